"""slurm/train.sbatch, and srun with multinode.py, on a real Slurm with two nodes."""

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
BATCH = ROOT / "slurm" / "train.sbatch"
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
GresTypes=gpu
NodeName={names[0]} NodeAddr={addresses[0]} CPUs=4 RealMemory=16000 Gres=gpu:2
NodeName={names[1]} NodeAddr={addresses[1]} CPUs=4 RealMemory=16000 Gres=gpu:2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=test Nodes={names[0]},{names[1]} Default=YES GraceTime=60
PartitionName=urgent Nodes={names[0]},{names[1]} PriorityTier=2
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
        # Slurm only counts them, but they must be devices.
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        (folder / "munge.key").touch(mode=0o600)
        (folder / "munge.key").write_bytes(os.urandom(1024))

        def command(*argv: object, host: int = 0, **env: object) -> list[str]:
            return hosts.command(host, argv, {**env, "SLURM_CONF": conf})

        def call(*argv: object, **env: object) -> str:
            return run(*command(*argv, **env))

        def is_(job: str, state: str) -> bool:
            now = re.search(r" JobState=(\S*)", call("scontrol", "-o", "show", "job", job))[1]
            ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
            assert now == state or now not in ended, f"{job} is {now}"
            return now == state

        files = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "seed")]
        socket = folder / "munge.socket"
        daemons = [(0, "munged", "--foreground", f"--socket={socket}", *files)]
        daemons += [(0, "slurmctld", "-D"), *((n, "slurmd", "-D", "-N", names[n]) for n in (0, 1))]
        for host, *argv in daemons:
            subprocess.Popen(command(*argv, host=host), start_new_session=True)
            wait_for(socket.exists, seconds=30)
        wait_for(lambda: call("sinfo", "-hNo", "%T").split() == ["idle"] * 4, seconds=30)
        wait = lambda job, state: wait_for(lambda: is_(job, state))  # noqa: E731
        yield SimpleNamespace(call=call, wait=wait, names=names)


@pytest.mark.timeout(600)
@pytest.mark.slow("a Slurm cluster, and a real job that is started three times")
def test_the_batch_script_goes_on_after_its_time_and_after_pre_emption(slurm, tmp_path):
    """Its time is up. Then a job of higher priority comes. It saves in mid-epoch each time."""
    output = tmp_path / "job.out"

    def said(pattern: str) -> bool:
        return output.exists() and bool(re.search(pattern, output.read_text(), re.M))

    def start_again(count: int) -> None:
        """Now: Slurm makes a requeued job wait for two minutes."""
        slurm.wait(job, "PENDING")
        assert f" Restarts={count} " in slurm.call("scontrol", "-o", "show", "job", job)
        time.sleep(1.1)  # in the second in which it ended, slurmd takes it for the one that ended
        slurm.call("scontrol", "update", f"JobId={job}", "StartTime=now")

    data = ("--dataset", "fashion-mnist", "--data-dir", idx_files(tmp_path / "data", 2_400, 10))
    options = (2, *data)
    placed = ("--parsable", f"--chdir={tmp_path}", f"--output={output}", "--cpus-per-task=2")
    env = {**ENVIRONMENT, "SCRIPT": ROOT / "recipes/long_run.py", "OMP_NUM_THREADS": ""}
    env |= {"LADDER_SLOW": "1:0.1"}  # scancel and scontrol take their time, too
    own = ("--batch-size", 12, "--log-interval", 1)
    job = slurm.call("sbatch", *placed, "--gpus-per-node=1", BATCH, *options, *own, **env).strip()
    wait_for(lambda: said(r"Epoch 0 \| Step 3 "))
    slurm.call("scancel", "--batch", "--signal=USR1", job)
    start_again(1)
    wait_for(lambda: said(r"Epoch 1 \| Step 123 "))
    urgent = ("--partition=urgent", "--nodes=2", "--cpus-per-task=4", "--output=/dev/null")
    slurm.call("sbatch", *urgent, "--wrap=true")
    start_again(2)
    slurm.wait(job, "COMPLETED")
    text = output.read_text()
    assert text.count("[rank 1 of 2] on cpu") == 3, text
    assert re.findall("^.rank 0 of 2. on cpu, from epoch (.)", text, re.M) == ["0", "0", "1"]
    assert text.count("stopped by SIGTERM") == 4
    assert [line["epoch"] for line in epochs(text)] == [0, 1]
    train(tmp_path, "single_gpu.py", 1, *options, "--batch-size", 24, dtype="float64")
    own = load(tmp_path / f"checkpoint-{job}.pt")
    assert difference(own, load(tmp_path / "checkpoint.pt")) < 1e-12


