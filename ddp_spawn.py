"""Train on all devices of this node: mp.spawn starts a process for each, DDP connects them.

    python ddp_spawn.py 50 10                  one process per GPU; two on a CPU
    python ddp_spawn.py --nproc-per-node 4     four; on a CPU they share the cores
    python ddp_spawn.py 50 10 --resume         go on from checkpoint.pt, where there is one
    CUDA_VISIBLE_DEVICES=0,2 python ddp_spawn.py

The global batch is --batch-size times the processes, so with four it is that of
`single_gpu.py --batch-size 128`. mp.spawn starts Python anew for each process, imports this file
there (hence the main guard) and calls main(rank, ...). Ctrl-C ends all processes, and --resume goes
on from the last snapshot. To make this file yours, edit the lines marked "your". ddp_torchrun.py
adds restarts, stops that save in mid-epoch, accumulation and AMP.
"""

import argparse
import datetime
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # unused. Imported later, by an optimizer, its defaults hold the group
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
        self.model = model  # not in DDP yet, because a snapshot's names have no "module."
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
        self.model = DDP(model)  # copies rank 0's weights to all; device_ids would only move inputs

    def _run_batch(self, source: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        output = self.model(source)  # your inputs
        loss = F.cross_entropy(output, targets)  # your loss: a mean over the batch
        loss.backward()  # meanwhile DDP averages the gradients over all ranks
        self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch: int) -> torch.Tensor:
        set_seed(self.args.seed, self.rank, epoch)  # so a resumed run has the same dropout
        self.train_data.generator.manual_seed(torch.initial_seed())  # loader workers start from it
        self.train_data.sampler.set_epoch(epoch)  # another order, the same on all ranks
        name = self.device.type.upper().replace("CUDA", "GPU")  # the tutorials print [GPU0]
        line = f"Epoch {epoch} | Batchsize: {self.args.batch_size} | Steps: {len(self.train_data)}"
        log(f"[{name}{self.rank}] {line}", every_rank=True)
        self.model.train()
        loss_sum = torch.zeros((), device=self.device)
        # disable=None: no progress bar where stderr is not a terminal
        progress = tqdm(self.train_data, leave=False, disable=True if self.rank > 0 else None)
        for step, (source, targets) in enumerate(progress, start=1):
            source = source.to(self.device, non_blocking=self.pin_memory)  # your inputs
            targets = targets.to(self.device, non_blocking=self.pin_memory)  # your inputs
            loss = self._run_batch(source, targets)
            loss_sum += loss * len(targets)
            if self.args.log_interval and step % self.args.log_interval == 0:
                log(f"Epoch {epoch} | Step {step} | Loss of rank 0: {loss.item():.6f}")
        dist.all_reduce(loss_sum)  # it becomes the sum over all ranks
        return loss_sum

    @torch.no_grad()
    def _evaluate(self) -> tuple[torch.Tensor, torch.Tensor]:
        for buffer in self.model.buffers():  # all test with rank 0's BatchNorm statistics
            values = buffer.contiguous()  # a strided view has gaps, and gloo would write into them
            dist.broadcast(values, src=0)
            buffer.copy_(values)
        self.model.eval()
        loss_sum = torch.zeros((), device=self.device)
        correct = torch.zeros((), device=self.device)
        for source, targets in self.test_data:
            source = source.to(self.device, non_blocking=self.pin_memory)  # your inputs
            targets = targets.to(self.device, non_blocking=self.pin_memory)  # your inputs
            # Not through DDP, whose forward() would wait for a rank that has no test batch.
            output = self.model.module(source)  # your inputs
            loss_sum += F.cross_entropy(output, targets) * len(targets)  # your loss
            correct += (output.argmax(dim=1) == targets).sum()  # your metric
        return loss_sum, correct

    def train(self, total_epochs: int) -> None:
        train_size = self.train_data.sampler.total_size  # of all ranks, with repeated samples
        test_size = len(self.test_data.dataset)
        for epoch in range(self.epoch, total_epochs):
            start = time.perf_counter()
            train_loss = self._run_epoch(epoch).item() / train_size  # waits for the device
            rate = train_size / (time.perf_counter() - start)
            line = f"Epoch {epoch} | Train loss: {train_loss:.4f}"
            if test_size > 0:  # without a test set, write test_set = [] in load_train_objs()
                sums = torch.stack(self._evaluate())
                dist.all_reduce(sums)
                test_loss, correct = sums.tolist()
                test_loss /= test_size
                line += f" | Test loss: {test_loss:.4f}"
                line += f" | Accuracy: {correct:.0f}/{test_size} ({correct / test_size:.2%})"
            log(f"{line} | {rate:.0f} samples/s")
            self.schedule.step()  # your schedule: move this if it steps after each batch
            self.epoch = epoch + 1
            if self.epoch % self.args.save_every == 0 or self.epoch == total_epochs:
                if self.rank == 0:
                    self._save_snapshot()
                log(f"Epoch {epoch} | Training checkpoint saved at {self.args.snapshot_path}")

    def _save_snapshot(self) -> None:  # the tutorials also call it a checkpoint
        snapshot = {  # only what torch.load(weights_only=True) accepts
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "epoch": self.epoch,
            "args": {name: str(value) for name, value in vars(self.args).items()},  # for --resume
        }
        path = os.path.realpath(self.args.snapshot_path)  # os.replace() would replace a link itself
        torch.save(snapshot, f"{path}.tmp")
        with open(f"{path}.tmp", "rb+") as file:
            os.fsync(file.fileno())  # all of it is on the disk before it replaces the last snapshot
        os.replace(f"{path}.tmp", path)

    def _load_snapshot(self) -> None:
        snapshots = [read_snapshot(self.args) if self.rank == 0 else None]
        dist.broadcast_object_list(snapshots)  # rank 0 reads it, and all start from the same one
        snapshot = snapshots[0]
        if snapshot is None:
            log(f"No snapshot at {self.args.snapshot_path}, starting from the beginning")
            return
        self.model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.schedule.load_state_dict(snapshot["schedule"])
        self.epoch = snapshot["epoch"]
        log(f"Resuming training from snapshot at Epoch {self.epoch}")


