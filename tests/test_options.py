"""Each option is in force in each script that has it, and each process gets its device."""

import os
import re
import runpy
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers.jobs import LONG, ROOT, SCRIPTS, epochs, every_ddp_script, every_script

from common.data import make_digits

SINGLE, PARALLEL, SPAWN, TORCHRUN, NODES = SCRIPTS
# What is typed, and what it must change: to these values, or to any others.
OPTIONS = [
    (("1", "3"), "epochs", (1, 3)),
    (("5 1", "5 3"), "saved", ([0, 1, 2, 3, 4], [2, 4])),
    (("1 --batch-size 1", "1 --batch-size 8"), "batch_size", (1, 8)),
    (("1 --batch_size 1", "1 --batch_size 8"), "batch_size", (1, 8)),
    (("1 --lr 0", "1 --lr 0.05"), "loss", ()),
    (("1 --momentum 0", "1 --momentum 0.5"), "loss", ()),
    (("1 --dataset digits", "1 --dataset mnist"), "data", (("digits", "data"), ("mnist", "data"))),
    (("1 --data-dir a", "1 --data-dir b"), "data", (("digits", "a"), ("digits", "b"))),
    (("1 --model mlp", "1 --model lenet"), "model", ("MLP", "LeNet")),
    (("1 --seed 0", "1 --seed 7"), "loss", ()),
    (("1 --snapshot-path a.pt", "1 --snapshot-path b.pt"), "files", (["a.pt"], ["b.pt"])),
    (("1", "2 --resume"), "epochs", (1, 1)),
]
# In the tests below, in test_steps.py, test_training.py and test_multinode.py:
ELSEWHERE = {"--device", "--backend", "--nproc-per-node", "--init-method", "--rank"}
ELSEWHERE |= {"--world-size", "--local-rank", "--num-workers"}


@every_script
@pytest.mark.parametrize(("typed", "what", "expected"), OPTIONS)
def test_an_option_is_in_force(do, monkeypatch, script, typed, what, expected):
    def load(*given: object) -> tuple:
        seen.data = given
        return make_digits(40, 0), make_digits(10, 1)

    module, found = do.module(script), []
    monkeypatch.setattr(module, "load_dataset", load)
    for words in typed:
        seen = SimpleNamespace()
        job = do(script, *words.split())
        lines = epochs(job.text)
        seen.epochs, last = len(lines), lines[-1]
        seen.loss = last["train_loss"], last["val_loss"]
        seen.saved = [int(epoch) for epoch in re.findall(r"Epoch (\d+) \|.* saved", job.text)]
        seen.model, seen.batch_size = type(job.model).__name__, job.passes[0][1].batch_size
        seen.files = sorted(path.name for path in Path().glob("*.pt"))
        found.append(getattr(seen, what))
        if "--resume" not in typed[1]:
            for name in seen.files:
                Path(name).unlink()
    assert found == [*expected] if expected else found[0] != found[1], found


@every_script
def test_every_option_has_a_row_and_a_default(parse, script):
    names = {*re.findall(r'^    add\("(--[\w-]+)"', (ROOT / script).read_text(), re.M)}
    tried = " ".join(words for typed, *_ in OPTIONS for words in typed)
    assert len(names) >= 10 and {name for name in names if name not in tried} <= ELSEWHERE
    args = parse(script)[1]
    assert (args.total_epochs, args.save_every, args.batch_size) == (5, 1, 32)
    assert (args.lr, args.momentum, args.seed, args.num_workers) == (0.01, 0.9, 42, 0)
    assert (args.dataset, args.data_dir, args.snapshot_path) == ("digits", "data", "checkpoint.pt")


@pytest.mark.parametrize("typed", ["--local-rank=1", "--local_rank=1"])
def test_torch_distributed_launch_may_add_an_option(parse, typed):
    assert parse(TORCHRUN, typed, 50, 10)[1].total_epochs == 50


# --- on a machine with four GPUs -----------------------------------------------------------------


@pytest.fixture
def four_gpus(monkeypatch):
    """What a process would set up there."""
    job, patch = SimpleNamespace(device=None, nccl=True), monkeypatch.setattr
    patch(torch.cuda, "is_available", lambda: True)
    patch(torch.cuda, "device_count", lambda: 4)
    patch(torch.cuda, "set_device", lambda device: setattr(job, "device", str(device)))
    patch(dist, "is_nccl_available", lambda: job.nccl)
    patch(dist, "init_process_group", lambda name, **more: vars(job).update(more, backend=name))
    return job


@every_ddp_script
def test_each_process_gets_its_device(parse, four_gpus, monkeypatch, script):
    """It is the sixth one of all, and the second one of its machine."""
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    method = ("--init-method", "tcp://10.0.0.1:1000", "--world-size", 8)

    def set_up(*options: object) -> str:
        module, args = parse(script, *options, *(method if script == NODES else ()))
        if script == SPAWN:
            args.init_method = method[1]
            return str(module.ddp_setup(1, args))
        return str(module.ddp_setup(args))

    assert set_up() == four_gpus.device == "cuda:1" and four_gpus.backend == "nccl"
    if script != TORCHRUN:  # which leaves these to the environment
        expected = (method[1], 5, 8) if script == NODES else (method[1], 1, 4)
        assert (four_gpus.init_method, four_gpus.rank, four_gpus.world_size) == expected
    assert set_up("--backend", "gloo") == "cuda:1" and four_gpus.backend == "gloo"
    four_gpus.device = None
    assert set_up("--device", "cpu") == "cpu" and four_gpus.device is None
    assert four_gpus.backend == "gloo"
    four_gpus.nccl = False  # Windows
    assert set_up() == "cuda:1" and four_gpus.backend == "gloo"


def test_spawn_starts_a_process_for_each_gpu_or_two_on_a_cpu(parse, four_gpus, monkeypatch):
    monkeypatch.setattr(mp, "spawn", spawn := Mock())
    monkeypatch.setattr(signal, "signal", Mock())
    monkeypatch.setattr(os, "environ", {})
    for options in ((), ("--device", "cpu"), ("--nproc-per-node", 3)):
        parse(SPAWN, *options)
        runpy.run_path(str(ROOT / SPAWN), run_name="__main__")
    assert [call.kwargs["nprocs"] for call in spawn.call_args_list] == [4, 2, 3]
    assert os.environ == {"OMP_NUM_THREADS": "1"}  # because they share the cores


@pytest.mark.parametrize("script", (*SCRIPTS, LONG))
def test_memory_is_pinned_for_a_gpu_and_workers_persist(parse, four_gpus, monkeypatch, script):
    """Those of long_run.py are spawned."""
    module, args = parse(script, "--num-workers", 1)
    monkeypatch.setattr(dist, "all_gather_object", lambda ranks, own: ranks.__setitem__(0, own))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(module, "load_dataset", lambda *_: ([1], [1]))
    monkeypatch.setattr(module, "DataLoader", loader := Mock())
    monkeypatch.setattr(module, "build_model", Mock(side_effect=ZeroDivisionError))
    monkeypatch.setattr(module, "DistributedSampler", Mock(), raising=False)
    with pytest.raises(ZeroDivisionError):
        if script in (SINGLE, PARALLEL):
            module.main(args)
        else:
            module.train(args, torch.device("cuda", 0))
    expected = {"num_workers": 1, "pin_memory": True, "persistent_workers": True}
    expected |= {"multiprocessing_context": "spawn"} if script == LONG else {}
    for call in loader.call_args_list:
        assert expected.items() <= call.kwargs.items()
    assert loader.call_count == 2
