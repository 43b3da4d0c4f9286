"""The README and the pages of docs/, cut into what the tests look at."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NO_RUN = "<!-- no-run -->"

_FENCE = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str
    line: int
    before: str  # what lies between the block before it and this one


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    page, found, end = path.read_text(encoding="utf-8"), [], 0
    for match in _FENCE.finditer(page):
        line = page.count("\n", 0, match.start("text"))
        found.append(Block(match["language"], match["text"], line, page[end : match.start()]))
        end = match.end()
    return found


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
    return re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as Markdown makes them."""
    prose = _FENCE.sub("", path.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}
