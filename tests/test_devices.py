"""Runs anywhere: a process's device, backend, threads and interface, and how multinode.py joins.

The devices are pretended; test_gpu.py is for real ones. Real nodes: test_multinode.py.
"""

import os
import runpy
import signal
import socket
import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers.jobs import ROOT, SCRIPTS, every_ddp_script, set_up

TORCHRUN, NODES = SCRIPTS[3:]
FIFTH = ("--rank", 4, "--world-size", 8)


@pytest.mark.parametrize("type", ["cuda", "cpu"])
@pytest.mark.parametrize(
    ("script", "nodes"), [(SCRIPTS[2], 1), *((name, n) for name in SCRIPTS[3:] for n in (1, 2))]
)
def test_a_process_gets_its_device_its_threads_and_its_interface(
    parse, pretend, monkeypatch, capsys, type, script, nodes
):
    """The last of two processes a node, which has four devices and eight cores. torchrun gives each
    process one thread; ddp_torchrun.py leaves it at that."""
    rank, world_size = 2 * nodes - 1, 2 * nodes
    options = () if script == TORCHRUN else ("--nproc-per-node", 2)
    if script == "multinode.py":
        options += ("--rank", rank - 1, "--world-size", world_size)
    job = pretend("cuda", 4)
    module, args = parse(script, "--device", type, *options)
    ranks = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}
    environment = {name: str(value) for name, value in ranks.items()}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(torch, "get_num_threads", lambda: job.threads)
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 0, 0)]))
    device = set_up(module, args, 1)
    expected = ("cuda:1", device, 1) if type == "cuda" else ("cpu", None, None)
    assert (str(device), job.device_id, job.index) == expected
    assert (job.rank, job.world_size) == (rank, world_size)
    where = f"device {device} | backend {args.backend} | threads {8 if script == TORCHRUN else 4}"
    assert capsys.readouterr().out == f"[rank {rank} of {world_size}] {where}\n"
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    here = nodes == 1 and script != "multinode.py"  # its ranks may be anywhere
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        assert environment.get(name) == (loopback if here else None)


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
        assert parse(script, "--backend", backend.upper())[1].backend == backend


def test_single_gpu_takes_any_device_and_data_parallel_cuda_or_the_cpu(
    parse, refuse, pretend, monkeypatch
):
    """nn.DataParallel takes an Intel GPU, and fails in its first step."""
    for type in ("cuda", "xpu", "mps"):
        pretend(type, 1)
        monkeypatch.setattr(torch.cuda, "is_available", lambda type=type: type == "cuda")
        assert parse("single_gpu.py")[1].device == type
        if type == "xpu":
            line = "nn.DataParallel fails on xpu (pytorch#143239): use ddp_spawn.py"
            assert refuse("data_parallel.py") == line
        else:
            assert parse("data_parallel.py")[1].device == ("cuda" if type == "cuda" else "cpu")
    pretend("xpu", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert parse("data_parallel.py")[1].device == "cuda"


@pytest.mark.parametrize("script", SCRIPTS[2:4])
def test_a_process_for_each_device_and_no_more(parse, refuse, pretend, monkeypatch, script):
    """multinode.py starts one."""
    pretend("cuda", 3)
    options = ("--nproc-per-node", 4)
    if script == TORCHRUN:
        options = ()
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    else:
        assert parse(script)[1].nproc_per_node == 3
        assert parse(script, "--device", "cpu")[1].nproc_per_node == 2
        assert parse(script, "--device", "cpu", *options)[1].nproc_per_node == 4
    assert "4 processes are more than 3 devices" in refuse(script, *options)


@pytest.mark.parametrize(("world_size", "first"), [("2", b"0"), ("4", b"1")])
def test_each_attempt_of_a_node_has_keys_of_its_own(parse, pretend, monkeypatch, world_size, first):
    """Under torchrun's restarts. On several nodes the attempts have other numbers on each."""
    job = pretend("cuda", 2)
    module, args = parse(TORCHRUN)
    shared, stores = dist.HashStore(), []
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(shared, 0, 0)]))
    ranks = {"RANK": "0", "WORLD_SIZE": world_size, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for attempt in ("0", "1"):
        monkeypatch.setattr(os, "environ", {**ranks, "TORCHELASTIC_RESTART_COUNT": attempt})
        set_up(module, args)
        job.store.set("key", attempt)
        stores.append(job.store)
    assert stores[0].get("key") == first


@pytest.mark.parametrize(
    ("env", "options", "number", "expected"),
    [
        ({"RANK": "5", "WORLD_SIZE": "8"}, (), 0, (5, "cuda:0")),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}, (), 0, (5, "cuda:3")),
        ({}, (*FIFTH, "--nproc-per-node", 4), 3, (7, "cuda:3")),
        ({"LOCAL_RANK": "2"}, (*FIFTH, "--nproc-per-node", 2), 1, (5, "cuda:3")),
    ],
)
def test_ranks_count_processes(command_line, pretend, monkeypatch, env, options, number, expected):
    job = pretend("cuda", 4)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    module = command_line(NODES, "--init-method", "tcp://node:7000", *options)
    device = set_up(module, module.parse_args(), number)
    assert (job.rank, str(device)) == expected
    assert (job.world_size, job.init_method) == (8, "tcp://node:7000")


