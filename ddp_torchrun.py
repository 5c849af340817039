"""Train under torchrun, on one node or on several: it starts the processes, and restarts them.

    torchrun --nproc_per_node=gpu ddp_torchrun.py 50 10       one process per GPU of this node
    torchrun --nproc_per_node=4 --max-restarts=3 ddp_torchrun.py 50
    python ddp_torchrun.py --resume                           one process, without torchrun
    torchrun --nproc_per_node=4 ddp_torchrun.py --check       no training: where does time go?
    torchrun --nproc_per_node=4 ddp_torchrun.py --batch-size 8 --accumulate 4 --amp bf16 --compile
    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=4 --master_addr=10.0.0.1 ddp_torchrun.py
        two nodes: the same on the second one, with --node_rank=1
    torchrun --nnodes=1:4 --nproc_per_node=4 --max-restarts=3 --rdzv_id=7 --rdzv_backend=c10d
        --rdzv_endpoint=10.0.0.1:29400 ddp_torchrun.py        one to four nodes; they come and go

slurm/ has a batch script. The global batch is --batch-size times the processes times --accumulate.
With --max-restarts, a crash of any process restarts all, from this run's last snapshot; for that
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or restarted processes fail on what the crashed ones
left in torchrun's store. Ctrl-C and SIGTERM stop all after the same step and save a snapshot;
torchrun kills what has not stopped after 30 seconds. --resume then ends with the same weights as a
run that was never stopped (on accelerators with --deterministic). To make this file yours, edit
the lines that are marked "load your".
"""

import argparse
import atexit
import contextlib
import datetime
import importlib.util
import os
import shutil
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler
from tqdm import tqdm

from common.check import check
from common.data import (
    DATASETS,
    Batches,
    DataError,
    ShardedBatchSampler,
    load_dataset,
    obey_only_the_rank,
    preload,
    worker_context,
)
from common.model import DEFAULT_MODEL, MODELS, build_model, check_batch_norm
from common.seed import get_rng_state, set_rng_state, set_seed, use_deterministic_kernels

