"""A step between two neighbouring scripts shows one idea: all else is the same, to the letter."""

import ast
import difflib

import pytest
from helpers.jobs import ROOT, SCRIPTS

SINGLE, PARALLEL, SPAWN, TORCHRUN, NODES = SCRIPTS
# Upper limits from DESIGN's sketch: whoever needs a line more takes another one out.
LENGTHS = dict(zip(SCRIPTS, (132, 133, 191, 180, 185), strict=True))
STEPS = {(SINGLE, PARALLEL): 23, (SINGLE, SPAWN): 127, (SPAWN, TORCHRUN): 63, (SPAWN, NODES): 64}
# How many lines of a function differ, of those that differ at all.
DIFFERENT = {
    (SINGLE, PARALLEL): {"main": 7, "parse_args": 4},
    (SINGLE, SPAWN): {
        "train_epoch": 7,
        "evaluate": 2,
        "save_snapshot": 2,
        "load_snapshot": 15,
        "main": 37,
        "parse_args": 10,
    },
    (SPAWN, TORCHRUN): {"ddp_setup": 8, "train": 3, "main": 5, "parse_args": 12},
    (SPAWN, NODES): {"ddp_setup": 6, "train": 3, "main": 5, "parse_args": 14},
}


def lines(script: str) -> list[str]:
    return (ROOT / script).read_text().splitlines()


def functions(script: str) -> dict[str, list[str]]:
    nodes = [node for node in ast.parse((ROOT / script).read_text()).body if hasattr(node, "name")]
    return {node.name: lines(script)[node.lineno - 1 : node.end_lineno] for node in nodes}


def changed(one: list[str], other: list[str]) -> int:
    """Lines that only one of the texts has, as `diff` counts them."""
    return sum(line[0] in "-+" for line in [*difflib.unified_diff(one, other, n=0)][2:])


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_no_longer_than_its_sketch(script):
    assert len(lines(script)) <= LENGTHS[script]


@pytest.mark.parametrize(("one", "other"), STEPS)
def test_a_step_changes_what_it_is_about_and_no_more(one, other):
    ours, theirs = functions(one), functions(other)
    counts = {name: changed(ours[name], theirs[name]) for name in ours.keys() & theirs.keys()}
    assert {name: count for name, count in counts.items() if count} == DIFFERENT[one, other]
    order = [name for name in theirs if name in ours]
    assert order == [name for name in ours if name in theirs]
    assert changed(lines(one), lines(other)) <= STEPS[one, other]
