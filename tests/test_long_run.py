"""recipes/long_run.py: what it has beyond the five. Micro-batches: test_same_job.py."""

import re
import signal
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from helpers.files import difference, load, patched, same_bytes
from helpers.jobs import LONG, ROOT, TORCHRUN, epochs
from helpers.ranks import train

from common.data import make_digits

SCRIPT = f"recipes/{LONG}"
LAUNCH = TORCHRUN.replace("ddp_torchrun.py", SCRIPT)
STEP = re.compile(r"Epoch \d+ \| Step (\d+) \| Loss: (\S+) \| lr: ([\d.e-]+)", re.M)
SAVED = re.compile(r"^Step (\d+) \| Training checkpoint saved at (\S+)$", re.M)
STOPPED = "stopped by SIGTERM: continue with --resume"
MLP = ("--model", "mlp")


@pytest.fixture
def do(do):
    """do(*arguments) -> what conftest.py's do() finds, and what each step did. Batches are of 8, so
    an epoch has 5 steps."""
    all_scripts = do

    def do(*arguments: object) -> SimpleNamespace:
        rates, norms, step = [], [], torch.optim.SGD.step

        def stepping(optimizer: torch.optim.Optimizer, *given: object) -> object:
            (group,) = optimizer.param_groups
            rates.append(group["lr"])
            norms.append(torch.stack([w.grad.norm() for w in group["params"]]).norm().item())
            return step(optimizer, *given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.optim.SGD, "step", stepping)
            job = all_scripts(LONG, "--batch-size", 8, *arguments)
        job.rates, job.norms = rates, norms
        job.steps = [int(step) for step, _, _ in STEP.findall(job.text)]
        job.losses = [float(loss) for _, loss, _ in STEP.findall(job.text)]
        job.saved = [int(step) for step, _ in SAVED.findall(job.text)]
        return job

    do.module, do.all_scripts = all_scripts.module(LONG), all_scripts
    return do


# option, two values (of a switch: without and with it), what is seen of the job, and how it is
OPTIONS = [
    ("--accumulate", (1, 2), "steps", ([1, 2, 3, 4, 5], [1, 2, 3])),
    ("--log-interval", (1, 2), "steps", ([1, 2, 3, 4, 5], [2, 4])),
    ("--save-steps", (1, 3), "saved", ([1, 2, 3, 4, 5], [3, 5])),
    ("--save-minutes", (1, 0), "saved", ([5], [1, 2, 3, 4, 5])),
    ("--amp", (False, True), "losses", ()),
    ("--seed", (0, 7), "losses", ()),
    ("--lr", (0.0, 0.05), "losses", ()),
    ("--momentum", (0.0, 0.5), "losses", ()),
    ("--clip", (0.0, 0.1), "losses", ()),
    ("--warm-up", (0, 4), "losses", ()),
    ("--cosine", (False, True), "losses", ()),
]


@pytest.mark.parametrize(("option", "values", "seen", "expected"), OPTIONS)
def test_an_option_is_in_force(do, option, values, seen, expected):
    found = []
    for value in values:
        words = ([option] if value else []) if isinstance(value, bool) else [option, value]
        found.append(getattr(do(1, *MLP, "--log-interval", 1, *words), seen))
        Path("checkpoint.pt").unlink()
    assert found[0] != found[1] and (not expected or found == [*expected])


def test_options_of_the_model_and_of_the_group(do, monkeypatch):
    convert, compile = Mock(side_effect=lambda model: model), Mock()
    join = Mock(wraps=dist.init_process_group)
    monkeypatch.setattr(torch.nn.SyncBatchNorm, "convert_sync_batchnorm", convert)
    monkeypatch.setattr(torch.nn.Module, "compile", compile)
    monkeypatch.setattr(dist, "init_process_group", join)
    do(1, *MLP, "--snapshot-path", "other.pt")
    assert not convert.called and not compile.called
    job = do(1, "--model", "lenet", "--sync-bn", "--compile", "--timeout", 77, "--backend", "gloo")
    assert type(job.model).__name__ == "LeNet"
    convert.assert_called_once_with(job.model)
    compile.assert_called_once_with(dynamic=False)
    join.assert_called_with("gloo", timeout=timedelta(seconds=77))


