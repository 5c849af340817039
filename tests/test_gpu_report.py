"""tools/gpu.py and in_turn.py, as far as a CPU goes: a rehearsal runs, and each trains its own."""

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


def test_without_a_gpu_there_is_one_sentence(run):
    said = "error: tools/gpu.py needs a GPU, and torch finds none here: .+\n"
    assert re.fullmatch(said, run("tools/gpu.py", status=1))


@pytest.fixture
def rehearse(monkeypatch, capsys):
    """rehearse(title=part, ...) -> what gpu.py prints if these are its parts."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # waiting threads would take other tests' cores
    threads = torch.get_num_threads()

    def rehearse(**parts) -> str:
        monkeypatch.setattr(gpu, "PARTS", dict(enumerate(parts.items(), start=1)))
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--rehearse", "--before", str(ROOT)])
        monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
        gpu.main()
        return capsys.readouterr().out

    yield rehearse
    torch.set_num_threads(threads)
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_part_that_breaks_is_in_the_report_and_the_others_go_on(rehearse, capsys):
    with pytest.raises(SystemExit, match=r"^failed: part 1$"):
        rehearse(bad=lambda *_: 1 / 0, good=lambda *_: (["fine"], True))
    said = r"(?s)### Part 1: bad\n.*ZeroDivisionError: .*### Part 2: good\n.*fine\n"
    assert re.search(said, capsys.readouterr().out)


@pytest.mark.slow("an epoch of each contestant, of which one is compiled; three ranks of torchrun")
def test_the_rehearsal_of_speeds_and_of_more_devices(rehearse):
    require(None if shutil.which("g++") else "no C++ compiler")
    more = functools.partial(gpu.scaling, model="mlp", batch=8)
    text = rehearse(speeds=functools.partial(gpu.compare, model="mlp", batch=32), more=more)
    for name in (in_turn.OURS, f"{in_turn.OURS} --compile", f"{in_turn.OURS} before", "1", "2"):
        assert re.search(rf"^\| {re.escape(name)} \| [\d.]+ ", text, re.M), text


@pytest.mark.slow("fifteen contestants")
def test_contestants_train_what_they_are_said_to(rehearse):
    """Each as many steps. (Fabric and Accelerate are not installed in CI.)"""
    found, steps = in_turn.contestants("resnet18", 2, 3, "cpu", compiles=False, before=ROOT), []
    changes = (" --amp", *(f", {change}" for change in in_turn.CHANGES))
    assert {"single_gpu.py before", *(in_turn.OURS + change for change in changes)} < found.keys()

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
            tf32 = ".py" in name and "without TF32" not in name
            assert contestant.precision == ("high" if tf32 else "highest"), name
            steps.clear()
    finally:
        hook.remove()
