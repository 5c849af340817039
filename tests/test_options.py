"""Each option is in force in each script that has it, and each process gets its device.

A new option is a row of OPTIONS, say Row("--label-smoothing", (0.0, 0.5)): the two values must
give different losses, and the same ones in each of the scripts.
"""

import re
import runpy
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers.jobs import ROOT, SCRIPTS, epochs, every_ddp_script, every_script

from common.data import make_digits

SINGLE, PARALLEL, SPAWN, TORCHRUN, NODES = SCRIPTS


@pytest.fixture
def trained(do, monkeypatch):
    """trained(script, *options) -> what it does; without dropout that is the same in all."""

    def trained(script: str, *options: object) -> SimpleNamespace:
        module, job, sizes = do.module(script), SimpleNamespace(), {}
        before, build_model = {*Path().iterdir()}, module.build_model

        def load(*given: object) -> tuple:
            job.dataset, job.data_dir = given
            return make_digits(40, 0), make_digits(10, 1)

        def build(*given: object) -> torch.nn.Module:
            model = build_model(*given)
            model.register_forward_pre_hook(look)
            return model

        def look(model: torch.nn.Module, inputs: tuple) -> None:
            sizes.setdefault(model.training, len(inputs[0]))  # the first one is a whole batch

        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.Dropout, "forward", lambda _, inputs: inputs)
            patch.setattr(module, "build_model", build)
            patch.setattr(module, "load_dataset", load)
            did = do(script, "--batch-size", 8, *options)
        lines = epochs(did.text)
        job.losses = [line[name] for line in lines for name in ("train_loss", "val_loss")]
        job.epochs = [line["epoch"] for line in lines]
        job.saved = [int(line.split()[1]) for line in did.text.splitlines() if "saved at" in line]
        job.files = [*map(str, {*Path().glob("*.pt")} - before)]
        job.model = type(did.model).__name__
        job.batch_sizes = [sizes.get(True), sizes.get(False)]  # None: all is done
        job.workers = did.passes[0][1].num_workers if did.passes else 0
        return job

    return trained


class Row(NamedTuple):
    """An option and two of its values: of a switch False and True.

    What is `seen` with them must be `expected`, which is the values themselves unless it is given.
    Losses must be those of another script.
    """

    option: str
    values: tuple
    seen: str = "losses"
    expected: tuple = ()

    def words(self, value: object) -> tuple:
        if self.option in ("total_epochs", "save_every"):
            return (value,) if self.option == "total_epochs" else (5, value)
        if isinstance(value, bool):
            return (1, *([self.option] if value else []))
        return (1, self.option, value)


OPTIONS = (
    Row("total_epochs", (1, 3), "epochs", ([0], [0, 1, 2])),
    Row("save_every", (1, 3), "saved", ([0, 1, 2, 3, 4], [2, 4])),
    Row("--batch-size", (1, 8), "batch_sizes", ([1, 1], [8, 8])),
    Row("--batch_size", (1, 8), "batch_sizes", ([1, 1], [8, 8])),
    Row("--lr", (0.0, 0.05)),
    Row("--momentum", (0.0, 0.5)),
    Row("--dataset", ("digits", "mnist"), "dataset"),
    Row("--data-dir", ("a", "b"), "data_dir"),
    Row("--model", ("mlp", "lenet"), "model", ("MLP", "LeNet")),
    Row("--seed", (0, 7)),
    Row("--num-workers", (0, 1), "workers"),
    Row("--snapshot-path", ("a.pt", "b.pt"), "files", (["a.pt"], ["b.pt"])),
    Row("--resume", (False, True), "epochs", ([0], [])),  # the first one has saved
)
# These are in test_each_process_gets_its_device and in test_multinode.py.
OF_THE_START = {"--device", "--backend", "--nproc-per-node", "--init-method", "--rank"}
OF_THE_START |= {"--world-size", "--local-rank"}


@every_script
@pytest.mark.parametrize("row", OPTIONS, ids=lambda row: row.option)
def test_an_option_is_in_force(trained, tmp_path, row, script):
    def seen(script: str) -> list:
        found = []
        for value in row.values:
            job = trained(script, *row.words(value))
            found.append(getattr(job, row.seen))
            if row.option != "--resume":
                for path in tmp_path.glob("*.pt"):
                    path.unlink()
        return found

    ours = seen(script)
    assert ours[0] != pytest.approx(ours[1], abs=1e-4), f"{row.option} does nothing"
    expected = row.expected or row.values
    if row.seen == "losses":
        expected = seen(SPAWN if script == SINGLE else SINGLE)
    for mine, right in zip(ours, expected, strict=True):
        assert mine == pytest.approx(right, abs=2e-4)


