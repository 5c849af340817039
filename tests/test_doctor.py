"""tools/doctor.py finds each kind of mistake in a program that makes it, and none without it."""

import contextlib
import json
import os
import re
import runpy
import socket
import sys
import tempfile
import time
from html import unescape
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from helpers.files import patched
from helpers.jobs import ALONE, ROOT
from helpers.ranks import start_server

from tools import doctor

RIGHT = (ROOT / "docs" / "your_loop.py").read_text()

# Programs: your_loop.py with some changes (A => B replaces a text, A >> B adds a line after that of
# A, A << B before it), and what the doctor says about each. Mistakes in one do not hide each other.
PROGRAMS = """
## well done: as it is
## well done: accumulation
@accumulate
## well done: ranks evaluate unequal numbers of batches
batch_size=100 => batch_size=151
## well done: a random split, dropout and BatchNorm
make_data(1000, seed=1), make_data(303, seed=2) => random_split(make_data(1303, 1), [1000, 303])
nn.ReLU() => nn.BatchNorm1d(64), nn.Dropout(0.5)
## well done: next() in place of a loop
for inputs, targets in train_loader: << batches = iter(train_loader)
in train_loader: => in (next(batches) for _ in range(len(train_loader))):
## well done: two models, of which one has just been evaluated
model = DDP(model) >> spare = torch.optim.SGD(other.parameters(), lr=0.1)
model = DDP(model) >> other = DDP(nn.Sequential(nn.Linear(20, 2), nn.Dropout(0.5))).eval()
## an evaluation that asks for no batch after the last
import os => import itertools, os
make_data(1000, seed=1), make_data(303, seed=2) => random_split(make_data(1303, 1), [1000, 303])
batch_size=100 => batch_size=100, sampler=DistributedSampler(val_set, shuffle=False)
DataLoader(val_shard => DataLoader(val_set
in val_loader => in itertools.islice(val_loader, len(val_loader))
FOUND train.py:29: DistributedSampler counts 1 of 303 samples twice
## an average
nn.ReLU() => nn.BatchNorm1d(64)
model = DDP(model) >> ema = torch.optim.swa_utils.AveragedModel(model.module)
optimizer.step() >> ema.update_parameters(model.module)
(model.module(inputs) => (ema(inputs)
, "optimizer": => , "ema": ema.state_dict(), "optimizer":
FOUND train.py:29: rank 1 evaluates with other weights or buffers (2, first module.1.running_mean)
## an average of rank 0
model = DDP(model) >> ema = torch.optim.swa_utils.AveragedModel(model.module)
optimizer.step() >> if rank == 0: ema.update_parameters(model.module)
(model.module(inputs) => (ema(inputs)
FOUND train.py:29: rank 1 evaluates with other weights or buffers (5, first module.0.weight)
## well done: a batch sampler
batch_size=64 // world_size, sampler=sampler => batch_sampler=BatchSampler(sampler, 32, False)
## a sampler of one's own
sampler=sampler => sampler=Own(range(1000))
train_loader = << Own = type("Own", (SequentialSampler,), {"__iter__": lambda own: iter(draw())})
train_loader = << draw = lambda: torch.randperm(1000)[rank::2].tolist()
train_loader = << torch.manual_seed(rank)
of the first samples are on more than one rank: give each its share, unless it is meant
NOTE train.py:30: only the first batches are compared, because Own is not torch's
## a sampler of one's own, without set_epoch
sampler = DistributedSampler( => sampler = Own(
sampler = << Own = type("Own", (DistributedSampler,), {"__iter__": lambda own: iter([*old(own)])})
sampler = << old = DistributedSampler.__iter__
sampler.set_epoch(epoch) => pass
FOUND train.py:29: two epochs begin with the same batches: call sampler.set_epoch(epoch) in each
NOTE train.py:29: only the first batches are compared, because Own is not torch's
## a list, a generator and two optimizers
sampler=sampler => sampler=[*sampler]
train_loader = << train_set.rng = random.Random(1)
loss.backward() << train_set.rng.random()
import os => import os, random
torch.optim.SGD(model.parameters() => torch.optim.SGD(model[0].parameters()
model = DDP(model) << head = torch.optim.SGD(model[2].parameters(), lr=0.1)
optimizer.step() >> head.step()
NOTE train.py:28: two epochs have the same order of 500 samples
steps add to the gradients of the step before
ranks 0 and 1 draw the same random numbers from TensorDataset.rng
## the old optimizer, and an idle layer
model = DDP(model) << model.register_parameter("idle", nn.Parameter(torch.ones(2)))
model = DDP(model) >> old, optimizer = optimizer, torch.optim.AdamW(model.parameters())
DDP(model) => DDP(model, find_unused_parameters=True)
optimizer.state_dict() => old.state_dict()
NOTE train.py:52: no gradient reaches 1 parameter in
NOTE train.py:65: no snapshot has the optimizer's state
## epochs and files
sampler.set_epoch(epoch) => next(iter(train_loader))
batch_size=100 => batch_size=100, sampler=DistributedSampler(val_set, shuffle=False)
DataLoader(val_shard => DataLoader(val_set
if rank == 0: => if True:
os.replace( => print(
model.module.state_dict() => model.state_dict()
, "optimizer": optimizer.state_dict() => , "nothing": 0
FOUND train.py:27: two epochs have the same order of 500 samples
NOTE train.py:27: the loader is started 6 times for 3 epochs
FOUND train.py:29: DistributedSampler counts 1 of 303 samples twice
FOUND train.py:63: 2 ranks write snapshot.pt.tmp: let rank 0 save
NOTE train.py:63: snapshot.pt.tmp has names like module.0.bias
NOTE train.py:63: no snapshot has the optimizer's state
## shares and random numbers
torch.manual_seed(1000 * epoch + rank) => pass
sampler=sampler => shuffle=True
batch_size=100 => batch_size=100, drop_last=True
nn.ReLU() => nn.Dropout(0.5)
FOUND train.py:27: an epoch has 1000 of 1000 samples on more than one rank (RandomSampler)
FOUND train.py:29: the evaluation leaves out 103 of 303 samples
FOUND train.py:50: ranks 0 and 1 draw the same random numbers from torch
## random numbers that rank 0 alone draws, too
torch.manual_seed(1000 * epoch + rank) => pass
nn.ReLU() => nn.Dropout(0.5)
loss.backward() << if rank == 0: torch.rand(1)
FOUND train.py:51: ranks 0 and 1 draw the same random numbers from torch
## split
dist.broadcast(buffer, src=0) => pass
make_data(1000, seed=1), make_data(303, seed=2) => random_split(make_data(1303, 1), [1000, 303])
manual_seed(42) => manual_seed(rank)
lr=0.1 => lr=0.1 * (1 + rank)
nn.ReLU() => nn.BatchNorm1d(64)
model(inputs), targets => model(inputs), targets, torch.tensor([1.0, 4.0])
FOUND train.py:27: the ranks have different subsets, of which a DistributedSampler takes shares
samples of the evaluation are trained on by another rank
FOUND train.py:29: rank 1 evaluates with other weights or buffers (2, first 1.running_mean)
FOUND train.py:50: in step 0, lr is 0.1 on rank 0 and 0.2 on rank 1
FOUND train.py:47: the loss is divided by
## sharded twice
torch.manual_seed(1000 * epoch + rank) => pass
sampler = DistributedSampler << train_set = Subset(train_set, range(rank, 1000, 2))
optimizer.zero_grad() => pass
nn.ReLU() => nn.Dropout(0.5)
model.train() => pass
FOUND train.py:28: the data are sharded twice: each rank has 500 samples of its own
FOUND train.py:51: 11 of 12 steps add to the gradients of the step before
FOUND train.py:51: step 8 is taken in eval mode
FOUND train.py:51: ranks 0 and 1 draw the same random numbers from torch
## other data
make_data(1000, seed=1) => make_data(1000, seed=rank)
val_shard = << val_set.classes = [rank]
import os => import os, numpy
manual_seed(42) >> numpy.random.seed(1)
loss.backward() << numpy.random.rand()
model(inputs), targets => model.module(inputs), targets
FOUND train.py:28: the samples 0, n/2 and n-1 are others on rank 1 (targets
FOUND train.py:31: the ranks number the classes differently
FOUND train.py:53: ranks 0 and 1 draw the same random numbers from numpy
the gradients of ranks 0 and 1 differ, because forward() did not go through DDP
## other data, with augmentation, and a loss that is a sum
make_data(1000, seed=1) => Noisy(*make_data(1000, seed=rank).tensors)
def main << def noise(own, i): return own.tensors[0][i] + torch.randn(20), own.tensors[1][i]
def main << Noisy = type("Noisy", (TensorDataset,), {"__getitem__": noise})
(model(inputs), targets) => (model(inputs), targets, reduction="sum") / 32
FOUND train.py:29: the samples 0, n/2 and n-1 are others on rank 1
NOTE train.py:49: what this loss is divided by is not judged
## accumulation
@accumulate
(i + 1) % 4 == 0 => i % 4 == 0
targets) / 4) => targets))
contextlib.nullcontext() if last else model.no_sync() => contextlib.nullcontext()
FOUND train.py:50: the first step comes after 1 of 4 micro-batches
FOUND train.py:50: the losses of 4 micro-batches are added, so gradients are 4 times too large
FOUND train.py:50: there are 4 all-reduces in each step
## unequal
DataLoader(train_set, => DataLoader(Subset(train_set, range(rank * 660, 660 + rank * 340)),
batch_size=64 // world_size, sampler=sampler => batch_size=32
sampler.set_epoch(epoch) => pass
FOUND train.py:27: the ranks have [21, 11] batches
NOTE train.py:27: two epochs have the same order of 660 samples: shuffle them in each epoch
the ranks' last acts are: rank 0:
## two backward passes
loss.backward() => loss.backward(retain_graph=True); (loss / 2).backward()
because backward() runs twice after a forward(), or a checkpoint is reentrant (4 of 4
## no_sync
model(inputs), targets >> model.require_backward_grad_sync = False
in step 1, the gradients of ranks 0 and 1 differ, because all of the step was in no_sync()
## unfrozen
model = DDP(model) << model[0].requires_grad_(False)
model = DDP(model) >> model.requires_grad_(True)
because 0.weight was frozen when DDP was made (2 of 4, first 0.weight: norm
## outside DDP
model = DDP(model) << scale = nn.Parameter(torch.ones(()))
model = DDP(model) << optimizer.add_param_group({"params": [scale]})
(model(inputs) => (model(inputs) * scale
because DDP does not have the parameter (1 of 5, first a parameter of shape [] (number 4): norm
## changed gradients
optimizer.step() << model.module[0].bias.grad.mul_(1 - rank)
because a rank changes them after the all-reduce (1 of 4, first 0.bias
## changed at first
model = DDP(model) >> model.module[0].bias.data += rank
the weights of ranks 0 and 1 differ before the first step (1 of 4, first 0.bias: norm
## changed later
optimizer.step() >> model.module[0].bias.data += rank
step 1 gives ranks 0 and 1 other weights, with the same gradients (1 of 4, first 0.bias: norm
## other parameters
model.parameters(), lr => [p.detach().clone() for p in model.parameters()], lr
12 steps change no weight, because the optimizer's parameters have no gradient
no optimizer has 4 parameters with a gradient (first 0.bias)
## one class
nn.Linear(64, 2) => nn.Linear(64, 1)
> 0) => > 99)
12 steps change no weight, because all gradients are 0
## batches of one's own, and an evaluation
torch.manual_seed(1000 * epoch + rank) => pass
batch_size=64 // world_size, sampler=sampler => batch_sampler=batches
train_loader = << firsts = range(500 * rank, 500 * rank + 480, 30)
train_loader = << batches = Batches(range(i, i + 20 + 5 * rank) for i in firsts)
def main << Batches = type("Batches", (list,), {})
def main << def noise(own, i): return own.tensors[0][i] + torch.randn(20), own.tensors[1][i]
def main << Noisy = type("Noisy", (TensorDataset,), {"__getitem__": noise})
make_data(303, seed=2) => Noisy(*make_data(303, seed=2).tensors)
nn.ReLU() => nn.Dropout(0.5)
dist.all_reduce(correct) => pass
NOTE train.py:32: two epochs begin with the same batches: shuffle them in each epoch
NOTE train.py:32: only the first batches are compared, because Batches is not torch's
FOUND train.py:55: ranks 0 and 1 draw the same random numbers from torch
FOUND train.py:52: the loss is divided by 20 on rank 0 and by 25 on rank 1
NOTE train.py:34: samples of the evaluation are random (from torch)
NOTE train.py:34: each rank evaluates a share of 303 samples, and keeps its result
## dropped samples
sampler=sampler => sampler=sampler, collate_fn=some
train_loader = << some = lambda batch: default_collate([s for s in batch if s[0][0] < 1.5])
the loss is divided by 28 on rank 0 and by 30 on rank 1
## skipped batch
loss.backward() << if rank and inputs[0, 0] > 1: continue
FOUND train.py:51: rank 1 takes no step for batch 12, but another rank does
## one rank waits
dist.all_reduce(correct) => correct if rank else dist.all_reduce(correct)
the ranks' last acts are: rank 0: all_reduce of [] at train.py:59 after 8 steps; rank 1:
## a rank sleeps
optimizer.step() << __import__("time").sleep(rank * epoch * 999)
FOUND train.py:49: no rank goes on: rank 0 stands at train.py:49 loss.backward() <
## well done: evaluation through DDP, which sends buffers before the first batch alone
nn.ReLU() => nn.BatchNorm1d(64)
batch_size=100 => batch_size=151
model.module(inputs) => model(inputs)
## evaluation sums up each batch
batch_size=100 => batch_size=151
model.eval() >> part = torch.zeros((), dtype=torch.long)
correct += >> dist.all_reduce(part)
FOUND train.py:29: the ranks evaluate [2, 1] batches, and communicate in each
the ranks' last acts are
## an error in a call that is watched
optimizer.step() << if epoch and rank: os.remove("missing.pt")
the error is FileNotFoundError: [Errno 2]
## a refusal
import os => import os, sys
optimizer.step() << if epoch: sys.exit("error: mine")
the error is mine: see what it prints
## an error
optimizer.step() << assert epoch < 1 or rank == 0, "mine"
the error is AssertionError: mine: see what it prints
"""
PROGRAMS = dict(part.partition("\n")[::2] for part in PROGRAMS.split("## ")[1:])
MORE = "default_collate, random_split, BatchSampler, SequentialSampler"
QUICK = ("well done: as it is", "epochs and files", "accumulation", "no_sync")
ACCUMULATE = """        for i, (inputs, targets) in enumerate(train_loader):
            last = (i + 1) % 4 == 0
            with contextlib.nullcontext() if last else model.no_sync():
                (F.cross_entropy(model(inputs), targets) / 4).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
"""


