"""Every line and figure that is printed, and who prints it. In the tests' process."""

import os
import re
import runpy
import signal
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers.jobs import ROOT, SCRIPTS
from helpers.parts import every_ddp_script, every_script, inner, set_up

from common.data import make_digits


@every_ddp_script
def test_rank_1_is_quiet(make, monkeypatch, capsys, script):
    module, _ = make(script)
    capsys.readouterr()
    for rank in (0, 1):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        module.log("of the job")
        module.log(f"of rank {rank}", every_rank=True)
    assert capsys.readouterr().out == "of the job\nof rank 0\nof rank 1\n"


@pytest.fixture
def clock(monkeypatch):
    """A list of one number: what time.perf_counter gives."""
    now = [1000.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


def pass_time(clock: list[float], seconds: float) -> None:
    clock[0] += seconds


@every_script
def test_the_line_of_an_epoch(make, monkeypatch, capsys, clock, script):
    """What sums are divided by, and which seconds count: 4 of training and none of the 100 of
    evaluation. ddp_torchrun.py enters the epoch at sample 16 of 40, and waits for the device in it.
    """
    _, trainer = make(script, 9, 2, "--snapshot-path", "own.pt")
    torchrun, scalars = script == "ddp_torchrun.py", []

    class Sum:
        def item(self) -> float:
            pass_time(clock, 2)  # it waits for the device
            return 10.0

    def run_epoch(epoch: int) -> object:
        pass_time(clock, 2)
        if not torchrun:
            return Sum()
        pass_time(clock, 2)
        trainer.samples_seen = 40
        trainer.loss_sum += 10
        return 0

    def evaluate() -> tuple[torch.Tensor, torch.Tensor]:
        pass_time(clock, 100)
        return torch.tensor(5.0), torch.tensor(7.0)

    monkeypatch.setattr(trainer, "_run_epoch", run_epoch)
    monkeypatch.setattr(trainer, "_evaluate", evaluate)
    monkeypatch.setattr(trainer, "_save_snapshot", lambda: None)
    monkeypatch.setattr(trainer.schedule, "step", lambda: None)
    trainer.device, trainer.epoch = torch.device("cuda"), 2
    if torchrun:
        trainer.samples_seen = 16
        trainer.writer = SimpleNamespace(
            add_scalar=lambda *given: scalars.append(given), flush=lambda: scalars.append("flushed")
        )
    capsys.readouterr()
    trainer.train(4)
    losses = "Train loss: 0.2500 | Test loss: 0.5000 | Accuracy: 7/10 (70.00%)"
    assert capsys.readouterr().out == (
        f"Epoch 2 | {losses} | {6 if torchrun else 10} samples/s\n"
        f"Epoch 3 | {losses} | 10 samples/s\n"
        "Epoch 3 | Training checkpoint saved at own.pt\n"
    )
    expected = [("loss/train", 0.25, 2), ("loss/test", 0.5, 2), ("accuracy", pytest.approx(0.7), 2)]
    assert scalars[:4] == ([*expected, "flushed"] if torchrun else [])


@every_script
def test_the_lines_of_a_resume(make, capsys, script):
    path = ("--snapshot-path", "own.pt")
    _, trainer = make(script, 7, 3, *path, "--resume")
    assert "No snapshot at own.pt, starting from the beginning\n" in capsys.readouterr().out
    trainer.epoch = 4
    trainer._save_snapshot()
    capsys.readouterr()
    make(script, *path, "--resume")
    assert "Resuming training from snapshot at Epoch 4\n" in capsys.readouterr().out


@every_script
def test_the_lines_of_steps_and_the_sums_of_an_epoch(make, capsys, script):
    """A learning rate of 0 leaves the weights as they are, so all can be computed afterwards."""
    options = ("--batch-size", 16, "--log-interval", 1, "--lr", 0, "--test-batch-size", 3)
    _, trainer = make(script, "--model", "mlp", *options)
    model, loss = inner(trainer), torch.nn.functional.cross_entropy
    capsys.readouterr()
    loss_sum = trainer._run_epoch(1)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "[CPU0] Epoch 1 | Batchsize: 16 | Steps: 3"
    trainer.train_data.batch_sampler.set_epoch(1)
    expected = [loss(model(source), targets).item() for source, targets in trainer.train_data]
    whose = "Loss of rank 0" if script in SCRIPTS[2:] else "Loss"
    form = rf"Epoch 1 \| Step (\d) \| {whose}: (\d\.\d{{6}})"
    steps = [re.fullmatch(form, line).groups() for line in lines]
    assert [int(step) for step, _ in steps] == [1, 2, 3]
    assert [float(value) for _, value in steps] == pytest.approx(expected, abs=2e-6)
    if script == "ddp_torchrun.py":
        assert loss_sum == 0 and trainer.samples_seen == 40  # it was not stopped
        loss_sum = trainer.loss_sum
    sizes = (13, 13, 14)
    total = sum(size * value for size, value in zip(sizes, expected, strict=True))
    assert loss_sum.item() == pytest.approx(total, rel=1e-5)
    source, targets = trainer.test_data.dataset.__getitems__(range(10))
    output = model(source)
    test_loss, correct = trainer._evaluate()
    assert test_loss.item() == pytest.approx(10 * loss(output, targets).item(), rel=1e-5)
    assert correct == (output.argmax(1) == targets).sum()


class Bar(list):
    """In the place of tqdm: no steps."""

    asked: ClassVar[list] = []

    def __init__(self, loader: object, leave: bool, disable: bool | None) -> None:
        self.asked.append(disable)

    @staticmethod
    def write(text: str, end: str) -> None:
        print(text, end=end)


@every_script
def test_an_epochs_first_line_names_the_device_and_the_rank(make, monkeypatch, capsys, script):
    module, trainer = make(script, "--batch-size", 8)
    trainer.rank = 1 if script in SCRIPTS[2:] else 0
    monkeypatch.setattr(module, "set_seed", lambda *_: None)
    monkeypatch.setattr(module, "tqdm", Bar)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: 0.0)
    monkeypatch.setattr(dist, "all_reduce", lambda *_: None)
    capsys.readouterr()
    for type, name in (("cuda", "GPU"), ("xpu", "XPU"), ("mps", "MPS"), ("cpu", "CPU")):
        trainer.device = torch.device(type)
        trainer._run_epoch(3)
        line = f"[{name}{trainer.rank}] Epoch 3 | Batchsize: 8 | Steps: 5\n"
        assert capsys.readouterr().out == line
        # None is tqdm's own choice: a bar on a terminal only
        assert Bar.asked.pop() is (True if trainer.rank else None)