@pytest.mark.parametrize(
    ("type", "expected"), [("cuda", "nccl"), ("xpu", "xccl"), ("mps", "gloo"), (None, "gloo")]
)
def test_any_accelerator_that_has_a_backend(parse, monkeypatch, type, expected):
    """It is told the number of its own device. gloo does not serve MPS."""
    accelerator, told = torch.accelerator, []
    monkeypatch.setattr(accelerator, "is_available", lambda: type is not None)
    monkeypatch.setattr(accelerator, "current_accelerator", lambda: type and torch.device(type))
    monkeypatch.setattr(accelerator, "set_device_index", told.append)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setenv("LOCAL_RANK", "3")
    module, args = parse(LONG)
    served = type in ("cuda", "xpu")
    assert (args.device, args.backend) == (type if served else "cpu", expected)
    assert str(module.ddp_setup(args)) == (f"{type}:3" if served else "cpu")
    assert told == ([3] if served else [])
    assert parse(LONG, "--device", "cpu")[1].backend == "gloo"


def test_what_is_clipped_is_the_norm_of_the_steps_gradient(do):
    options = (1, *MLP, "--batch-size", 4, "--accumulate", 2)
    assert min(do(*options).norms) > 0.5
    Path("checkpoint.pt").unlink()
    assert do(*options, "--clip", 0.5).norms == pytest.approx([0.5] * 5, rel=1e-4)


def test_a_schedule_is_a_function_of_the_step_also_in_a_resumed_run(do):
    """With more epochs, another batch size or another --lr, it falls to nearly 0 at the new end."""
    schedule = (*MLP, "--warm-up", 4, "--cosine", "--lr")
    first = do(2, *schedule, 0.1).rates
    assert first[:5] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])
    assert first[4:] == sorted(first[4:], reverse=True) and 0 < first[-1] < 0.01
    rest = do(4, *schedule, 0.2, "--batch-size", 4, "--resume").rates
    whole = do(4, *schedule, 0.2, "--batch-size", 4, "--snapshot-path", "whole.pt").rates
    assert len(whole) == 40 and rest == whole[20:] and 0 < rest[-1] < 0.001


