"""Train on several nodes without torchrun: you give each process its rank, and rank 0's address.

    python multinode.py --init-method tcp://10.0.0.1:22225 --rank 0 --world-size 2     first node
    python multinode.py --init-method tcp://10.0.0.1:22225 --rank 1 --world-size 2     second node
    python multinode.py --init-method tcp://10.0.0.1:22225 --rank 4 --world-size 8
        --nproc-per-node 4      the second of two nodes with four GPUs each: ranks 4 to 7
    python multinode.py --init-method file:///shared/new_file --rank 0 --world-size 2
    MASTER_ADDR=10.0.0.1 MASTER_PORT=22225 RANK=0 WORLD_SIZE=2 python multinode.py

Use ddp_torchrun.py if you can run torchrun: it is less to type, and it can restart a job. Here each
command starts --nproc-per-node ranks, one by default, and --rank is the first of them. All meet at
rank 0's address with any free port, or at a file on a shared disk, a new one for each run. Every
node needs the data. Rank 0 saves, and --resume needs its snapshot on all nodes. If a process ends,
the others fail in their next all-reduce, or after --timeout. Anyone who can reach the port can
join, so use a private network. To make this file yours, edit the lines marked "your".
"""

import argparse
import datetime
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from tqdm import tqdm

from common.data import DATASETS, load_dataset  # your dataset
from common.loader import collate, worker_options
from common.model import DEFAULT_MODEL, MODELS, build_model  # your model
from common.seed import set_seed, use_deterministic_kernels


