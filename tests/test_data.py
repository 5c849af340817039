"""common/: data with and without a download, models for their images, seeds."""

import hashlib
import pickle
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.files import idx_files
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision.transforms.functional import normalize

from common.data import DATASETS, load_dataset, make_digits
from common.model import DEFAULT_MODEL, MODELS, build_model
from common.seed import set_seed

pytestmark = pytest.mark.numbers


def test_digits_are_balanced_normalised_and_the_same_everywhere():
    sizes, hashes = (12_000, 2_000), ("4874d27d67e2bd8b", "9341cbd56bc9ebc3")
    for dataset, count, start in zip(load_dataset("digits", "-"), sizes, hashes, strict=True):
        assert dataset.images.shape == (count, 1, 28, 28) and dataset.images.dtype == torch.uint8
        assert dataset.targets.bincount().tolist() == [count // 10] * 10
        ((images, _),) = dataset.__getitems__(torch.arange(count))
        assert abs(images.mean()) < 0.05 and abs(images.std() - 1) < 0.05
        assert hashlib.sha256(dataset.images.numpy().tobytes()).hexdigest().startswith(start)


def test_batches_are_normalised_and_nobody_locks_what_is_there(tmp_path):
    train, test = load_dataset("fashion-mnist", str(idx_files(tmp_path, 50, 20)))
    assert not (tmp_path / ".lock").exists()
    file = (tmp_path / "FashionMNIST/raw/train-images-idx3-ubyte").read_bytes()[16:]
    assert train.images.numpy().tobytes() == file  # the same way up
    images, targets = next(iter(DataLoader(train, 3, sampler=[3, 1, 49])))
    expected = (train.images[[3, 1, 49]] / 255 - 0.2860) / 0.3530  # torchvision's two transforms
    assert images.dtype == torch.float32 and torch.allclose(images, expected, atol=1e-5)
    assert torch.equal(targets, train.targets[[3, 1, 49]]) and len(test) == 20
    assert torch.equal(train[-1][0], images[2]) and train[-1][1] == targets[2]


def test_a_loader_makes_the_same_batches_with_and_without_getitems():
    """A Subset passes whole batches on, and a ConcatDataset takes samples one at a time."""
    data = make_digits(10, 0)
    for other in (Subset(data, range(10)), ConcatDataset([data, data])):
        for mine, theirs in zip(DataLoader(data, 5), DataLoader(other, 5), strict=False):
            assert all(map(torch.equal, mine, theirs)) and mine[0].shape[1:] == (1, 28, 28)


def test_cifar10_has_its_own_numbers_for_each_channel(monkeypatch, tmp_path):
    """In files of rows of red, then green, then blue."""
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: True)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": ["a", "b"]}))
    data = torch.randint(256, (10, 3072), dtype=torch.uint8)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        file = {"data": data.numpy(), "labels": [1] * 10}
        (folder / name).write_bytes(pickle.dumps(file))
    train, _ = load_dataset("cifar10", str(tmp_path))
    mean, deviation = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    expected = normalize(data[7].view(3, 32, 32) / 255, mean, deviation)
    assert torch.allclose(train[7][0], expected, atol=1e-5)


def test_one_of_several_processes_downloads(monkeypatch, tmp_path):
    """Threads stand for processes: each has a lock of its own on the same file."""
    source, folder, downloads = idx_files(tmp_path / "source", 50, 20), tmp_path / "data", []

    def download(*_: object, download_root: str, filename: str, **__: object) -> None:
        downloads.append(filename)
        path = Path(download_root, filename.removesuffix(".gz"))
        whole = (source / "FashionMNIST/raw" / path.name).read_bytes()
        path.write_bytes(whole[:100])
        time.sleep(0.1)  # meanwhile the others find that it is not there, or not whole
        path.write_bytes(whole)

    monkeypatch.setattr("torchvision.datasets.mnist.download_and_extract_archive", download)
    with ThreadPoolExecutor(3) as processes:
        calls = [processes.submit(load_dataset, "fashion-mnist", str(folder)) for _ in range(3)]
    assert [len(call.result()[0]) for call in calls] == [50, 50, 50]
    assert len(downloads) == len({*downloads}) == 4


@pytest.mark.parametrize("dataset", DATASETS)
def test_each_model_takes_each_data_sets_images_and_returns_logits(dataset):
    torch.manual_seed(3)  # or all might be positive
    images = torch.randn(4, 3, 32, 32) if dataset == "cifar10" else torch.randn(4, 1, 28, 28)
    for name in MODELS:
        logits = build_model(name, dataset)(images)
        assert logits.shape == (4, 10) and (logits < 0).any()
        assert not torch.allclose(logits.exp().sum(1), torch.ones(4))  # no softmax
    assert type(build_model(None, dataset)) is MODELS[DEFAULT_MODEL[dataset]]


def test_draws_differ_by_every_number_and_repeat():
    draws = {}
    numbers = [(0,), (42,), (42, 0), (42, 1), (42, 1, 0), (42, 0, 1), (42, 1, 0, 0), (43, 0)]
    for given in (*numbers, *reversed(numbers)):
        set_seed(*given)
        drawn = (random.random(), np.random.rand(), torch.rand(()).item())
        assert draws.setdefault(given, drawn) == drawn
    for values in zip(*draws.values(), strict=True):
        assert len({*values}) == len(numbers)
