"""What is printed: more in test_training.py, a resume's lines in test_snapshots.py."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.files import load
from helpers.jobs import SCRIPTS, epochs, every_script, inner

pytestmark = pytest.mark.numbers

DDP = SCRIPTS[2:]


@every_script
def test_the_rate_is_that_of_training(make, monkeypatch, capsys, script):
    """40 samples in five steps of 2 s, the device's rest of 2 s, and 100 s of evaluation, which do
    not count. ddp_torchrun.py has seen 16 of the first epoch's before.
    """
    seconds = [0]

    def rest(epoch: int) -> SimpleNamespace:
        loss_sum = run_epoch(epoch)
        return SimpleNamespace(item=lambda: seconds.append(2) or loss_sum.item())

    _, trainer = make(script, "--model", "mlp", "--batch-size", 8)
    monkeypatch.setattr("time.perf_counter", lambda: sum(seconds))
    passes = lambda model, _: seconds.append(2 if model.training else 100)  # noqa: E731
    inner(trainer).register_forward_pre_hook(passes)
    run_epoch, trainer._run_epoch, trainer.samples_seen = trainer._run_epoch, rest, 16
    trainer.train(2)
    lines = epochs(capsys.readouterr().out)
    assert [line["rate"] for line in lines] == [3, 3]  # 40 / 12, and 24 / 8


@every_script
def test_the_lines_of_steps_and_the_sums_of_an_epoch(make, monkeypatch, capsys, script):
    """Steps' losses are rank 0's, and say so; the sums are over two ranks, which have the same.

    A learning rate of 0 leaves the weights as they are, so all can be computed afterwards.
    """
    options = ("--batch-size", 16, "--log-interval", 1, "--lr", 0, "--test-batch-size", 3)
    _, trainer = make(script, "--model", "mlp", *options)
    model, loss = inner(trainer), torch.nn.functional.cross_entropy
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.mul_(2))
    ranks = 2 if script in DDP else 1
    loss_sum = trainer._run_epoch(1)
    printed = [line for line in capsys.readouterr().out.splitlines() if "| Step " in line]
    sampler = trainer.train_data.sampler
    sampler.set_epoch(1) if script in DDP else sampler.generator.manual_seed(42 + 1)
    values = [loss(model(source), targets).item() for source, targets in trainer.train_data]
    whose = "Loss of rank 0" if script in DDP else "Loss"
    for step, (line, value) in enumerate(zip(printed, values, strict=True), start=1):
        start, number = line.rsplit(" ", 1)
        assert start == f"Epoch 1 | Step {step} | {whose}:"
        assert len(number) == 8 and float(number) == pytest.approx(value, abs=2e-6)
    total = sum(size * value for size, value in zip((16, 16, 8), values, strict=True))
    assert loss_sum.item() == pytest.approx(total * ranks, rel=1e-5)
    source, targets = trainer.test_data.dataset.__getitems__(range(10))
    test_loss, correct = trainer._evaluate() / ranks
    assert test_loss.item() == pytest.approx(10 * loss(model(source), targets).item(), rel=1e-5)
    assert correct == (model(source).argmax(1) == targets).sum()


@pytest.mark.parametrize("script", DDP)
def test_rank_0_speaks_for_all(make, monkeypatch, capsys, script):
    module, _ = make(script)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    capsys.readouterr()
    monkeypatch.setenv("RANK", "1")  # which ddp_torchrun.py goes by
    module.log("said once")
    module.log("said by each", every_rank=True)
    assert capsys.readouterr().out == "said by each\n"
    if script != "ddp_torchrun.py":
        monkeypatch.setattr(dist, "is_initialized", lambda: False)
        module.log("said by the parent")
        assert capsys.readouterr().out == "said by the parent\n"


@every_script
def test_without_a_test_set_it_trains_and_saves(make, capsys, script):
    module, trainer = make(script, "--model", "mlp")
    trainer.test_data = module.prepare_dataloader([], 10, range(0), trainer.args)
    trainer.train(2)
    lines = re.findall(r"^(Epoch . \| Train.*) \| \d+ samples/s$", capsys.readouterr().out, re.M)
    (first, second) = (re.fullmatch(r"Epoch . \| Train loss: (\S+)", line)[1] for line in lines)
    assert float(second) < float(first)
    assert load(Path("checkpoint.pt"))["epoch"] == 2


@every_script
def test_an_epochs_first_line_names_the_device_and_the_rank(make, monkeypatch, script):
    """And rank 0 alone has a progress bar: None is tqdm's own choice, on a terminal only."""
    module, trainer = make(script, "--batch-size", 8)
    trainer.rank = rank = 1 if script in DDP else 0
    lines, bars = [], []
    monkeypatch.setattr(module, "log", lambda line, **_: lines.append(line))
    monkeypatch.setattr(module, "tqdm", lambda _, leave, disable: bars.append(disable) or [])
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: 0.0)
    monkeypatch.setattr(dist, "all_reduce", lambda *_: None)
    for type in ("cuda", "xpu", "mps", "cpu"):
        trainer.device = torch.device(type)
        trainer._run_epoch(3)
    rest = f"{rank}] Epoch 3 | Batchsize: 8 | Steps: 5"
    assert lines == [f"[{name}{rest}" for name in ("GPU", "GPU", "GPU", "CPU")]
    assert bars == [True if rank else None] * 4
