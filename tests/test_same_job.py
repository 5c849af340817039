"""The same job gives the same result on every rung, at any number of processes.

In double precision, where rounding cannot hide a mistake: a wrong shard, a wrong weight of a
batch or a missing all-reduce shows at 1e-3, rounding at 1e-15.
"""

from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
from helpers.files import difference, idx_files, load
from helpers.jobs import ALONE, TORCHRUN, Job, command, epochs, losses

DOUBLE = {"LADDER_DTYPE": "float64"}


def node(processes: int) -> tuple:
    return ("multinode.py", *ALONE, "--nproc-per-node", processes)


def spawn(processes: int) -> tuple:
    return ("ddp_spawn.py", "--nproc-per-node", processes)


def results(text: str) -> list[dict[str, float]]:
    return [{**line, "rate": 0} for line in epochs(text)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The options of a job of two epochs, and what one process makes of it with batches of 64."""
    folder = tmp_path_factory.mktemp("reference")
    data = (2, "--dataset", "fashion-mnist", "--data-dir", idx_files(folder, 2_000, 200))
    words = command("single_gpu.py", *data, "--batch-size", 64)
    text = Job(words, folder, DOUBLE, fork=True).finish()
    return data, text, load(folder / "checkpoint.pt")


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("ddp_spawn.py", ("--nproc-per-node", 2, "--batch-size", 32)),
        ("ddp_spawn.py", ("--nproc-per-node", 4, "--batch-size", 16)),
        ("data_parallel.py", ("--batch-size", 64)),
        ("ddp_torchrun.py", ("--batch-size", 16, "--accumulate", 4)),
        (TORCHRUN.format(2), ("--batch-size", 32)),
        (TORCHRUN.format(4), ("--batch-size", 8, "--accumulate", 2)),
        ("multinode.py", (*ALONE, "--nproc-per-node", 2, "--batch-size", 32)),
    ],
)
def test_two_epochs_agree_to_rounding(fork, tmp_path, reference, script, options):
    data, expected_text, expected = reference
    text = fork(script, *data, *options, **DOUBLE)
    assert len(epochs(text)) == 2 and results(text) == results(expected_text)
    assert difference(load(tmp_path / "checkpoint.pt"), expected) < 1e-12


def test_data_parallel_agrees_with_uneven_chunks(fork, tmp_path, fashion):
    """Through the real DataParallel.forward, on three pretended devices."""
    common = (2, *fashion(500, 10), "--batch-size", 64, "--log-interval", 1)
    expected = fork("single_gpu.py", *common, "--snapshot-path", "one.pt", **DOUBLE)
    text = fork("data_parallel.py", *common, LADDER_CHUNKS=3, **DOUBLE)
    assert len(losses(text)) == 16 and losses(text) == losses(expected)
    # 500 samples in eight steps: 62 = 21 + 21 + 20, or 63.
    chunks = (tmp_path / "chunks.txt").read_text().splitlines()
    assert chunks[:8] == ["21 21 20"] * 4 + ["21 21 21"] * 4
    assert difference(load(tmp_path / "checkpoint.pt"), load(tmp_path / "one.pt")) < 1e-12


@pytest.mark.parametrize(
    ("launch", "options"),
    [
        (spawn(2), ("--batch-size", 8)),
        (spawn(4), ("--batch-size", 4)),
        (node(4), ("--batch-size", 4)),
        ((TORCHRUN.format(2),), ("--batch-size", 8)),
        ((TORCHRUN.format(4),), ("--batch-size", 4)),
        ((TORCHRUN.format(4),), ("--batch-size", 1, "--accumulate", 4)),
        ((TORCHRUN.format(2),), ("--batch-size", 4, "--accumulate", 2)),
        (("ddp_torchrun.py",), ("--batch-size", 4, "--accumulate", 4)),
    ],
)
def test_shares_of_unequal_size_have_their_right_weights(fork, tmp_path, fashion, launch, options):
    """65 samples in five steps of 13, of which two ranks have 7 and 6, and four have 4 and 3."""
    common = (2, *fashion(65, 10))
    expected = fork(
        "single_gpu.py", *common, "--batch-size", 16, "--snapshot-path", "1.pt", **DOUBLE
    )
    text = fork(*launch, *common, *options, **DOUBLE)
    assert "Epoch 1 | Batchsize: 16 | Steps: 5" in expected and "Steps: 5\n" in text
    assert results(text) == results(expected)
    assert difference(load(tmp_path / "checkpoint.pt"), load(tmp_path / "1.pt")) < 1e-12


def traced(folder: Path, size: int) -> list[list[list[int]]]:
    """The batches of each process, from data sets of this size."""
    lines = [path.read_text().splitlines() for path in folder.iterdir()]
    words = [[[int(word) for word in line.split()] for line in rank] for rank in lines]
    return [[indices for count, *indices in rank if count == size] for rank in words]


@pytest.mark.parametrize("launch", [spawn(2), spawn(4), (TORCHRUN.format(2),)])
def test_no_share_is_empty_with_batches_of_one(fork, tmp_path, fashion, launch):
    """65 samples over 2 or 4 ranks: a step less than 33 or 17, in which one rank has two."""
    trace = tmp_path / "trace"
    trace.mkdir()
    options = ("--batch-size", 1, *fashion(65, 10), "--lr", 0.001)
    text = fork(*launch, 1, *options, LADDER_TRACE=trace, **DOUBLE)
    assert "nan" not in text and len(epochs(text)) == 1
    ranks = traced(trace, 65)
    steps = 65 // len(ranks)
    assert f"Steps: {steps}\n" in text and {len(rank) for rank in ranks} == {steps}
    assert Counter(chain(*chain(*ranks))) == Counter(range(65))
    assert Counter(map(len, chain(*ranks))) == {1: 65 - 2, 2: 1}
    weights = load(tmp_path / "checkpoint.pt")["model"].values()
    assert all(weight.isfinite().all() for weight in weights)


@pytest.mark.parametrize(
    "launch",
    [
        ("data_parallel.py",),
        ("ddp_spawn.py", "--nproc-per-node", 1),
        ("multinode.py", *ALONE),
    ],
)
def test_one_process_drops_out_the_same(fork, tmp_path, fashion, launch):
    """Dropout differs between ranks; a world of one has rank 0's."""
    common = (1, *fashion(500, 10), "--model", "convnet")
    fork("single_gpu.py", *common, "--snapshot-path", "one.pt", **DOUBLE)
    fork(*launch, *common, **DOUBLE)
    assert difference(load(tmp_path / "checkpoint.pt"), load(tmp_path / "one.pt")) < 1e-12


@pytest.mark.parametrize(
    "launch", [spawn(3), (TORCHRUN.format(3), "--batch-size", 8, "--accumulate", 3)]
)
def test_replicas_hold_the_same_bytes_at_the_end(fork, fashion, launch):
    text = fork(*launch, *fashion(500, 10), "--model", "convnet", LADDER_CHECKSUM=1)
    checksums = [line for line in text.splitlines() if line.startswith("checksum ")]
    assert len(checksums) == 3 and len(set(checksums)) == 1


def test_shards_are_disjoint_cover_the_data_and_differ_from_epoch_to_epoch(fork, tmp_path, fashion):
    trace = tmp_path / "trace"
    trace.mkdir()
    fork(*spawn(3), 2, *fashion(100, 10), "--batch-size", 8, LADDER_TRACE=trace)
    train = traced(trace, 100)
    assert len(train) == 3
    seen = []
    for epoch in range(2):
        # 100 / (3 x 8): 5 steps.
        shards = [list(chain(*rank[5 * epoch : 5 * (epoch + 1)])) for rank in train]
        assert Counter(chain(*shards)) == Counter(range(100))
        assert sorted(map(len, shards)) == [30, 35, 35]  # each step's 20 = 7 + 7 + 6
        seen.append(sorted(map(tuple, shards)))
    # The model never sees the samples in the data set's own order, nor twice in the same one.
    assert set(seen[0]).isdisjoint(seen[1])
    test = chain(*chain(*traced(trace, 10)))
    assert Counter(test) == Counter({index: 2 for index in range(10)})
