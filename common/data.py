"""Data sets as uint8 tensors in memory, fetched a batch at a time, and who trains on what.

`load_dataset` gives (train, test). `digits`, the default, is generated and needs no download;
the others come through torchvision. `ShardedBatchSampler` deals an epoch's samples to the ranks,
and `Batches` fetches them, from any map-style data set.
"""

import contextlib
import importlib
import multiprocessing.context
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset, DistributedSampler, default_collate, get_worker_info

from common.seed import set_seed

DATASETS = ("digits", "mnist", "fashion-mnist", "cifar10")


class DataError(RuntimeError):
    """The data cannot be had. The message is one line that names the thing and the remedy."""


class ImageDataset(Dataset):
    """Images and their classes, held as they are stored and converted a batch at a time.

    Args:
        images: (N, C, H, W), uint8.
        targets: (N,), int64, classes from 0.
        mean, std: a value for each channel, of pixels scaled to 0..1.
    """

    def __init__(
        self,
        images: torch.Tensor,
        targets: torch.Tensor,
        mean: tuple[float, ...],
        std: tuple[float, ...],
    ) -> None:
        self.images = images
        self.targets = targets
        # Normalisation as one multiplication and one addition: pixel * scale + offset.
        mean_, std_ = (torch.tensor(x, dtype=torch.float64).view(-1, 1, 1) for x in (mean, std))
        self.scale = (1 / (255 * std_)).to(torch.get_default_dtype())
        self.offset = (-mean_ / std_).to(torch.get_default_dtype())

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One sample: (C, H, W) in torch's default dtype, and its class as an int64 scalar."""
        images, targets = self.__getitems__([range(len(self.targets))[index]])
        return images[0], targets[0]

    def __getitems__(self, indices: torch.Tensor | list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """A whole batch, (B, C, H, W) and (B,): the DataLoader calls this where it is defined."""
        indices = torch.as_tensor(indices, dtype=torch.int64)
        images = self.images.index_select(0, indices)  # a quarter of [indices]'s time
        images = images.to(self.scale.dtype).mul_(self.scale).add_(self.offset)
        return images, self.targets.index_select(0, indices)


class Batches(Dataset):
    """Any map-style data set, asked for a batch at a time; every batch has the same structure.

    For `DataLoader(Batches(dataset), sampler=..., batch_size=None)`, with a sampler that yields
    lists of indices. A data set that defines `__getitems__(indices)` is asked once a batch, and
    may return a tuple, which is the batch; all else is stacked by torch's `default_collate`.

    In a loader's worker process every batch draws from a seed of its own, made of the loader's for
    this epoch and the batch's first index: random augmentation differs by rank, epoch and sample,
    does not depend on the number of workers, and goes on exactly where a run was stopped.

    Raises:
        DataError: the data set is empty.
    """

    def __init__(self, dataset: Dataset) -> None:
        if len(dataset) == 0:
            raise DataError("a data set is empty: look at what loads it")
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, indices: list[int]) -> Any:
        """The batch of these samples, (B, ...) each; B may be 0, where a rank has no sample."""
        if not indices:
            return tree_map_only(torch.Tensor, lambda tensor: tensor[:0], self[[0]])
        worker = get_worker_info()
        if worker:
            set_seed(worker.seed - worker.id + indices[0])
        if hasattr(self.dataset, "__getitems__"):
            batch = self.dataset.__getitems__(indices)
        else:
            batch = [self.dataset[index] for index in indices]
        return batch if isinstance(batch, tuple) else default_collate(batch)


if sys.platform == "linux":

    class ForkedWorker(multiprocessing.context.ForkProcess):
        """A loader's worker, which is known to run when `start` returns.

        With Python 3.11 the child of a fork hangs if another thread, such as gloo's or NCCL's, was
        about to take the GIL: with torch 2.15, of forks right after a collective, one in a hundred
        to a thousand. Whoever gives no sign of life is killed, and forked anew.

        Raises:
            RuntimeError: six in a row gave none.
        """

        patience = 10.0  # seconds

        @staticmethod
        def _Popen(worker: "ForkedWorker") -> Any:  # the fork itself
            for _ in range(6):
                worker.sign = multiprocessing.get_context("fork").Event()
                # The worker inherits this: until `obey_only_the_rank` runs, no signal may end it.
                mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
                try:
                    forked = multiprocessing.context.ForkProcess._Popen(worker)
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                if worker.sign.wait(worker.patience):
                    return forked
                forked.kill()
                forked.wait()
            raise RuntimeError("no fork of a loader's worker gives a sign of life: --num-workers 0")

        def run(self) -> None:
            self.sign.set()
            super().run()

    class ForkedWorkers(multiprocessing.context.ForkContext):
        """A context of multiprocessing whose processes are `ForkedWorker`s."""

        Process = ForkedWorker


