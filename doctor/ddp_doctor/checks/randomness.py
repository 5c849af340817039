"""Random numbers that are the same on all ranks, in the model or in the samples."""

from collections.abc import Iterator
from itertools import pairwise, product

from ddp_doctor.job import Event, Found, Job

SHARED = "torch", "random", "numpy", "torch.cuda"  # the generators of a whole process
REMEDY = "seed each rank with seed + rank, once the model is made"
OWN = "seed it in worker_init_fn, or with seed + rank"


def model(job: Job) -> Iterator[Found]:
    for rank in job.others[:1] if not job.grouped else ():
        one, two = job.of(job.first, "before"), job.of(rank, "before")
        for name in one[0]["states"] if one and two else ():
            moves = used(job, job.first, name), used(job, rank, name)
            same = all(
                (a["here"], a["states"].get(name)) == (b["here"], b["states"].get(name))
                for a, b in zip(one, two, strict=False)
            )
            for a, b in zip(*(job.passes(r, trains=True) for r in (job.first, rank)), strict=False):
                begin = a["states"].get(name)  # then they may draw other amounts of numbers
                same = same or (begin is not None and begin == b["states"].get(name))
            if min(moves) > 1 and same:
                what = f"ranks {job.first} and {rank} draw the same random numbers from {name}"
                what += ", for dropout or augmentation"
                yield Found("random", one[0]["where"], what, REMEDY)


def used(job: Job, rank: int, name: str) -> int:
    """The steps that draw numbers. Each pass that begins draws one, too, a seed for its workers."""
    starts = [e["time"] for e in job.of(rank, "loader")]
    return sum(
        a["here"] == b["here"]
        and a["states"].get(name) != b["states"].get(name)
        and not any(a["time"] < start < b["time"] for start in starts)
        for a, b in pairwise(job.of(rank, "before"))
    )


def samples(job: Job) -> Iterator[Found]:
    """In the workers, or where the data set has a generator of its own."""
    places = {(e["key"], e["number"]): e["place"] for e in job.all("loader")}
    trained = {(e["key"], e["number"]) for e in job.all("trains")}
    said = set()
    for rank in job.ranks if not job.grouped else ():
        for one, two in product(job.of(job.first, "draws"), job.of(rank, "draws")):
            here = one["key"], one["number"]
            itself = rank == job.first and one["worker"] == two["worker"]
            if itself or here not in trained or here != (two["key"], two["number"]):
                continue
            for name in alike(one, two):
                judged = one["worker"] is None and name in SHARED  # by model()
                if judged or (name, one["key"]) in said:
                    continue
                said.add((name, one["key"]))
                who = f"ranks {job.first} and {rank}" if rank != job.first else "a rank"
                who = f"the workers of {who}" if one["worker"] is not None else who
                what = f"{who} draw the same random numbers from {name}, for the samples"
                yield Found("random", places[here], what, REMEDY if name in SHARED else OWN)


def alike(one: Event, two: Event) -> list[str]:
    """The generators from which both draw, beginning with the same state."""
    found = []
    for name, state in one["before"].items():
        moves = all(e["after"].get(name) != e["before"].get(name) for e in (one, two))
        same = one["after"].get(name) == two["after"].get(name)
        seeded = name != "torch" or one["seeds"] or two["seeds"]  # may be seeded for each sample
        if moves and state == two["before"].get(name) and (same or not seeded):
            found.append(name)
    return found


def evaluated(job: Job) -> Iterator[Found]:
    for loader in job.loaders(trains=False):
        rank, event = min(loader.items())
        here = event["key"], event["number"]
        draws = [e for e in job.of(rank, "draws") if (e["key"], e["number"]) == here]
        names = sorted({n for e in draws for n, s in e["before"].items() if e["after"].get(n) != s})
        if names:
            what = f"samples of the evaluation are random (from {', '.join(names)})"
            remedy = "give it a data set without augmentation"
            yield Found("random-evaluation", event["place"], what, remedy, "NOTE")
