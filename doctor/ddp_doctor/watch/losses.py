"""Losses of torch.nn.functional: what they are divided by, and the gradient that they get."""

import ast
import functools
import inspect
import re
import sys
import textwrap
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F

from ddp_doctor.watch import loaders
from ddp_doctor.watch.hooks import LIBRARY, Raised, around, foreign, where
from ddp_doctor.watch.models import AFTER, LOOKS, M
from ddp_doctor.watch.note import note

WORLD = re.compile(r"world|n_?gpus?\b|nprocs?|num_proc|n_?ranks|num_ranks|replicas", re.I)


class Losses:
    """Those since the last step."""

    def __init__(self) -> None:
        self.count = 0
        self.incoming: list[tuple[int, torch.Tensor]] = []
        self.world = False  # whether the program divides by a number that is named like world_size

    def taken(self) -> list[tuple[int, float]]:
        found = [(index, float(grad.sum())) for index, grad in self.incoming]
        self.count, self.incoming = 0, []
        return found


S = Losses()


@around(F, "cross_entropy", "nll_loss")
def classes(
    input,
    target,
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
    label_smoothing=0.0,
):
    result = yield
    if not seen(result):
        return
    facts: dict[str, Any] = {"count": None, "plain": True, "pairs": False}
    if reduction == "mean" and not target.is_floating_point():
        used = target != ignore_index
        facts["count"] = float(used.sum() if weight is None else weight[target[used]].sum())
        facts["plain"] = weight is None and bool(used.all())
        n = len(target) if target.dim() == 1 else 0
        facts["pairs"] = n > 2 and input.shape == (n, n) and target.tolist() == [*range(n)]
    noted(result, mean=reduction == "mean", weighted=weight is not None, **facts)


@around(F, "binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss")
@around(F, "smooth_l1_loss", "huber_loss", "kl_div", "gaussian_nll_loss", "poisson_nll_loss")
def others(*args, reduction="mean", **kwargs):
    result = yield
    if seen(result):
        mean = reduction in ("mean", "batchmean")
        noted(result, mean=mean, weighted=False, count=None, plain=True, pairs=False)


def seen(result: Any) -> bool:
    if isinstance(result, Raised) or not torch.is_grad_enabled() or result.dim():
        return False
    return LOOKS[0]()


def noted(result: torch.Tensor, **facts: Any) -> None:
    index, S.count = S.count, S.count + 1
    if result.requires_grad:
        result.register_hook(lambda grad: S.incoming.append((index, grad.detach())))
    S.world = S.world or divides_by_world()
    note("loss", index=index, drawn=loaders.L.drawn, **facts, where=where())


def divided() -> None:
    """Before a backward pass: whether a loss of the user's own is divided."""
    S.world = S.world or (bool(M.divisors) and divides_by_world())


AFTER.append((divided, lambda: None))


def divides_by_world() -> bool:
    """Whether the user's functions on the stack do, and by no number that looks the same."""
    frame, found = sys._getframe(1), []
    while frame and len(found) < 8:
        file = frame.f_code.co_filename
        if not foreign(file) and "site-packages" not in file and not file.startswith(LIBRARY):
            found.append(divisions(frame.f_code))
        frame = frame.f_back
    return any(by_world for by_world, _ in found) and not any(plain for _, plain in found)


@functools.cache
def divisions(code: CodeType) -> tuple[bool, bool]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError):
        return False, True  # unknown
    parts = [n for n in ast.walk(tree) if isinstance(n, ast.BinOp | ast.AugAssign)]
    by = [getattr(n, "right", getattr(n, "value", n)) for n in parts if isinstance(n.op, ast.Div)]
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    by += [n for n in calls if getattr(n.func, "attr", "") in ("div", "div_", "true_divide")]
    sides = [getattr(n, "left", n) for n in parts if isinstance(n.op, ast.Mult)]
    sides += [getattr(n, "right", getattr(n, "value", n)) for n in parts]
    plain = [n for n in sides if isinstance(n, ast.Constant) and n.value in (0.5, 2, 3, 4)]
    return any(WORLD.search(ast.unparse(n)) for n in by), bool(plain)
