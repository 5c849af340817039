"""The programs of pitfalls.md, on real processes that talk through gloo on the CPU.

    python docs/programs/pitfalls.py            list their names
    python docs/programs/pitfalls.py no_sync    run one, wrong and right, and print both outputs
    python docs/programs/pitfalls.py --update   run all, and put their outputs into pitfalls.md

Each function that takes a rank is a program. `if wrong:` has the lines as they circulate, `else:`
the remedy. So every `if` stays an `if`, and ruff is not to ask for expressions.
"""
# ruff: noqa: SIM108

import contextlib
import datetime
import faulthandler
import inspect
import multiprocessing
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, Subset, random_split

PAGE = Path(__file__).parent.parent / "pitfalls.md"
# A fork from a process that has imported torch: a tenth of a second instead of seconds a rank.
START = "forkserver" if sys.platform == "linux" else "spawn"
PRELOAD = ["torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel"]
SECONDS = 120  # a program that takes longer fails
RANKS = {"padding": 4, "local_rank": 4}  # all others have two ranks
RANKS |= dict.fromkeys(("map_location", "threads"), 1)
HANGS = ("one_rank", "skip", "wrapper")  # the wrong ones, whose collectives end after five seconds


def shuffle(rank, wrong):
    dataset = range(12)
    sampler = DistributedSampler(dataset)
    if wrong:
        loader = DataLoader(dataset, batch_size=3, shuffle=True)
    else:
        loader = DataLoader(dataset, batch_size=3, sampler=sampler)
    samples = torch.cat(list(loader))
    print(f"{len(loader)} steps, samples {sorted(samples.tolist())}")


def set_epoch(rank, wrong):
    sampler = DistributedSampler(range(8))
    orders = []
    for epoch in range(2):
        if not wrong:
            sampler.set_epoch(epoch)
        orders.append(list(sampler))
    print(f"{orders[0]}, then {orders[1]}")


def split(rank, wrong):
    if not wrong:
        torch.manual_seed(42)  # the same on all ranks, and before the data are made
    train_set, val_set = random_split(range(1000), [0.8, 0.2])
    others = [None, None]
    dist.all_gather_object(others, [*val_set])
    print("trains on what the other rank evaluates:", bool({*train_set} & {*others[1 - rank]}))


def padding(rank, wrong):
    val_set = torch.tensor([1.0] + [0.0] * 9)  # of ten samples, one is classified rightly
    if wrong:
        shard = DistributedSampler(val_set, shuffle=False)
    else:
        shard = range(rank, len(val_set), dist.get_world_size())
    shares = torch.cat(list(DataLoader(Subset(val_set, list(shard)))))
    sums = torch.tensor([shares.sum(), len(shares)])
    dist.all_reduce(sums)
    correct, total = sums.tolist()
    print(f"Accuracy: {correct:.0f}/{total:.0f} ({correct / total:.1%})")


