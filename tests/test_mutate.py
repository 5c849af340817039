"""mutate.py's list is not stale, and has what must be there. To see its mutants killed, run it."""

from pathlib import Path

import pytest
from mutate import (
    DATA,
    DDP,
    ELASTIC,
    MUTANTS,
    NODES,
    PARALLEL,
    ROOT,
    SCRIPTS,
    SEED,
    SINGLE,
    SPAWN,
    mutated,
    runs,
)

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
    "stale snapshot on a restart": (ELASTIC, NODES),
    "no barrier before leaving": DDP,
    "stopped is done": SCRIPTS,
    "deaf to signals": (SINGLE, PARALLEL),
    "each rank stops by itself": DDP,
    "rank without the host's number": (NODES,),
    "set_seed without the rank": (SEED,),
}


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


def test_the_tests_that_it_names_exist(request):
    named = {test for mutant in MUTANTS for test in mutant.tests.values()}
    for file in {test.split("::")[0] for test in named}:
        path = Path(__file__).with_name(file)
        tests = pytest.Module.from_parent(request.session, path=path).collect()
        known = {test.nodeid.split("/")[-1] for test in tests}
        assert {test for test in named if test.startswith(f"{file}::")} <= known


def test_files_and_names_choose():
    assert {file for _, file in runs([SPAWN])} == {SPAWN}
    assert [file for _, file in runs(["no set_epoch"])] == [*SCRIPTS]
    assert {mutant.name for mutant, _ in runs(["padded", "in place"])} == {
        "padded evaluation",
        "saved in place",
    }
