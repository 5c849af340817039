"""Models in DDP, models beside them, and their backward passes."""

import gc
import os
import weakref
from collections import Counter, deque
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel

from ddp_doctor.watch import content, loaders
from ddp_doctor.watch.hooks import around, careful, where
from ddp_doctor.watch.note import note

BATCHED = nn.modules.batchnorm._BatchNorm
MODAL = nn.modules.dropout._DropoutNd, BATCHED  # they differ between training and evaluation
NODES = 3000  # of the autograd graph
RATE = 20  # of so many iterations, DDP measures one


class Models:
    """The live models in DDP, and what was done with them."""

    def __init__(self) -> None:
        # Of each, its parameters at first: {id: (trainable, type, device)}.
        self.facts: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self.wrapped: set[int] = set()  # all parameters that any of them had at first
        self.moved: set[int] = set()  # parameters that had another type or device since then
        # And of the averages: a WeakSet would have another order on each rank.
        self.averages: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self.syncs: deque = deque(maxlen=512)  # of each forward pass, whether it is averaged
        self.forwards = self.backwards = self.made = 0
        self.graph: Counter = Counter()
        self.divisors: list[float] = []  # of the loss, just before its backward pass

    def live(self) -> list[DDP]:
        return [*self.facts]


M = Models()
LOOKS: list = []  # whether the coming step is looked at: optimizers.py knows
AFTER: list = []  # what else is done around a backward pass


@around(DDP, "__init__")
def wrapped(self, module, *args, **kwargs):
    yield
    M.made += 1
    first = {id(p): (p.requires_grad, *kind(p)) for p in module.parameters()}
    for facts in M.facts.values():  # the newest one's count
        for known in facts.keys() & first.keys():
            del facts[known]
    M.facts[self] = first
    M.moved -= first.keys()
    M.wrapped |= first.keys()
    self._set_ddp_runtime_logging_sample_rate(RATE)
    device = next(module.parameters()).device
    name = f"{device} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}"
    if device.type == "cuda":
        name = str(getattr(torch.cuda.get_device_properties(device), "uuid", name))
    norms = [m for m in module.modules() if isinstance(m, BATCHED)]
    facts = {
        "device": name,
        "type": device.type,
        "bytes": sum(p.nbytes for p in module.parameters() if p.requires_grad),
        "batchnorm": sum(not isinstance(m, nn.SyncBatchNorm) for m in norms),
        "group": self.process_group.size(),
    }
    note("ddp", **facts, where=where())


@around(nn.Module, "_apply")
def moved(self, *args, **kwargs):
    """To another device or type. Back again, a parameter has still lost DDP's hooks."""
    yield
    for facts in M.facts.values():
        for p in filter(lambda p: id(p) in facts, self._parameters.values()):
            if facts[id(p)][1:] != kind(p):
                M.moved.add(id(p))


def kind(p: torch.Tensor) -> tuple[str, str]:
    return str(p.dtype), str(p.device)


@around(AveragedModel, "__init__")
def averaged(self, *args, **kwargs):
    yield
    M.averages[self] = None


@around(DDP, "forward")
def forward(self, *args, **kwargs):
    if loaders.L.here is not None:
        loaders.L.here.sent += bool(self.will_sync_module_buffers())
    if torch.is_grad_enabled():
        M.forwards += 1
        M.syncs.append(bool(self.require_backward_grad_sync))
        if not loaders.L.names and LOOKS[0]():
            note("forward", rows=careful(content.rows)((args, kwargs)) or [], where=where())
    yield


@around(torch.autograd, "backward")
def backward(tensors, *args, **kwargs):
    M.backwards += 1
    loaders.backward()
    if not LOOKS[0]():
        yield
        return
    looked(tensors)
    for before, _ in AFTER:
        before()
    yield
    for _, after in AFTER:
        after()


@careful
def looked(tensors: Any) -> None:
    """The operations on which a loss depends, and what it is divided by last of all."""
    roots = [tensors] if torch.is_tensor(tensors) else [*tensors]
    waiting = [t.grad_fn for t in roots if getattr(t, "grad_fn", None) is not None]
    node, M.divisors = waiting[0] if len(waiting) == 1 else None, []
    while node is not None and node.name() in ("DivBackward0", "MulBackward0"):
        if node.name() == "DivBackward0" and node._saved_other.numel() == 1:
            M.divisors.append(float(node._saved_other))
        node = node.next_functions[0][0]
    seen, found = {*waiting}, Counter()
    while waiting and len(seen) < NODES:
        node = waiting.pop()
        found[node.name()] += 1
        fresh = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= fresh
        waiting += fresh
    M.graph += Counter() if waiting else found


# --- the end of an evaluation
def buffers(own: loaders.Pass) -> dict[str, Any]:
    inner = [model.module for model in (*M.live(), *M.averages)]
    found = content.digest({n: b for m in inner for n, b in m.named_buffers()})
    return {"buffers": found}


loaders.ENDS.append(buffers)


# --- models beside DDP's, such as a teacher or an average
class Beside:
    """Those that are there in the first steps. A call of one is noted, for two epochs."""

    def __init__(self) -> None:
        self.found = loaders.Weak()
        self.original: Any = None  # nn.Module.__call__; False once it is there again
        self.put: Any = None

    def look(self, optimized: set[int]) -> None:
        """Which models are there, and what weights they have."""
        mine = {id(m) for model in M.live() for m in model.modules()}
        every = [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
        inner = {id(child) for m in every for child in m.children()} | mine
        for model in every:
            weights = dict(model.named_parameters()) if id(model) not in inner else {}
            shared = optimized & {*map(id, weights.values())}
            if weights and not shared and not isinstance(model, DDP):
                known = self.found.of(model) or self.found.put(model, {"sums": []})
                known["sums"].append(content.digest(weights))
                known["calls"] = 0
        if self.found and self.original is None:
            self.original = nn.Module.__call__
            around(nn.Module, "__call__")(called)
            self.put = nn.Module.__call__

    def rest(self) -> None:
        if self.original and nn.Module.__call__ is self.put:
            nn.Module.__call__, self.original = self.original, False


B = Beside()


def called(self, *args, **kwargs):
    known = B.found.of(self)
    if known is not None and known["calls"] < 4:
        known["calls"] += 1
        modal = [m for m in self.modules() if isinstance(m, MODAL)]
        facts = {"name": type(self).__name__, "weights": known["sums"][-1], "modal": bool(modal)}
        facts["asleep"] = not any(m.training for m in modal)
        facts["frozen"] = len(known["sums"]) > 1 and known["sums"][0] == known["sums"][-1]
        facts["trained"] = loaders.L.here is not None and loaders.L.here.trains
        note("beside", **facts, where=where())
    yield
