"""benchmarks/check.py: its times, by a clock of the test's own; its predictions and its verdict."""

import functools
import math
import os
import re
import shutil
import sys

import pytest
import torch
import torch.distributed as dist
from check import Rank, check, cpu_quota, main, measure, report, verdict
from helpers.hosts import Hosts, require, requirements
from helpers.jobs import ROOT, SPAWN2, Job, command

from common.data import ImageDataset

CHECK = "benchmarks/check.py"
TWO = f"torchrun --standalone --nproc_per_node=2 {CHECK}"
SECONDS = {"step": 0.100, "data": 0.001, "compute": 0.089, "fixed": 0.004, "alone": 0.080}
WHERE = {"host": "alpha", "device": "cpu", "threads": 1, "cpus": frozenset(range(4))}
FAST = Rank(**WHERE, quota=math.inf, samples=30, **SECONDS, reduce=0.040, latency=0.0012)
FOUR = 2 * [FAST] + [  # ranks on two nodes
    FAST._replace(host="beta", data=0.002, compute=0.090, step=0.104),
    FAST._replace(host="beta", compute=0.088),
]
said = functools.partial(report, size=48_000_000, steps=50, accumulate=1)


def test_the_lines_that_it_prints():
    # A ring of four has six messages: 0.2 ms each to arrive, and 40/6 - 0.2 = 6.4667 ms for 12 MB,
    # 1.8557 GB/s. Eight ranks: 14 (0.2 + 48 / 8 / 1.8557) = 48.07 ms, 8.07 more. And so on.
    assert said(FOUR, accumulate=2) == [
        "All-reduce | 48.00 MB | 40.00 ms | 1.8000 GB/s",
        "Step | 104.00 ms: data 1.25, compute 89.00, waiting for rank 2 1.75, all-reduce 12.00",
        "Epoch | 50 steps | about 5.2 s",
        "Measured | 2 nodes | 1154 samples/s | efficiency 78%",
        "Predicted | 1 process, threads 1 | 369 samples/s | efficiency 100%",
        "Predicted | 4 nodes | 2142 samples/s | efficiency 73%",
        "Predicted | 8 nodes | 4051 samples/s | efficiency 69%",
        "Predicted | 16 nodes | 7588 samples/s | efficiency 64%",
        "Predicted | 2 nodes, --accumulate 8 | 1263 samples/s | efficiency 86%",
        "Verdict | nothing is wrong: 87% of the step is data and computing",
    ]
    lines = said(FOUR, accumulate=0)  # in a script that has no --accumulate
    assert not any("accumulate" in line for line in lines) and len(lines) == 9
    for step, ending in ((0.3, "--batch-size"), (0.34, "; 1 process alone is faster")):
        slow = [rank._replace(step=step) for rank in FOUR]  # 120 samples; alone 369/s
        assert said(slow)[-1].endswith(ending)
    # Of one node, and of one process.
    assert said(FOUR[:2])[3:-1] == [
        "Measured | 2 processes on one node | 600 samples/s | efficiency 81%",
        "Predicted | 1 process, threads 1 | 370 samples/s | efficiency 100%",
        "Predicted | 2 processes on one node, --accumulate 4 | 649 samples/s | efficiency 88%",
        "Predicted | more nodes | not known before two of them have run this",
    ]
    lines = said(FOUR[:1])
    assert lines[1] == "Step | 100.00 ms: data 1.00, compute 89.00"
    assert [line.split(" | ")[1] for line in lines[3:5]] == ["1 process", "more nodes"]


def test_the_sentence_names_what_costs_most():
    ranks = [rank._replace(data=0.001, compute=0.089) for rank in FOUR]
    for step, changed, sentence in (
        (0.10, {"fixed": 0.021}, "the batch is too small for the device (21% of the step): raise"),
        (0.10, {"fixed": 0.019}, "nothing is wrong: 90% of the step is data and computing"),
        (0.12, {"data": 0.030}, "the data come too late (25% of the step): raise --num-workers"),
        (0.10, {"alone": 0.05, "threads": 2}, "the processes slow each other down: alone rank 0"),
        (0.20, {}, "the link is the limit, 1.5 GB/s (55% of the step): raise --accumulate or"),
        (0.20, {"host": "alpha"}, "the all-reduce is the limit (55% of the step): raise --acc"),
    ):
        changed_ranks = [rank._replace(**changed) for rank in ranks]
        assert verdict(changed_ranks, step, 1.5e9, 1).startswith(sentence)


