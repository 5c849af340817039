"""benchmarks/: the harness runs, its edits fit the scripts, the page is that of its figures."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from helpers.jobs import ROOT, Job, epochs

sys.path.append(str(ROOT / "benchmarks"))
import report
import run as harness

STALE = "run `python benchmarks/report.py`"


@pytest.mark.slow("all contestants, over a minute")
def test_a_quick_run_measures_all_and_writes_the_page(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "--quick", "--out", "."]
    # A Job: what it has started ends with it, also when it is out of time.
    Job(command, tmp_path, {"OMP_NUM_THREADS": ""}).finish(seconds=600)
    result = json.loads((tmp_path / "results.json").read_text())
    records = {record["contestant"]: record for record in result["records"]}
    assert {"ddp_spawn.py", "SGD fused", "tutorial, 1 thread"} < records.keys()
    for name, record in records.items():
        assert "error" not in record, record
        assert record["rate"] > 0 and record["epochs"] > 0, name
        assert 0 < record["first_step"] < 120 and record["memory"] > 100, name
    ours = records["ddp_spawn.py"]
    assert ours["accuracy"] > 15
    assert abs(ours["accuracy"] - records["SGD fused"]["accuracy"]) < 0.5
    assert all(split[part] > 0 for split in result["splits"] for part in ("data", "backward"))
    (copies,) = result["copies"]  # of 77 MB; evaluation takes 20 and gives them back
    assert copies["what"] == "ddp_spawn.py" and 0.5 < copies["copies"] < 2  # one each: 3
    page = (tmp_path / "RESULTS.md").read_text()
    for bound in ("compute + all-reduce", "compute + all-reduce, mp.spawn"):
        assert f"| mlp-32-2 | ddp_spawn.py | {bound} | 0.95 |" in page
    assert (tmp_path / "throughput.svg").read_text().rstrip().endswith("</svg>")


def test_a_case_that_stops_at_the_first_step(tmp_path):
    names = ("single_gpu.py", "tutorial")
    case = harness.Case("mlp", "fashion-mnist", 32, 1, names, 64, rounds=1, name="start")
    data = harness.make_data(tmp_path, case.dataset, case.samples)
    records = harness.run_case(case, data, None, 1e6)  # seconds that nobody waits for
    times = {record["contestant"]: record["first_step"] for record in records}
    assert times.keys() == set(names) and all(0 < value < 120 for value in times.values())
    page = "\n".join(report.table({"records": records, "cases": {}}, "mlp-32-1-start"))
    ratio = times["single_gpu.py"] / times["tutorial"]
    assert f"| single_gpu.py | {times['single_gpu.py']:.1f} s |" in page.splitlines()[2]
    assert page.splitlines()[2].endswith(f"| {ratio:.2f} |")


def test_the_cases_of_the_cpu_find_no_gpu(monkeypatch):
    for name in harness.CPU_ONLY:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LADDER_MACHINE", "2")  # it looks as if this one had two
    case = next(case for case in harness.all_cases("cuda") if case.device == "cuda")
    for device, expected in (("cuda", "True"), ("cpu", "False")):
        env = harness.environment(
            harness.CONTESTANTS["tutorial"], dataclasses.replace(case, device=device)
        )
        argv = [sys.executable, "-c", "import torch; print(torch.accelerator.is_available())"]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected, device


def test_a_contestant_that_fails_fails_the_run(tmp_path, monkeypatch):
    case = harness.Case("mlp", "fashion-mnist", 32, 2, ("ddp_spawn.py",), 64, rounds=1)
    data = harness.make_data(tmp_path, case.dataset, case.samples)
    (data / "FashionMNIST" / "raw" / "train-labels-idx1-ubyte").write_bytes(b"")
    (record,) = harness.run_case(case, data, None, 0.1)
    assert "error: FashionMNIST in" in record["output"]
    result = {"records": [record], "cases": {case.key: {}}}
    assert "| ddp_spawn.py | failed |" in "\n".join(report.table(result, case.key))


@pytest.mark.parametrize("broken", ["split_step", "copies_held"])
def test_a_measurement_that_fails_fails_the_run(monkeypatch, broken):
    what = {"what": "it", "samples": (1, 2), "copies": 1.0}
    for name in ("split_step", "copies_held"):
        found = what | ({"error": "no room"} if name == broken else {})
        monkeypatch.setattr(harness, name, lambda *_, found=found: found)
    monkeypatch.setattr(harness, "run_case", lambda *_: [])
    monkeypatch.setattr(harness.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["run.py", "--quick"])
    with pytest.raises(SystemExit, match="failed: it: no room"):
        harness.main()


@pytest.mark.parametrize(("copies", "verdict"), [(0.0, "no"), (1.1, "yes"), (1.96, "no")])
def test_the_data_set_held_once_is_one_copy(copies, verdict):
    held = {"what": "ddp_spawn.py", "samples": (1_000, 2_000), "copies": copies}
    result = {"records": [], "cases": {}, "copies": [held]}
    assert report.targets(result).endswith(f"| {copies:.2f} copies | {verdict} | |")
    assert report.memory(result)[-1] == f"| ddp_spawn.py | 1,000 and 2,000 | {copies:.2f} |"
    held["error"] = "no room"
    assert "copies |" not in report.targets(result)
    assert report.memory(result)[-1] == "| ddp_spawn.py | failed (no room) | |"


@pytest.mark.parametrize(
    "name", [name for name, contestant in harness.CONTESTANTS.items() if contestant.edit]
)
def test_a_changed_choice_is_one_place_in_its_script(name, tmp_path):
    contestant = harness.CONTESTANTS[name]
    copy = harness.program_of(contestant, tmp_path)
    code = copy.read_text()
    compile(code, copy.name, "exec")
    assert copy.parent == tmp_path and code != (ROOT / contestant.program).read_text()
    assert name in harness.CHOICES


def test_ours_run_beside_another_version(tmp_path, monkeypatch):
    """That one runs with its own common/, and the ratio is a target."""
    monkeypatch.setattr(harness, "CONTESTANTS", {**harness.CONTESTANTS})
    monkeypatch.setattr(report, "TARGETS", [*report.TARGETS])
    folder = tmp_path / "before"
    shutil.copytree(ROOT / "common", folder / "common")
    (folder / "common" / "seed.py").write_text("raise SystemExit('the other version')")
    for script in ("ddp_spawn.py", "ddp_torchrun.py"):
        shutil.copy(ROOT / script, folder)
    cases = harness.beside(folder)
    assert [case.key for case in cases] == ["mlp-32-2-before", "mlp-256-2-before"]
    case = dataclasses.replace(cases[0], samples=64, rounds=1)
    data = harness.make_data(tmp_path, case.dataset, case.samples)
    records = {record["contestant"]: record for record in harness.run_case(case, data, None, 0.1)}
    for script in ("ddp_spawn.py", "ddp_torchrun.py"):
        assert "error" not in records[script], records
        assert "the other version\n" in records[f"{script} before"]["output"]
    rates = dict(zip(case.contestants, (3, 4, 2, 5), strict=True))
    rates = [record(name, 0, rate, case.key) for name, rate in rates.items()]
    lines = report.targets({"records": rates, "cases": {}})
    assert f"| {case.key} | ddp_spawn.py | ddp_spawn.py before | 0.97 | 1.50 " in lines
    assert f"| {case.key} | ddp_torchrun.py | ddp_torchrun.py before | 0.97 | 0.80 " in lines


def test_cases_have_names_of_their_own_and_the_targets_are_among_them():
    cases = {case.key: case for case in harness.all_cases("cuda")}
    assert len(cases) == len(harness.all_cases("cuda")) > len(harness.all_cases(None)) > 20
    assert all(name in harness.CONTESTANTS for case in cases.values() for name in case.contestants)
    for key, ours, theirs, *_ in (*report.TARGETS, *report.TIMES):
        assert {ours, theirs} <= set(cases[key].contestants), key
        assert set(cases[key].close) <= set(cases[key].contestants)


def record(contestant: str, number: int, rate: float, case: str = "mlp-32-2") -> dict:
    return {"case": case, "contestant": contestant, "round": number, "rate": rate}


def test_a_summary_has_a_rate_and_an_accuracy_a_run():
    """The first epoch is warm-up; accuracies are compared after as many epochs as all have done."""
    figures = {"first_step": 1.234567, "memory": 7.777}
    raw = {"case": "a", "round": 0, **figures}
    slow = {**raw, "contestant": "slow", "rates": [1.0, 5.0, 7.0], "accuracies": [10, 20, 30]}
    fast = {**raw, "contestant": "fast", "rates": [1.0, 2.0, 4.0, 9.0], "accuracies": [1, 2, 3, 4]}
    alone = {**raw, "contestant": "tutorial", "rates": [1.0, 1.0], "accuracies": [5, 6]}
    one = {**alone, "contestant": "tutorial, 1 thread"}
    failed = {"case": "a", "contestant": "slow", "round": 1, "error": "killed", "output": "..."}
    result = report.summary({"records": [slow, fast, failed], "cases": {}})
    rounded = {"case": "a", "round": 0, "first_step": 1.2346, "memory": 7.78}
    assert result["records"] == [
        {**rounded, "contestant": "slow", "rate": 6.0, "epochs": 3, "accuracy": 30},
        {**rounded, "contestant": "fast", "rate": 4.0, "epochs": 3, "accuracy": 3},
        {"case": "a", "contestant": "slow", "round": 1, "error": "killed"},
    ]
    assert report.accuracies(result, "a") == (3, {"slow": 30, "fast": 3})
    assert json.loads(report.dumps(result)) == result
    assert report.dumps(result).count("\n  {") == 3
    many = report.summary({"records": [slow, alone, one], "cases": {}})
    assert report.accuracies(many, "a")[0] == 2  # of the one with one thread
    one |= {"rates": [1.0, 1.0, 1.0], "accuracies": [5, 6, 7]}
    many = report.summary({"records": [slow, alone, one], "cases": {}})
    assert report.accuracies(many, "a") == (3, {"slow": 30, "tutorial, 1 thread": 7})


def test_ratios_are_taken_within_a_round_and_their_median_counts():
    ours, bound = "ddp_spawn.py", "compute + all-reduce"
    records = [record(ours, 0, 96), record(bound, 0, 100)]
    records += [record(ours, 1, 48), record(bound, 1, 50)]  # a slow minute
    records += [record(ours, 2, 10), record(bound, 2, 100)]
    records += [{**record(bound, 3, 1), "error": "killed"}, record(ours, 3, 96)]
    result = {"records": records, "cases": {}}
    assert report.ratio(result, "mlp-32-2", ours, bound) == 0.96
    # 1.25 * 0.4965 / sqrt(3), and from three rounds on
    line = f"| mlp-32-2 | {ours} | {bound} | 0.95 | 0.96 ± 0.36 (0.10 to 0.96) | undecided |"
    assert line in report.targets(result)
    assert report.spread([1.0, 3.0]) == "2.00 (1.00 to 3.00)"


def test_a_target_within_two_errors_is_undecided():
    sure, unsure = [1.0, 1.0, 1.0, 1.0], [0.9, 1.0, 1.0, 1.1]  # an error of 0.05
    assert [report.verdict(sure, target) for target in (0.99, 1.0, 1.01)] == ["yes", "yes", "no"]
    found = [report.verdict(unsure, target) for target in (0.89, 0.91, 1.09, 1.11)]
    assert found == ["yes", "undecided", "undecided", "no"]
    found = [report.verdict(unsure, target, at_most=True) for target in (0.89, 1.0, 1.11)]
    assert found == ["no", "undecided", "yes"]


def test_who_takes_other_steps_is_not_compared():
    def learnt(case: str, name: str, accuracy: float) -> dict:
        return {**record(name, 0, 1, case), "epochs": 2, "accuracy": accuracy}

    records = [learnt(case, "ours", 90) for case in ("mlp-32-1", "mlp-32-2")]
    records += [learnt(case, "theirs", 91) for case in ("mlp-32-1", "mlp-32-2")]
    records += [learnt(case, "compute alone", 80) for case in ("mlp-32-1", "mlp-32-2")]
    records += [learnt("mlp-32-2", "ours --accumulate 8", 20)]
    odd = report.odd_ones({"records": records, "cases": {"mlp-32-1": {}, "mlp-32-2": {}}})
    assert odd == ["mlp-32-1, compute alone: 80.0% after 2 epochs, the median 90.0%"]


def test_a_peer_learns_the_same_from_our_data(tmp_path):
    data = harness.make_data(tmp_path, "fashion-mnist", 640)
    program = str(ROOT / "benchmarks" / "tutorial.py")
    lines = []
    for option in ((), ("--our-data",)):
        job = Job(
            [sys.executable, program, "2", "--data-dir", str(data), *option],
            tmp_path,
            {},
            fork=True,
        )
        lines.append(re.findall(r"Accuracy: (\d+)/2000", job.finish()))
    assert lines[0] == lines[1] and len(lines[0]) == 2 and int(lines[0][1]) > 400


def test_what_the_upper_bound_reaches():
    records = [record("compute + all-reduce", 0, 60), record("tutorial", 0, 20)]
    case, one = "mlp-32-2-accumulate", "the same, 1 process, 1 thread"
    records += [record(one, 0, 50, case)]
    result = {"records": records, "cases": {}}
    assert report.limit(result, "mlp-32-2", "tutorial") == 3
    assert report.limit(result, "mlp-32-2", "compute + all-reduce") is None
    assert report.limit(result, case, one) is None  # not measured
    records += [record("compute + all-reduce --accumulate 8", 0, 80, case)]
    assert report.limit(result, case, one) == 1.6


@pytest.mark.slow("nine epochs of a program that is for the benchmarks only")
def test_the_upper_bound_does_the_scripts_steps_and_accumulates(fork, tmp_path):
    data = harness.make_data(tmp_path, "fashion-mnist", 2048)
    accuracies, after_one = {}, {}
    for batch, accumulate in ((32, 1), (32, 8), (256, 1)):
        argv = [sys.executable, str(ROOT / "benchmarks" / "upper_bound.py"), "3", "--accumulate"]
        argv += [str(accumulate), "--batch-size", str(batch), "--data-dir", str(data)]
        path = os.pathsep.join((str(ROOT), os.environ["PYTHONPATH"]))
        env = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)
        found = [float(accuracy) for accuracy, _ in harness.EPOCH.findall(done.stdout)]
        assert len(found) == 3, done.stdout + done.stderr
        accuracies[batch, accumulate] = found[-1]
        after_one[batch, accumulate] = found[0]
    # One epoch, as later ones have other permutations.
    options = ("--dataset", "fashion-mnist", "--data-dir", data)
    (ours,) = epochs(fork("single_gpu.py", 1, *options))
    assert abs(ours["accuracy"] - after_one[32, 1]) < 0.5
    (ours,) = epochs(fork("ddp_spawn.py", 1, *options, "--nproc-per-node", 2))
    bound = str(ROOT / "benchmarks" / "upper_bound.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    spawn = ["--nproc-per-node", "2"]
    for launch, processes in (([sys.executable], spawn), (torchrun, [])):
        argv = [*launch, bound, "1", "--all-reduce", "--data-dir", str(data), *processes]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)
        ((accuracy, _),) = harness.EPOCH.findall(done.stdout)
        assert abs(ours["accuracy"] - float(accuracy)) < 0.5
    assert abs(accuracies[32, 8] - accuracies[256, 1]) < 0.5
    assert accuracies[32, 1] > accuracies[32, 8] + 5  # more steps


def test_the_committed_page_is_that_of_the_committed_figures():
    folder = ROOT / "benchmarks"
    result = json.loads((folder / "results.json").read_text())
    assert (folder / "RESULTS.md").read_text() == report.page(result), STALE
    assert not [record for record in result["records"] if "error" in record]
    assert set(result["cases"]) >= {case.key for case in harness.all_cases(None)}


def test_the_page_says_what_a_second_core_brings():
    result = json.loads((ROOT / "benchmarks" / "results.json").read_text())
    case = "mlp-256-2-accumulate"
    rates = {"ddp_torchrun.py --accumulate 8": 300, "the same, 1 process, 1 thread": 100}
    for run in result["records"]:
        if run["case"] == case:
            run["rate"] = rates.get(run["contestant"], 1)
    assert "two processes do\n3.0 times what one does, on a core each.\n[" in report.page(result)
    result["records"] = [run for run in result["records"] if run["case"] != case]
    del result["cases"][case]  # as with --cases
    assert "what one does" not in report.page(result)