@every_ddp_script
def test_the_line_of_a_rank(parse, monkeypatch, capsys, script):
    module, args = parse(script)
    args.device, args.nproc_per_node = "cuda", 2
    environment = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(module, "open_store", lambda *_: None, raising=False)
    set_up(module, args, 1)
    line = "[rank 1 of 2] device cuda:1 | backend nccl | threads 4\n"
    assert capsys.readouterr().out == line


@every_script
def test_the_first_line_and_the_total_time(make, parse, monkeypatch, capsys, clock, script):
    """As it is started; `make` is here for what it holds back and puts in order."""
    done = SimpleNamespace(join=lambda **_: True)
    data = (make_digits(40, 0), make_digits(10, 1))
    parse(script, 1, 1, "--model", "mlp", "--batch-size", 20)  # in sys.argv
    monkeypatch.setattr("common.data.load_dataset", lambda *_: pass_time(clock, 2.5) or data)
    monkeypatch.setattr(mp, "spawn", lambda *_, **__: done)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    # The fake clock stands still in an epoch, whose rate would be a division by zero.
    monkeypatch.setattr(torch.optim.SGD, "step", lambda *_, **__: pass_time(clock, 0.25))
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as error:
        assert script == "ddp_torchrun.py" and error.code == 0
    text = capsys.readouterr().out
    assert "total_epochs: 1, save_every: 1, batch_size: 20\n" in text
    seconds = {"ddp_spawn.py": "2.500", "multinode.py": "0.000"}.get(script, "3.000")
    assert text.endswith(f"\nTotal time: {seconds}s\n")
