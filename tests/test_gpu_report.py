"""benchmarks/gpu.py and in_turn.py, as far as a CPU goes: all parts of the report are made, the
contestants train what they are said to, in turn, and a trace is read right."""

import functools
import re
import shutil
import sys

import gpu
import in_turn
import pytest
import torch
import torch.distributed as dist
from helpers.hosts import require
from helpers.jobs import ROOT
from torch.optim.optimizer import register_optimizer_step_pre_hook

from common.model import MODELS


def test_without_a_gpu_there_is_one_sentence(start):
    """With torch's reason, because torch only warns of a driver that is too old."""
    text = start("benchmarks/gpu.py").finish(1)
    said = "error: benchmarks/gpu.py needs a GPU, and torch finds none here: "
    with pytest.raises((RuntimeError, AssertionError)) as caught:
        torch.cuda.init()
    assert text == f"{said}{str(caught.value).splitlines()[0]}\n"


@pytest.fixture
def rehearse(monkeypatch, capsys):
    """rehearse(part, title=part, ...) -> what gpu.py prints if these are its parts."""

    def rehearse(**parts) -> str:
        titles = enumerate(parts.items(), start=1)
        monkeypatch.setattr(gpu, "PARTS", dict(titles))
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--rehearse", "--before", str(ROOT)])
        monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
        gpu.main()
        return capsys.readouterr().out

    return rehearse


def test_a_part_that_breaks_is_in_the_report_and_the_others_go_on(rehearse, capsys):
    def bad(*_):
        raise ValueError("a surprise")

    with pytest.raises(SystemExit, match=r"^failed: part 1$"):
        rehearse(bad=bad, good=lambda *_: (["fine"], True))
    text = capsys.readouterr().out
    assert re.search(r"(?s)### Part 1: bad\n.*ValueError: a surprise\n.*### Part 2.*fine\n", text)
    assert f"| Command | python benchmarks/gpu.py --rehearse --before {ROOT} |" in text


def test_the_faults_seconds_are_in_the_report(rehearse, monkeypatch, tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_gpu.py").write_text(
        "import os\nimport pytest\n\n@pytest.mark.gpu\ndef test(record_property):\n"
        "    record_property('a fault', os.environ['REHEARSE'])\n"
    )
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    text = rehearse(tests=gpu.tests)
    assert "\n| a fault | 1 |\n" in text and "1 passed" in text
    assert "record_property is incompatible" not in text


def test_contestants_train_in_turn(monkeypatch):
    """The first round warms up. Who fails is named, and its error; after `until` rounds end."""
    calls, clock = [], iter(range(1000))
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(in_turn.time, "perf_counter", lambda: next(clock))

    def fails(number: int) -> None:
        calls.append("c")
        raise ValueError("no\nmore")

    found = {
        "a": in_turn.Contestant(lambda _: calls.append("a"), 1),
        "b": in_turn.Contestant(
            lambda _: calls.append(f"b{torch.get_float32_matmul_precision()[:4]}"), 1, "high"
        ),
        "c": in_turn.Contestant(fails, 1),
    }
    seconds, errors = in_turn.measure(found, rounds=2)
    assert calls == ["c", "bhigh", "a", "a", "bhigh", "bhigh", "a"]
    assert seconds == {"a": [1, 1], "b": [1, 1], "c": []} and errors == {"c": "ValueError: no"}
    assert torch.get_float32_matmul_precision() == "highest"
    lines = in_turn.table(found, {"a": [0.1, 0.3, 0.2], "c": []}, steps=10, batch=5)
    assert lines[2:] == ["| a | 20.00 | 10.00 | 30.00 | 250 | 1 |"]
    assert in_turn.measure({"a": found["a"]}, rounds=2, until=0)[0] == {"a": []}


@pytest.fixture
def group(monkeypatch):
    """For a process that gpu.py starts without torchrun."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # waiting threads would take other tests' cores
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.slow("twenty contestants")
def test_contestants_train_what_they_are_said_to(group):
    """Each as many steps. (Fabric and Accelerate are not installed in CI.)"""
    found = in_turn.contestants("resnet18", 2, 3, "cpu", compiles=False, before=ROOT)
    assert "vit" not in MODELS  # which other tests have, too
    wanted = {in_turn.OURS, "single_gpu.py before", "the tutorial's loop, DDP"}
    wanted |= {f"{in_turn.OURS}{change}" for change in (" --amp", ", TF32", ", channels_last")}
    assert wanted < found.keys()
    steps = []

    def count(optimizer: torch.optim.Optimizer, *_) -> None:
        weight = max(optimizer.param_groups[0]["params"], key=torch.Tensor.dim)
        last = weight.is_contiguous(memory_format=torch.channels_last)
        steps.append((last, bool(optimizer.defaults["fused"])))

    hook = register_optimizer_step_pre_hook(count)
    try:
        for name, contestant in found.items():
            contestant.epoch(0)
            contestant.epoch(1)
            assert steps == 6 * [("channels_last" in name, "fused" in name)], name
            steps.clear()
    finally:
        hook.remove()


def test_the_share_of_the_all_reduce_that_is_hidden():
    def event(name: str, start: float, seconds: float, cat: str = "kernel") -> dict:
        return {"cat": cat, "name": name, "ts": start, "dur": seconds}

    events = [event("gemm", 0, 40), event("gemm", 30, 20), event("relu", 35, 5)]  # 0 to 50
    events += [event("Memcpy HtoD", 80, 10, "gpu_memcpy"), event("a call", 0, 999, "cuda_runtime")]
    events += [event("ncclDevKernel_AllReduce_Sum", 45, 10), event("ncclDevKernel_x", 70, 30)]
    # It computes from 0 to 50 and from 80 to 90, of 100. NCCL has 10 + 30, of which 5 + 10.
    assert in_turn.shares(events) == (0.6, 0.375)
    assert in_turn.shares(events[:3]) == (1.0, None) and in_turn.shares([]) == (None, None)


@pytest.mark.slow("a torchrun for one process, and one for two")
def test_the_report_of_more_devices_and_of_starts(rehearse):
    scaling = functools.partial(gpu.scaling, model="mlp", batch=8)
    text = rehearse(starts=gpu.first_steps, more=scaling)
    row = r"^\| single_gpu\.py \| 1 \| [\d.]+ \| .*import torch [\d.]+.* the first step [\d.]+ \|$"
    assert re.search(row, text, re.M), text
    assert re.search(r"^\| 1 \| [\d,]+ \| 1\.00 \| 1\.00 \|  \|$", text, re.M), text
    assert re.search(r"^\| 2 \| [\d,]+ \| [\d.]+ \| [\d.]+ \|  \|$", text, re.M), text


@pytest.mark.slow("an epoch of each contestant, of which one is compiled")
def test_the_report_of_speeds(rehearse, group):
    require(None if shutil.which("g++") else "no C++ compiler")
    text = rehearse(speeds=functools.partial(gpu.compare, model="mlp", batch=32))
    for name in ("ddp_torchrun.py", "ddp_torchrun.py --compile", "ddp_torchrun.py before"):
        assert re.search(rf"^\| {re.escape(name)} \| [\d.]+ ", text, re.M), text
    assert "\nMedians of 1 or more epochs of 3 steps.\n" in text