def test_too_many_threads_are_named_first_whatever_else_costs_most():
    """They are counted on each node."""

    def said(ranks: list[Rank], **changed: object) -> str:
        sentence = verdict([rank._replace(**changed) for rank in ranks], 0.3, 1.5e9, 1)
        start, _, end = sentence.partition("more threads than cores on ")
        assert not end or not start
        return end

    assert said(FOUR, threads=2) == said(FOUR, quota=2.5) == ""
    assert said(FOUR, threads=3) == "alpha (threads: 6, cores: 4): export OMP_NUM_THREADS=2"
    one = frozenset({3})
    assert said(FOUR, cpus=one) == "alpha (threads: 2, cores: 1): start fewer processes"
    beta = [*FOUR[:2], *(rank._replace(cpus=one) for rank in FOUR[2:])]
    assert said(beta) == "beta (threads: 2, cores: 1): start fewer processes"
    own = [rank._replace(cpus=frozenset({n})) for n, rank in enumerate(FOUR)]  # a core each
    assert said(own) == ""
    assert said(own, threads=2) == "alpha (threads: 4, cores: 2): export OMP_NUM_THREADS=1"
    quota = "cores: 1.5 by the CPU quota): export OMP_NUM_THREADS=1 and start fewer processes"
    assert said(FOUR, threads=2, quota=1.5) == f"alpha (threads: 4, {quota}"
    assert said(FOUR[:1], quota=0.5) == ""  # one thread is never too many
    gpus = {"device": "cuda", "threads": 16, "cpus": frozenset(range(16))}
    assert said(FOUR, **gpus) == "alpha (threads: 32, cores: 16): export OMP_NUM_THREADS=4"  # not 8


def test_threads_beside_an_accelerator():
    for device, threads, said in (("cuda", 4, False), ("cuda", 5, True), ("cpu", 5, False)):
        ranks = [FAST._replace(device=device, threads=threads, cpus=frozenset(range(16)))]
        tail = (
            f"; {threads} threads a process may keep the device waiting: export OMP_NUM_THREADS=4"
        )
        for step, sentence in ((0.1, "nothing is wrong: 90%"), (0.3, "the all-reduce is the lim")):
            line = verdict(ranks, step, 1.5e9, 1)
            assert line.startswith(sentence) and (tail in line) is said


def test_the_cpu_quota_of_a_container(tmp_path):
    assert cpu_quota(tmp_path) == math.inf
    for quota, cpus in (("150000", 1.5), ("-1", math.inf)):  # version 1
        (tmp_path / "cpu").mkdir(exist_ok=True)
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
        assert cpu_quota(tmp_path) == cpus
    for text, cpus in (("50000 100000\n", 0.5), ("max 100000\n", math.inf)):
        (tmp_path / "cpu.max").write_text(text)
        assert cpu_quota(tmp_path) == cpus


@pytest.fixture
def clock(monkeypatch):
    """clock(seconds): so much time goes by. Otherwise only a batch of data takes some: 2 ms."""
    fetch = ImageDataset.__getitems__

    def clock(seconds):
        clock.now += seconds

    clock.now = 1000.0
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)
    monkeypatch.setattr(ImageDataset, "__getitems__", lambda *given: clock(0.002) or fetch(*given))
    return clock