def ddp_setup(rank: int, args: argparse.Namespace) -> torch.device:
    if args.deterministic:  # before the process group, which chooses its kernels, too
        use_deterministic_kernels()
    device = torch.device("cpu")
    if args.device != "cpu":
        device = torch.device(args.device, rank)
        torch.accelerator.set_device_index(device.index)
    if "OMP_NUM_THREADS" not in os.environ:  # or every process would take all cores
        torch.set_num_threads(max(1, torch.get_num_threads() // args.nproc_per_node))
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if loopback:  # connect on this host, whatever its name resolves to
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    dist.init_process_group(
        args.backend,
        store=dist.FileStore(args.store, args.nproc_per_node),  # the ranks meet at this file
        rank=rank,
        world_size=args.nproc_per_node,
        timeout=datetime.timedelta(seconds=args.timeout),
        device_id=None if device.type == "cpu" else device,  # NCCL connects now, on this device
    )
    where = f"device {device} | backend {dist.get_backend()} | threads {torch.get_num_threads()}"
    log(f"[rank {rank} of {args.nproc_per_node}] {where}", every_rank=True)
    return device


def load_train_objs(args: argparse.Namespace, device: torch.device) -> tuple:
    train_set, test_set = load_dataset(args.dataset, args.data_dir)  # load your dataset
    set_seed(args.seed)
    model = build_model(args.model, train_set[0][0].shape).to(device)  # load your model
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum)  # your optimizer
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1)  # your schedule: none yet
    return train_set, test_set, model, optimizer, schedule


def prepare_dataloader(
    dataset: Dataset, batch_size: int, sampler: Iterable, args: argparse.Namespace
) -> DataLoader:
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate,  # your batches: stacks samples, unless __getitems__ has done so
        # The loader draws its workers' seed from this one. A resumed run draws once more, and from
        # torch's global generator that would give it another dropout.
        generator=torch.Generator(),
        pin_memory=args.device not in ("cpu", "mps"),  # so copies overlap the computation
        # num_workers, started in the way that common/loader.py explains.
        **worker_options(args.num_workers),
    )


def main(rank: int, args: argparse.Namespace) -> None:
    # SIGINT ends this rank at once. It comes from Ctrl-C, and mp.spawn has Linux send it when the
    # parent dies.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    device = ddp_setup(rank, args)
    train_set, test_set, model, optimizer, schedule = load_train_objs(args, device)
    shard = DistributedSampler(train_set, seed=args.seed)  # this rank's share of each epoch
    train_data = prepare_dataloader(train_set, args.batch_size, shard, args)
    test_shard = range(rank, len(test_set), dist.get_world_size())  # not padded: each counts once
    test_data = prepare_dataloader(test_set, args.test_batch_size, test_shard, args)
    trainer = Trainer(model, train_data, test_data, optimizer, schedule, device, args)
    trainer.train(args.total_epochs)
    dist.barrier()  # no rank leaves before rank 0 has saved
    del trainer  # or DDP would hold the group, whose threads may abort a rank when Python ends
    dist.destroy_process_group()


# --- stops, snapshots, messages and options: on a first reading, go on to the last block -------


def stop(signum: int, frame: object) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # ignore a second one until all ranks have ended
    os.write(2, b"stopped: --resume goes on from the last snapshot\n")  # print() may be at work
    sys.exit(128 + signum)  # the shells' number for a signal


