"""How torch's functions are watched: a hook notes what goes in and what comes out, no more.

A hook is a generator function with the arguments of the function that it watches. What stands
before its `yield` runs before that function, what stands after it runs afterwards, and the `yield`
gives the result, or a Raised. What fails in a hook is noted, and the user's call goes on: it is
made in `watched` below and nowhere else, so each error with another frame of the doctor is ours.
"""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ddp_doctor.watch.note import note

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the doctor's own folder
LIBRARY = os.path.dirname(os.__file__)
SCRIPTED = {"__script_if_tracing_wrapper": True}  # torch.jit.script takes the original


class Raised(NamedTuple):
    """What a hook gets in place of a result."""

    error: BaseException


def around(owner: Any, *names: str) -> Callable:
    """Watch functions or methods of a module or class."""

    def put(hook: Callable) -> Callable:
        for name in names:
            if original := getattr(owner, name, None):  # some are missing in an older torch
                setattr(owner, name, wrapper(original, hook))
        return hook

    return put


def wrapper(original: Callable, hook: Callable) -> Callable:
    broken = False

    def failed(error: Exception) -> None:
        nonlocal broken
        broken = True
        note("failed", name=hook.__name__, error=f"{type(error).__name__}: {error}")

    def finish(running: Any, result: Any) -> None:
        try:
            running.send(result)
        except StopIteration:
            pass
        except Exception as error:
            failed(error)

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if broken or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        running = hook(*args, **kwargs)
        try:
            next(running)
        except Exception as error:
            failed(error)
            return original(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            finish(running, Raised(error))
            raise
        finish(running, result)
        return result

    vars(watched).update(SCRIPTED, __original_fn=original)
    return watched


def careful(function: Callable) -> Callable:
    """What fails in here is noted, and does not end the user's program."""

    @functools.wraps(function)
    def tried(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            note("failed", name=function.__name__, error=f"{type(error).__name__}: {error}")

    return tried


def foreign(file: str) -> bool:
    """Whether a file is torch's or the doctor's."""
    return "/torch/" in file or file.startswith(("<", HERE))


def where() -> str:
    """The line of the user's program that has led here."""
    frame, fallback = sys._getframe(1), "?"
    while frame:
        file = frame.f_code.co_filename
        place = f"{os.path.basename(file)}:{frame.f_lineno}"
        if not foreign(file) and "site-packages" not in file and not file.startswith(LIBRARY):
            return place
        fallback = place if fallback == "?" and not foreign(file) else fallback
        frame = frame.f_back
    return fallback
