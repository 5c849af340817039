"""Train on several hosts: started by hand, by torchrun, or by Slurm.

    python multinode.py --init-method tcp://192.168.54.179:22225 --rank 0 --world-size 2
    python multinode.py --init-method tcp://192.168.54.179:22225 --rank 1 --world-size 2
        one process a call, in any order; the address is that of rank 0's host, the port any free
        one there. With several devices a host, let each host start one process for each:
    python multinode.py --init-method tcp://192.168.54.179:22225 --nnodes 2 --node-rank 0
    python multinode.py --init-method file:///shared/new_file --rank 0 --world-size 2
    MASTER_ADDR=192.168.54.179 MASTER_PORT=22225 RANK=0 WORLD_SIZE=2 python multinode.py
    torchrun --nnodes 2 --node_rank 0 --nproc_per_node 4 --master_addr 192.168.54.179 multinode.py
    torchrun --nnodes 1:4 --nproc_per_node 4 --max-restarts 3 --rdzv_id 7 --rdzv_backend c10d
        --rdzv_endpoint 192.168.54.179:29400 multinode.py
    srun python multinode.py                    a task a process; or sbatch slurm/multinode.sbatch
    python multinode.py --check ...             no training: is everybody there, and how fast?

The rest is as in ddp_torchrun.py: each host prepares its own data, rank 0 saves, and what it saved
reaches the others over the network. Nothing here asks who is calling: use a private network.
docs/multinode.md says what to do when hosts do not meet, or are slow. To make it yours, edit what
is marked "load your".
"""

import argparse
import atexit
import contextlib
import datetime
import importlib.util
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

