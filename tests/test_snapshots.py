"""A snapshot is whole or not at all, any script loads it, and what does not fit is refused.

Nearly all in the tests' process. What a resumed run ends with: test_resume.py.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError

import pytest
import torch
import torch.distributed as dist
from helpers.files import load, same_bytes
from helpers.jobs import ROOT, SCRIPTS, every_ddp_script, every_script, inner
from helpers.ranks import train
from torch.multiprocessing import ProcessExitedException

DDP = SCRIPTS[2:]
NOT_FINITE = "weights are NaN or infinite, so they are not saved: try a lower --lr"


@every_script
def test_what_is_saved_is_what_is_loaded(make, capsys, script):
    torchrun = script == "ddp_torchrun.py"
    options = ("--model", "mlp", "--snapshot-path", "own.pt", "--resume")
    _, first = make(script, *options)
    assert "No snapshot at own.pt, starting from the beginning\n" in capsys.readouterr().out
    first._run_epoch(0)
    first.epoch = 3
    first.args.folder = Path()  # a user's own option, of any type
    if torchrun:
        first.samples_seen = 32
    first._save_snapshot()
    before = load(Path("own.pt"))
    assert {*before["model"]} == {*inner(first).state_dict()}  # no prefix
    _, second = make(script, *options)
    assert "Resuming training from snapshot at Epoch 3\n" in capsys.readouterr().out
    second._save_snapshot()
    after = load(Path("own.pt"))
    assert same_bytes(before, after) and second.epoch == 3
    holds = {"model", "optimizer", "schedule", "epoch", "args"}
    if torchrun:
        assert second.samples_seen == 32
        holds |= {"samples_seen"}
    assert after.keys() == holds


@every_script
def test_a_snapshot_is_written_whole_or_not_at_all(make, monkeypatch, script):
    """Killed while it writes, or with a full disk, a script leaves the snapshot before."""
    _, trainer = make(script)
    trainer._save_snapshot()
    path, save, replace, found = Path("checkpoint.pt"), torch.save, os.replace, []

    def replacing(new: str, old: str) -> None:
        found.extend(load(Path(name))["epoch"] for name in (old, new))
        replace(new, old)

    def failing(snapshot: dict, file: str) -> None:
        save(snapshot, file)
        Path(file).write_bytes(Path(file).read_bytes()[:100])
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", replacing)
    trainer.epoch = 3
    trainer._save_snapshot()
    assert found == [0, 3] and load(path)["epoch"] == 3
    monkeypatch.setattr(torch, "save", failing)
    trainer.epoch = 4
    with pytest.raises(OSError, match="the disk is full"):
        trainer._save_snapshot()
    assert load(path)["epoch"] == 3


@every_script
def test_a_new_run_keeps_the_snapshot_of_an_earlier_one(make, monkeypatch, capsys, script):
    """Rank 0 renames it. A run that is resumed leaves it."""
    module, trainer = make(script, "--model", "mlp", "--snapshot-path", "own.pt")
    trainer.epoch = 3
    trainer._save_snapshot()
    line = "The snapshot of an earlier run is now own.pt.old\n"
    own, old = Path("own.pt"), Path("own.pt.old")
    make(script, "--model", "mlp", "--snapshot-path", "own.pt", "--resume")
    if script in DDP:
        with monkeypatch.context() as patch:
            patch.setattr(dist, "get_rank", lambda: 1)
            loaders, rest = (trainer.train_data, trainer.test_data), (None, trainer.device)
            module.Trainer(inner(trainer), *loaders, trainer.optimizer, *rest, trainer.args)
    assert own.exists() and not old.exists() and line not in capsys.readouterr().out
    make(script, "--model", "mlp", "--snapshot-path", "own.pt")
    assert load(old)["epoch"] == 3 and not own.exists() and line in capsys.readouterr().out


def refused(call: Callable, *given: object) -> str:
    """The line that it ends with. The snapshot is as before."""
    before = Path("checkpoint.pt").read_bytes()
    with pytest.raises(SystemExit) as caught:
        call(*given)
    assert Path("checkpoint.pt").read_bytes() == before
    assert caught.value.code.startswith("error: ") and "\n" not in caught.value.code
    return caught.value.code.removeprefix("error: ")


@every_script
def test_weights_that_are_nan_or_infinite_are_not_saved(make, script):
    """All ranks look, also one that writes nothing, and none looks at buffers."""
    _, trainer = make(script, "--model", "mlp")
    inner(trainer).register_buffer("mask", torch.tensor(-torch.inf))
    trainer._save_snapshot()
    last = [*inner(trainer).parameters()][-1]
    for trainer.rank in (0, 1) if script in DDP else (0,):
        for last.data[-1] in (torch.inf, torch.nan):
            assert refused(trainer._save_snapshot) == NOT_FINITE
    assert refused(trainer.train, 1) == NOT_FINITE


def test_one_bad_batch_ends_all_ranks(tmp_path, fashion):
    """That of one rank, in the second epoch. The snapshot of the first one stays."""
    text, line = (ROOT / "ddp_spawn.py").read_text(), "            loss = self._run_batch("
    bad = f"            if self.rank == epoch == 1:\n                source[0] = torch.nan\n{line}"
    (tmp_path / "ddp_spawn.py").write_text(text.replace(line, bad))
    with pytest.raises(ProcessExitedException, match="exit code 1"):
        train(tmp_path, tmp_path / "ddp_spawn.py", 2, 3, *fashion(16, 4))
    said = "".join(path.read_text() for path in tmp_path.glob("output-?"))
    assert f"\nerror: {NOT_FINITE}\n" in said and "Traceback" not in said
    assert load(tmp_path / "checkpoint.pt")["epoch"] == 1


@every_script
def test_saved_every_nth_epoch_and_after_the_last(make, capsys, script):
    _, trainer = make(script, "--model", "mlp", 5, 2)
    trainer.train(5)
    found = r"^Epoch (\d) \| Training checkpoint saved at checkpoint.pt$"
    assert re.findall(found, capsys.readouterr().out, re.M) == ["1", "3", "4"]
    assert load(Path("checkpoint.pt"))["epoch"] == 5
    if script in DDP:  # rank 1 leaves the file to rank 0
        trainer.rank = 1
        trainer.train(6)
        assert trainer.epoch == 6 and load(Path("checkpoint.pt"))["epoch"] == 5


@every_script
def test_a_run_with_another_setting_is_refused(make, script):
    for option, then, now in (
        ("model", "mlp", "convnet"),
        ("lr", 0.5, 0.25),
        ("momentum", 0.5, 0.25),
        ("seed", 7, 8),
        ("dataset", "mnist", "fashion-mnist"),
    ):
        options = ("--model", "mlp", f"--{option}")
        make(script, *options, then)[1]._save_snapshot()
        line = f"checkpoint.pt was made with --{option} {then}, not {now}"
        assert refused(make, script, *options, now, "--resume") == line


@every_script
def test_a_snapshot_of_mid_epoch_is_for_ddp_torchrun_alone(make, script):
    _, trainer = make("ddp_torchrun.py", "--model", "mlp")
    trainer.samples_seen = 32
    trainer._save_snapshot()
    if script != "ddp_torchrun.py":
        line = "checkpoint.pt was saved in mid-epoch: go on with ddp_torchrun.py"
        assert refused(make, script, "--model", "mlp", "--resume") == line
    trainer.epoch, trainer.samples_seen = 2, 0
    trainer._save_snapshot()
    _, trainer = make(script, "--model", "mlp", "--resume")
    assert trainer.epoch == 2
    trainer._save_snapshot()  # and ddp_torchrun.py takes this script's
    _, trainer = make("ddp_torchrun.py", "--model", "mlp", "--amp", "--resume")
    assert (trainer.epoch, trainer.samples_seen) == (2, 0)


class Harmful:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("harm",)


@every_script
def test_what_is_not_a_snapshot_ends_the_run_and_runs_nothing(make, script):
    """The error is torch's own."""
    make(script, "--model", "mlp")[1]._save_snapshot()
    torch.save(Harmful(), "harmful.pt")
    Path("torn.pt").write_bytes(Path("checkpoint.pt").read_bytes()[:-100])
    for name, said in (("harmful.pt", "Weights only load failed"), ("torn.pt", "zip archive")):
        before = Path(name).read_bytes()
        with pytest.raises((RuntimeError, UnpicklingError), match=said):
            make(script, "--model", "mlp", "--snapshot-path", name, "--resume")
        assert Path(name).read_bytes() == before
    assert not Path("harm").exists()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("options", [("--batch-size", 8), ("--batch-size", 4, "--accumulate", 2)])
