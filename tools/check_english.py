"""Refuse words and phrases that CONTRIBUTING.md lists as hard to read, in docs, code and tests.

The table under "Plain English" in CONTRIBUTING.md is the only list: its first column holds the phrases in backticks,
its second column what to write instead. In src/, the docstring of a function must first say what is returned.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADING = "## Plain English"
FOLDERS = ("src", "docs", "examples", "benchmarks", "tools", "tests")
TEXT_TOKENS = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
BETWEEN_WORDS = r"[\s#]+"  # a phrase may go over the end of a line
# "Attributes:" and "Args:" are noun phrases: "seed: Seed of the shuffling.", not "seed: Of the shuffling."
OF_ENTRY = re.compile(r"^ +\*{0,2}\w+: Of\b", re.MULTILINE)
# First lines of docstrings that say what a function returns, and annotations of functions that return no value.
SAYS_WHAT = re.compile(
    r"\breturn|^(Convert|Draw|Encode|Flatten|Map|Normalise|Refuse|Scale|Yield)\b|; see `", re.IGNORECASE
)
NO_VALUE = re.compile(r"(None|Never|NoReturn)$|Iterator|Generator|AbstractContextManager")


def read_phrases(contributing: str) -> dict[str, str]:
    """Return the phrases of the table, each with what to write instead."""
    section = contributing.partition(f"{HEADING}\n")[2].partition("\n## ")[0]
    phrases = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 2:
            phrases |= dict.fromkeys(re.findall(r"`([^`]+)`", cells[0].lower()), cells[1])
    return phrases


@functools.cache
def pattern_of(phrases: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that matches any of the phrases."""
    words = (BETWEEN_WORDS.join(map(re.escape, phrase.split())) for phrase in phrases)
    return re.compile(rf"\b(?:{'|'.join(words)})\b", re.IGNORECASE)


def find_problems(text: str, phrases: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Yield line number, from 1, and description of each problem in a text."""
    for match in pattern_of(tuple(phrases)).finditer(text):
        phrase = " ".join(re.split(BETWEEN_WORDS, match.group().lower()))
        yield text.count("\n", 0, match.start()) + 1, f"{match.group()!r}: write {phrases[phrase]}"
    for match in OF_ENTRY.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, f"{match.group().strip()!r}: write a noun phrase"


def find_unclear_returns(source: str) -> Iterator[tuple[int, str]]:
    """Yield line number and description of each public function whose docstring does not say first what it returns."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_") or node.returns is None:
            continue
        first = (ast.get_docstring(node) or "").partition("\n")[0]
        is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
        if first and not is_property and not NO_VALUE.match(ast.unparse(node.returns)) and not SAYS_WHAT.search(first):
            yield node.lineno, f"{node.name}: the first line of the docstring must say what is returned: {first!r}"


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the texts in a file that people read, each with the number of its first line."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        if path.name == "CONTRIBUTING.md":  # the list itself
            before, _, after = source.partition(f"{HEADING}\n")
            section = after.partition("\n## ")[0]
            source = before + "\n" * (section.count("\n") + 1) + after[len(section) :]
        yield 1, re.sub(r"https?://\S+", "", source)
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in TEXT_TOKENS:
            yield token.start[0], token.string


def main() -> int:
    """Print every problem; return 1 if there is one."""
    contributing = ROOT / "CONTRIBUTING.md"
    phrases = read_phrases(contributing.read_text(encoding="utf-8"))
    if not phrases:
        print(f"{contributing.name} has no table under {HEADING!r}.")
        return 1
    paths = [ROOT / "README.md", ROOT / "CHANGELOG.md", contributing]
    paths += sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md"))
    paths.remove(ROOT / "tests" / "test_english.py")  # which has the phrases as examples
    problems = [
        f"{path.relative_to(ROOT)}:{first + line - 1}: {problem}"
        for path in paths
        for first, text in texts_of(path)
        for line, problem in find_problems(text, phrases)
    ]
    problems += [
        f"{path.relative_to(ROOT)}:{line}: {problem}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for line, problem in find_unclear_returns(path.read_text(encoding="utf-8"))
    ]
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
