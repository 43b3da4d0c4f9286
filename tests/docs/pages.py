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
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import cloudpickle

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
VARYING = "varying"
"""Word after `text` in the first line of an output whose numbers differ between runs or machines."""

_FENCE = re.compile(r"^```(?P<language>\w*)(?P<words>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- (?P<word>no-run|only-walk)(?: (?P<places>[\d,]+))?(?:: (?P<reason>[^>]*?))? -->")
_TITLE = re.compile(r'title="([^"]+)"')
_SPAN = re.compile(r"`([^`\n]+)`|^    (\S.*)$", re.MULTILINE)
_NUMBER = re.compile(r" *(\b[0-9a-f]{32,}\b|-?\d[\d.,]*(e[-+]?\d+)?)")
LONGEST_OUTPUT = 30
"""Number of lines of the longest output that a page has to show."""


class Command(NamedTuple):
    """A command line of a page, and why it is not run, if so."""

    text: str
    no_run: str | None = None


class Block(NamedTuple):
    """A fenced block of a page.

    Comments before it, which a reader does not see, say what is not run: `<!-- no-run: reason -->`, for a few of its
    command lines `<!-- no-run 2,3: reason -->`, and what only `make walk` runs, `<!-- only-walk: reason -->`.
    """

    language: str
    text: str
    line: int
    before: str  # what lies between the block before it and this one
    varies: bool
    end: int  # position behind the block in the page
    title: str | None = None  # name of the file that holds the text

    def no_run(self, *, walk: bool = False) -> str | None:
        """Return why the block is not run in a test, or in `make walk`; `None` if it is run."""
        for mark in _MARK.finditer(self.before):
            if mark["places"] is None and (mark["word"] == "no-run" or (mark["word"] == "only-walk" and not walk)):
                return mark["reason"] or "marked"
        return None

    def commands(self) -> list[Command]:
        """Return the command lines of an `sh` block."""
        lines: list[str] = []
        end = ""  # of the text that a command reads from the lines after it
        for line in self.text.replace("\\\n", " ").splitlines():
            if end:
                lines[-1] += f"\n{line}"
                end = "" if line.strip() == end else end
            elif line.strip():
                lines.append(line.strip())
                here = re.search(r"<<\s*'?(\w+)'?$", line)
                end = here[1] if here else ""
        reasons: dict[int, str] = {}
        for mark in _MARK.finditer(self.before):
            places = mark["places"].split(",") if mark["places"] else range(1, len(lines) + 1)
            reasons |= dict.fromkeys(map(int, places), mark["reason"] or "marked")
        return [Command(line, reasons.get(place)) for place, line in enumerate(lines, 1)]


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    page, found, end = path.read_text(encoding="utf-8"), [], 0
    for match in _FENCE.finditer(page):
        line = page.count("\n", 0, match.start("text"))
        between = page[end : match.start()]
        end = match.end()
        title = _TITLE.search(match["words"])
        varies = VARYING in match["words"]
        found.append(Block(match["language"], match["text"], line, between, varies, end, title and title[1]))
    return found


def page_module() -> ModuleType:
    """Return the module in which the Python blocks of a page run, one after another."""
    module = ModuleType("page")
    sys.modules["page"] = module  # dataclasses look up the module of a class
    cloudpickle.register_pickle_by_value(module)  # and runners in other processes cannot import it
    return module


def run_block(block: Block, path: Path, module: ModuleType) -> str:
    """Run a Python block of a page in the working directory, and return what it printed."""
    printed = io.StringIO()
    # Blank lines in front make a traceback point at the line of the page.
    code = compile("\n" * block.line + block.text, page_id(path), "exec", dont_inherit=True)
    with contextlib.redirect_stdout(printed):
        exec(code, vars(module))
    return printed.getvalue()


def output_of(block: Block, after: Block | None) -> Block | None:
    """Return the block that shows the output of a block, if there is one."""
    return after if after is not None and after.language == "text" and not after.before.strip() else None


