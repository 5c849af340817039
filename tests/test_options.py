"""Every option of every script: refused below its range, and in force.

An option without a row in one of the two tables fails.
"""

import argparse
import os
import re
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers.jobs import ROOT, SCRIPTS
from helpers.parts import inner, set_up

from common.data import make_digits

DDP, ELASTIC, NODES = SCRIPTS[2:], SCRIPTS[3:4], SCRIPTS[4:]
BY_HAND = ("--init-method", "tcp://10.0.0.1:1000")


class Tools(NamedTuple):
    """What it takes to see an option in force."""

    script: str
    make: Callable
    parse: Callable
    patch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture

    def trainer(self, *arguments: object) -> object:
        return self.make(self.script, *arguments)[1]


@pytest.fixture
def tools(make, parse, monkeypatch, capsys):
    return lambda script: Tools(script, make, parse, monkeypatch, capsys)


# --- numbers: what shows them, given the command line ---------------------------------------------


def total_epochs(tools: Tools, *arguments: object) -> int:
    tools.trainer(*arguments)
    return tools.make.total_epochs


def save_every(tools: Tools, *arguments: object) -> int:
    trainer, saved = tools.trainer(*arguments), []
    trainer._save_snapshot = lambda: saved.append(trainer.epoch)
    trainer.train(5)
    return saved[0]


def batch_size(tools: Tools, *arguments: object) -> int:
    return len(next(iter(tools.trainer(*arguments).train_data))[1])


def test_batch_size(tools: Tools, *arguments: object) -> int:
    return len(next(iter(tools.trainer(*arguments).test_data))[1])


test_batch_size.__test__ = False  # the option's name


def lr(tools: Tools, *arguments: object) -> float:
    return tools.trainer(*arguments).optimizer.param_groups[0]["lr"]


def momentum(tools: Tools, *arguments: object) -> float:
    return tools.trainer(*arguments).optimizer.param_groups[0]["momentum"]


def seed(tools: Tools, *arguments: object) -> int:
    return tools.trainer(*arguments).train_data.batch_sampler.seed


def log_interval(tools: Tools, *arguments: object) -> int:
    trainer = tools.trainer(*arguments, "--batch-size", 5)
    tools.capsys.readouterr()
    trainer._run_epoch(0)
    steps = re.findall(r"\| Step (\d+) \|", tools.capsys.readouterr().out)
    return int(steps[0]) if steps else 0


def num_workers(tools: Tools, *arguments: object) -> int:
    trainer = tools.trainer(*arguments)
    assert trainer.train_data.num_workers == trainer.test_data.num_workers
    return trainer.train_data.num_workers


def joined(tools: Tools, *arguments: object) -> dict:
    """What init_process_group is given, in the last process of a call."""
    module, args = tools.parse(tools.script, *arguments)
    given = {}
    with tools.patch.context() as patch:
        patch.setattr(dist, "init_process_group", lambda *_, **kwargs: given.update(kwargs))
        patch.setattr(dist, "get_backend", lambda: "gloo")
        patch.setattr(torch, "set_num_threads", lambda _: None)
        patch.setattr(module, "open_store", lambda args: None, raising=False)
        set_up(module, args)
    return given


def timeout(tools: Tools, *arguments: object) -> float:
    return joined(tools, *arguments)["timeout"].total_seconds()


def accumulate(tools: Tools, *arguments: object) -> int:
    trainer, calls = tools.trainer(*arguments), []
    inner(trainer).register_forward_pre_hook(lambda module, _: calls.append(module))
    trainer._run_batch(*make_digits(20, 0).__getitems__(range(20)), 20)
    return len(calls)


def nproc_per_node(tools: Tools, *arguments: object) -> int:
    """What mp.spawn is asked for by the script's last lines."""
    asked, done = [], SimpleNamespace(join=lambda **_: True)
    tools.parse(tools.script, *arguments)

    def load_dataset(*given: object) -> tuple:
        tools.make.asked = given
        return make_digits(40, 0), make_digits(10, 1)

    with tools.patch.context() as patch:
        patch.setattr(mp, "spawn", lambda _, __, count, join: asked.append(count) or done)
        patch.setattr(signal, "signal", lambda *_: None)
        patch.setattr("common.data.load_dataset", load_dataset)
        runpy.run_path(str(ROOT / tools.script), run_name="__main__")
    return asked[0]


