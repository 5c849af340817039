"""Train under torchrun, on one node or on several: it starts the processes and can restart them.

    torchrun --nproc_per_node=gpu ddp_torchrun.py 50 10       one process per GPU of this node
    torchrun --nproc_per_node=4 ddp_torchrun.py --batch-size 8 --accumulate 4 --amp --compile
    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=4 --master_addr=10.0.0.1 ddp_torchrun.py
        two nodes: on the second one the same, with --node_rank=1

The global batch is --batch-size times the processes times --accumulate. A snapshot is saved after
every save_every-th epoch, and within an epoch after every --save-steps steps. If a process fails,
torchrun ends the others, and --resume goes on from the last snapshot. On several nodes the snapshot
must lie on a disk that they share. To make this file yours, edit the lines marked "your".

For Slurm, see slurm/. `python ddp_torchrun.py` runs a single process, for example in a debugger.
torchrun can also restart a job that has failed, on several nodes with --rdzv_backend=c10d:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc_per_node=4 --max-restarts=3 ddp_torchrun.py 50 10 --resume
"""

import argparse
import contextlib
import datetime
import itertools
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from tqdm import tqdm

from common.data import DATASETS, load_dataset  # your dataset
from common.loader import collate, worker_options
from common.model import DEFAULT_MODEL, MODELS, build_model  # your model
from common.seed import set_seed, use_deterministic_kernels


def ddp_setup(args: argparse.Namespace) -> torch.device:
    if args.deterministic:  # first, because NCCL reads it when the process group is made
        use_deterministic_kernels()
    device = torch.device("cpu")
    if args.device != "cpu":
        device = torch.device(args.device, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device.index)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(min(4, torch.get_num_threads()))  # 16 took 1.7 times as long
    dist.init_process_group(  # rank and world_size are in torchrun's environment
        args.backend,
        timeout=datetime.timedelta(seconds=args.timeout),
        device_id=None if device.type == "cpu" else device,  # NCCL connects now, and not later
    )
    where = f"device {device} | backend {args.backend}"
    log(f"[rank {dist.get_rank()} of {dist.get_world_size()}] {where}", every_rank=True)
    return device


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
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        if args.sync_bn:  # new layers, but the same parameters, so the optimizer stays valid
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        self.model = model  # loaded before DDP wraps it and puts "module." before each name
        self.train_data = train_data
        self.test_data = test_data
        self.pin_memory = train_data.pin_memory  # non_blocking copies need pinned memory
        self.optimizer = optimizer
        self.schedule = schedule
        self.device = device
        self.args = args
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.amp)
        self.epoch = 0  # the one in progress
        self.samples_seen = 0  # in this epoch, by all ranks
        self.unsaved_steps = 0  # since the last snapshot
        if args.resume:
            self._load_snapshot()
        elif self.rank == 0 and os.path.exists(args.snapshot_path):
            os.replace(args.snapshot_path, f"{args.snapshot_path}.old")
            log(f"The snapshot of an earlier run is now {args.snapshot_path}.old")
        loaded = {"snapshot's epoch": self.epoch, "snapshot's samples_seen": self.samples_seen}
        if any(loaded.values()):  # the snapshot of another run may be of the same epoch
            loaded["snapshot's last weight"] = [*model.parameters()][-1].flatten()[-1].item()
        compare_ranks(loaded)
        self.model = DDP(model)  # copies rank 0's weights; we move the inputs, so no device_ids
        if args.compile:
            model.compile(dynamic=False)  # in place, so names stay; recompiled for each batch size

    def _run_batch(
        self, source: torch.Tensor, targets: torch.Tensor, share: float, last: bool
    ) -> torch.Tensor:
        # Only the last micro-batch's backward() sends gradients. The others just add them up.
        sync = contextlib.nullcontext() if last else self.model.no_sync()
        with sync:
            with self.autocast:
                output = self.model(source)  # your inputs
                loss = F.cross_entropy(output, targets)  # your loss: a mean over the batch
            (loss * share).backward()  # in the last one, DDP averages the gradients over the ranks
        if last:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def _run_epoch(self, epoch: int) -> torch.Tensor:
        set_seed(self.args.seed, self.rank, epoch, self.samples_seen)  # new dropout in each epoch
        self.train_data.sampler.set_epoch(epoch, self.samples_seen)  # reshuffles
        accumulate, batches = self.args.accumulate, len(self.train_data)
        samples = len(self.train_data.sampler)  # of this rank, in the rest of the epoch
        full_step = accumulate * self.args.batch_size  # the epoch's last step may be smaller
        steps = math.ceil(batches / accumulate)
        line = f"Epoch {epoch} | Batchsize: {self.args.batch_size} | Steps: {steps}"
        log(f"[{'CPU' if self.device.type == 'cpu' else 'GPU'}{self.rank}] {line}", every_rank=True)
        self.model.train()
        loss_sum = torch.zeros((), device=self.device)
        # Only rank 0 has a progress bar. disable=None hides it where the output is no terminal.
        progress = tqdm(self.train_data, leave=False, disable=True if self.rank > 0 else None)
        for number, (source, targets) in enumerate(progress, start=1):
            source = source.to(self.device, non_blocking=self.pin_memory)  # your inputs
            targets = targets.to(self.device, non_blocking=self.pin_memory)  # your inputs
            step = math.ceil(number / accumulate)
            last = number % accumulate == 0 or number == batches  # the step's last micro-batch
            step_samples = min(full_step, samples - (step - 1) * full_step)
            loss = self._run_batch(source, targets, len(targets) / step_samples, last)
            loss_sum += loss * len(targets)
            self.samples_seen += len(targets) * self.world_size
            if not last:
                continue
            if self.args.log_interval and step % self.args.log_interval == 0:
                log(f"Epoch {epoch} | Step {step} | Loss of rank 0: {loss.item():.6f}")
            self.unsaved_steps += 1
            if self.unsaved_steps >= self.args.save_steps and step < steps:
                self._save_snapshot()
                log(f"Epoch {epoch} | Step {step} | Saved at {self.args.snapshot_path}")
        dist.all_reduce(loss_sum)  # now the sum over all ranks
        return loss_sum

    @torch.no_grad()
    def _evaluate(self) -> torch.Tensor:
        for buffer in self.model.buffers():  # all ranks use rank 0's BatchNorm statistics
            dist.broadcast(buffer, src=0)
        self.model.eval()
        loss_sum = torch.zeros((), device=self.device)
        correct = torch.zeros((), device=self.device)
        for source, targets in self.test_data:
            source = source.to(self.device, non_blocking=self.pin_memory)  # your inputs
            targets = targets.to(self.device, non_blocking=self.pin_memory)  # your inputs
            with self.autocast:
                # Not through DDP, whose forward() may wait for a rank that has no test batch.
                output = self.model.module(source)  # your inputs
                loss_sum += F.cross_entropy(output, targets) * len(targets)  # your loss
            correct += (output.argmax(dim=1) == targets).sum()  # your metric
        sums = torch.stack((loss_sum, correct))
        dist.all_reduce(sums)  # now the sums over all ranks
        return sums

    def train(self, total_epochs: int) -> None:
        test_size = len(self.test_data.dataset)
        for epoch in range(self.epoch, total_epochs):
            start = time.perf_counter()
            train_size = self.train_data.sampler.total_size - self.samples_seen  # the epoch's rest
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
            self.samples_seen = 0
            if self.epoch % self.args.save_every == 0 or self.epoch == total_epochs:
                self._save_snapshot()
                log(f"Epoch {epoch} | Training checkpoint saved at {self.args.snapshot_path}")

    def _save_snapshot(self) -> None:  # the tutorials also call it a checkpoint
        if not all(parameter.isfinite().all() for parameter in self.model.parameters()):
            sys.exit("error: weights are NaN or infinite, so they are not saved: try a lower --lr")
        self.unsaved_steps = 0
        if self.rank > 0:
            return
        snapshot = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "epoch": self.epoch,
            "samples_seen": self.samples_seen,
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
        self.model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.schedule.load_state_dict(snapshot["schedule"])
        self.epoch = snapshot["epoch"]
        seen = snapshot.get("samples_seen", 0)  # only this script saves in mid-epoch
        self.samples_seen = seen - seen % self.world_size  # the world size may have changed
        log(f"Resuming training from snapshot at Epoch {self.epoch}")


