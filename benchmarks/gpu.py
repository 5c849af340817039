"""For whoever has a machine with GPUs: one command, and one report to paste into an issue.

    python benchmarks/gpu.py > report.md        all parts, an hour and a half
    python benchmarks/gpu.py --part 2           one of them, up to 8 minutes; --help lists them
    python benchmarks/gpu.py --rehearse         with little data, also on a CPU: does it work?

The report goes to stdout. What happens meanwhile goes to stderr. The status is 1 where something
failed. It needs Linux and `pip install '.[bench,test]'`, and downloads nothing.
"""

import argparse
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import report
import run as harness
import torch
from helpers.files import idx_files
from helpers.jobs import Job
from run import HERE, PEER, ROOT, Case, Contestant

MODELS = {"mlp": (28, 61_440), "resnet18": (32, 12_288), "vit": (32, 12_288)}  # image size, samples
OURS = "ddp_torchrun.py"
OPTIONS = {
    f"{OURS} --amp": Contestant("torchrun", OURS, ("--amp",)),
    f"{OURS} --compile": Contestant("torchrun", OURS, ("--compile",)),
}
SWITCHES = {
    f"{OURS}, TF32": Contestant("torchrun", OURS, switches=("--tf32",)),
    f"{OURS}, channels_last": Contestant("torchrun", OURS, switches=("--channels-last",)),
    f"{OURS}, fused=True": Contestant("torchrun", OURS, switches=("--fused",)),
    f"{OURS} --num-workers 4": Contestant("torchrun", OURS, ("--num-workers", "4")),
}
PEERS = {
    "tutorial, our data": Contestant("torchrun", PEER, harness.OURS),
    "Fabric, our data": Contestant("torchrun", PEER, (*harness.FABRIC, *harness.OURS)),
    "Accelerate, our data": Contestant("torchrun", PEER, (*harness.ACCELERATE, *harness.OURS)),
}
Section = tuple[list[str], bool]  # of the report: its lines, and whether all went well
FAILURES = (Exception, pytest.fail.Exception)  # the latter of a Job that takes too long


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parts = ", ".join(f"{number}: {part[0]}" for number, part in PARTS.items())
    parser.add_argument("--part", type=int, choices=PARTS, help=f"only this one; {parts}")
    parser.add_argument("--rehearse", action="store_true", help="little data, also on a CPU")
    args = parser.parse_args()
    found = torch.accelerator.current_accelerator(check_available=True)
    if not found and not args.rehearse:
        sys.exit(f"error: benchmarks/gpu.py needs a GPU, and torch finds none here: {no_gpu()}")
    args.device = found.type if found else "cpu"
    args.count = torch.accelerator.device_count() if found else 2  # processes on a CPU
    args.torchrun = f"-m torch.distributed.run --standalone --nproc_per_node={args.count}".split()
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup leaves SIGHUP
            signal.signal(signum, lambda *_: sys.exit("stopped"))  # and end the jobs on the way
    print("\n".join([*machine(args), "", *left_out(args)]), flush=True)
    failed = []
    for number in [args.part] if args.part else PARTS:
        title, part, *more = PARTS[number]
        start = time.monotonic()
        args.until = start + 450
        with tempfile.TemporaryDirectory() as folder:
            try:
                lines, good = part(args, Path(folder), *more)
            except FAILURES:  # the other parts go on
                found = traceback.format_exc().strip().splitlines()[-40:]
                lines, good = ["```", *found, "```"], False
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
        lines.append("- What needs two devices is left out, because there is one.")
    return lines or ["Nothing is left out."]


def machine(args: argparse.Namespace) -> list[str]:
    rows = harness.machine()
    if args.device == "cuda":
        rows["GPU"] = f"{args.count} x {rows['GPU']}"
        rows["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    rows["Command"] = f"python benchmarks/gpu.py {' '.join(sys.argv[1:])}"
    lines = ["## Report of benchmarks/gpu.py", "", "| | |", "| --- | --- |"]
    return [*lines, *(f"| {name} | {value} |" for name, value in rows.items())]


def tests(args: argparse.Namespace, folder: Path) -> Section:
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "-rs", "--session-timeout=600"]
    job = Job([*words, str(ROOT / "tests")], folder, {"TMPDIR": str(folder)})
    return ["```", *job.finish(seconds=660).strip().splitlines()[-40:], "```"], True


def speed(args: argparse.Namespace, folder: Path, model: str, several: bool) -> Section:
    if several and args.count < 2:
        return ["Skipped: it needs two devices, and there is one."], True
    count, bound = (args.count, report.TOGETHER) if several else (1, report.ALONE)
    one = () if several else ("single_gpu.py", "tutorial")
    return rates(args, folder, model, count, (OURS, *OPTIONS, *PEERS, *one), bound)


def options(args: argparse.Namespace, folder: Path, model: str) -> Section:
    return rates(args, folder, model, args.count, (*OPTIONS, *SWITCHES), OURS)


