"""common/model.py: each model takes images of any size."""

import pytest
import torch

from common.model import MODELS, build_model


@pytest.mark.parametrize("name", MODELS)
def test_a_model_takes_any_image_and_returns_logits(name):
    for shape in ((1, 28, 28), (3, 32, 32), (3, 40, 40)):
        logits = build_model(name, shape)(torch.randn(4, *shape))
        assert logits.shape == (4, 10) and (logits < 0).any()
        assert not torch.allclose(logits.exp().sum(1), torch.ones(4))  # no softmax