LAUNCHER = os.getppid()  # torchrun; another parent, later on, means that it was killed


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
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        if args.sync_bn:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        self.model = DDP(
            model,
            device_ids=None if device.type == "cpu" else [device.index],
            gradient_as_bucket_view=True,  # gradients lie in DDP's buckets: no second copy
            # On a CPU the all-reduce takes its cores from backward(): without DDP's small first
            # bucket a model of up to 25 MiB is one all-reduce, and a step some percent faster.
            bucket_cap_mb=25 if device.type == "cpu" else None,
        )
        self.autocast = torch.autocast(device.type, AMP[args.amp], enabled=args.amp != "off")
        self.scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
        self.train_data = train_data
        self.test_data = test_data
        self.pinned = train_data.pin_memory  # only copies from pinned memory may overlap the work
        self.optimizer = optimizer
        self.schedule = schedule
        self.epoch = 0  # the epoch in progress
        self.samples_seen = 0  # in this epoch, by all ranks
        self.loss_sum = torch.zeros((), device=device)  # over this rank's share of them
        self.stopped = 0  # the number of the signal that has ended training, or 0
        self.ask_every = 1  # steps between two agreements on whether to stop
        self.asked = time.perf_counter()  # when the last one was
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
        parts = self.args.accumulate  # on every rank, or they would wait for each other
        sources = source.tensor_split(parts)  # load your inputs
        micro_batches = zip(sources, targets.tensor_split(parts), strict=True)
        for number, (micro_source, micro_targets) in enumerate(micro_batches, start=1):
            # Under no_sync() gradients add up on their rank; the last backward() sends the sum.
            last = number == parts
            with contextlib.nullcontext() if last else self.model.no_sync():
                with self.autocast:
                    output = self.model(micro_source)  # load your inputs
                    loss = F.cross_entropy(output, micro_targets, reduction="sum")  # load your loss
                # Here gradients travel: while the last backward() computes them, DDP all-reduces
                # them. It takes the mean over the ranks, so this scale makes it the mean over the
                # global batch of `count` samples, also where the ranks have unequal shares of it.
                self.scaler.scale(loss * self.world_size / count).backward()
            loss_sum += loss.detach()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss_sum

    def _run_epoch(self, epoch: int) -> None:
        self.train_data.sampler.set_epoch(epoch, self.samples_seen)
        self.train_data.generator.manual_seed(torch.initial_seed() + epoch)  # its workers' seeds
        name = self.device.type.upper().replace("CUDA", "GPU")
        b_sz = self.args.batch_size
        line = f"Epoch {epoch} | Batchsize: {b_sz} | Steps: {len(self.train_data)}"
        log(f"[{name}{self.rank}] {line}", every_rank=True)
        sizes = self.train_data.sampler.sizes()  # of the global batches, step by step
        self.model.train()
        hidden = self.args.no_progress or not sys.stderr.isatty() or self.rank > 0
        progress = tqdm(self.train_data, leave=False, disable=hidden)
        for step, (source, targets) in enumerate(progress, start=1):
            source = source.to(self.device, non_blocking=self.pinned)  # load your inputs
            targets = targets.to(self.device, non_blocking=self.pinned)  # load your inputs
            count = sizes[step - 1]
            loss = self._run_batch(source, targets, count)
            self.loss_sum += loss
            self.samples_seen += count
            if self.args.log_interval and step % self.args.log_interval == 0:
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
            dist.all_reduce(sums)
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
        dist.barrier()

    def _load_snapshot(self, snapshot: dict) -> None:
        if self.rank > 0:
            dist.barrier()  # until rank 0 has loaded it, or has said, once, why it does not fit
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
            if snapshot["scaler"]:  # the run before had one, too
                self.scaler.load_state_dict(snapshot["scaler"])
            self.epoch = snapshot["epoch"]
            self.samples_seen = snapshot["samples_seen"]
            # The sum over all ranks so far: one of them takes it up, or it would count again.
            self.loss_sum.fill_(snapshot["loss_sum"] if self.rank == 0 else 0)
            if self.rank < len(snapshot["rng_states"]):  # there may be more processes than then
                set_rng_state(snapshot["rng_states"][self.rank], self.device)
        except Exception as error:  # load_state_dict raises nearly everything
            cannot_resume(self.args, error)
        if self.rank == 0:
            dist.barrier()
        log(f"Resuming training from snapshot at Epoch {self.epoch}, sample {self.samples_seen}")

    def _settle_buckets(self) -> None:
        # After the first backward pass DDP regroups the gradients into other buckets, which changes
        # the rounding. In a resumed run that would be at another step: so one pass is made here,
        # before training. Its "loss" is the sum of all parameters, with Python's sum() in place of
        # forward(), whatever inputs the model takes.
        model = self.model.module
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        forward = model.forward
        model.forward = sum
        self.model([parameter.sum() for parameter in trained]).backward()
        model.forward = forward

    def _stop_agreed(self, step: int) -> int:
        # If one rank left the loop alone, the others would hang in the next all-reduce. So all say
        # which signal they have heard, if any, and the largest number counts. This costs a round
        # trip: while steps take less than a second, it is done at every tenth only.
        if step % self.ask_every > 0 and step < len(self.train_data):
            return 0
        orphaned = dist.is_torchelastic_launched() and os.getppid() != LAUNCHER
        heard = signal.SIGTERM if orphaned else self.stop.item()
        slow = time.perf_counter() - self.asked > self.ask_every  # over a second per step
        answer = torch.tensor([heard, slow], device=self.device)
        dist.all_reduce(answer, op=dist.ReduceOp.MAX)
        agreed, slow_anywhere = answer.tolist()
        self.ask_every = 1 if slow_anywhere else 10
        self.asked = time.perf_counter()
        return agreed


# --- setting up ---