def rates(
    args: argparse.Namespace, folder: Path, model: str, count: int, names: tuple, bound: str
) -> Section:
    """A row for each contestant, and what its rate is of that of `bound`."""
    compiles = args.compiles and (model == "mlp" or not args.rehearse)  # minutes on a CPU
    names = (*(name for name in names if compiles or "--compile" not in name), bound)
    harness.CONTESTANTS.update(OPTIONS | SWITCHES | PEERS)
    size, samples = MODELS[model]
    batches, samples = ((4,), 32) if args.rehearse else ((32, 256), count * samples)
    data = idx_files(folder, samples, samples // 8, size=size)
    cases = [Case(batch, count, names, model=model, device=args.device) for batch in batches]
    result = {"records": []}
    for number, case in itertools.product(range(1 if args.rehearse else 3), cases):
        for name in harness.shuffled(case, names, number):
            if (left := args.until - time.monotonic()) > (90 if number else 0):
                limits = {"seconds": 0 if args.rehearse else 3, "limit": left}
                result["records"].append(harness.run_one(case, name, number, data, **limits))
    columns = {case.key: (f"batches of {case.batch}", bound) for case in cases}
    lines = report.table(result, columns)
    lines += [f"\nIn brackets is the share of {bound}. For an empty cell no time was left."]
    failed = {r["contestant"]: error_line(r["error"]) for r in result["records"] if "error" in r}
    lines += [f"- {name}: `{line}`" for name, line in failed.items()]
    ours = [line for name, line in failed.items() if report.kind(name) != 1]  # not the peers
    return lines, all(line.startswith("not done") for line in ours)


def error_line(text: str) -> str:
    """That a job was cut short, or the first error that Python names in its output."""
    pattern = r"^(not done after .*|(?:\[\w+\]:)? ?[\w.]+(?:Error|Exception)\b.*)"
    found = re.search(pattern, text, re.M)
    return found[1] if found else (text.strip() or "no output").splitlines()[-1]


def start(args: argparse.Namespace, folder: Path, *words: object) -> Job:
    env = harness.environment(harness.CONTESTANTS[OURS], Case(32, 1, (), device=args.device))
    return Job([sys.executable, *map(str, words), "--device", args.device], folder, env)


def waits(args: argparse.Namespace, folder: Path) -> Section:
    batch, steps = (4, 4) if args.rehearse else (32, 40)
    lines, good = [], True
    kinds = [((), ()), ((), ("--amp",)), (("--tf32",), ()), (("--channels-last",), ())]
    kinds += [((), ("--compile",))] if args.compiles else []
    for (switches, options), model in itertools.product(kinds, MODELS):
        only = "resnet18" if "--channels-last" in switches else "mlp"  # it has convolutions
        if model != only and (args.rehearse or only == "resnet18"):
            continue
        samples = batch * args.count * steps
        data = idx_files(folder / model, samples, 100, size=MODELS[model][0])
        more = ("--model", model, "--dataset", "fashion-mnist", "--data-dir", data, *options)
        more += ("--batch-size", batch)
        programs = (HERE / "vit.py", *switches, HERE / "gaps.py", ROOT / OURS)
        job = start(args, folder, *args.torchrun, *programs, *more)
        try:
            text = job.finish(seconds=max(1, int(args.until - time.monotonic())))
            found = text.split("Trace | ")[1].split("\n")[0]
        except FAILURES as error:
            found = error_line(str(error))
            good = good and found.startswith("not done")
        lines.append(f"- {' '.join((model, *switches, *options))}: {found}")
    return lines, good


def ends(args: argparse.Namespace, folder: Path) -> Section:
    lines, jobs = ["| what | seconds |", "| --- | ---: |"], []
    saved, resumed = r"^Epoch \d+ \| Training checkpoint saved", "^Resuming training"

    def begin(*words: object) -> Job:
        jobs.append(start(args, folder, *words, "1000"))  # epochs
        return jobs[-1]

    def seconds(what: str, wait: Callable, wanted: object) -> None:
        begin = time.monotonic()
        wait(wanted)
        lines.append(f"| {what} | {time.monotonic() - begin:.1f} |")

    try:
        job = begin(*args.torchrun, ROOT / OURS)
        seconds("torchrun ddp_torchrun.py: to the end of the first epoch", job.wait_for, saved)
        job.process.send_signal(signal.SIGTERM)
        seconds("SIGTERM to torchrun: until all have saved and ended", job.finish, 1)
        assert "| Stopped at sample" in job.text, job.text
        job = begin(*args.torchrun, "--max-restarts=1", ROOT / OURS, "--resume")
        seconds("the same with --resume: until training goes on", job.wait_for, resumed)
        job.wait_for(saved)
        os.kill(job.workers()[-1], signal.SIGKILL)
        twice = f"(?s)({resumed}.*){{2}}"
        seconds("kill -9 of a rank, restart: until training goes on", job.wait_for, twice)
        job.kill()
        job = begin(ROOT / "ddp_spawn.py")
        seconds("ddp_spawn.py: to the end of the first epoch", job.wait_for, saved)
        os.killpg(job.process.pid, signal.SIGINT)
        seconds("Ctrl-C: until all have ended", job.finish, 130)
        job = begin(ROOT / "ddp_spawn.py", "--resume")
        job.wait_for(saved)
        os.kill(job.workers()[-1], signal.SIGKILL)
        seconds("kill -9 of a rank: until all have ended", job.finish, 1)
    except FAILURES as error:
        return [*lines, "```", *str(error).strip().splitlines()[-20:], "```"], False
    finally:
        for job in jobs:
            job.kill()
    return lines, True


PARTS = {
    1: ("tests marked gpu", tests),
    2: ("MLP on one device", speed, "mlp", False),
    3: ("ResNet-18 on one device", speed, "resnet18", False),
    4: ("a small transformer on one device", speed, "vit", False),
    5: ("MLP on all devices", speed, "mlp", True),
    6: ("ResNet-18 on all devices", speed, "resnet18", True),
    7: ("a small transformer on all devices", speed, "vit", True),
    8: ("what options bring to ResNet-18 on all devices", options, "resnet18"),
    9: ("what options bring to a small transformer on all devices", options, "vit"),
    10: ("does the device wait for the host, and how much memory is used?", waits),
    11: ("a stop, a kill and a restart", ends),
}

if __name__ == "__main__":
    main()
