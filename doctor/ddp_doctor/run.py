"""Starts the user's command, waits for its end, and puts back what it has changed."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ddp_doctor import commands, ends
from ddp_doctor.disk import NAME, make_home
from ddp_doctor.restore import Undo, is_free
from ddp_doctor.vault import Vault

SITE = Path(__file__).resolve().parent / "site"
GRACE = 40  # seconds after a signal: torchrun gives its processes 30
ENTRIES = 20_000  # of the working folder that are compared
ENDED = "ended"


class Error(Exception):
    """Why nothing can be judged."""


class Run:
    def __init__(self, words: list[str], minutes: float, patience: float, shared: Path | None):
        self.words, self.minutes, self.patience = words, minutes, patience
        self.shared = shared.resolve() if shared else None
        if shared and any(shared.glob(f"*/{ENDED}")):
            raise Error(f"{shared} has notes of an earlier run: give an empty folder")
        self.folder = Path(tempfile.mkdtemp(prefix="ddp-doctor-", dir=self.shared))
        self.home = make_home(Path.cwd())
        self.owner = open(self.home / "alive", "w")  # noqa: SIM115
        fcntl.flock(self.owner, fcntl.LOCK_SH)  # nobody else restores meanwhile
        self.start = json.loads((self.home / "journal.jsonl").read_text())["start"]
        self.signals: list[int] = []
        self.stopped = ""  # why the command was ended before its own end
        self.lines: list[str] = []  # what is to be said of the files
        self.status, self.reason = 0, ""  # the reason why nothing is judged
        self.before = manifest(Path.cwd())

    # --- the command
    def environment(self) -> dict[str, str]:
        paths = filter(None, (str(SITE), os.environ.get("PYTHONPATH")))
        own = {"DDP_DOCTOR_FOLDER": str(self.folder), "DDP_DOCTOR_VAULT": str(self.home)}
        own |= {"DDP_DOCTOR_START": repr(self.start), "PYTHONPATH": os.pathsep.join(paths)}
        return os.environ | own | ({"DDP_DOCTOR_SHARED": "1"} if self.shared else {})

    def run(self) -> None:
        environment = self.environment()

        commands.before(Vault(str(self.home)), self.words, os.getcwd())
        names = ("SIGINT", "SIGTERM", "SIGHUP")
        for name in names:  # until the end, so that the files are put back whatever comes
            signal.signal(getattr(signal, name), self.signalled)
        try:
            process = subprocess.Popen(self.words, env=environment)
            self.status = self.wait(process)
        finally:
            ends.end(self.folder)

    def signalled(self, number: int, frame: object) -> None:
        self.signals.append(number)

    def wait(self, process: subprocess.Popen) -> int:
        ranks = ends.Ranks(self.folder, self.patience)
        begun, late, forwarded = time.monotonic(), 0.0, 0
        while (status := process.poll()) is None:
            time.sleep(0.2)
            now = time.monotonic()
            if (self.folder / "refused").exists():
                break
            if self.signals and not late:
                self.stopped, late = "by a signal", now + GRACE
            if len(self.signals) > forwarded and (
                self.signals[-1] != signal.SIGINT or not sys.stdin.isatty()
            ):  # a terminal's Ctrl-C reaches the command, too
                process.send_signal(self.signals[-1])
                forwarded = len(self.signals)
            if late and now > late:
                break
            if not late and self.minutes and now - begun > 60 * self.minutes:
                for rank in ranks.look():
                    rank.pause()
                if ranks.paused():
                    self.stopped = f"after {self.minutes:g} minutes"
                    break
            elif not late and ranks.hang():
                self.stopped = "because no rank goes on"
                break
        return -signal.SIGKILL if status is None else status

    # --- the files
    def restore(self) -> None:
        """All that was there before; what the program has made stays."""
        deadline = time.monotonic() + 10
        fcntl.flock(self.owner, fcntl.LOCK_UN)
        while not is_free(self.home) and time.monotonic() < deadline:
            ends.end(self.folder)
            time.sleep(0.1)
        if not is_free(self.home):
            self.lines.append(
                f"processes of the run still live: later, ddp-doctor restore {self.home}"
            )
            return
        undo = Undo(self.home)
        undo.run()
        self.lines += undo.said
        for line in undo.failed:
            self.lines.append(
                f"{line}; its original is in {self.home}: ddp-doctor restore {self.home}"
            )
        for path, facts in self.before.items():
            if not os.path.lexists(path):
                self.lines.append(f"{path} HAS GONE, by something that the doctor did not see")
            elif facts_of(path) != facts:
                self.lines.append(f"{path} HAS CHANGED, by something that the doctor did not see")

    def refused(self) -> str:
        return next(iter(self.said("refused")), "")

    def failures(self) -> list[str]:
        return self.said("failed")

    def said(self, name: str) -> list[str]:
        """What processes of the run had to say in a file of this name."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / name).read_text().splitlines()
        return []

    def waits(self) -> bool:
        """Whether another machine judges. The one with rank 0 waits until all have ended."""
        if not self.shared:
            return False
        (self.folder / ENDED).touch()
        if not any('"rank": 0,' in e.open().readline() for e in self.folder.glob("*.jsonl")):
            return True
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not all(
            (folder / ENDED).exists() for folder in self.shared.glob("ddp-doctor-*")
        ):
            time.sleep(0.2)
        return False

    def close(self) -> None:
        self.owner.close()
        if not self.shared:
            shutil.rmtree(self.folder, ignore_errors=True)


def manifest(folder: Path) -> dict[str, tuple]:
    """Of the files in a folder, of so many, what shows a change; but not of the doctor's output."""
    found: dict[str, tuple] = {}
    own = {(os.fstat(n).st_dev, os.fstat(n).st_ino) for n in (1, 2)}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in ("__pycache__", ".git", NAME)]
        for path in (os.path.join(parent, name) for name in names):
            with contextlib.suppress(OSError):
                if (os.lstat(path).st_dev, os.lstat(path).st_ino) not in own:
                    found[path] = facts_of(path)
            if len(found) >= ENTRIES:
                return found
    return found


def facts_of(path: str) -> tuple:
    own = os.lstat(path)
    return own.st_size, own.st_mtime_ns, own.st_mode


def program(words: list[str]) -> list[str]:
    """The command as the doctor starts it: its Python is the one that runs the doctor."""
    first, *rest = words
    python = {"python": [], "python3": [], "torchrun": ["-m", "torch.distributed.run"]}.get(first)
    folders = [Path(sys.executable).parent, os.environ.get("PATH", "")]
    found = shutil.which(first, path=os.pathsep.join(map(str, folders)))
    if python is not None or first.endswith(".py"):
        words = [sys.executable, *(python if python is not None else [first]), *rest]
    elif found:
        words = [found, *rest]
    else:
        raise Error(f"there is no command {first}")
    if os.path.basename(words[0]).startswith("python"):
        for flag in words[1:]:
            if not flag.startswith("-") or flag in ("-m", "-c"):
                break
            if not flag.startswith("--") and set(flag[1:]) & set("IES"):
                raise Error(f"python {flag} ignores PYTHONPATH, through which the doctor watches")
    return words
