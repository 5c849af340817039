"""The programs of pitfalls.md: each runs on real processes, which talk through gloo on the CPU.

    python docs/pitfalls.py                  run all, and put code and output into pitfalls.md
    python docs/pitfalls.py no_sync_wrong    run this one and print what its ranks print

The names that end in `_wrong` are the code as it circulates, cut down to the mistake.
"""

import contextlib
import datetime
import difflib
import inspect
import os
import re
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

PAGE = Path(__file__).with_suffix(".md")
# A fork from a process that has imported torch: a tenth of a second instead of seconds a rank.
START = "forkserver" if sys.platform == "linux" else "spawn"
PRELOAD = ["torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel"]
SECONDS = 120  # for a program, at most
PROGRAMS: dict[str, "Program"] = {}


class Program(NamedTuple):
    """A function that `ranks` processes call; each host is a folder of its own."""

    function: Callable
    ranks: int
    hosts: int
    group: bool  # the ranks find themselves in a process group
    leave: bool  # a rank that is done leaves the others alone


def program(
    ranks: int = 2, hosts: int = 1, group: bool = True, leave: bool = False
) -> Callable[[Callable], Callable]:
    def add(function: Callable) -> Callable:
        PROGRAMS[function.__name__] = Program(function, ranks, hosts, group, leave)
        return function

    return add


# --- who trains on what -------------------------------------------------------------------------


@program()
def shuffle_wrong(rank):
    dataset = range(12)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=3, shuffle=True)
    sampler.set_epoch(0)
    samples = torch.cat(list(loader))
    print(f"{len(loader)} steps, samples {sorted(samples.tolist())}")


@program()
def shuffle_right(rank):
    dataset = range(12)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=3, sampler=sampler)
    sampler.set_epoch(0)
    samples = torch.cat(list(loader))
    print(f"{len(loader)} steps, samples {sorted(samples.tolist())}")


@program()
def unseeded_wrong(rank):
    dataset = torch.rand(8)
    datasets = [None, None]
    dist.all_gather_object(datasets, dataset.tolist())
    print("samples that both ranks have:", len({*datasets[0]} & {*datasets[1]}), "of 8")


@program()
def unseeded_right(rank):
    dataset = torch.rand(8, generator=torch.Generator().manual_seed(0))
    datasets = [None, None]
    dist.all_gather_object(datasets, dataset.tolist())
    print("samples that both ranks have:", len({*datasets[0]} & {*datasets[1]}), "of 8")


class Watched(Dataset):
    """Twelve samples, each with its target, and a list of those that were fetched."""

    def __init__(self):
        self.fetched = []

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.fetched.append(index)
        return index, index


@program()
def peek_wrong(rank):
    dataset = Watched()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=3, sampler=sampler)
    for epoch in range(3):
        b_sz = len(next(iter(loader))[0])
        sampler.set_epoch(epoch)
        steps = len(list(loader))
        print(f"epoch {epoch}: {steps} steps of {b_sz}, fetched {dataset.fetched}")
        dataset.fetched.clear()


@program()
def peek_right(rank):
    dataset = Watched()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=3, sampler=sampler)
    for epoch in range(3):
        b_sz = loader.batch_size
        sampler.set_epoch(epoch)
        steps = len(list(loader))
        print(f"epoch {epoch}: {steps} steps of {b_sz}, fetched {dataset.fetched}")
        dataset.fetched.clear()


@program(ranks=4)
def padding_wrong(rank):
    hits = torch.tensor([1.0] + [0.0] * 9)  # ten test samples, the first of them classified rightly
    loader = DataLoader(hits, sampler=DistributedSampler(hits, shuffle=False))
    shard = torch.cat(list(loader))
    sums = torch.tensor([shard.sum(), len(shard)])
    dist.all_reduce(sums)
    correct, total = sums.tolist()
    print(f"Accuracy: {correct:.0f}/{total:.0f} ({correct / total:.1%})")


