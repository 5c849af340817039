"""Snapshots, devices, threads, and where the time goes."""

import os
from collections.abc import Iterator
from itertools import combinations

from ddp_doctor.job import Event, Found, Job


def saves(job: Job) -> Iterator[Found]:
    writers: dict[tuple, dict[int, Event]] = {}
    said = []
    for rank in job.ranks:
        host = job.ranks[rank][0]["host"]
        for event in job.of(rank, "save"):
            writers.setdefault((host, event["path"]), {}).setdefault(rank, event)
    for (_, path), events in writers.items():
        event, name = min(events.items())[1], os.path.basename(path or "?")
        if len(events) > 1 and path:
            what = f"{len(events)} ranks write {name}"
            yield Found("all-save", event["where"], what, "let rank 0 save")
        if event["prefixed"] and event["where"] not in said:
            said.append(event["where"])
            what = f"{name} has names like {event['prefixed'][0]}"
            remedy = "save model.module.state_dict()"
            yield Found("prefix", event["where"], what, remedy, "NOTE")
    models = [e for e in job.all("save") if e["model"]]
    if models and not any(e["optimizer"] for e in job.all("save")):
        what = "no snapshot has the optimizer's state"
        remedy = "save optimizer.state_dict()"
        yield Found("no-optimizer", models[0]["where"], what, remedy, "NOTE")


def devices(job: Job) -> Iterator[Found]:
    for event in [e for e in job.all("load") if e["device"]][:1]:
        what = f"torch.load() puts tensors on {event['device']}, another rank's device"
        yield Found("load", event["where"], what, 'use map_location="cpu"')
    made = {rank: job.of(rank, "ddp")[0] for rank in job.ranks if job.of(rank, "ddp")}
    hosts = {rank: job.ranks[rank][0]["host"] for rank in made}
    on_cpu = all(event["type"] == "cpu" for event in made.values())
    for (one, a), (two, b) in [] if on_cpu else combinations(made.items(), 2):
        if a["device"] == b["device"] and hosts[one] == hosts[two]:
            what = f"ranks {one} and {two} use the same device"
            yield Found("device", a["where"], what, "use cuda:LOCAL_RANK")
            break
    steps = {rank: own[0]["threads"] for rank in job.ranks if (own := job.of(rank, "before"))}
    threads = [n for r, n in steps.items() if job.ranks[r][0]["host"] == job.start["host"]]
    cores, most = job.start["cores"], max(threads, default=0)
    if sum(threads) > cores and most > 1 and job.others:
        what = f"{sum(threads)} threads run on {cores:g} cores"
        remedy = f"export OMP_NUM_THREADS={max(1, int(cores / len(threads)))}"
        yield Found("threads", "the machine", what, remedy)
    elif not on_cpu and most > 4 and sum(threads) >= cores:
        what = f"{most} threads of a process may keep its device waiting"
        yield Found("threads", "the machine", what, "export OMP_NUM_THREADS=4", "NOTE")
    batches = [e["batch"] for e in job.passes(job.first, trains=True) if e["batch"]]
    first = made.get(job.first)
    if first and first["batchnorm"] and job.others and min(batches, default=16) < 16:
        what = f"BatchNorm sees the {min(batches)} samples of one rank"
        remedy = "use larger batches, or on GPUs SyncBatchNorm"
        yield Found("batchnorm", first["where"], what, remedy, "NOTE")


def limits(job: Job) -> Iterator[Found]:
    """What was not judged."""
    epochs = job.passes(job.first, trains=True)
    remedy = "compare the loss with that of one process"
    if job.grouped and not job.alone:
        what = f"neither data nor weights are compared, because of {job.grouped}"
        yield Found("limits", "the program", what, remedy, "NOTE")
    elif job.sharded and not job.alone:
        what = f"what is sharded or averaged is not compared ({job.sharded})"
        yield Found("limits", "the program", what, remedy, "NOTE")
    if max(len(job.ranks), job.start["told"]) == 1:
        what = "one process has trained, so none was compared"
        yield Found("limits", "the program", what, "start two", "NOTE")
    elif job.world > 1 and not job.complete:
        what = f"{len(job.ranks)} of {job.world} ranks are compared"
        remedy = "start the doctor on each machine, with the same --folder"
        yield Found("limits", "the program", what, remedy, "NOTE")
    if len(epochs) == 1 and not job.status and job.others:
        what = "only one epoch was seen, so neither its order nor a step's time is known"
        yield Found("limits", epochs[0]["place"], what, "let it train for two", "NOTE")
    for event in {e["name"]: e for e in job.all("failed")}.values():
        what = f"the doctor's {event['name']}() failed: {event['error']}"
        remedy = "what it should see is not judged"
        yield Found("limits", "the doctor", what, remedy, "NOTE")


def alone(job: Job) -> Iterator[Found]:
    count = max(len(job.ranks), job.start["told"])
    if job.world == 1 and count > 1:
        remedy = "call init_process_group() and DDP(model)"
        yield Found("alone", "the program", f"{count} processes train alone", remedy)
    if job.alone:
        passes = [e for rank in job.ranks for e in job.passes(rank, trains=True)]
        label = "FOUND" if any(event["distributed"] for event in passes) else "NOTE"
        what = f"{len(job.ranks)} ranks train, and no gradient goes from one to another"
        place = job.all("before")[0]["where"]
        yield Found("alone", place, what, "wrap the model: DDP(model)", label)


def speed(job: Job) -> str:
    """Where the time of a step goes, and what would help most."""
    paces = job.of(job.first, "pace")
    if not paces:
        return ""
    pace, models = paces[-1], job.of(job.first, "ddp")
    total, data, update = (pace[name] for name in ("total", "data", "update"))
    steps = job.of(job.first, "before")
    exposed = (pace["exposed"] or 0.0) * (sum(steps[-1]["sync"]) if steps else 1)
    slow = any(g.get("fused", True) is False for event in steps for g in event["options"])
    rest, name = total - data - update, "forward and backward"
    parts = [(data, "waiting for data", "raise num_workers")]
    parts += [(rest, name, ""), (update, "optimizer", "use fused=True" if slow else "")]
    if models and job.world > 1 and 0 < exposed < rest:
        size = sum(e["bytes"] for e in models) / 1e6
        parts[1] = rest - exposed, name, ""
        name = f"waiting for the all-reduce of {size:.1f} MB"
        parts.insert(2, (exposed, name, "raise the batch size"))
    times = ", ".join(f"{name} {1e3 * seconds:.1f}" for seconds, name, _ in parts)
    remedy = max(parts)[2]
    return f"TIME a step takes {1e3 * total:.1f} ms: {times}" + (f": {remedy}" if remedy else "")


def blind(job: Job) -> str | None:
    """Why nothing could be judged."""
    if not job.ranks:
        return "no process was watched that takes an optimizer's step or joins a process group"
    if job.all("before"):
        return None
    paths = {os.path.basename(e["path"]): 1 for e in job.all("load") if e["path"]}
    why = f": it has read {', '.join(paths)}, so start it without" if paths else ""
    return f"no optimizer has made a step{why}"
