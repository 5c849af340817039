"""A small transformer for tools/gpu.py, because the scripts' models are small or convolve."""

import torch
from torch import nn


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
