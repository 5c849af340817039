"""The data: digits without a download, normalised batches, one download for several processes."""

import contextlib
import hashlib
import operator
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.files import idx_files
from torch.utils.data import Dataset

from common.data import load_dataset
from common.loader import collate


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


def test_cifar10_has_its_own_numbers_for_each_channel(monkeypatch, tmp_path):
    """Mean and standard deviation of red, green and blue in its training set."""
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: True)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": ["a", "b"]}))
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        data = np.random.default_rng(0).integers(0, 256, (10, 3072)).astype("u1")
        (folder / name).write_bytes(pickle.dumps({"data": data, "labels": [1] * 10}))
    train, _ = load_dataset("cifar10", str(tmp_path))
    mean = torch.tensor((0.4914, 0.4822, 0.4465)).view(3, 1, 1)
    deviation = torch.tensor((0.2470, 0.2435, 0.2616)).view(3, 1, 1)
    expected = (train.images[7] / 255 - mean) / deviation
    assert torch.allclose(train[7][0], expected, atol=1e-5)


def test_one_of_several_downloads_and_nobody_locks_what_is_there(monkeypatch, tmp_path):
    """Threads stand for processes: each has a lock of its own on the same file."""
    from torchvision.datasets import mnist

    source, folder, downloads = idx_files(tmp_path / "source", 50, 20), tmp_path / "data", []
    start = threading.Barrier(3)

    def check_exists(dataset: Dataset) -> bool:
        there = exists(dataset)
        with contextlib.suppress(threading.BrokenBarrierError):
            start.wait(5)  # so that all find at first that nothing is there
            start.abort()  # and later calls do not wait
        return there

    def download(*_: object, download_root: str, filename: str, **__: object) -> None:
        downloads.append(filename)
        whole = (source / "FashionMNIST/raw" / filename.removesuffix(".gz")).read_bytes()
        path = Path(download_root, filename.removesuffix(".gz"))
        path.write_bytes(whole[:100])
        time.sleep(0.1)
        path.write_bytes(whole)

    exists = mnist.MNIST._check_exists
    monkeypatch.setattr(mnist.MNIST, "_check_exists", check_exists)
    monkeypatch.setattr(mnist, "download_and_extract_archive", download)
    with ThreadPoolExecutor(3) as processes:
        calls = [processes.submit(load_dataset, "fashion-mnist", str(folder)) for _ in range(3)]
    assert [len(call.result()[0]) for call in calls] == [50, 50, 50]
    assert len(downloads) == len({*downloads}) == 4
    (folder / ".lock").unlink()
    assert len(load_dataset("fashion-mnist", str(folder))[1]) == 20
    assert not (folder / ".lock").exists()


def test_samples_become_a_batch_and_whole_batches_stay_as_they_are():
    source, targets = collate([(torch.ones(3), 5), (torch.zeros(3), 6)])
    assert source.tolist() == [[1, 1, 1], [0, 0, 0]] and targets.tolist() == [5, 6]
    assert all(map(operator.is_, collate((source, targets)), (source, targets)))