@program(ranks=4)
def padding_right(rank):
    hits = torch.tensor([1.0] + [0.0] * 9)  # ten test samples, the first of them classified rightly
    loader = DataLoader(Subset(hits, range(rank, len(hits), dist.get_world_size())))
    shard = torch.cat(list(loader))
    sums = torch.tensor([shard.sum(), len(shard)])
    dist.all_reduce(sums)
    correct, total = sums.tolist()
    print(f"Accuracy: {correct:.0f}/{total:.0f} ({correct / total:.1%})")


# --- losses and gradients -----------------------------------------------------------------------


@program()
def no_sync_wrong(rank):
    target = [1.0, 3.0][rank]  # what the samples of this rank say
    model = DDP(nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        for _ in range(2):
            with model.no_sync():
                loss = (model(torch.ones(1, 1)) - target).square().mean()
                (loss / 2).backward()
        optimizer.step()
    print(f"weight {model.module.weight.item():.3f}, loss {loss.item():.3f}")


@program()
def no_sync_right(rank):
    target = [1.0, 3.0][rank]  # what the samples of this rank say
    model = DDP(nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        for last in (False, True):
            with contextlib.nullcontext() if last else model.no_sync():
                loss = (model(torch.ones(1, 1)) - target).square().mean()
                (loss / 2).backward()
        optimizer.step()
    print(f"weight {model.module.weight.item():.3f}, loss {loss.item():.3f}")


@program()
def accumulate_wrong(rank):
    model = DDP(nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10):
        loss = model(torch.ones(1, 1)).mean()  # the gradient of every batch is 1
        loss.backward()
        if step % 4 == 0:
            print(f"step {step}: update with gradient {model.module.weight.grad.item()}")
            optimizer.step()
            optimizer.zero_grad()
    print(f"end: gradient {model.module.weight.grad.item()} is left")


@program()
def accumulate_right(rank):
    model = DDP(nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for steps in torch.arange(10).split(4):
        for step in steps:
            last = step == steps[-1]
            with contextlib.nullcontext() if last else model.no_sync():
                loss = model(torch.ones(1, 1)).mean()
                (loss / len(steps)).backward()
        print(f"step {step}: update with gradient {model.module.weight.grad.item()}")
        optimizer.step()
        optimizer.zero_grad()
    print(f"end: gradient {model.module.weight.grad} is left")


@program()
def reduce_wrong(rank):
    loss = torch.tensor([1.0, 3.0][rank])
    dist.reduce(loss, dst=0)
    loss /= dist.get_world_size()
    print(f"mean loss {loss.item()}")


@program()
def reduce_right(rank):
    loss = torch.tensor([1.0, 3.0][rank])
    dist.all_reduce(loss)
    loss /= dist.get_world_size()
    print(f"mean loss {loss.item()}")


@program(ranks=1)
def uneven_wrong(rank):
    losses = torch.arange(10.0, requires_grad=True)  # of the ten samples of a batch
    per_device = [chunk.mean() for chunk in losses.chunk(4)]  # as DataParallel splits them
    loss = torch.stack(per_device).mean()
    loss.backward()
    print("samples per device:", [len(chunk) for chunk in losses.chunk(4)])
    print(f"loss {loss.item():.3f}")
    print("weights of the samples:", *(f"{weight:.3f}" for weight in losses.grad))


@program(ranks=1)
def uneven_right(rank):
    losses = torch.arange(10.0, requires_grad=True)  # of the ten samples of a batch
    gathered = torch.cat(losses.chunk(4))
    loss = gathered.mean()
    loss.backward()
    print("samples per device:", [len(chunk) for chunk in losses.chunk(4)])
    print(f"loss {loss.item():.3f}")
    print("weights of the samples:", *(f"{weight:.3f}" for weight in losses.grad))


@program()
def one_logit_wrong(rank):
    torch.manual_seed(0)
    source, targets = torch.rand(64, 20), torch.rand(64, 1)
    model = DDP(nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.module.weight.clone()
    for _ in range(100):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(source), targets)
        loss.backward()
        optimizer.step()
    print(f"loss {abs(loss.item()):.2f}, weights changed: {not model.module.weight.equal(before)}")


@program()
def one_logit_right(rank):
    torch.manual_seed(0)
    source, targets = torch.rand(64, 20), torch.rand(64, 1)
    model = DDP(nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.module.weight.clone()
    for _ in range(100):
        optimizer.zero_grad()
        loss = F.mse_loss(model(source), targets)
        loss.backward()
        optimizer.step()
    print(f"loss {abs(loss.item()):.2f}, weights changed: {not model.module.weight.equal(before)}")


@program()
def one_rank_wrong(rank):
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))  # the default: half an hour
    correct = torch.tensor([3.0, 4.0][rank])
    try:
        if rank == 0:
            dist.all_reduce(correct, group=group)
            print(f"correct: {correct.item():.0f}")
    except RuntimeError:
        print("waits for rank 1, in vain")


@program()
def one_rank_right(rank):
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))  # the default: half an hour
    correct = torch.tensor([3.0, 4.0][rank])
    try:
        dist.all_reduce(correct, group=group)
        if rank == 0:
            print(f"correct: {correct.item():.0f}")
    except RuntimeError:
        print("waits for rank 1, in vain")


