"""Parts of the scripts, called in the tests' own process: cheap, and the same for every rung.

One process is the whole group here, on a CPU. A test about another rank pretends to be one.
"""

import atexit
import importlib
import json
import os
import random
import re
import runpy
import signal
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import ROOT, SCRIPTS, load, same_bytes

from common.data import DataError, make_digits
from common.seed import get_rng_state, set_seed

CPU = torch.device("cpu")
every_script = pytest.mark.parametrize("script", SCRIPTS)
every_ddp_script = pytest.mark.parametrize("script", SCRIPTS[2:])
every_torchrun_script = pytest.mark.parametrize("script", SCRIPTS[3:])


def inner(trainer: object) -> torch.nn.Module:
    return getattr(trainer.model, "module", trainer.model)


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
def test_the_optimizer_has_the_parameters_that_are_on_the_device(parse, monkeypatch, script):
    """Where torch makes new ones for the device, as for "meta", the order matters."""
    module, args = parse(script)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    objs = (make_digits(10, 0),) if script == "ddp_spawn.py" else ()
    *_, model, optimizer, _ = module.load_train_objs(args, *objs, torch.device("meta"))
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert [*map(id, trained)] == [*map(id, model.parameters())]
    assert {parameter.device.type for parameter in trained} == {"meta"}


@every_script
@pytest.mark.parametrize("type", ["cuda", "mps", "cpu"])
def test_copies_are_waited_for_unless_memory_is_pinned(make, parse, monkeypatch, script, type):
    module, _ = parse(script)
    loader = module.prepare_dataloader([0], [[0]], torch.device(type), 0)
    assert loader.pin_memory == (type == "cuda")
    _, trainer = make(script)
    trainer.pinned, seen, to = type == "cuda", set(), torch.Tensor.to

    def traced(tensor, *args, **kwargs):
        seen.add(kwargs.get("non_blocking"))
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", traced)
    trainer._run_epoch(0)
    trainer._evaluate()
    assert (seen - {None}) == {type == "cuda"}


@every_script
def test_batchnorm_of_single_samples_is_refused(make, script):
    make(script, "--model", "resnet18", "--batch-size", 2)
    with pytest.raises(DataError, match="BatchNorm needs 2 samples"):
        make(script, "--model", "resnet18", "--batch-size", 1)
    if script in SCRIPTS[3:]:  # 13 or 14 samples a step, in eight parts
        with pytest.raises(DataError, match="BatchNorm needs 2 samples"):
            make(script, "--model", "resnet18", "--batch-size", 2, "--accumulate", 8)


@every_script
def test_workers_are_forked_on_linux_and_made_anew_in_each_epoch(parse, script):
    module, _ = parse(script)
    loader = module.prepare_dataloader([0], [[0]], CPU, 2)
    fork = sys.platform == "linux"
    assert not fork or loader.multiprocessing_context.get_start_method() == "fork"
    assert loader.num_workers == 2 and not loader.persistent_workers  # or their seed would stay


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
def test_each_epoch_has_its_order_and_may_begin_in_the_middle(make, capsys, script):
    _, trainer = make(script, "--model", "mlp", "--batch-size", 8, "--seed", 7)
    sampler, seeds = trainer.train_data.sampler, set()
    for epoch in (3, 4):
        trainer.samples_seen = 16
        trainer._run_epoch(epoch)
        assert (sampler.epoch, sampler.start, trainer.samples_seen) == (epoch, 16, 40)
        assert f"Epoch {epoch} | Batchsize: 8 | Steps: 3\n" in capsys.readouterr().out
        seeds.add(trainer.train_data.generator.initial_seed())  # of the loader's workers
    assert sampler.seed == 7 and len(seeds) == 2


@every_script
def test_a_seed_gives_the_weights(make, script):
    weights = []
    for seed in (7, 7, 8):
        torch.seed()
        trainer = make(script, "--model", "mlp", "--seed", seed)[1]
        weights.append(next(trainer.model.parameters()).detach())
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])


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


@every_script
def test_dropout_in_training_and_all_units_in_evaluation(make, script):
    _, trainer = make(script)
    modes = []
    inner(trainer).register_forward_pre_hook(lambda module, _: modes.append(module.training))
    trainer._run_epoch(0)
    trainer._evaluate()
    trainer.samples_seen = 0
    trainer._run_epoch(1)
    assert modes == [True, True, False, True, True]


@every_script
def test_loading_data_draws_nothing_from_the_models_numbers(make, script):
    _, trainer = make(script)
    before = torch.get_rng_state()
    assert len(list(trainer.train_data)) == 2 and len(list(trainer.test_data)) == 1
    assert torch.equal(torch.get_rng_state(), before)


# --- more than one process ----------------------------------------------------------------------


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
def test_losses_and_accuracy_are_those_of_all_ranks(make, monkeypatch, capsys, script):
    _, trainer = make(script, "--model", "mlp", "--batch-size", 20, "--log-interval", 2)

    def all_reduce(tensor, op=None):
        if tensor.is_floating_point():
            tensor.fill_(5)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    trainer.train(1)
    text = capsys.readouterr().out
    assert "Epoch 0 | Step 2 | Loss: 0.250000\n" in text
    assert "Train loss: 0.1250 | Test loss: 0.5000 | Accuracy: 5/10 (50.00%)" in text
    assert load(Path("checkpoint.pt"))["loss_sum"] == 5


@every_ddp_script
def test_all_ranks_are_evaluated_with_the_buffers_of_rank_0(make, monkeypatch, script):
    _, trainer = make(script)
    inner(trainer).register_buffer("statistics", torch.zeros(2))
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src: tensor.fill_(7 + src))
    trainer._evaluate()
    assert inner(trainer).statistics.tolist() == [7, 7]


@every_ddp_script
def test_ddp_has_its_order_of_summation_before_training(make, script):
    _, trainer = make(script)
    assert all(parameter.grad is not None for parameter in trainer.model.parameters())


