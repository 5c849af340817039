"""ddp_torchrun.py for a run of days, which should be fast and lose little if it is stopped.

    torchrun --standalone --nproc_per_node=gpu recipes/long_run.py 50 10 --amp --accumulate 4

A step takes --accumulate micro-batches of --batch-size samples from each process. SIGTERM, which
schedulers send before they end a job, saves at the next loss line: torchrun waits 30 s for it. With
--resume, rank 0 sends its snapshot to all, which takes four times the file's size in the memory of
each process, and once in that of each GPU.
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

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # has common/
from common.data import DATASETS, load_dataset  # replace by your own
from common.model import MODELS, build_model  # replace by your own
from common.seed import set_seed


class ResumableSampler(DistributedSampler):
    skip = 0  # samples of this rank that it has trained on before the run was resumed

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.skip, None)


def ddp_setup(args):
    """Connect this process with the others, and return its device."""
    device = torch.device("cpu")
    if args.device != "cpu":
        device = torch.device(args.device, int(os.environ["LOCAL_RANK"]))  # from 0 on each machine
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(args.backend, timeout=datetime.timedelta(seconds=args.timeout))
    return device


def learning_rate(step, last_step, args):
    """It rises to --lr for --warm-up steps, and then stays there, or falls with --cosine."""
    if step <= args.warm_up:
        return args.lr * step / args.warm_up
    progress = (step - 1 - args.warm_up) / (last_step - args.warm_up)
    return args.lr * (0.5 + 0.5 * math.cos(math.pi * progress)) if args.cosine else args.lr


def train_step(model, micro_batches, optimizer, device, args):
    """Returns the mean loss of this rank's samples, and how many these are."""
    model.train()
    samples = sum(len(targets) for _, targets in micro_batches)
    mean_loss = torch.zeros((), device=device)
    optimizer.zero_grad()
    for number, (inputs, targets) in enumerate(micro_batches, start=1):
        last = number == len(micro_batches)
        inputs = inputs.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        with contextlib.nullcontext() if last else model.no_sync():  # DDP averages in the last
            with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                loss = F.cross_entropy(model(inputs), targets)  # your loss: a mean over the batch
            loss = loss * len(targets) / samples  # its share of the step, also of a smaller rest
            loss.backward()
        mean_loss += loss.detach()
    if args.clip > 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
    return mean_loss, samples


@torch.no_grad()
def evaluate(model, loader, device):
    """Returns the sum of the losses of this rank's samples, and its correct answers."""
    model.eval()
    sums = torch.zeros(2, device=device)
    for inputs, targets in loader:
        inputs = inputs.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        outputs = model(inputs)
        sums[0] += F.cross_entropy(outputs, targets) * len(targets)  # your loss
        sums[1] += (outputs.argmax(dim=1) == targets).sum()  # your metric
    return sums


def save_snapshot(args, model, optimizer, step, place):
    if not all(weight.isfinite().all() for weight in model.parameters()):
        sys.exit("error: weights are NaN or infinite, so they are not saved: try a lower --lr")
    if dist.get_rank() > 0:  # all ranks have these weights
        return
    snapshot = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **place}
    torch.save(snapshot, f"{args.snapshot_path}.tmp")
    os.replace(f"{args.snapshot_path}.tmp", args.snapshot_path)  # all or nothing, if it is killed
    print(f"Step {step} | Training checkpoint saved at {args.snapshot_path}", flush=True)


def load_snapshot(args, model, optimizer, train_size):
    """Returns how many epochs are finished, and how many samples of the next one were seen."""
    snapshots = [None]
    if dist.get_rank() == 0 and args.resume and os.path.exists(args.snapshot_path):
        snapshots = [torch.load(args.snapshot_path, map_location="cpu", weights_only=True)]
    dist.broadcast_object_list(snapshots)  # all ranks load what rank 0 has read
    if snapshots[0] is None:
        return 0, 0
    samples_seen, size = snapshots[0].get("samples_seen", 0), snapshots[0].get("train_size")
    if samples_seen > 0 and size != train_size:
        sys.exit(f"error: the snapshot is of {size} training samples, not {train_size}")
    model.load_state_dict(snapshots[0]["model"])
    optimizer.load_state_dict(snapshots[0]["optimizer"])
    return snapshots[0]["epoch"], samples_seen


