"""Each option is in force in each script that has it, and a number below its range is refused.

OPTIONS is the table. A new option is a row there, for example

    Row("--label-smoothing", (0.0, 0.5)),

where the two values must give different losses, and the same ones in each of the scripts.
"""

import argparse
import os
import runpy
import signal
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers.jobs import ROOT, SCRIPTS, epochs, every_script, inner, losses, set_up

SINGLE, PARALLEL, SPAWN, TORCHRUN, NODES = ((script,) for script in SCRIPTS)
DDP = SPAWN + TORCHRUN + NODES
OF_NINE = ("--init-method", "tcp://10.0.0.1:1000", "--rank", 0, "--world-size", 9, "--no-cuda")


@pytest.fixture
def tools(make, calls, parse, monkeypatch, capsys):
    return SimpleNamespace(make=make, calls=calls, parse=parse, patch=monkeypatch, capsys=capsys)


# --- looks: what is seen of a script that is given options ----------------------------------------


def trained(tools: SimpleNamespace, script: str, *options: object) -> SimpleNamespace:
    """What it trains and prints; without dropout that is the same in all scripts."""
    job = SimpleNamespace(batches=[], test_batches=[], types=set(), log_dir=None)
    files, kernels, compiled, join = {*os.listdir()}, [], [], dist.init_process_group

    def joining(*given: object, **named: object) -> None:
        kernels.append(torch.are_deterministic_algorithms_enabled())
        join(*given, **named)

    def compile(forward: Callable, **_: object) -> Callable:
        return lambda *inputs: compiled.append(forward) or forward(*inputs)

    def writer(log_dir: str, **_: object) -> SimpleNamespace:
        job.log_dir = log_dir
        return SimpleNamespace(add_scalar=lambda *_: None, flush=lambda: None)

    def look(model: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        (job.batches if model.training else job.test_batches).append(len(inputs[0]))
        job.types.add(str(output.dtype))

    with tools.patch.context() as patch:
        patch.setattr(dist, "init_process_group", joining)
        patch.setattr(torch, "compile", compile)
        tensorboard = SimpleNamespace(SummaryWriter=writer)
        patch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # --deterministic would leave it
        trainer = tools.make(script, "--batch-size", 8, "--log-interval", 1, *options)[1]
        kernels.append(torch.are_deterministic_algorithms_enabled())
        torch.use_deterministic_algorithms(False)
        patch.setattr(torch.nn.Dropout, "forward", lambda _, inputs: inputs)
        inner(trainer).register_forward_hook(look)
        tools.capsys.readouterr()
        did = {name: given for name, *given in tools.calls}
        trainer.train(*did["train"])
    text = tools.capsys.readouterr().out
    results = [line[name] for line in epochs(text) for name in ("train_loss", "test_loss")]
    job.losses = losses(text) + results
    job.epochs = [line["epoch"] for line in epochs(text)]
    job.steps = [int(line.split()[4]) for line in text.splitlines() if "| Step " in line]
    job.saved = [int(line.split()[1]) for line in text.splitlines() if "saved at" in line]
    job.files = [name for name in os.listdir() if name not in files and "output" not in name]
    job.model = type(inner(trainer)).__name__
    job.asked = did["load_dataset"]
    job.compiled = len(compiled) > 0
    job.deterministic = all(kernels)  # before the group chooses its own, too
    loaders = (trainer.train_data, trainer.test_data)
    job.workers = [len(getattr(loader._iterator, "_workers", ())) for loader in loaders]
    return job


def two_gpus(patch: pytest.MonkeyPatch) -> None:
    cuda = lambda check_available=False: torch.device("cuda")  # noqa: E731
    patch.setattr(torch.accelerator, "current_accelerator", cuda)
    patch.setattr(torch.accelerator, "device_count", lambda: 2)
    patch.setattr(torch.accelerator, "set_device_index", lambda _: None)


def joined(tools: SimpleNamespace, script: str, *options: object) -> SimpleNamespace:
    """On a machine with two GPUs: its device, and what it gives init_process_group()."""
    job = SimpleNamespace()
    two_gpus(tools.patch)
    tools.patch.setattr(torch, "set_num_threads", lambda _: None)
    tools.patch.setattr(dist, "is_backend_available", lambda _: True)
    tools.patch.setattr(dist, "get_backend", lambda: "any")
    tools.patch.setattr(dist, "get_rank", lambda: 0)
    tools.patch.setattr(
        dist,
        "init_process_group",
        lambda backend, **given: vars(job).update(given, backend=backend),
    )
    module, args = tools.parse(script, *options)
    if script in DDP:
        job.device = set_up(module, args)
        return job
    tools.patch.setattr(
        module, "load_train_objs", lambda _, device: vars(job).update(device=device)
    )
    with pytest.raises(TypeError):  # there is nothing to train
        module.main(args)
    return job


def started(tools: SimpleNamespace, script: str, *options: object) -> SimpleNamespace:
    """What its last lines do."""
    job = SimpleNamespace()
    tools.parse(script, *options)
    tools.patch.setattr(mp, "spawn", lambda _, args, nprocs: vars(job).update(processes=nprocs))
    tools.patch.setattr(signal, "signal", lambda *_: None)
    runpy.run_path(str(ROOT / script), run_name="__main__")
    return job


def converted(tools: SimpleNamespace, script: str, *options: object) -> bool:
    """Whether SyncBatchNorm takes the model."""
    models, norm = [], torch.nn.SyncBatchNorm
    with tools.patch.context() as patch:
        patch.setattr(norm, "convert_sync_batchnorm", lambda model: models.append(model) or model)
        return [inner(tools.make(script, *options)[1])] == models


# --- the table ------------------------------------------------------------------------------------


def the_losses(job: SimpleNamespace) -> list[float]:
    return job.losses


class Row(NamedTuple):
    """An option and two of its values: of a number the smallest first, of a switch False and True.

    `look` sees the script with a value, and `seen` picks what must be `expected`, which is the
    value itself unless it is given. Losses must be those of another script.
    """

    option: str
    values: tuple
    seen: Callable = the_losses
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


F32, BF16, F16 = (["torch.float32"], ["torch.bfloat16"], ["torch.float16"])
URL = lambda job: job.init_method  # noqa: E731
STEPS = ([1, 2, 3, 4, 5], [1, 2, 3])  # of 8 samples, and of two times 8
OPTIONS = (
    Row("total_epochs", (1, 3), lambda job: len(job.epochs)),
    Row("save_every", (1, 3), lambda job: job.saved, ([0, 1, 2, 3, 4], [2, 4])),
    Row("--batch-size", (1, 8), lambda job: job.batches[0]),
    Row("--batch_size", (1, 8), lambda job: job.batches[0]),
    Row("--test-batch-size", (1, 5), lambda job: job.test_batches[0]),
    Row("--lr", (0.0, 0.05)),
    Row("--momentum", (0.0, 0.5)),
    Row("--dataset", ("digits", "cifar10"), lambda job: job.model, ("ConvNet", "LeNet")),
    Row("--dataset", ("digits", "mnist"), lambda job: job.asked[0]),
    Row("--data-dir", ("a", "b"), lambda job: job.asked[1]),
    Row("--model", ("mlp", "lenet"), lambda job: job.model, ("MLP", "LeNet")),
    Row("--seed", (0, 7)),
    Row("--deterministic", (False, True), lambda job: job.deterministic),
    Row("--num-workers", (0, 1), lambda job: job.workers, ([0, 0], [1, 1])),
    Row("--log-interval", (0, 2), lambda job: job.steps, ([], [2, 4])),
    Row("--snapshot-path", ("a.pt", "b.pt"), lambda job: job.files, (["a.pt"], ["b.pt"])),
    Row("--resume", (False, True), lambda job: job.epochs, ([0], [])),  # the first one has saved
    Row("--device", ("cuda", "cpu"), lambda job: job.device.type, (), SINGLE + DDP, joined),
    Row("--backend", ("nccl", "gloo"), lambda job: job.backend, (), DDP, joined),
    Row("--timeout", (1, 77), lambda job: job.timeout.total_seconds(), (), DDP, joined),
    Row("--nproc-per-node", (1, 3), lambda job: job.processes, (), SPAWN, started),
    Row("--nproc-per-node", (1, 3), lambda job: job.processes, (), NODES, started, OF_NINE),
    Row("--accumulate", (1, 2), lambda job: job.steps, STEPS, TORCHRUN),
    Row("--amp", ("off", "bf16"), lambda job: sorted(job.types), (F32, BF16), TORCHRUN),
    Row("--amp", ("off", "fp16"), lambda job: sorted(job.types), (F32, F16), TORCHRUN),
    Row("--compile", (False, True), lambda job: job.compiled, (), TORCHRUN),
    Row("--sync-bn", (False, True), bool, (), TORCHRUN, converted),
    Row("--log-dir", ("a", "b"), lambda job: job.log_dir, (), TORCHRUN),
    Row("--rank", (0, 3), lambda job: job.rank, (), NODES, joined, OF_NINE),
    Row("--world-size", (1, 3), lambda job: job.world_size, (), NODES, joined, OF_NINE),
    Row("--init-method", ("tcp://a:1", "tcp://b:2"), URL, (), NODES, joined),
    Row("--epochs", (1, 3), lambda job: len(job.epochs), (), NODES),
    Row("--no-cuda", (False, True), lambda job: job.device.type, ("cuda", "cpu"), NODES, joined),
)
EACH = [
    pytest.param(row, script, id=f"{row.option}-{script}")
    for row in OPTIONS
    for script in row.scripts
]
NUMBERS = [each for each in EACH if type(each.values[0].values[0]) in (int, float)]


@pytest.mark.parametrize(("row", "script"), EACH)
def test_an_option_is_in_force(tools, row, script):
    def seen(script: str) -> list:
        return [row.seen(row.look(tools, script, *row.words(value))) for value in row.values]

    ours, (one, other) = seen(script), row.values
    assert ours[0] != pytest.approx(ours[1], abs=1e-4), (
        f"{row.option} does nothing in {script}: with {one} and with {other} one sees {ours[0]}"
    )
    expected, where = row.expected or row.values, "the table"
    if row.seen is the_losses:
        where = row.scripts[-1 if script == row.scripts[0] else 0]
        expected = seen(where)
    for value, mine, right in zip(row.values, ours, expected, strict=True):
        assert mine == pytest.approx(right, abs=1e-4), (
            f"{row.option} {value} gives {mine} in {script}, and {right} in {where}"
        )


@pytest.mark.parametrize(("row", "script"), NUMBERS)
def test_a_number_below_its_range_is_refused(refuse, row, script):
    low = row.values[0]
    argument, _, message = refuse(script, *row.words(low - 1)).partition(": ")
    assert row.option in argument and message == f"{low - 1} is less than {low}", (
        f"{row.option} {low - 1} in {script}: {argument}: {message}"
    )


@every_script
def test_every_option_has_a_row(parse, monkeypatch, script):
    actions = []

    def parse_args(parser: argparse.ArgumentParser) -> None:
        actions.extend(parser._actions)
        raise InterruptedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    with pytest.raises(InterruptedError):
        parse(script)
    rows = {row.option for row in OPTIONS if script in row.scripts}
    rows |= {"-h", "--help", "--local-rank", "--local_rank"}
    for action in actions:
        for option in action.option_strings or [action.dest]:
            assert option in rows, f"{option} of {script} has no row in OPTIONS"
