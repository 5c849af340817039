"""slurm/ddp_torchrun.sbatch, and srun with multinode.py, on a real Slurm with two nodes.

See hosts.py and helpers/slurm.py.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.files import difference, idx_files, load
from helpers.hosts import Hosts, require
from helpers.jobs import ROOT, SITE, Job, command, epochs
from helpers.slurm import Slurm, slurm_requirements

pytestmark = pytest.mark.xdist_group("slurm")  # one cluster, so one process
BATCH = ROOT / "slurm" / "ddp_torchrun.sbatch"
DOUBLE = {"LADDER_DTYPE": "float64"}
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
ENVIRONMENT = {**DOUBLE, "PATH": PATH, "PYTHONPATH": SITE, "PYTHONUNBUFFERED": ""}


@pytest.fixture(scope="module")
def slurm():
    require(slurm_requirements())
    with Hosts(2) as hosts, Slurm(hosts) as slurm:
        yield slurm


@pytest.mark.slow("a Slurm cluster, and a real job that is started three times")
def test_the_batch_script_trains_stops_when_told_and_goes_on(slurm, tmp_path):
    """Told to stop as before the time is up, which fails the job, and as at pre-emption."""
    output = tmp_path / "job.out"

    def wait_for(pattern: str) -> None:
        end = time.monotonic() + 120
        while not (output.exists() and re.search(pattern, output.read_text(), re.M)):
            assert time.monotonic() < end, slurm.log
            time.sleep(0.05)

    data = ("--dataset", "fashion-mnist", "--data-dir", idx_files(tmp_path / "data", 4_000, 10))
    options = (4, *data, "--log-interval", 1)
    placed = ("--cpus-per-task=2", f"--chdir={ROOT}", f"--output={output}")
    own = ("--batch-size", 6, "--snapshot-path", tmp_path / "job.pt")
    job = slurm.sbatch((*placed, BATCH, *options, *own), ENVIRONMENT)
    wait_for(r"Epoch 1 \| Step 3 ")
    subprocess.run(slurm.command(["scancel", "--signal=TERM", job]), check=True)
    slurm.wait(job, "FAILED")
    assert not slurm.show(job, "ExitCode").startswith("0:")
    subprocess.run(slurm.command(["scontrol", "requeue", job]), check=True)
    slurm.requeue_now(job)
    wait_for(r"Epoch 2 \| Step 3 ")
    subprocess.run(slurm.command(["scontrol", "requeue", job]), check=True)
    slurm.wait(job, "PENDING")
    slurm.requeue_now(job)
    slurm.wait(job, "COMPLETED", seconds=120)
    text = output.read_text()
    for rank in range(4):  # two on each node
        assert text.count(f"[rank {rank} of 4] device cpu |") == 3
    samples = re.findall(r"^Epoch [12] \| Stopped at sample (\d+), saved$", text, re.M)
    assert len(samples) == 2 and all(0 < int(sample) < 4_000 for sample in samples)
    assert re.findall("^Resuming training from snapshot at Epoch (.)", text, re.M) == ["1", "2"]
    assert [line["epoch"] for line in epochs(text)] == [0, 1, 2, 3]
    words = command("single_gpu.py", *options, "--batch-size", 24)
    Job(words, tmp_path, DOUBLE, fork=True).finish()
    assert difference(load(tmp_path / "job.pt"), load(tmp_path / "checkpoint.pt")) < 1e-12


@pytest.mark.slow("a Slurm cluster, and a real job")
def test_srun_without_torchrun(slurm, tmp_path):
    """docs/multinode.md's line, ranks from Slurm's variables."""
    page = (ROOT / "docs" / "multinode.md").read_text()
    (line,) = re.findall(r"^srun .* bash -c '\n(.*?)'$", page, re.M | re.S)
    options = f"1 --model mlp --snapshot-path {tmp_path}/checkpoint.pt"
    script = line.replace("multinode.py 50 10", f"multinode.py {options}")
    assert script != line
    srun = ["srun", "--nodes=2", "--ntasks=2", "--cpus-per-task=1", f"--chdir={ROOT}"]
    words = slurm.command([*srun, "bash", "-c", script], {**ENVIRONMENT, "OMP_NUM_THREADS": ""})
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert re.search(rf"^\[rank {rank} of 2\] .* threads 1$", done.stdout, re.M)
    assert done.stdout.count("Steps: 188\n") == 2 and len(epochs(done.stdout)) == 1


@pytest.mark.parametrize("cpus, threads, complaint", [(7, 1, True), (8, 1, False), (64, 8, False)])
def test_a_node_with_fewer_cpus_than_processes(tmp_path, cpus, threads, complaint):
    """The batch script alone, for a script of one's own, with another scontrol and another srun."""
    for name, line in (("scontrol", "echo a; echo b"), ("srun", 'echo "$OMP_NUM_THREADS $*"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SCRIPT": "train.py"}
    env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "[a-b]", "SLURM_JOB_NUM_NODES": "2"}
    env |= {"SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": str(cpus)}
    done = subprocess.run(["bash", str(BATCH), "50"], env=env, capture_output=True, text=True)
    assert done.stdout.startswith(f"{threads} ") and "--nproc_per_node=8" in done.stdout
    assert " train.py --snapshot-path=checkpoint-7.pt --resume 50\n" in done.stdout
    line = f"{cpus} CPUs a node for 8 processes: raise --cpus-per-task\n"
    assert done.stderr == (line if complaint else "")
