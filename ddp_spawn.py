"""Train on all devices of this node: mp.spawn starts a process for each, DDP connects them.

    python ddp_spawn.py 50 10                  one process per GPU; two on a CPU
    python ddp_spawn.py --nproc-per-node 4     four; on a CPU they share the cores
    python ddp_spawn.py 50 10 --resume         go on from checkpoint.pt, where there is one
    CUDA_VISIBLE_DEVICES=0,2 python ddp_spawn.py
    python ddp_spawn.py --help                 all options

The global batch is --batch-size times the processes: with four, this is the same job as
`single_gpu.py --batch-size 128`. mp.spawn starts Python anew for each process, imports this file
there (hence the main guard) and calls main(rank, ...). Ctrl-C ends all processes; --resume goes on
from the last snapshot. To make this file yours, edit the lines marked "load your". ddp_torchrun.py
adds restarts, stops that save in mid-epoch, accumulation and AMP, and serves one device, too.
"""

import argparse
import datetime
import io
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, it would keep the process group to the end
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler
from tqdm import tqdm

from common.data import DATASETS, GlobalBatchSampler, collate, follow, load_dataset, worker_context
from common.model import DEFAULT_MODEL, MODELS, build_model
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
        self.world_size = dist.get_world_size()
        self.model = DDP(
            model,
            device_ids=None if device.type == "cpu" else [device],
            gradient_as_bucket_view=True,  # gradients lie in DDP's buckets: no second copy
            # In MB. DDP's first bucket is small, for overlap: on a CPU that costs 7% of a step.
            bucket_cap_mb=25 if device.type == "cpu" else None,
        )
        self.train_data = train_data
        self.test_data = test_data
        self.pinned = train_data.pin_memory  # only copies from pinned memory may overlap the work
        self.optimizer = optimizer
        self.schedule = schedule
        self.device = device
        self.args = args
        self.epoch = 0  # the next one to train
        if args.resume:
            self._load_snapshot()

    def _run_batch(self, source: torch.Tensor, targets: torch.Tensor, size: int) -> torch.Tensor:
        self.optimizer.zero_grad()
        output = self.model(source)  # load your inputs
        loss = F.cross_entropy(output, targets)  # load your loss: a mean over the batch
        # Gradients travel here: backward() averages them over the ranks, hence `* world_size`. A
        # rank may have one sample fewer than another of the global batch, hence `* len / size`.
        (loss * len(targets) * self.world_size / size).backward()
        self.optimizer.step()
        return loss.detach()

    def _run_epoch(self, epoch: int) -> torch.Tensor:
        set_seed(self.device, self.args.seed, self.rank, epoch)  # a resumed run draws the same
        self.train_data.batch_sampler.set_epoch(epoch)
        name = self.device.type.upper().replace("CUDA", "GPU")
        steps = f"Batchsize: {self.args.batch_size} | Steps: {len(self.train_data)}"
        log(f"[{name}{self.rank}] Epoch {epoch} | {steps}", every_rank=True)
        self.model.train()
        loss_sum = torch.zeros((), device=self.device)
        sizes = self.train_data.batch_sampler.sizes()  # of the global batches
        # disable=None: no progress bar where stderr is not a terminal
        progress = tqdm(self.train_data, leave=False, disable=True if self.rank > 0 else None)
        for step, (source, targets) in enumerate(progress, start=1):
            source = source.to(self.device, non_blocking=self.pinned)  # load your inputs
            targets = targets.to(self.device, non_blocking=self.pinned)  # load your inputs
            loss = self._run_batch(source, targets, sizes[step - 1])
            loss_sum += loss * len(targets)
            if self.args.log_interval and step % self.args.log_interval == 0:
                log(f"Epoch {epoch} | Step {step} | Loss of rank 0: {loss.item():.6f}")
        dist.all_reduce(loss_sum)
        return loss_sum

    @torch.no_grad()
    def _evaluate(self) -> tuple[torch.Tensor, torch.Tensor]:
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)  # BatchNorm's statistics differ between ranks
        self.model.eval()
        loss_sum = torch.zeros((), device=self.device)
        correct = torch.zeros((), device=self.device)
        for source, targets in self.test_data:
            source = source.to(self.device, non_blocking=self.pinned)  # load your inputs
            targets = targets.to(self.device, non_blocking=self.pinned)  # load your inputs
            # Not through DDP: the ranks may have unequal numbers of batches here.
            output = self.model.module(source)  # load your inputs
            loss_sum += F.cross_entropy(output, targets) * len(targets)  # load your loss
            correct += (output.argmax(dim=1) == targets).sum()  # load your metric
        return loss_sum, correct

    def train(self, total_epochs: int) -> None:
        train_size = len(self.train_data.dataset)
        test_size = len(self.test_data.dataset)
        for epoch in range(self.epoch, total_epochs):
            start = time.perf_counter()
            train_loss = self._run_epoch(epoch).item()  # waits for the device
            rate = train_size / (time.perf_counter() - start)
            sums = torch.stack(self._evaluate())
            dist.all_reduce(sums)
            test_loss, correct = sums.tolist()
            train_loss /= train_size
            test_loss /= test_size
            losses = f"Train loss: {train_loss:.4f} | Test loss: {test_loss:.4f}"
            accuracy = f"Accuracy: {correct:.0f}/{test_size} ({correct / test_size:.2%})"
            log(f"Epoch {epoch} | {losses} | {accuracy} | {rate:.0f} samples/s")
            self.schedule.step()  # load your schedule, if it steps otherwise
            self.epoch = epoch + 1
            if self.epoch % self.args.save_every == 0 or self.epoch == total_epochs:
                if self.rank == 0:
                    self._save_snapshot()
                log(f"Epoch {epoch} | Training checkpoint saved at {self.args.snapshot_path}")

    def _save_snapshot(self) -> None:
        snapshot = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "epoch": self.epoch,
            "global_batch": self.train_data.batch_sampler.global_batch,
            "args": {name: str(value) for name, value in vars(self.args).items()},  # plain types
        }
        content = io.BytesIO()
        torch.save(snapshot, content)  # not to the file, because a stop in there aborts Python
        # First to another file: whatever happens here, the snapshot before stays whole.
        temporary = Path(f"{self.args.snapshot_path}.tmp")
        try:
            with temporary.open("wb") as file:
                file.write(content.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.args.snapshot_path)
        finally:
            temporary.unlink(missing_ok=True)  # what a full disk leaves

    def _load_snapshot(self) -> None:
        path = self.args.snapshot_path
        message = [None]
        if self.rank == 0 and os.path.exists(path):
            message = [open_snapshot(self.args)]
        dist.broadcast_object_list(message, src=0)
        snapshot = message[0]
        if snapshot is None:
            log(f"No snapshot at {path}, starting from the beginning")
            return
        self.model.module.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.schedule.load_state_dict(snapshot["schedule"])
        self.epoch = snapshot["epoch"]
        log(f"Resuming training from snapshot at Epoch {self.epoch}")
        if snapshot["global_batch"] != self.train_data.batch_sampler.global_batch:
            log(f"The global batch is another one than before ({snapshot['global_batch']} samples)")