def load_train_objs(args: argparse.Namespace, device: torch.device) -> tuple:
    set_seed(args.seed)  # first, so that a random split of the data is the same in all processes
    train_set, test_set = load_dataset(args.dataset, args.data_dir)  # load your dataset
    model = build_model(args.model, train_set[0][0].shape).to(device)  # load your model
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum)  # your optimizer
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)  # your schedule
    return train_set, test_set, model, optimizer, schedule


class ResumableSampler(DistributedSampler):
    """DistributedSampler that can begin in mid-epoch, after `samples_seen` samples of all ranks."""

    start = 0  # how many of this rank's samples are skipped

    def set_epoch(self, epoch: int, samples_seen: int = 0) -> None:
        super().set_epoch(epoch)
        self.start = samples_seen // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(super().__iter__(), self.start, None)

    def __len__(self) -> int:
        return self.num_samples - self.start


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


@record  # puts this process's traceback into torchrun's report
def main(args: argparse.Namespace) -> None:
    device = ddp_setup(args)
    compare_ranks(vars(args))
    train_set, test_set, model, optimizer, schedule = load_train_objs(args, device)
    compare_ranks({"train_size": len(train_set), "test_size": len(test_set)})
    shard = ResumableSampler(train_set, seed=args.seed)  # this rank's share of each epoch
    train_data = prepare_dataloader(train_set, args.batch_size, shard, args)
    test_shard = range(dist.get_rank(), len(test_set), dist.get_world_size())  # no padding
    test_data = prepare_dataloader(test_set, args.test_batch_size, test_shard, args)
    trainer = Trainer(model, train_data, test_data, optimizer, schedule, device, args)
    trainer.train(args.total_epochs)
    del trainer  # if DDP outlives its process group, Python may hang at exit
    dist.destroy_process_group()


