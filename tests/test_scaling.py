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
    small = JOB._replace(gradient=1e6)
    worst, best = scaling.step_seconds(small, 2, slow)
    assert worst == best  # one bucket


def test_what_accumulation_and_bf16_bring():
    reduce = scaling.reduce_seconds(2, 100e6, TEN, buckets=4)
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


def test_more_nodes_do_what_was_predicted_where_the_link_decides():
    """Where the cores that all nodes share have time to spare. The page's words, in numbers."""
    cases = scaling.by_case(json.loads(scaling.DATA.read_text()))
    assert len(cases) == 2 * len(scaling.CASES)
    for (model, link, accumulate), runs in cases.items():
        assert list(runs) == list(scaling.NODES)
        assert runs[1]["rate"] > runs[8]["rate"]
        assert runs[2]["check"][-1].endswith("; 1 process alone is faster")
        samples = scaling.PER_PASS[model] * accumulate
        four, eight = (
            [
                rate / runs[nodes]["rate"]
                for rate in scaling.foreseen(runs[2]["check"], nodes, samples)
            ]
            for nodes in (4, 8)
        )
        if link == "100mbit":
            assert runs[8]["busy"] < 0.75
            if accumulate == 1:
                assert four + eight == [pytest.approx(1, abs=0.05)] * 4
            else:  # too high: nodes that share a core compute in turn
                high, counted = {"mlp": (1.10, 1), "resnet18": (1.21, 1.07)}[model]
                assert four == [pytest.approx(1, abs=0.1), pytest.approx(1, abs=0.03)]
                assert eight[0] == pytest.approx(high, abs=0.01)
                assert eight[1] == pytest.approx(counted, abs=0.01)
            assert runs[4]["rate"] > 1.25 * runs[2]["rate"]
        else:
            assert runs[8]["busy"] > 0.9 and four[0] > 1.3 and eight[0] > 2
            assert 0.6 < scaling.printed(runs[2]["check"], r"ms \|") / 0.125 < 0.8


def test_what_check_foretells_by_hand():
    check = [
        "All-reduce | 2.68 MB | 20.00 ms | 0.1340 GB/s",
        "Step | 40.00 ms: data 1.00, compute 9.00, waiting for rank 1 2.00, all-reduce 28.00",
        "Predicted | 4 nodes | 640 samples/s | efficiency 25%",
        "Predicted | 8 nodes | 1000 samples/s | efficiency 20%",
    ]
    # Eight nodes take 128 samples in 128 ms, and with three more turns of 9 ms in 155 ms.
    assert scaling.foreseen(check, 8, 16) == [1000, pytest.approx(128 / 0.155)]
    # Four nodes 64 samples in 100 ms, and one more turn.
    assert scaling.foreseen(check, 4, 16) == [640, pytest.approx(64 / 0.109)]
    # Two nodes, eight passes of 12 ms and one all-reduce.
    assert scaling.accumulated(check, 16) == pytest.approx(256 / (0.096 + 0.028))
