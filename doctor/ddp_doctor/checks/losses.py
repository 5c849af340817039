"""The loss, and the learning rate."""

from collections import defaultdict
from collections.abc import Iterator

from ddp_doctor.job import Event, Found, Job, some


def losses(job: Job) -> Iterator[Found]:
    of_steps: dict[tuple, list[Event]] = defaultdict(list)
    for rank in job.ranks:
        for event in job.of(rank, "loss"):
            of_steps[rank, event["step"]].append(event)
    for rank, a, b in job.pairs("before") if not job.grouped else ():
        mine, theirs = of_steps[job.first, a["step"]], of_steps[rank, b["step"]]
        for one, two in zip(mine, theirs, strict=False):
            if one["count"] is None or two["count"] is None or one["count"] == two["count"]:
                continue
            plain = one["plain"] and two["plain"] and one["drawn"] != two["drawn"]
            shares = [weight(a, one), weight(b, two)]
            if plain or None in shares or abs(shares[0] - shares[1]) < 1e-3 * abs(shares[0]):
                continue
            what = f"the loss is divided by {one['count']:.6g} on rank {job.first}"
            what += f" and by {two['count']:.6g} on rank {rank}"
            remedy = "multiply it by its own number, and divide it by the mean of all ranks'"
            yield Found("unequal-losses", one["where"], what, remedy)
            return


def weight(step: Event, loss: Event) -> float | None:
    """What one target counts in the gradient."""
    grads = [grad for index, grad in step["incoming"] if index == loss["index"]]
    return grads[0] / loss["count"] if grads and loss["count"] else None


def world(job: Job) -> Iterator[Found]:
    """A loss that is divided by world_size, although DDP averages."""
    steps = [e for e in job.of(job.first, "before") if e["world"] and e["sync"] and e["sync"][-1]]
    gathers = any(not event["backwards"] for event in job.inner())  # whose gradients add up
    if job.world < 2 or job.sharded or gathers or "hook" in job.topology or len(steps) < 3:
        return
    grads = [[grad * job.world for _, grad in e["incoming"]] for e in steps]
    by_loss = [len(own) == 1 and abs(own[0] - 1) < 1e-4 for own in grads]
    by_root = [job.world in e["divisors"] and (e["rooted"] or not e["incoming"]) for e in steps]
    if all(by_loss) or all(by_root):
        what = f"the loss is divided by world_size, and DDP averages over {job.world} ranks, too"
        remedy = f"do not divide it: gradients are {job.world} times too small"
        yield Found("divided-twice", steps[0]["where"], what, remedy)


def halved(job: Job) -> Iterator[Found]:
    """Gradients that are divided by world_size after DDP has averaged them."""
    steps = [e for e in job.of(job.first, "before") if e["synced"] and e["sync"] == [True]]
    ratios = []
    for event in steps if job.world > 1 and not job.sharded else ():
        norms = [(event["grads"][n][1], event["synced"][n][1]) for n in event["synced"]]
        ratios += [one / two for one, two in norms if two]
    if len(steps) > 3 and ratios and all(abs(r * job.world - 1) < 1e-3 for r in ratios):
        what = f"gradients are divided by {job.world} after the all-reduce, which has averaged them"
        yield Found("divided-twice", steps[0]["where"], what, "do not divide them")


def one_sided(job: Job) -> Iterator[Found]:
    """A term of the loss that has a gradient on some ranks only."""
    for rank in job.others if not job.grouped else ():
        steps = [(a, b) for _, a, b in job.pairs("before") if a["backwards"] == b["backwards"]]
        pairs = [(a["graph"], b["graph"]) for a, b in steps if a["graph"]]
        more = [{n: c - b.get(n, 0) for n, c in a.items() if c > b.get(n, 0)} for a, b in pairs]
        less = [{n: c - a.get(n, 0) for n, c in b.items() if c > a.get(n, 0)} for a, b in pairs]
        for own, other, poorer in ((more, less, rank), (less, more, job.first)):
            if len(pairs) > 7 and all(own) and not any(other) and all(o == own[0] for o in own):
                names = ", ".join(sorted(own[0])[:3])
                what = f"the loss of rank {poorer} lacks {some(sum(own[0].values()), 'operation')}"
                what += f" that another rank's has, in each step ({names})"
                remedy = "compute each term on all ranks, without detach() or no_grad() on one"
                yield Found("one-sided", job.of(job.first, "before")[0]["where"], what, remedy)
                return


