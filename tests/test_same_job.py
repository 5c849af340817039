"""The same steps on every rung, at any number of processes that divides the data set.

In double precision, where rounding cannot hide a mistake: a wrong shard or a missing all-reduce
shows at 1e-3, rounding at 1e-15.
"""

import re

import pytest
from helpers.files import difference, idx_files, load
from helpers.jobs import LONG, SCRIPTS, epochs
from helpers.ranks import train

pytestmark = pytest.mark.numbers

SINGLE, PARALLEL, SPAWN, TORCHRUN, NODES = SCRIPTS
LOSSES = []  # of each step of long_run.py, whoever takes it


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The options of a job of two epochs, and what one process makes of it with batches of 24.

    84 samples make three steps of 24 and one of 12, of which three ranks have 4 each. Of the 3
    validation samples, one of four ranks has none, so a sample that counts twice would show, too.
    """
    folder = tmp_path_factory.mktemp("reference")
    options = (2, "--dataset", "fashion-mnist", "--data-dir", idx_files(folder, 84, 3))
    lines = epochs(train(folder, SINGLE, 1, *options, "--batch-size", 24, dtype="float64"))
    assert lines[1]["train_loss"] < lines[0]["train_loss"]
    return options, [{**line, "rate": 0} for line in lines], load(folder / "checkpoint.pt")


@pytest.mark.parametrize(
    ("script", "processes"),
    [(PARALLEL, 1), (SPAWN, 2), (SPAWN, 4), (TORCHRUN, 1), (TORCHRUN, 3), (NODES, 2), (NODES, 4)],
)
def test_the_same_steps(tmp_path, reference, script, processes):
    data, expected_lines, expected = reference
    options = ("--batch-size", 24 // processes)
    text = train(tmp_path, script, processes, *data, *options, dtype="float64")
    assert text.count("Steps: 4\n") == 2 * processes
    assert [{**line, "rate": 0} for line in epochs(text)] == expected_lines
    assert difference(load(tmp_path / "checkpoint.pt"), expected) < 1e-12


@pytest.mark.parametrize(
    ("processes", "batch", "accumulate"),
    # The last step's micro-batches: of 8 and 4 samples, 4 and 2, 2 and 1, 4 alone, 12 alone
    [(1, 8, 3), (2, 4, 3), (4, 2, 3), (3, 4, 2), (1, 24, 1)],
)
def test_micro_batches_make_the_same_steps(tmp_path, reference, processes, batch, accumulate):
    """A loss line is the mean over all ranks and micro-batches of the step."""
    data, expected_lines, expected = reference
    options = ("--batch-size", batch, "--accumulate", accumulate, "--log-interval", 1)
    text = train(tmp_path, f"recipes/{LONG}", processes, *data, *options, dtype="float64")
    assert [{**line, "rate": 0} for line in epochs(text)] == expected_lines
    assert difference(load(tmp_path / "checkpoint.pt"), expected) < 1e-12
    LOSSES.append(re.findall(r"^Epoch . \| Step . \| Loss: (\S+) ", text, re.M))
    assert len(LOSSES[0]) == 8 and LOSSES[-1] == LOSSES[0]
