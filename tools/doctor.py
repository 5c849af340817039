"""What is silently wrong with a program that trains on several processes, and where its time goes.

    python tools/doctor.py torchrun --nproc_per_node=2 train.py --my-options
    python tools/doctor.py python ddp_spawn.py
    python tools/doctor.py accelerate launch --num_processes 2 train.py

Put it before your own command, which should train for two epochs or more. It is stopped after some
steps. The doctor's own options stand before the command. docs/doctor.md says what its lines mean.

doctor_watch.py notes what happens in each process. Here it is judged: a check is a function that
gets what all ranks have noted, and yields what it finds. To add one, write it, and name it in
CHECKS.
"""

import argparse
import contextlib
import json
import linecache
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from itertools import chain, combinations, pairwise
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
PAGE, PITFALLS, LOOP = "docs/doctor.md#", "docs/pitfalls.md#", "docs/your_loop.md#"
DATA, WEIGHTS, LIMITS = (PAGE + name for name in ("data", "gradients-and-weights", "limits"))
SHUFFLE = PITFALLS + "an-epoch-takes-as-long-on-two-devices-as-on-one"
SPLIT = PITFALLS + "validation-accuracy-is-too-good"
SKIP = PITFALLS + "one-rank-takes-fewer-steps-than-the-others"
HANG = PITFALLS + "the-job-hangs-in-a-collective"
EARLY = PITFALLS + "accumulation-learns-worse"


class Found(NamedTuple):
    place: str
    what: str
    remedy: str
    page: str
    label: str = "FOUND"  # or NOTE, which does not count

    def __str__(self) -> str:
        return f"{self.label} {self.place}: {self.what}: {self.remedy} ({self.page})"


class Job:
    """What the ranks have noted: lists of events. The others are compared with the first rank."""

    def __init__(self, folder: Path, status: int) -> None:
        self.folder, self.status, self.ranks = folder, status, {}
        files = [events for file in folder.glob("*.jsonl") if (events := read(file))]
        self.world = max((events[0]["world"] for events in files), default=0)
        for events in sorted(files, key=lambda events: events[0]["time"]):
            if events[0]["world"] == self.world:  # of a rank that was restarted, the last process
                self.ranks[events[0]["rank"] if self.world > 1 else len(self.ranks)] = events
        self.ranks = dict(sorted(self.ranks.items()))
        self.first, *self.others = [*self.ranks] or [None]
        self.others = self.others if self.world > 1 else []  # alone() has judged these
        self.start = self.ranks[self.first][0] if self.ranks else {}

    def of(self, rank: int, kind: str) -> list[dict]:
        return [event for event in self.ranks[rank] if event["kind"] == kind]

    def all(self, kind: str) -> list[dict]:
        return [event for rank in self.ranks for event in self.of(rank, kind)]

    def pairs(self, kind: str) -> Iterator[tuple[int, dict, dict]]:
        """Another rank, an event of the first rank, and the same event of the other one."""
        for rank in self.others:
            for one, two in zip(self.of(self.first, kind), self.of(rank, kind), strict=False):
                yield rank, one, two

    def passes(self, rank: int, trains: bool) -> list[dict]:
        """The starts of the passes that had a backward pass, or of those that ended without one."""
        taken = Counter((e["key"], e["number"]) for e in self.of(rank, "batch"))
        starts, ended = self.of(rank, "loader"), {}
        for e in starts:  # Lightning takes the last batch, and does not ask for another
            if 1 < e.get("length", 0) <= taken[e["key"], e["number"]]:
                ended[e["key"], e["number"]] = False
        ended |= {(e["key"], e["number"]): e["trained"] for e in self.of(rank, "end")}
        ended |= {tuple(e["here"]): True for e in self.of(rank, "backward") if e["here"]}
        return [e for e in starts if ended.get((e["key"], e["number"])) is trains]

    def loaders(self, trains: bool) -> Iterator[dict[int, dict]]:
        """For each loader, the start of its first such pass on each rank."""
        found = {}
        for rank in self.ranks:
            for event in self.passes(rank, trains):
                found.setdefault(event["key"], {}).setdefault(rank, event)
        yield from (loader for loader in found.values() if "dataset" in loader[min(loader)])

    def numbers(self, event: dict, name: str) -> list[int]:
        """The samples of a loader ("own"), or those of one pass in their order ("drawn")."""
        numbers = array("q")
        if name in event:
            numbers.frombytes((self.folder / event[name]).read_bytes())
        return numbers.tolist()

    def rows(self, rank: int, event: dict) -> list[list]:
        """Checksums of the first samples in each of the first batches of a pass."""
        here = event["key"], event["number"]
        batches = [e["rows"] for e in self.of(rank, "batch") if (e["key"], e["number"]) == here]
        return [batch for batch in batches if batch]

    def common_rows(self, loader: dict) -> set:
        """Samples of the first batches that the first rank and another one get."""
        mine, *others = ({*chain(*self.rows(r, loader))} for r in (self.first, *self.others))
        return mine & set().union(*others)

    def same_rows(self, kind: str, **name: object) -> bool:
        """Whether a rank gets the same batches as the first one."""
        rows = {}
        for rank in self.ranks:
            rows[rank] = [e["rows"] for e in self.of(rank, kind) if name.items() <= e.items()]
        mine = rows.pop(self.first)
        different = {row for batch in mine for row in batch}
        same = (all(a == b for a, b in zip(mine, other, strict=False)) for other in rows.values())
        return len(different) > 1 and any(same)


