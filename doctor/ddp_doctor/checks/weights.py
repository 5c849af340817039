"""Gradients and weights: that they are the same on all ranks, and that they learn."""

from collections import defaultdict
from collections.abc import Iterator

from ddp_doctor.events import Sums
from ddp_doctor.job import Event, Found, Job, differing, some


def settings(job: Job) -> Iterator[Found]:
    for rank, one, two in (*job.pairs("before"), *job.pairs("later")):
        scales = [{"GradScaler's scale": event["scale"]} for event in (one, two)]
        groups = [scales, *zip(one["options"], two["options"], strict=False)]
        for a, b in groups if not job.grouped else ():
            for name in differing(a, b):
                what = f"in step {one['step']}, {name} is {a[name]} on rank {job.first}"
                what += f" and {b[name]} on rank {rank}"
                yield Found("settings", one["where"], what, "compute it alike on all ranks")
                return


def weights(job: Job) -> Iterator[Found]:
    """The first step after which weights differ, and why."""
    if job.sharded:
        return
    if job.meets_again:
        what = "the weights of the ranks differ, and are the same again later"
        pairs = [*job.pairs("before"), *job.pairs("after")]
        if any(differing(one["weights"], two["weights"]) for _, one, two in pairs):
            yield Found("limits", "the model", what, "average them at the end, too", "NOTE")
        return
    afters = {
        (r, e["optimizer"], e["step"]): e["weights"] for r in job.ranks for e in job.of(r, "after")
    }
    for rank, one, two in job.pairs("before"):
        if names := differing(one["weights"], two["weights"]):
            what = f"the weights of ranks {job.first} and {rank} differ before step {one['step']}"
            remedy = "wrap the model in DDP once they are loaded, and change none on one rank"
            yield told("weights", what, one["weights"], two["weights"], names, one, remedy)
            return
        sides = (job.first, one), (rank, two)
        after, other = (afters.get((r, e["optimizer"], e["step"]), {}) for r, e in sides)
        if not (names := differing(after, other)):
            continue
        if one["options"] != two["options"]:
            return  # the cause, which settings() finds
        grads = [name for name in differing(one["grads"], two["grads"]) if name in names]
        if grads:
            kind, why, remedy = reason(job, one, two, grads[0])
            what = f"in step {one['step']}, the gradients of ranks {job.first} and {rank} differ"
            if kind == "gradients" and copied(job, one["step"]):
                what += ", and a later DDP() gives all ranks rank 0's weights"
                yield Found("limits", one["where"], what, "make DDP once", "NOTE")
                return
            what += f", because {why}" if why else ""
            yield told(kind, what, one["grads"], two["grads"], grads, one, remedy)
            return
        what = f"step {one['step']} gives ranks {job.first} and {rank} other weights"
        what += ", with the same gradients"
        remedy = "change none on one rank, and load the optimizer's state on all"
        yield told("weights", what, after, other, names, one, remedy)
        return
    yield from later(job, max((e["step"] for e in job.of(job.first, "after")), default=0))


def later(job: Job, same: int) -> Iterator[Found]:
    """Weights that differ after the steps that are looked at, so without a cause."""
    if not job.all("ddp") or job.topology.keys() & {"hook", "join"}:
        return
    for rank, one, two in sorted(job.pairs("later"), key=lambda pair: pair[1]["step"]):
        if one["options"] != two["options"] or not one["sync"] or not two["sync"]:
            return
        if names := differing(one["weights"], two["weights"]):
            what = f"the weights of ranks {job.first} and {rank} differ before step {one['step']}"
            what += f", and were the same in step {same}"
            remedy = "look for what one rank does and another does not between them"
            yield told("weights", what, one["weights"], two["weights"], names, one, remedy)
            return
        same = one["step"]


def copied(job: Job, step: int) -> bool:
    """Whether a DDP() after this step has made the weights the same."""
    made = {e["step"] for e in job.of(job.first, "ddp") if e["step"] > step}
    pairs = [(one, two) for _, one, two in job.pairs("before") if one["step"] in made]
    return any(one["weights"] and one["weights"] == two["weights"] for one, two in pairs)


