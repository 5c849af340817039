"""What the tests change in the scripts from outside; Python imports it in every process started
with this folder on PYTHONPATH. The scripts know nothing of it. Each hook has a variable:

LADDER_DTYPE=float64     torch's default dtype
LADDER_RAISE=rank:step   cross_entropy raises in that rank at that call
LADDER_CPU=1             no accelerator is found, whatever the machine has (but in GPU tests)
LADDER_SLOW=rank[:s]     this rank sleeps for s or 0.3 seconds after every step of the optimizer
LADDER_TWIN=1            the first GPU stands for two, for DataParallel and for torchrun's ranks
"""

import functools
import os
import sys
import time
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

here = str(Path(__file__).parent)
spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != here])
if spec:  # the next one on the path counts, too, which may be that of a simulated accelerator
    spec.loader.exec_module(module_from_spec(spec))
hooks = {name[7:]: value for name, value in os.environ.items() if name.startswith("LADDER_")}
# multiprocessing's resource tracker is a Python process, too, and needs none of this.
if hooks and not any("resource_tracker" in word for word in sys.orig_argv):
    import torch

    if "CPU" in hooks:
        for module in (torch.accelerator, torch.cuda):
            module.is_available = lambda: False
            module.device_count = lambda: 0

    if "DTYPE" in hooks:
        torch.set_default_dtype(getattr(torch, hooks["DTYPE"]))

    if "RAISE" in hooks:
        import torch.distributed as dist
        import torch.nn.functional as F

        rank, left = map(int, hooks["RAISE"].split(":"))
        cross_entropy = F.cross_entropy

        def failing(*args, **kwargs):
            global left
            left -= 1
            if left == 0 and rank == (dist.get_rank() if dist.is_initialized() else 0):
                raise ArithmeticError("the test's own error")
            return cross_entropy(*args, **kwargs)

        F.cross_entropy = failing

    if "SLOW" in hooks:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        slow_rank, seconds = hooks["SLOW"].partition(":")[::2]

        def sleep(*_: object) -> None:
            if torch.distributed.get_rank() == int(slow_rank):
                time.sleep(float(seconds or 0.3))

        register_optimizer_step_post_hook(sleep)

    if "TWIN" in hooks and "RANK" in os.environ:
        # NCCL refuses two ranks on one GPU of a host, so each rank is a host of its own.
        os.environ.update(NCCL_HOSTID=f"host{os.environ['RANK']}", LOCAL_RANK="0")
    elif "TWIN" in hooks:
        init = torch.nn.DataParallel.__init__
        torch.nn.DataParallel.__init__ = functools.partialmethod(init, device_ids=[0, 0])
