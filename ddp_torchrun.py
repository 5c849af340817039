"""Train under torchrun, on one node or on several: it starts the processes, and restarts them.

    torchrun --nproc_per_node=gpu ddp_torchrun.py 50 10       one process per GPU of this node
    torchrun --nproc_per_node=4 --max-restarts=3 ddp_torchrun.py 50 --resume
    torchrun --nproc_per_node=4 ddp_torchrun.py --batch-size 8 --accumulate 4 --amp --compile
    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=4 --master_addr=10.0.0.1 ddp_torchrun.py
        two nodes: the same on the second one, with --node_rank=1
    torchrun --nnodes=1:4 --nproc_per_node=4 --max-restarts=3 --rdzv_id=7 --rdzv_backend=c10d
        --rdzv_endpoint=10.0.0.1:29400 ddp_torchrun.py --resume
        one to four nodes, which may join and leave

slurm/ has a batch script. The global batch is --batch-size times the processes times --accumulate.
When a process crashes, torchrun restarts all, up to --max-restarts times, and with --resume they go
on from the last snapshot. On several nodes that needs the snapshot on a shared disk and
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (docs/multinode.md). Ctrl-C and SIGTERM stop all ranks after
the same step, and rank 0 saves. torchrun kills what is left after 30 seconds, and exits with 1.
`python ddp_torchrun.py` is one process. To make it yours, edit the lines marked "your".

On a first reading take ddp_setup, Trainer.__init__, _run_batch and main. open_store,
_agree_on_stopping and ResumableSampler serve restarts and stops.
"""

import argparse
import contextlib
import datetime
import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # unused. Imported later, by an optimizer, its defaults hold the group
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

LAUNCHER = os.getppid()  # torchrun's process id. If it changes, torchrun was killed.
stop_requested = False  # by a signal


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
        if args.sync_bn:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        self.model = model  # not in DDP yet, because a snapshot's names have no "module."
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
        self.stopping = False
        if args.resume:
            self._load_snapshot()
        # DDP copies rank 0's weights to all ranks. Gradients lie in the buckets that it sends.
        self.model = DDP(model, gradient_as_bucket_view=True)
        if args.compile:
            model.compile(dynamic=False)  # in place, so names stay. A graph for each batch size.

    def _run_batch(self, micro_batches: list, samples: int) -> torch.Tensor:
        self.optimizer.zero_grad()
        step_loss = torch.zeros((), device=self.device)
        for number, (source, targets) in enumerate(micro_batches, start=1):
            source = source.to(self.device, non_blocking=self.pin_memory)  # your inputs
            targets = targets.to(self.device, non_blocking=self.pin_memory)  # your inputs
            # Under no_sync() each rank only adds up its gradients.
            last = number == len(micro_batches)
            sync = contextlib.nullcontext() if last else self.model.no_sync()
            with sync:
                with self.autocast:
                    output = self.model(source)  # your inputs
                    loss = F.cross_entropy(output, targets)  # your loss: a mean over the batch
                loss = loss * len(targets) / samples  # weighted by its share of this rank's samples
                loss.backward()  # in the last one DDP averages the gradients over all ranks
            step_loss += loss.detach()
        self.optimizer.step()
        return step_loss

    def _run_epoch(self, epoch: int) -> torch.Tensor:
        set_seed(self.args.seed, self.rank, epoch, self.samples_seen)
        self.train_data.generator.manual_seed(torch.initial_seed())  # loader workers start from it
        self.train_data.sampler.set_epoch(epoch, self.samples_seen)
        self.ask_at_step = self.interval = 1  # in steps; see _agree_on_stopping()
        self.asked_at = time.perf_counter()
        name = self.device.type.upper().replace("CUDA", "GPU")  # the tutorials print [GPU0]
        steps = math.ceil(len(self.train_data) / self.args.accumulate)
        line = f"Epoch {epoch} | Batchsize: {self.args.batch_size} | Steps: {steps}"
        log(f"[{name}{self.rank}] {line}", every_rank=True)
        self.model.train()
        loss_sum = torch.zeros((), device=self.device)
        # disable=None: no progress bar where stderr is not a terminal
        progress = tqdm(self.train_data, leave=False, disable=True if self.rank > 0 else None)
        batches = iter(progress)
        for step in range(1, steps + 1):
            if step == self.ask_at_step:
                self._agree_on_stopping(step)
                if self.stopping:
                    break
            micro_batches = list(itertools.islice(batches, self.args.accumulate))
            samples = sum(len(targets) for _, targets in micro_batches)
            loss = self._run_batch(micro_batches, samples)
            loss_sum += loss * samples
            self.samples_seen += samples * self.world_size
            if self.args.log_interval and step % self.args.log_interval == 0:
                log(f"Epoch {epoch} | Step {step} | Loss of rank 0: {loss.item():.6f}")
        dist.all_reduce(loss_sum)  # it becomes the sum over all ranks
        return loss_sum

    def _agree_on_stopping(self, step: int) -> None:
        # If one rank left the loop alone, the others would wait for it in the next all-reduce. So
        # the ranks ask each other at every tenth step, or at every step if one takes a second.
        torch.zeros((), device=self.device).item()  # waits for the device, to time its steps
        slow = time.perf_counter() - self.asked_at > self.interval  # a step takes over a second
        stop = stop_requested or (dist.is_torchelastic_launched() and os.getppid() != LAUNCHER)
        answers = torch.tensor([stop, slow], dtype=torch.int32, device=self.device)
        dist.all_reduce(answers, op=dist.ReduceOp.MAX)  # one yes is enough
        self.stopping, slow = answers.bool().tolist()
        self.interval = 1 if slow or step == 1 else 10  # before step 1 none was timed
        self.ask_at_step = step + self.interval
        self.asked_at = time.perf_counter()

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
            with self.autocast:
                # Not through DDP, whose forward() would wait for a rank that has no test batch.
                output = self.model.module(source)  # your inputs
                loss_sum += F.cross_entropy(output, targets) * len(targets)  # your loss
            correct += (output.argmax(dim=1) == targets).sum()  # your metric
        return loss_sum, correct

    def train(self, total_epochs: int) -> None:
        test_size = len(self.test_data.dataset)
        for epoch in range(self.epoch, total_epochs):
            start = time.perf_counter()
            train_size = self.train_data.sampler.total_size - self.samples_seen
            train_loss = self._run_epoch(epoch).item() / train_size  # waits for the device
            if self.stopping:
                if self.rank == 0:
                    self._save_snapshot()
                log(f"Epoch {epoch} | Stopped at sample {self.samples_seen}, saved")
                return
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
            self.samples_seen = 0
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
            "samples_seen": self.samples_seen,
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
            if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
                log("WARNING: this is a restart, and what was trained before it is lost")
            return
        self.model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.schedule.load_state_dict(snapshot["schedule"])
        self.epoch = snapshot["epoch"]
        seen = snapshot.get("samples_seen", 0)  # only this script stops in mid-epoch
        self.samples_seen = seen - seen % self.world_size  # a multiple of the new world_size
        log(f"Resuming training from snapshot at Epoch {self.epoch}")


