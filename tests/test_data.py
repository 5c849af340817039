"""The data: digits without a download, normalised batches, and each sample for one rank, once."""

import hashlib

import pytest
import torch
from helpers.files import idx_files
from torch.utils.data import DataLoader, Subset, TensorDataset

from common.data import GlobalBatchSampler, collate, load_dataset, worker_context


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


def test_batches_are_normalised_as_torchvision_does(tmp_path):
    from torchvision import datasets, transforms

    idx_files(tmp_path, 50, 20)
    train, test = load_dataset("fashion-mnist", str(tmp_path))
    normalize = transforms.Normalize((0.2860,), (0.3530,))
    transform = transforms.Compose([transforms.ToTensor(), normalize])
    reference = datasets.FashionMNIST(str(tmp_path), train=True, transform=transform)
    images, targets = train.__getitems__([3, 1, 49])
    assert images.dtype == torch.float32 and len(test) == 20
    for image, target, index in zip(images, targets, (3, 1, 49), strict=True):
        assert torch.allclose(image, reference[index][0], atol=1e-5)
        assert target == reference[index][1]
        assert torch.equal(train[index][0], image) and train[index][1] == target


def test_whole_batches_and_single_samples_are_collated(digits):
    assert worker_context(0) is None  # no workers, no way to start them
    images, targets = digits[1].__getitems__(range(10))
    for dataset in (digits[1], Subset(digits[1], range(10)), TensorDataset(images, targets)):
        batch_sampler = GlobalBatchSampler(range(10), 4)
        loader = DataLoader(dataset, batch_sampler=batch_sampler, collate_fn=collate)
        for (source, classes), indices in zip(loader, batch_sampler, strict=True):
            assert torch.equal(source, images[indices])
            assert torch.equal(classes, targets[indices])


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
