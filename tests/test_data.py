"""common/data.py: the data sets, the batches, and who gets which sample."""

import hashlib
import os
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.files import idx_files
from helpers.forks import start_the_server
from helpers.jobs import ROOT
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    Subset,
    TensorDataset,
)

from common.data import GlobalBatchSampler, collate, load_dataset, make_digits, worker_context
from common.model import build_model
from common.seed import set_seed


def test_without_workers_there_is_no_way_to_start_them():
    assert worker_context(0) is None


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits", "unused")


def test_digits_are_uint8_balanced_and_normalised(digits):
    for dataset, count in zip(digits, (12_000, 2_000), strict=True):
        assert dataset.images.shape == (count, 1, 28, 28) and dataset.images.dtype == torch.uint8
        assert dataset.targets.bincount().tolist() == [count // 10] * 10
        images, _ = dataset.__getitems__(torch.arange(count))
        assert abs(images.mean()) < 0.05 and abs(images.std() - 1) < 0.05
    assert not torch.equal(digits[0].images[:2000], digits[1].images)


def test_digits_are_the_same_bytes_whatever_the_vector_unit_and_dtype():
    code = (
        "import hashlib, sys, torch; torch.set_default_dtype(torch.float64)\n"
        "from common.data import make_digits\n"
        "print(hashlib.sha256(make_digits(3000, 0).images.numpy().tobytes()).hexdigest())"
    )
    expected = hashlib.sha256(make_digits(3000, 0).images.numpy().tobytes()).hexdigest()
    env = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "1"}
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True)
    assert out.stdout.decode().strip() == expected, out.stderr.decode()


def test_digits_are_learnable_but_not_by_a_linear_model(digits):
    train, test = digits
    torch.set_num_threads(1)  # tests run side by side
    scores = {}
    for name in ("linear", "convnet"):
        set_seed(torch.device("cpu"), 0)
        linear = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
        model = linear if name == "linear" else build_model(name, (1, 28, 28))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        sampler = GlobalBatchSampler(train, 64)
        for epoch in range(4):
            sampler.set_epoch(epoch)
            for indices in sampler:
                source, targets = train.__getitems__(indices)
                optimizer.zero_grad()
                F.cross_entropy(model(source), targets).backward()
                optimizer.step()
        source, targets = test.__getitems__(torch.arange(len(test)))
        with torch.no_grad():
            scores[name] = (model.eval()(source).argmax(1) == targets).double().mean().item()
    assert 0.5 < scores["linear"] < 0.85 and scores["convnet"] > 0.97, scores


def test_batches_are_normalised_as_torchvision_does(tmp_path):
    from torchvision import datasets, transforms

    idx_files(tmp_path, 50, 20)
    train, test = load_dataset("fashion-mnist", str(tmp_path))
    transform = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize((0.2860,), (0.3530,))]
    )
    reference = datasets.FashionMNIST(str(tmp_path), train=True, transform=transform)
    images, targets = train.__getitems__([3, 1, 49])
    assert images.dtype == torch.float32 and len(test) == 20
    for image, target, index in zip(images, targets, (3, 1, 49), strict=True):
        assert torch.allclose(image, reference[index][0], atol=1e-5)
        assert target == reference[index][1]
        assert torch.equal(train[index][0], image) and train[index][1] == target


class Plain(Dataset):
    """As tutorials write them: no __getitems__, a dictionary, Python's own numbers."""

    def __init__(self, count: int) -> None:
        self.samples = {index: index / 2 for index in range(count)}  # no tensor is a key in it

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], int]:
        return {"half": torch.tensor([self.samples[index]]), "name": f"sample {index}"}, index


def test_batches_of_any_dataset(digits):
    sampler = BatchSampler(range(10), 4, drop_last=False)
    pairs = TensorDataset(torch.arange(10.0), torch.arange(10))
    for dataset in (
        digits[1],
        pairs,
        Subset(pairs, range(10)),
        Subset(digits[1], range(10)),
        Plain(10),
    ):
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
        batches = list(loader)
        assert [len(targets) for _, targets in batches] == [4, 4, 2]
        assert torch.cat([targets for _, targets in batches]).tolist() == list(range(10))
    last, _ = batches[-1]
    assert last["half"].tolist() == [[4.0], [4.5]] and last["name"] == ["sample 8", "sample 9"]


