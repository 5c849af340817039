"""Train on all GPUs of this node from one process: nn.DataParallel, the older way.

    python data_parallel.py 50 10               all GPUs
    CUDA_VISIBLE_DEVICES=0,2 python data_parallel.py

One line of training differs from single_gpu.py: nn.DataParallel(model). In every step it copies the
model to all GPUs, splits the batch, runs one thread per GPU, and gathers outputs and gradients on
the first. ddp_spawn.py and ddp_torchrun.py copy the model once, move gradients and no weights, and
are faster, so torch recommends DDP. This file takes CUDA or ROCm GPUs, or else the CPU. To make it
yours, copy common/loader.py and common/seed.py with it, and edit the lines marked "your".
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler
from tqdm import tqdm

from common.data import DATASETS, load_dataset  # your data
from common.loader import loader_options
from common.model import DEFAULT_MODEL, MODELS, build_model  # your model
from common.seed import set_seed


def train_epoch(model, loader, optimizer, device, epoch, args):
    """One pass over the loader. Returns the sum of the samples' losses."""
    model.train()
    loss_sum = torch.zeros((), device=device)
    progress = tqdm(loader, leave=False, disable=None)  # None: a bar on a terminal only
    for step, (inputs, targets) in enumerate(progress, start=1):
        inputs = inputs.to(device, non_blocking=loader.pin_memory)  # your inputs
        targets = targets.to(device, non_blocking=loader.pin_memory)  # your inputs
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)  # your loss: a mean over the batch
        loss.backward()
        optimizer.step()
        loss_sum += loss.detach() * len(targets)
        if args.log_interval and step % args.log_interval == 0:
            log(f"Epoch {epoch} | Step {step} | Loss: {loss.item():.4f}")
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


def main(args):
    start = time.perf_counter()
    line = f"total_epochs: {args.total_epochs}, save_every: {args.save_every}"
    log(f"{line}, batch_size: {args.batch_size}")
    device = torch.device(args.device)
    name = "CPU" if device.type == "cpu" else "GPU"
    if device.type != "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(4, torch.get_num_threads()))  # more would delay GPU kernels
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU: faster, and exact to three digits

    set_seed(args.seed)  # the same weights and random split of your data in each process and run
    train_set, val_set = load_dataset(args.dataset, args.data_dir)  # your data
    sampler = RandomSampler(train_set, generator=torch.Generator())
    options = loader_options(args.device, args.num_workers)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, **options)  # your loader
    val_loader = DataLoader(val_set, args.batch_size, **options)  # your loader

    model = build_model(args.model, train_set[0][0].shape).to(device)  # your model
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum)  # your optimizer
    parts = {"model": model, "optimizer": optimizer}  # what a snapshot holds
    first_epoch = load_snapshot(args, parts) if args.resume else 0
    if not args.resume and os.path.exists(args.snapshot_path):
        os.replace(args.snapshot_path, f"{args.snapshot_path}.old")
        log(f"The snapshot of an earlier run is now {args.snapshot_path}.old")
    model = nn.DataParallel(model)  # after parts, so names in a snapshot have no "module."

    for epoch in range(first_epoch, args.total_epochs):
        epoch_start = time.perf_counter()
        set_seed(args.seed, 0, epoch)  # so a run resumed here draws the same dropout; 0 is the rank
        sampler.generator.manual_seed(args.seed + epoch)  # reshuffles, as DistributedSampler does
        line = f"Epoch {epoch} | Batchsize: {args.batch_size} | Steps: {len(train_loader)}"
        log(f"[{name}0] {line}")
        loss_sum = train_epoch(model, train_loader, optimizer, device, epoch, args)
        train_loss = loss_sum.item() / len(train_set)  # item() waits for the device
        rate = len(train_set) / (time.perf_counter() - epoch_start)
        if (epoch + 1) % args.save_every == 0 or epoch + 1 == args.total_epochs:
            save_snapshot(args, parts, epoch + 1)  # first, because evaluation may fail
            log(f"Epoch {epoch} | Training checkpoint saved at {args.snapshot_path}")
        line = f"Epoch {epoch} | Train loss: {train_loss:.4f}"
        if len(val_set) > 0:  # no validation set? Then write val_set = []
            val_loss, correct = evaluate(model, val_loader, device).tolist()
            line += f" | Val loss: {val_loss / len(val_set):.4f}"
            line += f" | Accuracy: {correct:.0f}/{len(val_set)} ({correct / len(val_set):.2%})"
        log(f"{line} | {rate:.0f} samples/s")
    log(f"Total time: {time.perf_counter() - start:.3f}s")


def save_snapshot(args, parts, epoch):
    """Save the parts and the number of finished epochs, whole or not at all."""
    if not all(weight.isfinite().all() for weight in parts["model"].parameters()):
        sys.exit("error: weights are NaN or infinite, so they are not saved: try a lower --lr")
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


def log(line):
    tqdm.write(line)  # print() would break the progress bar
    sys.stdout.flush()


def positive(text):
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def parse_args():
    parser = argparse.ArgumentParser(usage="%(prog)s [total_epochs] [save_every] [options]")
    add = parser.add_argument
    add("total_epochs", nargs="?", type=positive, default=5, help="how many epochs to train")
    add("save_every", nargs="?", type=positive, default=1, help="epochs between two snapshots")
    add("--batch-size", "--batch_size", type=positive, default=32, help="samples for all GPUs")
    add("--lr", type=float, default=0.01, help="learning rate of SGD")  # your optimizer
    add("--momentum", type=float, default=0.9, help="momentum of SGD")  # your optimizer
    add("--dataset", choices=DATASETS, default="digits", help="digits: no download")  # your data
    add("--data-dir", default="data", help="where torchvision keeps or downloads the others")
    add("--model", choices=MODELS, help="default: chosen by --dataset")  # your model
    add("--seed", type=int, default=42)
    add("--num-workers", type=int, default=0, help="processes that load data: try 4 for files")
    add("--log-interval", type=int, default=100, help="steps between two loss lines (0: none)")
    add("--snapshot-path", default="checkpoint.pt")
    add("--resume", action="store_true", help="resume from the snapshot if there is one")
    args = parser.parse_intermixed_args()  # also takes 50 --resume 10
    args.device = "cuda" if torch.cuda.is_available() else "cpu"  # DataParallel knows no other
    args.model = args.model or DEFAULT_MODEL[args.dataset]  # your model
    if os.environ.get("WORLD_SIZE", "1") != "1":
        parser.error(f"WORLD_SIZE is {os.environ['WORLD_SIZE']}: use torchrun with ddp_torchrun.py")
    path = Path(args.snapshot_path)
    if (path.exists() and not path.is_file()) or not os.access(path.parent, os.W_OK):
        parser.error(f"--snapshot-path {path}: name a file in an existing, writable folder")
    return args


if __name__ == "__main__":
    main(parse_args())
