"""What the programs beside ours share, so that each of them shows its loop and little else."""

import argparse
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import Dataset
from torchvision.datasets import FashionMNIST
from torchvision.transforms import ToTensor

from common.data import load_dataset


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("total_epochs", type=int)
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


def load_data(args: argparse.Namespace) -> tuple[Dataset, Dataset, Callable | None]:
    """Training set, test set and the loader's collate_fn.

    The sets are torchvision's: PIL images, made tensors one at a time. With --our-data they are in
    memory and come a batch at a time, as in our scripts.
    """
    if args.our_data:
        return *load_dataset("fashion-mnist", args.data_dir), tuple
    folder, convert = args.data_dir, ToTensor()
    train_set = FashionMNIST(folder, train=True, transform=convert)
    return train_set, FashionMNIST(folder, train=False, transform=convert), None


def normalize(args: argparse.Namespace, images: torch.Tensor) -> torch.Tensor:
    """What our data set does to its images, for the same accuracy after the same steps.

    On a whole batch: torchvision's Normalize on each sample would cost the peers more.
    """
    return images if args.our_data else (images - 0.2860) / 0.3530


@torch.no_grad()
def print_epoch(
    args: argparse.Namespace, epoch: int, model: nn.Module, test_set: Dataset, rate: float
) -> None:
    """The end of our scripts' epoch lines. `model` is the unwrapped one. The clock has stopped."""
    model.eval()
    total = len(test_set)
    if args.our_data:
        images, targets = test_set.__getitems__(range(total))
    else:
        images, targets = normalize(args, test_set.data.unsqueeze(1) / 255), test_set.targets
    correct = (model(images.to(args.device)).argmax(dim=1).cpu() == targets).sum().item()
    accuracy = f"Accuracy: {correct}/{total} ({correct / total:.2%})"
    # One write: other processes print, too.
    print(f"Epoch {epoch} | {accuracy} | {rate:.0f} samples/s\n", end="", flush=True)
