"""Whether each validation sample counts once, with the same model on all ranks."""

from collections.abc import Iterator
from itertools import combinations, takewhile

from ddp_doctor.checks.data import alike_on_all
from ddp_doctor.job import Event, Found, Job, differing

Loader = dict[int, Event]


def evaluation(job: Job) -> Iterator[Found]:
    trained: dict[int, set] = {rank: set() for rank in job.ranks}
    for loader in job.loaders(trains=True):
        for rank, event in loader.items():
            trained[rank] |= {(event["dataset"], n) for n in job.drawn(event)}
    loaders = [loader for loader in job.loaders(trains=False) if not job.grouped]
    for loader in loaders:
        if loader[min(loader)]["size"] is None:
            continue
        yield from padded(job, loader)
        yield from kept(job, loader)
        yield from left_out(job, loader, loaders)
        yield from leaked(job, loader, trained)
        yield from communicates(job, loader)


def after(job: Job, rank: int, start: Event) -> list[Event]:
    """The collectives of a rank from the start of an evaluation until it trains again."""
    events, kinds = job.ranks[rank], ("collective", "before", "trains")
    own = [e for e in events[events.index(start) + 1 :] if e["kind"] in kinds]
    return [*takewhile(lambda e: e["kind"] == "collective", own)]


def padded(job: Job, loader: Loader) -> Iterator[Found]:
    rank, event = min(loader.items())
    samples = len(job.drawn(event))
    shapes = [e["shape"] or [0] for e in after(job, rank, event) if "gather" in e["name"]]
    gathered = any(max(shape) >= (event["batch"] or samples) for shape in shapes if shape)
    objects = any(e["name"].endswith("object") for e in after(job, rank, event))
    drawn = [job.drawn(e) for e in loader.values()] if {*loader} == {*job.ranks} else []
    twice = sum(map(len, drawn)) - len(seen := set().union(*drawn))
    # And not all samples on all ranks, nor other samples of the same numbers.
    own = 0 < twice < len(seen) / 2 and not event["random"] and not event["padded"]
    own = own and job.others and alike_on_all(job, loader).verdict in ("same", "unknown")
    if own and not gathered and not objects:
        what = f"the ranks draw {twice} of {len(seen)} samples twice with {event['kinds'][1]}"
        yield Found("padded", event["place"], what, "do not count them again", "NOTE")
    dropped = any(drawn) and twice == 0  # by a sampler around it
    if event["padded"] and not dropped and not gathered and not objects:  # or cut to the length
        what = f"{event['kinds'][1]} counts {event['padded']} of {event['size']} samples twice"
        yield Found("padded", event["place"], what, "take range(rank, n, world_size)")


def kept(job: Job, loader: Loader) -> Iterator[Found]:
    """Each rank evaluates a share, and what it finds stays there, or is averaged wrongly."""
    rank, event = min(loader.items())
    drawn = [job.drawn(e) for e in loader.values()]
    seen = set().union(*drawn)
    shared = len(drawn) == len(job.ranks) and all(drawn)
    if not job.others or not shared or sum(map(len, drawn)) - len(seen) > event["padded"]:
        return
    calls = [after(job, r, e) for r, e in loader.items()]
    going = any(e["kind"] == "before" and e["time"] > event["time"] for e in job.ranks[rank])
    if not calls[0] and going:
        what = f"each rank evaluates a share of {len(seen)} samples, and keeps its result"
        remedy = "add up with all_reduce(), if a number of all samples is meant"
        yield Found("evaluation-kept", event["place"], what, remedy, "NOTE")
    counts = [*map(len, drawn)]
    values = [[e["value"] for e in own if e["value"] is not None] for own in calls]
    for shares in zip(*values, strict=False) if len({*counts}) > 1 else ():
        scale = 100 if max(shares) > 1 else 1  # per cent
        rights = [v * n / scale for v, n in zip(shares, counts, strict=True)]
        whole = all(abs(right - round(right)) < 1e-3 for right in rights)
        if whole and all(0 < v < scale and v % 1 for v in shares):
            what = f"means of {counts} samples are averaged as if they were of as many"
            remedy = "sum up what is right and the samples, and divide once"
            yield Found("mean-of-means", event["place"], what, remedy)
            return