def test_a_device_that_is_not_there_is_refused(refuse, pretend, monkeypatch):
    pretend("cuda", 4)
    options = ("--rank", 0, "--world-size", 8, "--nproc-per-node")
    line = "device 4 is not here: this node has 4, counted from 0"
    assert refuse(NODES, *options, 5) == line
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert refuse(NODES, *options, 2) == line


def test_it_names_the_others_and_the_devices_left(command_line, pretend, monkeypatch, capsys):
    pretend("cuda", 4)
    options = ("--init-method", "tcp://node:7000", "--rank", 1, "--world-size", 8, "--timeout", 9)
    monkeypatch.setattr(mp, "spawn", lambda *_, **__: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def said(*more: object) -> list[str]:
        command_line(NODES, *options, *more)
        runpy.run_path(str(ROOT / NODES), run_name="__main__")
        return capsys.readouterr().out.splitlines()[1:-1]

    waits = "rank 1 waits for all 8 at tcp://node:7000, up to 9 s"
    first, second = said()
    assert first.startswith("only 1 of 4 devices: --nproc-per-node 4 ") and second == waits
    assert said("--nproc-per-node", 4) == said("--device", "cpu") == [waits]
    monkeypatch.setenv("LOCAL_RANK", "0")  # the others are for the other calls
    assert said() == [waits]


def reason(parse, rank: int, init_method: str, address: str | None = None) -> str:
    """Why it cannot join within a second: the end of its one line."""
    options = ("--init-method", init_method, "--rank", rank, "--world-size", 2, "--timeout", 1)
    module, args = parse(NODES, *options)
    with pytest.raises(SystemExit) as caught, pytest.MonkeyPatch.context() as patch:
        patch.setattr(signal, "signal", lambda *_: None)
        module.main(0, args)
    start = f"error: rank {rank} cannot join at {address or init_method}: "
    assert caught.value.code.startswith(start) and "\n" not in caught.value.code
    return caught.value.code.removeprefix(start)


@pytest.mark.parametrize(
    ("rank", "url", "expected"),
    [
        (1, "localhost:7000", "No rendezvous handler for localhost://"),
        (1, "tcp://localhost", "port number missing"),
        (1, "tcp://:7000", "hostname cannot be None"),
        (1, "tcp://localhost:70000", "Port out of range 0-65535"),
        (1, "tcp://no.such.host:1", "timed out"),
        (1, "tcp://127.0.0.1:9", "timed out"),  # nobody listens there
        (0, "tcp://192.0.2.1:0", "timed out"),  # nor is this an address of this machine
    ],
)
def test_one_line_names_the_rank_the_address_and_torchs_reason(parse, rank, url, expected):
    assert expected in reason(parse, rank, url)


def test_a_port_in_use_a_missing_variable_and_nobody_else(parse, monkeypatch, tmp_path):
    with socket.create_server(("", 0)) as other:
        assert "EADDRINUSE" in reason(parse, 0, f"tcp://localhost:{other.getsockname()[1]}")
    monkeypatch.setenv("MASTER_PORT", "7000")
    assert reason(parse, 0, "env://", "env://$MASTER_ADDR:7000")
    assert reason(parse, 0, f"file://{tmp_path}/store")


def test_a_file_to_meet_at_is_taken_as_it_stands(refuse, monkeypatch):
    """torch expands no variable in it."""
    monkeypatch.setenv("HOME", "/tmp")
    line = "--init-method file://$HOME/new: write file:///folder/file, a new one"
    options = ("--rank", 0, "--world-size", 2, "--init-method")
    assert refuse(NODES, *options, "file://$HOME/new") == line
