"""The README and the pages of docs/, cut into what the tests look at.

    python tests/docs/pages.py docs/metrics.md

runs the Python blocks of a page in a temporary directory, and writes what they print below them.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import cloudpickle

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NO_RUN = "<!-- no-run -->"

VARYING = "varying"
"""Word after `text` in the first line of an output whose numbers differ between runs or machines."""

_FENCE = re.compile(r"^```(?P<language>\w*)(?P<words>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r" *(\b[0-9a-f]{32,}\b|-?\d[\d.,]*(e[-+]?\d+)?)")
LONGEST_OUTPUT = 30
"""Number of lines of the longest output that a page has to show."""


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str
    line: int
    before: str  # what lies between the block before it and this one
    varies: bool
    end: int  # position behind the block in the page


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    page, found, end = path.read_text(encoding="utf-8"), [], 0
    for match in _FENCE.finditer(page):
        line = page.count("\n", 0, match.start("text"))
        between = page[end : match.start()]
        end = match.end()
        found.append(Block(match["language"], match["text"], line, between, VARYING in match["words"], end))
    return found


def run_blocks(path: Path) -> Iterator[tuple[Block, str, Block | None]]:
    """Run the Python blocks of a page in the working directory, one after another.

    Yields:
        A block, what it printed, and the block that shows its output, if there is one.
    """
    module = ModuleType("page")
    sys.modules["page"] = module  # dataclasses look up the module of a class
    cloudpickle.register_pickle_by_value(module)  # and runners in other processes cannot import it
    found = blocks(path)
    for block, after in zip(found, [*found[1:], None], strict=True):
        if block.language != "python" or NO_RUN in block.before:
            continue
        printed = io.StringIO()
        # Blank lines in front make a traceback point at the line of the page.
        code = compile("\n" * block.line + block.text, page_id(path), "exec", dont_inherit=True)
        with contextlib.redirect_stdout(printed):
            exec(code, vars(module))
        shows = after is not None and after.language == "text" and not after.before.strip()
        yield block, printed.getvalue(), after if shows else None


def must_be_shown(block: Block, printed: str) -> bool:
    """Return whether a page has to show what a block prints; what `fit` shows of its progress need not be there."""
    return 0 < printed.count("\n") <= LONGEST_OUTPUT and "print(" in block.text


def without_numbers(text: str) -> str:
    """Return a text with # for each number and the spaces before it."""
    return _NUMBER.sub("#", text)


def write_outputs(path: Path) -> None:
    """Write what the blocks of a page print below them, where the page shows no or another output."""
    page = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        found = list(run_blocks(path))
    for block, printed, shown in reversed(found):
        if shown is None and must_be_shown(block, printed):
            page = f"{page[: block.end]}\n\n```text\n{printed}```{page[block.end :]}"
        elif shown is not None and shown.text != printed:
            words = f" {VARYING}" if shown.varies else ""
            page = f"{page[: block.end]}\n\n```text{words}\n{printed}```{page[shown.end :]}"
    path.write_text(page, encoding="utf-8")


def commands(path: Path, program: str) -> list[str]:
    """Return a program's command lines in `sh` blocks and code spans, and make's in indented blocks."""
    page = path.read_text(encoding="utf-8")
    shell = "\n".join(block.text for block in blocks(path) if block.language == "sh").replace("\\\n", " ")
    lines = [line.strip() for line in shell.splitlines()]
    prose = _FENCE.sub("", page)
    lines += re.findall(r"`([^`\n]+)`", prose)
    lines += [line.strip() for line in prose.splitlines() if line.startswith("    ")]
    return [line for line in lines if line.startswith(f"{program} ")]


def links(path: Path) -> list[str]:
    """Return the targets of a page's relative links."""
    prose = _FENCE.sub("", path.read_text(encoding="utf-8"))
    found = re.findall(r"\]\(([^)\s]+)\)", prose)
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def first_column(path: Path, heading: str) -> list[str]:
    """Return the code spans in the first column of the tables under a heading."""
    section = re.split(rf"^#+ {heading}$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1]
    section = re.split(r"^#+ ", section, flags=re.MULTILINE)[0]
    return re.findall(r"^\| \[?`([^`]+)`(?:\]\([^)]*\))? \|", section, flags=re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as Markdown makes them."""
    prose = _FENCE.sub("", path.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    for name in sys.argv[1:]:
        write_outputs(Path(name).resolve())