# Else a host that is lost is followed by two screens of C++ frames. To see them, export WARNING.
os.environ["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler
from tqdm import tqdm

from common.data import (
    DATASETS,
    Batches,
    DataError,
    ShardedBatchSampler,
    load_dataset,
    obey_only_the_rank,
    preload,
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
        self.device, self.stop, self.args = device, stop, args
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if args.sync_bn:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        ids = None if device.type == "cpu" else [device.index]
        # Gradients that are views of DDP's buckets save a copy.
        self.model = DDP(model, device_ids=ids, gradient_as_bucket_view=True)
        self.autocast = torch.autocast(device.type, AMP[args.amp], enabled=args.amp != "off")
        self.scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
        self.train_data, self.test_data = train_data, test_data
        self.pinned = train_data.pin_memory  # a copy from other memory must be waited for
        self.optimizer, self.schedule = optimizer, schedule
        self.epoch = 0  # the epoch in progress
        self.samples_seen = 0  # those of its samples that the job has trained on
        self.loss_sum = torch.zeros((), device=device)  # over these samples
        self.stopped = 0  # by the signal of this number
        self.ask_every, self.asked = 1, time.perf_counter()  # see _stop_agreed
        self._settle_buckets()
        if args.compile:
            model.compile()  # in place: the names of the weights stay as they are
        if snapshot is not None:
            self._load_snapshot(snapshot)
        self.writer = None
        if args.log_dir and self.rank == 0:
            from torch.utils.tensorboard import SummaryWriter  # an extra, and slow to import

            self.writer = SummaryWriter(args.log_dir, purge_step=self.epoch)

    def _run_batch(self, source: torch.Tensor, targets: torch.Tensor, count: int) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss_sum = torch.zeros((), device=self.device)
        parts = self.args.accumulate  # on every rank as many, also where shares are uneven
        sources = source.tensor_split(parts)  # load your inputs
        micro_batches = zip(sources, targets.tensor_split(parts), strict=True)
        for number, (source, targets) in enumerate(micro_batches, start=1):
            # Gradients add up locally; the last backward pass all-reduces the sum.
            last = number == parts
            with contextlib.nullcontext() if last else self.model.no_sync():
                with self.autocast:
                    output = self.model(source)  # load your inputs
                    loss = F.cross_entropy(output, targets, reduction="sum")  # load your loss
                # DDP averages over the ranks: this makes it the mean over the global batch of
                # `count`, also where the ranks have unequal shares of it.
                self.scaler.scale(loss * self.world_size / count).backward()
            loss_sum += loss.detach()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss_sum

    def _run_epoch(self, epoch: int) -> None:
        b_sz, log_interval = self.args.batch_size, self.args.log_interval
        name = self.device.type.upper().replace("CUDA", "GPU")
        self.train_data.sampler.set_epoch(epoch, self.samples_seen)
        self.train_data.generator.manual_seed(torch.initial_seed() + epoch)  # for its workers
        line = f"Epoch {epoch} | Batchsize: {b_sz} | Steps: {len(self.train_data)}"
        log(f"[{name}{self.rank}] {line}", every_rank=True)
        sizes = self.train_data.sampler.sizes()  # of the global batches
        self.model.train()
        quiet = self.args.no_progress or self.rank > 0
        progress = tqdm(self.train_data, leave=False, disable=quiet or None)
        for step, (source, targets) in enumerate(progress, start=1):
            source = source.to(self.device, non_blocking=self.pinned)  # load your inputs
            targets = targets.to(self.device, non_blocking=self.pinned)  # load your inputs
            count = sizes[step - 1]
            loss = self._run_batch(source, targets, count)
            self.loss_sum += loss
            self.samples_seen += count
            if log_interval and step % log_interval == 0:
                dist.all_reduce(loss)
                log(f"Epoch {epoch} | Step {step} | Loss: {loss.item() / count:.6f}")
            self.stopped = self._stop_agreed(step)
            if self.stopped:
                break
        progress.close()

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
            with self.autocast:
                # Shards differ in length, so not through DDP: no collectives here.
                output = self.model.module(source)  # load your inputs
                loss_sum += F.cross_entropy(output, targets, reduction="sum")  # load your loss
            correct += (output.argmax(dim=1) == targets).sum()  # load your metric
        return loss_sum, correct

    def train(self, total_epochs: int) -> None:
        path, save_every = self.args.snapshot_path, self.args.save_every
        samples, total = len(self.train_data.dataset), len(self.test_data.dataset)
        for epoch in range(self.epoch, total_epochs):
            seen, start = self.samples_seen, time.perf_counter()
            self._run_epoch(epoch)
            if self.device.type != "cpu":
                torch.accelerator.synchronize()  # the clock must not stop before the device
            rate = (self.samples_seen - seen) / (time.perf_counter() - start)
            if self.stopped:
                self._save_snapshot()
                log(f"Epoch {epoch} | Stopped at sample {self.samples_seen}, saved at {path}")
                return
            sums = torch.stack((self.loss_sum, *self._evaluate()))
            dist.all_reduce(sums)
            train_loss, test_loss, correct = sums.tolist()
            train_loss, test_loss = train_loss / samples, test_loss / total
            losses = f"Train loss: {train_loss:.4f} | Test loss: {test_loss:.4f}"
            accuracy = f"Accuracy: {correct:.0f}/{total} ({correct / total:.2%})"
            log(f"Epoch {epoch} | {losses} | {accuracy} | {rate:.0f} samples/s")
            if self.writer:
                self.writer.add_scalar("loss/train", train_loss, epoch)
                self.writer.add_scalar("loss/test", test_loss, epoch)
                self.writer.add_scalar("accuracy", correct / total, epoch)
                self.writer.add_scalar("samples_per_second", rate, epoch)
                self.writer.flush()
            self.schedule.step()  # load your schedule, if it steps otherwise
            self.epoch, self.samples_seen = epoch + 1, 0
            self.loss_sum.zero_()
            if self.epoch % save_every == 0 or self.epoch == total_epochs:
                self._save_snapshot()
                log(f"Epoch {epoch} | Training checkpoint saved at {path}")

    # Snapshots and stopping

    def _save_snapshot(self) -> None:
        rng_states = [None] * self.world_size
        dist.all_gather_object(rng_states, get_rng_state(self.device))
        loss_sum = self.loss_sum.clone()
        dist.all_reduce(loss_sum)
        if self.rank > 0:
            with waiting_for("rank 0, which saves the snapshot"):
                dist.barrier()
            return
        snapshot = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "epoch": self.epoch,
            "samples_seen": self.samples_seen,
            "loss_sum": loss_sum.item(),
            "rng_states": rng_states,
            "settings": vars(self.args),
        }
        # Whole or not at all: whatever happens here, the snapshot before is still there.
        path, temporary = Path(self.args.snapshot_path), Path(f"{self.args.snapshot_path}.tmp")
        try:
            with temporary.open("wb") as file:
                torch.save(snapshot, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except (OSError, RuntimeError) as error:  # the latter from torch.save
            temporary.unlink(missing_ok=True)
            sys.exit(f"error: cannot save {path} ({error}): make room, then --resume")
        dist.barrier()

    def _load_snapshot(self, snapshot: dict) -> None:
        if self.rank > 0:
            dist.barrier()  # rank 0 says, once, what does not fit
        try:
            # Where the command line overrules the snapshot, the new optimizer's own values hold.
            now, then = vars(self.args), snapshot["settings"]
            changed = [name for name in KEPT if now[name] != then.get(name, now[name])]
            if "lr" in changed:  # and those of the new schedule, as if it had come this far
                changed += ["initial_lr", "max_lr", "min_lr"]
                with warnings.catch_warnings(action="ignore"):  # no optimizer.step() between them
                    for _ in range(snapshot["epoch"]):
                        self.schedule.step()
                snapshot["schedule"] = self.schedule.state_dict()
            old, new = snapshot["optimizer"]["param_groups"], self.optimizer.param_groups
            for kept, made in zip(old, new, strict=False):
                kept.update({name: made[name] for name in changed if name in made})
            self.model.module.load_state_dict(snapshot["model"])
            self.optimizer.load_state_dict(snapshot["optimizer"])
            self.schedule.load_state_dict(snapshot["schedule"])
            if snapshot["scaler"]:  # the run before had one, too
                self.scaler.load_state_dict(snapshot["scaler"])
            self.epoch, self.samples_seen = snapshot["epoch"], snapshot["samples_seen"]
            self.loss_sum.fill_(snapshot["loss_sum"] if self.rank == 0 else 0)
            if self.rank < len(snapshot["rng_states"]):  # there may be more processes than then
                set_rng_state(snapshot["rng_states"][self.rank], self.device)
        except Exception as error:  # load_state_dict raises nearly everything
            cannot_resume(self.args, error)
        if self.rank == 0:
            dist.barrier()
        log(f"Resuming training from snapshot at Epoch {self.epoch}, sample {self.samples_seen}")

    def _settle_buckets(self) -> None:
        # DDP rearranges its buckets of gradients after the first backward pass, and with them the
        # order of summation. Do that first, or a resumed run would round differently. Any output
        # will do that all parameters have a part in, so the model itself is not asked for one.
        model = self.model.module
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        model.forward = sum
        self.model([parameter.sum() for parameter in trained]).backward()
        del model.forward  # its class has the real one

    def _stop_agreed(self, step: int) -> int:
        # Every rank must leave the loop after the same step, or the others wait in an all-reduce
        # for the one that left. Asking costs a round trip: where a step takes less than a second,
        # do it at every tenth.
        if step % self.ask_every > 0 and step < len(self.train_data):
            return 0
        launched = dist.is_torchelastic_launched() or mp.parent_process()
        orphaned = launched and os.getppid() != LAUNCHER
        signum = signal.SIGTERM if orphaned else self.stop.item()
        slow = time.perf_counter() - self.asked > self.ask_every
        answer = torch.tensor([signum, slow], device=self.device)
        dist.all_reduce(answer, op=dist.ReduceOp.MAX)
        signum, slow = answer.tolist()
        self.ask_every, self.asked = 1 if slow else 10, time.perf_counter()
        return signum


# Setting up


def ddp_setup(args: argparse.Namespace) -> torch.device:
    if args.deterministic:  # first of all: the process group chooses its kernels, too
        use_deterministic_kernels()
    address = own_address(args)
    try:
        store = join(args, address)
        device, device_id = torch.device("cpu"), None
        if args.device != "cpu":
            device = device_id = choose_device(args)
            torch.accelerator.set_device_index(device.index)
        if "OMP_NUM_THREADS" not in os.environ:  # or else every process takes all cores
            cores = int(os.environ.get("SLURM_CPUS_PER_TASK", torch.get_num_threads()))
            torch.set_num_threads(max(1, cores // args.local_world_size))
        loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
        if loopback and args.world_size == args.local_world_size:  # these need no network
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
        dist.init_process_group(
            args.backend,
            store=store,
            rank=args.rank,
            world_size=args.world_size,
            timeout=datetime.timedelta(seconds=args.timeout),
            device_id=device_id,
        )
    except (OSError, RuntimeError, ValueError) as error:
        reason = one_line(error)
        if "EADDRINUSE" in reason:
            reason = "the port is taken: choose another one"
        elif "Failed to recv" in reason:
            reason = "rank 0 has left again: look there for the cause"
        where = f"rank {args.rank} of {args.world_size}, at {address}"
        sys.exit(f"error: {where}, cannot join at {args.init_method}: {reason}")
    line = f"[rank {args.rank} of {args.world_size}] host {socket.gethostname()} at {address}"
    line += f" | device {device} | backend {dist.get_backend()} | threads {torch.get_num_threads()}"
    log(line, every_rank=True)
    return device


def join(args: argparse.Namespace, address: str) -> dist.Store | None:
    # The store where the ranks meet, as soon as all are there. torchrun's workers have one already.
    name, complaint = socket.gethostname(), loopback_name(args, address)
    if dist.is_torchelastic_launched():
        if complaint and args.local_world_size < args.world_size:
            raise ValueError(complaint)
        return None
    if args.init_method is None:
        return dist.HashStore()
    rank, world_size, url = args.rank, args.world_size, urlsplit(args.init_method)
    end, timeout = time.monotonic() + args.timeout, datetime.timedelta(seconds=args.timeout)
    if url.scheme == "file":
        store = dist.FileStore(url.path, world_size)
    else:
        report = time.monotonic() + 10
        while rank > 0:  # torch would wait as well, but end with two screens of C++ frames
            try:
                socket.create_connection((url.hostname, url.port), timeout=5).close()
                break
            except OSError as error:
                if time.monotonic() > end or isinstance(error, socket.gaierror):
                    hint = "is that rank 0's host, is rank 0 started, is there a firewall?"
                    raise ValueError(f"{error}; {hint}") from error
                if time.monotonic() > report:
                    report += 10
                    log(f"[rank {rank}] still waiting for rank 0 at {args.init_method} ({error})")
                time.sleep(0.1)
        place = (url.hostname, url.port, world_size, rank == 0, timeout)
        libuv = sys.platform != "win32"  # torch for Windows is built without
        store = dist.TCPStore(*place, wait_for_workers=False, use_libuv=libuv)
    if complaint:
        store.set("complaint", complaint)
    boot = Path("/proc/sys/kernel/random/boot_id")  # where two hosts have one name
    store.set(f"host of {rank}", name + (boot.read_text() if boot.exists() else ""))
    store.add(f"host {name}", 1)
    if store.add(f"rank {rank}", 1) > 1:
        hint = ", or remove the file of an earlier run" if url.scheme == "file" else ""
        raise ValueError(f"there is a rank {rank} already: give each process its own{hint}")
    told = store.compare_set("world size", "", str(world_size)).decode()
    if told != str(world_size):
        raise ValueError(f"another process says that there are {told}: give all the same number")
    report = time.monotonic() + 10
    while not store.check(keys := [f"rank {other}" for other in range(world_size)]):
        missing = ", ".join(key for key in keys if not store.check([key]))
        if time.monotonic() > end:
            raise ValueError(
                f"missing after {args.timeout} s: {missing}; start them all, like this"
            )
        if time.monotonic() > report:
            report += 10
            log(f"[rank {rank}] still waiting for {missing}")
        time.sleep(0.1)
    # With --nnodes, LOCAL_RANK or srun it is known who shares this host; now it is for all.
    if args.nnodes is None and not {"LOCAL_RANK", "SLURM_LOCALID"} & os.environ.keys():
        hosts = [store.get(f"host of {other}") for other in range(world_size)]
        args.local_rank = hosts[:rank].count(hosts[rank])
        args.local_world_size = hosts.count(hosts[rank])
    if store.check(["complaint"]) and store.add(f"host {name}", 0) < world_size:
        raise ValueError(store.get("complaint").decode())
    return store


def choose_device(args: argparse.Namespace) -> torch.device:
    # Processes that were started by hand know only now how many of them share this host. One that
    # sees a single device takes it: CUDA_VISIBLE_DEVICES may show each another one.
    count = torch.accelerator.device_count()
    if args.local_world_size > count > 1 and args.backend != "gloo":
        raise ValueError(
            f"{args.local_world_size} processes on this host are more than {count} devices: start "
            "fewer, or use --device cpu, or --backend gloo, where they may share one"
        )
    return torch.device(args.device, args.local_rank % count)


def loopback_name(args: argparse.Namespace, address: str) -> str:
    # gloo tells the others to connect to what this host's own name resolves to.
    name = socket.gethostname()
    if args.backend != "gloo" or "GLOO_SOCKET_IFNAME" in os.environ or address.startswith("127."):
        return ""
    try:
        named = socket.gethostbyname(name)
    except OSError:
        named = "nothing"
    remedy = f"there export GLOO_SOCKET_IFNAME=the interface that has {address}, or mend /etc/hosts"
    reachable = named != "nothing" and not named.startswith("127.")
    return "" if reachable else f"on {name} the name {name} resolves to {named}: {remedy}"


def own_address(args: argparse.Namespace) -> str:
    # That from which rank 0 is reached. Connecting a datagram socket sends nothing.
    host = urlsplit(args.init_method or "").hostname or socket.gethostname()
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError:  # joining will say why
        return "an unknown address"


def load_train_objs(args: argparse.Namespace, device: torch.device) -> tuple:
    if args.local_rank > 0:
        preload(args.dataset)  # slow imports: there is time
        with waiting_for("the first process of each host, which prepares the data"):
            dist.barrier()
    train_set, test_set = load_dataset(args.dataset, args.data_dir)  # load your dataset
    if args.local_rank == 0:
        with waiting_for("the other hosts, which prepare the data"):
            dist.barrier()
    set_seed(args.seed)  # the same weights on every rank
    model = build_model(args.model, train_set[0][0].shape).to(device)  # load your model
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1)  # load your schedule
    return train_set, test_set, model, optimizer, schedule


def prepare_dataloader(
    dataset: Dataset, sampler: Sampler, device: torch.device, num_workers: int
) -> DataLoader:
    # Forked workers are there at once. Elsewhere than on Linux each starts Python anew.
    fork = num_workers > 0 and sys.platform == "linux"
    return DataLoader(
        Batches(dataset),
        sampler=sampler,
        batch_size=None,  # the sampler gives whole batches
        num_workers=num_workers,
        multiprocessing_context="fork" if fork else None,
        worker_init_fn=obey_only_the_rank,
        pin_memory=device.type not in ("cpu", "mps"),
        generator=torch.Generator(),  # its own, so that it draws nothing from the model's
    )


def main(args: argparse.Namespace, stop: torch.Tensor) -> None:
    start, rank, world_size = time.perf_counter(), args.rank, args.world_size
    device = ddp_setup(args)
    args.run = agree_on_run()
    snapshot = find_snapshot(args)
    line = "total_epochs: {total_epochs}, save_every: {save_every}, batch_size: {batch_size}"
    log(line.format(**vars(args)))
    train_set, test_set, model, optimizer, schedule = load_train_objs(args, device)
    set_seed(args.seed, rank)  # from here on each rank draws its own
    batch_size = args.batch_size * args.accumulate
    train_sampler = ShardedBatchSampler(train_set, batch_size, world_size, rank, args.seed)
    smallest = train_sampler.sizes()[0] // world_size // args.accumulate
    check_batch_norm(model, smallest * world_size if args.sync_bn else smallest, train_set)
    shard = range(rank, len(test_set), world_size)  # no padding: every sample counts once
    test_sampler = BatchSampler(shard, args.test_batch_size, drop_last=False)
    train_data = prepare_dataloader(train_set, train_sampler, device, args.num_workers)
    test_data = prepare_dataloader(test_set, test_sampler, device, args.num_workers)
    objs = (model, train_data, test_data, optimizer, schedule)
    trainer = Trainer(*objs, device, snapshot, stop, args)
    catch_stop_signals(stop)
    if args.check:
        check(trainer)
    else:
        trainer.train(args.total_epochs)
    if not trainer.stopped:
        log(f"Total time: {time.perf_counter() - start:.3f}s")
    dist.destroy_process_group()
    # After a stop the shells' number for a signal: not done yet.
    leave(128 + trainer.stopped if trainer.stopped else 0)


def check(trainer: Trainer) -> None:
    # Does an all-reduce add up, how long does it take, and what does that make of a step?
    world_size, device = trainer.world_size, trainer.device
    trainer.model.train()
    source, targets = next(iter(trainer.train_data))
    source = source.to(device, non_blocking=trainer.pinned)  # load your inputs
    targets = targets.to(device, non_blocking=trainer.pinned)  # load your inputs
    count = sum(parameter.numel() for parameter in trainer.model.parameters())
    gradient = torch.full((count,), trainer.rank + 1.0, device=device)
    dist.all_reduce(gradient)
    wrong = (gradient != world_size * (world_size + 1) / 2).sum()
    dist.all_reduce(wrong)
    seconds = torch.empty(6, 2, device=device)
    for row in seconds:
        dist.barrier()
        start = time.perf_counter()
        with trainer.model.no_sync():
            trainer._run_batch(source, targets, len(targets) * world_size).item()
        row[0] = time.perf_counter() - start
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(gradient)
        gradient[0].item()  # waits for the device
        row[1] = time.perf_counter() - start
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)  # a step waits for the slowest rank
    rows = seconds[1:].tolist()  # the first one warms up
    compute, reduce = map(statistics.median, zip(*rows, strict=True))
    size, steps = count * gradient.element_size(), len(trainer.train_data)
    sent = 2 * (world_size - 1) / world_size * size / reduce / 1e9  # by each rank, in a ring
    share, epoch = reduce / (compute + reduce), steps * (compute + reduce)
    log(f"All-reduce | {size / 1e6:.2f} MB | {reduce * 1e3:.2f} ms | {sent:.4f} GB/s")
    log(f"Step | {compute * 1e3:.2f} ms to compute, {share:.0%} of the step for the all-reduce")
    log(f"Epoch | {steps} steps | about {epoch:.1f} s")
    if wrong:
        sys.exit(f"error: {wrong.item()} of {world_size * count} sums of the all-reduce are wrong")


# Plumbing


@record  # without it torchrun's report has no traceback
def run(args: argparse.Namespace, stop: torch.Tensor) -> None:
    try:
        main(args, stop)
    except (DataError, OSError) as error:
        sys.exit(f"error: {error}")
    except RuntimeError as error:
        # When a rank fails, the others lose it. Let torchrun report the one, not the others.
        if not is_lost_peer(error):
            raise
        line = f"error: rank {args.rank} has lost the others, look there for the cause"
        sys.exit(f"{line} ({one_line(error)})")


def run_rank(local_rank: int, args: argparse.Namespace, stop: torch.Tensor) -> None:
    args.local_rank, args.rank = local_rank, args.rank + local_rank
    run(args, stop)


def spawn(args: argparse.Namespace, stop: torch.Tensor) -> None:
    processes = []
    try:
        # Children inherit this and stay deaf to Ctrl-C until they can answer it properly.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        context = mp.spawn(run_rank, (args, stop), args.nproc_per_node, join=False)
        processes = context.processes
        catch_stop_signals(stop)  # shared memory: what one process hears, all hear
        seconds = 0  # since a stop was asked for
        while not context.join(timeout=1, grace_period=5):
            seconds += stop.item() > 0
            if seconds > PATIENCE:
                log("error: not all ranks stopped: --resume goes on from the last snapshot")
                sys.exit(128 + stop.item())
    except mp.ProcessExitedException as error:
        if error.exit_code > 0:  # its last words are on the screen
            sys.exit(error.exit_code)
        sys.exit(f"error: {error}: --resume goes on from the last snapshot")
    finally:
        for process in processes:
            process.kill()


def is_lost_peer(error: RuntimeError) -> bool:
    # By what gloo, NCCL and the store say when a peer has gone. All else is this rank's own fault.
    said = ("closed by peer", "reset by peer", "writev", "for recv operation", "for send operation")
    said += ("pair closure", "remote process exit", "collective operation timeout", "store->get(")
    store_failed = isinstance(error, (dist.DistNetworkError, dist.DistStoreError))
    return store_failed or any(words in str(error) for words in said)


def one_line(error: Exception) -> str:
    # NCCL names the cause in a later line than the first. The C++ frames come last.
    return " ".join(str(error).split("Exception raised from")[0].split())


PATIENCE = 25  # seconds that ranks have to save after a request to stop; torchrun gives 30


LAUNCHER = os.getppid()  # another parent, later on, means that it was killed


def catch_stop_signals(stop: torch.Tensor) -> None:
    def on_signal(signum: int, frame: object) -> None:
        stop.fill_(signum)
        if not dist.is_torchelastic_launched():  # torchrun passes on what came here already
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)


def leave(status: int) -> None:
    # Not by sys.exit: with torch 2.9 gloo's threads abort or block one process in some hundreds
    # while Python ends. First what Python does then: wait for threads, and run what has been
    # registered, as by experiment trackers.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)


tqdm.set_lock(threading.RLock())  # its own is a semaphore that a killed process leaves behind


def log(line: str, every_rank: bool = False) -> None:
    if dist.is_initialized() and dist.get_rank() > 0 and not every_rank:
        return
    tqdm.write(f"{line}\n", end="")  # one write, above the progress bar
    sys.stdout.flush()


@contextlib.contextmanager
def waiting_for(whom: str) -> Iterator[None]:
    # A download or a slow disk must not look like a hang. What bounds it is --timeout.
    line = f"[rank {dist.get_rank()}] still waiting for {whom}"
    timer = threading.Timer(10, log, (line, True))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# What a resumed run keeps of the one before: what it computes, not where and how fast.
KEPT = ("total_epochs", "save_every", "batch_size", "test_batch_size", "lr", "momentum")
KEPT += ("dataset", "data_dir", "model", "seed", "accumulate", "amp")


def agree_on_run() -> str:
    # torchrun tells each process where to report errors, in a folder that each host's torchrun
    # makes anew and keeps for its restarts: <run>/attempt_<n>/<local rank>/error.json. The run's
    # name stays there. A host that joins later learns it from the others.
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    note = Path(report).parents[2] / "run" if report else Path(os.devnull)
    known = note.read_text() if note.exists() else ""
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, (known > "", known or uuid.uuid4().hex))
    note.write_text(max(names)[1])
    return max(names)[1]


