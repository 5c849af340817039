"""Running the real command lines: each in a session of its own, watched for what it leaves."""

import functools
import importlib
import os
import re
import signal
import struct
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from forks import Fork, stop_the_server

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "tests" / "site"
sys.path.insert(0, str(ROOT))

from common.data import make_digits  # noqa: E402

SCRIPTS = ("single_gpu.py", "data_parallel.py", "ddp_spawn.py", "ddp_torchrun.py", "multinode.py")
# Standalone: its own port, also where torchrun's default is a fixed one (before torch 2.9).
TORCHRUN = "torchrun --standalone --nproc_per_node={} ddp_torchrun.py"
EPOCH = re.compile(
    r"^Epoch (\d+) \| Train loss: (\S+) \| Test loss: (\S+) \| "
    r"Accuracy: (\d+)/(\d+) \((\S+)%\) \| (\d+) samples/s$",
    re.M,
)

machine = pytest.MonkeyPatch()  # holds back what the machine has, while the CPU's tests run


@pytest.hookimpl(tryfirst=True)  # before fixtures of any scope: some of them start jobs, too
def pytest_runtest_setup(item: pytest.Item) -> None:
    """On any machine, tests marked gpu find its accelerators, and all others find none."""
    machine.undo()
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        machine.delenv(name, raising=False)  # a test that calls ddp_setup leaves them behind
    if item.get_closest_marker("gpu"):
        return
    # For the processes that tests start, in whatever way: sitecustomize.py has the rest.
    machine.setenv("CUDA_VISIBLE_DEVICES", "")
    machine.setenv("HIP_VISIBLE_DEVICES", "")
    machine.setenv("LADDER_CPU", "1")
    machine.setenv("PYTHONPATH", str(SITE), prepend=os.pathsep)
    # For this process, which has torch already.
    found = torch.accelerator.current_accelerator()
    own = [torch.get_device_module(found)] if found else []
    for module in (torch.accelerator, *own):
        machine.setattr(module, "is_available", lambda: False)
        machine.setattr(module, "device_count", lambda: 0)
    # torch.compile looks for what functools.cache leaves in this one.
    machine.setattr(torch.backends.mps, "is_available", functools.cache(lambda: False))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("slow"):
            if not mark.args:
                raise pytest.UsageError(f"{item.nodeid}: say why, @pytest.mark.slow('why')")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # in the process that prints, with -n or without
        config.pluginmanager.register(Progress(config))


class Progress:
    """A line every 15 seconds that says what is being run; LADDER_RAN names a file for all that
    was run, in which .ci/run looks for what is missing."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.start = self.said = time.monotonic()
        self.running, self.done = [], 0
        self.file = os.environ.get("LADDER_RAN")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running.append(nodeid)
        now = time.monotonic()
        if now < self.said + 15:
            return
        self.said = now
        minutes, seconds = divmod(int(now - self.start), 60)
        names = ", ".join(name.partition("::")[2] for name in self.running)
        writer = self.config.get_terminal_writer()
        if writer.chars_on_current_line:
            writer.line()
        writer.line(f"{minutes}:{seconds:02}  {self.done} done, now {names}")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.running.remove(nodeid)
        self.done += 1
        if self.file:
            with open(self.file, "a") as file:
                print(nodeid.partition("@")[0], file=file)  # the rest is xdist's name of a group


def pytest_sessionfinish() -> None:
    """Wait for the process that was forked from: what it used counts as used by the tests."""
    stop_the_server()


class Job:
    """A script that was started; `finish` waits for it and checks that no process is left."""

    def __init__(
        self,
        command: list[str],
        folder: Path,
        env: dict[str, str],
        fork: bool = False,
        host: str = "",
    ) -> None:
        self.mark = uuid.uuid4().hex
        # One thread a process, as tests run side by side; an empty variable in `env` is one that
        # is not set.
        env = {"OMP_NUM_THREADS": "1", **env, "LADDER_MARK": self.mark, "PYTHONUNBUFFERED": "1"}
        unset = {name for name, value in env.items() if not value}
        env = {name: value for name, value in {**os.environ, **env}.items() if name not in unset}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SITE), env.get("PYTHONPATH"))))
        self.folder, self.output = folder, folder / f"output-{self.mark}"
        self.output.touch()
        if fork:
            self.process = Fork(command, folder, env, self.output, host)
            return
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, pattern: str, seconds: float = 60) -> None:
        """Return as soon as the output has `pattern`."""
        end = time.monotonic() + seconds
        while not re.search(pattern, self.text, re.M):
            assert self.process.poll() is None, f"ended without {pattern!r}:\n{self.text}"
            assert time.monotonic() < end, f"no {pattern!r} in {seconds} s:\n{self.text}"
            time.sleep(0.01)

    def pids(self) -> list[int]:
        """All living processes of the job, the parent first, the workers by age.

        Those of its session, and torchrun's workers, which have sessions of their own.
        """
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    state, _, _, session, *_ = stat(int(entry.name))
                    ours = session == str(self.process.pid)
                    ours = ours or self.mark.encode() in (entry / "environ").read_bytes()
                    if state != "Z" and ours:
                        found.append(int(entry.name))
                except OSError:
                    continue
        return sorted(found)

    def workers(self) -> list[int]:
        """The processes that mp.spawn or torchrun started, by rank."""
        workers = []
        for pid in self.pids():
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                program = Path(f"/proc/{pid}/cmdline").read_bytes()
                if found := re.search(rb"\0LOCAL_RANK=(\d+)", environment):
                    workers.append((int(found[1]), pid))
                elif stat(pid)[1] == str(self.process.pid) and b"resource_tracker" not in program:
                    workers.append((pid, pid))
            except OSError:
                continue
        return [pid for _, pid in sorted(workers)]

    def finish(self, status: int | None = 0, seconds: float = 120) -> str:
        """The whole output, once the job has ended with `status` and left no process behind."""
        try:
            self.process.wait(seconds)
            end = time.monotonic() + 10
            while (left := self.pids()) and time.monotonic() < end:
                time.sleep(0.05)
            assert not left, f"still running: {left}\n{self.text}"
        except subprocess.TimeoutExpired:
            pytest.fail(f"not done after {seconds} s:\n{self.text}")
        finally:
            self.kill()
        if status is not None:
            assert self.process.returncode == status, self.text
        return self.text

    def kill(self) -> None:
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


def stat(pid: int) -> list[str]:
    """State, parent, process group, session and so on, as in proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def command(launch: str, *arguments: object) -> list[str]:
    """`launch` is a script, or a command that ends with one: the words that start it."""
    *words, script = launch.split()
    first = words.pop(0) if words else "python"
    programs = {"python": sys.executable, "torchrun": str(Path(sys.executable).parent / "torchrun")}
    return [programs[first], *words, str(ROOT / script), *map(str, arguments)]


