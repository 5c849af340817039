"""Runs anywhere: the device, the backend, the threads and the network interface of a process.

The devices are pretended; test_gpu.py is for real ones.
"""

import os
import sys

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import SCRIPTS, every_ddp_script, set_up

TORCHRUN = "ddp_torchrun.py"


def pretend(monkeypatch, type: str, count: int) -> None:
    found = lambda check_available=False: torch.device(type)  # noqa: E731
    monkeypatch.setattr(torch.accelerator, "current_accelerator", found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.parametrize("type", ["cuda", "cpu"])
@pytest.mark.parametrize(
    ("script", "nodes"), [(SCRIPTS[2], 1), *((name, n) for name in SCRIPTS[3:] for n in (1, 2))]
)
def test_a_process_gets_its_device_its_threads_and_its_interface(
    parse, monkeypatch, capsys, type, script, nodes
):
    """The last of two processes a node, which has four devices and eight cores. torchrun gives each
    process one thread; ddp_torchrun.py leaves it at that."""
    rank, world_size = 2 * nodes - 1, 2 * nodes
    options = () if script == TORCHRUN else ("--nproc-per-node", 2)
    if script == "multinode.py":
        options += ("--rank", rank - 1, "--world-size", world_size)
    module, args = parse(script, *options)
    args.device, given, indices, threads = type, {}, [], [8]
    ranks = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}
    environment = {name: str(value) for name, value in ranks.items()}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(torch.accelerator, "set_device_index", indices.append)
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 0, 0)]))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **kwargs: given.update(kwargs))
    monkeypatch.setattr(dist, "get_backend", lambda: "any")
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    device = set_up(module, args, 1)
    assert str(device) == ("cuda:1" if type == "cuda" else "cpu")
    assert given["device_id"] == (device if type == "cuda" else None)
    assert indices == ([1] if type == "cuda" else [])
    assert (given["rank"], given["world_size"]) == (rank, world_size)
    assert threads == ([8] if script == TORCHRUN else [8, 4])
    line = f"[rank {rank} of {world_size}] device {device} | backend any | threads {threads[-1]}\n"
    assert capsys.readouterr().out == line
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform) if nodes == 1 else None
    if script == "multinode.py":  # its ranks may be anywhere
        loopback = None
    assert environment.get("GLOO_SOCKET_IFNAME") == loopback
    assert environment.get("NCCL_SOCKET_IFNAME") == loopback


@every_ddp_script
@pytest.mark.parametrize(
    ("type", "backends", "expected"),
    [
        ("cuda", {"nccl", "gloo"}, ("cuda", "nccl")),
        ("cuda", {"gloo"}, ("cuda", "gloo")),  # Windows
        ("xpu", {"xccl", "gloo"}, ("xpu", "xccl")),
        ("xpu", {"gloo"}, ("cpu", "gloo")),  # Windows: gloo does not serve it
        ("mps", {"gloo"}, ("cpu", "gloo")),
    ],
)
def test_the_backend_and_the_device_that_go_together(
    parse, refuse, monkeypatch, script, type, backends, expected
):
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name in backends)
    pretend(monkeypatch, type, 1)
    args = parse(script)[1]
    assert (args.device, args.backend) == expected
    assert parse(script, "--device", "cpu")[1].backend == "gloo"
    backend = "nccl" if type == "cuda" else "xccl"
    if backend not in backends:  # one that was asked for is not replaced
        alone = ("--rank", 0, "--world-size", 1) if script == "multinode.py" else ()
        line = f"--backend {backend} does not work on {args.device} here: leave it out"
        assert refuse(script, *alone, "--backend", backend) == line


def test_single_gpu_takes_mps_and_data_parallel_cuda_or_the_cpu(parse, monkeypatch):
    for type in ("cuda", "xpu", "mps"):
        pretend(monkeypatch, type, 1)
        monkeypatch.setattr(torch.cuda, "is_available", lambda type=type: type == "cuda")
        assert parse("single_gpu.py")[1].device == type
        assert parse("data_parallel.py")[1].device == ("cuda" if type == "cuda" else "cpu")


@pytest.mark.parametrize("script", SCRIPTS[2:4])
def test_a_process_for_each_device_and_no_more(parse, refuse, monkeypatch, script):
    """multinode.py starts one: test_joining.py."""
    pretend(monkeypatch, "cuda", 2)
    options = ("--nproc-per-node", 3)
    if script == TORCHRUN:
        options = ()
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    else:
        assert parse(script)[1].nproc_per_node == 2
        assert parse(script, "--device", "cpu", *options)[1].nproc_per_node == 3
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
        assert parse(script, "--device", "cpu")[1].nproc_per_node == 2
        pretend(monkeypatch, "cuda", 2)
    assert "3 processes are more than 2 devices" in refuse(script, *options)


@pytest.mark.parametrize(("world_size", "here"), [(2, 2), (4, 2)])
def test_each_attempt_of_a_node_has_keys_of_its_own(parse, monkeypatch, world_size, here):
    """Under torchrun's restarts. On several nodes the attempts have other numbers on each."""
    module, args = parse(TORCHRUN)
    shared, stores = dist.HashStore(), []
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(shared, 0, 0)]))
    monkeypatch.setattr(dist, "init_process_group", lambda _, store, **__: stores.append(store))
    monkeypatch.setattr(dist, "get_backend", lambda: "any")
    for name, value in (("RANK", 0), ("WORLD_SIZE", world_size), ("LOCAL_RANK", 0)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        set_up(module, args)
        stores[-1].set("key", attempt)
    assert stores[0].get("key") == (b"1" if world_size > here else b"0")