def rank(tools: Tools, *arguments: object) -> int:
    return joined(tools, *BY_HAND, "--world-size", 9, *arguments)["rank"]


def world_size(tools: Tools, *arguments: object) -> int:
    return joined(tools, *BY_HAND, "--rank", 0, *arguments)["world_size"]


class Number(NamedTuple):
    """A numeric option: what shows it, its smallest value, and two values that it may have."""

    seen: Callable
    low: int
    values: tuple[float, float]
    scripts: tuple[str, ...] = SCRIPTS


NUMBERS = {
    "total_epochs": Number(total_epochs, 1, (3, 4)),
    "save_every": Number(save_every, 1, (2, 3)),
    "batch_size": Number(batch_size, 1, (8, 5)),
    "test_batch_size": Number(test_batch_size, 1, (5, 2)),
    "lr": Number(lr, 0, (0.5, 0.25)),
    "momentum": Number(momentum, 0, (0.5, 0.25)),
    "seed": Number(seed, 0, (7, 8)),
    "log_interval": Number(log_interval, 0, (2, 3)),
    "num_workers": Number(num_workers, 0, (1, 2)),
    "timeout": Number(timeout, 1, (77, 78), scripts=DDP),
    "accumulate": Number(accumulate, 1, (2, 4), scripts=ELASTIC),
    "nproc_per_node": Number(nproc_per_node, 1, (3, 4), scripts=("ddp_spawn.py", "multinode.py")),
    "rank": Number(rank, 0, (3, 4), scripts=NODES),
    "world_size": Number(world_size, 1, (3, 4), scripts=NODES),
    "epochs": Number(total_epochs, 1, (3, 4), scripts=NODES),
}
EACH = [(script, name) for name, number in NUMBERS.items() for script in number.scripts]


def given(name: str, value: float) -> tuple:
    """The option as one writes it; the two positional ones come in their order."""
    if name in ("total_epochs", "save_every"):
        return (value,) if name == "total_epochs" else (5, value)
    return (f"--{name.replace('_', '-')}", value)


@pytest.mark.parametrize(("script", "name"), EACH)
def test_a_number_is_refused_below_its_range(refuse, script, name):
    number = NUMBERS[name]
    message = refuse(script, *given(name, number.low - 1))
    option = name if name in ("total_epochs", "save_every") else f"--{name.replace('_', '-')}"
    low = float(number.low) if name in ("lr", "momentum") else number.low
    assert re.match(rf"argument {option}\b.*: {number.low - 1} is less than {low}$", message), (
        message
    )


@pytest.mark.parametrize(("script", "name"), EACH)
def test_a_number_is_in_force(tools, script, name):
    number = NUMBERS[name]
    for value in number.values:
        assert number.seen(tools(script), *given(name, value)) == value


# --- all the others -------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_data_set_and_folder(tools, script):
    tools, options = tools(script), ("--dataset", "mnist", "--data-dir", "elsewhere")
    if script == "ddp_spawn.py":
        nproc_per_node(tools, *options)
    else:
        tools.trainer(*options)
    assert tools.make.asked == ("mnist", "elsewhere")


@pytest.mark.parametrize("script", SCRIPTS)
def test_model(tools, script):
    tools = tools(script)
    assert type(inner(tools.trainer("--model", "lenet"))).__name__ == "LeNet"
    for data_set, model in (("digits", "ConvNet"), ("fashion-mnist", "MLP"), ("cifar10", "LeNet")):
        assert type(inner(tools.trainer("--dataset", data_set))).__name__ == model


@pytest.mark.parametrize("script", SCRIPTS)
def test_snapshot_path(tools, script):
    tools(script).trainer("--snapshot-path", "own.pt")._save_snapshot()
    assert "own.pt" in os.listdir() and "checkpoint.pt" not in os.listdir()


@pytest.mark.parametrize("script", SCRIPTS)
def test_resume(tools, script):
    tools = tools(script)
    trainer = tools.trainer()
    trainer.epoch = 3
    trainer._save_snapshot()
    assert (tools.trainer().epoch, tools.trainer("--resume").epoch) == (0, 3)


