"""common/data.py: the data sets, the batches, and who gets which sample."""

import hashlib
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.files import idx_files
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

from common.data import (
    Batches,
    DataError,
    ShardedBatchSampler,
    load_dataset,
    make_digits,
    worker_context,
)
from common.model import build_model
from common.seed import set_seed


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
@pytest.mark.parametrize("always", [False, True])
def test_a_forked_worker_that_hangs_is_forked_anew(tmp_path, always):
    """As with Python 3.11, where another thread was about to take the GIL: the first one here."""
    code = (
        "import os, pathlib, time\n"
        "from torch.utils.data import DataLoader\n"
        "from common.data import ForkedWorker, worker_context\n"
        "def hang_once():\n"
        f"    if {always} or not pathlib.Path('hung').exists():\n"
        "        pathlib.Path('hung').write_text(str(os.getpid()))\n"
        "        time.sleep(90)\n"
        "os.register_at_fork(after_in_child=hang_once)\n"
        "ForkedWorker.patience = 1.0\n"
        "context = worker_context(2)\n"
        "print(sum(DataLoader(range(5), num_workers=2, multiprocessing_context=context)))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    if always:
        assert done.returncode == 1 and "gives a sign of life: --num-workers 0" in done.stderr
    else:
        assert done.stdout == "tensor([10])\n", done.stderr
    assert not os.path.exists(f"/proc/{(tmp_path / 'hung').read_text()}")


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_a_signal_does_not_end_a_worker_that_has_just_been_forked(tmp_path):
    """Each gets a SIGTERM in its first moment, as from a scheduler that tells all processes."""
    code = (
        "import os, signal\n"
        "from torch.utils.data import DataLoader\n"
        "from common.data import ForkedWorker, obey_only_the_rank, worker_context\n"
        "kill = lambda: print('killed', flush=True) or os.kill(os.getpid(), signal.SIGTERM)\n"
        "os.register_at_fork(after_in_child=kill)\n"
        "ForkedWorker.patience = 1.0\n"
        "how = {'worker_init_fn': obey_only_the_rank, 'num_workers': 2}\n"
        "print(sum(DataLoader(range(5), multiprocessing_context=worker_context(2), **how)))\n"
        "print(signal.pthread_sigmask(signal.SIG_BLOCK, set()))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "killed\nkilled\ntensor([10])\nset()\n", done.stdout + done.stderr


def test_without_workers_there_is_no_way_to_start_them():
    assert worker_context(0) is None


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits", "unused")


def test_preload_imports_what_the_data_set_needs_and_raises_nothing(tmp_path):
    code = (
        "import sys; from common.data import preload\n"
        "preload(sys.argv[1]); print('torchvision' in sys.modules)"
    )
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "torchvision.py").write_text("raise ImportError('built for another torch')")
    for name, first, expected in (
        ("digits", ROOT, "False"),
        ("mnist", ROOT, "True"),
        ("mnist", broken, "False"),
    ):
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (first, ROOT)))}
        argv = [sys.executable, "-c", code, name]
        done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True)
        assert (done.stdout.strip(), done.stderr) == (expected, ""), (name, first)


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
        set_seed(0)
        linear = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
        model = linear if name == "linear" else build_model(name, (1, 28, 28))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        sampler = ShardedBatchSampler(train, 64, num_replicas=1, rank=0, seed=0)
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
    for dataset in (digits[1], pairs, Subset(pairs, range(10)), Plain(10)):
        loader = DataLoader(Batches(dataset), sampler=sampler, batch_size=None)
        assert [len(targets) for _, targets in loader] == [4, 4, 2]
        source, targets = Batches(dataset)[[7, 3]]
        if dataset is not digits[1]:
            assert targets.tolist() == [7, 3]
        none, no_targets = Batches(dataset)[[]]
        assert type(none) is type(source) and no_targets.shape == (0,)
        assert no_targets.dtype == targets.dtype
    assert source["half"].tolist() == [[3.5], [1.5]] and source["name"] == ["sample 7", "sample 3"]
    assert none["half"].shape == (0, 1)


class Counted(Plain):
    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.asked = []

    def __getitems__(self, indices: list[int]) -> list:
        self.asked.append(indices)
        return [self[index] for index in indices]