def remarks(job: Job) -> Iterator[Found]:
    pairs = [e for e in job.of(job.first, "loss") if e["pairs"]] if job.others else []
    gathers = any("gather" in e["name"] and e["shape"] for e in job.of(job.first, "collective"))
    for event in pairs[:1] if not gathers else ():
        what = f"each rank compares only its own {event['count']:.0f} samples"
        yield Found("contrastive", event["where"], what, "gather the others', if meant", "NOTE")
    for event in [e for e in job.of(job.first, "collective") if e["name"] == "reduce"][:1]:
        what, remedy = "reduce() leaves the sum on one rank", "use all_reduce(), if others use it"
        yield Found("reduce", event["where"], what, remedy, "NOTE")
    sums = [e for e in job.of(job.first, "loss") if not e["mean"]] if job.others else []
    for event in sums[:1]:
        what, remedy = "what this loss is divided by is not judged", "divide it alike on all ranks"
        yield Found("loss-sum", event["where"], what, remedy, "NOTE")


# --- the learning rate
def schedule(job: Job) -> Iterator[Found]:
    last = {e["number"]: e for e in job.of(job.first, "scheduler")}
    epochs = len({e["number"] for e in job.passes(job.first, trains=True)})
    for event in last.values():
        name, place, calls, steps, total = (
            event[key] for key in ("name", "where", "calls", "steps", "total")
        )
        size, count = max(event["bursts"].items(), key=lambda item: item[1], default=("1", 0))
        times, most = int(size), count > 0.9 * sum(event["bursts"].values()) and count > 3
        made, remedy = f"{name} is made for {total} steps", "call its step()"
        ended = total and not job.status  # else it would have made more
        if most and times > 1 and (not total or calls > 1.5 * total):
            what = f"{name} steps {times} times in each optimizer step, {calls} times in all"
            what += f", and is made for {total}" if total else ""
            label = "FOUND" if total else "NOTE"
            yield Found("scheduler", place, what, f"{remedy} once in each optimizer step", label)
        elif most and times == 1 and total == epochs > 1 and calls > 3 * total:
            what = f"{made}, one in each epoch, and has made {calls}"
            yield Found("scheduler", place, what, f"{remedy} once in each epoch")
        elif ended and 0 < calls <= epochs + 1 < total and total == steps > 3 * epochs:
            what = f"{made}, one in each optimizer step, and has made {calls}"
            yield Found("scheduler", place, what, f"{remedy} in each optimizer step")
        elif ended and most and total > calls and total in whole_epochs(job, epochs):
            what = f"{made}, those of one process, and has made {calls}"
            yield Found("scheduler", place, what, "make it for epochs * len(loader)")
    for event in job.of(job.first, "resumed")[:1]:
        for own, used in zip(event["rates"], event["used"], strict=False):
            if abs(own - used) > 1e-6 * abs(own):
                what = f"after a resume, the learning rate is {used:.6g}"
                what += f", and {event['name']}'s own {own:.6g}"
                remedy = "do not set it by hand after the scheduler's state is loaded"
                yield Found("resumed-rate", event["where"], what, remedy)
                return


def whole_epochs(job: Job, epochs: int) -> set[int]:
    """The steps of as many epochs, if one process went through all of the data."""
    found = set()
    for event in job.passes(job.first, trains=True):
        if event["size"] and event["batch"] and event["distributed"] and job.world > 1:
            found |= {epochs * (event["size"] // event["batch"])}
            found |= {epochs * -(-event["size"] // event["batch"])}
    return found
