"""A resumed run ends as one that never stopped, whichever rung and however many processes go on."""

from pathlib import Path

import pytest
import torch
from helpers.files import difference, load, same_bytes
from helpers.jobs import epochs, every_form
from helpers.ranks import train


@every_form
def test_one_process_with_any_optimizer(do, monkeypatch, script):
    """With dropout, whose masks are the same only if they are seeded as before, and to the bytes.
    The learning rate is this run's, because it may change."""
    monkeypatch.setattr(torch.optim, "SGD", lambda weights, lr, **_: torch.optim.AdamW(weights, lr))
    options = ("--batch-size", 8, "--lr", 0.001)
    do(script, 3, *options, "--snapshot-path", "whole.pt")
    do(script, 1, *options)
    before = load(Path("checkpoint.pt"))
    text = do(script, 3, *options, "--resume").text
    assert "from epoch 1\n" in text and [line["epoch"] for line in epochs(text)] == [1, 2]
    after, whole = load(Path("checkpoint.pt")), load(Path("whole.pt"))
    assert (before["epoch"], after["epoch"]) == (1, 3) and same_bytes(after, whole)
    assert difference(before, whole) > 1e-3
    do(script, 4, "--batch-size", 8, "--lr", 0.002, "--resume")
    assert load(Path("checkpoint.pt"))["optimizer"]["param_groups"][0]["lr"] == 0.002


@pytest.mark.parametrize("script", ["ddp_spawn.py", "ddp_torchrun.py", "multinode.py"])
def test_two_processes_end_with_the_same_bytes(tmp_path, fashion, script):
    """With three or more the order of summation matters, and DDP changes it after a step."""
    options = (*fashion(100, 10), "--model", "convnet", "--batch-size", 8)
    whole = epochs(train(tmp_path, script, 2, 3, *options, "--snapshot-path", "whole.pt"))
    first = epochs(train(tmp_path, script, 2, 1, *options))
    text = train(tmp_path, script, 2, 3, *options, "--resume")
    assert "[rank 1 of 2] on cpu, from epoch 1\n" in text
    parts = [{**line, "rate": 0} for line in first + epochs(text)]
    assert len(parts) == 3 and parts == [{**line, "rate": 0} for line in whole]
    assert same_bytes(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt"))
