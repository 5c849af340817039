"""How long a step takes in the scripts, with and without what they do for speed, beside the
tutorial's loop and the upper bound. All train in one process, an epoch each in turn.

    torchrun --nproc_per_node=4 benchmarks/in_turn.py      long_run.py on all devices, both networks

gpu.py makes a report of it. A program takes long to start, and a device is slower at times, which
hits all alike if they take turns.
"""

import contextlib
import functools
import importlib.util
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from networks import BATCH, NETWORKS, TINY, build, random_data  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

CORES = torch.get_num_threads()
OURS = "long_run.py --amp"
STEPS = 1 if TINY else 20  # of an epoch
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
ALONE |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # as torchrun sets them for one process
CHANGES = {  # what no script has an option for, while its main() runs
    "without gradient_as_bucket_view": lambda module: mock.patch.object(
        module, "DDP", lambda model, **_: DDP(model)
    ),
    "without TF32": lambda _: mock.patch.object(torch, "set_float32_matmul_precision"),
    "channels_last": lambda module: mock.patch.object(
        module, "build_model", lambda *how: build(*how).to(memory_format=torch.channels_last)
    ),
    "SGD(fused=True)": lambda _: mock.patch.object(
        torch.optim.SGD, "__init__", functools.partialmethod(torch.optim.SGD.__init__, fused=True)
    ),
}


class Contestant(NamedTuple):
    epoch: Callable[[int], object]  # trains one
    threads: int
    precision: str = "highest"  # of float32 products and convolutions; "high" is TF32


class Made(Exception):
    """main() has made all that an epoch needs."""


def script(name: str, folder: Path = ROOT) -> ModuleType:
    """The script in this folder as a module, with the common/ that lies beside it."""
    ours = {
        name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] == "common"
    }
    sys.path.insert(0, str(folder))
    path = folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{path.stem}_of_{folder.name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.pop(0)
    sys.modules.update(ours)
    module.MODELS.update(NETWORKS)
    module.build_model = build
    module.save_snapshot = lambda *_, **__: None
    return module


def contestant(module: ModuleType, data: Dataset, words: list, change: str = "") -> Contestant:
    """The epochs of the model, loader and optimizer that the script's main() makes."""
    made, loaders, join = [], [], dist.init_process_group
    once = lambda *given, **more: dist.is_initialized() or join(*given, **more)  # noqa: E731
    train = "train_step" if hasattr(module, "train_step") else "train_epoch"
    own = getattr(module, train)

    def loader(*given: object, **named: object) -> DataLoader:
        loaders.append(DataLoader(*given, **named))
        return loaders[-1]

    def stop(*given: object) -> None:
        made.extend(given)
        raise Made

    torch.set_num_threads(CORES)
    torch.set_float32_matmul_precision("highest")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        words = [*map(str, words), "--snapshot-path", f"{folder}/none"]
        for patch in (
            mock.patch.dict(os.environ, {} if "RANK" in os.environ else ALONE),
            mock.patch.object(sys, "argv", words),
            mock.patch.object(module, "load_dataset", lambda *_: (data, data)),
            mock.patch.object(module, train, stop),
            mock.patch.object(module, "DataLoader", loader),
            mock.patch.object(dist, "init_process_group", once),
            *([CHANGES[change](module)] if change else []),
            contextlib.redirect_stdout(sys.stderr),
            contextlib.suppress(Made),
        ):
            stack.enter_context(patch)
        getattr(module.main, "__wrapped__", module.main)(module.parse_args())

    def epoch(number: int) -> None:
        model, _, *rest = made
        if train == "train_step":
            for batch in loaders[0]:
                own(model, [batch], *rest)
            return
        if hasattr(loaders[0].sampler, "set_epoch"):
            loaders[0].sampler.set_epoch(number)
        own(model, loaders[0], *rest)

    return Contestant(epoch, torch.get_num_threads(), torch.get_float32_matmul_precision())


def loop(network: nn.Module, batches: Any, device: str, ddp: bool) -> Callable[[int], None]:
    """The tutorial's, in bfloat16."""
    network = DDP(network.to(device)) if ddp else network.to(device)
    optimizer = torch.optim.SGD(network.parameters(), 0.01, 0.9)

    def epoch(_: int) -> None:
        network.train()
        for source, targets in batches:
            source, targets = source.to(device), targets.to(device)
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16):
                loss = F.cross_entropy(network(source), targets)
            loss.backward()
            optimizer.step()

    return epoch


