"""Each option is in force in each script that has it.

A new option is a row of OPTIONS, say Row("--label-smoothing", (0.0, 0.5)): the two values must
give different losses, and the same ones in each of the scripts.
"""

import os
import re
import runpy
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import Mock

import pytest
import torch
import torch.multiprocessing as mp
from helpers.jobs import ROOT, SCRIPTS, epochs, every_form, every_script, losses, set_up

SINGLE, _, SPAWN, TORCHRUN, NODES = ((script,) for script in SCRIPTS)
FORMS = SINGLE + SPAWN + TORCHRUN  # test_sameness.py compares the other two with these
DDP = SPAWN + TORCHRUN + NODES
OF_NINE = ("--init-method", "tcp://10.0.0.1:1000", "--rank", 0, "--world-size", 9)


@pytest.fixture
def tools(do, parse, pretend, monkeypatch):
    return SimpleNamespace(do=do, parse=parse, pretend=pretend, monkeypatch=monkeypatch)


def trained(tools: SimpleNamespace, script: str, *options: object) -> SimpleNamespace:
    """What it trains and prints; without dropout that is the same in all scripts."""
    job, module = SimpleNamespace(), tools.do.module(script)
    sizes, types, compiled, converted, workers = {}, set(), [], [], []
    files, build_model = {*os.listdir()}, module.build_model

    def build(*given: object) -> torch.nn.Module:
        model = build_model(*given)
        model.register_forward_hook(look)
        return model

    def look(model: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        sizes.setdefault(model.training, len(inputs[0]))  # the first one is a whole batch
        types.add(output.dtype)

    def compile(forward: Callable, **_: object) -> Callable:
        return lambda *inputs: compiled.append(forward) or forward(*inputs)

    def convert(model: torch.nn.Module) -> torch.nn.Module:
        return converted.append(model) or model

    def loader(*given: object, **named: object) -> torch.utils.data.DataLoader:
        workers.append(named.get("num_workers", 0))
        if workers[-1]:
            named["multiprocessing_context"] = "forkserver"  # quicker than spawn
        return torch.utils.data.DataLoader(*given, **named)

    with tools.monkeypatch.context() as patch:
        patch.setattr(torch, "compile", compile)
        patch.setattr(torch.nn.SyncBatchNorm, "convert_sync_batchnorm", convert)
        patch.setattr(torch.nn.Dropout, "forward", lambda _, inputs: inputs)
        patch.setattr(module, "build_model", build)
        patch.setattr(module, "DataLoader", loader)
        did = tools.do(script, "--batch-size", 8, "--log-interval", 1, *options)
    text = did.text
    job.losses = losses(text) + [line["val_loss"] for line in epochs(text)]
    job.epochs = [line["epoch"] for line in epochs(text)]
    job.steps = [int(line.split()[4]) for line in text.splitlines() if "| Loss" in line]
    job.saved = [int(line.split()[1]) for line in text.splitlines() if "saved at" in line]
    job.saved_steps = [int(line.split()[4]) for line in text.splitlines() if "Saved at" in line]
    job.files = sorted(name for name in {*os.listdir()} - files if "output" not in name)
    job.model = type(did.model).__name__
    ((_, job.dataset, job.data_dir),) = [call for call in did.calls if call[0] == "load_dataset"]
    job.batch_sizes = [sizes.get(True), sizes.get(False)]  # None: all is done
    job.types, job.compiled = [*types], len(compiled) > 0
    job.converted, job.workers = converted == [did.model], workers
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
    job.device = set_up(module, args).type
    job.timeout = job.timeout.total_seconds()
    return job


class Row(NamedTuple):
    """An option and two of its values: of a switch False and True.

    `look` sees the script with a value, and what it has `seen` must be `expected`, which is the
    value itself unless it is given. Losses must be those of another script.
    """

    option: str
    values: tuple
    seen: str = "losses"
    expected: tuple = ()
    scripts: tuple[str, ...] = FORMS
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
    Row("--batch-size", (1, 8), "batch_sizes", ([1, 1], [8, 8])),
    Row("--batch_size", (1, 8), "batch_sizes", ([1, 1], [8, 8])),
    Row("--lr", (0.0, 0.05)),
    Row("--momentum", (0.0, 0.5)),
    Row("--dataset", ("digits", "mnist"), "dataset"),
    Row("--data-dir", ("a", "b"), "data_dir"),
    Row("--model", ("mlp", "lenet"), "model", ("MLP", "LeNet")),
    Row("--seed", (0, 7)),
    Row("--num-workers", (0, 1), "workers", ([0, 0], [1, 1])),
    Row("--log-interval", (0, 2), "steps", ([], [2, 4])),
    Row("--snapshot-path", ("a.pt", "b.pt"), "files", (["a.pt"], ["b.pt"])),
    Row("--resume", (False, True), "epochs", ([0], [])),  # the first one has saved
    Row("--device", ("cuda", "cpu"), "device", (), DDP, joined),
    Row("--backend", ("nccl", "gloo"), "backend", (), DDP, joined),
    Row("--timeout", (1, 77), "timeout", (), DDP, joined),
    Row("--nproc-per-node", (1, 3), "processes", (), SPAWN, joined),
    Row("--nproc-per-node", (1, 3), "processes", (), NODES, joined, OF_NINE),
    Row("--accumulate", (1, 2), "steps", ([1, 2, 3, 4, 5], [1, 2, 3]), TORCHRUN),
    Row("--save-steps", (1, 3), "saved_steps", ([1, 2, 3, 4, 5], [3]), TORCHRUN),
    Row("--amp", (False, True), "types", ([torch.float32], [torch.bfloat16]), TORCHRUN),
    Row("--clip", (0.0, 0.1), "losses", (), TORCHRUN),
    Row("--warm-up", (0, 4), "losses", (), TORCHRUN),
    Row("--cosine", (False, True), "losses", (), TORCHRUN),
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


@pytest.mark.parametrize(("row", "script"), EACH)
def test_an_option_is_in_force(tools, row, script):
    def seen(script: str) -> list:
        looks = [row.look(tools, script, *row.words(value)) for value in row.values]
        return [getattr(job, row.seen) for job in looks]

    ours = seen(script)
    assert ours[0] != pytest.approx(ours[1], abs=1e-4), f"{row.option} does nothing in {script}"
    expected = row.expected or row.values
    if row.seen == "losses":
        expected = seen(row.scripts[-1 if script == row.scripts[0] else 0])
    for mine, right in zip(ours, expected, strict=True):
        assert mine == pytest.approx(right, abs=2e-4), f"{row.option} in {script}"


def test_what_is_clipped_is_the_norm_of_the_steps_gradient(do, monkeypatch):
    norms, step = [], torch.optim.SGD.step

    def stepping(optimizer: torch.optim.Optimizer, *given: object) -> object:
        gradients = [weight.grad.norm() for weight in optimizer.param_groups[0]["params"]]
        norms.append(torch.stack(gradients).norm().item())
        return step(optimizer, *given)

    monkeypatch.setattr(torch.optim.SGD, "step", stepping)
    options = (1, "--model", "mlp", "--batch-size", 4, "--accumulate", 2)
    do("ddp_torchrun.py", *options)
    assert min(norms) > 0.5
    norms.clear()
    do("ddp_torchrun.py", *options, "--clip", 0.5)
    assert norms == pytest.approx([0.5] * 5, rel=1e-4)


@every_form
def test_options_may_stand_anywhere(parse, script):
    for words in ((50, "--resume", 10), (50, 10, "--resume"), ("--resume", 50, 10)):
        args = parse(script, *words)[1]
        assert (args.total_epochs, args.save_every, args.resume) == (50, 10, True)


@every_script
def test_every_option_has_a_row(script):
    names = {*re.findall(r'^    add\("([\w-]+)"', (ROOT / script).read_text(), re.M)}
    assert names - {row.option for row in OPTIONS} == {"--local-rank"} & names