@every_ddp_script
def test_all_stop_when_one_must(make, monkeypatch, script):
    module, trainer = make(script, "--batch-size", 2)
    assert trainer._stop_agreed(10) == 0
    with monkeypatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda tensor, op: tensor.fill_(2))
        assert (trainer._stop_agreed(3), trainer._stop_agreed(10)) == (0, 2)
    monkeypatch.setattr(mp, "parent_process", lambda: SimpleNamespace(is_alive=lambda: False))
    monkeypatch.setattr(module, "LAUNCHER", -1, raising=False)
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    assert trainer._stop_agreed(10) == signal.SIGTERM  # the launcher is dead


@every_ddp_script
def test_slow_steps_are_asked_after_each(make, monkeypatch, script):
    """Ten of them may take longer than torchrun, Slurm or a parent waits for a stop."""
    _, trainer = make(script, "--batch-size", 2)
    asked, all_reduce = [], dist.all_reduce
    counted = lambda *args, **kwargs: asked.append(1) or all_reduce(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(dist, "all_reduce", counted)
    for seconds, every in ((2, 1), (0, 10), (11, 1), (2, 1), (0, 10), (9, 10)):
        trainer.asked -= seconds
        assert trainer._stop_agreed(10) == 0 and trainer.ask_every == every
    assert len(asked) == 6
    trainer._stop_agreed(11)
    assert len(asked) == 6


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


@every_ddp_script
def test_whoever_waits_says_for_whom(make, monkeypatch, capsys, script):
    module, trainer = make(script)
    timers = []

    class Timer:
        def __init__(self, seconds, function, args):
            timers.append(self)
            self.seconds, self.call, self.cancelled = seconds, lambda: function(*args), False

        def start(self):
            assert not self.cancelled

        def cancel(self):
            self.cancelled = True

    monkeypatch.setattr(module.threading, "Timer", Timer)
    monkeypatch.setattr(dist, "barrier", lambda: timers[-1].call())
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    trainer.rank = trainer.args.local_rank = 1
    capsys.readouterr()
    trainer._save_snapshot()
    expected = "[rank 1] still waiting for rank 0, which saves the snapshot\n"
    assert capsys.readouterr().out == expected
    if script != "ddp_spawn.py":  # its parent prepares the data
        monkeypatch.setattr(module, "load_dataset", lambda *_: (make_digits(10, 0),) * 2)
        module.load_train_objs(trainer.args, CPU)
        expected = "[rank 1] still waiting for the first process of each node, which prepares "
        assert capsys.readouterr().out.startswith(expected)
        trainer.args.local_rank = 0
        module.load_train_objs(trainer.args, CPU)
        expected = "[rank 1] still waiting for the other nodes, which prepare the data\n"
        assert capsys.readouterr().out == expected
    assert all(timer.seconds == 10 and timer.cancelled for timer in timers)


@pytest.mark.parametrize("script", ["ddp_spawn.py", "multinode.py"])
def test_a_parent_passes_on_signals_and_a_status_and_kills_who_is_left(parse, monkeypatch, script):
    events, data = [], (make_digits(10, 0), make_digits(10, 1))
    child = SimpleNamespace(kill=lambda: events.append("kill"))

    def join(timeout, grace_period):
        raise mp.ProcessExitedException("rank 1", error_index=1, error_pid=1, exit_code=143)

    module, args = parse(script)
    context = SimpleNamespace(processes=[child, child], join=join)
    monkeypatch.setattr(mp, "spawn", lambda *_, join: events.append("spawn") or context)
    monkeypatch.setattr(signal, "signal", lambda *given: events.append(given))
    monkeypatch.setattr(module, "load_dataset", lambda *_: data)
    with pytest.raises(SystemExit, match="143"):
        module.spawn(args, torch.zeros((), dtype=torch.int32))
    start = events.index("spawn")
    assert events[start - 1] == (signal.SIGINT, signal.SIG_IGN)  # children inherit it
    assert [number for number, _ in events[start + 1 : -2]] == [signal.SIGINT, signal.SIGTERM]
    assert events[-2:] == ["kill", "kill"]


def test_a_parent_told_to_stop_while_it_loads_starts_nobody(parse, monkeypatch):
    module, args = parse("ddp_spawn.py")
    handlers, data = {}, (make_digits(10, 0), make_digits(10, 1))

    def load_dataset(*_):
        handlers[signal.SIGTERM](signal.SIGTERM, None)
        return data

    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(module, "load_dataset", load_dataset)
    monkeypatch.setattr(mp, "spawn", lambda *_, **__: pytest.fail("processes are started"))
    with pytest.raises(SystemExit, match="143"):
        module.spawn(args, torch.zeros((), dtype=torch.int32))


@every_ddp_script
def test_a_process_leaves_before_python_ends_but_after_what_is_registered(
    parse, monkeypatch, script
):
    module, _ = parse(script)
    calls = []
    monkeypatch.setattr(threading, "_shutdown", lambda: calls.append("threads"))
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: calls.append("registered"))
    monkeypatch.setattr(os, "_exit", calls.append)
    module.leave(143)
    assert calls == ["threads", "registered", 143]


@every_ddp_script
def test_rank_1_is_quiet(make, monkeypatch, capsys, script):
    module, _ = make(script)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    capsys.readouterr()
    module.log("of the job")
    module.log("of every rank", every_rank=True)
    assert capsys.readouterr().out == "of every rank\n"


@every_ddp_script
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_process_gets_its_device_its_threads_and_its_interface(parse, monkeypatch, script, hosts):
    """The last of two processes a host. A host has four devices and eight cores."""
    module, args = parse(script, "--timeout", 9)
    args.device, args.local_rank, args.local_world_size = "cuda", 1, 2
    args.rank, args.world_size = 2 * hosts - 1, 2 * hosts
    given, environment, indices, threads = {}, {}, [], []
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", indices.append)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **kwargs: given.update(kwargs))
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(module, "join", lambda args: None, raising=False)
    monkeypatch.setattr(module, "loopback_error", lambda args: "", raising=False)
    if script == "ddp_spawn.py" and hosts == 2:
        return  # it knows one node
    args.store = "store"
    device = module.ddp_setup(args)
    assert device == given["device_id"] == torch.device("cuda", 1) and indices == [1]
    assert threads == [4] and given["timeout"].seconds == 9
    assert (given["rank"], given["world_size"]) == (2 * hosts - 1, 2 * hosts)
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform) if hosts == 1 else None
    assert environment.get("GLOO_SOCKET_IFNAME") == loopback
    assert environment.get("NCCL_SOCKET_IFNAME") == loopback