def test_snapshots_within_an_epoch(make, capsys, rank, options):
    """After every two of an epoch's five steps, counted over epochs, which all ranks do alike.

    Epochs' ends have a rule of their own: the third one saves.
    """
    _, trainer = make("ddp_torchrun.py", "--model", "mlp", 3, 3, "--save-steps", 2, *options)
    trainer.rank, save, saved = rank, trainer._save_snapshot, []

    def save_snapshot() -> None:
        saved.append((trainer.epoch, trainer.samples_seen))
        save()
        if rank == 0:
            snapshot = load(Path("checkpoint.pt"))
            assert (snapshot["epoch"], snapshot["samples_seen"]) == saved[-1]

    trainer._save_snapshot = save_snapshot
    trainer.train(3)
    steps = [(0, 2), (0, 4), (1, 1), (1, 3), (2, 1), (2, 3)]
    assert saved == [*((epoch, 8 * step) for epoch, step in steps), (3, 0)]
    lines = [f"Epoch {epoch} | Step {step} | Saved at checkpoint.pt" for epoch, step in steps]
    assert [line for line in capsys.readouterr().out.splitlines() if " Step " in line] == lines


@every_ddp_script
def test_ddp_ends_before_its_group(make, script):
    make(script)
    assert make.calls[1:] == [("train", 5), ("destroy_process_group",)]
