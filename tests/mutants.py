"""How mutate.py breaks the scripts and common/, and the test that must notice each."""

import re
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent
SINGLE, PARALLEL, SPAWN, ELASTIC, NODES = SCRIPTS = (
    "single_gpu.py",
    "data_parallel.py",
    "ddp_spawn.py",
    "ddp_torchrun.py",
    "multinode.py",
)
DDP = (SPAWN, ELASTIC, NODES)
LAST = (ELASTIC, NODES)
DATA, MODEL, SEED = "common/data.py", "common/model.py", "common/seed.py"
CHECK = "common/check.py"


class Mutant(NamedTuple):
    name: str
    breaks: str
    old: str  # exactly once in each file
    new: str
    tests: dict[str, str]  # file to break: the test that must fail


FILES = {
    test: path.name
    for path in TESTS.glob("test_*.py")
    for test in re.findall(r"^def test_(\w+)", path.read_text(), re.M)
}


def at(test: str) -> str:
    """The file of this test, and its name: `test` is without test_, and may have parameters."""
    return f"{FILES[test.partition('[')[0]]}::test_{test}"


def parts(test: str, *scripts: str) -> dict[str, str]:
    """A test that calls parts of the script, which is its parameter."""
    return {script: f"{at(test)}[{script}]" for script in scripts or SCRIPTS}


def common(file: str, test: str) -> dict[str, str]:
    return {file: at(test)}


def option(test: str, *scripts: str) -> dict[str, str]:
    """A test of test_options.py, which has the script as its parameter."""
    return {script: f"test_options.py::test_{test}[{script}]" for script in scripts or SCRIPTS}


def number(name: str, old: str, new: str, *scripts: str) -> "Mutant":
    """An option that is parsed and checked, and a constant is used instead."""
    test = f"test_options.py::test_a_number_is_in_force[{{}}-{name}]"
    tests = {script: test.format(script) for script in scripts or SCRIPTS}
    return Mutant(f"{name} ignored", "the option does nothing", old, new, tests)


def figure(what: str, old: str, new: str, test: str, *scripts: str) -> "Mutant":
    """A wrong figure in a printed line."""
    return Mutant(f"figure: {what}", "a wrong number is printed", old, new, parts(test, *scripts))


CHUNKS = "test_same_job.py::test_data_parallel_agrees_with_uneven_chunks"
UNEVEN = "test_same_job.py::test_a_last_batch_that_is_shared_out_unevenly_has_its_right_weight[{}]"
SHARDS = "test_same_job.py::test_shards_are_disjoint_cover_the_data_and_differ_from_epoch_to_epoch"
STOP = "test_resume.py::test_asked_to_stop_in_the_middle_of_an_epoch[launch{}]"
SETUP = "a_process_gets_its_device_its_threads_and_its_interface"
SAVED, WHOLE = "what_is_saved_is_what_is_loaded", "a_snapshot_is_written_whole_or_not_at_all"
EPOCH, STEPS = "the_line_of_an_epoch", "the_lines_of_steps_and_the_sums_of_an_epoch"
LINES, RANK = "the_lines_of_the_start_of_a_stop_and_of_a_resume", "the_line_of_a_rank"
FIRST_LINE = "an_epochs_first_line_names_the_device_and_the_rank"
JOINING = "test_joining.py::test_whoever_cannot_join_says_for_whom_it_waits"
DEVICES_LINE = {PARALLEL: "test_output.py::test_data_parallel_says_over_how_many_devices_it_splits"}
NOISE = "a_batchs_noise_in_a_worker_is_that_of_its_epoch_and_first_sample"
STATUS = "a_stopped_job_ends_with_the_signals_status"
LEAVES = "a_process_leaves_before_python_ends_but_after_what_is_registered"
STEP = "a_step_is_on_the_mean_over_the_global_batch"
SENT = "every_rank_starts_from_what_rank_0_sends"
SCHEDULES = "schedules_and_groups_go_on_unless_the_command_line_overrules_them"
LOST = "test_joining.py::test_a_lost_peer_is_told_from_a_fault_of_ones_own"
WAITING = "whoever_waits_says_for_whom"
TOTAL_TIME = "the_total_time_is_in_seconds"
DEVICES = {PARALLEL: "test_steps.py::test_data_parallel_has_the_generators_of_all_its_devices"}
PARENT = "a_parent_passes_on_signals_and_a_status_and_kills_who_is_left"
RANK_1, ALL_RANKS = "rank_1_leaves_the_file_to_rank_0", "losses_and_accuracy_are_those_of_all_ranks"


def setup(hosts: int, *scripts: str) -> dict[str, str]:
    return {script: f"{at(SETUP)}[{hosts}-{script}]" for script in scripts}


def shares(*scripts: str) -> dict[str, str]:
    test = "a_rank_of_three_gets_its_shares_its_seed_and_its_smallest_batch"
    return {script: f"{at(test)}[False-{script}]" for script in scripts or DDP}


def saving(rank: int, *scripts: str) -> dict[str, str]:
    test = "nobody_goes_on_while_rank_0_saves"
    return {script: f"{at(test)}[{rank}-{script}]" for script in scripts or DDP}


def fitting(rank: int) -> dict[str, str]:
    test = "rank_0_says_first_what_does_not_fit"
    return {script: f"{at(test)}[{rank}-{script}]" for script in DDP}


def scheduled(*scripts: str) -> dict[str, str]:
    return {script: f"{at(SCHEDULES)}[SGD-{script}]" for script in scripts or SCRIPTS}


def kept(name: str, *scripts: str) -> dict[str, str]:
    test = "test_a_resumed_run_keeps_a_number_unless_the_command_line_has_it"
    return {script: f"test_options.py::{test}[{script}-{name}]" for script in scripts or SCRIPTS}


def ended(how: str, *scripts: str) -> dict[str, str]:
    test = "a_parent_ends_a_job_of_which_a_rank_hangs_or_is_killed"
    return {script: f"{at(test)}[{how}-{script}]" for script in scripts}


def copied(type: str, *scripts: str) -> dict[str, str]:
    test = "copies_are_waited_for_unless_memory_is_pinned"
    return {script: f"{at(test)}[{type}-{script}]" for script in scripts or SCRIPTS}


