"""Train on all devices of this node from one process, with nn.DataParallel.

    python data_parallel.py                             all devices that torch finds
    CUDA_VISIBLE_DEVICES=0,2 python data_parallel.py    these two; with none named, the CPU
    python data_parallel.py --batch-size 128            128 over all devices: 32 each on four
    python data_parallel.py --help                      all options

In every step DataParallel *scatters* the batch over the devices, in chunks; *replicates* the model
from device 0 to all others; runs the replicas, each in a Python thread; *gathers* the outputs on
device 0, where the loss is computed and backward() starts; and adds up the gradients there. One
optimizer on device 0 takes the step.

It is kept for the code that uses it. torch's documentation recommends DDP (ddp_spawn.py) instead:
here the weights travel anew in every step, the threads share one GIL, device 0 computes the loss
and the update while the others wait, and there is no second node. With DDP each device has a
process and a replica of its own, and only gradients travel, during the backward pass. This file
stops and resumes like single_gpu.py. To make it yours, edit the lines marked "load your".
"""

import argparse
import importlib.util
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler
from tqdm import tqdm

from common.data import (
    DATASETS,
    Batches,
    DataError,
    ShardedBatchSampler,
    load_dataset,
    obey_only_the_rank,
    worker_context,
)
from common.model import DEFAULT_MODEL, MODELS, build_model, check_batch_norm
from common.seed import get_rng_state, set_rng_state, set_seed, use_deterministic_kernels