def read(file: Path) -> list[dict]:
    events = []
    with contextlib.suppress(ValueError):  # the last line, if the process was killed
        for line in file.read_text().splitlines():
            events.append(json.loads(line))
    return events


def some(things: list, noun: str) -> str:
    return f"{len(things)} {noun}{'s' * (len(things) != 1)}"


def differing(one: dict, two: dict) -> list[str]:
    return [name for name in one if name in two and one[name] != two[name]]


# --- it stops, it dies, it stands still
def ends(job: Job) -> Iterator[Found]:
    acts = "; ".join(f"rank {rank}: {last_act(job, rank)}" for rank in job.ranks)
    acts = f"the ranks' last acts are: {acts}"
    stuck = [rank for rank in job.ranks if job.ranks[rank][-1]["kind"] == "stuck"]
    crashes = sorted(job.all("crash"), key=lambda e: (is_echo(e), e["time"]))
    alike = "let all ranks make the same calls in the same order"
    if crashes and job.status:
        crash = crashes[0]
        (rank,) = [r for r in job.ranks if crash in job.ranks[r]][:1]
        what = (
            f"rank {rank} ends after {crash['step']} steps; {acts}; the error is {crash['error']}"
        )
        remedy = (alike, HANG) if is_echo(crash) else ("see what it prints", "docs/errors.md")
        yield Found(crash["where"], what, *remedy)
    elif stuck:
        stacks = [f"rank {r} stands at {' < '.join(job.ranks[r][-1]['stack'])}" for r in stuck]
        place = (job.ranks[stuck[0]][-1]["stack"] or ["?"])[0].split(" ")[0]
        yield Found(place, f"no rank goes on: {'; '.join(stacks)}; {acts}", alike, HANG)
    elif job.status:
        what = f"it ends with status {job.status}; {acts}"
        yield Found("the command", what, "see what it prints", HANG)


def is_echo(crash: dict) -> bool:
    """Whether another rank's end may be the cause."""
    signs = ("gloo", "NCCL", "Connection", "Broken pipe", "timed out", "DistBackendError")
    return any(sign in crash["error"] for sign in signs)


def last_act(job: Job, rank: int) -> str:
    names = {"batch": "takes a batch", "end": "ends a pass", "loader": "starts a pass"}
    names |= {"forward": "forward()", "backward": "backward()", "save": "torch.save()"}
    names |= {"before": "optimizer.step()", "after": "has ended its step", "collective": ""}
    for act in reversed(job.ranks[rank]):
        if act["kind"] in names:
            name = f"{act['name']} of {act['shape']}" if "shape" in act else names[act["kind"]]
            place = f" at {act['where']}" if "where" in act else ""
            return f"{name}{place} after {act['step'] + (act['kind'] == 'after')} steps"
    return "it has joined"


def alone(job: Job) -> Iterator[Found]:
    count = max(len(job.ranks), job.start["told"])
    if job.world == 1 and count > 1:
        what, remedy = f"{count} processes train alone", "call init_process_group() and DDP(model)"
        yield Found("the program", what, remedy, LOOP + "1-start-one-process-per-device")


def steps(job: Job) -> Iterator[Found]:
    for rank in job.others:
        taken = []
        for r in (job.first, rank):  # after how many batches each step comes
            trained = [[e["key"], e["number"]] for e in job.passes(r, trains=True)]
            events = [e["kind"] for e in job.ranks[r] if e["here"] in trained]
            events = [kind for kind in events if kind in ("batch", "before")]
            places = [i for i, kind in enumerate(events) if kind == "before"]
            taken.append([place - step for step, place in enumerate(places)])
        for step, (one, two) in enumerate(zip(*taken, strict=False)):
            if one != two:
                late = rank if two > one else job.first
                what = f"rank {late} takes no step for batch {min(one, two)}, but another rank does"
                place = job.of(job.first, "before")[step]["where"]
                yield Found(place, what, "let all ranks skip a batch together", SKIP)
                return