@pytest.fixture
def start(tmp_path):
    """start(launch, *arguments, **environment) -> Job, in the test's own folder."""
    jobs = []

    def start(
        launch: str,
        *arguments: object,
        folder: Path = tmp_path,
        fork: bool = False,
        **env: object,
    ) -> Job:
        env = {name: str(value) for name, value in env.items()}
        jobs.append(Job(command(launch, *arguments), folder, env, fork))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()


@pytest.fixture
def run(start):
    """run(launch, *arguments, status=0, **environment) -> output."""

    def run(launch: str, *arguments: object, status: int = 0, **env: object) -> str:
        return start(launch, *arguments, **env).finish(status)

    return run


@pytest.fixture
def fork(run):
    """fork(launch, *arguments, status=0, **environment) -> output; see forks.py."""
    return functools.partial(run, fork=True)


@pytest.fixture
def parse(tmp_path, monkeypatch):
    """parse(script, *arguments) -> the script as a module, and what it makes of the arguments.

    In the tests' own process, as on a machine without accelerators, also in a test marked gpu.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # as multinode.py does, for all that follows

    def parse(script: str, *arguments: object) -> tuple:
        module = importlib.import_module(script.removesuffix(".py"))
        monkeypatch.setattr(module, "device_names", lambda: ["cpu"])
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        return module, module.parse_args()

    return parse


@pytest.fixture
def make(parse, monkeypatch):
    """make(script, *arguments) -> the module, and the Trainer that its main() makes: of 40 digits,
    and 10 to test on. `make.calls` is what main() does besides, in its order; `make.asked` are
    load_dataset's arguments, `make.total_epochs` is train's."""
    monkeypatch.setattr(mp, "parent_process", lambda: SimpleNamespace(is_alive=lambda: True))
    data_parallel = sys.modules["torch.nn.parallel.data_parallel"]
    monkeypatch.setattr(data_parallel, "_get_available_device_type", lambda: None)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")  # as the scripts do, for all that follows
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tests run side by side

    def make(script: str, *arguments: object) -> tuple:
        if dist.is_initialized():
            dist.destroy_process_group()
        module, args = parse(script, *arguments)
        data, stop = (make_digits(40, 0), make_digits(10, 1)), torch.zeros((), dtype=torch.int32)
        trainers, make.calls = [], []
        with pytest.MonkeyPatch.context() as patch:
            load_dataset = lambda *given: setattr(make, "asked", given) or data  # noqa: E731
            patch.setattr(module, "load_dataset", load_dataset)
            patch.setattr(module, "catch_stop_signals", lambda stop: None)
            patch.setattr(module, "leave", make.calls.append, raising=False)
            for name in ("barrier", "destroy_process_group"):
                patch.setattr(dist, name, lambda name=name: make.calls.append(name))

            def train(self: object, total_epochs: int) -> None:
                make.total_epochs = total_epochs
                trainers.append(self)
                make.calls.append("train")

            patch.setattr(module.Trainer, "train", train)
            if script == "ddp_spawn.py":
                args.nproc_per_node = args.world_size = 1  # and this process is it
                args.local_world_size = 1
                done = SimpleNamespace(processes=[], join=lambda **_: True)
                spawn = lambda main, objs, count, join: main(0, *objs) or done  # noqa: E731
                patch.setattr(mp, "spawn", spawn)
                patch.setattr(signal, "signal", lambda *_: None)
                module.spawn(args, stop)
            else:
                module.main(args, stop)
        return module, trainers[0]

    yield make
    torch.set_num_threads(threads)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def refuse(parse, capsys, tmp_path):
    """refuse(script, *arguments) -> the error of arguments that it does not take."""

    def refuse(script: str, *arguments: object) -> str:
        with pytest.raises(SystemExit) as caught:
            parse(script, *arguments)
        assert caught.value.code == 2
        return refusal(capsys.readouterr().err, script, tmp_path)

    return refuse


def refusal(text: str, script: str, folder: Path) -> str:
    """The error that comes after the usage; no other line, and nothing written."""
    usage, error = text.splitlines()
    assert usage == f"usage: {script} [total_epochs] [save_every] [options]"
    assert not [path for path in folder.iterdir() if not path.name.startswith("output-")]
    return error.removeprefix(f"{script}: error: ")


def epochs(text: str) -> list[dict[str, float]]:
    """The epoch lines of an output."""
    names = ("epoch", "train_loss", "test_loss", "correct", "total", "accuracy", "rate")
    return [dict(zip(names, map(float, found), strict=True)) for found in EPOCH.findall(text)]


def losses(text: str) -> list[float]:
    """The loss of every step, with --log-interval 1."""
    return [float(value) for value in re.findall(r"\| Step \d+ \| Loss: (\S+)", text)]


def load(path: Path) -> dict:
    return torch.load(path, map_location="cpu", weights_only=True)  # maybe an accelerator's


def same_bytes(a: dict, b: dict) -> bool:
    """Whether two snapshots' weights and momenta are the same, bit for bit."""
    tensors = [(a["model"][name], b["model"][name]) for name in a["model"]]
    for index, state in a["optimizer"]["state"].items():
        other = b["optimizer"]["state"][index]
        tensors.append((state["momentum_buffer"], other["momentum_buffer"]))
    assert len(tensors) > len(a["model"])
    return all(torch.equal(x, y) for x, y in tensors)


