"""Where a step's time goes: data, forward, backward, update, waiting. The script stays as it is.

    python benchmarks/split.py single_gpu 2 --dataset fashion-mnist
    python benchmarks/split.py ddp_torchrun 2 --dataset fashion-mnist --amp bf16 --compile

The first argument is single_gpu or ddp_torchrun (one process), the others are the script's own. Its
last epoch runs under torch.profiler. On a GPU a part is the time of its kernels and copies, and
`waiting` is when the device had nothing to do; on a CPU it is what belongs to no part: the loop
around, and the profiler itself.
"""

import functools
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.autograd import DeviceType
from torch.profiler import profile, record_function

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# What torch.profiler calls them by itself; forward and backward are labelled below.
PARTS = {
    "data": "enumerate(DataLoader)",
    "forward": "split:forward",
    "backward": "split:backward",
    "update": "Optimizer.",  # step and zero_grad
}


def labelled(name: str, function: Callable) -> Callable:
    @functools.wraps(function)
    def wrapper(*args: object, **kwargs: object) -> object:
        with record_function(f"split:{name}"):
            return function(*args, **kwargs)

    return wrapper


def milliseconds(events: list, wall: float) -> dict[str, float]:
    """`wall` and the profiler's times are in microseconds, of one epoch."""
    host = [event for event in events if event.device_type == DeviceType.CPU]
    device = [event for event in events if event.device_type != DeviceType.CPU]
    work = [event for event in device if not getattr(event, "is_user_annotation", False)]
    times = {}
    for part, prefix in PARTS.items():
        own = [event for event in host if event.name.startswith(prefix)]
        times[part] = sum(e.device_time_total if work else e.cpu_time_total for e in own)
    if work:
        total = sum(event.time_range.elapsed_us() for event in work)
        copies = [event for event in work if event.name.startswith("Memcpy HtoD")]
        times["data"] = sum(event.time_range.elapsed_us() for event in copies)
        # Autograd launches its kernels from a thread of its own, outside of our label.
        times["backward"] = total - times["data"] - times["forward"] - times["update"]
    times["waiting"] = wall - sum(times.values())
    return {part: value / 1000 for part, value in times.items()}


def profiled(run_epoch: Callable) -> Callable:
    def wrapper(trainer: object, epoch: int) -> object:
        if epoch + 1 < trainer.args.total_epochs:
            return run_epoch(trainer, epoch)
        kind = type(trainer.model)
        kind.__call__ = labelled("forward", kind.__call__)
        F.cross_entropy = labelled("forward", F.cross_entropy)
        torch.Tensor.backward = labelled("backward", torch.Tensor.backward)
        with profile() as profiler:  # all devices that there are
            start = time.perf_counter()
            result = run_epoch(trainer, epoch)
            if trainer.device.type != "cpu":
                torch.accelerator.synchronize()
            wall = 1e6 * (time.perf_counter() - start)
        steps = len(trainer.train_data)
        times = milliseconds(list(profiler.events()), wall)
        times = {part: value / steps for part, value in times.items()}
        print(f"split: {json.dumps(times)}", flush=True)
        return result

    return wrapper


if __name__ == "__main__":
    script = importlib.import_module(sys.argv.pop(1))
    script.Trainer._run_epoch = profiled(script.Trainer._run_epoch)
    script.main(script.parse_args())
