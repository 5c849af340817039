"""What benchmarks/gpu.py trains, because the scripts' own models would leave a GPU mostly idle.

REHEARSE=1 makes both so small that a CPU can train them.
"""

import functools
import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset
from torchvision.models import resnet50

from common.data import ImageDataset, WholeBatch
from common.model import LeNet

TINY = bool(os.environ.get("REHEARSE"))
WORDS, LENGTH, WIDTH, HEADS, LAYERS = (256, 32, 32, 2, 2) if TINY else (50257, 1024, 768, 12, 12)
SIZE = 32 if TINY else 224


class GPT(nn.Module):
    """GPT-2's smallest, 124 million weights: tokens (N, length) -> logits (N, words, length).

    https://github.com/openai/gpt-2/blob/master/src/model.py
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        options = {"activation": "gelu", "batch_first": True, "norm_first": True}
        block = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, **options)
        norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.TransformerEncoder(block, LAYERS, norm, enable_nested_tensor=False)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight
        x = self.blocks(x, self.mask, is_causal=True)
        return F.linear(x, self.tokens.weight).transpose(1, 2)


class Texts(TensorDataset):
    """Like the scripts' data sets, it gives whole batches."""

    def __getitems__(self, indices: list[int]) -> list[WholeBatch]:
        return [WholeBatch(self[indices])]


NETWORKS = {"resnet50": lambda: LeNet(classes=1000) if TINY else resnet50(), "gpt": GPT}
BATCH = dict.fromkeys(NETWORKS, 2) if TINY else {"resnet50": 64, "gpt": 8}  # samples per device


def build(name: str, *_: object) -> nn.Module:
    """In place of common.model.build_model, which knows only images."""
    return NETWORKS[name]()


@functools.cache  # of a gigabyte with eight devices
def random_data(name: str, count: int) -> Dataset:
    """`count` images (3, 224, 224) of 1000 classes, or texts with the next token of each token."""
    generator = torch.Generator().manual_seed(0)
    if name == "gpt":
        texts = torch.randint(WORDS, (count, LENGTH + 1), generator=generator)
        return Texts(texts[:, :-1], texts[:, 1:])
    pixels = torch.randint(256, (count, 3, SIZE, SIZE), dtype=torch.uint8, generator=generator)
    targets = torch.randint(1000, (count,), generator=generator)
    return ImageDataset(pixels, targets, (0.5,) * 3, (0.3,) * 3)
