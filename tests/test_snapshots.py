"""A snapshot is whole or not at all, any script loads it, and what does not fit is refused.

In the tests' process. What a resumed run ends with: test_resume.py.
"""

import os
import re
from fractions import Fraction
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from helpers.files import load, same_bytes
from helpers.jobs import every_ddp_script, every_script, inner


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
    """Killed while it flushes, or with a full disk, a script leaves the snapshot before."""
    _, trainer = make(script)
    trainer._save_snapshot()
    both, flushed = (Path("checkpoint.pt"), Path("checkpoint.pt.tmp")), []
    monkeypatch.setattr(os, "fsync", lambda _: flushed.extend(load(path)["epoch"] for path in both))
    trainer.epoch = 3
    trainer._save_snapshot()
    assert flushed == [0, 3] and load(Path("checkpoint.pt"))["epoch"] == 3
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError("the disk is full")))
    trainer.epoch = 4
    with pytest.raises(OSError, match="the disk is full"):
        trainer._save_snapshot()
    assert load(Path("checkpoint.pt"))["epoch"] == 3


@every_script
def test_a_link_stays_a_link(make, script):
    Path("checkpoint.pt").symlink_to("own.pt")
    make(script)[1]._save_snapshot()
    assert Path("checkpoint.pt").is_symlink() and Path("own.pt").is_file()


@every_script
def test_saved_every_nth_epoch_and_after_the_last(make, capsys, script):
    _, trainer = make(script, "--model", "mlp", 5, 2)
    trainer.train(5)
    found = r"^Epoch (\d) \| Training checkpoint saved at checkpoint.pt$"
    assert re.findall(found, capsys.readouterr().out, re.M) == ["1", "3", "4"]
    assert load(Path("checkpoint.pt"))["epoch"] == 5


class Harmful:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("harm",)


def refused(make, script: str, *options: object, path: str = "checkpoint.pt") -> str:
    before = Path(path).read_bytes()
    with pytest.raises(SystemExit) as caught:
        make(script, *options, "--snapshot-path", path, "--resume")
    assert Path(path).read_bytes() == before
    assert caught.value.code.startswith("error: ") and "\n" not in caught.value.code
    return caught.value.code.removeprefix("error: ")


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
        assert refused(make, script, *options, now) == line


@every_script
def test_what_is_not_a_snapshot_is_refused(make, script):
    make(script, "--model", "mlp")[1]._save_snapshot()
    torch.save({"MODEL_STATE": {}, "EPOCHS_RUN": 3}, "tutorial.pt")
    torch.save({"args": ["--lr"]}, "other.pt")
    torch.save(Harmful(), "harmful.pt")
    Path("torn.pt").write_bytes(Path("checkpoint.pt").read_bytes()[:-100])
    Path("empty.pt").touch()
    for name in ("tutorial.pt", "other.pt", "harmful.pt", "torn.pt", "empty.pt"):
        line = refused(make, script, "--model", "mlp", path=name)
        assert line.startswith(f"{name} is not a snapshot of these scripts (")
    assert not Path("harm").exists()
    torch.save({**load(Path("checkpoint.pt")), "own": Fraction(1, 3)}, "own.pt")
    assert "GLOBAL fractions.Fraction" in refused(make, script, "--model", "mlp", path="own.pt")


@every_script
def test_a_snapshot_of_mid_epoch_is_for_ddp_torchrun_alone(make, script):
    _, trainer = make("ddp_torchrun.py", "--model", "mlp")
    trainer.samples_seen = 32
    trainer._save_snapshot()
    if script != "ddp_torchrun.py":
        line = "checkpoint.pt was saved in mid-epoch: go on with ddp_torchrun.py"
        assert refused(make, script, "--model", "mlp") == line
    trainer.epoch, trainer.samples_seen = 2, 0
    trainer._save_snapshot()
    _, trainer = make(script, "--model", "mlp", "--resume")
    assert trainer.epoch == 2
    trainer._save_snapshot()  # and ddp_torchrun.py takes this script's
    _, trainer = make("ddp_torchrun.py", "--model", "mlp", "--amp", "--resume")
    assert (trainer.epoch, trainer.samples_seen) == (2, 0)


@every_ddp_script
def test_rank_1_leaves_the_file_to_rank_0(make, monkeypatch, script):
    _, trainer = make(script, "--model", "mlp")
    trainer.rank = 1
    trainer.train(1)
    assert trainer.epoch == 1 and not Path("checkpoint.pt").exists()
    trainer._save_snapshot()
    snapshot = {**load(Path("checkpoint.pt")), "epoch": 3}

    def broadcast_object_list(message: list, src: int = 0) -> None:
        assert message == [None] and src == 0
        message[0] = snapshot

    monkeypatch.setattr(dist, "broadcast_object_list", broadcast_object_list)
    Path("checkpoint.pt").write_text("its own node's, which is not read")
    trainer.model = trainer.model.module  # as it is when Trainer() loads the snapshot
    trainer._load_snapshot()
    assert trainer.epoch == 3


@every_ddp_script
def test_nobody_ends_while_rank_0_saves(make, script):
    """Or the first process that ends would end the others. DDP ends before its group."""
    make(script)
    assert make.calls[1:] == [("train", 5), ("barrier",), ("destroy_process_group",)]


def test_a_restart_that_finds_no_snapshot_warns(make, monkeypatch, capsys):
    warning = "WARNING: this is a restart, and what was trained before it is lost\n"
    make("ddp_torchrun.py", "--resume")
    assert warning not in capsys.readouterr().out
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    _, trainer = make("ddp_torchrun.py", "--resume")
    assert warning in capsys.readouterr().out
    trainer._save_snapshot()
    make("ddp_torchrun.py", "--resume")
    assert warning not in capsys.readouterr().out
