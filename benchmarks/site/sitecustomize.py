"""Prints when a job gets how far, for run.py: with this folder on PYTHONPATH, every process that
trains ends itself after its first step, and rank 0 says at what times it passed what."""

import json
import os
import sys
import time

if not any("resource_tracker" in word for word in sys.orig_argv):
    times = {"the parent and Python": time.time()}
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.utils.data import DataLoader

    times["import torch"] = time.time()

    def around(function, before: str, after: str | None = None):
        """The function, and the times at its first call and after it, under these names."""

        def called(*args, **kwargs):
            times.setdefault(before, time.time())
            result = function(*args, **kwargs)
            if after:
                times.setdefault(after, time.time())
            return result

        return called

    def first_step(*_) -> None:
        times["the first step"] = time.time()
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"First step: {json.dumps(times)}", flush=True)
        os._exit(0)

    dist.init_process_group = around(dist.init_process_group, "other imports, options", "joining")
    DataLoader.__iter__ = around(DataLoader.__iter__, "data, model")
    register_optimizer_step_post_hook(first_step)
