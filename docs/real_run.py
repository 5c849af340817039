"""Train on all GPUs: torchrun --nproc_per_node=gpu real_run.py (docs/your_loop.md explains it)."""

import contextlib
import math
import os
import time

import torch
import torch.distributed as dist
import torch.distributed.nn  # before init_process_group: see "The end" in docs/your_loop.md
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

SNAPSHOT = "real_run.pt"  # saved after each epoch; delete it to start over
SEED = 42
EPOCHS = 5
GLOBAL_BATCH = 64  # samples in a step, on all ranks together
ACCUMULATE = 1  # micro-batches in a step: more if a batch does not fit into memory
LR = 0.1
WARM_UP = 20  # steps: at least 1
LOG_EVERY = 10  # steps
WORKERS = 0  # spawned processes per loader and rank: try 4 for files


def make_data(count, seed):  # your data
    inputs = torch.randn(count, 20, generator=torch.Generator().manual_seed(seed))
    targets = (inputs.sum(dim=1) > 0).long()
    return TensorDataset(inputs, targets)


def main():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(SEED)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train_set, test_set = make_data(1000, seed=1), make_data(303, seed=2)  # your data
    sampler = DistributedSampler(train_set, seed=SEED)
    batch_size, rest = divmod(GLOBAL_BATCH, world_size * ACCUMULATE)  # of a micro-batch
    assert rest == 0, f"set {GLOBAL_BATCH=} to a multiple of {world_size} ranks * {ACCUMULATE=}"
    full_step = ACCUMULATE * batch_size  # this rank's samples in a step
    workers = {"persistent_workers": True, "multiprocessing_context": "spawn"} if WORKERS else {}
    options = {"num_workers": WORKERS, "pin_memory": device.type == "cuda", **workers}
    train_loader = DataLoader(train_set, batch_size=batch_size, sampler=sampler, **options)
    test_shard = Subset(test_set, range(rank, len(test_set), world_size))
    test_loader = DataLoader(test_shard, batch_size=batch_size, **options)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)  # your model
    model = DDP(model)  # needs no device_ids, because the loop moves the inputs itself
    autocast = torch.autocast(device.type, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)  # your optimizer
    total_steps = EPOCHS * math.ceil(len(train_loader) / ACCUMULATE)
    warm_up = LinearLR(optimizer, start_factor=1 / WARM_UP, total_iters=WARM_UP)
    cosine = CosineAnnealingLR(optimizer, T_max=max(1, total_steps - WARM_UP))
    schedule = SequentialLR(optimizer, [warm_up, cosine], milestones=[WARM_UP])  # your schedule
    parts = {"model": model.module, "optimizer": optimizer, "schedule": schedule}  # of a snapshot
    settings = {"SEED": SEED, "EPOCHS": EPOCHS, "LR": LR, "WARM_UP": WARM_UP, "steps": total_steps}
    first_epoch, epochs = 0, [None] * world_size  # epochs: first_epoch of each rank
    if os.path.exists(SNAPSHOT):
        snapshot = torch.load(SNAPSHOT, map_location="cpu")
        assert snapshot["settings"] == settings, f"delete {SNAPSHOT}, or set {snapshot['settings']}"
        for name, part in parts.items():
            part.load_state_dict(snapshot[name])
        first_epoch, snapshot = snapshot["epoch"], None  # frees its memory
    print(f"[rank {rank} of {world_size}] {device}, epoch {first_epoch} of {EPOCHS}", flush=True)
    dist.all_gather_object(epochs, first_epoch)
    assert min(epochs) == max(epochs), f"{SNAPSHOT} is not the same on all ranks: {epochs} epochs"
    for epoch in range(first_epoch, EPOCHS):
        model.train()
        sampler.set_epoch(epoch)  # a new order in each epoch, the same in each run
        torch.manual_seed(SEED + 1000 * epoch + rank)  # different dropout in each epoch and rank
        start, count, loss_sum = time.perf_counter(), 0, torch.zeros((), device=device)
        for number, (inputs, targets) in enumerate(train_loader, start=1):
            inputs, targets = inputs.to(device), targets.to(device)  # your inputs
            step = math.ceil(number / ACCUMULATE)  # of this epoch
            last = number % ACCUMULATE == 0 or number == len(train_loader)  # the step's last one
            step_samples = min(full_step, len(sampler) - (step - 1) * full_step)
            with contextlib.nullcontext() if last else model.no_sync():
                with autocast:
                    loss = F.cross_entropy(model(inputs), targets)  # your inputs, your loss
                (loss * len(targets) / step_samples).backward()
            if last:
                norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)  # your limit
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
                    rate = count / (time.perf_counter() - start)  # .item() has waited for the GPU
                    line += f" | lr {lr:.4f} | gradient norm {norm:.3f} | {rate:.0f} samples/s"
                    print(f"{line} | {torch.cuda.max_memory_allocated() >> 20} MiB", flush=True)
                start, count, loss_sum = time.perf_counter(), 0, torch.zeros((), device=device)
        model.eval()
        for buffer in model.module.buffers():  # BatchNorm's differ since the last forward pass
            dist.broadcast(buffer, src=0)
        sums = torch.zeros(2, device=device, dtype=torch.float64)  # losses, correct answers
        with torch.no_grad():
            for inputs, targets in test_loader:
                inputs, targets = inputs.to(device), targets.to(device)  # your inputs
                with autocast:
                    outputs = model.module(inputs)  # your inputs
                    sums[0] += F.cross_entropy(outputs, targets) * len(targets)  # your loss
                sums[1] += (outputs.argmax(dim=1) == targets).sum()  # your metric
        dist.all_reduce(sums)
        assert sums.isfinite().all(), f"epoch {epoch}: the test loss is {sums[0]}, nothing is saved"
        if rank == 0:
            line = f"epoch {epoch}: {sums[1]:.0f} of {len(test_set)}"
            print(f"{line}, test loss {sums[0] / len(test_set):.4f}", flush=True)
            snapshot = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**snapshot, "settings": settings, "epoch": epoch + 1}, f"{SNAPSHOT}.tmp")
            os.replace(f"{SNAPSHOT}.tmp", SNAPSHOT)  # a crash leaves the old or the new one


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # after main(), because the DDP object must be freed first
