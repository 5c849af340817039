"""Right programs do under the doctor what they do without it: status, printed lines, files.

The programs of programs.txt: test_checks.py.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from conftest import PACKAGE
from test_checks import HERE, judged

HEAD = """
import os, random, shutil, sys, hashlib
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils import data
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs, targets = torch.randn(200, 8), torch.randint(0, 2, (200,))
torch.manual_seed(100 + rank); random.seed(rank)
def say(*words):  # one write for a line, which those of other ranks do not mix with
    sys.stdout.write(f"{rank}: {' '.join(map(str, words))}\\n"); sys.stdout.flush()
def weights(model):
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return hashlib.md5(flat.numpy().tobytes()).hexdigest()
"""
PROGRAMS = {
    "snapshots": """
# workers, dropout, a schedule
class Noisy(data.Dataset):
    calls = 0
    def __len__(self): return 200
    def __getitem__(self, i):
        Noisy.calls += 1
        return inputs[i] + 0.1 * torch.randn(8) + 0.1 * random.random(), targets[i]
class Reversed(data.DistributedSampler):
    starts = 0
    def __iter__(self):
        Reversed.starts += 1
        return iter([*super().__iter__()][::-1])
model = DDP(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.BatchNorm1d(16), nn.Linear(16, 2)))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=35)
for workers in (0, 2):
    sampler = Reversed(Noisy())
    loader = data.DataLoader(Noisy(), 16, sampler=sampler, num_workers=workers)
    for epoch in range(3 if workers == 0 else 2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
        say(epoch, loss.item(), optimizer.param_groups[0]["lr"], torch.rand(1).item())
        if rank == 0:
            os.makedirs(f"runs/checkpoint-{1000 + epoch}", exist_ok=True)
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, f"runs/checkpoint-{1000 + epoch}/model.pt")
            found = sorted(os.listdir("runs"))
            if len(found) > 2:
                shutil.rmtree(f"runs/{min(found, key=lambda n: int(n.split('-')[1]))}")
            with open("last.ckpt", "wb") as file: torch.save(state, file)
            torch.save(state, "best.tmp"); os.replace("best.tmp", "best.ckpt")
            say(sorted(os.listdir("runs")), sorted(os.listdir(".")), os.path.getsize("last.ckpt"))
say(Noisy.calls, Reversed.starts, weights(model), random.random())
""",
    "stream": """
# a stream, and parts that are not always used
class Stream(data.IterableDataset):
    def __iter__(self):
        for i in torch.randperm(200)[rank::world].tolist():
            yield inputs[i], targets[i]
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.n = nn.Linear(8, 2), nn.Linear(8, 2), 0
    def forward(self, x):
        self.n += 1
        return self.a(x) if self.n % 3 else self.b(x)
torch.manual_seed(7)
loader = data.DataLoader(Stream(), 10)
model = DDP(Experts(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(4):
    count = 0
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        count += len(x)
        if epoch == 1 and i == 5: break
    say(epoch, count, model.module.n, weights(model))
iterator = iter(loader)
say(type(iterator).__name__, isinstance(iterator, data.dataloader._BaseDataLoaderIter))
""",
    "join": """
# Join, a hook, new DDPs, a static graph, accumulation
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
import contextlib, gc, weakref
own = slice(90, 200) if rank else slice(90)
loader = data.DataLoader(data.TensorDataset(inputs[own], targets[own]), 10, shuffle=True)
plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
model = DDP(plain)
model.register_comm_hook(None, default_hooks.allreduce_hook)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
with Join([model]):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
say(weights(model))
plain[0].requires_grad_(False)
old = weakref.ref(model)
del model
gc.collect()
say("freed", old() is None)
loader = data.DataLoader(data.TensorDataset(inputs[rank::2], targets[rank::2]), 10)
optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], 0.1)
for static in (True, False):
    model = DDP(plain, static_graph=static)
    for i, (x, y) in enumerate(loader):
        whole = static or i % 2 == 1
        with contextlib.nullcontext() if whole else model.no_sync():
            (nn.functional.cross_entropy(model(x), y) / (2 - static)).backward()
        if whole:
            optimizer.step(); optimizer.zero_grad()
    say(static, weights(model))
refs = [weakref.ref(o) for o in (model, loader, loader.dataset, optimizer)]
del model, loader, optimizer
gc.collect()
say("freed", [ref() is None for ref in refs])
sys.exit(3 if rank == 0 else 0)
""",
}


def files(work: Path) -> dict[str, bytes]:
    return {str(p.relative_to(work)): p.read_bytes() for p in work.rglob("*") if p.is_file()}


def test_all_is_as_without_the_doctor(tmp_path: Path) -> None:
    """By its command, with old files that the program replaces."""
    results = {}
    for doctor in (False, True):
        work = tmp_path / str(doctor)
        (work / "runs" / "checkpoint-500").mkdir(parents=True)
        (work / "runs" / "checkpoint-500" / "model.pt").write_text("old")
        (work / "last.ckpt").write_text("old weights")
        (work / "train.py").write_text(HEAD + PROGRAMS["snapshots"])
        before = files(work)
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
        if doctor:
            command = [str(PACKAGE), "torchrun", *command[2:]]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *command],
            cwd=work,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
        lines = sorted(line for line in done.stdout.splitlines() if re.match(r"\d: ", line))
        after = files(work)
        results[doctor] = lines, {n: c for n, c in after.items() if n not in before}
        if doctor:
            assert {n: after.get(n) for n in before} == before
            assert "\n0 found" in done.stdout, done.stdout
        else:
            assert lines, done.stderr
    assert results[True] == results[False]


def test_more_is_as_without_the_doctor(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.py" for name in ("stream", "join")]
    for path in paths:
        path.write_text(HEAD + PROGRAMS[path.stem])
    command = [sys.executable, HERE / "record.py", "--to", tmp_path, *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and done.stdout.startswith("stream [0, 0]\njoin [3, 0]\n"), done
    for path in paths:
        lines = judged(path.with_suffix(".tar.xz"), path.with_suffix(""))
        assert not [line for line in lines if line.label == "FOUND"], lines
