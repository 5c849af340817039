"""Where the time goes: the wall clock of undisturbed steps, and DDP's own logger."""

import statistics
import time
from collections import Counter
from typing import Any

from ddp_doctor.watch import loaders
from ddp_doctor.watch.hooks import careful
from ddp_doctor.watch.models import M
from ddp_doctor.watch.note import closing, note
from ddp_doctor.watch.optimizers import OPT, STEPPING, here

RATE = 20  # of DDP's iterations, one is measured


class Pace:
    """The undisturbed steps so far."""

    def __init__(self) -> None:
        self.begun = self.updating = self.waited = 0.0
        self.clean: Any = None  # the pass in which the last step ended, if it was not looked at
        self.total = self.data = self.update = 0.0
        self.steps: Counter = Counter()  # of each optimizer
        self.exposed: dict[int, float] = {}  # of each iteration that DDP has measured


P = Pace()


def before(optimizer: Any) -> None:
    P.updating = time.perf_counter()


def after(optimizer: Any) -> None:
    now, own = time.perf_counter(), OPT.own.of(optimizer)
    if P.clean == here() and not own.looked:
        P.total += now - P.begun
        P.data += loaders.L.waited - P.waited
        P.update += now - P.updating
        P.steps[own.number] += 1
    P.clean, P.begun, P.waited = None if own.looked else here(), now, loaders.L.waited
    if OPT.steps % RATE == 0 or OPT.steps < 12:
        measured()
    if OPT.steps % 64 == 0:
        told()
    P.begun += time.perf_counter() - now


@careful
def measured() -> None:
    """What an iteration has waited for its all-reduces: DDP's logger knows, without a sync."""
    for model in M.live()[:1]:
        found = model._get_ddp_logging_data()
        if found.get("iteration", 0) not in P.exposed and "backward_comm_time" in found:
            covered = found.get("backward_compute_comm_overlap_time", 0)
            P.exposed[found["iteration"]] = (found["backward_comm_time"] - covered) / 1e9


@careful
def told() -> None:
    if steps := max(P.steps.values(), default=0):
        later = [seconds for number, seconds in P.exposed.items() if number > 2]
        exposed = statistics.median(later) if later else None
        facts = {"total": P.total, "data": P.data, "update": P.update, "exposed": exposed}
        note("pace", steps=steps, **facts)


STEPPING.append((before, after))
closing.append(told)
