"""Does the suite notice? Break the scripts in the ways that matter: a test must fail each time.

    python tests/mutate.py                          all, about 14 minutes on two cores
    python tests/mutate.py multinode.py             what breaks this file
    python tests/mutate.py "no set_epoch" padded    mutants whose names contain these words
    python tests/mutate.py --list

Too slow for CI; tests/test_mutate.py, which is in the suite, keeps the list from going stale. Each
run breaks a copy of the working tree in one place, and runs the test that must notice: killed. A
mutant that survives means a test to write. First the same tests are run on unbroken copies. Needs
what the suite needs in CI: root for several hosts, and Slurm.
"""

import argparse
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 300  # for a test, at most
# A fork from a process that has imported torch: a second instead of five for most of the tests.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["pytest", "torch", "torch._dynamo", "torchvision"])
SINGLE, PARALLEL, SPAWN, ELASTIC, NODES = SCRIPTS = (
    "single_gpu.py",
    "data_parallel.py",
    "ddp_spawn.py",
    "ddp_torchrun.py",
    "multinode.py",
)
DDP = (SPAWN, ELASTIC, NODES)
DATA, MODEL, SEED = "common/data.py", "common/model.py", "common/seed.py"


class Mutant(NamedTuple):
    name: str
    breaks: str
    old: str  # exactly once in each file
    new: str
    tests: dict[str, str]  # file to break: the test that must fail


def parts(test: str, *scripts: str) -> dict[str, str]:
    """A test of test_parts.py, which has the script as its parameter."""
    return {script: f"test_parts.py::test_{test}[{script}]" for script in scripts or SCRIPTS}


def common(file: str, test: str) -> dict[str, str]:
    return {file: f"test_common.py::test_{test}"}


TORCHRUN2 = "torchrun --standalone --nproc_per_node=2 ddp_torchrun.py"
CHUNKS = "test_same_job.py::test_data_parallel_agrees_with_uneven_chunks"
UNEVEN = "test_same_job.py::test_a_last_batch_that_is_shared_out_unevenly_has_its_right_weight[{}]"
ACCUMULATED = "test_same_job.py::test_accumulated_batches_are_one_large_batch[65]"
TWO_EPOCHS = "test_same_job.py::test_two_epochs_agree_to_rounding[{}]"
REPLICAS = "test_same_job.py::test_replicas_hold_the_same_bytes_at_the_end[launch1]"
SHARDS = "test_same_job.py::test_shards_are_disjoint_cover_the_data_and_differ_from_epoch_to_epoch"
HOSTS = "test_multinode.py::test_any_number_of_hosts_does_the_same_job[{}]"
WAYS = "test_multinode.py::test_ways_of_launching[{}]"
CTRL_C = "test_multinode.py::test_ctrl_c_on_one_host_stops_all"
STOP = "test_resume.py::test_asked_to_stop_in_the_middle_of_an_epoch[launch{}]"
CHECK = "test_multinode.py::test_check_finds_the_speed_of_the_link_and_predicts_the_epoch"
SETUP = "a_process_gets_its_device_its_threads_and_its_interface"
SAVED, WHOLE = "what_is_saved_is_what_is_loaded", "a_snapshot_is_written_whole_or_not_at_all"
PARENT = "a_parent_passes_on_signals_and_a_status_and_kills_who_is_left"
RANK_1, ALL_RANKS = "rank_1_leaves_the_file_to_rank_0", "losses_and_accuracy_are_those_of_all_ranks"


def setup(hosts: int, *scripts: str) -> dict[str, str]:
    return {script: f"test_parts.py::test_{SETUP}[{hosts}-{script}]" for script in scripts}


