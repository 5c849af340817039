"""docs/pitfalls.md: its programs do what it says, and its numbers and quotations are not stale."""

import ast
import re
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.forks import start_the_server
from helpers.jobs import ROOT

sys.path.insert(0, str(ROOT / "docs"))
import pitfalls

BLOCKS = pitfalls.blocks(pitfalls.PAGE.read_text())
QUOTATIONS = [(name, text) for language, name, text in BLOCKS if not name.isidentifier()]
STALE = "stale: python docs/pitfalls.py"


@pytest.fixture(scope="module", autouse=True)
def server():
    """A process has one server to fork from, started by whoever comes first: this one suits all."""
    start_the_server()


def show(name: str) -> list[str]:
    """What the program prints, if the page says so, too."""
    text = pitfalls.run(name)
    assert ("text", name, text) in BLOCKS, f"{STALE}\n{text}"
    return text.splitlines()


def samples(line: str) -> list[int]:
    return list(map(int, re.search(r"\[([\d, ]*)\]$", line)[1].split(", ")))


def test_a_loader_that_ignores_the_sampler():
    (line,) = show("shuffle_wrong")
    assert "[every rank] 4 steps" in line and samples(line) == [*range(12)]
    lines = show("shuffle_right")
    assert [line[:16] for line in lines] == ["[rank 0] 2 steps", "[rank 1] 2 steps"]
    assert sorted(samples(lines[0]) + samples(lines[1])) == [*range(12)]


def test_unseeded_data():
    assert show("unseeded_wrong") == ["[every rank] samples that both ranks have: 0 of 8"]
    assert show("unseeded_right") == ["[every rank] samples that both ranks have: 8 of 8"]


def test_a_second_iterator():
    wrong, right = ([samples(line) for line in show(f"peek_{end}")] for end in ("wrong", "right"))
    assert [len(fetched) for fetched in wrong] == [9] * 6
    assert [len(fetched) for fetched in right] == [6] * 6
    assert [fetched[3:] for fetched in wrong] == right
    for epoch in (1, 2, 4, 5):  # of rank 0, of rank 1
        assert wrong[epoch][:3] == right[epoch - 1][:3]


def test_padded_evaluation():
    assert show("padding_wrong") == ["[every rank] Accuracy: 2/12 (16.7%)"]
    assert show("padding_right") == ["[every rank] Accuracy: 1/10 (10.0%)"]


def test_no_sync():
    lines = ["[rank 0] weight 1.000, loss 0.000", "[rank 1] weight 3.000, loss 0.000"]
    assert show("no_sync_wrong") == lines
    assert show("no_sync_right") == ["[every rank] weight 2.000, loss 1.000"]


def test_accumulation():
    def gradients(name: str) -> list[tuple[str, ...]]:
        return re.findall(r"\] (\w+ ?\d?): .*gradient (\S+)", "\n".join(show(name)))

    wrong = [("step 0", "1.0"), ("step 4", "4.0"), ("step 8", "4.0"), ("end", "1.0")]
    right = [("step 3", "1.0"), ("step 7", "1.0"), ("step 9", "1.0"), ("end", "None")]
    assert gradients("accumulate_wrong") == wrong
    assert gradients("accumulate_right") == right


def test_reduce():
    assert show("reduce_wrong") == ["[rank 0] mean loss 2.0", "[rank 1] mean loss 1.5"]
    assert show("reduce_right") == ["[every rank] mean loss 2.0"]


def test_the_mean_of_uneven_means():
    wrong, right = show("uneven_wrong"), show("uneven_right")
    assert wrong[0] == right[0] == "samples per device: [3, 3, 3, 1]"
    assert (wrong[1], right[1]) == ("loss 5.250", "loss 4.500")
    assert wrong[2].split()[-2:] == ["0.083", "0.250"] and right[2].count("0.100") == 10


def test_one_logit():
    assert show("one_logit_wrong") == ["[every rank] loss 0.00, weights changed: False"]
    (line,) = show("one_logit_right")
    assert "loss 0.00" not in line and "weights changed: True" in line


def test_a_collective_that_one_rank_calls():
    assert show("one_rank_wrong") == ["[rank 0] waits for rank 1, in vain"]
    assert show("one_rank_right") == ["[rank 0] correct: 7"]


def test_evaluation_through_the_wrapper():
    assert show("wrapper_wrong") == ["[rank 0] waits for rank 1, in vain"]
    assert show("wrapper_right") == ["[rank 0] outputs: 3"]


def test_parameters_that_take_no_part():
    done, raised = show("unused_wrong")
    assert done == "[every rank] step 0 done" and "Expected to have finished reduction" in raised
    assert show("unused_right") == [done, "[every rank] step 1 done"]


