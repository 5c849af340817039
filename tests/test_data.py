"""The data: digits without a download, normalised batches, and each sample for one rank, once."""

import hashlib

import pytest
import torch
from helpers.files import idx_files

from common.data import GlobalBatchSampler, load_dataset


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits", "unused")


def test_digits_are_balanced_normalised_and_the_same_everywhere(digits):
    for dataset, count in zip(digits, (12_000, 2_000), strict=True):
        assert dataset.images.shape == (count, 1, 28, 28) and dataset.images.dtype == torch.uint8
        assert dataset.targets.bincount().tolist() == [count // 10] * 10
        images, _ = dataset.__getitems__(torch.arange(count))
        assert abs(images.mean()) < 0.05 and abs(images.std() - 1) < 0.05
    # The tests of another machine find the same bytes.
    hashes = [hashlib.sha256(dataset.images.numpy().tobytes()).hexdigest() for dataset in digits]
    assert [value[:16] for value in hashes] == ["4874d27d67e2bd8b", "9341cbd56bc9ebc3"]


def test_batches_are_normalised(tmp_path):
    train, test = load_dataset("fashion-mnist", str(idx_files(tmp_path, 50, 20)))
    images, targets = train.__getitems__([3, 1, 49])
    expected = (train.images[[3, 1, 49]] / 255 - 0.2860) / 0.3530  # torchvision's two transforms
    assert images.dtype == torch.float32 and torch.allclose(images, expected, atol=1e-5)
    assert torch.equal(targets, train.targets[[3, 1, 49]]) and len(test) == 20
    assert torch.equal(train[-1][0], images[2]) and train[-1][1] == targets[2]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 2, 7, 32])
def test_each_step_deals_its_samples_to_all_ranks_once(world_size, batch_size):
    for count in (7, 31, 64, 65, 100, 257):
        ranks = [
            GlobalBatchSampler(range(count), batch_size, rank, world_size, seed=42)
            for rank in range(world_size)
        ]
        sizes, limit = ranks[0].sizes(), batch_size * world_size
        assert sum(sizes) == count and sizes == sorted(sizes) and sizes[-1] - sizes[0] <= 1
        if batch_size > 1:
            assert sizes[-1] <= limit and len(sizes) == -(-count // limit)
        else:  # a rest that does not divide: larger steps, and no empty share
            assert len(sizes) == count // world_size
        orders = []
        for epoch in (0, 1):
            generator = torch.Generator().manual_seed(42 + epoch)
            orders.append(torch.randperm(count, generator=generator).tolist())
            for sampler in ranks:
                sampler.set_epoch(epoch)
            shards, seen = [list(sampler) for sampler in ranks], 0
            for step, (size, *shares) in enumerate(zip(sizes, *shards, strict=True)):
                dealt = [index for share in shares for index in share]
                assert sorted(dealt) == sorted(orders[epoch][seen : seen + size])
                lengths = [len(share) for share in shares]
                assert max(lengths) - min(lengths) <= 1 and min(lengths) > 0
                for sampler, shard in zip(ranks, shards, strict=True):  # it may go on from any step
                    sampler.set_epoch(epoch, seen)
                    assert next(iter(sampler)) == shard[step] and sampler.sizes() == sizes[step:]
                seen += size
        assert orders[0] != orders[1]


def test_too_few_samples_are_refused():
    with pytest.raises(ValueError, match="the training set is empty"):
        GlobalBatchSampler([], 32)
    with pytest.raises(ValueError, match="2 samples are left for 3 processes: start fewer"):
        GlobalBatchSampler(range(2), 32, 0, 3)
    sampler = GlobalBatchSampler(range(65), 32, 0, 3)
    with pytest.raises(ValueError, match="1 samples are left for 3 processes"):
        sampler.set_epoch(0, start=64)
    sampler.set_epoch(0, start=65)  # the epoch is over
    assert list(sampler) == []
