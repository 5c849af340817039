"""Train on all GPUs of this node from one process: nn.DataParallel, the older way.

    python data_parallel.py 50 10               all GPUs
    CUDA_VISIBLE_DEVICES=0,2 python data_parallel.py
    python data_parallel.py --help              all options

In every step it copies the model to all GPUs, splits the batch, runs one thread per GPU, and
gathers outputs and gradients on the first. ddp_spawn.py and ddp_torchrun.py copy the model once,
move gradients and no weights, and are faster, so torch recommends DDP. This file takes CUDA or ROCm
GPUs, or else the CPU. With one GPU, or on a CPU, it does what single_gpu.py does. To make it yours,
edit the lines marked "your".
"""

import argparse
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler
from tqdm import tqdm

from common.data import DATASETS, load_dataset  # your dataset
from common.loader import collate, worker_options
from common.model import DEFAULT_MODEL, MODELS, build_model  # your model
from common.seed import set_seed, use_deterministic_kernels


class Trainer:
    def __init__(
        self,
        model: nn.Module,
        train_data: DataLoader,
        test_data: DataLoader,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler,
        device: torch.device,
        args: argparse.Namespace,
    ) -> None:
        self.model = model
        self.train_data = train_data
        self.test_data = test_data
        self.pin_memory = train_data.pin_memory  # non_blocking copies need pinned memory
        self.optimizer = optimizer
        self.schedule = schedule
        self.device = device
        self.args = args
        self.epoch = 0  # the next one to train
        if args.resume:
            self._load_snapshot()
        elif os.path.exists(args.snapshot_path):
            os.replace(args.snapshot_path, f"{args.snapshot_path}.old")
            log(f"The snapshot of an earlier run is now {args.snapshot_path}.old")
        self.model = nn.DataParallel(model)  # after loading, as snapshots' names have no "module."

    def _run_batch(self, source: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        output = self.model(source)  # your inputs
        loss = F.cross_entropy(output, targets)  # your loss: a mean over the batch
        loss.backward()  # DataParallel adds up the gradients of all GPUs on the first
        self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch: int) -> torch.Tensor:
        set_seed(self.args.seed, 0, epoch)  # so a resumed run draws the same dropout; 0 is the rank
        self.train_data.sampler.generator.manual_seed(self.args.seed + epoch)  # reshuffles
        line = f"Epoch {epoch} | Batchsize: {self.args.batch_size} | Steps: {len(self.train_data)}"
        log(f"[{'CPU' if self.device.type == 'cpu' else 'GPU'}0] {line}")
        self.model.train()
        loss_sum = torch.zeros((), device=self.device)
        # disable=None: a progress bar on a terminal only
        progress = tqdm(self.train_data, leave=False, disable=None)
        for step, (source, targets) in enumerate(progress, start=1):
            source = source.to(self.device, non_blocking=self.pin_memory)  # your inputs
            targets = targets.to(self.device, non_blocking=self.pin_memory)  # your inputs
            loss = self._run_batch(source, targets)
            loss_sum += loss * len(targets)
            if self.args.log_interval and step % self.args.log_interval == 0:
                log(f"Epoch {epoch} | Step {step} | Loss: {loss.item():.6f}")
        return loss_sum

    @torch.no_grad()
    def _evaluate(self) -> torch.Tensor:
        self.model.eval()
        loss_sum = torch.zeros((), device=self.device)
        correct = torch.zeros((), device=self.device)
        for source, targets in self.test_data:
            source = source.to(self.device, non_blocking=self.pin_memory)  # your inputs
            targets = targets.to(self.device, non_blocking=self.pin_memory)  # your inputs
            output = self.model(source)  # your inputs
            loss_sum += F.cross_entropy(output, targets) * len(targets)  # your loss
            correct += (output.argmax(dim=1) == targets).sum()  # your metric
        return torch.stack((loss_sum, correct))

    def train(self, total_epochs: int) -> None:
        train_size = len(self.train_data.dataset)
        test_size = len(self.test_data.dataset)
        for epoch in range(self.epoch, total_epochs):
            start = time.perf_counter()
            train_loss = self._run_epoch(epoch).item() / train_size  # item() waits for the device
            rate = train_size / (time.perf_counter() - start)
            line = f"Epoch {epoch} | Train loss: {train_loss:.4f}"
            if test_size > 0:  # no test set? Write test_set = [] in load_train_objs()
                test_loss, correct = self._evaluate().tolist()
                line += f" | Test loss: {test_loss / test_size:.4f}"
                line += f" | Accuracy: {correct:.0f}/{test_size} ({correct / test_size:.2%})"
            log(f"{line} | {rate:.0f} samples/s")
            self.schedule.step()  # your schedule: once an epoch
            self.epoch = epoch + 1
            if self.epoch % self.args.save_every == 0 or self.epoch == total_epochs:
                self._save_snapshot()
                log(f"Epoch {epoch} | Training checkpoint saved at {self.args.snapshot_path}")

    def _save_snapshot(self) -> None:  # the tutorials also call it a checkpoint
        if not all(parameter.isfinite().all() for parameter in self.model.parameters()):
            sys.exit("error: weights are NaN or infinite, so they are not saved: try a lower --lr")
        snapshot = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "epoch": self.epoch,
            "args": {name: str(value) for name, value in vars(self.args).items()},  # for --resume
        }
        torch.save(snapshot, f"{self.args.snapshot_path}.tmp")
        os.replace(f"{self.args.snapshot_path}.tmp", self.args.snapshot_path)  # never half a file

    def _load_snapshot(self) -> None:
        path = self.args.snapshot_path
        if not os.path.exists(path):
            log(f"No snapshot at {path}, starting from the beginning")
            return
        snapshot = torch.load(path, map_location="cpu", weights_only=True)
        for name in ("dataset", "model", "lr", "momentum", "seed"):  # your settings
            saved, given = snapshot["args"].get(name), str(getattr(self.args, name))
            if saved != given:  # the optimizer's state would override a new --lr
                sys.exit(f"error: {path} was made with --{name} {saved}, not {given}")
        if snapshot.get("samples_seen"):
            sys.exit(f"error: {path} was saved in mid-epoch: go on with ddp_torchrun.py")
        self.model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.schedule.load_state_dict(snapshot["schedule"])
        self.epoch = snapshot["epoch"]
        log(f"Resuming training from snapshot at Epoch {self.epoch}")