@pytest.mark.parametrize("model", ["mlp", "convnet"])
def test_an_epoch_goes_on_in_the_middle_with_the_same_bytes(do, monkeypatch, model):
    """Each snapshot is the last thing that a process does. The convnet has dropout.

    An epoch has five steps. Of those of the whole run, every third is saved, and those at an
    epoch's end once.
    """
    options = (3, "--model", model, "--batch-size", 4, "--accumulate", 2, "--warm-up", 2)
    options += ("--cosine", "--clip", 0.5, "--save-steps", 3)
    expected = do(*options, "--snapshot-path", "whole.pt")
    assert expected.saved == [3, 5, 6, 9, 10, 12, 15]
    save, found = do.module.save_snapshot, []

    def stop(*given: object) -> None:
        save(*given)
        snapshot = load(Path("checkpoint.pt"))
        found.append((snapshot["epoch"], snapshot["samples_seen"]))
        if len(found) < 7:
            raise ZeroDivisionError

    monkeypatch.setattr(do.module, "save_snapshot", stop)
    for _ in range(6):
        with pytest.raises(ZeroDivisionError):
            do(*options, "--resume")
    text = do(*options, "--resume").text
    assert found == [(step // 5, step % 5 * 8) for step in expected.saved]
    assert epochs(text)[-1]["val_loss"] == epochs(expected.text)[-1]["val_loss"]
    assert same_bytes(load(Path("checkpoint.pt")), load(Path("whole.pt")))


STOP = """@@ after its first save, each rank ends
                 save_snapshot(args, model.module, optimizer, step, place)
+                os._exit(0)
"""


def test_a_stop_in_mid_epoch_goes_on_at_any_world_size(tmp_path, fashion):
    """A sample that is trained twice, or never, would show."""
    script, data = tmp_path / "long_run.py", (1, *fashion(120, 10))
    script.write_text(patched((ROOT / SCRIPT).read_text(), STOP))
    options = (*data, "--resume", "--save-steps", 3, "--batch-size")
    for processes, batch, seen in ((3, 4, 36), (1, 12, 72), (2, 6, 108), (4, 3, 0)):
        train(tmp_path, script, processes, *options, batch, dtype="float64")
        assert load(tmp_path / "checkpoint.pt")["samples_seen"] == seen
    options = (*data, "--batch-size", 12, "--snapshot-path", "whole.pt")
    train(tmp_path, "single_gpu.py", 1, *options, dtype="float64")
    assert difference(load(tmp_path / "checkpoint.pt"), load(tmp_path / "whole.pt")) < 1e-12


def test_another_global_batch_goes_on_at_its_last_whole_step(do, monkeypatch):
    """The train loss is that of the rest. Workers get numbers of their own rank's, once."""
    do(1, *MLP)
    path = Path("checkpoint.pt")
    torch.save({**load(path), "epoch": 0, "train_size": 40, "samples_seen": 24}, path)
    monkeypatch.setattr(do.module, "set_seed", seed := Mock(wraps=do.module.set_seed))
    job = do(1, *MLP, "--resume", "--accumulate", 2, "--log-interval", 1)
    assert job.steps == [2, 3]
    loss = (16 * job.losses[0] + 8 * job.losses[1]) / 24
    assert epochs(job.text)[0]["train_loss"] == pytest.approx(loss, abs=2e-4)
    assert [call.args for call in seed.call_args_list] == [
        (42,),
        (42, 0, 0),
        (42, 0, 2),
        (42, 0, 3),
    ]


@pytest.mark.parametrize(("stop", "at"), [(3, 4), (10, 10), (20, 20)])
def test_a_stop_is_at_a_loss_line_also_at_the_end_of_an_epoch(do, monkeypatch, stop, at):
    """SIGTERM comes in this step of 20; a loss line is in every second one."""
    step = do.module.train_step

    def stepping(*given: object) -> tuple:
        stepping.count += 1
        if stepping.count == stop:
            signal.raise_signal(signal.SIGTERM)  # heard before the next line, unlike os.kill
        return step(*given)

    stepping.count = 0
    monkeypatch.setattr(do.module, "train_step", stepping)
    saved = lambda: load(Path("checkpoint.pt"))  # noqa: E731  (before any rank ends)
    monkeypatch.setattr(dist, "barrier", barrier := Mock(side_effect=saved))
    returned = do(4, *MLP, "--log-interval", 2).returned
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert returned == (STOPPED if barrier.called else None) and barrier.called is (at < 20)
    assert stepping.count == at == 5 * saved()["epoch"] + saved()["samples_seen"] // 8


def test_a_snapshot_of_the_five_scripts_and_one_for_them(do, tmp_path):
    do.all_scripts("single_gpu.py", 1, "--batch-size", 8, *MLP)
    job = do(2, 3, *MLP, "--resume", "--momentum", 0.5)
    assert "from epoch 1\n" in job.text and job.saved == [10]
    assert load(tmp_path / "checkpoint.pt")["optimizer"]["param_groups"][0]["momentum"] == 0.5


def refused(do, *options: object) -> str:
    """The line that it ends with. The snapshot, if there is one, is as before."""
    path = Path("checkpoint.pt")
    before = path.exists() and path.read_bytes()
    with pytest.raises(SystemExit) as caught:
        do(*options)
    assert before == (path.exists() and path.read_bytes())
    assert caught.value.code.startswith("error: ") and "\n" not in caught.value.code
    return caught.value.code.removeprefix("error: ")


def test_a_data_set_that_has_shrunk_or_is_empty(do, monkeypatch):
    do(1, *MLP)
    path = Path("checkpoint.pt")
    torch.save({**load(path), "train_size": 41, "samples_seen": 8}, path)
    line = "the snapshot is of 41 training samples, not 40"
    assert refused(do, 2, *MLP, "--resume") == line
    torch.save({**load(path), "train_size": 41, "samples_seen": 0}, path)  # at an epoch's end
    assert do(2, *MLP, "--resume").steps == [10]
    monkeypatch.setattr(do.module, "load_dataset", lambda *_: (make_digits(0, 0), [1]))
    line = "the training set has no samples"
    assert refused(do, 1, *MLP, "--snapshot-path", "other.pt") == line


def test_a_rank_with_another_option_or_data_set(do, monkeypatch):
    """All ranks end with the line of the first one that differs. Some options may differ."""

    def line(*others: dict) -> str:
        def all_gather_object(ranks: list, own: dict) -> None:
            ranks[:] = [own | other for other in others]

        monkeypatch.setattr(dist, "all_gather_object", all_gather_object)
        return refused(do, 1, *MLP)

    for name, value in {"lr": 0.01, "seed": 42, "train_size": 40, "val_size": 10}.items():
        assert line({}, {}, {name: 3}) == f"{name} is {value} on rank 0, and 3 on rank 2"
    assert line({"train_size": 3}, {}) == "train_size is 3 on rank 0, and 40 on rank 1"
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        line({}, dict.fromkeys(("data_dir", "snapshot_path", "num_workers"), "another"))
