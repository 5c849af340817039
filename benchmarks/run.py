"""How fast are the scripts, beside what a user would run instead and what the machine can do?

    python benchmarks/run.py                    everything; writes results.json and RESULTS.md,
                                                here or with --out DIR there
    python benchmarks/run.py --cases mlp-32-2   this case only (names may have *); prints only
    python benchmarks/run.py --before DIR --cases '*before*' --seconds 3
                                                single_gpu.py, ddp_spawn.py and ddp_torchrun.py in
                                                ten rounds beside an older version, of which DIR is
                                                a clone: half an hour

In each round every contestant of a case runs once, through its own command line, one after the
other, and in the next round in reverse order: minutes in which the machine is slow hit all of them.
A contestant trains until its time is up and is then killed. Its first epoch is warm-up, and the
median of the others is its rate. report.py takes ratios within a round. Keep the machine quiet
meanwhile.

On Linux, with `pip install '.[bench]'`: the tests' helpers start and end the processes.
"""

import argparse
import contextlib
import datetime
import fnmatch
import importlib.metadata
import os
import platform
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import report  # noqa: E402
import torch  # noqa: E402
from helpers.files import idx_files  # noqa: E402
from helpers.jobs import Job  # noqa: E402

EPOCH = re.compile(r"^Epoch \d+ \|.* Accuracy: \d+/\d+ \((\S+)%\) \| (\d+) samples/s$", re.M)
# The user's settings that would decide for the contestants: unset for them.
UNSET = ("OMP_NUM_THREADS", "MASTER_ADDR", "RANK", "WORLD_SIZE")
UNSET += ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# With tests/site on PYTHONPATH: no program finds an accelerator, whatever the machine has.
CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1", "LADDER_CPU": "1"}


@dataclass(frozen=True)
class Contestant:
    launch: str  # python: one process; spawn: it starts the others itself; torchrun
    program: str
    options: tuple[str, ...] = ()
    one_thread: bool = False  # OMP_NUM_THREADS=1
    processes: int | None = None  # not as many as the case has


PEER, BOUND = "benchmarks/peers.py", "benchmarks/upper_bound.py"
LONG = "recipes/long_run.py"
FRUGAL = ("--accumulate", "8")
OURS = ("--our-data",)
FABRIC, ACCELERATE = ("--by", "fabric"), ("--by", "accelerate")
CONTESTANTS = {
    "single_gpu.py": Contestant("python", "single_gpu.py"),
    "data_parallel.py": Contestant("python", "data_parallel.py"),
    "ddp_spawn.py": Contestant("spawn", "ddp_spawn.py"),
    "ddp_torchrun.py": Contestant("torchrun", "ddp_torchrun.py"),
    "multinode.py": Contestant("torchrun", "multinode.py"),  # by env://
    "long_run.py": Contestant("torchrun", LONG),
    "long_run.py --accumulate 8": Contestant("torchrun", LONG, FRUGAL),
    report.ONE: Contestant("torchrun", LONG, FRUGAL, one_thread=True, processes=1),
    "tutorial": Contestant("spawn", PEER),
    "tutorial, 1 thread": Contestant("spawn", PEER, one_thread=True),
    "Fabric": Contestant("spawn", PEER, FABRIC),
    "Accelerate": Contestant("torchrun", PEER, ACCELERATE),
    "tutorial, 1 thread, our data": Contestant("spawn", PEER, OURS, one_thread=True),
    "Fabric, our data": Contestant("spawn", PEER, (*FABRIC, *OURS)),
    "Accelerate, our data": Contestant("torchrun", PEER, (*ACCELERATE, *OURS)),
    "compute alone": Contestant("torchrun", BOUND),
    "compute + all-reduce": Contestant("torchrun", BOUND, ("--all-reduce",)),
    "compute + all-reduce --accumulate 8": Contestant("torchrun", BOUND, ("--all-reduce", *FRUGAL)),
}


@dataclass(frozen=True)
class Case:
    batch: int  # of a process
    processes: int
    contestants: tuple[str, ...]
    rounds: int = 3
    name: str = ""
    model: str = "mlp"
    size: int = 28  # of the images, which are grey and square
    samples: int = 12_288  # a whole number of global batches
    device: str = "cpu"

    @property
    def key(self) -> str:
        return "-".join(filter(None, (self.model, str(self.batch), str(self.processes), self.name)))


def all_cases(before: Path | None = None) -> list[Case]:
    """`before` is a folder with an older version of our scripts."""
    peers = ("tutorial", "tutorial, 1 thread", "Fabric", "Accelerate")
    on_our_data = ("tutorial, 1 thread, our data", "Fabric, our data", "Accelerate, our data")
    ours, others = ("ddp_spawn.py", "ddp_torchrun.py"), ("multinode.py", "long_run.py")
    names = (*ours, *on_our_data, *report.BOUNDS)
    cases = [Case(32, 2, names, model="resnet18", size=32, samples=1_536)]
    for batch in (32, 256):
        one = ("single_gpu.py", "data_parallel.py", *peers, "compute alone")
        cases.append(Case(batch, 1, one))
        frugal = ("long_run.py --accumulate 8", report.ONE, f"{report.TOGETHER} --accumulate 8")
        cases.append(Case(batch, 2, frugal, name="accumulate"))
        cases.append(Case(batch, 2, (*ours, *others, *peers, *on_our_data, *report.BOUNDS)))
        for script in ("single_gpu.py", *ours) if before else ():
            older = f"{script} before"
            program = str(before.resolve() / script)
            CONTESTANTS[older] = replace(CONTESTANTS[script], program=program)
            count = 1 if script == "single_gpu.py" else 2
            name = f"before-{Path(script).stem}"
            cases.append(Case(batch, count, (script, older), rounds=10, name=name))
    return cases