@pytest.mark.timeout(600)
@pytest.mark.slow("a Slurm cluster, and three real jobs")
def test_a_job_is_requeued_if_it_has_saved_and_not_restarted_if_it_fails(slurm, tmp_path):
    """Two jobs of an array save when they are stopped, but only the second is. ddp_torchrun.py
    cannot save then, and weights that are NaN end a job for good."""
    for name in ("common", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    env = {**ENVIRONMENT, "LADDER_SLOW": "0", "LADDER_DTYPE": ""}
    placed = ("--parsable", f"--chdir={tmp_path}", "--nodes=1", "--cpus-per-task=2")
    placed += ("--gpus-per-node=1", f"--output={tmp_path}/%j.out")
    sbatch = lambda *words, **more: slurm.call("sbatch", *placed, *words, **env, **more).strip()  # noqa: E731
    state = lambda job: re.search(r"JobState=(\S+)", slurm.call("scontrol", "show", "job", job))[1]  # noqa: E731
    other = sbatch(BATCH, 9, SCRIPT=ROOT / "ddp_torchrun.py")
    array = sbatch("--array=1-2", f"--output={tmp_path}/array-%a.out", BATCH, "--log-interval", 1)
    outputs = [tmp_path / f"{name}.out" for name in (other, "array-1", "array-2")]
    said = lambda what: [o.exists() and what in o.read_text() for o in outputs]  # noqa: E731
    wait_for(lambda: said("Epoch 0 | Step 2 ")[1:] == [True] * 2 and said("Epoch 0 | B")[0])
    for job in (other, f"{array}_2"):
        slurm.call("scancel", "--batch", "--signal=USR1", job)
    slurm.wait(f"{array}_2", "PENDING")
    slurm.wait(f"{array}_1", "RUNNING")
    wait_for(lambda: state(other) == "FAILED")
    assert said(f"not requeued: checkpoint-{other}.pt was not saved") == [True, False, False]
    snapshot = tmp_path / f"checkpoint-{array}_2.pt"
    assert load(snapshot)["samples_seen"] > 0
    assert not (tmp_path / f"checkpoint-{array}_1.pt").exists()
    slurm.call("scancel", array)
    fails = sbatch(BATCH, "--lr", "1e30", "--save-steps", 5)
    wait_for(lambda: state(fails) == "FAILED")
    text = (tmp_path / f"{fails}.out").read_text()
    assert text.count("error: weights are NaN or infinite") == 1


@pytest.mark.slow("a Slurm cluster, and a real job")
def test_srun_without_torchrun(slurm, tmp_path):
    """docs/multinode.md's line: ranks from Slurm's variables, and a GPU of the job for each."""
    page = (ROOT / "docs" / "multinode.md").read_text()
    (line,) = re.findall(r"^srun [^\n]* bash -c '\n(.*?)'$", page, re.M | re.S)
    say = 'echo "rank $RANK has GPU $CUDA_VISIBLE_DEVICES"\n'
    options = f"1 --model mlp --snapshot-path {tmp_path}/checkpoint.pt"
    script = line.replace(
        "exec python multinode.py 50 10", f"{say}exec python multinode.py {options}"
    )
    assert script != line
    # Slurm has given GPU 0 of the first node to another job.
    other = ("--nodes=1", f"--nodelist={slurm.names[0]}", "--gpus-per-node=1", "--output=/dev/null")
    other = slurm.call("sbatch", "--parsable", *other, "--wrap=sleep 300").strip()
    slurm.wait(other, "RUNNING")
    srun = ("srun", "--nodes=2", "--ntasks=2", "--gpus-per-node=1", f"--chdir={ROOT}")
    text = slurm.call(*srun, "bash", "-c", script, **ENVIRONMENT)
    slurm.call("scancel", other)
    for rank, gpu in ((0, 1), (1, 0)):
        assert f"rank {rank} has GPU {gpu}\n" in text and f"[rank {rank} of 2] on cpu" in text
    assert text.count("Steps: 188\n") == 2 and len(epochs(text)) == 1


ARRAY = {"SLURM_GPUS_ON_NODE": "8", "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ({"SLURM_GPUS_ON_NODE": "8"}, "--snapshot-path=checkpoint-7.pt --resume 50"),
        (
            {"CPU_PROCESSES": "8", "SNAPSHOT": "a.pt", "SCRIPT": "train.py"},
            "--snapshot-path=a.pt --resume 50",
        ),
        (ARRAY, "--snapshot-path=checkpoint-5_3.pt --resume --seed=3 50"),
        ({**ARRAY, "SNAPSHOT": "a.pt"}, "--snapshot-path=a.pt.3 --resume --seed=3 50"),
        ({}, "Slurm gave this job no GPUs: ask for --gpus-per-node"),
        (
            {"SLURM_GPUS_ON_NODE": "8", "MORE": "--snapshot-path=b.pt"},
            "write SNAPSHOT=NAME.pt before sbatch",
        ),
    ],
)
def test_what_the_batch_script_starts(tmp_path, given, arguments):
    """Without Slurm: srun says what it was given."""
    for name, line in (("scontrol", "echo a; echo b"), ("srun", 'echo "$*"; env')):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **given}
    env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "[a-b]", "SLURM_JOB_NUM_NODES": "2"}
    env |= {"SLURM_CPUS_PER_TASK": "16"}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    words = ["bash", BATCH, "50", *env.pop("MORE", "").split()]
    done = subprocess.run(words, cwd=tmp_path, env=env, **both)
    first, *exported = done.stdout.splitlines()
    if not exported:
        assert arguments in first and done.returncode > 0
        return
    assert " torchrun --nnodes=2 --nproc_per_node=8 --max-restarts=0 --rdzv_id=7 " in first
    assert " --rdzv_backend=c10d --rdzv_endpoint=a:10007 " in first
    program = given.get("SCRIPT", "recipes/long_run.py")
    assert first.endswith(f" {program} {arguments}")
    assert {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "SRUN_CPUS_PER_TASK=16"} <= {*exported}
    assert not [line for line in exported if line.startswith("OMP_NUM_THREADS=")]
