"""Evaluation counts every test sample once, at any world size."""

import pytest
from helpers.jobs import epochs


@pytest.mark.parametrize("total", [1, 7])
def test_evaluation_is_exact_where_the_world_size_does_not_divide_the_test_set(
    fork, fashion, total
):
    common = (1, *fashion(96, total), "--no-progress", "--test-batch-size", 2)
    (single,) = epochs(fork("single_gpu.py", *common, "--batch-size", 96, LADDER_DTYPE="float64"))
    assert single["total"] == total
    for count in (2, 3):
        options = ("--nproc-per-node", count, "--batch-size", 96 // count)
        (ours,) = epochs(fork("ddp_spawn.py", *common, *options, LADDER_DTYPE="float64"))
        assert {**ours, "rate": 0} == {**single, "rate": 0}
