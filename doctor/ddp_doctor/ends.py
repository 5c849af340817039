"""Whether a job still moves, where its ranks stand, and how all its processes are ended."""

import contextlib
import json
import linecache
import os
import re
import signal
import time
from pathlib import Path

# Programs use SIGUSR1 and SIGUSR2 for themselves. A Mac has no real-time signals, but SIGINFO.
ASK = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else 29
WAITS = ("/torch/distributed/", "/torch/nn/parallel/", "/torch/autograd/graph.py")
FILES = "/torch/distributed/checkpoint/"
DEVICE = re.compile(r"\.(item|cpu|tolist|numpy|synchronize|to)\(")  # where a GPU is waited for


class Rank:
    """A process that has joined, as its files show it."""

    def __init__(self, beat: Path) -> None:
        self.pid, self.beat = int(beat.stem), beat
        self.events, self.stacks = beat.with_suffix(".jsonl"), beat.with_suffix(".stack")
        self.seen: tuple = ()

    def moved(self) -> bool:
        before = self.seen
        with contextlib.suppress(FileNotFoundError):
            self.seen = (self.beat.read_bytes()[:8], self.events.stat().st_size)
        return self.seen != before

    @property
    def lives(self) -> bool:
        try:
            os.kill(self.pid, 0)
            return "Z" not in state(self.pid)
        except ProcessLookupError:
            return False

    @property
    def waits_for_end(self) -> bool:
        return self.beat.read_bytes()[9] == 1

    def pause(self) -> None:
        with contextlib.suppress(FileNotFoundError), self.beat.open("r+b") as file:
            file.seek(8)
            file.write(b"\1")

    def ask(self) -> list[tuple[str, int]]:
        """Where it stands: files and lines, the innermost first."""
        before = self.stacks.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, ASK)
        end = time.monotonic() + 3
        while self.stacks.stat().st_size == before and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.1)  # it writes line by line
        text = self.stacks.read_text()[before:]
        return [(f, int(n)) for f, n in re.findall(r'^  File "(.*)", line (\d+) in ', text, re.M)]


def state(pid: int) -> str:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def stands_in_collective(stack: list[tuple[str, int]]) -> bool:
    own = [(file, line) for file, line in stack if "/ddp_doctor/" not in file]
    if not own:
        return False
    file, line = own[0]
    if any(part in file for part in WAITS):
        return FILES not in file
    if file.endswith("/threading.py") or "/multiprocessing/" in file:
        return False
    return "torch" not in file and bool(DEVICE.search(linecache.getline(file, line)))


def lines_of(stack: list[tuple[str, int]]) -> list[str]:
    """The user's own lines, the innermost first."""
    own = []
    for file, number in stack:
        if not re.search("^<|/torch/|/lib/python|/ddp_doctor/", file):
            line = linecache.getline(file, number).strip()
            own.append(f"{os.path.basename(file)}:{number} {line}")
    return own[:3]


class Ranks:
    """All ranks of this machine."""

    def __init__(self, folder: Path, patience: float) -> None:
        self.folder, self.patience = folder, patience
        self.ranks: dict[Path, Rank] = {}
        self.last = time.monotonic()
        self.next = 0.0  # when to ask again

    def look(self) -> list[Rank]:
        for beat in self.folder.glob("*.beat"):
            self.ranks.setdefault(beat, Rank(beat))
        if any([rank.moved() for rank in self.ranks.values()]):
            self.last = time.monotonic()
        return [rank for rank in self.ranks.values() if rank.lives]

    def still(self) -> float:
        return time.monotonic() - self.last

    def all_wait(self, ranks: list[Rank]) -> dict[Rank, list]:
        """Where the ranks stand, if each of them waits for others, and does so when asked again."""
        before = {rank: rank.ask() for rank in ranks}
        if not all(map(stands_in_collective, before.values())):
            return {}
        end = time.monotonic() + min(5, self.patience / 2)
        while time.monotonic() < end:
            time.sleep(0.2)
            self.look()
            if self.still() < self.patience / 2:
                return {}
        after = {rank: rank.ask() for rank in ranks if rank.lives}
        return after if after == before else {}

    def hang(self) -> bool:
        """Whether no rank will ever go on. Then their events say where they stand."""
        ranks = self.look()
        if not ranks or self.still() < self.patience or time.monotonic() < self.next:
            return False
        self.next = time.monotonic() + self.patience
        stands = self.all_wait(ranks)
        for rank, stack in stands.items():
            event = {"kind": "stuck", "time": time.time(), "step": 0, "here": None}
            with rank.events.open("a") as file:
                file.write(json.dumps({**event, "stack": lines_of(stack)}) + "\n")
        return bool(stands)

    def paused(self) -> bool:
        """After pause(): whether all ranks have come to a place where nothing is torn."""
        ranks = self.look()
        waiting = [rank for rank in ranks if rank.waits_for_end]
        if len(waiting) == len(ranks):
            return True
        others = [rank for rank in ranks if rank not in waiting]
        return self.still() > 2 and all(stands_in_collective(rank.ask()) for rank in others)


def of_run(folder: Path) -> list[int]:
    """All processes that were started below the doctor, also by others that have ended."""
    found, own = [], f"DDP_DOCTOR_FOLDER={folder}\0".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if own in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    if not Path("/proc/self").exists():
        found = [int(beat.stem) for beat in folder.glob("*.beat")]
    return found


def end(folder: Path) -> None:
    """Until none is left: one may start another meanwhile."""
    for _ in range(50):
        pids = [pid for pid in of_run(folder) if "Z" not in state(pid)]
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
