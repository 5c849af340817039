"""multinode.py, and ddp_torchrun.py under torchrun, on two and three nodes with addresses of their
own: see hosts.py.

As root on Linux; a laptop skips these tests and says why, CI fails if it cannot run them.
"""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from helpers.files import difference, idx_files, load, same_bytes
from helpers.hosts import Hosts, require, requirements
from helpers.jobs import Job, command, epochs

DOUBLE = {"LADDER_DTYPE": "float64"}
# On a host nothing says how to connect.
PLAIN = dict.fromkeys(
    ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT"), ""
)
SHARED_STORE_OFF = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
ELASTIC = (
    "torchrun --nnodes 1:2 --nproc_per_node 1 --max-restarts 5 --rdzv_id 7 --rdzv_backend c10d"
)
QUICK = "--rdzv_conf last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
PORT = 22225


@pytest.fixture
def hosts(tmp_path):
    """hosts(count) -> Hosts with start(host, launch, ...) -> Job, in a folder for each host.

    Forked (see forks.py), unless `fork` is False.
    """
    require(requirements())
    opened, jobs = [], []

    def start(host: int, launch: str, *arguments: object, fork: bool = True, **env: object) -> Job:
        folder = tmp_path / f"host{host}"
        folder.mkdir(exist_ok=True)
        env = {**PLAIN, **{name: str(value) for name, value in env.items()}}
        words = command(launch, *arguments)
        if fork:
            job = Job(words, folder, env, fork=True, host=opened[0].name(host))
        else:
            job = Job(opened[0].command(host, words), folder, env)
        jobs.append(job)
        return job

    def hosts(count: int, **options: object) -> Hosts:
        opened.append(Hosts(count, **options))
        opened[0].start = start
        opened[0].method = f"tcp://{opened[0].address(0)}:{PORT}"
        return opened[0]

    yield hosts
    for job in jobs:
        job.kill()
    for each in opened:
        each.close()


def by_hand(hosts: Hosts, rank: int, world_size: int = 2) -> tuple:
    return ("--init-method", hosts.method, "--rank", rank, "--world-size", world_size)


def torchrun(hosts: Hosts, rank: int, processes: int) -> str:
    address = f"--master_addr {hosts.address(0)} --master_port {PORT}"
    nodes = f"--nnodes 2 --node_rank {rank} --nproc_per_node {processes}"
    return f"torchrun {nodes} {address} ddp_torchrun.py"


