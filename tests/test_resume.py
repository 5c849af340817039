"""A resumed run ends as one that never stopped, whichever rung and however many processes go on."""

import os
import signal
from pathlib import Path

import pytest
import torch
from helpers.files import difference, load, same_bytes
from helpers.jobs import TORCHRUN, epochs, every_ddp_script, every_script
from helpers.ranks import train


def own_optimizer(module, monkeypatch) -> None:
    """What a user does at the lines marked "your": a rate for each of two groups, and a schedule
    that computes them from where they began, as warm-up does."""
    load_train_objs = module.load_train_objs

    def edited(args, *rest):
        *objs, model, _, _ = load_train_objs(args, *rest)
        first, *others = model.parameters()
        groups = [{"params": [first], "lr": args.lr / 10}, {"params": others}]
        optimizer = torch.optim.AdamW(groups, lr=args.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        return *objs, model, optimizer, schedule

    monkeypatch.setattr(module, "load_train_objs", edited)


@every_script
def test_one_process_with_any_optimizer_and_schedule(make, parse, monkeypatch, script):
    """And with dropout, whose masks are the same only if they are seeded as before."""
    own_optimizer(parse(script)[0], monkeypatch)
    options = (script, "--batch-size", 8, "--lr", 0.001)
    make(*options, "--snapshot-path", "whole.pt")[1].train(3)
    make(*options)[1].train(1)
    before = load(Path("checkpoint.pt"))
    _, resumed = make(*options, "--resume")
    rates = [group["lr"] for group in resumed.optimizer.param_groups]
    assert rates == pytest.approx([0.00005, 0.0005])
    resumed.train(3)
    after, whole = load(Path("checkpoint.pt")), load(Path("whole.pt"))
    assert (before["epoch"], after["epoch"]) == (1, 3)
    for name, weight in whole["model"].items():
        assert torch.equal(after["model"][name], weight)
        assert not torch.equal(before["model"][name], weight)


def test_an_epoch_goes_on_in_the_middle(make, monkeypatch, capsys):
    """The model is one without dropout, because the rest of the epoch has a seed of its own."""
    options = ("ddp_torchrun.py", "--model", "mlp", "--batch-size", 4, "--accumulate", 2)
    make(*options, "--snapshot-path", "whole.pt")[1].train(2)
    expected = epochs(capsys.readouterr().out)
    _, killed = make(*options, "--save-steps", 3)
    save = killed._save_snapshot
    monkeypatch.setattr(killed, "_save_snapshot", lambda: save() or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        killed.train(2)
    assert load(Path("checkpoint.pt"))["samples_seen"] == 24
    _, resumed = make(*options, "--resume")
    resumed.train(2)
    text = capsys.readouterr().out
    assert "Epoch 0 | Batchsize: 4 | Steps: 2\n" in text
    for line, whole in zip(epochs(text), expected, strict=True):
        assert line["test_loss"] == whole["test_loss"]
    assert same_bytes(load(Path("checkpoint.pt")), load(Path("whole.pt")))


@every_ddp_script
def test_two_processes_end_with_the_same_bytes(tmp_path, fashion, script):
    """With three or more the order of summation matters, and DDP changes it after a step."""
    options = (*fashion(100, 10), "--model", "convnet", "--batch-size", 8)
    whole = epochs(train(tmp_path, script, 2, 3, *options, "--snapshot-path", "whole.pt"))
    first = epochs(train(tmp_path, script, 2, 1, *options))
    text = train(tmp_path, script, 2, 3, *options, "--resume")
    assert "Resuming training from snapshot at Epoch 1\n" in text
    parts = [{**line, "rate": 0} for line in first + epochs(text)]
    assert len(parts) == 3 and parts == [{**line, "rate": 0} for line in whole]
    assert same_bytes(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt"))
    assert not epochs(train(tmp_path, script, 2, 3, *options, "--resume"))  # nothing is left to do


def test_any_rung_goes_on_from_any_other_at_any_world_size(tmp_path, fashion):
    data = fashion(102, 10)
    legs = [
        ("ddp_spawn.py", 2, 6),
        ("single_gpu.py", 1, 12),
        ("ddp_torchrun.py", 3, 2, "--accumulate", 2),
        ("data_parallel.py", 1, 12),
        ("multinode.py", 2, 6),
        ("single_gpu.py", 1, 12),
    ]
    for epoch, (script, processes, *options) in enumerate(legs):
        options = (*data, "--resume", "--batch-size", *options)
        text = train(tmp_path, script, processes, epoch + 1, *options, dtype="float64")
        assert [line["epoch"] for line in epochs(text)] == [epoch], text
    options = (*data, "--batch-size", 12, "--snapshot-path", "whole.pt")
    train(tmp_path, "single_gpu.py", 1, len(legs), *options, dtype="float64")
    assert difference(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt")) < 1e-12


def test_a_stop_in_mid_epoch_goes_on_at_any_world_size(start, tmp_path, fashion):
    """A sample that is trained twice, or never, would show. Numbers of samples that the processes
    do not divide: test_steps.py."""
    data, seen = (1, *fashion(480, 10), "--save-steps", 3), [0]

    def leg(launch: str, *options: object, status: int = 0) -> None:
        job = start(launch, *data, *options, "--resume", LADDER_SLOW=0, LADDER_DTYPE="float64")
        if status:
            job.wait_for(r"Step 3 \| Saved")
            os.kill(job.process.pid, signal.SIGTERM)
        job.finish(status)
        seen.append(load(tmp_path / "checkpoint.pt")["samples_seen"])

    leg(TORCHRUN.format(3), "--batch-size", 2, "--accumulate", 2, status=1)
    leg("ddp_torchrun.py", "--batch-size", 12, status=-signal.SIGTERM)
    leg(TORCHRUN.format(2), "--batch-size", 6)
    assert 0 < seen[1] < seen[2] < 480 and seen[3] == 0
    options = (*data[:-2], "--batch-size", 12, "--snapshot-path", "whole.pt")
    train(tmp_path, "single_gpu.py", 1, *options, dtype="float64")
    assert difference(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt")) < 1e-12
