"""Several nodes do one job, joined by hand or by torchrun, over a network that may fail."""

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from helpers.files import difference, idx_files, load
from helpers.hosts import NETNS, Hosts, require, requirements, run
from helpers.jobs import Job, command, epochs
from helpers.ranks import train

pytestmark = pytest.mark.slow("nodes in network namespaces")

DOUBLE = {"LADDER_DTYPE": "float64"}
PORT = 22225


class Nodes(Hosts):
    """Hosts with jobs, each in its host's folder."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.jobs = folder, []
        super().__init__(count)
        self.method = f"tcp://{self.address(0)}:{PORT}"

    def start(self, host: int, launch: str, *arguments: object, **env: object) -> Job:
        folder = self.folder / f"host{host}"
        folder.mkdir(exist_ok=True)
        env = {name: str(value) for name, value in env.items()}
        self.jobs.append(Job(self.command(host, command(launch, *arguments)), folder, env))
        return self.jobs[-1]

    def call(self, host: int, *arguments: object, processes: int = 1, **env: object) -> Job:
        """multinode.py, on the host of this number."""
        options = ("--init-method", self.method, "--rank", host * processes)
        options += ("--world-size", self.count * processes, "--nproc-per-node", processes)
        return self.start(host, "multinode.py", *options, *arguments, **env)


@pytest.fixture
def hosts(tmp_path):
    """hosts(count) -> Nodes"""
    require(requirements())
    with contextlib.ExitStack() as stack:
        yield lambda count: stack.enter_context(Nodes(tmp_path, count))


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The options of a small job, and what single_gpu.py makes of it with a batch of 24."""
    folder = tmp_path_factory.mktemp("job")
    data = ("--dataset", "fashion-mnist", "--data-dir", idx_files(folder, 492, 10))
    options = (2, *data, "--log-interval", 1)
    text = train(folder, "single_gpu.py", 1, *options, "--batch-size", 24, dtype="float64")
    return options, scores(text), load(folder / "checkpoint.pt")


def scores(text: str) -> list[dict[str, float]]:
    return [{**line, "rate": 0} for line in epochs(text)]


