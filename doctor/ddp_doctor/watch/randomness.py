"""The random numbers that the samples draw, in the rank itself or in its workers."""

import json
import os

import torch
from torch.utils import data
from torch.utils.data._utils import fetch

from ddp_doctor.watch import content
from ddp_doctor.watch.hooks import around
from ddp_doctor.watch.loaders import L
from ddp_doctor.watch.note import folder, note

FETCHES = 3  # so many of a pass are looked at


@around(fetch._MapDatasetFetcher, "fetch")
@around(fetch._IterableDatasetFetcher, "fetch")
def fetched(self, *args):
    worker = data.get_worker_info()
    own = L.opening if worker else L.asked
    if own is None or own.number > 1 or own.fetches >= FETCHES:
        yield
        return
    own.fetches += 1
    before, seed = content.states(self.dataset), torch.initial_seed()
    yield
    after = content.states(self.dataset)
    facts = {**own.named, "before": before, "after": after, "seeds": torch.initial_seed() != seed}
    if worker is None:
        note("draws", **facts, worker=None)
    else:
        event = json.dumps({"kind": "draws", **facts, "worker": worker.id})
        with open(folder() / f"{os.getppid()}-{os.getpid()}.worker", "a") as file:
            file.write(event + "\n")
