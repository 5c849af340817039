"""For whoever has a machine with GPUs: one command, and one report to paste into an issue.

    python tools/gpu.py > report.md         all parts, a quarter of an hour on one GPU
    python tools/gpu.py --part 2 3          these, each up to 8 minutes; --help lists them
    python tools/gpu.py --before DIR        also an older version of the scripts: a clone of it
    python tools/gpu.py --rehearse          with little data, also on a CPU: does it work?

The report goes to stdout. What happens meanwhile goes to stderr. The status is 1 where something
failed. It needs Linux and `pip install '.[bench,test]'`, and downloads nothing.
"""

import argparse
import functools
import json
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests")]

import pytest  # noqa: E402
import run as harness  # noqa: E402
import torch  # noqa: E402
from helpers.jobs import Job  # noqa: E402

Section = tuple[list[str], bool]  # of the report: its lines, and whether all went well
FAILURES = (Exception, pytest.fail.Exception)  # the latter of a Job that takes too long


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parts = ", ".join(f"{number}: {part[0]}" for number, part in PARTS.items())
    parser.add_argument("--part", type=int, nargs="+", choices=PARTS, help=f"these; {parts}")
    parser.add_argument("--before", type=Path, help="a clone of an older version, to run beside")
    parser.add_argument("--seconds", type=float, default=420, help="of a part: then no new epochs")
    parser.add_argument("--rehearse", action="store_true", help="little data, also on a CPU")
    args = parser.parse_args()
    found = torch.accelerator.current_accelerator(check_available=True)
    if not found and not args.rehearse:
        sys.exit(f"error: tools/gpu.py needs a GPU, and torch finds none here: {no_gpu()}")
    args.device = found.type if found else "cpu"
    args.count = torch.accelerator.device_count() if found else 2  # processes on a CPU
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup leaves SIGHUP
            signal.signal(signum, lambda *_: sys.exit("stopped"))  # and end the jobs on the way
    print("\n".join(machine(args)), flush=True)
    failed = []
    for number in args.part or PARTS:
        title, part = PARTS[number]
        start = time.monotonic()
        args.until = start + args.seconds
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
    if args.before:
        rows["Before"] = f"commit {harness.commit(args.before)}"
    rows["Command"] = f"python tools/gpu.py {' '.join(sys.argv[1:])}"
    lines = ["## Report of tools/gpu.py", "", "| | |", "| --- | --- |"]
    return [*lines, *(f"| {name} | {value} |" for name, value in rows.items())]


def tests(args: argparse.Namespace, folder: Path) -> Section:
    """Their results, and after how many seconds each fault was over."""
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    words += ["-m", "gpu", "-n", "0", "-q", "-rfEs"]
    words += ["-o", "junit_family=xunit1", f"--junitxml={folder}/tests.xml"]  # with properties
    words += [str(ROOT / "tests" / "test_gpu.py")]
    env = {"TMPDIR": str(folder), "REHEARSE": "1" if args.rehearse else ""}
    job = Job(words, folder, env)
    text = job.finish(None, seconds=470)
    rows = ElementTree.parse(folder / "tests.xml").iter("property")
    lines = ["| fault | seconds |", "| --- | ---: |"]
    lines += [f"| {row.get('name')} | {row.get('value')} |" for row in rows]
    return [*lines, "", "```", *text.strip().splitlines()[-20:], "```"], job.process.returncode == 0


def compare(args: argparse.Namespace, _: Path, model: str, batch: int) -> Section:
    import in_turn  # here, because it takes what the tests shall have

    steps, batch = (3, 4) if args.rehearse else (in_turn.STEPS[model], batch)
    compiles = model == "mlp" or not args.rehearse  # minutes on a CPU
    found = in_turn.contestants(model, batch, steps, args.device, compiles, args.before)
    seconds, errors = in_turn.measure(found, 1 if args.rehearse else 5, args.until)
    lines = in_turn.table(found, seconds, steps, batch)
    epochs = min(map(len, (runs for name, runs in seconds.items() if name not in errors)))
    lines.append(f"\nMedians of {epochs} or more epochs of {steps} steps.")
    lines += [f"- {name}: `{error}`" for name, error in errors.items()]
    return lines, not errors


def scaling(args: argparse.Namespace, folder: Path, model: str, batch: int) -> Section:
    """Weak: as many samples a device; strong: as many in all."""
    lines = ["| devices | samples/s | of one's each | strong: faster |", "| ---: |" + " ---: |" * 3]
    options = [model, "--batch-size", str(batch)]
    if args.rehearse:
        options, batch = [model, "--batch-size", "8", "--steps", "3", "--rounds", "1"], 8
    first = {}
    for count in (1, 2, 4, 8):
        if count > args.count:
            continue
        words = f"-m torch.distributed.run --standalone --nproc_per_node={count}".split()
        env = harness.CPU_ONLY if args.device == "cpu" else {}
        job = Job([sys.executable, *words, str(HERE / "in_turn.py"), *options], folder, env)
        text = job.finish(seconds=200)
        found = json.loads(text.split("Seconds a step: ")[1].splitlines()[0])
        first = first or found
        rate, weak = count * batch / found["weak"], first["weak"] / found["weak"]
        strong = first["strong"] / found["strong"]
        lines.append(f"| {count} | {rate:,.0f} | {weak:.2f} | {strong:.2f} |")
    return lines, True


PARTS = {
    1: ("tests marked gpu, and faults", tests),
    2: ("MLP, batches of 32", functools.partial(compare, model="mlp", batch=32)),
    3: ("ResNet-18, batches of 256", functools.partial(compare, model="resnet18", batch=256)),
    4: ("a small transformer, batches of 32", functools.partial(compare, model="vit", batch=32)),
    5: ("ResNet-18 on more devices", functools.partial(scaling, model="resnet18", batch=256)),
}

if __name__ == "__main__":
    main()
