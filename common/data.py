"""Data sets as uint8 tensors in memory, fetched a batch at a time, and who trains on what.

`load_dataset` gives (train, test). `digits`, the default, is generated and needs no download;
the others come through torchvision. `GlobalBatchSampler` deals an epoch's samples to the ranks.
`collate`, `worker_context` and `follow` are for the `DataLoader` of any map-style data set.
"""

import importlib
import math
import multiprocessing.forkserver
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset, Sampler, default_collate

DATASETS = ("digits", "mnist", "fashion-mnist", "cifar10")


class DataError(SystemExit):
    """The data cannot be had. The message is one line that names the thing and the remedy.

    It ends the process with that line and status 1, in a child process, too.
    """


class ImageDataset(Dataset):
    """Images and their classes, held as they are stored and converted a batch at a time.

    Args:
        images: (N, C, H, W), uint8.
        targets: (N,), int64, classes from 0.
        mean, std: a value for each channel, of pixels scaled to 0..1.
    """

    def __init__(self, images: Tensor, targets: Tensor, mean: tuple, std: tuple) -> None:
        self.images = images
        self.targets = targets
        # Normalisation as one multiplication and one addition: pixel * scale + offset.
        mean_, std_ = (torch.tensor(x, dtype=torch.float64).view(-1, 1, 1) for x in (mean, std))
        self.scale = (1 / (255 * std_)).to(torch.get_default_dtype())
        self.offset = (-mean_ / std_).to(torch.get_default_dtype())

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One sample: (C, H, W) in torch's default dtype, and its class as an int64 scalar."""
        images, targets = self.__getitems__([range(len(self.targets))[index]])
        return images[0], targets[0]

    def __getitems__(self, indices: Tensor | list[int]) -> tuple[Tensor, Tensor]:
        """A whole batch, (B, C, H, W) and (B,): the DataLoader calls this where it is defined."""
        indices = torch.as_tensor(indices, dtype=torch.int64)
        images = self.images.index_select(0, indices)  # a quarter of [indices]'s time
        images = images.to(self.scale.dtype).mul_(self.scale).add_(self.offset)
        return images, self.targets.index_select(0, indices)


def collate(batch: Any) -> Any:
    """Stack samples into a batch; a data set with `__getitems__` gives whole batches already."""
    return batch if isinstance(batch, tuple) else default_collate(batch)


def worker_context(num_workers: int) -> multiprocessing.context.BaseContext | None:
    """For `DataLoader(multiprocessing_context=...)`: workers are forked from a server process.

    A worker that is forked from a rank may hang, because gloo's or NCCL's threads may hold a lock
    at that moment. A worker that is spawned needs two seconds to import torch. The server has no
    threads, and imports torch once. It does not hear SIGINT and SIGTERM, nor do its workers: see
    `follow`. Only on Linux: elsewhere this returns None, and torch spawns the workers.
    https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods
    """
    if num_workers == 0 or sys.platform != "linux":
        return None
    multiprocessing.forkserver.set_forkserver_preload(["torch", "tqdm"])
    multiprocessing.resource_tracker.ensure_running()  # which would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    multiprocessing.forkserver.ensure_running()  # it inherits what is blocked
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return multiprocessing.get_context("forkserver")


def follow(worker_id: int) -> None:
    """For `DataLoader(worker_init_fn=...)`: a worker ends when its rank ends it, or has ended.

    A scheduler's SIGTERM reaches all processes. A worker that obeyed it would take its rank down
    before that can save. Only on Linux, where `worker_context` has blocked the signal.
    """
    rank = multiprocessing.parent_process()
    sys.excepthook = lambda *_: None  # quiet about a connection that a killed rank has broken

    def wait() -> None:
        while rank.is_alive():
            heard = signal.sigtimedwait({signal.SIGTERM}, 1)  # second
            if heard and heard.si_pid == rank.pid:
                break
        os._exit(0)

    if sys.platform == "linux":
        threading.Thread(target=wait, daemon=True).start()


class GlobalBatchSampler(Sampler[list[int]]):
    """Each rank's share of each global batch, for `DataLoader(batch_sampler=...)`.

    An epoch is one permutation of the data, drawn from `seed + epoch`, cut into global batches of
    equal size (to within one sample); of each, rank r takes every `world_size`-th sample from the
    r-th on. So step k has the same samples at any number of processes, and none is padded, repeated
    or left out. (DistributedSampler pads the epoch, and the last batch is a short one.)

    Args:
        batch_size: samples per rank and step, at the most.

    Raises:
        ValueError: there are fewer samples than ranks.
    """

    def __init__(
        self, dataset: Dataset, batch_size: int, rank: int = 0, world_size: int = 1, seed: int = 0
    ) -> None:
        self.samples = len(dataset)
        self.global_batch = batch_size * world_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        if self.samples == 0:
            raise ValueError("the training set is empty")
        self.set_epoch(0)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the permutation, and how many samples of it the job has seen already.

        Raises:
            ValueError: some samples are left, but fewer than there are ranks.
        """
        self.epoch = epoch
        self.start = start
        if 0 < self.samples - start < self.world_size:
            left = self.samples - start
            raise ValueError(
                f"{left} samples are left for {self.world_size} processes: start fewer"
            )

    def sizes(self) -> list[int]:
        """The number of samples of each global batch to come, over all ranks."""
        steps = len(self)
        size, larger = divmod(self.samples - self.start, max(steps, 1))
        return [size] * (steps - larger) + [size + 1] * larger

    def __len__(self) -> int:
        remaining = self.samples - self.start
        return min(math.ceil(remaining / self.global_batch), remaining // self.world_size)

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.samples, generator=generator)
        first = self.start
        for size in self.sizes():
            yield order[first + self.rank : first + size : self.world_size].tolist()
            first += size


def load_dataset(name: str, data_dir: str) -> tuple[ImageDataset, ImageDataset]:
    """The training and the test set of one of `DATASETS`, downloaded into `data_dir` if need be.

    Not for several processes at once that share `data_dir`, on one node or on several: they would
    download into the same folder.

    Raises:
        DataError: download failed, file missing or damaged, folder not writable, torchvision
            missing or not the one for this torch. It is a SystemExit.
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


def _draw_digits(targets: Tensor, generator: torch.Generator) -> Tensor:
    """Images (N, 1, 28, 28), uint8, of the digits in `targets` (N,)."""

    def uniform(low: float, high: float, *shape: int) -> Tensor:
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
            f"error: torchvision does not work with torch {torch.__version__} "
            f"({_first_line(error)}): pip install --upgrade torch torchvision, the two together"
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
            raise DataError(f"error: {_explain(error, class_name, data_dir)}") from error
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
