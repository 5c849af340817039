"""Whether the ranks share out the data: by numbers, and by what the samples hold."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from ddp_doctor.job import Event, Found, Job, differing

ENOUGH = 16  # samples that two ranks must have in common to be compared


class Alike(NamedTuple):
    """Whether a number is the same sample on two ranks: same, other, targets, order or unknown."""

    verdict: str
    count: int = 0  # samples that were compared


def shares(job: Job) -> Iterator[Found]:
    """Whether the ranks share out an epoch: no sample twice, and none left out."""
    for loader in job.loaders(trains=True):
        if not job.others or {*loader} != {*job.ranks} or job.grouped:
            continue
        check = streams if loader[job.first]["streams"] else numbers
        yield from check(job, loader)


def numbers(job: Job, loader: dict[int, Event]) -> Iterator[Found]:
    event, place = loader[job.first], loader[job.first]["place"]
    drawn = [job.drawn(e) for e in loader.values()]
    own = [job.own(e) for e in loader.values()]
    lengths, epochs = ([e[name] for e in loader.values()] for name in ("length", "epoch"))
    seen, alike = set().union(*drawn), alike_on_all(job, loader)
    twice = sum(map(len, drawn)) - len(seen)
    if event["distributed"] and len({*epochs}) > 1:
        remedy = "let rank 0 read the snapshot, and broadcast its epoch"
        yield Found("epochs", place, f"the ranks are in different epochs {epochs}", remedy)
        return
    if len({*lengths}) > 1 and "join" not in job.topology and steps_differ(job):
        remedy = "use a DistributedSampler, so that all have the same number, or Join"
        yield Found("unequal", place, f"the ranks have {lengths} batches", remedy)
    if event["distributed"] and own[0] and not any(own[0] & other for other in own[1:]):
        what = f"the data are sharded twice: each rank has {len(own[0])} samples of its own"
        what += f", and the sampler takes {len(drawn[0])} of them"
        yield Found("sharded-twice", place, what, "shard them once")
    elif event["distributed"] and any(own[0] != other for other in own):
        what = "the ranks have different subsets, of which a DistributedSampler takes shares"
        yield Found("split", place, what, "split with the same seed on all ranks")
    elif event["distributed"] and alike.verdict in ("other", "order"):
        return  # which meaning() says
    elif event["random"] or any(len({*one}) < 0.95 * len(one) for one in drawn):
        yield from replaced(job, event, drawn, alike)
    elif seen and twice > job.world + event["padded"] and alike.verdict != "other":
        what = f"an epoch has {twice} of {len(set().union(*own))} samples on more than one rank"
        if alike.verdict == "same" and max(map(len, drawn)) < 0.9 * len(seen):
            remedy = "give each rank its share, unless it is meant"
            yield Found("not-sharded", place, what, remedy, "NOTE")
        elif alike.verdict == "unknown":
            what = f"an epoch has {twice} numbers on more than one rank, perhaps of other samples"
            remedy = "use a DistributedSampler, if all ranks have the same data"
            yield Found("not-sharded", place, what, remedy, "NOTE")
        else:
            remedy = f"use sampler=DistributedSampler(dataset), not {event['kinds'][1]}"
            yield Found("not-sharded", place, what, remedy)
    elif seen and job.complete and all(job.end(r, e) for r, e in loader.items()):
        mine = [e for other in job.loaders(trains=False) for e in other.values()]
        kept = [e for e in mine if e["dataset"] == event["dataset"]]  # for an evaluation
        left = set().union(*own).difference(seen, *map(job.drawn, kept))
        every = len(seen) + len(left)  # who shards twice loses all but one share of it
        counts = {job.end(r, e)["count"] - (e["length"] or 0) for r, e in loader.items()}
        twice_sharded = abs(len(seen) * job.world - every) <= job.world * (event["batch"] or 1)
        again = [{*job.drawn(e)} for e in job.passes(job.first, trains=True)[1:2]]
        if twice_sharded and counts == {0} and all(one <= seen for one in again):
            what = f"an epoch has only {len(seen)} of {every} samples"
            yield Found("sharded-twice", place, what, "shard the data once")


def replaced(job: Job, event: Event, drawn: list, alike: Alike) -> Iterator[Found]:
    """Samples that are drawn with replacement."""
    sampler, counts, place = event["kinds"][1], [*map(len, drawn)], event["place"]
    if drawn[0] and any(drawn[0] == other for other in drawn[1:]) and alike.verdict != "other":
        what = f"{sampler} draws the same samples on all ranks"
        yield Found("not-sharded", place, what, "seed it with seed + rank")
    elif min(counts) >= (event["size"] or 1) and alike.verdict != "other":
        what = f"each rank draws {counts[0]} of {event['size']} samples with {sampler}"
        what += f", so an epoch has {sum(counts)}"
        remedy = "let each rank draw len(dataset) // world_size"
        yield Found("weighted", place, what, remedy)


def steps_differ(job: Job) -> bool:
    return job.status != 0 or len({events[-1]["step"] for events in job.ranks.values()}) > 1


def streams(job: Job, loader: dict[int, Event]) -> Iterator[Found]:
    """Of an IterableDataset, there are only the contents to compare."""
    place, workers = loader[job.first]["place"], loader[job.first]["workers"]
    rows = {rank: job.rows(rank, e) for rank, e in loader.items()}
    first = {*rows[job.first]}
    if len(first) <= ENOUGH:
        return
    times = len(rows[job.first]) / len(first)
    plain = times < 1.05
    if workers > 1 and abs(times - workers) < 0.1 * workers:
        what = f"each sample comes {workers} times on a rank, once from each worker"
        remedy = "let each worker yield its share, by torch.utils.data.get_worker_info()"
        yield Found("stream", place, what, remedy)
        plain = True
    for rank in job.others:
        common = first & {*rows[rank]}
        if plain and len(common) > 0.9 * len(first):
            what = f"ranks {job.first} and {rank} get the same {len(common)} samples"
            yield Found("stream", place, what, "let each rank yield its share, by dist.get_rank()")
            return
        if plain and len(common) > 0.1 * len(first):
            what = f"{len(common)} of the first {len(first)} samples are on more than one rank"
            yield Found("stream", place, what, "give each its share, unless it is meant", "NOTE")
            return


def inputs(job: Job) -> Iterator[Found]:
    """Of a program without loaders, the batches that go into DDP."""
    if job.all("loader") or job.grouped or not job.others:
        return
    rows = {r: [e["rows"] for e in job.of(r, "forward") if e["rows"]] for r in job.ranks}
    mine = rows[job.first]
    different = {str(row) for batch in mine for row in batch}
    if len(different) > 1 and any(mine == rows[rank] for rank in job.others):
        what, place = "the ranks get the same inputs", job.of(job.first, "forward")[0]["where"]
        if len(mine) > 1 and all(batch == mine[0] for batch in mine):
            what, remedy = f"{what} in each step", "give each its share, unless its loss has one"
            yield Found("not-sharded", place, what, remedy, "NOTE")
            return
        remedy = "seed each rank with its own number before it draws a batch"
        yield Found("not-sharded", place, what, remedy)


def order(job: Job) -> Iterator[Found]:
    """Whether two epochs are the same."""
    passes: dict[str, list[Event]] = {}
    for event in job.passes(job.first, trains=True):
        passes.setdefault(event["key"], []).append(event)
    for key, events in passes.items():
        first, place = events[0], events[0]["place"]
        listed = job.rows if first["streams"] else lambda rank, e: job.drawn(e)
        one, two = ([*listed(job.first, e)] for e in events[:2]) if len(events) > 1 else ([], [])
        enough = job.others and len({*one}) > 3 and len(two) >= min(ENOUGH, len(one))
        if enough and one[: len(two)] == two[: len(one)]:
            what = f"two epochs have the same order of {len(one)} samples"
            what = "two epochs begin with the same samples" if first["streams"] else what
            yield repeated(events[:2], place, what, shuffled=one != sorted(one))
        starts = [e for e in job.of(job.first, "loader") if e["key"] == key]
        evaluated = any(e["key"] == key for e in job.passes(job.first, trains=False))
        if len(starts) >= 2 * len(events) > 2 and not evaluated:
            what = f"the loader is started {len(starts)} times for {len(events)} epochs"
            remedy = "do not call next(iter(loader))"
            yield Found("restarts", place, what, remedy, "NOTE")


def repeated(events: list[Event], place: str, what: str, shuffled: bool) -> Found:
    first, told = events[0], events[0]["epoch"] != events[1]["epoch"]
    if first["streams"] and first["persistent"] and told and first["workers"]:
        remedy = "persistent workers do not see set_epoch(): use persistent_workers=False"
        return Found("same-order", place, what, remedy, "FOUND" if first["shuffles"] else "NOTE")
    if first["streams"] and first["shuffles"]:
        return Found("same-order", place, what, "seed its generator with seed + epoch")
    forgotten = first["settable"] and not told
    if shuffled and (forgotten or (first["distributed"] and first["shuffle"])):
        return Found("same-order", place, what, "call sampler.set_epoch(epoch) in each epoch")
    return Found("same-order", place, what, "shuffle them in each epoch", "NOTE")


# --- whether a number is the same sample on all ranks
def meaning(job: Job) -> Iterator[Found]:
    seen = set()
    for loader in [*job.loaders(trains=True), *job.loaders(trains=False)]:
        event = loader[min(loader)]
        if event["dataset"] in seen or job.grouped or {*loader} != {*job.ranks}:
            continue
        place, orders = event["place"], [e.get("orders", {}) for e in loader.values()]
        names = [n for other in orders[1:] for n in differing(orders[0], other)]
        sorted_alike = [n for n in names if len({o[n][0] for o in orders if n in o}) == 1]
        alike, distributed = alike_on_all(job, loader), event["distributed"]
        numbered = [n for n in sorted_alike if orders[0][n][2] or distributed]
        if numbered:
            what = f"the ranks number {numbered[0]} of {event['kinds'][0]} differently"
            remedy = "a set has another order in each process: sort it before you number it"
            yield Found("numbering", place, what, remedy)
        elif alike.verdict == "targets":
            what = f"{alike.count} samples with the same input have other targets on another rank"
            yield Found("numbering", place, what, "sort the names before you number the classes")
        elif alike.verdict == "order" and distributed:
            what = f"{alike.count} samples have other numbers on another rank"
            yield Found("numbering", place, what, "sort the data before they are numbered")
        elif alike.verdict == "other" and distributed:
            what = f"{alike.count} samples of the same number are others on another rank"
            remedy = (
                "make the data alike on all ranks; or, if each rank has its own, shard them once"
            )
            yield Found("other-data", place, what, f"{remedy}, without DistributedSampler")
        else:
            continue
        seen.add(event["dataset"])


def alike_on_all(job: Job, loader: dict[int, Event]) -> Alike:
    """The most that can be said of the first rank and any other."""
    found = [contents(job, rank, event) for rank, event in loader.items()]
    verdicts = [alike(found[0], other) for other in found[1:]]
    prints = [e.get("prints", {}) for e in loader.values()]
    verdicts.sort(key=lambda a: ("unknown", "same", "order", "other", "targets").index(a.verdict))
    verdict = verdicts[-1] if verdicts else Alike("unknown")
    if verdict.verdict == "unknown" and prints[0] and all(prints[0] == own for own in prints):
        return Alike("same")
    return verdict


def contents(job: Job, rank: int, event: Event) -> dict[int, list[list[int]]]:
    """What the first passes of a loader have given for each number."""
    found: dict[int, list[list[int]]] = {}
    for batch in [e for e in job.of(rank, "batch") if e["key"] == event["key"]]:
        if len(batch["numbers"]) == len(batch["rows"]):
            for number, row in zip(batch["numbers"], batch["rows"], strict=True):
                found.setdefault(number, []).append(row)
    return found


def alike(one: dict[int, list], two: dict[int, list]) -> Alike:
    """Each part of the samples counts for itself: inputs may be random, and targets are few."""
    common = [number for number in one if number in two]
    if len(common) < 3:
        return Alike("unknown")
    parts = range(len(one[common[0]][0]))
    equal = [sum(one[n][0][p] == two[n][0][p] for n in common) for p in parts]
    values = [len({one[n][0][p] for n in common}) for p in parts]
    names = [p for p in parts if values[p] > 0.8 * len(common)]  # it tells which sample it is
    plain = [p for p in parts if steady(one, p) and steady(two, p)]
    others = [p for p in plain if equal[p] < 0.9 * len(common)]
    same = [p for p in parts if equal[p] == len(common) and values[p] > 1]
    if others and {*same} & {*names}:
        return Alike("targets", len(common) - equal[others[0]])
    if {*same} & {*names} or all(count == len(common) for count in equal):
        return Alike("same", len(common))
    if others and not same:
        mine, theirs = ({tuple(row) for rows in d.values() for row in rows} for d in (one, two))
        moved = len(mine & theirs) > 0.5 * min(len(mine), len(theirs))
        return Alike("order" if moved else "other", len(common) - equal[others[0]])
    return Alike("unknown")


def steady(found: dict[int, list], part: int) -> bool:
    """Whether a part of the samples that came twice was the same."""
    twice = [rows for rows in found.values() if len(rows) > 1]
    return len(twice) > 2 and all(a[part] == b[part] for rows in twice for a, b in pairwise(rows))
