"""For whoever has a machine with GPUs: one command, and one report to paste into an issue.

    python benchmarks/gpu.py > report.md         all parts, a quarter of an hour on one GPU
    python benchmarks/gpu.py --part 2 3          these, each up to 8 minutes; --help lists them
    python benchmarks/gpu.py --before DIR        also an older version of the scripts: a clone of it
    python benchmarks/gpu.py --rehearse          with little data, also on a CPU: does it work?

What is compared trains in one process, an epoch each in turn, because programs take long to start,
and a device is slower at times. The report goes to stdout. The status is 1 where something failed.
It needs Linux and `pip install '.[bench,test]'`, and downloads nothing.
"""

import argparse
import contextlib
import functools
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock
from xml.etree import ElementTree

import pytest
import run as harness
import torch
import torch.distributed as dist
import torch.nn.functional as F
import vit
from helpers.files import idx_files
from helpers.jobs import SITE, Job
from run import HERE, ROOT, Case
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import profile
from torch.utils.data import DataLoader

from common.data import ImageDataset
from common.model import build_model

SHAPES = {"mlp": (1, 28, 28), "resnet18": (3, 32, 32), "vit": (3, 32, 32)}
STEPS = {"mlp": 400, "resnet18": 40, "vit": 40}  # of an epoch
OURS = "ddp_torchrun.py"
Section = tuple[list[str], bool]  # of the report: its lines, and whether all went well
FAILURES = (Exception, pytest.fail.Exception)  # the latter of a Job that takes too long


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parts = ", ".join(f"{number}: {part[0]}" for number, part in PARTS.items())
    parser.add_argument("--part", type=int, nargs="+", choices=PARTS, help=f"these; {parts}")
    parser.add_argument("--before", type=Path, help="a clone of an older version, to run beside")
    parser.add_argument("--rehearse", action="store_true", help="little data, also on a CPU")
    parser.add_argument("--scale", help=argparse.SUPPRESS)  # a model: this is a rank of part 6
    args = parser.parse_args()
    found = torch.accelerator.current_accelerator(check_available=True)
    if not found and not args.rehearse:
        sys.exit(f"error: benchmarks/gpu.py needs a GPU, and torch finds none here: {no_gpu()}")
    args.device = found.type if found else "cpu"
    args.count = torch.accelerator.device_count() if found else 2  # processes on a CPU
    if args.scale:
        return scale(args)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup leaves SIGHUP
            signal.signal(signum, lambda *_: sys.exit("stopped"))  # and end the jobs on the way
    print("\n".join([*machine(args), "", *left_out(args)]), flush=True)
    failed = []
    for number in args.part or PARTS:
        title, part, *more = PARTS[number]
        start = time.monotonic()
        args.until = start + 450
        with tempfile.TemporaryDirectory() as folder:
            try:
                lines, good = part(args, Path(folder), *more)
            except FAILURES:  # the other parts go on
                lines = traceback.format_exc().strip().splitlines()[-40:]
                lines, good = ["```", *lines, "```"], False
        print(f"\n### Part {number}: {title}\n", *lines, sep="\n")
        print(f"\nIt took {time.monotonic() - start:.0f} seconds.", flush=True)
        failed += [] if good else [str(number)]
    if failed:
        sys.exit(f"failed: part {', '.join(failed)}")


