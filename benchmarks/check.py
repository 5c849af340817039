"""Why is it not faster with more devices? Where a step's time goes, and what would be faster.

    torchrun --nproc_per_node=4 benchmarks/check.py ddp_torchrun.py --model resnet18
    torchrun --nnodes=2 --node_rank=0 ... benchmarks/check.py ddp_torchrun.py     on each node
    python benchmarks/check.py ddp_spawn.py --batch-size 256

Start it as you would start the script, one of ours or your own copy, and put check.py before the
script's name. It puts its measurement in the place of `Trainer.train` and changes nothing else: the
model, the data, the loss and the options are the script's. Nothing is trained or saved.
docs/scaling.md has the model of a step that the predictions follow.
"""

import contextlib
import functools
import importlib
import inspect
import math
import os
import runpy
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._pytree import tree_leaves, tree_map_only

TIMES = 3  # that each part is timed, and the median counts
# Threads of a process with an accelerator. They wait busily after each piece of work, and so take
# the cores from the threads that launch kernels.
ENOUGH = 4


class Rank(NamedTuple):
    """What one rank has measured, in seconds per step, and where it runs."""

    host: str
    device: str  # its type
    threads: int
    cpus: frozenset[int]  # those that the process may run on
    quota: float  # as many as it may use at a time, see cpu_quota
    samples: int  # per step
    step: float  # a whole one, with its data and its all-reduce
    data: float  # of it, until the data were there
    compute: float  # forward and backward pass and optimizer, while all ranks do so
    fixed: float  # of this, what would also pass with fewer samples
    alone: float  # compute, while the other ranks have nothing to do; only rank 0's is true
    reduce: float  # an all-reduce of the gradient, and nothing else
    latency: float  # an all-reduce of one number


