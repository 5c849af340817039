"""How fast are the scripts, beside what a user would run instead and what the machine can do?

    python benchmarks/run.py                     everything; writes RESULTS.md and the plot
    python benchmarks/run.py --list              the cases
    python benchmarks/run.py --cases 'mlp-*-2'   some of them, for the terminal: writes to a folder
                                                 named by --out, or nothing
    python benchmarks/run.py --quick --out DIR   does it all run? The numbers mean nothing
    python benchmarks/run.py --before DIR        ddp_spawn.py and ddp_torchrun.py beside another
                                                 version of them, which is in DIR with its common/

In each round every contestant of a case runs once, through its own command line, one after the
other, in an order drawn anew: minutes in which the machine is slow hit all of them. A contestant
trains until its time is up and is then killed; the first epoch is warm-up, and the median of the
others is the round's rate. Ratios are taken within a round. Keep the machine quiet meanwhile.
"""

import argparse
import contextlib
import datetime
import fnmatch
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pickle
import platform
import random
import re
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import report  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from common.data import make_digits  # noqa: E402

try:
    from helpers.hosts import Hosts, requirements
except ImportError:  # it needs pytest
    Hosts = None

STEP = re.compile(r"\[[A-Z]+0\] Epoch 0 \| Batchsize: \d+ \| Steps: \d+")
EPOCH = re.compile(r"^Epoch \d+ \|.* Accuracy: \d+/\d+ \((\S+)%\) \| (\d+) samples/s$", re.M)
# With tests/site on PYTHONPATH: no program finds an accelerator, whatever the machine has.
CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "LADDER_CPU": "1"}
LIMIT = 240  # seconds for one run
LOCAL = 12_288  # samples of an epoch: a whole number of batches of 256 for 1, 2 and 4 processes


@dataclass(frozen=True)
class Contestant:
    launch: str  # python: one process; spawn, node: it starts the others itself; torchrun
    program: str
    options: tuple[str, ...] = ()
    one_thread: bool = False  # OMP_NUM_THREADS=1
    processes: int | None = None  # not as many as the case has
    needs: str | None = None  # a package
    edit: tuple[str, str] | None = None  # in a copy of the program: this text, and what for it


