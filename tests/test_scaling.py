"""docs/scaling.md: its tables are what its program makes of the model, and the model is right."""

import importlib.util
import json
import re

import pytest
from helpers.jobs import ROOT

spec = importlib.util.spec_from_file_location("scaling", ROOT / "docs" / "scaling.py")
scaling = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scaling)

TEN = scaling.Link("10 Gbit/s", 1.25e9, 1)
JOB = scaling.Job("a job", 100e6, 0.3, "")


def test_the_page_is_what_the_command_would_write():
    page = scaling.PAGE.read_text()
    assert scaling.written(page, json.loads(scaling.DATA.read_text())) == page
    assert "<text" in scaling.PICTURE.read_text()  # letters, not outlines
    for name in re.findall(r"\]\(([\w/.-]+)[)#]", page):
        assert (ROOT / "docs" / name).exists(), name


def test_an_all_reduce_by_hand():
    two = scaling.reduce_seconds(2, 100e6, TEN)
    assert two == pytest.approx(2 * 50e6 / 1.25e9 + 2 * 14e-6)
    # A thousand nodes: a tree of ten levels, up and down, in place of 2,046 messages.
    many = scaling.reduce_seconds(1024, 100e6, TEN)
    assert many == pytest.approx(2 * 1023 / 1024 * 100e6 / 1.25e9 + 20 * 14e-6)
    # Eight devices of one node send through its link once: seven of their eight hops stay inside.
    eight = TEN._replace(devices=8)
    assert scaling.reduce_seconds(8, 100e6, eight) == pytest.approx(
        2 * 7 / 8 * 100e6 / 1.25e9 + 14 * 3.4e-6
    )


def test_what_can_be_hidden():
    reduce = scaling.reduce_seconds(2, 100e6, TEN)  # 80 ms, in 100 MB
    worst, best = scaling.step_seconds(JOB, 2, TEN)
    assert worst == pytest.approx(0.3 + reduce)
    assert best == pytest.approx(0.3 + reduce * 25 * 2**20 / 100e6)  # the last bucket
    slow = TEN._replace(bandwidth=1e8)
    worst, best = scaling.step_seconds(JOB, 2, slow)
    assert worst - best == pytest.approx(0.2)  # the backward pass is not longer
    small = JOB._replace(gradient=1e6)
    worst, best = scaling.step_seconds(small, 2, slow)
    assert worst == best  # one bucket


def test_what_accumulation_and_bf16_bring():
    reduce = scaling.reduce_seconds(2, 100e6, TEN)
    assert scaling.step_seconds(JOB, 2, TEN, accumulate=4)[0] == pytest.approx(1.2 + reduce)
    half = scaling.step_seconds(JOB, 2, TEN, bf16=True)[0]
    assert half == pytest.approx(0.3 + reduce / 2, abs=1e-4)
    assert scaling.efficiencies(JOB, 2, TEN, accumulate=4)[0] == pytest.approx(1.2 / (1.2 + reduce))


def test_results_on_a_network_lie_within_the_bands():
    """As the page says; and that those on NVLink do not."""
    inside = []
    for job, link, devices, share in scaling.PUBLISHED:
        low, high = scaling.efficiencies(job, devices, link)
        inside.append(low <= share <= high)
    assert inside == [True, True, True, False, False]


def test_eight_nodes_do_what_was_predicted_where_the_link_decides():
    """Where the cores that all nodes share have time to spare. The page's words, in numbers."""
    runs = json.loads(scaling.DATA.read_text())["runs"]
    by_key = {(run["model"], run["link"], run["accumulate"], run["nodes"]): run for run in runs}
    eight = [run for run in runs if run["nodes"] == 8]
    assert len(eight) == 2 * len(scaling.CASES)
    for run in eight:
        check = by_key[run["model"], run["link"], run["accumulate"], 2]["check"]
        predicted, counted = (rate / run["rate"] for rate in scaling.foreseen(check))
        if run["link"] == "100mbit":
            assert run["busy"] < 0.75 and abs(predicted - 1) < 0.2 and abs(counted - 1) < 0.05, run
        else:
            assert run["busy"] > 0.9 and 2 < predicted < 4, run