class Trainer:
    def __init__(
        self,
        model: nn.Module,
        train_data: DataLoader,
        test_data: DataLoader,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler,
        device: torch.device,
        snapshot: dict | None,
        stop: torch.Tensor,
        args: argparse.Namespace,
    ) -> None:
        self.device = device
        self.args = args
        self.stop = stop  # the number of the signal that asks for a stop, or 0
        self.model = nn.DataParallel(model)  # over all devices that torch finds
        self.devices = [device]
        if self.model.device_ids:
            self.devices = [torch.device(device.type, index) for index in self.model.device_ids]
        set_seed(args.seed, devices=self.devices)  # from here on each device draws its own
        self.train_data = train_data
        self.test_data = test_data
        self.pinned = train_data.pin_memory  # only copies from pinned memory may overlap the work
        self.optimizer = optimizer
        self.schedule = schedule
        self.epoch = 0  # the epoch in progress
        self.samples_seen = 0  # in this epoch
        self.loss_sum = torch.zeros((), device=device)  # over these samples
        self.stopped = 0  # the number of the signal that has ended training, or 0
        count = len(self.model.device_ids)
        split = f"split over {count} devices" if count > 1 else "not split: there is one device"
        log(f"DataParallel on {device} | Batches are {split}")
        if snapshot is not None:
            self._load_snapshot(snapshot)
        self.writer = None
        if args.log_dir:
            from torch.utils.tensorboard import SummaryWriter  # an extra, and slow to import

            self.writer = SummaryWriter(args.log_dir, purge_step=self.epoch)

    def _run_batch(self, source: torch.Tensor, targets: torch.Tensor, count: int) -> torch.Tensor:
        self.optimizer.zero_grad()
        output = self.model(source)  # load your inputs
        # On the gathered outputs: a mean of per-device means is wrong where chunks are uneven.
        loss = F.cross_entropy(output, targets, reduction="sum")  # load your loss
        (loss / count).backward()  # of the mean over the batch
        self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch: int) -> None:
        self.train_data.sampler.set_epoch(epoch, self.samples_seen)
        self.train_data.generator.manual_seed(torch.initial_seed() + epoch)  # its workers' seeds
        name = self.device.type.upper().replace("CUDA", "GPU")
        b_sz = self.args.batch_size
        line = f"Epoch {epoch} | Batchsize: {b_sz} | Steps: {len(self.train_data)}"
        log(f"[{name}0] {line}")
        sizes = self.train_data.sampler.sizes()  # of the batches, step by step
        self.model.train()
        hidden = self.args.no_progress or not sys.stderr.isatty()
        progress = tqdm(self.train_data, leave=False, disable=hidden)
        for step, (source, targets) in enumerate(progress, start=1):
            source = source.to(self.device, non_blocking=self.pinned)  # load your inputs
            targets = targets.to(self.device, non_blocking=self.pinned)  # load your inputs
            count = sizes[step - 1]
            loss = self._run_batch(source, targets, count)
            self.loss_sum += loss
            self.samples_seen += count
            if self.args.log_interval and step % self.args.log_interval == 0:
                log(f"Epoch {epoch} | Step {step} | Loss: {loss.item() / count:.6f}")
            self.stopped = self.stop.item()
            if self.stopped:
                break
        progress.close()

    @torch.no_grad()
    def _evaluate(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.model.eval()
        loss_sum = torch.zeros((), device=self.device)
        correct = torch.zeros((), device=self.device)
        for source, targets in self.test_data:
            source = source.to(self.device, non_blocking=self.pinned)  # load your inputs
            targets = targets.to(self.device, non_blocking=self.pinned)  # load your inputs
            output = self.model(source)  # load your inputs
            loss_sum += F.cross_entropy(output, targets, reduction="sum")  # load your loss
            correct += (output.argmax(dim=1) == targets).sum()  # load your metric
        return loss_sum, correct

    def train(self, total_epochs: int) -> None:
        path = self.args.snapshot_path
        train_size = len(self.train_data.dataset)
        test_size = len(self.test_data.dataset)
        for epoch in range(self.epoch, total_epochs):
            seen_before = self.samples_seen
            start = time.perf_counter()
            self._run_epoch(epoch)
            if self.device.type != "cpu":
                torch.accelerator.synchronize()  # the clock must not stop before the device
            rate = (self.samples_seen - seen_before) / (time.perf_counter() - start)
            if self.stopped:
                self._save_snapshot()
                log(f"Epoch {epoch} | Stopped at sample {self.samples_seen}, saved at {path}")
                return
            sums = torch.stack((self.loss_sum, *self._evaluate()))
            train_loss, test_loss, correct = sums.tolist()
            train_loss /= train_size
            test_loss /= test_size
            losses = f"Train loss: {train_loss:.4f} | Test loss: {test_loss:.4f}"
            accuracy = f"Accuracy: {correct:.0f}/{test_size} ({correct / test_size:.2%})"
            log(f"Epoch {epoch} | {losses} | {accuracy} | {rate:.0f} samples/s")
            if self.writer:
                self.writer.add_scalar("loss/train", train_loss, epoch)
                self.writer.add_scalar("loss/test", test_loss, epoch)
                self.writer.add_scalar("accuracy", correct / test_size, epoch)
                self.writer.add_scalar("samples_per_second", rate, epoch)
                self.writer.flush()
            self.schedule.step()  # load your schedule, if it steps otherwise
            self.epoch = epoch + 1
            self.samples_seen = 0
            self.loss_sum.zero_()
            if self.epoch % self.args.save_every == 0 or self.epoch == total_epochs:
                self._save_snapshot()
                log(f"Epoch {epoch} | Training checkpoint saved at {path}")

    # --- snapshots and stopping ---

    def _save_snapshot(self) -> None:
        snapshot = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": {},  # ddp_torchrun.py has one; each script reads all snapshots
            "epoch": self.epoch,
            "samples_seen": self.samples_seen,
            "loss_sum": self.loss_sum.item(),
            "rng_states": [get_rng_state(*self.devices)],  # one for each process
            "settings": vars(self.args),
        }
        # First to another file: whatever happens here, the snapshot before stays whole.
        path = Path(self.args.snapshot_path)
        temporary = Path(f"{path}.tmp")
        try:
            with temporary.open("wb") as file:
                torch.save(snapshot, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except (OSError, RuntimeError) as error:  # the latter from torch.save
            temporary.unlink(missing_ok=True)
            sys.exit(f"error: cannot save {path} ({error}): make room, then --resume")

    def _load_snapshot(self, snapshot: dict) -> None:
        try:
            # A new --lr or --momentum counts more than the snapshot's: the new values, and a new
            # schedule that has come to this epoch, take the place of those that were loaded.
            then = snapshot["settings"]
            changeable = [name for name in self.optimizer.defaults if name in self.args.kept]
            if any(getattr(self.args, name) != then.get(name) for name in changeable):
                with warnings.catch_warnings(action="ignore"):  # no optimizer.step() between them
                    for _ in range(snapshot["schedule"]["last_epoch"]):
                        self.schedule.step()
                snapshot["optimizer"]["param_groups"] = self.optimizer.state_dict()["param_groups"]
                snapshot["schedule"] = self.schedule.state_dict()
            self.model.module.load_state_dict(snapshot["model"])
            self.optimizer.load_state_dict(snapshot["optimizer"])
            self.schedule.load_state_dict(snapshot["schedule"])
            self.epoch = snapshot["epoch"]
            self.samples_seen = snapshot["samples_seen"]
            self.loss_sum.fill_(snapshot["loss_sum"])
            set_rng_state(snapshot["rng_states"][0], *self.devices)
        except Exception as error:  # load_state_dict raises nearly everything
            cannot_resume(self.args, error)
        log(f"Resuming training from snapshot at Epoch {self.epoch}, sample {self.samples_seen}")


# --- setting up ---


def load_train_objs(args: argparse.Namespace, device: torch.device) -> tuple:
    train_set, test_set = load_dataset(args.dataset, args.data_dir)  # load your dataset
    set_seed(args.seed)
    model = build_model(args.model, train_set[0][0].shape).to(device)  # load your model
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=args.lr,
        momentum=args.momentum,
    )
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1)  # load your schedule
    return train_set, test_set, model, optimizer, schedule


