"""slurm/ddp_torchrun.sbatch, and srun with multinode.py, on a real Slurm with two nodes."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.files import difference, idx_files, load
from helpers.hosts import Hosts, require, requirements, run
from helpers.jobs import ROOT, SITE, epochs
from helpers.ranks import train

pytestmark = pytest.mark.xdist_group("slurm")  # one cluster, so one process
PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo", "sbatch", "srun", "scancel", "scontrol")
BATCH = ROOT / "slurm" / "ddp_torchrun.sbatch"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
ENVIRONMENT = {"LADDER_DTYPE": "float64", "PATH": PATH, "PYTHONPATH": SITE, "PYTHONUNBUFFERED": ""}
CONF = """\
ClusterName=ladder
SlurmctldHost={names[0]}({addresses[0]})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides # believe the CPUs and RealMemory below
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
NodeName={names[0]} NodeAddr={addresses[0]} CPUs=4 RealMemory=16000
NodeName={names[1]} NodeAddr={addresses[1]} CPUs=4 RealMemory=16000
PartitionName=test Nodes={names[0]},{names[1]} Default=YES
"""


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(scope="module")
def slurm():
    """slurm.command(*argv, **environment) runs srun and its like; slurm.call() does, and returns
    the output; slurm.wait(job, state)."""
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    require(f"not installed: {', '.join(missing)}" if missing else requirements())
    # Not a test's folder: Slurm's sockets lie in it, and their paths must be short.
    with tempfile.TemporaryDirectory() as name, Hosts(2) as hosts:
        folder = Path(name)
        folder.chmod(0o755)  # as munged wants it
        names = [hosts.name(host) for host in (0, 1)]
        addresses = [hosts.address(host) for host in (0, 1)]
        for name in names:
            (folder / name).mkdir()
        conf = folder / "slurm.conf"
        conf.write_text(CONF.format(names=names, addresses=addresses, folder=folder))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (folder / "munge.key").touch(mode=0o600)
        (folder / "munge.key").write_bytes(os.urandom(1024))

        def command(*argv: object, host: int = 0, **env: object) -> list[str]:
            return hosts.command(host, argv, {**env, "SLURM_CONF": conf})

        def call(*argv: object, **env: object) -> str:
            return run(*command(*argv, **env))

        def is_(job: str, state: str) -> bool:
            now = re.search(r" JobState=(\S*)", call("scontrol", "-o", "show", "job", job))[1]
            assert now in (state, "PENDING", "RUNNING", "COMPLETING"), f"{job} is {now}"
            return now == state

        files = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "seed")]
        socket = folder / "munge.socket"
        daemons = [(0, "munged", "--foreground", f"--socket={socket}", *files)]
        daemons += [(0, "slurmctld", "-D"), *((n, "slurmd", "-D", "-N", names[n]) for n in (0, 1))]
        for host, *argv in daemons:
            subprocess.Popen(command(*argv, host=host), start_new_session=True)
            wait_for(socket.exists, seconds=30)
        wait_for(lambda: call("sinfo", "-hNo", "%T").split() == ["idle"] * 2, seconds=30)
        wait = lambda job, state: wait_for(lambda: is_(job, state))  # noqa: E731
        yield SimpleNamespace(command=command, call=call, wait=wait)


@pytest.mark.timeout(600)  # 170 s at a load of 11
@pytest.mark.slow("a Slurm cluster, and a real job that is started three times")
def test_the_batch_script_trains_stops_when_told_and_goes_on(slurm, tmp_path):
    """Told to stop as before the time is up, which fails the job, and as at pre-emption."""
    output = tmp_path / "job.out"

    def said(pattern: str) -> bool:
        return output.exists() and bool(re.search(pattern, output.read_text(), re.M))

    def start_now() -> None:
        """A requeued job: Slurm makes it wait for two minutes."""
        time.sleep(1.1)  # in the second in which it ended, slurmd takes it for the one that ended
        slurm.call("scontrol", "update", f"JobId={job}", "StartTime=now")

    data = ("--dataset", "fashion-mnist", "--data-dir", idx_files(tmp_path / "data", 4_000, 10))
    options = (4, *data, "--log-interval", 1)
    placed = ("--parsable", "--cpus-per-task=2", f"--chdir={ROOT}", f"--output={output}")
    own = ("--batch-size", 6, "--snapshot-path", tmp_path / "job.pt")
    env = {**ENVIRONMENT, "LADDER_SLOW": "1:0.02"}  # scancel and scontrol take their time, too
    job = slurm.call("sbatch", *placed, BATCH, *options, *own, **env).strip()
    wait_for(lambda: said(r"Epoch 1 \| Step 3 "))
    slurm.call("scancel", "--signal=TERM", job)
    slurm.wait(job, "FAILED")
    slurm.call("scontrol", "requeue", job)
    start_now()
    wait_for(lambda: said(r"Epoch 2 \| Step 3 "))
    slurm.call("scontrol", "requeue", job)
    slurm.wait(job, "PENDING")
    start_now()
    slurm.wait(job, "COMPLETED")
    text = output.read_text()
    # Two runs of CI had a fourth start, most likely because a rank aborted when Python ended, and
    # torchrun restarted all. Since the scripts import torch.distributed.nn first, none has aborted.
    for rank in range(4):  # two on each node
        assert text.count(f"[rank {rank} of 4] device cpu |") == 3, text
    samples = re.findall(r"^Epoch [12] \| Stopped at sample (\d+), saved$", text, re.M)
    assert len(samples) == 2 and all(0 < int(sample) < 4_000 for sample in samples)
    assert re.findall("^Resuming training from snapshot at Epoch (.)", text, re.M) == ["1", "2"]
    assert [line["epoch"] for line in epochs(text)] == [0, 1, 2, 3]
    train(tmp_path, "single_gpu.py", 1, *options, "--batch-size", 24, dtype="float64")
    assert difference(load(tmp_path / "job.pt"), load(tmp_path / "checkpoint.pt")) < 1e-12


@pytest.mark.slow("a Slurm cluster, and a real job")
def test_srun_without_torchrun(slurm, tmp_path):
    """docs/multinode.md's line, ranks from Slurm's variables."""
    page = (ROOT / "docs" / "multinode.md").read_text()
    (line,) = re.findall(r"^srun [^\n]* bash -c '\n(.*?)'$", page, re.M | re.S)
    options = f"1 --model mlp --snapshot-path {tmp_path}/checkpoint.pt"
    script = line.replace("multinode.py 50 10", f"multinode.py {options}")
    assert script != line
    srun = ("srun", "--nodes=2", "--ntasks=2", "--cpus-per-task=1", f"--chdir={ROOT}")
    text = slurm.call(*srun, "bash", "-c", script, **ENVIRONMENT, OMP_NUM_THREADS="")
    for rank in range(2):
        assert re.search(rf"^\[rank {rank} of 2\] .* threads 1$", text, re.M)
    assert text.count("Steps: 188\n") == 2 and len(epochs(text)) == 1


@pytest.mark.slow("a Slurm cluster")
def test_a_script_of_one_process_under_srun_and_in_a_batch_script(slurm, tmp_path):
    """srun with two tasks starts it twice. A batch script runs once, whatever it asks for."""
    line = f"python {ROOT}/single_gpu.py 1 --model mlp"
    srun = ("srun", "--ntasks=2", f"--chdir={tmp_path}", *line.split())
    done = subprocess.run(slurm.command(*srun, **ENVIRONMENT), capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    said = "single_gpu.py: error: SLURM_STEP_NUM_TASKS is 2: start ddp_torchrun.py"
    assert done.stderr.count(said) == 2
    placed = ("--parsable", "--ntasks=2", f"--chdir={tmp_path}", f"--output={tmp_path}/job.out")
    job = slurm.call("sbatch", *placed, f"--wrap={line}", **ENVIRONMENT, OMP_NUM_THREADS=1).strip()
    slurm.wait(job, "COMPLETED")
    assert len(epochs((tmp_path / "job.out").read_text())) == 1


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
