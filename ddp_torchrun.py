"""Train under torchrun, on one node or on several: it starts the processes and can restart them.

    torchrun --nproc_per_node=gpu ddp_torchrun.py 50 10            one process per GPU of this node
    torchrun --nproc_per_node=gpu ddp_torchrun.py 50 10 --resume   resume from checkpoint.pt
    torchrun --nproc_per_node=4 ddp_torchrun.py --batch-size 8 --accumulate 4 --amp --clip 1
    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=4 --master_addr=10.0.0.1 ddp_torchrun.py
        two nodes: on the second one the same, with --node_rank=1

The global batch is --batch-size times the processes times --accumulate. On several nodes, the
snapshot must lie on a disk that they share. torchrun can restart a job that has failed, but only
with this variable, because otherwise a restart may hang (several nodes: docs/multinode.md):

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc_per_node=4 --max-restarts=3 ddp_torchrun.py 50 10 --resume

To make this file yours, copy common/loader.py and common/seed.py with it, edit the lines marked
"your", and delete the options that you do not need.
"""

import argparse
import contextlib
import datetime
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # keep it: without it, gloo may abort Python at exit
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

from common.data import DATASETS, load_dataset  # your data
from common.loader import loader_options
from common.model import DEFAULT_MODEL, MODELS, build_model  # your model
from common.seed import set_seed


def ddp_setup(args):
    """Give this process its device, and connect it with the others."""
    device = torch.device("cpu")
    if args.device != "cpu":
        device = torch.device(args.device, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device.index)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(min(4, torch.get_num_threads()))  # more would delay GPU kernels
    dist.init_process_group(  # torchrun has set RANK, WORLD_SIZE and the address of rank 0
        args.backend,
        timeout=datetime.timedelta(seconds=args.timeout),
        device_id=None if device.type == "cpu" else device,  # NCCL connects here, not later
    )
    return device


def train_epoch(model, loader, optimizer, device, epoch, args, parts, done):
    """One pass over the loader, after `done` samples. Returns the sum of the samples' losses."""
    model.train()
    loss_sum = torch.zeros((), device=device)
    samples = done + len(loader.sampler)  # of this rank, in the whole epoch
    step_size = args.batch_size * args.accumulate  # samples; an epoch's last step may have fewer
    steps = math.ceil(samples / step_size)
    step = epoch * steps + done // step_size  # counted over the whole run
    hidden = True if dist.get_rank() > 0 else None  # None: a bar on a terminal only
    progress = tqdm(loader, leave=False, disable=hidden)
    for number, (inputs, targets) in enumerate(progress, start=1):
        inputs = inputs.to(device, non_blocking=loader.pin_memory)  # your inputs
        targets = targets.to(device, non_blocking=loader.pin_memory)  # your inputs: one per sample
        if len(targets) > min(args.batch_size, samples - done):
            sys.exit(f"error: {len(targets)} targets for {args.batch_size} samples: give one each")
        share = len(targets) / min(step_size, samples - done)  # of the step's samples
        last = number % args.accumulate == 0 or number == len(loader)  # the step's last micro-batch
        # Only the step's last backward() sends gradients. The others just add them up.
        sync = contextlib.nullcontext() if last else model.no_sync()
        with sync:
            with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                loss = F.cross_entropy(model(inputs), targets)  # your loss: a mean over the batch
            (loss * share).backward()  # DDP averages over the ranks
        loss_sum += loss.detach() * len(targets)
        if not last:
            continue
        if args.clip > 0:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        for group in optimizer.param_groups:  # your schedule
            group["lr"] = group["initial_lr"] * lr_factor(step, args.total_epochs * steps, args)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        done = min(done + step_size, samples)
        if args.log_interval and step % args.log_interval == 0:
            loss = loss.detach() / dist.get_world_size()
            dist.all_reduce(loss)  # the mean of all ranks' last micro-batches
            lr = optimizer.param_groups[0]["lr"]
            log(f"Epoch {epoch} | Step {step} | Loss: {loss.item():.4f} | lr: {lr:.4g}")
        if step % args.save_steps == 0:
            if done == samples:  # this step was the epoch's last
                save_snapshot(args, parts, epoch + 1)
            else:
                save_snapshot(args, parts, epoch, done * dist.get_world_size())
            log(f"Epoch {epoch} | Step {step} | Saved at {args.snapshot_path}")
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


