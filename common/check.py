"""Is the network fast enough? What `multinode.py --check` measures in place of training."""

import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only


def check(trainer: Any) -> None:
    """Time a step and an all-reduce of the gradient's size, and print on rank 0 what follows.

    Five times each, the median: the step of the slowest rank, without its all-reduce, and the
    all-reduce alone. GB/s is what each rank sends where the ranks are a ring: 2 (n - 1) / n times
    the gradient's size. All ranks must call this.

    Args:
        trainer: has `model` (DDP), `device`, `world_size`, `train_data` (yields (source,
            targets)) and `_run_batch(source, targets, count) -> loss`. Its weights change.

    Raises:
        SystemExit: a sum that an all-reduce has made is wrong.

    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    device = trainer.device
    rank, world_size = dist.get_rank(), trainer.world_size
    trainer.model.train()
    batch = next(iter(trainer.train_data))
    source, targets = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), batch)
    count = sum(parameter.numel() for parameter in trainer.model.parameters())
    gradient = torch.full((count,), rank + 1.0, device=device)
    dist.all_reduce(gradient)
    wrong = (gradient != world_size * (world_size + 1) / 2).sum()
    dist.all_reduce(wrong)
    seconds = torch.empty(6, 2, device=device)
    for row in seconds:
        dist.barrier()
        start = time.perf_counter()
        with trainer.model.no_sync():
            trainer._run_batch(source, targets, len(targets) * world_size).item()
        row[0] = time.perf_counter() - start
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(gradient)
        gradient[0].item()  # waits for the device
        row[1] = time.perf_counter() - start
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)  # a step waits for the slowest rank
    rows = seconds[1:].tolist()  # the first one warms up
    compute = statistics.median(row[0] for row in rows)
    reduce = statistics.median(row[1] for row in rows)
    size = count * gradient.element_size()
    sent = 2 * (world_size - 1) / world_size * size / reduce / 1e9
    steps = len(trainer.train_data)
    share = f"{reduce / (compute + reduce):.0%} of the step for the all-reduce"
    epoch = steps * (compute + reduce)
    if rank == 0:
        print(f"All-reduce | {size / 1e6:.2f} MB | {reduce * 1e3:.2f} ms | {sent:.4f} GB/s")
        print(f"Step | {compute * 1e3:.2f} ms to compute, {share}")
        print(f"Epoch | {steps} steps | about {epoch:.1f} s", flush=True)
    if wrong:
        sys.exit(f"error: {wrong.item()} of {world_size * count} sums of the all-reduce are wrong")