def ddp_setup(local_rank: int, args: argparse.Namespace) -> torch.device:
    if args.deterministic:  # first, because NCCL reads it when the process group is made
        use_deterministic_kernels()
    device = torch.device("cpu")
    if args.device != "cpu":
        device = torch.device(args.device, local_rank)
        torch.accelerator.set_device_index(local_rank)
    if "OMP_NUM_THREADS" not in os.environ:  # otherwise every process would use all cores
        threads = max(1, torch.get_num_threads() // args.nproc_per_node)
        torch.set_num_threads(threads if args.device == "cpu" else min(4, threads))
    dist.init_process_group(
        args.backend,
        init_method=args.init_method,
        rank=args.rank + local_rank,
        world_size=args.world_size,
        timeout=datetime.timedelta(seconds=args.timeout),
        device_id=None if device.type == "cpu" else device,  # NCCL connects now, and not later
    )
    where = f"device {device} | backend {args.backend}"
    log(f"[rank {dist.get_rank()} of {args.world_size}] {where}", every_rank=True)
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
        self.model = model  # loaded before DDP wraps it and puts "module." before each name
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
        elif self.rank == 0 and os.path.exists(args.snapshot_path):
            os.replace(args.snapshot_path, f"{args.snapshot_path}.old")
            log(f"The snapshot of an earlier run is now {args.snapshot_path}.old")
        loaded = {"snapshot's epoch": self.epoch}
        if any(loaded.values()):  # the snapshot of another run may be of the same epoch
            loaded["snapshot's last weight"] = [*model.parameters()][-1].flatten()[-1].item()
        compare_ranks(loaded)
        self.model = DDP(model)  # copies rank 0's weights; we move the inputs, so no device_ids

    def _run_batch(self, source: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        output = self.model(source)  # your inputs
        loss = F.cross_entropy(output, targets)  # your loss: a mean over the batch
        loss.backward()  # meanwhile DDP averages the gradients over all ranks
        self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch: int) -> torch.Tensor:
        set_seed(self.args.seed, self.rank, epoch)  # so a resumed run draws the same dropout
        self.train_data.sampler.set_epoch(epoch)  # reshuffles, in the same way on all ranks
        line = f"Epoch {epoch} | Batchsize: {self.args.batch_size} | Steps: {len(self.train_data)}"
        log(f"[{'CPU' if self.device.type == 'cpu' else 'GPU'}{self.rank}] {line}", every_rank=True)
        self.model.train()
        loss_sum = torch.zeros((), device=self.device)
        # Only rank 0 has a progress bar. disable=None hides it where the output is no terminal.
        progress = tqdm(self.train_data, leave=False, disable=True if self.rank > 0 else None)
        for step, (source, targets) in enumerate(progress, start=1):
            source = source.to(self.device, non_blocking=self.pin_memory)  # your inputs
            targets = targets.to(self.device, non_blocking=self.pin_memory)  # your inputs
            loss = self._run_batch(source, targets)
            loss_sum += loss * len(targets)
            if self.args.log_interval and step % self.args.log_interval == 0:
                log(f"Epoch {epoch} | Step {step} | Loss of rank 0: {loss.item():.6f}")
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
            # Not through DDP, whose forward() may wait for a rank that has no test batch.
            output = self.model.module(source)  # your inputs
            loss_sum += F.cross_entropy(output, targets) * len(targets)  # your loss
            correct += (output.argmax(dim=1) == targets).sum()  # your metric
        sums = torch.stack((loss_sum, correct))
        dist.all_reduce(sums)  # now the sums over all ranks
        return sums

    def train(self, total_epochs: int) -> None:
        train_size = self.train_data.sampler.total_size  # of all ranks, with repeated samples
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
        if self.rank > 0:
            return
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


def main(local_rank: int, args: argparse.Namespace) -> None:
    device = ddp_setup(local_rank, args)
    compare_ranks(vars(args))
    rank = dist.get_rank()
    train_set, test_set, model, optimizer, schedule = load_train_objs(args, device)
    compare_ranks({"train_size": len(train_set), "test_size": len(test_set)})
    shard = DistributedSampler(train_set, seed=args.seed)  # this rank's share of each epoch
    train_data = prepare_dataloader(train_set, args.batch_size, shard, args)
    test_shard = range(rank, len(test_set), dist.get_world_size())  # no padding: each counts once
    test_data = prepare_dataloader(test_set, args.test_batch_size, test_shard, args)
    trainer = Trainer(model, train_data, test_data, optimizer, schedule, device, args)
    trainer.train(args.total_epochs)
    del trainer  # if DDP outlives its process group, Python may hang at exit
    dist.destroy_process_group()


MAY_DIFFER = {"rank", "nproc_per_node", "init_method", "data_dir", "snapshot_path", "num_workers"}


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
    if every_rank or not dist.is_initialized() or dist.get_rank() == 0:
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
    add("--nproc-per-node", type=positive, default=1, help="ranks that this command starts")
    add("--init-method", default="env://", help="tcp://host:port of rank 0, or file:///shared/new")
    add("--rank", type=int, default=os.environ.get("RANK"), help="this command's first rank")
    add("--world-size", type=int, default=os.environ.get("WORLD_SIZE"), help="number of all ranks")
    add("--backend", choices=dist.Backend.backend_list, help="e.g. nccl")
    add("--timeout", type=positive, default=600, help="seconds that ranks wait for each other")
    add("--num-workers", type=int, default=0, help="processes that load data: try 4 for files")
    add("--log-interval", type=int, default=0, help="steps between loss lines (0: none)")
    add("--snapshot-path", default="checkpoint.pt")
    add("--resume", action="store_true", help="go on from the snapshot if there is one")
    args = parser.parse_intermixed_args()  # also takes 50 --resume 10
    args.model = args.model or DEFAULT_MODEL[args.dataset]  # your model
    args.backend = args.backend or default_backend(args.device)
    if dist.is_torchelastic_launched():
        parser.error("this script starts its own processes: use torchrun with ddp_torchrun.py")
    if args.rank is None or args.world_size is None:
        parser.error("give --rank and --world-size, or export RANK and WORLD_SIZE")
    last = args.rank + args.nproc_per_node - 1
    if args.rank < 0 or last >= args.world_size:
        parser.error(f"ranks {args.rank} to {last} are not in 0 to {args.world_size - 1}")
    path = Path(args.snapshot_path)
    writable = os.access(path.parent, os.W_OK) and (path.is_file() or not path.exists())
    if args.rank == 0 and not writable:  # the other ranks write nothing
        parser.error(f"--snapshot-path {path}: name a file in a folder that you may write to")
    count = torch.accelerator.device_count()
    if args.device != "cpu" and args.nproc_per_node > count:
        parser.error(f"{args.nproc_per_node} processes are more than {count} devices")
    return args


if __name__ == "__main__":
    args = parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM does what Ctrl-C does
    start = time.perf_counter()
    line = f"total_epochs: {args.total_epochs}, save_every: {args.save_every}"
    log(f"{line}, batch_size: {args.batch_size}")
    log(f"waiting for all {args.world_size} ranks at {args.init_method}, up to {args.timeout} s")
    try:
        mp.spawn(main, args=(args,), nprocs=args.nproc_per_node)
    except mp.ProcessExitedException as error:  # a rank that exits by itself has printed why
        sys.exit(error.exit_code if error.exit_code > 0 else f"error: {error}")
    finally:
        for process in mp.active_children():  # otherwise they would train on after Ctrl-C
            process.kill()
    log(f"Total time: {time.perf_counter() - start:.3f}s")