def skipped(job: Job) -> Iterator[Found]:
    """A rank that takes no step for a batch."""
    for rank, one, two in job.pairs("before") if not job.grouped else ():
        micro = all(e["backwards"] == e["batches"] for e in (one, two))  # of unequal sizes
        micro = micro and sum(one["sync"]) == sum(two["sync"])
        main = job.numbers[job.first].get(one["optimizer"]) == 0
        if one["batches"] != two["batches"] and main and not micro:
            late = rank if two["batches"] > one["batches"] else job.first
            what = f"before step {one['step']}, rank {late} takes no step for a batch"
            what += ", but another rank does"
            yield Found("skipped", one["where"], what, "let all ranks skip a batch together")
            return


def told(kind: str, what: str, one: Sums, two: Sums, names: list, at: Event, remedy: str) -> Found:
    a, b = (f"{norm:.6g}" for _, norm in (one[names[0]], two[names[0]]))
    norms = f"norm {a} and {b}" if a != b else f"norm {a} on both"
    what = f"{what} ({len(names)} of {len(one)}, first {names[0]}: {norms})"
    return Found(kind, at["where"], what, remedy)


def reason(job: Job, event: Event, other: Event, name: str) -> tuple[str, str, str]:
    """Why gradients differ: only what was recorded."""
    forwards, synced = len(event["sync"]), sum(event["sync"])
    if not job.all("ddp"):
        return "gradients", "", "average all of them, on all ranks"
    if name in event["synced"] and event["synced"][name] == other["synced"].get(name):
        why = "a rank changes them after the all-reduce"
        return "gradients-changed", why, "do the same on all ranks"
    around = event["backwards"] and not forwards and {*event["outside"]} >= event["grads"].keys()
    if around and "compiled" not in job.topology:
        remedy = "call DDP's model in each step, and make it once"
        return "not-through-ddp", "forward() did not go through DDP", remedy
    if name in event["outside"]:
        return "outside", "DDP does not have the parameter", "put it into the module that DDP wraps"
    if name in event["late"]:
        why = f"{name} was frozen or not there when DDP was made"
        return "late", why, "call DDP() again after unfreezing or adding it"
    if name in event["moved"]:
        why = f"{name} was moved to another type or device, where DDP's hooks were lost"
        return "moved", why, "call model.to() before DDP(model)"
    if "compiled" in job.topology:
        return "gradients", "", "compare with a run without torch.compile"
    if not forwards:
        why = "forward() did not go through DDP"
        return "not-through-ddp", why, "call model(x), not model.module(x)"
    if not synced:
        return "no-sync", "all of the step was in no_sync()", "leave it for the last micro-batch"
    if not event["sync"][-1]:
        why = "the last backward pass of the step is in no_sync()"
        return "no-sync", why, "average in the last micro-batch, and in no other"
    if event["backwards"] > forwards:
        why = "backward() runs twice after a forward(), or a checkpoint is reentrant"
        return "two-backwards", why, "add the losses, or pass use_reentrant=False"
    return "gradients", "", "look for what one rank does and another does not before this step"