def changed(lines: list[str]) -> str:
    program = RIGHT.replace("Subset, Tensor", f"Subset, {MORE}, Tensor")
    for line in lines:
        if line == "@accumulate":
            start, end = map(program.index, ("        for inputs", "        model.eval"))
            program = "import contextlib" + program[9:start] + ACCUMULATE + program[end:]
            program = program.replace("contextlib\n", "contextlib, os\n", 1)
            continue
        old, sign, new = re.split(" (=>|<<|>>) ", line)
        assert old in program, old
        whole, indent = re.search(rf"^( *).*{re.escape(old)}.*\n", program + "\n", re.M).group(0, 1)
        added = {"<<": f"{indent}{new}\n{whole}", ">>": f"{whole}{indent}{new}\n"}
        program = program.replace(*((old, new) if sign == "=>" else (whole, added[sign])))
    return program


def one_rank(rank: int, folder: str, env: dict, arguments: tuple) -> None:
    os.chdir(folder)
    sys.argv = ["train.py", *arguments]
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
    output = os.open(f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
    import doctor_watch

    try:
        runpy.run_path("train.py", run_name="__main__")
    except Exception as error:
        doctor_watch.crashed(error)
        raise


def examine(folder: Path, program: str, *arguments: str, patience: int = 30) -> str:
    """The doctor's lines about a program, whose ranks are forks, which saves most of the time."""
    (folder / "train.py").write_text(program)
    start_server()
    with socket.socket() as held, tempfile.TemporaryDirectory() as notes, contextlib.chdir(folder):
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("localhost", 0))
        env = {"MASTER_ADDR": "localhost", "MASTER_PORT": held.getsockname()[1], "DOCTOR_KEEP": ""}
        env |= {"WORLD_SIZE": 2, "OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "lo"}
        env |= {"DOCTOR_FOLDER": notes, "DOCTOR_STEPS": 8, "DOCTOR_PATIENCE": patience}
        env = {name: str(value) for name, value in {**env, "DOCTOR_START": time.time()}.items()}
        given, status = (str(folder), env, arguments), 0
        ranks = mp.start_processes(one_rank, given, 2, False, start_method="forkserver")
        try:
            while not ranks.join(1):
                doctor.end_stuck(Path(notes), patience)
        except (mp.ProcessRaisedException, mp.ProcessExitedException):
            status = 1
        job = doctor.Job(Path(notes), status)
        return "\n".join(map(str, doctor.judge(job)))


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow("two ranks")) for n in PROGRAMS],
)
def test_each_mistake_is_found_and_nothing_else(tmp_path, name):
    lines = PROGRAMS[name].splitlines()
    changes = [line for line in lines if re.search(" (=>|<<|>>) |^@", line)]
    expected = [line for line in lines if line not in changes]
    found = examine(tmp_path, changed(changes), patience=5)
    for line in expected:
        assert line in found, found
    own = [line for line in found.splitlines() if "only one epoch was seen" not in line]
    assert len(own) == len(expected), found


