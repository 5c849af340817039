"""Learning-rate schedulers: how often they step, and the rate after a resume."""

import contextlib
import re
import weakref
from collections import Counter
from typing import Any

from torch.optim import lr_scheduler

from ddp_doctor.watch.hooks import around, careful, where
from ddp_doctor.watch.note import closing, note
from ddp_doctor.watch.optimizers import OPT, STEPPING

TOTALS = ("total_steps", "T_max", "num_training_steps", "max_steps", "t_total", "total")
COUNTS = re.compile(r"world|gpu|ranks|replicas|epoch|loader|len", re.I)
LARGEST = 10**12


class Own:
    """What one scheduler has done."""

    def __init__(self, number: int, place: str) -> None:
        self.number, self.place, self.loaded = number, place, False
        self.calls = self.steps = self.burst = 0  # a burst: calls since the optimizer's last step
        self.bursts: Counter = Counter()


class Schedulers:
    """The live ones."""

    def __init__(self) -> None:
        self.own: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self.count = self.depth = 0

    def of(self, scheduler: Any) -> Own:
        if scheduler not in self.own:
            self.count += 1
            self.own[scheduler] = Own(self.count, where())
        return self.own[scheduler]


S = Schedulers()
KINDS = [kind for kind in vars(lr_scheduler).values() if isinstance(kind, type)]


def stepped(self, *args, **kwargs):
    S.depth += 1  # one scheduler may step others
    if S.depth == 1:
        own = S.of(self)
        own.calls, own.burst = own.calls + 1, own.burst + 1
    yield
    S.depth -= 1


def made(self, *args, **kwargs):
    S.depth += 1  # its first step is no step of the program's
    yield
    S.depth -= 1
    S.of(self)


def loaded(self, *args, **kwargs):
    yield
    S.of(self).loaded = bool(getattr(self, "last_epoch", 0))


for kind in KINDS:
    for name, hook in (("step", stepped), ("__init__", made), ("load_state_dict", loaded)):
        if name in vars(kind) and hasattr(kind, "get_last_lr"):
            around(kind, name)(hook)


def total(scheduler: Any) -> int | None:
    """The steps for which it is made, where they can be known."""
    own = vars(scheduler)
    given = [own.get(name) for name in TOTALS]
    for function in own.get("lr_lambdas") or ():
        names = getattr(function, "keywords", None) or closure(function)
        given += [names.get(name) for name in TOTALS]
    numbers = [n for n in given if isinstance(n, int | float) and 1 < n < LARGEST]
    return next(map(int, numbers), None)


def closure(function: Any) -> dict[str, Any]:
    """The variables of a function around this one, unless it counts with more than steps."""
    code = getattr(function, "__code__", None)
    names = code.co_freevars if code else ()
    if any(COUNTS.search(name) for name in (*names, *(code.co_names if code else ()))):
        return {}
    found = {}
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        with contextlib.suppress(ValueError):  # it is empty
            found[name] = cell.cell_contents
    return found


@careful
def before(optimizer: Any) -> None:
    for scheduler, own in [*S.own.items()]:
        if getattr(scheduler, "optimizer", None) is not optimizer:
            continue
        if own.steps == 0 and own.loaded:
            rates = [float(rate) for rate in scheduler.get_last_lr()]
            used = [float(group["lr"]) for group in optimizer.param_groups]
            note("resumed", name=type(scheduler).__name__, rates=rates, used=used, where=where())
        own.steps += 1
        own.bursts[own.burst] += own.steps > 1
        own.burst = 0


@careful
def told() -> None:
    for scheduler, own in [*S.own.items()]:
        facts = {"number": own.number, "calls": own.calls, "steps": own.steps}
        bursts = {str(size): count for size, count in own.bursts.items()}
        facts |= {"bursts": bursts, "total": total(scheduler), "where": own.place}
        note("scheduler", name=type(scheduler).__name__, **facts)


def after(optimizer: Any) -> None:
    if OPT.steps < 64 or OPT.steps % 64 == 0:
        told()


STEPPING.append((before, after))
closing.append(told)
