"""Fixtures, and what pytest does around each test; what they are made of is in helpers/."""

import functools
import importlib
import multiprocessing.util
import os
import signal
import sys
import tempfile
import uuid
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.files import idx_files
from helpers.jobs import SITE, Job, command
from helpers.ranks import start_server

from common.data import make_digits

temporary = tempfile.TemporaryDirectory(prefix="ladder-")  # for what torch and killed jobs leave
os.chmod(temporary.name, 0o755)  # munged wants its socket where any user can reach it
multiprocessing.util.get_temp_dir()  # its own, which it removes after the one above is gone
torch.set_num_threads(1)  # tests run side by side
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs of `pytest &` would ignore it
machine = pytest.MonkeyPatch()  # holds back what the machine has, while the CPU's tests run


@pytest.hookimpl(tryfirst=True)  # before fixtures of any scope: some of them start jobs, too
def pytest_runtest_setup(item: pytest.Item) -> None:
    """On any machine, tests marked gpu find its accelerators, and all others find none."""
    machine.undo()
    machine.setenv("TMPDIR", temporary.name)
    machine.setattr(tempfile, "tempdir", temporary.name)  # mp.spawn leaves a file if a rank raises
    machine.setenv("OMP_WAIT_POLICY", "passive")  # waiting threads would take other tests' cores
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


@pytest.hookimpl(trylast=True)  # after the fixtures have ended their jobs
def pytest_sessionfinish() -> None:
    temporary.cleanup()


