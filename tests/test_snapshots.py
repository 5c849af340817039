"""A snapshot is whole or not at all, any script loads it, and what does not fit is refused.

In the tests' process. What a resumed run ends with: test_resume.py.
"""

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.files import load, same_bytes
from helpers.jobs import every_ddp_script, every_script, inner

HOLDS = {"model", "optimizer", "schedule", "epoch", "args"}


@every_script
def test_what_is_saved_is_what_is_loaded(make, script):
    torchrun = script == "ddp_torchrun.py"
    options = ("--model", "mlp", *(("--amp", "fp16") if torchrun else ()))
    _, first = make(script, *options)
    first._run_epoch(0)
    first.epoch = 3
    first.args.folder = Path()  # a user's own option, of any type
    if torchrun:
        first.scaler.load_state_dict({**first.scaler.state_dict(), "scale": 8.0})
        first.samples_seen = 32
    first._save_snapshot()
    before = load(Path("checkpoint.pt"))
    assert before.keys() == HOLDS | ({"scaler", "samples_seen"} if torchrun else set())
    assert {*before["model"]} == {*inner(first).state_dict()}  # no prefix
    assert before["args"]["model"] == "mlp"
    _, second = make(script, *options, "--resume")
    assert second.epoch == 3
    second._save_snapshot()
    after = load(Path("checkpoint.pt"))
    assert same_bytes(before, after)
    if torchrun:
        assert (second.samples_seen, after["scaler"]["scale"]) == (32, 8)


@every_script
def test_a_snapshot_is_written_whole_or_not_at_all(make, monkeypatch, script):
    """Killed while it flushes, or with a full disk, a script leaves the snapshot before."""
    _, trainer = make(script)
    trainer._save_snapshot()
    before, written, fsync = Path("checkpoint.pt").read_bytes(), [], os.fsync

    def flush(descriptor: int) -> None:
        assert Path("checkpoint.pt").read_bytes() == before
        written.append(load(Path("checkpoint.pt.tmp"))["epoch"])
        fsync(descriptor)

    def full(descriptor: int) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "fsync", flush)
    trainer.epoch = 3
    trainer._save_snapshot()
    after = Path("checkpoint.pt").read_bytes()
    assert written == [3] and load(Path("checkpoint.pt"))["epoch"] == 3
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="the disk is full"):
        trainer._save_snapshot()
    assert Path("checkpoint.pt").read_bytes() == after


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


def refused(make, script: str, *options: object) -> str:
    name = options[options.index("--snapshot-path") + 1]
    before = Path(name).read_bytes()
    with pytest.raises(SystemExit) as caught:
        make(script, *options, "--resume")
    assert Path(name).read_bytes() == before
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
        model = () if option == "model" else ("--model", "mlp")
        make(script, *model, f"--{option}", then)[1]._save_snapshot()
        options = (*model, "--snapshot-path", "checkpoint.pt", f"--{option}", now)
        line = f"checkpoint.pt was made with --{option} {then}, not {now}"
        assert refused(make, script, *options) == line


@every_script
def test_what_is_not_a_snapshot_is_refused(make, script):
    make(script, "--model", "mlp")[1]._save_snapshot()
    whole = Path("checkpoint.pt").read_bytes()
    torch.save({"MODEL_STATE": {}, "EPOCHS_RUN": 3}, "tutorial.pt")
    torch.save(Harmful(), "harmful.pt")
    Path("torn.pt").write_bytes(whole[: len(whole) // 2])
    Path("text.pt").write_text("hello")
    Path("empty.pt").write_bytes(b"")
    for name in ("tutorial.pt", "harmful.pt", "torn.pt", "text.pt", "empty.pt"):
        line = refused(make, script, "--model", "mlp", "--snapshot-path", name)
        assert line.startswith(f"{name} is not a snapshot of these scripts (")
    assert not Path("harm").exists()


@every_script
def test_a_snapshot_of_mid_epoch_is_for_ddp_torchrun_alone(make, script):
    _, trainer = make("ddp_torchrun.py", "--model", "mlp")
    trainer.epoch = 2
    for name, trainer.samples_seen in (("mid.pt", 32), ("end.pt", 0)):
        trainer.args.snapshot_path = name
        trainer._save_snapshot()
    options = ("--model", "mlp", "--snapshot-path")
    if script == "ddp_torchrun.py":
        assert make(script, *options, "mid.pt", "--resume")[1].samples_seen == 32
    else:
        line = "mid.pt was saved in mid-epoch: go on with ddp_torchrun.py"
        assert refused(make, script, *options, "mid.pt") == line
    _, trainer = make(script, *options, "end.pt", "--resume")
    assert trainer.epoch == 2
    trainer._save_snapshot()  # and ddp_torchrun.py takes this script's
    _, trainer = make("ddp_torchrun.py", *options, "end.pt", "--amp", "fp16", "--resume")
    assert (trainer.epoch, trainer.samples_seen) == (2, 0)


@every_ddp_script
def test_rank_1_leaves_the_file_to_rank_0(make, monkeypatch, script):
    _, trainer = make(script, "--model", "mlp")
    trainer.epoch = 3
    trainer._save_snapshot()
    snapshot = load(Path("checkpoint.pt"))
    Path("checkpoint.pt").unlink()

    trainer.rank = 1
    monkeypatch.setattr(trainer, "_run_epoch", lambda epoch: torch.zeros(()))
    monkeypatch.setattr(trainer.schedule, "step", lambda: None)
    trainer.train(4)
    assert trainer.epoch == 4 and not Path("checkpoint.pt").exists()

    for weight in snapshot["model"].values():
        weight.fill_(3)

    def broadcast_object_list(message: list, src: int = 0) -> None:
        assert message == [None] and src == 0
        message[0] = snapshot

    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "broadcast_object_list", broadcast_object_list)
    Path("checkpoint.pt").write_text("its own node's, which is not read")
    trainer.model = trainer.model.module  # as it is when Trainer() loads the snapshot
    trainer._load_snapshot()
    assert all((weight == 3).all() for weight in trainer.model.parameters())
    assert trainer.epoch == 3


@every_ddp_script
def test_nobody_ends_while_rank_0_saves(make, calls, script):
    """Or the first process that ends would end the others. DDP ends before its group."""
    make(script)
    assert calls[1:] == [("train", 5), ("barrier",), ("destroy_process_group",)]