CONTESTANTS = {
    "single_gpu.py": Contestant("python", "single_gpu.py"),
    "data_parallel.py": Contestant("python", "data_parallel.py"),
    "ddp_spawn.py": Contestant("spawn", "ddp_spawn.py"),
    "ddp_torchrun.py": Contestant("torchrun", "ddp_torchrun.py"),
    "multinode.py": Contestant("node", "multinode.py"),
    "ddp_torchrun.py --accumulate 8": Contestant(
        "torchrun", "ddp_torchrun.py", ("--accumulate", "8")
    ),
    "the same, 1 process, 1 thread": Contestant(
        "torchrun", "ddp_torchrun.py", ("--accumulate", "8"), one_thread=True, processes=1
    ),
    "ddp_torchrun.py --amp bf16": Contestant("torchrun", "ddp_torchrun.py", ("--amp", "bf16")),
    "ddp_torchrun.py --compile": Contestant("torchrun", "ddp_torchrun.py", ("--compile",)),
    # One choice changed at a time: what does it buy?
    "SGD fused": Contestant(
        "spawn",
        "ddp_spawn.py",
        edit=("momentum=args.momentum)", "momentum=args.momentum, fused=True)"),
    ),
    "DDP's own buckets": Contestant(
        "spawn", "ddp_spawn.py", edit=("bucket_cap_mb=25 if", "bucket_cap_mb=None if")
    ),
    "gradients copied to the buckets": Contestant(
        "spawn",
        "ddp_spawn.py",
        edit=("gradient_as_bucket_view=True", "gradient_as_bucket_view=False"),
    ),
    "samples fetched one at a time": Contestant(
        "spawn",
        "ddp_spawn.py",
        edit=("        dataset,\n", "        torch.utils.data.ConcatDataset([dataset]),\n"),
    ),
    "all threads in each process": Contestant(
        "spawn",
        "ddp_spawn.py",
        edit=(
            "max(1, torch.get_num_threads() // args.nproc_per_node)",
            "torch.get_num_threads()",
        ),
    ),
    "a session for each process": Contestant(
        "spawn",
        "ddp_spawn.py",
        edit=("    device = ddp_setup(", "    os.setsid()\n    device = ddp_setup("),
    ),
    "ddp_torchrun.py, agreeing on a stop at every step": Contestant(
        "torchrun",
        "ddp_torchrun.py",
        edit=("if step % self.ask_every > 0 and", "if step % 1 > 0 and"),
    ),
    "tutorial": Contestant("spawn", "benchmarks/tutorial.py"),
    "tutorial, 1 thread": Contestant("spawn", "benchmarks/tutorial.py", one_thread=True),
    "Fabric": Contestant("spawn", "benchmarks/with_fabric.py", needs="lightning_fabric"),
    "Accelerate": Contestant("torchrun", "benchmarks/with_accelerate.py", needs="accelerate"),
    "tutorial, 1 thread, our data": Contestant(
        "spawn", "benchmarks/tutorial.py", ("--our-data",), one_thread=True
    ),
    "Fabric, our data": Contestant(
        "spawn", "benchmarks/with_fabric.py", ("--our-data",), needs="lightning_fabric"
    ),
    "Accelerate, our data": Contestant(
        "torchrun", "benchmarks/with_accelerate.py", ("--our-data",), needs="accelerate"
    ),
    "compute alone": Contestant("torchrun", "benchmarks/upper_bound.py"),
    "compute + all-reduce": Contestant("torchrun", "benchmarks/upper_bound.py", ("--all-reduce",)),
    "compute + all-reduce, mp.spawn": Contestant(
        "spawn", "benchmarks/upper_bound.py", ("--all-reduce",)
    ),
    "compute + all-reduce --accumulate 8": Contestant(
        "torchrun", "benchmarks/upper_bound.py", ("--all-reduce", "--accumulate", "8")
    ),
}


@dataclass(frozen=True)
class Case:
    model: str
    dataset: str
    batch: int  # a process
    processes: int
    contestants: tuple[str, ...]  # the first is the one that the table holds the others against
    samples: int = LOCAL  # of an epoch
    rounds: int = 2
    close: tuple[str, ...] = ()  # who is so close to the first that they run in more rounds
    more_rounds: int = 0
    seconds: float | None = None  # of a run, after warm-up; else those of the command line
    name: str = ""  # of a special one; "start": to the first step
    hosts: int = 0  # one process each, one thread each
    link: str = ""  # what each host may send; else as it is
    device: str = "cpu"

    @property
    def key(self) -> str:
        where = f"{self.hosts}hosts" if self.hosts else str(self.processes)
        where = "gpu" if self.device != "cpu" else where
        return "-".join(filter(None, (self.model, str(self.batch), where, self.name, self.link)))

    @property
    def title(self) -> str:
        size = f"{self.model}, {self.dataset}-shaped data, batches of {self.batch}"
        special = {
            "accumulate": ", 8 of them a step",
            "choices": ", one choice changed",
            "start": ", to the first step",
            "before": ", beside another version",
        }
        size += special.get(self.name, "")
        if self.device != "cpu":
            return f"{size}, one {self.device.upper()} device"
        if not self.hosts:
            return f"{size}, {self.processes} process{'es' if self.processes > 1 else ''}"
        return f"{size}, {self.hosts} hosts, link {self.link or 'as it is'}"


PEERS = ("tutorial", "tutorial, 1 thread", "Fabric", "Accelerate")
ON_OUR_DATA = ("tutorial, 1 thread, our data", "Fabric, our data", "Accelerate, our data")
BOUNDS = ("compute alone", "compute + all-reduce", "compute + all-reduce, mp.spawn")
CHOICES = (
    "ddp_spawn.py",
    *(name for name, contestant in CONTESTANTS.items() if contestant.edit),
    "ddp_torchrun.py",
)