@every_ddp_script
def test_events_are_written_by_rank_0_alone(make, monkeypatch, script):
    writer = SimpleNamespace(SummaryWriter=lambda *args, **kwargs: "a writer")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", writer)
    assert make(script, "--log-dir", "runs")[1].writer == "a writer"
    monkeypatch.setattr(dist, "get_rank", lambda *_: 1)
    assert make(script, "--log-dir", "runs")[1].writer is None


class Aside(torch.nn.Module):
    """An auxiliary head that is used in training alone, frozen weights, and a pair of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.aside = (torch.nn.Linear(4, 4) for _ in range(3))
        self.body.bias.requires_grad_(False)

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.body(one * other)
        outputs = {"logits": self.head(hidden)}
        if self.training:
            outputs["aside"] = self.aside(hidden)
        return outputs


@every_ddp_script
def test_any_model_can_settle_its_buckets(make, script):
    _, trainer = make(script)
    model = Aside()
    trainer.model = torch.nn.parallel.DistributedDataParallel(model)
    trainer._settle_buckets()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == 5 and all((parameter.grad == 1).all() for parameter in trained)
    for _ in range(2):  # DDP complains in the second pass of what the first has left out
        outputs = trainer.model(torch.ones(2, 4), torch.ones(2, 4))
        assert {*outputs} == {"logits", "aside"}
        (outputs["logits"].sum() + outputs["aside"].sum()).backward()


@every_ddp_script
def test_deterministic_kernels_come_before_the_process_group(make, monkeypatch, parse, script):
    module, _ = parse(script)
    calls, init = [], dist.init_process_group
    monkeypatch.setattr(module, "use_deterministic_kernels", lambda: calls.append("kernels"))
    monkeypatch.setattr(
        dist, "init_process_group", lambda *args, **kw: calls.append("group") or init(*args, **kw)
    )
    make(script, "--deterministic")
    make(script)
    assert calls == ["kernels", "group", "group"]


@pytest.mark.parametrize("script", SCRIPTS[:2])
def test_deterministic_kernels_are_asked_for(make, monkeypatch, parse, script):
    module, _ = parse(script)
    calls = []
    monkeypatch.setattr(module, "use_deterministic_kernels", lambda: calls.append("kernels"))
    make(script, "--deterministic")
    make(script)
    assert calls == ["kernels"]


@pytest.mark.parametrize("script", SCRIPTS[:2])
def test_deterministic_kernels_are_refused_on_mps(parse, monkeypatch, capsys, script):
    module, _ = parse(script)
    monkeypatch.setattr(module, "device_names", lambda: ["mps", "cpu"])
    monkeypatch.setattr(sys, "argv", [script, "--deterministic"])
    with pytest.raises(SystemExit, match="2"):
        module.parse_args()
    assert "--deterministic cannot work on mps" in capsys.readouterr().err


@every_ddp_script
@pytest.mark.parametrize("built", [True, False])
def test_auto_takes_gloo_where_nccl_is_not_built(parse, monkeypatch, script, built):
    """As on Windows with an NVIDIA GPU."""
    module, _ = parse(script)
    available = dist.is_backend_available
    monkeypatch.setattr(module, "device_names", lambda: ["cuda", "cpu"])
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(
        dist, "is_backend_available", lambda name: built if name == "nccl" else available(name)
    )
    monkeypatch.setattr(sys, "argv", [script])
    assert module.parse_args().backend == ("nccl" if built else "gloo")


def test_data_parallel_has_the_generators_of_all_its_devices(make, monkeypatch):
    module, _ = make("data_parallel.py")
    seeded, states = [], []
    monkeypatch.setattr(torch.nn.DataParallel, "__init__", two_devices)
    monkeypatch.setattr(module, "set_seed", lambda *_, devices=(): seeded.append(devices))
    monkeypatch.setattr(module, "get_rng_state", lambda *devices: states.append(devices))
    monkeypatch.setattr(module, "set_rng_state", lambda _, *devices: states.append(devices))
    _, trainer = make("data_parallel.py")
    trainer._save_snapshot()
    make("data_parallel.py", "--resume")
    both = (torch.device("cpu", 0), torch.device("cpu", 1))
    assert seeded[-1] == [*both] and states == [both, both]


def two_devices(self: torch.nn.DataParallel, module: torch.nn.Module) -> None:
    torch.nn.Module.__init__(self)
    self.module, self.device_ids = module, [0, 1]


# --- torchrun, precision, compilation -----------------------------------------------------------


@every_torchrun_script
def test_the_first_process_of_a_host_prepares_the_data(parse, monkeypatch, script):
    calls, data = [], (make_digits(10, 0), make_digits(10, 1))
    module, args = parse(script)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "barrier", lambda: calls.append("barrier"))
    monkeypatch.setattr(module, "load_dataset", lambda *_: calls.append("data") or data)
    for args.local_rank, expected in ((0, ["data", "barrier"]), (1, ["barrier", "data"])):
        calls.clear()
        module.load_train_objs(args, CPU)
        assert calls == expected


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


@every_torchrun_script
def test_amp_in_training_and_in_evaluation(make, script):
    _, trainer = make(script, "--amp", "bf16", "--model", "mlp")
    types = []
    inner(trainer).register_forward_hook(lambda _, __, output: types.append(output.dtype))
    trainer._run_epoch(0)
    trainer._evaluate()
    assert types == [torch.bfloat16] * 3
    assert {value.dtype for value in inner(trainer).state_dict().values()} == {torch.float32}


@every_torchrun_script
def test_compile_leaves_the_names_of_the_weights(make, monkeypatch, script):
    monkeypatch.setattr("shutil.which", lambda name: name)  # nothing is compiled before it runs
    _, trainer = make(script, "--compile", "--model", "mlp")
    assert inner(trainer)._compiled_call_impl is not None
    assert next(iter(inner(trainer).state_dict())).startswith("layers.")


@every_torchrun_script
@pytest.mark.parametrize("share", [0, 1, 3, 7, 8])
def test_every_rank_takes_as_many_micro_batches(make, script, share):
    """SyncBatchNorm and no_sync need it, also where an epoch's shares are uneven."""
    _, trainer = make(script, "--batch-size", 2, "--accumulate", 4, "--model", "mlp")
    sizes = []
    inner(trainer).register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    source, targets = make_digits(10, 0).__getitems__(range(share))
    trainer._run_batch(source, targets, 8)
    assert len(sizes) == 4 and sum(sizes) == share and max(sizes) - min(sizes) <= 1