MAY_DIFFER = {"data_dir", "snapshot_path", "num_workers", "local_rank"}  # between nodes


def compare_ranks(own: dict) -> None:
    """End all ranks if a node has other options, other data or another snapshot."""
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    for rank, other in enumerate(ranks):
        for name in own:
            if name not in MAY_DIFFER and other[name] != ranks[0][name]:
                values = f"{ranks[0][name]} on rank 0, and {other[name]} on rank {rank}"
                dist.destroy_process_group()  # or gloo's threads may abort Python at exit
                sys.exit(f"error: {name} is {values}")


def log(line: str, every_rank: bool = False) -> None:
    if every_rank or os.environ["RANK"] == "0":
        # print() would break the progress bar. Text and newline in one write, or lines would mix.
        tqdm.write(f"{line}\n", end="")
        sys.stdout.flush()


def default_backend(device: str) -> str | None:
    backend = dist.get_default_backend_for_device(device)  # NCCL for CUDA, gloo for the CPU
    backend = backend if dist.is_backend_available(backend) else "gloo"  # Windows has no NCCL
    return backend if device in dist.Backend.backend_capability[backend] else None


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def parse_args() -> argparse.Namespace:
    found = torch.accelerator.current_accelerator(check_available=True)
    devices = [found.type, "cpu"] if found and default_backend(found.type) else ["cpu"]
    parser = argparse.ArgumentParser(usage="%(prog)s [total_epochs] [save_every] [options]")
    add = parser.add_argument
    add("total_epochs", nargs="?", type=positive, default=5, help="how many epochs to train")
    add("save_every", nargs="?", type=positive, default=1, help="epochs between two snapshots")
    add("--batch-size", "--batch_size", type=positive, default=32, help="samples per process")
    add("--test-batch-size", type=positive, default=1000, help="samples per batch in evaluation")
    add("--lr", type=float, default=0.01, help="learning rate of SGD")  # your optimizer
    add("--momentum", type=float, default=0.9, help="momentum of SGD")  # your optimizer
    add("--dataset", choices=DATASETS, default="digits", help="digits: no download")  # your dataset
    add("--data-dir", default="data", help="where torchvision keeps or downloads the others")
    add("--model", choices=MODELS, help="default: chosen by --dataset")  # your model
    add("--seed", type=int, default=42)
    add("--deterministic", action="store_true", help="deterministic kernels on an accelerator")
    add("--device", choices=devices, default=devices[0])
    add("--accumulate", type=positive, default=1, help="micro-batches per step")
    add("--amp", action="store_true", help="mixed precision in bfloat16, which needs no GradScaler")
    add("--compile", action="store_true", help="torch.compile: slow to start; measure if it pays")
    add("--sync-bn", action="store_true", help="BatchNorm over all ranks; not on a CPU")
    add("--save-steps", type=positive, default=1000, help="most steps between two snapshots")
    add("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # of torch.distributed.launch
    add("--backend", choices=dist.Backend.backend_list, help="e.g. nccl")
    add("--timeout", type=positive, default=600, help="seconds that ranks wait for each other")
    add("--num-workers", type=int, default=0, help="processes that load data: try 4 for files")
    add("--log-interval", type=int, default=0, help="steps between loss lines (0: none)")
    add("--snapshot-path", default="checkpoint.pt")
    add("--resume", action="store_true", help="go on from the snapshot if there is one")
    args = parser.parse_intermixed_args()  # also takes 50 --resume 10
    args.model = args.model or DEFAULT_MODEL[args.dataset]  # your model
    args.backend = args.backend or default_backend(args.device)
    path = Path(args.snapshot_path)
    if (path.exists() and not path.is_file()) or not os.access(path.parent, os.W_OK):
        parser.error(f"--snapshot-path {path}: name a file in a folder that you may write to")
    if "RANK" not in os.environ:  # plain `python`: one process, for example for a debugger
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        if not args.resume:
            parser.error("--max-restarts without --resume: a restart would begin at epoch 0")
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            error = "a restart may hang: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
            parser.error(f"{error}, and use --standalone or --rdzv_backend=c10d (pytorch#135712)")
    count = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if args.device != "cpu" and count > torch.accelerator.device_count():
        parser.error(f"{count} processes are more than {torch.accelerator.device_count()} devices")
    return args


if __name__ == "__main__":
    args = parse_args()
    start = time.perf_counter()
    line = f"total_epochs: {args.total_epochs}, save_every: {args.save_every}"
    log(f"{line}, batch_size: {args.batch_size}")
    main(args)
    log(f"Total time: {time.perf_counter() - start:.3f}s")
