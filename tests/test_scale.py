"""Many processes: 32 on one node, and the sampler's cost among a thousand ranks."""

import os
import signal

import pytest
import torch
from helpers.files import difference, load
from helpers.jobs import epochs

from common.data import GlobalBatchSampler

DOUBLE = {"LADDER_DTYPE": "float64"}


@pytest.mark.slow("32 processes")
def test_32_processes_on_one_node(start, tmp_path, fashion):
    """The same job as on one device; stopped and resumed; nobody is left behind."""
    data = (*fashion(4_000, 97), "--model", "mlp", "--log-interval", 1)
    many = (*data, "--batch-size", 4, "--nproc-per-node", 32)
    options = ("--batch-size", 128, "--snapshot-path", "one.pt")
    one = start("single_gpu.py", 2, *data, *options, fork=True, **DOUBLE).finish()
    options = ("--snapshot-path", "whole.pt")
    text = start("ddp_spawn.py", 2, *many, *options, fork=True, **DOUBLE).finish(seconds=400)
    assert all(f"\n[rank {rank} of 32] " in f"\n{text}" for rank in range(32))
    assert text.count("Epoch 1 | Batchsize: 4 | Steps: 32\n") == 32
    assert [line["correct"] for line in epochs(text)] == [line["correct"] for line in epochs(one)]
    assert [line["total"] for line in epochs(text)] == [97, 97]
    assert difference(load(tmp_path / "whole.pt"), load(tmp_path / "one.pt")) < 1e-12

    job = start("ddp_spawn.py", 2, *many, fork=True, **DOUBLE)
    job.wait_for(r"Epoch 1 \| Step 2 ", seconds=400)
    os.kill(job.process.pid, signal.SIGTERM)
    text = job.finish(128 + signal.SIGTERM)
    assert text.count("stopped: --resume goes on from the last snapshot\n") == 1, text
    assert load(tmp_path / "checkpoint.pt")["epoch"] == 1
    start("ddp_spawn.py", 2, *many, "--resume", fork=True, **DOUBLE).finish(seconds=400)
    assert difference(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt")) < 1e-12


def test_a_thousand_ranks_share_a_step():
    """Of a data set that 1,024 ranks do not divide: each sample once, and nobody's share off by
    more than one."""
    ranks, size = 1024, 100_003
    samplers = [GlobalBatchSampler(range(size), 8, rank, ranks) for rank in range(ranks)]
    batches = [list(sampler) for sampler in samplers]
    assert {len(own) for own in batches} == {-(-size // (8 * ranks))} == {13}
    seen = torch.cat([torch.as_tensor(batch) for own in batches for batch in own])
    assert len(seen) == size and torch.equal(seen.sort().values, torch.arange(size))
    for step in range(13):
        shares = {len(own[step]) for own in batches}
        assert max(shares) - min(shares) <= 1 and max(shares) <= 8
