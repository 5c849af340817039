"""Each mutant has one piece of a file replaced, which the test that it stands under must notice."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.jobs import ROOT, SCRIPTS

SINGLE, PARALLEL, SPAWN, TORCHRUN, NODES = SCRIPTS
DATA = "common/data.py"
ENDS = "test_stopping.py::test_a_job_ends_at_once_and_keeps_its_last_snapshot"
SHARD = "DistributedSampler(train_set, seed=args.seed)"
RANK_0_READS = "    if dist.get_rank() > 0:\n        dist.barrier()\n    snapshot = torch.load(path"

# test: [(file, a piece that it has once, what stands there instead), ...]
MUTANTS = {
    "test_same_job.py::test_the_same_steps": [
        (SPAWN, SHARD, "DistributedSampler(train_set)"),
        (SPAWN, "range(rank, len(val_set), world_size)", "range(len(val_set))"),
        (TORCHRUN, "min(step_size, samples - done)", "step_size"),
    ],
    "test_same_job.py::test_no_sample_is_lost_where_the_processes_do_not_divide_the_data": [
        (SPAWN, SHARD, SHARD.replace(")", ", drop_last=True)")),
    ],
    "test_steps.py::test_evaluation_is_with_the_buffers_of_rank_0_and_not_through_ddp": [
        (TORCHRUN, "evaluate(model.module,", "evaluate(model,"),
        (NODES, "dist.broadcast(buffer, src=0)", "pass"),
    ],
    "test_steps.py::test_evaluation_has_a_mode_of_its_own_and_leaves_the_model_in_training_mode": [
        (SINGLE, "    model.train()\n    return sums", "    return sums"),
    ],
    "test_steps.py::test_gradients_are_sent_once_a_step": [
        (TORCHRUN, "else model.no_sync()", "else contextlib.nullcontext()"),
    ],
    "test_steps.py::test_no_sample_is_lost_where_other_ranks_go_on_in_mid_epoch": [
        (TORCHRUN, "done = samples_seen // world_size", "done = -(-samples_seen // world_size)"),
    ],
    "test_seed.py::test_each_epoch_has_its_order_and_its_random_numbers": [
        (SINGLE, "set_seed(args.seed, 0, epoch)", "pass"),
        (SPAWN, "sampler.set_epoch(epoch)", "sampler.set_epoch(0)"),
    ],
    "test_output.py::test_a_step_of_ddp_torchrun_shows_the_loss_of_all_ranks": [
        (TORCHRUN, "            dist.all_reduce(loss)  #", "            #"),
    ],
    "test_snapshots.py::test_a_snapshot_is_written_whole_or_not_at_all": [
        (SINGLE, 'torch.save(snapshot, f"{args.snapshot_path}.tmp")', "torch.save(snapshot, path)"),
    ],
    "test_snapshots.py::test_a_new_run_keeps_the_snapshot_of_an_earlier_one": [
        (SPAWN, "if rank == 0 and not args.resume and", "if not args.resume and"),
    ],
    "test_snapshots.py::test_weights_that_are_nan_or_infinite_are_not_saved": [
        (SPAWN, "weight.isfinite()", "~weight.isnan()"),
    ],
    "test_snapshots.py::test_what_a_snapshot_holds": [
        (SPAWN, 'parts = {"model": model,', 'parts = {"model": DDP(model),'),
    ],
    "test_snapshots.py::test_rank_0_alone_writes_and_ddp_ends_before_its_group": [
        (NODES, "    if dist.get_rank() > 0:  # all", "    if False:  # all"),
    ],
    "test_resume.py::test_one_process_with_any_optimizer": [
        (SINGLE, '        group["lr"] = rate\n', "        pass\n"),
    ],
    "test_resume.py::test_an_epoch_goes_on_in_the_middle": [
        (TORCHRUN, "epoch * steps + done // step_size", "epoch * steps"),
        (TORCHRUN, "if done == samples:", "if False:"),
    ],
    f"{ENDS}[launch1-SIGTERM]": [
        (SPAWN, "signal.signal(signal.SIGTERM, signal.default_int_handler)", "pass"),
        (DATA, "def make_digits(", "def make_digits("),  # no mutant: the test must pass
    ],
    "test_stopping.py::test_a_worker_that_hands_over_a_batch_ends_with_its_rank": [
        ("common/loader.py", ', "worker_init_fn": _end_with_the_rank', ""),
    ],
    "test_stopping.py::test_what_is_registered_for_the_end_is_run[launch0]": [
        (SPAWN, "import torch.distributed.nn  #", "#"),
    ],
    "test_stopping.py::test_a_stop_while_another_rank_hangs": [
        (SPAWN, "process.kill()", "process.join()"),
    ],
    "test_torchrun.py::test_what_one_rank_refuses_all_refuse": [
        (TORCHRUN, "    snapshot = torch.load(path", RANK_0_READS),
    ],
    "test_errors.py::test_a_node_with_another_option_data_set_or_snapshot": [
        (TORCHRUN, "other[name] != ranks[0][name]", "False"),
        (NODES, "    if args.resume:  # from", "    if False:  # from"),
    ],
}
ALL = [(test, *mutant) for test, mutants in MUTANTS.items() for mutant in mutants]


def test_no_mutant_is_stale():
    stale = [f"{file}: {piece!r}" for _, file, piece, _ in ALL if text(file).count(piece) != 1]
    for file, name in (re.match(r"(\w+\.py)::(\w+)", test).groups() for test in MUTANTS):
        if f"\ndef {name}(" not in text(f"tests/{file}"):
            stale.append(f"{file}::{name} is not there")
    assert not stale, "\n".join(stale)


def text(file: str) -> str:
    return (ROOT / file).read_text()


@pytest.mark.slow("thirty runs of pytest")
@pytest.mark.parametrize(("test", "file", "piece", "other"), ALL)
def test_a_broken_script_is_noticed(tmp_path, test, file, piece, other):
    ignored = shutil.ignore_patterns(".*", "__pycache__", "data", "*.svg", "*.json", "*.pt")
    shutil.copytree(ROOT, tmp_path, ignore=ignored, dirs_exist_ok=True)
    (tmp_path / file).write_text(text(file).replace(piece, other))
    # The file is one of a test's parameters, or none of them is.
    stems = [script.removesuffix(".py") for script in SCRIPTS]
    names = f"{Path(file).stem} or not ({' or '.join(stems)})" if file in SCRIPTS else ""
    words = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-m", "", "-k", names]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env["PYTHONPATH"] = ""  # which has another sitecustomize.py of ours
    with (tmp_path / "output").open("w") as output:
        both = {"stdout": output, "stderr": output, "timeout": 280}
        done = subprocess.run([*words, f"tests/{test}"], cwd=tmp_path, env=env, **both)
    what = "does not see it" if piece != other else "fails where nothing is broken"
    said = (tmp_path / "output").read_text()[-2000:]
    assert done.returncode == (piece != other), f"{test} {what}:\n{said}"
