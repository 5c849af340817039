"""A resumed run ends as one that never stopped, whichever rung and however many processes go on."""

import os
import signal
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
import torch
from helpers.files import difference, load, same_bytes
from helpers.jobs import ALONE, SCRIPTS, TORCHRUN, Job, epochs

SPAWN2 = ("ddp_spawn.py", "--nproc-per-node", 2)
NODE2 = ("multinode.py", *ALONE, "--world-size", 2, "--nproc-per-node", 2)


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


@pytest.mark.parametrize(
    ("script", "amp"), [*((script, ()) for script in SCRIPTS), (SCRIPTS[3], ("--amp", "fp16"))]
)
def test_one_process_with_any_optimizer_and_schedule(make, parse, monkeypatch, script, amp):
    """And with dropout, whose masks are the same only if they are seeded as before."""
    own_optimizer(parse(script)[0], monkeypatch)
    options = (script, "--batch-size", 8, "--lr", 0.001, *amp)
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
    if amp:  # steps without an overflow
        growth = [snapshot["scaler"]["_growth_tracker"] for snapshot in (before, after, whole)]
        assert growth == [5, 15, 15] and after["scaler"]["scale"] > 1


def test_an_epoch_goes_on_in_the_middle(make, monkeypatch, capsys):
    options = ("ddp_torchrun.py", "--batch-size", 8)
    make(*options, "--snapshot-path", "whole.pt")[1].train(2)
    expected = epochs(capsys.readouterr().out)
    _, stopped = make(*options)
    stop = lambda step: setattr(stopped, "stopping", step == 4)  # noqa: E731
    monkeypatch.setattr(stopped, "_agree_on_stopping", stop)
    stopped.train(2)
    assert capsys.readouterr().out.endswith("\nEpoch 0 | Stopped at sample 24, saved\n")
    _, resumed = make(*options, "--resume")
    resumed.train(2)
    text = capsys.readouterr().out
    assert "Epoch 0 | Batchsize: 8 | Steps: 2\n" in text
    for line, whole in zip(epochs(text), expected, strict=True):
        assert line["test_loss"] == whole["test_loss"]
    assert same_bytes(load(Path("checkpoint.pt")), load(Path("whole.pt")))


# With three or more processes the order of summation matters, and DDP changes it after a step.
@pytest.mark.parametrize("launch", [SPAWN2, NODE2, (TORCHRUN.format(2),)])
def test_several_processes_end_with_the_same_bytes(fork, tmp_path, fashion, launch):
    script, *options = launch
    options += [*fashion(100, 10), "--model", "convnet", "--batch-size", 8]
    whole = epochs(fork(script, 3, *options, "--snapshot-path", "whole.pt"))
    first = epochs(fork(script, 1, *options))
    text = fork(script, 3, *options, "--resume")
    assert "Resuming training from snapshot at Epoch 1\n" in text
    parts = [{**line, "rate": 0} for line in first + epochs(text)]
    assert len(parts) == 3 and parts == [{**line, "rate": 0} for line in whole]
    assert same_bytes(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt"))
    assert not epochs(fork(script, 3, *options, "--resume"))  # there is nothing left to do


def test_any_rung_goes_on_from_any_other_at_any_world_size(fork, tmp_path, fashion):
    data, env = fashion(102, 10), {"LADDER_DTYPE": "float64"}
    legs = [
        (*SPAWN2, "--batch-size", 6),
        ("single_gpu.py", "--batch-size", 12),
        (TORCHRUN.format(3), "--batch-size", 2, "--accumulate", 2),
        ("data_parallel.py", "--batch-size", 12),
        (*NODE2, "--batch-size", 6),
        ("single_gpu.py", "--batch-size", 12),
    ]
    for epoch, (script, *options) in enumerate(legs):
        text = fork(script, epoch + 1, *data, *options, "--resume", **env)
        assert [line["epoch"] for line in epochs(text)] == [epoch], text
    options = ("--batch-size", 12, "--snapshot-path", "whole.pt")
    fork("single_gpu.py", len(legs), *data, *options, **env)
    assert difference(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt")) < 1e-12


def stop_one(job: Job, signum: int) -> None:
    """In mid-epoch, and only the last rank: all must agree."""
    job.wait_for(r"Epoch 0 \| Step 3 ")
    os.kill((job.workers() or [job.process.pid])[-1], signum)


def test_a_stop_in_mid_epoch_goes_on_at_any_world_size(fork, start, tmp_path, fashion):
    """Numbers of samples that the processes do not divide: test_steps.py."""
    data, double = (1, *fashion(480, 10), "--log-interval", 1), {"LADDER_DTYPE": "float64"}
    trained, seen = Counter(), [0]

    def leg(launch: str, size: int, signum: int | None = None, status: int = 0) -> None:
        trace = tmp_path / launch.replace("/", "-")
        trace.mkdir()
        options = (*data, "--batch-size", size, "--resume")
        job = start(launch, *options, fork=True, LADDER_SLOW=0, LADDER_TRACE=trace, **double)
        if signum:
            stop_one(job, signum)
        job.finish(status)
        seen.append(load(tmp_path / "checkpoint.pt")["samples_seen"])
        for path in trace.iterdir():
            lines = [[*map(int, line.split())] for line in path.read_text().splitlines()]
            batches = [indices for count, *indices in lines if count == 480]
            # A rank that stops has fetched a batch that it does not train.
            trained.update(chain(*(batches[:-1] if signum else batches)))

    leg(TORCHRUN.format(3), 4, signal.SIGINT, 1)
    leg("ddp_torchrun.py", 12, signal.SIGTERM, 143)
    leg(TORCHRUN.format(2), 6)
    assert 0 < seen[1] < seen[2] < 480 and seen[3] == 0
    assert trained == Counter(range(480))  # none repeated, none lost
    fork("single_gpu.py", *data, "--batch-size", 12, "--snapshot-path", "whole.pt", **double)
    assert difference(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt")) < 1e-12