def all_cases(gpu: str | None) -> list[Case]:
    mlp, convnet, resnet = ("mlp", "fashion-mnist"), ("convnet", "mnist"), ("resnet18", "cifar10")
    cases = []
    long = {"rounds": 3, "more_rounds": 12, "seconds": 5}  # for differences of some percent
    for batch in (32, 256):
        one = ("single_gpu.py", "data_parallel.py", *PEERS, "compute alone")
        ours = ("ddp_spawn.py", "ddp_torchrun.py", "multinode.py")
        two = (*ours, *PEERS, *ON_OUR_DATA, *BOUNDS)
        close = ("single_gpu.py", "compute alone")
        cases.append(Case(*mlp, batch, 1, one, close=close, **long))
        close = ("ddp_spawn.py", "ddp_torchrun.py", *BOUNDS[1:])
        close += ("tutorial",) if batch == 256 else ()
        cases.append(Case(*mlp, batch, 2, two, close=close, **long))
        # More processes than a laptop has cores: to show what that does.
        few = ("ddp_torchrun.py", "tutorial, 1 thread", "compute + all-reduce")
        cases.append(Case(*mlp, batch, 4, few))
        frugal = ("ddp_torchrun.py --accumulate 8", "the same, 1 process, 1 thread")
        frugal += ("compute + all-reduce --accumulate 8",)
        cases.append(Case(*mlp, batch, 2, frugal, rounds=9, name="accumulate"))
        cases.append(Case(*mlp, batch, 2, CHOICES, rounds=4, name="choices"))
    cases.append(Case(*mlp, 32, 1, ("single_gpu.py", "tutorial"), rounds=15, name="start"))
    names = ("ddp_spawn.py", "ddp_torchrun.py", "tutorial")
    cases.append(Case(*mlp, 32, 2, names, rounds=11, name="start"))
    for batch in (32, 256):
        one = ("single_gpu.py", "tutorial", "Fabric", "Accelerate", "compute alone")
        two = ("ddp_torchrun.py", *PEERS, "compute + all-reduce")
        cases.append(Case(*convnet, batch, 1, one, samples=4096))
        cases.append(Case(*convnet, batch, 2, two, samples=4096))
    cases.append(Case(*resnet, 32, 1, ("single_gpu.py", "compute alone"), samples=256))
    cases.append(Case(*resnet, 32, 2, ("ddp_torchrun.py", *BOUNDS[:2]), samples=256))
    # Over a slow link a step takes long: fewer of them.
    remote = ("multinode.py", "tutorial, 1 thread", "compute + all-reduce")
    frugal = ("multinode.py", "ddp_torchrun.py --accumulate 8", *remote[1:])
    for link, steps in (("", 96), ("1gbit", 32), ("100mbit", 8)):
        for hosts, batch, names in ((2, 32, frugal), (2, 256, remote), (3, 32, remote)):
            if (hosts, batch, link) == (2, 32, ""):
                names = (*names[:-1], "Fabric", "Accelerate", names[-1])
            samples = steps * batch * hosts
            if batch == 256:
                samples = min(LOCAL, samples)
            cases.append(Case(*mlp, batch, hosts, names, samples, hosts=hosts, link=link))
    if gpu:
        ours = ("single_gpu.py", "ddp_torchrun.py", "ddp_torchrun.py --amp bf16")
        ours += ("ddp_torchrun.py --compile",)
        for batch in (32, 256):
            for names in (mlp, convnet):
                contestants = (*ours, "tutorial", "Fabric", "Accelerate", "compute alone")
                cases.append(Case(*names, batch, 1, contestants, 61_440, device=gpu))
        cases.append(Case(*resnet, 256, 1, (*ours, "compute alone"), 10_240, device=gpu))
    return cases