MUTANTS = [
    # --- the data: who trains on what -----------------------------------------------------------
    Mutant(
        "no set_epoch",
        "every epoch has the order of the first",
        "set_epoch(epoch, self.samples_seen)",
        "set_epoch(0, self.samples_seen)",
        parts("each_epoch_has_its_order_and_may_begin_in_the_middle"),
    ),
    Mutant(
        "resumed epoch from its start",
        "after a stop in mid-epoch samples are repeated",
        "set_epoch(epoch, self.samples_seen)",
        "set_epoch(epoch)",
        parts("each_epoch_has_its_order_and_may_begin_in_the_middle"),
    ),
    Mutant(
        "seed not passed to the sampler",
        "every --seed has the same order",
        ", args.seed)\n",
        ", 0)\n",
        parts("each_epoch_has_its_order_and_may_begin_in_the_middle"),
    ),
    Mutant(
        "sampler not passed",
        "every rank trains on all the data",
        "world_size, rank, args.seed)",
        "1, 0, args.seed)",
        {SPAWN: SHARDS, ELASTIC: ACCUMULATED, NODES: HOSTS.format(2)},
    ),
    Mutant(
        "padded evaluation",
        "some test samples count twice",
        "shard = range(rank, len(test_set), world_size)",
        "shard = range(rank, len(test_set) + world_size - 1, world_size)\n"
        "    shard = [index % len(test_set) for index in shard]",
        {
            SPAWN: "test_evaluation.py::test_evaluation_is_exact_where_the_world_size_does_not_"
            "divide_the_test_set[7]",
            ELASTIC: "test_training.py::test_batchnorm_is_evaluated_with_the_statistics_that_are_"
            f"saved[{TORCHRUN2}]",
            NODES: HOSTS.format(3),
        },
    ),
    Mutant(
        "last test batch dropped",
        "some test samples do not count",
        "drop_last=False",
        "drop_last=True",
        parts("dropout_in_training_and_all_units_in_evaluation"),
    ),
    Mutant(
        "loader draws from the model's generator",
        "a resumed run has other dropout masks",
        "        generator=torch.Generator(),",
        "        #",
        parts("loading_data_draws_nothing_from_the_models_numbers"),
    ),
    Mutant(
        "workers draw alike in every epoch",
        "the same augmentation again and again",
        "        self.train_data.generator.manual_seed(torch.initial_seed() + epoch)",
        "        #",
        parts("each_epoch_has_its_order_and_may_begin_in_the_middle"),
    ),
    Mutant(
        "all processes prepare the data",
        "a download by all at once, into one folder",
        "if args.local_rank > 0:\n        preload(",
        "if False:\n        preload(",
        parts("the_first_process_of_a_host_prepares_the_data", ELASTIC, NODES),
    ),
    # --- a step -----------------------------------------------------------------------------------
    Mutant(
        "no DDP wrap",
        "replicas go their own ways",
        "DDP(model, ids, bucket_cap_mb=bucket, gradient_as_bucket_view=True)",
        "nn.DataParallel(model)",
        {
            SPAWN: UNEVEN.format(65),
            ELASTIC: TWO_EPOCHS.format(f"{TORCHRUN2}-options4"),
            NODES: HOSTS.format(2),
        },
    ),
    Mutant(
        "weights not seeded",
        "every run starts from other weights",
        "    set_seed(args.seed, deterministic=args.deterministic)",
        "    pass",
        parts("a_seed_gives_the_weights"),
    ),
    Mutant(
        "one stream for all ranks",
        "all ranks drop out the same units",
        "set_seed(args.seed, rank, args.deterministic)",
        "set_seed(args.seed, 0, args.deterministic)",
        {
            SPAWN: "test_resume.py::test_a_snapshot_holds_what_the_design_says",
            ELASTIC: REPLICAS,
            NODES: HOSTS.format(2),
        },
    ),
    Mutant(
        "gradients not cleared",
        "each step adds those of all steps before",
        "        self.optimizer.zero_grad()\n",
        "",
        {
            SINGLE: CHUNKS,
            PARALLEL: CHUNKS,
            SPAWN: UNEVEN.format(65),
            ELASTIC: ACCUMULATED,
            NODES: HOSTS.format(1),
        },
    ),
    Mutant(
        "evaluation in training mode",
        "dropout and batch statistics in evaluation",
        "        self.model.eval()\n        loss_sum",
        "        loss_sum",
        parts("dropout_in_training_and_all_units_in_evaluation"),
    ),
    Mutant(
        "training in evaluation mode",
        "no dropout, no batch statistics in training",
        "        self.model.train()\n",
        "",
        parts("dropout_in_training_and_all_units_in_evaluation"),
    ),
    Mutant(
        "mean of the ranks' means",
        "a sample of a short shard weighs more",
        "loss * self.world_size / count",
        "loss / max(1, len(targets))",
        {SPAWN: UNEVEN.format(65)},
    ),
    Mutant(
        "mean of the devices' means",
        "a sample of a short chunk weighs more",
        'F.cross_entropy(output, targets, reduction="sum")\n        (loss',
        "sum(F.cross_entropy(output[i::3], targets[i::3]) for i in range(3)) / 3 * count\n"
        "        (loss",
        {PARALLEL: CHUNKS},
    ),
    Mutant(
        "loss not divided in accumulation",
        "the step grows with --accumulate",
        "loss * self.world_size / count",
        "loss / max(1, len(targets))",
        {ELASTIC: ACCUMULATED, NODES: WAYS.format("nodes")},
    ),
    Mutant(
        "last batch weighed as a full one",
        "too small a step at the end of an epoch",
        ", left)  # the global batch",
        ", 999 * left)  # the global batch",
        {SPAWN: UNEVEN.format(65), ELASTIC: ACCUMULATED, NODES: HOSTS.format(3)},
    ),
    Mutant(
        "no_sync on every micro-batch",
        "gradients are never all-reduced",
        "contextlib.nullcontext() if last else self.model.no_sync()",
        "self.model.no_sync()",
        {ELASTIC: REPLICAS, NODES: WAYS.format("nodes")},
    ),
    Mutant(
        "remainder dropped",
        "a short micro-batch at the end of an epoch is left out",
        "strict=True))\n",
        "strict=True))[: len(source) // b_sz]\n",
        {ELASTIC: ACCUMULATED, NODES: WAYS.format("nodes")},
    ),
    Mutant(
        "step % accumulate",
        "where an epoch leaves fewer micro-batches, they are not all-reduced",
        "last = number == len(micro_batches)",
        "last = number == self.args.accumulate",
        {ELASTIC: ACCUMULATED, NODES: WAYS.format("torchrun")},
    ),
    Mutant(
        "no autocast in training",
        "--amp does nothing there",
        "\n                with self.autocast:\n",
        "\n                with contextlib.nullcontext():\n",
        parts("amp_in_training_and_in_evaluation", ELASTIC, NODES),
    ),
    Mutant(
        "no autocast in evaluation",
        "--amp does nothing there",
        "\n            with self.autocast:\n",
        "\n            with contextlib.nullcontext():\n",
        parts("amp_in_training_and_in_evaluation", ELASTIC, NODES),
    ),
    Mutant(
        "compile wraps the module",
        "snapshots with _orig_mod. in their names",
        "            model.compile()",
        "            model = torch.compile(model)",
        parts("compile_leaves_the_names_of_the_weights", ELASTIC, NODES),
    ),
    Mutant(
        "nothing compiled",
        "--compile does nothing",
        "            model.compile()",
        "            pass",
        parts("compile_leaves_the_names_of_the_weights", ELASTIC, NODES),
    ),
    Mutant(
        "buckets not settled",
        "a resumed run adds up in another order",
        "        self._settle_buckets()\n",
        "",
        parts("ddp_has_its_order_of_summation_before_training", *DDP),
    ),
    # --- what is printed --------------------------------------------------------------------------
    Mutant(
        "metrics not all-reduced",
        "an epoch's losses and accuracy are rank 0's",
        "            dist.all_reduce(sums)\n",
        "",
        parts(ALL_RANKS, *DDP),
    ),
    Mutant(
        "step losses not all-reduced",
        "the losses of --log-interval are rank 0's",
        "                dist.all_reduce(loss)\n",
        "",
        parts(ALL_RANKS, *DDP),
    ),
    Mutant(
        "buffers not broadcast",
        "evaluation mixes the ranks' BatchNorm statistics",
        "            dist.broadcast(buffer, src=0)",
        "            pass",
        parts("all_ranks_are_evaluated_with_the_buffers_of_rank_0", *DDP),
    ),
    Mutant(
        "all ranks print",
        "each line as often as there are processes",
        "if dist.is_initialized() and dist.get_rank() > 0 and not every_rank:",
        "if False:",
        parts("rank_1_is_quiet", *DDP),
    ),
    Mutant(
        "all ranks write events",
        "TensorBoard shows every point as often as there are processes",
        "if args.log_dir and self.rank == 0:",
        "if args.log_dir:",
        parts("events_are_written_by_rank_0_alone", *DDP),
    ),
    # --- the snapshot -----------------------------------------------------------------------------
    Mutant(
        "optimizer not restored",
        "a resumed run starts without momentum",
        '        self.optimizer.load_state_dict(snapshot["optimizer"])\n',
        "",
        parts(SAVED),
    ),
    Mutant(
        "RNG not restored",
        "a resumed run has other dropout masks",
        'set_rng_state(snapshot["rng_states"][0], self.device)',
        "pass",
        parts(SAVED, SINGLE, PARALLEL),
    ),
    Mutant(
        "RNG not restored",
        "a resumed run has other dropout masks",
        'set_rng_state(snapshot["rng_states"][self.rank], self.device)',
        "pass",
        parts(SAVED, *DDP),
    ),
    Mutant(
        "rank 0's RNG for all",
        "after a resume all ranks drop out the same units",
        'snapshot["rng_states"][self.rank]',
        'snapshot["rng_states"][0]',
        parts(RANK_1, *DDP),
    ),
    Mutant(
        "scaler not restored",
        "a resumed fp16 run scales anew",
        'self.scaler.load_state_dict(snapshot["scaler"])',
        "pass",
        parts(SAVED, ELASTIC, NODES),
    ),
    Mutant(
        "weights not restored",
        "all but rank 0 go on from the first weights",
        'return\n        self.model.module.load_state_dict(snapshot["model"])\n',
        "return\n",
        parts(RANK_1, *DDP),
    ),
    Mutant(
        "sum of losses counted by every rank",
        "the resumed epoch's loss is too high",
        'snapshot["loss_sum"] if self.rank == 0 else 0',
        'snapshot["loss_sum"]',
        parts(RANK_1, *DDP),
    ),
    Mutant(
        "snapshot overrules the command line",
        "--lr does nothing with --resume",
        "            group.update(lr=self.args.lr, momentum=self.args.momentum)\n",
        "            pass\n",
        parts(SAVED),
    ),
    Mutant(
        "snapshot of another job",
        "--resume takes what another model or seed has left",
        "if then != now:",
        "if False:",
        parts("snapshots_that_do_not_fit_are_refused"),
    ),
    Mutant(
        "epoch instead of epoch + 1",
        "a resumed run trains an epoch twice",
        "self.epoch, self.samples_seen = epoch + 1, 0",
        "self.epoch, self.samples_seen = epoch, 0",
        parts("saved_every_nth_epoch_and_after_the_last"),
    ),
    Mutant(
        "epoch % save_every",
        "the last epochs are lost",
        "if self.epoch % save_every == 0 or self.epoch == total_epochs:",
        "if epoch % save_every == 0:",
        parts("saved_every_nth_epoch_and_after_the_last"),
    ),
    Mutant(
        "saved in place",
        "killed while it writes, a job has lost its snapshot",
        'Path(f"{self.args.snapshot_path}.tmp")',
        "Path(self.args.snapshot_path)",
        parts(WHOLE),
    ),
    Mutant(
        "not on the disk",
        "after a power cut the snapshot is empty",
        "                os.fsync(file.fileno())\n",
        "",
        parts(WHOLE),
    ),
    Mutant(
        "half a snapshot left behind",
        "a full disk stays full",
        "            temporary.unlink(missing_ok=True)\n",
        "",
        parts(WHOLE),
    ),
    Mutant(
        "wrapped names in the snapshot",
        "no other rung can read it",
        '"model": self.model.module.state_dict()',
        '"model": self.model.state_dict()',
        parts(SAVED, PARALLEL, *DDP),
    ),
    Mutant(
        "rank 0 not alone in saving",
        "ranks write one file at once, hosts keep copies",
        "        if self.rank > 0:\n            return\n",
        "",
        parts(RANK_1, *DDP),
    ),
    Mutant(
        "snapshot not broadcast",
        "all but rank 0 start from the beginning",
        "        dist.broadcast_object_list(box",
        "        str(box",
        parts(RANK_1, SPAWN, ELASTIC),
    ),
    Mutant(
        "snapshot not broadcast",
        "all but rank 0 start from the beginning",
        "        dist.broadcast_object_list(box, src=source)",
        "        pass",
        parts(RANK_1, NODES),
    ),
    Mutant(
        "stale snapshot on a restart",
        "it goes on from what an earlier run has left",
        'return snapshot["settings"]["run"] == self.run',
        'return "run" in snapshot["settings"]',
        parts("a_restart_goes_on_from_its_own_run_alone", ELASTIC, NODES),
    ),
    Mutant(
        "restart from the beginning",
        "a crash costs all epochs",
        'return snapshot["settings"]["run"] == self.run',
        "return False",
        parts("a_restart_goes_on_from_its_own_run_alone", ELASTIC, NODES),
    ),
    # --- processes --------------------------------------------------------------------------------
    Mutant(
        "global rank as device index",
        "the second host's processes take other devices than their own",
        "index = args.local_rank %",
        "index = args.rank %",
        setup(2, ELASTIC, NODES),
    ),
    Mutant(
        "all on one device",
        "the others stay idle",
        "index = rank %",
        "index = 0 *",
        setup(1, SPAWN),
    ),
    Mutant(
        "threads not set",
        "every process takes all cores",
        "torch.set_num_threads(",
        "str(",
        setup(1, *DDP),
    ),
    Mutant(
        "gloo on the network",
        "processes of one host talk past the loopback interface",
        '        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)\n',
        "",
        setup(1, *DDP),
    ),
    Mutant(
        "several hosts on loopback",
        "they never meet",
        "if loopback and args.world_size == args.local_world_size:",
        "if loopback:",
        setup(2, ELASTIC, NODES),
    ),
    Mutant(
        "no time-out",
        "--timeout does nothing",
        "timeout=datetime.timedelta(seconds=args.timeout),",
        "",
        setup(1, SPAWN, ELASTIC),
    ),
    Mutant(
        "no time-out",
        "--timeout does nothing",
        "            timeout=datetime.timedelta(seconds=args.timeout),\n",
        "",
        setup(1, NODES),
    ),
    Mutant(
        "no barrier before leaving",
        "rank 0 is killed while it saves",
        "    dist.barrier()  # rank 0 may still be saving",
        "    # rank 0 may still be saving",
        parts("nobody_leaves_before_all_are_done", *DDP),
    ),
    Mutant(
        "sys.exit in a rank",
        "gloo's threads abort or block its end",
        "    os._exit(status)",
        "    sys.exit(status)",
        parts("a_process_leaves_before_python_ends", *DDP),
    ),
    Mutant(
        "each rank stops by itself",
        "the others wait for it",
        "        dist.all_reduce(answer, op=dist.ReduceOp.MAX)\n",
        "",
        parts("all_stop_when_one_must", *DDP),
    ),
    Mutant(
        "orphans train on",
        "when the launcher is killed, its processes stay",
        "self.stop.item() if mp.parent_process().is_alive() else signal.SIGTERM",
        "self.stop.item()",
        parts("all_stop_when_one_must", SPAWN),
    ),
    Mutant(
        "orphans train on",
        "when the launcher is killed, its processes stay",
        "signal.SIGTERM if orphaned else self.stop.item()",
        "self.stop.item()",
        parts("all_stop_when_one_must", ELASTIC, NODES),
    ),
    Mutant(
        "deaf to signals",
        "SIGTERM and Ctrl-C do not stop it",
        "            self.stopped = self.stop.item()\n",
        "",
        {
            SINGLE: STOP.format("0-SIGTERM to the parent"),
            PARALLEL: STOP.format("2-SIGTERM to the parent"),
        },
    ),
    Mutant(
        "parent deaf to Ctrl-C",
        "kill -INT does not stop the job",
        "            catch_stop_signals(stop)\n            while",
        "            while",
        {SPAWN: STOP.format("6-SIGINT to the parent")},
    ),
    Mutant(
        "parent deaf while it loads",
        "its handlers come only with the processes",
        "    catch_stop_signals(stop)  # shared memory: what one process hears, all hear\n"
        "    train_set",
        "    train_set",
        {SPAWN: "test_parts.py::test_a_parent_told_to_stop_while_it_loads_starts_nobody"},
    ),
    Mutant(
        "parent deaf to signals",
        "SIGTERM to it alone leaves its children",
        "        catch_stop_signals(stop)  # shared memory",
        "        #",
        parts(PARENT, NODES),
    ),
    Mutant(
        "signals forgotten while the parent loads",
        "the job starts, only to stop",
        "    if stop.item():\n        sys.exit(128 + stop.item())\n",
        "",
        {SPAWN: "test_parts.py::test_a_parent_told_to_stop_while_it_loads_starts_nobody"},
    ),
    Mutant(
        "stopped is done",
        "a scheduler takes a stopped job for a finished one",
        "        sys.exit(128 + trainer.stopped)",
        "        sys.exit(0)",
        {
            SINGLE: STOP.format("0-SIGTERM to the parent"),
            PARALLEL: STOP.format("2-SIGTERM to the parent"),
        },
    ),
    Mutant(
        "stopped is done",
        "a scheduler takes a stopped job for a finished one",
        "leave(128 + trainer.stopped if trainer.stopped else 0)",
        "leave(0)",
        {
            SPAWN: STOP.format("3-SIGTERM to the parent"),
            ELASTIC: STOP.format("10-SIGTERM to rank 1"),
            NODES: CTRL_C,
        },
    ),
    Mutant(
        "children hear Ctrl-C too early",
        "a screen of tracebacks",
        "signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "pass",
        parts(PARENT, SPAWN, NODES),
    ),
    Mutant(
        "children left behind",
        "after a second Ctrl-C they wait for their time-out",
        "process.kill()",
        "pass",
        {
            SPAWN: "test_errors.py::test_second_ctrl_c_ends_a_job_that_cannot_stop",
            **parts(PARENT, NODES),
        },
    ),
    Mutant(
        "a dead rank is no error",
        "a job without results has succeeded",
        "sys.exit(error.exit_code)",
        "sys.exit(0)",
        {SPAWN: "test_errors.py::test_a_rank_that_never_joins", **parts(PARENT, NODES)},
    ),
    Mutant(
        "no @record",
        "torchrun's report has no traceback",
        "@record  #",
        "#",
        parts("what_torchrun_is_told", ELASTIC, NODES),
    ),
    Mutant(
        "the others' errors hide the first",
        "torchrun may report them as the cause",
        'if "gloo" not in str(error) and not isinstance(error, dist.DistError):',
        "if True:",
        parts("what_torchrun_is_told", ELASTIC, NODES),
    ),
    # --- multinode.py -----------------------------------------------------------------------------
    Mutant(
        "rank without the host's number",
        "two hosts claim the same ranks",
        "args.rank = args.node_rank * args.nproc_per_node",
        "args.rank = args.node_rank",
        {NODES: "test_parts.py::test_a_hosts_number_gives_the_ranks"},
    ),
    Mutant(
        "rank without the local rank",
        "a host's processes claim the same rank",
        "args.rank + local_rank",
        "args.rank",
        {NODES: "test_parts.py::test_a_hosts_number_gives_the_ranks"},
    ),
    Mutant(
        "rank given twice",
        "two processes take one place, and all wait",
        'if store.add(f"rank {rank}", 1) > 1:',
        'if store.add(f"rank {rank}", 1) > 9:',
        {NODES: "test_parts.py::test_who_is_missing_double_or_of_another_world"},
    ),
    Mutant(
        "worlds that differ",
        "one process starts without the others, and they wait",
        "if told != str(world_size):",
        "if False:",
        {NODES: "test_parts.py::test_who_is_missing_double_or_of_another_world"},
    ),
    Mutant(
        "rank outside the world",
        "it waits for a place that there is not",
        "if not 0 <= args.rank < args.world_size:",
        "if False:",
        {NODES: "test_multinode.py::test_usage[arguments4-env4-not in a world of 2]"},
    ),
    Mutant(
        "loopback name not noticed",
        "hosts wait for each other on their own loopback interfaces",
        'reachable = named != "nothing" and not named.startswith("127.")',
        'reachable = named != "nothing"',
        {NODES: "test_parts.py::test_a_name_that_resolves_to_loopback_is_reported"},
    ),
    Mutant(
        "restart from rank 0's snapshot",
        "after a restart rank 0 may be a host that has none",
        "source = everywhere.index(max(everywhere))",
        "source = 0",
        {NODES: "test_parts.py::test_after_a_restart_the_furthest_snapshot_counts"},
    ),
    Mutant(
        "run's name not learned",
        "a host that joined later starts from the beginning after a restart",
        "return max(names)[1]",
        "return names[0][1]",
        {NODES: "test_parts.py::test_a_host_that_joins_later_learns_the_runs_name"},
    ),
    Mutant(
        "srun's tasks train alone",
        "each is rank 0 of 1",
        'found["rank"], found["world_size"] = env["SLURM_PROCID"], env["SLURM_NTASKS"]',
        "pass",
        {NODES: "test_slurm.py::test_srun_without_torchrun"},
    ),
    Mutant(
        "warnings from C++",
        "the error line is lost in them",
        '"TORCH_CPP_LOG_LEVEL", "ERROR"',
        '"TORCH_CPP_LOG_LEVEL", "WARNING"',
        {NODES: "test_parts.py::test_warnings_from_c_plus_plus_are_there_for_who_asks"},
    ),
    Mutant(
        "--check is not alarmed",
        "an all-reduce that does not add up passes",
        "    if wrong:\n",
        "    if False:\n",
        {NODES: "test_parts.py::test_check_adds_up"},
    ),
    Mutant(
        "--check halves the speed",
        "a link looks slower than it is",
        "sent = 2 * (world_size - 1)",
        "sent = (world_size - 1)",
        {NODES: CHECK},
    ),
    Mutant(
        "--check counts the all-reduce twice",
        "an epoch looks longer than it is",
        "with trainer.model.no_sync():",
        "with contextlib.nullcontext():",
        {NODES: CHECK},
    ),
    # --- common/ ----------------------------------------------------------------------------------
    Mutant(
        "normalisation missing",
        "pixels from 0 to 1",
        ".mul_(self.scale).add_(self.offset)",
        ".div_(255)",
        common(DATA, "batches_are_normalised_as_torchvision_does"),
    ),
    Mutant(
        "labels of other images",
        "nothing can be learned",
        "self.targets.index_select(0, indices)",
        "self.targets[: len(indices)]",
        common(DATA, "batches_are_normalised_as_torchvision_does"),
    ),
    Mutant(
        "sampler ignores the seed",
        "every --seed has the same order",
        "manual_seed(self.seed + self.epoch)",
        "manual_seed(self.epoch)",
        common(DATA, "sampler_has_distributed_samplers_order"),
    ),
    Mutant(
        "sampler ignores the epoch",
        "every epoch has the same order",
        "manual_seed(self.seed + self.epoch)",
        "manual_seed(self.seed)",
        common(DATA, "sampler_has_distributed_samplers_order"),
    ),
    Mutant(
        "shards overlap",
        "ranks train on the same samples, and others are left out",
        "[self.rank :: self.num_replicas]",
        "[self.rank // 2 :: self.num_replicas]",
        common(DATA, "sampler_deals_every_sample_once[0-3-100]"),
    ),
    Mutant(
        "remainder dropped",
        "the last samples of an epoch are left out",
        "in range(self.start, len(order), self.global_batch):",
        "in range(self.start, len(order) - self.global_batch + 1, self.global_batch):",
        common(DATA, "sampler_deals_every_sample_once[0-3-100]"),
    ),
    Mutant(
        "sampler starts anew",
        "an epoch entered in the middle repeats samples",
        "in range(self.start, len(order), self.global_batch):",
        "in range(0, len(order), self.global_batch):",
        common(DATA, "sampler_deals_every_sample_once[64-3-100]"),
    ),
    Mutant(
        "one image size only",
        "other data sets end in an error about shapes",
        "nn.Linear(32 * side * side, 128)",
        "nn.Linear(512, 128)",
        common(MODEL, "model_takes_any_image_and_returns_logits[shape1-convnet]"),
    ),
    Mutant(
        "set_seed without the rank",
        "all ranks drop out the same units",
        "(seed + 1_000_003 * rank)",
        "(seed)",
        common(SEED, "seeds_differ_by_rank_and_repeat"),
    ),
    Mutant(
        "NumPy not seeded",
        "augmentation differs from run to run",
        "    np.random.seed(value)\n",
        "",
        common(SEED, "seeds_differ_by_rank_and_repeat"),
    ),
    Mutant(
        "torch's RNG not restored",
        "a resumed run has other dropout masks",
        '    torch.set_rng_state(state["cpu"])\n',
        "",
        common(SEED, "rng_state_survives_a_snapshot_that_is_loaded_safely"),
    ),
    Mutant(
        "NumPy's RNG not restored",
        "a resumed run augments otherwise",
        '    np.random.set_state(state["numpy"])\n',
        "",
        common(SEED, "rng_state_survives_a_snapshot_that_is_loaded_safely"),
    ),
    Mutant(
        "Python's RNG not restored",
        "a resumed run augments otherwise",
        '    random.setstate(state["python"])\n',
        "",
        common(SEED, "rng_state_survives_a_snapshot_that_is_loaded_safely"),
    ),
    Mutant(
        "--deterministic does nothing",
        "GPU runs differ",
        "        torch.use_deterministic_algorithms(True)\n",
        "",
        common(SEED, "deterministic_kernels_are_optional"),
    ),
]


