"""What doctor.py sees in each process of a program: imported there, it watches torch's own classes.

Each process writes a file of JSON lines, one for each event; nothing is judged here. A pass over a
loader is cut after a few batches. In the first pass that trains, and at the beginning of the second
one, gradients, weights and random numbers are looked at. Then some steps are timed, the last ones
of them without all-reduce, and the next pass that trains ends the process.
"""

import copy
import dis
import faulthandler
import functools
import inspect
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import time
import traceback
import weakref
import zlib
from array import array
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import optimizer as optimizers
from torch.optim.swa_utils import AveragedModel
from torch.utils import data
from torch.utils._pytree import tree_leaves

FOLDER = os.environ["DOCTOR_FOLDER"]
STEPS, PATIENCE = int(os.environ["DOCTOR_STEPS"]), float(os.environ["DOCTOR_PATIENCE"])
START, KEEP = float(os.environ["DOCTOR_START"]), bool(os.environ["DOCTOR_KEEP"])
LIBRARY = os.path.dirname(os.__file__)
BATCHED = nn.modules.batchnorm._BatchNorm
MODAL = nn.modules.dropout._DropoutNd, BATCHED  # they differ between training and evaluation
SNAPSHOT = re.compile(r"\.(pt|pth|ckpt|tar|bin|pkl|safetensors)\b")


class Watch:
    """What this process has done so far, and the file in which it says so."""

    def __init__(self):
        self.file, self.pid, self.early, self.places = None, None, [], {}
        self.models, self.trainable, self.optimizers, self.datasets = [], [], {}, {}
        self.averages = []  # AveragedModels
        self.made = weakref.WeakSet()  # all optimizers, also those that never step
        self.steps = self.first_step = self.changed = 0  # in all, at the pass's start, the phase's
        self.trained = self.depth = self.all_backwards = self.files = 0
        self.forwards = self.synced = self.backwards = self.batches = 0  # since the last step
        self.incoming, self.scaler, self.drawn = [], None, None
        self.phase, self.here = "look", None  # then with, alone, rest; the pass over a loader
        self.begun = time.perf_counter()
        self.waited = 0.0

    def note(self, kind, **facts):
        here = None if self.here is None else [self.here.key, self.here.number]
        event = {"kind": kind, "time": time.time(), "step": self.steps, "here": here, **facts}
        if self.file is None:
            self.early.append(event)
        elif self.pid == os.getpid():  # and not in a loader's worker, which may be a fork
            self.file.write(json.dumps(event, default=str) + "\n")

    def begin(self, rank, world):
        if self.pid == os.getpid():
            return
        self.pid, early, self.early = os.getpid(), self.early, []
        self.file = open(os.path.join(FOLDER, f"{self.pid}.jsonl"), "w", buffering=1)  # noqa: SIM115
        told = int(os.environ.get("WORLD_SIZE", 1))
        self.note("start", rank=rank, world=world, told=told, cores=cores())
        self.file.writelines(json.dumps(event, default=str) + "\n" for event in early)
        # doctor.py asks with this signal where the process stands. A thread that watches it could
        # hang the loader workers that it forks.
        self.stacks = open(os.path.join(FOLDER, f"{self.pid}.stack"), "w")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR2, self.stacks, all_threads=False)

    def looks(self):
        """Whether gradients, weights and random numbers are looked at in this step."""
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        return self.phase == "look" and self.steps - self.first_step < 2 * STEPS and not capturing


W = Watch()


def instead_of(owner, *names):
    """Put a function in the place of others. It gets the original one first."""

    def put(function):
        for name in names:
            original = getattr(owner, name)

            def wrapped(*args, original=original, **kwargs):
                if torch.compiler.is_compiling():
                    return original(*args, **kwargs)
                return function(original, *args, **kwargs)

            setattr(owner, name, functools.wraps(original)(wrapped))

    return put


def careful(function):
    """What fails in here is noted, and does not end the user's program."""

    @functools.wraps(function)
    def tried(*args):
        try:
            return function(*args)
        except Exception as error:
            W.note("failed", name=function.__name__, error=f"{type(error).__name__}: {error}")

    return tried


