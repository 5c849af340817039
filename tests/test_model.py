"""common/model.py: the models are the tutorials'."""

import pytest
import torch
from torch import nn

from common.model import DEFAULT_MODEL, MODELS, build_model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 40, 40)])
def test_model_takes_any_image_and_returns_logits(name, shape):
    model = build_model(name, shape)
    logits = model(torch.randn(4, *shape))
    assert logits.shape == (4, 10)
    assert (logits < 0).any() and not torch.allclose(logits.exp().sum(1), torch.ones(4))
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_models_are_those_of_the_tutorials():
    assert [p.shape[0] for p in MODELS["mlp"]().parameters() if p.ndim == 2] == [512, 512, 10]
    lenet = [p.shape[0] for p in MODELS["lenet"]().parameters() if p.ndim > 1]
    assert lenet == [6, 16, 120, 84, 10]
    assert any(isinstance(m, nn.BatchNorm2d) for m in MODELS["resnet18"]().modules())
    assert any(isinstance(m, nn.Dropout) for m in MODELS["convnet"]().modules())
    assert DEFAULT_MODEL.keys() == {"digits", "mnist", "fashion-mnist", "cifar10"}