def test_a_data_set_with_getitems_is_asked_once_a_batch():
    dataset = Counted(10)
    assert Batches(dataset)[[7, 3]][1].tolist() == [7, 3] and dataset.asked == [[7, 3]]


class Noise(Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> float:
        return random.random() + np.random.rand() + torch.rand(()).item()


def test_a_batchs_noise_in_a_worker_is_that_of_its_epoch_and_first_sample(monkeypatch):
    def draw(seed: int, worker: int, indices: list[int]) -> float:
        info = SimpleNamespace(seed=seed + worker, id=worker)  # as torch makes them
        monkeypatch.setattr("common.data.get_worker_info", lambda: info)
        return Batches(Noise())[indices][0].item()

    first = draw(100, 0, [3, 8])
    assert draw(100, 0, [8, 3]) != first != draw(200, 0, [3, 8])
    assert draw(100, 1, [3, 8]) == first  # whichever worker it comes to
    monkeypatch.setattr("common.data.get_worker_info", lambda: None)
    set_seed(7)
    values = [Batches(Noise())[[3, 8]][0].item() for _ in range(2)]
    assert values[0] != values[1]  # no worker: the process's own numbers go on


@pytest.mark.skipif(sys.platform != "linux", reason="others cannot tell who sends a signal")
def test_a_worker_obeys_its_rank_alone():
    code = """if True:
        import multiprocessing, os, signal, time
        from common.data import obey_only_the_rank
        def work():
            obey_only_the_rank(0)
            for signum in (signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), signum)
            time.sleep(0.5)
            theirs.send("alive")
            time.sleep(60)
        ours, theirs = multiprocessing.Pipe()
        worker = multiprocessing.get_context("fork").Process(target=work, daemon=True)
        worker.start()
        print(ours.recv() if ours.poll(5) else "dead")
        worker.terminate()
        worker.join(5)
        print("status", worker.exitcode)
        worker.kill()
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "alive\nstatus 0\n", done.stderr  # and not by a signal


@pytest.mark.parametrize("count", [1, 5, 31, 32, 33, 65, 97, 12_000])
@pytest.mark.parametrize("batch_size", [1, 2, 7, 32])
def test_global_batches_are_even_and_go_on_as_they_began(count, batch_size):
    for world_size in (1, 2, 3):
        sampler = ShardedBatchSampler(range(count), batch_size, world_size, 0, seed=1)
        sizes = sampler.sizes()
        limit = batch_size * world_size
        assert sum(sizes) == count and len(sizes) == len(sampler) == -(-count // limit)
        assert sizes == sorted(sizes) and sizes[-1] - sizes[0] <= 1 and sizes[-1] <= limit
        seen = 0
        for step, size in enumerate(sizes, start=1):  # resumed after any step: the same ones
            seen += size
            if step in (1, 2, len(sizes) // 2, len(sizes)):
                sampler.set_epoch(0, start=seen)
                assert sampler.sizes() == sizes[step:]


def test_an_empty_data_set_is_refused():
    with pytest.raises(DataError, match="the training set is empty"):
        ShardedBatchSampler([], 32, 2, 0, seed=1)
    with pytest.raises(DataError, match="a data set is empty"):
        Batches([])


@pytest.mark.parametrize("count", [1, 7, 64, 100, 257])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("start", [0, 5, 64])
def test_sampler_deals_every_sample_once(count, world_size, start):
    dataset, batch_size, previous = range(count), 8, None
    for epoch in (0, 1):
        samplers = [
            ShardedBatchSampler(dataset, batch_size, world_size, rank, seed=42)
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
            assert max(sizes) - min(sizes) <= 1
        assert len(order) < 32 or order != previous
        previous = order


def test_sampler_has_distributed_samplers_order():
    dataset = range(96)
    for rank in range(3):
        ours = ShardedBatchSampler(dataset, 8, 3, rank, seed=7)
        theirs = DistributedSampler(dataset, num_replicas=3, rank=rank, seed=7)
        for epoch in (0, 5):
            ours.set_epoch(epoch)
            theirs.set_epoch(epoch)
            assert [index for batch in ours for index in batch] == list(theirs)
