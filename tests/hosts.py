"""Several hosts on one machine, and a Slurm cluster on them: needs Linux, root and iproute2.

A host is a network namespace with an address, a hostname and an /etc/hosts of its own; a bridge
joins them, and nothing else is reachable. Files, processes, CPUs and the clock are shared.
"""

import atexit
import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import pytest

NETNS = Path("/etc/netns")  # `ip netns exec NAME` mounts the files in NAME/ over those in /etc
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


def requirements() -> str | None:
    """Why there can be no hosts here, or None."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [name for name in ("ip", "tc", "unshare", "hostname") if not shutil.which(name)]:
        return f"not installed: {', '.join(missing)}"
    tried = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True)
    if tried.returncode:
        return "namespaces are not permitted here (in a container: docker run --privileged)"
    return None


def slurm_requirements() -> str | None:
    """Why there can be no Slurm cluster here, or None."""
    binaries = "munged", "slurmctld", "slurmd", "sinfo", "sbatch", "srun", "scancel", "scontrol"
    if missing := [name for name in binaries if not shutil.which(name)]:
        return f"not installed: {', '.join(missing)}"
    return requirements()


def require(reason: str | None) -> None:
    """Skip the test for this reason; in CI, where everything must be there, let it fail."""
    if reason:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def run(*argv: object) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True)
    assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
    return done.stdout


def kill(find: Callable[[], list[int]]) -> None:
    """SIGKILL to all that `find` finds, until it finds nothing."""
    end = time.monotonic() + 10
    while pids := find():
        assert time.monotonic() < end, f"cannot be killed: {pids}"
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


class Hosts:
    """`count` hosts on one bridge: ladder<number>n1 with 10.77.<number>.1, and so on.

    `own` is the address that a host's own name has in its own /etc/hosts: the right one unless
    given. Debian's installer writes 127.0.1.1 there.
    """

    def __init__(self, count: int = 2, own: str | None = None) -> None:
        self.count = count
        self.number, self._claim = self._claimed()
        self._remove()  # what a run that was killed left under this number
        atexit.register(self.close)
        bridge = self.bridge = f"ladder{self.number}bridge"
        run("ip", "netns", "add", bridge)
        run("ip", "-n", bridge, "link", "add", "br0", "up", "type", "bridge")
        for host in range(count):
            name, peer = self.name(host), ("peer", "name", f"port{host}", "netns", bridge)
            run("ip", "netns", "add", name)
            run("ip", "link", "add", "eth0", "netns", name, "type", "veth", *peer)
            run("ip", "-n", bridge, "link", "set", f"port{host}", "up", "master", "br0")
            run("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            lines = ["127.0.0.1 localhost", "::1 localhost"]
            for other in range(count):
                address = own if own and other == host else self.address(other)
                lines.append(f"{address} {self.name(other)}")
            folder = NETNS / name
            while not folder.is_dir():  # another process's close() may take the empty parent away
                with contextlib.suppress(FileNotFoundError):
                    folder.mkdir(parents=True)
            (folder / "hosts").write_text("\n".join(lines) + "\n")

    @staticmethod
    def _claimed() -> tuple[int, socket.socket]:
        """A number that no other process has: an abstract socket ends with its process."""
        for number in range(1, 255):
            claim = socket.socket(socket.AF_UNIX)
            try:
                claim.bind(f"\0ladder-hosts-{number}")
            except OSError:
                claim.close()
            else:
                return number, claim
        raise RuntimeError("254 groups of hosts are in use")

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def name(self, host: int) -> str:
        """The host's name, which is its namespace's too."""
        return f"ladder{self.number}n{host + 1}"

    def address(self, host: int) -> str:
        return f"10.77.{self.number}.{host + 1}"

    def command(
        self, host: int, argv: Iterable[object], env: Mapping[str, object] | None = None
    ) -> list[str]:
        """What runs `argv` on the host. All are exec'd, so the process started is `argv` itself.

        `env` comes on top of the caller's environment; an empty variable is one that is not set.
        """
        values = {name: str(value) for name, value in (env or {}).items()}
        unset = [f"--unset={name}" for name, value in values.items() if not value]
        settings = [f"{name}={value}" for name, value in values.items() if value]
        enter = ["ip", "netns", "exec", self.name(host), "unshare", "--uts"]
        rename = ["sh", "-c", 'hostname "$0" && exec "$@"', self.name(host)]
        return [*enter, *rename, "env", *unset, *settings, *map(str, argv)]

    def link(self, host: int, up: bool) -> None:
        """Pull the host's cable, or put it back. The host keeps its address; packets get lost."""
        run("ip", "-n", self.bridge, "link", "set", f"port{host}", "up" if up else "down")

    def shape(self, rate: str, host: int | None = None) -> None:
        """Limit what the host (None: each host) can send, for instance to "100mbit"."""
        for each in range(self.count) if host is None else [host]:
            tbf = ("root", "tbf", "rate", rate, "burst", "64k", "latency", "400ms")
            run("tc", "-n", self.name(each), "qdisc", "replace", "dev", "eth0", *tbf)

    def unshape(self, host: int | None = None) -> None:
        for each in range(self.count) if host is None else [host]:
            run("tc", "-n", self.name(each), "qdisc", "del", "dev", "eth0", "root")

    def pids(self, host: int) -> list[int]:
        """All living processes on the host."""
        return [int(pid) for pid in run("ip", "netns", "pids", self.name(host)).split()]

    def close(self) -> None:
        """Kill what still runs on the hosts, and remove them."""
        if self._claim.fileno() < 0:  # closed before: the number may be another's by now
            return
        atexit.unregister(self.close)
        self._remove()
        self._claim.close()

    def _remove(self) -> None:
        ours = re.compile(rf"^ladder{self.number}(?:n\d+|bridge)\b", re.M)
        for name in ours.findall(run("ip", "netns", "list")):
            kill(lambda name=name: [int(pid) for pid in run("ip", "netns", "pids", name).split()])
            run("ip", "netns", "del", name)
            shutil.rmtree(NETNS / name, ignore_errors=True)
        with contextlib.suppress(OSError):  # not empty, or not there
            NETNS.rmdir()


