"""Running the real command lines: each in a session of its own, watched for what it leaves."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "tests" / "site"
SCRIPTS = ("single_gpu.py", "data_parallel.py", "ddp_spawn.py", "ddp_torchrun.py", "multinode.py")
every_script = pytest.mark.parametrize("script", SCRIPTS)
every_ddp_script = pytest.mark.parametrize("script", SCRIPTS[2:])
LONG = "long_run.py"  # in recipes/
# For what test_sameness.py finds to be the same, to the letter, in all five.
every_form = pytest.mark.parametrize("script", (SCRIPTS[0], SCRIPTS[2], LONG))

# Standalone: its own port, also where torchrun's default is a fixed one (before torch 2.12).
TORCHRUN = "torchrun --standalone --nproc_per_node={} ddp_torchrun.py"
SPAWN2 = ("ddp_spawn.py", "--nproc-per-node", 2)
# What multinode.py needs where it is alone. Each Job puts a new file of its folder in this place.
ALONE = ("--init-method", "file://new", "--rank", 0, "--world-size", 1)
EPOCH = re.compile(
    r"Epoch (\d+) \| Train loss: (\S+) \| Val loss: (\S+) \| "
    r"Accuracy: (\d+)/(\d+) \((\S+)%\) \| (\d+) samples/s",
    re.M,
)


class Job:
    """A script that was started; `finish` waits for it and checks that no process is left."""

    def __init__(self, command: list[str], folder: Path, env: dict[str, str]) -> None:
        if sys.platform != "linux":
            pytest.skip("needs Linux: it looks into /proc for what a job leaves behind")
        self.mark = uuid.uuid4().hex
        # One thread a process, as tests run side by side; an empty variable in `env` is one that
        # is not set.
        env = {"OMP_NUM_THREADS": "1", **env, "JOB_MARK": self.mark}
        unset = {name for name, value in env.items() if not value}
        env = {name: value for name, value in {**os.environ, **env}.items() if name not in unset}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SITE), env.get("PYTHONPATH"))))
        self.folder, self.output = folder, folder / f"output-{self.mark}"
        self.command = command
        command = [word.replace("file://new", f"file://{self.output}-store") for word in command]
        with self.output.open("wb") as out:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
            self.process = subprocess.Popen(
                command, cwd=folder, env=env, start_new_session=True, **streams
            )

    @property
    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, pattern: str, seconds: float = 180) -> None:
        """Return as soon as the output has `pattern`."""
        end = time.monotonic() + seconds
        while not re.search(pattern, self.text, re.M):
            assert self.process.poll() is None, f"ended without {pattern!r}:\n{self.text}"
            assert time.monotonic() < end, f"no {pattern!r} in {seconds} s:\n{self.text}"
            time.sleep(0.01)

    def pids(self) -> list[int]:
        """All living processes of the job, which inherit its mark; the parent first."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # one that ends now
                if self.mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return sorted(found, key=lambda pid: (pid - self.process.pid) % 2**22)  # they start anew

    def workers(self) -> list[int]:
        """The processes that mp.spawn or torchrun started, in this order."""
        ranks = []
        for pid in self.pids():
            with contextlib.suppress(OSError):
                process = Path(f"/proc/{pid}")
                parent = (process / "stat").read_text().rsplit(")", 1)[1].split()[1]
                program = (process / "cmdline").read_bytes()
                if parent == str(self.process.pid) and b"resource_tracker import" not in program:
                    ranks.append(pid)
        return ranks

    def finish(self, status: int | None = 0, seconds: float = 240) -> str:
        """The whole output, once the job has ended with `status` and left no process behind."""
        try:
            self.process.wait(seconds)
            end = time.monotonic() + 30
            while (left := self.pids()) and time.monotonic() < end:
                time.sleep(0.05)
            assert not left, f"still running: {left}\n{self.text}"
        except subprocess.TimeoutExpired:
            pytest.fail(f"not done after {seconds} s:\n{self.text}")
        finally:
            self.kill()
        if status is not None:
            assert self.process.returncode == status, self.text
        return self.text

    def kill(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def command(launch: str, *arguments: object) -> list[str]:
    """`launch` is a script, or a command that ends with one: the words that start it."""
    *words, script = launch.split()
    first = words.pop(0) if words else "python"
    programs = {"python": sys.executable, "torchrun": str(Path(sys.executable).parent / "torchrun")}
    return [programs[first], *words, str(ROOT / script), *map(str, arguments)]


def epochs(text: str) -> list[dict[str, float]]:
    """The epoch lines of an output."""
    names = ("epoch", "train_loss", "val_loss", "correct", "total", "accuracy", "rate")
    return [dict(zip(names, map(float, found), strict=True)) for found in EPOCH.findall(text)]
