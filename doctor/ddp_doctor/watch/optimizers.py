"""Optimizers: gradients and weights around the first steps."""

import os
import weakref
from collections import Counter
from typing import Any

import torch
from torch.optim import optimizer as optimizers

from ddp_doctor.watch import content, loaders, losses, models, scaling
from ddp_doctor.watch.hooks import around, careful, where
from ddp_doctor.watch.models import AFTER, LOOKS, MODAL, M
from ddp_doctor.watch.note import begin, context, note

FIRST, SECOND = 16, 8  # steps that are looked at, in the first and in the second epoch
LATERS = 64  # steps of an optimizer in which only weights and options are compared
OPTIONS = int | float | bool


class Own:
    """What is known of one optimizer."""

    def __init__(self, number: int) -> None:
        self.number, self.steps = number, 0
        self.backwards = M.backwards
        self.kept: weakref.ref | None = None  # a parameter that has had a gradient
        self.zeroed, self.unzeroed = True, 0  # backward passes since gradients were zeroed
        self.state: tuple | None = None  # of that parameter's gradient, before a backward pass
        self.added = False  # whether a backward pass has changed it
        self.looked, self.order = False, 0
        self.compared, self.place = False, (None, 0)  # without being looked at; the pass before it
        self.laters = 0  # how many of these steps there were


class Optimizers:
    """All optimizers, and how many steps they have made."""

    def __init__(self) -> None:
        self.made: weakref.WeakSet = weakref.WeakSet()  # also those that never step
        self.own = loaders.Weak()
        self.running: list[int] = []  # ZeroRedundancyOptimizer calls another one
        self.steps = self.count = 0
        self.orders: Counter = Counter()  # steps in each of the first passes
        self.epochs: dict[Any, list] = {}  # the first passes of each loader that trains
        self.syncs = self.backwards = 0  # what the models had made at the last step
        self.last = (None, 0), 0  # the pass of the last step, and its batches
        self.tuned: set[frozenset] = set()  # which parameters were trained together
        self.held: set[int] = set()  # parameters that any optimizer had in a step
        self.other = (None, 0), False  # the present pass, and whether it trains others
        self.synced: dict[int, tuple] = {}  # gradients at the end of the last backward pass


OPT = Optimizers()
context["step"] = lambda: OPT.steps
STEPPING: list = []  # what other topics do before and after a step


def here() -> tuple:
    return (loaders.L.here.key, loaders.L.here.number) if loaders.L.here else (None, 0)


def looks() -> bool:
    """Whether gradients, weights and random numbers are looked at in the coming step."""
    key, number = here()
    seen = OPT.epochs.get(key, [])
    if number not in seen and len(seen) > 1 and OPT.other[0] != (key, number):
        OPT.other = (key, number), tuned() not in OPT.tuned  # some were unfrozen
    if (number not in seen and len(seen) > 1 and not OPT.other[1]) or len(OPT.epochs) > 8:
        return False
    limit = FIRST if number in seen[:1] or not seen else SECOND
    made = [n for (k, i, _), n in OPT.orders.items() if (k, i) == (key, number)]
    return max(made, default=0) < limit and not capturing()


LOOKS.append(looks)


def capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def tuned() -> frozenset:
    mine = [p for o in OPT.made for group in o.param_groups for p in group["params"]]
    mine += [p for m in M.live() for p in m.parameters()]
    return frozenset(id(p) for p in mine if p.requires_grad)


# --- around a backward pass
@careful
def zeroed() -> None:
    for own in OPT.own.values():
        kept = own.kept() if own.kept else None
        if kept is None or kept.grad is None or not kept.grad.any():
            own.zeroed, own.unzeroed = True, 0
        own.unzeroed += 1
        own.state = state(kept)


def state(p: torch.Tensor | None) -> tuple | None:
    return None if p is None or p.grad is None else (p.grad.data_ptr(), p.grad._version)