def contestants(device: str, before: Path | None) -> dict[str, Contestant]:
    """By name, with ResNet-50; `before` is a folder with an older version of the scripts."""
    batch, found = BATCH["resnet50"], {}
    data = random_data("resnet50", batch * STEPS)

    def ours(name: str, module: ModuleType, change: str = "") -> None:
        words = [*name.split(), "--batch-size", batch, "--model", "resnet50", "--device", device]
        found[", ".join(filter(None, (name, change)))] = contestant(module, data, words, change)

    long_run = script("recipes/long_run")
    if before:
        ours(OURS, script("recipes/long_run", before.resolve()))
        found = {f"{OURS}, before": found.pop(OURS)}
    ours(OURS, long_run)
    for change in ("without gradient_as_bucket_view", "SGD(fused=True)", "channels_last"):
        ours(OURS, long_run, change)
    ours(f"{OURS} --compile", long_run)
    for threads in (CORES, 8, 2, 1):
        if threads <= CORES:
            found[f"{OURS}, threads: {threads}"] = found[OURS]._replace(threads=threads)
    torchrun = script("ddp_torchrun")
    ours("ddp_torchrun.py", torchrun)
    ours("ddp_torchrun.py", torchrun, "without TF32")
    ours("single_gpu.py", script("single_gpu"))
    loader = DataLoader(data, batch, shuffle=True, pin_memory=device != "cpu")
    tutorial = loop(build("resnet50"), loader, device, ddp=True)
    found["the tutorial's loop in bfloat16, DDP"] = Contestant(tutorial, CORES)
    ready = [[part.to(device) for part in parts] for parts in loader]
    for name, ddp in (("no DDP", False), ("DDP", True)):
        bound = loop(build("resnet50"), ready, device, ddp)
        found[f"the same, data on the device, {name}"] = Contestant(bound, min(4, CORES))
    return found


def measure(found: dict[str, Contestant], rounds: int, until: float = math.inf) -> tuple:
    """Seconds of each one's epochs, after one to warm up, and the errors of who failed."""
    seconds, errors = {name: [] for name in found}, {}
    for number in range(rounds + 1):
        for name in found if number % 2 else reversed(found):
            if name in errors or (number and time.monotonic() > until):
                continue
            torch.set_num_threads(found[name].threads)
            torch.set_float32_matmul_precision(found[name].precision)
            torch.backends.cudnn.allow_tf32 = found[name].precision == "high"
            dist.barrier()
            synchronize()
            start = time.perf_counter()
            try:
                found[name].epoch(number)
                synchronize()
            except Exception as error:
                errors[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            else:
                seconds[name] += [time.perf_counter() - start] if number else []
    torch.set_float32_matmul_precision("highest")
    return seconds, errors


def synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def main() -> None:
    """In each rank: samples per second of all devices, by network and kind."""
    world_size = int(os.environ["WORLD_SIZE"])
    module, found, batches = script("recipes/long_run"), {}, {}
    for network, batch in BATCH.items():
        # weak: as many samples for each device as on one device; strong: as many in all
        for kind, each, *more in (
            ("weak", batch),
            ("strong", max(1, batch // world_size)),
            ("compiled", batch, "--compile"),
        ):
            name = f"{network} {kind}"
            data = random_data(network, each * world_size * STEPS)
            words = [*OURS.split(), "--batch-size", each, "--model", network, *more]
            found[name] = contestant(module, data, words)
            batches[name] = each * world_size
    seconds, errors = measure(found, 1 if TINY else 4)
    rates = {
        name: batches[name] * STEPS / statistics.median(runs)
        for name, runs in seconds.items()
        if runs
    }
    if dist.get_rank() == 0:
        print(f"Samples per second: {json.dumps(rates)}", *errors.items(), sep="\n", flush=True)
    del found
    dist.destroy_process_group()


if TINY:  # inductor would compile for minutes on a CPU
    torch.compile = functools.partial(torch.compile, backend="eager")

if __name__ == "__main__":
    main()
