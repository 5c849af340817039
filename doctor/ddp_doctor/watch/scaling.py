"""GradScaler, and the clipping of gradients."""

import weakref
from typing import Any

import torch
from torch.nn.utils import clip_grad

from ddp_doctor.watch import content
from ddp_doctor.watch.hooks import Raised, around, where
from ddp_doctor.watch.models import LOOKS
from ddp_doctor.watch.note import note


class Scalers:
    updated: Any = None  # the one that was updated last
    pending: Any = None  # one that has multiplied a loss since its last update


S = Scalers()


@around(torch.amp.GradScaler, "scale")
def scaled(self, *args, **kwargs):
    S.pending = weakref.ref(self) if self.is_enabled() else None
    yield


@around(torch.amp.GradScaler, "update")
def updated(self, *args, **kwargs):
    S.updated, S.pending = weakref.ref(self) if self.is_enabled() else None, None
    yield


def scale() -> float:
    """By what the losses of this step are multiplied."""
    scaler = S.updated() if S.updated else None
    return scaler.get_scale() if scaler is not None else 1.0


@around(torch.nn.utils, "clip_grad_norm_")
@around(clip_grad, "clip_grad_norm_")
def clipped(parameters, max_norm, *args, **kwargs):
    norm = yield
    if not isinstance(norm, Raised) and LOOKS[0]() and content.plain(norm):
        times = multiplied() if float(max_norm) < float(norm) else 1.0
        times = times if float(max_norm) < times else 1.0  # else it may be multiplied, too
        note("clip", norm=float(norm), scale=times, where=where())


def multiplied() -> float:
    """By what the gradients still are multiplied."""
    scaler = S.pending() if S.pending else None
    states = getattr(scaler, "_per_optimizer_states", {}).values()
    ready = scaler is not None and all(state["stage"].name == "READY" for state in states)
    return scaler.get_scale() if ready else 1.0
