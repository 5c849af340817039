"""What benchmarks/ measures with, and that the committed page is that of the committed figures."""

import json
import re

import in_turn
import pytest
import report
import run as harness
from helpers.jobs import ROOT


@pytest.mark.slow("two contestants")
def test_a_run_measures_and_writes_the_page(start, tmp_path):
    case = ("--cases", "mlp-32-2-before-ddp_torchrun", "--rounds", 2)
    start("benchmarks/run.py", *case, "--before", ROOT, "--out", tmp_path).finish(seconds=280)
    result = json.loads((tmp_path / "results.json").read_text())
    rates = {(r["round"], r["contestant"]): r["rate"] for r in result["records"]}
    assert len(rates) == 4 and min(rates.values()) > 100
    assert all(record["accuracy"] > 15 for record in result["records"])
    assert (tmp_path / "RESULTS.md").read_text() == report.page(result)
    assert report.changed(result)[0].startswith("- ddp_torchrun.py: ")


def test_the_committed_page_is_that_of_the_committed_figures():
    result = json.loads(report.PAGE.with_name("results.json").read_text())
    assert report.PAGE.read_text() == report.page(result), "run `python benchmarks/report.py`"
    assert {case.key for case in harness.all_cases()} <= {r["case"] for r in result["records"]}


@pytest.mark.slow("small jobs")
@pytest.mark.parametrize(
    ("part", "rows"),
    [
        (2, r"2 \| [1-9][\d,]* \|.*\| [1-9][\d,]* \|"),
        (4, rf"{in_turn.OURS}(?: --compile|, before)? \| [\d.]+ .*"),
    ],
)
def test_gpu_rehearses_its_parts_on_a_cpu(start, part, rows):
    words = ("--rehearse", "--before", ROOT, "--part", part)
    text = start("benchmarks/gpu.py", *words).finish(seconds=280)
    assert len(re.findall(rf"^\| {rows}$", text, re.M)) == {2: 2, 4: 3}[part], text
