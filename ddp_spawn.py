"""Train on all devices of this node: mp.spawn starts a process for each, DDP connects them.

    python ddp_spawn.py 50 10                  one process per GPU, or two on a CPU
    python ddp_spawn.py --nproc-per-node 4     four, which share a CPU's cores
    python ddp_spawn.py 50 10 --resume         resume from checkpoint.pt, if there is one
    CUDA_VISIBLE_DEVICES=0,2 python ddp_spawn.py

The global batch is --batch-size times the processes, so four processes have 128. For the 32 of
single_gpu.py, use --batch-size 8. With larger batches, you may want to raise --lr. ddp_torchrun.py
adds what a long run needs. To make this file yours, copy common/loader.py and common/seed.py with
it, and edit the lines marked "your".
"""

import argparse
import datetime
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # keep it: without it, gloo may abort Python at exit
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

from common.data import DATASETS, load_dataset  # your data
from common.loader import loader_options
from common.model import DEFAULT_MODEL, MODELS, build_model  # your model
from common.seed import set_seed


def ddp_setup(rank, args):
    """Give this process its device, and connect it with the others."""
    device = torch.device("cpu")
    if args.device != "cpu":
        device = torch.device(args.device, rank)
        torch.accelerator.set_device_index(rank)
    if "OMP_NUM_THREADS" not in os.environ:  # otherwise every process would use all cores
        threads = max(1, torch.get_num_threads() // args.nproc_per_node)
        torch.set_num_threads(threads if args.device == "cpu" else min(4, threads))
    dist.init_process_group(
        args.backend,
        init_method=args.init_method,
        rank=rank,
        world_size=args.nproc_per_node,
        timeout=datetime.timedelta(seconds=args.timeout),
        device_id=None if device.type == "cpu" else device,  # NCCL connects here, not later
    )
    return device


def train_epoch(model, loader, optimizer, device, epoch, args):
    """One pass over the loader. Returns the sum of the samples' losses."""
    model.train()
    loss_sum = torch.zeros((), device=device)
    hidden = True if dist.get_rank() > 0 else None  # None: a bar on a terminal only
    progress = tqdm(loader, leave=False, disable=hidden)
    for step, (inputs, targets) in enumerate(progress, start=1):
        inputs = inputs.to(device, non_blocking=loader.pin_memory)  # your inputs
        targets = targets.to(device, non_blocking=loader.pin_memory)  # your inputs
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)  # your loss: a mean over the batch
        loss.backward()  # meanwhile DDP averages the gradients over all ranks
        optimizer.step()
        loss_sum += loss.detach() * len(targets)
        if args.log_interval and step % args.log_interval == 0:
            log(f"Epoch {epoch} | Step {step} | Loss of rank 0: {loss.item():.4f}")
    return loss_sum


@torch.no_grad()
def evaluate(model, loader, device):
    """Returns the sum of the samples' losses, and the number of correct answers."""
    model.eval()
    sums = torch.zeros(2, device=device)
    for inputs, targets in loader:
        inputs = inputs.to(device, non_blocking=loader.pin_memory)  # your inputs
        targets = targets.to(device, non_blocking=loader.pin_memory)  # your inputs
        outputs = model(inputs)  # your inputs
        sums[0] += F.cross_entropy(outputs, targets) * len(targets)  # your loss
        sums[1] += (outputs.argmax(dim=1) == targets).sum()  # your metric
    model.train()
    return sums