@pytest.fixture
def start(tmp_path):
    """start(launch, *arguments, **environment) -> Job, in the test's own folder."""
    jobs = []

    def start(launch: str, *arguments: object, **env: object) -> Job:
        env = {name: str(value) for name, value in env.items()}
        jobs.append(Job(command(launch, *arguments), tmp_path, env))
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
def command_line(tmp_path, monkeypatch):
    """command_line(script, *arguments) -> the script as a module, with these in sys.argv.

    In the tests' own process, as on a machine without accelerators, also in a test marked gpu.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name in env:
        monkeypatch.delenv(name, raising=False)
    set_here = []

    def command_line(script: str, *arguments: object) -> ModuleType:
        if script == "ddp_torchrun.py" and "LOCAL_RANK" not in os.environ:  # as torchrun does
            for name, value in {**env, "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
                if name not in os.environ:
                    set_here.append(name)
                    monkeypatch.setenv(name, value)
        elif script != "ddp_torchrun.py":
            while set_here:
                monkeypatch.delenv(set_here.pop())
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        return importlib.import_module(script.removesuffix(".py"))

    return command_line


@pytest.fixture
def parse(command_line, tmp_path):
    """parse(script, *arguments) -> the script as a module, and what it makes of the arguments.

    multinode.py gets a file to meet at, and is alone there, where the arguments name no rank.
    """

    def parse(script: str, *arguments: object) -> tuple:
        if script == "multinode.py" and not {"--rank", "--world-size"} & {*arguments}:
            if "--init-method" not in arguments:
                arguments += ("--init-method", f"file://{tmp_path}/output-{uuid.uuid4().hex}")
            arguments += ("--rank", 0, "--world-size", 1)
        module = command_line(script, *arguments)
        return module, module.parse_args()

    return parse


@pytest.fixture
def pretend(command_line, monkeypatch):
    """pretend(type, count, backends) -> what a process sets up where there are such devices."""

    def pretend(type: str, count: int, backends: tuple = ("nccl", "gloo")) -> SimpleNamespace:
        job, patch = SimpleNamespace(index=None, threads=8), monkeypatch.setattr
        patch(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device(type))
        patch(torch.accelerator, "device_count", lambda: count)
        patch(torch.accelerator, "set_device_index", lambda index: setattr(job, "index", index))
        patch(torch, "set_num_threads", lambda number: setattr(job, "threads", number))
        patch(dist, "is_backend_available", lambda name: name in backends)
        patch(dist, "init_process_group", lambda name, **more: vars(job).update(more, backend=name))
        patch(dist, "get_backend", lambda: job.backend)
        patch(dist, "get_rank", lambda: getattr(job, "rank", int(os.environ.get("RANK", 0))))
        patch(dist, "get_world_size", lambda: int(os.environ.get("WORLD_SIZE", 1)))
        return job

    return pretend


@pytest.fixture
def do(parse, monkeypatch, capsys, tmp_path):
    """do(script, *arguments) -> what its main() did, in the tests' process, which is its only rank.

    It trains 40 digits, with 10 to validate. `text` is what it printed, `module` the script,
    `model` the bare model, `passes` the arguments of each train_epoch(), `calls` what else it
    called. To change what it does, patch the script's module first: do.module(script).
    """
    data_parallel = sys.modules["torch.nn.parallel.data_parallel"]
    monkeypatch.setattr(data_parallel, "_get_available_device_type", lambda: None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def do(script: str, *arguments: object) -> SimpleNamespace:
        if dist.is_initialized():  # another test's
            dist.destroy_process_group()
        if "--num-workers" in arguments:
            start_server()
        module, args = parse(script, *arguments)
        job = SimpleNamespace(module=module, args=args, passes=[], calls=[], model=None)
        data = make_digits(40, 0), make_digits(10, 1)

        def see(name: str, given: tuple, result: object) -> object:
            job.calls.append((name, *given))
            return result

        def build_model(*given: object) -> torch.nn.Module:
            job.model = own["build_model"](*given)
            return job.model

        def train_epoch(*given: object) -> torch.Tensor:
            job.passes.append(given)
            return own["train_epoch"](*given)

        def destroy() -> None:
            held = "model" in sys._getframe(1).f_locals
            see("destroy_process_group", ("main() still has DDP",) if held else (), None)
            own["destroy"]()

        own = {name: getattr(module, name) for name in ("build_model", "train_epoch")}
        own["destroy"] = dist.destroy_process_group
        with pytest.MonkeyPatch.context() as patch:
            if module.load_dataset.__module__ == "common.data":  # a test may have its own
                load = lambda *given: see("load_dataset", given, data)  # noqa: E731
                patch.setattr(module, "load_dataset", load)
            patch.setattr(module, "build_model", build_model)
            patch.setattr(module, "train_epoch", train_epoch)
            patch.setattr(dist, "destroy_process_group", destroy)
            try:
                if script in ("ddp_spawn.py", "multinode.py"):
                    args.nproc_per_node = 1  # and this process is it
                    args.init_method = f"file://{tmp_path}/output-{uuid.uuid4().hex}"
                    module.main(0, args)
                else:  # without torchrun's @record, which takes over how this process crashes
                    getattr(module.main, "__wrapped__", module.main)(args)
            finally:
                do.last = job
                if dist.is_initialized():
                    own["destroy"]()
        job.text = capsys.readouterr().out
        return job

    do.module = lambda script: importlib.import_module(script.removesuffix(".py"))
    return do


@pytest.fixture
def refuse(command_line, capsys, tmp_path):
    """refuse(script, *arguments) -> the error of arguments that it does not take."""

    def refuse(script: str, *arguments: object) -> str:
        with pytest.raises(SystemExit) as caught:
            command_line(script, *arguments).parse_args()
        assert caught.value.code == 2
        usage, error = capsys.readouterr().err.splitlines()
        assert usage == f"usage: {script} [total_epochs] [save_every] [options]"
        assert all(path.name.startswith("output-") for path in tmp_path.iterdir())
        return error.removeprefix(f"{script}: error: ")

    return refuse


@pytest.fixture
def fashion(tmp_path):
    """fashion(train, test) -> the arguments that train on generated files of these sizes."""

    def fashion(train: int, test: int) -> tuple[str, ...]:
        folder = idx_files(tmp_path / "fashion", train, test)
        return ("--dataset", "fashion-mnist", "--data-dir", str(folder))

    return fashion