def learning(job: Job) -> Iterator[Found]:
    """What also goes wrong in one process."""
    every = job.of(job.first, "before")
    for number in dict.fromkeys(e["optimizer"] for e in every):
        events = [e for e in every if e["optimizer"] == number]
        place = events[0]["where"]
        after = [e["weights"] for e in job.of(job.first, "after") if e["optimizer"] == number]
        norms = [norm for e in events for _, norm in e["grads"].values()]
        if len(after) > 3 and after[0] and all(weights == after[0] for weights in after):
            why = "all gradients are 0" if norms else "the optimizer's parameters have no gradient"
            why = "the updates are too small" if any(norms) else why
            remedy = "check that the loss depends on the parameters that the optimizer has"
            rates = {group.get("lr") for e in events for group in e["options"]}
            if any(norms) and rates == {0}:
                why, remedy = "the learning rate is 0", "raise it, or call scheduler.step()"
            what = f"{len(after)} steps change no weight, because {why}"
            yield Found("no-change", place, what, remedy)
        if len(stale := [e for e in events if e["stale"]]) > 2:
            what = f"{len(stale)} of {len(events)} steps add to the gradients of the step before"
            yield Found("stale", place, what, "call optimizer.zero_grad() in each step")
        idle = [{*e["idle"]} | {n for n, g in e["grads"].items() if not g[1]} for e in events]
        idle = sorted(set.intersection(*idle))
        if 0 < len(idle) < len(events[0]["grads"]) + len(events[0]["idle"]) and len(events) > 2:
            what = f"no gradient reaches {some(len(idle), 'parameter')} in {len(events)} steps"
            what += f" (first {idle[0]})"
            yield Found("idle", place, what, "freeze them, or let the loss depend on them", "NOTE")
        if asleep := [e for e in events if e["asleep"]]:
            what = f"step {asleep[0]['step']} is taken in eval mode"
            yield Found("eval-mode", place, what, "call model.train() after each evaluation")
    lost = {*every[-1]["lost"]} & {*every[-2]["lost"]} if len(every) > 1 else set()
    if lost and not job.sharded:
        what = (
            f"no optimizer has {some(len(lost), 'parameter')} with a gradient (first {min(lost)})"
        )
        yield Found("lost", every[0]["where"], what, "give them to it, or freeze them")


def accumulation(job: Job) -> Iterator[Found]:
    events = [e for e in job.of(job.first, "before") if e["optimizer"] == 0]
    if len(events) < 3 or len({e["optimizer"] for e in job.of(job.first, "before")}) > 1:
        return
    place, first, count = events[0]["where"], events[0]["backwards"], events[1]["backwards"]
    steady = count in (first, events[2]["backwards"])
    if 0 < first < count and steady:
        what = f"the first step comes after {first} of {count} micro-batches"
        yield Found("first-step", place, what, f"step if (i + 1) % {count} == 0")
    later = [e for e in events if e["order"] == 0 and e["here"] != events[0]["here"]]
    for event in later[:1] if steady and count > 1 else ():
        tail = event["backwards"] - count
        if tail > 0 and (event["unzeroed"] > count or event["stale"]):
            what = f"the first step of an epoch has {tail} micro-batches of the epoch before"
            remedy = "step at the end of an epoch, too, or call zero_grad() there"
            yield Found("tail", place, what, remedy)
    if 1 < count == events[1]["batches"] and steady:
        grads = [grad for _, grad in events[1]["incoming"]]
        norms = [(events[1]["grads"][n][1], norm) for n, (_, norm) in events[1]["synced"].items()]
        divided = any(count * own < 1.5 * norm for own, norm in norms)  # in .grad, by hand
        if grads == [1] * count and not divided:
            what = f"the losses of {count} micro-batches are added"
            what += f", so gradients are {count} times too large"
            yield Found("added-losses", place, what, f"divide each loss by {count}")
        if sum(events[1]["sync"]) == count and job.others:
            what = f"there are {count} all-reduces in each step, and one would do"
            remedy = "put all micro-batches but the last into no_sync()"
            yield Found("all-reduces", place, what, remedy, "NOTE")


def clipping(job: Job) -> Iterator[Found]:
    for event in [e for e in job.of(job.first, "clip") if e["scale"] != 1][2:3]:
        what = f"gradients are clipped while they are {event['scale']:g} times too large"
        yield Found("clipping", event["where"], what, "call scaler.unscale_(optimizer) before it")
    clips: dict[tuple, list[Event]] = defaultdict(list)
    for rank in job.ranks:
        for event in job.of(rank, "clip"):
            clips[rank, event["step"]].append(event)
    for rank, event, other in job.pairs("before") if not job.sharded else ():
        mine, theirs = clips[job.first, event["step"]], clips[rank, other["step"]]
        for one, two in zip(mine, theirs, strict=False):
            if one["norm"] != two["norm"] and event["grads"] == other["grads"]:
                what = f"gradients are clipped before they are averaged (norm {one['norm']:.6g} on"
                what += f" rank {job.first}, {two['norm']:.6g} on rank {rank})"
                yield Found("clipping", one["where"], what, "clip once, just before the step")
                return
