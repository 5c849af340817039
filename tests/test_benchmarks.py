"""benchmarks/: it measures, ratios are those of a round, and the page is that of its figures."""

import json
import sys
import time
from pathlib import Path

import pytest
import report
import run as harness
import torch
from helpers.jobs import ROOT, SCRIPTS

THREE_EPOCHS = """\
import time
for n, rate in enumerate((1, 20, 30)):
    print(f"Epoch {n} | Accuracy: {n}/100 ({n}.00%) | {rate} samples/s", flush=True)
time.sleep(100)
"""


@pytest.mark.slow("two contestants")
def test_a_run_measures_all_and_writes_the_page(tmp_path, monkeypatch):
    names = ("ddp_spawn.py", "tutorial, 1 thread, our data")
    case = harness.Case(32, 2, names, rounds=1, samples=1024)
    monkeypatch.setattr(harness, "all_cases", lambda *_: [case])
    monkeypatch.setattr(report, "FIRST_STEPS", report.FIRST_STEPS[1:2])
    monkeypatch.setattr(harness.signal, "signal", lambda *_: None)
    monkeypatch.setattr(
        sys, "argv", ["run.py", "--seconds", "0", "--starts", "1", "--out", str(tmp_path)]
    )
    harness.main()
    result = json.loads((tmp_path / "results.json").read_text())
    learnt = {record["contestant"]: record["accuracy"] for record in result["records"]}
    assert learnt.keys() == set(names)
    assert all(record["rate"] > 0 for record in result["records"])
    assert min(learnt.values()) > 15
    page = (tmp_path / "RESULTS.md").read_text()
    assert page == report.page(result) and result["machine"]["Date"] in page
    assert "</svg>" in (tmp_path / "throughput.svg").read_text()
    assert len(result["first steps"]) == 2
    for start in result["first steps"]:
        assert min(start["seconds"].values()) > 0 and "joining" in start["seconds"]


def test_a_contestant_runs_until_its_time_is_up():
    """The first epoch is warm-up; one that ends by itself has failed."""
    start = time.monotonic()
    record = harness.measure([sys.executable, "-S", "-c", THREE_EPOCHS], {}, 0.5)
    assert record == {"rate": 25, "accuracy": 1}
    assert time.monotonic() - start > 0.5
    assert harness.measure([sys.executable, "-S", "-c", "print(1)"], {}, 0) == {"error": "1\n"}
    assert time.monotonic() - start < 100  # it is not waited for until its time is up
    hangs = "import time; print('hi', flush=True); time.sleep(99)"
    late = harness.measure([sys.executable, "-S", "-c", hangs], {}, 0, limit=4)
    assert late == {"error": "not done after 4 s:\nhi\n"}


def test_the_targets_and_the_columns_are_among_the_cases(tmp_path, monkeypatch):
    """An older version of ours runs from its own folder, where Python finds its common/ first."""
    monkeypatch.setattr(harness, "CONTESTANTS", {**harness.CONTESTANTS})
    cases = {case.key: case for case in harness.all_cases(tmp_path)}
    assert all(name in harness.CONTESTANTS for case in cases.values() for name in case.contestants)
    assert all({ours, theirs} <= {*cases[key].close} for key, ours, theirs, _ in report.TARGETS)
    assert {key.removesuffix("-accumulate") for key in cases} == set(report.COLUMNS)
    older = harness.CONTESTANTS["ddp_spawn.py before"]
    words = harness.command(older, cases["mlp-32-2"], Path("data"))
    assert words[1:4] == [str(tmp_path / "ddp_spawn.py"), "1000", "1000"]
    for device in ("cpu", "cuda"):
        env = harness.environment(
            harness.CONTESTANTS["tutorial"], harness.Case(32, 1, (), device=device)
        )
        assert ("LADDER_CPU" in env) is (device == "cpu")


def record(contestant: str, number: int, **found: object) -> dict:
    return {"case": "mlp-32-2", "contestant": contestant, "round": number, **found}