def beside(folder: Path) -> list[Case]:
    """The cases for ours beside the same scripts in another folder, which has a common/, too."""
    scripts = ("ddp_spawn.py", "ddp_torchrun.py")
    for script in scripts:
        program = str(folder.resolve() / script)
        CONTESTANTS[f"{script} before"] = replace(CONTESTANTS[script], program=program)
    names = (*scripts, *(f"{script} before" for script in scripts))
    case = Case("mlp", "fashion-mnist", 32, 2, names, rounds=15, seconds=5, name="before")
    cases = [case, replace(case, batch=256)]
    report.TARGETS += [(c.key, s, f"{s} before", 0.97) for c in cases for s in scripts]
    return cases


# --- data ---------------------------------------------------------------------------------------


def make_data(folder: Path, dataset: str, samples: int) -> Path:
    """Files in torchvision's format and of the data set's shape, of digits that are drawn.

    A program that learns well passes 90% on them; 2,000 are for testing.
    """
    target = folder / f"{dataset}-{samples}"
    if target.exists():
        return target
    parts = {"train": make_digits(samples, seed=0), "t10k": make_digits(2_000, seed=1)}
    if dataset == "cifar10":
        base = target / "cifar-10-batches-py"
        base.mkdir(parents=True)
        train = zip(parts["train"].images.chunk(5), parts["train"].targets.chunk(5), strict=True)
        chunks = {f"data_batch_{number}": chunk for number, chunk in enumerate(train, start=1)}
        chunks["test_batch"] = (parts["t10k"].images[:256], parts["t10k"].targets[:256])
        for name, (images, labels) in chunks.items():
            data = F.pad(images, (2, 2, 2, 2)).expand(-1, 3, -1, -1).flatten(1).numpy()
            (base / name).write_bytes(pickle.dumps({"data": data, "labels": labels.tolist()}))
        names = {"label_names": [str(digit) for digit in range(10)]}
        (base / "batches.meta").write_bytes(pickle.dumps(names))
        return target
    raw = target / {"fashion-mnist": "FashionMNIST", "mnist": "MNIST"}[dataset] / "raw"
    raw.mkdir(parents=True)
    for part, data in parts.items():
        header = struct.pack(">IIII", 0x803, len(data), 28, 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + data.images.numpy().tobytes())
        header = struct.pack(">II", 0x801, len(data))
        labels = data.targets.to(torch.uint8).numpy().tobytes()
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(header + labels)
    return target


# --- one run ------------------------------------------------------------------------------------


def marked(mark: str) -> list[int]:
    """The living processes with this mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def peak_memory(pids: list[int]) -> float:
    """MB of the process that took the most, at any time of its life."""
    peaks = [0]
    for pid in pids:
        with contextlib.suppress(OSError):
            peaks += re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return max(map(int, peaks)) / 1000


def memory_together(pids: list[int]) -> float:
    """MB of these processes, without files' pages; those that several share count once."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += sum(map(int, re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB", text, re.M)))
    return total * 1024 / 1e6


