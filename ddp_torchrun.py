"""Train on the GPUs of one machine or of several: torchrun starts a process for each.

    torchrun --standalone --nproc_per_node=gpu ddp_torchrun.py 50 10    # on all GPUs (CPU: =2)

On two machines, run this on the first, and with --node_rank=1 on the second:

    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=4 --master_addr=10.0.0.1 ddp_torchrun.py

Each process has a rank, counted from 0 over all machines, and a local rank, counted on its own. A
step takes --batch-size samples of each: with four, 32 make a batch of 128, which may need a higher
--lr. recipes/long_run.py has what a long run needs: bfloat16, accumulation, a schedule.
"""

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset
from tqdm import tqdm

from common.data import DATASETS, load_dataset  # replace by your own
from common.model import MODELS, build_model  # replace by your own
from common.seed import set_seed


def ddp_setup(args):
    """Connect this process with the others, and return its device."""
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))  # from 0 on each machine
        torch.cuda.set_device(device)
    dist.init_process_group(args.backend)  # torchrun has set RANK, WORLD_SIZE and an address
    return device


def train_epoch(model, loader, optimizer, device):
    """Returns the sum of the losses of this rank's samples."""
    model.train()
    loss_sum = torch.zeros((), device=device)
    hidden = True if dist.get_rank() > 0 else None  # None: a bar on a terminal only
    for inputs, targets in tqdm(loader, leave=False, disable=hidden):
        inputs = inputs.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)  # your loss: a mean over the batch
        loss.backward()  # DDP averages the gradients over all ranks
        optimizer.step()
        loss_sum += loss.detach() * len(targets)
    return loss_sum


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


def save_snapshot(args, model, optimizer, epochs):
    if not all(weight.isfinite().all() for weight in model.parameters()):
        sys.exit("error: weights are NaN or infinite, so they are not saved: try a lower --lr")
    if dist.get_rank() > 0:  # all ranks have these weights
        return
    snapshot = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epochs}
    torch.save(snapshot, f"{args.snapshot_path}.tmp")
    os.replace(f"{args.snapshot_path}.tmp", args.snapshot_path)  # all or nothing, if it is killed
    print(f"Epoch {epochs - 1} | Training checkpoint saved at {args.snapshot_path}")


def load_snapshot(args, model, optimizer):
    """Returns how many epochs are finished: with --resume, those of rank 0's snapshot."""
    snapshots = [None]
    if dist.get_rank() == 0 and args.resume and os.path.exists(args.snapshot_path):
        snapshots = [torch.load(args.snapshot_path, map_location="cpu", weights_only=True)]
    dist.broadcast_object_list(snapshots)  # all ranks load what rank 0 has read
    if snapshots[0] is None:
        return 0
    model.load_state_dict(snapshots[0]["model"])
    optimizer.load_state_dict(snapshots[0]["optimizer"])
    for group in optimizer.param_groups:  # with a scheduler, load its state in place of these lines
        group.update(lr=args.lr, momentum=args.momentum)  # this run's, not the snapshot's
    return snapshots[0]["epoch"]


def train(args, device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_float32_matmul_precision("high")  # faster on GPUs, in TF32
    set_seed(args.seed)
    train_set, val_set = load_dataset(args.dataset, args.data_dir)  # your data
    sampler = DistributedSampler(train_set, seed=args.seed)  # equal shares: it may repeat samples
    val_shard = Subset(val_set, range(rank, len(val_set), world_size))  # each sample counts once
    options = {"num_workers": args.num_workers, "pin_memory": device.type == "cuda"}
    options["persistent_workers"] = args.num_workers > 0
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, **options)
    val_loader = DataLoader(val_shard, args.batch_size, **options)
    model = build_model(args.model, args.dataset).to(device)  # your model
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)

    first_epoch = load_snapshot(args, model, optimizer)
    if rank == 0:
        line = f"total_epochs: {args.total_epochs}, save_every: {args.save_every}"
        print(f"{line}, batch_size: {args.batch_size}", flush=True)
    print(f"[rank {rank} of {world_size}] on {device}, from epoch {first_epoch}", flush=True)
    model = DDP(model, gradient_as_bucket_view=True)  # takes rank 0's weights; needs no device_ids

    for epoch in range(first_epoch, args.total_epochs):
        start = time.perf_counter()
        set_seed(args.seed, rank, epoch)  # each rank draws its own dropout
        sampler.set_epoch(epoch)  # a new order in each epoch, the same on all ranks
        line = f"Epoch {epoch} | Batchsize: {args.batch_size} | Steps: {len(train_loader)}"
        print(f"[GPU{rank}] {line}", flush=True)
        loss_sum = train_epoch(model, train_loader, optimizer, device)
        dist.all_reduce(loss_sum)
        train_loss = loss_sum.item() / sampler.total_size  # item() waits for the device
        rate = sampler.total_size / (time.perf_counter() - start)
        if (epoch + 1) % args.save_every == 0 or epoch + 1 == args.total_epochs:
            save_snapshot(args, model.module, optimizer, epoch + 1)
        for buffer in model.buffers():  # BatchNorm's differ after the last step: take rank 0's
            dist.broadcast(buffer, src=0)
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
    train(args, device)  # frees its DDP object on return, before the group ends
    dist.destroy_process_group()


def parse_args():
    parser = argparse.ArgumentParser(usage="%(prog)s [total_epochs] [save_every] [options]")
    add = parser.add_argument
    add("total_epochs", nargs="?", type=int, default=5, help="how many epochs to train")
    add("save_every", nargs="?", type=int, default=1, help="epochs between two snapshots")
    add("--batch-size", "--batch_size", type=int, default=32, help="samples per process and step")
    add("--lr", type=float, default=0.01, help="learning rate of SGD")
    add("--momentum", type=float, default=0.9, help="momentum of SGD")
    add("--dataset", choices=DATASETS, default="digits", help="digits needs no download")
    add("--data-dir", default="data", help="where the others are, or are downloaded to")
    add("--model", choices=MODELS, help="by default, the data set's own")
    add("--seed", type=int, default=42, help="of weights, order and dropout")
    add("--num-workers", type=int, default=0, help="processes that load data, per rank")
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    add("--device", choices=devices, default=devices[0])
    add("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # of torch.distributed.launch
    add("--backend", help="by default nccl for GPUs, and gloo for CPUs and on Windows")
    add("--snapshot-path", default="checkpoint.pt", help="the file to save")
    add("--resume", action="store_true", help="continue from the snapshot, if it exists")
    args = parser.parse_args()
    nccl = args.device == "cuda" and dist.is_nccl_available()
    args.backend = args.backend or ("nccl" if nccl else "gloo")
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it with torchrun --nproc_per_node=2 ddp_torchrun.py")
    if os.environ["RANK"] == "0" and os.path.exists(args.snapshot_path) and not args.resume:
        parser.error(f"{args.snapshot_path} exists: continue with --resume, or delete it")
    os.makedirs(os.path.dirname(args.snapshot_path) or ".", exist_ok=True)
    return args


if __name__ == "__main__":
    main(parse_args())
