"""What is saved is what is loaded, by any script, whole or not at all. In the tests' process."""

import os
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.files import load, same_bytes
from helpers.jobs import SCRIPTS
from helpers.parts import CPU, every_ddp_script, every_script, inner

from common.seed import get_rng_state, set_seed


def draw() -> tuple:
    return random.random(), np.random.rand(), torch.rand(3).tolist()


@every_script
def test_what_is_saved_is_what_is_loaded(make, script):
    options = ("--model", "mlp", *(("--amp", "fp16") if script in SCRIPTS[3:] else ()))
    _, first = make(script, *options)
    if script in SCRIPTS[3:]:
        first.scaler.load_state_dict({**first.scaler.state_dict(), "scale": 8.0})
    first._run_epoch(0)
    first.epoch, first.samples_seen = 3, 32
    first.loss_sum.fill_(5)
    set_seed(7)
    first._save_snapshot()
    expected, before = draw(), load(Path("checkpoint.pt"))
    _, second = make(script, *options, "--resume", "--lr", 0.5)
    assert draw() == expected
    assert (second.epoch, second.samples_seen, second.loss_sum) == (3, 32, 5)
    assert second.optimizer.param_groups[0]["lr"] == 0.5  # the command line overrules the snapshot
    second._save_snapshot()
    after = load(Path("checkpoint.pt"))
    assert same_bytes(before, after) and before["scaler"] == after["scaler"]
    assert {*before["model"]} == {*inner(second).state_dict()}  # no prefix
    assert script not in SCRIPTS[3:] or after["scaler"]["_growth_tracker"] == 2


def with_schedule(module, monkeypatch, optimizer_class: type, **options: float) -> None:
    """What a user does at "load your schedule": two groups with rates of their own, and a schedule
    that computes the rate from where it began, as warm-up does."""
    load_train_objs = module.load_train_objs

    def edited(args, *rest):
        *objs, model, _, _ = load_train_objs(args, *rest)
        first, *others = model.parameters()
        groups = [{"params": [first], "lr": args.lr / 10}, {"params": others}]
        optimizer = optimizer_class(groups, lr=args.lr, **options)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        return *objs, model, optimizer, schedule

    monkeypatch.setattr(module, "load_train_objs", edited)


def rates(trainer) -> list[float]:
    return [group["lr"] for group in trainer.optimizer.param_groups]


@every_script
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_schedules_and_groups_go_on_unless_the_command_line_overrules_them(
    make, parse, monkeypatch, capsys, script, optimizer_class
):
    module, _ = parse(script)
    with_schedule(module, monkeypatch, optimizer_class)
    train, options = module.Trainer.train, (script, "--model", "mlp", "--lr", 0.4)
    _, trainer = make(*options)
    train(trainer, 2)
    expected = [0.4 / 10 / 4, 0.4 / 4]
    assert rates(trainer) == pytest.approx(expected)
    keys = {*trainer.optimizer.param_groups[0]}
    for arguments in (options, options[:1]):  # the same command line again, and none
        _, trainer = make(*arguments, "--resume")
        assert (trainer.epoch, rates(trainer)) == (2, pytest.approx(expected))
        assert {
            *trainer.optimizer.param_groups[0]
        } == keys and "overrules" not in capsys.readouterr().out
    trainer._save_snapshot()  # by a run that has no --lr itself
    trainer.schedule.step()
    assert rates(trainer) == pytest.approx([rate / 2 for rate in expected])
    _, trainer = make(script, "--resume", "--lr", 0.8, "--momentum", 0.5)
    text = capsys.readouterr().out
    assert "lr: 0.8 from the command line, not the snapshot's 0.4\n" in text
    assert rates(trainer) == pytest.approx([0.08 / 4, 0.8 / 4])  # as with this rate from the start
    assert {*trainer.optimizer.param_groups[0]} == keys  # AdamW has no momentum
    trainer.schedule.step()
    assert rates(trainer) == pytest.approx([0.08 / 8, 0.8 / 8])
    trainer._save_snapshot()
    _, trainer = make(script, "--resume", "--lr", 0.8)  # again: it is the snapshot's now
    assert rates(trainer) == pytest.approx([0.08 / 8, 0.8 / 8])
    assert "lr: " not in capsys.readouterr().out