def ddp_setup(args: argparse.Namespace) -> torch.device:
    if args.deterministic:  # before the process group, which chooses its kernels, too
        use_deterministic_kernels()
    device = torch.device("cpu")
    if args.device != "cpu":
        device = torch.device(args.device, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device.index)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if loopback and world_size == int(os.environ["LOCAL_WORLD_SIZE"]):  # one node needs no network
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    timeout = datetime.timedelta(seconds=args.timeout)
    dist.init_process_group(
        args.backend,
        store=open_store(timeout),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=None if device.type == "cpu" else device,  # NCCL connects now, on this device
    )
    where = f"device {device} | backend {dist.get_backend()} | threads {torch.get_num_threads()}"
    log(f"[rank {rank} of {world_size}] {where}", every_rank=True)
    compare_options(args)
    return device


def open_store(timeout: datetime.timedelta) -> dist.Store:
    """Where the ranks find each other. init_process_group() would leave no place for the prefix."""
    if os.environ["WORLD_SIZE"] == "1" and not dist.is_torchelastic_launched():
        return dist.HashStore()  # of one process alone, say for a debugger
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))  # yields rank, world_size, too
    if os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"]:  # one node
        # torchrun keeps one store for all attempts, and a crashed one's keys would mislead the next
        # (pytorch#135712). So each attempt puts its number before its keys. Several nodes may count
        # differently, and ranks with unequal prefixes would never meet.
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    return store


def load_train_objs(args: argparse.Namespace, device: torch.device) -> tuple:
    train_set, test_set = load_dataset(args.dataset, args.data_dir)  # load your dataset
    set_seed(args.seed)
    model = build_model(args.model, train_set[0][0].shape).to(device)  # load your model
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum)  # your optimizer
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1)  # your schedule: none yet
    return train_set, test_set, model, optimizer, schedule


class ResumableSampler(DistributedSampler):
    """DistributedSampler that can begin in mid-epoch, after `samples_seen` samples of all ranks."""

    start = 0

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
        collate_fn=collate,  # your batches: stacks samples, unless __getitems__ has done so
        # The loader draws its workers' seed from this one. A resumed run draws once more, and from
        # torch's global generator that would give it another dropout.
        generator=torch.Generator(),
        pin_memory=args.device not in ("cpu", "mps"),  # so copies overlap the computation
        # num_workers, started in the way that common/loader.py explains.
        **worker_options(args.num_workers),
    )