@program()
def wrapper_wrong(rank):
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    model = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), process_group=group)
    model.eval()
    try:
        if rank == 0:
            with torch.no_grad():
                print("outputs:", len(model(torch.ones(3, 4))))
    except RuntimeError:
        print("waits for rank 1, in vain")


@program()
def wrapper_right(rank):
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    model = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), process_group=group)
    model.eval()
    try:
        if rank == 0:
            with torch.no_grad():
                print("outputs:", len(model.module(torch.ones(3, 4))))
    except RuntimeError:
        print("waits for rank 1, in vain")


@program()
def unused_wrong(rank):
    modules = nn.ModuleDict({"used": nn.Linear(4, 1), "unused": nn.Linear(4, 1)})
    model = DDP(modules)
    model.module.forward = lambda source: model.module["used"](source)
    try:
        for step in range(2):
            model(torch.ones(3, 4)).mean().backward()
            print(f"step {step} done")
    except RuntimeError as error:
        print(str(error).split(". ")[0])


@program()
def unused_right(rank):
    modules = nn.ModuleDict({"used": nn.Linear(4, 1), "unused": nn.Linear(4, 1)})
    model = DDP(modules, find_unused_parameters=True)
    model.module.forward = lambda source: model.module["used"](source)
    try:
        for step in range(2):
            model(torch.ones(3, 4)).mean().backward()
            print(f"step {step} done")
    except RuntimeError as error:
        print(str(error).split(". ")[0])


@program(ranks=1)
def clip_wrong(rank):
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    loss = 3 * weight.sum()  # its gradient is 3, and 1 when it is clipped
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_([weight], max_norm=1.0)
    scaler.step(optimizer)
    print(f"a step of {-weight.item():.7f}")


@program(ranks=1)
def clip_right(rank):
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    loss = 3 * weight.sum()  # its gradient is 3, and 1 when it is clipped
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_([weight], max_norm=1.0)
    scaler.step(optimizer)
    print(f"a step of {-weight.item():.7f}")


@program(ranks=1)
def schedule_wrong(rank):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=10)  # in 10 steps
    for micro_batch in range(1, 13):
        if micro_batch % 4 == 0:
            optimizer.step()
            print(f"step {micro_batch // 4}: a rate of {schedule.get_last_lr()[0]:.1f}")
        schedule.step()


@program(ranks=1)
def schedule_right(rank):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=10)  # in 10 steps
    for micro_batch in range(1, 13):
        if micro_batch % 4 == 0:
            optimizer.step()
            print(f"step {micro_batch // 4}: a rate of {schedule.get_last_lr()[0]:.1f}")
            schedule.step()


# --- ranks --------------------------------------------------------------------------------------


@program(group=False)
def world_size_wrong(rank):
    try:
        batch_size = 64 // dist.get_world_size()
        meet = f"file://{Path('store').resolve()}"
        dist.init_process_group("gloo", meet, rank=rank, world_size=2)
        print("batch size", batch_size)
    except ValueError as error:
        print(f"ValueError: {error}")


