"""A resumed run ends as one that never stopped, whichever rung and however many processes go on."""

from pathlib import Path

import pytest
import torch
from helpers.files import difference, load, patched, same_bytes
from helpers.jobs import ROOT, epochs, every_form
from helpers.ranks import train


@every_form
def test_one_process_with_any_optimizer(do, monkeypatch, script):
    """With dropout, whose masks are the same only if they are seeded as before, and with a learning
    rate for each of two groups. The rates are this run's, because they may change."""

    def own_optimizer(parameters: object, lr: float, momentum: float) -> torch.optim.Optimizer:
        first, *others = parameters
        return torch.optim.AdamW([{"params": [first], "lr": lr / 10}, {"params": others}], lr=lr)

    monkeypatch.setattr(torch.optim, "SGD", own_optimizer)
    options = ("--batch-size", 8, "--lr", 0.001)
    do(script, 3, *options, "--snapshot-path", "whole.pt")
    do(script, 1, *options)
    before = load(Path("checkpoint.pt"))
    do(script, 3, *options, "--resume")
    after, whole = load(Path("checkpoint.pt")), load(Path("whole.pt"))
    assert (before["epoch"], after["epoch"]) == (1, 3)
    for name, weight in whole["model"].items():
        assert torch.equal(after["model"][name], weight)
        assert not torch.equal(before["model"][name], weight)
    do(script, 4, "--batch-size", 8, "--lr", 0.002, "--resume")
    rates = [group["lr"] for group in load(Path("checkpoint.pt"))["optimizer"]["param_groups"]]
    assert rates == pytest.approx([0.0002, 0.002])


def test_an_epoch_goes_on_in_the_middle(do, monkeypatch):
    """With a schedule. The model has no dropout, because the rest of the epoch draws other masks.

    An epoch has five steps. Of those of the whole run, every third is saved.
    """
    script, schedule = "ddp_torchrun.py", ("--warm-up", 2, "--cosine", "--clip", 0.5)
    options = (3, "--model", "mlp", "--batch-size", 4, "--accumulate", 2, *schedule)
    expected = epochs(do(script, *options, "--snapshot-path", "whole.pt").text)
    module, snapshots = do.module(script), []
    save = module.save_snapshot

    def stop(*given: object) -> None:
        save(*given)
        snapshots.append(load(Path("checkpoint.pt")))
        if len(snapshots) <= len(places):
            raise ZeroDivisionError

    monkeypatch.setattr(module, "save_snapshot", stop)
    places = [(0, 24), (1, 0), (1, 8), (1, 32), (2, 0), (2, 16)]
    for place in places:  # each save is the last thing that a process does
        with pytest.raises(ZeroDivisionError):
            do(script, *options, "--save-steps", 3, "--resume")
        assert (snapshots[-1]["epoch"], snapshots[-1]["samples_seen"]) == place
    text = do(script, *options, "--save-steps", 3, "--resume").text
    assert [saved["epoch"] for saved in snapshots[-2:]] == [3, 3]  # after the 15th step, and again
    assert "Epoch 2 | Batchsize: 4 | Steps: 3\n" in text
    assert epochs(text)[-1]["val_loss"] == expected[-1]["val_loss"]
    assert same_bytes(load(Path("checkpoint.pt")), load(Path("whole.pt")))


@pytest.mark.parametrize("script", ["ddp_spawn.py", "ddp_torchrun.py"])
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


def test_a_snapshot_fits_whatever_schedule_it_was_made_with(do):
    options = ("--model", "mlp", "--batch-size", 8)
    rate = lambda: load(Path("checkpoint.pt"))["optimizer"]["param_groups"][0]["lr"]  # noqa: E731
    do("ddp_torchrun.py", 1, *options, "--cosine", "--warm-up", 1)
    assert 0 < rate() < 0.002  # of 0.01, at the last step
    do("single_gpu.py", 2, *options, "--resume")
    assert rate() == 0.01
    do("ddp_torchrun.py", 3, *options, "--cosine", "--resume")
    assert rate() < 0.002


def test_a_schedule_is_a_function_of_the_step_also_in_a_resumed_run(do, monkeypatch):
    """On more epochs, another batch size or another --lr it falls to 0 at the new end."""
    module, rates = do.module("ddp_torchrun.py"), []
    step = torch.optim.SGD.step

    def stepping(optimizer: torch.optim.Optimizer, *given: object) -> object:
        rates.append(optimizer.param_groups[0]["lr"])
        return step(optimizer, *given)

    monkeypatch.setattr(torch.optim.SGD, "step", stepping)
    schedule = ("--model", "mlp", "--warm-up", 3, "--cosine", "--lr", 0.1)
    do("ddp_torchrun.py", 2, *schedule, "--batch-size", 8)
    assert rates[:4] == pytest.approx([0.1 / 3, 0.2 / 3, 0.1, 0.1])
    assert rates[3:] == sorted(rates[3:], reverse=True) and 0 < rates[-1] < 0.01
    rates.clear()
    do("ddp_torchrun.py", 4, *schedule[:-1], 0.2, "--batch-size", 4, "--resume")
    expected = [0.2 * module.lr_factor(step, 40, do.last.args) for step in range(20, 40)]
    assert rates == pytest.approx(expected)


STOP = """@@ after its first save in mid-epoch, each rank ends
             log(f"Epoch {epoch} | Step {step} | Saved at {args.snapshot_path}")
+            os._exit(0)
"""


def test_a_stop_in_mid_epoch_goes_on_at_any_world_size(tmp_path, fashion):
    """A sample that is trained twice, or never, would show. Numbers of samples that the processes
    do not divide: test_steps.py."""
    script, data = tmp_path / "ddp_torchrun.py", (1, *fashion(120, 10))
    script.write_text(patched((ROOT / "ddp_torchrun.py").read_text(), STOP))
    options = (*data, "--resume", "--save-steps", 3, "--batch-size")
    for processes, batch, seen in ((3, 4, 36), (1, 12, 72), (2, 6, 108), (4, 3, 0)):
        train(tmp_path, script, processes, *options, batch, dtype="float64")
        assert load(tmp_path / "checkpoint.pt")["samples_seen"] == seen
    options = (*data, "--batch-size", 12, "--snapshot-path", "whole.pt")
    train(tmp_path, "single_gpu.py", 1, *options, dtype="float64")
    assert difference(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt")) < 1e-12
