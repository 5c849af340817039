"""What all ranks have noted, as the checks read it."""

import contextlib
import json
from array import array
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

Event = dict[str, Any]  # events.py names the keys of each kind


class Found(NamedTuple):
    """A line of the doctor. Its kind is the name of a page in explain/."""

    kind: str
    place: str
    what: str
    remedy: str
    label: str = "FOUND"  # or NOTE, which does not count

    def __str__(self) -> str:
        return f"{self.label} {self.place}: {self.what}: {self.remedy} (explain {self.kind})"


class Job:
    """The events of each rank. The others are compared with the first rank."""

    def __init__(self, folder: Path, status: int) -> None:
        self.folder, self.status = Path(folder), status
        files = [events for file in self.folder.glob("**/*.jsonl") if (events := read(file))]
        files = [events for events in files if events[0]["kind"] == "start"]
        self.world: int = max((events[0]["world"] for events in files), default=0)
        found: dict[int, list[Event]] = {}
        for events in sorted(files, key=lambda events: events[0]["time"]):
            if events[0]["world"] == self.world:  # of a rank that was restarted, the last process
                found[events[0]["rank"] if self.world > 1 else len(found)] = events
        self.ranks = dict(sorted(found.items()))
        self.first: int | None
        self.first, *self.others = [*self.ranks] or [None]
        self.others = self.others if self.world > 1 else []
        self.start = self.ranks[self.first][0] if self.ranks else {}

    def of(self, rank: int | None, kind: str) -> list[Event]:
        return [event for event in self.ranks.get(rank, ()) if event["kind"] == kind]

    def all(self, kind: str) -> list[Event]:
        return [event for rank in self.ranks for event in self.of(rank, kind)]

    @property
    def complete(self) -> bool:
        return len(self.ranks) == self.world


def read(file: Path) -> list[Event]:
    events = []
    with contextlib.suppress(ValueError):  # the last line, if the process was killed
        for line in file.read_text(encoding="utf-8").splitlines():
            events.append(json.loads(line))
    return events