def no_gpu() -> str:
    """torch's own reason, for instance that the driver is too old for it."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return "it gives no reason"


def machine(args: argparse.Namespace) -> list[str]:
    rows = harness.machine()
    if args.device == "cuda":
        rows["GPU"] = f"{args.count} x {rows['GPU']}"
        rows["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    if args.before:
        rows["Before"] = f"commit {harness.commit(args.before)}"
    rows["Command"] = f"python benchmarks/gpu.py {' '.join(sys.argv[1:])}"
    lines = ["## Report of benchmarks/gpu.py", "", "| | |", "| --- | --- |"]
    return [*lines, *(f"| {name} | {value} |" for name, value in rows.items())]


def left_out(args: argparse.Namespace) -> list[str]:
    """What of the report will be missing here, and why. It ends this if a device does not work."""
    if args.device != "cpu":  # in a process of its own, because this one shall not use their memory
        code = f"import torch\nfor n in range({args.count}): "
        code += f"torch.ones(9, device=f'{args.device}:{{n}}').sum().item()"
        tried = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        if tried.returncode:
            sys.exit(f"error: a sum on each device fails: {error_line(tried.stderr)}")
    variable, *names = ("CXX", "g++") if args.device == "cpu" else ("CC", "gcc", "clang")
    needed = {
        " or ".join(names): any(map(shutil.which, (os.environ.get(variable, ""), *names))),
        "Python.h": Path(sysconfig.get_path("include"), "Python.h").is_file(),
    }
    missing = [name for name, there in needed.items() if not there]
    args.compiles = not missing
    lines = [f"- `--compile` is left out, because there is no {name}." for name in missing]
    if args.count == 1:
        lines.append("- There is one device. Where two ranks share it, no speed is measured.")
    return lines or ["Nothing is left out."]


def error_line(text: str) -> str:
    """That a job was cut short, or the first error that Python names in its output."""
    pattern = r"^(not done after .*|(?:\[\w+\]:)? ?[\w.]+(?:Error|Exception)\b.*)"
    found = re.search(pattern, text, re.M)
    return found[1] if found else (text.strip() or "no output").splitlines()[-1]


# --- tests, and programs as a user starts them ----------------------------------------------------


def tests(args: argparse.Namespace, folder: Path) -> Section:
    """Their results, and after how many seconds a fault was over."""
    words = ["-m", "gpu", "-n", "0", "-q", "-rfEs", f"--junitxml={folder}/tests.xml"]
    words = [sys.executable, "-m", "pytest", *words, str(ROOT / "tests" / "test_gpu.py")]
    env = {"TMPDIR": str(folder), "REHEARSE": "1" if args.rehearse else ""}
    job = Job(words, folder, env)
    text = job.finish(None, seconds=470)
    rows = ElementTree.parse(folder / "tests.xml").iter("property")
    lines = ["```", *text.strip().splitlines()[-20:], "```", "", "| fault | seconds |"]
    lines += ["| --- | ---: |", *(f"| {row.get('name')} | {row.get('value')} |" for row in rows)]
    return lines, job.process.returncode == 0


def first_steps(args: argparse.Namespace, folder: Path) -> Section:
    """Seconds from the command line to the first step; benchmarks/site/ tells who passes what."""
    lines, count = ["| seconds | processes | all | of which |", "| --- | ---: | ---: | --- |"], 2
    cases = [(1, "single_gpu.py"), (1, "tutorial"), (1, OURS)]
    if args.count > 1:
        cases += [(args.count, name) for name in ("ddp_spawn.py", OURS, "tutorial")]
    data = idx_files(folder, 60_000, 10_000)
    for processes, name in cases[: 1 if args.rehearse else None]:
        runs = []
        for _ in range(1 if args.rehearse else count):
            case = Case(32, processes, (), device=args.device)
            words = harness.command(harness.CONTESTANTS[name], case, data)
            env = harness.environment(harness.CONTESTANTS[name], case)
            env["PYTHONPATH"] = os.pathsep.join((str(HERE / "site"), env["PYTHONPATH"]))
            start = time.time()
            text = Job(words, folder, env).finish(None, seconds=120)
            times = json.loads(text.split("First step: ")[1].splitlines()[0])
            begins = [start, *times.values()]
            runs.append(
                {
                    name: end - begin
                    for (name, end), begin in zip(times.items(), begins, strict=False)
                }
            )
        best = min(runs, key=lambda run: sum(run.values()))
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in best.items())
        lines.append(f"| {name} | {processes} | {sum(best.values()):.1f} | {parts} |")
    return [*lines, "\nThe faster one of two starts."], True


# --- epochs of all contestants in one process, in turn --------------------------------------------


class Contestant(NamedTuple):
    epoch: Callable[[int], object]  # trains one
    threads: int
    precision: str = "highest"  # of float32 products; "high" is TF32


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


def trainer(module: ModuleType, data: ImageDataset, words: list, change: str = "") -> Any:
    """The Trainer that the script's main() makes with these options. Nothing is trained yet."""
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
    return made[0]


def images(model: str, count: int) -> ImageDataset:
    channels, size, _ = SHAPES[model]
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, channels, size, size), generator=generator)
    targets = torch.randint(10, (count,), generator=generator)
    return ImageDataset(pixels.byte(), targets, (0.5,) * channels, (0.3,) * channels)


