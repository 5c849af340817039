"""mutate.py's list is not stale, and has what must be there. To see its mutants killed, run it."""

import re
from pathlib import Path

import pytest
from mutants import DATA, DDP, ELASTIC, MUTANTS, NODES, PARALLEL, SCRIPTS, SEED, SINGLE, SPAWN
from mutate import ROOT, mutated, runs
from test_options import NUMBERS, OTHERS

RUNS = list(runs([]))
REQUIRED = {
    "no set_epoch": SCRIPTS,
    "no DDP wrap": DDP,
    "sampler not passed": DDP,
    "metrics not all-reduced": DDP,
    "padded evaluation": DDP,
    "optimizer not restored": SCRIPTS,
    "RNG not restored": SCRIPTS,
    "saved in place": SCRIPTS,
    "epoch instead of epoch + 1": SCRIPTS,
    "no_sync on every micro-batch": (ELASTIC, NODES),
    "remainder dropped": (ELASTIC, NODES, DATA),
    "global rank as device index": (ELASTIC, NODES),
    "threads not set": DDP,
    "rank 0 not alone in saving": DDP,
    "wrapped names in the snapshot": (PARALLEL, *DDP),
    "mean of the devices' means": (PARALLEL,),
    "mean of the ranks' means": (SPAWN,),
    "loss not divided in accumulation": (ELASTIC, NODES),
    "scaler not restored": (ELASTIC, NODES),
    "stale snapshot on a restart": (ELASTIC,),
    "ranks given by torchrun": (NODES,),
    "no barrier after the save": DDP,
    "schedule not restored": SCRIPTS,
    "settings not kept": SCRIPTS,
    "snapshots may run code": SCRIPTS,
    "gloo on the network": DDP,
    "NCCL on the network": DDP,
    "a port for the processes of one host": (SPAWN,),
    "stopped is done": SCRIPTS,
    "deaf to signals": (SINGLE, PARALLEL),
    "each rank stops by itself": DDP,
    "rank without the host's number": (NODES,),
    "set_seed without the rank": (SEED,),
}

# README's guarantees, and what breaks them.
GUARANTEES = {
    "Same job, same result.": ("no DDP wrap", "mean of the ranks' means", "weights not seeded"),
    "Every sample once.": ("shards overlap", "padded evaluation", "resumed epoch from its start"),
    "One snapshot format.": (
        "wrapped names in the snapshot",
        "snapshot without every setting",
        "saved in place",
        "not on the disk",
        "snapshots may run code",
        "snapshots may run code in rank 0",
    ),
    "Resume is exact.": ("RNG not restored", "optimizer not restored", "buckets not settled"),
    "Stop requests are obeyed.": (
        "deaf to signals",
        "each rank stops by itself",
        "stopped is done",
        "patience without an end",
        "children left behind",
        "orphans train on",
        "workers end by a signal",
    ),
    "Failures speak.": (
        "no @record",
        "the others' errors hide the first",
        "a rank's own error passes for a lost peer",
        "no range",
        "waiting for the save in silence",
        "waiting for the data in silence",
        "waiting for the others in silence",
        "joining takes any time",
        "no time-out",
    ),
    "Runs anywhere.": (
        "device ignored",
        "DDP on MPS",
        "threads not set",
        "NCCL where there is none",
    ),
    "No fixed ports.": (
        "gloo on the network",
        "NCCL on the network",
        "a port for the processes of one host",
        "a port for a process alone",
    ),
}
# Options whose mutant has a name of its own, and those that do nothing.
NAMES = {"seed": "seed not passed to the sampler", "timeout": "no time-out"}
NAMES |= {"snapshot_path": "saved at another path", "compile": "nothing compiled"}
IDLE = ("unused", "help")


def test_each_breaks_its_files_in_one_place():
    for mutant, file in RUNS:
        code = (ROOT / file).read_text()
        broken = mutated(mutant, code)
        assert broken != code
        compile(broken, file, "exec")


def test_no_run_is_there_twice():
    names = [(mutant.name, file) for mutant, file in RUNS]
    assert len({*names}) == len(names)
    changes = [(file, mutant.old, mutant.new) for mutant, file in RUNS]
    assert len({*changes}) == len(changes)


@pytest.mark.parametrize("name", REQUIRED)
def test_it_breaks_every_script_that_could_have_this_bug(name):
    assert {*REQUIRED[name]} <= {file for mutant, file in RUNS if mutant.name == name}


@pytest.mark.parametrize("name", [name for name in (*NUMBERS, *OTHERS) if name not in IDLE])
def test_each_option_is_ignored_once(name):
    mutant = NAMES.get(name, f"{name} ignored")
    scripts = NUMBERS[name].scripts if name in NUMBERS else ()
    broken = {file for other, file in RUNS if other.name == mutant}
    assert broken and {*scripts} <= broken


def test_each_guarantee_is_broken():
    readme = (ROOT / "README.md").read_text()
    (lines,) = re.findall(r"^## What you can count on$(.*?)^## ", readme, re.M | re.S)
    rows = (ROOT / "docs" / "guarantees.md").read_text()
    assert re.findall(r"^- \*\*(.*?)\*\*", lines, re.M) == [*GUARANTEES]
    assert re.findall(r"^\| \*\*(.*?)\*\*", rows, re.M) == [*GUARANTEES]
    assert {*sum(GUARANTEES.values(), ())} <= {mutant.name for mutant in MUTANTS}


def test_the_tests_that_it_names_exist(request):
    named = {test for mutant in MUTANTS for test in mutant.tests.values()}
    for file in {test.split("::")[0] for test in named}:
        path = Path(__file__).with_name(file)
        tests = pytest.Module.from_parent(request.session, path=path).collect()
        known = {test.nodeid.removeprefix("tests/") for test in tests}
        known |= {test.split("[")[0] for test in known}  # with all its parameters
        assert {test for test in named if test.startswith(f"{file}::")} <= known


def test_files_and_names_choose():
    assert {file for _, file in runs([SPAWN])} == {SPAWN}
    assert [file for _, file in runs(["no set_epoch"])] == [*SCRIPTS]
    assert {mutant.name for mutant, _ in runs(["padded", "in place"])} == {
        "padded evaluation",
        "saved in place",
    }
