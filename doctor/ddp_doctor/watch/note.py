"""The writer of events: one JSON object a line, in a file of this process's own."""

import atexit
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

EARLY = 10_000  # events that are kept until the rank is known


class Notes:
    """The events of this process. Its file is opened once its rank is known."""

    def __init__(self) -> None:
        self.file: IO[str] | None = None
        self.pid: int | None = None
        self.early: list[dict[str, Any]] = []
        self.context: dict[str, Callable[[], Any]] = {}  # facts that each event has

    def note(self, kind: str, **facts: Any) -> None:
        own = {name: tell() for name, tell in self.context.items()}
        event = {"kind": kind, "time": time.time(), **own, **facts}
        if self.file is None:
            self.early += [event] if len(self.early) < EARLY else []
        elif self.pid == os.getpid():  # and not in a loader's worker, which may be a fork
            self.file.write(json.dumps(event, default=str) + "\n")

    def begin(self, rank: int, world: int) -> None:
        if self.pid == os.getpid() or "DDP_DOCTOR_FOLDER" not in os.environ:
            return
        self.pid, early, self.early = os.getpid(), self.early, []
        path = folder() / f"{self.pid}.jsonl"
        self.file = open(path, "w", buffering=1, encoding="utf-8")  # noqa: SIM115
        told = int(os.environ.get("WORLD_SIZE", 1))
        facts = {"host": platform.node(), "pid": self.pid, "cores": cores()}
        self.note("start", rank=rank, world=world, told=told, **facts)
        self.file.writelines(json.dumps(event, default=str) + "\n" for event in early)


def folder() -> Path:
    return Path(os.environ["DDP_DOCTOR_FOLDER"])


def cores() -> float:
    """The cores that this process may use, with a container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        try:
            quota, period = " ".join(Path("/sys/fs/cgroup", n).read_text() for n in names).split()
            return count if quota in ("max", "-1") else min(count, max(1, int(quota) / int(period)))
        except OSError:
            continue
    return count or 1


def close() -> None:
    """Note what is known only when training is over; a program may end in several ways."""
    if NOTES.pid == os.getpid():
        for tell in closing:
            tell()


NOTES = Notes()
note, begin, context = NOTES.note, NOTES.begin, NOTES.context
closing: list[Callable[[], None]] = []
atexit.register(close)