def prepare_dataloader(
    dataset: Dataset, sampler: Sampler, device: torch.device, num_workers: int
) -> DataLoader:
    return DataLoader(
        Batches(dataset),
        sampler=sampler,
        batch_size=None,  # the sampler gives whole batches
        num_workers=num_workers,
        multiprocessing_context=worker_context(num_workers),
        worker_init_fn=obey_only_the_rank,
        pin_memory=device.type not in ("cpu", "mps"),
        generator=torch.Generator(),  # its own, so that it draws nothing from the model's
    )


def main(args: argparse.Namespace, stop: torch.Tensor) -> None:
    if args.deterministic:
        use_deterministic_kernels()
    device = torch.device(args.device)
    snapshot = open_snapshot(args)
    line = "total_epochs: {total_epochs}, save_every: {save_every}, batch_size: {batch_size}"
    log(line.format(**vars(args)))
    train_set, test_set, model, optimizer, schedule = load_train_objs(args, device)
    train_sampler = ShardedBatchSampler(
        train_set, args.batch_size, num_replicas=1, rank=0, seed=args.seed
    )
    # DataParallel splits a batch with chunk(), whose last part is the smallest.
    sizes = train_sampler.sizes()
    devices = max(1, torch.accelerator.device_count())
    last_chunks = [len(torch.empty(size).chunk(devices)[-1]) for size in (sizes[0], sizes[-1])]
    check_batch_norm(model, min(last_chunks), train_set)
    test_sampler = BatchSampler(range(len(test_set)), args.test_batch_size, drop_last=False)
    train_data = prepare_dataloader(train_set, train_sampler, device, args.num_workers)
    test_data = prepare_dataloader(test_set, test_sampler, device, args.num_workers)
    trainer = Trainer(
        model, train_data, test_data, optimizer, schedule, device, snapshot, stop, args
    )
    catch_stop_signals(stop)
    trainer.train(args.total_epochs)
    if trainer.stopped:
        sys.exit(128 + trainer.stopped)  # the shells' number for a signal: not done yet


# --- plumbing ---


def catch_stop_signals(stop: torch.Tensor) -> None:
    # The handler only stores the signal's number: the loop looks at it after each step. `stop` is a
    # tensor so that the processes of ddp_spawn.py and of multinode.py can share it.
    def on_signal(signum: int, frame: object) -> None:
        stop.fill_(signum)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)


tqdm.set_lock(threading.RLock())  # tqdm's own leaks a semaphore where a process is killed


def log(line: str) -> None:
    tqdm.write(f"{line}\n", end="")  # one write, above the progress bar
    sys.stdout.flush()


