"""A Slurm cluster on the hosts of hosts.py: needs what they need, and Slurm."""

import atexit
import fcntl
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from helpers.hosts import Hosts, kill, requirements, run

FINAL = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "TIMEOUT"}
SLURM_CONF = """\
ClusterName=ladder
SlurmctldHost={name}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=10
MailProg=/bin/true
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides # believe the CPUs and RealMemory below
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
"""


def slurm_requirements() -> str | None:
    """Why there can be no Slurm cluster here, or None."""
    binaries = "munged", "slurmctld", "slurmd", "sinfo", "sbatch", "srun", "scancel", "scontrol"
    if missing := [name for name in binaries if not shutil.which(name)]:
        return f"not installed: {', '.join(missing)}"
    return requirements()


class Slurm:
    """A Slurm cluster on the hosts, each with 4 CPUs; slurmctld on the first; no accounting.

    One at a time on the machine: a second one waits.
    """

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.daemons: list[subprocess.Popen] = []
        # Not a test's folder: Slurm's sockets lie in it, and their paths must be short.
        self.folder = Path(tempfile.gettempdir(), f"{hosts.name(0)}slurm")
        self._lock: int | None = os.open(shutil.which("slurmctld") or "slurmctld", os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        atexit.register(self.close)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        hosts, folder = self.hosts, self.folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        names = [hosts.name(host) for host in range(hosts.count)]
        conf = SLURM_CONF.format(name=names[0], address=hosts.address(0), folder=folder)
        for host, name in enumerate(names):
            conf += f"NodeName={name} NodeAddr={hosts.address(host)} CPUs=4 RealMemory=16000\n"
            (folder / name).mkdir()
        conf += f"PartitionName=test Nodes={','.join(names)} Default=YES\n"
        (folder / "slurm.conf").write_text(conf)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (folder / "state").mkdir()

        # A munged of our own, with its own key: nothing of the machine's is touched.
        (folder / "munge.key").touch(mode=0o600)
        (folder / "munge.key").write_bytes(os.urandom(1024))
        files = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "seed")]
        self._daemon(0, "munged", "--foreground", f"--socket={folder}/munge.socket", *files)
        self._until((folder / "munge.socket").exists, "munged")
        self._daemon(0, "slurmctld", "-D")
        for host, name in enumerate(names):
            self._daemon(host, "slurmd", "-D", "-N", name)
        self._until(self._idle, "idle nodes")

    def _daemon(self, host: int, *argv: str) -> None:
        command = self.hosts.command(host, argv, {"SLURM_CONF": self.folder / "slurm.conf"})
        with (self.folder / "daemons.log").open("ab") as log:
            daemon = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.daemons.append(daemon)

    def _idle(self) -> bool:
        ask = self.command(["sinfo", "-hNo", "%T"])
        answer = subprocess.run(ask, capture_output=True, text=True)
        return answer.stdout.split() == ["idle"] * self.hosts.count

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + 30
        while not condition():
            ended = [daemon.args for daemon in self.daemons if daemon.poll() is not None]
            assert not ended and time.monotonic() < end, f"no {what} {ended}\n{self.log}"
            time.sleep(0.02)

    def __enter__(self) -> "Slurm":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def log(self) -> str:
        return (self.folder / "daemons.log").read_text()

    def command(self, argv: Iterable[object], env: Mapping[str, object] | None = None) -> list[str]:
        """What runs srun, scancel, scontrol, squeue, ... on the first host."""
        conf = {"SLURM_CONF": self.folder / "slurm.conf"}
        return self.hosts.command(0, argv, {**(env or {}), **conf})

    def sbatch(self, words: Iterable[object], env: Mapping[str, object]) -> int:
        """The job's number. It inherits `env` and the tests' environment, as from a shell."""
        return int(run(*self.command(["sbatch", "--parsable", *words], env)))

    def show(self, job: int, field: str) -> str:
        """A field of `scontrol show job`."""
        shown = run(*self.command(["scontrol", "--oneliner", "show", "job", job]))
        return re.search(rf"(?:^| ){field}=(\S*)", shown).group(1)

    def wait(self, job: int, wanted: str, seconds: float = 60) -> None:
        """Until it is in this state. Another one that is final fails at once."""
        end = time.monotonic() + seconds
        while (state := self.show(job, "JobState")) != wanted:
            late = state in FINAL or time.monotonic() > end
            assert not late, f"job {job} is {state}, not {wanted}\n{self.log}"
            time.sleep(0.1)

    def requeue_now(self, job: int) -> None:
        """Let a requeued job start now: Slurm makes it wait for two minutes."""
        time.sleep(1.1)  # in the second in which it ended, slurmd takes it for the one that ended
        run(*self.command(["scontrol", "update", f"JobId={job}", "StartTime=now"]))

    def close(self) -> None:
        """Kill everything on the hosts: the jobs with their steps, and the daemons."""
        if self._lock is None:
            return
        atexit.unregister(self.close)
        hosts = self.hosts
        kill(lambda: [pid for host in range(hosts.count) for pid in hosts.pids(host)])
        for daemon in self.daemons:
            daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
        self._lock = None
