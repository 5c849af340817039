"""recipes/long_run.py: the job of the five scripts, with what it has beyond them.

FAULTS=40 .venv/bin/pytest -m slow tests/test_long_run.py     (5 without the variable)
"""

import contextlib
import os
import random
import re
import shutil
import signal
import sys
import time
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.files import difference, idx_files, load, patched, same_bytes
from helpers.hosts import require
from helpers.jobs import ROOT, TORCHRUN, epochs
from helpers.ranks import start_server, train
from test_faults import FAULTS, disk, strike  # noqa: F401 (disk is a fixture)
from test_multinode import Nodes, hosts  # noqa: F401 (hosts is a fixture)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import DataLoader

from common.data import make_digits

SCRIPT = "recipes/long_run.py"
LAUNCH = TORCHRUN.replace("ddp_torchrun.py", SCRIPT)
RESTARTS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1}
STEP = re.compile(r"^Epoch \d+ \| Step (\d+) \| Loss: (\S+) \| lr: (\S+)$", re.M)
SAVED = re.compile(r"^Step (\d+) \| Training checkpoint saved at (\S+)$", re.M)
MLP = ("--model", "mlp")


@pytest.fixture
def parse(parse, monkeypatch):
    """parse(*arguments) -> the script as a module, and what it makes of the arguments."""
    monkeypatch.syspath_prepend(ROOT / "recipes")
    return lambda *arguments: parse("long_run.py", *arguments)


