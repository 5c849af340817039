"""The models of the tutorials. Each takes (N, C, size, size) and returns logits (N, 10)."""

import copy

import torch
from torch import nn
from torch.utils.data import Dataset

from common.data import DataError, import_torchvision


class MLP(nn.Module):
    """The Fashion-MNIST quickstart's network: C x size x size -> 512 -> 512 -> 10.

    https://docs.pytorch.org/tutorials/beginner/basics/quickstart_tutorial.html
    """

    def __init__(self, channels: int = 1, size: int = 28, classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(channels * size * size, 512),
            nn.ReLU(),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class ConvNet(nn.Module):
    """The MNIST posts' network: two 5x5 convolutions, pooling, dropout, two linear layers.

    The first linear layer is as wide as the image size asks for (320 for 28x28), not a constant.
    """

    def __init__(self, channels: int = 1, size: int = 28, classes: int = 10) -> None:
        super().__init__()
        side = ((size - 4) // 2 - 4) // 2  # each: a 5x5 convolution takes 4, pooling halves
        self.features = nn.Sequential(
            nn.Conv2d(channels, 16, kernel_size=5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=5),
            nn.MaxPool2d(2),
            nn.ReLU(),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(32 * side * side, 128),
            nn.ReLU(),
            nn.Dropout(0.25),
            nn.Linear(128, classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x))


class LeNet(nn.Module):
    """The CIFAR-10 tutorial's network: 3 -> 6 -> 16 channels, then 120, 84, 10.

    https://docs.pytorch.org/tutorials/beginner/blitz/cifar10_tutorial.html
    """

    def __init__(self, channels: int = 3, size: int = 32, classes: int = 10) -> None:
        super().__init__()
        side = ((size - 4) // 2 - 4) // 2
        self.features = nn.Sequential(
            nn.Conv2d(channels, 6, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(16 * side * side, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x))


def resnet18(channels: int = 3, size: int = 32, classes: int = 10) -> nn.Module:
    """torchvision's ResNet-18, untrained, for 1 or 3 channels: the model with BatchNorm.

    Its last feature map is 1x1 for images of up to 32x32: see `check_batch_norm`. Any `size` will
    do. https://arxiv.org/abs/1512.03385

    Raises:
        DataError: torchvision is missing or does not match torch.
    """
    model = import_torchvision().models.resnet18(num_classes=classes)
    if channels != 3:
        model.conv1 = nn.Conv2d(channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
    return model


MODELS = {"mlp": MLP, "convnet": ConvNet, "lenet": LeNet, "resnet18": resnet18}
DEFAULT_MODEL = {
    "digits": "convnet",
    "mnist": "convnet",
    "fashion-mnist": "mlp",
    "cifar10": "lenet",
}


def build_model(name: str, image_shape: tuple[int, int, int]) -> nn.Module:
    """A model of `MODELS` for images of shape (C, size, size), weights drawn from torch's RNG."""
    channels, size, _ = image_shape
    return MODELS[name](channels, size)


def check_batch_norm(model: nn.Module, smallest: int, dataset: Dataset) -> None:
    """Refuse a model with BatchNorm that cannot train on the smallest batch that there will be.

    BatchNorm normalises by the mean and variance of what a process has in one forward pass. Of
    one sample with a 1x1 feature map there is no variance, and torch raises. Whether that will be
    so is seen by trying: a copy of the model on the first sample, if it takes that as it is.

    Args:
        smallest: samples of the smallest forward pass of any process.
        dataset: gives (input, target).

    Raises:
        DataError: it would raise, or there would be no sample at all.
    """
    batch_norm = nn.modules.batchnorm._BatchNorm
    if smallest > 1 or not any(isinstance(module, batch_norm) for module in model.modules()):
        return
    fits = smallest == 1
    try:
        device = next(model.parameters()).device
        copy.deepcopy(model).train()(dataset[0][0].unsqueeze(0).to(device))
    except ValueError as error:
        fits = "more than 1 value" not in str(error)
    except Exception:  # it takes other inputs than one tensor: training will tell
        pass
    if not fits:
        raise DataError(
            f"BatchNorm needs 2 samples or more a process at a time, and the smallest batch has "
            f"{smallest}: use a larger --batch-size, or fewer processes"
        )
