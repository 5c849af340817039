"""Draw docs/doctor.svg: what tools/doctor.py says of your_loop.py with four mistakes.

python docs/programs/doctor.py
"""

import os
import subprocess
import sys
import tempfile
import textwrap
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
COMMAND = "python tools/doctor.py torchrun --nproc_per_node=2 train.py"
MISTAKES = {
    "sampler.set_epoch(epoch)": "pass",
    "Subset(val_set, range(rank, len(val_set), world_size))": "val_set",
    "batch_size=100": "batch_size=100, sampler=DistributedSampler(val_set, shuffle=False)",
    "lr=0.1": "lr=0.1 if rank == 0 else 0.01",
    "(model(inputs), targets)": "(model(inputs), targets, torch.tensor([1.0, 4.0]))",
}
COLOURS = {"FOUND": "#ff7b72", "NOTE": "#d2a8ff", "TIME": "#79c0ff", "$": "#8b949e"}


def program() -> str:
    text = (ROOT / "docs" / "your_loop.py").read_text()
    for right, wrong in MISTAKES.items():
        text = text.replace(right, wrong)
    return text


def draw(lines: list[str]) -> str:
    """The lines as the text of a terminal, of which each word of COLOURS has its colour."""
    rows = []
    for line in lines:
        wrapped = textwrap.wrap(line, 100, subsequent_indent=6 * " ", break_on_hyphens=False)
        rows += [(row, COLOURS.get(line.split(" ")[0], "#e6edf3")) for row in wrapped]
    height = 20 * len(rows) + 24
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 {height}" '
    svg += 'font-family="monospace" font-size="14">\n'
    svg += f'<rect width="880" height="{height}" rx="8" fill="#0d1117"/>\n'
    for number, (row, colour) in enumerate(rows):
        text = escape(row).replace(" ", "\N{NO-BREAK SPACE}")
        svg += f'<text x="14" y="{28 + 20 * number}" fill="{colour}">{text}</text>\n'
    return svg + "</svg>\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(program())
        words = [sys.executable, ROOT / "tools" / "doctor.py", *COMMAND.split()[2:]]
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, cwd=folder, env=env, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("epoch ")]
    (ROOT / "docs" / "doctor.svg").write_text(draw([f"$ {COMMAND}", *lines]))
