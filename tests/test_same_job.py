"""The same steps on every rung, at any number of processes that divides the data set.

In double precision, where rounding cannot hide a mistake: a wrong shard or a missing all-reduce
shows at 1e-3, rounding at 1e-15.
"""

import pytest
from helpers.files import difference, idx_files, load
from helpers.jobs import SCRIPTS, epochs
from helpers.ranks import train

pytestmark = pytest.mark.numbers

SINGLE, PARALLEL, SPAWN, TORCHRUN, NODES = SCRIPTS


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


def test_no_sample_is_lost_where_the_processes_do_not_divide_the_data(tmp_path, fashion):
    """Of 40 samples, each of 3 ranks gets 14, so two are trained twice."""
    text = train(tmp_path, SPAWN, 3, 1, *fashion(40, 10), "--batch-size", 1)
    assert text.count("Steps: 14\n") == 3 and epochs(text)[0]["total"] == 10