@pytest.fixture
def do(parse, monkeypatch, capsys):
    """do(*arguments, data=(40, 10)) -> what it printed and did, in the tests' process as the only
    rank, with so many digits to train and to validate. Batches are of 8, so an epoch has 5 steps.
    """

    def do(*arguments: object, data: tuple[int, int] = (40, 10)) -> SimpleNamespace:
        module, args = parse("--batch-size", 8, *arguments)
        job = SimpleNamespace(module=module, args=args, rates=[], norms=[], seen=[], types=set())
        build_model, step = module.build_model, torch.optim.SGD.step
        monkeypatch.setattr(module, "DataLoader", make_loader)

        def build(*given: object) -> torch.nn.Module:
            job.model = build_model(*given)
            job.model.register_forward_hook(look)
            return job.model

        def look(model: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
            job.seen.append(len(inputs[0]))
            job.types.add(output.dtype)

        def stepping(optimizer: torch.optim.Optimizer, *given: object) -> object:
            (group,) = optimizer.param_groups
            job.rates.append(group["lr"])
            job.norms.append(torch.stack([w.grad.norm() for w in group["params"]]).norm().item())
            return step(optimizer, *given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "load_dataset", lambda *_: tuple(map(make_digits, data, (0, 1))))
            patch.setattr(module, "build_model", build)
            patch.setattr(torch.optim.SGD, "step", stepping)
            try:
                module.main.__wrapped__(args)  # without torchrun's @record
            finally:
                job.text = capsys.readouterr().out
                if dist.is_initialized():
                    dist.destroy_process_group()
        job.losses = [float(loss) for _, loss, _ in STEP.findall(job.text)]
        job.steps = [int(step) for step, _, _ in STEP.findall(job.text)]
        job.saved = [int(step) for step, _ in SAVED.findall(job.text)]
        return job

    def make_loader(*given: object, **named: object) -> DataLoader:
        if named["num_workers"]:
            assert named["multiprocessing_context"] == "spawn" and named["persistent_workers"]
            start_server()
            named["multiprocessing_context"] = "forkserver"  # quicker than spawned ones
        do.workers = named["num_workers"]
        return DataLoader(*given, **named)

    do.module = parse()[0]
    return do


# --- the same job ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The options of a job of two epochs, and what one process makes of it with batches of 24.

    84 samples make three steps of 24 and one of 12. Of the 3 validation samples, one of four ranks
    has none.
    """
    folder = tmp_path_factory.mktemp("reference")
    options = (2, "--dataset", "fashion-mnist", "--data-dir", idx_files(folder, 84, 3))
    text = train(folder, "single_gpu.py", 1, *options, "--batch-size", 24, dtype="float64")
    return options, scores(text), load(folder / "checkpoint.pt")


def scores(text: str) -> list[dict[str, float]]:
    return [{**line, "rate": 0} for line in epochs(text)]


LOSSES = {}  # of each step, whoever takes it


@pytest.mark.numbers
@pytest.mark.parametrize(
    ("processes", "batch", "accumulate"),
    # The last step's micro-batches: of 8 and 4 samples, 4 and 2, 2 and 1, 4 alone, 12 alone
    [(1, 8, 3), (2, 4, 3), (4, 2, 3), (3, 4, 2), (1, 24, 1)],
)
def test_the_same_steps(tmp_path, reference, processes, batch, accumulate):
    """A loss line is the mean over all ranks and micro-batches of the step."""
    data, expected_lines, expected = reference
    options = ("--batch-size", batch, "--accumulate", accumulate, "--log-interval", 1)
    text = train(tmp_path, SCRIPT, processes, *data, *options, dtype="float64")
    assert text.count("Steps: 4\n") == 2 * processes
    assert scores(text) == expected_lines
    assert difference(load(tmp_path / "checkpoint.pt"), expected) < 1e-12
    assert len(STEP.findall(text)) == 8
    assert LOSSES.setdefault("", STEP.findall(text)) == STEP.findall(text)


def test_gradients_are_sent_once_a_step(do, monkeypatch):
    """Also after micro-batches of 4, 4 and 4 samples, and of 4 at the end."""
    sent, steps, step = [], [], torch.optim.SGD.step

    def wrap(model: torch.nn.Module, **named: object) -> torch.nn.Module:
        model = torch.nn.parallel.DistributedDataParallel(model, **named)
        hook = lambda _, bucket: sent.append(bucket.index()) or allreduce_hook(None, bucket)  # noqa: E731
        model.register_comm_hook(None, hook)
        return model

    def stepping(optimizer: torch.optim.Optimizer, *given: object) -> object:
        steps.append(sorted(sent))
        sent.clear()
        return step(optimizer, *given)

    monkeypatch.setattr(do.module, "DDP", wrap)
    monkeypatch.setattr(torch.optim.SGD, "step", stepping)
    do(1, *MLP, "--batch-size", 4, "--accumulate", 3)
    assert len(steps) == 4 and all(step == [*range(len(step))] != [] for step in steps), steps


# --- options --------------------------------------------------------------------------------------

# option, two values (of a switch: without and with it), what is seen of the job, and how it is
OPTIONS = [
    ("--accumulate", (1, 2), "steps", ([1, 2, 3, 4, 5], [1, 2, 3])),
    ("--amp", (False, True), "types", ({torch.float32}, {torch.bfloat16})),
    ("--batch-size", (8, 4), "seen", ([8] * 5 + [8, 2], [4] * 10 + [4, 4, 2])),
    ("--log-interval", (1, 2), "steps", ([1, 2, 3, 4, 5], [2, 4])),
    ("--num-workers", (0, 1), "workers", (0, 1)),
    ("--save-steps", (1, 3), "saved", ([1, 2, 3, 4, 5], [3, 5])),
    ("--save-minutes", (1, 0), "saved", ([5], [1, 2, 3, 4, 5])),
    ("--snapshot-path", ("a.pt", "b/c.pt"), "files", (["a.pt"], ["b/c.pt"])),
    ("--seed", (0, 7), "losses", ()),
    ("--lr", (0.0, 0.05), "losses", ()),
    ("--momentum", (0.0, 0.5), "losses", ()),
    ("--clip", (0.0, 0.1), "losses", ()),
    ("--warm-up", (0, 4), "losses", ()),
    ("--cosine", (False, True), "losses", ()),
]


@pytest.mark.parametrize(("option", "values", "seen", "expected"), OPTIONS)
def test_an_option_is_in_force(do, tmp_path, option, values, seen, expected):
    found = []
    for value in values:
        words = ([option] if value else []) if isinstance(value, bool) else [option, value]
        job = do(1, *MLP, "--log-interval", 1, *words)
        job.workers = do.workers
        job.files = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.pt")]
        found.append(getattr(job, seen))
        (tmp_path / job.files[0]).unlink()
    assert found[0] != found[1] and (not expected or found == [*expected])


def test_options_of_the_model_and_of_the_group(do, monkeypatch):
    called = {}
    for target, name in (
        (torch.nn.SyncBatchNorm, "convert_sync_batchnorm"),
        (torch.nn.Module, "compile"),
        (dist, "init_process_group"),
    ):
        own = getattr(target, name)
        spy = lambda *given, own=own, name=name, **named: (  # noqa: E731
            called.update({name: (given, named)})
            or (None if name == "compile" else own(*given, **named))
        )
        monkeypatch.setattr(target, name, spy)
    do(1, *MLP)
    assert called.keys() == {"init_process_group"}
    Path("checkpoint.pt").unlink()
    job = do(1, "--model", "lenet", "--sync-bn", "--compile", "--timeout", 77, "--backend", "gloo")
    assert type(job.model).__name__ == "LeNet"
    assert called["convert_sync_batchnorm"][0] == (job.model,) == called["compile"][0]
    (backend,), named = called["init_process_group"]
    assert backend == "gloo" and named["timeout"].total_seconds() == 77


def test_every_option_is_tested_here_or_with_ddp_torchrun():
    """To which the rest of parse_args() is the same, to the letter."""
    names, other = (
        {*re.findall(r'^    add\("([\w-]+)"', (ROOT / script).read_text(), re.M)}
        for script in (SCRIPT, "ddp_torchrun.py")
    )
    tested = {row[0] for row in OPTIONS} | {"--sync-bn", "--compile", "--timeout"}
    assert names - other <= tested | {"--save-on-sigterm"} and other <= names


@pytest.mark.parametrize(
    ("type", "expected"), [("cuda", "nccl"), ("xpu", "xccl"), ("mps", "gloo"), (None, "gloo")]
)
def test_any_accelerator_that_has_a_backend(parse, monkeypatch, type, expected):
    """It is told the number of its own device. gloo does not serve MPS."""
    accelerator, told = torch.accelerator, []
    monkeypatch.setattr(accelerator, "is_available", lambda: type is not None)
    monkeypatch.setattr(accelerator, "current_accelerator", lambda: type and torch.device(type))
    monkeypatch.setattr(accelerator, "set_device_index", told.append)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setenv("LOCAL_RANK", "3")
    module, args = parse("--local_rank", 3)
    served = type in ("cuda", "xpu")
    assert (args.device, args.backend) == (type if served else "cpu", expected)
    assert str(module.ddp_setup(args)) == (f"{type}:3" if served else "cpu")
    assert told == ([3] if served else [])
    assert parse("--device", "cpu")[1].backend == "gloo"


def test_what_is_clipped_is_the_norm_of_the_steps_gradient(do):
    options = (1, *MLP, "--batch-size", 4, "--accumulate", 2)
    assert min(do(*options).norms) > 0.5
    Path("checkpoint.pt").unlink()
    assert do(*options, "--clip", 0.5).norms == pytest.approx([0.5] * 5, rel=1e-4)


def test_a_schedule_is_a_function_of_the_step_also_in_a_resumed_run(do):
    """With more epochs, another batch size or another --lr, it falls to nearly 0 at the new end."""
    schedule = (*MLP, "--warm-up", 4, "--cosine", "--lr")
    first = do(2, *schedule, 0.1).rates
    assert first[:5] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])
    assert first[4:] == sorted(first[4:], reverse=True) and 0 < first[-1] < 0.01
    rest = do(4, *schedule, 0.2, "--batch-size", 4, "--resume").rates
    whole = do(4, *schedule, 0.2, "--batch-size", 4, "--snapshot-path", "whole.pt").rates
    assert len(whole) == 40 and rest == whole[20:] and 0 < rest[-1] < 0.001


@pytest.mark.slow("compiles twice")
def test_compile_gives_the_same_losses_and_names(run, tmp_path, fashion):
    """In double precision. A laptop without a C++ compiler skips this; CI has one."""
    require(None if shutil.which("g++") else "no C++ compiler")
    options = (2, *fashion(160, 10), "--log-interval", 1)
    env = {"LADDER_DTYPE": "float64"}
    eager = run(LAUNCH.format(1), *options, "--snapshot-path", "eager.pt", **env)
    text = run(LAUNCH.format(1), *options, "--compile", TORCH_LOGS="graph_code", **env)
    assert STEP.findall(text) == STEP.findall(eager) and "TRACED GRAPH" in text
    assert difference(load(tmp_path / "checkpoint.pt"), load(tmp_path / "eager.pt")) < 1e-10
