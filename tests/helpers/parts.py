"""What tests of parts of the scripts share."""

import argparse
from types import ModuleType

import pytest
import torch

from helpers.jobs import SCRIPTS

CPU = torch.device("cpu")

every_script = pytest.mark.parametrize("script", SCRIPTS)

every_ddp_script = pytest.mark.parametrize("script", SCRIPTS[2:])


def inner(trainer: object) -> torch.nn.Module:
    return getattr(trainer.model, "module", trainer.model)


def set_up(module: ModuleType, args: argparse.Namespace, number: int = 0) -> torch.device:
    """ddp_setup() as main() calls it in the process of this number.

    ddp_torchrun.py takes its number from the environment.
    """
    args.store = "output-store"
    return module.ddp_setup(*([] if module.__name__ == "ddp_torchrun" else [number]), args)