NCCL = (
    "NCCL error in: ProcessGroupNCCL.cpp:2, {}\n{}\nLast error:\n{}\nException raised from x:\n#0"
)
SAID = [  # by whom, what, and whether it is a lost peer's
    (RuntimeError, "[a/gloo/pair.cc:1] Connection closed by peer [10.0.0.2]:1", True),
    (RuntimeError, "[a/gloo/pair.cc:1] Read error [10.0.0.2]:1: Connection reset by peer", True),
    (RuntimeError, "[a/gloo/buf.cc:1] Timed out waiting 3000ms for recv operation", True),
    (RuntimeError, "[a/gloo/pair.cc:1] writev [10.0.0.2]:1: Broken pipe", True),
    (RuntimeError, "[a/gloo/uv.cc:1] Connection is broken by pair closure", True),
    (RuntimeError, "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)", True),
    (RuntimeError, "[a/gloo/device.cc:1] Unable to find address for: eth9", False),
    (RuntimeError, "[enforce fail at gloo/pair.cc:4] op.preamble.length <= op.nbytes", False),
    (dist.DistStoreError, "wait timeout after 600000ms, keys: /default_pg/0", True),
    (dist.DistNetworkError, "Failed to recv, got 0 bytes. Connection was likely closed", True),
    (dist.DistBackendError, NCCL.format("remote process exited or there was a network error",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process "
        "exiting prematurely.", "socket recv failed"), True),
    (dist.DistBackendError, "[1] is setting up NCCL communicator and retrieving ncclUniqueId from "
        "[0] via c10d key-value store by key '0', but store->get('0') got error: Broken", True),
    (dist.DistBackendError, NCCL.format("invalid usage", "ncclInvalidUsage: ...",
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 4b000"), False),
    (dist.DistBackendError, NCCL.format("unhandled system error", "ncclSystemError: ...",
        "Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)"), False),
    (RuntimeError, "NCCL error: remote process exited or there was a network error\n"
        "NCCL Last Error: connection closed", True),
    (RuntimeError, "NCCL error: invalid usage\nNCCL Last Error: Duplicate GPU detected", False),
    (RuntimeError, "DataLoader timed out after 5 seconds", False),
    (RuntimeError, "Timed out waiting for the tokenizer's server", False),
    (RuntimeError, "Broken pipe while fetching from the store", False),
    (RuntimeError, "mat1 and mat2 shapes cannot be multiplied", False),
]  # fmt: skip


@every_torchrun_script
@pytest.mark.parametrize(("kind", "said", "lost"), SAID)
def test_a_lost_peer_is_told_from_a_fault_of_ones_own(parse, script, kind, said, lost):
    module, _ = parse(script)
    assert module.is_lost_peer(kind(said)) == lost
    line = module.one_line(kind(said))
    assert "\n" not in line and "#0" not in line
    assert "Duplicate GPU" not in said or "Duplicate GPU detected" in line  # not in the first line


@every_torchrun_script
def test_what_an_error_says(parse, monkeypatch, tmp_path, script):
    module, args = parse(script)
    report = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    monkeypatch.setattr("faulthandler.enable", lambda **kwargs: None)

    def run(error: Exception) -> None:
        def main(args, stop):
            raise error

        monkeypatch.setattr(module, "main", main)
        module.run(args, torch.zeros(()))

    with pytest.raises(ArithmeticError):
        run(ArithmeticError("the test's own error"))
    if script == "ddp_torchrun.py":
        assert "the test's own error" in json.loads(report.read_text())["message"]["message"]
        report.unlink()
    with pytest.raises(SystemExit, match=r"error: rank 0 has lost the others, .*by peer"):
        run(RuntimeError("[/gloo/transport] Connection closed by peer\nframe #0"))
    with pytest.raises(SystemExit, match="error: no data"):
        run(module.DataError("no data"))
    assert not report.exists()  # or torchrun would show it as the cause
    with pytest.raises(RuntimeError, match="shape mismatch"):
        run(RuntimeError("shape mismatch"))


# --- multinode.py -------------------------------------------------------------------------------


def test_a_hosts_number_gives_the_ranks(parse, monkeypatch):
    options = ("--init-method", "tcp://a:1000", "--nnodes", 2, "--node-rank", 1)
    module, args = parse("multinode.py", *options, "--nproc-per-node", 4)
    assert (args.rank, args.world_size, args.nproc_per_node) == (4, 8, 4)
    started = []
    monkeypatch.setattr(module, "run", lambda args, stop: started.append(args))
    module.run_rank(2, args, torch.zeros(()))
    assert started[0].rank == 6


def test_warnings_from_c_plus_plus_are_there_for_who_asks(monkeypatch):
    for given, used in (("WARNING", "WARNING"), ("", "ERROR")):
        monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", given)
        if not given:
            monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
        runpy.run_path(str(ROOT / "multinode.py"))
        assert os.environ["TORCH_CPP_LOG_LEVEL"] == used


def test_who_is_missing_double_or_of_another_world(parse, monkeypatch, tmp_path):
    def join(rank: int, world_size: int) -> None:
        options = ("--init-method", f"file://{tmp_path}/store", "--timeout", 1)
        module, args = parse("multinode.py", *options, "--rank", rank, "--world-size", world_size)
        module.join(args)

    store = dist.FileStore(str(tmp_path / "store"), 3)
    with pytest.raises(ValueError, match=r"missing after 1 s: rank 0, rank 2$"):
        join(1, 3)
    host = store.get("host of rank 1")
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    with pytest.raises(ValueError, match="there is a rank 1 already"):
        join(1, 3)
    assert store.get("host of rank 1") == host  # the true one's
    with pytest.raises(ValueError, match="another process has --world-size 3"):
        join(0, 2)
    with pytest.raises(ValueError, match=r"missing after 1 s: rank 2$"):  # corrected, it may join
        join(0, 3)


class Asleep(Exception):
    pass


def asleep(seconds: float) -> None:
    raise Asleep


def test_processes_of_one_host_take_different_devices(parse, monkeypatch, tmp_path):
    """Started by hand, one a call: they learn at the store who shares their host."""
    options = ("--init-method", f"file://{tmp_path}/store", "--world-size", 3)
    for rank, host in ((0, "a"), (1, "b"), (2, "a")):
        module, args = parse("multinode.py", *options, "--rank", rank)
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        monkeypatch.setattr(module, "loopback_error", lambda args: "")
        monkeypatch.setattr(module.time, "sleep", asleep)
        if rank < 2:  # they wait for the others
            with pytest.raises(Asleep):
                module.join(args)
        else:
            module.join(args)
            assert (args.local_rank, args.local_world_size) == (1, 2)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    args.device, args.backend = "cuda", "nccl"
    assert module.choose_device(args) == torch.device("cuda", 1)
    args.local_rank, args.local_world_size = 2, 3
    with pytest.raises(ValueError, match="3 processes on this node are more than 2 devices"):
        module.choose_device(args)
    args.backend = "gloo"
    assert module.choose_device(args) == torch.device("cuda", 0)
    # CUDA_VISIBLE_DEVICES may show each process a device of its own.
    args.backend = "nccl"
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert module.choose_device(args) == torch.device("cuda", 0)
    args.nnodes = 2  # all processes of a node see the same devices then
    with pytest.raises(ValueError, match="3 processes on this node are more than 1 devices"):
        module.choose_device(args)


def test_a_host_may_play_several_nodes(parse, monkeypatch, tmp_path):
    """With --nnodes, and CUDA_VISIBLE_DEVICES of its own for each."""
    monkeypatch.setattr("time.sleep", asleep)
    for rank in (0, 1):
        options = ("--init-method", f"file://{tmp_path}/store", "--nnodes", 2, "--node-rank", rank)
        module, args = parse("multinode.py", *options, "--nproc-per-node", 1)
        monkeypatch.setattr(module, "loopback_error", lambda args: "")
        try:
            module.join(args)
        except Asleep:
            assert rank == 0  # it waits for the other one
    assert (args.rank, args.local_rank, args.local_world_size) == (1, 0, 1)


@pytest.mark.parametrize("platform", ["linux", "win32"])
def test_no_libuv_on_windows(parse, monkeypatch, platform):
    options = ("--init-method", "tcp://127.0.0.1:9", "--world-size", 2, "--rank", 0)
    module, args = parse("multinode.py", *options)
    asked = []

    def store(*_, use_libuv, **__):
        asked.append(use_libuv)
        raise Asleep

    monkeypatch.setattr(dist, "TCPStore", store)
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(Asleep):
        module.join(args)
    assert asked == [platform != "win32"]


@every_torchrun_script
def test_a_name_that_resolves_to_loopback_is_reported(parse, monkeypatch, script):
    module, args = parse(script)
    name = socket.gethostname()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for address, complaint in (("127.0.1.1", True), ("10.0.0.1", False)):
        monkeypatch.setattr(socket, "gethostbyname", lambda _, address=address: address)
        found = module.loopback_error(args)
        assert found.startswith(f"on node {name} gloo takes {address} for its address") == complaint

    def unknown(_):
        raise OSError

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert "gloo takes 127.0.0.1 for its address" in module.loopback_error(args)
    args.backend = "nccl"
    assert module.loopback_error(args) == ""
    args.backend = "gloo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert module.loopback_error(args) == ""


def test_torchrun_on_several_nodes_looks_at_their_names(parse, monkeypatch):
    module, args = parse("ddp_torchrun.py")
    args.world_size = 2
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("it joins"))
    with pytest.raises(SystemExit, match=r"^error: on node .* gloo takes 127.0.1.1 for"):
        module.ddp_setup(args)


def test_a_name_that_resolves_to_loopback_matters_to_several_nodes(parse, monkeypatch, tmp_path):
    """And all of them say whose it is."""
    module, args = parse("multinode.py")
    args.rank, args.world_size = 0, 2
    monkeypatch.setattr(module, "wait_while", lambda *_: None)
    monkeypatch.setattr(module, "loopback_error", lambda args: "")
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    own = socket.gethostname() + (boot_id.read_text() if boot_id.exists() else "")
    for other in (own, "another"):
        store = dist.FileStore(str(tmp_path / other[:7]), 2)
        store.set("host of rank 1", other)
        store.set("node of rank 1", other)
        store.set("loopback error", "on node another ...")
        if other == own:
            module.call_the_roll(store, args)
        else:
            with pytest.raises(ValueError, match="on node another"):
                module.call_the_roll(store, args)


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


def test_check_adds_up(make, capsys):
    module, trainer = make("multinode.py", "--model", "mlp")
    module.check(trainer)
    text = capsys.readouterr().out
    assert re.search(r"^All-reduce \| 2\.68 MB \| \S+ ms \| 0\.0000 GB/s$", text, re.M)
    assert re.search(r"^Epoch \| 2 steps \| about \S+ s$", text, re.M)
    trainer.world_size = 2  # so the sums of one process are wrong
    with pytest.raises(SystemExit, match="error: 669706 of 1339412 sums of the all-reduce are"):
        module.check(trainer)


# --- what a process of several does ---------------------------------------------------------------


class Made(Exception):
    pass


def made(seen: dict, *given: object) -> None:
    seen["trainer"] = given
    raise Made


@every_ddp_script
@pytest.mark.parametrize("together", [False, True])
def test_a_rank_of_three_gets_its_shares_its_seed_and_its_smallest_batch(
    parse, monkeypatch, script, together
):
    """With SyncBatchNorm, batches are normalised together."""
    accumulate = 2 if script in SCRIPTS[3:] else 1
    options = ("--accumulate", 2) if accumulate == 2 else ()
    module, args = parse(script, "--batch-size", 5, "--test-batch-size", 2, "--seed", 7, *options)
    args.rank = args.local_rank = 1
    args.world_size = args.local_world_size = 3
    args.sync_bn = together
    data, seeds, smallest, seen = (make_digits(40, 0), make_digits(10, 1)), [], [], {}
    monkeypatch.setattr(module, "find_snapshot", lambda *_: None, raising=False)
    for name in ("barrier", "broadcast_object_list"):
        monkeypatch.setattr(dist, name, lambda *_, **__: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(module, "ddp_setup", lambda *_: CPU)
    monkeypatch.setattr(module, "load_dataset", lambda *_: data)
    monkeypatch.setattr(module, "set_seed", lambda *given: seeds.append(given))
    monkeypatch.setattr(module, "check_batch_norm", lambda _, count, __: smallest.append(count))
    monkeypatch.setattr(module, "Trainer", lambda *given: made(seen, *given))
    with pytest.raises(Made):
        module.main(*((1, *data, None, args) if script == SCRIPTS[2] else (args, None)))
    assert seeds == [(7,), (7, 1)]  # the same weights, and draws of its own
    _, train_data, test_data, *_ = seen["trainer"]
    sampler = train_data.sampler
    assert (sampler.num_replicas, sampler.rank, sampler.seed) == (3, 1, 7)
    assert sampler.global_batch == 5 * accumulate * 3
    assert list(test_data.sampler) == [[1, 4], [7]]
    if script != "ddp_spawn.py":  # 20 samples are the smaller of two global batches
        assert smallest == [20 // 3 // 2 * (3 if together else 1)]


def test_a_parent_looks_for_single_samples_of_batchnorm(parse, monkeypatch):
    module, args = parse("ddp_spawn.py", "--model", "resnet18", "--batch-size", 1)
    monkeypatch.setattr(module, "load_dataset", lambda *_: (make_digits(40, 0),) * 2)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(mp, "spawn", lambda *_, **__: pytest.fail("processes are started"))
    with pytest.raises(module.DataError, match="the smallest batch has 1"):
        module.spawn(args, torch.zeros((), dtype=torch.int32))


@every_script
def test_a_step_is_on_the_mean_over_the_global_batch(make, monkeypatch, script):
    """Of a rank that has 10 of 40 samples; the other one has the rest."""
    parts = 3 if script in SCRIPTS[3:] else 1
    options = ("--accumulate", 3) if parts == 3 else ()
    _, trainer = make(script, "--model", "mlp", *options)
    model, synced = inner(trainer), []
    trainer.world_size = 2 if script in SCRIPTS[2:] else 1
    model.register_forward_pre_hook(
        lambda *_: synced.append(getattr(trainer.model, "require_backward_grad_sync", True))
    )
    monkeypatch.setattr(trainer.optimizer, "step", lambda *_: None)
    source, targets = make_digits(10, 0).__getitems__(range(10))
    for _ in range(2):  # the second step knows nothing of the first one's gradients
        loss = trainer._run_batch(source, targets, 40)
    assert synced == [False] * (parts - 1) + [True] + [False] * (parts - 1) + [True]
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    expected = torch.nn.functional.cross_entropy(model(source), targets, reduction="sum")
    (expected * trainer.world_size / 40).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        assert torch.allclose(gradient, parameter.grad, atol=1e-6)


@every_ddp_script
def test_each_batch_counts_as_much_as_all_ranks_have_of_it(make, script):
    """Of 13, 13 and 14 samples, two ranks have 7 and 6, or 7."""
    _, trainer = make(script, "--model", "mlp", "--batch-size", 7)
    sampler, counts = trainer.train_data.sampler, []
    sampler.num_replicas = trainer.world_size = 2
    sampler.global_batch = 14
    trainer._run_batch = lambda _, targets, count: (
        counts.append((len(targets), count)) or torch.zeros(())
    )
    trainer._run_epoch(0)
    assert counts == [(7, 13), (7, 13), (7, 14)] and trainer.samples_seen == 40


@every_ddp_script
def test_every_rank_starts_from_what_rank_0_sends(make, monkeypatch, script):
    _, trainer = make(script, "--model", "mlp")
    assert type(trainer.model) is torch.nn.parallel.DistributedDataParallel
    trainer.epoch = 3
    trainer._save_snapshot()
    snapshot = load(Path("checkpoint.pt"))

    def send(box, src=0):
        box[0] = snapshot
        if len(box) == 2:
            box[1] = {**box[1], "total_epochs": 9}

    monkeypatch.setattr(dist, "broadcast_object_list", send)
    _, trainer = make(script, "--model", "mlp", "--snapshot-path", "none.pt")
    assert trainer.epoch == 3 and make.total_epochs == (5 if script == "ddp_spawn.py" else 9)


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


@pytest.mark.parametrize("script", ["ddp_spawn.py", "multinode.py"])
@pytest.mark.parametrize("how", ["hangs", "killed"])
def test_a_parent_ends_a_job_of_which_a_rank_hangs_or_is_killed(
    parse, monkeypatch, capsys, script, how
):
    stop, events = torch.zeros((), dtype=torch.int32), []
    child = SimpleNamespace(kill=lambda: events.append("kill"))

    def join(timeout, grace_period):
        if how == "killed":
            raise mp.ProcessExitedException(
                "process 1 terminated with signal SIGKILL", 1, 1, -9, "SIGKILL"
            )
        assert len(events) < 99
        events.append(timeout)
        stop.fill_(signal.SIGTERM)
        return False

    module, args = parse(script)
    monkeypatch.setattr(
        mp, "spawn", lambda *_, **__: SimpleNamespace(processes=[child, child], join=join)
    )
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(module, "load_dataset", lambda *_: (make_digits(10, 0),) * 2)
    said = "^error: process 1 .* SIGKILL: --resume goes on" if how == "killed" else "143"
    with pytest.raises(SystemExit, match=said):
        module.spawn(args, stop)
    assert events == ([1] * 26 if how == "hangs" else []) + ["kill", "kill"]
    assert ("error: not all ranks stopped" in capsys.readouterr().out) == (how == "hangs")


@pytest.mark.parametrize("script", ["ddp_spawn.py", "multinode.py"])
def test_a_parent_waits_for_as_long_as_nobody_asks_it_to_stop(parse, monkeypatch, script):
    seconds = iter([False] * 99 + [True])
    context = SimpleNamespace(processes=[], join=lambda **_: next(seconds))
    module, args = parse(script)
    monkeypatch.setattr(mp, "spawn", lambda *_, **__: context)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(module, "load_dataset", lambda *_: (make_digits(10, 0),) * 2)
    module.spawn(args, torch.zeros((), dtype=torch.int32))
    assert not [*seconds]


@every_ddp_script
def test_the_processes_of_one_host_meet_without_a_port(parse, monkeypatch, script):
    module, args = parse(script)
    given = {}
    monkeypatch.setattr(dist, "init_process_group", lambda _, **kwargs: given.update(kwargs))
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    if script == "ddp_spawn.py":
        args.rank, args.local_rank, args.store = 0, 0, "store"
    module.ddp_setup(args)
    expected = dist.FileStore if script == "ddp_spawn.py" else dist.HashStore
    assert type(given["store"]) is expected


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


@every_script
def test_macs_have_no_ddp(monkeypatch, script):
    module = importlib.import_module(script.removesuffix(".py"))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("mps"))
    assert (module.device_names()[0] == "mps") == (script in SCRIPTS[:2])


@pytest.mark.parametrize("script", SCRIPTS[:2])
def test_the_device_is_the_one_that_was_asked_for(parse, monkeypatch, script):
    module, args = parse(script)
    args.device, indices, seen = "cuda:1", [], {}
    monkeypatch.setattr(torch.accelerator, "set_device_index", indices.append)
    monkeypatch.setattr(module, "load_train_objs", lambda args, device: made(seen, device))
    with pytest.raises(Made):
        module.main(args, None)
    assert seen["trainer"] == (torch.device("cuda", 1),)
    assert indices == ([1] if script == "single_gpu.py" else [])


@every_script
def test_workers_obey_their_rank_and_copies_follow_the_loader(make, script):
    module, trainer = make(script)
    assert trainer.train_data.worker_init_fn is module.obey_only_the_rank
    assert not trainer.pinned
    pinned = SimpleNamespace(pin_memory=True)
    objs = (inner(trainer), pinned, None, trainer.optimizer, trainer.schedule, CPU, None)
    assert module.Trainer(*objs, trainer.stop, trainer.args).pinned


def test_whoever_cannot_join_says_for_whom_it_waits(parse, monkeypatch, capsys):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + 5))

    def refuse(*_, **__):
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    for method, line, end in (
        (
            "tcp://10.0.0.1:1000",
            "rank 0 at tcp://10.0.0.1:1000 (refused; is it started,",
            "is it started",
        ),
        (f"file://{os.getcwd()}/store", "rank 0, rank 2", "missing after 60 s: rank 0, rank 2"),
    ):
        options = ("--init-method", method, "--rank", 1, "--world-size", 3, "--timeout", 60)
        module, args = parse("multinode.py", *options)
        start = now[0]
        with pytest.raises(ValueError, match=end):
            module.join(args)
        assert 60 < now[0] - start <= 70
        text = capsys.readouterr().out
        assert text.count(f"[rank 1] still waiting for {line}") in (4, 5), text


