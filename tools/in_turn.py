"""How long a step takes in the scripts, and in what you would write or run instead. All train in
one process, an epoch each in turn. gpu.py makes a report of it.

    torchrun --nproc_per_node=4 tools/in_turn.py resnet18      ddp_torchrun.py on all devices

A program takes long to start, and a device is slower at times. In turn, that hits all of them.
"""

import argparse
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
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import peers  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import vit  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from common.data import ImageDataset  # noqa: E402
from common.model import MODELS, build_model  # noqa: E402

CORES = torch.get_num_threads()
OURS = "ddp_torchrun.py"
SHAPES = {"mlp": (1, 28, 28), "resnet18": (3, 32, 32), "vit": (3, 32, 32)}
STEPS = {"mlp": 200, "resnet18": 40, "vit": 40}  # of an epoch
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
ALONE |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # as torchrun sets them for one process
CHANGES = {  # what no script has an option for, while its main() runs
    "without the bucket view": lambda module: mock.patch.object(
        module, "DDP", lambda model, **_: DDP(model)
    ),
    "without TF32": lambda _: mock.patch.object(torch, "set_float32_matmul_precision"),
    "channels_last": lambda module: mock.patch.object(
        module, "build_model", lambda *how: build_model(*how).to(memory_format=torch.channels_last)
    ),
    "SGD(fused=True)": lambda _: mock.patch.object(
        torch.optim.SGD, "__init__", functools.partialmethod(torch.optim.SGD.__init__, fused=True)
    ),
}


class Contestant(NamedTuple):
    epoch: Callable[[int], object]  # trains one
    threads: int
    precision: str = "highest"  # of float32 products; "high" is TF32


class Made(Exception):
    """main() has made all that an epoch needs."""


def script(name: str, folder: Path = ROOT) -> ModuleType:
    """The script in this folder as a module, with the common/ that lies beside it."""
    ours = {
        name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] == "common"
    }
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location(f"{name}_of_{folder.name}", folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.pop(0)
    sys.modules.update(ours)
    module.MODELS["vit"] = vit.ViT
    module.log = module.save_snapshot = lambda *_, **__: None
    return module


def contestant(module: ModuleType, data: ImageDataset, words: list, change: str = "") -> Contestant:
    """The epochs of the model, loader and optimizer that the script's main() makes."""
    made, join = [], dist.init_process_group
    once = lambda *given, **more: dist.is_initialized() or join(*given, **more)  # noqa: E731
    old = hasattr(module, "Trainer")  # the scripts up to commit eea0a45
    place = (module.Trainer, "train") if old else (module, "train_epoch")

    def stop(*given: object) -> None:
        made.extend(given)
        raise Made

    torch.set_float32_matmul_precision("highest")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        words = [*map(str, words), "--snapshot-path", f"{folder}/none"]
        for patch in (
            mock.patch.dict(os.environ, {} if "RANK" in os.environ else ALONE),
            mock.patch.object(sys, "argv", words),
            mock.patch.object(module, "load_dataset", lambda *_: (data, data)),
            mock.patch.object(*place, stop),
            mock.patch.object(dist, "init_process_group", once),
            *([CHANGES[change](module)] if change else []),
            contextlib.suppress(Made),
        ):
            stack.enter_context(patch)
        getattr(module.main, "__wrapped__", module.main)(module.parse_args())

    def epoch(number: int) -> None:
        if old:
            made[0].samples_seen = made[0].unsaved_steps = 0  # or it would skip samples, or save
            made[0]._run_epoch(number)
            return
        model, loader, optimizer, device, _, *more = made
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(number)
        module.train_epoch(model, loader, optimizer, device, number, *more)

    return Contestant(epoch, torch.get_num_threads(), torch.get_float32_matmul_precision())


def images(model: str, count: int) -> ImageDataset:
    channels, size, _ = SHAPES[model]
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, channels, size, size), generator=generator)
    targets = torch.randint(10, (count,), generator=generator)
    return ImageDataset(pixels.byte(), targets, (0.5,) * channels, (0.3,) * channels)


