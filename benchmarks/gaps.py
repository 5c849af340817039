"""Does the accelerator wait for the host? One epoch under torch's profiler, and its gaps.

    torchrun --nproc_per_node=4 benchmarks/gaps.py ddp_torchrun.py --model resnet18

Start it as you would start the script, under torchrun or as one process, and put gaps.py before
the script's name. Nothing is saved. It prints one line, which is rank 0's. Its figures are means,
because ddp_torchrun.py's ranks ask each other at every tenth step only whether to stop. While a
kernel of NCCL waits for another rank, the device counts as busy.
"""

import contextlib
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import check
import torch
import torch.distributed as dist
from torch.profiler import profile, record_function

QUESTION = "_agree_on_stopping"


def trace(trainer: Any, total_epochs: int) -> int:
    """In place of `Trainer.train`, on all ranks: `_run_epoch()` thrice, the last time profiled."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = torch.get_device_module(trainer.device)
    for epoch in (0, 1):  # the first steps are slow
        start = time.perf_counter()
        trainer._run_epoch(epoch)
        device.synchronize()
        seconds = time.perf_counter() - start
        trainer.samples_seen = 0
    if ask := getattr(trainer, QUESTION, None):
        setattr(trainer, QUESTION, record_function(QUESTION)(ask))
    with profile() if rank == 0 else contextlib.nullcontext() as profiler:
        trainer._run_epoch(2)
        device.synchronize()
    if rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        steps = math.ceil(len(trainer.train_data) / (check.per_step(trainer) or 1))
        found = [f"{seconds / steps * 1e3:.2f} ms a step", *summary(events, steps)]
        if hasattr(device, "max_memory_allocated"):
            found.append(f"{device.max_memory_allocated() / 1e6:.0f} MB of memory at most")
        if set_seed := getattr(sys.modules[type(trainer).__module__], "set_seed", None):
            start = time.perf_counter()
            for epoch in range(100):
                set_seed(42, 0, epoch)
            found.append(f"set_seed() {(time.perf_counter() - start) * 1e4:.0f} us an epoch")
        print(f"Trace | {', '.join(found)}", flush=True)
    return 0


def summary(events: list[dict], steps: int) -> list[str]:
    """What the Chrome trace of `steps` steps says; its times are microseconds.

    https://docs.pytorch.org/docs/stable/profiler.html
    """
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    work = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in kinds)
    if not work:
        return ["the profiler saw no kernel"]
    ends = [*itertools.accumulate((end for _, end in work), max)]  # of all work up to there
    idle = [(end, start) for (start, _), end in zip(work[1:], ends, strict=False) if start > end]
    span = ends[-1] - work[0][0]
    # torch names the time that the kernels of these two take on the device.
    marks = [e for e in events if e.get("cat") == "gpu_user_annotation"]
    over = [e["ts"] + e["dur"] for e in marks if e["name"].startswith("Optimizer.step")]
    begins = [e["ts"] for e in marks if e["name"].startswith("DistributedDataParallel.forward")]
    asked = [e["ts"] for e in marks if e["name"] == QUESTION]
    between, with_question = [], []
    for end in over:
        if begin := min((begin for begin in begins if begin > end), default=None):
            between.append(sum(until - since for since, until in idle if end <= since < begin))
            if any(end <= ts < begin for ts in asked):
                with_question.append(between[-1])
    calls = [e for e in events if "runtime" in e.get("cat", "") and "Synchronize" in e["name"]]
    found = [f"under the profiler {span / steps / 1e3:.2f}"]
    found.append(f"device busy {1 - sum(end - start for start, end in idle) / span:.0%}")
    found.append(
        f"{sum(end - start > 10 for start, end in idle) / steps:.1f} gaps over 10 us a step"
    )
    if between:
        found.append(f"idle between steps {statistics.mean(between) / 1e3:.3f} ms")
    if with_question:
        mean = statistics.mean(with_question) / 1e3
        found[-1] += f" ({mean:.3f} where the ranks ask whether to stop)"
    return [*found, f"{len(calls) / steps:.2f} calls a step that wait for the device"]


if __name__ == "__main__":
    check.check = trace
    sys.exit(check.main())
