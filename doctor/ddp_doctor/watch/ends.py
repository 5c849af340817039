"""How a process ends, that it moves, and where it stands: what is asked of it from outside."""

import contextlib
import faulthandler
import functools
import mmap
import multiprocessing.process
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import optimizer as optimizers
from torch.utils import data
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ddp_doctor.ends import ASK
from ddp_doctor.watch import collectives  # noqa: F401  (its hooks learn the rank first)
from ddp_doctor.watch.hooks import HERE, Raised, around, careful, foreign, where
from ddp_doctor.watch.note import NOTES, folder, note

PASS = ("watched", "call", "open", "told")  # functions of the doctor that call the program's


class Pulse:
    """A page that the doctor reads: how many acts there were. It writes there: wait."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.count = 0
        self.page: Any = None
        self.stacks: IO[str] | None = None

    def begin(self) -> None:
        if NOTES.file is None or NOTES.pid != os.getpid() or self.pid == NOTES.pid:
            return
        # Asked with this signal, it says where it stands. A thread that watches it could hang the
        # loader workers that the process forks.
        self.stacks = open(folder() / f"{NOTES.pid}.stack", "w")  # noqa: SIM115
        with contextlib.suppress(ValueError):  # what faulthandler leaves behind when Python ends
            signal.signal(ASK, signal.SIG_IGN)
        faulthandler.register(ASK, self.stacks, all_threads=False)
        path = folder() / f"{NOTES.pid}.beat"
        path.write_bytes(bytes(16))
        with path.open("r+b") as file:
            self.page = mmap.mmap(file.fileno(), 16)
        self.pid = NOTES.pid

    def beat(self) -> None:
        if self.pid != os.getpid():
            self.begin()
        else:
            self.count += 1
            self.page[:8] = self.count.to_bytes(8, "little")


PULSE = Pulse()


@careful
def pause() -> None:
    """Wait here for the end that the doctor has asked for: no file is being written."""
    PULSE.beat()
    if PULSE.page is not None and PULSE.page[8] and PULSE.pid == os.getpid():
        note("stop")
        sys.stdout.flush()
        sys.stderr.flush()
        PULSE.page[9] = 1
        while True:
            time.sleep(1)


@around(dist.distributed_c10d, "init_process_group")
@around(dist, "init_process_group")
@around(_BaseDataLoaderIter, "__next__")
@around(DDP, "__init__", "forward")
@around(torch.autograd, "backward")
def moves(*args, **kwargs):
    PULSE.beat()
    yield
    PULSE.beat()


@around(data.DataLoader, "__iter__")
def passes(self):
    pause()
    yield


optimizers.register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: pause())
optimizers.register_optimizer_step_post_hook(lambda optimizer, args, kwargs: PULSE.beat())


# --- errors
def is_ours(trace: TracebackType) -> bool:
    return trace.tb_frame.f_code.co_filename.startswith(HERE)


def stripped(trace: TracebackType | None) -> TracebackType | None:
    """Without the doctor's frames, as it would be printed without the doctor."""
    while trace and is_ours(trace):
        trace = trace.tb_next
    one = trace
    while one and one.tb_next:
        if is_ours(one.tb_next):
            one.tb_next = one.tb_next.tb_next
        else:
            one = one.tb_next
    return trace


@careful
def crashed(error: BaseException) -> None:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f.name for f in frames if f.filename.startswith(HERE) and f.name not in PASS]
    frames = [f for f in frames if not foreign(f.filename)]
    place = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "?"
    text = re.sub(r"^\[\S*gloo\S* ", "", str(error))  # a path
    note("crash", error=shortened(f"{type(error).__name__}: {text}"), where=place, doctor=own[-1:])
    for one in {id(e): e for e in (error, error.__cause__, error.__context__) if e}.values():
        one.__traceback__ = one.__traceback__ if own else stripped(one.__traceback__)


def shortened(text: str) -> str:
    return text if len(text) <= 160 else f"{text[:160].rsplit(' ', 1)[0]} ..."


def uncaught(original: Callable) -> Callable:
    def hook(kind: type, error: BaseException, trace: TracebackType | None) -> None:
        crashed(error)
        original(kind, error, error.__traceback__)

    return hook


sys.excepthook = uncaught(sys.excepthook)


@around(sys, "exit")
def left(*status):
    if status and isinstance(status[0], str):  # an error message, and no uncaught exception
        error = shortened(status[0].removeprefix("error: "))
        note("crash", error=error, where=where(), doctor=[])
    yield


@around(multiprocessing.process.BaseProcess, "run")
def ran(self):
    result = yield
    if isinstance(result, Raised) and isinstance(result.error, Exception):
        crashed(result.error)


def spawned(original: Callable) -> Callable:
    @functools.wraps(original)  # a process that is spawned finds it by its name
    def wrap(function: Callable, *args: Any) -> None:
        def told(*given: Any) -> None:
            try:
                function(*given)
            except Exception as error:
                crashed(error)
                raise

        original(told, *args)

    return wrap


spawning = sys.modules["torch.multiprocessing.spawn"]
spawning._wrap = spawned(spawning._wrap)  # type: ignore[attr-defined]
