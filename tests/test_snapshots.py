"""What is saved is what is loaded, by any script, whole or not at all. In the tests' process."""

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.files import load, same_bytes
from helpers.parts import every_ddp_script, every_script, inner


@every_script
def test_what_is_saved_is_what_is_loaded(make, script):
    torchrun = script == "ddp_torchrun.py"
    options = ("--model", "mlp", *(("--amp", "fp16") if torchrun else ()))
    _, first = make(script, *options)
    first._run_epoch(0)
    first.epoch = 3
    if torchrun:
        first.scaler.load_state_dict({**first.scaler.state_dict(), "scale": 8.0})
        first.samples_seen = 32
        first.loss_sum.fill_(5)
    first._save_snapshot()
    before = load(Path("checkpoint.pt"))
    _, second = make(script, *options, "--resume")
    assert second.epoch == 3
    if torchrun:
        assert (second.samples_seen, second.loss_sum) == (32, 5)
    second._save_snapshot()
    after = load(Path("checkpoint.pt"))
    assert same_bytes(before, after) and before.get("scaler") == after.get("scaler")
    assert {*before["model"]} == {*inner(second).state_dict()}  # no prefix
    assert not torchrun or after["scaler"]["scale"] == 8


def with_schedule(module, monkeypatch) -> None:
    """What a user does at "load your schedule": two groups with rates of their own, and a schedule
    that computes the rate from where it began, as warm-up does."""
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
def test_another_optimizer_and_schedule_go_on(make, parse, monkeypatch, script):
    module, _ = parse(script)
    with_schedule(module, monkeypatch)
    train, options = module.Trainer.train, (script, "--model", "mlp", "--lr", 0.4)
    _, trainer = make(*options)
    train(trainer, 2)
    _, trainer = make(*options, "--resume")
    for halved in (4, 8):
        rates = [group["lr"] for group in trainer.optimizer.param_groups]
        assert rates == pytest.approx([0.04 / halved, 0.4 / halved])
        trainer.schedule.step()
    assert trainer.epoch == 2


@every_script
def test_a_snapshot_is_written_whole_or_not_at_all(make, monkeypatch, script):
    _, trainer = make(script)
    calls, fsync, replace = [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda *args: calls.append("fsync") or fsync(*args))
    monkeypatch.setattr(Path, "replace", lambda *args: calls.append("replace") or replace(*args))
    trainer._save_snapshot()
    assert calls == ["fsync", "replace"]
    before = Path("checkpoint.pt").read_bytes()

    def torn(what, file, **options):
        file.write(b"half")
        raise OSError("the disk is full")

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(OSError, match="the disk is full"):
        trainer._save_snapshot()
    assert Path("checkpoint.pt").read_bytes() == before
    assert not Path("checkpoint.pt.tmp").exists()


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
@pytest.mark.parametrize(
    ("option", "then", "now"),
    [
        ("model", "mlp", "convnet"),
        ("lr", 0.5, 0.25),
        ("momentum", 0.5, 0.25),
        ("seed", 7, 8),
        ("dataset", "mnist", "fashion-mnist"),
    ],
)
def test_a_run_with_another_setting_is_refused(make, script, option, then, now):
    model = () if option == "model" else ("--model", "mlp")
    make(script, *model, f"--{option}", then)[1]._save_snapshot()
    options = (*model, "--snapshot-path", "checkpoint.pt", f"--{option}", now)
    line = f"checkpoint.pt was made with --{option} {then}, and this run has {now}"
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
def test_a_snapshot_of_mid_epoch_is_for_ddp_torchrun(make, script):
    _, trainer = make("ddp_torchrun.py", "--model", "mlp")
    for name, trainer.samples_seen in (("mid.pt", 32), ("end.pt", 0)):
        trainer.args.snapshot_path = name
        trainer.epoch = 2
        trainer._save_snapshot()
    options = ("--model", "mlp", "--snapshot-path")
    if script == "ddp_torchrun.py":
        assert make(script, *options, "mid.pt", "--resume")[1].samples_seen == 32
    else:
        line = "mid.pt was saved in mid-epoch: go on with ddp_torchrun.py"
        assert refused(make, script, *options, "mid.pt") == line
    assert make(script, *options, "end.pt", "--resume")[1].epoch == 2


@every_script
def test_ddp_torchrun_takes_the_snapshots_of_all(make, script):
    _, trainer = make(script, "--model", "mlp")
    trainer.epoch = 2
    trainer._save_snapshot()
    _, trainer = make("ddp_torchrun.py", "--model", "mlp", "--amp", "fp16", "--resume")
    assert (trainer.epoch, trainer.samples_seen, trainer.loss_sum) == (2, 0, 0)


@every_script
def test_another_global_batch_is_said(make, capsys, script):
    make(script, "--batch-size", 8)[1]._save_snapshot()
    line = "The global batch is another one than before (8 samples)\n"
    for size, said in ((4, True), (8, False)):
        capsys.readouterr()
        make(script, "--batch-size", size, "--resume")
        assert (line in capsys.readouterr().out) == said


@every_ddp_script
def test_rank_1_leaves_the_file_to_rank_0(make, monkeypatch, script):
    _, trainer = make(script, "--model", "mlp")
    trainer.epoch = 3
    trainer._save_snapshot()
    snapshot = load(Path("checkpoint.pt"))
    Path("checkpoint.pt").unlink()

    trainer.rank = 1
    monkeypatch.setattr(dist, "barrier", lambda: None)  # it waits for rank 0
    run_epoch = lambda epoch: torch.zeros(()) if script != "ddp_torchrun.py" else 0  # noqa: E731
    monkeypatch.setattr(trainer, "_run_epoch", run_epoch)
    monkeypatch.setattr(trainer.schedule, "step", lambda: None)
    trainer.train(4)
    assert trainer.epoch == 4 and not Path("checkpoint.pt").exists()

    for weight in snapshot["model"].values():
        weight.fill_(3)
    snapshot["loss_sum"] = 5.0

    def broadcast_object_list(message: list, src: int) -> None:
        assert message == [None] and src == 0
        message[0] = snapshot

    monkeypatch.setattr(dist, "broadcast_object_list", broadcast_object_list)
    Path("checkpoint.pt").write_text("its own node's, which is not read")
    trainer._load_snapshot()
    assert all((weight == 3).all() for weight in trainer.model.parameters())
    assert trainer.epoch == 3
    assert script != "ddp_torchrun.py" or trainer.loss_sum == 0  # the sum so far is rank 0's


@every_ddp_script
@pytest.mark.parametrize("rank", [0, 1])
def test_nobody_ends_while_rank_0_saves(make, monkeypatch, script, rank):
    """Or the first process that ends would end the others."""
    _, trainer = make(script)
    if script != "ddp_torchrun.py":
        assert make.calls[-3:] == ["train", "barrier", "destroy_process_group"]
        return
    trainer.rank, calls, replace = rank, [], Path.replace
    monkeypatch.setattr(Path, "replace", lambda *args: calls.append("replace") or replace(*args))
    monkeypatch.setattr(dist, "barrier", lambda: calls.append("barrier"))
    trainer._save_snapshot()
    assert calls == (["replace", "barrier"] if rank == 0 else ["barrier"])