def same_on_all_ranks(options):
    """End all ranks with one line, if a machine was given other options or other data."""
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, options)
    for rank, other in enumerate(ranks):
        for name, value in ranks[0].items():
            if other[name] != value and name not in ("data_dir", "snapshot_path", "num_workers"):
                sys.exit(f"error: {name} is {value} on rank 0, and {other[name]} on rank {rank}")


def on_any_rank(flags, device):
    """Which flags are set on a rank. All get the same answer, so that they act together."""
    flags = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return flags.tolist()


def ignore_sigterm(worker_id):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to workers, too


def build_loaders(args, train_set, val_set, device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sampler = ResumableSampler(train_set, seed=args.seed)  # equal shares: it may repeat samples
    val_shard = Subset(val_set, range(rank, len(val_set), world_size))  # each sample counts once
    options = {"num_workers": args.num_workers, "pin_memory": device.type != "cpu"}
    if args.num_workers > 0:  # spawned, because forked ones may hang beside the threads of NCCL
        options |= {"persistent_workers": True, "worker_init_fn": ignore_sigterm}
        options["multiprocessing_context"] = "spawn"
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, **options)
    return train_loader, DataLoader(val_shard, args.batch_size, **options)


def train(args, device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_float32_matmul_precision("high")  # faster on GPUs, in TF32
    set_seed(args.seed)
    train_set, val_set = load_dataset(args.dataset, args.data_dir)  # your data
    same_on_all_ranks({**vars(args), "train_size": len(train_set), "val_size": len(val_set)})
    if len(train_set) == 0:
        sys.exit("error: the training set has no samples")
    train_loader, val_loader = build_loaders(args, train_set, val_set, device)
    model = build_model(args.model, args.dataset).to(device)  # your model
    if args.sync_bn:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    first_epoch, samples_seen = load_snapshot(args, model, optimizer, len(train_set))
    global_batch = args.batch_size * args.accumulate * world_size
    steps = math.ceil(len(train_set) / global_batch)  # in an epoch
    step = first_epoch * steps + samples_seen // global_batch  # in all epochs so far
    last_step = args.total_epochs * steps
    print(f"[rank {rank} of {world_size}] on {device}, from epoch {first_epoch}", flush=True)
    if args.compile:
        model.compile(dynamic=False)  # in place, so that weights keep their names
    model = DDP(model, gradient_as_bucket_view=True)  # a view saves a copy of the gradients

    args.stop = False  # from now on, SIGTERM saves first
    signal.signal(signal.SIGTERM, lambda *_: setattr(args, "stop", True))
    set_seed(args.seed, rank, first_epoch)  # each rank's workers draw their own numbers
    last_save = time.monotonic()
    for epoch in range(first_epoch, args.total_epochs):
        start = time.perf_counter()
        train_loader.sampler.set_epoch(epoch)  # a new order in each epoch, the same on all ranks
        train_loader.sampler.skip = step % steps * args.batch_size * args.accumulate
        loss_sum, count = 0, 0
        batches = iter(train_loader)
        while step < (epoch + 1) * steps:
            step += 1
            set_seed(args.seed, rank, step)  # so that a resumed run draws the same dropout
            lr = learning_rate(step, last_step, args)
            for group in optimizer.param_groups:  # your schedule
                group.update(lr=lr, momentum=args.momentum)
            micro_batches = list(itertools.islice(batches, args.accumulate))
            loss, samples = train_step(model, micro_batches, optimizer, device, args)
            loss_sum += loss * samples
            count += samples * world_size  # all ranks have equal shares
            late = stop = False
            if step % args.log_interval == 0:
                dist.all_reduce(loss)
                if rank == 0:
                    line = f"Epoch {epoch} | Step {step} | Loss: {loss.item() / world_size:.4f}"
                    print(f"{line} | lr: {lr:.4g}", flush=True)
                late = time.monotonic() - last_save > 60 * args.save_minutes
                late, stop = on_any_rank([late, args.stop], device)
            save = step % args.save_steps == 0 or step % (steps * args.save_every) == 0
            if save or late or stop or step == last_step:
                place = {"epoch": step // steps, "samples_seen": step % steps * global_batch}
                place["train_size"] = len(train_set)
                save_snapshot(args, model.module, optimizer, step, place)
                last_save = time.monotonic()
            if stop and step < last_step:
                dist.barrier()  # until rank 0 has saved: if a rank ends, torchrun ends the others
                return "stopped by SIGTERM: continue with --resume"

        dist.all_reduce(loss_sum)
        train_loss = loss_sum.item() / count  # item() waits for the device
        rate = count / (time.perf_counter() - start)
        for buffer in model.buffers():  # BatchNorm's differ after the last step: take rank 0's
            dist.broadcast(buffer, src=0)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
            sums = evaluate(model.module, val_loader, device)  # DDP's forward may wait for others
        dist.all_reduce(sums)
        val_loss, correct = sums.tolist()
        if rank == 0:
            losses = f"Train loss: {train_loss:.4f} | Val loss: {val_loss / len(val_set):.4f}"
            accuracy = f"Accuracy: {correct:.0f}/{len(val_set)} ({correct / len(val_set):.2%})"
            print(f"Epoch {epoch} | {losses} | {accuracy} | {rate:.0f} samples/s", flush=True)


@record  # shows a rank's traceback in torchrun's report
def main(args):
    device = ddp_setup(args)
    stopped = train(args, device)  # frees DDP and the workers on return, before the group ends
    dist.destroy_process_group()
    return stopped


def parse_args():
    parser = argparse.ArgumentParser(usage="%(prog)s [total_epochs] [save_every] [options]")
    add = parser.add_argument
    add("total_epochs", nargs="?", type=int, default=5, help="how many epochs to train")
    add("save_every", nargs="?", type=int, default=1, help="epochs between two snapshots")
    add("--batch-size", "--batch_size", type=int, default=32, help="samples of a micro-batch")
    add("--lr", type=float, default=0.01, help="learning rate of SGD")
    add("--momentum", type=float, default=0.9, help="momentum of SGD")
    add("--dataset", choices=DATASETS, default="digits", help="digits needs no download")
    add("--data-dir", default="data", help="where the others are, or are downloaded to")
    add("--model", choices=MODELS, help="by default, the data set's own")
    add("--seed", type=int, default=42, help="of weights, order and dropout")
    add("--num-workers", type=int, default=0, help="processes that load data, per rank")
    add("--accumulate", type=int, default=1, help="micro-batches per process and step")
    add("--amp", action="store_true", help="mixed precision in bfloat16, without a GradScaler")
    add("--clip", type=float, default=0.0, help="largest norm of a step's gradient (0: no limit)")
    add("--warm-up", type=int, default=0, help="steps in which the learning rate rises to --lr")
    add("--cosine", action="store_true", help="then it falls, and ends near 0")
    add("--sync-bn", action="store_true", help="BatchNorm over all ranks; not on a CPU")
    add("--compile", action="store_true", help="torch.compile: slow to start, then often faster")
    add("--log-interval", type=int, default=10, help="steps between two loss lines")
    add("--save-steps", type=int, default=1000, help="steps between two snapshots")
    add("--save-minutes", type=float, default=10, help="the same in minutes, at a loss line")
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = [found.type, "cpu"] if found and found.type != "mps" else ["cpu"]  # MPS has no DDP
    add("--device", choices=devices, default=devices[0])
    add("--backend", help="by default nccl for CUDA and ROCm, xccl for XPU, gloo for CPUs")
    add("--timeout", type=int, default=600, help="seconds that ranks wait for each other")
    add("--snapshot-path", default="checkpoint.pt", help="the file to save")
    add("--resume", action="store_true", help="continue from the snapshot, if it exists")
    args = parser.parse_args()
    args.backend = args.backend or dist.get_default_backend_for_device(args.device)
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it with torchrun --nproc_per_node=2 recipes/long_run.py")
    if os.environ["RANK"] == "0" and os.path.exists(args.snapshot_path) and not args.resume:
        parser.error(f"{args.snapshot_path} exists: continue with --resume, or delete it")
    os.makedirs(os.path.dirname(args.snapshot_path) or ".", exist_ok=True)
    return args


if __name__ == "__main__":
    sys.exit(main(parse_args()))