def load_train_objs(args: argparse.Namespace, device: torch.device) -> tuple:
    set_seed(args.seed)  # first, so that a random split of the data is the same in all processes
    train_set, test_set = load_dataset(args.dataset, args.data_dir)  # load your dataset
    model = build_model(args.model, train_set[0][0].shape).to(device)  # load your model
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum)  # your optimizer
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)  # your schedule
    return train_set, test_set, model, optimizer, schedule


def prepare_dataloader(
    dataset: Dataset, batch_size: int, sampler: Iterable, args: argparse.Namespace
) -> DataLoader:
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate,  # your batches: needed only by a data set with __getitems__
        pin_memory=args.device not in ("cpu", "mps"),  # the CPU goes on while the GPU copies
        **worker_options(args.num_workers),
    )


def main(args: argparse.Namespace) -> None:
    if args.deterministic:
        use_deterministic_kernels()
    device = torch.device(args.device)
    if device.type != "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(4, torch.get_num_threads()))  # 16 took 1.7 times as long
    train_set, test_set, model, optimizer, schedule = load_train_objs(args, device)
    shuffled = RandomSampler(train_set, generator=torch.Generator())
    train_data = prepare_dataloader(train_set, args.batch_size, shuffled, args)
    test_data = prepare_dataloader(test_set, args.test_batch_size, range(len(test_set)), args)
    trainer = Trainer(model, train_data, test_data, optimizer, schedule, device, args)
    trainer.train(args.total_epochs)


def log(line: str) -> None:
    tqdm.write(line)  # print() would break the progress bar
    sys.stdout.flush()


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(usage="%(prog)s [total_epochs] [save_every] [options]")
    add = parser.add_argument
    add("total_epochs", nargs="?", type=positive, default=5, help="how many epochs to train")
    add("save_every", nargs="?", type=positive, default=1, help="epochs between two snapshots")
    add("--batch-size", "--batch_size", type=positive, default=32, help="samples for all GPUs")
    add("--test-batch-size", type=positive, default=1000, help="samples per batch in evaluation")
    add("--lr", type=float, default=0.01, help="learning rate of SGD")  # your optimizer
    add("--momentum", type=float, default=0.9, help="momentum of SGD")  # your optimizer
    add("--dataset", choices=DATASETS, default="digits", help="digits: no download")  # your dataset
    add("--data-dir", default="data", help="where torchvision keeps or downloads the others")
    add("--model", choices=MODELS, help="default: chosen by --dataset")  # your model
    add("--seed", type=int, default=42)
    add("--deterministic", action="store_true", help="deterministic kernels on an accelerator")
    add("--num-workers", type=int, default=0, help="processes that load data: try 4 for files")
    add("--log-interval", type=int, default=0, help="steps between loss lines (0: none)")
    add("--snapshot-path", default="checkpoint.pt")
    add("--resume", action="store_true", help="go on from the snapshot if there is one")
    args = parser.parse_intermixed_args()  # also takes 50 --resume 10
    args.device = "cuda" if torch.cuda.is_available() else "cpu"  # it supports no other device
    args.model = args.model or DEFAULT_MODEL[args.dataset]  # your model
    if os.environ.get("WORLD_SIZE", "1") != "1":
        parser.error(f"WORLD_SIZE is {os.environ['WORLD_SIZE']}: use torchrun with ddp_torchrun.py")
    path = Path(args.snapshot_path)
    if (path.exists() and not path.is_file()) or not os.access(path.parent, os.W_OK):
        parser.error(f"--snapshot-path {path}: name a file in a folder that you may write to")
    return args


if __name__ == "__main__":
    args = parse_args()
    start = time.perf_counter()
    line = f"total_epochs: {args.total_epochs}, save_every: {args.save_every}"
    log(f"{line}, batch_size: {args.batch_size}")
    main(args)
    log(f"Total time: {time.perf_counter() - start:.3f}s")