def c10d(hosts: Hosts) -> str:
    endpoint = f"--rdzv_backend c10d --rdzv_endpoint {hosts.address(0)}:{PORT}"
    return f"torchrun --nnodes 2 --nproc_per_node 1 {endpoint} ddp_torchrun.py"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The arguments of a small job, and what single_gpu.py makes of it with a batch of 24."""
    folder = tmp_path_factory.mktemp("job")
    data = ("--dataset", "fashion-mnist", "--data-dir", idx_files(folder, 500, 10))
    options = (2, *data, "--log-interval", 1)
    text = Job(
        command("single_gpu.py", *options, "--batch-size", 24), folder, DOUBLE, fork=True
    ).finish()
    return options, scores(text), load(folder / "checkpoint.pt")


def scores(text: str) -> list[dict[str, float]]:
    """The epoch lines, without the speed."""
    return [{name: line[name] for name in line if name != "rate"} for line in epochs(text)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_number_of_hosts_does_the_same_job(hosts, tmp_path, job, count):
    """One process a call over TCP, started in the wrong order; every sample once an epoch."""
    options, expected, snapshot = job
    hosts, trace = hosts(count), tmp_path / "trace"
    trace.mkdir()
    jobs = []
    for rank in reversed(range(count)):
        arguments = (*by_hand(hosts, rank, count), "--batch-size", 24 // count)
        jobs.append(
            hosts.start(rank, "multinode.py", *options, *arguments, LADDER_TRACE=trace, **DOUBLE)
        )
        if rank == count - 1:
            time.sleep(1)
    texts = [job.finish() for job in reversed(jobs)]
    for rank, text in enumerate(texts):
        assert f"[rank {rank} of {count}] device cpu |" in text
        assert f"[CPU{rank}] Epoch 1 | Batchsize: {24 // count} | Steps: 21\n" in text
    assert [scores(text) for text in texts] == [expected, *[[]] * (count - 1)]
    assert len(expected) == 2 and texts[0].count("| Loss of rank 0: ") == 42
    assert difference(load(tmp_path / "host0" / "checkpoint.pt"), snapshot) < 1e-12
    others = [path for path in tmp_path.glob("host*/checkpoint.pt") if "host0" not in str(path)]
    assert not others  # rank 0 alone saves
    lines = [line.split() for path in trace.iterdir() for line in path.read_text().splitlines()]
    for size, times in (("500", 2), ("10", 2)):
        seen = sorted(int(index) for line in lines if line[0] == size for index in line[1:])
        assert seen == sorted(list(range(int(size))) * times)


@pytest.mark.slow("each launched by its real command line")
@pytest.mark.parametrize("way", ["processes", "file", "env", "torchrun", "c10d", "2019"])
def test_ways_of_launching(hosts, tmp_path, job, way):
    options, expected, snapshot = job
    options = options[1:] if way == "2019" else options
    hosts = hosts(2)
    # 24 samples a step, however they are shared out.
    size = {
        "processes": ("--batch-size", 6),
        "torchrun": ("--batch-size", 1, "--accumulate", 6),
    }.get(way, ("--batch-size", 12))
    jobs = []
    for rank in (1, 0):
        launch, arguments, env = "multinode.py", (), dict(DOUBLE)
        if way == "processes":
            arguments = (*by_hand(hosts, rank), "--nproc-per-node", 2)
        elif way == "file":
            shared = f"file://{tmp_path}/shared"
            arguments = ("--init-method", shared, "--rank", rank, "--world-size", 2)
        elif way == "env":
            env |= {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": PORT}
            env |= {"RANK": rank, "WORLD_SIZE": 2}
        elif way == "torchrun":
            launch = torchrun(hosts, rank, 2)
        elif way == "c10d":
            launch = c10d(hosts)
        elif way == "2019":
            arguments = (*by_hand(hosts, rank), "--test-batch-size", 5, "--epochs", 2, "--no-cuda")
            arguments += ("--lr", 0.01, "--momentum", 0.9, "--seed", 42, "--log-interval", 1)
        jobs.append(hosts.start(rank, launch, *options, *size, *arguments, fork=False, **env))
    texts = [job.finish() for job in jobs]
    ranks = sorted(int(rank) for rank in re.findall(r"\[rank (\d) of ", "".join(texts)))
    assert ranks == list(range(4 if way in ("processes", "torchrun") else 2))
    text = max(texts, key=lambda text: len(epochs(text)))  # of rank 0, on either host with c10d
    assert scores(text) == expected
    (path,) = tmp_path.glob("host*/checkpoint.pt")
    assert difference(load(path), snapshot) < 1e-12


def cannot_join(job: Job, seconds: float) -> str:
    """The job's only line about not joining, which must come in time."""
    start = time.monotonic()
    text = job.finish(1, seconds=60)
    assert time.monotonic() - start < seconds, text
    *others, line = text.splitlines()
    assert line.startswith("error: "), text
    expected = ("[W", "total_epochs: 5, save_every: 1, batch_size: 32", "waiting for ")
    assert all(other.startswith(expected) for other in others), text
    return line


def test_masters_that_are_not_there(hosts):
    hosts = hosts(2)
    for master, reason in (
        (hosts.address(0), "Connection refused"),
        (f"{hosts.address(0)}9", "No route to host|timed out"),
    ):
        method = f"tcp://{master}:{PORT}"
        arguments = ("--init-method", method, "--rank", 1, "--world-size", 2, "--timeout", 5)
        line = cannot_join(hosts.start(1, "multinode.py", *arguments), 12)
        assert line.startswith(f"error: missing after 5 s: --rank 0 at {method}")
        assert re.search(reason, line)