# --- what is printed: the figures -----------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """A list of one number: what time.perf_counter gives."""
    now = [1000.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


def pass_time(clock: list[float], seconds: float) -> None:
    clock[0] += seconds


@every_script
def test_the_line_of_an_epoch(make, monkeypatch, capsys, clock, script):
    """What sums are divided by, and which seconds count: 2 of training, 2 of waiting for the device
    and none of the 100 of evaluation. The epoch is entered at sample 16 of 40."""
    _, trainer = make(script, 9, 2, "--snapshot-path", "own.pt")
    scalars = []

    def run_epoch(epoch: int) -> None:
        pass_time(clock, 2)
        trainer.samples_seen = 40
        trainer.loss_sum += 10

    def evaluate() -> tuple[torch.Tensor, torch.Tensor]:
        pass_time(clock, 100)
        return torch.tensor(5.0), torch.tensor(7.0)

    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: pass_time(clock, 2))
    monkeypatch.setattr(trainer, "_run_epoch", run_epoch)
    monkeypatch.setattr(trainer, "_evaluate", evaluate)
    monkeypatch.setattr(trainer, "_save_snapshot", lambda: None)
    monkeypatch.setattr(trainer.schedule, "step", lambda: None)
    trainer.device, trainer.epoch, trainer.samples_seen = torch.device("cuda"), 2, 16
    trainer.writer = SimpleNamespace(
        add_scalar=lambda *given: scalars.append(given), flush=lambda: scalars.append("flushed")
    )
    capsys.readouterr()
    trainer.train(4)
    losses = "Train loss: 0.2500 | Test loss: 0.5000 | Accuracy: 7/10 (70.00%)"
    assert capsys.readouterr().out == (
        f"Epoch 2 | {losses} | 6 samples/s\n"
        f"Epoch 3 | {losses} | 10 samples/s\n"
        "Epoch 3 | Training checkpoint saved at own.pt\n"
    )
    assert scalars[:5] == [
        ("loss/train", 0.25, 2),
        ("loss/test", 0.5, 2),
        ("accuracy", pytest.approx(0.7), 2),
        ("samples_per_second", 6, 2),
        "flushed",
    ]