class Slurm:
    """A Slurm cluster on the hosts, each with 4 CPUs; slurmctld on the first; no accounting.

    One at a time on the machine: a second one waits. `settings` go into slurm.conf.
    """

    def __init__(self, hosts: Hosts, **settings: object) -> None:
        self.hosts = hosts
        self.daemons: list[subprocess.Popen] = []
        # Not a test's folder: Slurm's sockets lie in it, and their paths must be short.
        self.folder = Path(tempfile.gettempdir(), f"{hosts.name(0)}slurm")
        self._lock: int | None = os.open(shutil.which("slurmctld") or "slurmctld", os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        atexit.register(self.close)
        try:
            self._start(settings)
        except BaseException:
            self.close()
            raise

    def _start(self, settings: Mapping[str, object]) -> None:
        hosts, folder = self.hosts, self.folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        names = [hosts.name(host) for host in range(hosts.count)]
        conf = SLURM_CONF.format(name=names[0], address=hosts.address(0), folder=folder)
        conf += "".join(f"{name}={value}\n" for name, value in settings.items())
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

    def sbatch(
        self,
        script: Path,
        *options: object,
        arguments: Iterable[object] = (),
        env: Mapping[str, object] | None = None,
    ) -> int:
        """The number of the job. Its output lands in the script's folder, unless options say else.

        It inherits `env`, and the tests' environment, as from a user's shell.
        """
        options = ("--parsable", f"--chdir={script.parent}", *options)
        return int(run(*self.command(["sbatch", *options, script, *arguments], env)))

    def show(self, job: int, field: str) -> str:
        """A field of `scontrol show job`."""
        shown = run(*self.command(["scontrol", "--oneliner", "show", "job", job]))
        return re.search(rf"(?:^| ){field}=(\S*)", shown).group(1)

    def state(self, job: int) -> str:
        return self.show(job, "JobState")

    def exit_code(self, job: int) -> int:
        """That of the batch script; the negative number of the signal that ended it."""
        code, number = map(int, self.show(job, "ExitCode").split(":"))
        return -number or code

    def wait(self, job: int, states: str | Collection[str] = FINAL, seconds: float = 60) -> str:
        """The state, as soon as it is one of `states`. A final state that is not fails at once."""
        wanted = {states} if isinstance(states, str) else set(states)
        end = time.monotonic() + seconds
        while (state := self.state(job)) not in wanted:
            late = state in FINAL or time.monotonic() > end
            assert not late, f"job {job} is {state}, not {wanted}\n{self.log}"
            time.sleep(0.1)
        return state

    def requeue_now(self, job: int) -> None:
        """Let a requeued job start now: Slurm makes it wait for two minutes."""
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
