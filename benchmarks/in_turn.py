"""How long a step takes in the scripts and in what a user would write or run instead: contestants
that train in one process, an epoch each in turn. gpu.py makes a report of it.

    torchrun --nproc_per_node=4 benchmarks/in_turn.py resnet18      with all devices, as one line

Programs take long to start, and a device is slower at times, which then is so for all of them.
"""

import argparse
import contextlib
import functools
import importlib.util
import json
import math
import os
import signal
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

import peers  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import vit  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402
from torch.profiler import profile  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from common.data import ImageDataset  # noqa: E402
from common.model import MODELS, build_model  # noqa: E402

CORES = torch.get_num_threads()
OURS = "ddp_torchrun.py"
SHAPES = {"mlp": (1, 28, 28), "resnet18": (3, 32, 32), "vit": (3, 32, 32)}
STEPS = {"mlp": 200, "resnet18": 40, "vit": 40}  # of an epoch
CHANGES = {  # what no script has an option for, while its main() runs
    "gradient_as_bucket_view": lambda module: mock.patch.object(
        module, "DDP", functools.partial(DDP, gradient_as_bucket_view=True)
    ),
    "channels_last": lambda module: mock.patch.object(
        module, "build_model", lambda *how: build_model(*how).to(memory_format=torch.channels_last)
    ),
    "SGD(fused=True)": lambda module: mock.patch.object(
        torch.optim.SGD, "__init__", functools.partialmethod(torch.optim.SGD.__init__, fused=True)
    ),
}


class Contestant(NamedTuple):
    epoch: Callable[[int], object]  # trains one
    threads: int
    precision: str = "highest"  # of float32 products; "high" is TF32


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
    module.log = lambda *_, **__: None
    return module


def contestant(module: ModuleType, data: ImageDataset, words: list, change: str = "") -> Contestant:
    """The epochs of the Trainer that the script's main() makes with these options."""
    made, join = [], dist.init_process_group
    once = lambda *given, **more: dist.is_initialized() or join(*given, **more)  # noqa: E731
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for patch in (
            mock.patch.object(sys, "argv", [*map(str, words), "--snapshot-path", f"{folder}/none"]),
            mock.patch.object(module, "load_dataset", lambda *_: (data, data)),
            mock.patch.object(module.Trainer, "train", lambda self, _: made.append(self)),
            mock.patch.object(signal, "signal"),  # an older version has handlers
            mock.patch.object(dist, "init_process_group", once),
            mock.patch.object(dist, "destroy_process_group"),
            *([CHANGES[change](module)] if change else []),
        ):
            stack.enter_context(patch)
        getattr(module.main, "__wrapped__", module.main)(module.parse_args())

    def epoch(number: int) -> None:
        made[0]._run_epoch(number)
        made[0].samples_seen = 0  # or the next epoch would have no samples left
        made[0].unsaved_steps = 0  # or it would save

    return Contestant(epoch, torch.get_num_threads())


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

    def plain(ddp: bool, **options: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        network = build_model(model, SHAPES[model]).to(device)
        optimizer = torch.optim.SGD(network.parameters(), 0.01, 0.9, **options)
        return DDP(network) if ddp else network, optimizer

    torchrun = script("ddp_torchrun")
    ours(OURS, torchrun)
    ours("single_gpu.py", script("single_gpu"))
    if before:
        os.environ["LOCAL_WORLD_SIZE"] = "1"  # which some versions ask for
        for name in ("ddp_torchrun", "single_gpu"):
            ours(f"{name}.py before", script(name, before.resolve()))
    for option in ("--amp", *["--compile"] * compiles):
        ours(OURS, torchrun, option)
    for change in CHANGES:
        if change != "channels_last" or model == "resnet18":
            ours(OURS, torchrun, change=change)
    found[f"{OURS}, TF32"] = found[OURS]._replace(precision="high")
    for threads in (CORES, 8, 2, 1):
        if threads <= CORES:
            single = found["single_gpu.py"]._replace(threads=threads)
            found[f"single_gpu.py, threads: {threads}"] = single
    # What a user would write or run instead has all threads.
    loader = DataLoader(data, batch, shuffle=True, collate_fn=tuple, pin_memory=device != "cpu")
    found["the tutorial's loop"] = Contestant(loop(plain(False), loader), CORES)
    found["the tutorial's loop, DDP"] = Contestant(loop(plain(True), loader), CORES)
    given = argparse.Namespace(device=device, model=model, image_shape=SHAPES[model])
    vars(given).update(lr=0.01, momentum=0.9, seed=42, nproc_per_node=1)
    for name, prepare in (("Fabric", peers.with_fabric), ("Accelerate", peers.with_accelerate)):
        with contextlib.suppress(ImportError), mock.patch.dict(os.environ):
            prepared = prepare(given, loader)
            name += ", DDP" * any(isinstance(part, DDP) for part in prepared[0].modules())
            found[name] = Contestant(loop(prepared, None), CORES)
    ready = [[part.to(device) for part in parts] for parts in loader]
    for name, made in (
        ("no DDP", plain(False)),
        ("no DDP, SGD(fused=True)", plain(False, fused=True)),
        ("DDP", plain(True)),
    ):
        found[f"data on the device, {name}"] = Contestant(loop(made, ready), min(4, CORES))
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


def traced(epoch: Callable[[int], object]) -> list[dict]:
    """What the profiler saw of an epoch."""
    with profile() as profiler:
        epoch(9)
        synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        return json.loads(Path(folder, "trace.json").read_text())["traceEvents"]


def shares(events: list[dict]) -> tuple[float | None, float | None]:
    """Of a trace: for which share of the time the device computes, and of NCCL's time, the share in
    which it does. Either is None where the profiler has seen no such work."""
    work = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    spans = sorted((e["ts"], e["ts"] + e["dur"], "nccl" in e["name"].lower()) for e in work)
    sends = [(start, stop) for start, stop, of_nccl in spans if of_nccl]
    computes = hidden = end = 0.0
    for start, stop, of_nccl in spans:
        if not of_nccl:
            start, end = max(start, end), max(stop, end)  # what no kernel before it has covered
            computes += max(0.0, end - start)
            hidden += sum(max(0.0, min(end, to) - max(start, since)) for since, to in sends)
    whole = max(stop for _, stop, _ in spans) - spans[0][0] if spans else 0.0
    sent = sum(stop - start for start, stop in sends)
    return computes / whole if whole else None, hidden / sent if sent else None


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
    result["hidden"] = shares(traced(found["weak"].epoch))[1]
    if dist.get_rank() == 0:
        print(f"Seconds a step: {json.dumps(result)}", flush=True)
    del found
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
