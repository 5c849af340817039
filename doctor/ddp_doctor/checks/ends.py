"""A job that fails, or that stands still."""

import os
from collections.abc import Iterator

from ddp_doctor.job import Event, Found, Job

ALIKE = "let all ranks make the same calls in the same order"
SIGNS = ("gloo", "NCCL", "Connection", "Broken pipe", "timed out", "DistBackendError")
ACTS = {
    "batch": "takes a batch",
    "end": "ends a pass",
    "loader": "starts a pass",
    "forward": "forward()",
    "trains": "backward()",
    "save": "torch.save()",
    "load": "torch.load()",
    "before": "optimizer.step()",
    "after": "has ended its step",
}


def ends(job: Job) -> Iterator[Found]:
    acts = "; ".join(f"rank {rank}: {last_act(job, rank)}" for rank in job.ranks)
    acts = f"the ranks' last acts are: {acts}"
    stuck = {rank: own[-1]["stack"] for rank in job.ranks if (own := job.of(rank, "stuck"))}
    crashes = sorted(job.all("crash"), key=lambda e: (is_echo(e), e["time"]))
    if stuck:
        stacks = [f"rank {rank} stands at {' < '.join(own)}" for rank, own in stuck.items()]
        place = next((own[0].split(" ")[0] for own in stuck.values() if own), "?")
        yield Found("hang", place, f"no rank goes on: {'; '.join(stacks)}; {acts}", ALIKE)
    elif crashes and job.status:
        crash = crashes[0]
        rank = next(rank for rank in job.ranks if crash in job.ranks[rank])
        what = f"rank {rank} ends after {crash['step']} steps"
        what += f"; the error is {crash['error']}; {acts}"
        if is_echo(crash):
            yield Found("hang", crash["where"], what, ALIKE)
        else:
            yield Found("crash", crash["where"], what, "see what it prints")
    elif job.status:
        what = f"it ends with status {job.status}; {acts}"
        yield Found("crash", "the command", what, "see what it prints")


def is_echo(crash: Event) -> bool:
    """Whether another rank's end may be the cause."""
    return any(sign in crash["error"] for sign in SIGNS)


def last_act(job: Job, rank: int) -> str:
    for act in reversed(job.ranks[rank]):
        if act["kind"] in ACTS or act["kind"] == "collective":
            name = ACTS.get(act["kind"]) or f"{act['name']} of {act['shape']}"
            if act["kind"] == "save":
                name = f"torch.save({os.path.basename(act['path'] or '?')})"
            place = f" at {act['where']}" if "where" in act else ""
            return f"{name}{place} after {act['step'] + (act['kind'] == 'after')} steps"
    return "it has joined"
