"""The same steps on every rung, at any number of processes that divides the data set.

In double precision, where rounding cannot hide a mistake: a wrong shard, a wrong weight of a
micro-batch or a missing all-reduce shows at 1e-3, rounding at 1e-15.
"""

from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
import torch
from helpers.files import difference, idx_files, load
from helpers.jobs import ALONE, TORCHRUN, Job, command, epochs

from common.data import load_dataset
from common.model import build_model

DOUBLE = {"LADDER_DTYPE": "float64"}


def node(processes: int) -> tuple:
    return ("multinode.py", *ALONE, "--world-size", processes, "--nproc-per-node", processes)


def spawn(processes: int) -> tuple:
    return ("ddp_spawn.py", "--nproc-per-node", processes)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The options of a job of two epochs, and what one process makes of it with batches of 12.

    68 samples make five steps of 12 and one of 8, of which two ranks have 4 each, and four have 2.
    Of the 3 test samples, taken one at a time, two ranks have 2 and 1, and one of four none.
    """
    folder = tmp_path_factory.mktemp("reference")
    data = (2, "--dataset", "fashion-mnist", "--data-dir", idx_files(folder, 68, 3))
    options = (*data, "--test-batch-size", 1)
    words = command("single_gpu.py", *options, "--batch-size", 12)
    lines = epochs(Job(words, folder, DOUBLE, fork=True).finish())
    assert lines[1]["train_loss"] < lines[0]["train_loss"]
    return options, [{**line, "rate": 0} for line in lines], load(folder / "checkpoint.pt")


def traced(folder: Path, size: int) -> list[list[list[int]]]:
    """The batches of each process, from data sets of this size."""
    lines = [path.read_text().splitlines() for path in folder.iterdir()]
    words = [[[int(word) for word in line.split()] for line in rank] for rank in lines]
    return [[indices for count, *indices in rank if count == size] for rank in words]


@pytest.mark.parametrize(
    ("launch", "options", "processes"),
    [
        (("data_parallel.py",), ("--batch-size", 12), 1),
        (spawn(2), ("--batch-size", 6), 2),
        (spawn(4), ("--batch-size", 3), 4),
        (node(2), ("--batch-size", 6), 2),
        (node(4), ("--batch-size", 3), 4),
        ((TORCHRUN.format(4),), ("--batch-size", 3), 4),
        ((TORCHRUN.format(4),), ("--batch-size", 1, "--accumulate", 3), 4),
        ((TORCHRUN.format(2),), ("--batch-size", 3, "--accumulate", 2), 2),
        # A last micro-batch that is shorter than the others: of 2 samples, where they have 3.
        (("ddp_torchrun.py",), ("--batch-size", 3, "--accumulate", 4), 1),
    ],
)
def test_the_same_steps_on_every_sample_once(fork, tmp_path, reference, launch, options, processes):
    data, expected_lines, expected = reference
    trace = tmp_path / "trace"
    trace.mkdir()
    # nn.DataParallel splits over three pretended devices.
    env = {**DOUBLE, "LADDER_TRACE": trace, "LADDER_CHUNKS": 3}
    text = fork(*launch, *data, *options, **env)
    assert text.count("Steps: 6\n") == 2 * processes
    assert [{**line, "rate": 0} for line in epochs(text)] == expected_lines
    assert difference(load(tmp_path / "checkpoint.pt"), expected) < 1e-12
    ranks = traced(trace, 68)
    assert len(ranks) == processes
    for epoch in (slice(6), slice(6, 12)):
        steps = list(zip(*(rank[epoch] for rank in ranks), strict=True))
        assert [len([*chain(*shares)]) for shares in steps] == [12, 12, 12, 12, 12, 8]
        assert Counter(chain(*chain(*steps))) == Counter(range(68))
    assert Counter(chain(*chain(*traced(trace, 3)))) == {0: 2, 1: 2, 2: 2}
    if launch == ("data_parallel.py",):
        chunks = (tmp_path / "chunks.txt").read_text().splitlines()
        assert [chunk for chunk in chunks if len(chunk) > 1][:6] == ["4 4 4"] * 5 + ["3 3 2"]


@pytest.mark.parametrize("launch", [spawn(4), node(4), (TORCHRUN.format(4),)])
def test_no_sample_is_lost_where_the_processes_do_not_divide_the_data(
    fork, tmp_path, fashion, launch
):
    """Of 65 samples, each of 4 ranks gets 17. So 3 are trained twice, and all 9 to test on once."""
    trace = tmp_path / "trace"
    trace.mkdir()
    text = fork(launch[0], 1, *launch[1:], *fashion(65, 9), "--batch-size", 4, LADDER_TRACE=trace)
    ranks = traced(trace, 65)
    assert text.count("Steps: 5\n") == 4 and [len(rank) for rank in ranks] == [5] * 4
    times = Counter(chain(*chain(*ranks)))
    assert {*times} == {*range(65)} and sorted(times.values())[-4:] == [1, 2, 2, 2]
    assert Counter(chain(*chain(*traced(trace, 9)))) == Counter(range(9))
    assert epochs(text)[0]["total"] == 9


@pytest.mark.parametrize("launch", [spawn(2), node(2), (TORCHRUN.format(2),)])
def test_evaluation_is_of_the_saved_model(fork, tmp_path, fashion, launch):
    """The ranks have BatchNorm statistics of their own in training; a mix of them would show.

    They have 2 and 1 test batches. That none goes through DDP is not seen here, as gloo does not
    mind a broadcast to nobody: see test_steps.py.
    """
    options = (*fashion(16, 3), "--model", "resnet18", "--batch-size", 4, "--test-batch-size", 1)
    (line,) = epochs(fork(launch[0], 1, *launch[1:], *options, **DOUBLE))
    _, test_set = load_dataset("fashion-mnist", str(tmp_path / "fashion"))
    model = build_model("resnet18", (1, 28, 28)).double()
    model.load_state_dict(load(tmp_path / "checkpoint.pt")["model"])
    source, targets = test_set.__getitems__(range(3))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model.eval()(source.double()), targets)
    assert line["total"] == 3 and line["test_loss"] == pytest.approx(loss.item(), abs=6e-5)