PAGE = (ROOT / "docs" / "recipes.md").read_text()
RECIPES = {path.stem: path.read_text() for path in ROOT.glob("recipes/*.diff")}
RECIPES |= dict(re.findall(r"```diff (\w+)\n(.*?)```", PAGE, re.S))
DIGITS = """@@ 480 digits in place of 12,000
 from common.seed import set_seed
+from common.data import make_digits
+
+load_dataset = lambda *_: (make_digits(480, 0), make_digits(90, 1))
"""
ELSEWHERE = ("images", "pretrained", "text", "dicts", "causal", "gpt", "breakpoint")  # need more
OTHERS = {"early": "best early", "test": "best test"}
OPTIONS = {"fp16": ("--amp",), "optimizers": ("--model", "lenet")}  # Muon's matrices are smaller


@pytest.mark.slow("two ranks")
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ELSEWHERE])
def test_nothing_is_found_in_a_recipe(tmp_path, name):
    program = (ROOT / "ddp_torchrun.py").read_text()
    for diff in (*(RECIPES[n] for n in OTHERS.get(name, name).split()), DIGITS):
        program = patched(program, diff)
    options = ("4", "--model", "mlp", "--batch-size", "16", *OPTIONS.get(name, ()))
    assert "FOUND" not in (found := examine(tmp_path, program, *options)), found


