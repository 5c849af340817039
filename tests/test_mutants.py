"""Each mutant has one piece of a script replaced, which the test that it stands under must notice.

A new construct that a reader could take for granted belongs here, with the test that misses it.
"""

import re
import shutil

import pytest
from helpers.jobs import ROOT, SCRIPTS
from helpers.ranks import train
from torch.multiprocessing import ProcessExitedException

SINGLE, PARALLEL, SPAWN, TORCHRUN, NODES = SCRIPTS
BARE = 'object.__setattr__(model, "module", model)'  # model.module is the model itself
COPY = "inputs = inputs.to(device, non_blocking=True)"
SAVE = 'torch.save(snapshot, f"{args.snapshot_path}.tmp")'
ENDS = "test_stopping.py::test_a_job_ends_at_once_and_keeps_its_last_snapshot"
RESUMED = "if os.path.exists(args.snapshot_path) and not args.resume:"

# test: [(script, a piece that it has once, what stands there instead), ...]
MUTANTS = {
    "test_same_job.py::test_the_same_steps": [
        (SPAWN, "model = DDP(model)", BARE),
        (SPAWN, "sampler=sampler", "shuffle=True"),
        (SPAWN, "range(rank, len(val_set), world_size)", "range(len(val_set))"),
        (SPAWN, "dist.all_reduce(loss_sum)", "pass"),
        (SPAWN, "dist.all_reduce(sums)", "pass"),
    ],
    "test_steps.py::test_data_parallel_splits_training_and_evaluation": [
        (PARALLEL, "model = nn.DataParallel(model)", BARE)
    ],
    "test_steps.py::test_batches_are_copied_without_waiting_and_multiplied_in_tf32": [
        (TORCHRUN, f"disable=hidden):\n        {COPY}", "disable=hidden):\n        pass"),
        (TORCHRUN, f"in loader:\n        {COPY}", "in loader:\n        inputs = inputs.to(device)"),
        (SINGLE, 'torch.set_float32_matmul_precision("high")', "pass"),
        (SINGLE, "import torch\n", "import torch\n"),  # no mutant: the test must pass
    ],
    "test_steps.py::test_workers_persist": [(SPAWN, "= args.num_workers > 0", "= False")],
    "test_steps.py::test_each_epoch_has_its_order_and_its_random_numbers": [
        (SPAWN, "sampler.set_epoch(epoch)", "pass"),
        (SPAWN, "set_seed(args.seed, rank, epoch)", "pass"),
    ],
    "test_steps.py::test_the_sums_of_an_epoch_and_the_modes_of_the_model": [
        (SINGLE, "model.eval()", "pass"),
        (SINGLE, "model.train()", "pass"),
    ],
    "test_steps.py::test_evaluation_is_with_the_buffers_of_rank_0_and_not_through_ddp": [
        (TORCHRUN, "evaluate(model.module,", "evaluate(model,"),
        (NODES, "dist.broadcast(buffer, src=0)", "pass"),
    ],
    "test_steps.py::test_ddp_is_freed_before_its_group_ends": [
        (TORCHRUN, "dist.destroy_process_group()", "pass")
    ],
    "test_options.py::test_memory_is_pinned_for_a_gpu": [
        (SPAWN, '"pin_memory": device.type == "cuda"', '"pin_memory": False')
    ],
    "test_options.py::test_each_process_gets_its_device": [
        (TORCHRUN, 'int(os.environ["LOCAL_RANK"])', 'int(os.environ["RANK"])'),
        (NODES, "args.rank % torch.cuda.device_count()", "0"),
    ],
    "test_snapshots.py::test_what_a_snapshot_holds": [
        (SPAWN, "save_snapshot(args, model.module,", "save_snapshot(args, model,"),
        (SPAWN, "os.makedirs(", "str("),
    ],
    "test_snapshots.py::test_a_snapshot_is_written_whole_or_not_at_all": [
        (SPAWN, SAVE, f"{SAVE.replace('.tmp', '')}; {SAVE}")
    ],
    "test_snapshots.py::test_a_snapshot_that_exists_is_refused_by_rank_0": [
        (SPAWN, RESUMED, "if False:"),
        (TORCHRUN, 'if os.environ["RANK"] == "0" and ', "if "),
        (NODES, "if args.rank == 0 and ", "if "),
    ],
    "test_snapshots.py::test_weights_that_are_nan_or_infinite_are_not_saved": [
        (SPAWN, "weight.isfinite().all()", "not weight.isnan().any()")
    ],
    "test_snapshots.py::test_rank_0_alone_reads_and_writes_and_all_load_what_it_has_read": [
        (SPAWN, "dist.broadcast_object_list(snapshots)", "pass"),
        (SPAWN, "if dist.get_rank() == 0 and args.resume and", "if args.resume and"),
        (SPAWN, "    if dist.get_rank() > 0:  # all", "    if False:  # all"),
    ],
    "test_resume.py::test_one_process_with_any_optimizer": [
        (SINGLE, "group.update(lr=args.lr, momentum=args.momentum)", "pass"),
        (SPAWN, 'return snapshots[0]["epoch"]', 'return snapshots[0]["epoch"] - 1'),
    ],
    f"{ENDS}[launch1-SIGTERM]": [
        (SPAWN, "signal.signal(signal.SIGTERM, signal.default_int_handler)", "pass")
    ],
    f"{ENDS}[launch3-SIGKILL of a parent with an ampersand]": [
        (SPAWN, "signal.signal(signal.SIGINT, signal.default_int_handler)", "pass")
    ],
    "test_stopping.py::test_a_stop_while_another_rank_hangs": [
        (SPAWN, "process.kill()", "process.join()")
    ],
}
ALL = [(test, *mutant) for test, mutants in MUTANTS.items() for mutant in mutants]
# In a process that was forked with torch, forget the tests that are not those of the copy.
PYTEST = f"""\
import os, sys
def original(path):  # and not of a .venv below it
    return path.startswith({str(ROOT)!r}) and not path.startswith(sys.prefix)
sys.path[:] = [path for path in sys.path if not original(path)]
for name, module in [*sys.modules.items()]:
    if original(getattr(module, "__file__", None) or ""):
        del sys.modules[name]
for name in [name for name in os.environ if name.startswith("PYTEST_")]:
    del os.environ[name]
import pytest
sys.exit(pytest.main(["-n", "0", "-x", "-q", "-m", "", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def test_no_mutant_is_stale():
    stale = [f"{file}: {piece!r}" for _, file, piece, _ in ALL if text(file).count(piece) != 1]
    for file, name in (re.match(r"(\w+\.py)::(\w+)", test).groups() for test in MUTANTS):
        if f"\ndef {name}(" not in text(f"tests/{file}"):
            stale.append(f"{file}::{name} is not there")
    assert not stale, "\n".join(stale)


def text(file: str) -> str:
    return (ROOT / file).read_text()


@pytest.mark.slow("forty runs of pytest")
@pytest.mark.parametrize(("test", "file", "piece", "other"), ALL)
def test_a_broken_script_is_noticed(tmp_path, test, file, piece, other):
    for folder in ("common", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for name in (*SCRIPTS, "pyproject.toml"):
        (tmp_path / name).write_text(text(name))
    (tmp_path / file).write_text(text(file).replace(piece, other))
    (tmp_path / "run_pytest.py").write_text(PYTEST)
    # The script is one of a test's parameters, or none of them is.
    stems = " or ".join(script.removesuffix(".py") for script in SCRIPTS)
    words = ("-k", f"{file.removesuffix('.py')} or not ({stems})", f"tests/{test}")
    status = 0
    try:
        train(tmp_path, tmp_path / "run_pytest.py", 1, *words)
    except ProcessExitedException as ended:
        status = ended.exit_code
    what = "does not see it" if piece != other else "fails where nothing is broken"
    assert status == (piece != other), f"{test} {what}:\n{text(tmp_path / 'output-0')[-2000:]}"
