"""The template of docs/your_loop.md. `torchrun --nproc_per_node=gpu docs/real_run.py` starts it.

It saves snapshot.pt after each epoch, and resumes from it. Delete the file to start over.
"""

import contextlib
import math
import os
import time

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group is created: imported later, it would keep it alive
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

EPOCHS = 5
GLOBAL_BATCH = 64  # samples in a step, if ranks * ACCUMULATE divide it
ACCUMULATE = 2  # micro-batches in a step
LR = 0.1
WARM_UP = 20  # steps
MAX_NORM = 1.0  # of the gradient
LOG_EVERY = 10  # steps


def make_data(count, seed):
    inputs = torch.randn(count, 20, generator=torch.Generator().manual_seed(seed))
    targets = (inputs.sum(dim=1) > 0).long()
    return TensorDataset(inputs, targets)


rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(42)
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
train_set, test_set = make_data(1000, seed=1), make_data(303, seed=2)
sampler = DistributedSampler(train_set)
batch_size = GLOBAL_BATCH // world_size // ACCUMULATE  # of a micro-batch
full_step = ACCUMULATE * batch_size  # this rank's samples in a step
train_loader = DataLoader(train_set, batch_size=batch_size, sampler=sampler)
test_shard = Subset(test_set, range(rank, len(test_set), world_size))
test_loader = DataLoader(test_shard, batch_size=100)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
model = DDP(model)  # device_ids would only move inputs
autocast = torch.autocast(device.type, torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
total_steps = EPOCHS * math.ceil(len(train_loader) / ACCUMULATE)


def lr_factor(done):  # done: the steps of all epochs so far
    if done < WARM_UP:
        return (done + 1) / WARM_UP
    progress = (done - WARM_UP) / max(1, total_steps - WARM_UP)
    return (1 + math.cos(math.pi * progress)) / 2


schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
first_epoch = 0
if os.path.exists("snapshot.pt"):
    snapshot = torch.load("snapshot.pt", map_location="cpu")
    model.module.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    schedule.load_state_dict(snapshot["schedule"])
    first_epoch = snapshot["epoch"]
    print(f"[rank {rank}] resuming at epoch {first_epoch}")

for epoch in range(first_epoch, EPOCHS):
    model.train()
    sampler.set_epoch(epoch)  # a new order in each epoch, the same in each run
    torch.manual_seed(1000 * epoch + rank)  # different dropout on each rank, the same in each run
    start, count, loss_sum = time.perf_counter(), 0, torch.zeros((), device=device)
    for number, (inputs, targets) in enumerate(train_loader, start=1):
        inputs, targets = inputs.to(device), targets.to(device)
        step = math.ceil(number / ACCUMULATE)  # of this epoch
        last = number % ACCUMULATE == 0 or number == len(train_loader)  # the step's last one
        step_size = min(full_step, len(sampler) - (step - 1) * full_step)
        sync = contextlib.nullcontext() if last else model.no_sync()
        with sync:
            with autocast:
                loss = F.cross_entropy(model(inputs), targets)
            (loss * len(targets) / step_size).backward()
        if last:
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            lr = schedule.get_last_lr()[0]  # of this step
            schedule.step()
            optimizer.zero_grad()
        count += len(targets) * world_size
        loss_sum += loss.detach() * len(targets)
        if last and (step % LOG_EVERY == 0 or number == len(train_loader)):
            dist.all_reduce(loss_sum)
            if rank == 0:
                line = f"epoch {epoch}, step {step}: loss {loss_sum.item() / count:.4f}"
                rate = count / (time.perf_counter() - start)  # item() has waited for the GPU
                line += f" | lr {lr:.4f} | gradient norm {norm:.3f} | {rate:.0f} samples/s"
                memory = torch.cuda.max_memory_allocated() >> 20  # the peak; 0 on a CPU
                print(f"{line} | {memory} MiB")
            start, count, loss_sum = time.perf_counter(), 0, torch.zeros((), device=device)
    model.eval()
    for buffer in model.module.buffers():  # such as BatchNorm's statistics, which differ by rank
        dist.broadcast(buffer, src=0)
    sums = torch.zeros(2, device=device)  # of the losses, and of the correct answers
    with torch.no_grad():
        for inputs, targets in test_loader:
            inputs, targets = inputs.to(device), targets.to(device)
            with autocast:
                outputs = model.module(inputs)
                sums[0] += F.cross_entropy(outputs, targets, reduction="sum")
            sums[1] += (outputs.argmax(dim=1) == targets).sum()
    dist.all_reduce(sums)
    if rank == 0:
        test_loss = sums[0] / len(test_set)
        print(f"epoch {epoch}: {sums[1]:.0f} of {len(test_set)}, test loss {test_loss:.4f}")
        snapshot = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        snapshot["schedule"] = schedule.state_dict()
        torch.save({**snapshot, "epoch": epoch + 1}, "snapshot.pt.tmp")
        os.replace("snapshot.pt.tmp", "snapshot.pt")  # a crash leaves the old one or the new one

del model  # otherwise DDP keeps the group, whose threads may hang or abort Python at exit
dist.destroy_process_group()
