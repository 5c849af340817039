"""What tests of parts of the scripts share."""

import pytest
import torch

from helpers.jobs import SCRIPTS

CPU = torch.device("cpu")

every_script = pytest.mark.parametrize("script", SCRIPTS)

every_ddp_script = pytest.mark.parametrize("script", SCRIPTS[2:])

every_torchrun_script = pytest.mark.parametrize("script", SCRIPTS[3:])


def inner(trainer: object) -> torch.nn.Module:
    return getattr(trainer.model, "module", trainer.model)


def two_devices(self: torch.nn.DataParallel, module: torch.nn.Module) -> None:
    torch.nn.Module.__init__(self)
    self.module, self.device_ids = module, [0, 1]


class Made(Exception):
    pass


def made(seen: dict, *given: object) -> None:
    seen["trainer"] = given
    raise Made
