"""What is judged, by topic. A check gets a Job, and yields a Found for each thing that it finds."""

import inspect

from ddp_doctor.checks import data, ends, evaluation, losses, machine, randomness, weights
from ddp_doctor.checks.machine import blind, speed  # noqa: F401
from ddp_doctor.job import Found, Job

TOPICS = (ends, data, evaluation, weights, losses, randomness, machine)
CHECKS = [  # each generator of a topic that gets a job and nothing else
    function
    for topic in TOPICS
    for function in vars(topic).values()
    if inspect.isgeneratorfunction(function) and function.__module__ == topic.__name__
    if [*inspect.signature(function).parameters] == ["job"]
]


def judge(job: Job) -> list[Found]:
    """What all checks find. A rank that takes no step explains what some others would find."""
    if not job.ranks:
        return []
    later = (weights.weights, weights.accumulation, ends.ends) if [*weights.skipped(job)] else ()
    found = (found for check in CHECKS if check not in later for found in check(job))
    return [*dict.fromkeys(found)]