@program(group=False)
def world_size_right(rank):
    try:
        meet = f"file://{Path('store').resolve()}"
        dist.init_process_group("gloo", meet, rank=rank, world_size=2)
        batch_size = 64 // dist.get_world_size()
        print("batch size", batch_size)
    except ValueError as error:
        print(f"ValueError: {error}")


def set_device(index):
    """What torch.accelerator.set_device_index does on a node with two GPUs, for one with none."""
    print(f"device {index}" if index < 2 else f"device {index}: invalid device ordinal")


@program(ranks=4, hosts=2)
def local_rank_wrong(rank):
    local_rank = dist.get_rank()
    set_device(local_rank)


@program(ranks=4, hosts=2)
def local_rank_right(rank):
    local_rank = int(os.environ["LOCAL_RANK"])  # from torchrun
    set_device(local_rank)


# --- snapshots ----------------------------------------------------------------------------------


@program(ranks=1)
def save_every_wrong(rank):
    total_epochs, save_every = 50, 10
    for epoch in range(total_epochs):
        if epoch % save_every == 0:
            saved = epoch
    print(f"the snapshot is of epoch {saved}, the last is {epoch}: {epoch - saved} are lost")


@program(ranks=1)
def save_every_right(rank):
    total_epochs, save_every = 50, 10
    for epoch in range(total_epochs):
        if (epoch + 1) % save_every == 0 or epoch + 1 == total_epochs:
            saved = epoch
    print(f"the snapshot is of epoch {saved}, the last is {epoch}: {epoch - saved} are lost")


@program()
def resume_wrong(rank):
    def train(total_epochs):
        torch.manual_seed(0)
        model, first = DDP(nn.Linear(1, 1, bias=False)), 0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        if Path("snapshot.pt").exists():
            snapshot = torch.load("snapshot.pt")
            model.module.load_state_dict(snapshot["model"])
            first = snapshot["epoch"]
        dist.barrier()  # all have read it
        for epoch in range(first, total_epochs):
            optimizer.zero_grad()
            (model(torch.rand(1, 1)) - 1).square().mean().backward()
            optimizer.step()
            scheduler.step()
            snapshot = {"model": model.module.state_dict(), "epoch": epoch}
            if rank == 0:
                torch.save(snapshot, "snapshot.pt")
        dist.barrier()  # it is written
        print(f"epochs {list(range(first, total_epochs))}: weight {model.module.weight.item():.3f}")

    train(4)
    Path("snapshot.pt").unlink(missing_ok=True)
    dist.barrier()
    train(2)
    train(4)


@program()
def resume_right(rank):
    def train(total_epochs):
        torch.manual_seed(0)
        model, first = DDP(nn.Linear(1, 1, bias=False)), 0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        if Path("snapshot.pt").exists():
            snapshot = torch.load("snapshot.pt")
            model.module.load_state_dict(snapshot["model"])
            optimizer.load_state_dict(snapshot["optimizer"])
            scheduler.load_state_dict(snapshot["scheduler"])
            torch.set_rng_state(snapshot["rng_states"][rank])
            first = snapshot["epoch"]
        dist.barrier()  # all have read it
        for epoch in range(first, total_epochs):
            optimizer.zero_grad()
            (model(torch.rand(1, 1)) - 1).square().mean().backward()
            optimizer.step()
            scheduler.step()
            rng_states = [None] * dist.get_world_size()
            dist.all_gather_object(rng_states, torch.get_rng_state())
            snapshot = {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "rng_states": rng_states,
                "epoch": epoch + 1,
            }
            if rank == 0:
                torch.save(snapshot, "snapshot.pt")
        dist.barrier()  # it is written
        print(f"epochs {list(range(first, total_epochs))}: weight {model.module.weight.item():.3f}")

    train(4)
    Path("snapshot.pt").unlink(missing_ok=True)
    dist.barrier()
    train(2)
    train(4)


class KilledHere:
    """Part of a snapshot; while it is written, the process ends as after kill -9."""

    def __reduce__(self):
        time.sleep(0.5)
        os._exit(0)