@pytest.mark.parametrize(
    ("script", "options", "batches"),
    [("ddp_torchrun.py", (4, "--accumulate", 2), (4, 4)), ("multinode.py", (8,), (8,))],
)
def test_what_is_timed(make, monkeypatch, clock, script, options, batches):
    """Each part takes a time of its own; barriers take longest, and must not count."""
    _, trainer = make(script, "--model", "mlp", "--batch-size", *options)
    calls, real = [], trainer._run_batch

    def spend(targets, *how):
        calls.append((len(targets), *how))
        clock(0.010 / len(batches) + 0.001 * len(targets))
        sent = trainer.model.require_backward_grad_sync and (not how or how[-1])
        clock(0.004 if sent else 0)
        clock(5 if len(calls) == 40 else 0)  # in one of three times, of which the median counts
        return len(calls) < 4  # the real one follows, which must not change the weights

    def run_micro_batch(source, targets, share, last):
        _ = spend(targets, share, last) and real(source, targets, share, last)

    def run_batch(source, targets):
        _ = spend(targets) and real(source, targets)

    monkeypatch.setattr(dist, "barrier", lambda: clock(100))
    monkeypatch.setattr(dist, "all_reduce", lambda x, **_: clock(0.0005 + 1e-9 * x.nbytes))
    trainer._run_batch = run_micro_batch if len(batches) > 1 else run_batch
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    rank = measure(trainer, torch.zeros(1_000_000))
    assert all(map(torch.equal, before, trainer.model.parameters()))
    data = 0.002 * len(batches)
    expected = rank._replace(step=0.022 + data, data=data, compute=0.018, fixed=0.010, alone=0.018)
    expected = expected._replace(reduce=0.0045, latency=0.0005, samples=8)
    assert rank[5:] == pytest.approx(expected[5:], rel=1e-4)
    assert rank[1:4] == ("cpu", 1, os.sched_getaffinity(0))
    hows = [(0.5, False), (0.5, True)] if len(batches) > 1 else [()]
    assert set(calls) == {(size, *how) for size in (batches[0], batches[0] // 2) for how in hows}
    assert len(calls) == len(batches) * (6 + 5 * 3 * int(0.5 / (0.022 + data)))


def test_a_step_takes_no_batch_of_the_next_epoch(make, capsys):
    """Of 40 samples, the second step of an epoch has what is left."""
    _, trainer = make("ddp_torchrun.py", "--model", "mlp", "--batch-size", 7, "--accumulate", 4)
    steps = [[]]

    def run_batch(source, targets, share, last):
        steps[-1].append(len(targets))
        if last:
            steps.append([])

    trainer._run_batch = run_batch
    check(trainer, 5)
    assert steps[:4] == 2 * [[7, 5], [7, 7, 7, 7]]  # after one that was looked at
    assert "\nEpoch | 2 steps |" in capsys.readouterr().out


def test_batches_that_are_no_pairs(make):
    _, trainer = make("multinode.py", "--model", "mlp")
    trainer.train_data = [{"pixels": torch.ones(6, 3), "names": "abcdef", "labels": torch.ones(6)}]
    seen = set()
    trainer._run_batch = lambda batch: seen.add((batch["names"], *map(len, batch.values())))
    assert measure(trainer, torch.zeros(10)).samples == 6
    assert seen == {("abcdef", 6, 6, 6), ("abcdef", 3, 6, 3)}
    trainer.train_data, trainer.args.accumulate = 2 * [torch.ones(6)], 2
    trainer._run_batch = lambda batch, last: seen.add((len(batch), last))  # it has no share
    assert measure(trainer, torch.zeros(10)).samples == 12
    assert {(6, False), (6, True), (3, False), (3, True)} < seen


def test_data_that_are_fetched_while_the_device_computes_cost_nothing(make, clock):
    """As on a GPU: a batch takes 2 ms of the 20 ms for which the one before is computed."""
    _, trainer = make("multinode.py", "--model", "mlp", "--batch-size", 8)
    clock.busy_until = 0.0

    def run_batch(source, targets):
        clock(max(0.0, clock.busy_until - clock.now))
        clock.busy_until = clock.now + 0.020

    trainer._run_batch = run_batch
    assert measure(trainer, torch.zeros(10)).data == pytest.approx(0, abs=1e-4)


def test_rank_0_prints_sums_that_are_right(make, monkeypatch, capsys):
    _, trainer = make("multinode.py", "--model", "mlp")
    monkeypatch.setattr("check.measure", lambda trainer, gradient: FAST)
    next(trainer.model.parameters()).requires_grad_(False)  # 784 x 512 of 669,706 are not sent
    check(trainer, 5)
    lines = capsys.readouterr().out.splitlines()[-6:]
    assert "| 1.07 MB |" in lines[0] and "| 2 steps |" in lines[2]
    # As with two processes, so the sums of one are wrong.
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", lambda ranks, one: ranks.__setitem__(0, one))
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    with pytest.raises(SystemExit, match="error: 268298 of 536596 sums of all ranks are wrong"):
        check(trainer, 5)
    assert capsys.readouterr().out == ""


def test_a_slow_rank_of_a_users_own_copy(run, tmp_path):
    folder = tmp_path / "output-own"
    shutil.copytree(ROOT / "common", folder / "common")
    with (folder / "common" / "__init__.py").open("a") as file:  # what it imports must stay
        file.write("print('my own', flush=True)\n")
    own = {  # in the lines marked "your"
        r"F\.cross_entropy\(": "(lambda output, targets, **_: F.mse_loss(output, targets))(",
        r"load_dataset\(.*?\)": "2 * [65 * [(torch.ones(9999).double(), torch.ones(()).double())]]",
        r"build_model\(.*\)\.to": "nn.Sequential(nn.Linear(9999, 1), nn.Flatten(0)).double().to",
    }
    text = (ROOT / "ddp_torchrun.py").read_text()
    for old, new in own.items():
        text, count = re.subn(f"{old}(.*# .*your)", rf"{new}\1", text)
        assert count, old
    text = re.sub(r"^def main\((.*?)\)", r"def main(\1, more=False)", text, flags=re.M)
    (folder / "my_own.py").write_text(text)
    (tmp_path / "checkpoint.pt").write_text("of an earlier run")
    text = run(TWO, folder / "my_own.py", "--batch-size", 40, LADDER_SLOW=1, LADDER_ATEXIT=1)
    assert text.count("my own\n") >= 2
    assert len(re.findall("^Python ends: (?!.*gloo)", text, re.M)) == 3, text
    assert "\nAll-reduce | 0.08 MB |" in text and "\nEpoch | 1 steps |" in text
    assert re.search(r"^Step \| .* waiting for rank 1 1\d\d\.\d\d, all-reduce", text, re.M), text
    assert re.search(r"^Verdict \| rank 1 is slow: [34]\d\d\.\d\d ms for", text, re.M), text
    assert untouched(tmp_path)


def untouched(folder):
    """Whether there is nothing new but the job's output, and the snapshot is that of before."""
    left = [path for path in folder.iterdir() if not path.name.startswith("output-")]
    return {path.name: path.read_text() for path in left} == {"checkpoint.pt": "of an earlier run"}


def test_what_it_cannot_measure(make, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path])

    def refused(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["check.py", *map(str, arguments)])
        with pytest.raises(SystemExit, match="2"):
            main()
        return capsys.readouterr().err

    usage = "python benchmarks/check.py SCRIPT [the script's options]\n"
    assert refused() == f"error: name a script: {usage}"
    assert refused("no.py") == f"error: there is no no.py: {usage}"
    text = (ROOT / "ddp_torchrun.py").read_text()
    for name, changed, line in (
        ("a.py", text.replace("class Trainer", "class T"), "has no Trainer, which benchmarks/"),
        ("b.py", text.replace("def train(", "def t("), "has no Trainer.train, which benchmarks/"),
        ("c.py", text.replace("def _run_batch(", "def r("), "has no Trainer._run_batch, which "),
        ("d.py", text.replace("def parse_args(", "def p("), "has no parse_args, which benchmarks/"),
        ("e.py", text.replace("def main(", "def main(rank: int, "), "has no mp.spawn(...) for its"),
        ("statistics.py", text, "cannot be imported by this name: rename it, to train.py say"),
        ("train.v2.py", text, "cannot be imported by this name: rename it, to train.py say"),
    ):
        (tmp_path / name).write_text(changed)
        assert refused(tmp_path / name).startswith(f"error: {name} {line}")
    _, trainer = make("single_gpu.py", "--model", "mlp")
    with pytest.raises(SystemExit, match="2"):
        check(trainer, 5)
    assert "Trainer.model is not DDP, which this measures, but MLP\n" in capsys.readouterr().err
    # A node's first process says it, and the others wait until that ends them.
    slept = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("time.sleep", slept.append)
    assert refused("no.py") == "" and slept == [10]


@pytest.mark.slow("starts processes as mp.spawn does")
def test_a_script_that_starts_its_processes_itself(run, tmp_path):
    """With BatchNorm: rank 0 sends its buffers before a pass, but not where it computes alone."""
    script, *options = SPAWN2
    options += ("--model", "resnet18", "--batch-size", 2, "--timeout", 60)
    (tmp_path / "checkpoint.pt").write_text("of an earlier run")
    text = run(CHECK, ROOT / script, *options)
    assert "\nMeasured | 2 processes on one node |" in text and "\nVerdict | " in text
    assert "accumulate" not in text and "\nTotal time: " in text and untouched(tmp_path)


@pytest.mark.slow("nodes in network namespaces")
def test_it_finds_the_speed_of_the_link(tmp_path):
    require(requirements())
    with Hosts(2) as hosts:
        hosts.shape("100mbit")
        words = command(CHECK, ROOT / "ddp_torchrun.py", "--model", "mlp")
        there = [hosts.command(rank, words, hosts.exported(rank)) for rank in (0, 1)]
        jobs = [Job(words, tmp_path, {}) for words in there]
        text, _ = (job.finish() for job in jobs)
    found = re.search(r"^All-reduce \| 2.68 MB \| (\S+) ms \| (\S+) GB/s$", text, re.M)
    # 0.1 Gbit/s, with tbf's burst on top; less where other tests use the cores.
    assert 0.02 < 8 * float(found[2]) < 0.13, text
    assert "\nVerdict | the link is the limit, 0.0" in text
