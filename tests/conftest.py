"""Fixtures, and what pytest does around each test; what they are made of is in helpers/."""

import importlib
import multiprocessing.util
import os
import signal
import sys
import tempfile
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.files import idx_files
from helpers.jobs import LONG, SITE, Job, command
from helpers.ranks import start_server
from torch.utils.data import DataLoader

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
    for module in (torch.accelerator, torch.cuda):  # for this process, which has torch already
        machine.setattr(module, "is_available", lambda: False)
        machine.setattr(module, "device_count", lambda: 0)


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

    return lambda launch, *words, status=0, **env: start(launch, *words, **env).finish(status)


@pytest.fixture
def parse(tmp_path, monkeypatch):
    """parse(script, *arguments) -> the script as a module, and what it makes of the arguments.

    In the tests' own process, whose environment is that of torchrun's only rank.
    """
    monkeypatch.chdir(tmp_path)
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in (env | {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}).items():
        monkeypatch.setenv(name, value)

    def parse(script: str, *arguments: object) -> tuple:
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        module = importlib.import_module(script.removesuffix(".py"))
        return module, module.parse_args()

    return parse


@pytest.fixture
def refuse(parse, capsys):
    """refuse(script, *arguments) -> the error of arguments that it does not take."""

    def refuse(script: str, *arguments: object) -> str:
        with pytest.raises(SystemExit) as caught:
            parse(script, *arguments)
        assert caught.value.code == 2
        usage, error = capsys.readouterr().err.splitlines()
        assert usage == f"usage: {script} [total_epochs] [save_every] [options]"
        return error.removeprefix(f"{script}: error: ")

    return refuse


@pytest.fixture
def do(parse, capsys):
    """do(script, *arguments) -> what its main() did, in the tests' process, which is its only rank.

    It trains 40 digits, with 10 to validate, in place of the data sets of common/. `text` is what
    it printed, `module` the script, `model` the bare model, `passes` the arguments of each
    train_epoch(), or train_step() in long_run.py. To change what it does, patch the script's module
    first: do.module(script). Loaders' workers come from the fork server: quicker than spawned ones,
    and safe beside threads.
    """
    destroy = dist.destroy_process_group  # a test may have its own

    def do(script: str, *arguments: object) -> SimpleNamespace:
        if "--num-workers" in arguments:
            start_server()
        module, args = parse(script, *arguments)
        step = "train_step" if script == LONG else "train_epoch"
        build_model, train_step, loader = (
            getattr(module, name) for name in ("build_model", step, "DataLoader")
        )
        do.job = job = SimpleNamespace(module=module, args=args, passes=[], model=None)

        def build(*given: object) -> torch.nn.Module:
            job.model = build_model(*given)
            return job.model

        def train(*given: object) -> torch.Tensor:
            job.passes.append(given)
            return train_step(*given)

        def make_loader(*given: object, **named: object) -> DataLoader:
            if named["num_workers"]:
                named["multiprocessing_context"] = "forkserver"
            return loader(*given, **named)

        with pytest.MonkeyPatch.context() as patch:
            if module.load_dataset.__module__ == "common.data":  # a test may have its own
                data = make_digits(40, 0), make_digits(10, 1)
                patch.setattr(module, "load_dataset", lambda *_: data)
            patch.setattr(module, "build_model", build)
            patch.setattr(module, step, train)
            patch.setattr(module, "DataLoader", make_loader)
            try:
                if script == "ddp_spawn.py":
                    args.nproc_per_node, args.init_method = 1, "env://"
                    module.main(0, args)
                else:  # without torchrun's @record, which takes over how this process crashes
                    job.returned = getattr(module.main, "__wrapped__", module.main)(args)
            finally:
                if torch.__version__ < "2.8":  # pytorch#154976: it may hang while gloo tidies up
                    time.sleep(0.2)
                if dist.is_initialized():
                    destroy()
        job.text = capsys.readouterr().out
        return job

    do.module = lambda script: importlib.import_module(script.removesuffix(".py"))
    return do


@pytest.fixture
def fashion(tmp_path):
    """fashion(train, test) -> the arguments that train on generated files of these sizes."""

    folder = tmp_path / "fashion"
    options = ("--dataset", "fashion-mnist", "--data-dir")
    return lambda train, test: (*options, str(idx_files(folder, train, test)))
