"""Passes over loaders: which samples each rank really gets, and how long it waits for them."""

import operator
import os
import time
import weakref
from array import array
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import data
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ddp_doctor.watch import content
from ddp_doctor.watch.hooks import Raised, around, careful, where
from ddp_doctor.watch.note import context, folder, note

PASSES, SAMPLES, NUMBERS = 4, 2048, 5_000_000  # so much of each loader is looked at
SHUFFLES = {"randperm", "shuffle", "permutation", "permuted"}


class Weak(dict):
    """Facts about objects, by their identity, for as long as these live."""

    def of(self, thing: Any) -> Any:
        return self.get(id(thing))

    def put(self, thing: Any, facts: Any, owner: Any = None) -> Any:
        """Of a thing that cannot be referred to weakly, its owner's life counts."""
        try:
            weakref.finalize(thing, self.pop, id(thing), None).atexit = False
        except TypeError:
            weakref.finalize(owner, self.pop, id(thing), None).atexit = False
        self[id(thing)] = facts
        return facts


class Pass:
    """What one pass over a loader has given so far."""

    def __init__(self, key: str, number: int) -> None:
        self.key, self.number, self.named = key, number, {"key": key, "number": number}
        self.count = self.samples = self.fetches = self.sent = 0
        self.ended = self.trains = self.fresh = False  # fresh: a batch came since the last backward
        self.waiting: deque = deque()  # numbers of the batches that are still to come
        self.file: str | None = None
        self.iterator: Any = None  # a weak reference
        self.maps: list = []  # of a Subset's numbers to those of the data set


class Loaders:
    """The loaders of this process, and the pass that has given the last batch."""

    def __init__(self) -> None:
        self.places: Counter = Counter()
        self.names, self.passes, self.datasets = Weak(), Weak(), Weak()
        self.numbers: Counter = Counter()  # how many passes each loader has had
        self.open: list[Pass] = []
        self.here: Pass | None = None
        self.asked: Pass | None = None  # the one whose next batch is made
        self.opening: Pass | None = None  # the last one that began: its workers are forks
        self.files = self.sets = self.batches = 0
        self.drawn: int | None = None  # samples of the last batch
        self.waited = 0.0


L = Loaders()
ENDS: list[Callable[[Pass], dict]] = []  # what other topics tell at the end of an evaluation
context["here"] = lambda: None if L.here is None else [L.here.key, L.here.number]


@around(data.DataLoader, "__init__")
def loader_made(self, *args, **kwargs):
    place = where()  # the same loader has the same name on all ranks
    yield
    L.places[place] += 1
    L.names.put(self, f"{place}#{L.places[place]}")


@around(_BaseDataLoaderIter, "__init__")
def pass_begun(self, loader, *args, **kwargs):
    own = begin(self, loader)
    yield
    describe(own, loader, self)


@around(_BaseDataLoaderIter, "_reset")
def pass_begun_again(self, loader=None, *args, **kwargs):
    own = L.passes.of(self)
    again = own is not None and own.count and loader is not None  # its workers are persistent
    own = begin(self, loader) if again else own
    yield
    if again:
        describe(own, loader, self)


def begin(iterator: Any, loader: Any) -> Pass:
    key = L.names.of(loader) or f"{type(loader).__name__}#0"
    own = L.opening = Pass(key, L.numbers[key])
    L.numbers[key] += 1
    own.iterator = weakref.ref(iterator)
    L.open = [*(p for p in L.open if not p.ended), own][-16:]
    return L.passes.put(iterator, own)