# --- data
def shares(job: Job) -> Iterator[Found]:
    """Whether the ranks share out an epoch: no sample twice, and none left out."""
    for loader in job.loaders(trains=True):
        if not job.others or {*loader} != {*job.ranks}:
            continue
        event, place = loader[job.first], loader[job.first]["place"]
        drawn = [job.numbers(e, "drawn") for e in loader.values()]
        own = [set(job.numbers(e, "own")) for e in loader.values()]
        lengths = [e.get("length") for e in loader.values()]
        seen, there = set().union(*drawn), set().union(*own)
        twice = sum(map(len, drawn)) - len(seen)
        rest = job.world * (event["batch"] or 1) if event["whole"] else 0
        missing = seen and not event["random"] and len(job.ranks) == job.world
        if len({*lengths}) > 1:
            remedy = "use a DistributedSampler, so that all have the same number"
            yield Found(place, f"the ranks have {lengths} batches", remedy, SKIP)
        if event["distributed"] and not any(own[0] & other for other in own[1:]) and own[0]:
            what = f"the data are sharded twice: each rank has {len(own[0])} samples of its own"
            what += f", and the sampler takes {len(drawn[0])} of them"
            yield Found(place, what, "shard them once", DATA)
        elif event["distributed"] and any(own[0] != other for other in own):
            what = "the ranks have different subsets, of which a DistributedSampler takes shares"
            yield Found(place, what, "split with the same seed on all ranks", SPLIT)
        elif seen and not event["random"] and twice > job.world + event["padded"]:
            what = f"an epoch has {twice} of {len(there)} samples on more than one rank"
            what += f" ({event['sampler']})"
            yield Found(place, what, "use sampler=DistributedSampler(dataset)", SHUFFLE)
        elif job.same_rows("batch", key=event["key"], number=event["number"]):
            yield Found(place, "the ranks get the same batches", "give each its share", SHUFFLE)
        elif not seen and len(common := job.common_rows(event)) > job.world:
            what = f"{len(common)} of the first samples are on more than one rank"
            yield Found(place, what, "give each its share, unless it is meant", SHUFFLE, "NOTE")
        elif missing and len(there) - len(seen) > job.world + rest:
            what = f"an epoch has only {len(seen)} of {len(there)} samples"
            yield Found(place, what, "shard the data once", DATA)


def inputs(job: Job) -> Iterator[Found]:
    if not job.all("loader") and job.same_rows("forward"):
        place, page = job.of(job.first, "forward")[0]["where"], LOOP + "batches-drawn-at-random"
        remedy = "seed each rank with its own number before it draws a batch"
        yield Found(place, "the ranks get the same inputs", remedy, page)


def order(job: Job) -> Iterator[Found]:
    passes = {}
    for event in job.passes(job.first, trains=True) if job.ranks else ():
        passes.setdefault(event["key"], []).append(event)
    for events in passes.values():
        first, place = events[0], events[0]["place"]
        one, *others = (job.numbers(e, "drawn") for e in events[:2])
        what = f"two epochs have the same order of {len(one)} samples"
        same = [one] == others and len({*one}) > 3
        if not one and len(events) > 1 and "length" in first:  # the sampler is not torch's
            before, after = (job.rows(job.first, e) for e in events[:2])
            what = "two epochs begin with the same batches"
            same = before[: len(after)] == after and len(after) > 1
        if same and job.others:
            page = PITFALLS + "every-epoch-has-the-same-order"
            if first["distributed"] and first["shuffle"]:
                yield Found(place, what, "call sampler.set_epoch(epoch) in each epoch", page)
            else:
                yield Found(place, what, "shuffle them in each epoch", page, "NOTE")
        starts = [e for e in job.of(job.first, "loader") if e["key"] == first["key"]]
        if len(starts) >= 2 * len(events) > 2:
            what = f"the loader is started {len(starts)} times for {len(events)} epochs"
            page = PAGE + "data"
            yield Found(place, what, "do not call next(iter(loader))", page, "NOTE")


def meaning(job: Job) -> Iterator[Found]:
    """Whether the same number is the same sample and the same class on all ranks."""
    seen = set()
    for rank, one, two in job.pairs("loader"):
        probed = one["key"] == two["key"] and "draws" in one and "draws" in two
        if not probed or one["dataset"] in seen:
            continue
        a, b = one["targets"], two["targets"]
        both = one["inputs"], two["inputs"]  # None: they cannot be compared
        if one["classes"] != two["classes"]:
            what, remedy = "the ranks number the classes differently", "sort their names"
        elif one["distributed"] and None not in both and both[0] != both[1]:
            what = f"the samples 0, n/2 and n-1 are others on rank {rank}"
            what += f" (targets {a} and {b})"[:120] if a != b else ""
            remedy = "make the data with the same seed, and shard them once"
        else:
            continue
        seen.add(one["dataset"])
        yield Found(one["place"], what, remedy, SPLIT)