def find_snapshot(args: argparse.Namespace) -> dict | None:
    # After a restart rank 0 may be on another host than the one that saved: the furthest snapshot
    # of this run counts. Without any, --resume asks for rank 0's.
    snapshot, mine = None, (False, -1, 0)
    if args.local_rank == 0:
        snapshot = open_snapshot(args)
    if snapshot is not None:
        same_run = snapshot["settings"].get("run") == args.run
        mine = (same_run, snapshot["epoch"], snapshot["samples_seen"])
    everywhere = [None] * args.world_size
    dist.all_gather_object(everywhere, mine)
    source = everywhere.index(max(everywhere))
    box = [snapshot, {name: getattr(args, name) for name in KEPT}]
    dist.broadcast_object_list(box, src=source)  # no other rank needs the file
    vars(args).update(box[1])
    return box[0]


def open_snapshot(args: argparse.Namespace) -> dict | None:
    path, resume = Path(args.snapshot_path), args.resume and args.rank == 0
    if not path.exists():
        if resume:
            log(f"No snapshot at {path}, starting from the beginning")
        return None
    try:
        snapshot = torch.load(path, map_location="cpu", weights_only=True)
        # After a crash torchrun starts everything anew: go on from what this run has saved, but
        # never from the snapshot of an earlier one; --resume asks for that.
        if not resume and snapshot["settings"]["run"] != args.run:
            return None
        # A resumed run goes on as it was started, but for what its own command line says.
        for name in KEPT:
            now = getattr(args, name)
            then = snapshot["settings"].get(name, now)  # not every script has every option
            if name not in args.given:
                setattr(args, name, then)
            elif then != now and name in ("dataset", "model", "seed"):
                raise ValueError(f"made with --{name} {then}, and this run has {now}")
            elif then != now:
                log(f"{name}: {now} from the command line, not the snapshot's {then}")
    except Exception as error:  # torch.load raises nearly everything
        if not resume:  # it is another program's
            return None
        cannot_resume(args, error)
    return snapshot