def measure(commands: list[list[str]], env: dict[str, str], seconds: float | None) -> dict:
    """Run a contestant, a command for each host, until its time is up: None, to its first step."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        env = {**env, "BENCH_MARK": mark, "TMPDIR": folder}  # what is killed cannot clean up
        outputs = [Path(folder, f"output{number}") for number in range(len(commands))]
        processes, first, warm, start = [], None, None, time.monotonic()
        try:
            for command, output in zip(commands, outputs, strict=True):
                with output.open("wb") as out:
                    processes.append(
                        subprocess.Popen(
                            command,
                            cwd=folder,
                            env=env,
                            stdin=subprocess.DEVNULL,
                            stdout=out,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            while True:
                text = "\n".join(output.read_text() for output in outputs)
                now, epochs = time.monotonic(), EPOCH.findall(text)
                if first is None and STEP.search(text):
                    first = now - start
                if first and seconds is None:
                    break
                if warm is None and epochs:
                    first, warm = first or now - start, now
                if warm and len(epochs) > 1 and now - warm >= seconds:
                    break
                if any(process.poll() is not None for process in processes) or now - start > LIMIT:
                    lines = [line for line in text.splitlines() if line.strip()]
                    return {"error": lines[-1] if lines else "no output", "output": text}
                time.sleep(0.1 if first else 0.02)  # looking costs the others time, too
            return {
                "first_step": first,
                "rates": [float(rate) for _, rate in epochs],
                "accuracies": [float(accuracy) for accuracy, _ in epochs],
                "memory": peak_memory(marked(mark)),
                "together": memory_together(marked(mark)),
            }
        finally:
            while left := marked(mark):
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                for process in processes:
                    process.poll()
                time.sleep(0.02)
            for process in processes:
                process.wait()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(contestant: Contestant, case: Case) -> dict[str, str]:
    """The user's, without what would decide for the contestants."""
    ours = "OMP_NUM_THREADS MASTER_ADDR GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME RANK WORLD_SIZE"
    env = {name: value for name, value in os.environ.items() if name not in ours.split()}
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "site")))
    env |= {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "MASTER_PORT": str(free_port())}
    if case.device == "cpu":
        env |= CPU_ONLY
    if contestant.one_thread or case.hosts:
        env["OMP_NUM_THREADS"] = "1"
    if case.dataset == "cifar10":  # torchvision knows the real files' checksums
        env["LADDER_MD5"] = "skip"
    return env


def program_of(contestant: Contestant, folder: Path) -> Path:
    path = ROOT / contestant.program
    if not contestant.edit:
        return path
    code, (old, new) = path.read_text(), contestant.edit
    if code.count(old) != 1:
        raise ValueError(f"{contestant.program} has {code.count(old)} places with {old!r}")
    copy = folder / contestant.program
    copy.write_text(code.replace(old, new))
    return copy


def commands(
    contestant: Contestant, case: Case, data: Path, hosts: "Hosts | None"
) -> list[list[str]]:
    count = contestant.processes or case.processes
    program = str(program_of(contestant, data.parent))
    tail = ["1000", "--batch-size", str(case.batch), "--dataset", case.dataset, "--model"]
    tail += [case.model, "--data-dir", str(data), "--device", case.device, *contestant.options]
    if contestant.program.startswith("benchmarks/"):
        arguments = tail
    else:
        arguments = [*tail[:1], "1000", *tail[1:]]  # saves after epoch 1000
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    if hosts:
        address, words = hosts.address(0), []
        for rank in range(count):
            if contestant.program == "multinode.py":
                method = f"tcp://{address}:22225"
                ranks = ["--init-method", method, "--rank", str(rank), "--world-size", str(count)]
                words.append([sys.executable, program, *arguments, *ranks])
            else:
                nodes = ["--nnodes", str(count), "--node_rank", str(rank), "--nproc_per_node", "1"]
                nodes += ["--master_addr", address, "--master_port", "22225"]
                words.append([*torchrun, *nodes, program, *arguments])
        return [hosts.command(host, argv) for host, argv in enumerate(words)]
    if contestant.launch == "torchrun" and (count > 1 or contestant.program == "ddp_torchrun.py"):
        return [[*torchrun, "--standalone", f"--nproc_per_node={count}", program, *arguments]]
    if contestant.launch == "node":
        store = data.parent / f"store-{uuid.uuid4().hex}"
        arguments += ["--rank", "0", "--world-size", "1", "--init-method", f"file://{store}"]
    if contestant.launch in ("spawn", "node"):
        arguments += ["--nproc-per-node", str(count)]
    return [[sys.executable, program, *arguments]]


# --- all of them --------------------------------------------------------------------------------


def say(line: str) -> None:
    print(line, flush=True)


