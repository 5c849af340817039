"""A script's run without its start: in processes forked from one that has imported torch.

That saves three seconds of processor time a process. `Fork` runs the same file with the same
arguments, environment and folder, in a session of its own. mp.spawn's ranks are forked, too, and a
parent that sets torchrun's variables takes torchrun's place, without its restarts and reports.
Data sets and models are not pickled. A process that uses a GPU cannot be forked.
"""

import atexit
import ctypes
import functools
import multiprocessing
import multiprocessing.forkserver
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from unittest import mock

SITE = Path(__file__).resolve().parents[1] / "site"
PRELOAD = ("torch", "torch._dynamo", "torchvision", "tqdm", "PIL.Image")
TORCHRUN = r"\S*(?:torchrun|python[\d.]* -m torch.distributed.run)(?: --standalone)?"
TORCHRUN += r" --nproc[-_]per[-_]node[= ](\d+)"
CONTEXT = multiprocessing.get_context("forkserver" if sys.platform == "linux" else None)


class Fork:
    """What subprocess.Popen is to a command line, for `command` in `folder`, with this `env`.

    `command` is Python's or torchrun's, as a list of words; its output goes to `output`. `host` is
    the name of one of hosts.py's hosts, or "" for this machine.
    """

    def __init__(
        self, command: list[str], folder: Path, env: dict[str, str], output: Path, host: str
    ) -> None:
        self.args = command
        start_the_server()
        self.process = CONTEXT.Process(target=begin, args=(command, folder, env, output, host))
        self.process.start()
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.process.exitcode


@functools.cache  # one for each process that runs tests
def start_the_server() -> None:
    """The process that has imported everything and waits to be forked."""
    if multiprocessing.forkserver.get_inherited_fds() is not None:  # these tests are forked, too
        multiprocessing.forkserver._forkserver.ensure_running = lambda: None
        return
    CONTEXT.set_forkserver_preload([*PRELOAD])
    # These are read when torch is loaded: one thread a process, as in conftest.py, and no warnings.
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR"):
        multiprocessing.forkserver.ensure_running()


def stop_the_server() -> None:
    for process in multiprocessing.active_children():  # a failed test's: it would wait for them
        process.kill()
    multiprocessing.forkserver._forkserver._stop()


def begin(command: list[str], folder: Path, env: dict[str, str], output: Path, host: str) -> None:
    """In the forked process: become what the command line would have started."""
    os.setsid()
    os.chdir(folder)
    for path, flags, descriptors in (
        (os.devnull, os.O_RDONLY, (0,)),
        (output, os.O_WRONLY, (1, 2)),
    ):
        file = os.open(path, flags)
        for descriptor in descriptors:
            os.dup2(file, descriptor)
        os.close(file)
    if host:
        move_to(host)
    os.environ.clear()
    os.environ.update(env)
    for name in [name for name in sys.modules if name.split(".")[0] == "helpers"]:
        del sys.modules[name]  # a copy of the repository has its own
    launch, script, *arguments = split(command)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(str(SITE / "sitecustomize.py"))
    fork_what_mp_spawn_would_start()
    if re.fullmatch(r"\S*python[\d.]*", launch):
        end(run)
    ranks = re.fullmatch(TORCHRUN, launch)
    assert ranks, f"only the real torchrun can do this: {launch}"
    end(functools.partial(stand_in_for_torchrun, int(ranks[1])))


def move_to(host: str) -> None:
    """As `ip netns exec` and `unshare --uts` do: this host's network, name and /etc/hosts."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: object) -> None:
        if libc[name](*arguments):
            raise OSError(ctypes.get_errno(), f"{name} fails")

    with open(f"/run/netns/{host}") as network:
        call("setns", network.fileno(), 0x40000000)  # CLONE_NEWNET
    call("unshare", 0x04000000 | 0x00020000)  # CLONE_NEWUTS, CLONE_NEWNS
    socket.sethostname(host)
    call("mount", b"none", b"/", None, 0x4000 | 0x80000, None)  # MS_REC, MS_SLAVE
    call("mount", f"/etc/netns/{host}/hosts".encode(), b"/etc/hosts", None, 0x1000, None)  # MS_BIND


def split(command: list[str]) -> list[str]:
    """The words before the script as one string, the script, its arguments."""
    place = next(number for number, word in enumerate(command) if word.endswith(".py"))
    return [" ".join(command[:place]), *command[place:]]


def run() -> None:
    runpy.run_path(sys.argv[0], run_name="__main__")


def end(function: Callable[[], None]) -> None:
    """Call it, and end this process as Python ends after a program."""
    status = 0
    try:
        function()
    except SystemExit as error:
        status = error.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException as error:
        traceback.print_exc()
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status or 0)


def fork_what_mp_spawn_would_start() -> None:
    import torch.multiprocessing as mp

    def spawn(function: Callable, args: tuple = (), nprocs: int = 1, join: bool = True) -> object:
        def as_in_a_new_process(*given: object) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            atexit._clear()  # the parent's: its temporary folder is not for a rank to remove
            function(*given)

        return mp.start_processes(as_in_a_new_process, args, nprocs, join, start_method="fork")

    mp.spawn = spawn


def stand_in_for_torchrun(count: int) -> None:
    """Start the ranks, with torchrun's variables and a store like torchrun's; end with them."""
    reader, writer = os.pipe()
    store = os.fork()
    if not store:
        end(functools.partial(serve_the_store, writer))
    os.close(writer)
    port = os.read(reader, 10).decode()
    assert port, "no store"
    names = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    names |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    ranks = set()
    for rank in range(count):
        pid = os.fork()
        if not pid:
            os.environ.update(names, RANK=str(rank), LOCAL_RANK=str(rank))
            end(run)
        ranks.add(pid)
    status = 0
    while ranks:
        pid, code = os.wait()
        ranks.discard(pid)
        if code and not status:
            status = 1
            time.sleep(0.5)  # torchrun looks now and then
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    os.kill(store, signal.SIGKILL)
    os.wait()
    sys.exit(status)


def serve_the_store(writer: int) -> None:
    import torch.distributed as dist

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.write(writer, str(store.port).encode())
    signal.pause()
