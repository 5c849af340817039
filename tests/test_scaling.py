"""docs/scaling.md: its tables are what its program makes of the model, and the model is right."""

import json

import pytest
import scaling

TEN = scaling.Link("10 Gbit/s", 1.25e9, 1)
JOB = scaling.Job("a job", 100e6, 0.3)


def test_the_page_is_what_the_command_would_write():
    page = scaling.PAGE.read_text()
    assert scaling.written(page, json.loads(scaling.DATA.read_text())) == page
    assert "<text" in scaling.PICTURE.read_text()  # letters, not outlines


def test_a_step_by_hand():
    # A thousand nodes: a tree of ten levels, up and down, in place of 2,046 messages.
    many = scaling.reduce_seconds(1024, 100e6, TEN)
    assert many == pytest.approx(2 * 1023 / 1024 * 100e6 / 1.25e9 + 20 * 14e-6)
    # Eight devices of one node send through its link once: seven of their eight hops stay inside.
    eight = scaling.reduce_seconds(8, 100e6, TEN._replace(devices=8))
    assert eight == pytest.approx(2 * 7 / 8 * 100e6 / 1.25e9 + 14 * 3.4e-6)
    # What of an all-reduce can be hidden.
    reduce = scaling.reduce_seconds(2, 100e6, TEN, buckets=4)
    assert reduce == pytest.approx(2 * 50e6 / 1.25e9 + 4 * 2 * 14e-6)
    worst, best = scaling.step_seconds(JOB, 2, TEN)
    assert worst == pytest.approx(0.3 + reduce)
    assert best == pytest.approx(0.3 + reduce * 25 * 2**20 / 100e6)  # the last bucket
    worst, best = scaling.step_seconds(JOB, 2, TEN._replace(bandwidth=1e8))
    assert worst - best == pytest.approx(0.2)  # the backward pass is not longer
    assert scaling.step_seconds(JOB, 2, TEN, accumulate=4)[0] == pytest.approx(1.2 + reduce)
    assert scaling.step_seconds(JOB, 2, TEN, bf16=True)[0] == pytest.approx(0.3 + reduce / 2, 1e-3)
    assert scaling.efficiencies(JOB, 2, TEN, accumulate=4)[0] == pytest.approx(1.2 / (1.2 + reduce))


def test_what_the_page_says_of_published_and_measured_results():
    inside = []
    for job, link, devices, share in scaling.PUBLISHED:
        low, high = scaling.efficiencies(job, devices, link)
        inside.append(low <= share <= high)
    assert inside == [True, True, True, False, False]
    cases = scaling.by_case(json.loads(scaling.DATA.read_text()))
    one_pass, eight_passes, two_nodes = [], [], []
    for (model, link, accumulate), runs in cases.items():
        said = scaling.foretold(cases, model, link, accumulate)
        off = {nodes: rate / runs[nodes]["rate"] - 1 for nodes, rate in said.items()}
        two_nodes.append(abs(off.pop(2, 0)))
        if link == "100mbit":
            (one_pass if accumulate == 1 else eight_passes).extend(off.values())
        else:
            assert runs[8]["busy"] > 0.9 and min(off.values()) > 0.4
    page = " ".join(scaling.PAGE.read_text().split())
    assert f"predictions for four and eight nodes are within {max(map(abs, one_pass)):.0%}." in page
    assert f"With eight passes they are up to {max(eight_passes):.0%} too high" in page
    assert f"brings on two nodes was within {max(two_nodes):.0%}" in page
