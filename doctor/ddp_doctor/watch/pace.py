"""Where the time goes: the wall clock of undisturbed steps, and what DDP's own logger measures."""

import statistics
import time
from collections import deque
from typing import Any

from ddp_doctor.watch import loaders
from ddp_doctor.watch.hooks import careful
from ddp_doctor.watch.models import M
from ddp_doctor.watch.note import closing, note
from ddp_doctor.watch.optimizers import OPT, STEPPING, here

OUTLIER = 3  # a step that takes so many times the median has saved a snapshot, or evaluated


class Pace:
    """The steps so far; with several optimizers, from one step of the first one to its next."""

    def __init__(self) -> None:
        self.steps: deque = deque(maxlen=4096)  # seconds in all, for data, in optimizers
        self.exposed: dict[int, float] = {}  # of each iteration that DDP has measured
        self.started: Any = None  # when and where the step began, if nothing disturbs it
        self.begun = self.update = self.waited = 0.0


P = Pace()


def before(optimizer: Any) -> None:
    P.begun = time.perf_counter()


def after(optimizer: Any) -> None:
    now, own = time.perf_counter(), OPT.own.of(optimizer)
    P.update += now - P.begun
    if own.looked or own.compared:
        P.started = None
    if own.number:
        return
    place = here(), sum(loaders.L.numbers.values())
    if P.started and P.started[1] == place:
        P.steps.append((now - P.started[0], loaders.L.waited - P.waited, P.update))
        if OPT.steps % 4 == 0:
            measured()
    P.started = None if own.looked or own.compared else (now, place)
    P.update, P.waited = 0.0, loaders.L.waited
    if OPT.steps % 64 == 0:
        told()


@careful
def measured() -> None:
    """What an iteration has waited for its all-reduces, once its backward pass was done."""
    for model in M.live()[:1]:
        found = model._get_ddp_logging_data()
        if "backward_comm_time" in found and found["iteration"] not in P.exposed:
            covered = found.get("backward_compute_comm_overlap_time", 0)
            seconds = (found["backward_comm_time"] - covered) / 1e9
            P.exposed[found["iteration"]] = seconds if len(P.steps) > 1 else 0.0


@careful
def told() -> None:
    if not P.steps:
        return
    limit = OUTLIER * statistics.median(step[0] for step in P.steps)
    steps = [step for step in P.steps if step[0] <= limit]
    total, data, update = (statistics.fmean(parts) for parts in zip(*steps, strict=True))
    measured = [seconds for seconds in P.exposed.values() if seconds]
    exposed = statistics.median(measured) if measured else None
    note("pace", steps=len(steps), total=total, data=data, update=update, exposed=exposed)


STEPPING.append((before, after))
closing.append(told)