def test_clipping_before_unscale():
    (wrong,), (right,) = show("clip_wrong"), show("clip_right")
    assert float(right.split()[-1]) == 0.1
    assert float(wrong.split()[-1]) == pytest.approx(0.1 / 65_536, abs=1e-7)


def test_a_schedule_that_steps_with_each_micro_batch():
    found = [[line.split()[-1] for line in show(f"schedule_{end}")] for end in ("wrong", "right")]
    assert found == [["0.7", "0.3", "0.0"], ["1.0", "0.9", "0.8"]]


def test_the_size_of_no_world():
    (line,) = show("world_size_wrong")
    assert "ValueError: Default process group has not been initialized" in line
    assert show("world_size_right") == ["[every rank] batch size 32"]


def test_devices_of_the_second_host():
    assert [line.count("invalid") for line in show("local_rank_wrong")] == [0, 0, 1, 1]
    assert [line[-8:] for line in show("local_rank_right")] == ["device 0", "device 1"] * 2


def test_the_last_epochs():
    assert show("save_every_wrong")[0].endswith("epoch 40, the last is 49: 9 are lost")
    assert show("save_every_right")[0].endswith("epoch 49, the last is 49: 0 are lost")


def test_resuming():
    expected, _, wrong = show("resume_wrong")
    assert "[1, 2, 3]" in wrong and wrong.split()[-1] != expected.split()[-1]
    expected, _, right = show("resume_right")
    assert "[2, 3]" in right and right.split()[-1] == expected.split()[-1]


def test_killed_while_saving():
    gone = "[rank 1] rank 0 is gone"
    assert show("in_place_wrong") == [gone, "[rank 1] nothing that torch.load can read"]
    assert show("in_place_right") == [gone, "[rank 1] snapshot of epoch 1"]


def test_a_snapshot_that_one_host_has():
    lines = show("relative_path_wrong")
    assert lines[:2] == ["[rank 0] starts at epoch 3", "[rank 0] done"]
    assert lines[2:] == ["[rank 1] starts at epoch 0", "[rank 1] epoch 2: the others are gone"]
    assert show("relative_path_right") == ["[every rank] starts at epoch 3", "[every rank] done"]


def test_claim_about_seeds():
    found = [[line.split()[-1] for line in show(f"seeds_{end}")] for end in ("wrong", "right")]
    assert found == [["True", "True", "True"], ["False", "True", "False"]]


def test_claim_about_the_optimizer():
    before, after = show("optimizer_order")
    assert "before" in before and "after" in after and before.split()[-1] == after.split()[-1]


def test_claim_about_one_spawned_process():
    assert show("spawn_one") == ["in a global: [], in a tensor among the arguments: 7.0"]


def test_claim_about_spawned_data():
    assert show("spawn_data") == ["samples of each process: [12, 12], with a sampler: [6, 6]"]


def test_claim_about_the_timeout():
    lines = ["[rank 0] without the argument: 0:30:00", "[rank 0] with it: Timed out waiting 2000ms"]
    assert show("timeout") == lines
    if dist.is_nccl_available():
        assert str(dist.constants.default_pg_nccl_timeout) == "0:10:00"


def test_the_page_has_all_programs_and_their_code():
    shown = [name for language, name, _ in BLOCKS if language == "text"]
    assert sorted(shown) == sorted(pitfalls.PROGRAMS)
    code = {name: text for language, name, text in BLOCKS if language == "python"}
    for name in shown:
        assert code[name] == pitfalls.source(name), STALE
        if name.endswith("_wrong"):
            changed = pitfalls.change(name.removesuffix("_wrong"))
            assert ("diff", name.removesuffix("_wrong"), changed) in BLOCKS, STALE
            assert "\n+" in changed
        assert re.search(f'"{name}"|"{name[:-5]}{{end}}"', Path(__file__).read_text()), name


def test_the_index_has_every_section():
    page = pitfalls.PAGE.read_text()
    index, _, rest = page.partition("\n## ")
    headings = re.findall(r"^### (.*)$", rest, re.M)
    links = re.findall(r"\[((?:[^]]|`)+)\]\(#([^)]+)\)", index)
    assert [name for name, _ in links] == headings and len(headings) > 20
    for name, anchor in links:  # as GitHub makes them
        assert anchor == re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-")


def unindented(code: str) -> str:
    return "".join(f"{line.strip()}\n" for line in code.splitlines())


@pytest.mark.parametrize(("place", "text"), QUOTATIONS, ids=[name for name, _ in QUOTATIONS])
def test_quoted_lines_are_in_the_scripts(place, text):
    script, name = place.split()
    code = (ROOT / script).read_text()
    nodes = [node for node in ast.walk(ast.parse(code)) if getattr(node, "name", "") == name]
    (code,) = [ast.get_source_segment(code, node) for node in nodes]
    assert f"\n{unindented(text)}" in unindented(code)