def output_problem(block: Block, printed: str, shown: Block | None) -> str | None:
    """Return what is wrong with the output that a page shows of a Python block, or `None`."""
    if not printed and "except " in block.text:
        return "shows an error that was not raised"
    if shown is None:
        return f"show what the block prints:\n{printed}" if must_be_shown(block, printed) else None
    read = without_numbers if shown.varies else str
    return None if read(printed) == read(shown.text) else f"prints something else:\n{printed}"


def run_blocks(path: Path) -> Iterator[tuple[Block, str, Block | None]]:
    """Run the Python blocks of a page in the working directory, one after another.

    Yields:
        A block, what it printed, and the block that shows its output, if there is one.
    """
    module, found = page_module(), blocks(path)
    for block, after in zip(found, [*found[1:], None], strict=False):
        if block.language == "python" and not block.no_run():
            yield block, run_block(block, path, module), output_of(block, after)


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
    shell = [command.text for block in blocks(path) if block.language == "sh" for command in block.commands()]
    lines = [*shell, *spans(_FENCE.sub("", path.read_text(encoding="utf-8")))]
    return [line for line in lines if line.startswith(f"{program} ")]


def spans(prose: str) -> list[str]:
    """Return the code spans and the indented lines of a text."""
    return [found[1] or found[2].strip() for found in _SPAN.finditer(prose)]


def links(path: Path) -> list[str]:
    """Return the targets of a page's relative links."""
    prose = _FENCE.sub("", path.read_text(encoding="utf-8"))
    found = re.findall(r"\]\(([^)\s]+)\)", prose)
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def paragraphs(path: Path) -> list[str]:
    """Return the paragraphs and list items of a page, each in one line, without headings, tables, code and pictures."""
    page = re.sub(r"<!--.*?-->", "", _FENCE.sub("", path.read_text(encoding="utf-8")), flags=re.DOTALL)
    page = re.sub(r"(?<=\n\n)(    .*\n)+|^(#+ |\||!\[).*$", "", page, flags=re.MULTILINE)
    cut = re.split(r"\n[ \t]*\n|\n(?= *(?:[-*]|\d+\.) )", page)
    found = [" ".join(re.sub(r"^\s*([-*]|\d+\.) ", "", part).split()) for part in cut]
    return [text for text in found if text]


def repeated_sentences(path: Path) -> list[str]:
    """Return the sentences of at least 40 characters that stand on a page more than once."""
    sentences = [text for part in paragraphs(path) for text in re.split(r"(?<=[.:?!]) (?=[A-Z`*\[])", part)]
    return [text for text, times in Counter(sentences).items() if times > 1 and len(text) >= 40]


def named_paths(path: Path) -> list[str]:
    """Return the paths of the repository that a page names, and the tests, as `test_...`."""
    page = path.read_text(encoding="utf-8")
    folders = "src|tests|docs|examples|benchmarks|tools|clients|requirements"
    found = re.findall(rf"(?<![\w/.-])((?:{folders})/[\w./*-]*[\w/*])", page)
    found += re.findall(r"`([a-z_]+/[\w/*]+\.py)`", page)  # of a room of src/corral, or of examples
    return [*found, *re.findall(r"`(test_\w+)`", page)]


def first_column(path: Path, heading: str) -> list[str]:
    """Return the code spans in the first column of the tables under a heading."""
    section = re.split(rf"^#+ {heading}$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1]
    section = re.split(r"^#+ ", section, flags=re.MULTILINE)[0]
    return re.findall(r"^\| \[?`([^`]+)`(?:\]\([^)]*\))? \|", section, flags=re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as Markdown makes them."""
    page = path.read_text(encoding="utf-8")
    for included in re.findall(r"^```{include} (\S+)$", page, flags=re.MULTILINE):
        page += (path.parent / included).read_text(encoding="utf-8")
    prose = _FENCE.sub("", page)
    titles = re.findall(r"^#+ (.+)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    for name in sys.argv[1:]:
        write_outputs(Path(name).resolve())