def main(rank, args):
    start = time.perf_counter()
    device = ddp_setup(rank, args)
    world_size = dist.get_world_size()
    line = f"total_epochs: {args.total_epochs}, save_every: {args.save_every}"
    log(f"{line}, batch_size: {args.batch_size}")
    log(f"[rank {rank} of {world_size}] {device}", every_rank=True)
    name = "CPU" if device.type == "cpu" else "GPU"
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU: faster, and exact to three digits

    set_seed(args.seed)  # the same weights and random split of your data in each process and run
    train_set, val_set = load_dataset(args.dataset, args.data_dir)  # your data
    sampler = DistributedSampler(train_set, seed=args.seed)  # this rank's share of each epoch
    options = loader_options(args.device, args.num_workers)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, **options)  # your loader
    val_shard = range(rank, len(val_set), world_size)  # without padding: each sample counts once
    val_loader = DataLoader(val_set, args.batch_size, sampler=val_shard, **options)  # your loader

    model = build_model(args.model, train_set[0][0].shape).to(device)  # your model
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum)  # your optimizer
    parts = {"model": model, "optimizer": optimizer}  # what a snapshot holds
    first_epoch = load_snapshot(args, parts) if args.resume else 0
    if rank == 0 and not args.resume and os.path.exists(args.snapshot_path):
        os.replace(args.snapshot_path, f"{args.snapshot_path}.old")
        log(f"The snapshot of an earlier run is now {args.snapshot_path}.old")
    model = DDP(model, gradient_as_bucket_view=True)  # copies rank 0's weights; views save memory

    for epoch in range(first_epoch, args.total_epochs):
        epoch_start = time.perf_counter()
        set_seed(args.seed, rank, epoch)  # so a run resumed here draws the same dropout
        sampler.set_epoch(epoch)  # reshuffles, in the same way on all ranks
        line = f"Epoch {epoch} | Batchsize: {args.batch_size} | Steps: {len(train_loader)}"
        log(f"[{name}{rank}] {line}", every_rank=True)
        loss_sum = train_epoch(model, train_loader, optimizer, device, epoch, args)
        dist.all_reduce(loss_sum)  # now the sum over all ranks
        train_loss = loss_sum.item() / sampler.total_size  # item() waits for the device
        rate = sampler.total_size / (time.perf_counter() - epoch_start)
        if (epoch + 1) % args.save_every == 0 or epoch + 1 == args.total_epochs:
            save_snapshot(args, parts, epoch + 1)  # first, because evaluation may fail
            log(f"Epoch {epoch} | Training checkpoint saved at {args.snapshot_path}")
        line = f"Epoch {epoch} | Train loss: {train_loss:.4f}"
        if len(val_set) > 0:  # no validation set? Then write val_set = []
            for buffer in model.buffers():  # all ranks use rank 0's BatchNorm statistics
                dist.broadcast(buffer, src=0)
            sums = evaluate(model.module, val_loader, device)  # DDP may hang on uneven shards
            dist.all_reduce(sums)  # now the sums over all ranks
            val_loss, correct = sums.tolist()
            line += f" | Val loss: {val_loss / len(val_set):.4f}"
            line += f" | Accuracy: {correct:.0f}/{len(val_set)} ({correct / len(val_set):.2%})"
        log(f"{line} | {rate:.0f} samples/s")
    log(f"Total time: {time.perf_counter() - start:.3f}s")
    del model  # if DDP outlives its process group, Python may hang at exit
    dist.destroy_process_group()


def save_snapshot(args, parts, epoch):
    """Save the parts and the number of finished epochs, whole or not at all."""
    if not all(weight.isfinite().all() for weight in parts["model"].parameters()):
        sys.exit("error: weights are NaN or infinite, so they are not saved: try a lower --lr")
    if dist.get_rank() > 0:  # all ranks have the same weights, so rank 0's are enough
        return
    snapshot = {name: part.state_dict() for name, part in parts.items()}
    snapshot["epoch"] = epoch
    snapshot["args"] = {name: str(value) for name, value in vars(args).items()}
    torch.save(snapshot, f"{args.snapshot_path}.tmp")
    os.replace(f"{args.snapshot_path}.tmp", args.snapshot_path)  # a crash leaves the old or the new


def load_snapshot(args, parts):
    """Load the parts that --resume begins with. Returns the number of finished epochs."""
    path = args.snapshot_path
    if not os.path.exists(path):
        log(f"No snapshot at {path}, starting from the beginning")
        return 0
    snapshot = torch.load(path, map_location="cpu", weights_only=True)
    for name in ("dataset", "model", "momentum", "seed"):  # your settings
        saved, given = snapshot["args"].get(name), str(getattr(args, name))
        if saved not in (None, given):  # None: saved without this option
            sys.exit(f"error: {path} was made with {name} {saved}, not {given}")
    if snapshot.get("samples_seen"):
        sys.exit(f"error: {path} was saved within an epoch: resume it with ddp_torchrun.py")
    rates = [group["lr"] for group in parts["optimizer"].param_groups]
    for name, part in parts.items():
        part.load_state_dict(snapshot[name])
    # Keep this run's learning rate. With a torch scheduler, follow its recipe in docs/recipes.md.
    for group, rate in zip(parts["optimizer"].param_groups, rates, strict=True):  # your schedule
        group["lr"] = rate
    log(f"Resuming training from snapshot at Epoch {snapshot['epoch']}")
    return snapshot["epoch"]