def evaluation(job: Job) -> Iterator[Found]:
    loaders, trained = [*job.loaders(trains=False)], {rank: set() for rank in job.ranks}
    for rank, event in ((r, e) for loader in job.loaders(trains=True) for r, e in loader.items()):
        trained[rank] = trained[rank] | {(event["dataset"], n) for n in job.numbers(event, "drawn")}
    for loader in loaders:
        rank, event = min(loader.items())
        place, data = event["place"], event["dataset"]
        mine = {r: {(data, n) for n in job.numbers(e, "own")} for r, e in loader.items()}
        alike = [e for other in loaders for e in other.values() if e["dataset"] == data]
        own = set().union(*mine.values())
        left = own - {(data, n) for e in alike for n in job.numbers(e, "drawn")}
        if event["padded"]:
            what = f"{event['sampler']} counts {event['padded']} of {event['size']} samples twice"
            page = PITFALLS + "accuracy-depends-on-the-number-of-processes"
            yield Found(place, what, "take range(rank, n, world_size)", page)
        if event.get("draws"):
            what = f"samples of the evaluation are random (from {', '.join(event['draws'])})"
            page = "docs/recipes.md#a-test-set-for-the-end"
            yield Found(place, what, "give it a data set without augmentation", page, "NOTE")
        drawn = [job.numbers(e, "drawn") for e in loader.values()]
        twice = sum(map(len, drawn)) - len(set().union(*drawn))
        shared = len(drawn) == len(job.ranks) and all(drawn) and twice <= event["padded"]
        if job.others and shared:
            later = [e["kind"] for e in job.ranks[rank] if e["time"] > event["time"]]
            later = [kind for kind in later if kind in ("collective", "before", "stop")]
            if later and later[0] != "collective":
                what = f"each rank evaluates a share of {len(own)} samples, and keeps its result"
                remedy = "add up with all_reduce(), if a number of all samples is meant"
                page = LOOP + "4-evaluate-each-sample-once"
                yield Found(place, what, remedy, page, "NOTE")
        split = any(a != b and a & b for a, b in combinations(mine.values(), 2))
        if "drawn" in event and left and not split and len(job.ranks) == job.world:
            what = f"the evaluation leaves out {len(left)} of {len(own)} samples"
            yield Found(place, what, "evaluate without drop_last, and on all ranks", DATA)
        leaked = set().union(*(own for r, own in mine.items() if not own & trained[r]))
        if leaked := leaked & set().union(*trained.values()):
            what = f"{len(leaked)} samples of the evaluation are trained on by another rank"
            yield Found(place, what, "split with the same seed on all ranks", SPLIT)
        here, lengths = [event["key"], event["number"]], [e.get("length") for e in loader.values()]
        calls = [e for e in job.of(rank, "collective") if e["here"] == here]
        (end,) = [e for e in job.of(rank, "end") if [e["key"], e["number"]] == here] or [None]
        if len({*lengths}) > 1 and end and len(calls) + end["wrapper"] >= end["count"] > 0:
            what = f"the ranks evaluate {lengths} batches, and communicate in each"
            page = PITFALLS + "the-job-hangs-in-evaluation"
            yield Found(place, what, "call model.module, and sum up after the loop", page)


def buffers(job: Job) -> Iterator[Found]:
    for rank, one, two in job.pairs("end"):
        if one["key"] == two["key"] and (names := differing(one["buffers"], two["buffers"])):
            what = f"rank {rank} evaluates with other weights or buffers"
            what += f" ({len(names)}, first {names[0]})"
            page = PITFALLS + "the-ranks-evaluate-with-different-buffers"
            remedy = "call model.eval(), and broadcast rank 0's before"
            yield Found(one["key"].split("#")[0], what, remedy, page)
            return


# --- gradients and weights
def settings(job: Job) -> Iterator[Found]:
    for rank, one, two in job.pairs("before"):
        scales = [{"GradScaler's scale": event["scale"]} for event in (one, two)]
        groups = [scales, *zip(one["options"], two["options"], strict=False)]
        for a, b in groups:
            for name in differing(a, b):
                what = f"in step {one['step']}, {name} is {a[name]} on rank {job.first}"
                what += f" and {b[name]} on rank {rank}"
                yield Found(one["where"], what, "compute it alike on all ranks", WEIGHTS)
                return