@every_script
def test_every_option_has_a_row(script):
    names = {*re.findall(r'^    add\("([\w-]+)"', (ROOT / script).read_text(), re.M)}
    assert len(names) >= 12 and names - {row.option for row in OPTIONS} <= OF_THE_START


@every_script
def test_the_defaults_and_the_order_of_options(parse, script):
    args = parse(script)[1]
    assert (args.total_epochs, args.save_every, args.batch_size) == (5, 1, 32)
    assert (args.lr, args.momentum, args.seed, args.num_workers) == (0.01, 0.9, 42, 0)
    assert (args.dataset, args.data_dir, args.snapshot_path) == ("digits", "data", "checkpoint.pt")
    for words in ((50, 10, "--resume"), ("--resume", 50, 10)):
        args = parse(script, *words)[1]
        assert (args.total_epochs, args.save_every, args.resume) == (50, 10, True)


# --- on a machine with four GPUs -----------------------------------------------------------------


@pytest.fixture
def four_gpus(monkeypatch):
    """What a process would set up there."""
    job, patch = SimpleNamespace(device=None, rank=None, world_size=None), monkeypatch.setattr
    patch(torch.cuda, "is_available", lambda: True)
    patch(torch.cuda, "device_count", lambda: 4)
    patch(torch.cuda, "set_device", lambda device: setattr(job, "device", str(device)))
    patch(dist, "is_nccl_available", lambda: job.nccl)
    patch(dist, "init_process_group", lambda name, **more: vars(job).update(more, backend=name))
    job.nccl = True
    return job


def set_up(parse, script: str, *options: object, number: int = 1) -> torch.device:
    """ddp_setup() as main() calls it in the process of this number."""
    module, args = parse(script, *options)
    args.init_method = getattr(args, "init_method", "tcp://")  # ddp_spawn.py's parent chooses it
    return module.ddp_setup(*([number] if script == SPAWN else []), args)


@every_ddp_script
def test_each_process_gets_its_device(parse, four_gpus, monkeypatch, script):
    """The sixth process is the second one of the second machine. The first GPU is the default."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    six = ("--rank", 5, "--world-size", 8, "--init-method", "tcp://10.0.0.1:1000")
    options = six if script == NODES else ()
    four_gpus.device = None
    assert str(set_up(parse, script, *options)) == four_gpus.device == "cuda:1"
    assert four_gpus.backend == "nccl"
    if script == NODES:
        assert four_gpus.init_method == "tcp://10.0.0.1:1000"
    if script != TORCHRUN:  # which leaves these to the environment
        expected = (5, 8) if script == NODES else (1, 4)
        assert (four_gpus.rank, four_gpus.world_size) == expected
    set_up(parse, script, *options, "--backend", "gloo")
    assert four_gpus.backend == "gloo"
    four_gpus.nccl = False  # Windows
    assert parse(script, *options)[1].backend == "gloo"
    four_gpus.nccl, four_gpus.device = True, None
    assert str(set_up(parse, script, *options, "--device", "cpu")) == "cpu"
    assert (four_gpus.backend, four_gpus.device) == ("gloo", None)


def test_spawn_starts_a_process_for_each_gpu_or_two_on_a_cpu(parse, four_gpus, monkeypatch):
    monkeypatch.setattr(mp, "spawn", spawn := Mock())
    monkeypatch.setattr(signal, "signal", Mock())
    for options in ((), ("--device", "cpu"), ("--nproc-per-node", 3)):
        parse(SPAWN, *options)
        runpy.run_path(str(ROOT / SPAWN), run_name="__main__")
    assert [call.kwargs["nprocs"] for call in spawn.call_args_list] == [4, 2, 3]


@every_script
def test_memory_is_pinned_for_a_gpu(parse, four_gpus, monkeypatch, script):
    module, args = parse(script)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda _: None)
    monkeypatch.setattr(module, "load_dataset", lambda *_: ([1], [1]))
    monkeypatch.setattr(module, "DataLoader", loader := Mock(side_effect=[0, ZeroDivisionError]))
    monkeypatch.setattr(module, "DistributedSampler", Mock(), raising=False)
    monkeypatch.setattr(module, "Subset", Mock(), raising=False)
    with pytest.raises(ZeroDivisionError):
        if script in (SINGLE, PARALLEL):
            module.main(args)
        else:
            module.train(args, torch.device("cuda", 0))
    assert [call.kwargs["pin_memory"] for call in loader.call_args_list] == [True, True]