def log(line, every_rank=False):
    if every_rank or dist.get_rank() == 0:
        # print() would break the progress bar. Text and newline in one write, or lines would mix.
        tqdm.write(f"{line}\n", end="")
        sys.stdout.flush()


def default_backend(device):
    """What connects processes on this device, or None if nothing does."""
    backend = dist.get_default_backend_for_device(device)
    backend = backend if dist.is_backend_available(backend) else "gloo"  # Windows has no NCCL
    return backend if device in dist.Backend.backend_capability[backend] else None


def positive(text):
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def parse_args():
    found = torch.accelerator.current_accelerator(check_available=True)
    devices = [found.type, "cpu"] if found and default_backend(found.type) else ["cpu"]
    parser = argparse.ArgumentParser(usage="%(prog)s [total_epochs] [save_every] [options]")
    add = parser.add_argument
    add("total_epochs", nargs="?", type=positive, default=5, help="how many epochs to train")
    add("save_every", nargs="?", type=positive, default=1, help="epochs between two snapshots")
    add("--batch-size", "--batch_size", type=positive, default=32, help="samples per process")
    add("--lr", type=float, default=0.01, help="learning rate of SGD")  # your optimizer
    add("--momentum", type=float, default=0.9, help="momentum of SGD")  # your optimizer
    add("--dataset", choices=DATASETS, default="digits", help="digits: no download")  # your data
    add("--data-dir", default="data", help="where torchvision keeps or downloads the others")
    add("--model", choices=MODELS, help="default: chosen by --dataset")  # your model
    add("--seed", type=int, default=42)
    add("--device", choices=devices, default=devices[0])
    add("--nproc-per-node", type=positive, help="default: one per device, 2 on a CPU")
    add("--backend", choices=dist.Backend.backend_list, help="e.g. nccl")
    add("--timeout", type=positive, default=600, help="seconds that ranks wait for each other")
    add("--num-workers", type=int, default=0, help="processes that load data: try 4 for files")
    add("--log-interval", type=int, default=100, help="steps between two loss lines (0: none)")
    add("--snapshot-path", default="checkpoint.pt")
    add("--resume", action="store_true", help="resume from the snapshot if there is one")
    args = parser.parse_intermixed_args()  # also takes 50 --resume 10
    args.model = args.model or DEFAULT_MODEL[args.dataset]  # your model
    args.backend = args.backend or default_backend(args.device)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        parser.error(f"WORLD_SIZE is {os.environ['WORLD_SIZE']}: use torchrun with ddp_torchrun.py")
    path = Path(args.snapshot_path)
    if (path.exists() and not path.is_file()) or not os.access(path.parent, os.W_OK):
        parser.error(f"--snapshot-path {path}: name a file in an existing, writable folder")
    count = 2 if args.device == "cpu" else torch.accelerator.device_count()
    args.nproc_per_node = args.nproc_per_node or count
    if args.device != "cpu" and args.nproc_per_node > count:
        parser.error(f"{args.nproc_per_node} processes need as many devices, and there are {count}")
    return args


if __name__ == "__main__":
    args = parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM does what Ctrl-C does
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store").as_posix().lstrip("/")
        args.init_method = f"file:///{store}"  # the ranks meet here; a port may be in use
        try:
            mp.spawn(main, args=(args,), nprocs=args.nproc_per_node)
        except mp.ProcessExitedException as error:  # a rank has said why it exits, or was killed
            sys.exit(error.exit_code if error.exit_code > 0 else f"error: {error}")
        finally:
            for process in mp.active_children():  # otherwise they keep training after Ctrl-C
                process.kill()