def weights(job: Job) -> Iterator[Found]:
    """The first step after which weights differ, and why."""
    afters = job.pairs("after")
    for rank, one, two in job.pairs("before"):
        _, after, other = next(afters, (0, {"weights": {}}, {"weights": {}}))
        if names := differing(one["weights"], two["weights"]):
            what = f"the weights of ranks {job.first} and {rank} differ before the first step"
            remedy = "wrap the model in DDP once they are loaded, and change none on one rank"
            yield told(what, one["weights"], two["weights"], names, one, remedy, WEIGHTS)
            return
        if not (names := differing(after["weights"], other["weights"])):
            continue
        if one["options"] != two["options"]:
            return  # the cause, which settings() finds
        grads = [name for name in differing(one["grads"], two["grads"]) if name in names]
        if grads:
            why, remedy, page = reason(one, grads[0])
            what = f"in step {one['step']}, the gradients of ranks {job.first} and {rank} differ"
            what += f", because {why}"
            yield told(what, one["grads"], two["grads"], grads, one, remedy, page)
            return
        what = f"step {one['step']} gives ranks {job.first} and {rank} other weights"
        what += ", with the same gradients"
        remedy = "change none on one rank, and load the optimizer's state on all"
        yield told(what, after["weights"], other["weights"], names, one, remedy, WEIGHTS)
        return


def told(what, one, two, names, event, remedy, page) -> Found:
    a, b = (f"{norm:.6g}" for _, norm in (one[names[0]], two[names[0]]))
    norms = f"norm {a} and {b}" if a != b else f"norm {a} on both"
    what = f"{what} ({len(names)} of {len(one)}, first {names[0]}: {norms})"
    return Found(event["where"], what, remedy, page)


def reason(event: dict, name: str) -> tuple[str, str, str]:
    forwards, synced, backwards, _ = event["counts"]
    if name in event["outside"]:
        return "DDP does not have the parameter", "put it into the module that DDP wraps", WEIGHTS
    if name in event["late"]:
        page = PITFALLS + "only-an-unfrozen-layer-differs"
        return f"{name} was frozen when DDP was made", "call DDP() again after unfreezing", page
    if not forwards:
        page = PITFALLS + "weights-differ-from-the-first-step-on"
        return "forward() did not go through DDP", "call model(x), not model.module(x)", page
    if not synced:
        page = PITFALLS + "with-accumulation-the-weights-drift-apart"
        return "all of the step was in no_sync()", "leave it for the last micro-batch", page
    if backwards > forwards:
        page = PITFALLS + "with-two-backward-passes-the-gradients-differ"
        why = "backward() runs twice after a forward(), or a checkpoint is reentrant"
        return why, "add the losses, or pass use_reentrant=False", page
    return "a rank changes them after the all-reduce", "do the same on all ranks", WEIGHTS


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
            what = f"{len(after)} steps change no weight, because {why}"
            remedy = "check that the loss depends on the parameters that the optimizer has"
            yield Found(place, what, remedy, WEIGHTS)
        if len(stale := [e for e in events if e["stale"]]) > 2:
            what = f"{len(stale)} of {len(events)} steps add to the gradients of the step before"
            yield Found(place, what, "call optimizer.zero_grad() in each step", WEIGHTS)
        idle = [{*e["idle"]} | {n for n, g in e["grads"].items() if not g[1]} for e in events]
        idle = sorted(set.intersection(*idle))
        if 0 < len(idle) < len(events[0]["grads"]) + len(events[0]["idle"]) and len(events) > 2:
            what = f"no gradient reaches {some(idle, 'parameter')} in {len(events)} steps"
            what += f" (first {idle[0]})"
            yield Found(place, what, "freeze them, or let the loss depend on them", WEIGHTS, "NOTE")
        if asleep := [e for e in events if e["asleep"]]:
            what = f"step {asleep[0]['step']} is taken in eval mode"
            yield Found(place, what, "call model.train() after each evaluation", WEIGHTS)
    if len(every) > 1 and (lost := sorted({*every[-1]["lost"]} & {*every[-2]["lost"]})):
        what = f"no optimizer has {some(lost, 'parameter')} with a gradient (first {lost[0]})"
        yield Found(every[0]["where"], what, "give them to it, or freeze them", WEIGHTS)


# --- the loss
def losses(job: Job) -> Iterator[Found]:
    for rank, one, two in job.pairs("loss"):
        plain = one["plain"] and two["plain"] and one["drawn"] != two["drawn"]
        if one["count"] != two["count"] and not plain:
            what = f"the loss is divided by {one['count']:.6g} on rank {job.first}"
            what += f" and by {two['count']:.6g} on rank {rank}"
            page = PITFALLS + "class-weights-give-another-loss-on-more-devices"
            page = page if one["weighted"] else LOOP + "loss-over-some-of-the-targets-only"
            remedy = "divide each rank's sum by the mean of these numbers"
            yield Found(one["where"], what, remedy, page)
            break
    pairs = [e for e in job.of(job.first, "loss") if e["pairs"]] if job.others else []
    for event in pairs[:1]:
        what = f"each rank compares only its own {event['count']:.0f} samples"
        page = PITFALLS + "a-contrastive-loss-learns-worse-on-more-devices"
        yield Found(event["where"], what, "gather the others', if these are meant", page, "NOTE")
    for event in [e for e in job.of(job.first, "collective") if e["name"] == "reduce"][:1]:
        what, remedy = "reduce() leaves the sum on one rank", "use all_reduce(), if others use it"
        page = LOOP + "3-let-rank-0-print-and-save"
        yield Found(event["where"], what, remedy, page, "NOTE")