def environment(contestant: Contestant, case: Case) -> dict[str, str]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = dict.fromkeys(UNSET, "")  # Job unsets what is empty
    env |= {"PYTHONUNBUFFERED": "1", "MASTER_PORT": port}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    if contestant.one_thread:
        env["OMP_NUM_THREADS"] = "1"
    return env | (CPU_ONLY if case.device == "cpu" else {})


def command(contestant: Contestant, case: Case, data: Path) -> list[str]:
    count = contestant.processes or case.processes
    program = ROOT / contestant.program
    options = ["--batch-size", str(case.batch), "--dataset", "fashion-mnist", "--data-dir"]
    options += [str(data), "--model", case.model, *contestant.options]
    if contestant.program.startswith("benchmarks/"):
        options = ["1000", "--device", case.device, *options]
    else:
        options = ["1000", "1000", *options]  # total_epochs, save_every
    if contestant.launch == "torchrun" and (count > 1 or program.parent.name != "benchmarks"):
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
        return [sys.executable, *torchrun, str(program), *options]
    if contestant.launch == "spawn":
        options += ["--nproc-per-node", str(count)]
    return [sys.executable, str(program), *options]


def measure(words: list[str], env: dict[str, str], seconds: float, limit: float = 240) -> dict:
    """Run a contestant until its time is up: samples per second, and accuracy after two epochs."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(words, Path(folder), {**env, "TMPDIR": folder})  # killed, it cannot clean up
        start, warm, epochs = time.monotonic(), None, []
        try:
            while warm is None or len(epochs) < 2 or time.monotonic() - warm < seconds:
                if job.process.poll() is not None:
                    return {"error": job.text}
                if time.monotonic() - start > limit:
                    return {"error": f"not done after {limit:.0f} s:\n{job.text}"}
                time.sleep(0.1)  # looking costs the others time, too
                epochs = EPOCH.findall(job.text)
                if epochs and warm is None:
                    warm = time.monotonic()
        finally:
            while job.pids():
                job.kill()
    rates = [float(rate) for _, rate in epochs]
    return {"rate": statistics.median(rates[1:]), "accuracy": float(epochs[1][0])}


def run_one(case: Case, name: str, number: int, data: Path, **limits: float) -> dict:
    """A contestant's run in a round, as a record of results.json."""
    contestant = CONTESTANTS[name]
    words, env = command(contestant, case, data), environment(contestant, case)
    record = measure(words, env, **limits)
    said = f"FAILED\n{record['error']}" if "error" in record else record
    print(f"  {name}: {said}", file=sys.stderr, flush=True)
    return {"case": case.key, "contestant": name, "round": number, **record}


def run_case(case: Case, data: Path, seconds: float) -> list[dict]:
    records = []
    for number in range(case.rounds):
        for name in case.contestants[:: -1 if number % 2 else 1]:
            records.append(run_one(case, name, number, data, seconds=seconds))
    return sorted(records, key=lambda r: (r["round"], case.contestants.index(r["contestant"])))


def commit(folder: Path) -> str:
    describe = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    return subprocess.run(describe, capture_output=True, text=True).stdout.strip() or "unknown"


def machine() -> dict[str, str]:
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = torch.accelerator.current_accelerator(check_available=True)
    named = getattr(torch.get_device_module(gpu), "get_device_name", None) if gpu else None
    versions = {"Python": platform.python_version(), "torch": torch.__version__}
    for package in ("torchvision", "lightning-fabric", "accelerate"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    cores = len(os.sched_getaffinity(0))
    return {
        "CPU": f"{found[1] if found else platform.machine()}, {cores} cores, {memory:.0f} GiB",
        "GPU": named(0) if named else str(gpu or "none"),
        "System": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "Source": f"commit {commit(ROOT)}",
        "Date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC",
        "Load before": f"{os.getloadavg()[0]:.2f} (1 minute)",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="+", metavar="NAME", default=["*"], help="only these")
    parser.add_argument("--seconds", type=float, default=5, help="of a run, after warm-up")
    parser.add_argument("--rounds", type=int, help="of each case")
    parser.add_argument("--before", type=Path, help="a clone of an older version, to run beside")
    parser.add_argument("--out", type=Path, help="folder for what is written")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and clean up on the way
    cases = {case.key: case for case in all_cases(args.before)}
    wanted = [key for key in cases if any(fnmatch.fnmatch(key, name) for name in args.cases)]
    if not wanted:
        sys.exit(f"no such case; there are {', '.join(cases)}")
    out = args.out or (HERE if wanted == [*cases] else None)
    start = time.monotonic()
    result = {"machine": machine(), "seconds": args.seconds, "records": []}
    if args.before:
        result["machine"]["Before"] = f"commit {commit(args.before)}"
    with tempfile.TemporaryDirectory() as folder:
        for number, key in enumerate(wanted, start=1):
            print(f"[{number} of {len(wanted)}] {key}", flush=True)
            case = cases[key]
            case = replace(case, rounds=args.rounds or case.rounds)
            data = idx_files(Path(folder, key), case.samples, 2_000, size=case.size)
            result["records"] += run_case(case, data, args.seconds)
            result["minutes"] = (time.monotonic() - start) / 60
            if out:  # after each case, because an hour may be cut short
                out.mkdir(parents=True, exist_ok=True)
                report.write(result, out)
    tables = (report.table, report.changed, report.odd_ones)
    print("\n".join(line for table in tables for line in table(result)))
    if failed := [f"{r['case']}: {r['contestant']}" for r in result["records"] if "error" in r]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