def contestants(args: argparse.Namespace, model: str, batch: int, steps: int) -> dict:
    """By name; our scripts first."""
    peers = importlib.import_module("peers")  # it wants common/, which run.py puts on the path
    data, cores, found = images(model, batch * steps), torch.get_num_threads(), {}

    def ours(name: str, module: ModuleType, *options: str, change: str = "") -> None:
        torch.set_num_threads(cores)
        words = [name, "--batch-size", batch, "--model", model, "--device", args.device, *options]
        made = trainer(module, data, words, change)

        def epoch(number: int) -> None:
            made._run_epoch(number)
            made.samples_seen = 0

        label = ", ".join(filter(None, (" ".join((name, *options)), change)))
        found[label] = Contestant(epoch, torch.get_num_threads())

    def loop(prepared: tuple, batches: Any) -> Callable[[int], None]:
        network, optimizer, *more = prepared
        backward = more[1] if more else torch.Tensor.backward

        def epoch(_: int) -> None:
            network.train()
            for source, targets in more[0] if more else batches:
                source, targets = source.to(args.device), targets.to(args.device)
                optimizer.zero_grad()
                loss = F.cross_entropy(network(source), targets)
                backward(loss)
                optimizer.step()

        return epoch

    def plain(ddp: bool, **options: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        network = build_model(model, SHAPES[model]).to(args.device)
        optimizer = torch.optim.SGD(network.parameters(), 0.01, 0.9, **options)
        return DDP(network) if ddp else network, optimizer

    torchrun, single = script("ddp_torchrun"), script("single_gpu")
    ours(OURS, torchrun)
    ours("single_gpu.py", single)
    if args.before:
        os.environ["LOCAL_WORLD_SIZE"] = "1"  # which some versions ask for
        for name in ("ddp_torchrun", "single_gpu"):
            ours(f"{name}.py before", script(name, args.before.resolve()))
    ours(OURS, torchrun, "--amp")
    if args.compiles and (model == "mlp" or not args.rehearse):  # minutes on a CPU
        ours(OURS, torchrun, "--compile")
    for change in CHANGES:
        if change != "channels_last" or model == "resnet18":
            ours(OURS, torchrun, change=change)
    found[f"{OURS}, TF32"] = found[OURS]._replace(precision="high")
    for threads in {cores, 8, 2, 1} - {found["single_gpu.py"].threads}:
        found[f"single_gpu.py, {threads} threads"] = found["single_gpu.py"]._replace(
            threads=threads
        )
    # What a user would write or run instead has all threads.
    loader = DataLoader(
        data, batch, shuffle=True, collate_fn=tuple, pin_memory=args.device != "cpu"
    )
    found["the tutorial's loop"] = Contestant(loop(plain(False), loader), cores)
    found["the tutorial's loop, DDP"] = Contestant(loop(plain(True), loader), cores)
    given = argparse.Namespace(**vars(args), model=model, image_shape=SHAPES[model])
    vars(given).update(lr=0.01, momentum=0.9, seed=42, nproc_per_node=1)
    for name, prepare in (("Fabric", peers.with_fabric), ("Accelerate", peers.with_accelerate)):
        with contextlib.suppress(ImportError):
            prepared = prepare(given, loader)
            name += ", DDP" * any(isinstance(part, DDP) for part in prepared[0].modules())
            found[name] = Contestant(loop(prepared, None), cores)
    ready = [[part.to(args.device) for part in parts] for parts in loader]
    for name, made in (
        ("no DDP", plain(False)),
        ("no DDP, SGD(fused=True)", plain(False, fused=True)),
        ("DDP", plain(True)),
    ):
        found[f"data on the device, {name}"] = Contestant(loop(made, ready), min(4, cores))
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
                errors[name] = error_line(f"{type(error).__name__}: {error}")
            else:
                seconds[name] += [time.perf_counter() - start] if number else []
    torch.set_float32_matmul_precision("highest")
    return seconds, errors


def synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def traced(epoch: Callable[[int], object]) -> list[dict]:
    """What the profiler saw of an epoch."""
    with profile() as profiler:
        epoch(9)
        synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        return json.loads(Path(folder, "trace.json").read_text())["traceEvents"]


def compare(args: argparse.Namespace, _: Path, model: str, batch: int) -> Section:
    steps, batch = (3, 4) if args.rehearse else (STEPS[model], batch)
    found = contestants(args, model, batch, steps)
    seconds, errors = measure(found, rounds=1 if args.rehearse else 5, until=args.until)
    lines = ["| | ms a step | from | to | samples/s | threads |", "| --- |" + " ---: |" * 5]
    for name, runs in seconds.items():
        if runs:
            cells = [statistics.median(runs), min(runs), max(runs)]
            cells = [f"{cell / steps * 1e3:.2f}" for cell in cells]
            cells += [f"{batch * steps / statistics.median(runs):,.0f}", str(found[name].threads)]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append(f"\nMedians of {len(seconds[OURS])} epochs of {steps} steps, in turn.")
    lines += [f"- {name}: `{error}`" for name, error in errors.items()]
    if busy := shares(traced(found[OURS].epoch))[0]:
        lines.append(
            f"- {OURS}: under the profiler the device computes for {busy:.0%} of an epoch."
        )
    return lines, not errors


def shares(events: list[dict]) -> tuple[float | None, float | None]:
    """Of a trace: for which share of the time the device computes, and of NCCL's time, the share in
    which it does. Both are None where the profiler has seen no such work."""
    work = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    spans = [("nccl" in e["name"].lower(), e["ts"], e["ts"] + e["dur"]) for e in work]
    sends = [(start, stop) for of_nccl, start, stop in spans if of_nccl]
    computes = end = covered = 0.0
    for _, start, stop in sorted(span for span in spans if not span[0]):
        start, end = max(start, end), max(stop, end)  # what no kernel before it has covered
        computes += max(0.0, end - start)
        covered += sum(max(0.0, min(end, stop) - max(start, begin)) for begin, stop in sends)
    whole = max(s[2] for s in spans) - min(s[1] for s in spans) if spans else 0.0
    sent = sum(stop - start for start, stop in sends)
    return computes / whole if whole else None, covered / sent if sent else None


# --- more devices ---------------------------------------------------------------------------------


def scale(args: argparse.Namespace) -> None:
    """In each rank: the script's epochs with as many samples a rank, and with as many in all."""
    world_size, steps = int(os.environ["WORLD_SIZE"]), 3 if args.rehearse else STEPS[args.scale]
    batch, module, found = 8 if args.rehearse else 256, script("ddp_torchrun"), {}
    for name, each in (("weak", batch), ("strong", batch // world_size)):
        data = images(args.scale, each * world_size * steps)
        words = [OURS, "--batch-size", each, "--model", args.scale, "--device", args.device]
        made = trainer(module, data, words)
        found[name] = Contestant(made._run_epoch, torch.get_num_threads())
    seconds, _ = measure(found, rounds=1 if args.rehearse else 5)
    share = shares(traced(found["weak"].epoch))[1]
    if dist.get_rank() == 0:
        result = {name: statistics.median(runs) / steps for name, runs in seconds.items()}
        print(f"Scaling: {json.dumps({**result, 'hidden': share})}", flush=True)
    dist.destroy_process_group()


def scaling(args: argparse.Namespace, folder: Path, model: str) -> Section:
    lines = ["| devices | samples/s | of one | the same batch in all: faster | all-reduce hidden |"]
    lines, rates = [*lines, "| ---: |" + " ---: |" * 4], []
    twin = args.device == "cuda" and args.count == 1
    counts = [count for count in (1, 2, 4, 8) if count <= max(2 if twin else 1, args.count)]
    for count in counts:
        words = f"-m torch.distributed.run --standalone --nproc_per_node={count}".split()
        words += [str(HERE / "gpu.py"), "--scale", model, *["--rehearse"] * args.rehearse]
        env = {"LADDER_TWIN": "2" if twin and count == 2 else "", "PYTHONPATH": str(SITE)}
        env["LADDER_CPU"] = "1" if args.device == "cpu" else ""
        text = Job([sys.executable, *words], folder, env).finish(seconds=200)
        found = json.loads(text.split("Scaling: ")[1].splitlines()[0])
        rates.append(found)
        weak, strong = rates[0]["weak"] / found["weak"], rates[0]["strong"] / found["strong"]
        share = "" if found["hidden"] is None else f"{found['hidden']:.0%}"
        rate = count * (8 if args.rehearse else 256) / found["weak"]
        lines.append(f"| {count} | {rate:,.0f} | {weak:.2f} | {strong:.2f} | {share} |")
    if twin:
        lines.append("\nThe two share one GPU, so only that it works is to be seen here.")
    return lines, True


PARTS = {
    1: ("tests marked gpu, and faults", tests),
    2: ("MLP, batches of 32", compare, "mlp", 32),
    3: ("ResNet-18, batches of 256", compare, "resnet18", 256),
    4: ("a small transformer, batches of 32", compare, "vit", 32),
    5: ("ResNet-18, batches of 32", compare, "resnet18", 32),
    6: ("to the first step", first_steps),
    7: ("ResNet-18, batches of 256, on more devices", scaling, "resnet18"),
}

if __name__ == "__main__":
    main()
