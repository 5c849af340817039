"""For whoever has a machine with GPUs: one command, and one report to paste into an issue.

    python benchmarks/gpu.py > report.md         all parts, about a quarter of an hour
    python benchmarks/gpu.py --part 2 3          these; --help lists them
    python benchmarks/gpu.py --before DIR        also an older version of the scripts: a clone of it
    python benchmarks/gpu.py --rehearse          does it work? With tiny networks, also on a CPU

The report goes to stdout. What happens meanwhile goes to stderr. The status is 1 where something
failed. It needs Linux and `pip install '.[bench,test]'`, and downloads nothing.
"""

import argparse
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import pytest  # noqa: E402
import run as harness  # noqa: E402
import torch  # noqa: E402
from helpers.jobs import ALONE, Job, command  # noqa: E402

Section = tuple[list[str], bool]  # of the report: its lines, and whether all went well
FAILURES = (Exception, pytest.fail.Exception)  # the latter of a Job that takes too long


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parts = ", ".join(f"{number}: {part[0]}" for number, part in PARTS.items())
    parser.add_argument("--part", type=int, nargs="+", choices=PARTS, help=f"these; {parts}")
    parser.add_argument("--before", type=Path, help="a clone of an older version, to run beside")
    parser.add_argument("--rehearse", action="store_true", help="tiny networks, also on a CPU")
    args = parser.parse_args()
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if not found and not args.rehearse:
        sys.exit(f"error: benchmarks/gpu.py needs a GPU, and torch finds none here: {no_gpu()}")
    args.device = found.type if found else "cpu"
    args.count = torch.accelerator.device_count() if found else 2  # processes on a CPU
    os.environ["REHEARSE"] = "1" if args.rehearse else ""  # for the tests and networks.py
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup leaves SIGHUP
            signal.signal(signum, lambda *_: sys.exit("stopped"))  # and end the jobs on the way
    print("\n".join(machine(args)), flush=True)
    args.start, failed = time.monotonic(), []
    for number in args.part or PARTS:
        title, part = PARTS[number]
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                lines, good = part(args, Path(folder))
            except FAILURES:  # the other parts go on
                lines = traceback.format_exc().strip().splitlines()[-40:]
                lines, good = ["```", *lines, "```"], False
        print(f"\n### Part {number}: {title}\n", *lines, sep="\n")
        print(f"\nIt took {time.monotonic() - start:.0f} seconds.", flush=True)
        failed += [] if good else [str(number)]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
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
        pairs = [(one, other) for one in range(args.count) for other in range(args.count)]
        pairs = [torch.cuda.can_device_access_peer(*pair) for pair in pairs if len({*pair}) == 2]
        rows["Peer-to-peer"] = f"{sum(pairs)} of {len(pairs)} pairs of GPUs"
    if args.before:
        rows["Before"] = f"commit {harness.commit(args.before)}"
    rows["Command"] = f"python benchmarks/gpu.py {' '.join(sys.argv[1:])}"
    lines = ["## Report of benchmarks/gpu.py", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in rows.items()]
    if shutil.which("nvidia-smi"):  # NV18: 18 links of NVLink; PHB, NODE, SYS: through the host
        topology = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True)
        lines += ["", "```", *topology.stdout.split("\n\n")[0].splitlines(), "```"]
    return lines


def left(args: argparse.Namespace, limit: float) -> float:
    """Seconds for what may take so many: fewer where the quarter of an hour is nearly over."""
    return max(20, min(limit, args.start + 900 - time.monotonic()))


def tests(args: argparse.Namespace, folder: Path) -> Section:
    """Their results, and after how many seconds each fault was over."""
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    words += ["-m", "gpu", "-n", "0", "-q", "-rfEs"]
    words += ["-o", "junit_family=xunit1", f"--junitxml={folder}/tests.xml"]  # with properties
    words += [str(ROOT / "tests" / "test_gpu.py")]
    words += ["-k", "exception"] if args.rehearse else []  # REHEARSE=1 pytest -m gpu runs them all
    job = Job(words, folder, {"TMPDIR": str(folder)})
    text = job.finish(None, seconds=left(args, 470))
    rows = ElementTree.parse(folder / "tests.xml").iter("property")
    lines = ["| fault | seconds |", "| --- | ---: |"]
    lines += [f"| {row.get('name')} | {row.get('value')} |" for row in rows]
    return [*lines, "", "```", *text.strip().splitlines()[-20:], "```"], job.process.returncode == 0