def test_log_dir(tools):
    """Rank 0 alone writes."""
    tools, opened = tools("ddp_torchrun.py"), []
    writer = SimpleNamespace(SummaryWriter=lambda folder, **_: opened.append(folder))
    tools.patch.setitem(sys.modules, "torch.utils.tensorboard", writer)
    tools.trainer("--log-dir", "runs")
    tools.trainer()
    tools.patch.setattr(dist, "get_rank", lambda *_: 1)
    tools.trainer("--log-dir", "runs")
    assert opened == ["runs"]


@pytest.mark.parametrize("script", DDP)
def test_backend(tools, script):
    tools, asked = tools(script), []
    module, args = tools.parse(script, "--backend", "gloo")
    assert args.backend == "gloo"
    args.backend = "own"
    tools.patch.setattr(dist, "init_process_group", lambda name, **_: asked.append(name))
    tools.patch.setattr(dist, "get_backend", lambda: "own")
    tools.patch.setattr(dist, "is_backend_available", lambda name: True)
    set_up(module, args)
    assert asked == ["own"]


def test_sync_bn(tools):
    """Refused on a CPU, so only what becomes of the model is seen here."""
    tools, converted = tools("ddp_torchrun.py"), []
    convert = lambda model: converted.append(model) or model  # noqa: E731
    tools.patch.setattr(torch.nn.SyncBatchNorm, "convert_sync_batchnorm", convert)
    module, _ = tools.parse("ddp_torchrun.py")
    trainer = tools.trainer("--model", "mlp")
    assert converted == []
    trainer.args.sync_bn = True
    objs = (inner(trainer), trainer.train_data, trainer.test_data, trainer.optimizer)
    module.Trainer(*objs, trainer.schedule, trainer.device, trainer.args)
    assert converted == [inner(trainer)]


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        *((script, ("--device", "cpu")) for script in SCRIPTS if script != "data_parallel.py"),
        (NODES[0], ("--no-cuda",)),
    ],
)
def test_device(parse, monkeypatch, script, arguments):
    parse(script)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    for given, device in (((), "cuda"), (arguments, "cpu")):
        assert parse(script, *given)[1].device == device


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_smallest_values_are_taken(parse, script):
    """A rate of 0, a batch of 1."""
    options = ("--lr", 0, "--momentum", 0, "--seed", 0, "--batch-size", 1)
    args = parse(script, 1, 1, *options)[1]
    assert (args.lr, args.momentum, args.seed, args.batch_size) == (0, 0, 0, 1)


def test_local_rank_is_taken_and_ignored(parse):
    """As `python -m torch.distributed.launch` adds it."""
    for option in ("--local-rank=1", "--local_rank=1"):
        parse("ddp_torchrun.py", option)


# The option, and the test that fails where it does nothing: none of them is slow.
OTHERS = {
    "dataset": "test_options.py::test_data_set_and_folder",
    "data_dir": "test_options.py::test_data_set_and_folder",
    "model": "test_options.py::test_model",
    "deterministic": "test_devices.py::test_deterministic_kernels_are_asked_for",
    "device": "test_options.py::test_device",
    "snapshot_path": "test_options.py::test_snapshot_path",
    "resume": "test_options.py::test_resume",
    "log_dir": "test_options.py::test_log_dir",
    "backend": "test_options.py::test_backend",
    "sync_bn": "test_options.py::test_sync_bn",
    "amp": "test_steps.py::test_amp_in_training_and_in_evaluation",
    "compile": "test_steps.py::test_compile_leaves_the_names_of_the_weights",
    "init_method": "test_multinode.py::test_any_number_of_hosts_does_the_same_job",
    "no_cuda": "test_options.py::test_device",
    "local_rank": "test_options.py::test_local_rank_is_taken_and_ignored",
    "help": "test_readme.py::test_docstrings_name_options_that_exist",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_option_has_a_row(parse, monkeypatch, script):
    actions = []

    def parse_args(parser):
        actions.extend(parser._actions)
        raise InterruptedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    with pytest.raises(InterruptedError):
        parse(script)
    numbers = {name for name, number in NUMBERS.items() if script in number.scripts}
    assert {action.dest for action in actions if action.type} == numbers
    others = {action.dest for action in actions} - numbers
    assert others <= OTHERS.keys(), "add a row for it"
    for file, test in (OTHERS[name].split("::") for name in others):
        text = Path(__file__).with_name(file).read_text()
        assert f"\ndef {test}(" in text
        assert not re.search(rf"^@pytest.mark.slow\(.*\n(@.*\n)*def {test}\(", text, re.M)
