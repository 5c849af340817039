"""A step between two neighbouring scripts shows one idea: all else is the same, to the letter."""

import difflib

import pytest
from helpers.jobs import ROOT, SCRIPTS

SINGLE, PARALLEL, SPAWN, TORCHRUN, NODES = SCRIPTS
# Upper limits from DESIGN's sketch: whoever needs a line more takes another one out.
LENGTHS = dict(zip(SCRIPTS, (132, 133, 191, 180, 185), strict=True))
LIMITS = {(SINGLE, PARALLEL): 23, (SINGLE, SPAWN): 127, (SPAWN, TORCHRUN): 63, (SPAWN, NODES): 64}
STEPS = dict(zip(LIMITS, (21, 127, 63, 64), strict=True))  # a line that is changed counts twice


def lines(script: str) -> list[str]:
    return (ROOT / script).read_text().splitlines()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_no_longer_than_its_sketch(script):
    assert len(lines(script)) <= LENGTHS[script]


@pytest.mark.parametrize(("one", "other"), STEPS)
def test_a_step_changes_what_it_is_about_and_no_more(one, other):
    """If you have changed a line of all scripts, change it in this one as well. A step that becomes
    shorter is a new number above."""
    diff = [*difflib.unified_diff(lines(one), lines(other), n=0)][2:]
    count = sum(line[0] in "-+" for line in diff)
    assert count == STEPS[one, other] <= LIMITS[one, other], "\n".join(diff)