@pytest.mark.slow("two ranks")
def test_the_picture_shows_what_the_doctor_says(tmp_path):
    picture = unescape(re.sub("<.*?>", "", (ROOT / "docs" / "doctor.svg").read_text()))
    shown = " ".join(picture.replace("\N{NO-BREAK SPACE}", " ").split())
    found = examine(tmp_path, runpy.run_path(str(ROOT / "docs/programs/doctor.py"))["program"]())
    assert len(found.splitlines()) == 4 == shown.count("FOUND")
    for line in found.splitlines():
        assert line in shown, line


# What is not easily run, as two ranks would note it: kind, facts, other facts of rank 1.
PLACE = {"where": "train.py:1", "key": "loader", "number": 0, "place": "train.py:2", "dataset": 0}
GPU = {"device": "GPU-1", "type": "cuda", "bytes": 8, "batchnorm": 1}
STEPPED = {"optimizer": 0, "counts": [1, 1, 1, 1], "threads": 8, "states": {}, "scale": 1.0}
STEPPED |= dict.fromkeys(("late", "outside", "lost", "idle", "options", "incoming"), ())
STEPPED |= dict.fromkeys(("asleep", "stale", "sharded")) | {"weights": {}, "grads": {}}
LOADED = {"distributed": True, "classes": 0, "targets": 0, "inputs": 0, "workers": 2, "seed": 5}
LOADED |= {"draws": ["torch"], "reseeds": False, "batch": 8, "whole": False}
LOADED |= {"padded": 0, "random": False, "shuffle": False, "sampler": "RandomSampler"}
TRAINED = [("ddp", GPU, {"device": "GPU-2"}), ("end", {"trained": True, "buffers": {}}, {})]
PAIRS = {"count": 4, "plain": True, "pairs": True, "drawn": 4}
NOTED = {
    "ranks 0 and 1 use the same device": [("ddp", GPU, {})],
    "BatchNorm sees the 8 samples of one rank": [("loader", LOADED, {}), *TRAINED],
    "32 threads run on 16 cores": [("before", STEPPED | {"threads": 16}, {})],
    "torch.load() puts tensors on cuda:0": [("load", {"device": "cuda:0"}, {})],
    "8 threads of a process may keep its device waiting": [
        ("ddp", GPU, {"device": "GPU-2"}),
        ("before", STEPPED, {}),
    ],
    "GradScaler's scale is 1.0 on rank 0 and 2.0 on": [("before", STEPPED, {"scale": 2.0})],
    "fully_shard's shards are not compared": [("before", STEPPED | {"sharded": True}, {})],
    "workers of ranks 0 and 1 have the same seed": [("loader", LOADED, {})],
    "each rank compares only its own 4 samples": [("loss", PAIRS, {})],
    "reduce() leaves the sum on one rank": [("collective", {"name": "reduce", "shape": []}, {})],
    "2 processes train alone": [("before", STEPPED | {"threads": 1}, {"scale": 2.0})],
}