def open_snapshot(args: argparse.Namespace) -> dict | None:
    path = Path(args.snapshot_path)
    if not args.resume:
        return None
    if not path.exists():
        log(f"No snapshot at {path}, starting from the beginning")
        return None
    try:
        snapshot = torch.load(path, map_location="cpu", weights_only=True)
        # A resumed run goes on as it was started, but for what its own command line says.
        for name in args.kept:
            now = getattr(args, name)
            then = snapshot["settings"].get(name, now)  # not every script has every option
            if name not in args.given:
                setattr(args, name, then)
            elif then != now and name in ("dataset", "model", "seed"):
                raise ValueError(f"made with --{name} {then}, and this run has {now}")
            elif then != now:
                log(f"{name}: {now} from the command line, not the snapshot's {then}")
    except Exception as error:  # torch.load raises nearly everything
        cannot_resume(args, error)
    return snapshot


def cannot_resume(args: argparse.Namespace, error: Exception) -> NoReturn:
    path = args.snapshot_path
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    sys.exit(f"error: cannot resume from {path} ({reason}): name another --snapshot-path")


def device_names() -> list[str]:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return ["cpu"]
    return [found.type]  # DataParallel takes no other


def at_least(low: float) -> Callable[[str], float]:
    # For add_argument(type=...): argparse puts the option's name before what is wrong with it.
    def number(text: str) -> float:
        value = type(low)(text)  # int or float
        if not low <= value < 2**32:
            raise argparse.ArgumentTypeError(f"{text} is out of range, which begins at {low}")
        return value

    number.__name__ = type(low).__name__  # argparse: "invalid int value"
    return number


def parse_args() -> argparse.Namespace:
    devices = device_names()
    job = argparse.ArgumentParser(add_help=False)  # what --resume takes from the snapshot
    add = job.add_argument
    add("total_epochs", nargs="?", type=at_least(1), default=5, help="how many epochs to train")
    add("save_every", nargs="?", type=at_least(1), default=1, help="epochs between two snapshots")
    add("--batch-size", "--batch_size", type=at_least(1), default=32, help="samples on all devices")
    add("--test-batch-size", type=at_least(1), default=1000, help="the same in evaluation")
    add("--lr", type=at_least(0.0), default=0.01, help="learning rate of SGD")
    add("--momentum", type=at_least(0.0), default=0.9, help="momentum of SGD")
    add("--dataset", choices=DATASETS, default="digits", help="digits needs no download")
    add("--data-dir", default="data", help="where torchvision keeps or downloads the others")
    add("--model", choices=MODELS, help="default: what suits the data set")
    add("--seed", type=at_least(0), default=42)
    usage = "%(prog)s [total_epochs] [save_every] [options]"
    title = __doc__.split("\n")[0]
    parser = argparse.ArgumentParser(parents=[job], usage=usage, description=title)
    add = parser.add_argument
    add("--deterministic", action="store_true", help="deterministic kernels on an accelerator")
    add("--device", choices=["auto", *devices], default="auto")
    add("--snapshot-path", default="checkpoint.pt")
    add("--resume", action="store_true", help="go on from the snapshot where there is one")
    add("--log-interval", type=at_least(0), default=0, help="steps between loss lines (0: none)")
    add("--log-dir", help="folder for TensorBoard's event files")
    add("--no-progress", action="store_true", help="no progress bar")
    add("--num-workers", type=at_least(0), default=0, help="loader processes; 4 for files, say")
    args = parser.parse_args()
    args.kept = [*vars(job.parse_args([]))]
    # Parsed again with None for every default: what is not None now was given.
    parser.set_defaults(**dict.fromkeys(vars(args)))
    args.given = [name for name, value in vars(parser.parse_args()).items() if value is not None]
    args.model = args.model or DEFAULT_MODEL[args.dataset]
    args.device = devices[0] if args.device == "auto" else args.device
    if args.deterministic and args.device.startswith("mps"):
        parser.error("--deterministic cannot work on mps, where torch lacks such kernels: use cpu")
    path = Path(args.snapshot_path)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        parser.error(f"--snapshot-path {path}: name a file in a folder that you may write to")
    if args.log_dir and not importlib.util.find_spec("tensorboard"):
        parser.error("--log-dir needs TensorBoard: pip install tensorboard")
    return args


if __name__ == "__main__":
    args = parse_args()
    start = time.perf_counter()
    try:
        main(args, stop=torch.zeros((), dtype=torch.int32))
    except (DataError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    log(f"Total time: {time.perf_counter() - start:.3f}s")