def run_case(case: Case, data: Path, hosts: "Hosts | None", seconds: float) -> list[dict]:
    records = []
    for number in range(case.rounds + case.more_rounds):
        names = case.contestants if number < case.rounds else case.close
        # Who runs when, and after whom, should not matter; the same order in every run of this.
        for name in random.Random(f"{case.key} {number}").sample(names, len(names)):
            contestant = CONTESTANTS[name]
            if contestant.needs and not importlib.util.find_spec(contestant.needs):
                say(f"  {name}: left out, {contestant.needs} is not installed")
                continue
            words = commands(contestant, case, data, hosts)
            until = None if case.name == "start" else case.seconds or seconds
            record = measure(words, environment(contestant, case), until)
            records.append({"case": case.key, "contestant": name, "round": number, **record})
            if "error" in record:
                say(f"  {name}: FAILED\n{record['output']}")
                continue
            if until is None:
                say(f"  {name}: first step after {record['first_step']:.1f} s")
                continue
            rate, first = statistics.median(record["rates"][1:]), record["first_step"]
            say(
                f"  {name}: {rate:,.0f} samples/s over {len(record['rates']) - 1} epochs, first "
                f"step after {first:.1f} s, {record['memory']:.0f} MB, {record['accuracies'][1]}%"
            )
    return sorted(records, key=lambda r: (r["round"], case.contestants.index(r["contestant"])))


def no_hosts() -> str | None:
    """Why there can be no namespaced hosts here."""
    return "tests/helpers/hosts.py needs pytest" if Hosts is None else requirements()


def machine() -> dict[str, str]:
    cpu = platform.processor()
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
        cpu = found[1] if found else cpu
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = torch.accelerator.current_accelerator(check_available=True)
    device = torch.get_device_module(found).get_device_name(0) if found else "none"
    versions = {"Python": platform.python_version(), "torch": torch.__version__}
    for package in ("torchvision", "lightning-fabric", "accelerate"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    source = hashlib.sha256()
    for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("common/*.py"), *HERE.glob("*.py")]):
        source.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return {
        "CPU": f"{cpu}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB",
        "GPU": device,
        "System": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "Source": f"scripts, common/ and benchmarks/: SHA-256 {source.hexdigest()[:16]}...",
        "Date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "Load before": f"{os.getloadavg()[0]:.2f} (1 minute)",
    }


def split_step(script: str, options: list[str], device: str, batch: int, data: Path) -> dict:
    """Where the time of a step goes: see split.py."""
    command = [sys.executable, str(HERE / "split.py"), script, "2", *options]
    command += ["--dataset", "fashion-mnist", "--data-dir", str(data), "--device", device]
    command += ["--batch-size", str(batch)]
    what = " ".join([f"{script}.py", *options])
    split = {"what": what, "device": device, "batch": batch}
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "site")}
    if device == "cpu":
        env |= CPU_ONLY
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if found := re.search(r"^split: (\{.*\})$", done.stdout, re.M):
        return split | json.loads(found[1])
    return split | {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}