@every_script
def test_a_schedule_goes_on_where_another_option_is_overruled(make, parse, monkeypatch, script):
    """It is restored, not stepped anew: no optimizer has epochs, and AdamW has no momentum."""
    module, _ = parse(script)
    with_schedule(module, monkeypatch, torch.optim.AdamW)
    _, trainer = make(script, "--model", "mlp")
    trainer.epoch = 2
    trainer._save_snapshot()
    steps, step = [], torch.optim.lr_scheduler.LambdaLR.step
    monkeypatch.setattr(
        torch.optim.lr_scheduler.LambdaLR, "step", lambda self: steps.append(1) or step(self)
    )
    make(script, "--model", "mlp")
    as_ever = len(steps)  # torch's own, in the constructor
    make(script, 9, "--model", "mlp", "--momentum", 0.5, "--resume")
    assert len(steps) == 2 * as_ever


@every_script
def test_an_optimizer_that_does_not_fit_is_refused(make, parse, monkeypatch, script):
    make(script, "--model", "mlp")[1]._save_snapshot()
    module, _ = parse(script)
    with_schedule(module, monkeypatch, torch.optim.SGD)
    refusal = r"^error: cannot resume from checkpoint.pt \(ValueError: .* groups\): name another"
    with pytest.raises(SystemExit, match=refusal):
        make(script, "--resume")


@every_script
def test_a_snapshot_is_written_whole_or_not_at_all(make, monkeypatch, script):
    _, trainer = make(script)
    calls, fsync, replace = [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda *args: calls.append("fsync") or fsync(*args))
    monkeypatch.setattr(Path, "replace", lambda *args: calls.append("replace") or replace(*args))
    trainer._save_snapshot()
    assert calls == ["fsync", "replace"]
    before, save = Path("checkpoint.pt").read_bytes(), torch.save

    def torn(what, file, **options):
        if not isinstance(what, dict):  # pickled on its way to another rank
            return save(what, file, **options)
        file.write(b"half")
        raise OSError("the disk is full")

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(SystemExit, match=r"cannot save checkpoint.pt \(the disk is full\)"):
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


