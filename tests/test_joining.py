"""How processes find each other, and what is said where they do not or no more. In the tests' own
process; on real nodes: test_multinode.py."""

import json
import os
import runpy
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.jobs import ROOT
from helpers.parts import every_torchrun_script

NCCL = (
    "NCCL error in: ProcessGroupNCCL.cpp:2, {}\n{}\nLast error:\n{}\nException raised from x:\n#0"
)

SAID = [  # by whom, what, and whether it is a lost peer's
    (RuntimeError, "[a/gloo/pair.cc:1] Connection closed by peer [10.0.0.2]:1", True),
    (RuntimeError, "[a/gloo/pair.cc:1] Read error [10.0.0.2]:1: Connection reset by peer", True),
    (RuntimeError, "[a/gloo/buf.cc:1] Timed out waiting 3000ms for recv operation", True),
    (RuntimeError, "[a/gloo/pair.cc:1] writev [10.0.0.2]:1: Broken pipe", True),
    (RuntimeError, "[a/gloo/uv.cc:1] Connection is broken by pair closure", True),
    (RuntimeError, "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)", True),
    (RuntimeError, "[a/gloo/device.cc:1] Unable to find address for: eth9", False),
    (RuntimeError, "[enforce fail at gloo/pair.cc:4] op.preamble.length <= op.nbytes", False),
    (dist.DistStoreError, "wait timeout after 600000ms, keys: /default_pg/0", True),
    (dist.DistNetworkError, "Failed to recv, got 0 bytes. Connection was likely closed", True),
    (dist.DistBackendError, NCCL.format("remote process exited or there was a network error",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process "
        "exiting prematurely.", "socket recv failed"), True),
    (dist.DistBackendError, "[1] is setting up NCCL communicator and retrieving ncclUniqueId from "
        "[0] via c10d key-value store by key '0', but store->get('0') got error: Broken", True),
    (dist.DistBackendError, NCCL.format("invalid usage", "ncclInvalidUsage: ...",
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 4b000"), False),
    (dist.DistBackendError, NCCL.format("unhandled system error", "ncclSystemError: ...",
        "Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)"), False),
    (RuntimeError, "NCCL error: remote process exited or there was a network error\n"
        "NCCL Last Error: connection closed", True),
    (RuntimeError, "NCCL error: invalid usage\nNCCL Last Error: Duplicate GPU detected", False),
    (RuntimeError, "DataLoader timed out after 5 seconds", False),
    (RuntimeError, "Timed out waiting for the tokenizer's server", False),
    (RuntimeError, "Broken pipe while fetching from the store", False),
    (RuntimeError, "mat1 and mat2 shapes cannot be multiplied", False),
]  # fmt: skip


@every_torchrun_script
@pytest.mark.parametrize(("kind", "said", "lost"), SAID)
def test_a_lost_peer_is_told_from_a_fault_of_ones_own(parse, script, kind, said, lost):
    module, _ = parse(script)
    assert module.is_lost_peer(kind(said)) == lost
    line = module.one_line(kind(said))
    assert "\n" not in line and "#0" not in line
    assert "Duplicate GPU" not in said or "Duplicate GPU detected" in line  # not in the first line


@every_torchrun_script
def test_what_an_error_says(parse, monkeypatch, tmp_path, script):
    module, args = parse(script)
    report = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    monkeypatch.setattr("faulthandler.enable", lambda **kwargs: None)

    def run(error: Exception) -> None:
        def main(args, stop):
            raise error

        monkeypatch.setattr(module, "main", main)
        module.run(args, torch.zeros(()))

    with pytest.raises(ArithmeticError):
        run(ArithmeticError("the test's own error"))
    if script == "ddp_torchrun.py":
        assert "the test's own error" in json.loads(report.read_text())["message"]["message"]
        report.unlink()
    with pytest.raises(SystemExit, match=r"error: rank 0 has lost the others, .*by peer"):
        run(RuntimeError("[/gloo/transport] Connection closed by peer\nframe #0"))
    with pytest.raises(SystemExit, match="error: no data"):
        run(module.DataError("no data"))
    assert not report.exists()  # or torchrun would show it as the cause
    with pytest.raises(RuntimeError, match="shape mismatch"):
        run(RuntimeError("shape mismatch"))


def test_a_hosts_number_gives_the_ranks(parse, monkeypatch):
    options = ("--init-method", "tcp://a:1000", "--nnodes", 2, "--node-rank", 1)
    module, args = parse("multinode.py", *options, "--nproc-per-node", 4)
    assert (args.rank, args.world_size, args.nproc_per_node) == (4, 8, 4)
    started = []
    monkeypatch.setattr(module, "run", lambda args, stop: started.append(args))
    module.run_rank(2, args, torch.zeros(()))
    assert started[0].rank == 6


def test_warnings_from_c_plus_plus_are_there_for_who_asks(monkeypatch):
    for given, used in (("WARNING", "WARNING"), ("", "ERROR")):
        monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", given)
        if not given:
            monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
        runpy.run_path(str(ROOT / "multinode.py"))
        assert os.environ["TORCH_CPP_LOG_LEVEL"] == used


def test_who_is_missing_double_or_of_another_world(parse, monkeypatch, tmp_path):
    def join(rank: int, world_size: int) -> None:
        options = ("--init-method", f"file://{tmp_path}/store", "--timeout", 1)
        module, args = parse("multinode.py", *options, "--rank", rank, "--world-size", world_size)
        module.join(args)

    store = dist.FileStore(str(tmp_path / "store"), 3)
    with pytest.raises(ValueError, match=r"missing after 1 s: rank 0, rank 2$"):
        join(1, 3)
    host = store.get("host of rank 1")
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    with pytest.raises(ValueError, match="there is a rank 1 already"):
        join(1, 3)
    assert store.get("host of rank 1") == host  # the true one's
    with pytest.raises(ValueError, match="another process has --world-size 3"):
        join(0, 2)
    with pytest.raises(ValueError, match=r"missing after 1 s: rank 2$"):  # corrected, it may join
        join(0, 3)


def test_the_world_of_rank_0_counts(parse):
    """Else rank 0 would be refused, and all others have a broken pipe and no reason."""
    store = dist.TCPStore("127.0.0.1", 0, 3, is_master=True, wait_for_workers=False)
    method = f"tcp://127.0.0.1:{store.port}"
    options = ("--init-method", method, "--rank", 1, "--world-size", 2, "--timeout", 20)
    module, args = parse("multinode.py", *options)
    with ThreadPoolExecutor() as threads:
        early = threads.submit(module.join, args)
        time.sleep(1)
        assert store.compare_set("world size", "", "3") == b"3"
        with pytest.raises(ValueError, match="another process has --world-size 3"):
            early.result(20)


@every_torchrun_script
def test_a_name_that_resolves_to_loopback_is_reported(parse, monkeypatch, script):
    module, args = parse(script)
    name = socket.gethostname()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for address, complaint in (("127.0.1.1", True), ("10.0.0.1", False)):
        monkeypatch.setattr(socket, "gethostbyname", lambda _, address=address: address)
        found = module.loopback_error(args)
        assert found.startswith(f"on node {name} gloo takes {address} for its address") == complaint

    def unknown(_):
        raise OSError

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert "gloo takes 127.0.0.1 for its address" in module.loopback_error(args)
    args.backend = "nccl"
    assert module.loopback_error(args) == ""
    args.backend = "gloo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert module.loopback_error(args) == ""


def test_torchrun_on_several_nodes_looks_at_their_names(parse, monkeypatch):
    module, args = parse("ddp_torchrun.py")
    args.world_size = 2
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("it joins"))
    with pytest.raises(SystemExit, match=r"^error: on node .* gloo takes 127.0.1.1 for"):
        module.ddp_setup(args)


def test_a_name_that_resolves_to_loopback_matters_to_several_nodes(parse, monkeypatch, tmp_path):
    """And all of them say whose it is."""
    module, args = parse("multinode.py")
    args.rank, args.world_size = 0, 2
    monkeypatch.setattr(module, "wait_while", lambda *_: None)
    monkeypatch.setattr(module, "loopback_error", lambda args: "")
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    own = socket.gethostname() + (boot_id.read_text() if boot_id.exists() else "")
    for other in (own, "another"):
        store = dist.FileStore(str(tmp_path / other[:7]), 2)
        store.set("host of rank 1", other)
        store.set("node of rank 1", other)
        store.set("loopback error", "on node another ...")
        if other == own:
            module.call_the_roll(store, args)
        else:
            with pytest.raises(ValueError, match="on node another"):
                module.call_the_roll(store, args)


def test_whoever_cannot_join_says_for_whom_it_waits(parse, monkeypatch, capsys):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + 5))

    def refuse(*_, **__):
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    for method, line, end in (
        (
            "tcp://10.0.0.1:1000",
            "rank 0 at tcp://10.0.0.1:1000 (refused; is it started,",
            "is it started",
        ),
        (f"file://{os.getcwd()}/store", "rank 0, rank 2", "missing after 60 s: rank 0, rank 2"),
    ):
        options = ("--init-method", method, "--rank", 1, "--world-size", 3, "--timeout", 60)
        module, args = parse("multinode.py", *options)
        start = now[0]
        with pytest.raises(ValueError, match=end):
            module.join(args)
        assert 60 < now[0] - start <= 70
        text = capsys.readouterr().out
        assert text.count(f"[rank 1] still waiting for {line}") in (4, 5), text
