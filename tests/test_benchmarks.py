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


@pytest.mark.slow("four contestants")
def test_a_run_measures_all_and_writes_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "CONTESTANTS", {**harness.CONTESTANTS})
    cases = {case.key: case for case in harness.all_cases(ROOT)}
    small = {"rounds": 1, "samples": 1024}
    wanted = ("ddp_spawn.py", "tutorial, 1 thread, our data")
    both = [harness.replace(cases["mlp-32-2"], contestants=wanted, **small)]
    both.append(harness.replace(cases["mlp-32-2-before-ddp_torchrun"], **small))
    monkeypatch.setattr(harness, "all_cases", lambda _: both)
    monkeypatch.setattr(harness.signal, "signal", lambda *_: None)
    words = ["run.py", "--seconds", "0", "--before", ROOT, "--out", tmp_path]
    monkeypatch.setattr(sys, "argv", [*map(str, words)])
    harness.main()
    result = json.loads((tmp_path / "results.json").read_text())
    learnt = {record["contestant"]: record["accuracy"] for record in result["records"]}
    assert learnt.keys() == {*wanted, "ddp_torchrun.py", "ddp_torchrun.py before"}
    assert min(learnt.values()) > 15
    page = (tmp_path / "RESULTS.md").read_text()
    assert page == report.page(result) and "\n- ddp_torchrun.py: " in page


def test_a_contestant_runs_until_its_time_is_up():
    """The first epoch is warm-up; one that ends by itself has failed."""
    start = time.monotonic()
    record = harness.measure([sys.executable, "-S", "-c", THREE_EPOCHS], {}, 0.5)
    assert record == {"rate": 25, "accuracy": 1} and time.monotonic() - start > 0.5
    assert harness.measure([sys.executable, "-S", "-c", "print(1)"], {}, 0) == {"error": "1\n"}
    hangs = "import time; print('hi', flush=True); time.sleep(99)"
    late = harness.measure([sys.executable, "-S", "-c", hangs], {}, 0, limit=4)
    assert late == {"error": "not done after 4 s:\nhi\n"}


def test_rounds_alternate(monkeypatch):
    calls = []
    run_one = lambda _, name, n, *__, **___: calls.append(name) or {"round": n, "contestant": name}  # noqa: E731
    monkeypatch.setattr(harness, "run_one", run_one)
    harness.run_case(harness.Case(32, 1, ("a", "b"), rounds=3), Path(), 0)
    assert "".join(calls) == "abbaab"


def test_ratios_are_taken_within_a_round_and_their_median_counts():
    rounds = [("ddp_torchrun.py", rate) for rate in (96, 48, 20, 96)]
    rounds += [(report.TOGETHER, rate) for rate in (100, 50, 200)]
    rows = [
        {"case": "mlp-32-2", "contestant": name, "round": number % 4, "rate": rate}
        for number, (name, rate) in enumerate(rounds)
    ]
    assert "| ddp_torchrun.py | 72 (0.96) |" in report.table({"records": rows})
    rows = [{**row, "case": "mlp-32-2-before-x"} for row in rows]
    line = "- ddp_torchrun.py: 0.960 ± 0.358 (0.10 to 0.96) with batches of 32"
    assert report.changed({"records": rows}) == [line]


def test_the_committed_page_is_that_of_the_committed_figures():
    result = json.loads(report.PAGE.with_name("results.json").read_text())
    assert report.PAGE.read_text() == report.page(result), "run `python benchmarks/report.py`"
    assert {case.key for case in harness.all_cases()} <= {r["case"] for r in result["records"]}


# torch may abort a rank whose process group is still there at the end of Python. This always does.
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