@every_script
def test_the_lines_of_the_start_of_a_stop_and_of_a_resume(make, capsys, script):
    path = ("--snapshot-path", "own.pt")
    _, trainer = make(script, 7, 3, "--batch-size", 5, *path, "--resume")
    text = capsys.readouterr().out
    assert "total_epochs: 7, save_every: 3, batch_size: 5\n" in text
    assert "No snapshot at own.pt, starting from the beginning\n" in text

    def run_epoch(epoch: int) -> None:
        trainer.samples_seen, trainer.stopped = 24, signal.SIGTERM

    trainer._run_epoch, trainer.epoch = run_epoch, 4
    trainer.train(7)
    assert capsys.readouterr().out == "Epoch 4 | Stopped at sample 24, saved at own.pt\n"
    make(script, *path, "--resume")
    text = capsys.readouterr().out
    assert "total_epochs: 7, save_every: 3, batch_size: 5\n" in text
    assert "Resuming training from snapshot at Epoch 4, sample 24\n" in text


@every_script
def test_a_stopped_job_ends_with_the_signals_status(make, parse, monkeypatch, script):
    module, _ = parse(script)

    class Trainer(module.Trainer):
        def __init__(self, *given: object) -> None:
            super().__init__(*given)
            self.stopped = signal.SIGTERM

    monkeypatch.setattr(module, "Trainer", Trainer)
    if script in SCRIPTS[:2]:
        with pytest.raises(SystemExit, match="143"):
            make(script)
    else:
        make(script)
        assert make.calls[-1] == 143