@pytest.mark.parametrize(("count", "processes", "store"), [(3, 1, "tcp"), (2, 2, "file")])
def test_any_number_of_hosts_does_the_same_job(hosts, tmp_path, job, count, processes, store):
    """The last ones start first. Rank 0 alone prints and saves."""
    nodes = hosts(count)
    if store == "file":
        nodes.method = f"file://{tmp_path}/shared"
    options = (*job[0], "--batch-size", 24 // count // processes)
    for host in reversed(range(count)):
        nodes.call(host, *options, processes=processes, **DOUBLE)
    texts = [each.finish() for each in nodes.jobs]
    assert [scores(text) for text in texts] == [*[[]] * (count - 1), job[1]]
    (path,) = tmp_path.glob("host*/checkpoint.pt")
    assert path.parent.name == "host0" and difference(load(path), job[2]) < 1e-12


def test_torchrun_restarts_on_all_nodes(hosts, tmp_path, job):
    """A process of node 1 is killed. All go on from the snapshot, and do the same job."""
    nodes = hosts(2)
    meet = f"--rdzv_backend=c10d --rdzv_endpoint={nodes.address(0)}:29400 --rdzv_id=7"
    options = (*job[0], "--batch-size", 6, "--accumulate", 2, "--save-steps", 2, "--resume")
    options += ("--snapshot-path", tmp_path / "shared.pt")
    env = {**DOUBLE, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1, "LADDER_SLOW": 1}
    for host in (0, 1):
        words = f"torchrun --nnodes=2 --max-restarts=3 {meet} ddp_torchrun.py"
        nodes.start(host, words, *options, **env)
    nodes.jobs[0].wait_for(r"Epoch 1 \| Step 24 ")
    (worker,) = nodes.jobs[1].workers()
    os.kill(worker, signal.SIGKILL)
    texts = [each.finish() for each in nodes.jobs]
    for rank, text in enumerate(texts):  # a restart may fail and be followed by another
        assert text.count(f"[rank {rank} of 2] ") >= 2
    assert "Resuming training from snapshot at Epoch 1\n" in texts[0]
    assert [line["epoch"] for line in epochs(texts[0])] == [0, 1]
    assert difference(load(tmp_path / "shared.pt"), job[2]) < 1e-12


def test_a_link_that_goes_down(hosts, job):
    """All end after --timeout."""
    nodes, options = hosts(2), (500, *job[0][1:], "--timeout", 8)
    jobs = [nodes.call(rank, *options) for rank in (0, 1)]
    jobs[0].wait_for(r"Epoch 1 \| Step 3 ")
    run("ip", "-n", f"ladder{nodes.number}bridge", "link", "set", "port1", "down")
    for each in jobs:
        *_, line = each.finish(1).rstrip().splitlines()
        assert re.search("Timed out waiting 8000ms|Application timeout", line), line


def test_ctrl_c_on_one_host_ends_all_and_they_go_on(hosts, tmp_path, job):
    """The snapshot lies on a shared disk, where an earlier run has left its own."""
    nodes = hosts(2)
    shared = tmp_path / "shared.pt"
    shared.write_text("an earlier run's")
    options = (*job[0], "--batch-size", 12, "--snapshot-path", shared)
    jobs = [nodes.call(rank, *options, LADDER_SLOW=1, **DOUBLE) for rank in (0, 1)]
    jobs[0].wait_for(r"Epoch 1 \| Step 3 ")
    os.killpg(jobs[1].process.pid, signal.SIGINT)
    assert "\nKeyboardInterrupt\n" in jobs[1].finish(-signal.SIGINT, seconds=20)
    text = jobs[0].finish(1, seconds=20)
    assert re.search(r"Connection (closed|reset) by peer", text), text
    assert f"The snapshot of an earlier run is now {shared}.old\n" in text
    assert Path(f"{shared}.old").read_text() == "an earlier run's"
    jobs = [nodes.call(rank, *options, "--resume", **DOUBLE) for rank in (0, 1)]
    text = jobs[0].finish()
    assert "Resuming training from snapshot at Epoch 1\n" in text
    assert scores(text) == job[1][1:] and not epochs(jobs[1].finish())
    assert difference(load(shared), job[2]) < 1e-12


TORCHRUN = "torchrun --nnodes=2 --node_rank={} --master_addr={} ddp_torchrun.py"


def end_alike(nodes: Nodes, launch: str, options: tuple, other: tuple, line: str) -> None:
    """Start the job on two hosts, the second with other options, too. Both end with this line, and
    after it only torchrun has something to say."""
    line = f"error: {line}: it must be the same on all nodes"
    after = "$" if launch == "multinode.py" else r"E\d{4} "
    for host, given in enumerate([options, (*options, *other)]):
        if launch == "multinode.py":
            nodes.call(host, *given)
        else:
            nodes.start(host, TORCHRUN.format(host, nodes.address(0)), *given)
    nodes.jobs[0].wait_for("^error: ")
    for job in nodes.jobs:
        before, said, rest = job.finish(1, seconds=30).partition(f"{line}\n")
        assert said and "Traceback" not in before, job.text
        assert re.match(after, rest) and line not in rest, job.text


@pytest.mark.parametrize(("launch", "resume"), [("multinode.py", ("--resume",)), ("torchrun", ())])
def test_a_node_with_another_option_ends_all(hosts, tmp_path, job, launch, resume):
    """Also where the snapshot, which was made with momentum 0.9, would be refused on that node."""
    path = tmp_path / "shared.pt"
    torch.save(job[2], path)
    options = (*job[0], *resume, "--snapshot-path", path)
    line = "momentum is 0.9 on rank 0, and 0.1 on rank 1"
    end_alike(hosts(2), launch, options, ("--momentum", 0.1), line)
    assert load(path)["epoch"] == 2  # not renamed


@pytest.mark.parametrize(
    ("launch", "saved", "line"),
    [
        ("multinode.py", (None, 2), "epoch is 0 on rank 0, and 2 on rank 1"),
        ("torchrun", (2, 1), "epoch is 2 on rank 0, and 1 on rank 1"),
    ],
)
def test_a_node_with_another_snapshot_or_none_ends_all(hosts, tmp_path, job, launch, saved, line):
    paths = [tmp_path / "first.pt", tmp_path / "second.pt"]
    for path, epoch in zip(paths, saved, strict=True):
        if epoch:
            torch.save(job[2] | {"epoch": epoch}, path)
    first, second = (("--snapshot-path", path) for path in paths)
    end_alike(hosts(2), launch, (*job[0], "--resume", *first), second, f"snapshot's {line}")


STANDALONE = "torchrun --standalone --nproc_per_node=2 --local-addr=localhost ddp_torchrun.py"


@pytest.mark.parametrize("launch", ["ddp_spawn.py", STANDALONE])
def test_two_runs_at_once_on_a_host_that_does_not_know_its_own_name(hosts, fashion, launch):
    nodes, options = hosts(1), (50, *fashion(1000, 10), "--log-interval", 1, "--snapshot-path")
    (NETNS / nodes.name(0) / "hosts").write_text("127.0.0.1 localhost\n")
    jobs = [nodes.start(0, launch, *options, name) for name in ("first.pt", "second.pt")]
    for job in jobs:
        job.wait_for("Step 3 ")
    assert all(job.process.poll() is None for job in jobs)