def test_a_port_that_is_taken(hosts):
    hosts = hosts(1)
    program = (
        f"import socket; s = socket.create_server(('', {PORT})); print(1, flush=True); input()"
    )
    taken = subprocess.Popen(
        hosts.command(0, [sys.executable, "-c", program]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    taken.stdout.readline()
    line = cannot_join(hosts.start(0, "multinode.py", *by_hand(hosts, 0)), 9.5)
    assert f"port: {PORT}" in line and "EADDRINUSE, message: address already in use" in line
    taken.communicate("\n")


def test_rank_0_on_another_node_than_the_address_says(hosts):
    hosts = hosts(2)
    text = hosts.start(1, "multinode.py", *by_hand(hosts, 0), "--timeout", 5).finish(1, seconds=30)
    assert f"error: --rank 0 cannot join at {hosts.method}: " in text.splitlines()[-1], text


def test_a_peer_that_never_comes(hosts):
    """Rank 0 names it. The others name it, too, or lose rank 0 before."""
    hosts = hosts(2)
    job = hosts.start(0, "multinode.py", *by_hand(hosts, 0, 3), "--timeout", 6)
    other = hosts.start(1, "multinode.py", *by_hand(hosts, 2, 3), "--timeout", 6)
    assert cannot_join(job, 12) == "error: missing after 6 s: --rank 1"
    text = other.finish(1, seconds=6)
    assert "\nwaiting for --rank 1\n" in text
    assert "error: missing after 6 s: --rank 1\n" in text or "remote server shutdown" in text


def test_ctrl_c_while_another_node_is_missing(start, tmp_path):
    """On any machine."""
    options = ("--init-method", f"file://{tmp_path}/store", "--rank", 0, "--world-size", 2)
    job = start("multinode.py", *options, "--nproc-per-node", 2)
    job.wait_for("waiting for --rank 1")
    os.killpg(job.process.pid, signal.SIGINT)
    text = job.finish(128 + signal.SIGINT, seconds=10)
    assert text.endswith("\nstopped: --resume goes on from the last snapshot\n")
    assert "error" not in text and "Traceback" not in text, text


def test_ranks_given_twice_and_worlds_that_differ(hosts, job):
    options, _, _ = job
    hosts = hosts(2)
    jobs = [hosts.start(0, "multinode.py", *options, *by_hand(hosts, 0, 3), "--timeout", 30)]
    jobs[0].wait_for("waiting for --rank 1, --rank 2")
    line = cannot_join(hosts.start(1, "multinode.py", *by_hand(hosts, 1, 2), "--timeout", 30), 15)
    assert (
        "error: --rank 1 has a world of 2 calls of 1 processes, and another rank one of 3" in line
    )
    jobs.append(hosts.start(1, "multinode.py", *options, *by_hand(hosts, 2, 3), "--timeout", 30))
    jobs[0].wait_for("waiting for --rank 1$")
    line = cannot_join(hosts.start(1, "multinode.py", *by_hand(hosts, 2, 3), "--timeout", 30), 15)
    assert "there is a --rank 2 already: give each call its own" in line
    jobs.append(hosts.start(1, "multinode.py", *options, *by_hand(hosts, 1, 3), "--timeout", 30))
    for each in jobs:  # whoever was refused has left no trace
        each.finish()


def test_names_that_resolve_to_loopback(hosts, job):
    """As Debian's installer has it: 127.0.1.1 for the host's own name. With docs/multinode.md's
    remedy they join."""
    options, expected, _ = job
    hosts = hosts(2, own="127.0.1.1")
    jobs = [hosts.start(r, "multinode.py", *by_hand(hosts, r)) for r in (0, 1)]
    while all(each.process.poll() is None for each in jobs):
        time.sleep(0.1)
    first, last = sorted(jobs, key=lambda each: each.process.poll() is None)
    text = first.finish(1)
    assert "Gloo connectFullMesh failed" in text and "remote=[127.0.1.1]" in text
    last.kill()
    env = {**DOUBLE, "GLOO_SOCKET_IFNAME": "eth0"}
    options += ("--batch-size", 12)
    jobs = [hosts.start(r, "multinode.py", *options, *by_hand(hosts, r), **env) for r in (0, 1)]
    assert [scores(job.finish()) for job in jobs] == [expected, []]


def test_damaged_data_on_one_node(hosts, tmp_path, job):
    """One of its processes says so, in a line."""
    options, _, _ = job
    hosts = hosts(2)
    damaged = idx_files(tmp_path / "damaged", 500, 10)
    os.truncate(damaged / "FashionMNIST/raw/train-images-idx3-ubyte", 1_000)
    jobs = []
    for rank, folder in enumerate((options[4], damaged)):
        arguments = (*options[:4], folder, "--nproc-per-node", 2, *by_hand(hosts, rank))
        jobs.append(hosts.start(rank, "multinode.py", *arguments, "--timeout", 10))
    text = jobs[1].finish(1, seconds=30)
    (line,) = re.findall("^error: .*", text, re.M)
    assert line.startswith(f"error: FashionMNIST in {damaged} is damaged or incomplete")
    assert "Traceback" not in text, text
    assert not epochs(jobs[0].finish(1, seconds=30))


@pytest.mark.parametrize("how", ["killed", "link down"])
def test_a_peer_that_is_lost_in_training(hosts, job, how):
    options, _, _ = job
    hosts = hosts(2)
    arguments = (500, *options[1:], "--batch-size", 12, "--timeout", 5)
    jobs = [hosts.start(r, "multinode.py", *arguments, *by_hand(hosts, r)) for r in (0, 1)]
    jobs[0].wait_for(r"Epoch 1 \| Step 3 ")
    start = time.monotonic()
    if how == "killed":
        os.kill(jobs[1].process.pid, signal.SIGKILL)
    else:
        hosts.link(1, up=False)
    for rank in (0,) if how == "killed" else (0, 1):
        text = jobs[rank].finish(1, seconds=30)
        assert time.monotonic() - start < 20
        reason = "Connection (closed|reset) by peer" if how == "killed" else "Timed out waiting"
        assert re.search(reason, text.rstrip().splitlines()[-1]), text


def test_a_link_that_is_down_for_a_while(hosts, job):
    options, _, _ = job
    hosts = hosts(2)
    arguments = (8, *options[1:], "--batch-size", 12, "--timeout", 60)
    jobs = [
        hosts.start(r, "multinode.py", *arguments, *by_hand(hosts, r), **DOUBLE) for r in (0, 1)
    ]
    jobs[0].wait_for(r"Epoch 1 \| Step 3 ")
    hosts.link(1, up=False)
    time.sleep(1)
    before = jobs[0].text
    time.sleep(2)
    assert jobs[0].text == before and "Epoch 7" not in before
    hosts.link(1, up=True)
    texts = [job.finish() for job in jobs]
    assert "Epoch 7 | Training checkpoint saved" in texts[0]


def test_ctrl_c_on_one_host_ends_all(hosts, tmp_path, job):
    """Resumed on both, it ends as if nothing had happened."""
    options, _, _ = job
    hosts = hosts(2)
    options = (8, *options[1:], "--batch-size", 12, "--model", "convnet", "--timeout", 20)
    jobs = [hosts.start(r, "multinode.py", *options, *by_hand(hosts, r)) for r in (0, 1)]
    for each in jobs:
        each.finish()
    path = tmp_path / "host0" / "checkpoint.pt"
    expected = load(path)
    jobs = [
        hosts.start(r, "multinode.py", *options, *by_hand(hosts, r), fork=False) for r in (0, 1)
    ]
    jobs[0].wait_for(r"Epoch 1 \| Step 3 ")
    os.killpg(jobs[1].process.pid, signal.SIGINT)
    text = jobs[1].finish(128 + signal.SIGINT, seconds=20)
    assert text.count("stopped: --resume goes on from the last snapshot\n") == 1
    assert "Traceback" not in text, text
    text = jobs[0].finish(1, seconds=20)
    assert re.search(r"Connection (closed|reset) by peer", text), text
    assert 0 < load(path)["epoch"] < 8
    jobs = [
        hosts.start(r, "multinode.py", *options, "--resume", *by_hand(hosts, r)) for r in (0, 1)
    ]
    for each in jobs:
        each.finish()
    assert same_bytes(load(path), expected)


@pytest.mark.slow("waits for torchrun's time-outs, over a minute")
def test_elastic_hosts_go_and_come_back(hosts, tmp_path, job):
    """Host 1 is switched off: host 0 goes on from the snapshot; host 1 comes back and joins."""
    options, _, _ = job
    hosts = hosts(2)
    launch = f"{ELASTIC} --rdzv_endpoint {hosts.address(0)}:{PORT} {QUICK} ddp_torchrun.py"
    arguments = (60, *options[1:], "--model", "convnet", "--batch-size", 2, "--timeout", 10)
    arguments += ("--resume", "--snapshot-path", tmp_path / "shared.pt")
    first = hosts.start(0, launch, *arguments, fork=False, **SHARED_STORE_OFF)
    second = hosts.start(1, launch, *arguments, fork=False, **SHARED_STORE_OFF)
    for each in (first, second):
        each.wait_for(r"^\[rank \d of 2\]")
    both = first.text + second.text
    while "Epoch 1 | Training checkpoint saved" not in both:
        time.sleep(0.1)
        both = first.text + second.text
    second.kill()
    first.wait_for(r"^\[rank 0 of 1\]", 90)
    first.wait_for(r"^Resuming training from snapshot at Epoch [1-9]", 30)
    again = hosts.start(1, launch, *arguments, fork=False, **SHARED_STORE_OFF)
    again.wait_for(r"^\[rank \d of 2\]", 90)
    for each in (first, again):
        each.finish(seconds=240)
    # Whoever became rank 0 when both were there again.
    assert (first.text + again.text).count("\nResuming training from snapshot at Epoch ") == 2
    done = epochs(first.text) + epochs(again.text) + epochs(second.text)
    assert {line["epoch"] for line in done} == set(range(60))
