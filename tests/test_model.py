"""common/model.py: the models are the tutorials', and take images of any size."""

import pytest
import torch
from torch import nn

from common.model import DEFAULT_MODEL, MODELS, build_model


@pytest.mark.parametrize("name", MODELS)
def test_a_model_takes_any_image_and_returns_logits(name):
    for shape in ((1, 28, 28), (3, 32, 32), (3, 40, 40)):
        logits = build_model(name, shape)(torch.randn(4, *shape))
        assert logits.shape == (4, 10) and (logits < 0).any()
        assert not torch.allclose(logits.exp().sum(1), torch.ones(4))  # no softmax


def test_models_are_those_of_the_tutorials():
    widths = {name: [p.shape[0] for p in MODELS[name]().parameters()] for name in ("mlp", "lenet")}
    assert widths["mlp"][::2] == [512, 512, 10] and widths["lenet"][::2] == [6, 16, 120, 84, 10]
    assert any(isinstance(module, nn.BatchNorm2d) for module in MODELS["resnet18"]().modules())
    assert any(isinstance(module, nn.Dropout) for module in MODELS["convnet"]().modules())
    defaults = {"digits": "convnet", "mnist": "convnet", "fashion-mnist": "mlp", "cifar10": "lenet"}
    assert defaults == DEFAULT_MODEL
