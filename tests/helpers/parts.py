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
    """ddp_setup() as main() calls it in this process of a call, of which no other is on the host.

    ddp_torchrun.py takes its number from the environment.
    """
    if module.__name__ == "ddp_torchrun":
        return module.ddp_setup(args)
    args.store = "output-store"
    if module.__name__ == "ddp_spawn":
        return module.ddp_setup(number, args)
    args.local_world_size = args.nproc_per_node
    return module.ddp_setup(args.rank * args.nproc_per_node + number, number, args)


def two_devices(self: torch.nn.DataParallel, module: torch.nn.Module) -> None:
    torch.nn.Module.__init__(self)
    self.module, self.device_ids = module, [0, 1]
