"""What is judged, by topic. A check gets a Job, and yields a Found for each thing that it finds."""

from ddp_doctor.job import Found, Job

CHECKS = []


def judge(job: Job) -> list[Found]:
    """What all checks find."""
    return [*dict.fromkeys(found for check in CHECKS for found in check(job))]


def speed(job: Job) -> str:
    """Where the time of a step goes, and what would help most."""
    return ""