def worker_context(num_workers: int) -> multiprocessing.context.BaseContext | None:
    """For `DataLoader(multiprocessing_context=...)`: how its workers start; None is torch's way.

    On Linux they are forked, and there at once; elsewhere each starts Python anew. It goes with
    `worker_init_fn=obey_only_the_rank`, as forked workers start with signals blocked.
    """
    return ForkedWorkers() if num_workers > 0 and sys.platform == "linux" else None


def obey_only_the_rank(worker_id: int) -> None:
    """For `DataLoader(worker_init_fn=...)`: only the process that uses a worker may end it.

    A scheduler's SIGTERM and Ctrl-C reach all processes of a job. Workers that end by them take
    their rank down before it can save. On Linux: elsewhere a worker cannot tell who has sent a
    signal, and this does nothing.
    """
    if not hasattr(signal, "sigwaitinfo"):
        return

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    threading.Thread(target=wait, daemon=True).start()


class ShardedBatchSampler(DistributedSampler):
    """Deals each epoch's permutation to the ranks, one global batch after the other.

    The permutation is DistributedSampler's own, randperm seeded with `seed + epoch`, and so is
    the rule: of each global batch rank r takes every `num_replicas`-th sample from the r-th on.
    Joined over the ranks, step k is therefore the same set of samples at any number of
    processes. What differs from DistributedSampler + BatchSampler:

    - Nothing is padded or dropped. Instead of a short batch at its end, an epoch has global
      batches of one size, to within one sample: 97 samples in batches of at most 32 are 24, 24,
      24 and 25. The ranks' shares of one differ by one sample at the most. A rank gets none
      where a global batch has fewer samples than there are ranks; it takes the step all the
      same, as collectives need. Weigh the loss by the size of the global batch: `sizes`.
    - An epoch can be entered in the middle, at another number of processes too.
    - It yields lists of indices, whole batches, for `DataLoader(sampler=..., batch_size=None)`.

    Raises:
        DataError: the data set is empty.

    https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
    """

    def __init__(
        self, dataset: Dataset, batch_size: int, num_replicas: int, rank: int, seed: int
    ) -> None:
        if len(dataset) == 0:
            raise DataError("the training set is empty: look at what loads it")
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, seed=seed)
        self.global_batch = batch_size * num_replicas
        self.start = 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch's permutation, and how many samples of it the job has seen already."""
        super().set_epoch(epoch)
        self.start = start

    def sizes(self) -> list[int]:
        """The number of samples of each global batch to come, over all ranks."""
        steps = len(self)
        size, larger = divmod(len(self.dataset) - self.start, max(steps, 1))
        # The smaller ones first: what cannot train on them fails at the first step, not the last.
        return [size] * (steps - larger) + [size + 1] * larger

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator)
        first = self.start
        for size in self.sizes():  # not order.split(): millions of tensors at once
            window = order[first : first + size]
            yield window[self.rank :: self.num_replicas].tolist()
            first += size

    def __len__(self) -> int:
        return len(range(self.start, len(self.dataset), self.global_batch))


def preload(name: str) -> None:
    """Import what `load_dataset(name, ...)` will need: a second's work, while another one loads.

    Raises nothing: what is amiss is for `load_dataset` to say.
    """
    if name != "digits":
        with contextlib.suppress(DataError):
            import_torchvision()


def load_dataset(name: str, data_dir: str) -> tuple[ImageDataset, ImageDataset]:
    """The training and the test set of one of `DATASETS`, downloaded into `data_dir` if need be.

    Not for several processes at once that share `data_dir`, on one node or on several: they would
    download into the same folder.

    Raises:
        DataError: download failed, file missing or damaged, folder not writable, torchvision
            missing or not the one for this torch.
    """
    if name == "digits":
        return make_digits(12_000, seed=0), make_digits(2_000, seed=1)
    return _load_torchvision(name, data_dir)


# --- digits -------------------------------------------------------------------------------------

_GLYPHS = """
.###. ..#.. .###. .###. ...#. ##### .###. ##### .###. .###.
#...# .##.. #...# #...# ..##. #.... #.... ....# #...# #...#
#...# ..#.. ....# ....# .#.#. #.... #.... ...#. #...# #...#
#...# ..#.. ...#. ..##. #..#. ####. ####. ...#. .###. .####
#...# ..#.. ..#.. ....# ##### ....# #...# ..#.. #...# ....#
#...# ..#.. .#... #...# ...#. #...# #...# ..#.. #...# ....#
.###. .###. ##### .###. ...#. .###. .###. ..#.. .###. .###.
"""


def make_digits(count: int, seed: int) -> ImageDataset:
    """`count` images, (N, 1, 28, 28), of ten glyphs turned, scaled, sheared, shifted and blurred.

    Needs no file. All arithmetic is float64, and only the result is rounded to uint8, so that
    machines whose vector units round differently get the same bytes.
    """
    generator = torch.Generator().manual_seed(seed)
    targets = torch.arange(count) % 10
    # A thousand at a time, which stay in the processor's cache: ten times as fast as all at once.
    images = torch.cat([_draw_digits(chunk, generator) for chunk in targets.split(1000)])
    return ImageDataset(images, targets, mean=(0.15,), std=(0.20,))


