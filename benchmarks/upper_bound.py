"""What the machine can do: nothing but compute on batches that lie ready, and one all-reduce.

    python upper_bound.py EPOCHS --data-dir DIR                 forward, backward, update
    torchrun --nproc_per_node=2 upper_bound.py EPOCHS --data-dir DIR --all-reduce   one model

With --all-reduce the gradients are copied to one flat tensor after the backward pass, and averaged
by one call; with --accumulate 8, after every eighth.
"""

import argparse
import os
import time

import peers
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import BatchSampler, DistributedSampler

from common.model import build_model
from common.seed import set_seed


def all_reduce(parameters: list[torch.Tensor], flat: torch.Tensor) -> None:
    torch.cat([parameter.grad.flatten() for parameter in parameters], out=flat)
    dist.all_reduce(flat)
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)


def main(rank: int, world_size: int, args: argparse.Namespace) -> None:
    if "OMP_NUM_THREADS" not in os.environ:  # torchrun sets it
        torch.set_num_threads(max(1, torch.get_num_threads() // world_size))
    peers.ddp_setup(rank, world_size, args.device)
    train_set, test_set = peers.load_data(args)
    set_seed(args.seed)  # the scripts' first weights
    model = build_model(args.model, args.dataset).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    shard = DistributedSampler(train_set, world_size, rank, seed=args.seed)
    sampler = BatchSampler(shard, args.batch_size, drop_last=False)
    batches = [[part.to(args.device) for part in train_set.__getitems__(i)[0]] for i in sampler]
    parameters = list(model.parameters())
    flat = torch.empty(sum(p.numel() for p in parameters), device=args.device)
    share = 1 / args.accumulate / (world_size if args.all_reduce else 1)  # so sums are averages

    for epoch in range(args.total_epochs):
        model.train()
        if world_size > 1:
            dist.barrier()  # the others may still be starting
        start = time.perf_counter()
        for step, (source, targets) in enumerate(batches, start=1):
            (share * F.cross_entropy(model(source), targets)).backward()
            if step % args.accumulate:
                continue
            if args.all_reduce:
                all_reduce(parameters, flat)
            optimizer.step()
            optimizer.zero_grad()
        peers.end_epoch(args, epoch, model, start, len(train_set), test_set if rank == 0 else None)


if __name__ == "__main__":
    args = peers.parse_args()
    args.our_data = True  # the batches that lie ready are those of our data set
    peers.launch(main, args)
