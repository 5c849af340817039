"""common/data.py and model.py: data with and without a download, models for images of any size."""

import hashlib
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers.files import idx_files
from torchvision.transforms.functional import normalize

from common.data import load_dataset
from common.loader import collate
from common.model import MODELS, build_model

pytestmark = pytest.mark.numbers


def test_digits_are_balanced_normalised_and_the_same_everywhere():
    sizes, hashes = (12_000, 2_000), ("4874d27d67e2bd8b", "9341cbd56bc9ebc3")
    for dataset, count, start in zip(load_dataset("digits", "-"), sizes, hashes, strict=True):
        assert dataset.images.shape == (count, 1, 28, 28) and dataset.images.dtype == torch.uint8
        assert dataset.targets.bincount().tolist() == [count // 10] * 10
        images, _ = dataset.__getitems__(torch.arange(count))
        assert abs(images.mean()) < 0.05 and abs(images.std() - 1) < 0.05
        assert hashlib.sha256(dataset.images.numpy().tobytes()).hexdigest().startswith(start)


def test_batches_are_normalised_and_nobody_locks_what_is_there(tmp_path):
    train, test = load_dataset("fashion-mnist", str(idx_files(tmp_path, 50, 20)))
    assert not (tmp_path / ".lock").exists()
    file = (tmp_path / "FashionMNIST/raw/train-images-idx3-ubyte").read_bytes()[16:]
    assert train.images.numpy().tobytes() == file  # the same way up
    images, targets = train.__getitems__([3, 1, 49])
    expected = (train.images[[3, 1, 49]] / 255 - 0.2860) / 0.3530  # torchvision's two transforms
    assert images.dtype == torch.float32 and torch.allclose(images, expected, atol=1e-5)
    assert torch.equal(targets, train.targets[[3, 1, 49]]) and len(test) == 20
    assert torch.equal(train[-1][0], images[2]) and train[-1][1] == targets[2]


def test_cifar10_has_its_own_numbers_for_each_channel(monkeypatch, tmp_path):
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5=None: True)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": ["a", "b"]}))
    data = torch.randint(256, (10, 3072), dtype=torch.uint8).numpy()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(pickle.dumps({"data": data, "labels": [1] * 10}))
    train, _ = load_dataset("cifar10", str(tmp_path))
    assert train.images[:10].numpy().tobytes() == data.tobytes()  # red, green and blue, row by row
    mean, deviation = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    expected = normalize(train.images[7] / 255, mean, deviation)
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
    assert (folder / ".lock").exists()  # where the processes of all nodes see it


def test_collate_stacks_samples_and_leaves_whole_batches():
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    stacked = torch.tensor([[1.0], [2.0]])
    for kind in (tuple, list):  # what a data set may return as a sample
        source, targets = collate([kind((one, 3)), kind((two, 4))])
        assert torch.equal(source, stacked) and targets.tolist() == [3, 4]
    whole = ({"a": stacked}, torch.tensor([3, 4]))  # of __getitems__
    assert collate(whole) is whole


@pytest.mark.parametrize("name", MODELS)
def test_a_model_takes_any_image_and_returns_logits(name):
    torch.manual_seed(3)  # or all might be positive
    for shape in ((1, 28, 28), (3, 32, 32), (3, 40, 40)):
        logits = build_model(name, shape)(torch.randn(4, *shape))
        assert logits.shape == (4, 10) and (logits < 0).any()
        assert not torch.allclose(logits.exp().sum(1), torch.ones(4))  # no softmax