class Noise(Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> float:
        return random.random() + np.random.rand() + torch.rand(()).item()


def test_workers_draw_numbers_of_their_own():
    """And others in each epoch, as torch seeds them from the loader's generator."""
    start_the_server()  # or jobs would be forked from one that does not hear signals
    drawn = []
    for epoch in (0, 1):
        loader = DataLoader(
            Noise(),
            batch_size=5,
            num_workers=2,
            multiprocessing_context=worker_context(2),
            generator=torch.Generator().manual_seed(epoch),
        )
        drawn += torch.cat(list(loader)).tolist()
    assert len(drawn) == len({*drawn}) == 20


STOPS = """if True:
    import os, signal
    from torch.utils.data import DataLoader, Dataset
    from common.data import follow, worker_context

    class Stops(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            for signum in (signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), signum)
                os.kill(os.getppid(), signum)  # the server
            return index

    if __name__ == "__main__":
        how = {"multiprocessing_context": worker_context(2), "worker_init_fn": follow}
        loader = DataLoader(Stops(), num_workers=2, persistent_workers=True, **how)
        for epoch in range(2):
            print(sum(loader).item())
        print(signal.pthread_sigmask(signal.SIG_BLOCK, set()), flush=True)
        first, second = loader._iterator._workers
        first.terminate()  # as torch does where a worker does not end by itself
        first.join(10)
        print(first.exitcode, second.exitcode, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="workers are spawned elsewhere")
def test_workers_do_not_hear_requests_to_stop_and_end_with_their_rank(start, tmp_path):
    """A scheduler sends SIGTERM to every process, a terminal SIGINT."""
    script = tmp_path / "stops.py"
    script.write_text(STOPS)
    text = start(str(script), PYTHONPATH=ROOT).finish(-signal.SIGKILL, seconds=60)
    assert text.startswith("6\n6\nset()\n0 None\n")


@pytest.mark.parametrize("count", [5, 31, 32, 33, 65, 97, 12_000])
@pytest.mark.parametrize("batch_size", [1, 2, 7, 32])
def test_global_batches_are_even_and_go_on_as_they_began(count, batch_size):
    for world_size in (1, 2, 3):
        sampler = GlobalBatchSampler(range(count), batch_size, 0, world_size, seed=1)
        sizes, limit = sampler.sizes(), batch_size * world_size
        assert sum(sizes) == count and len(sizes) == len(sampler)
        assert sizes == sorted(sizes) and sizes[-1] - sizes[0] <= 1 and sizes[0] >= world_size
        if batch_size > 1:
            assert sizes[-1] <= limit and len(sizes) == -(-count // limit)
        else:  # a rest that does not divide: larger steps, and no empty share
            assert sizes[-1] <= 2 * world_size and len(sizes) == count // world_size
        seen = 0
        for step, size in enumerate(sizes, start=1):  # resumed after any step: the same ones
            seen += size
            if step in (1, 2, len(sizes) // 2, len(sizes)):
                sampler.set_epoch(0, start=seen)
                assert sampler.sizes() == sizes[step:]


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


@pytest.mark.parametrize("count", [7, 64, 65, 100, 257])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("start", [0, 3, 60])
def test_sampler_deals_every_sample_once(count, world_size, batch_size, start):
    dataset, start, previous = range(count), min(start, count - world_size), None
    for epoch in (0, 1):
        samplers = [
            GlobalBatchSampler(dataset, batch_size, rank, world_size, seed=42)
            for rank in range(world_size)
        ]
        for sampler in samplers:
            sampler.set_epoch(epoch, start)
        shards = [list(sampler) for sampler in samplers]
        assert {len(shard) for shard in shards} == {len(samplers[0])}  # as many steps on all ranks
        generator = torch.Generator().manual_seed(42 + epoch)
        order = torch.randperm(count, generator=generator).tolist()[start:]
        first = 0
        for step, size in enumerate(samplers[0].sizes()):
            dealt = [index for shard in shards for index in shard[step]]
            assert sorted(dealt) == sorted(order[first : first + size])
            first += size
            sizes = [len(shard[step]) for shard in shards]
            assert max(sizes) - min(sizes) <= 1 and min(sizes) > 0
        assert first == len(order)
        assert len(order) < 32 or order != previous
        previous = order


def test_sampler_has_distributed_samplers_order():
    dataset = range(96)
    for rank in range(3):
        ours = GlobalBatchSampler(dataset, 8, rank, 3, seed=7)
        theirs = DistributedSampler(dataset, num_replicas=3, rank=rank, seed=7)
        for epoch in (0, 5):
            ours.set_epoch(epoch)
            theirs.set_epoch(epoch)
            assert [index for batch in ours for index in batch] == list(theirs)
