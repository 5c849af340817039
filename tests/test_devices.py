"""Which device, backend, kernels, threads and network interface a process gets. In the tests' own
process: the devices are pretended."""

import importlib
import os
import socket
import sys

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import SCRIPTS
from helpers.parts import Made, every_ddp_script, every_script, made


@every_ddp_script
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_process_gets_its_device_its_threads_and_its_interface(parse, monkeypatch, script, hosts):
    """The last of two processes a host. A host has four devices and eight cores."""
    module, args = parse(script, "--timeout", 9)
    args.device, args.local_rank, args.local_world_size = "cuda", 1, 2
    args.rank, args.world_size = 2 * hosts - 1, 2 * hosts
    given, environment, indices, threads = {}, {}, [], []
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", indices.append)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **kwargs: given.update(kwargs))
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(module, "join", lambda args: None, raising=False)
    monkeypatch.setattr(module, "loopback_error", lambda args: "", raising=False)
    if script == "ddp_spawn.py" and hosts == 2:
        return  # it knows one node
    args.store = "store"
    device = module.ddp_setup(args)
    assert device == given["device_id"] == torch.device("cuda", 1) and indices == [1]
    assert threads == [4] and given["timeout"].seconds == 9
    assert (given["rank"], given["world_size"]) == (2 * hosts - 1, 2 * hosts)
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform) if hosts == 1 else None
    assert environment.get("GLOO_SOCKET_IFNAME") == loopback
    assert environment.get("NCCL_SOCKET_IFNAME") == loopback


@every_ddp_script
def test_deterministic_kernels_come_before_the_process_group(make, monkeypatch, parse, script):
    module, _ = parse(script)
    calls, init = [], dist.init_process_group
    monkeypatch.setattr(module, "use_deterministic_kernels", lambda: calls.append("kernels"))
    monkeypatch.setattr(
        dist, "init_process_group", lambda *args, **kw: calls.append("group") or init(*args, **kw)
    )
    make(script, "--deterministic")
    make(script)
    assert calls == ["kernels", "group", "group"]


@pytest.mark.parametrize("script", SCRIPTS[:2])
def test_deterministic_kernels_are_asked_for(make, monkeypatch, parse, script):
    module, _ = parse(script)
    calls = []
    monkeypatch.setattr(module, "use_deterministic_kernels", lambda: calls.append("kernels"))
    make(script, "--deterministic")
    make(script)
    assert calls == ["kernels"]


@pytest.mark.parametrize("script", SCRIPTS[:2])
def test_deterministic_kernels_are_refused_on_mps(parse, monkeypatch, capsys, script):
    module, _ = parse(script)
    monkeypatch.setattr(module, "device_names", lambda: ["mps", "cpu"])
    monkeypatch.setattr(sys, "argv", [script, "--deterministic"])
    with pytest.raises(SystemExit, match="2"):
        module.parse_args()
    assert "--deterministic cannot work on mps" in capsys.readouterr().err


@every_ddp_script
@pytest.mark.parametrize("built", [True, False])
def test_auto_takes_gloo_where_nccl_is_not_built(parse, monkeypatch, script, built):
    """As on Windows with an NVIDIA GPU."""
    module, _ = parse(script)
    available = dist.is_backend_available
    monkeypatch.setattr(module, "device_names", lambda: ["cuda", "cpu"])
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(
        dist, "is_backend_available", lambda name: built if name == "nccl" else available(name)
    )
    monkeypatch.setattr(sys, "argv", [script])
    assert module.parse_args().backend == ("nccl" if built else "gloo")


class Asleep(Exception):
    pass


def asleep(seconds: float) -> None:
    raise Asleep


def test_processes_of_one_host_take_different_devices(parse, monkeypatch, tmp_path):
    """Started by hand, one a call: they learn at the store who shares their host."""
    options = ("--init-method", f"file://{tmp_path}/store", "--world-size", 3)
    for rank, host in ((0, "a"), (1, "b"), (2, "a")):
        module, args = parse("multinode.py", *options, "--rank", rank)
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        monkeypatch.setattr(module, "loopback_error", lambda args: "")
        monkeypatch.setattr(module.time, "sleep", asleep)
        if rank < 2:  # they wait for the others
            with pytest.raises(Asleep):
                module.join(args)
        else:
            module.join(args)
            assert (args.local_rank, args.local_world_size) == (1, 2)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    args.device, args.backend = "cuda", "nccl"
    assert module.choose_device(args) == torch.device("cuda", 1)
    args.local_rank, args.local_world_size = 2, 3
    with pytest.raises(ValueError, match="3 processes on this node are more than 2 devices"):
        module.choose_device(args)
    args.backend = "gloo"
    assert module.choose_device(args) == torch.device("cuda", 0)
    # CUDA_VISIBLE_DEVICES may show each process a device of its own.
    args.backend = "nccl"
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert module.choose_device(args) == torch.device("cuda", 0)
    args.nnodes = 2  # all processes of a node see the same devices then
    with pytest.raises(ValueError, match="3 processes on this node are more than 1 devices"):
        module.choose_device(args)


def test_a_host_may_play_several_nodes(parse, monkeypatch, tmp_path):
    """With --nnodes, and CUDA_VISIBLE_DEVICES of its own for each."""
    monkeypatch.setattr("time.sleep", asleep)
    for rank in (0, 1):
        options = ("--init-method", f"file://{tmp_path}/store", "--nnodes", 2, "--node-rank", rank)
        module, args = parse("multinode.py", *options, "--nproc-per-node", 1)
        monkeypatch.setattr(module, "loopback_error", lambda args: "")
        try:
            module.join(args)
        except Asleep:
            assert rank == 0  # it waits for the other one
    assert (args.rank, args.local_rank, args.local_world_size) == (1, 0, 1)


@pytest.mark.parametrize("platform", ["linux", "win32"])
def test_no_libuv_on_windows(parse, monkeypatch, platform):
    options = ("--init-method", "tcp://127.0.0.1:9", "--world-size", 2, "--rank", 0)
    module, args = parse("multinode.py", *options)
    asked = []

    def store(*_, use_libuv, **__):
        asked.append(use_libuv)
        raise Asleep

    monkeypatch.setattr(dist, "TCPStore", store)
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(Asleep):
        module.join(args)
    assert asked == [platform != "win32"]


@every_ddp_script
def test_the_processes_of_one_host_meet_without_a_port(parse, monkeypatch, script):
    module, args = parse(script)
    given = {}
    monkeypatch.setattr(dist, "init_process_group", lambda _, **kwargs: given.update(kwargs))
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    if script == "ddp_spawn.py":
        args.rank, args.local_rank, args.store = 0, 0, "store"
    module.ddp_setup(args)
    expected = dist.FileStore if script == "ddp_spawn.py" else dist.HashStore
    assert type(given["store"]) is expected


@every_script
def test_macs_have_no_ddp(monkeypatch, script):
    module = importlib.import_module(script.removesuffix(".py"))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("mps"))
    assert (module.device_names()[0] == "mps") == (script in SCRIPTS[:2])


@pytest.mark.parametrize("script", SCRIPTS[:2])
def test_the_device_is_the_one_that_was_asked_for(parse, monkeypatch, script):
    module, args = parse(script)
    args.device, indices, seen = "cuda:1", [], {}
    monkeypatch.setattr(torch.accelerator, "set_device_index", indices.append)
    monkeypatch.setattr(module, "load_train_objs", lambda args, device: made(seen, device))
    with pytest.raises(Made):
        module.main(args, None)
    assert seen["trainer"] == (torch.device("cuda", 1),)
    assert indices == ([1] if script == "single_gpu.py" else [])