@record  # without it torchrun's report has no traceback
def main(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    device = ddp_setup(args)
    line = f"total_epochs: {args.total_epochs}, save_every: {args.save_every}"
    log(f"{line}, batch_size: {args.batch_size}")
    rank = dist.get_rank()
    train_set, test_set, model, optimizer, schedule = load_train_objs(args, device)
    shard = ResumableSampler(train_set, seed=args.seed)  # this rank's share of each epoch
    train_data = prepare_dataloader(train_set, args.batch_size, shard, args)
    test_shard = range(rank, len(test_set), dist.get_world_size())  # not padded: each counts once
    test_data = prepare_dataloader(test_set, args.test_batch_size, test_shard, args)
    signal.signal(signal.SIGINT, on_stop_signal)  # from here on all ranks stop together
    signal.signal(signal.SIGTERM, on_stop_signal)
    trainer = Trainer(model, train_data, test_data, optimizer, schedule, device, args)
    trainer.train(args.total_epochs)
    log(f"Total time: {time.perf_counter() - start:.3f}s")
    stopped = trainer.stopping
    dist.barrier()  # until rank 0 has saved. torchrun ends the others when one returns 143.
    del trainer  # or DDP would hold the group, whose threads may abort a rank when Python ends
    dist.destroy_process_group()
    return 143 if stopped else 0  # 128 + SIGTERM, because 0 would report success


# --- stops, snapshots, messages and options: on a first reading, go on to the last block -------


def on_stop_signal(signum: int, frame: object) -> None:
    global stop_requested
    stop_requested = True  # the ranks agree on it in _agree_on_stopping()


def compare_options(args: argparse.Namespace) -> None:
    may_differ = {"data_dir", "snapshot_path", "num_workers", "local_rank"}
    rank_0 = [vars(args)]
    dist.broadcast_object_list(rank_0)  # ranks with other options hang, or train other models
    for name, value in rank_0[0].items():
        own = vars(args)[name]
        if own != value and name not in may_differ:
            sys.exit(f"error: {name} is {value} on rank 0 and {own} on rank {dist.get_rank()}")


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
    return snapshot


def log(line: str, every_rank: bool = False) -> None:
    if every_rank or dist.get_rank() == 0:
        # print() would break the progress bar. One write keeps the lines of two ranks apart.
        with contextlib.suppress(BrokenPipeError):  # Ctrl-C ends `| tee`, and the job has to save
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
    add("--accumulate", type=positive, default=1, help="micro-batches per step")
    add("--amp", action="store_true", help="mixed precision in bfloat16, which needs no GradScaler")
    add("--compile", action="store_true", help="torch.compile: slow to start; measure if it pays")
    add("--sync-bn", action="store_true", help="BatchNorm over all ranks; not on a CPU")
    add("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # torch.distributed.launch gives it
    add("--backend", type=str.lower, choices=dist.Backend.backend_list, help="e.g. nccl")
    add("--timeout", type=positive, default=600, help="seconds that ranks wait for each other")
    add("--num-workers", type=int, default=0, help="loader processes: try 4 for files")
    add("--log-interval", type=int, default=0, help="steps between loss lines (0: none)")
    add("--snapshot-path", default="checkpoint.pt")
    add("--resume", action="store_true", help="go on from the snapshot where there is one")
    args = parser.parse_intermixed_args()  # takes 50 --resume 10, too
    args.model = args.model or DEFAULT_MODEL[args.dataset]  # your model
    args.backend = args.backend or default_backend(args.device)
    path = Path(os.path.realpath(args.snapshot_path))
    if (path.exists() and not path.is_file()) or not os.access(path.parent, os.W_OK):
        parser.error(f"--snapshot-path {path}: name a file in a folder that you may write to")
    if "RANK" in os.environ and "LOCAL_WORLD_SIZE" not in os.environ:
        parser.error("RANK is set, but not LOCAL_WORLD_SIZE: use torchrun, or unset RANK")
    if "RANK" not in os.environ:  # started without torchrun: one process, for a debugger say
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):  # srun, mpirun
            if os.environ.get(name, "1") != "1":
                parser.error(f"{name} is {os.environ[name]}, but there is no RANK: start torchrun")
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0 and not args.resume:
        parser.error("torchrun's --max-restarts goes with --resume, or a restart would begin anew")
    processes = int(os.environ["LOCAL_WORLD_SIZE"])
    count = torch.accelerator.device_count()
    if args.device != "cpu" and processes > count:
        parser.error(f"{processes} processes are more than {count} devices")
    return args


if __name__ == "__main__":
    args = parse_args()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until training begins, Ctrl-C kills this rank
    sys.exit(main(args))