@every_script
def test_the_lines_of_steps_and_the_sums_of_an_epoch(make, capsys, script):
    """A learning rate of 0 leaves the weights as they are, so all can be computed afterwards."""
    options = ("--batch-size", 16, "--log-interval", 1, "--lr", 0, "--test-batch-size", 3)
    _, trainer = make(script, "--model", "mlp", *options)
    model, loss = inner(trainer), torch.nn.functional.cross_entropy
    capsys.readouterr()
    trainer._run_epoch(1)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "[CPU0] Epoch 1 | Batchsize: 16 | Steps: 3"
    expected = [loss(model(source), targets).item() for source, targets in trainer.train_data]
    steps = [
        re.fullmatch(r"Epoch 1 \| Step (\d) \| Loss: (\d\.\d{6})", li).groups() for li in lines
    ]
    assert [int(step) for step, _ in steps] == [1, 2, 3]
    assert [float(value) for _, value in steps] == pytest.approx(expected, abs=2e-6)
    sizes = (13, 13, 14)
    total = sum(size * value for size, value in zip(sizes, expected, strict=True))
    assert trainer.loss_sum.item() == pytest.approx(total, rel=1e-5)
    assert trainer.samples_seen == 40
    source, targets = trainer.test_data.dataset[[*range(10)]]
    output = model(source)
    test_loss, correct = trainer._evaluate()
    assert test_loss.item() == pytest.approx(10 * loss(output, targets).item(), rel=1e-5)
    assert correct == (output.argmax(1) == targets).sum()


