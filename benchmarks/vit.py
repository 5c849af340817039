"""A small transformer, and three ways to be faster that no script has: for the GPU's benchmarks.

    torchrun --nproc_per_node=2 benchmarks/vit.py --tf32 --fused SCRIPT --model vit

It runs any script that takes its model from common/model.py, but for mp.spawn with several
processes: these would know nothing of it.
"""

import functools
import runpy
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common.model


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


def channels_last() -> None:
    """Convolutions take this layout from the weights, whatever that of the images is."""
    build = common.model.build_model
    common.model.build_model = lambda *how: build(*how).to(memory_format=torch.channels_last)


def fused() -> None:
    torch.optim.SGD.__init__ = functools.partialmethod(torch.optim.SGD.__init__, fused=True)


SWITCHES = {
    "--tf32": functools.partial(torch.set_float32_matmul_precision, "high"),
    "--channels-last": channels_last,
    "--fused": fused,
}

if __name__ == "__main__":
    common.model.MODELS["vit"] = ViT
    sys.argv.pop(0)
    while sys.argv[0] in SWITCHES:
        SWITCHES[sys.argv.pop(0)]()
    runpy.run_path(sys.argv[0], run_name="__main__")