def left_out(job: Job, loader: Loader, loaders: list[Loader]) -> Iterator[Found]:
    event = loader[min(loader)]
    mine = {r: job.own(e) for r, e in loader.items()}
    every = [item for other in loaders for item in other.items()]
    alike = [(r, e) for r, e in every if e["dataset"] == event["dataset"]]
    left = set().union(*mine.values()) - {n for _, e in alike for n in job.drawn(e)}
    split = any(a != b and a & b for a, b in combinations(mine.values(), 2))
    ends = [(job.end(r, e), e["length"]) for r, e in alike]
    whole = all(end and length in (None, end["count"]) for end, length in ends)
    if left and whole and not split and job.complete and job.drawn(event):
        every = set().union(*mine.values())
        what = f"the evaluation leaves out {len(left)} of {len(every)} samples"
        remedy = "evaluate without drop_last, and on all ranks"
        yield Found("left-out", event["place"], what, remedy)


def leaked(job: Job, loader: Loader, trained: dict[int, set]) -> Iterator[Found]:
    event = loader[min(loader)]
    mine = {r: {(e["dataset"], n) for n in job.own(e)} for r, e in loader.items()}
    found = set().union(*(own for r, own in mine.items() if not own & trained[r]))
    found &= set().union(*trained.values())
    if found and alike_on_all(job, loader).verdict not in ("other", "order"):
        what = f"{len(found)} samples of the evaluation are trained on by another rank"
        yield Found("split", event["place"], what, "split with the same seed on all ranks")


def communicates(job: Job, loader: Loader) -> Iterator[Found]:
    rank, event = min(loader.items())
    here, lengths = [event["key"], event["number"]], [e["length"] for e in loader.values()]
    calls = [e for e in job.of(rank, "collective") if e["here"] == here]
    calls = [e for e in calls if e["name"] not in ("send", "recv", "batch_isend_irecv")]
    end = job.end(rank, event)
    if len({*lengths}) > 1 and end and len(calls) + end["sent"] >= end["count"] > 0:
        what = f"the ranks evaluate {lengths} batches, and communicate in each"
        remedy = "call model.module, and sum up after the loop"
        yield Found("evaluation-hangs", event["place"], what, remedy)


def buffers(job: Job) -> Iterator[Found]:
    for rank in job.others if not job.sharded else ():
        theirs = {(e["key"], e["number"]): e.get("buffers", {}) for e in job.of(rank, "end")}
        for event in job.of(job.first, "end"):
            own = theirs.get((event["key"], event["number"]), {})
            if names := differing(event.get("buffers", {}), own):
                what = f"rank {rank} evaluates with other buffers ({len(names)}, first {names[0]})"
                remedy = "call model.eval(), and broadcast rank 0's before"
                yield Found("buffers", event["key"].split("#")[0], what, remedy)
                return


def beside(job: Job) -> Iterator[Found]:
    """A teacher or an average: called on all ranks, and not wrapped in DDP."""
    said = set()
    for rank in job.others if not job.sharded else ():
        for one, two in zip(job.of(job.first, "beside"), job.of(rank, "beside"), strict=False):
            same = all(one[name] == two[name] for name in ("name", "where"))
            names = differing(one["weights"], two["weights"]) if same else []
            if names and one["where"] not in said:
                said.add(one["where"])
                what = f"{one['name']} has other weights on rank {rank}"
                what += f" ({len(names)} of {len(one['weights'])}, first {names[0]})"
                remedy = "copy or load it alike on all ranks, and update it on all"
                yield Found("beside", one["where"], what, remedy)
    for event in job.of(job.first, "beside"):
        frozen = event["frozen"] and event["trained"] and event["modal"] and not event["asleep"]
        if frozen and event["where"] not in said:
            said.add(event["where"])
            what = f"{event['name']}, whose weights stay as they are, is called in training mode"
            yield Found("beside", event["where"], what, "call its eval()")
