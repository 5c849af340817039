"""What all ranks have noted, as the checks read it."""

import contextlib
import json
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cached_property
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
        files = [own for path in self.folder.glob("**/*.jsonl") if (own := process(path))]
        self.world: int = max((own[0]["world"] for own in files), default=0)
        found: dict[int, list[Event]] = {}
        for own in sorted(files, key=lambda own: own[0]["time"]):
            if own[0]["world"] == self.world:  # of a rank that was restarted, the last process
                found[own[0]["rank"] if self.world > 1 else len(found)] = own
        self.ranks = dict(sorted(found.items()))
        self.kinds: dict[tuple, list[Event]] = defaultdict(list)
        for rank, events in self.ranks.items():
            for event in events:
                self.kinds[rank, event["kind"]].append(event)
        self.first: int | None
        self.first, *self.others = [*self.ranks] or [None]
        self.others = self.others if self.world > 1 else []
        self.start = self.ranks[self.first][0] if self.ranks else {}
        self.topology = {e["what"]: e["name"] for e in self.all("topology")}

    def of(self, rank: int | None, kind: str) -> list[Event]:
        return self.kinds[rank, kind]

    def all(self, kind: str) -> list[Event]:
        return [event for rank in self.ranks for event in self.of(rank, kind)]

    @cached_property
    def complete(self) -> bool:
        return len(self.ranks) == self.world

    # --- by what ranks may differ on purpose
    @cached_property
    def sharded(self) -> str | None:
        """Why gradients and weights are not compared."""
        if self.torn:
            return "an optimizer that holds only some parameters of each rank"
        names = (self.topology.get(what) for what in ("sharded", "averaged"))
        return self.grouped or next((name for name in names if name), None)

    @cached_property
    def grouped(self) -> str | None:
        """Why the data are not compared, either: not all ranks have the same part in the work."""
        models = self.all("ddp")
        if models and all(event["group"] == self.world for event in models):
            return None
        calls = [] if models or "sharded" in self.topology else self.inner()
        steps = {event["step"] for event in calls if not event["backwards"] and event["step"]}
        last = max((event["step"] for event in calls), default=0)  # later ones are not noted
        before = [e for e in self.of(self.first, "before") if e["backwards"]]
        looked = {event["step"] for event in before if 0 < event["step"] <= last}
        if len(looked) > 2 and len(steps & looked) > len(looked) / 2:
            return self.topology.get("groups") or "collectives of its own in the forward pass"
        return self.topology.get("groups") or ("models of their own" if self.alone else None)

    @cached_property
    def alone(self) -> bool:
        """Whether each rank trains a model of its own, although they are in one group."""
        shared = self.all("ddp") or self.topology.keys() & {"sharded", "groups", "averaged"}
        apart = bool(self.others) and not shared and not self.inner() and not self.meets_again
        return apart and bool(self.all("before"))

    @cached_property
    def meets_again(self) -> bool:
        """Whether weights differ, and are the same later: they are averaged now and then."""
        apart, made = set(), {e["step"] for e in self.of(self.first, "ddp")}
        pairs = [*self.pairs("before"), *self.pairs("after")]
        for rank, one, two in sorted(pairs, key=lambda pair: pair[1]["time"]):
            which = rank, one["optimizer"]
            if one["weights"] and one["weights"] == two["weights"]:
                if which in apart and one["step"] not in made:  # where DDP() copies rank 0's
                    return True
                apart.discard(which)
            elif differing(one["weights"], two["weights"]):
                apart.add(which)
        return any(e["weights"] and e["step"] for e in self.all("collective"))

    def inner(self) -> list[Event]:
        """The collectives with more than a number in the passes that train."""
        trained = [[e["key"], e["number"]] for e in self.of(self.first, "trains")] or [None]
        calls = [e for e in self.all("collective") if e["here"] in trained]
        return [e for e in calls if e["shape"] not in ([], [1], None)]

    # --- steps
    @cached_property
    def held(self) -> dict[int, dict[int, tuple]]:
        """For each rank, the names of the parameters of each optimizer, in its first step."""
        return {
            rank: {e["optimizer"]: tuple(e["names"]) for e in reversed(self.of(rank, "before"))}
            for rank in self.ranks
        }

    @cached_property
    def numbers(self) -> dict[int, dict[int, int]]:
        """For each rank, the optimizers that all ranks have. One rank may also train a teacher."""
        every = [Counter(own.values()) for own in self.held.values()]
        found = {}
        for rank, held in self.held.items():
            counts = {n: [c[names] for c in every] for n, names in held.items()}
            same = {n: all(c) if self.status else min(c) == max(c) for n, c in counts.items()}
            own = sorted(n for n in held if same[n])
            found[rank] = {number: index for index, number in enumerate(own)}
        return found

    @cached_property
    def torn(self) -> bool:
        """Whether the optimizers of several ranks hold what no other rank's hold."""
        names = [{*own.values()} for own in self.held.values()]
        common = set.intersection(*names) if names else set()
        apart = [own for own in names if own - common]
        return len(apart) > 1 or (bool(apart) and not common)

    def steps(self, rank: int | None, kind: str) -> dict[tuple, Event]:
        """The events before or after the steps that were looked at, by their places."""
        numbers = {n: n for n in self.held[rank]} if self.torn else self.numbers[rank]
        events = [e for e in self.of(rank, kind) if e["optimizer"] in numbers]
        return {(numbers[e["optimizer"]], str(e["here"]), e["order"]): e for e in events}

    def pairs(self, kind: str) -> Iterator[tuple[int, Event, Event]]:
        """Another rank, a step of the first rank, and the same step of the other one."""
        for rank in self.others:
            mine = self.steps(rank, kind)
            for place, event in self.steps(self.first, kind).items():
                other = mine.get(place)
                # After a loader's end, places say nothing: the ranks may end apart.
                if other and (event["here"] or event["step"] == other["step"]):
                    yield rank, event, other

    # --- passes over loaders
    def passes(self, rank: int | None, trains: bool) -> list[Event]:
        """The starts of the passes that train, or of those that have ended without."""
        trained = {(e["key"], e["number"]) for e in self.of(rank, "trains")}
        starts = self.of(rank, "loader")
        if trains:
            return [e for e in starts if (e["key"], e["number"]) in trained]
        taken = {(e["key"], e["number"]) for e in self.of(rank, "end")}
        for e in starts:  # Lightning takes the last batch, and does not ask for another
            if 1 < (e["length"] or 0) <= len(self.batches(rank, e)):
                taken.add((e["key"], e["number"]))
        return [e for e in starts if (e["key"], e["number"]) in taken - trained]

    def loaders(self, trains: bool) -> Iterator[dict[int, Event]]:
        """For each loader, the start of its first such pass on each rank."""
        found: dict[str, dict[int, Event]] = {}
        for rank in self.ranks:
            for event in self.passes(rank, trains):
                found.setdefault(event["key"], {}).setdefault(rank, event)
        yield from found.values()

    def batches(self, rank: int | None, start: Event) -> list[Event]:
        """The first batches of a pass."""
        here = start["key"], start["number"]
        return [e for e in self.of(rank, "batch") if (e["key"], e["number"]) == here]

    def end(self, rank: int | None, start: Event) -> Event | None:
        here = start["key"], start["number"]
        return next((e for e in self.of(rank, "end") if (e["key"], e["number"]) == here), None)

    def rows(self, rank: int | None, start: Event) -> list[tuple]:
        """The contents of the first samples of a pass, in their order."""
        return [tuple(row) for e in self.batches(rank, start) for row in e["rows"]]

    def drawn(self, start: Event) -> list[int]:
        """The numbers that a pass has drawn, in their order."""
        return self.listed(start["numbers"])

    def own(self, start: Event) -> set[int]:
        """The numbers that a loader may draw."""
        return set(self.listed(start["own"]) or range(start["size"] or 0))

    def listed(self, name: str | None) -> list[int]:
        numbers = array("q")
        if name and (path := Path(name)).exists():
            numbers.frombytes(path.read_bytes()[: path.stat().st_size // 8 * 8])
        return numbers.tolist()


def process(path: Path) -> list[Event]:
    """The events of a process that was a rank, and those of its loaders' workers."""
    events = read(path)
    if not events or events[0]["kind"] != "start":
        return []
    for event in [event for event in events if event["kind"] == "loader"]:
        for name in ("numbers", "own"):
            event[name] = event[name] and str(path.parent / event[name])
    workers = map(read, path.parent.glob(f"{path.stem}-*.worker"))
    return events + [event for worker in workers for event in worker]


def read(file: Path) -> list[Event]:
    events = []
    with contextlib.suppress(ValueError):  # the last line, if the process was killed
        for line in file.read_text(encoding="utf-8").splitlines():
            events.append(json.loads(line))
    return events


def some(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def differing(one: dict, two: dict) -> list[str]:
    return [name for name in one if name in two and one[name] != two[name]]