def accumulation(job: Job) -> Iterator[Found]:
    events = [e for e in job.of(job.first, "before") if e["optimizer"] == 0]
    if len(events) < 3:
        return
    place, first = events[0]["where"], events[0]["counts"][2]
    _, synced, count, batches = events[1]["counts"]
    if 0 < first < count == events[2]["counts"][2]:
        what = f"the first step comes after {first} of {count} micro-batches"
        yield Found(place, what, f"step if (i + 1) % {count} == 0", EARLY)
    if 1 < count == batches:
        if events[1]["incoming"] == [1] * count:
            what = f"the losses of {count} micro-batches are added"
            what += f", so gradients are {count} times too large"
            yield Found(place, what, f"divide each loss by {count}", EARLY)
        if synced == count and job.others:
            what = f"there are {count} all-reduces in each step, and one would do"
            remedy = "put all micro-batches but the last into no_sync()"
            yield Found(place, what, remedy, PAGE + "speed")


# --- random numbers, files, devices, threads
def randomness(job: Job) -> Iterator[Found]:
    remedy = "seed each rank with seed + rank, once the model is made"
    page = PAGE + "random-numbers"
    for rank in job.others[:1]:
        one, two = job.of(job.first, "before"), job.of(rank, "before")
        for name in one[0]["states"] if one and two else ():
            states = [(e["here"], e["states"][name]) for e in one]
            other = [(e["here"], e["states"].get(name)) for e in two]
            moves = min(
                sum(a[0] == b[0] and a != b for a, b in pairwise(own)) for own in (states, other)
            )
            same = all(a == b for a, b in zip(states, other, strict=False))
            for a, b in zip(*(job.passes(r, trains=True) for r in (job.first, rank)), strict=False):
                begin = a.get("states", {}).get(name)  # then they may draw other amounts of numbers
                same = same or (begin is not None and begin == b.get("states", {}).get(name))
            if moves > 1 and same:
                what = f"ranks {job.first} and {rank} draw the same random numbers from {name}"
                yield Found(one[0]["where"], f"{what}, for dropout or augmentation", remedy, page)
    for rank, one, two in job.pairs("loader"):
        alike = all(one.get(name) == two.get(name) for name in ("key", "seed"))
        if alike and one.get("workers") and one.get("draws") and not one["reseeds"]:
            what = f"the workers of ranks {job.first} and {rank} have the same seed"
            what += f", and draw from {', '.join(one['draws'])}"
            yield Found(one["place"], what, remedy, page)
            return


def saves(job: Job) -> Iterator[Found]:
    writers, said = {}, []
    for rank in job.ranks:
        for event in job.of(rank, "save"):
            writers.setdefault(event["path"], {}).setdefault(rank, event)
    for path, events in writers.items():
        event, name = min(events.items())[1], os.path.basename(path or "?")
        if len(events) > 1 and path:
            page = LOOP + "3-let-rank-0-print-and-save"
            yield Found(
                event["where"], f"{len(events)} ranks write {name}", "let rank 0 save", page
            )
        if event["prefixed"] and event["where"] not in said:
            said.append(event["where"])
            page = PITFALLS + "missing-keys-in-state_dict-when-you-load-weights"
            what = f"{name} has names like {event['prefixed'][0]}"
            yield Found(event["where"], what, "save model.module.state_dict()", page, "NOTE")
    models = [e for e in job.all("save") if e["model"]]
    if models and not any(e["optimizer"] for e in job.all("save")):
        what = "no snapshot has the optimizer's state"
        page = PITFALLS + "the-loss-jumps-after-a-restart"
        yield Found(models[0]["where"], what, "save optimizer.state_dict()", page, "NOTE")