def ddp_setup(rank: int, args: argparse.Namespace) -> torch.device:
    if args.deterministic:  # before the process group, which chooses its kernels, too
        use_deterministic_kernels()
    device = torch.device("cpu")
    if args.device != "cpu":
        device = torch.device(args.device, rank)
        torch.accelerator.set_device_index(rank)
    if "OMP_NUM_THREADS" not in os.environ:  # or every process would take all cores
        torch.set_num_threads(max(1, torch.get_num_threads() // args.nproc_per_node))
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if loopback:  # one node needs no network
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    backend = args.backend or dist.get_default_backend_for_device(device)
    if not dist.is_backend_available(backend):  # on Windows there is no NCCL
        backend = "gloo"
    dist.init_process_group(
        backend,
        store=dist.FileStore(args.store, args.nproc_per_node),  # no port to choose
        rank=rank,
        world_size=args.nproc_per_node,
        timeout=datetime.timedelta(seconds=args.timeout),
        device_id=None if device.type == "cpu" else device,
    )
    where = f"device {device} | backend {dist.get_backend()} | threads {torch.get_num_threads()}"
    log(f"[rank {rank} of {args.nproc_per_node}] {where}", every_rank=True)
    return device


def load_train_objs(args: argparse.Namespace, train_set: Dataset, device: torch.device) -> tuple:
    set_seed(device, args.seed)  # the same weights on every rank
    model = build_model(args.model, train_set[0][0].shape).to(device)  # load your model
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1)  # load your schedule
    return model, optimizer, schedule


def prepare_dataloader(
    dataset: Dataset, batch_sampler: Sampler, device: torch.device, num_workers: int
) -> DataLoader:
    return DataLoader(
        dataset,
        batch_sampler=batch_sampler,
        collate_fn=collate,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        multiprocessing_context=worker_context(num_workers),
        worker_init_fn=follow,  # the rank, and not a scheduler's signals
        pin_memory=device.type not in ("cpu", "mps"),
        generator=torch.Generator().manual_seed(torch.initial_seed()),  # not the model's
    )


def main(rank: int, train_set: Dataset, test_set: Dataset, args: argparse.Namespace) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C, and what Linux sends if the parent dies
    if not mp.parent_process().is_alive():  # it has died before that
        sys.exit(1)
    device = ddp_setup(rank, args)
    world_size = dist.get_world_size()
    model, optimizer, schedule = load_train_objs(args, train_set, device)
    set_seed(device, args.seed, rank)  # from here on each rank draws its own
    train_sampler = GlobalBatchSampler(train_set, args.batch_size, rank, world_size, seed=args.seed)
    shard = range(rank, len(test_set), world_size)  # no padding: each sample counts once
    test_sampler = BatchSampler(shard, args.test_batch_size, drop_last=False)
    train_data = prepare_dataloader(train_set, train_sampler, device, args.num_workers)
    test_data = prepare_dataloader(test_set, test_sampler, device, args.num_workers)
    trainer = Trainer(model, train_data, test_data, optimizer, schedule, device, args)
    trainer.train(args.total_epochs)
    dist.barrier()  # rank 0 may still be saving, and all must leave together
    del trainer  # or DDP keeps the group, whose threads may block or abort Python's end
    dist.destroy_process_group()


def spawn(objs: tuple, nproc: int) -> None:
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")  # what killed ranks leave
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # children inherit it: no tracebacks at the start
    try:
        context = mp.spawn(main, objs, nproc, join=False)
        signal.signal(signal.SIGINT, stop)
        while not context.join(grace_period=2):
            pass
    except mp.ProcessExitedException as error:
        if error.exit_code > 0:  # it has said itself what is wrong
            sys.exit(error.exit_code)
        sys.exit(f"error: {error}: --resume goes on from the last snapshot")
    finally:  # whatever happens here, no process is left behind
        for process in mp.active_children():
            process.kill()


def open_snapshot(args: argparse.Namespace) -> dict:
    path = args.snapshot_path
    try:
        snapshot = torch.load(path, map_location="cpu", weights_only=True)
        for name in ("dataset", "model", "lr", "momentum", "seed"):
            then, now = str(snapshot["args"][name]), str(getattr(args, name))
            if then != now:
                sys.exit(f"error: {path} was made with --{name} {then}, and this run has {now}")
    except Exception as error:  # not sys.exit's; torch.load raises nearly everything
        sys.exit(f"error: {path} is not a snapshot of these scripts ({error!r:.200})")
    if snapshot.get("samples_seen"):
        sys.exit(f"error: {path} was saved in mid-epoch: go on with ddp_torchrun.py")
    return snapshot


def stop(signum: int, frame: object) -> None:
    signal.signal(signum, signal.SIG_IGN)  # once is enough
    os.write(2, b"stopped: --resume goes on from the last snapshot\n")
    sys.exit(128 + signum)  # the shells' number for a signal


def log(line: str, every_rank: bool = False) -> None:
    if every_rank or not dist.is_initialized() or dist.get_rank() == 0:
        tqdm.write(f"{line}\n", end="", nolock=True)  # one write; a stop in a lock would fail
        sys.stdout.flush()


def at_least(low: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = type(low)(text)  # int or float
        if not value >= low:
            raise argparse.ArgumentTypeError(f"{text} is less than {low}")
        return value

    return number


def parse_args() -> argparse.Namespace:
    found = torch.accelerator.current_accelerator(check_available=True)
    devices = [found.type, "cpu"] if found and found.type != "mps" else ["cpu"]
    parser = argparse.ArgumentParser(usage="%(prog)s [total_epochs] [save_every] [options]")
    add = parser.add_argument
    add("total_epochs", nargs="?", type=at_least(1), default=5, help="how many epochs to train")
    add("save_every", nargs="?", type=at_least(1), default=1, help="epochs between two snapshots")
    add("--batch-size", "--batch_size", type=at_least(1), default=32, help="samples per device")
    add("--test-batch-size", type=at_least(1), default=1000, help="the same in evaluation")
    add("--lr", type=at_least(0.0), default=0.01, help="learning rate of SGD")
    add("--momentum", type=at_least(0.0), default=0.9, help="momentum of SGD")
    add("--dataset", choices=DATASETS, default="digits", help="digits needs no download")
    add("--data-dir", default="data", help="where torchvision keeps or downloads the others")
    add("--model", choices=MODELS, help="default: what suits the data set")
    add("--seed", type=at_least(0), default=42)
    add("--deterministic", action="store_true", help="deterministic kernels on an accelerator")
    add("--device", choices=devices, default=devices[0])
    add("--nproc-per-node", type=at_least(1), help="default: one per device, 2 on a CPU")
    add("--backend", help="nccl, gloo ...; default: what suits the device")
    add("--timeout", type=at_least(1), default=600, help="seconds for a collective")
    add("--num-workers", type=at_least(0), default=0, help="loader processes; 4 for files, say")
    add("--log-interval", type=at_least(0), default=0, help="steps between loss lines (0: none)")
    add("--snapshot-path", default="checkpoint.pt")
    add("--resume", action="store_true", help="go on from the snapshot where there is one")
    args = parser.parse_args()
    args.model = args.model or DEFAULT_MODEL[args.dataset]
    serves = dist.Backend.backend_capability.get(args.backend, [])
    if args.backend and (args.device not in serves or not dist.is_backend_available(args.backend)):
        parser.error(f"--backend {args.backend} does not work on {args.device} here: leave it out")
    if dist.is_torchelastic_launched():
        parser.error("torchrun starts ddp_torchrun.py; this script starts its own processes")
    path = Path(args.snapshot_path)
    if (path.exists() and not path.is_file()) or not os.access(path.parent, os.W_OK):
        parser.error(f"--snapshot-path {path}: name a file in a folder that you may write to")
    count = 2 if args.device == "cpu" else torch.accelerator.device_count()
    args.nproc_per_node = args.nproc_per_node or count
    if args.device != "cpu" and args.nproc_per_node > count:
        parser.error(f"{args.nproc_per_node} processes are more than {count} devices")
    return args


if __name__ == "__main__":
    args = parse_args()
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    start = time.perf_counter()
    epochs = f"total_epochs: {args.total_epochs}, save_every: {args.save_every}"
    log(f"{epochs}, batch_size: {args.batch_size}")
    # Loaded once: the processes share the tensors in it.
    train_set, test_set = load_dataset(args.dataset, args.data_dir)  # load your dataset
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        args.store = os.path.join(folder, "store")
        spawn((train_set, test_set, args), args.nproc_per_node)
    log(f"Total time: {time.perf_counter() - start:.3f}s")
