"""docs/pitfalls.md: its programs print what it quotes."""

import re

import pitfalls
import pytest
from helpers.ranks import start_server

PAGE = pitfalls.PAGE.read_text()
SECTIONS = pitfalls.sections(PAGE)
SLOW = pytest.mark.slow("starts Python anew, which imports torch")
NAMES = [pytest.param(n, marks=SLOW) if n == "threads" else n for n in SECTIONS]


@pytest.mark.parametrize("name", NAMES)
def test_the_program_prints_what_the_page_quotes(name):
    start_server()  # with more than the program asks for, so that other tests can use it
    quoted = re.findall(r"^- (\w+): `(.*)`$", SECTIONS[name], re.M)
    assert pitfalls.run(name).splitlines() == [f"{label}: {text}" for label, text in quoted]
    labels, texts = zip(*quoted, strict=True)
    assert labels == (("wrong", "right") if "```diff" in SECTIONS[name] else ("prints",))
    assert len({*texts}) == len(texts)