def machine(job: Job) -> Iterator[Found]:
    for event in job.all("load")[:1]:
        what = f"torch.load() puts tensors on {event['device']}, another rank's device"
        page = PITFALLS + "a-snapshot-needs-a-gpu-or-fills-gpu-0"
        yield Found(event["where"], what, 'use map_location="cpu"', page)
    made = {rank: job.of(rank, "ddp")[0] for rank in job.ranks if job.of(rank, "ddp")}
    on_cpu = all(event["type"] == "cpu" for event in made.values())
    for (one, a), (two, b) in [] if on_cpu else combinations(made.items(), 2):
        if a["device"] == b["device"]:
            what, remedy = f"ranks {one} and {two} use the same device", "use cuda:LOCAL_RANK"
            page = PITFALLS + "invalid-device-ordinal-or-all-processes-on-gpu-0"
            yield Found(a["where"], what, remedy, page)
            break
    threads = [own[0]["threads"] for rank in job.ranks if (own := job.of(rank, "before"))]
    cores, most = job.start["cores"], max(threads, default=0)
    if sum(threads) > cores and most > 1 and job.others:
        what = f"{sum(threads)} threads run on {cores:g} cores"
        remedy = f"export OMP_NUM_THREADS={max(1, int(cores / len(threads)))}"
        page = PITFALLS + "more-threads-run-than-the-machine-has-cores"
        yield Found("the machine", what, remedy, page)
    elif not on_cpu and most > 4 and sum(threads) >= cores:
        what = f"{most} threads of a process may keep its device waiting"
        page = PITFALLS + "more-threads-run-than-the-machine-has-cores"
        yield Found("the machine", what, "export OMP_NUM_THREADS=4", page, "NOTE")
    batches = [e["batch"] for e in job.passes(job.first, trains=True) if e.get("batch")]
    first = made.get(job.first)
    if first and first["batchnorm"] and job.others and min(batches, default=16) < 16:
        what = f"BatchNorm sees the {min(batches)} samples of one rank"
        page = PITFALLS + "a-model-with-batchnorm-learns-worse-on-more-devices"
        yield Found(
            first["where"], what, "use larger batches, or on GPUs SyncBatchNorm", page, "NOTE"
        )


def limits(job: Job) -> Iterator[Found]:
    """What was not judged."""
    epochs = job.passes(job.first, trains=True)
    for event in [e for e in epochs if "length" in e and "drawn" not in e and e["number"] < 2][:1]:
        what = f"only the first batches are compared, because {event['sampler']} is not torch's"
        remedy = "check yourself that the ranks share out an epoch"
        yield Found(event["place"], what, remedy, LIMITS, "NOTE")
    for event in job.of(job.first, "sum")[:1] if job.others else ():
        what, remedy = "what this loss is divided by is not judged", "divide it alike on all ranks"
        page = LOOP + "loss-over-some-of-the-targets-only"
        yield Found(event["where"], what, remedy, page, "NOTE")
    if any(e["sharded"] for e in job.all("before")):
        what = "fully_shard's shards are not compared"
        remedy = "compare the loss with that of one process"
        yield Found("the model", what, remedy, LIMITS, "NOTE")
    if max(len(job.ranks), job.start["told"]) == 1:
        what, remedy = "one process has trained, so none was compared", "start two"
        yield Found("the program", what, remedy, LIMITS, "NOTE")
    if not job.all("before"):
        yield Found("the program", "no optimizer has made a step", "let it train", LIMITS, "NOTE")
    elif len(epochs) == 1 and epochs[0].get("distributed") and not job.status:
        what = "only one epoch was seen, so neither its order nor a step's time is known"
        yield Found(epochs[0]["place"], what, "let it train for two", LIMITS, "NOTE")
    for event in job.all("failed")[:1]:
        what = f"{event['name']}() of the doctor failed: {event['error']}"
        yield Found("doctor_watch.py", what, "what it should see is not judged", LIMITS, "NOTE")


CHECKS = [ends, alone, steps, shares, inputs, order, meaning, evaluation, buffers, settings]
CHECKS += [weights, learning, losses, accumulation, randomness, saves, machine, limits]


def judge(job: Job) -> list[Found]:
    """What all checks find. A rank that takes no step explains what some others would find."""
    skips = [*steps(job)]
    checks = [c for c in CHECKS if not skips or c not in (ends, weights, accumulation)]
    return [*dict.fromkeys(finding for check in checks for finding in check(job))]


def speed(job: Job) -> str:
    """Where the time of a step goes, and what would help most."""
    parts = {}
    for phase in ("with", "alone"):
        own = [e for e in job.of(job.first, "timed") if e["phase"] == phase]
        if count := max(Counter(e["optimizer"] for e in own).values(), default=0):
            names = ("total", "data", "update", "synced")
            parts[phase] = [sum(e[name] for e in own) / count for name in names]
    if "with" not in parts:
        return ""
    total, data, update, synced = parts["with"]
    exposed = max(0.0, total - parts["alone"][0]) if "alone" in parts else 0.0
    models = job.of(job.first, "ddp")
    size = sum(e["bytes"] for e in models) / 1e6
    groups = [group for e in job.of(job.first, "before") for group in e["options"]]
    slow = any("fused" in group and not group["fused"] for group in groups)
    found = [
        (data, "waiting for data", "raise num_workers"),
        (max(0.0, total - data - update - exposed), "forward and backward", ""),
        (update, "optimizer", "use fused=True" if slow else ""),
    ]
    if models and job.world > 1:
        name = f"waiting for {synced:g} all-reduce{'s' * (synced != 1)} of {size:.1f} MB"
        found.insert(2, (exposed, name, "raise the batch size"))
    times = ", ".join(f"{name} {1e3 * seconds:.1f}" for seconds, name, _ in found)
    remedy = max(found)[2]
    return f"TIME a step takes {1e3 * total:.1f} ms: {times}" + (f": {remedy}" if remedy else "")


