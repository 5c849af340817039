"""Evaluation counts every test sample once, at any world size."""

import pytest
from helpers.jobs import ALONE, TORCHRUN, epochs


@pytest.mark.parametrize("total", [1, 7])
def test_evaluation_is_exact_where_the_world_size_does_not_divide_the_test_set(
    fork, fashion, total
):
    common = (1, *fashion(96, total), "--test-batch-size", 2)
    (single,) = epochs(fork("single_gpu.py", *common, "--batch-size", 96, LADDER_DTYPE="float64"))
    assert single["total"] == total
    for script, *options in (
        ("ddp_spawn.py", "--nproc-per-node", 2, "--batch-size", 48),
        ("ddp_spawn.py", "--nproc-per-node", 3, "--batch-size", 32),
        (TORCHRUN.format(3), "--batch-size", 32),
        ("multinode.py", *ALONE, "--nproc-per-node", 3, "--batch-size", 32),
    ):
        (ours,) = epochs(fork(script, *common, *options, LADDER_DTYPE="float64"))
        assert {**ours, "rate": 0} == {**single, "rate": 0}