def ddp_setup(args: argparse.Namespace) -> torch.device:
    if args.deterministic:  # first of all: the process group chooses its kernels, too
        use_deterministic_kernels()
    if "OMP_NUM_THREADS" not in os.environ:  # or else every process takes all cores
        torch.set_num_threads(max(1, torch.get_num_threads() // args.local_world_size))
    device = torch.device("cpu")
    if args.device != "cpu":
        index = args.local_rank % torch.accelerator.device_count()
        device = torch.device(args.device, index)
        torch.accelerator.set_device_index(device.index)
    if args.world_size > args.local_world_size and (error := loopback_error(args)):
        sys.exit(f"error: {error}")
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if loopback and args.world_size == args.local_world_size:  # one node needs no network
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    dist.init_process_group(
        args.backend,
        store=None if "RANK" in os.environ else dist.HashStore(),  # None: torchrun's
        rank=args.rank,
        world_size=args.world_size,
        timeout=datetime.timedelta(seconds=args.timeout),
        device_id=None if device.type == "cpu" else device,
    )
    line = f"[rank {args.rank} of {args.world_size}] host {socket.gethostname()} | device {device}"
    line += f" | backend {dist.get_backend()} | threads {torch.get_num_threads()}"
    log(line, every_rank=True)
    return device


def loopback_error(args: argparse.Namespace) -> str:
    # An error's text, or "". gloo tells the other nodes to connect to what this node's name
    # resolves to: Debian's installer makes that 127.0.1.1, where each would reach only itself.
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "127.0.0.1"  # which gloo takes for a name that nobody knows
    if args.backend != "gloo" or "GLOO_SOCKET_IFNAME" in os.environ or address[:4] != "127.":
        return ""
    remedy = "export GLOO_SOCKET_IFNAME=its network interface (lo, if one machine plays all nodes)"
    return f"on node {name} gloo takes {address} for its address: on it, {remedy}"


def load_train_objs(args: argparse.Namespace, device: torch.device) -> tuple:
    if args.local_rank > 0:
        preload(args.dataset)  # what it imports, while the first process prepares the data
        with waiting_for("the first process of each node, which prepares the data"):
            dist.barrier()
    train_set, test_set = load_dataset(args.dataset, args.data_dir)  # load your dataset
    if args.local_rank == 0:
        with waiting_for("the other nodes, which prepare the data"):
            dist.barrier()
    set_seed(args.seed)  # the same weights on every rank
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
    start = time.perf_counter()
    device = ddp_setup(args)
    snapshot = find_snapshot(args)
    line = "total_epochs: {total_epochs}, save_every: {save_every}, batch_size: {batch_size}"
    log(line.format(**vars(args)))
    train_set, test_set, model, optimizer, schedule = load_train_objs(args, device)
    set_seed(args.seed, args.rank)  # from here on each rank has random numbers of its own
    per_step = args.batch_size * args.accumulate
    train_sampler = ShardedBatchSampler(
        train_set, per_step, num_replicas=args.world_size, rank=args.rank, seed=args.seed
    )
    smallest = train_sampler.sizes()[0] // args.world_size // args.accumulate
    if args.sync_bn:
        smallest *= args.world_size
    check_batch_norm(model, smallest, train_set)
    shard = range(args.rank, len(test_set), args.world_size)  # no padding: every sample counts once
    test_sampler = BatchSampler(shard, args.test_batch_size, drop_last=False)
    train_data = prepare_dataloader(train_set, train_sampler, device, args.num_workers)
    test_data = prepare_dataloader(test_set, test_sampler, device, args.num_workers)
    trainer = Trainer(
        model, train_data, test_data, optimizer, schedule, device, snapshot, stop, args
    )
    if args.check:
        check(trainer)
    else:
        catch_stop_signals(stop)
        trainer.train(args.total_epochs)
    if not trainer.stopped:
        log(f"Total time: {time.perf_counter() - start:.3f}s")
    dist.destroy_process_group()
    # After a stop the shells' number for a signal: not done yet.
    leave(128 + trainer.stopped if trainer.stopped else 0)


# --- plumbing ---


@record  # without it torchrun's report has no traceback
def run(args: argparse.Namespace, stop: torch.Tensor) -> None:
    try:
        main(args, stop)
    except (DataError, OSError) as error:
        sys.exit(f"error: {error}")
    except RuntimeError as error:
        # When a rank fails, the others lose it. Its error is the cause, and not theirs.
        if not is_lost_peer(error):
            raise
        line = f"error: rank {args.rank} has lost the others, look there for the cause"
        sys.exit(f"{line} ({one_line(error)})")


def is_lost_peer(error: RuntimeError) -> bool:
    # By what gloo, NCCL and the store say when a peer has gone. All else is this rank's own fault.
    said = ("closed by peer", "reset by peer", "writev", "for recv operation", "for send operation")
    said += ("pair closure", "remote process exit", "collective operation timeout", "store->get(")
    store_failed = isinstance(error, (dist.DistNetworkError, dist.DistStoreError))
    return store_failed or any(words in str(error) for words in said)


def one_line(error: Exception) -> str:
    # NCCL names the cause in a later line than the first. The C++ frames come last.
    return " ".join(str(error).split("Exception raised from")[0].split())


def catch_stop_signals(stop: torch.Tensor) -> None:
    # The handler only stores the signal's number: the loop looks at it after each step. `stop` is a
    # tensor so that the processes of ddp_spawn.py and of multinode.py can share it.
    def on_signal(signum: int, frame: object) -> None:
        stop.fill_(signum)
        # Under torchrun one Ctrl-C comes twice, from the terminal and from torchrun.
        if not dist.is_torchelastic_launched():
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C

    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)


def leave(status: int) -> None:
    # Not sys.exit: with torch 2.9, gloo's threads abort or block about one process in 300 while the
    # interpreter shuts down. What sys.exit would do first is done here: wait for threads, and run
    # what experiment trackers and others have registered with atexit.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)


tqdm.set_lock(threading.RLock())  # tqdm's own leaks a semaphore where a process is killed


def log(line: str, every_rank: bool = False) -> None:
    if dist.is_initialized() and dist.get_rank() > 0 and not every_rank:
        return
    tqdm.write(f"{line}\n", end="")  # one write, above the progress bar
    sys.stdout.flush()


@contextlib.contextmanager
def waiting_for(whom: str) -> Iterator[None]:
    # After ten seconds it says so: a download or a slow disk must not look like a hang. The wait
    # itself is bounded by --timeout.
    line = f"[rank {dist.get_rank()}] still waiting for {whom}"
    timer = threading.Timer(10, log, (line, True))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def names_of_run(args: argparse.Namespace) -> list[str]:
    # The names by which a snapshot knows its run: a restart and a new run have the same command
    # line, but torchrun makes a folder for each run, on each node, and keeps it for the restarts.
    # It is 7_c3d4, for --rdzv_id 7, where local rank 1 is to report errors in
    #     /tmp/torchelastic_a1b2/7_c3d4/attempt_0/1/error.json
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    names = [None] * args.world_size
    dist.all_gather_object(names, Path(report).parents[2].name if report else "")
    return sorted({name for name in names if name})


def find_snapshot(args: argparse.Namespace) -> dict | None:
    # The first process of each node offers its file: after a restart rank 0 may be on a node
    # without one. The best offer wins: this run's own before the one that --resume asks rank 0
    # for, and the furthest of these.
    args.run_names = names_of_run(args)
    snapshot = open_snapshot(args) if args.local_rank == 0 else None
    offer = (False, -1, 0)
    if snapshot is not None:
        progress = (snapshot.get("epoch", 0), snapshot.get("samples_seen", 0))
        offer = (is_of_this_run(snapshot, args), *progress)
    offers = [None] * args.world_size
    dist.all_gather_object(offers, offer)
    settings = {name: getattr(args, name) for name in args.kept}
    message = [snapshot, settings]
    dist.broadcast_object_list(message, src=offers.index(max(offers)))
    snapshot, settings = message
    vars(args).update(settings)
    if args.resume and snapshot is None:
        log(f"No snapshot at {args.snapshot_path}, starting from the beginning")
    return snapshot


def is_of_this_run(snapshot: dict, args: argparse.Namespace) -> bool:
    return not set(args.run_names).isdisjoint(snapshot["settings"].get("run_names", []))


def open_snapshot(args: argparse.Namespace) -> dict | None:
    path = Path(args.snapshot_path)
    asked = args.resume and args.rank == 0
    if not path.exists():
        return None
    try:
        snapshot = torch.load(path, map_location="cpu", weights_only=True)
        # After a crash torchrun starts everything anew: go on from what this run has saved, but
        # never from the snapshot of an earlier one; --resume asks for that.
        if not asked and not is_of_this_run(snapshot, args):
            return None
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
        if not asked:  # another program's file is no error
            return None
        cannot_resume(args, error)
    return snapshot


def cannot_resume(args: argparse.Namespace, error: Exception) -> NoReturn:
    path = args.snapshot_path
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    sys.exit(f"error: cannot resume from {path} ({reason}): name another --snapshot-path")


AMP = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def device_names() -> list[str]:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type == "mps":  # no backend serves MPS
        return ["cpu"]
    return [found.type, "cpu"]


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
    add("--batch-size", "--batch_size", type=at_least(1), default=32, help="samples per device")
    add("--test-batch-size", type=at_least(1), default=1000, help="the same in evaluation")
    add("--lr", type=at_least(0.0), default=0.01, help="learning rate of SGD")
    add("--momentum", type=at_least(0.0), default=0.9, help="momentum of SGD")
    add("--dataset", choices=DATASETS, default="digits", help="digits needs no download")
    add("--data-dir", default="data", help="where torchvision keeps or downloads the others")
    add("--model", choices=MODELS, help="default: what suits the data set")
    add("--seed", type=at_least(0), default=42)
    add("--accumulate", type=at_least(1), default=1, help="micro-batches per step")
    add("--amp", choices=AMP, default="off", help="automatic mixed precision")
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
    add("--compile", action="store_true", help="torch.compile: slow to start; measure if it pays")
    add("--sync-bn", action="store_true", help="BatchNorm over all ranks; not on a CPU")
    add("--local-rank", "--local_rank", dest="unused", help=argparse.SUPPRESS)
    add("--check", action="store_true", help="join and measure, but do not train")
    add("--backend", default="auto", help="nccl, gloo ...; auto: what suits the device")
    add("--timeout", type=at_least(1), default=600, help="seconds to join, or for a collective")
    args = parser.parse_args()
    args.kept = [*vars(job.parse_args([]))]
    # Parsed again with None for every default: what is not None now was given.
    parser.set_defaults(**dict.fromkeys(vars(args)))
    args.given = [name for name, value in vars(parser.parse_args()).items() if value is not None]
    # torchrun sets these; where nothing does, this process is the whole world.
    args.rank = int(os.environ.get("RANK", 0))
    args.world_size = int(os.environ.get("WORLD_SIZE", 1))
    args.local_rank = int(os.environ.get("LOCAL_RANK", 0))
    args.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if "RANK" in os.environ and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        parser.error("the environment has a RANK but no MASTER_ADDR and MASTER_PORT: use torchrun")
    args.model = args.model or DEFAULT_MODEL[args.dataset]
    args.device = devices[0] if args.device == "auto" else args.device
    count = 0 if args.device == "cpu" else torch.accelerator.device_count()
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
    compilers = (os.environ.get("CXX", "g++"), "clang++", "cl")
    if args.compile and not any(shutil.which(name) for name in compilers):
        parser.error("--compile needs a C++ compiler: install g++, or leave it out")
    path = Path(args.snapshot_path)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        parser.error(f"--snapshot-path {path}: name a file in a folder that you may write to")
    if args.log_dir and not importlib.util.find_spec("tensorboard"):
        parser.error("--log-dir needs TensorBoard: pip install tensorboard")
    return args


if __name__ == "__main__":
    args = parse_args()
    try:
        run(args, stop=torch.zeros((), dtype=torch.int32))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