# --- the command
def run(words: list[str], env: dict, folder: Path, patience: float) -> int:
    process = subprocess.Popen(words, env=env)
    while process.poll() is None:
        with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
            process.wait(1)  # Ctrl-C ends the command, too
        end_stuck(folder, patience)
    return process.returncode


def end_stuck(folder: Path, patience: float) -> None:
    """If no rank has done anything for a while, ask each one where it stands, and end them all."""
    last = {file: events[-1] for file in folder.glob("*.jsonl") if (events := read(file))}
    over = ("stop", "crash", "stuck")
    waiting = {file: event for file, event in last.items() if event["kind"] not in over}
    for event in waiting.values():
        seconds = patience if event["step"] else 10 * patience  # the first may compile something
        if time.time() - event["time"] < seconds:
            return
    for file in waiting:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(file.stem), signal.SIGUSR2)  # faulthandler writes a .stack
    time.sleep(1 if waiting else 0)
    for file, event in waiting.items():
        if lines := stack(file.with_suffix(".stack")):
            with file.open("a") as notes:
                notes.write(json.dumps({**event, "kind": "stuck", "stack": lines}) + "\n")
        with contextlib.suppress(ProcessLookupError):
            group = os.getpgid(int(file.stem))
            if group == os.getpgid(0):
                os.kill(int(file.stem), signal.SIGKILL)
            else:  # torchrun's: a rank, and the workers of its loaders
                os.killpg(group, signal.SIGKILL)


def stack(file: Path) -> list[str]:
    """The last lines of the user's own that faulthandler has written, the innermost first."""
    own = []
    for name, number in re.findall(r'^  File "(.*)", line (\d+) in ', file.read_text(), re.M):
        base = os.path.basename(name)
        if not re.search("^<|/torch/|/lib/python", name) and "doctor" not in base:
            line = linecache.getline(name, int(number)).strip()
            own.append(f"{base}:{number} {line}")
    return own[:3]


def main() -> int:
    parser = argparse.ArgumentParser(usage="%(prog)s [options] COMMAND ...")
    parser.add_argument("--steps", type=int, default=8, help="how many are looked at in an epoch")
    parser.add_argument("--json", type=Path, help="a file for the findings")
    parser.add_argument("--keep-files", action="store_true", help="let torch.save write its files")
    parser.add_argument("--patience", type=float, default=30, help="seconds without any act")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if not args.command:
        parser.error("name the command that trains")
    first, *words = args.command
    python = {"python": [], "python3": [], "torchrun": ["-m", "torch.distributed.run"]}.get(first)
    folders = [HERE.parent, Path(sys.executable).parent, os.environ.get("PATH", "")]
    program = shutil.which(first, path=os.pathsep.join(map(str, folders)))
    if python is not None or first.endswith(".py"):
        words = [sys.executable, *(python if python is not None else [first]), *words]
    elif program:
        words = [program, *words]
    else:
        parser.error(f"there is no command {first}")
    folder = Path(tempfile.mkdtemp(prefix="doctor-"))
    env = {"DOCTOR_FOLDER": folder, "DOCTOR_STEPS": args.steps, "DOCTOR_PATIENCE": args.patience}
    env |= {"DOCTOR_START": time.time(), "DOCTOR_KEEP": "1" if args.keep_files else ""}
    paths = filter(None, (str(HERE / "site"), os.environ.get("PYTHONPATH")))
    env |= {"PYTHONPATH": os.pathsep.join(paths)}
    try:
        status = run(
            words, os.environ | {name: str(env[name]) for name in env}, folder, args.patience
        )
        job = Job(folder, status)
        if not job.ranks:
            text = f"error: it ends with status {status}, and no process has trained"
            print(text, file=sys.stderr)
            return 2
        found = judge(job)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    count = sum(finding.label == "FOUND" for finding in found)
    lines = [*map(str, found), *filter(None, [speed(job)]), f"{count} found"]
    print("", *lines, sep="\n", flush=True)  # the program may have left a progress bar
    if args.json:
        listed = {"found": [finding._asdict() for finding in found], "time": speed(job)}
        args.json.write_text(json.dumps(listed, indent=1) + "\n")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