@pytest.mark.parametrize("line", NOTED)
def test_what_two_ranks_note(tmp_path, line):
    world = 1 if "alone" in line else 2
    for rank in (0, 1):
        events = [{"kind": "start", "rank": rank, "world": world, "told": 2, "cores": 16}]
        for kind, facts, other in NOTED[line]:
            events.append({"kind": kind, **PLACE, **facts, **(other if rank else {})})
        lines = [json.dumps({"time": 1.0, "step": 0, "here": None, **event}) for event in events]
        (tmp_path / f"{rank}.jsonl").write_text("\n".join(lines))
    job = doctor.Job(tmp_path, 0)
    found = "\n".join(map(str, doctor.judge(job)))
    assert line in found
    assert world > 1 or found.count("FOUND") == 1  # and the two are not compared


def test_where_a_rank_stands_is_a_line_of_the_users_own(tmp_path):
    """Also where one of his folders is called doctor."""
    (tmp_path / "train.py").write_text("first()\nsecond()\n")
    frames = ["/x/torch/nn.py", "/x/tools/doctor_watch.py", tmp_path / "doctor" / "a.py"]
    frames.append(tmp_path / "train.py")
    (tmp_path / "1.stack").write_text("".join(f'  File "{f}", line 2 in main\n' for f in frames))
    assert doctor.stack(tmp_path / "1.stack") == ["a.py:2 ", "train.py:2 second()"]