def cannot_resume(args: argparse.Namespace, error: Exception) -> NoReturn:
    path, reason = args.snapshot_path, f"{type(error).__name__}: {error}".splitlines()[0]
    sys.exit(f"error: cannot resume from {path} ({reason}): name another --snapshot-path")


AMP = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def device_names() -> list[str]:
    found = torch.accelerator.current_accelerator(check_available=True)
    return [found.type, "cpu"] if found and found.type != "mps" else ["cpu"]


def find_ranks(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    # Who is this process, and where does it meet the others? The arguments say so, or else the
    # environment: torchrun's, the user's own or Slurm's. Where nothing does, it is alone.
    env = os.environ
    names = ("init_method", "rank", "world_size", "nnodes", "node_rank")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None]
    found = {"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1}
    if dist.is_torchelastic_launched() and given:
        parser.error(f"torchrun gives the ranks: leave out {', '.join(given)}, or use python")
    if args.nproc_per_node is not None and args.nnodes is None:
        parser.error("--nproc-per-node goes with --nnodes, --node-rank and --init-method")
    if args.nproc_per_node is None:
        args.nproc_per_node = 2 if args.device == "cpu" else torch.accelerator.device_count()
    if "--nnodes" in given or "--node-rank" in given:
        if given != ["--init-method", "--nnodes", "--node-rank"]:
            parser.error("--nnodes, --node-rank and --init-method go together, without --rank")
        args.rank = args.node_rank * args.nproc_per_node
        args.world_size = args.nnodes * args.nproc_per_node
        found["local_world_size"] = args.nproc_per_node
    elif args.init_method == "env://" or (not given and "RANK" in env):
        for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
            if name not in env and getattr(args, name.lower(), None) is None:
                parser.error(f"the environment has no {name}: export it, or use --init-method tcp")
        found = {name: env.get(name.upper(), alone) for name, alone in found.items()}
        args.init_method = "env://"
    elif given:
        if given != ["--init-method", "--rank", "--world-size"]:
            parser.error("--init-method, --rank and --world-size go together, or with --nnodes")
        found["local_rank"] = env.get("LOCAL_RANK", 0)
    elif "SLURM_STEP_ID" in env:
        found["rank"], found["world_size"] = env["SLURM_PROCID"], env["SLURM_NTASKS"]
        found["local_rank"] = env["SLURM_LOCALID"]
        env.setdefault("SLURM_CPUS_PER_TASK", "1")  # Slurm's own default
        env.setdefault("MASTER_PORT", str(10_000 + int(env["SLURM_JOB_ID"]) % 20_000))
        ask = ["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]]
        try:
            hosts = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()
        except (OSError, subprocess.SubprocessError) as error:
            parser.error(f"Slurm does not say which host is the first ({error}): use --init-method")
        env.setdefault("MASTER_ADDR", hosts[0])
        args.init_method = "env://"
    for name, value in found.items():
        if getattr(args, name, None) is None:
            if not str(value).isdigit():
                parser.error(f"{name} is {value} in the environment: it must be a number")
            setattr(args, name, int(value))
    if args.init_method == "env://":
        host = f"[{env['MASTER_ADDR']}]" if ":" in env["MASTER_ADDR"] else env["MASTER_ADDR"]
        args.init_method = f"tcp://{host}:{env['MASTER_PORT']}"
    if not 0 <= args.rank < args.world_size:
        parser.error(f"rank {args.rank} is not in a world of {args.world_size}: they count from 0")
    method = args.init_method or "tcp://localhost:1"
    match = re.fullmatch(r"file://.+|tcp://.+:(\d+)", method)
    if not match or not 0 < int(match[1] or 1) < 65_536:
        parser.error(f"--init-method {method}: write tcp://host:port or file:///path")


def parse_args() -> argparse.Namespace:
    usage = "%(prog)s [total_epochs] [save_every] [options]"
    parser = argparse.ArgumentParser(usage=usage, description=__doc__.split("\n")[0])
    add, devices = parser.add_argument, device_names()
    add("total_epochs", nargs="?", type=int, default=5, help="total epochs to train the model")
    add("save_every", nargs="?", type=int, default=1, help="how often to save a snapshot")
    add("--batch-size", "--batch_size", type=int, default=32, help="samples a device and step")
    add("--test-batch-size", type=int, default=1000, help="the same in evaluation")
    add("--lr", type=float, default=0.01, help="learning rate of SGD")
    add("--momentum", type=float, default=0.9, help="momentum of SGD")
    add("--dataset", choices=DATASETS, default="digits", help="digits needs no download")
    add("--data-dir", default="data", help="where torchvision keeps or downloads the others")
    add("--model", choices=MODELS, help="default: what suits the data set")
    add("--seed", type=int, default=42)
    add("--deterministic", action="store_true", help="deterministic kernels on an accelerator")
    add("--device", choices=["auto", *devices], default="auto")
    add("--snapshot-path", default="checkpoint.pt")
    add("--resume", action="store_true", help="go on from the snapshot where there is one")
    add("--log-interval", type=int, default=0, help="steps between loss lines (0: none)")
    add("--log-dir", help="folder for TensorBoard's event files")
    add("--no-progress", action="store_true", help="no progress bar")
    add("--num-workers", type=int, default=0, help="processes that load data; 4 for files, say")
    add("--accumulate", type=int, default=1, help="batches a step, one after the other")
    add("--amp", choices=AMP, default="off", help="automatic mixed precision")
    add("--compile", action="store_true", help="torch.compile: slow to start, then faster")
    add("--sync-bn", action="store_true", help="BatchNorm over all ranks; not on a CPU")
    add("--nproc-per-node", type=int, help="with --nnodes; default: one a device, 2 on a CPU")
    add("--init-method", help="tcp://host-of-rank-0:port, file:///shared/new_file, or env://")
    add("--rank", type=int, help="this process's number, from 0")
    add("--world-size", type=int, help="how many processes there are")
    add("--nnodes", type=int, help="instead of --world-size: how many hosts there are")
    add("--node-rank", type=int, help="instead of --rank: this host's number, from 0")
    add("--check", action="store_true", help="join and measure, but do not train")
    add("--epochs", type=int, help="the same as total_epochs")
    add("--no-cuda", action="store_true", help="the same as --device cpu")
    add("--local-rank", "--local_rank", dest="unused", help=argparse.SUPPRESS)
    add("--backend", default="auto", help="nccl, gloo ...; auto: what suits the device")
    add("--timeout", type=int, default=600, help="seconds that a collective may take")
    args = parser.parse_args()
    parser.set_defaults(**dict.fromkeys(vars(args)))  # what is not None without them was given
    args.given = [name for name, value in vars(parser.parse_args()).items() if value is not None]
    if args.epochs is not None:
        args.total_epochs = args.epochs
        args.given.append("total_epochs")
    args.device = "cpu" if args.no_cuda else args.device
    args.model = args.model or DEFAULT_MODEL[args.dataset]
    args.device = devices[0] if args.device == "auto" else args.device
    count = 0 if args.device == "cpu" else torch.accelerator.device_count()
    find_ranks(parser, args)
    if args.backend == "auto":
        args.backend = dist.get_default_backend_for_device(args.device)
        if not dist.is_backend_available(args.backend):  # on Windows there is no NCCL
            args.backend = "gloo"
    serves = dist.Backend.backend_capability.get(args.backend, [])
    if args.device not in serves or not dist.is_backend_available(args.backend):
        parser.error(f"--backend {args.backend} does not work on {args.device} here: use auto")
    if args.device != "cpu" and args.local_world_size > count and args.backend != "gloo":
        parser.error(
            f"{args.local_world_size} processes are more than {count} devices: use "
            f"--nproc-per-node {count}, --device cpu, or --backend gloo, where they may share one"
        )
    if args.sync_bn and args.device == "cpu":
        parser.error("--sync-bn needs an accelerator: leave it out on a CPU")
    if args.compile and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++", "cl"))):
        parser.error("--compile needs a C++ compiler: install g++, or leave it out")
    from_0 = ("lr", "momentum", "seed", "log_interval", "num_workers")
    from_0 += ("rank", "local_rank", "node_rank")
    for name, value in vars(args).items():
        low = 0 if name in from_0 else 1
        if type(value) in (int, float) and not low <= value < 2**32:
            parser.error(f"{name} is {value}: it must be {low} or more, and below 2**32")
    path = Path(args.snapshot_path)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        parser.error(f"--snapshot-path {path}: name a file in a folder that you may write to")
    if args.log_dir and not importlib.util.find_spec("tensorboard"):
        parser.error("--log-dir needs TensorBoard: pip install tensorboard")
    return args


if __name__ == "__main__":
    args = parse_args()
    try:
        launch = run if args.nnodes is None else spawn
        launch(args, stop=torch.zeros((), dtype=torch.int32))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
