"""What is watched, by topic: importing this module, in a process that has torch, starts it."""

from ddp_doctor.watch import (  # noqa: F401
    collectives,
    ends,
    files,
    loaders,
    losses,
    models,
    optimizers,
    pace,
    randomness,
    scaling,
    schedulers,
)
