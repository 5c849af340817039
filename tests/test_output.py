"""What is printed: more in test_training.py, a resume's lines in test_snapshots.py."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.files import load
from helpers.jobs import SCRIPTS, epochs, every_form, losses
from helpers.ranks import train

from common.data import make_digits

pytestmark = pytest.mark.numbers

DDP = SCRIPTS[2:]
MLP = ("--model", "mlp")


@every_form
def test_the_rate_is_that_of_training(do, monkeypatch, script):
    """40 samples in five steps of 2 s, the device's rest of 2 s, and 100 s of evaluation, which do
    not count."""
    module, seconds = do.module(script), [0]
    train_epoch, evaluate = module.train_epoch, module.evaluate

    def slow_epoch(*given: object) -> SimpleNamespace:
        train_epoch(*given)
        seconds.append(2 * len(given[1]))
        return SimpleNamespace(item=lambda: seconds.append(2) or 1.0)

    monkeypatch.setattr("time.perf_counter", lambda: sum(seconds))
    monkeypatch.setattr(dist, "all_reduce", lambda _: None)
    monkeypatch.setattr(module, "train_epoch", slow_epoch)
    monkeypatch.setattr(module, "evaluate", lambda *given: seconds.append(100) or evaluate(*given))
    text = do(script, 2, *MLP, "--batch-size", 8).text
    assert [line["rate"] for line in epochs(text)] == [3, 3]  # 40 / 12


@every_form
def test_the_lines_of_steps_and_the_sums_of_an_epoch(do, script):
    """A learning rate of 0 leaves the weights as they are, so all can be computed afterwards."""
    job = do(script, 1, *MLP, "--batch-size", 16, "--log-interval", 1, "--lr", 0)
    loss, loader = torch.nn.functional.cross_entropy, job.passes[0][1]
    loader.sampler.set_epoch(0) if script in DDP else loader.sampler.generator.manual_seed(42)
    with torch.no_grad():
        batches = [(loss(job.model(inputs), targets), len(targets)) for inputs, targets in loader]
    whose = "Loss of rank 0" if script in ("ddp_spawn.py", "multinode.py") else "Loss"
    rate = r" \| lr: 0" if script == "ddp_torchrun.py" else ""
    printed = re.findall(rf"^Epoch 0 \| Step \d \| {whose}: (\d\.\d{{4}}){rate}$", job.text, re.M)
    assert [float(value) for value in printed] == pytest.approx(
        [value.item() for value, _ in batches], abs=6e-5
    )
    (line,) = epochs(job.text)
    total = sum(value.item() * size for value, size in batches) / 40
    assert line["train_loss"] == pytest.approx(total, abs=6e-5)


def test_a_step_of_ddp_torchrun_shows_the_loss_of_all_ranks(tmp_path, fashion):
    options = (2, *fashion(64, 4), "--log-interval", 1)
    expected = losses(train(tmp_path, "single_gpu.py", 1, *options, "--batch-size", 16))
    given = (*options, "--batch-size", 8)
    found = losses(train(tmp_path, "ddp_torchrun.py", 2, *given))
    assert len(found) == 8 and found == pytest.approx(expected, abs=2e-4)


@every_form
def test_without_a_validation_set_it_trains_and_saves(do, monkeypatch, script):
    module = do.module(script)
    monkeypatch.setattr(module, "load_dataset", lambda *_: (make_digits(40, 0), []))
    text = do(script, 2, *MLP).text
    first, second = re.findall(r"^Epoch . \| Train loss: (\S+) \| \d+ samples/s$", text, re.M)
    assert float(second) < float(first)
    assert load(Path("checkpoint.pt"))["epoch"] == 2
