"""Each mutant has one piece of a file replaced, which the test that it stands under must notice."""

import multiprocessing
import re
import shutil
from pathlib import Path

import pytest
from helpers.jobs import ROOT, SCRIPTS
from helpers.ranks import start_server

SINGLE, PARALLEL, SPAWN, TORCHRUN, NODES = SCRIPTS
DATA = "common/data.py"
SAVED_IN_PLACE = "torch.save(snapshot, self.args.snapshot_path)"
RANK_0_READS = "        if self.rank > 0: dist.barrier()\n        snapshot = torch.load(path"
ENDS = "test_stopping.py::test_a_job_ends_at_once_and_keeps_its_last_snapshot"

# test: [(file, a piece that it has once, what stands there instead), ...]
MUTANTS = {
    "test_same_job.py::test_the_same_steps": [
        (SPAWN, "DistributedSampler(train_set, seed=args.seed)", "DistributedSampler(train_set)"),
        (NODES, "set_seed(args.seed)", "set_seed(args.seed, dist.get_rank())"),
        (SPAWN, "range(rank, len(test_set), dist.get_world_size())", "range(len(test_set))"),
        (NODES, "dist.all_reduce(loss_sum)", "pass"),
        (SPAWN, "dist.all_reduce(sums)", "pass"),
        (TORCHRUN, "len(targets) / step_samples", "1 / accumulate"),
    ],
    "test_same_job.py::test_no_sample_is_lost_where_the_processes_do_not_divide_the_data": [
        (NODES, "(train_set, seed=args.seed)", "(train_set, seed=args.seed, drop_last=True)"),
    ],
    "test_data.py::test_cifar10_has_its_own_numbers_for_each_channel": [
        (DATA, "0.2470, 0.2435", "0.2435, 0.2470"),
    ],
    "test_steps.py::test_evaluation_is_with_the_buffers_of_rank_0_and_not_through_ddp": [
        (TORCHRUN, "self.model.module(source)", "self.model(source)"),
        (NODES, "dist.broadcast(buffer, src=0)", "pass"),
    ],
    "test_steps.py::test_a_step_is_on_the_mean_over_the_batch": [
        (TORCHRUN, "else self.model.no_sync()", "else contextlib.nullcontext()"),
    ],
    "test_steps.py::test_no_sample_is_lost_where_other_ranks_go_on_in_mid_epoch": [
        (TORCHRUN, "seen - seen % self.world_size", "seen + seen % self.world_size"),
        (TORCHRUN, "samples_seen // self.num_replicas", "samples_seen"),
    ],
    "test_steps.py::test_dropout_in_training_and_all_units_in_evaluation": [
        (PARALLEL, "self.model.eval()", "pass"),
        (SINGLE, "self.model.train()", "pass"),
    ],
    "test_seed.py::test_each_epoch_has_its_order_and_its_random_numbers": [
        (SINGLE, "set_seed(self.args.seed, 0, epoch)", "pass"),
        (PARALLEL, "manual_seed(self.args.seed + epoch)", "manual_seed(self.args.seed)"),
        (SPAWN, "sampler.set_epoch(epoch)", "sampler.set_epoch(0)"),
        (NODES, "self.args.seed, self.rank, epoch)", "self.args.seed, epoch)"),
    ],
    "test_seed.py::test_a_random_split_is_the_same_on_all_ranks_and_after_a_resume": [
        (SPAWN, "    set_seed(args.seed)  #", "    #"),
    ],
    "test_output.py::test_without_a_test_set_it_trains_and_saves": [
        (NODES, "if test_size > 0:", "if True:"),
    ],
    "test_snapshots.py::test_a_snapshot_is_written_whole_or_not_at_all": [
        (SINGLE, 'torch.save(snapshot, f"{self.args.snapshot_path}.tmp")', SAVED_IN_PLACE),
    ],
    "test_snapshots.py::test_a_new_run_keeps_the_snapshot_of_an_earlier_one": [
        (SPAWN, "elif self.rank == 0 and os.path", "elif os.path"),
        (PARALLEL, 'os.replace(args.snapshot_path, f"{args.snapshot_path}.old")', "pass"),
    ],
    "test_snapshots.py::test_weights_that_are_nan_or_infinite_are_not_saved": [
        (NODES, "parameter.isfinite()", "~parameter.isnan()"),
        (SINGLE, "in self.model.parameters()):", "in self.model.state_dict().values()):"),
    ],
    "test_snapshots.py::test_snapshots_within_an_epoch": [
        (TORCHRUN, " and step < steps:", ":"),
        (
            TORCHRUN,
            "        self.unsaved_steps = 0\n        if self.rank > 0:",
            "        if self.rank > 0:",
        ),
    ],
    "test_snapshots.py::test_what_is_saved_is_what_is_loaded": [
        (NODES, '"model": self.model.module', '"model": self.model'),
        (SINGLE, 'self.optimizer.load_state_dict(snapshot["optimizer"])', "pass"),
    ],
    "test_snapshots.py::test_a_run_with_another_setting_is_refused": [(SINGLE, ', "seed")', ")")],
    "test_snapshots.py::test_ddp_ends_before_its_group": [(SPAWN, "    del trainer  #", "    #")],
    "test_resume.py::test_one_process_with_any_optimizer_and_schedule": [
        (PARALLEL, 'self.schedule.load_state_dict(snapshot["schedule"])', "pass"),
    ],
    "test_resume.py::test_an_epoch_goes_on_in_the_middle": [
        (TORCHRUN, 'snapshot.get("samples_seen", 0)', "0"),
        (TORCHRUN, "+= len(targets) * self.world_size", "+= 1"),
    ],
    f"{ENDS}[launch3-SIGTERM]": [
        (SPAWN, "signal.signal(signal.SIGTERM, signal.default_int_handler)", "pass"),
        (DATA, "def make_digits(", "def make_digits("),  # no mutant: the test must pass
    ],
    "test_stopping.py::test_a_worker_that_hands_over_a_batch_ends_with_its_rank": [
        ("common/loader.py", '"worker_init_fn": _end_with_the_rank, ', ""),
    ],
    "test_stopping.py::test_what_is_registered_for_the_end_is_run": [
        ("common/__init__.py", "import torch.distributed.nn", "#"),
    ],
    "test_stopping.py::test_a_stop_or_a_death_while_another_rank_hangs": [
        (SPAWN, "process.kill()", "process.join()"),
    ],
    "test_torchrun.py::test_what_one_rank_refuses_all_refuse": [
        (TORCHRUN, "        snapshot = torch.load(path", RANK_0_READS),
    ],
    "test_errors.py::test_a_mistake": [
        (SINGLE, "not os.access(path.parent, os.W_OK)", "False"),
        (NODES, "args.rank < 0 or last >= args.world_size", "last >= args.world_size"),
    ],
    "test_errors.py::test_a_node_with_another_option_data_set_or_snapshot": [
        (TORCHRUN, "other[name] != ranks[0][name]", "False"),
        (NODES, "        compare_ranks(loaded)\n", ""),
        (TORCHRUN, '"train_size": len(train_set), ', ""),
    ],
    "test_multinode.py::test_a_node_with_the_snapshot_of_another_run_ends_all": [
        (NODES, "if any(loaded.values()):", "if False:"),
    ],
    "test_devices.py::test_threads": [
        (SPAWN, "torch.get_num_threads() // args.nproc_per_node", "torch.get_num_threads()"),
        (TORCHRUN, "min(4, torch.get_num_threads())", "torch.get_num_threads()"),
    ],
    "test_devices.py::test_a_process_gets_its_device_and_its_rank": [
        (NODES, "rank=args.rank + local_rank", "rank=args.rank"),
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


# Forked from a process that has torch, because importing it takes most of a test's time.
PYTEST = """
import os, sys
os.chdir({folder!r})
for name in [name for name in os.environ if name.startswith("PYTEST_")]:
    del os.environ[name]
os.environ.pop("PYTHONPATH", None)  # with another sitecustomize.py of ours
for descriptor in (1, 2):
    os.dup2(os.open("output", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
import pytest
sys.exit(pytest.main(["-n", "0", "-x", "-q", "-m", "", "-k", {names!r}, {test!r}]))
"""


@pytest.mark.slow("half a hundred runs of pytest")
@pytest.mark.parametrize(("test", "file", "piece", "other"), ALL)
def test_a_broken_script_is_noticed(tmp_path, test, file, piece, other):
    ignored = shutil.ignore_patterns(".*", "__pycache__", "data", "*.svg", "*.json", "*.pt")
    shutil.copytree(ROOT, tmp_path, ignore=ignored, dirs_exist_ok=True)
    (tmp_path / file).write_text(text(file).replace(piece, other))
    # The file is one of a test's parameters, or none of them is.
    stems = [script.removesuffix(".py") for script in SCRIPTS]
    names = f"{Path(file).stem} or not ({' or '.join(stems)})" if file in SCRIPTS else ""
    code = PYTEST.format(folder=str(tmp_path), test=f"tests/{test}", names=names)
    start_server()
    process = multiprocessing.get_context("forkserver").Process(target=exec, args=(code, {}))
    process.start()
    process.join(280)  # seconds
    process.kill()  # one that hangs has no exit code, and fails below
    what = "does not see it" if piece != other else "fails where nothing is broken"
    output = (tmp_path / "output").read_text()
    assert process.exitcode == (piece != other), f"{test} {what}:\n{output[-2000:]}"
