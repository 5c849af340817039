"""The tutorials' loop as published: PIL images made tensors one at a time, threads left alone.

    python tutorial.py EPOCHS --data-dir DIR                      one process, no DDP
    python tutorial.py EPOCHS --data-dir DIR --nproc-per-node 2   mp.spawn, DistributedSampler, DDP

After https://docs.pytorch.org/tutorials/beginner/ddp_series_intro.html, on a CPU too.
"""

import argparse
import os
import time

import peer
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from common.model import build_model


def ddp_setup(rank: int, world_size: int, device: str) -> None:
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "12355")
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, rank=rank, world_size=world_size)


def prepare_dataloader(dataset: Dataset, collate: object, args: argparse.Namespace) -> DataLoader:
    sampler = DistributedSampler(dataset, seed=args.seed) if dist.is_initialized() else None
    return DataLoader(
        dataset,
        batch_size=args.batch_size,
        collate_fn=collate,
        pin_memory=args.device != "cpu",
        shuffle=sampler is None,
        sampler=sampler,
    )


class Trainer:
    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self.args, self.rank = args, rank
        self.train_set, self.test_set, collate = peer.load_data(args)
        self.train_data = prepare_dataloader(self.train_set, collate, args)
        torch.manual_seed(args.seed)
        self.module = build_model(args.model, (1, 28, 28)).to(args.device)
        self.model = DDP(self.module) if dist.is_initialized() else self.module
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=args.lr, momentum=args.momentum
        )

    def _run_batch(self, source: torch.Tensor, targets: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        output = self.model(peer.normalize(self.args, source))
        loss = F.cross_entropy(output, targets)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch: int) -> None:
        if dist.is_initialized():
            self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            source, targets = source.to(self.args.device), targets.to(self.args.device)
            self._run_batch(source, targets)

    def train(self, total_epochs: int) -> None:
        for epoch in range(total_epochs):
            self.model.train()
            start = time.perf_counter()
            self._run_epoch(epoch)
            if self.args.device != "cpu":
                torch.accelerator.synchronize()
            rate = len(self.train_set) / (time.perf_counter() - start)
            if self.rank == 0:
                peer.print_epoch(self.args, epoch, self.module, self.test_set, rate)


def main(rank: int, world_size: int, args: argparse.Namespace) -> None:
    if args.device != "cpu":
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    if world_size > 1:
        ddp_setup(rank, world_size, args.device)
    Trainer(args, rank).train(args.total_epochs)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    args = peer.parse_args()
    if args.nproc_per_node > 1:
        mp.spawn(main, (args.nproc_per_node, args), args.nproc_per_node)
    else:
        main(0, 1, args)
