"""tools/doctor.py finds each kind of mistake in a program that makes it, and none without it."""

import os
import runpy
import socket
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from helpers.jobs import ROOT
from helpers.ranks import start_server

from tools import doctor

RIGHT = (ROOT / "docs" / "your_loop.py").read_text()
LOADER = "DataLoader(train_set, batch_size=64 // world_size, sampler=sampler)"
LOSS = "loss = F.cross_entropy(model(inputs), targets)\n"
BACKWARD, STEP = "            loss.backward()\n", "            optimizer.step()\n"
WRAP, SPLIT = "    model = DDP(model)", "make_data(1000, seed=1), make_data(303, seed=2)"
SAVE, RENAME = "        if rank == 0:\n", '            os.replace("snapshot.pt.tmp", "snapshot.pt")'
DROPOUT = ("nn.ReLU()", "nn.Dropout(0.5)")
NORM = ("nn.ReLU()", "nn.BatchNorm1d(64)")
SEEDED = (WRAP, f"    torch.manual_seed(rank)\n{WRAP}")
LOOP = RIGHT[RIGHT.index("        for inputs, targets in") : RIGHT.index("        model.eval()")]
ACCUMULATED = """        for i, (inputs, targets) in enumerate(train_loader):
            last = (i + 1) % 4 == 0
            with contextlib.nullcontext() if last else model.no_sync():
                (F.cross_entropy(model(inputs), targets) / 4).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
"""
ACCUMULATE = [(LOOP, ACCUMULATED), ("import os\n", "import contextlib\nimport os\n")]


