"""The same job gives the same result on every rung, at any number of processes.

In double precision, where rounding cannot hide a mistake: a wrong shard, a wrong weight of a
batch or a missing all-reduce shows at 1e-3, rounding at 1e-15.
"""

from collections import Counter
from itertools import chain

import pytest
from helpers.files import difference, idx_files, load
from helpers.jobs import TORCHRUN, Job, command, epochs, losses

DOUBLE = {"LADDER_DTYPE": "float64"}
OPTIONS = (2, "--no-progress", "--log-interval", 10)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The options of a job of two epochs, and what one process makes of it with batches of 64."""
    folder = tmp_path_factory.mktemp("reference")
    data = ("--dataset", "fashion-mnist", "--data-dir", idx_files(folder, 2_000, 200))
    words = command("single_gpu.py", *OPTIONS, *data, "--batch-size", 64)
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
    ],
)
def test_two_epochs_agree_to_rounding(fork, tmp_path, reference, script, options):
    data, expected_text, expected = reference
    text = fork(script, *OPTIONS, *data, *options, **DOUBLE)
    assert len(epochs(text)) == 2 and len(losses(text)) == 6
    assert losses(text) == losses(expected_text)
    for ours, theirs in zip(epochs(text), epochs(expected_text), strict=True):
        ours.pop("rate"), theirs.pop("rate")
        assert ours == theirs
    assert difference(load(tmp_path / "checkpoint.pt"), expected) < 1e-12


def test_data_parallel_agrees_with_uneven_chunks(fork, tmp_path, fashion):
    """Through the real DataParallel.forward, on three pretended devices."""
    common = (2, *fashion(500, 10), "--batch-size", 64, "--no-progress", "--log-interval", 1)
    expected = fork("single_gpu.py", *common, "--snapshot-path", "one.pt", **DOUBLE)
    text = fork("data_parallel.py", *common, LADDER_CHUNKS=3, **DOUBLE)
    assert "Batches are split over 3 devices" in text and len(losses(text)) == 16
    assert losses(text) == losses(expected)
    # 500 samples in eight steps: 62 = 21 + 21 + 20, or 63.
    chunks = (tmp_path / "chunks.txt").read_text().splitlines()
    assert chunks[:8] == ["21 21 20"] * 4 + ["21 21 21"] * 4
    assert difference(load(tmp_path / "checkpoint.pt"), load(tmp_path / "one.pt")) < 1e-12


@pytest.mark.parametrize("count", [65, 130])
def test_a_last_batch_that_is_shared_out_unevenly_has_its_right_weight(
    fork, tmp_path, fashion, count
):
    """65 over 4 x 16: in the last step one rank has one sample and the others none."""
    common = (2, *fashion(count, 10), "--no-progress")
    fork("single_gpu.py", *common, "--batch-size", 64, "--snapshot-path", "one.pt", **DOUBLE)
    fork("ddp_spawn.py", *common, "--batch-size", 16, "--nproc-per-node", 4, **DOUBLE)
    assert difference(load(tmp_path / "checkpoint.pt"), load(tmp_path / "one.pt")) < 1e-12


@pytest.mark.parametrize("count", [65, 90])
def test_accumulated_batches_are_one_large_batch(fork, tmp_path, fashion, count):
    """4 x 8 against 1 x 32. The last step has 1 sample, or 26 in four batches."""
    common = (2, *fashion(count, 10), "--no-progress", "--log-interval", 1)
    expected = fork(
        "single_gpu.py", *common, "--batch-size", 32, "--snapshot-path", "1.pt", **DOUBLE
    )
    assert len(losses(expected)) == 6
    for launch, options in (
        ("ddp_torchrun.py", ("--batch-size", 8, "--accumulate", 4)),
        (TORCHRUN.format(2), ("--batch-size", 4, "--accumulate", 4)),
    ):
        assert losses(fork(launch, *common, *options, **DOUBLE)) == losses(expected)
        assert difference(load(tmp_path / "checkpoint.pt"), load(tmp_path / "1.pt")) < 1e-12


def test_one_process_drops_out_the_same(fork, tmp_path, fashion):
    """Dropout differs between ranks; a world of one has rank 0's, on every rung."""
    common = (1, *fashion(500, 10), "--model", "convnet", "--no-progress")
    fork("single_gpu.py", *common, "--snapshot-path", "one.pt", **DOUBLE)
    fork("ddp_torchrun.py", *common, **DOUBLE)
    assert difference(load(tmp_path / "checkpoint.pt"), load(tmp_path / "one.pt")) < 1e-12


@pytest.mark.parametrize(
    "launch",
    [
        ("ddp_spawn.py", "--nproc-per-node", 3),
        (TORCHRUN.format(3), "--batch-size", 8, "--accumulate", 3),
    ],
)
def test_replicas_hold_the_same_bytes_at_the_end(fork, tmp_path, fashion, launch):
    text = fork(*launch, *fashion(500, 10), "--model", "convnet", LADDER_CHECKSUM=1)
    checksums = [line for line in text.splitlines() if line.startswith("checksum ")]
    assert len(checksums) == 3 and len(set(checksums)) == 1
    states = [state["cpu"] for state in load(tmp_path / "checkpoint.pt")["rng_states"]]
    assert len({state.numpy().tobytes() for state in states}) == 3  # they drop out other units


def test_float32_agrees_for_the_first_ten_steps(fork, tmp_path, fashion):
    common = (1, *fashion(640, 10), "--no-progress", "--log-interval", 1)
    expected = losses(fork("single_gpu.py", *common, "--batch-size", 64, "--snapshot-path", "1.pt"))
    assert len(expected) == 10 and expected[-1] < expected[0]
    for number, (script, options) in enumerate(
        [("data_parallel.py", ("--batch-size", 64)), ("ddp_spawn.py", ("--batch-size", 32))]
    ):
        path = tmp_path / f"other{number}.pt"
        text = fork(script, *common, *options, "--snapshot-path", path)
        assert losses(text) == pytest.approx(expected, abs=2e-6)
        assert difference(load(path), load(tmp_path / "1.pt")) < 1e-6


def test_shards_are_disjoint_cover_the_data_and_differ_from_epoch_to_epoch(fork, tmp_path, fashion):
    trace = tmp_path / "trace"
    trace.mkdir()
    options = ("--nproc-per-node", 3, "--batch-size", 8, "--no-progress")
    fork("ddp_spawn.py", 2, *fashion(100, 10), *options, LADDER_TRACE=trace)
    batches = [
        [[int(word) for word in line.split()] for line in path.read_text().splitlines()]
        for path in trace.iterdir()
    ]
    assert len(batches) == 3
    seen = []
    for epoch in range(2):
        # Each line: the length of the data set, then the indices. 100 / (3 x 8): 5 steps.
        train = [[line[1:] for line in rank if line[0] == 100] for rank in batches]
        shards = [list(chain(*rank[5 * epoch : 5 * (epoch + 1)])) for rank in train]
        assert Counter(chain(*shards)) == Counter(range(100))
        assert sorted(map(len, shards)) == [30, 35, 35]  # each step's 20 = 7 + 7 + 6
        seen.append(sorted(map(tuple, shards)))
    assert all(set(a).isdisjoint(seen[1]) for a in seen[:1])
    # The model never sees the samples in the data set's own order, nor twice in the same one.
    assert seen[0] != seen[1]
    test = [index for rank in batches for line in rank if line[0] == 10 for index in line[1:]]
    assert Counter(test) == Counter({index: 2 for index in range(10)})