@mock.patch.dict(MODELS, vit=vit.ViT)
def contestants(
    model: str, batch: int, steps: int, device: str, compiles: bool, before: Path | None
) -> dict[str, Contestant]:
    """By name; ddp_torchrun.py first. `before` is a folder with an older version of the scripts."""
    data, found = images(model, batch * steps), {}

    def ours(name: str, module: ModuleType, *options: str, change: str = "") -> None:
        torch.set_num_threads(CORES)
        words = [name, "--batch-size", batch, "--model", model, "--device", device, *options]
        label = ", ".join(filter(None, (" ".join((name, *options)), change)))
        found[label] = contestant(module, data, words, change)

    def loop(prepared: tuple, batches: Any) -> Callable[[int], None]:
        network, optimizer, *more = prepared
        batches, backward, _ = more or (batches, torch.Tensor.backward, True)

        def epoch(_: int) -> None:
            network.train()
            for source, targets in batches:
                source, targets = source.to(device), targets.to(device)
                optimizer.zero_grad()
                loss = F.cross_entropy(network(source), targets)
                backward(loss)
                optimizer.step()

        return epoch

    def plain(ddp: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        network = build_model(model, SHAPES[model]).to(device)
        return DDP(network) if ddp else network, torch.optim.SGD(network.parameters(), 0.01, 0.9)

    torchrun = script("ddp_torchrun")
    ours(OURS, torchrun)
    ours("single_gpu.py", script("single_gpu"))
    if before:
        for name in ("ddp_torchrun", "single_gpu"):
            ours(f"{name}.py before", script(name, before.resolve()))
    for option in ("--amp", *["--compile"] * compiles):
        ours(OURS, torchrun, option)
    for change in CHANGES:
        if change != "channels_last" or model == "resnet18":
            ours(OURS, torchrun, change=change)
    for threads in (CORES, 8, 2, 1):
        if threads <= CORES:
            single = found["single_gpu.py"]._replace(threads=threads)
            found[f"single_gpu.py, threads: {threads}"] = single
    # What you would write or run instead has all threads.
    loader = DataLoader(data, batch, shuffle=True, collate_fn=tuple, pin_memory=device != "cpu")
    found["the tutorial's loop"] = Contestant(loop(plain(False), loader), CORES)
    found["the tutorial's loop, DDP"] = Contestant(loop(plain(True), loader), CORES)
    given = argparse.Namespace(device=device, model=model, image_shape=SHAPES[model])
    vars(given).update(lr=0.01, momentum=0.9, seed=42, nproc_per_node=1)
    for name, prepare in (("Fabric", peers.with_fabric), ("Accelerate", peers.with_accelerate)):
        with contextlib.suppress(ImportError), mock.patch.dict(os.environ):
            found[name] = Contestant(loop(prepare(given, loader), None), CORES)
    ready = [[part.to(device) for part in parts] for parts in loader]
    for name, ddp in (("no DDP", False), ("DDP", True)):
        found[f"data on the device, {name}"] = Contestant(loop(plain(ddp), ready), min(4, CORES))
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


def table(found: dict[str, Contestant], seconds: dict, steps: int, batch: int) -> list[str]:
    lines = ["| | ms a step | from | to | samples/s | threads |", "| --- |" + " ---: |" * 5]
    for name, runs in seconds.items():
        if runs:
            cells = [statistics.median(runs), min(runs), max(runs)]
            cells = [f"{cell / steps * 1e3:.2f}" for cell in cells]
            cells += [f"{batch * steps / statistics.median(runs):,.0f}", str(found[name].threads)]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """In each rank: the script's epochs with as many samples a rank, and with as many in all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("--batch-size", type=int, default=256, help="of one device")
    parser.add_argument("--steps", type=int, help="of an epoch")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    world_size, steps = int(os.environ["WORLD_SIZE"]), args.steps or STEPS[args.model]
    module, found = script("ddp_torchrun"), {}
    for name, each in (("weak", args.batch_size), ("strong", args.batch_size // world_size)):
        data = images(args.model, each * world_size * steps)
        words = [OURS, "--batch-size", each, "--model", args.model]
        found[name] = contestant(module, data, words)
    seconds, _ = measure(found, args.rounds)
    result = {name: statistics.median(runs) / steps for name, runs in seconds.items()}
    if dist.get_rank() == 0:
        print(f"Seconds a step: {json.dumps(result)}", flush=True)
    del found
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
