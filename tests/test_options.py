"""Each option is in force in each script that has it, and a number that must be 1 or more is.

A new option is a row of OPTIONS, say Row("--label-smoothing", (0.0, 0.5)): the two values must
give different losses, and the same ones in each of the scripts.
"""

import argparse
import os
import runpy
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers.jobs import ROOT, SCRIPTS, epochs, every_script, inner, losses, set_up

SINGLE, PARALLEL, SPAWN, TORCHRUN, NODES = ((script,) for script in SCRIPTS)
DDP = SPAWN + TORCHRUN + NODES
OF_NINE = ("--init-method", "tcp://10.0.0.1:1000", "--rank", 0, "--world-size", 9)


@pytest.fixture
def tools(make, parse, pretend, monkeypatch, capsys):
    patch = {"monkeypatch": monkeypatch, "capsys": capsys}
    return SimpleNamespace(make=make, parse=parse, pretend=pretend, **patch)


def trained(tools: SimpleNamespace, script: str, *options: object) -> SimpleNamespace:
    """What it trains and prints; without dropout that is the same in all scripts."""
    job = SimpleNamespace()
    sizes, types, kernels, compiled, converted = {}, set(), [], [], []
    files, join = {*os.listdir()}, dist.init_process_group

    def joining(*given: object, **named: object) -> None:
        kernels.append(torch.are_deterministic_algorithms_enabled())
        join(*given, **named)

    def compile(forward: Callable, **_: object) -> Callable:
        return lambda *inputs: compiled.append(forward) or forward(*inputs)

    def convert(model: torch.nn.Module) -> torch.nn.Module:
        return converted.append(model) or model

    def look(model: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        sizes.setdefault(model.training, len(inputs[0]))  # the first one is a whole batch
        types.add(output.dtype)

    with tools.monkeypatch.context() as patch:
        patch.setattr(dist, "init_process_group", joining)
        patch.setattr(torch, "compile", compile)
        patch.setattr(torch.nn.SyncBatchNorm, "convert_sync_batchnorm", convert)
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # --deterministic would leave it
        trainer = tools.make(script, "--batch-size", 8, "--log-interval", 1, *options)[1]
        loaders = (trainer.train_data, trainer.test_data)
        for loader in loaders if trainer.args.num_workers else ():
            loader.multiprocessing_context = "forkserver"  # quicker than spawn
        kernels.append(torch.are_deterministic_algorithms_enabled())
        torch.use_deterministic_algorithms(False)
        patch.setattr(torch.nn.Dropout, "forward", lambda _, inputs: inputs)
        inner(trainer).register_forward_hook(look)
        did = {name: given for name, *given in tools.make.calls}
        trainer.train(*did["train"])
    text = tools.capsys.readouterr().out
    job.losses = losses(text) + [line["test_loss"] for line in epochs(text)]
    job.epochs = [line["epoch"] for line in epochs(text)]
    job.steps = [int(line.split()[4]) for line in text.splitlines() if "| Loss" in line]
    job.saved = [int(line.split()[1]) for line in text.splitlines() if "saved at" in line]
    job.saved_steps = [int(line.split()[4]) for line in text.splitlines() if "Saved at" in line]
    job.files = sorted(name for name in {*os.listdir()} - files if "output" not in name)
    job.model = type(inner(trainer)).__name__
    job.dataset, job.data_dir = did["load_dataset"]
    job.batch_size, job.test_batch_size = sizes.get(True), sizes.get(False)  # None: all is done
    job.types, job.compiled = [*types], len(compiled) > 0
    job.converted = converted == [inner(trainer)]
    job.deterministic = all(kernels)  # before the group chooses its own, too
    job.workers = [len(getattr(loader._iterator, "_workers", ())) for loader in loaders]
    return job


def joined(tools: SimpleNamespace, script: str, *options: object) -> SimpleNamespace:
    """On a machine with four GPUs: its device, and what it gives mp.spawn() and to the group."""
    job = tools.pretend("cuda", 4)
    module, args = tools.parse(script, *options)
    if script in SPAWN + NODES:
        tools.monkeypatch.setattr(mp, "spawn", spawn := Mock())
        tools.monkeypatch.setattr(signal, "signal", Mock())
        runpy.run_path(str(ROOT / script), run_name="__main__")
        (args,), job.processes = spawn.call_args.kwargs["args"], spawn.call_args.kwargs["nprocs"]
    if script in DDP:
        job.device = set_up(module, args).type
        job.timeout = job.timeout.total_seconds()
        return job
    load = lambda _, device: vars(job).update(device=device.type)  # noqa: E731
    tools.monkeypatch.setattr(module, "load_train_objs", load)
    with pytest.raises(TypeError):  # there is nothing to train
        module.main(args)
    return job


class Row(NamedTuple):
    """An option and two of its values: of a number the smallest first, of a switch False and True.

    `look` sees the script with a value, and what it has `seen` must be `expected`, which is the
    value itself unless it is given. Losses must be those of another script.
    """

    option: str
    values: tuple
    seen: str = "losses"
    expected: tuple = ()
    scripts: tuple[str, ...] = SCRIPTS
    look: Callable = trained
    beside: tuple = ()

    def words(self, value: object) -> tuple:
        if self.option in ("total_epochs", "save_every"):
            return (value,) if self.option == "total_epochs" else (5, value)
        if isinstance(value, bool):
            return (1, *self.beside, *([self.option] if value else []))
        return (1, *self.beside, self.option, value)


EPOCHS = ([0], [0, 1, 2])
OPTIONS = (
    Row("total_epochs", (1, 3), "epochs", EPOCHS),
    Row("save_every", (1, 3), "saved", ([0, 1, 2, 3, 4], [2, 4])),
    Row("--batch-size", (1, 8), "batch_size"),
    Row("--batch_size", (1, 8), "batch_size"),
    Row("--test-batch-size", (1, 5), "test_batch_size"),
    Row("--lr", (0.0, 0.05)),
    Row("--momentum", (0.0, 0.5)),
    Row("--dataset", ("digits", "cifar10"), "model", ("ConvNet", "LeNet")),
    Row("--dataset", ("digits", "mnist"), "dataset"),
    Row("--data-dir", ("a", "b"), "data_dir"),
    Row("--model", ("mlp", "lenet"), "model", ("MLP", "LeNet")),
    Row("--seed", (0, 7)),
    Row("--deterministic", (False, True), "deterministic"),
    Row("--num-workers", (0, 1), "workers", ([0, 0], [1, 1])),
    Row("--log-interval", (0, 2), "steps", ([], [2, 4])),
    Row("--snapshot-path", ("a.pt", "b.pt"), "files", (["a.pt"], ["b.pt"])),
    Row("--resume", (False, True), "epochs", ([0], [])),  # the first one has saved
    Row("--device", ("cuda", "cpu"), "device", (), SINGLE + DDP, joined),
    Row("--backend", ("nccl", "gloo"), "backend", (), DDP, joined),
    Row("--timeout", (1, 77), "timeout", (), DDP, joined),
    Row("--nproc-per-node", (1, 3), "processes", (), SPAWN, joined),
    Row("--nproc-per-node", (1, 3), "processes", (), NODES, joined, OF_NINE),
    Row("--accumulate", (1, 2), "steps", ([1, 2, 3, 4, 5], [1, 2, 3]), TORCHRUN),
    Row("--save-steps", (1, 3), "saved_steps", ([1, 2, 3, 4], [3]), TORCHRUN),
    Row("--amp", (False, True), "types", ([torch.float32], [torch.bfloat16]), TORCHRUN),
    Row("--compile", (False, True), "compiled", (), TORCHRUN),
    Row("--sync-bn", (False, True), "converted", (), TORCHRUN),
    Row("--rank", (0, 3), "rank", (), NODES, joined, OF_NINE),
    Row("--world-size", (2, 3), "world_size", (), NODES, joined, OF_NINE),
    Row("--init-method", ("tcp://a:1", "tcp://b:2"), "init_method", (), NODES, joined),
)
EACH = [
    pytest.param(row, script, id=f"{row.option}-{script}")
    for row in OPTIONS
    for script in row.scripts
]
NUMBERS = [each for each in EACH if each.values[0].values[0] == 1]


@pytest.mark.parametrize(("row", "script"), EACH)
def test_an_option_is_in_force(tools, row, script):
    def seen(script: str) -> list:
        looks = [row.look(tools, script, *row.words(value)) for value in row.values]
        return [getattr(job, row.seen) for job in looks]

    ours, (one, other) = seen(script), row.values
    assert ours[0] != pytest.approx(ours[1], abs=1e-4), (
        f"{row.option} does nothing in {script}: with {one} and with {other} one sees {ours[0]}"
    )
    expected, where = row.expected or row.values, "the table"
    if row.seen == "losses":
        where = row.scripts[-1 if script == row.scripts[0] else 0]
        expected = seen(where)
    for value, mine, right in zip(row.values, ours, expected, strict=True):
        assert mine == pytest.approx(right, abs=1e-4), (
            f"{row.option} {value} gives {mine} in {script}, and {right} in {where}"
        )


@pytest.mark.parametrize(("row", "script"), NUMBERS)
def test_a_number_below_1_is_refused(refuse, row, script):
    argument, _, message = refuse(script, *row.words(0)).partition(": ")
    assert row.option in argument and message == "0 is less than 1", (
        f"{row.option} 0 in {script}: {argument}: {message}"
    )


@every_script
def test_options_may_stand_anywhere(parse, script):
    for words in ((50, "--resume", 10), (50, 10, "--resume"), ("--resume", 50, 10)):
        args = parse(script, *words)[1]
        assert (args.total_epochs, args.save_every, args.resume) == (50, 10, True)


@every_script
def test_every_option_has_a_row(parse, monkeypatch, script):
    names, add = set(), argparse._ActionsContainer.add_argument

    def add_argument(parser: object, *given: str, **named: object) -> argparse.Action:
        names.update(given)
        return add(parser, *given, **named)

    monkeypatch.setattr(argparse._ActionsContainer, "add_argument", add_argument)
    parse(script)
    rows = {row.option for row in OPTIONS if script in row.scripts}
    missing = names - rows - {"-h", "--help", "--local-rank", "--local_rank"}
    assert not missing, f"no row in OPTIONS for {script}: {missing}"