def runs(words: list[str]) -> Iterator[tuple[Mutant, str]]:
    """Each mutant with each of its files, where one of the words is the file or in the name."""
    for mutant in MUTANTS:
        for file in mutant.tests:
            if not words or file in words or any(word in mutant.name for word in words):
                yield mutant, file


def mutated(mutant: Mutant, code: str) -> str:
    assert code.count(mutant.old) == 1, f"{mutant.name}: {code.count(mutant.old)} times"
    return code.replace(mutant.old, mutant.new)


def copy(folder: Path) -> Path:
    """The working tree, without what git ignores."""
    ask = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(ask, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def pytest_main(folder: Path, test: str) -> None:
    """Run the test there, in a process of its own, whose status is pytest's."""
    os.chdir(folder)
    with open("output", "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    quick = ("-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--basetemp=files")
    sys.exit(int(pytest.main([*quick, f"tests/{test}"])))


def run_test(folder: Path, test: str) -> tuple[int, str, float]:
    """pytest's status, what failed or was said last, and the seconds that it took."""
    start = time.monotonic()
    process = FORKSERVER.Process(target=pytest_main, args=(folder, test))
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        os.kill(process.pid, signal.SIGINT)  # pytest then ends what the test has started
        process.join(30)
        process.kill()
        process.join()
    text = (folder / "output").read_text()
    failed = re.findall(r"^(?:FAILED|ERROR) tests/(.*)", text, re.M)
    last = (failed or text.splitlines() or [""])[-1]
    return process.exitcode, last, time.monotonic() - start


def run_baseline(test: str) -> tuple[str, str, float]:
    """The test in an unbroken copy: passes, or ERROR."""
    with tempfile.TemporaryDirectory() as folder:
        status, last, seconds = run_test(copy(Path(folder)), test)
    return "ERROR" if status else "passes", last, seconds


def run_mutant(mutant: Mutant, file: str) -> tuple[str, str, float]:
    """Its test in a copy with the file broken: killed, SURVIVED or ERROR."""
    with tempfile.TemporaryDirectory() as folder:
        path = copy(Path(folder)) / file
        path.write_text(mutated(mutant, path.read_text()))
        status, last, seconds = run_test(Path(folder), mutant.tests[file])
    return {0: "SURVIVED", 1: "killed"}.get(status, "ERROR"), last, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*", help="files to break, or words of mutants' names")
    parser.add_argument("--list", action="store_true", help="say what would be run")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--no-baseline", action="store_true", help="only the broken copies")
    args = parser.parse_args()
    chosen = list(runs(args.words))
    if not chosen:
        parser.error(f"nothing is called {' or '.join(args.words)}: see --list")
    if args.list:
        for mutant, file in chosen:
            print(f"{file}: {mutant.name} ({mutant.breaks})\n    {mutant.tests[file]}")
        return
    os.environ["CI"] = "true"  # a test that cannot run here fails, and is not skipped
    tests = [] if args.no_baseline else sorted({mutant.tests[file] for mutant, file in chosen})
    start, found = time.monotonic(), []
    with ThreadPoolExecutor(args.jobs) as pool:
        work = [(test, pool.submit(run_baseline, test)) for test in tests]
        for mutant, file in chosen:
            work.append((f"{file}: {mutant.name}", pool.submit(run_mutant, mutant, file)))
        for name, future in work:
            result, last, seconds = future.result()
            found.append(result)
            print(f"{result:8} {seconds:5.0f} s  {name}", flush=True)
            if result != "passes":
                print(f"{'':18}{last}", flush=True)
    counts = ", ".join(f"{found.count(result)} {result}" for result in dict.fromkeys(found))
    print(f"{counts} in {(time.monotonic() - start) / 60:.0f} minutes")
    sys.exit("SURVIVED" in found or "ERROR" in found)


if __name__ == "__main__":
    main()
