"""Every option of every script: refused below its range, in force, and kept by --resume or not.

An option without a row in one of the two tables fails.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers.jobs import SCRIPTS
from helpers.parts import inner

from common.data import make_digits

DDP, ELASTIC, NODES = SCRIPTS[2:], SCRIPTS[3:], SCRIPTS[4:]
BY_HAND = ("--init-method", "tcp://10.0.0.1:1000")
STOP = torch.zeros((), dtype=torch.int32)


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
    return tools.trainer(*arguments).train_data.sampler.seed


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
    """What init_process_group is given; in multinode.py for a process with a rank of its own."""
    module, args = tools.parse(tools.script, *arguments)
    given, alone = {}, {"local_rank": 0, "local_world_size": 1}
    if tools.script == "ddp_spawn.py":
        vars(args).update(alone, rank=0, store="store")
    with tools.patch.context() as patch:
        patch.setattr(dist, "init_process_group", lambda *_, **kwargs: given.update(kwargs))
        patch.setattr(dist, "get_backend", lambda: "gloo")
        patch.setattr(module, "join", lambda args: vars(args).update(alone), raising=False)
        module.ddp_setup(args)
    return given


def timeout(tools: Tools, *arguments: object) -> float:
    return joined(tools, *arguments)["timeout"].total_seconds()


def accumulate(tools: Tools, *arguments: object) -> int:
    trainer, calls = tools.trainer(*arguments), []
    inner(trainer).register_forward_pre_hook(lambda module, _: calls.append(module))
    trainer._run_batch(*make_digits(20, 0).__getitems__(range(20)), 20)
    return len(calls)


def nproc_per_node(tools: Tools, *arguments: object) -> int:
    by_node = (*BY_HAND, "--nnodes", 2, "--node-rank", 0) if tools.script in NODES else ()
    module, args = tools.parse(tools.script, *by_node, *arguments)
    asked, done = [], SimpleNamespace(processes=[], join=lambda **_: True)
    with tools.patch.context() as patch:
        patch.setattr(mp, "spawn", lambda _, __, count, join: asked.append(count) or done)
        patch.setattr(module.signal, "signal", lambda *_: None)
        patch.setattr(module, "load_dataset", lambda *_: (make_digits(40, 0),) * 2)
        module.spawn(args, STOP)
    return asked[0]


def rank(tools: Tools, *arguments: object) -> int:
    return joined(tools, *BY_HAND, "--world-size", 9, *arguments)["rank"]


def world_size(tools: Tools, *arguments: object) -> int:
    return joined(tools, *BY_HAND, "--rank", 0, *arguments)["world_size"]


def nnodes(tools: Tools, *arguments: object) -> int:
    by_node = (*BY_HAND, "--node-rank", 0, "--nproc-per-node", 1)
    return joined(tools, *by_node, *arguments)["world_size"]


def node_rank(tools: Tools, *arguments: object) -> int:
    by_node = (*BY_HAND, "--nnodes", 9, "--nproc-per-node", 1)
    return joined(tools, *by_node, *arguments)["rank"]


class Number(NamedTuple):
    """A numeric option: what shows it, its smallest value, and two values that it may have."""

    seen: Callable
    low: int
    values: tuple[float, float]
    kept: bool = False  # by a resumed run whose command line does not have it
    scripts: tuple[str, ...] = SCRIPTS


NUMBERS = {
    "total_epochs": Number(total_epochs, 1, (3, 4), kept=True),
    "save_every": Number(save_every, 1, (2, 3), kept=True),
    "batch_size": Number(batch_size, 1, (8, 5), kept=True),
    "test_batch_size": Number(test_batch_size, 1, (5, 2), kept=True),
    "lr": Number(lr, 0, (0.5, 0.25), kept=True),
    "momentum": Number(momentum, 0, (0.5, 0.25), kept=True),
    "seed": Number(seed, 0, (7, 8), kept=True),
    "log_interval": Number(log_interval, 0, (2, 3)),
    "num_workers": Number(num_workers, 0, (1, 2)),
    "timeout": Number(timeout, 1, (77, 78), scripts=DDP),
    "accumulate": Number(accumulate, 1, (2, 4), kept=True, scripts=ELASTIC),
    "nproc_per_node": Number(nproc_per_node, 1, (3, 4), scripts=("ddp_spawn.py", "multinode.py")),
    "rank": Number(rank, 0, (3, 4), scripts=NODES),
    "world_size": Number(world_size, 1, (3, 4), scripts=NODES),
    "nnodes": Number(nnodes, 1, (3, 4), scripts=NODES),
    "node_rank": Number(node_rank, 0, (3, 4), scripts=NODES),
    "epochs": Number(total_epochs, 1, (3, 4), scripts=NODES),  # kept as total_epochs
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
    company = {"rank": (*BY_HAND, "--world-size", 9), "world_size": (*BY_HAND, "--rank", 0)}
    company |= {"nnodes": (*BY_HAND, "--node-rank", 0), "node_rank": (*BY_HAND, "--nnodes", 9)}
    if name == "nproc_per_node" and script in NODES:
        company[name] = (*BY_HAND, "--nnodes", 2, "--node-rank", 0)
    message = refuse(script, *company.get(name, ()), *given(name, number.low - 1))
    option = name if name in ("total_epochs", "save_every") else f"--{name.replace('_', '-')}"
    assert re.match(rf"argument {option}\b.*: {number.low - 1} is out of range", message), message
    assert "Traceback" not in message


@pytest.mark.parametrize(("script", "name"), EACH)
def test_a_number_is_in_force(tools, script, name):
    number = NUMBERS[name]
    for value in number.values:
        assert number.seen(tools(script), *given(name, value)) == value


@pytest.mark.parametrize(("script", "name"), [pair for pair in EACH if NUMBERS[pair[1]].kept])
def test_a_resumed_run_keeps_a_number_unless_the_command_line_has_it(tools, capsys, script, name):
    tools, number = tools(script), NUMBERS[name]
    first, second = number.values
    tools.trainer(*given(name, first))._save_snapshot()
    capsys.readouterr()
    assert number.seen(tools, "--resume") == first
    assert "from the command line" not in capsys.readouterr().out
    if name == "seed":
        with pytest.raises(SystemExit, match="made with --seed 7, and this run has 8"):
            tools.trainer("--resume", *given(name, second))
        return
    line = f"{name}: {second} from the command line, not the snapshot's {first}\n"
    assert number.seen(tools, "--resume", *given(name, second)) == second
    assert line in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name, number in NUMBERS.items() if not number.kept])
def test_what_is_not_kept_is_as_without_a_snapshot(tools, name):
    """How a run is started, and what it says, is for each command line to say."""
    number = NUMBERS[name]
    tools = tools(number.scripts[-1])
    if number.seen in (log_interval, num_workers, timeout):
        default = number.seen(tools)
        tools.trainer(*given(name, number.values[0]))._save_snapshot()
        assert number.seen(tools, "--resume") == default != number.values[0]


# --- all the others -------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_data_set_and_folder(tools, script):
    tools = tools(script)
    tools.trainer("--dataset", "mnist", "--data-dir", "elsewhere")._save_snapshot()
    tools.trainer("--resume")
    assert tools.make.asked == ("mnist", "elsewhere")
    with pytest.raises(SystemExit, match="made with --dataset mnist, and this run has cifar10"):
        tools.trainer("--resume", "--dataset", "cifar10")


@pytest.mark.parametrize("script", SCRIPTS)
def test_model(tools, script):
    tools = tools(script)
    tools.trainer("--model", "lenet")._save_snapshot()
    assert type(inner(tools.trainer())).__name__ == "ConvNet"
    assert type(inner(tools.trainer("--resume"))).__name__ == "LeNet"


@pytest.mark.parametrize("script", SCRIPTS)
def test_snapshot_path(tools, script):
    tools(script).trainer("--snapshot-path", "own.pt")._save_snapshot()
    assert os.listdir() == ["own.pt"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_resume(tools, script):
    tools = tools(script)
    trainer = tools.trainer()
    trainer.epoch = 3
    trainer._save_snapshot()
    assert (tools.trainer().epoch, tools.trainer("--resume").epoch) == (0, 3)


@pytest.mark.parametrize("script", SCRIPTS)
def test_without_resume_nothing_is_kept(tools, script):
    tools = tools(script)
    tools.trainer("--lr", 0.5)._save_snapshot()
    assert lr(tools) == 0.01


@pytest.mark.parametrize("script", SCRIPTS)
def test_log_dir(tools, script):
    tools, opened = tools(script), []
    writer = SimpleNamespace(SummaryWriter=lambda folder, **_: opened.append(folder))
    tools.patch.setitem(sys.modules, "torch.utils.tensorboard", writer)
    tools.trainer("--log-dir", "runs")
    tools.trainer()
    assert opened == ["runs"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_progress(tools, script):
    tools, bars = tools(script), []

    class Bar(list):
        def __init__(self, loader, leave, disable):
            bars.append(disable)
            super().__init__(loader)

        def close(self):
            pass

    module, _ = tools.parse(script)
    tools.patch.setattr(module, "tqdm", Bar)
    tools.patch.setattr(module, "log", lambda *_, **__: None)
    tools.patch.setattr(sys.stderr, "isatty", lambda: True)
    for options in (("--no-progress",), ()):
        tools.trainer(*options)._run_epoch(0)
    assert bars == [True, False]


@pytest.mark.parametrize("script", DDP)
def test_backend(tools, script):
    tools, asked = tools(script), []
    module, args = tools.parse(script, "--backend", "gloo")
    args.backend = "own"
    if script == "ddp_spawn.py":
        args.rank, args.local_rank, args.store = 0, 0, "store"
    tools.patch.setattr(dist, "init_process_group", lambda name, **_: asked.append(name))
    tools.patch.setattr(dist, "get_backend", lambda: "own")
    module.ddp_setup(args)
    assert asked == ["own"]


@pytest.mark.parametrize("script", ELASTIC)
def test_sync_bn(tools, script):
    """Refused on a CPU, so only what becomes of the model is seen here."""
    tools, converted = tools(script), []
    convert = lambda model: converted.append(model) or model  # noqa: E731
    tools.patch.setattr(torch.nn.SyncBatchNorm, "convert_sync_batchnorm", convert)
    module, _ = tools.parse(script)
    trainer = tools.trainer("--model", "mlp")
    trainer.args.sync_bn = True
    objs = (inner(trainer), trainer.train_data, trainer.test_data, trainer.optimizer)
    module.Trainer(*objs, trainer.schedule, trainer.device, None, STOP, trainer.args)
    assert converted == [inner(trainer)]


@pytest.mark.parametrize("script", ELASTIC)
def test_check(tools, script):
    tools, checked = tools(script), []
    module, _ = tools.parse(script)
    tools.patch.setattr(module, "check", checked.append)
    with pytest.raises(IndexError):  # of the Trainer that is not there, as nothing is trained
        tools.trainer("--check")
    assert len(checked) == 1 and "train" not in tools.make.calls


@pytest.mark.parametrize(
    ("script", "arguments"),
    [*((script, ("--device", "cpu")) for script in SCRIPTS), (NODES[0], ("--no-cuda",))],
)
def test_device(parse, monkeypatch, script, arguments):
    module, _ = parse(script)
    monkeypatch.setattr(module, "device_names", lambda: ["cuda", "cuda:1", "cpu"])
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    for given, device in (((), "cuda"), (arguments, "cpu")):
        monkeypatch.setattr(sys, "argv", [script, *given])
        assert module.parse_args().device == device


@pytest.mark.parametrize("script", ELASTIC)
def test_amp_is_kept(tools, script):
    tools = tools(script)
    tools.trainer("--amp", "bf16")._save_snapshot()
    assert tools.trainer("--resume").args.amp == "bf16"
    assert tools.trainer("--resume", "--amp", "off").args.amp == "off"


def test_epochs_overrule_the_snapshots(tools):
    tools = tools("multinode.py")
    tools.trainer("--epochs", 3)._save_snapshot()
    for arguments, expected in (((), 3), (("--epochs", 4), 4)):
        tools.trainer("--resume", *arguments)
        assert tools.make.total_epochs == expected


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_smallest_values_are_taken(parse, script):
    """A rate of 0, a batch of 1."""
    options = ("--lr", 0, "--momentum", 0, "--seed", 0, "--batch-size", 1)
    args = parse(script, 1, 1, *options)[1]
    assert (args.lr, args.momentum, args.seed, args.batch_size) == (0, 0, 0, 1)


def test_local_rank_is_taken_and_ignored(parse):
    """As `python -m torch.distributed.launch` adds it."""
    for option in ("--local-rank=1", "--local_rank=1"):
        assert parse("ddp_torchrun.py", option)[1].local_rank == 0


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
    "no_progress": "test_options.py::test_no_progress",
    "backend": "test_options.py::test_backend",
    "sync_bn": "test_options.py::test_sync_bn",
    "amp": "test_steps.py::test_amp_in_training_and_in_evaluation",
    "compile": "test_steps.py::test_compile_leaves_the_names_of_the_weights",
    "init_method": "test_multinode.py::test_any_number_of_hosts_does_the_same_job",
    "check": "test_options.py::test_check",
    "no_cuda": "test_options.py::test_device",
    "unused": "test_options.py::test_local_rank_is_taken_and_ignored",
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
    kept = {name for name in numbers if NUMBERS[name].kept}
    monkeypatch.undo()
    assert {*parse(script)[1].kept} & NUMBERS.keys() == kept
