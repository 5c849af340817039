"""Runs anywhere: a process's device, backend and threads.

The devices are pretended; test_gpu.py is for real ones. Real nodes: test_multinode.py.
"""

import os

import pytest
import torch
from helpers.jobs import SCRIPTS, every_ddp_script, every_script, set_up

SINGLE, PARALLEL, SPAWN, TORCHRUN, NODES = SCRIPTS
TWO = ("--nproc-per-node", 2)  # the processes of a node, of whose ranks this one is the second
OPTIONS = {SPAWN: TWO, NODES: (*TWO, "--rank", 4, "--world-size", 8)}
TORCHRUNS = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize("type", ["cuda", "cpu"])
@every_ddp_script
def test_a_process_gets_its_device_and_its_rank(parse, pretend, monkeypatch, script, type):
    job = pretend("cuda", 4)
    module, args = parse(script, "--device", type, *OPTIONS.get(script, ()))
    args.init_method = "file:///new"  # ddp_spawn.py's parent chooses it
    monkeypatch.setattr(os, "environ", dict(TORCHRUNS))
    device = set_up(module, args, 1)
    expected = ("cuda:1", device, 1) if type == "cuda" else ("cpu", None, None)
    assert (str(device), job.device_id, job.index) == expected
    rank, world_size = (1, 2) if script == SPAWN else (5, 8)
    if script != TORCHRUN:  # which leaves them to the environment
        assert (job.rank, job.world_size) == (rank, world_size)
    assert job.backend == args.backend == ("nccl" if type == "cuda" else "gloo")


@pytest.mark.parametrize("type", ["cuda", "cpu"])
@every_script
def test_threads(parse, pretend, monkeypatch, script, type):
    """At most four beside an accelerator. Processes that mp.spawn starts share the cores; torchrun
    exports OMP_NUM_THREADS. Where that is set, it counts."""
    job = pretend("cuda", 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: type == "cuda")
    options = () if script == PARALLEL else ("--device", type, *OPTIONS.get(script, ()))
    module, args = parse(script, *options)
    args.init_method = "file:///new"

    def threads(cores: int, **env: str) -> int:
        job.threads = cores
        monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
        monkeypatch.setattr(os, "environ", TORCHRUNS | env)
        if script in SCRIPTS[2:]:
            set_up(module, args, 1)
        else:
            monkeypatch.setattr(module, "load_dataset", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                module.main(args)
        return job.threads

    found = [threads(cores) for cores in (1, 2, 6, 24)]
    if script in (SPAWN, NODES):
        assert found == ([1, 1, 3, 4] if type == "cuda" else [1, 1, 3, 12])
    else:
        assert found == ([1, 2, 4, 4] if type == "cuda" else [1, 2, 6, 24])
    assert threads(24, OMP_NUM_THREADS="24") == 24


@every_ddp_script
@pytest.mark.parametrize(
    ("type", "backends", "expected"),
    [
        ("cuda", ("nccl", "gloo"), ("cuda", "nccl")),
        ("cuda", ("gloo",), ("cuda", "gloo")),  # Windows
        ("xpu", ("xccl", "gloo"), ("xpu", "xccl")),
        ("xpu", ("gloo",), ("cpu", "gloo")),  # Windows: gloo does not serve it
        ("mps", ("gloo",), ("cpu", "gloo")),
    ],
)
def test_the_backend_goes_with_the_device(parse, pretend, script, type, backends, expected):
    pretend(type, 1, backends)
    args = parse(script)[1]
    assert (args.device, args.backend) == expected
    assert parse(script, "--device", "cpu")[1].backend == "gloo"
    backend = "nccl" if type == "cuda" else "xccl"
    if backend not in backends:  # one that was asked for is not replaced
        assert parse(script, "--backend", backend)[1].backend == backend


def test_single_gpu_takes_any_device_and_data_parallel_cuda_or_the_cpu(parse, pretend, monkeypatch):
    for type in ("cuda", "xpu", "mps"):
        pretend(type, 1)
        monkeypatch.setattr(torch.cuda, "is_available", lambda type=type: type == "cuda")
        assert parse(SINGLE)[1].device == type
        assert parse(PARALLEL)[1].device == ("cuda" if type == "cuda" else "cpu")


@every_ddp_script
def test_a_process_for_each_device_and_no_more(parse, refuse, pretend, monkeypatch, script):
    pretend("cuda", 3)
    options = ("--nproc-per-node", 4)
    if script == TORCHRUN:
        options = ()
        monkeypatch.setenv("LOCAL_RANK", "0")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    elif script == SPAWN:
        assert parse(script)[1].nproc_per_node == 3
        assert parse(script, "--device", "cpu")[1].nproc_per_node == 2
        assert parse(script, "--device", "cpu", *options)[1].nproc_per_node == 4
    else:
        assert parse(script)[1].nproc_per_node == 1
        options += ("--rank", 0, "--world-size", 8)
    line = "4 processes need as many devices, and there are 3"
    assert refuse(script, *options) == line