def test_ratios_are_taken_within_a_round_and_their_median_counts():
    ours, bound = "ddp_torchrun.py", report.TOGETHER
    records = [record(bound, 3, error="killed"), record(report.ALONE, 0, rate=200)]
    records += [record(ours, number, rate=rate) for number, rate in enumerate((96, 48, 10, 96))]
    records += [record(bound, number, rate=rate) for number, rate in enumerate((100, 50, 100))]
    # The error of the median: 1.25 * 0.4965 / sqrt(3).
    assert report.targets({"records": records}) == [
        "- `mlp-32-2`: ddp_torchrun.py is to do 0.95 of compute + all-reduce. "
        "It does 0.96 ± 0.36 (0.10 to 0.96 in 3 rounds), which is **undecided**."
    ]
    assert "| ddp_torchrun.py | 72 (0.96) |" in report.table({"records": records})
    values = {"ours": 90, "theirs": 91, "odd": 80, "compute alone": 80}
    records = [record(name, 0, accuracy=value) for name, value in values.items()]
    odd = ["- mlp-32-2: odd learns 80.0%, and the median is 90.0%"]
    assert report.odd_ones({"records": records}) == odd
    # A target within two errors is undecided: here they are 0 and 0.05.
    found = [report.verdict([1.0] * 4, target) for target in (1.0, 1.01)]
    found += [report.verdict([0.9, 1.0, 1.0, 1.1], target) for target in (0.89, 0.91, 1.09, 1.11)]
    assert found == ["reached", "missed", "reached", "undecided", "undecided", "missed"]


def test_first_steps_are_compared_within_a_round(monkeypatch):
    monkeypatch.setattr(report, "FIRST_STEPS", report.FIRST_STEPS[:1])
    ours = [{"import torch": 1, "joining": 0.5}, {"import torch": 9}]
    found = [*(("single_gpu.py", s) for s in ours), *2 * [("tutorial", {"import torch": 3})]]
    records = [{"processes": 1, "contestant": name, "seconds": s} for name, s in found]
    heads, _, ours, theirs = report.first_steps({"first steps": records})
    assert heads == "| seconds | processes | all | of the tutorial's | import torch | joining |"
    assert ours == "| single_gpu.py | 1 | 5.25 | 1.75 | 5.00 | 0.50 |"  # of 1.5 / 3 and 9 / 3
    assert theirs == "| tutorial | 1 | 3.00 |  | 3.00 |  |"


def test_the_committed_page_is_that_of_the_committed_figures():
    assert report.fill("<!-- a -->\n1\n<!-- end -->", {"a": "2"}) == "<!-- a -->\n2\n<!-- end -->"
    result = json.loads(report.PAGE.with_name("results.json").read_text())
    assert report.PAGE.read_text() == report.page(result), "run `python benchmarks/report.py`"
    measured = {record["case"] for record in result["records"]}
    assert {case.key for case in harness.all_cases()} <= measured
    assert not [record for record in result["records"] if "error" in record]


# torch may abort a rank whose process group is still there when Python ends. This always does.
ABORT = """
import atexit, os, pathlib, time
def abort():
    time.sleep(0.2)  # Linux may list a thread for a moment after it was joined
    if "gloo" in str([task.read_text() for task in pathlib.Path("/proc/self/task").glob("*/comm")]):
        os.abort()
atexit.register(abort)
"""


@pytest.mark.slow("ranks of whole jobs")
@pytest.mark.parametrize("program", [*SCRIPTS[2:], "docs/your_loop.py"])
def test_how_ranks_end_is_counted(run, tmp_path, program):
    path = tmp_path / Path(program).name
    path.write_text(ABORT + (ROOT / program).read_text())
    text = run("benchmarks/ends.py", path, 2)
    assert text == f"torch {torch.__version__}, {path.name}: {{0: 4}}\n"