@record  # puts this rank's traceback into torchrun's report
def main(args):
    start = time.perf_counter()
    device = ddp_setup(args)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    same_on_all_ranks(vars(args))
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
    if args.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, args.momentum)  # your optimizer
    parts = {"model": model, "optimizer": optimizer}  # what a snapshot holds
    first_epoch = samples_seen = 0
    if args.resume:
        first_epoch, samples_seen = load_snapshot(args, parts)
    for group in optimizer.param_groups:  # your schedule
        group["initial_lr"] = group["lr"]  # what lr_factor multiplies
    own = {"train_size": len(train_set), "val_size": len(val_set), "snapshot's epoch": first_epoch}
    if args.resume:  # from the same snapshot? DDP would hide a difference in weights
        weights = sum(weight.cpu().double().sum().item() for weight in model.parameters())
        own["snapshot's samples_seen"] = samples_seen
        own["sum of the snapshot's weights"] = f"{weights:.9g}"
    same_on_all_ranks(own)
    if rank == 0 and not args.resume and os.path.exists(args.snapshot_path):
        os.replace(args.snapshot_path, f"{args.snapshot_path}.old")
        log(f"The snapshot of an earlier run is now {args.snapshot_path}.old")
    if args.compile:
        model.compile(dynamic=False)  # in place, so names stay; recompiled for each batch size
    model = DDP(model, gradient_as_bucket_view=True)  # copies rank 0's weights; views save memory

    for epoch in range(first_epoch, args.total_epochs):
        epoch_start = time.perf_counter()
        set_seed(args.seed, rank, epoch)  # so a run resumed here draws the same dropout
        sampler.set_epoch(epoch)  # reshuffles, in the same way on all ranks
        loader, done = train_loader, 0
        if samples_seen:  # resumed within this epoch: train on its rest, with other dropout
            set_seed(args.seed, rank, epoch, samples_seen)
            done = samples_seen // world_size
            rest = list(sampler)[done:]
            loader = DataLoader(train_set, args.batch_size, sampler=rest, **options)  # your loader
            samples_seen = 0
        steps_left = math.ceil(len(loader) / args.accumulate)
        line = f"Epoch {epoch} | Batchsize: {args.batch_size} | Steps: {steps_left}"
        log(f"[{name}{rank}] {line}", every_rank=True)
        loss_sum = train_epoch(model, loader, optimizer, device, epoch, args, parts, done)
        dist.all_reduce(loss_sum)  # now the sum over all ranks
        train_size = len(loader.sampler) * world_size  # with samples that were repeated
        train_loss = loss_sum.item() / train_size  # item() waits for the device
        rate = train_size / (time.perf_counter() - epoch_start)
        if (epoch + 1) % args.save_every == 0 or epoch + 1 == args.total_epochs:
            save_snapshot(args, parts, epoch + 1)  # first, because evaluation may fail
            log(f"Epoch {epoch} | Training checkpoint saved at {args.snapshot_path}")
        line = f"Epoch {epoch} | Train loss: {train_loss:.4f}"
        if len(val_set) > 0:  # no validation set? Then write val_set = []
            for buffer in model.buffers():  # all ranks use rank 0's BatchNorm statistics
                dist.broadcast(buffer, src=0)
            with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                sums = evaluate(model.module, val_loader, device)  # DDP may hang on uneven shards
            dist.all_reduce(sums)  # now the sums over all ranks
            val_loss, correct = sums.tolist()
            line += f" | Val loss: {val_loss / len(val_set):.4f}"
            line += f" | Accuracy: {correct:.0f}/{len(val_set)} ({correct / len(val_set):.2%})"
        log(f"{line} | {rate:.0f} samples/s")
    log(f"Total time: {time.perf_counter() - start:.3f}s")
    del model  # if DDP outlives its process group, Python may hang at exit
    dist.destroy_process_group()


def lr_factor(step, total_steps, args):  # your schedule
    """What --lr is multiplied by: it rises in --warm-up steps, then --cosine lets it fall to 0."""
    if step < args.warm_up:
        return (step + 1) / args.warm_up
    if not args.cosine:
        return 1.0
    return 0.5 + 0.5 * math.cos(math.pi * (step - args.warm_up) / (total_steps - args.warm_up))


MAY_DIFFER = {"data_dir", "snapshot_path", "num_workers", "local_rank"}  # between nodes


def same_on_all_ranks(own):
    """End all ranks if a node has other options, other data or another snapshot."""
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    for rank, other in enumerate(ranks):
        for name in own:
            if name not in MAY_DIFFER and other[name] != ranks[0][name]:
                values = f"{ranks[0][name]} on rank 0, and {other[name]} on rank {rank}"
                dist.destroy_process_group()  # or gloo's threads may abort Python at exit
                sys.exit(f"error: {name} is {values}: it must be the same on all nodes")