@every_script
def test_snapshots_that_do_not_fit_are_refused(make, script):
    make(script, "--model", "mlp")[1]._save_snapshot()
    snapshot, whole = load(Path("checkpoint.pt")), Path("checkpoint.pt").read_bytes()
    del snapshot["model"]["layers.1.weight"]
    torch.save(snapshot, "edited.pt")
    torch.save({"MODEL_STATE": {}, "EPOCHS_RUN": 3}, "tutorial.pt")
    Path("torn.pt").write_bytes(whole[: len(whole) // 2])
    Path("text.pt").write_text("hello")
    for name, model, seed, reason in (
        ("checkpoint.pt", "convnet", 42, r"ValueError: made with --model mlp, and this .* convnet"),
        ("checkpoint.pt", "mlp", 7, "ValueError: made with --seed 42, and this run has 7"),
        ("edited.pt", "mlp", 42, "RuntimeError: Error.* in loading state_dict"),
        ("tutorial.pt", "mlp", 42, "KeyError: 'settings'"),
        ("torn.pt", "mlp", 42, r"\w+"),
        ("text.pt", "mlp", 42, r"\w+"),
    ):
        before = Path(name).read_bytes()
        options = ("--model", model, "--seed", seed, "--snapshot-path", name)
        with pytest.raises(
            SystemExit, match=f"^error: cannot resume from {name} .{reason}.*: name"
        ):
            make(script, *options, "--resume")
        assert Path(name).read_bytes() == before


@every_ddp_script
def test_rank_1_leaves_the_file_to_rank_0(make, monkeypatch, script):
    _, trainer = make(script, "--model", "mlp")
    trainer.epoch = 3
    trainer.loss_sum.fill_(5)
    trainer._save_snapshot()
    snapshot = load(Path("checkpoint.pt"))
    Path("checkpoint.pt").unlink()

    trainer.rank = trainer.args.local_rank = 1
    monkeypatch.setattr(dist, "barrier", lambda: None)  # it waits for rank 0
    trainer._save_snapshot()
    assert not Path("checkpoint.pt").exists()

    set_seed(7)
    snapshot["rng_states"].append(get_rng_state(CPU))
    expected = draw()
    for weight in snapshot["model"].values():
        weight.fill_(3)
    trainer.epoch = 0
    trainer._load_snapshot(snapshot)
    assert draw() == expected  # of rank 1's own generators
    assert all((weight == 3).all() for weight in trainer.model.parameters())
    assert (trainer.epoch, trainer.loss_sum) == (3, 0)  # the sum so far is rank 0's


@every_ddp_script
@pytest.mark.parametrize("rank", [0, 1])
def test_nobody_goes_on_while_rank_0_saves(make, monkeypatch, script, rank):
    """Or the first process that ends would end the others, or a slow disk an all-reduce."""
    _, trainer = make(script)
    assert make.calls[-3:] == ["train", "destroy_process_group", 0]
    trainer.rank, calls, replace = rank, [], Path.replace
    monkeypatch.setattr(Path, "replace", lambda *args: calls.append("replace") or replace(*args))
    monkeypatch.setattr(dist, "barrier", lambda: calls.append("barrier"))
    trainer._save_snapshot()
    assert calls == (["replace", "barrier"] if rank == 0 else ["barrier"])


def test_a_restart_goes_on_from_its_own_run_alone(make, monkeypatch):
    epochs, script = [], "ddp_torchrun.py"
    for report in ("run1/attempt_0/0", "run2/attempt_0/0", "run1/attempt_1/0"):
        Path(report).mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", os.path.abspath(f"{report}/error.json"))
        _, trainer = make(script, "--model", "mlp")
        epochs.append(trainer.epoch)
        if report == "run1/attempt_0/0":
            trainer.epoch = 2
            trainer._save_snapshot()
    assert epochs == [0, 0, 2]


def test_after_a_restart_the_furthest_snapshot_counts(make, monkeypatch):
    """This run's, on whichever node it lies, before the one that --resume asks rank 0 for."""
    module, trainer = make("ddp_torchrun.py", "--model", "mlp")
    trainer.epoch = 7
    trainer._save_snapshot()
    args, asked = trainer.args, []
    monkeypatch.setattr(dist, "broadcast_object_list", lambda box, src: asked.append((src, box)))
    monkeypatch.setattr(module, "names_of_run", lambda args: ["this run"])
    args.world_size = 3
    for resume, own in ((False, (False, -1, 0)), (True, (False, 7, 0))):
        for others in ([(True, 1, 320), (True, 1, 64)], [(False, -1, 0)] * 2):

            def all_gather_object(objects, mine, own=own, others=others):
                assert mine == own
                objects[:] = [mine, *others]

            monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
            args.resume = resume
            module.find_snapshot(args)
    assert [src for src, _ in asked] == [1, 0, 1, 0]
    assert [box[0] is None for _, box in asked] == [True, True, False, False]


def test_a_node_that_joins_later_is_of_the_run(parse, monkeypatch):
    """Its torchrun has a folder of its own; one of the others' is in the snapshot's settings."""
    module, args = parse("ddp_torchrun.py")
    report = "/tmp/torchelastic_a/7_b/attempt_2/0/error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", report)

    def all_gather_object(objects, own):
        objects[:] = [own, "7_c"]

    monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
    args.run_names = module.names_of_run(args)
    assert args.run_names == ["7_b", "7_c"]
    for saved, same in ((["7_c"], True), (["7_a"], False), ([], False)):
        assert module.is_of_this_run({"settings": {"run_names": saved}}, args) == same
    assert not module.is_of_this_run({"settings": {}}, args)  # of another script


@every_ddp_script
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_says_first_what_does_not_fit(make, monkeypatch, script, rank):
    _, trainer = make(script, "--model", "mlp")
    trainer._save_snapshot()
    snapshot, calls = load(Path("checkpoint.pt")), []
    monkeypatch.setattr(dist, "barrier", lambda: calls.append("barrier"))
    trainer.rank = rank
    trainer._load_snapshot(snapshot)
    assert calls == ["barrier"]
    del snapshot["model"]
    with pytest.raises(SystemExit, match="cannot resume"):
        trainer._load_snapshot(snapshot)
    assert calls == ["barrier"] * (1 + rank)


class Harmful:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("harm",)


@every_script
def test_a_snapshot_cannot_run_code(make, parse, monkeypatch, script):
    torch.save(Harmful(), "checkpoint.pt")
    with pytest.raises(SystemExit, match="cannot resume from checkpoint"):
        make(script, "--resume")
    if script == "ddp_spawn.py":  # rank 0 opens it once more
        monkeypatch.setattr(parse(script)[0], "open_snapshot", lambda args: {})
        with pytest.raises(Exception, match=r"(?i)weights.only"):
            make(script, "--resume")
    if script in SCRIPTS[3:]:  # it may be this run's, of before a restart
        make(script)
    assert not Path("harm").exists()


@every_script
def test_a_snapshot_of_another_script_has_not_every_setting(make, script):
    """`--accumulate` and `--amp` are the last two's alone, and so is the gradient scaler."""
    make("single_gpu.py", "--model", "mlp", "--lr", 0.5)[1]._save_snapshot()
    options = ("--accumulate", 2, "--amp", "fp16") if script in SCRIPTS[3:] else ()
    _, trainer = make(script, "--resume", *options)
    assert trainer.args.lr == 0.5
    assert script not in SCRIPTS[3:] or trainer.args.accumulate == 2
    if script in SCRIPTS[3:]:
        trainer._save_snapshot()
        assert make(script, "--resume")[1].args.amp == "fp16"
