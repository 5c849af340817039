"""docs/scaling.md: its tables are what its program makes of the model, and the model is right."""

import importlib.util
import json

import pytest
from helpers.jobs import ROOT

spec = importlib.util.spec_from_file_location("scaling", ROOT / "docs" / "scaling.py")
scaling = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scaling)

TEN = scaling.Link("10 Gbit/s", 1.25e9, 1)
JOB = scaling.Job("a job", 100e6, 0.3)


def test_the_page_is_what_the_command_would_write():
    page = scaling.PAGE.read_text()
    assert scaling.written(page, json.loads(scaling.DATA.read_text())) == page
    assert "<text" in scaling.PICTURE.read_text()  # letters, not outlines


def test_an_all_reduce_by_hand():
    two = scaling.reduce_seconds(2, 100e6, TEN)
    assert two == pytest.approx(2 * 50e6 / 1.25e9 + 2 * 14e-6)
    # A thousand nodes: a tree of ten levels, up and down, in place of 2,046 messages.
    many = scaling.reduce_seconds(1024, 100e6, TEN)
    assert many == pytest.approx(2 * 1023 / 1024 * 100e6 / 1.25e9 + 20 * 14e-6)
    # Eight devices of one node send through its link once: seven of their eight hops stay inside.
    eight = scaling.reduce_seconds(8, 100e6, TEN._replace(devices=8))
    assert eight == pytest.approx(2 * 7 / 8 * 100e6 / 1.25e9 + 14 * 3.4e-6)


def test_what_can_be_hidden():
    reduce = scaling.reduce_seconds(2, 100e6, TEN, buckets=4)  # 80 ms, in 100 MB
    assert reduce == pytest.approx(0.08 + 8 * 14e-6)
    worst, best = scaling.step_seconds(JOB, 2, TEN)
    assert worst == pytest.approx(0.3 + reduce)
    assert best == pytest.approx(0.3 + reduce * 25 * 2**20 / 100e6)  # the last bucket
    tied = JOB._replace(last=60e6)
    assert scaling.step_seconds(tied, 2, TEN)[1] == pytest.approx(0.3 + reduce * 0.6)
    slow = TEN._replace(bandwidth=1e8)
    worst, best = scaling.step_seconds(JOB, 2, slow)
    assert worst - best == pytest.approx(0.2)  # the backward pass is not longer
    worst, best = scaling.step_seconds(JOB._replace(gradient=1e6), 2, slow)
    assert worst == best  # one bucket
    assert scaling.step_seconds(JOB, 2, TEN, accumulate=4)[0] == pytest.approx(1.2 + reduce)
    half = scaling.step_seconds(JOB, 2, TEN, bf16=True)[0]
    assert half == pytest.approx(0.3 + reduce / 2, abs=1e-4)
    assert scaling.efficiencies(JOB, 2, TEN, accumulate=4)[0] == pytest.approx(1.2 / (1.2 + reduce))


def test_what_the_page_says_of_published_results():
    bands = [
        scaling.efficiencies(job, devices, link) for job, link, devices, _ in scaling.PUBLISHED
    ]
    shares = [published[-1] for published in scaling.PUBLISHED]
    inside = [low <= share <= high for share, (low, high) in zip(shares, bands, strict=True)]
    assert inside == [True, True, True, False, False]
    assert all(low > 0.985 for low, _ in bands[3:])


def test_what_the_page_says_of_its_measurements():
    cases = scaling.by_case(json.loads(scaling.DATA.read_text()))
    one_pass, eight_passes, two_nodes = [], [], []
    for (model, link, accumulate), runs in cases.items():
        said = scaling.foretold(cases, model, link, accumulate)
        off = {nodes: rate / runs[nodes]["rate"] - 1 for nodes, rate in said.items()}
        if accumulate > 1:
            two_nodes.append(abs(off.pop(2)))
        if link == "1gbit":
            assert runs[8]["busy"] > 0.9 and min(off.values()) > 0.5
        elif accumulate == 1:
            one_pass += map(abs, off.values())
        else:
            eight_passes += off.values()
    assert (len(one_pass), len(eight_passes), len(two_nodes)) == (4, 4, 4)
    page = " ".join(scaling.PAGE.read_text().split())
    assert f"the predictions for four and eight nodes are within {max(one_pass):.0%}." in page
    assert f"With eight passes they are up to {max(eight_passes):.0%} too high" in page
    assert f"brings on two nodes was within {max(two_nodes):.0%}" in page


def test_what_check_foretells_by_hand():
    check = [
        "All-reduce | 2.68 MB | 20.00 ms | 0.1340 GB/s",
        "Step | 40.00 ms: data 1.00, compute 9.00, waiting for rank 1 2.00, all-reduce 28.00",
    ]
    # Two nodes, eight passes of 12 ms and one all-reduce.
    assert scaling.accumulated(check, 16) == pytest.approx(256 / (0.096 + 0.028))