@program(leave=True)
def in_place_wrong(rank):
    if rank == 0:
        for snapshot in ({"epoch": 1}, {"epoch": 2, "model": KilledHere()}):
            torch.save(snapshot, "snapshot.pt")
    try:
        dist.barrier()
    except RuntimeError:
        print("rank 0 is gone")
    try:
        print("snapshot of epoch", torch.load("snapshot.pt")["epoch"])
    except Exception:
        print("nothing that torch.load can read")


@program(leave=True)
def in_place_right(rank):
    if rank == 0:
        for snapshot in ({"epoch": 1}, {"epoch": 2, "model": KilledHere()}):
            torch.save(snapshot, "snapshot.pt.tmp")
            os.replace("snapshot.pt.tmp", "snapshot.pt")  # all of it, or nothing
    try:
        dist.barrier()
    except RuntimeError:
        print("rank 0 is gone")
    try:
        print("snapshot of epoch", torch.load("snapshot.pt")["epoch"])
    except Exception:
        print("nothing that torch.load can read")


@program(hosts=2, leave=True)
def relative_path_wrong(rank):
    if rank == 0:
        torch.save({"epoch": 3}, "snapshot.pt")  # the run before: rank 0 saved, on its node
    first = torch.load("snapshot.pt")["epoch"] if Path("snapshot.pt").exists() else 0
    print("starts at epoch", first)
    for epoch in range(first, 5):
        try:
            dist.all_reduce(torch.ones(1))  # an epoch's training
        except RuntimeError:
            print(f"epoch {epoch}: the others are gone")
            return
    print("done")


@program(hosts=2)
def relative_path_right(rank):
    if rank == 0:
        torch.save({"epoch": 3}, "snapshot.pt")  # the run before: rank 0 saved, on its node
    box = [torch.load("snapshot.pt") if rank == 0 else None]
    dist.broadcast_object_list(box)
    first = box[0]["epoch"]
    print("starts at epoch", first)
    for epoch in range(first, 5):
        try:
            dist.all_reduce(torch.ones(1))  # an epoch's training
        except RuntimeError:
            print(f"epoch {epoch}: the others are gone")
            return
    print("done")


# --- claims -------------------------------------------------------------------------------------


def same(value):
    values = [None, None]
    dist.all_gather_object(values, value)
    return values[0] == values[1]


@program()
def seeds_wrong(rank):
    torch.manual_seed(42)
    module = nn.Linear(1, 1, bias=False)
    print("the same weights before the wrap:", same(module.weight.item()))
    DDP(module)
    print("the same weights after it:", same(module.weight.item()))
    print("the same dropout:", same(F.dropout(torch.ones(1000)).tolist()))


@program()
def seeds_right(rank):
    torch.manual_seed(42 + rank)
    module = nn.Linear(1, 1, bias=False)
    print("the same weights before the wrap:", same(module.weight.item()))
    DDP(module)
    print("the same weights after it:", same(module.weight.item()))
    print("the same dropout:", same(F.dropout(torch.ones(1000)).tolist()))


@program()
def optimizer_order(rank):
    for made in ("before", "after"):
        torch.manual_seed(0)
        module = nn.Linear(1, 1, bias=False)
        if made == "before":
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = DDP(module)
        if made == "after":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (model(torch.ones(1, 1)) - rank).square().mean().backward()
            optimizer.step()
        print(f"optimizer made {made} the wrap: weight {module.weight.item():.5f}")


LEARNED = []


def learn(i, shared):
    LEARNED.append("something")
    shared.fill_(7)


@program(ranks=1)
def spawn_one(rank):
    shared = torch.zeros(())
    mp.spawn(learn, args=(shared,), nprocs=1)
    print(f"in a global: {LEARNED}, in a tensor among the arguments: {shared.item()}")


def count(i, dataset, plain, sampled):
    plain[i] = len(list(DataLoader(dataset)))
    sampler = DistributedSampler(dataset, num_replicas=2, rank=i)
    sampled[i] = len(list(DataLoader(dataset, sampler=sampler)))


@program(ranks=1)
def spawn_data(rank):
    plain, sampled = torch.zeros(2, 2, dtype=torch.int64)
    mp.spawn(count, args=(range(12), plain, sampled), nprocs=2)
    print(f"samples of each process: {plain.tolist()}, with a sampler: {sampled.tolist()}")


