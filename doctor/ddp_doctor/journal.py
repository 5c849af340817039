"""The journal of a run: JSON lines, which all its processes share and write one at a time."""

import contextlib
import fcntl
import json
import os
import threading
from collections.abc import Iterator

from ddp_doctor.disk import Key


class Refused(Exception):
    """The program was about to do something that could not be undone."""


class Journal:
    """What it says of the files that were there before, and the lock of those who write it."""

    def __init__(self, home: str) -> None:
        self.home, self.journal = home, os.path.join(home, "journal.jsonl")
        self.known: set[Key] = set()  # was there before, whatever its time of change says now
        self.copied: set[Key] = set()  # and what it holds is in a vault
        self.made: set[str] = set()  # folders and links that the run has made
        self.held: list[str] = []  # where things that were there before lie since a rename
        self.folders: dict[int, list[str]] = {}
        self.starts: dict[int, float] = {}
        self.begun = 0.0
        self.noted: set[Key] = set()  # whose mode, owner and times are in the journal
        self.read = self.count = self.kept = self.file = self.depth = 0
        self.turn = threading.RLock()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """All other threads and processes wait; what they have written is known."""
        with self.turn:
            if self.depth == 0:
                self.file = os.open(self.journal, os.O_RDWR | os.O_APPEND)
            self.depth += 1
            try:
                if self.depth == 1:
                    fcntl.flock(self.file, fcntl.LOCK_EX)
                    self.catch_up()
                yield
            finally:
                self.depth -= 1
                if self.depth == 0:
                    os.close(self.file)

    def after_fork(self) -> None:
        """Another thread of the parent may have had its turn."""
        if self.depth:
            os.close(self.file)  # the parent still holds the lock
        self.turn, self.depth = threading.RLock(), 0

    def catch_up(self) -> None:
        text = os.pread(self.file, os.fstat(self.file).st_size - self.read, self.read)
        whole = text[: text.rfind(b"\n") + 1]
        self.read += len(whole)
        if len(whole) < len(text):  # a process was killed while it wrote the last line
            os.ftruncate(self.file, self.read)
        for line in whole.splitlines():
            self.learn(json.loads(line))

    def learn(self, record: dict) -> None:
        self.count += 1
        own = tuple(record.get("inode", ()))
        self.known.add(own)
        if record["op"] == "vault":
            self.folders.setdefault(record["device"], []).append(record["path"])
            self.begun = self.begun or record["start"]
            self.starts.setdefault(record["device"], record["start"])
        elif record["op"] == "made":
            self.made.add(record["path"])
        else:
            self.kept += 1
        if record["op"] == "stat":
            self.noted.add(own)
        if record["op"] == "copy":
            self.copied.add(own)
        if record.get("goes"):  # no link keeps it, so that a new file may get its number
            self.known.discard(own)
            self.copied.discard(own)
            self.noted.discard(own)
        if record["op"] == "rename":
            self.held.append(record["to"])
            self.made.discard(record["to"])

    def note(self, op: str, **facts: object) -> None:
        line = json.dumps({"op": op, **facts}).encode() + b"\n"
        if os.write(self.file, line) < len(line):
            os.ftruncate(self.file, self.read)
            raise Refused("the disk with the doctor's journal is full")
        self.read += len(line)
        self.learn(json.loads(line))