def read_snapshot(args: argparse.Namespace) -> dict | None:
    path = args.snapshot_path
    if not os.path.exists(path):
        return None
    try:
        snapshot = torch.load(path, map_location="cpu", weights_only=True)
        saved = dict(snapshot["args"])
    except Exception as error:  # torch.load raises many kinds of errors
        reason = repr(error).split("error: ")[-1]  # without torch's advice before it
        sys.exit(f"error: {path} is not a snapshot of these scripts ({reason:.200})")
    # A run goes on with what it began with. The optimizer's state would overrule a new --lr.
    for name in ("dataset", "model", "lr", "momentum", "seed"):  # your settings
        given = str(getattr(args, name))
        if saved.get(name) != given:
            sys.exit(f"error: {path} was made with --{name} {saved.get(name)}, not {given}")
    if snapshot.get("samples_seen"):
        sys.exit(f"error: {path} was saved in mid-epoch: go on with ddp_torchrun.py")
    return snapshot


def log(line: str, every_rank: bool = False) -> None:
    if every_rank or not dist.is_initialized() or dist.get_rank() == 0:
        # print() would break the progress bar. One write keeps the lines of two ranks apart.
        tqdm.write(f"{line}\n", end="")
        sys.stdout.flush()


def default_backend(device: str) -> str | None:
    backend = dist.get_default_backend_for_device(device)  # NCCL, XCCL or gloo
    backend = backend if dist.is_backend_available(backend) else "gloo"  # Windows has no NCCL
    return backend if device in dist.Backend.backend_capability[backend] else None  # as for MPS


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
    add("--batch-size", "--batch_size", type=positive, default=32, help="samples per device")
    add("--test-batch-size", type=positive, default=1000, help="the same in evaluation")
    add("--lr", type=float, default=0.01, help="learning rate of SGD")  # your optimizer
    add("--momentum", type=float, default=0.9, help="momentum of SGD")  # your optimizer
    add("--dataset", choices=DATASETS, default="digits", help="digits: no download")  # your dataset
    add("--data-dir", default="data", help="where torchvision keeps or downloads the others")
    add("--model", choices=MODELS, help="default: what suits the data set")  # your model
    add("--seed", type=int, default=42)
    add("--deterministic", action="store_true", help="deterministic kernels on an accelerator")
    add("--device", choices=devices, default=devices[0])
    add("--nproc-per-node", type=positive, help="default: one per device, 2 on a CPU")
    add("--backend", type=str.lower, choices=dist.Backend.backend_list, help="e.g. nccl")
    add("--timeout", type=positive, default=600, help="seconds that ranks wait for each other")
    add("--num-workers", type=int, default=0, help="loader processes: try 4 for files")
    add("--log-interval", type=int, default=0, help="steps between loss lines (0: none)")
    add("--snapshot-path", default="checkpoint.pt")
    add("--resume", action="store_true", help="go on from the snapshot where there is one")
    args = parser.parse_intermixed_args()  # takes 50 --resume 10, too
    args.model = args.model or DEFAULT_MODEL[args.dataset]  # your model
    args.backend = args.backend or default_backend(args.device)
    for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if os.environ.get(name, "1") != "1":  # torchrun, srun or mpirun has started several of this
            parser.error(f"{name} is {os.environ[name]}: start ddp_torchrun.py, or unset {name}")
    path = Path(os.path.realpath(args.snapshot_path))
    if (path.exists() and not path.is_file()) or not os.access(path.parent, os.W_OK):
        parser.error(f"--snapshot-path {path}: name a file in a folder that you may write to")
    count = 2 if args.device == "cpu" else torch.accelerator.device_count()
    args.nproc_per_node = args.nproc_per_node or count
    if args.device != "cpu" and args.nproc_per_node > count:
        parser.error(f"{args.nproc_per_node} processes are more than {count} devices")
    return args


if __name__ == "__main__":
    args = parse_args()
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")  # of killed ranks
    signal.signal(signal.SIGINT, stop)  # in the parent, because only it runs this block
    signal.signal(signal.SIGTERM, stop)
    start = time.perf_counter()
    line = f"total_epochs: {args.total_epochs}, save_every: {args.save_every}"
    log(f"{line}, batch_size: {args.batch_size}")
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    args.store = os.path.join(folder.name, "store")
    try:
        mp.spawn(main, args=(args,), nprocs=args.nproc_per_node)
    except mp.ProcessExitedException as error:  # with a code above 0, the rank has said why
        sys.exit(error.exit_code if error.exit_code > 0 else f"error: {error}")
    finally:  # no process is left behind
        for process in mp.active_children():
            process.kill()
        folder.cleanup()
    log(f"Total time: {time.perf_counter() - start:.3f}s")