@program()
def timeout(rank):
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    if rank == 0:  # and rank 1 never comes
        print("without the argument:", dist.constants.default_pg_timeout)
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            print("with it:", re.search(r"Timed out waiting \d+ms", str(error))[0])
    dist.barrier()


# --- running them -------------------------------------------------------------------------------


def start_rank(name: str, rank: int, folder: str) -> None:
    function, ranks, hosts, group, leave = PROGRAMS[name]
    local_world_size = ranks // hosts
    os.environ["LOCAL_RANK"] = str(rank % local_world_size)
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if loopback:  # nothing here listens to the network
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    torch.set_num_threads(1)
    torch.seed()  # a Python of its own has its own; a fork has that of its parent
    host = Path(folder, f"host{rank // local_world_size}")
    host.mkdir(exist_ok=True)
    os.chdir(host)
    if group:
        store = dist.FileStore(os.path.join(folder, "store"), ranks)
        seconds = datetime.timedelta(seconds=SECONDS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=seconds)
        dist.barrier()  # all are connected
    output = Path(folder, f"output{rank}")
    with output.open("w") as file, contextlib.redirect_stdout(file):
        function(rank)
    if leave:
        time.sleep(0.5)  # the last that it has sent must arrive
    elif dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # the first out of the barrier may be gone
            dist.barrier()
    # Not through the group's destructor: it may wait for one of gloo's threads that waits for the
    # GIL (torch 2.7).
    os._exit(0)


def run(name: str) -> str:
    """What the ranks of a program print, one rank after the other."""
    ranks, end = PROGRAMS[name].ranks, time.monotonic() + SECONDS
    context = mp.get_context(START)
    if START == "forkserver":
        context.set_forkserver_preload(PRELOAD)
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            with patch.dict(os.environ, OMP_NUM_THREADS="1"):
                for rank in range(ranks):
                    processes.append(context.Process(target=start_rank, args=(name, rank, folder)))
                    processes[-1].start()
            for process in processes:
                process.join(max(0, end - time.monotonic()))
            codes = [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.join()
        if codes != [0] * ranks:
            raise RuntimeError(f"{name}: exit codes {codes} (None: not done in {SECONDS} s)")
        outputs = [Path(folder, f"output{rank}").read_text() for rank in range(ranks)]
    if len(set(outputs)) == 1:
        label = "" if ranks == 1 else "[every rank] "
        return textwrap.indent(outputs[0], label)
    return "".join(textwrap.indent(text, f"[rank {i}] ") for i, text in enumerate(outputs))


def source(name: str) -> str:
    """The function or class of this name, as it is to stand on the page."""
    return re.sub(r"\A@.*\n", "", inspect.getsource(globals()[name]))


def change(name: str) -> str:
    """What NAME_right changes in NAME_wrong, with a line before and after it."""
    programs = [
        textwrap.dedent("".join(source(f"{name}_{end}").splitlines(keepends=True)[1:]))
        for end in ("wrong", "right")
    ]
    lines = [text.splitlines(keepends=True) for text in programs]
    return re.sub(r"^@@.*", "@@", "".join([*difflib.unified_diff(*lines, n=1)][3:]), flags=re.M)


def blocks(page: str) -> list[tuple[str, str, str]]:
    """The page's blocks: language, the rest of the first line, and what stands in it."""
    return re.findall(r"^```(\w+) (.+)\n((?:.*\n)*?)```$", page, re.M)


def update() -> None:
    page = PAGE.read_text()
    for language, name, old in blocks(page):
        if name.isidentifier():  # and no quotation from a script
            new = {"text": run, "diff": change, "python": source}[language](name)
            first = f"```{language} {name}\n"
            page = page.replace(f"{first}{old}```\n", f"{first}{new}```\n")
    PAGE.write_text(page)


if __name__ == "__main__":
    if sys.argv[1:]:
        print(*(run(name) for name in sys.argv[1:]), sep="\n", end="")
    else:
        update()
