"""Train on all devices of this node: mp.spawn starts a process for each, DDP connects them.

    python ddp_spawn.py 50 10                 one process per GPU; two on a CPU
    python ddp_spawn.py --nproc-per-node 4    four; on a CPU they share the cores
    python ddp_spawn.py 50 10 --resume        go on from checkpoint.pt, where there is one
    CUDA_VISIBLE_DEVICES=0,2 python ddp_spawn.py
    python ddp_spawn.py --help                all options

The global batch is --batch-size times the processes: with four, this is the same job as
`single_gpu.py --batch-size 128`. mp.spawn starts Python anew for each process, imports this file
there (hence the main guard) and calls main(rank, ...). The parent loads the data, which all
processes share, and waits. Ctrl-C and SIGTERM, to any process, stop all after the same step and
save a snapshot; a second Ctrl-C stops at once. --resume then ends with the same weights as a run
that was never stopped (on accelerators with --deterministic). To make this file yours, edit the
lines that are marked "load your".
"""

import argparse
import atexit
import contextlib
import datetime
import importlib.util
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
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
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.model = DDP(
            model,
            device_ids=None if device.type == "cpu" else [device.index],
            gradient_as_bucket_view=True,  # gradients lie in DDP's buckets: no second copy
            # On a CPU the all-reduce takes its cores from backward(): without DDP's small first
            # bucket a model of up to 25 MiB is one all-reduce, and a step some percent faster.
            bucket_cap_mb=25 if device.type == "cpu" else None,
        )
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
        if snapshot is not None:
            self._load_snapshot(snapshot)
        self.writer = None
        if args.log_dir and self.rank == 0:
            from torch.utils.tensorboard import SummaryWriter  # an extra, and slow to import

            self.writer = SummaryWriter(args.log_dir, purge_step=self.epoch)

    def _run_batch(self, source: torch.Tensor, targets: torch.Tensor, count: int) -> torch.Tensor:
        self.optimizer.zero_grad()
        output = self.model(source)  # load your inputs
        loss = F.cross_entropy(output, targets, reduction="sum")  # load your loss
        # Here gradients travel: while backward() computes them, DDP all-reduces them. It takes the
        # mean over the ranks, so this scale makes it the mean over the global batch of `count`
        # samples, also where the ranks have unequal shares of it.
        (loss * self.world_size / count).backward()
        self.optimizer.step()
        return loss.detach()

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
            "scaler": {},  # ddp_torchrun.py has one; each script reads all snapshots
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
        orphaned = not mp.parent_process().is_alive()
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
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if loopback:  # one node needs no network
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    dist.init_process_group(
        args.backend,
        store=dist.FileStore(args.store, args.world_size),
        rank=args.rank,
        world_size=args.world_size,
        timeout=datetime.timedelta(seconds=args.timeout),
        device_id=None if device.type == "cpu" else device,
    )
    line = f"[rank {args.rank} of {args.world_size}] host {socket.gethostname()} | device {device}"
    line += f" | backend {dist.get_backend()} | threads {torch.get_num_threads()}"
    log(line, every_rank=True)
    return device


def load_train_objs(args: argparse.Namespace, train_set: Dataset, device: torch.device) -> tuple:
    set_seed(args.seed)  # the same weights on every rank
    model = build_model(args.model, train_set[0][0].shape).to(device)  # load your model
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=args.lr,
        momentum=args.momentum,
    )
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1)  # load your schedule
    return model, optimizer, schedule


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


def main(
    rank: int,
    train_set: Dataset,
    test_set: Dataset,
    stop: torch.Tensor,
    args: argparse.Namespace,
) -> None:
    args.rank = args.local_rank = rank
    device = ddp_setup(args)
    message = [None]
    if args.resume and rank == 0:  # rank 0 alone reads the snapshot, and broadcasts it
        message = [torch.load(args.snapshot_path, map_location="cpu", weights_only=True)]
    dist.broadcast_object_list(message, src=0)
    snapshot = message[0]
    model, optimizer, schedule = load_train_objs(args, train_set, device)
    set_seed(args.seed, args.rank)  # from here on each rank has random numbers of its own
    train_sampler = ShardedBatchSampler(
        train_set, args.batch_size, num_replicas=args.world_size, rank=args.rank, seed=args.seed
    )
    shard = range(args.rank, len(test_set), args.world_size)  # no padding: every sample counts once
    test_sampler = BatchSampler(shard, args.test_batch_size, drop_last=False)
    train_data = prepare_dataloader(train_set, train_sampler, device, args.num_workers)
    test_data = prepare_dataloader(test_set, test_sampler, device, args.num_workers)
    trainer = Trainer(
        model, train_data, test_data, optimizer, schedule, device, snapshot, stop, args
    )
    catch_stop_signals(stop)
    trainer.train(args.total_epochs)
    dist.destroy_process_group()
    # After a stop the shells' number for a signal: not done yet.
    leave(128 + trainer.stopped if trainer.stopped else 0)