@careful
def describe(own: Pass, loader: Any, iterator: Any) -> None:
    chain, dataset = [iterator._index_sampler], loader.dataset
    for _ in range(4):  # BatchSampler, or a framework's around the user's own
        inner = [getattr(chain[-1], name, None) for name in ("batch_sampler", "sampler")]
        parts = getattr(chain[-1], "__dict__", {}).values()
        inner += [part for part in parts if isinstance(part, data.Sampler)]
        chain += [s for s in inner if s is not None][:1]
    sharing = [s for s in chain if hasattr(s, "total_size") and hasattr(s, "dataset")]
    sampler = (sharing or chain[-1:])[0]
    while isinstance(dataset, data.Subset):
        own.maps.append(dataset.indices)
        dataset = dataset.dataset
    streams = isinstance(dataset, data.IterableDataset)
    size = None if streams else length(loader.dataset)
    number, known = L.datasets.of(dataset), {}
    if number is None:
        number, L.sets = L.datasets.put(dataset, L.sets, loader), L.sets + 1
        known["prints"] = (careful(content.prints)(dataset, size) or {}) if size else {}
        known["orders"] = careful(content.numberings)(dataset, size) or {}
    if own.number < PASSES and not streams:
        L.files += 1
        own.file = str(folder() / f"{os.getpid()}-{L.files}.numbers")
        if own.maps and size and size < NUMBERS:
            own_numbers = array("q", mapped(own, range(size))).tobytes()
            (folder() / f"{os.getpid()}-{L.files}.own").write_bytes(own_numbers)
    known |= {
        "place": own.key.split("#")[0],
        "dataset": number,
        "kinds": [type(dataset).__name__, type(sampler).__name__],
        "size": size,
        "length": length(loader) if size else None,
        "batch": next((s.batch_size for s in chain if hasattr(s, "batch_size")), loader.batch_size),
        "workers": loader.num_workers,
        "persistent": loader.persistent_workers,
        "streams": streams,
        "shuffles": streams and shuffles(dataset),
        "distributed": isinstance(sampler, data.DistributedSampler) and sampler.num_replicas > 1,
        "shuffle": bool(getattr(sampler, "shuffle", False)),
        "settable": any(hasattr(s, "set_epoch") and getattr(s, "shuffle", 1) for s in chain),
        "random": bool(getattr(sampler, "replacement", False)),
        "padded": max(0, sampler.total_size - len(sampler.dataset)) if sharing else 0,
        "whole": any(getattr(s, "drop_last", False) for s in (loader, *chain)),
        "states": content.states() if own.number < PASSES else {},
        "epoch": next((e for e in map(epoch, (sampler, dataset)) if e is not None), None),
        "numbers": own.file and os.path.basename(own.file),
        "own": own.file and os.path.basename(own.file).replace("numbers", "own"),
    }
    note("loader", **own.named, **known, where=where())


def length(thing: Any) -> int | None:
    try:
        return len(thing)
    except Exception:  # it has none
        return None


def epoch(thing: Any) -> int | None:
    """What set_epoch() has told."""
    found = [getattr(thing, "__dict__", {}).get(name) for name in ("epoch", "_epoch")]
    return next((value for value in found if isinstance(value, int)), None)


def shuffles(dataset: Any) -> bool:
    """Whether the stream's own code shuffles, and no attribute says that it does not."""
    own = vars(type(dataset)) | vars(dataset)
    names = {*own.get("__iter__", len).__code__.co_names} if "__iter__" in own else set()
    for name in [*names]:
        names |= {*getattr(getattr(own.get(name), "__code__", None), "co_names", ())}
    off = any("shuffle" in name and not callable(v) and not v for name, v in own.items())
    return bool(names & SHUFFLES) and not off


def mapped(own: Pass, numbers: Any) -> list[int]:
    """The numbers in the innermost data set."""
    for indices in own.maps:
        numbers = [indices[i] for i in numbers]
    return [operator.index(i) for i in numbers]


@around(_BaseDataLoaderIter, "_next_index")
def numbers_drawn(self):
    own, found = L.passes.of(self), (yield)
    if own is None or own.file is None or isinstance(found, Raised):
        return
    many = found if isinstance(found, list | tuple) or torch.is_tensor(found) else [found]
    try:
        own.waiting.append(mapped(own, many))
    except TypeError:  # they are no numbers
        own.waiting.append([])


@around(_BaseDataLoaderIter, "__next__")
def batch_taken(self):
    own = L.asked = L.passes.of(self)
    start = time.perf_counter()
    batch = yield
    L.waited += time.perf_counter() - start
    if own is None or isinstance(batch, Raised):
        if own and isinstance(batch.error, StopIteration) and not own.ended:
            end(own)
        return
    L.here, own.fresh = own, torch.is_grad_enabled()
    L.batches, own.count = L.batches + 1, own.count + 1
    numbers = own.waiting.popleft() if own.waiting else []
    L.drawn = len(numbers) or None
    if own.file and numbers and own.samples < NUMBERS:
        with open(own.file, "ab", buffering=0) as file:
            file.write(array("q", numbers).tobytes())
    if own.number < PASSES and own.samples < SAMPLES:
        found = careful(content.rows)(batch, L.drawn) or []
        L.drawn = L.drawn or len(found) or None
        note("batch", **own.named, numbers=numbers, rows=found, where=where())
    own.samples += L.drawn or 0


def end(own: Pass) -> None:
    own.ended, told = True, {}
    if own.number < PASSES:
        for tell in [] if own.trains else ENDS:
            told |= tell(own)
        note("end", **own.named, count=own.count, sent=own.sent, **told)
    L.here = None if L.here is own else L.here


def backward() -> None:
    """The passes that have given a batch since the last backward pass are those that train."""
    for own in L.open:  # that of next(iter(loader)) is gone, unless it is the last one
        gone = own.ended or (own.iterator() is None and own is not L.here)
        if own.fresh and not own.trains and not gone:
            own.trains = True
            note("trains", **own.named)
        own.fresh = False