def copies_held(name: str, folder: Path, sizes: tuple[int, int]) -> dict:
    """How many copies of the data set a job has: its memory's growth over that of the data."""
    together = []
    for samples in sizes:
        case, contestant = Case("mlp", "fashion-mnist", 256, 2, (name,), samples), CONTESTANTS[name]
        data = make_data(folder, case.dataset, samples)
        words = commands(contestant, case, data, None)
        record = measure(words, environment(contestant, case), seconds=0)
        if "error" in record:
            return {"what": name, "error": record["error"]}
        together.append(record["together"])
    grown = (sizes[1] - sizes[0]) * (28 * 28 + 8) / 1e6  # MB: pixels, and an int64 as a label
    return {"what": name, "samples": sizes, "copies": (together[1] - together[0]) / grown}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--cases", nargs="+", metavar="GLOB", help="only these")
    parser.add_argument("--rounds", type=int, help="instead of each case's own number")
    parser.add_argument("--seconds", type=float, default=1.5, help="of most runs, after warm-up")
    parser.add_argument("--quick", action="store_true", help="one case, small and short")
    parser.add_argument("--before", type=Path, help="folder of another version to run beside")
    parser.add_argument("--out", type=Path, help="folder for RESULTS.md, results.json, the plot")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and clean up on the way
    found = torch.accelerator.current_accelerator(check_available=True)
    cases = beside(args.before) if args.before else all_cases(found.type if found else None)
    if args.quick:
        few = ("ddp_spawn.py", "SGD fused", "tutorial, 1 thread", *BOUNDS[1:])
        small = {"samples": 1024, "rounds": 1, "more_rounds": 0, "seconds": None}
        cases = [replace(c, contestants=few, **small) for c in cases if c.key == "mlp-32-2"]
        args.seconds = min(args.seconds, 0.2)
    if args.cases:
        cases = [c for c in cases if any(fnmatch.fnmatch(c.key, glob) for glob in args.cases)]
    if args.rounds:
        cases = [replace(case, rounds=args.rounds, more_rounds=0) for case in cases]
    if args.list or not cases:
        print("\n".join(case.key for case in cases) or "no such case: see --list")
        sys.exit(0 if cases else 2)
    out = args.out or (None if args.quick or args.cases or args.before else HERE)

    start, left_out, records, splits, copies = time.monotonic(), [], [], [], []
    result = {"machine": machine(), "seconds": args.seconds}
    reason = no_hosts()
    if reason and any(case.hosts for case in cases):
        left_out.append(f"several hosts: {reason}")
        cases = [case for case in cases if not case.hosts]
    if not found:
        left_out.append("one GPU, with bf16 and --compile: there is no GPU here")
    for line in left_out:
        say(f"left out: {line}")
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(cases, start=1):
            say(f"[{number}/{len(cases)}, {time.monotonic() - start:.0f} s] {case.title}")
            data = make_data(Path(folder), case.dataset, case.samples)
            with contextlib.ExitStack() as stack:
                hosts = None
                if case.hosts:
                    hosts = stack.enter_context(Hosts(case.hosts))
                    if case.link:
                        hosts.shape(case.link)
                records += run_case(case, data, hosts, args.seconds)
        say("where a step's time goes")
        data = make_data(Path(folder), "fashion-mnist", 1024 if args.quick else LOCAL)
        for device in ("cpu", found.type) if found else ("cpu",):
            variants = [("single_gpu", [])]
            if device != "cpu":
                variants += [("ddp_torchrun", ["--amp", "bf16"]), ("ddp_torchrun", ["--compile"])]
            for script, options in variants:
                for batch in (32, 256):
                    splits.append(split_step(script, options, device, batch, data))
                    say(f"  {splits[-1]}")
        say("copies of the data set that two processes hold")
        shown, sizes = ("ddp_spawn.py", "ddp_torchrun.py", "tutorial"), (LOCAL, 16 * LOCAL)
        if args.quick:
            shown, sizes = shown[:1], (1024, 96 * 1024)
        for name in shown:
            copies.append(copies_held(name, Path(folder), sizes))
            say(f"  {copies[-1]}")
    result |= {"left_out": left_out, "records": records, "splits": splits, "copies": copies}
    result["cases"] = {
        case.key: {
            "title": case.title,
            "gpu": case.device != "cpu",
            "seconds": case.seconds or args.seconds,
        }
        for case in cases
    }
    result["minutes"] = (time.monotonic() - start) / 60
    result = report.summary(result)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.json").write_text(report.dumps(result))
        report.write(result, out)
    print(report.targets(result))
    failed = [f"{r['case']}: {r['contestant']}" for r in records if "error" in r]
    failed += [f"{r['what']}: {r['error']}" for r in [*splits, *copies] if "error" in r]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