@every_script
def test_an_epochs_first_line_names_the_device_and_the_rank(make, monkeypatch, capsys, script):
    module, trainer = make(script, "--batch-size", 8)
    trainer.rank, bars = 1 if script in SCRIPTS[2:] else 0, []
    monkeypatch.setattr(module, "log", lambda line, **_: print(line))
    monkeypatch.setattr(module, "tqdm", lambda *_, disable, **__: bars.append(disable) or Bar())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    capsys.readouterr()
    for type, name in (("cuda", "GPU"), ("xpu", "XPU")):
        trainer.device, trainer.samples_seen = torch.device(type), 40  # no steps
        trainer._run_epoch(3)
        line = f"[{name}{trainer.rank}] Epoch 3 | Batchsize: 8 | Steps: 0\n"
        assert capsys.readouterr().out == line and bars.pop() == bool(trainer.rank)


class Bar(list):
    def close(self) -> None:
        pass


@every_ddp_script
def test_the_line_of_a_rank(parse, monkeypatch, capsys, script):
    module, args = parse(script)
    args.store = "store"
    args.device, args.rank, args.local_rank, args.local_world_size = "cuda", 1, 1, 2
    args.world_size = 2
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(socket, "gethostname", lambda: "thathost")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(module, "join", lambda *_: None, raising=False)
    module.ddp_setup(args)
    line = "[rank 1 of 2] host thathost | device cuda:1 | backend nccl | threads 4\n"
    assert capsys.readouterr().out == line


def test_data_parallel_says_over_how_many_devices_it_splits(make, monkeypatch, capsys):
    make("data_parallel.py")
    line = "DataParallel on cpu | Batches are not split: there is one device\n"
    assert line in capsys.readouterr().out
    monkeypatch.setattr(torch.nn.DataParallel, "__init__", two_devices)
    make("data_parallel.py")
    assert "DataParallel on cpu | Batches are split over 2 devices\n" in capsys.readouterr().out


@every_script
def test_the_total_time_is_in_seconds(make, parse, monkeypatch, capsys, script):
    now = [1000.0]

    def perf_counter() -> float:
        now[0] += 1e-6
        return now[0]

    done = SimpleNamespace(processes=[], join=lambda **_: True)
    data, check = (make_digits(40, 0), make_digits(10, 1)), lambda *_: pass_time(now, 2.5)
    monkeypatch.setattr("time.perf_counter", perf_counter)
    if script in SCRIPTS[3:]:
        monkeypatch.setattr(parse(script)[0], "check_batch_norm", check)
        make(script, "--model", "mlp")
    else:  # as it is started; `make` is here for what it holds back and puts in order
        monkeypatch.setattr("common.data.load_dataset", lambda *_: data)
        monkeypatch.setattr("common.model.check_batch_norm", check)
        monkeypatch.setattr(mp, "spawn", lambda *_, **__: done)
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        monkeypatch.setattr(sys, "argv", [script, "1", "--model", "mlp"])
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert capsys.readouterr().out.endswith("\nTotal time: 2.500s\n")


def test_the_figures_of_check(make, monkeypatch, capsys):
    """A step computes for 3 s and reduces for 1 s; the first, which warms up, is slower."""
    module, trainer = make("multinode.py", "--model", "mlp")
    synced, times = [], []
    for compute, reduce in ((50, 60), *[(3, 1)] * 5):
        times += [0, compute, compute, compute + reduce]
    monkeypatch.setattr("time.perf_counter", lambda: times.pop(0))
    inner(trainer).register_forward_pre_hook(
        lambda *_: synced.append(trainer.model.require_backward_grad_sync)
    )
    trainer.world_size = 2
    with pytest.raises(SystemExit, match="sums of the all-reduce are wrong"):
        module.check(trainer)
    assert capsys.readouterr().out.endswith(
        "All-reduce | 2.68 MB | 1000.00 ms | 0.0027 GB/s\n"
        "Step | 3000.00 ms to compute, 25% of the step for the all-reduce\n"
        "Epoch | 2 steps | about 8.0 s\n"
    )
    assert synced == [False] * 6 and not times
