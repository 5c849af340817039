"""A small transformer beside the models that the scripts have, for the GPU's benchmarks.

    torchrun --nproc_per_node=2 benchmarks/vit.py SCRIPT --model vit [the script's options]

It runs any script that takes its model from common/model.py, but for mp.spawn with several
processes: these would not know the model.
"""

import runpy
import sys

import torch
from torch import nn

from common.model import MODELS


class ViT(nn.Module):
    """Images (N, C, size, size) in patches of 4x4, six layers, 10.7 million weights -> (N, 10).

    https://arxiv.org/abs/2010.11929, without the class token: the mean over all patches instead.
    """

    def __init__(self, channels: int = 1, size: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, 384, kernel_size=4, stride=4)
        self.positions = nn.Parameter(torch.zeros((size // 4) ** 2, 384))
        layer = nn.TransformerEncoderLayer(
            384, nhead=6, dim_feedforward=1536, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers=6, enable_nested_tensor=False)
        self.head = nn.Linear(384, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.layers(tokens).mean(dim=1))


if __name__ == "__main__":
    MODELS["vit"] = ViT
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
