"""What a user would otherwise run: the same training by the tutorials' loop, with Lightning Fabric
and with Accelerate, as their documentation shows it. The threads are left alone.

    python peers.py EPOCHS --data-dir DIR --nproc-per-node 2                mp.spawn and DDP
    python peers.py EPOCHS --data-dir DIR --nproc-per-node 2 --by fabric    Fabric starts processes
    torchrun --nproc_per_node=2 peers.py EPOCHS --data-dir DIR --by accelerate

(`accelerate launch` starts several processes on CPUs through MPI only.)
After https://docs.pytorch.org/tutorials/beginner/ddp_series_intro.html,
https://lightning.ai/docs/fabric/stable/fundamentals/convert.html and
https://huggingface.co/docs/accelerate/basic_tutorials/migration
"""

import argparse
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.datasets import FashionMNIST
from torchvision.transforms import ToTensor

from common.data import load_dataset
from common.model import build_model


def with_ddp(rank: int, world_size: int, args: argparse.Namespace, train_data: DataLoader) -> tuple:
    ddp_setup(rank, world_size, args.device)
    torch.manual_seed(args.seed)
    model, optimizer = build(args)
    model.to(args.device)
    model = DDP(model) if world_size > 1 else model
    return model, optimizer, train_data, torch.Tensor.backward, rank == 0


def with_fabric(args: argparse.Namespace, train_data: DataLoader) -> tuple:
    from lightning_fabric import Fabric

    count = int(os.environ.get("WORLD_SIZE", args.nproc_per_node))
    strategy = "ddp" if count > 1 else "auto"
    fabric = Fabric(accelerator=args.device, devices=count, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(args.seed, verbose=False)
    model, optimizer = fabric.setup(*build(args))
    train_data = fabric.setup_dataloaders(train_data)
    return model, optimizer, train_data, fabric.backward, fabric.is_global_zero


def with_accelerate(args: argparse.Namespace, train_data: DataLoader) -> tuple:
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    accelerator = Accelerator(cpu=args.device == "cpu")
    set_seed(args.seed)
    model, optimizer, train_data = accelerator.prepare(*build(args), train_data)
    return model, optimizer, train_data, accelerator.backward, accelerator.is_main_process


def build(args: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build_model(args.model, args.dataset)
    return model, torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)


def main(rank: int, world_size: int, args: argparse.Namespace) -> None:
    train_set, test_set = load_data(args)
    sampler = None
    if args.by == "ddp" and world_size > 1:
        sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed)
    pin = args.device != "cpu"
    train_data = DataLoader(train_set, args.batch_size, sampler is None, sampler, pin_memory=pin)
    if args.by == "fabric":
        prepared = with_fabric(args, train_data)
    elif args.by == "accelerate":
        prepared = with_accelerate(args, train_data)
    else:
        prepared = with_ddp(rank, world_size, args, train_data)
    model, optimizer, train_data, backward, first = prepared

    for epoch in range(args.total_epochs):
        model.train()
        if sampler:
            sampler.set_epoch(epoch)
        if dist.is_initialized():
            dist.barrier()  # the first rank has evaluated
        start = time.perf_counter()
        for source, targets in train_data:
            source, targets = source.to(args.device), targets.to(args.device)
            optimizer.zero_grad()
            output = model(normalize(args, source))
            loss = F.cross_entropy(output, targets)
            backward(loss)
            optimizer.step()
        end_epoch(args, epoch, model, start, len(train_set), test_set if first else None)
    if args.by == "ddp" and world_size > 1:
        dist.destroy_process_group()


# --- what upper_bound.py has, too -----------------------------------------------------------------


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("total_epochs", type=int)
    parser.add_argument("--by", default="ddp", choices=["ddp", "fabric", "accelerate"])
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--dataset", default="fashion-mnist", help="another: upper_bound.py only")
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--nproc-per-node", type=int, default=1)
    parser.add_argument("--our-data", action="store_true", help="the data set of common/data.py")
    parser.add_argument("--all-reduce", action="store_true", help="upper_bound.py")
    parser.add_argument("--accumulate", type=int, default=1, help="upper_bound.py: batches a step")
    parser.set_defaults(lr=0.01, momentum=0.9, seed=42)
    return parser.parse_args()


def launch(main: Callable, args: argparse.Namespace) -> None:
    """main(rank, world_size, args) in each process: torchrun's, those of mp.spawn, or this one."""
    if "RANK" in os.environ:
        main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), args)
    elif args.nproc_per_node > 1 and args.by == "ddp":
        mp.spawn(main, (args.nproc_per_node, args), args.nproc_per_node)
    else:
        main(0, 1, args)


def ddp_setup(rank: int, world_size: int, device: str) -> None:
    if device != "cpu":
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    if world_size > 1:
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", "12355")
        backend = dist.get_default_backend_for_device(device)
        dist.init_process_group(backend, rank=rank, world_size=world_size)


def load_data(args: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """Training set and test set: torchvision's images one at a time, or as our scripts."""
    if args.our_data:
        return load_dataset(args.dataset, args.data_dir)
    return tuple(FashionMNIST(args.data_dir, train, ToTensor()) for train in (True, False))


def normalize(args: argparse.Namespace, images: torch.Tensor) -> torch.Tensor:
    """As our data set does, but on whole batches, because Normalize on each sample costs more."""
    return images if args.our_data else (images - 0.2860) / 0.3530


@torch.no_grad()
def end_epoch(
    args: argparse.Namespace, epoch: int, model: nn.Module, start: float, samples: int, test_set
) -> None:
    """Stop the clock. A rank that has a test set prints the end of our scripts' epoch lines."""
    if args.device != "cpu":
        torch.accelerator.synchronize()
    rate = samples / (time.perf_counter() - start)
    if not test_set:
        return
    model = getattr(model, "module", model)  # not through DDP
    model.eval()
    total = len(test_set)
    if args.our_data:
        ((images, targets),) = test_set.__getitems__(range(total))
    else:
        images, targets = normalize(args, test_set.data.unsqueeze(1) / 255), test_set.targets
    correct = (model(images.to(args.device)).argmax(dim=1).cpu() == targets).sum().item()
    accuracy = f"Accuracy: {correct}/{total} ({correct / total:.2%})"
    # One write: other processes print, too.
    print(f"Epoch {epoch} | {accuracy} | {rate:.0f} samples/s\n", end="", flush=True)


if __name__ == "__main__":
    launch(main, parse_args())
