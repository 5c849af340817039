"""docs/pitfalls.md: its programs print what it quotes, and its diffs are in them."""

import ast
import inspect
import re

import pitfalls
import pytest
import torch
from helpers.ranks import start_server
from torch.utils.checkpoint import checkpoint

PAGE = pitfalls.PAGE.read_text()
SECTIONS = pitfalls.sections(PAGE)
SLOW = pytest.mark.slow("starts Python anew, which imports torch")
NAMES = [pytest.param(n, marks=SLOW) if n in ("threads", "spawn") else n for n in SECTIONS]


@pytest.mark.parametrize("name", NAMES)
def test_the_program_prints_what_the_page_quotes(name):
    start_server()  # with more than the program asks for, so that other tests can use it
    if name == "two_forwards" and torch.__version__.startswith("2.11."):
        (message,) = re.findall("^`(one of .*)`", SECTIONS[name], re.M)
        assert message in pitfalls.run(name)
        return
    quoted = re.findall(r"^- (\w+): `(.*)`$", SECTIONS[name], re.M)
    assert pitfalls.run(name).splitlines() == [f"{label}: {text}" for label, text in quoted]
    labels, texts = zip(*quoted, strict=True)
    assert labels == (("wrong", "right") if "```diff" in SECTIONS[name] else ("prints",))
    assert len({*texts}) == len(texts)


@pytest.mark.parametrize("name", [name for name in SECTIONS if "```diff" in SECTIONS[name]])
def test_the_lines_of_the_diff_are_in_the_program(name):
    """Those with - and + only in what the wrong or the right program does."""
    program = inspect.getsource(getattr(pitfalls, name))
    for helper, function in inspect.getmembers(pitfalls, inspect.isfunction):
        if f"({helper}, " in program:
            program += inspect.getsource(function)
    lines = program.splitlines()
    found = {"-": [], "+": [], " ": lines}
    for node in ast.walk(ast.parse(program)):
        test = ast.unparse(node.test) if isinstance(node, ast.If) else None
        if test in ("wrong", "not wrong"):
            signs = "-+" if test == "wrong" else "+-"
            for sign, body in zip(signs, (node.body, node.orelse), strict=True):
                for statement in body:
                    found[sign] += lines[statement.lineno - 1 : statement.end_lineno]
    (diff,) = re.findall(r"^```diff\n(.*?)\n```$", SECTIONS[name], re.M | re.S)
    assert 2 <= len(diff.splitlines()) <= 6 and "\n+" in f"\n{diff}"
    for line in diff.splitlines():
        assert any(line[1:].strip() in ours for ours in found[line[0]]), line


def test_the_table_has_every_entry():
    *headings, _ = re.findall(r"^## (.*)$", PAGE, re.M)
    assert re.findall(r"^\| \[(.*?)\]\(#", PAGE, re.M) == headings and len(headings) > 20


def test_a_reentrant_checkpoint_of_inputs_without_gradient_gives_its_layer_none():
    """As the page says, in one process, too."""
    layer, inputs = torch.nn.Linear(1, 1), torch.ones(1, 1)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        assert not checkpoint(layer, inputs, use_reentrant=True).requires_grad
    assert checkpoint(layer, inputs, use_reentrant=False).requires_grad
