"""Train under torchrun, on one node or on several: it starts the processes, and restarts them.

    torchrun --nproc_per_node=gpu ddp_torchrun.py 50 10       one process per GPU of this node
    torchrun --nproc_per_node=4 --max-restarts=3 ddp_torchrun.py 50 --resume
    torchrun --nproc_per_node=4 ddp_torchrun.py --batch-size 8 --accumulate 4 --amp bf16 --compile
    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=4 --master_addr=10.0.0.1 ddp_torchrun.py
        two nodes: the same on the second one, with --node_rank=1
    torchrun --nnodes=1:4 --nproc_per_node=4 --max-restarts=3 --rdzv_id=7 --rdzv_backend=c10d
        --rdzv_endpoint=10.0.0.1:29400 ddp_torchrun.py --resume
        one to four nodes; they come and go

slurm/ has a batch script. The global batch is --batch-size times the processes times --accumulate.
When a process crashes, torchrun restarts all; with --resume they go on from the last snapshot.
For that, export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or they fail on what the crashed ones left in
torchrun's store. Several nodes need the snapshot on a disk that all can read. Ctrl-C and SIGTERM
stop all after the same step and save, within the 30 seconds that torchrun gives them; it then
reports the signal, with status 1. --resume ends with the weights of a run that was never stopped
(on accelerators: with --deterministic). `python ddp_torchrun.py` is one process, on one device. To
make this file yours, edit the lines marked "load your".
"""

import argparse
import contextlib
import datetime
import importlib.util
import io
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, it would keep the process group to the end
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler
from tqdm import tqdm

from common.data import DATASETS, GlobalBatchSampler, collate, follow, load_dataset, worker_context
from common.model import DEFAULT_MODEL, MODELS, build_model
from common.seed import set_seed, use_deterministic_kernels