def one_rank(rank: int, folder: str, processes: int, env: dict) -> None:
    os.chdir(folder)
    os.environ.update(env, RANK=str(rank), LOCAL_RANK=str(rank))
    output = os.open(f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    sys.path[:0] = [str(ROOT / "tools")]
    import doctor_watch

    try:
        runpy.run_path("train.py", run_name="__main__")
    except Exception as error:
        doctor_watch.crashed(error)
        raise


def examine(folder: Path, program: str, processes: int = 2) -> str:
    """The doctor's lines about a program, whose ranks are forks, which saves most of the time."""
    (folder / "train.py").write_text(program)
    start_server()
    with socket.socket() as held, tempfile.TemporaryDirectory() as notes:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("localhost", 0))
        env = {"MASTER_ADDR": "localhost", "MASTER_PORT": held.getsockname()[1], "DOCTOR_KEEP": ""}
        env |= {"WORLD_SIZE": processes, "OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "lo"}
        env |= {"DOCTOR_FOLDER": notes, "DOCTOR_STEPS": 8, "DOCTOR_PATIENCE": 5}
        env = {name: str(value) for name, value in {**env, "DOCTOR_START": time.time()}.items()}
        given, status = (str(folder), processes, env), 0
        ranks = mp.start_processes(one_rank, given, processes, False, start_method="forkserver")
        try:
            while not ranks.join(1):
                doctor.end_stuck(Path(notes))
        except (mp.ProcessRaisedException, mp.ProcessExitedException):
            status = 1
        job = doctor.Job(Path(notes), status)
        return "\n".join(str(found) for check in doctor.CHECKS for found in check(job))


def changed(*changes: tuple[str, str]) -> str:
    program = RIGHT
    for old, new in changes:
        assert old in program, old
        program = program.replace(old, new)
    return program


# Each group is one program with mistakes that do not hide each other: changes, and what is found.
GROUPS = {
    "epochs and files": (
        [
            ("sampler.set_epoch(epoch)", "next(iter(train_loader))"),
            (
                "val_shard = Subset(val_set, range(rank, len(val_set), world_size))",
                "val_shard = val_set",
            ),
            (
                "batch_size=100)",
                "batch_size=100, sampler=DistributedSampler(val_set, shuffle=False))",
            ),
            (SAVE, "        if True:\n"),
            (RENAME, "            pass"),
            ("model.module.state_dict()", "model.state_dict()"),
            (', "optimizer": optimizer.state_dict()', ""),
        ],
        [
            "FOUND train.py:28: two epochs have the same order of 500 samples: call",
            "NOTE train.py:28: the loader is started 6 times for 3 epochs",
            "FOUND train.py:30: DistributedSampler repeats 1 samples, which count twice",
            "FOUND train.py:61: 2 ranks write snapshot.pt.tmp: let rank 0 save",
            "NOTE train.py:61: snapshot.pt.tmp has names like module.0.bias",
            "NOTE train.py:61: no snapshot has the optimizer's state",
        ],
    ),
    "shares and random numbers": (
        [
            (LOADER, LOADER.replace("sampler=sampler", "shuffle=True")),
            ("batch_size=100)", "batch_size=100, drop_last=True)"),
            DROPOUT,
        ],
        [
            "FOUND train.py:28: an epoch has 1000 of 1000 samples on more than one rank",
            "FOUND train.py:30: the evaluation leaves out 103 of 303 samples",
            "ranks 0 and 1 draw the same random numbers from torch, for dropout",
        ],
    ),
    "split": (
        [
            (SPLIT, "torch.utils.data.random_split(make_data(1303, 1), [1000, 303])"),
            ("manual_seed(42)", "manual_seed(rank)"),
            ("lr=0.1", "lr=0.1 * (1 + rank)"),
            NORM,
            (LOSS, LOSS.replace("targets)", "targets, torch.tensor([1.0, 4.0]))")),
        ],
        [
            "FOUND train.py:28: the ranks have different subsets",
            "samples of the evaluation are trained on by another rank",
            "FOUND train.py:30: rank 1 evaluates with other buffers (2, first 1.running_mean)",
            "in step 0, lr is 0.1 on rank 0 and 0.2 on rank 1",
            "FOUND train.py:47: the loss is divided by",
        ],
    ),
    "sharded twice": (
        [
            (
                "    sampler =",
                "    train_set = Subset(train_set, range(rank, 1000, 2))\n    sampler =",
            ),
            ("            optimizer.zero_grad()\n", ""),
            DROPOUT,
            ("        model.train()\n", ""),
        ],
        [
            "FOUND train.py:29: the data are sharded twice: each rank has 500 samples of its own",
            "11 of 12 steps add to the gradients of the step before",
            "FOUND train.py:49: step 8 is taken in eval mode",
            "draw the same random numbers from torch",
        ],
    ),
    "other data": (
        [
            ("make_data(1000, seed=1)", "make_data(1000, seed=rank)"),
            ("    val_shard =", "    val_set.classes = [rank]\n    val_shard ="),
            ("import os\n", "import numpy\nimport os\n"),
            (BACKWARD, f"            numpy.random.rand()\n{BACKWARD}"),
            ("manual_seed(42)", "manual_seed(42)\n    numpy.random.seed(1)"),
            (f"{LOSS}", "loss = F.cross_entropy(model.module(inputs), targets)\n"),
        ],
        [
            "FOUND train.py:30: the samples 0, n/2 and n-1 are others on rank 1: targets",
            "the ranks number the classes differently",
            "draw the same random numbers from numpy",
            "of ranks 0 and 1 differ, because forward() did not go through DDP",
        ],
    ),
    "accumulation": (
        [
            *ACCUMULATE,
            ("(i + 1) % 4 == 0", "i % 4 == 0"),
            ("targets) / 4)", "targets))"),
            ("contextlib.nullcontext() if last else model.no_sync()", "contextlib.nullcontext()"),
        ],
        [
            "FOUND train.py:51: the first step has 1 micro-batches, the others have 4",
            "the losses of 4 micro-batches are added, so gradients are 4 times too large",
            "there are 4 all-reduces in each step",
        ],
    ),
    "unequal": (
        [
            (LOADER, "DataLoader(Subset(train_set, range(rank * 660, 660 + rank * 340)), 32)"),
            ("sampler.set_epoch(epoch)", "pass"),
        ],
        [
            "FOUND train.py:28: the ranks have [21, 11] batches",
            "; the ranks' last acts are: rank 0: takes a batch",
        ],
    ),
    "no_sync": (
        [(LOSS, f"{LOSS}            model.require_backward_grad_sync = False\n")],
        ["the gradients of ranks 0 and 1 differ, because all of the step was in no_sync()"],
    ),
    "unfrozen": (
        [(WRAP, f"    model[0].requires_grad_(False)\n{WRAP}.requires_grad_(True)")],
        ["(2 of 4, first 0.weight: norm", "because it was frozen when DDP was made"],
    ),
    "outside DDP": (
        [
            (WRAP, f"    scale = nn.Parameter(torch.ones(()))\n{WRAP}"),
            (WRAP, f"    optimizer.add_param_group({{'params': [scale]}})\n{WRAP}"),
            ("(model(inputs)", "(model(inputs) * scale"),
        ],
        [
            "(1 of 5, first a parameter of shape [] (number 4): norm",
            "DDP does not have the parameter",
        ],
    ),
    "changed gradients": (
        [
            (
                STEP,
                f"            if rank:\n                model.module[0].bias.grad.zero_()\n{STEP}",
            )
        ],
        ["a rank changes them after the all-reduce", "(1 of 4, first 0.bias: norm"],
    ),
    "changed at first": (
        [("    for epoch in", "    model.module[0].bias.data += rank\n    for epoch in")],
        ["the weights of ranks 0 and 1 differ before the first step (1 of 4, first 0.bias: norm"],
    ),
    "changed later": (
        [(STEP, f"{STEP}            model.module[0].bias.data += rank\n")],
        ["step 1 gives ranks 0 and 1 other weights, with the same gradients (1 of 4, first 0.bias"],
    ),
    "other parameters": (
        [("model.parameters(), lr", "[p.detach().clone() for p in model.parameters()], lr")],
        [
            "12 steps change no weight, because the optimizer's",
            "4 parameters have gradients and are in",
        ],
    ),
    "one class": (
        [("nn.Linear(64, 2)", "nn.Linear(64, 1)"), ("> 0)", "> 99)")],
        ["12 steps change no weight, because all gradients are 0"],
    ),
    "dropped samples": (
        [
            ("sampler=sampler)", "sampler=sampler, collate_fn=collate)"),
            (
                "def main():",
                "def collate(batch):\n    batch = [s for s in batch if s[0][0] < 1.5]\n",
            ),
            (
                "s[0][0] < 1.5]\n",
                "s[0][0] < 1.5]\n    return default_collate(batch)\n\n\ndef main():",
            ),
            ("Subset, TensorDataset", "Subset, TensorDataset, default_collate"),
        ],
        ["the loss is divided by 28 on rank 0 and by 30 on rank 1"],
    ),
    "skipped batch": (
        [
            (
                BACKWARD,
                f"            if rank and inputs[0, 0] > 1:\n                continue\n{BACKWARD}",
            )
        ],
        ["FOUND train.py:52: rank 1 takes no step for batch 14, but another rank does"],
    ),
    "one rank waits": (
        [
            (
                "        dist.all_reduce(correct)",
                "        if rank == 0:\n            dist.all_reduce(correct)",
            )
        ],
        ["last acts are: rank 0: all_reduce of [] at train.py:58 after 8 steps; rank 1: "],
    ),
    "an error": (
        [(STEP, f"            assert epoch < 1 or rank == 0, 'mine'\n{STEP}")],
        ["FOUND train.py:50: rank 1 ends after 8 steps with AssertionError: mine"],
    ),
}
WELL = {
    "your_loop.py": [],
    "dropout": [DROPOUT, SEEDED],
    "accumulation": ACCUMULATE,
    "split": [(SPLIT, "torch.utils.data.random_split(make_data(1303, 1), [1000, 303])")],
    "BatchNorm": [
        NORM,
        (
            "        model.eval()\n",
            "        model.eval()\n        [dist.broadcast(b, 0) for b in model.buffers()]\n",
        ),
    ],
}


def slow(groups: dict, quick: tuple) -> list:
    mark = pytest.mark.slow("a job of two ranks for each kind")
    return [pytest.param(name, marks=() if name in quick else mark, id=name) for name in groups]


@pytest.mark.parametrize("group", slow(GROUPS, ("epochs and files", "accumulation", "no_sync")))
def test_each_mistake_is_found(tmp_path, group):
    changes, expected = GROUPS[group]
    lines = examine(tmp_path, changed(*changes))
    for line in expected:
        assert line in lines, lines
    if group not in ("unequal", "skipped batch"):  # which end with an error, too
        assert len(lines.splitlines()) == len(expected) or len(expected) == 2, lines


@pytest.mark.parametrize("program", slow(WELL, ("your_loop.py",)))
def test_nothing_is_found_in_a_program_without_mistakes(tmp_path, program):
    assert examine(tmp_path, changed(*WELL[program])) == ""
