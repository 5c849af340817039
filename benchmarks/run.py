"""How fast are the scripts, beside what a user would run instead and what the machine can do?

    python benchmarks/run.py                    everything; writes results.json and RESULTS.md,
                                                here or with --out DIR there
    python benchmarks/run.py --before DIR       the same, and single_gpu.py, ddp_spawn.py and
                                                ddp_torchrun.py beside an older version, of which
                                                DIR is a clone
    python benchmarks/run.py --cases mlp-32-2   this case only (names may have *); prints only

All contestants of a case are started, each through its own command line, and then their ranks are
stopped (SIGSTOP). In each round every contestant goes on in turn, until it has trained one epoch
from start to end, and in the next round in reverse order: minutes in which the machine is slow hit
all of them. report.py takes ratios within a round. Keep the machine quiet meanwhile. They need 14
GiB of memory.

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
UNTIL_KILLED = ("--save-minutes", "1e6", "--save-steps", "1000000", "--timeout", "86400")
FRUGAL = ("--accumulate", "8")
OURS = ("--our-data",)
FABRIC, ACCELERATE = ("--by", "fabric"), ("--by", "accelerate")
CONTESTANTS = {
    "single_gpu.py": Contestant("python", "single_gpu.py"),
    "data_parallel.py": Contestant("python", "data_parallel.py"),
    "ddp_spawn.py": Contestant("spawn", "ddp_spawn.py"),
    "ddp_torchrun.py": Contestant("torchrun", "ddp_torchrun.py"),
    "multinode.py": Contestant("torchrun", "multinode.py"),  # by env://
    "long_run.py": Contestant("torchrun", LONG, UNTIL_KILLED),
    "long_run.py --accumulate 8": Contestant("torchrun", LONG, (*UNTIL_KILLED, *FRUGAL)),
    report.ONE: Contestant("torchrun", LONG, (*UNTIL_KILLED, *FRUGAL), True, processes=1),
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
    samples: int  # a whole number of global batches
    name: str = ""
    rounds: int = 10
    model: str = "mlp"
    size: int = 28  # of the images, which are grey and square

    @property
    def key(self) -> str:
        return "-".join(filter(None, (self.model, str(self.batch), str(self.processes), self.name)))


def all_cases(before: Path | None = None) -> list[Case]:
    """`before` is a folder with an older version of our scripts."""
    peers = ("tutorial", "tutorial, 1 thread", "Fabric", "Accelerate")
    on_our_data = ("tutorial, 1 thread, our data", "Fabric, our data", "Accelerate, our data")
    ours, others = ("ddp_spawn.py", "ddp_torchrun.py"), ("multinode.py", "long_run.py")
    names = (*ours, *on_our_data, *report.BOUNDS)
    cases = [Case(32, 2, names, samples=256, model="resnet18", size=32)]
    for batch, samples in ((32, 2_048), (256, 8_192)):
        one = ("single_gpu.py", "data_parallel.py", *peers, "compute alone")
        cases.append(Case(batch, 1, one, samples))
        frugal = ("long_run.py --accumulate 8", report.ONE, f"{report.TOGETHER} --accumulate 8")
        cases.append(Case(batch, 2, frugal, samples, name="accumulate"))
        two = (*ours, *others, *peers, *on_our_data, *report.BOUNDS)
        cases.append(Case(batch, 2, two, samples))
        for script in ("single_gpu.py", *ours) if before else ():
            older = f"{script} before"
            program = str(before.resolve() / script)
            CONTESTANTS[older] = replace(CONTESTANTS[script], program=program)
            count = 1 if script == "single_gpu.py" else 2
            name = f"before-{Path(script).stem}"
            cases.append(Case(batch, count, (script, older), samples, name, rounds=30))
    return cases


def environment(contestant: Contestant) -> dict[str, str]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    env = dict.fromkeys(UNSET, "")  # Job unsets what is empty
    env |= {"PYTHONUNBUFFERED": "1", "MASTER_PORT": port}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    if contestant.one_thread:
        env["OMP_NUM_THREADS"] = "1"
    return env | CPU_ONLY


def command(contestant: Contestant, case: Case, data: Path) -> list[str]:
    count = contestant.processes or case.processes
    program = ROOT / contestant.program
    options = ["--batch-size", str(case.batch), "--dataset", "fashion-mnist", "--data-dir"]
    options += [str(data), "--model", case.model, *contestant.options]
    if contestant.program.startswith("benchmarks/"):
        options = ["1000", *options]
    else:
        options = ["1000", "1000", *options]  # total_epochs, save_every
    if contestant.launch == "torchrun" and (count > 1 or program.parent.name != "benchmarks"):
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
        return [sys.executable, *torchrun, str(program), *options]
    if contestant.launch == "spawn":
        options += ["--nproc-per-node", str(count)]
    return [sys.executable, str(program), *options]


class Run(Job):
    """A contestant, whose ranks are stopped but while it has its turn."""

    def __init__(self, contestant: Contestant, case: Case, data: Path, folder: Path) -> None:
        folder.mkdir()
        words, env = command(contestant, case, data), environment(contestant)
        super().__init__(words, folder, {**env, "TMPDIR": str(folder)})

    def warm_up(self) -> None:
        self.wait_for_epochs(1)
        pids = self.pids()
        # Without torchrun's own process, which would miss its heartbeats.
        self.ranks = pids[1:] if "torch.distributed.run" in self.command else pids
        self.signal(signal.SIGSTOP)

    def signal(self, number: int) -> None:
        for pid in self.ranks:
            os.kill(pid, number)

    def wait_for_epochs(self, count: int, limit: float = 240) -> list[tuple[str, str]]:
        start = time.monotonic()
        while len(found := EPOCH.findall(self.text)) < count:
            if self.process.poll() is not None or time.monotonic() - start > limit:
                raise RuntimeError(f"no {count} epochs in {limit:.0f} s:\n{self.text}")
            time.sleep(0.02)  # looking costs the others time, too
        return found

    def turn(self) -> float:
        """Samples per second of the next epoch that begins and ends within this turn."""
        count = len(EPOCH.findall(self.text))
        self.signal(signal.SIGCONT)
        found = self.wait_for_epochs(count + 2)
        self.signal(signal.SIGSTOP)
        return float(found[count + 1][1])


def run_case(case: Case, data: Path, rounds: int) -> list[dict]:
    """The records of results.json: of each contestant, its rate in each round, and what it has
    learnt after as many epochs as all others."""
    records = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        runs = {}
        for name in case.contestants:
            print(f"  {name}", file=sys.stderr, flush=True)
            runs[name] = Run(CONTESTANTS[name], case, data, Path(folder, f"{len(runs)}"))
            stack.callback(runs[name].kill)
            runs[name].warm_up()
        for number in range(rounds):
            for name in case.contestants[:: -1 if number % 2 else 1]:
                record = {"case": case.key, "contestant": name, "round": number}
                record["rate"] = runs[name].turn()
                print(f"  {record}", file=sys.stderr, flush=True)
                records.append(record)
        epochs = {name: EPOCH.findall(run.text) for name, run in runs.items()}
        last = min(map(len, epochs.values())) - 1
        for record in records:
            record["accuracy"] = float(epochs[record["contestant"]][last][0])
    return sorted(records, key=lambda r: (r["round"], case.contestants.index(r["contestant"])))


def commit(folder: Path) -> str:
    describe = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    return subprocess.run(describe, capture_output=True, text=True).stdout.strip() or "unknown"


def machine() -> dict[str, str]:
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
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
    parser.add_argument("--rounds", type=int, help="of each case")
    parser.add_argument("--before", type=Path, help="a clone of an older version, to run beside")
    parser.add_argument("--out", type=Path, help="folder for what is written")
    args = parser.parse_args()
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda *_: sys.exit("stopped"))  # and end the others on the way
    cases = {case.key: case for case in all_cases(args.before)}
    wanted = [key for key in cases if any(fnmatch.fnmatch(key, name) for name in args.cases)]
    if not wanted:
        sys.exit(f"no such case; there are {', '.join(cases)}")
    out = args.out or (HERE if wanted == [*cases] else None)
    start, failed = time.monotonic(), []
    result = {"machine": machine(), "records": []}
    if args.before:
        result["machine"]["Before"] = f"commit {commit(args.before)}"
    with tempfile.TemporaryDirectory() as folder:
        for number, key in enumerate(wanted, start=1):
            print(f"[{number} of {len(wanted)}] {key}", flush=True)
            case = cases[key]
            data = idx_files(
                Path(folder, key), case.samples, min(case.samples, 2_000), size=case.size
            )
            try:
                result["records"] += run_case(case, data, args.rounds or case.rounds)
            except (RuntimeError, ProcessLookupError) as error:  # the other cases go on
                print(error, file=sys.stderr)
                failed.append(key)
            result["minutes"] = (time.monotonic() - start) / 60
            if out:  # after each case, because an hour may be cut short
                out.mkdir(parents=True, exist_ok=True)
                report.write(result, out)
    tables = (report.table, report.changed, report.odd_ones)
    print("\n".join(line for table in tables for line in table(result)))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