def no_sync(rank, wrong):
    target = [1.0, 3.0][rank]  # what the samples of this rank say
    model = DDP(nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        for last in (False, True):
            if wrong:
                context = model.no_sync()
            else:
                context = contextlib.nullcontext() if last else model.no_sync()
            with context:
                loss = (model(torch.ones(1, 1)) - target).square().mean()
                (loss / 2).backward()
        optimizer.step()
    print(f"weight {model.module.weight.item():.3f}, loss {loss.item():.3f}")


def bypass(rank, wrong):
    samples = [1.0, 3.0]  # one for each rank
    model = DDP(nn.Linear(1, 1, bias=False))
    nn.init.ones_(model.module.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if wrong:
        loss = model.module(torch.ones(1, 1)).mean() * samples[rank]
    else:
        loss = model(torch.ones(1, 1)).mean() * samples[rank]
    loss.backward()
    optimizer.step()
    print(f"weight {model.module.weight.item():.1f}")


def two_losses(rank, wrong):
    model = DDP(nn.Linear(1, 1, bias=False))
    nn.init.ones_(model.module.weight)
    output = model(torch.full((1, 1), rank + 1.0))
    first, second = output.mean(), output.square().mean()
    if wrong:
        first.backward(retain_graph=True)
        second.backward()
    else:
        (first + second).backward()
    print(f"gradient {model.module.weight.grad.item():.1f}")


def unfrozen(rank, wrong):
    target = [1.0, 3.0][rank]  # what the samples of this rank say
    body, head = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    module = nn.Sequential(body, head)
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    body.requires_grad_(False)
    model = DDP(module)
    # Some epochs later, when the head has learned:
    body.requires_grad_(True)
    if not wrong:
        model = DDP(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (model(torch.ones(1, 1)) - target).square().mean().backward()
        optimizer.step()
    print(f"weight of the body {body.weight.item():.3f}")


def reentrant(rank, wrong):
    target = [1.0, 3.0][rank]
    layer, head = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    module = nn.Sequential(layer, head)
    for parameter in module.parameters():
        nn.init.ones_(parameter)

    def forward(x, times):
        for _ in range(times):
            if wrong:
                x = checkpoint(layer, x, use_reentrant=True)
            else:
                x = checkpoint(layer, x, use_reentrant=False)
        return head(x)

    module.forward = forward
    for times, find_unused in ((2, False), (1, True)):
        model = DDP(module, find_unused_parameters=find_unused)
        module.zero_grad()
        x = torch.ones(1, 1, requires_grad=True)  # as behind an embedding
        (model(x, times) - target).square().mean().backward()
        print(f"gradient {layer.weight.grad.item():.1f}")


def accumulate(rank, wrong):
    model = DDP(nn.Linear(1, 1, bias=False))
    updates, loader = [], range(10)
    for step in loader:
        loss = model(torch.ones(1, 1)).mean()  # its gradient is 1
        if wrong:
            loss.backward()
            update = step % 4 == 0
        else:
            size = min(4, len(loader) - step // 4 * 4)  # the last step may have fewer
            (loss / size).backward()
            update = (step + 1) % 4 == 0 or step + 1 == len(loader)
        if update:
            updates.append(f"{model.module.weight.grad.item()} after step {step}")
            model.zero_grad()
    print("gradients", ", ".join(updates))


def class_weights(rank, wrong):
    weight = torch.tensor([1.0, 4.0])  # of the two classes
    targets = torch.tensor([0, 0, 0, 1, 0, 0, 0, 0])
    module = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(module.weight)
    F.cross_entropy(module(torch.ones(8, 1)), targets, weight).backward()
    alone = module.weight.grad[0].item()
    module.zero_grad()
    model = DDP(module)
    output, targets = model(torch.ones(4, 1)), targets[4 * rank :][:4]
    if wrong:
        loss = F.cross_entropy(output, targets, weight)
    else:
        total = weight[targets].sum()
        dist.all_reduce(total)
        loss = F.cross_entropy(output, targets, weight, reduction="sum")
        loss = loss * dist.get_world_size() / total  # DDP divides by world_size
    loss.backward()
    print(f"gradient {module.weight.grad[0].item():.3f}, in one process {alone:.3f}")


class Temperature(nn.Module):
    """A loss that learns."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output, target):
        return (self.scale * output - target).square().mean()


class WithLoss(nn.Module):
    def __init__(self, net, criterion):
        super().__init__()
        self.net, self.criterion = net, criterion

    def forward(self, inputs, target):
        return self.criterion(self.net(inputs), target)


def loss_weights(rank, wrong):
    inputs, target = torch.ones(1, 1), [2.0, 4.0][rank]
    net, criterion = nn.Linear(1, 1, bias=False), Temperature()
    nn.init.ones_(net.weight)
    if wrong:
        model = DDP(net)
        loss = criterion(model(inputs), target)
    else:
        model = DDP(WithLoss(net, criterion))  # its forward returns criterion(net(inputs), target)
        loss = model(inputs, target)
    loss.backward()
    gradients = [parameter.grad.item() for parameter in (net.weight, criterion.scale)]
    print(f"gradient of the net {gradients[0]}, of the loss {gradients[1]}")


def unused(rank, wrong):
    modules = nn.ModuleDict({"used": nn.Linear(4, 1), "unused": nn.Linear(4, 1)})
    modules.forward = lambda source: modules["used"](source)
    if wrong:
        model = DDP(modules)
    else:
        model = DDP(modules, find_unused_parameters=True)
    for _ in range(2):
        model(torch.ones(3, 4)).mean().backward()
    print("two steps done")


def one_rank(rank, wrong):
    correct = torch.tensor([3.0, 4.0][rank])
    if wrong:
        if rank == 0:
            dist.all_reduce(correct)
    else:
        dist.all_reduce(correct)
    if rank == 0:
        print(f"correct {correct.item():.0f}")


def skip(rank, wrong):
    model = DDP(nn.Linear(2, 1, bias=False))
    steps = torch.zeros(1)
    for step in range(3):
        source = torch.ones(1, 2)
        if rank == 1 and step == 1:
            source[0] = float("nan")
        loss = model(source).mean()
        if wrong:
            bad = loss.isnan()
        else:
            bad = loss.isnan().float()
            dist.all_reduce(bad)  # if one rank has a bad batch, all ranks skip the step
        if bad:
            continue
        loss.backward()
        steps += 1
    dist.all_reduce(steps)
    print(f"steps of both ranks: {steps.item():.0f}")


def wrapper(rank, wrong):
    model = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model.eval()
    if rank == 0:
        with torch.no_grad():
            if wrong:
                output = model(torch.ones(3, 4))
            else:
                output = model.module(torch.ones(3, 4))
        print("outputs", len(output))


def local_rank(rank, wrong):
    if wrong:
        index = dist.get_rank()
    else:
        index = int(os.environ["LOCAL_RANK"])
    # As torch.cuda.set_device does on a machine with two GPUs.
    print(f"device {index}" if index < 2 else "invalid device ordinal")


def limit_threads(rank, wrong, threads):
    torch.set_num_threads(max(2, torch.get_num_threads()))  # a machine with one core has no pitfall
    alone = torch.get_num_threads()
    if not wrong:
        torch.set_num_threads(max(1, torch.get_num_threads() // 2))  # two ranks share the cores
    threads[rank] = torch.get_num_threads() / alone


def threads(rank, wrong):
    os.environ.pop("OMP_NUM_THREADS", None)
    threads = torch.zeros(2)
    mp.spawn(limit_threads, args=(wrong, threads), nprocs=2)
    print("more threads than one process has:", threads.sum().item() > 1)


def prefix(rank, wrong):
    model = DDP(nn.Linear(1, 1, bias=False))
    if wrong:
        weights = model.state_dict()
    else:
        weights = model.module.state_dict()
    print("saved", *weights)
    nn.Linear(1, 1, bias=False).load_state_dict(weights)
    print("loaded")


def map_location(rank, wrong):
    with patch("torch.serialization.location_tag", lambda storage: "cuda:0"):
        torch.save(torch.ones(1), "snapshot.pt")  # as rank 0 writes it on a machine with GPUs
    if wrong:
        snapshot = torch.load("snapshot.pt")
    else:
        snapshot = torch.load("snapshot.pt", map_location="cpu")
    print("loaded on", snapshot.device)


def resume(rank, wrong):
    def train(snapshot, total_epochs):
        torch.manual_seed(0)
        model = DDP(nn.Linear(1, 1, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for name, part in (("model", model.module), ("optimizer", optimizer)):
            if name in snapshot:
                part.load_state_dict(snapshot[name])
        for epoch in range(snapshot["epoch"], total_epochs):
            optimizer.zero_grad()
            (model(torch.ones(1, 1)) - 1).square().mean().backward()
            optimizer.step()
            if wrong:
                snapshot = {"model": model.module.state_dict(), "epoch": epoch}
            else:
                snapshot = {"model": model.module.state_dict(), "epoch": epoch + 1}
                snapshot["optimizer"] = optimizer.state_dict()
        return snapshot

    whole = train({"epoch": 0}, 4)["model"]["weight"].item()
    resumed = train(train({"epoch": 0}, 2), 4)["model"]["weight"].item()
    print(f"after four epochs: weight {whole:.3f} in one go, {resumed:.3f} if resumed after two")


def seeds(rank):
    torch.manual_seed(42 + rank)
    module = nn.Linear(1, 1, bias=False)
    before = module.weight.item()
    DDP(module)
    print(f"weight {before:.3f} before DDP, {module.weight.item():.3f} after")


def optimizer_order(rank):
    module = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = DDP(module)
    pairs = zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True)
    print("the optimizer has DDP's own tensors:", all(ours is theirs for ours, theirs in pairs))


def start_rank(rank: int, name: str, folder: str, wrong: tuple[bool, ...]) -> None:
    """Call the program as this rank, leave what it prints in a file, and wait to be killed."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    ranks, nodes = RANKS.get(name, 2), 2 if name == "local_rank" else 1
    os.environ.update(LOCAL_RANK=str(rank % (ranks // nodes)), CUDA_VISIBLE_DEVICES="")
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if loopback:  # nothing here listens to the network
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
    torch.set_num_threads(1)
    torch.seed()  # a Python of its own has its own; a fork has that of its parent
    os.chdir(folder)
    store = dist.FileStore(os.path.join(folder, "store"), ranks)
    limit = datetime.timedelta(seconds=5 if name in HANGS and wrong[0] else SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    dist.barrier()  # all are connected
    output = Path(folder, f"output{rank}")
    with output.with_suffix(".tmp").open("w") as file, contextlib.redirect_stdout(file):
        try:
            globals()[name](rank, *wrong)
        except Exception as error:
            words = str(error).split(". ")[0].split()
            # gloo has several messages for it, and the rank that is first closes its connections.
            if re.search("timed? ?out|closed by peer|reset by peer", str(error), re.I):
                words = ["timed out"]
            print(f"{type(error).__name__}:", *words)
    output.with_suffix(".tmp").replace(output)
    time.sleep(2 * SECONDS)  # a rank that ends early would be an error for the others


def run_once(name: str, *wrong: bool) -> str:
    """What the ranks of a program print, in one line."""
    if START == "forkserver":
        multiprocessing.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, f"output{rank}") for rank in range(RANKS.get(name, 2))]
        with patch.dict(os.environ, OMP_NUM_THREADS="1"):
            ranks = mp.start_processes(
                start_rank, (name, folder, wrong), len(outputs), join=False, start_method=START
            )
        try:
            while not all(output.exists() for output in outputs):
                ranks.join(timeout=0.02)  # raises if one has failed
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        lines = ["; ".join(output.read_text().splitlines()) for output in outputs]
    if len({*lines}) == 1:
        return lines[0] if len(lines) == 1 else f"every rank: {lines[0]}"
    return " | ".join(f"rank {rank}: {line}" for rank, line in enumerate(lines) if line)


def run(name: str) -> str:
    """Both outputs of a program, a line each; one line of a program that is neither."""
    if "wrong" not in inspect.signature(globals()[name]).parameters:
        return f"prints: {run_once(name)}"
    return f"wrong: {run_once(name, True)}\nright: {run_once(name, False)}"


def sections(page: str) -> dict[str, str]:
    """The entries of the page, each by the name of its program, which only its source shows."""
    entries = re.split(r"\n(?=##+ )", page)
    names = [re.search(r"(?:^```diff |Program:\s`)(\w+)", entry, re.M) for entry in entries]
    return {name[1]: entry for name, entry in zip(names, entries, strict=True) if name}


def update() -> None:
    page = PAGE.read_text()
    for name, entry in sections(page).items():
        new = entry
        for line in run(name).splitlines():
            label, _, text = line.partition(": ")
            quoted = f"- {label}: `{text}`"
            new = re.sub(rf"^- {label}: .*", lambda _, quoted=quoted: quoted, new, flags=re.M)
        page = page.replace(entry, new)
    PAGE.write_text(page)


if __name__ == "__main__":
    names = list(sections(PAGE.read_text()))
    if sys.argv[1:] == ["--update"]:
        update()
    elif unknown := [name for name in sys.argv[1:] if name not in names]:
        sys.exit(f"error: no program is called {unknown[0]}: choose one of {', '.join(names)}")
    elif sys.argv[1:]:
        print(*(run(name) for name in sys.argv[1:]), sep="\n")
    else:
        print(*names, sep="\n")