def spawn(args: argparse.Namespace, stop: torch.Tensor) -> None:
    catch_stop_signals(stop)
    # Opened here for its settings, and to say once what is wrong. Rank 0 reads it again.
    if open_snapshot(args) is None:
        args.resume = False
    line = "total_epochs: {total_epochs}, save_every: {save_every}, batch_size: {batch_size}"
    log(line.format(**vars(args)))
    train_set, test_set = load_dataset(args.dataset, args.data_dir)  # load your dataset
    model = build_model(args.model, train_set[0][0].shape)  # load your model: here to check it once
    sampler = ShardedBatchSampler(
        train_set, args.batch_size, num_replicas=args.world_size, rank=0, seed=args.seed
    )
    check_batch_norm(model, sampler.sizes()[0] // args.world_size, train_set)
    if stop.item():
        sys.exit(128 + stop.item())
    with tempfile.TemporaryDirectory() as folder:
        args.store = os.path.join(folder, "store")  # no port to choose, and nothing that listens
        try:
            start_and_wait(train_set, test_set, stop, args)
        except RuntimeError as error:  # the data sets' tensors go to shared memory
            if "shared memory" not in str(error):
                raise
            sys.exit(f"error: {error}: give it more, for example with docker run --shm-size=1g")


# --- plumbing ---


PATIENCE = 25  # seconds that ranks have to save after a request to stop; torchrun gives 30


def start_and_wait(
    train_set: Dataset, test_set: Dataset, stop: torch.Tensor, args: argparse.Namespace
) -> None:
    # Ranks inherit this: else Ctrl-C would end them with tracebacks while they start.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    objs = (train_set, test_set, stop, args)
    context = mp.spawn(main, objs, args.nproc_per_node, join=False)
    try:
        catch_stop_signals(stop)
        waited = 0  # seconds, since a stop was asked for
        while not context.join(timeout=1, grace_period=5):
            if stop.item():
                waited += 1
            if waited > PATIENCE:
                log("error: not all ranks stopped: --resume goes on from the last snapshot")
                sys.exit(128 + stop.item())
    except mp.ProcessExitedException as error:
        if error.exit_code > 0:  # stopped and saved, or it has said what is wrong
            sys.exit(error.exit_code)
        if stop.item():  # ended by the signal before it could train
            sys.exit(128 + stop.item())
        sys.exit(f"error: {error}: --resume goes on from the last snapshot")
    finally:
        for process in context.processes:
            process.kill()


def catch_stop_signals(stop: torch.Tensor) -> None:
    # The handler only stores the signal's number: the loop looks at it after each step. `stop` is a
    # tensor so that the processes of ddp_spawn.py and of multinode.py can share it.
    def on_signal(signum: int, frame: object) -> None:
        stop.fill_(signum)
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
    add("--nproc-per-node", type=at_least(1), help="default: one per device, 2 on a CPU")
    add("--backend", default="auto", help="nccl, gloo ...; auto: what suits the device")
    add("--timeout", type=at_least(1), default=600, help="seconds to join, or for a collective")
    args = parser.parse_args()
    args.kept = [*vars(job.parse_args([]))]
    # Parsed again with None for every default: what is not None now was given.
    parser.set_defaults(**dict.fromkeys(vars(args)))
    args.given = [name for name, value in vars(parser.parse_args()).items() if value is not None]
    args.model = args.model or DEFAULT_MODEL[args.dataset]
    args.device = devices[0] if args.device == "auto" else args.device
    count = 0 if args.device == "cpu" else torch.accelerator.device_count()
    if args.nproc_per_node is None:
        args.nproc_per_node = 2 if args.device == "cpu" else count
    args.world_size = args.local_world_size = args.nproc_per_node
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
        spawn(args, stop=torch.zeros((), dtype=torch.int32))
    except (DataError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    log(f"Total time: {time.perf_counter() - start:.3f}s")
