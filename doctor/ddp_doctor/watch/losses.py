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
        self.rooted = False  # and whether it so divides what it calls backward() of

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
    if torch._C._functorch.is_functorch_wrapped_tensor(result):  # which has no value to look at
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
    S.rooted = bool(M.divisors) and any(rooted for _, _, rooted in functions())


AFTER.append((divided, lambda: None))


def divides_by_world() -> bool:
    """Whether the user's functions on the stack do, and by no number that looks the same."""
    found = functions()
    return any(by_world for by_world, *_ in found) and not any(plain for _, plain, _ in found)


def functions() -> list[tuple[bool, bool, bool]]:
    """What the user's functions on the stack divide by."""
    frame, found = sys._getframe(1), []
    while frame and len(found) < 8:
        file = frame.f_code.co_filename
        if not foreign(file) and "site-packages" not in file and not file.startswith(LIBRARY):
            found.append(divisions(frame.f_code))
        frame = frame.f_back
    return found


@functools.cache
def divisions(code: CodeType) -> tuple[bool, bool, bool]:
    """Whether a function divides by world_size, by another number, and its loss by world_size."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError):
        return False, True, False  # unknown
    nodes = [*ast.walk(tree)]
    parts = [n for n in nodes if isinstance(n, ast.BinOp | ast.AugAssign)]
    sides = [getattr(n, "left", n) for n in parts if isinstance(n.op, ast.Mult)]
    sides += [getattr(n, "right", getattr(n, "value", n)) for n in parts]
    plain = [n for n in sides if isinstance(n, ast.Constant) and n.value in (0.5, 2, 3, 4)]
    calls = [n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    roots = [n.func.value for n in calls if n.func.attr == "backward"]
    ends = {n.id: (n.lineno, n.col_offset) for n in roots if isinstance(n, ast.Name)}
    for n in [n for n in nodes if isinstance(n, ast.stmt)]:
        targets = getattr(n, "targets", [getattr(n, "target", None)])
        names = {target.id for target in targets if isinstance(target, ast.Name)} & ends.keys()
        if any((n.lineno, n.col_offset) < ends[name] for name in names):  # later, it is only shown
            roots.append(n if isinstance(n, ast.AugAssign) else getattr(n, "value", n))
    return any(map(by_world, nodes)), bool(plain), any(map(by_world, roots))


def by_world(node: ast.AST) -> bool:
    """Whether the last that an expression does is to divide by world_size."""
    divisor = None
    if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div):
        divisor = getattr(node, "right", getattr(node, "value", None))
    elif isinstance(node, ast.Call):
        name = getattr(node.func, "attr", "")
        divisor = node if name in ("div", "div_", "true_divide") else None
    return divisor is not None and bool(WORLD.search(ast.unparse(divisor)))