def difference(a: dict, b: dict) -> float:
    """The largest difference between two snapshots' weights and momenta."""
    assert a["model"].keys() == b["model"].keys()
    assert a["optimizer"]["state"].keys() == b["optimizer"]["state"].keys()
    pairs = [(a["model"][name], b["model"][name]) for name in a["model"]]
    for index, state in a["optimizer"]["state"].items():
        pairs.append((state["momentum_buffer"], b["optimizer"]["state"][index]["momentum_buffer"]))
    return max((x.double() - y.double()).abs().max().item() for x, y in pairs)


def idx_files(folder: Path, train: int, test: int, seed: int = 0) -> Path:
    """Fashion-MNIST-shaped files in torchvision's place below `folder`, learnable, of any size."""
    raw = folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    prototypes = np.random.default_rng(1).integers(0, 256, (10, 28, 28))
    rng = np.random.default_rng(seed)
    for part, count in (("train", train), ("t10k", test)):
        labels = rng.integers(0, 10, min(count, 5_000))
        noise = rng.normal(60, 40, (len(labels), 28, 28))
        images = np.clip(prototypes[labels] / 2 + noise, 0, 255).astype("u1")
        labels = np.resize(labels, count)  # more of them are the first ones again
        images = np.resize(images, (count, 28, 28))
        header = struct.pack(">IIII", 0x803, count, 28, 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = struct.pack(">II", 0x801, count)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(header + labels.astype("u1").tobytes())
    return folder


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """whole(launch) -> arguments, output and snapshot of a run that nobody stopped; made once."""
    folder = tmp_path_factory.mktemp("whole")
    data = ("--dataset", "fashion-mnist", "--data-dir", str(idx_files(folder, 4_000, 10)))
    made = {}

    def whole(launch: tuple) -> tuple[tuple, str, dict]:
        # The ConvNet has dropout: its masks are the same only if every rank's RNG is restored.
        options = (2, *launch[1:], *data, "--model", "convnet", "--no-progress")
        options += ("--log-interval", 1)
        if launch not in made:
            text = Job(command(launch[0], *options), folder, {}, fork=True).finish()
            made[launch] = text, load(folder / "checkpoint.pt")
        return options, *made[launch]

    return whole


@pytest.fixture
def fashion(tmp_path):
    """fashion(train, test) -> the arguments that train on generated files of these sizes."""

    def fashion(train: int, test: int) -> tuple[str, ...]:
        folder = idx_files(tmp_path / "fashion", train, test)
        return ("--dataset", "fashion-mnist", "--data-dir", str(folder))

    return fashion
