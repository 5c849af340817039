"""slurm/ddp_torchrun.sbatch and srun on a real Slurm with two nodes: see hosts.py."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.files import difference, idx_files, load, same_bytes
from helpers.hosts import Hosts, require
from helpers.jobs import ROOT, SITE, Job, command, epochs
from helpers.slurm import Slurm, slurm_requirements

pytestmark = pytest.mark.xdist_group("slurm")  # one cluster, so one process
EPOCHS = 4


@pytest.fixture(scope="module")
def slurm():
    require(slurm_requirements())
    with Hosts(2) as hosts, Slurm(hosts) as slurm:
        yield slurm


class Project:
    """A folder with what a user has: the script, common/ and slurm/. And a job to run in it."""

    def __init__(self, folder: Path, slurm: Slurm) -> None:
        self.folder, self.slurm = folder, slurm
        for script in ("ddp_torchrun.py", "multinode.py"):
            shutil.copy(ROOT / script, folder)
        for name in ("common", "slurm"):
            shutil.copytree(ROOT / name, folder / name)
        data = ("--dataset", "fashion-mnist", "--data-dir", idx_files(folder / "data", 4_000, 10))
        self.options = (*data, "--log-interval", 1)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.env = {"PATH": path, "PYTHONPATH": SITE, "PYTHONUNBUFFERED": ""}  # lines stay whole

    def sbatch(self, *arguments: object, **env: object) -> int:
        options = ("--cpus-per-task=2", f"--chdir={self.folder}", f"--output={self.folder}/%j.out")
        script = self.folder / "slurm" / "ddp_torchrun.sbatch"
        return self.slurm.sbatch(
            script, *options, arguments=map(str, arguments), env={**self.env, **env}
        )

    def text(self, job: int) -> str:
        path = self.folder / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def wait_for(self, job: int, pattern: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not re.search(pattern, self.text(job), re.M):
            assert time.monotonic() < end, self.text(job) + self.slurm.log
            time.sleep(0.05)

    def snapshot(self, job: int) -> dict:
        return load(self.folder / f"checkpoint-{job}.pt")


@pytest.fixture(scope="module")
def project(tmp_path_factory, slurm):
    return Project(tmp_path_factory.mktemp("project"), slurm)


@pytest.fixture(scope="module")
def whole(project):
    """The number of a job that nobody disturbed, and its output."""
    job = project.sbatch(EPOCHS, *project.options, "--batch-size", 6, "--model", "convnet")
    project.slurm.wait(job, "COMPLETED", seconds=120)
    return job, project.text(job)


@pytest.mark.slow("a Slurm cluster, and a real job")
def test_the_batch_script_trains(project, whole):
    job, text = whole
    assert [line["epoch"] for line in epochs(text)] == list(range(EPOCHS))
    for rank in range(4):  # two on each node
        assert text.count(f"[rank {rank} of 4] device cpu |") == 1
    assert text.count("Steps: 167\n") == 4 * EPOCHS  # 4,000 samples over 4 x 6
    assert project.slurm.exit_code(job) == 0


@pytest.mark.slow("a Slurm cluster, and a real job")
def test_asked_to_stop_then_requeued(project, whole):
    """A signal as at pre-emption saves in mid-epoch; the job goes on from there when requeued."""
    slurm = project.slurm
    job = project.sbatch(EPOCHS, *project.options, "--batch-size", 6, "--model", "convnet")
    project.wait_for(job, r"Epoch 1 \| Step 3 ")
    subprocess.run(slurm.command(["scontrol", "requeue", job]), check=True)
    slurm.wait(job, "PENDING")
    epoch, sample = re.search(
        r"^Epoch (\d) \| Stopped at sample (\d+), saved$", project.text(job), re.M
    ).groups()
    assert 0 < int(sample) < 4_000
    slurm.requeue_now(job)
    slurm.wait(job, "COMPLETED", seconds=120)
    assert f"Resuming training from snapshot at Epoch {epoch}\n" in project.text(job)
    assert same_bytes(project.snapshot(job), project.snapshot(whole[0]))


@pytest.mark.slow("a Slurm cluster, and a real job")
def test_term_saves_and_ends_the_job(project, whole):
    slurm = project.slurm
    job = project.sbatch(EPOCHS, *project.options, "--batch-size", 6, "--model", "convnet")
    project.wait_for(job, r"Epoch 1 \| Step 3 ")
    subprocess.run(slurm.command(["scancel", "--signal=TERM", job]), check=True)
    slurm.wait(job, "FAILED")
    snapshot = project.snapshot(job)
    assert snapshot["epoch"] > 0 and 0 < snapshot["samples_seen"] < 4_000
    assert not same_bytes(snapshot, project.snapshot(whole[0]))


@pytest.mark.parametrize("cpus, threads, complaint", [(7, 1, True), (8, 1, False), (64, 8, False)])
def test_a_node_with_fewer_cpus_than_processes(tmp_path, cpus, threads, complaint):
    """The batch script alone, with another scontrol and another srun."""
    for name, line in (("scontrol", "echo a; echo b"), ("srun", 'echo "$OMP_NUM_THREADS $*"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": 7, "SLURM_JOB_NODELIST": "[a-b]", "SLURM_JOB_NUM_NODES": 2}
    job |= {"SLURM_GPUS_ON_NODE": 8, "SLURM_CPUS_PER_TASK": cpus}
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | {k: str(v) for k, v in job.items()}
    script = ["bash", str(ROOT / "slurm" / "ddp_torchrun.sbatch"), "50"]
    done = subprocess.run(script, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{threads} ") and "--nproc_per_node=8" in done.stdout
    assert " ddp_torchrun.py --snapshot-path=checkpoint-7.pt --resume 50\n" in done.stdout
    done = subprocess.run(script, env={**env, "SCRIPT": "train.py"}, capture_output=True, text=True)
    assert " train.py --snapshot-path=checkpoint-7.pt --resume 50\n" in done.stdout
    line = f"{cpus} CPUs a node for 8 processes: raise --cpus-per-task\n"
    assert done.stderr == (line if complaint else "")


@pytest.mark.slow("a Slurm cluster, and a real job")
def test_a_worker_that_fails_fails_the_job(project):
    job = project.sbatch(2, *project.options, LADDER_RAISE="1:5", MAX_RESTARTS=0)
    assert project.slurm.wait(job) == "FAILED" and project.slurm.exit_code(job) > 0
    assert "ArithmeticError: the test's own error" in project.text(job)
    assert not epochs(project.text(job))


@pytest.mark.slow("a Slurm cluster, and a real job")
def test_srun_without_torchrun(project, tmp_path):
    """docs/multinode.md's line, ranks from Slurm's variables: the same job as on one device."""
    page = (ROOT / "docs" / "multinode.md").read_text()
    (line,) = re.findall(r"^srun .* bash -c '\n(.*?)'$", page, re.M | re.S)
    options = (1, *project.options, "--snapshot-path")
    env = {**project.env, "LADDER_DTYPE": "float64", "OMP_NUM_THREADS": ""}
    arguments = (*options, tmp_path / "two.pt", "--batch-size", 32)
    srun = ["srun", "--nodes=2", "--ntasks=2", "--cpus-per-task=1", f"--chdir={project.folder}"]
    python = " ".join(map(str, ("python multinode.py", *arguments)))
    bash = ["bash", "-c", line.replace("python multinode.py 50 10", python)]
    assert python in bash[2]
    done = subprocess.run(
        project.slurm.command([*srun, *bash], env), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert re.search(rf"^\[rank {rank} of 2\] .* threads 1$", done.stdout, re.M)
    arguments = (*options, tmp_path / "one.pt", "--batch-size", 64)
    Job(
        command("single_gpu.py", *arguments), tmp_path, {"LADDER_DTYPE": "float64"}, fork=True
    ).finish()
    assert difference(load(tmp_path / "two.pt"), load(tmp_path / "one.pt")) < 1e-12