def steps(args: argparse.Namespace, _: Path) -> Section:
    import in_turn  # here, because it takes what the tests shall have

    found = in_turn.contestants(args.device, args.before)
    until = time.monotonic() + left(args, 240)
    seconds, errors = in_turn.measure(found, 1 if args.rehearse else 5, until)
    batch, count = in_turn.BATCH["resnet50"], in_turn.STEPS
    lines = ["| | ms a step | from | to | images/s | threads |", "| --- |" + " ---: |" * 5]
    for name, runs in seconds.items():
        if runs:
            cells = [statistics.median(runs), min(runs), max(runs)]
            cells = [f"{cell / count * 1e3:.1f}" for cell in cells]
            cells += [f"{batch * count / statistics.median(runs):,.0f}", str(found[name].threads)]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    epochs = min(map(len, (runs for name, runs in seconds.items() if name not in errors)))
    lines.append(f"\nMedians of {epochs} or more epochs of {count} steps of {batch} images.")
    return [*lines, *(f"- {name}: `{error}`" for name, error in errors.items())], not errors


def scaling(args: argparse.Namespace, folder: Path) -> Section:
    """Samples per second of all devices, by their number."""
    heads = "| devices | samples/s | efficiency | speed-up | compiled: samples/s |"
    tables = {network: [heads, "| ---: |" + " ---: |" * 4] for network in ("resnet50", "gpt")}
    first, failures = {}, []
    counts = [args.count] if args.rehearse else [1, 2, 4, 8]
    for count in [count for count in counts if count <= args.count]:
        words = f"-m torch.distributed.run --standalone --nproc_per_node={count}".split()
        env = {"OMP_NUM_THREADS": "4"}  # for each process, whatever their number
        env |= harness.CPU_ONLY if args.device == "cpu" else {}
        job = Job([sys.executable, *words, str(HERE / "in_turn.py")], folder, env)
        try:
            text = job.finish(seconds=left(args, 240))
        except FAILURES as failure:  # the other counts go on
            failures += ["", f"{count} failed:", "", "```", *str(failure).splitlines()[-30:], "```"]
            continue
        rates, *errors = text.split("Samples per second: ")[1].splitlines()
        rates = json.loads(rates)
        failures += [f"- {count}: `{error}`" for error in errors if error.startswith("(")]
        first = first or {"count": count, **rates}
        for network, lines in tables.items():
            weak, strong, compiled = (
                rates.get(f"{network} {kind}", math.nan) for kind in ("weak", "strong", "compiled")
            )
            each = weak / count / (first.get(f"{network} weak", math.nan) / first["count"])
            faster = strong / first.get(f"{network} strong", math.nan)
            lines.append(f"| {count} | {weak:,.0f} | {each:.2f} | {faster:.2f} | {compiled:,.0f} |")
    lines = [line for network, rows in tables.items() for line in (f"\n{network}\n", *rows)]
    lines.append(
        "\nEach device has as many samples as one alone, but for the speed-up as many in all."
    )
    return [*lines, *failures], not failures


def doctor(args: argparse.Namespace, folder: Path) -> Section:
    """It finds nothing in the five scripts, also here."""
    together = f"torchrun --standalone --nproc_per_node={args.count} {ROOT}/ddp_torchrun.py"
    commands = [("python multinode.py", *ALONE)]
    if not args.rehearse:
        others = ("single_gpu", "data_parallel", "ddp_spawn")
        commands += [(together,), *((f"python {name}.py",) for name in others)]
    lines, good = ["| command | last line | seconds |", "| --- | --- | ---: |"], True
    for number, words in enumerate(commands):
        words += (2, "--snapshot-path", f"{number}.pt")  # two epochs
        start, line = time.monotonic(), " ".join(map(str, words))
        job = Job([sys.executable, str(ROOT / "doctor"), *command(*words)], folder, {})
        text = job.finish(None, seconds=left(args, 120))
        found = re.findall("^FOUND .*", text, re.M)
        last = text.strip().splitlines()[-1]
        lines.append(f"| {line} | {last} | {time.monotonic() - start:.0f} |")
        lines += [f"| | {one} | |" for one in found]
        good = good and job.process.returncode == 0
    return lines, good


PARTS = {
    1: ("tests marked gpu, and faults", tests),
    2: ("ResNet-50 and a GPT of 124 million weights on more devices", scaling),
    3: ("what the doctor finds in the scripts", doctor),
    4: ("a step of ResNet-50, one device", steps),  # last, because it keeps the device's memory
}

if __name__ == "__main__":
    main()