def _draw_digits(targets: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Images (N, 1, 28, 28), uint8, of the digits in `targets` (N,)."""

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        draws = torch.rand(len(targets), *shape, generator=generator, dtype=torch.float64)
        return low + (high - low) * draws

    rows = [line.split() for line in _GLYPHS.split("\n") if line]
    glyphs = torch.tensor(
        [[[cell == "#" for cell in row[digit]] for row in rows] for digit in range(10)],
        dtype=torch.float64,
    )  # (10, 7, 5)

    # Output pixel (x, y) shows the glyph at (u, v), both from -1 to 1 over their grids: the
    # inverse of shearing, scaling, turning and shifting. 30x30 pixels, as the blur takes a rim.
    angle, shear = uniform(-0.4, 0.4, 1, 1), uniform(-0.3, 0.3, 1, 1)
    width, height = uniform(0.35, 0.6, 1, 1), uniform(0.5, 0.8, 1, 1)
    axis = torch.linspace(-29 / 28, 29 / 28, 30, dtype=torch.float64)
    x = axis.view(1, 1, 30) - uniform(-0.25, 0.25, 1, 1)
    y = axis.view(1, 30, 1) - uniform(-0.25, 0.25, 1, 1)
    u = (angle.cos() * x + angle.sin() * y) / width
    v = (angle.cos() * y - angle.sin() * x) / height
    grid = torch.stack((u - shear * v, v), dim=-1)
    images = F.grid_sample(glyphs[targets].unsqueeze(1), grid, align_corners=False).squeeze(1)

    for dim in (1, 2):  # blur with (1, 2, 1) / 4 down the columns, then along the rows
        first, middle, last = (images.narrow(dim, start, 28) for start in range(3))
        images = (first + 2 * middle + last) / 4
    images = uniform(0.6, 1.2, 1, 1) * images + uniform(-0.2, 0.2, 28, 28)
    return (255 * images.clamp(0, 1)).round().to(torch.uint8).unsqueeze(1)


# --- torchvision's data sets --------------------------------------------------------------------

_TORCHVISION = {  # class, mean and standard deviation of the training set's channels
    "mnist": ("MNIST", (0.1307,), (0.3081,)),
    "fashion-mnist": ("FashionMNIST", (0.2860,), (0.3530,)),
    "cifar10": ("CIFAR10", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}


def import_torchvision() -> ModuleType:
    """torchvision, imported here only: it costs every process more than a second.

    Raises:
        DataError: it is missing, or was built for another torch.
    """
    try:
        return importlib.import_module("torchvision")
    except Exception as error:  # a build for another torch fails in many ways
        raise DataError(
            f"torchvision does not work with torch {torch.__version__} ({_first_line(error)}): "
            "install the two together, pip install --upgrade torch torchvision"
        ) from error


def _load_torchvision(name: str, data_dir: str) -> tuple[ImageDataset, ImageDataset]:
    class_name, mean, std = _TORCHVISION[name]
    dataset_class = getattr(import_torchvision().datasets, class_name)
    sets = []
    for train in (True, False):
        try:
            data = dataset_class(data_dir, train=train, download=True)
            images, targets = torch.as_tensor(data.data), torch.as_tensor(data.targets)
            # (N, H, W) of the grey sets, (N, H, W, 3) of the coloured one -> (N, C, H, W)
            images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2)
            if len(images) != len(targets) or len(images) == 0 or targets.max() > 9:
                raise ValueError(f"{len(images)} images and {len(targets)} labels do not match")
        except Exception as error:
            raise DataError(_explain(error, class_name, data_dir)) from error
        sets.append(ImageDataset(images.contiguous(), targets, mean, std))
    return sets[0], sets[1]


def _explain(error: Exception, class_name: str, data_dir: str) -> str:
    """One line for what torchvision's loaders raise: they raise nearly everything."""
    reason = _first_line(error)
    # urllib's errors are OSErrors too, but have no file name.
    if isinstance(error, OSError) and error.filename and not hasattr(error, "url"):
        return f"cannot use the data folder {data_dir} ({reason}): name another with --data-dir"
    if isinstance(error, OSError) or "Error downloading" in str(error):
        return (
            f"cannot download {class_name} to {data_dir} ({reason}): put its files there by hand, "
            "or use --dataset digits, which needs none"
        )
    return (
        f"{class_name} in {data_dir} is damaged or incomplete ({reason}): "
        "delete it there, and it is downloaded again"
    )


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # torchvision lists every mirror it tried: the last line has the network's own words.
    return f"{type(error).__name__}: {lines[-1] if lines else error!r}"
