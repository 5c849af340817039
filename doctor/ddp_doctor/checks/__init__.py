"""What is judged, by topic. A check gets a Job, and yields a Found for each thing that it finds."""

from ddp_doctor.checks import data, evaluation, losses, machine, randomness, weights
from ddp_doctor.checks.machine import blind, speed  # noqa: F401
from ddp_doctor.job import Found, Job

CHECKS = [
    machine.alone,
    data.shares,
    data.inputs,
    data.order,
    data.meaning,
    evaluation.evaluation,
    evaluation.buffers,
    evaluation.beside,
    weights.settings,
    weights.weights,
    weights.learning,
    weights.accumulation,
    weights.clipping,
    losses.losses,
    losses.world,
    losses.halved,
    losses.one_sided,
    losses.remarks,
    losses.schedule,
    randomness.model,
    randomness.samples,
    randomness.evaluated,
    machine.saves,
    machine.devices,
    machine.limits,
]


def judge(job: Job) -> list[Found]:
    """What all checks find. What one process is told of itself alone comes from a few of them."""
    if not job.ranks:
        return []
    return [*dict.fromkeys(found for check in CHECKS for found in check(job))]