def check(trainer: Any, total_epochs: int) -> None:
    """In place of `Trainer.train`: time the parts of a step. Rank 0 prints what follows from them.

    All ranks must call this. It takes some ten seconds, or about twenty steps where these are slow.
    It uses the trainer's `model` (DDP), `optimizer`, `train_data` and `_run_batch`, which gets the
    parts of one batch of the loader, on the device. The last tensor in a batch has a row for each
    sample. If `_run_batch` also takes `last`, and `share`, then `args.accumulate` batches are a
    step. The gradients change, and BatchNorm's statistics; the weights do not.

    Raises:
        SystemExit: there is no DDP, or a sum that an all-reduce has made is wrong.
    """
    if not isinstance(trainer.model, DDP):
        refuse(f"Trainer.model is not DDP, which this measures, but {type(trainer.model).__name__}")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parameters = trainer.model.parameters()
    size = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    device = next(trainer.model.parameters()).device
    gradient = torch.full((size // 4,), rank + 1.0, dtype=torch.float32, device=device)
    dist.all_reduce(gradient)
    wrong = (gradient != world_size * (world_size + 1) / 2).sum()
    dist.all_reduce(wrong)
    ranks = [None] * world_size
    dist.all_gather_object(ranks, measure(trainer, gradient.zero_()))
    if rank == 0:
        accumulate = accumulated(trainer)
        steps = math.ceil(len(trainer.train_data) / (accumulate or 1))
        print("\n".join(report(ranks, gradient.nbytes, steps, accumulate)), flush=True)
    if wrong:
        sys.exit(f"error: {wrong.item()} of {world_size * size // 4} sums of all ranks are wrong")


def accumulated(trainer: Any) -> int:
    """How many batches of the loader are a step; 0 where `_run_batch` is always a whole one."""
    takes = inspect.signature(trainer._run_batch).parameters
    return getattr(trainer.args, "accumulate", 1) if "last" in takes else 0


def rows(batch: Any) -> int:
    return len([part for part in tree_leaves(batch) if torch.is_tensor(part)][-1])


def first_rows(batch: Any, number: int) -> Any:
    return tree_map_only(torch.Tensor, lambda part: part[:number], batch)


def measure(trainer: Any, gradient: torch.Tensor) -> Rank:
    """This rank's times; all ranks measure the same at the same time.

    `gradient` has as many bytes as DDP sends. They are zeros, as their sum must stay finite.
    """
    device, accumulate = gradient.device, accumulated(trainer) or 1
    takes = inspect.signature(trainer._run_batch).parameters
    pinned = getattr(trainer.train_data, "pin_memory", False)
    move = functools.partial(torch.Tensor.to, device=device, non_blocking=pinned)
    waits = []

    def endless() -> Iterator[tuple]:
        """Batches, each with whether it is the last one of its step."""
        while True:
            for number, batch in enumerate(trainer.train_data, start=1):
                yield batch, number % accumulate == 0 or number == len(trainer.train_data)

    def fetched() -> Iterator[tuple]:
        """A step's batches, each when the one before was computed."""
        last = False
        while not last:
            start = time.perf_counter()
            batch, last = next(batches)
            waits.append(time.perf_counter() - start)
            yield batch, last

    def run(step: Iterable[tuple]) -> None:
        for batch, last in step:
            batch = tree_map_only(torch.Tensor, move, batch)
            parts = batch if isinstance(batch, tuple | list) else (batch,)
            more = {"share": 1 / accumulate, "last": last}
            trainer._run_batch(*parts, **{name: more[name] for name in more if name in takes})

    batches = endless()
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.0
    trainer.model.train()
    first = list(fetched())
    sizes = [rows(batch) for batch, _ in first]
    one = tree_map_only(torch.Tensor, move, first[0][0])  # all may be too many for the device

    def of_sizes(numbers: list[int]) -> list[tuple]:
        """A step's batches, of the first one's rows."""
        return [(first_rows(one, n), last) for n, (_, last) in zip(numbers, first, strict=True)]

    here = of_sizes(sizes)
    timed(lambda: run(fetched()), device)  # the first ones are slow
    slowest = torch.tensor(timed(lambda: run(fetched()), device), device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    repeats = max(1, min(50, int(0.5 / slowest.item())))  # on all ranks the same
    waits.clear()
    whole = timed(lambda: run(fetched()), device, repeats)
    wait = sum(waits) / (TIMES * repeats)
    ready = timed(lambda: run(here), device, repeats)

    def compute(step: list[tuple] = here) -> None:
        with trainer.model.no_sync():
            run(step)

    together = timed(compute, device, repeats)
    alone = together
    if not any(isinstance(module, nn.SyncBatchNorm) for module in trainer.model.modules()):
        idle = dist.get_rank() > 0
        # DDP sends buffers only in the pass after one with all-reduce: not here, where none waits.
        alone = timed((lambda: None) if idle else compute, device, repeats)
    halves = [min(number, max(2, number // 2)) for number in sizes]  # BatchNorm needs two in each
    fewer = of_sizes(halves)
    saved = together - timed(lambda: compute(fewer), device, repeats)  # on all ranks, as it waits
    samples, fixed = sum(sizes), together
    if sum(halves) < samples:
        fixed -= min(together, max(0.0, saved) * samples / (samples - sum(halves)))
    number = torch.zeros((), device=device)
    linux = sys.platform == "linux"
    return Rank(
        host=socket.gethostname(),
        device=device.type,
        threads=torch.get_num_threads(),
        cpus=frozenset(os.sched_getaffinity(0) if linux else range(os.cpu_count())),
        quota=cpu_quota(),
        samples=samples,
        step=whole,
        data=min(wait, max(0.0, whole - ready)),  # a device may compute while the next is fetched
        compute=together,
        fixed=fixed,
        alone=alone,
        reduce=timed(lambda: dist.all_reduce(gradient), device, repeats),
        latency=timed(lambda: dist.all_reduce(number), device, repeats),
    )


def cpu_quota(folder: Path = Path("/sys/fs/cgroup")) -> float:
    """How many CPUs a container may use at a time, which its affinity does not tell.

    https://docs.kernel.org/admin-guide/cgroup-v2.html, and version 1 has two files.
    """
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        with contextlib.suppress(OSError):
            quota, period = " ".join((folder / name).read_text() for name in names).split()
            return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    return math.inf


def timed(work: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    """Seconds per call of `work`, where all ranks begin together: the median of `TIMES` times."""
    seconds = []
    for _ in range(TIMES):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append((time.perf_counter() - start) / repeats)
    return statistics.median(seconds)


def all_reduce_seconds(ranks: int, size: float, latency: float, bandwidth: float) -> float:
    """Of a ring: 2 (n - 1) messages of the n-th part of `size`, each after the one before.

    Each takes `latency` seconds, however small, and a rank sends `bandwidth` bytes per second.
    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
    Journal of Parallel and Distributed Computing 69 (2009).
    """
    return 2 * (ranks - 1) * (latency + size / ranks / bandwidth)


def report(ranks: list[Rank], size: int, steps: int, accumulate: int) -> list[str]:
    """The lines that `check` prints, of what all ranks have measured and of `size` bytes.

    Efficiency is the share of a step that is of use: what a device needs for its data and its
    computing when nobody disturbs it. `accumulate` is 0 in a script that has no --accumulate.
    """
    world_size = len(ranks)
    nodes = len({rank.host for rank in ranks})
    own = [rank.data + rank.compute for rank in ranks]
    slowest = own.index(max(own))
    step = max(own[slowest], *(rank.step for rank in ranks))
    data = statistics.mean(rank.data for rank in ranks)
    compute = statistics.mean(rank.compute for rank in ranks)
    waiting = own[slowest] - statistics.mean(own)
    exposed = step - own[slowest]  # what of the all-reduce is not hidden
    reduce = max(rank.reduce for rank in ranks)
    sent = 2 * (world_size - 1) / world_size * size / reduce
    parts = f"data {data * 1e3:.2f}, compute {compute * 1e3:.2f}"
    if world_size > 1:
        parts += f", waiting for rank {slowest} {waiting * 1e3:.2f}"
        parts += f", all-reduce {exposed * 1e3:.2f}"
    lines = [
        f"All-reduce | {size / 1e6:.2f} MB | {reduce * 1e3:.2f} ms | {sent / 1e9:.4f} GB/s",
        f"Step | {step * 1e3:.2f} ms: {parts}",
        f"Epoch | {steps} steps | about {steps * step:.1f} s",
    ]

    samples = sum(rank.samples for rank in ranks)
    useful = min(ranks[0].alone, compute) + data
    now = f"{nodes} nodes" if nodes > 1 else f"{world_size} processes on one node"
    now = now if world_size > 1 else "1 process"
    rows = [("Measured", now, samples / step, useful / step)]
    alone = ranks[0].samples / useful
    if world_size > 1:
        rows.append(("Predicted", f"1 process, threads {ranks[0].threads}", alone, 1.0))
    if nodes > 1:
        hops = 2 * (world_size - 1)  # messages of a ring, see all_reduce_seconds
        latency = min(reduce, max(rank.latency for rank in ranks)) / hops
        bandwidth = size / world_size / max(reduce / hops - latency, 1e-9)
        for times in (2, 4, 8):
            more = all_reduce_seconds(times * world_size, size, latency, bandwidth) - reduce
            rate = times * samples / (step + more)
            rows.append(("Predicted", f"{times * nodes} nodes", rate, useful / (step + more)))
    if world_size > 1 and accumulate:
        longer = step + 3 * own[slowest]  # the all-reduce comes but once
        name = f"{now}, --accumulate {4 * accumulate}"
        rows.append(("Predicted", name, 4 * samples / longer, 4 * useful / longer))
    for kind, name, rate, efficiency in rows:
        rate = round(rate, 1 if rate < 100 else None)
        lines.append(f"{kind} | {name} | {rate} samples/s | efficiency {efficiency:.0%}")
    if nodes == 1:
        lines.append("Predicted | more nodes | not known before two of them have run this")
    sentence = verdict(ranks, step, sent, accumulate)
    if world_size > 1 and alone > samples / step:
        sentence += "; 1 process alone is faster"
    return [*lines, f"Verdict | {sentence}"]


def verdict(ranks: list[Rank], step: float, sent: float, accumulate: int) -> str:
    """What takes most of a step without being of use, if that is a fifth of it, and what helps.

    `step` is in seconds; `sent` are bytes per second that each rank sends in an all-reduce. Too
    many threads come first, because they make all other times wrong.
    """
    for host in dict.fromkeys(rank.host for rank in ranks):
        if sentence := crowded([rank for rank in ranks if rank.host == host]):
            return sentence
    own = [rank.data + rank.compute for rank in ranks]
    slowest = own.index(max(own))
    first = ranks[0]

    link = "the all-reduce is the limit"
    if any(rank.host != first.host for rank in ranks):
        link = f"the link is the limit, {sent / 1e9:.3g} GB/s"

    larger = "raise --accumulate or --batch-size" if accumulate else "raise --batch-size"
    milliseconds = f"{first.alone * 1e3:.2f} ms"
    disturbed = f"the processes slow each other down: alone rank 0 computes in {milliseconds}"
    fewer = "start fewer on a node, or give each its own cores"
    late = "the data come too late"
    slow = f"rank {slowest} is slow: {own[slowest] * 1e3:.2f} ms for its data and computing"
    small = "the batch is too small for the device"
    look = f"see what else runs on {ranks[slowest].host}"
    costs = [
        (step - own[slowest], link, larger),
        (first.compute - first.alone, disturbed, fewer),
        (min(rank.data for rank in ranks), late, "raise --num-workers"),
        (own[slowest] - statistics.median_low(own), slow, look),
        (min(rank.fixed for rank in ranks), small, "raise --batch-size"),
    ]
    seconds, cause, remedy = max(costs)
    sentence = f"{cause} ({seconds / step:.0%} of the step): {remedy}"
    if seconds < 0.2 * step:
        share = statistics.mean(own) / step
        sentence = f"nothing is wrong: {share:.0%} of the step is data and computing"
    threads = max(rank.threads for rank in ranks)
    if first.device != "cpu" and threads > ENOUGH:
        sentence += f"; {threads} threads a process may keep the device waiting: "
        sentence += f"export OMP_NUM_THREADS={ENOUGH}"
    return sentence


def crowded(ranks: list[Rank]) -> str:
    """What to say if these ranks of one node have more threads than cores; otherwise nothing."""
    first, threads = ranks[0], sum(rank.threads for rank in ranks)
    cpus = len(frozenset.union(*(rank.cpus for rank in ranks)))
    cores = min(cpus, max(1.0, first.quota))
    if threads <= cores:
        return ""
    remedies = []
    if threads > len(ranks):
        fit = max(1, int(cores / len(ranks)))
        fit = fit if first.device == "cpu" else min(ENOUGH, fit)
        remedies.append(f"export OMP_NUM_THREADS={fit}")
    if len(ranks) > cores:
        remedies.append("start fewer processes")
    found = f"threads: {threads}, cores: {cores:g}{' by the CPU quota' if cores < cpus else ''}"
    return f"more threads than cores on {first.host} ({found}): {' and '.join(remedies)}"


def refuse(reason: str) -> NoReturn:
    """One line, from rank 0 or from the first process of each node, and status 2."""
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("LOCAL_RANK", 0))
    if rank == 0:
        print(f"error: {reason}", file=sys.stderr, flush=True)
    else:
        time.sleep(10)  # what has started this process ends it
    sys.exit(2)


def spawn_checked(
    spawn: Callable, function: Callable, args: tuple = (), *others: Any, **options: Any
) -> Any:
    """mp.spawn, with `check` in the place of `Trainer.train` in the processes that it starts."""
    return spawn(check_there, (function, *args), *others, **options)


def check_there(rank: int, function: Callable, *args: Any) -> None:
    function.__globals__["Trainer"].train = check
    for given in args:
        keep_snapshot(given)
    function(rank, *args)


def keep_snapshot(args: Any) -> None:
    """Have the script find no snapshot, because a new run renames the one of an earlier run."""
    if hasattr(args, "snapshot_path") and not getattr(args, "resume", False):
        args.snapshot_path = ""


def main() -> None:
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        named = f"there is no {sys.argv[1]}" if len(sys.argv) > 1 else "name a script"
        refuse(f"{named}: python benchmarks/check.py SCRIPT [the script's options]")
    path = Path(sys.argv[1]).resolve()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(path.parent))  # as Python does for the script
    if path.stem in sys.modules or "." in path.stem:
        refuse(f"{path.name} cannot be imported by this name: rename it, to train.py say")
    script = importlib.import_module(path.stem)
    for name in ("Trainer", "Trainer.train", "Trainer._run_batch", "parse_args", "main"):
        place = script.Trainer if "." in name else script
        if not callable(getattr(place, name.split(".")[-1], None)):
            refuse(f"{path.name} has no {name}, which benchmarks/check.py needs")
    script.Trainer.train = check
    parameters = inspect.signature(script.main).parameters.values()
    needed = [parameter for parameter in parameters if parameter.default is parameter.empty]
    if len(needed) == 1:
        args = script.parse_args()
        keep_snapshot(args)
        script.main(args)
        return
    if "mp.spawn(" not in path.read_text():  # or what it starts would train
        refuse(f"{path.name} has no mp.spawn(...) for its main() of {len(needed)} arguments")
    mp.spawn = functools.partial(spawn_checked, mp.spawn)  # its main is for the processes it starts
    runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    # Not this module's main: mp.spawn's processes have the script for their __main__, and find
    # check_there in this module by its name.
    importlib.import_module("check").main()