@careful
def synced() -> None:
    for own in OPT.own.values():
        own.added = own.added or (own.kept and state(own.kept())) != own.state
    grads = {id(p): p.grad for o in OPT.made for g in o.param_groups for p in g["params"]}
    OPT.synced = content.digest(
        {i: g for i, g in grads.items() if g is not None and content.plain(g)}
    )


AFTER.append((zeroed, synced))


# --- a step
@around(optimizers.Optimizer, "__init__")
def made(self, *args, **kwargs):
    yield
    OPT.made.add(self)


def pre_hook(optimizer, args, kwargs):
    if id(optimizer) in OPT.running:  # its last step has raised
        OPT.running.clear()
    OPT.running.append(id(optimizer))
    if len(OPT.running) > 1:
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        before(optimizer)
        return None
    calls = []

    def closed():  # makes the gradients, within step()
        result = closure()
        if not calls:
            before(optimizer)
        calls.append(1)
        return result

    return ((args[0], closed), {}) if len(args) > 1 else (args, {**kwargs, "closure": closed})


def post_hook(optimizer, args, kwargs):
    if OPT.running[-1:] == [id(optimizer)]:
        OPT.running.pop()
    if not OPT.running:
        after(optimizer)


optimizers.register_optimizer_step_pre_hook(pre_hook)
optimizers.register_optimizer_step_post_hook(post_hook)


@careful
def before(optimizer: Any) -> None:
    begin(int(os.environ.get("RANK", 0)), 1)  # a program without a process group
    own = OPT.own.of(optimizer)
    if own is None:
        own, OPT.count = OPT.own.put(optimizer, Own(OPT.count)), OPT.count + 1
    if M.backwards == OPT.backwards:  # torch.func, or torch.autograd.grad()
        loaders.backward()
    for start, _ in STEPPING:
        start(optimizer)
    own.looked = looks()
    if own.looked:
        key, number = here()
        seen = OPT.epochs.setdefault(key, [])
        seen += [number] if number not in seen else []
        own.order = OPT.orders[key, number, own.number]
        OPT.tuned.add(tuned())
        note_before(optimizer, own)
    first = here() != own.place  # step of a pass
    due = first or not own.steps & (own.steps - 1)  # the 32nd, the 64th and so on
    own.compared = due and not own.looked and own.laters < LATERS and not capturing()
    own.place = here()
    if own.compared:
        note_later(optimizer, own, 0 if first else own.steps)


@careful
def note_before(optimizer: Any, own: Own) -> None:
    names = named(optimizer)
    ours = {n: p for n, p in names.items() if content.plain(p)}
    graded = {n: p for n, p in ours.items() if p.grad is not None}
    live = M.live()
    tuned = {n: p for m in live for n, p in m.module.named_parameters() if p.requires_grad}
    inside = {id(p) for m in live for p in m.module.parameters()}
    first = {i: facts for m in live for i, facts in M.facts[m].items()}
    optimized = {id(p) for o in OPT.made for g in o.param_groups for p in g["params"]}
    OPT.held |= optimized
    mine = {id(p) for p in graded.values()}
    both = [m.module for m in live if {id(p) for p in m.module.parameters()} & mine]
    asleep = [layer for m in both if not m.training for layer in m.modules()]
    more = M.backwards > own.backwards  # since this optimizer's last step
    kept, scale = own.kept() if own.kept else None, scaling.scale()
    kinds = {n: first.get(id(p), (0, 0, 0))[1:] for n, p in graded.items()}
    moved = [n for n, p in graded.items() if id(p) in M.moved or kinds[n] != models.kind(p)]
    count = M.forwards - OPT.syncs
    facts = {
        "optimizer": own.number,
        "order": own.order,
        "names": [*names],
        "weights": content.digest(ours),
        "grads": content.digest({n: p.grad for n, p in graded.items()}),
        "synced": {n: OPT.synced[id(p)] for n, p in graded.items() if id(p) in OPT.synced},
        "options": [*map(options, optimizer.param_groups[:8])],
        "scale": scale,
        "late": [n for n, p in graded.items() if id(p) in inside and late(p, first)],
        "moved": [n for n in moved if id(graded[n]) in first],
        "outside": [n for n, p in graded.items() if id(p) not in inside],
        "idle": [n for n, p in ours.items() if p.requires_grad and p.grad is None],
        "lost": [n for n, p in tuned.items() if p.grad is not None and id(p) not in OPT.held],
        "asleep": any(isinstance(layer, MODAL) for layer in asleep),
        "stale": bool(more and state(kept) and own.added and not own.zeroed),
        "incoming": [(i, grad / scale) for i, grad in losses.S.taken()],
        "world": losses.S.world,
        "divisors": M.divisors,
        "rooted": losses.S.rooted,
        "graph": dict(M.graph),
        "sync": [*M.syncs][-count:] if count else [],
        "backwards": M.backwards - OPT.backwards,
        "unzeroed": own.unzeroed,
        "batches": batches(),
        "states": content.states(),
        "threads": torch.get_num_threads(),
    }
    note("before", **facts, where=where())
    if own.order in (2, 10) and live:
        models.B.look(optimized)
    graded_now = (p for p in ours.values() if p.grad is not None and not p.grad.is_sparse)
    some = next((p for p in graded_now if p.grad.any()), None)
    own.kept, own.zeroed, own.unzeroed = some if some is None else weakref.ref(some), False, 0
    own.added = False