def test_each_page_that_a_line_names_is_there():
    source = (ROOT / "tools" / "doctor.py").read_text()
    for page, name in (("doctor", "PAGE"), ("pitfalls", "PITFALLS"), ("your_loop", "LOOP")):
        text = (ROOT / "docs" / f"{page}.md").read_text()
        titles = re.findall(r"^#+ (.*)", text, re.M)
        there = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        named = re.findall(rf'{name} \+ "(\S+)"', source)
        if page == "pitfalls":
            named += re.findall(r'page = .*, "(\S+-\S+)"', source)
        assert named and {*named} <= there, {*named} - there


DOCTOR = "python tools/doctor.py"
TORCHRUN = ("torchrun", "--standalone", "--nproc_per_node=2", ROOT / "ddp_torchrun.py")


def test_nothing_of_the_users_is_changed(run, tmp_path):
    """The program prints what it does, and no snapshot is renamed, overwritten or made."""
    (tmp_path / "checkpoint.pt").write_bytes(b"the user's own")
    text = run(DOCTOR, "--json", "found.json", *TORCHRUN, 4, "--log-interval", 1)
    assert re.findall(r"^\[GPU|^\[CPU0\] Epoch 0 \| Batchsize: 32 \| Steps: 188", text, re.M)
    assert "Epoch 1 | Training checkpoint saved at checkpoint.pt" in text
    *_, time_line, last = text.splitlines()
    assert time_line.startswith("TIME a step takes ") and last == "0 found"
    assert json.loads((tmp_path / "found.json").read_text())["found"] == []
    names = {path.name for path in tmp_path.iterdir() if not path.name.startswith("output-")}
    assert names == {"checkpoint.pt", "found.json"}
    assert (tmp_path / "checkpoint.pt").read_bytes() == b"the user's own"


@pytest.mark.slow("each starts a job of its own")
@pytest.mark.parametrize(
    "words",
    [
        ("python", ROOT / "single_gpu.py", 4),
        ("python", ROOT / "data_parallel.py", 4),
        ("python", ROOT / "ddp_spawn.py", 4, "--nproc-per-node", 2),
        ("python", ROOT / "multinode.py", 4, *ALONE[:-1], 2, "--nproc-per-node", 2),
        (*TORCHRUN, 4, "--accumulate", 2, "--amp", "--clip", 1, "--warm-up", 2, "--num-workers", 1),
        (*TORCHRUN, 4, "--model", "resnet18", "--batch-size", 16),
    ],
    ids=str,
)
def test_nothing_is_found_in_the_scripts(run, words):
    text = run(DOCTOR, *words)
    assert text.endswith("\n0 found\n") and "\nTIME a step takes " in text
    alone = "one process has trained, so none was compared" in text
    assert alone == str(words[1]).endswith(("single_gpu.py", "data_parallel.py")), text


def test_commands_that_cannot_be_run(run):
    assert "there is no command mistyped" in run(DOCTOR, "mistyped", status=2)
    text = run(DOCTOR, "python", "-c", "import sys; sys.exit(3)", status=2)
    assert text == "error: it ends with status 3, and no process has trained\n"
