"""Each mutant has one piece of a file replaced, which the test that it stands under must notice."""

import multiprocessing
import re
import shutil
from pathlib import Path

import pytest
from helpers.jobs import ROOT, SCRIPTS
from helpers.ranks import start_server

SINGLE, PARALLEL, SPAWN, TORCHRUN, NODES = SCRIPTS
DATA, LOADER = "common/data.py", "common/loader.py"
ENDS = "test_stopping.py::test_a_job_ends_at_once_and_keeps_its_last_snapshot"

# test: [(file, a piece that it has once, what stands there instead), ...]
MUTANTS = {
    "test_same_job.py::test_the_same_steps": [
        (SPAWN, "DistributedSampler(train_set, seed=args.seed)", "DistributedSampler(train_set)"),
        (NODES, "set_seed(args.seed)", "set_seed(args.seed, dist.get_rank())"),
        (SPAWN, "range(rank, len(test_set), dist.get_world_size())", "range(len(test_set))"),
        (NODES, "dist.all_reduce(loss_sum)", "pass"),
        (SPAWN, "dist.all_reduce(sums)", "pass"),
    ],
    "test_same_job.py::test_no_sample_is_lost_where_the_processes_do_not_divide_the_data": [
        (NODES, "(train_set, seed=args.seed)", "(train_set, seed=args.seed, drop_last=True)"),
    ],
    "test_data.py::test_cifar10_has_its_own_numbers_for_each_channel": [
        (DATA, "0.2470, 0.2435", "0.2435, 0.2470"),
    ],
    "test_steps.py::test_evaluation_is_with_the_buffers_of_rank_0_and_not_through_ddp": [
        (TORCHRUN, "self.model.module(source)", "self.model(source)"),
        (SPAWN, "buffer.contiguous()", "buffer"),
        (NODES, "dist.broadcast(values, src=0)", "pass"),
    ],
    "test_steps.py::test_a_step_is_on_the_mean_over_the_batch": [
        (TORCHRUN, "else self.model.no_sync()", "else contextlib.nullcontext()"),
        (TORCHRUN, "loss * len(targets) / samples", "loss / len(micro_batches)"),
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
    "test_seed.py::test_each_ranks_loader_workers_draw_numbers_of_their_own": [
        (TORCHRUN, "self.train_data.generator.manual_seed(torch.initial_seed())", "pass"),
    ],
    "test_seed.py::test_loading_data_draws_nothing_from_the_models_numbers": [
        (SINGLE, "generator=torch.Generator(),\n", ""),
    ],
    "test_output.py::test_without_a_test_set_it_trains_and_saves": [
        (NODES, "if test_size > 0:", "if True:"),
    ],
    "test_snapshots.py::test_a_snapshot_is_written_whole_or_not_at_all": [
        (SINGLE, "os.fsync(file.fileno())", "pass"),
    ],
    "test_snapshots.py::test_what_is_saved_is_what_is_loaded": [
        (NODES, '"model": self.model.module', '"model": self.model'),
        (SINGLE, 'self.optimizer.load_state_dict(snapshot["optimizer"])', "pass"),
    ],
    "test_snapshots.py::test_a_run_with_another_setting_is_refused": [(SINGLE, ', "seed")', ")")],
    "test_snapshots.py::test_nobody_ends_while_rank_0_saves": [
        (SPAWN, "    del trainer  #", "    #")
    ],
    "test_resume.py::test_one_process_with_any_optimizer_and_schedule": [
        (PARALLEL, 'self.schedule.load_state_dict(snapshot["schedule"])', "pass"),
    ],
    "test_resume.py::test_an_epoch_goes_on_in_the_middle": [
        (TORCHRUN, 'snapshot.get("samples_seen", 0)', "0"),
    ],
    "test_recipes_models.py::test_zero_is_resumed_to_the_weights_of_sgd": [
        (TORCHRUN, "op=dist.ReduceOp.MAX", "op=dist.ReduceOp.MIN"),
        (TORCHRUN, "+= samples * self.world_size", "+= samples"),
    ],
    f"{ENDS}[launch3-SIGTERM]": [
        (SPAWN, "signal.signal(signal.SIGTERM, stop)", "pass"),
        (DATA, "def make_digits(", "def make_digits("),  # no mutant: the test must pass
    ],
    f"{ENDS}[launch5-SIGKILL of rank 1]": [
        (LOADER, '"worker_init_fn": _end_with_the_rank,', ""),
    ],
    "test_stopping.py::test_torchruns_workers_save_in_mid_epoch[SIGKILL of the parent]": [
        (TORCHRUN, " or (dist.is_torchelastic_launched() and os.getppid() != LAUNCHER)", ""),
    ],
    "test_stopping.py::test_a_stop_is_heard_in_short_epochs_and_between_long_steps": [
        (TORCHRUN, "step == self.ask_at_step", "step % 10 == 0"),
    ],
    "test_stopping.py::test_the_ranks_ask_each_other_at_every_tenth_step_or_at_each_slow_one": [
        (TORCHRUN, "torch.zeros((), device=self.device).item()", "pass"),
    ],
    "test_stopping.py::test_what_is_registered_for_the_end_is_run": [
        (SPAWN, "import torch.distributed.nn  #", "#"),
    ],
    "test_stopping.py::test_the_snapshot_of_a_stop_is_saved_whatever_reads_the_output": [
        (TORCHRUN, "contextlib.suppress(BrokenPipeError)", "contextlib.nullcontext()"),
    ],
    "test_stopping.py::test_a_stop_or_a_death_while_another_rank_hangs": [
        (SPAWN, "process.kill()", "process.join()"),
    ],
    "test_errors.py::test_a_mistake": [
        (SINGLE, "not os.access(path.parent, os.W_OK)", "False"),
        (NODES, "args.rank < 0 or last_rank >= args.world_size", "last_rank >= args.world_size"),
    ],
    "test_errors.py::test_a_node_with_another_option": [
        (TORCHRUN, "if own != value and", "if False and"),
    ],
    "test_devices.py::test_a_process_gets_its_device_its_threads_and_its_interface": [
        (SPAWN, "torch.get_num_threads() // args.nproc_per_node", "torch.get_num_threads()"),
        (TORCHRUN, 'os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)', "pass"),
    ],
    "test_devices.py::test_each_attempt_of_a_node_has_keys_of_its_own": [
        (TORCHRUN, 'os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store', '"0", store'),
    ],
    "test_devices.py::test_ranks_count_processes": [
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