@careful
def note_later(optimizer: Any, own: Own, order: int) -> None:
    own.laters += 1
    ours = {n: p for n, p in named(optimizer).items() if content.plain(p)}
    facts = {"optimizer": own.number, "order": order, "weights": content.digest(ours)}
    facts |= {"options": [*map(options, optimizer.param_groups[:8])], "scale": scaling.scale()}
    note("later", **facts, sync=bool(M.syncs and M.syncs[-1]), where=where())


def late(p: torch.Tensor, first: dict[int, tuple]) -> bool:
    """Whether it was frozen when DDP was made, or was never in a model that DDP was made of."""
    return not first[id(p)][0] if id(p) in first else id(p) not in M.wrapped


def batches() -> int:
    """Those that this pass has given since the last step."""
    count = loaders.L.here.count if loaders.L.here else 0
    return count - (OPT.last[1] if OPT.last[0] == here() else 0)


def named(optimizer: Any) -> dict[str, torch.Tensor]:
    """The parameters of an optimizer, by their names in DDP's models, but for those it ignores."""
    known = {id(p): n for m in M.live() for n, p in m.module.named_parameters()}
    ignored = {name for m in M.live() for name in m.parameters_to_ignore}
    mine, found = [p for group in optimizer.param_groups for p in group["params"]], {}
    for i, p in enumerate(mine):
        found[known.get(id(p), f"a parameter of shape {[*p.shape]} (number {i})")] = p
    return {name: p for name, p in found.items() if name not in ignored}


def options(group: dict[str, Any]) -> dict[str, Any]:
    found = {n: v.item() if torch.is_tensor(v) and v.numel() == 1 else v for n, v in group.items()}
    return {n: v for n, v in found.items() if isinstance(v, OPTIONS)}


@careful
def after(optimizer: Any) -> None:
    own = OPT.own.of(optimizer)
    if own is None:
        return
    key, number = here()
    if own.looked:
        OPT.orders[key, number, own.number] += 1
        note_after(optimizer, own)
    elif models.B.original and all(len(seen) > 1 for seen in OPT.epochs.values()):
        models.B.rest()
    own.backwards, own.steps, OPT.steps = M.backwards, own.steps + 1, OPT.steps + 1
    OPT.syncs, OPT.backwards = M.forwards, M.backwards
    OPT.last = here(), loaders.L.here.count if loaders.L.here else 0
    losses.S.taken()
    M.graph.clear()
    for _, finish in STEPPING:
        finish(optimizer)


@careful
def note_after(optimizer: Any, own: Own) -> None:
    ours = {n: p for n, p in named(optimizer).items() if content.plain(p)}
    note("after", optimizer=own.number, order=own.order, weights=content.digest(ours))
