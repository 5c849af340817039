"""Several machines do one job, joined by hand or by torchrun, each with a disk of its own."""

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest
from helpers.files import difference, idx_files, load
from helpers.hosts import Hosts, require, requirements
from helpers.jobs import Job, command, epochs
from helpers.ranks import train

pytestmark = pytest.mark.slow("machines in network namespaces")

DOUBLE = {"LADDER_DTYPE": "float64"}
TORCHRUN = "torchrun --nnodes=2 --node_rank={} --nproc_per_node=2 --master_addr={} ddp_torchrun.py"
LONG = "torchrun --nnodes=2 --node_rank={} --master_addr={} recipes/long_run.py"


class Nodes(Hosts):
    """Hosts with jobs, each in its host's folder."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.jobs = folder, []
        super().__init__(count)

    def start(self, host: int, launch: str, *arguments: object, **env: object) -> Job:
        folder = self.folder / f"host{host}"
        folder.mkdir(exist_ok=True)
        env = DOUBLE | {name: str(value) for name, value in env.items()}
        self.jobs.append(Job(self.command(host, command(launch, *arguments)), folder, env))
        return self.jobs[-1]

    def call(self, host: int, *arguments: object, **env: object) -> Job:
        """multinode.py, on the host of this number."""
        options = ("--init-method", f"tcp://{self.address(0)}:22225", "--rank", host)
        options += ("--world-size", self.count)
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
    options = (2, "--dataset", "fashion-mnist", "--data-dir", idx_files(folder, 492, 10))
    text = train(folder, "single_gpu.py", 1, *options, "--batch-size", 24, dtype="float64")
    return options, scores(text), load(folder / "checkpoint.pt")


def scores(text: str) -> list[dict[str, float]]:
    return [{**line, "rate": 0} for line in epochs(text)]


def test_three_hosts_do_the_same_job(hosts, tmp_path, job):
    """The last ones start first. Rank 0 alone prints the results and saves. By file://:
    test_training.py, by env://: test_slurm.py."""
    nodes = hosts(3)
    for host in (2, 1, 0):
        nodes.call(host, *job[0], "--batch-size", 8)
    texts = [each.finish() for each in nodes.jobs]
    assert [scores(text) for text in texts] == [[], [], job[1]]
    (path,) = tmp_path.glob("host*/checkpoint.pt")
    assert path.parent.name == "host0" and difference(load(path), job[2]) < 1e-12


def test_torchrun_does_the_same_job_on_two_hosts(hosts, tmp_path, job):
    nodes = hosts(2)
    for host in (0, 1):
        launch = TORCHRUN.format(host, nodes.address(0))
        nodes.start(host, launch, *job[0], "--batch-size", 6)
    texts = [each.finish() for each in nodes.jobs]
    assert [scores(text) for text in texts] == [job[1], []]
    (path,) = tmp_path.glob("host*/checkpoint.pt")
    assert path.parent.name == "host0" and difference(load(path), job[2]) < 1e-12


def test_a_peer_that_dies_and_a_resume_on_one_host_only(hosts, tmp_path, job):
    """Host 1 has no snapshot, and is not told to resume. It gets what rank 0 has read."""
    nodes, options = hosts(2), (*job[0], "--batch-size", 12)
    jobs = [nodes.call(rank, *options, LADDER_SLOW=1) for rank in (0, 1)]
    jobs[1].wait_for(r"Epoch 1 \| Batchsize: ")
    jobs[1].process.kill()
    text = jobs[0].finish(1, seconds=60)
    assert re.search(r"Connection (closed|reset) by peer", text), text
    jobs = [nodes.call(0, *options, "--resume"), nodes.call(1, *options)]
    assert scores(jobs[0].finish()) == job[1][1:]
    assert "[rank 1 of 2] on cpu, from epoch 1\n" in jobs[1].finish()
    assert difference(load(tmp_path / "host0" / "checkpoint.pt"), job[2]) < 1e-12


def test_long_run_on_two_machines_without_a_shared_disk(hosts, job):
    """Machine 1 alone is told to stop, and torchrun tells its loaders' workers, too. Machine 0
    alone has the snapshot, from which both go on."""
    data, _, expected = job
    nodes = hosts(2)

    def both(*options: object, **env: object) -> list[str]:
        jobs = []
        for host in (0, 1):
            launch = LONG.format(host, nodes.address(0))
            words = (*data, "--batch-size", 4, "--accumulate", 3, *options)
            jobs.append(nodes.start(host, launch, *words, LADDER_DTYPE="float64", **env))
        if env:
            jobs[0].wait_for(r"Step 5 \|")
            os.kill(jobs[1].process.pid, signal.SIGTERM)
        return [job.finish(None if env else 0) for job in jobs]

    texts = both("--log-interval", 1, "--num-workers", 1, LADDER_SLOW="0:1")
    for text in texts:  # torchrun had nobody to kill
        assert "stopped by SIGTERM: continue with --resume\n" in text and "forcefully" not in text
        assert 'long_run.py", line' not in text
    (step,) = re.findall(r"^Step (\d+) \| Training checkpoint saved", texts[0], re.M)
    stopped = load(nodes.folder / "host0" / "checkpoint.pt")
    assert int(step) in range(5, 12) and stopped["samples_seen"] == 24 * int(step)
    assert not (nodes.folder / "host1" / "checkpoint.pt").exists()
    both("--resume")
    assert difference(load(nodes.folder / "host0" / "checkpoint.pt"), expected) < 1e-12