def cores():
    count = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        try:  # a container's quota
            quota, period = " ".join(Path("/sys/fs/cgroup", n).read_text() for n in names).split()
            return count if quota in ("max", "-1") else min(count, max(1, int(quota) / int(period)))
        except OSError:
            continue
    return count


def foreign(file):
    return "/torch/" in file or file.startswith("<") or "doctor" in os.path.basename(file)


def where():
    """The line of the user's program that has led here."""
    frame, fallback = sys._getframe(1), "?"
    while frame:
        file = frame.f_code.co_filename
        place = f"{os.path.basename(file)}:{frame.f_lineno}"
        if not foreign(file) and "site-packages" not in file and not file.startswith(LIBRARY):
            return place
        fallback = place if fallback == "?" and not foreign(file) else fallback
        frame = frame.f_back
    return fallback


def digest(tensors):
    """Of each tensor, by name: a checksum of its bits, and its norm, which people can compare."""
    found = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
        flat = (torch.view_as_real(flat) if flat.is_complex() else flat).reshape(-1)
        flat = (flat[::61] if flat.numel() > 1 << 20 else flat).cpu().contiguous()  # of each row
        found[name] = zlib.crc32(flat.view(torch.uint8).numpy()), flat.float().norm().item()
    return found


def rows(batch):
    """Checksums of a batch's first samples, of some numbers of each."""
    leaves = [leaf for leaf in tree_leaves(batch) if torch.is_tensor(leaf) and leaf.dim() > 0]
    counts, found = [len(leaf) for leaf in leaves], []
    for i in range(min(16, max(counts, key=counts.count, default=0))):
        parts = [leaf[i].reshape(-1) for leaf in leaves if len(leaf) > i]
        parts = [part[:: max(1, len(part) // 1024)].tolist() for part in parts]
        found.append(zlib.crc32(repr(parts).encode()))
    return found


def random_states():
    """The states of torch's, Python's, NumPy's and the GPU's generators."""
    states = {"torch": torch.get_rng_state(), "random": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_initialized():
        states["torch.cuda"] = torch.cuda.get_rng_state()
    return states


def checksums(states):
    lists = {name: s.tolist() if torch.is_tensor(s) else s for name, s in states.items()}
    lists |= {"numpy": (lists["numpy"][1].tolist(), lists["numpy"][2])} if "numpy" in lists else {}
    return {name: zlib.crc32(repr(state).encode()) for name, state in lists.items()}


def own_generators():
    """The states of generators that data sets have as attributes."""
    found = {}
    for number, dataset in W.datasets.values():
        for name, value in getattr(dataset, "__dict__", {}).items():
            if isinstance(value, torch.Generator):
                value = value.get_state().tolist()
            elif hasattr(value, "bit_generator"):
                value = value.bit_generator.state
            elif isinstance(value, random.Random):
                value = value.getstate()
            else:
                continue
            key = f"{type(dataset).__name__}.{name}" + (f" ({number})" if number else "")
            found[key] = zlib.crc32(repr(value).encode())
    return found


# --- models, backward passes, losses
@instead_of(DDP, "__init__")
def ddp_made(original, self, module, *args, **kwargs):
    original(self, module, *args, **kwargs)
    W.models.append(self)
    trainable = [p for p in module.parameters() if p.requires_grad]
    W.trainable.append({*map(id, trainable)})
    device = next(module.parameters()).device
    name = f"{device} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}"
    if device.type == "cuda":
        name = str(getattr(torch.cuda.get_device_properties(device), "uuid", name))
    norms = [m for m in module.modules() if isinstance(m, BATCHED)]
    own = sum(not isinstance(m, nn.SyncBatchNorm) for m in norms)
    facts = {"bytes": sum(p.nbytes for p in trainable), "batchnorm": own, "where": where()}
    W.note("ddp", device=name, type=device.type, **facts)


@instead_of(AveragedModel, "__init__")
def average_made(original, self, *args, **kwargs):
    original(self, *args, **kwargs)
    W.averages.append(self)


@instead_of(DDP, "forward")
def ddp_forward(original, self, *args, **kwargs):
    sync = self.require_backward_grad_sync
    if torch.is_grad_enabled():
        W.forwards, W.synced = W.forwards + 1, W.synced + bool(sync)
        if W.looks():
            own = careful(rows)((args, kwargs)) if not W.datasets else []
            W.note("forward", rows=own, where=where())
        self.require_backward_grad_sync = sync and W.phase != "alone"
    if W.here:
        W.here.wrapper += self.will_sync_module_buffers()
    try:
        return original(self, *args, **kwargs)
    finally:
        self.require_backward_grad_sync = sync


@instead_of(torch.autograd, "backward")
def backward(original, *args, **kwargs):
    W.backwards, W.all_backwards = W.backwards + 1, W.all_backwards + 1
    if W.looks() or (W.here and W.here.count == 1):
        W.note("backward", where=where())
        for own in W.optimizers.values():
            kept = own["kept"]
            own["zeroed"] |= kept is None or kept.grad is None or not kept.grad.any()
    return original(*args, **kwargs)


@instead_of(F, "cross_entropy", "nll_loss")
def loss(original, *args, **kwargs):
    result = original(*args, **kwargs)
    if torch.is_grad_enabled() and result.requires_grad and W.looks():
        given = inspect.signature(original).bind(*args, **kwargs)
        given.apply_defaults()
        note_loss(result, given.arguments)
    return result


@careful
def note_loss(result, given):
    if given["reduction"] != "mean":
        W.note("sum", where=where())
    if given["reduction"] != "mean" or given["target"].is_floating_point():
        return
    input, target, weight = given["input"], given["target"], given["weight"]
    used = target != given["ignore_index"]
    count = float(used.sum() if weight is None else weight[target[used]].sum())
    n = len(target) if target.dim() == 1 else 0
    pairs = n > 2 and input.shape == (n, n) and target.tolist() == [*range(n)]
    plain = weight is None and bool(used.all())
    facts = {"count": count, "plain": plain, "drawn": W.drawn, "pairs": pairs}
    W.note("loss", **facts, weighted=weight is not None, where=where())
    result.register_hook(lambda grad: W.incoming.append(grad.detach()))


# --- optimizers
@instead_of(optimizers.Optimizer, "__init__")
def optimizer_made(original, self, *args, **kwargs):
    original(self, *args, **kwargs)
    W.made.add(self)


@instead_of(torch.amp.GradScaler, "update")
def scaler_updated(original, self, *args, **kwargs):
    W.scaler = self if self.is_enabled() else None
    return original(self, *args, **kwargs)


def pre_hook(optimizer, args, kwargs):
    W.depth += 1  # ZeroRedundancyOptimizer calls another one
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if W.depth > 1 or closure is None:
        return before(optimizer) if W.depth == 1 else None

    def closed():  # makes the gradients, within step()
        result = closure()
        if W.depth == 1:
            before(optimizer)
        return result

    return ((args[0], closed), {}) if len(args) > 1 else (args, {**kwargs, "closure": closed})


def post_hook(optimizer, args, kwargs):
    W.depth -= 1
    if W.depth == 0:
        after(optimizer)


optimizers.register_optimizer_step_pre_hook(pre_hook)
optimizers.register_optimizer_step_post_hook(post_hook)


def named(optimizer):
    """The parameters of an optimizer, by their names in DDP's models."""
    known = {id(p): n for m in W.models for n, p in m.module.named_parameters()}
    mine, found = [p for group in optimizer.param_groups for p in group["params"]], {}
    for i, p in enumerate(mine):
        found[known.get(id(p), f"a parameter of shape {[*p.shape]} (number {i})")] = p
    return found


def before(optimizer):
    W.begin(int(os.environ.get("RANK", 0)), 1)  # a program without a process group
    fresh = {"number": len(W.optimizers), "kept": None, "zeroed": True, "backwards": 0}
    own = W.optimizers.setdefault(id(optimizer), fresh)
    if W.looks():
        note_before(optimizer, own)
    own["time"] = now()


@careful
def note_before(optimizer, own):
    names = named(optimizer)
    plain = {n: p for n, p in names.items() if type(p.data).__name__ != "DTensor"}
    graded = {n: p for n, p in plain.items() if p.grad is not None}
    wrapped = {n: p for m in W.models for n, p in m.module.named_parameters()}
    inside, trainable = {*map(id, wrapped.values())}, set().union(*W.trainable)
    optimized = {id(p) for o in W.made for g in o.param_groups for p in g["params"]}
    mine = {*map(id, graded.values())}
    both = [m.module for m in W.models if {*map(id, m.module.parameters())} & mine]
    asleep = [layer for m in both if not m.training for layer in m.modules()]
    more = W.all_backwards > own["backwards"]  # since this optimizer's last step
    kept, scale = own["kept"], W.scaler.get_scale() if W.scaler is not None else 1.0
    facts = {
        "optimizer": own["number"],
        "weights": digest(plain) if kept is None and own["zeroed"] else {},
        "grads": digest({n: p.grad for n, p in graded.items()}),
        "options": [*map(options, optimizer.param_groups[:8])],
        "scale": scale,
        "sharded": len(plain) < len(names),
        "late": [n for n, p in graded.items() if id(p) in inside - trainable],
        "idle": [n for n, p in plain.items() if p.requires_grad and p.grad is None],
        "outside": [n for n, p in graded.items() if id(p) not in inside],
        "lost": [n for n, p in wrapped.items() if p.grad is not None and id(p) not in optimized],
        "asleep": any(isinstance(layer, MODAL) for layer in asleep),
        "stale": bool(more and kept is not None and kept.grad is not None and not own["zeroed"]),
        "incoming": [float(grad.sum()) / scale for grad in W.incoming],
        "counts": [W.forwards, W.synced, W.backwards, W.batches],
        "states": checksums(random_states()) | own_generators(),
        "threads": torch.get_num_threads(),
    }
    W.note("before", **facts, where=where())


def options(group):
    found = {k: v for k, v in group.items() if k != "params" and not callable(v)}
    return {k: float(v) if torch.is_tensor(v) and v.numel() == 1 else v for k, v in found.items()}


def after(optimizer):
    own, end = W.optimizers[id(optimizer)], now()
    if W.looks():
        note_after(optimizer, own)
    elif W.phase in ("with", "alone"):
        parts = {"total": end - W.begun, "data": W.waited, "update": end - own["time"]}
        W.note("timed", phase=W.phase, optimizer=own["number"], synced=W.synced, **parts)
    W.steps += 1
    W.forwards = W.synced = W.backwards = W.batches = 0
    W.incoming, W.waited, W.begun = [], 0.0, now()
    small = sum(p.nbytes for m in W.models for p in m.module.parameters()) < 40e6
    seen = W.steps - W.first_step >= (4 if small else 2)
    ready = W.trained and seen if W.datasets else W.steps >= 2 * STEPS
    if W.phase == "look" and ready:
        W.phase, W.changed = "with", W.steps
    elif W.phase in ("with", "alone") and W.steps - W.changed >= (STEPS if small else 2):
        several = W.models and dist.is_initialized() and dist.get_world_size() > 1
        W.phase = "alone" if several and W.phase == "with" else "rest"
        W.changed = W.steps
    if W.steps >= 20 * STEPS or (W.phase == "rest" and not W.datasets):
        stop()


@careful
def note_after(optimizer, own):
    plain = {n: p for n, p in named(optimizer).items() if type(p.data).__name__ != "DTensor"}
    W.note("after", optimizer=own["number"], weights=digest(plain))
    graded = (p for p in plain.values() if p.grad is not None and not p.grad.is_sparse)
    own["backwards"] = W.all_backwards
    own["kept"], own["zeroed"] = next((p for p in graded if p.grad.any()), None), False


def now():
    """The time; while steps are timed, that at which the device has done its work."""
    if W.phase in ("with", "alone") and torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


# --- data
@instead_of(data.DataLoader, "__init__")
def loader_made(original, self, *args, **kwargs):
    original(self, *args, **kwargs)
    place = where()  # the same loader has the same name on all ranks
    W.places[place] = W.places.get(place, 0) + 1
    self.__dict__["_doctor"] = {"key": f"{place}#{W.places[place]}", "passes": 0, "trained": 0}


@instead_of(data.DataLoader, "__iter__")
def loader_started(original, self):
    own = self.__dict__["_doctor"]
    if own["trained"] >= 6 or (own["trained"] >= 2 and W.phase == "rest"):
        stop()
    iterator = original(self)
    state = torch.get_rng_state()
    started = Pass(self, own, iterator)
    torch.set_rng_state(state)
    return started


class Pass:
    """One iteration over a loader. It notes what the loader gives, and ends after a few batches."""

    def __init__(self, loader, own, iterator):
        self.own, self.key, self.number = own, own["key"], own["passes"]
        self.iterator, self.count, self.begun = iterator, 0, W.all_backwards
        self.ended, self.wrapper, self.size, self.total = False, 0, None, None
        own["passes"] += 1
        W.first_step = W.steps
        facts = {"key": self.key, "number": self.number, "place": self.key.split("#")[0]}
        W.note("loader", **facts, **(self.facts(loader) or {}), where=where())

    @careful
    def facts(self, loader):
        batches, sampler, dataset, maps = loader.batch_sampler, loader.sampler, loader.dataset, []
        if type(batches) is data.BatchSampler:  # which may be the user's, around his own sampler
            sampler, self.size = batches.sampler, batches.batch_size
        elif batches is not None:
            sampler = batches  # of the user's own kind
        while isinstance(dataset, data.Subset):
            maps.append(dataset.indices)
            dataset = dataset.dataset
        sized = hasattr(dataset, "__len__") and not isinstance(dataset, data.IterableDataset)
        init = getattr(loader.worker_init_fn, "func", loader.worker_init_fn)
        called = getattr(getattr(init, "__code__", None), "co_names", ())
        sharing = hasattr(sampler, "total_size") and hasattr(sampler, "dataset")
        padded = sampler.total_size - len(sampler.dataset) if sharing else 0
        weighted = isinstance(sampler, data.WeightedRandomSampler)
        facts = {
            "dataset": W.datasets.setdefault(id(dataset), (len(W.datasets), dataset))[0],
            "size": len(loader.dataset) if sized else None,
            "sampler": type(sampler).__name__,
            "distributed": isinstance(sampler, data.DistributedSampler),
            "shuffle": bool(getattr(sampler, "shuffle", False)),
            "random": weighted or getattr(sampler, "replacement", False),
            "padded": max(0, padded),
            "whole": getattr(batches, "drop_last", False) or getattr(sampler, "drop_last", False),
            "batch": self.size,
            "workers": loader.num_workers,
            "seed": getattr(self.iterator, "_base_seed", None),
            "reseeds": any("seed" in name for name in called),
            "states": checksums(random_states()),
        }
        if sized:
            facts["length"] = len(loader)
            facts |= (probe(dataset) or {}) if self.number == 0 else {}
            if len(dataset) < 5_000_000 and self.own["trained"] < 2 and self.number < 8:
                facts |= self.listed(loader, sampler, maps)
        return facts

    def listed(self, loader, sampler, maps):
        """Write the numbers of all samples into files: of the data, and of the whole pass."""
        plain = data.SequentialSampler, data.RandomSampler, data.DistributedSampler
        plain += (data.SubsetRandomSampler, data.WeightedRandomSampler, list, tuple, range)
        known = type(sampler).__iter__ in [kind.__iter__ for kind in plain]
        if type(loader.batch_sampler) is not data.BatchSampler or not known:
            return {}  # to iterate over any other one might change it
        whole = loader.batch_sampler.drop_last
        generator = getattr(sampler, "generator", None)
        state = generator.get_state() if generator is not None else None
        drawn = [*sampler]
        if generator is not None:
            generator.set_state(state)
        self.total, W.files = len(drawn), W.files + 1
        drawn = drawn[: self.total // self.size * self.size] if whole else drawn
        found = {}
        for name, numbers in (("own", range(len(loader.dataset))), ("drawn", drawn)):
            for indices in maps:
                numbers = [indices[i] for i in numbers]
            found[name] = f"{os.getpid()}-{W.files}-{name}"
            Path(FOLDER, found[name]).write_bytes(array("q", map(int, numbers)).tobytes())
        return found

    def __iter__(self):
        return self

    def __len__(self):
        return len(self.iterator)

    def __getattr__(self, name):
        return getattr(self.iterator, name)

    def __next__(self):
        timed = self.own["trained"] and W.all_backwards > self.begun and W.phase != "rest"
        limit = 64 * STEPS if timed else STEPS
        if self.count >= limit and (W.backwards == 0 or self.count >= 8 * limit):
            if end_is_expected(sys._getframe(1)):
                self.end()  # but not between the micro-batches of a step
            elif W.all_backwards > self.begun:
                W.trained = max(W.trained, 1)
        if self.ended:
            raise StopIteration
        start = now()
        W.begun = start if W.batches == 0 else W.begun
        try:
            batch = next(self.iterator)
        except StopIteration:
            self.end()
            raise
        W.waited += time.perf_counter() - start
        W.here, W.batches, self.count = self, W.batches + 1, self.count + 1
        if self.total is not None:  # how many samples it should have
            W.drawn = min(self.size, self.total - self.size * (self.count - 1))
        own = careful(rows)(batch) if W.phase == "look" and self.count <= STEPS else []
        W.note("batch", key=self.key, number=self.number, rows=own, where=where())
        return batch

    def end(self):
        self.ended, W.here, trained, buffers = True, None, W.all_backwards > self.begun, {}
        if trained:
            self.own["trained"] += 1
            W.trained = max(W.trained, self.own["trained"])
        elif W.phase == "look":
            kept = {n: p for m in W.averages for n, p in m.named_parameters()}
            models = [*(model.module for model in W.models), *W.averages]
            buffers = digest(kept | {n: b for m in models for n, b in m.named_buffers()})
        facts = {"count": self.count, "wrapper": self.wrapper, "buffers": buffers}
        W.note("end", key=self.key, number=self.number, trained=trained, **facts)


def end_is_expected(frame):
    """Whether the batch is taken by a loop, or by next() where StopIteration is caught."""
    while frame:
        code = frame.f_code
        loops = dis.opname[code.co_code[frame.f_lasti]].startswith(("FOR_ITER", "SEND"))
        if loops or "StopIteration" in code.co_names:
            return True
        frame = None if code.co_flags & inspect.CO_GENERATOR else frame.f_back
    return False


@careful
def probe(dataset):
    """What three samples are, and which random numbers they draw."""
    dataset, states = copy.copy(dataset), random_states()  # it may open a file: not in the user's
    names = [repr(getattr(dataset, name, None)) for name in ("classes", "class_to_idx")]
    found = []
    try:
        for _ in range(2):  # with the same numbers on all ranks
            first = same_seed()
            samples = [tree_leaves(dataset[i]) for i in (0, len(dataset) // 2, len(dataset) - 1)]
            drawn = [n for n, state in checksums(random_states()).items() if state != first[n]]
            plain = [[v.tolist() if hasattr(v, "tolist") else v for v in own] for own in samples]
            found.append(zlib.crc32(repr(plain).encode()))
    finally:
        torch.set_rng_state(states["torch"])
        random.setstate(states["random"])
        if "numpy" in states:
            sys.modules["numpy"].random.set_state(states["numpy"])
    targets = [[v for v in leaves if isinstance(v, int | str)] for leaves in plain]
    known = found[0] == found[1] and not own_generators()
    facts = {"classes": names, "targets": targets, "draws": drawn}
    return facts | {"inputs": found[0] if known else None}


def same_seed():
    torch.default_generator.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    return checksums(random_states())


# --- files: none of the user's is touched
def instead(path):
    """Where a file of this path goes."""
    path = os.path.abspath(os.fspath(path))
    return os.path.join(FOLDER, f"file-{zlib.crc32(os.fsencode(path))}-{os.path.basename(path)}")


def is_path(path):
    return isinstance(path, str | os.PathLike)


def is_moved(path, exists=os.path.lexists):
    return is_path(path) and exists(instead(path))


def is_users(path, exists=os.path.lexists):
    """Whether it is a snapshot that was there before the run."""
    found = is_path(path) and SNAPSHOT.search(os.path.basename(path)) and exists(path)
    return bool(found) and os.stat(path, follow_symlinks=False).st_ctime < START


@instead_of(torch, "save")
def save(original, obj, f, *args, **kwargs):
    path, parts = os.path.abspath(f) if is_path(f) else getattr(f, "name", None), [*dicts(obj)]
    keys = {str(key) for part in parts for key in part}
    states = [bool(part.get("state")) for part in parts if "param_groups" in part]
    stateless = not any(optimizer.state for optimizer in W.made)
    inner = {n for m in W.models for n in m.module.state_dict()}
    keys -= {n for m in W.averages for n in m.state_dict() if n.startswith("module.")}
    prefixed = sorted(k for k in keys - inner if k.startswith("module.") and k[7:] in inner)
    complete = any(states) or (bool(states) and stateless)
    facts = {"path": path, "prefixed": prefixed[:1], "optimizer": complete}
    W.note("save", model=bool(prefixed or inner & keys), **facts, where=where())
    return original(obj, f if KEEP or not is_path(f) else instead(f), *args, **kwargs)


@instead_of(torch, "load")
def load(original, f, *args, **kwargs):
    found = original(instead(f) if is_moved(f) else f, *args, **kwargs)
    devices = {leaf.device for leaf in tree_leaves(found) if torch.is_tensor(leaf)}
    own = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
    for device in [d for d in devices if d.type not in ("cpu", "meta") and d.index != own][:1]:
        W.note("load", device=str(device), where=where())
    return found


def act_on_files(original, *paths, **kwargs):
    if is_moved(paths[0]):
        return original(*map(instead, paths), **kwargs)
    changed = paths[1:] if original.__name__.startswith("copy") else paths
    if original.__module__ != "genericpath" and any(map(is_users, changed)):
        return paths[-1]
    return original(*paths, **kwargs)


if not KEEP:
    instead_of(os, "replace", "rename", "remove", "unlink")(act_on_files)
    instead_of(shutil, "move", "copy", "copy2", "copyfile")(act_on_files)
    instead_of(os.path, "exists", "isfile", "getsize")(act_on_files)


def dicts(obj, depth=4):
    """The dicts in an object that is saved, itself included."""
    if isinstance(obj, dict):
        yield obj
    inner = [*obj.values()] if isinstance(obj, dict) else obj if isinstance(obj, list) else []
    for value in inner if depth else ():
        yield from dicts(value, depth - 1)


# --- how a process begins and ends
def group_made(original, *args, **kwargs):
    original(*args, **kwargs)
    W.begin(dist.get_rank(), dist.get_world_size())


def collective(original, *args, **kwargs):
    shape = next(([*a.shape] for a in args if torch.is_tensor(a)), None)
    W.note("collective", name=original.__name__, shape=shape, where=where())
    return original(*args, **kwargs)


for module in (dist, dist.distributed_c10d):
    instead_of(module, "init_process_group")(group_made)
    names = "all_reduce reduce broadcast all_gather all_gather_object all_gather_into_tensor"
    names += " barrier gather gather_object broadcast_object_list reduce_scatter_tensor scatter"
    names += " all_to_all"
    instead_of(module, *names.split())(collective)


def crashed(error):
    frames = traceback.extract_tb(error.__traceback__)
    for frame in frames[-1:]:  # the user's own call may also fail there, in original()
        if frame.filename == __file__ and "original(" not in frame.line:
            W.note("failed", name=frame.name, error=f"{type(error).__name__}: {error}")
    frames = [f for f in frames if not foreign(f.filename)]
    place = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "?"
    text = re.sub(r"^\[\S*gloo\S* ", "", str(error))  # a path
    W.note("crash", error=shortened(f"{type(error).__name__}: {text}"), where=place)


def shortened(text):
    return text if len(text) <= 160 else f"{text[:160].rsplit(' ', 1)[0]} ..."


@instead_of(sys, "exit")
def left(original, *status):
    if status and isinstance(status[0], str):  # an error message, and no exception that is uncaught
        W.note("crash", error=shortened(status[0].removeprefix("error: ")), where=where())
    original(*status)


@instead_of(sys, "excepthook")
def uncaught(original, kind, error, trace):
    crashed(error)
    original(kind, error, trace)


@instead_of(sys.modules["torch.multiprocessing.spawn"], "_wrap")
def spawned(original, function, *args):
    def told(*given):
        try:
            function(*given)
        except Exception as error:
            crashed(error)
            raise

    original(told, *args)


def stop():
    """End this process when all others have come here, too, without the program's own end."""
    W.note("stop")
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    Path(FOLDER, f"{os.getpid()}.stop").touch()
    end, count = time.perf_counter() + PATIENCE, lambda name: len([*Path(FOLDER).glob(name)])
    while count("*.stop") < count("*.jsonl") and time.perf_counter() < end:
        time.sleep(0.05)
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a worker ends
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(0)