MUTANTS = [
    # --- the data: who trains on what -------------------------------------------------------------
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
        "rank=0, seed=args.seed\n    )",
        "rank=0, seed=0\n    )",
        parts("each_epoch_has_its_order_and_may_begin_in_the_middle", SINGLE, PARALLEL),
    ),
    Mutant(
        "seed not passed to the sampler",
        "every --seed has the same order",
        "rank=args.rank, seed=args.seed",
        "rank=args.rank, seed=0",
        parts("each_epoch_has_its_order_and_may_begin_in_the_middle", *DDP),
    ),
    Mutant(
        "sampler not passed",
        "every rank trains on all the data",
        "num_replicas=args.world_size, rank=args.rank,",
        "num_replicas=1, rank=0,",
        {SPAWN: SHARDS, **shares(*LAST)},
    ),
    Mutant(
        "padded evaluation",
        "some test samples count twice",
        "shard = range(args.rank, len(test_set), args.world_size)",
        "shard = range(args.rank, len(test_set) + args.world_size - 1, args.world_size)\n"
        "    shard = [index % len(test_set) for index in shard]",
        {
            SPAWN: "test_evaluation.py::test_evaluation_is_exact_where_the_world_size_does_not_"
            "divide_the_test_set[7]",
            **shares(*LAST),
        },
    ),
    Mutant(
        "all ranks test on all",
        "each test sample counts as often as there are processes",
        "shard = range(args.rank, len(test_set), args.world_size)",
        "shard = range(len(test_set))",
        shares(),
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
        "self.model = DDP(\n",
        "self.model = (lambda model, **_: nn.DataParallel(model))(\n",
        {SPAWN: UNEVEN.format(65), **parts(SENT, *LAST)},
    ),
    Mutant(
        "weights not seeded",
        "every run starts from other weights",
        "    set_seed(args.seed)\n    model",
        "    model",
        parts("a_seed_gives_the_weights", SINGLE, PARALLEL),
    ),
    Mutant(
        "weights not seeded",
        "every run starts from other weights",
        "    set_seed(args.seed)  # the same weights on every rank\n",
        "",
        parts("a_seed_gives_the_weights", *DDP),
    ),
    Mutant(
        "one stream for all ranks",
        "all ranks drop out the same units",
        "    set_seed(args.seed, args.rank)",
        "    set_seed(args.seed, 0)",
        shares(),
    ),
    Mutant(
        "gradients not cleared",
        "each step adds those of all steps before",
        "        self.optimizer.zero_grad()\n",
        "",
        parts(STEP),
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
        parts(STEP, SPAWN),
    ),
    Mutant(
        "mean of the devices' means",
        "a sample of a short chunk weighs more",
        'loss = F.cross_entropy(output, targets, reduction="sum")',
        "loss = sum(F.cross_entropy(output[i::3], targets[i::3]) for i in range(3)) / 3 * count",
        {PARALLEL: CHUNKS},
    ),
    Mutant(
        "loss not divided in accumulation",
        "the step grows with --accumulate",
        "loss * self.world_size / count",
        "loss / max(1, len(targets))",
        parts(STEP, *LAST),
    ),
    Mutant(
        "all batches weighed as full ones",
        "too small a step where a global batch is smaller",
        "count = sizes[step - 1]",
        "count = self.train_data.sampler.global_batch",
        parts(STEPS, *DDP),
    ),
    Mutant(
        "batches weighed by this rank's share",
        "a sample of a short shard weighs more",
        "count = sizes[step - 1]",
        "count = max(1, len(targets)) * self.world_size",
        parts("each_batch_counts_as_much_as_all_ranks_have_of_it", *DDP),
    ),
    Mutant(
        "no_sync on every micro-batch",
        "gradients are never all-reduced",
        "contextlib.nullcontext() if last else self.model.no_sync()",
        "self.model.no_sync()",
        parts(STEP, *LAST),
    ),
    Mutant(
        "no no_sync",
        "every micro-batch is all-reduced",
        "contextlib.nullcontext() if last else self.model.no_sync()",
        "contextlib.nullcontext()",
        parts(STEP, *LAST),
    ),
    Mutant(
        "remainder dropped",
        "samples that do not divide by --accumulate are left out",
        "sources = source.tensor_split(parts)",
        "sources, targets = (t[: len(t) // parts * parts] for t in (source, targets))\n"
        "        sources = sources.tensor_split(parts)",
        parts(STEP, *LAST),
    ),
    Mutant(
        "micro-batches of a fixed size",
        "ranks take different numbers of them, and wait for each other",
        "sources = source.tensor_split(parts)  # load your inputs\n"
        "        micro_batches = zip(sources, targets.tensor_split(parts), strict=True)",
        "b_sz = self.args.batch_size\n"
        "        micro_batches = [*zip(source.split(b_sz), targets.split(b_sz), strict=True)]\n"
        "        parts = len(micro_batches)",
        {
            script: f"test_steps.py::test_every_rank_takes_as_many_micro_batches[3-{script}]"
            for script in LAST
        },
    ),
    Mutant(
        "the first micro-batch is all-reduced, not the last",
        "gradients of the others stay with their rank",
        "last = number == parts",
        "last = number == 1",
        parts(STEP, *LAST),
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
        "DDP's own buckets on a CPU",
        "two all-reduces where one is faster",
        "            bucket_cap_mb=25 if",
        "            bucket_cap_mb=None if",
        parts("on_a_cpu_up_to_25_mib_of_gradients_are_one_all_reduce", *DDP),
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
        '            self.optimizer.load_state_dict(snapshot["optimizer"])\n',
        "",
        parts(SAVED),
    ),
    Mutant(
        "RNG not restored",
        "a resumed run has other dropout masks",
        'set_rng_state(snapshot["rng_states"][0], self.device)',
        "pass",
        parts(SAVED, SINGLE),
    ),
    Mutant(
        "RNG not restored",
        "a resumed run has other dropout masks",
        'set_rng_state(snapshot["rng_states"][0], *self.devices)',
        "pass",
        parts(SAVED, PARALLEL),
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
        "a resumed run goes on from the first weights",
        '            self.model.load_state_dict(snapshot["model"])\n',
        "",
        parts(SAVED, SINGLE),
    ),
    Mutant(
        "weights not restored",
        "a resumed run goes on from the first weights",
        '            self.model.module.load_state_dict(snapshot["model"])\n',
        "",
        {**parts(SAVED, PARALLEL), **parts(RANK_1, *DDP)},
    ),
    Mutant(
        "schedule not stepped",
        "the rate stays what it was",
        "            self.schedule.step()\n",
        "",
        scheduled(),
    ),
    Mutant(
        "schedule not saved",
        "a resumed run begins it anew",
        '"schedule": self.schedule.state_dict()',
        '"schedule": {}',
        scheduled(),
    ),
    Mutant(
        "schedule not restored",
        "a resumed run begins it anew",
        '            self.schedule.load_state_dict(snapshot["schedule"])\n',
        "",
        scheduled(),
    ),
    Mutant(
        "the old schedule with a new rate",
        "--lr in a resumed run lasts for an epoch, or grows many times over",
        "if any(getattr(self.args, name) != then.get(name) for name in changeable):",
        "if False:",
        scheduled(),
    ),
    Mutant(
        "a schedule of another optimizer's option",
        "--momentum begins AdamW's schedule anew",
        "changeable = [name for name in self.optimizer.defaults if name in self.args.kept]",
        "changeable = self.args.kept",
        parts("a_schedule_goes_on_where_another_option_is_overruled"),
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
        '                snapshot["optimizer"]["param_groups"] = self',
        '                snapshot["nothing"] = self',
        parts(SAVED),
    ),
    Mutant(
        "settings not kept",
        "a resumed run has the defaults of what its command line leaves out",
        "                setattr(args, name, then)\n",
        "                pass\n",
        kept("batch_size"),
    ),
    Mutant(
        "everything is given",
        "a resumed run has the defaults of what its command line leaves out",
        "if value is not None]\n",
        "]\n",
        kept("save_every"),
    ),
    Mutant(
        "nothing is given",
        "a resumed run does not hear its own command line",
        "for name, value in vars(parser.parse_args()).items()",
        "for name, value in {}.items()",
        kept("total_epochs"),
    ),
    Mutant(
        "overruled in silence",
        "a forgotten option changes a run, and no line says so",
        "            elif then != now:\n                log(",
        "            elif then != now:\n                str(",
        kept("lr"),
    ),
    Mutant(
        "snapshot without every setting",
        "the last two scripts cannot resume the others' snapshots",
        'snapshot["settings"].get(name, now)',
        'snapshot["settings"][name]',
        parts("a_snapshot_of_another_script_has_not_every_setting", *LAST),
    ),
    Mutant(
        "an empty scaler is restored",
        "the last two scripts cannot resume the others' snapshots",
        'if snapshot["scaler"]:',
        "if True:",
        parts("a_snapshot_of_another_script_has_not_every_setting", *LAST),
    ),
    Mutant(
        "the data set is not kept",
        "a resumed run trains on the default",
        "    args.kept = [*vars(job.parse_args([]))]\n",
        '    args.kept = [*{*vars(job.parse_args([]))} - {"dataset"}]\n',
        option("data_set_and_folder"),
    ),
    Mutant(
        "the data's folder is not kept",
        "a resumed run downloads anew",
        "    args.kept = [*vars(job.parse_args([]))]\n",
        '    args.kept = [*{*vars(job.parse_args([]))} - {"data_dir"}]\n',
        option("data_set_and_folder"),
    ),
    Mutant(
        "the model is not kept",
        "a resumed run needs --model again",
        "    args.kept = [*vars(job.parse_args([]))]\n",
        '    args.kept = [*{*vars(job.parse_args([]))} - {"model"}]\n',
        option("model"),
    ),
    Mutant(
        "--amp is not kept",
        "a resumed run computes in float32",
        "    args.kept = [*vars(job.parse_args([]))]\n",
        '    args.kept = [*{*vars(job.parse_args([]))} - {"amp"}]\n',
        option("amp_is_kept", *LAST),
    ),
    Mutant(
        "--epochs is not given",
        "it does nothing with --resume",
        '        args.given.append("total_epochs")\n',
        "",
        {NODES: "test_options.py::test_epochs_overrule_the_snapshots"},
    ),
    Mutant(
        "snapshot of another job",
        "--resume takes what another model or seed has left",
        "            elif then != now and name in",
        "            elif False and name in",
        parts("snapshots_that_do_not_fit_are_refused"),
    ),
    Mutant(
        "epoch instead of epoch + 1",
        "a resumed run trains an epoch twice",
        "            self.epoch = epoch + 1\n",
        "            self.epoch = epoch\n",
        parts("saved_every_nth_epoch_and_after_the_last"),
    ),
    Mutant(
        "epoch % save_every",
        "the last epochs are lost",
        "if self.epoch % self.args.save_every == 0 or self.epoch == total_epochs:",
        "if epoch % self.args.save_every == 0:",
        parts("saved_every_nth_epoch_and_after_the_last"),
    ),
    Mutant(
        "saved in place",
        "killed while it writes, a job has lost its snapshot",
        'temporary = Path(f"{path}.tmp")',
        "temporary = Path(path)",
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
        'waiting_for("rank 0, which saves the snapshot"):\n                dist.barrier()\n'
        "            return\n",
        'waiting_for("rank 0, which saves the snapshot"):\n                dist.barrier()\n',
        parts(RANK_1, *DDP),
    ),
    Mutant(
        "snapshot not broadcast",
        "all but rank 0 start from the beginning",
        "    dist.broadcast_object_list(message, src=0)",
        "    str(message)",
        parts(SENT, SPAWN, NODES),
    ),
    Mutant(
        "snapshot not broadcast",
        "all but rank 0 start from the beginning",
        "    dist.broadcast_object_list(message, src=offers",
        "    dict(src=offers",
        parts(SENT, ELASTIC),
    ),
    Mutant(
        "settings not broadcast",
        "rank 0 alone keeps the snapshot's settings",
        "    vars(args).update(settings)\n",
        "",
        parts(SENT, *LAST),
    ),
    Mutant(
        "another node's snapshot counts as this run's",
        "after a restart the job goes on from an earlier run's",
        "offer = (is_of_this_run(snapshot, args), *",
        "offer = (True, *",
        {ELASTIC: "test_snapshots.py::test_after_a_restart_the_furthest_snapshot_counts"},
    ),
    Mutant(
        "stale snapshot on a restart",
        "it goes on from what an earlier run has left",
        'return not set(args.run_names).isdisjoint(snapshot["settings"].get("run_names", []))',
        "return True",
        {ELASTIC: "test_snapshots.py::test_a_restart_goes_on_from_its_own_run_alone"},
    ),
    Mutant(
        "restart from the beginning",
        "a crash costs all epochs",
        'return not set(args.run_names).isdisjoint(snapshot["settings"].get("run_names", []))',
        "return False",
        {ELASTIC: "test_snapshots.py::test_a_restart_goes_on_from_its_own_run_alone"},
    ),
    # --- processes --------------------------------------------------------------------------------
    Mutant(
        "global rank as device index",
        "the second host's processes take other devices than their own",
        "index = args.local_rank %",
        "index = args.rank %",
        setup(2, ELASTIC),
    ),
    Mutant(
        "global rank as device index",
        "the second host's processes take other devices than their own",
        "torch.device(args.device, args.local_rank % count)",
        "torch.device(args.device, args.rank % count)",
        {NODES: "test_devices.py::test_processes_of_one_host_take_different_devices"},
    ),
    Mutant(
        "all on one device",
        "the others stay idle",
        "index = args.local_rank %",
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
        "several nodes on loopback",
        "they never connect",
        "if loopback and args.world_size == args.local_world_size:",
        "if loopback:",
        setup(2, NODES),
    ),
    Mutant(
        "several nodes on loopback",
        "they never connect",
        "if loopback and args.world_size == args.local_world_size:",
        "if loopback:",
        setup(2, ELASTIC),
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
        "        timeout=datetime.timedelta(seconds=args.timeout),\n        device_id",
        "        device_id",
        setup(1, NODES),
    ),
    Mutant(
        "no barrier after the save",
        "rank 0 is killed while it saves",
        'make room, then --resume")\n        dist.barrier()\n',
        'make room, then --resume")\n',
        saving(0),
    ),
    Mutant(
        "nobody waits for the save",
        "a slow disk lets an all-reduce run into its time-out",
        'waiting_for("rank 0, which saves the snapshot"):\n                dist.barrier()\n',
        'waiting_for("rank 0, which saves the snapshot"):\n                pass\n',
        saving(1),
    ),
    Mutant(
        "the group is not left",
        "the others may lose a peer that is done",
        "    dist.destroy_process_group()\n",
        "",
        saving(0),
    ),
    Mutant(
        "waiting for the save in silence",
        "a slow disk looks like a hang",
        'with waiting_for("rank 0, which saves the snapshot"):',
        "with contextlib.nullcontext():",
        parts(WAITING, *DDP),
    ),
    Mutant(
        "waiting for the data in silence",
        "a download looks like a hang",
        'with waiting_for("the first process of each node, which prepares the data"):',
        "with contextlib.nullcontext():",
        parts(WAITING, *LAST),
    ),
    Mutant(
        "the line about waiting always comes",
        "ten seconds later a line says that somebody waits, and nobody does",
        "        timer.cancel()\n",
        "        pass\n",
        parts(WAITING, *DDP),
    ),
    Mutant(
        "all ranks say what does not fit",
        "the line about a snapshot comes as often as there are processes",
        "        if self.rank > 0:\n            dist.barrier()  # until rank 0",
        "        if False:\n            dist.barrier()  # until rank 0",
        fitting(1),
    ),
    Mutant(
        "rank 0 does not let the others load",
        "they wait until their time-out",
        "        if self.rank == 0:\n            dist.barrier()\n        log(",
        "        log(",
        fitting(0),
    ),
    Mutant(
        "sys.exit in a rank",
        "gloo's threads abort or block its end",
        "    os._exit(status)",
        "    sys.exit(status)",
        parts(LEAVES, *DDP),
    ),
    Mutant(
        "each rank stops by itself",
        "the others wait for it",
        "        dist.all_reduce(answer, op=dist.ReduceOp.MAX)\n",
        "",
        parts("all_stop_when_one_must", *DDP),
    ),
    Mutant(
        "slow steps asked after every tenth",
        "a stop takes longer than anyone waits for it",
        "1 if slow_anywhere else 10",
        "10",
        parts("slow_steps_are_asked_after_each", *DDP),
    ),
    Mutant(
        "orphans train on",
        "when the launcher is killed, its processes stay",
        "signal.SIGTERM if orphaned else self.stop.item()",
        "self.stop.item()",
        parts("all_stop_when_one_must", *DDP),
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
        "        catch_stop_signals(stop)\n        waited",
        "        waited",
        parts(PARENT, SPAWN, NODES),
    ),
    Mutant(
        "no patience with ranks that save",
        "all are killed as soon as one is asked to stop",
        "if waited > PATIENCE:",
        "if waited > 0:",
        ended("hangs", SPAWN, NODES),
    ),
    Mutant(
        "patience without an end",
        "a rank that hangs keeps the others waiting",
        "if waited > PATIENCE:",
        "if False:",
        ended("hangs", SPAWN, NODES),
    ),
    Mutant(
        "patience from the start",
        "every job is killed after 25 seconds",
        "            if stop.item():\n                waited",
        "            if True:\n                waited",
        parts("a_parent_waits_for_as_long_as_nobody_asks_it_to_stop", SPAWN, NODES),
    ),
    Mutant(
        "a killed rank's number as a status",
        "the shell sees 247, and no line says what happened",
        "if error.exit_code > 0:",
        "if True:",
        ended("killed", SPAWN, NODES),
    ),
    Mutant(
        "parent deaf while it loads",
        "its handlers come only with the processes",
        "    catch_stop_signals(stop)\n    # Opened",
        "    # Opened",
        {SPAWN: "test_stopping.py::test_a_parent_told_to_stop_while_it_loads_starts_nobody"},
    ),
    Mutant(
        "signals forgotten while the parent loads",
        "the job starts, only to stop",
        "    if stop.item():\n        sys.exit(128 + stop.item())\n",
        "",
        {SPAWN: "test_stopping.py::test_a_parent_told_to_stop_while_it_loads_starts_nobody"},
    ),
    Mutant(
        "stopped is done",
        "a scheduler takes a stopped job for a finished one",
        "        sys.exit(128 + trainer.stopped)",
        "        sys.exit(0)",
        parts(STATUS, SINGLE, PARALLEL),
    ),
    Mutant(
        "stopped is done",
        "a scheduler takes a stopped job for a finished one",
        "leave(128 + trainer.stopped if trainer.stopped else 0)",
        "leave(0)",
        parts(STATUS, *DDP),
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
        parts("what_an_error_says", ELASTIC),
    ),
    Mutant(
        "the others' errors hide the first",
        "torchrun may report them as the cause",
        "if not is_lost_peer(error):",
        "if True:",
        parts("what_an_error_says", *LAST),
    ),
    Mutant(
        "a rank's own error passes for a lost peer",
        "nobody reports the cause",
        "if not is_lost_peer(error):",
        "if False:",
        parts("what_an_error_says", *LAST),
    ),
    *(
        Mutant(
            f"lost peer: {said}",
            "a rank that has lost the others is reported as the cause",
            said,
            "no such words",
            dict.fromkeys(LAST, LOST),
        )
        for said in (
            "closed by peer",
            "reset by peer",
            "writev",
            "for recv operation",
            "pair closure",
            "remote process exit",
            "collective operation timeout",
            "store->get(",
        )
    ),
    Mutant(
        "lost peer: the network",
        "a rank that has lost the others is reported as the cause",
        "(dist.DistNetworkError, dist.DistStoreError)",
        "(dist.DistStoreError,)",
        dict.fromkeys(LAST, LOST),
    ),
    Mutant(
        "lost peer: the store",
        "a rank that has lost the others is reported as the cause",
        "(dist.DistNetworkError, dist.DistStoreError)",
        "(dist.DistNetworkError,)",
        dict.fromkeys(LAST, LOST),
    ),
    Mutant(
        "lost peer: all of gloo's and NCCL's",
        "two processes on one GPU are told to look elsewhere",
        "store_failed = isinstance(error, (dist.DistNetworkError, dist.DistStoreError))",
        'store_failed = isinstance(error, dist.DistError) or "gloo" in str(error)',
        dict.fromkeys(LAST, LOST),
    ),
    Mutant(
        "only the first line of an error",
        "NCCL's cause is not in it",
        'return " ".join(str(error).split("Exception raised from")[0].split())',
        "return str(error).splitlines()[0]",
        dict.fromkeys(LAST, LOST),
    ),
    Mutant(
        "C++ frames in an error's line",
        "the cause is lost in them",
        'str(error).split("Exception raised from")[0].split()',
        "str(error).split()",
        dict.fromkeys(LAST, LOST),
    ),
    # --- multinode.py -----------------------------------------------------------------------------
    Mutant(
        "rank without the host's number",
        "two hosts claim the same ranks",
        "args.rank = args.node_rank * args.nproc_per_node",
        "args.rank = args.node_rank",
        {NODES: "test_joining.py::test_a_hosts_number_gives_the_ranks"},
    ),
    Mutant(
        "rank without the local rank",
        "a host's processes claim the same rank",
        "    args.rank += local_rank\n",
        "",
        {NODES: "test_joining.py::test_a_hosts_number_gives_the_ranks"},
    ),
    Mutant(
        "rank given twice",
        "two processes take one place, and all wait",
        'if store.add(f"claims of rank {args.rank}", 1) > 1:',
        'if store.add(f"claims of rank {args.rank}", 1) > 9:',
        {NODES: "test_joining.py::test_who_is_missing_double_or_of_another_world"},
    ),
    Mutant(
        "worlds that differ",
        "one process starts without the others, and they wait",
        "if told != str(args.world_size):",
        "if False:",
        {NODES: "test_joining.py::test_who_is_missing_double_or_of_another_world"},
    ),
    Mutant(
        "world of whoever comes first",
        "one wrong process takes rank 0, and with it the store, from all others",
        '            store.wait(["world size"])',
        "            pass",
        {NODES: "test_joining.py::test_the_world_of_rank_0_counts"},
    ),
    Mutant(
        "rank outside the world",
        "it waits for a place that there is not",
        "if args.rank >= args.world_size:",
        "if False:",
        {NODES: "test_multinode.py::test_usage[not in a world of 2]"},
    ),
    Mutant(
        "loopback name not noticed",
        "nodes wait for each other on their own loopback interfaces",
        'or address[:4] != "127."',
        "or True",
        parts("a_name_that_resolves_to_loopback_is_reported", *LAST),
    ),
    Mutant(
        "loopback name complained of on one node",
        "processes of one node cannot join",
        "if len(hosts) > 1 and store",
        "if store",
        {NODES: "test_joining.py::test_a_name_that_resolves_to_loopback_matters_to_several_nodes"},
    ),
    Mutant(
        "loopback name of another node in silence",
        "a node waits for the others until its time-out",
        'if len(hosts) > 1 and store.check(["loopback error"]):',
        "if False:",
        {NODES: "test_joining.py::test_a_name_that_resolves_to_loopback_matters_to_several_nodes"},
    ),
    Mutant(
        "torchrun's nodes with loopback names",
        "they wait for each other until their time-out",
        " and (error := loopback_error(args)):",
        ' and (error := ""):',
        {ELASTIC: "test_joining.py::test_torchrun_on_several_nodes_looks_at_their_names"},
    ),
    Mutant(
        "deaf to Ctrl-C while they join",
        "whoever forgot to start a node waits 25 seconds more",
        "    signal.signal(signal.SIGINT, signal.SIG_DFL)",
        "    #",
        {NODES: "test_multinode.py::test_ctrl_c_while_another_node_is_missing"},
    ),
    Mutant(
        "ranks given by torchrun",
        "two scripts for one thing, and this one does not restart",
        "if dist.is_torchelastic_launched():\n        parser",
        "if False:\n        parser",
        {
            NODES: "test_multinode.py::test_usage[torchrun starts ddp_torchrun.py; this script is "
            "for ranks]"
        },
    ),
    Mutant(
        "restart from rank 0's snapshot",
        "after a restart rank 0 may be on a node that has none",
        "src=offers.index(max(offers))",
        "src=0",
        {ELASTIC: "test_snapshots.py::test_after_a_restart_the_furthest_snapshot_counts"},
    ),
    Mutant(
        "the others' names of the run not learned",
        "after a restart a node that joined later takes its snapshot for another run's",
        "return sorted({name for name in names if name})",
        "return names[:1]",
        {ELASTIC: "test_snapshots.py::test_a_node_that_joins_later_is_of_the_run"},
    ),
    Mutant(
        "ranks in the environment not heard",
        "each process of srun is rank 0 of 1",
        'rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")',
        "rank = world_size = None",
        {NODES: "test_slurm.py::test_srun_without_torchrun"},
    ),
    Mutant(
        "warnings from C++",
        "the error line is lost in them",
        '"TORCH_CPP_LOG_LEVEL", "ERROR"',
        '"TORCH_CPP_LOG_LEVEL", "WARNING"',
        {NODES: "test_joining.py::test_warnings_from_c_plus_plus_are_there_for_who_asks"},
    ),
    # --- common/check.py --------------------------------------------------------------------------
    Mutant(
        "--check is not alarmed",
        "an all-reduce that does not add up passes",
        "    if wrong:\n",
        "    if False:\n",
        common(CHECK, "rank_0_prints_sums_that_are_right"),
    ),
    Mutant(
        "--check halves the speed",
        "a link looks slower than it is",
        "sent = 2 * (world_size - 1)",
        "sent = (world_size - 1)",
        common(CHECK, "the_lines_of_several_nodes"),
    ),
    Mutant(
        "--check counts the all-reduce twice",
        "computing looks longer than it is",
        "with trainer.model.no_sync():",
        "if True:",
        common(CHECK, "what_is_timed[multinode.py]"),
    ),
    Mutant(
        "--check trains",
        "what is saved or measured afterwards is another model",
        'group["lr"] = 0.0',
        'group["lr"] = 0.1',
        common(CHECK, "what_is_timed[multinode.py]"),
    ),
    Mutant(
        "--check waits in its times",
        "a barrier counts as work",
        "        dist.barrier()\n        start = time.perf_counter()\n",
        "        start = time.perf_counter()\n        dist.barrier()\n",
        common(CHECK, "what_is_timed[multinode.py]"),
    ),
    Mutant(
        "--check without data",
        "data that come too late are not seen",
        "        waits.append(time.perf_counter() - start)\n",
        "        waits.append(0.0)\n",
        common(CHECK, "what_is_timed[multinode.py]"),
    ),
    Mutant(
        "--check counts data that nobody waits for",
        "a GPU that computes meanwhile looks idle",
        "min(wait, max(0.0, whole - ready))",
        "wait",
        common(CHECK, "data_that_are_fetched_while_the_device_computes_cost_nothing"),
    ),
    Mutant(
        "--check's small batch",
        "a batch that is too small is not seen",
        "timed(lambda: compute(fewer), device, repeats)",
        "together / 2",
        common(CHECK, "what_is_timed[multinode.py]"),
    ),
    Mutant(
        "--check hangs with BatchNorm",
        "rank 0 sends buffers to ranks that wait elsewhere",
        "        idle = dist.get_rank() > 0\n",
        "        idle = dist.get_rank() > 0\n        step()\n",
        common(CHECK, "batchnorm_does_not_make_it_hang"),
    ),
    Mutant(
        "prediction of nodes without latency",
        "a thousand small messages cost nothing",
        "(latency + size / ranks / bandwidth)",
        "(size / ranks / bandwidth)",
        common(CHECK, "the_seconds_of_a_ring"),
    ),
    Mutant(
        "prediction of nodes without the ring's growth",
        "more nodes look free",
        "- reduce\n            rate",
        "* 0\n            rate",
        common(CHECK, "the_lines_of_several_nodes"),
    ),
    Mutant(
        "prediction of accumulation",
        "four times the batch look free",
        "step + 3 * own[slowest]",
        "step",
        common(CHECK, "the_lines_of_several_nodes"),
    ),
    Mutant(
        "efficiency counts what is disturbed",
        "processes that share cores look efficient",
        "useful = min(ranks[0].alone, compute) + data",
        "useful = compute + data",
        common(CHECK, "the_lines_of_several_nodes"),
    ),
    Mutant(
        "slow rank by its mean",
        "all ranks look slow where one is",
        "statistics.median_low(own), slow",
        "own[slowest], slow",
        common(
            CHECK,
            "the_sentence_about_a_slow_rank_and_about_a_link_below_its_name",
        ),
    ),
    Mutant(
        "link's name is believed",
        "a link far below its name is not seen",
        "if sent < named / 2:",
        "if False:",
        common(
            CHECK,
            "the_sentence_about_a_slow_rank_and_about_a_link_below_its_name",
        ),
    ),
    # --- options: parsed, checked, and used nowhere -----------------------------------------------
    number("total_epochs", "    trainer.train(args.total_epochs)", "    trainer.train(5)"),
    number("save_every", "if self.epoch % self.args.save_every == 0", "if self.epoch % 1 == 0"),
    number(
        "batch_size",
        "train_set, args.batch_size, num_replicas=1",
        "train_set, 32, num_replicas=1",
        SINGLE,
        PARALLEL,
    ),
    number(
        "batch_size",
        "args.batch_size, num_replicas=args.world_size, rank=args",
        "32, num_replicas=args.world_size, rank=args",
        SPAWN,
    ),
    number("batch_size", "per_step = args.batch_size", "per_step = 32", *LAST),
    number("test_batch_size", "args.test_batch_size, drop_last", "1000, drop_last"),
    number("lr", "lr=args.lr", "lr=0.01"),
    number("momentum", "momentum=args.momentum", "momentum=0.9"),
    number(
        "log_interval", "if self.args.log_interval and step % self.args.log_interval", "if step % 1"
    ),
    number("num_workers", "train_sampler, device, args.num_workers)", "train_sampler, device, 0)"),
    Mutant(
        "num_workers ignored in evaluation",
        "the option does half of its work",
        "test_sampler, device, args.num_workers)",
        "test_sampler, device, 0)",
        number("num_workers", "", "").tests,
    ),
    Mutant(
        "num_workers not passed on",
        "the option does nothing",
        "        num_workers=num_workers,\n",
        "",
        parts("workers_are_forked_on_linux_and_made_anew_in_each_epoch"),
    ),
    number("accumulate", "parts = self.args.accumulate", "parts = 1", *LAST),
    Mutant(
        "accumulate does not enlarge the batch",
        "each step takes --batch-size samples, in parts",
        "per_step = args.batch_size * args.accumulate",
        "per_step = args.batch_size",
        shares(*LAST),
    ),
    number("nproc_per_node", "objs, args.nproc_per_node, join", "objs, 2, join", SPAWN),
    number("nproc_per_node", "stop), args.nproc_per_node, join", "stop), 2, join", NODES),
    number("rank", "rank=args.rank,\n        world", "rank=0,\n        world", NODES),
    number("world_size", "        world_size=args.world_size,\n", "        world_size=2,\n", NODES),
    number("nnodes", "= args.nnodes * args.nproc_per_node", "= 2 * args.nproc_per_node", NODES),
    number(
        "node_rank", "= args.node_rank * args.nproc_per_node", "= 0 * args.nproc_per_node", NODES
    ),
    number("epochs", "        args.total_epochs = args.epochs\n", "        pass\n", NODES),
    Mutant(
        "another rank in the group",
        "processes claim one place",
        "        rank=args.rank,\n        world_size",
        "        rank=0,\n        world_size",
        setup(1, SPAWN, ELASTIC),
    ),
    Mutant(
        "dataset ignored",
        "the option does nothing",
        "load_dataset(args.dataset, args.data_dir)",
        'load_dataset("digits", args.data_dir)',
        option("data_set_and_folder"),
    ),
    Mutant(
        "data_dir ignored",
        "the option does nothing",
        "load_dataset(args.dataset, args.data_dir)",
        'load_dataset(args.dataset, "data")',
        option("data_set_and_folder"),
    ),
    Mutant(
        "model ignored",
        "the option does nothing",
        "build_model(args.model, train_set[0][0].shape).to",
        'build_model("convnet", train_set[0][0].shape).to',
        option("model"),
    ),
    Mutant(
        "model overruled by the data set",
        "the option does nothing",
        "args.model = args.model or DEFAULT_MODEL[args.dataset]",
        "args.model = DEFAULT_MODEL[args.dataset]",
        option("model"),
    ),
    Mutant(
        "device ignored",
        "the option does nothing",
        'devices[0] if args.device == "auto" else args.device',
        "devices[0]",
        {
            script: f"test_options.py::test_device[{script}-arguments{number}]"
            for number, script in enumerate(SCRIPTS)
        },
    ),
    Mutant(
        "device not used",
        "everything is computed on the CPU",
        "device = torch.device(args.device)",
        'device = torch.device("cpu")',
        parts("the_device_is_the_one_that_was_asked_for", SINGLE, PARALLEL),
    ),
    Mutant(
        "device not made current",
        "what the device's own generator draws comes from another one",
        "        torch.accelerator.set_device_index(device.index)\n",
        "        pass\n",
        parts("the_device_is_the_one_that_was_asked_for", SINGLE),
    ),
    Mutant(
        "device not made current",
        "all processes' first tensors lie on the first device",
        "        torch.accelerator.set_device_index(device.index)\n",
        "        pass\n",
        setup(1, *DDP),
    ),
    Mutant(
        "model stays on the CPU",
        "the first step fails",
        ".shape).to(device)",
        ".shape)",
        parts("the_optimizer_has_the_parameters_that_are_on_the_device"),
    ),
    Mutant(
        "optimizer before the device",
        "where torch makes new parameters there, nothing is trained",
        "        model.parameters(),\n",
        "        [parameter.clone().detach() for parameter in model.parameters()],\n",
        parts("the_optimizer_has_the_parameters_that_are_on_the_device"),
    ),
    Mutant(
        "deterministic ignored",
        "the option does nothing",
        "    if args.deterministic:\n        use",
        "    if False:\n        use",
        parts("deterministic_kernels_are_asked_for", SINGLE, PARALLEL),
    ),
    Mutant(
        "deterministic ignored",
        "the option does nothing",
        "    if args.deterministic:  # first",
        "    if False:  # first",
        parts("deterministic_kernels_come_before_the_process_group", *DDP),
    ),
    Mutant(
        "kernels after the group",
        "NCCL has chosen its own by then",
        "    device = ddp_setup(",
        "    device = (lambda *given: (vars(args).update(deterministic=False), "
        "globals()['ddp_setup'](*given), use_deterministic_kernels())[1])(",
        parts("deterministic_kernels_come_before_the_process_group", *DDP),
    ),
    Mutant(
        "--deterministic on MPS",
        "it fails in the first step",
        'if args.deterministic and args.device.startswith("mps"):',
        "if False:",
        parts("deterministic_kernels_are_refused_on_mps", SINGLE, PARALLEL),
    ),
    Mutant(
        "DDP on MPS",
        "there is no backend for it",
        'if found is None or found.type == "mps":',
        "if found is None:",
        parts("macs_have_no_ddp", *DDP),
    ),
    Mutant(
        "saved at another path",
        "--snapshot-path does nothing",
        "path = Path(self.args.snapshot_path)",
        'path = Path("checkpoint.pt")',
        option("snapshot_path"),
    ),
    Mutant(
        "resumed from another path",
        "--snapshot-path does nothing",
        "    path = Path(args.snapshot_path)\n    if not args.resume",
        '    path = Path("checkpoint.pt")\n    if not args.resume',
        parts(LINES, SINGLE, PARALLEL, SPAWN, NODES),
    ),
    Mutant(
        "resumed from another path",
        "--snapshot-path does nothing",
        "    path = Path(args.snapshot_path)\n    asked =",
        '    path = Path("checkpoint.pt")\n    asked =',
        parts(LINES, ELASTIC),
    ),
    Mutant(
        "resumed from another path in rank 0",
        "--snapshot-path does nothing",
        "torch.load(args.snapshot_path",
        'torch.load("checkpoint.pt"',
        parts(LINES, SPAWN),
    ),
    Mutant(
        "resume ignored",
        "the option does nothing",
        "    if not args.resume:\n",
        "    if True:\n",
        option("resume", SINGLE, PARALLEL, SPAWN, NODES),
    ),
    Mutant(
        "resume ignored",
        "the option does nothing",
        "if not asked and not is_of",
        "if not is_of",
        option("resume", ELASTIC),
    ),
    Mutant(
        "always resumed",
        "a run goes on from whatever lies there",
        "    if not args.resume:\n",
        "    if False:\n",
        option("without_resume_nothing_is_kept", SINGLE, PARALLEL, SPAWN, NODES),
    ),
    Mutant(
        "log_dir ignored",
        "the option does nothing",
        "        if args.log_dir:\n",
        "        if False:\n",
        option("log_dir", SINGLE, PARALLEL),
    ),
    Mutant(
        "log_dir ignored",
        "the option does nothing",
        "if args.log_dir and self.rank == 0:",
        "if False:",
        option("log_dir", *DDP),
    ),
    Mutant(
        "events in another folder",
        "--log-dir does nothing",
        "SummaryWriter(args.log_dir, ",
        'SummaryWriter("events", ',
        option("log_dir"),
    ),
    Mutant(
        "no_progress ignored",
        "the option does nothing",
        "hidden = self.args.no_progress or not sys.stderr.isatty()",
        "hidden = not sys.stderr.isatty()",
        option("no_progress", SINGLE, PARALLEL),
    ),
    Mutant(
        "no_progress ignored",
        "the option does nothing",
        "hidden = self.args.no_progress or not",
        "hidden = not",
        option("no_progress", *DDP),
    ),
    Mutant(
        "a bar for each rank",
        "they write over one another",
        "not sys.stderr.isatty() or self.rank > 0",
        "not sys.stderr.isatty()",
        parts(FIRST_LINE, *DDP),
    ),
    Mutant(
        "backend ignored",
        "the option does nothing",
        "init_process_group(\n        args.backend,",
        'init_process_group(\n        "gloo",',
        option("backend", *DDP),
    ),
    Mutant(
        "NCCL where there is none",
        "Windows with a GPU needs --backend gloo",
        "        if not dist.is_backend_available(args.backend):  # on",
        "        if False:  # on",
        {
            script: f"test_devices.py::test_auto_takes_gloo_where_nccl_is_not_built[False-{script}]"
            for script in DDP
        },
    ),
    Mutant(
        "gloo for GPUs",
        "NCCL is there, and unused",
        "        if not dist.is_backend_available(args.backend):  # on",
        "        if True:  # on",
        {
            script: f"test_devices.py::test_auto_takes_gloo_where_nccl_is_not_built[True-{script}]"
            for script in DDP
        },
    ),
    Mutant(
        "libuv on Windows",
        "torch for Windows is built without",
        'use_libuv=sys.platform != "win32"',
        "use_libuv=True",
        {NODES: "test_devices.py::test_no_libuv_on_windows[win32]"},
    ),
    Mutant(
        "sync_bn ignored",
        "the option does nothing",
        "        if args.sync_bn:\n",
        "        if False:\n",
        option("sync_bn", *LAST),
    ),
    Mutant(
        "BatchNorm's samples counted as without --sync-bn",
        "small batches are refused for nothing",
        "    if args.sync_bn:\n        smallest",
        "    if False:\n        smallest",
        {script: shares(script)[script].replace("False", "True") for script in LAST},
    ),
    Mutant(
        "BatchNorm's samples counted over all ranks",
        "a rank with a single sample fails in training",
        "[0] // args.world_size // args.accumulate",
        "[0] // args.accumulate",
        shares(*LAST),
    ),
    Mutant(
        "BatchNorm's samples counted over all micro-batches",
        "one with a single sample fails in training",
        "[0] // args.world_size // args.accumulate",
        "[0] // args.world_size",
        shares(*LAST),
    ),
    Mutant(
        "BatchNorm's samples counted over all ranks",
        "a rank with a single sample fails in training",
        "sampler.sizes()[0] // args.world_size",
        "sampler.sizes()[0]",
        {SPAWN: "test_steps.py::test_a_parent_looks_for_single_samples_of_batchnorm"},
    ),
    Mutant(
        "BatchNorm is not looked at",
        "a run fails in training",
        "    check_batch_norm(model, ",
        "    (lambda *_: None)(model, ",
        parts("batchnorm_of_single_samples_is_refused"),
    ),
    Mutant(
        "no gradient scaler",
        "gradients vanish in fp16",
        'enabled=args.amp == "fp16"',
        "enabled=False",
        parts(SAVED, *LAST),
    ),
    Mutant(
        "amp ignored",
        "the option does nothing",
        'AMP[args.amp], enabled=args.amp != "off"',
        "torch.bfloat16, enabled=False",
        parts("amp_in_training_and_in_evaluation", *LAST),
    ),
    Mutant(
        "fp16 for bf16",
        "the option does something else",
        'AMP[args.amp], enabled=args.amp != "off"',
        'torch.float16, enabled=args.amp != "off"',
        parts("amp_in_training_and_in_evaluation", *LAST),
    ),
    Mutant(
        "check ignored",
        "the option does nothing",
        "    if args.check:\n",
        "    if False:\n",
        {script: f"test_options.py::test_check[{script}]" for script in LAST},
    ),
    Mutant(
        "no_cuda ignored",
        "the option does nothing",
        'args.device = "cpu" if args.no_cuda else args.device',
        "pass",
        {NODES: f"test_options.py::test_device[{NODES}-arguments5]"},
    ),
    Mutant(
        "init_method ignored",
        "the option does nothing",
        "url = urlsplit(args.init_method)",
        'url = urlsplit("tcp://localhost:1")',
        {NODES: "test_joining.py::test_who_is_missing_double_or_of_another_world"},
    ),
    Mutant(
        "no range",
        "a typing error is a run of another job",
        "not low <= value < 2**32:",
        "False:",
        {
            script: f"test_options.py::test_a_number_is_refused_below_its_range[{script}-lr]"
            for script in SCRIPTS
        },
    ),
    Mutant(
        "zero is enough",
        "a batch of no samples",
        '"--batch_size", type=at_least(1)',
        '"--batch_size", type=at_least(0)',
        {
            script: "test_options.py::test_a_number_is_refused_below_its_range"
            f"[{script}-batch_size]"
            for script in SCRIPTS
        },
    ),
    Mutant(
        "zero is too little",
        "--momentum 0 is refused",
        "        if not low <= value < 2**32:",
        "        if not low < value < 2**32:",
        option("the_smallest_values_are_taken"),
    ),
    # --- loaders ----------------------------------------------------------------------------------
    Mutant(
        "workers started in torch's own way",
        "forked, and with Python 3.11 one hangs in a thousand",
        "        multiprocessing_context=worker_context(num_workers),\n",
        "",
        parts("workers_are_forked_on_linux_and_made_anew_in_each_epoch"),
    ),
    Mutant(
        "persistent workers",
        "they keep the seed of their first epoch",
        "        num_workers=num_workers,\n",
        "        num_workers=num_workers,\n        persistent_workers=num_workers > 0,\n",
        parts("workers_are_forked_on_linux_and_made_anew_in_each_epoch"),
    ),
    Mutant(
        "workers end by a signal",
        "they take their rank down before it can save",
        "        worker_init_fn=obey_only_the_rank,\n",
        "",
        parts("workers_obey_their_rank_and_copies_follow_the_loader"),
    ),
    Mutant(
        "copies not waited for",
        "from memory that is not pinned, a step may see half a batch",
        "self.pinned = train_data.pin_memory",
        "self.pinned = True",
        parts("workers_obey_their_rank_and_copies_follow_the_loader"),
    ),
    Mutant(
        "copies always waited for",
        "a device waits for each batch",
        "self.pinned = train_data.pin_memory",
        "self.pinned = False",
        parts("workers_obey_their_rank_and_copies_follow_the_loader"),
    ),
    *(
        Mutant(
            f"{what} in {where} copied without waiting",
            "from memory that is not pinned, a step may see half a batch",
            f"{before}            {first}{what} = {what}.to(self.device, non_blocking=self.pinned)",
            f"{before}            {first}{what} = {what}.to(self.device, non_blocking=True)",
            copied("mps"),
        )
        for where, before in (("training", "start=1):\n"), ("evaluation", "in self.test_data:\n"))
        for what, first in (
            ("source", ""),
            (
                "targets",
                "source = source.to(self.device, non_blocking=self.pinned)  # load your inputs\n"
                "            ",
            ),
        )
    ),
    Mutant(
        "memory pinned on a Mac",
        "a warning, and nothing is won",
        'device.type not in ("cpu", "mps")',
        'device.type != "cpu"',
        copied("mps"),
    ),
    Mutant(
        "memory not pinned",
        "a device waits for each batch",
        'device.type not in ("cpu", "mps")',
        "False",
        copied("cuda"),
    ),
    # --- what the security of a run rests on ------------------------------------------------------
    Mutant(
        "snapshots may run code",
        "a file from elsewhere takes over",
        '    snapshot = torch.load(path, map_location="cpu", weights_only=True)',
        '    snapshot = torch.load(path, map_location="cpu", weights_only=False)',
        parts("a_snapshot_cannot_run_code"),
    ),
    Mutant(
        "snapshots may run code in rank 0",
        "a file from elsewhere takes over",
        'torch.load(args.snapshot_path, map_location="cpu", weights_only=True)',
        'torch.load(args.snapshot_path, map_location="cpu", weights_only=False)',
        parts("a_snapshot_cannot_run_code", SPAWN),
    ),
    Mutant(
        "NCCL on the network",
        "processes of one host talk past the loopback interface",
        '        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)\n',
        "",
        setup(1, *DDP),
    ),
    Mutant(
        "a port for the processes of one host",
        "the store listens on all interfaces, and anybody may talk to it",
        "store=dist.FileStore(args.store, args.world_size),",
        'store=dist.TCPStore("localhost", 0, 1, args.rank == 0, wait_for_workers=False),',
        parts("the_processes_of_one_host_meet_without_a_port", SPAWN),
    ),
    Mutant(
        "a port for a process alone",
        "the store listens on all interfaces, and anybody may talk to it",
        "dist.HashStore()",
        'dist.TCPStore("localhost", 0, 1, True)',
        parts("the_processes_of_one_host_meet_without_a_port", *LAST),
    ),
    # --- data_parallel.py -------------------------------------------------------------------------
    Mutant(
        "all devices seeded alike",
        "they drop out the same units",
        "set_seed(args.seed, devices=self.devices)",
        "set_seed(args.seed)",
        DEVICES,
    ),
    Mutant(
        "the first device's generator alone is saved",
        "a resumed run has other dropout masks on the others",
        "get_rng_state(*self.devices)",
        "get_rng_state(self.device)",
        DEVICES,
    ),
    Mutant(
        "the first device's generator alone is restored",
        "a resumed run has other dropout masks on the others",
        '["rng_states"][0], *self.devices)',
        '["rng_states"][0], self.device)',
        DEVICES,
    ),
    # --- settling, by any model -------------------------------------------------------------------
    Mutant(
        "buckets settled without all parameters",
        "DDP complains in the first step, or rounds differently in the second",
        "[parameter.sum() for parameter in trained]",
        "[parameter.sum() for parameter in trained[1:]]",
        parts("any_model_can_settle_its_buckets", *DDP),
    ),
    Mutant(
        "the model's forward is not given back",
        "nothing is computed",
        "        model.forward = forward\n",
        "",
        parts("any_model_can_settle_its_buckets", *DDP),
    ),
    Mutant(
        "the class's forward is given back",
        "a compiled model has none any more",
        "        model.forward = forward\n",
        "        del model.forward\n",
        parts("a_model_with_a_forward_of_its_own_keeps_it", *DDP),
    ),
    # --- joining ----------------------------------------------------------------------------------
    Mutant(
        "more processes than devices",
        "two share one, and NCCL fails",
        'if args.local_world_size > count and args.backend != "gloo":\n        raise',
        "if False:\n        raise",
        {NODES: "test_devices.py::test_processes_of_one_host_take_different_devices"},
    ),
    Mutant(
        "processes of one host do not know of each other",
        "all take the first device",
        "args.local_rank = nodes[: args.rank].count(nodes[args.rank])",
        "args.local_rank = 0",
        {NODES: "test_devices.py::test_processes_of_one_host_take_different_devices"},
    ),
    Mutant(
        "processes of one host do not count each other",
        "each takes all cores",
        "args.local_world_size = nodes.count(nodes[args.rank])",
        "args.local_world_size = 1",
        {NODES: "test_devices.py::test_processes_of_one_host_take_different_devices"},
    ),
    Mutant(
        "waiting for the others in silence",
        "a host that was not started looks like a hang",
        'log(f"[rank {args.rank}] still waiting for {names}',
        'str(f"[rank {args.rank}] still waiting for {names}',
        {NODES: JOINING},
    ),
    Mutant(
        "joining takes any time",
        "--timeout does nothing there",
        "if seconds > args.timeout:",
        "if seconds > 6000:",
        {NODES: JOINING},
    ),
    Mutant(
        "registered functions do not run",
        "experiment trackers lose their last lines",
        "    atexit._run_exitfuncs()\n",
        "",
        parts(LEAVES, *DDP),
    ),
    # --- figures ----------------------------------------------------------------------------------
    figure(
        "rate of samples seen before",
        "(self.samples_seen - seen_before) / (",
        "self.samples_seen / (",
        EPOCH,
    ),
    figure(
        "rate by the millisecond",
        "(time.perf_counter() - start)\n",
        "(time.perf_counter() - start) / 1e3\n",
        EPOCH,
    ),
    figure(
        "rate before the device is done",
        "                torch.accelerator.synchronize()",
        "                pass",
        EPOCH,
    ),
    figure(
        "rate with evaluation",
        "            rate = (self.samples_seen - seen_before) / (time",
        "            self._evaluate()\n"
        "            rate = (self.samples_seen - seen_before) / (time",
        EPOCH,
    ),
    figure(
        "training loss over the test set",
        "train_loss /= train_size",
        "train_loss /= test_size",
        EPOCH,
    ),
    figure(
        "test loss over the training set",
        "test_loss /= test_size",
        "test_loss /= train_size",
        EPOCH,
    ),
    figure(
        "losses swapped",
        "train_loss, test_loss, correct = ",
        "test_loss, train_loss, correct = ",
        EPOCH,
    ),
    figure(
        "accuracy of the training set",
        "({correct / test_size:.2%})",
        "({correct / train_size:.2%})",
        EPOCH,
    ),
    figure(
        "accuracy as a share", "({correct / test_size:.2%})", "({correct / test_size:.2f}%)", EPOCH
    ),
    figure(
        "correct of the training set",
        "{correct:.0f}/{test_size}",
        "{correct:.0f}/{train_size}",
        EPOCH,
    ),
    figure("losses add up over epochs", "            self.loss_sum.zero_()\n", "", EPOCH),
    figure(
        "epoch of a saved snapshot",
        'log(f"Epoch {epoch} | Training',
        'log(f"Epoch {self.epoch} | Training',
        EPOCH,
    ),
    figure("event: training loss", '"loss/train", train_loss', '"loss/train", test_loss', EPOCH),
    figure("event: test loss", '"loss/test", test_loss', '"loss/test", train_loss', EPOCH),
    figure("event: accuracy", '"accuracy", correct / test_size', '"accuracy", correct', EPOCH),
    figure("event: rate", '"samples_per_second", rate', '"samples_per_second", train_size', EPOCH),
    figure(
        "event: epoch",
        '"loss/train", train_loss, epoch',
        '"loss/train", train_loss, self.epoch + 1',
        EPOCH,
    ),
    figure("events stay in memory", "                self.writer.flush()\n", "", EPOCH),
    figure(
        "steps as samples",
        "Steps: {len(self.train_data)}",
        "Steps: {len(self.train_data.dataset)}",
        STEPS,
    ),
    figure(
        "batch size",
        "b_sz = self.args.batch_size",
        "b_sz = 32",
        STEPS,
    ),
    figure(
        "epoch that begins", 'line = f"Epoch {epoch} |', 'line = f"Epoch {self.epoch} |', FIRST_LINE
    ),
    figure("CUDA for GPU", '.upper().replace("CUDA", "GPU")', ".upper()", FIRST_LINE),
    figure(
        "GPU for every device", 'self.device.type.upper().replace("CUDA", "GPU")', '"GPU"', STEPS
    ),
    figure("rank 0 in every rank's line", "[{name}{self.rank}]", "[{name}0]", FIRST_LINE, *DDP),
    figure("step's loss as a sum", "{loss.item() / count:.6f}", "{loss.item():.6f}", STEPS),
    figure(
        "steps from 0",
        "enumerate(progress, start=1)",
        "enumerate(progress)",
        STEPS,
        SINGLE,
        PARALLEL,
    ),
    figure(
        "training loss of means",
        "self.loss_sum += loss\n",
        "self.loss_sum += loss / count\n",
        STEPS,
    ),
    figure(
        "test loss of means",
        'loss_sum += F.cross_entropy(output, targets, reduction="sum")',
        "loss_sum += F.cross_entropy(output, targets)",
        STEPS,
    ),
    figure(
        "wrong ones counted",
        "(output.argmax(dim=1) == targets)",
        "(output.argmax(dim=1) != targets)",
        STEPS,
    ),
    figure(
        "the job's first line",
        'save_every: {save_every}, batch_size: {batch_size}"',
        'save_every: {total_epochs}, batch_size: {batch_size}"',
        LINES,
    ),
    figure(
        "batch size in the first line",
        'batch_size: {batch_size}"',
        'batch_size: {test_batch_size}"',
        LINES,
    ),
    figure(
        "epochs in the first line",
        '"total_epochs: {total_epochs},',
        '"total_epochs: {save_every},',
        LINES,
    ),
    figure(
        "sample of a stop",
        "Stopped at sample {self.samples_seen}",
        "Stopped at sample {train_size}",
        LINES,
    ),
    figure(
        "epoch of a resume",
        "at Epoch {self.epoch}, sample",
        "at Epoch {self.epoch + 1}, sample",
        LINES,
    ),
    figure("sample of a resume", ", sample {self.samples_seen}", ", sample 0", LINES),
    figure(
        "no line about a missing snapshot", 'log(f"No snapshot at', 'str(f"No snapshot at', LINES
    ),
    figure(
        "host and device swapped",
        "host {socket.gethostname()} | device {device}",
        "host {device} | device {socket.gethostname()}",
        RANK,
        SPAWN,
        ELASTIC,
    ),
    figure("device's type alone", "| device {device}", "| device {device.type}", RANK, *DDP),
    figure(
        "backend as given", "backend {dist.get_backend()}", "backend {args.backend}", RANK, *DDP
    ),
    figure(
        "cores for threads",
        "threads {torch.get_num_threads()}",
        "threads {os.cpu_count()}",
        RANK,
        *DDP,
    ),
    figure("ranks from 1", '"[rank {args.rank} of', '"[rank {args.rank + 1} of', RANK, *DDP),
    figure(
        "world",
        '"[rank {args.rank} of {args.world_size}]',
        '"[rank {args.rank} of {args.rank}]',
        RANK,
        *DDP,
    ),
    figure(
        "rank 0's line alone",
        "    log(line, every_rank=True)\n",
        "    log(line) if args.rank == 0 else None\n",
        RANK,
        *LAST,
    ),
    figure(
        "total time in milliseconds",
        "Total time: {time.perf_counter() - start:.3f}",
        "Total time: {(time.perf_counter() - start) * 1e3:.3f}",
        TOTAL_TIME,
    ),
    Mutant(
        "figure: devices",
        "a wrong number is printed",
        "split over {count} devices",
        "split over {count + 1} devices",
        DEVICES_LINE,
    ),
    Mutant(
        "figure: split or not",
        "a wrong line is printed",
        "if count > 1 else",
        "if count < 1 else",
        DEVICES_LINE,
    ),
    Mutant(
        "figure: size in MiB",
        "a wrong number is printed",
        "{size / 1e6:.2f} MB",
        "{size / 2**20:.2f} MB",
        common(CHECK, "the_lines_of_several_nodes"),
    ),
    Mutant(
        "figure: all-reduce in seconds",
        "a wrong number is printed",
        "MB | {reduce * 1e3:.2f} ms",
        "MB | {reduce:.2f} ms",
        common(CHECK, "the_lines_of_several_nodes"),
    ),
    Mutant(
        "figure: speed in gigabits",
        "a wrong number is printed",
        "{sent / 1e9:.4f} GB/s",
        "{sent / 1e9 * 8:.4f} GB/s",
        common(CHECK, "the_lines_of_several_nodes"),
    ),
    Mutant(
        "figure: compute in seconds",
        "a wrong number is printed",
        "compute {compute * 1e3:.2f}",
        "compute {compute:.2f}",
        common(CHECK, "the_lines_of_several_nodes"),
    ),
    Mutant(
        "figure: data in seconds",
        "a wrong number is printed",
        "data {data * 1e3:.2f}",
        "data {data:.2f}",
        common(CHECK, "the_lines_of_several_nodes"),
    ),
    Mutant(
        "figure: all-reduce that is hidden",
        "a wrong number is printed",
        "{exposed * 1e3:.2f}",
        "{reduce * 1e3:.2f}",
        common(CHECK, "the_lines_of_several_nodes"),
    ),
    Mutant(
        "figure: waiting of the slowest",
        "a wrong number is printed",
        "{waiting * 1e3:.2f}",
        "{own[slowest] * 1e3:.2f}",
        common(CHECK, "the_lines_of_several_nodes"),
    ),
    Mutant(
        "figure: epoch without the all-reduce",
        "a wrong number is printed",
        "{steps * step:.1f}",
        "{steps * own[slowest]:.1f}",
        common(CHECK, "the_lines_of_several_nodes"),
    ),
    Mutant(
        "figure: nodes that are ranks",
        "a wrong number is printed",
        "{times * nodes} nodes",
        "{times * world_size} nodes",
        common(CHECK, "the_lines_of_several_nodes"),
    ),
    # --- common/ ----------------------------------------------------------------------------------
    Mutant(
        "new workers hear signals",
        "a SIGTERM as an epoch begins ends workers, and the job without a snapshot",
        "mask = signal.pthread_sigmask(signal.SIG_BLOCK, ",
        "mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, ",
        common(DATA, "a_signal_does_not_end_a_worker_that_has_just_been_forked"),
    ),
    Mutant(
        "hung workers are waited for",
        "and so is their rank, by all others",
        "if worker.sign.wait(worker.patience):",
        "if worker.sign.wait():",
        common(DATA, "a_forked_worker_that_hangs_is_forked_anew[False]"),
    ),
    Mutant(
        "hung workers are left behind",
        "they are there when the run has ended",
        "                forked.kill()\n                forked.wait()\n",
        "",
        common(DATA, "a_forked_worker_that_hangs_is_forked_anew[False]"),
    ),
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
        "for size in self.sizes():",
        "for size in self.sizes()[:-1]:",
        common(DATA, "sampler_deals_every_sample_once[0-3-100]"),
    ),
    Mutant(
        "windows of a fixed size",
        "an epoch ends with a short batch, and ranks may lack a step",
        "for size in self.sizes():",
        "for size in [self.global_batch] * len(self):",
        common(DATA, "sampler_deals_every_sample_once[0-3-100]"),
    ),
    Mutant(
        "larger batches first",
        "a batch that is too small for BatchNorm fails at the epoch's end",
        "[size] * (steps - larger) + [size + 1] * larger",
        "[size + 1] * larger + [size] * (steps - larger)",
        common(DATA, "global_batches_are_even_and_go_on_as_they_began[32-97]"),
    ),
    Mutant(
        "an empty training set",
        "an epoch without steps, and a loss of nan",
        'if len(dataset) == 0:\n            raise DataError("the training',
        'if False:\n            raise DataError("the training',
        common(DATA, "an_empty_data_set_is_refused"),
    ),
    Mutant(
        "an empty test set",
        "an epoch ends in a division by zero",
        'if len(dataset) == 0:\n            raise DataError("a data set',
        'if False:\n            raise DataError("a data set',
        common(DATA, "an_empty_data_set_is_refused"),
    ),
    Mutant(
        "no empty batches",
        "a rank without a sample fails, and the others wait for it",
        "if not indices:",
        "if False:",
        common(DATA, "batches_of_any_dataset"),
    ),
    Mutant(
        "a sample at a time",
        "data sets with __getitems__ are as slow as others",
        'if hasattr(self.dataset, "__getitems__"):',
        "if False:",
        common(DATA, "a_data_set_with_getitems_is_asked_once_a_batch"),
    ),
    Mutant(
        "batches without a seed of their own",
        "augmentation depends on the number of workers, and a resumed run has another",
        "            set_seed(worker.seed - worker.id + indices[0])\n",
        "            pass\n",
        common(DATA, NOISE),
    ),
    Mutant(
        "augmentation differs by worker",
        "it depends on their number",
        "worker.seed - worker.id + indices[0]",
        "worker.seed + indices[0]",
        common(DATA, NOISE),
    ),
    Mutant(
        "all batches are augmented alike",
        "the same numbers again and again",
        "worker.seed - worker.id + indices[0]",
        "worker.seed - worker.id",
        common(DATA, NOISE),
    ),
    Mutant(
        "workers end by a signal",
        "they take their rank down before it can save",
        "    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})\n",
        "",
        common(DATA, "a_worker_obeys_its_rank_alone"),
    ),
    Mutant(
        "workers obey anybody",
        "they take their rank down before it can save",
        ".si_pid != os.getppid():",
        ".si_pid == -1:",
        common(DATA, "a_worker_obeys_its_rank_alone"),
    ),
    Mutant(
        "workers obey nobody",
        "they stay when their rank is done",
        "    threading.Thread(target=wait, daemon=True).start()\n",
        "",
        common(DATA, "a_worker_obeys_its_rank_alone"),
    ),
    Mutant(
        "sampler starts anew",
        "an epoch entered in the middle repeats samples",
        "        first = self.start\n",
        "        first = 0\n",
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
        "    torch.use_deterministic_algorithms(True)\n",
        "",
        common(SEED, "deterministic_kernels"),
    ),
    Mutant(
        "all devices of a process draw alike",
        "nn.DataParallel drops out the same units on each",
        ".manual_seed(value + number)",
        ".manual_seed(value)",
        common(SEED, "each_device_of_a_process_draws_its_own_and_is_restored"),
    ),
    Mutant(
        "the devices' RNG is not restored",
        "a resumed run on GPUs has other dropout masks",
        ".set_rng_state(state[device.type][number], device)",
        ".get_rng_state(device)",
        common(SEED, "each_device_of_a_process_draws_its_own_and_is_restored"),
    ),
    Mutant(
        "BatchNorm of single samples",
        "torch raises at the first step, or statistics are none",
        "if smallest > 1 or not any(",
        "if True or not any(",
        common(MODEL, "batchnorm_of_single_samples_is_refused"),
    ),
    Mutant(
        "all BatchNorm of single samples",
        "models with large feature maps are refused, too",
        "    fits = smallest == 1\n",
        "    fits = False\n",
        common(MODEL, "batchnorm_of_single_samples_is_refused"),
    ),
    Mutant(
        "the model itself is tried on a single sample",
        "its running statistics are no longer the first ones",
        "copy.deepcopy(model).train()",
        "model.train()",
        common(MODEL, "batchnorm_of_single_samples_is_refused"),
    ),
]