def save_snapshot(args, parts, epoch, samples_seen=0):
    """Save the parts and how far the run is, whole or not at all."""
    if not all(weight.isfinite().all() for weight in parts["model"].parameters()):
        sys.exit("error: weights are NaN or infinite, so they are not saved: try a lower --lr")
    if dist.get_rank() > 0:  # all ranks have the same weights, so rank 0's are enough
        return
    snapshot = {name: part.state_dict() for name, part in parts.items()}
    snapshot |= {"epoch": epoch, "samples_seen": samples_seen}  # of that epoch, by all ranks
    snapshot["args"] = {name: str(value) for name, value in vars(args).items()}
    torch.save(snapshot, f"{args.snapshot_path}.tmp")
    os.replace(f"{args.snapshot_path}.tmp", args.snapshot_path)  # a crash leaves the old or the new


def load_snapshot(args, parts):
    """Load the parts that --resume begins with. Returns finished epochs, samples after them."""
    path = args.snapshot_path
    if not os.path.exists(path):
        log(f"No snapshot at {path}, starting from the beginning")
        return 0, 0
    snapshot = torch.load(path, map_location="cpu", weights_only=True)
    for name in ("dataset", "model", "momentum", "seed", "warm_up", "cosine"):  # your settings
        saved, given = snapshot["args"].get(name), str(getattr(args, name))
        if saved not in (None, given):  # None: saved without this option
            sys.exit(f"error: {path} was made with {name} {saved}, not {given}")
    rates = [group["lr"] for group in parts["optimizer"].param_groups]
    for name, part in parts.items():
        part.load_state_dict(snapshot[name])
    # Keep this run's learning rate. With a torch scheduler, follow its recipe in docs/recipes.md.
    for group, rate in zip(parts["optimizer"].param_groups, rates, strict=True):  # your schedule
        group["lr"] = rate
    log(f"Resuming training from snapshot at Epoch {snapshot['epoch']}")
    return snapshot["epoch"], snapshot.get("samples_seen", 0)  # only this script saves it


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
    add("--accumulate", type=positive, default=1, help="micro-batches per step")
    add("--amp", action="store_true", help="mixed precision in bfloat16, which needs no GradScaler")
    add("--clip", type=float, default=0.0, help="largest norm of the gradient (0: no limit)")
    add("--warm-up", type=int, default=0, help="steps in which the learning rate rises to --lr")
    add("--cosine", action="store_true", help="then let the learning rate fall, almost to 0")
    add("--sync-bn", action="store_true", help="BatchNorm over all ranks; not on a CPU")
    add("--compile", action="store_true", help="torch.compile: slow to start; measure if it pays")
    add("--save-steps", type=positive, default=1000, help="steps between two snapshots in an epoch")
    add("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # of torch.distributed.launch
    add("--backend", choices=dist.Backend.backend_list, help="e.g. nccl")
    add("--timeout", type=positive, default=600, help="seconds that ranks wait for each other")
    add("--num-workers", type=int, default=0, help="processes that load data: try 4 for files")
    add("--log-interval", type=int, default=100, help="steps between two loss lines (0: none)")
    add("--snapshot-path", default="checkpoint.pt")
    add("--resume", action="store_true", help="resume from the snapshot if there is one")
    args = parser.parse_intermixed_args()  # also takes 50 --resume 10
    args.model = args.model or DEFAULT_MODEL[args.dataset]  # your model
    args.backend = args.backend or default_backend(args.device)
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc_per_node=gpu ddp_torchrun.py")
    path = Path(args.snapshot_path)
    if (path.exists() and not path.is_file()) or not os.access(path.parent, os.W_OK):
        parser.error(f"--snapshot-path {path}: name a file in an existing, writable folder")
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        if not args.resume:
            parser.error("--max-restarts without --resume: a restart would begin at epoch 0")
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            error = "a restart may hang: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
            parser.error(f"{error}, and use --standalone or --rdzv_backend=c10d (pytorch#135712)")
    processes, count = os.environ.get("LOCAL_WORLD_SIZE", "1"), torch.accelerator.device_count()
    if args.device != "cpu" and int(processes) > count:
        parser.error(f"{processes} processes need as many devices, and there are {count}")
    return args


if __name__ == "__main__":
    main(parse_args())