AMP = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}
LAUNCHER = os.getppid()  # torchrun; another parent later on means that it was killed
stop_signal = 0  # the number of the signal that asks for a stop


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
        self.autocast = torch.autocast(device.type, AMP[args.amp], enabled=args.amp != "off")
        self.scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")
        self.epoch = 0  # the one in progress
        self.samples_seen = 0  # in this epoch, by all ranks
        self.loss_sum = torch.zeros((), device=device)  # over this rank's share of them
        self.asked = time.perf_counter()  # when the ranks last agreed on whether to stop
        self._settle_buckets()
        if args.compile:
            model.compile()  # in place: the names of the weights stay as they are
        if args.resume:
            self._load_snapshot()

    def _run_batch(self, source: torch.Tensor, targets: torch.Tensor, size: int) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss_sum = torch.zeros((), device=self.device)
        parts = min(self.args.accumulate, size // self.world_size)  # the same on every rank
        sources = source.tensor_split(parts)  # load your inputs
        micro_batches = zip(sources, targets.tensor_split(parts), strict=True)
        for number, (micro_source, micro_targets) in enumerate(micro_batches, start=1):
            # Under no_sync() gradients add up on their rank; the last backward() sends the sum.
            with contextlib.nullcontext() if number == parts else self.model.no_sync():
                with self.autocast:
                    output = self.model(micro_source)  # load your inputs
                    loss = F.cross_entropy(output, micro_targets)  # load your loss: a mean
                # Gradients travel here: the last backward() averages them over the ranks, hence
                # `* world_size`. Shares of the global batch may be unequal, hence `* len / size`.
                weight = len(micro_targets) * self.world_size / size
                self.scaler.scale(loss * weight).backward()
            loss_sum += loss.detach() * len(micro_targets)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss_sum

    def _run_epoch(self, epoch: int) -> int:
        # Returns the number of the signal that has stopped it, or 0.
        self.train_data.batch_sampler.set_epoch(epoch, self.samples_seen)
        self.ask_every = 1  # steps between two agreements on whether to stop
        set_seed(self.device, self.args.seed, self.rank, epoch, self.samples_seen)
        name = self.device.type.upper().replace("CUDA", "GPU")
        steps = f"Batchsize: {self.args.batch_size} | Steps: {len(self.train_data)}"
        log(f"[{name}{self.rank}] Epoch {epoch} | {steps}", every_rank=True)
        self.model.train()
        sizes = self.train_data.batch_sampler.sizes()  # of the global batches
        # disable=None: no progress bar where stderr is not a terminal
        progress = tqdm(self.train_data, leave=False, disable=True if self.rank > 0 else None)
        for step, (source, targets) in enumerate(progress, start=1):
            source = source.to(self.device, non_blocking=self.pinned)  # load your inputs
            targets = targets.to(self.device, non_blocking=self.pinned)  # load your inputs
            loss_sum = self._run_batch(source, targets, sizes[step - 1])
            self.loss_sum += loss_sum
            self.samples_seen += sizes[step - 1]
            if self.args.log_interval and step % self.args.log_interval == 0:
                loss = loss_sum.item() / len(targets)
                log(f"Epoch {epoch} | Step {step} | Loss of rank 0: {loss:.6f}")
            # The next step's random numbers do not depend on those before: a run may go on here.
            set_seed(self.device, self.args.seed, self.rank, epoch, self.samples_seen)
            if signum := self._stop_agreed(step, last=step == len(sizes)):
                return signum
        return 0

    def _settle_buckets(self) -> None:
        # DDP regroups the gradients after its first backward pass, and with three or more ranks the
        # sums then round differently. A resumed run would do so at another step, so one pass is
        # made before training. Its "loss" is the sum of all parameters, by Python's sum().
        model = self.model.module
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        forward = model.forward
        model.forward = sum
        self.model([parameter.sum() for parameter in trained]).backward()
        model.forward = forward

    def _stop_agreed(self, step: int, last: bool) -> int:
        # If one rank left the loop alone, the others would hang in the next all-reduce. So all say
        # which signal they have heard, if any, and the largest number counts. This costs a round
        # trip: while steps take less than a second, it is done at every tenth only.
        if step % self.ask_every > 0 and not last:
            return 0
        orphaned = dist.is_torchelastic_launched() and os.getppid() != LAUNCHER
        heard = signal.SIGTERM if orphaned else stop_signal
        slow = time.perf_counter() - self.asked > self.ask_every  # over a second per step
        answer = torch.tensor([heard, slow], device=self.device)
        dist.all_reduce(answer, op=dist.ReduceOp.MAX)
        signum, slow_anywhere = answer.tolist()
        self.ask_every = 1 if slow_anywhere else 10
        self.asked = time.perf_counter()
        return signum

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
            with self.autocast:
                output = self.model.module(source)  # load your inputs
                loss_sum += F.cross_entropy(output, targets) * len(targets)  # load your loss
            correct += (output.argmax(dim=1) == targets).sum()  # load your metric
        return loss_sum, correct

    def train(self, total_epochs: int) -> int:
        train_size = len(self.train_data.dataset)
        test_size = len(self.test_data.dataset)
        writer = None
        if self.args.log_dir and self.rank == 0:
            from torch.utils.tensorboard import SummaryWriter  # an extra, and slow to import

            writer = SummaryWriter(self.args.log_dir, purge_step=self.epoch)
        for epoch in range(self.epoch, total_epochs):
            start = time.perf_counter()
            seen_before = self.samples_seen
            if signum := self._run_epoch(epoch):
                self._save_snapshot()
                log(f"Epoch {epoch} | Stopped at sample {self.samples_seen}, saved")
                return signum
            rate = (train_size - seen_before) / (time.perf_counter() - start)
            sums = torch.stack([self.loss_sum, *self._evaluate()])
            dist.all_reduce(sums)
            train_loss, test_loss, correct = sums.tolist()
            train_loss /= train_size
            test_loss /= test_size
            losses = f"Train loss: {train_loss:.4f} | Test loss: {test_loss:.4f}"
            accuracy = f"Accuracy: {correct:.0f}/{test_size} ({correct / test_size:.2%})"
            log(f"Epoch {epoch} | {losses} | {accuracy} | {rate:.0f} samples/s")
            if writer:
                writer.add_scalar("loss/train", train_loss, epoch)
                writer.add_scalar("loss/test", test_loss, epoch)
                writer.add_scalar("accuracy", correct / test_size, epoch)
                writer.flush()
            self.schedule.step()  # load your schedule, if it steps otherwise
            self.epoch = epoch + 1
            self.samples_seen = 0
            self.loss_sum.zero_()
            if self.epoch % self.args.save_every == 0 or self.epoch == total_epochs:
                self._save_snapshot()
                log(f"Epoch {epoch} | Training checkpoint saved at {self.args.snapshot_path}")
        return 0

    def _save_snapshot(self) -> None:
        loss_sum = self.loss_sum.clone()
        dist.all_reduce(loss_sum)
        if self.rank > 0:
            dist.barrier()  # until it is saved
            return
        snapshot = {
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "epoch": self.epoch,
            "global_batch": self.train_data.batch_sampler.global_batch,
            "samples_seen": self.samples_seen,
            "loss_sum": loss_sum.item(),
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
        dist.barrier()

    def _load_snapshot(self) -> None:
        path = self.args.snapshot_path
        message = [None]
        if self.rank == 0 and os.path.exists(path):
            message = [open_snapshot(self.args)]
        dist.broadcast_object_list(message, src=0)  # the nodes need not share a file system
        snapshot = message[0]
        if snapshot is None:
            log(f"No snapshot at {path}, starting from the beginning")
            return
        self.model.module.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.schedule.load_state_dict(snapshot["schedule"])
        if snapshot.get("scaler"):  # the run before had one, too
            self.scaler.load_state_dict(snapshot["scaler"])
        self.epoch = snapshot["epoch"]
        self.samples_seen = snapshot.get("samples_seen", 0)  # only this script stops in mid-epoch
        # The sum over all ranks so far: one of them takes it up, or it would count again.
        self.loss_sum.fill_(snapshot.get("loss_sum", 0) if self.rank == 0 else 0)
        log(f"Resuming training from snapshot at Epoch {self.epoch}")
        if snapshot["global_batch"] != self.train_data.batch_sampler.global_batch:
            log(f"The global batch is another one than before ({snapshot['global_batch']} samples)")


def ddp_setup(args: argparse.Namespace) -> torch.device:
    if args.deterministic:  # before the process group, which chooses its kernels, too
        use_deterministic_kernels()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cpu")
    if args.device != "cpu":
        device = torch.device(args.device, local_rank)
        torch.accelerator.set_device_index(local_rank)
    if "OMP_NUM_THREADS" not in os.environ:  # or every process would take all cores
        torch.set_num_threads(max(1, torch.get_num_threads() // here))
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if loopback and world_size == here:  # one node needs no network
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    backend = args.backend or dist.get_default_backend_for_device(device)
    if not dist.is_backend_available(backend):  # on Windows there is no NCCL
        backend = "gloo"
    dist.init_process_group(
        backend,
        store=dist.HashStore() if world_size == 1 else None,  # torchrun has one
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=args.timeout),
        device_id=None if device.type == "cpu" else device,
    )
    where = f"device {device} | backend {dist.get_backend()} | threads {torch.get_num_threads()}"
    log(f"[rank {rank} of {world_size}] {where}", every_rank=True)
    return device


def load_train_objs(args: argparse.Namespace, device: torch.device) -> tuple:
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    phase = 0 if rank == 0 else 1 if local_rank == 0 else 2
    for turn in range(3):  # rank 0 downloads, then one process on each other node; the rest find it
        if turn == phase:
            train_set, test_set = load_dataset(args.dataset, args.data_dir)  # load your dataset
        dist.barrier()
    set_seed(device, args.seed)  # the same weights on every rank
    model = build_model(args.model, train_set[0][0].shape).to(device)  # load your model
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1)  # load your schedule
    return train_set, test_set, model, optimizer, schedule


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


@record  # without it torchrun's report has no traceback
def main(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    device = ddp_setup(args)
    epochs = f"total_epochs: {args.total_epochs}, save_every: {args.save_every}"
    log(f"{epochs}, batch_size: {args.batch_size}")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_set, test_set, model, optimizer, schedule = load_train_objs(args, device)
    set_seed(device, args.seed, rank)  # from here on each rank draws its own
    per_step = args.batch_size * args.accumulate
    train_sampler = GlobalBatchSampler(train_set, per_step, rank, world_size, seed=args.seed)
    shard = range(rank, len(test_set), world_size)  # no padding: each sample counts once
    test_sampler = BatchSampler(shard, args.test_batch_size, drop_last=False)
    train_data = prepare_dataloader(train_set, train_sampler, device, args.num_workers)
    test_data = prepare_dataloader(test_set, test_sampler, device, args.num_workers)
    signal.signal(signal.SIGINT, on_stop_signal)  # before Trainer(), in which all ranks meet
    signal.signal(signal.SIGTERM, on_stop_signal)
    trainer = Trainer(model, train_data, test_data, optimizer, schedule, device, args)
    signum = trainer.train(args.total_epochs)
    log(f"Total time: {time.perf_counter() - start:.3f}s")
    del trainer  # or DDP keeps the group, whose threads may block or abort Python's end
    dist.destroy_process_group()
    return 128 + signum if signum else 0  # the shells' number for a signal: not done yet


def on_stop_signal(signum: int, frame: object) -> None:
    global stop_signal
    stop_signal = signum  # the loop looks at it after its step


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
    return snapshot


def log(line: str, every_rank: bool = False) -> None:
    if every_rank or dist.get_rank() == 0:
        tqdm.write(f"{line}\n", end="", nolock=True)  # one write; a stop in a lock would fail
        sys.stdout.flush()


def at_least(low: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = type(low)(text)  # int or float
        if not value >= low:
            raise argparse.ArgumentTypeError(f"{text} is less than {low}")
        return value

    return number


def leave_it_to_the_first(message: str) -> None:
    time.sleep(5)  # the node's first process says it, once, and torchrun then ends this one
    sys.exit(2)


def parse_args() -> argparse.Namespace:
    found = torch.accelerator.current_accelerator(check_available=True)
    devices = [found.type, "cpu"] if found and found.type != "mps" else ["cpu"]
    parser = argparse.ArgumentParser(usage="%(prog)s [total_epochs] [save_every] [options]")
    if {os.environ.get("LOCAL_RANK"), os.environ.get("TORCHELASTIC_RESTART_COUNT")} - {"0", None}:
        parser.error = leave_it_to_the_first
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
    add("--accumulate", type=at_least(1), default=1, help="micro-batches per step")
    add("--amp", choices=AMP, default="off", help="automatic mixed precision")
    add("--compile", action="store_true", help="torch.compile: slow to start; measure if it pays")
    add("--sync-bn", action="store_true", help="BatchNorm over all ranks; not on a CPU")
    add("--log-dir", help="folder for TensorBoard's event files")
    add("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # torch.distributed.launch gives it
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
    path = Path(args.snapshot_path)
    if (path.exists() and not path.is_file()) or not os.access(path.parent, os.W_OK):
        parser.error(f"--snapshot-path {path}: name a file in a folder that you may write to")
    if args.log_dir and importlib.util.find_spec("tensorboard") is None:
        parser.error("--log-dir needs TensorBoard: pip install tensorboard")
    if "RANK" in os.environ and "LOCAL_WORLD_SIZE" not in os.environ:
        parser.error("RANK is set, but not LOCAL_WORLD_SIZE: use torchrun, or unset RANK")
    if "RANK" not in os.environ:  # started without torchrun: one process, for a debugger say
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0 and not args.resume:
        parser.error("torchrun's --max-restarts goes with --resume, or a restart would begin anew")
    processes, count = int(os.environ["LOCAL_WORLD_SIZE"]), torch.accelerator.device_count()
    if args.device != "cpu" and processes > count:
        parser.error(f"{processes} processes are more than {count} devices")
    if args.sync_bn and args.device == "cpu":
        parser.error("--sync-bn needs an accelerator: leave it out on a CPU")
    return args


if __name__ == "__main__":
    args = parse_args()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback, until training begins
    sys.exit(main(args))
