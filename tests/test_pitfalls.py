"""docs/pitfalls.md: its programs print what it quotes, and its diffs are in them."""

import ast
import re

import pitfalls
import pytest
from helpers.jobs import ROOT

PAGE = pitfalls.PAGE.read_text()
SECTIONS = pitfalls.sections(PAGE)
CODE = (ROOT / "docs" / "pitfalls.py").read_text()
LINES = CODE.splitlines()
FUNCTIONS = {node.name: node for node in ast.parse(CODE).body if isinstance(node, ast.FunctionDef)}
SLOW = pytest.mark.slow("starts Python anew, which imports torch")
NAMES = [pytest.param(n, marks=SLOW) if n in ("threads", "spawn") else n for n in SECTIONS]


@pytest.mark.parametrize("name", NAMES)
def test_the_program_prints_what_the_page_quotes(name):
    printed = pitfalls.run(name).splitlines()
    quoted = re.findall(r"^- (\w+: )`(.*)`$", SECTIONS[name], re.M)
    assert printed == ["".join(quotation) for quotation in quoted]
    labels = [line.partition(": ")[0] for line in printed]
    assert labels == (["wrong", "right"] if "```diff" in SECTIONS[name] else ["prints"])
    assert len({line.partition(": ")[2] for line in printed}) == len(printed)


def code(*nodes: ast.stmt) -> str:
    return "\n".join(line for node in nodes for line in LINES[node.lineno - 1 : node.end_lineno])


def lines_of(name: str) -> dict[str, str]:
    """The program, and its lines that only the wrong one has, and that only the right one has."""
    program = code(FUNCTIONS[name])
    helpers = [node for other, node in FUNCTIONS.items() if f"({other}, " in program]
    lines = {"-": "", "+": "", " ": program + code(*helpers)}
    for node in ast.walk(ast.Module([FUNCTIONS[name], *helpers])):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "wrong":
            lines["-"] += code(*node.body)
            lines["+"] += code(*node.orelse)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "not wrong":
            lines["+"] += code(*node.body)
    return lines


@pytest.mark.parametrize("name", [name for name in SECTIONS if "```diff" in SECTIONS[name]])
def test_the_lines_of_the_diff_are_in_the_program(name):
    (diff,) = re.findall(r"^```diff\n(.*?)\n```$", SECTIONS[name], re.M | re.S)
    assert 2 <= len(diff.splitlines()) <= 6 and "\n+" in diff
    lines = lines_of(name)
    for line in diff.splitlines():
        assert line[1:].strip() in lines[line[0]], line


def test_the_table_has_every_entry():
    """tests/test_readme.py follows the links."""
    table, _, rest = PAGE.partition("\n## ")
    headings = re.findall(r"^## (.*)$", f"## {rest}", re.M)
    assert re.findall(r"^\| \[(.*?)\]\(#", table, re.M) == headings[:-1] and len(headings) > 20
