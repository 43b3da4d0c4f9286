"""The lines of code of each room, and their budget; docstrings, comments, blank lines and imports do not count.

python tests/code_lines.py            # a table: lines now, and the budget
python tests/code_lines.py --write    # lowers the budget of the rooms that became smaller
"""

from __future__ import annotations

import ast
import functools
import json
import sys
from collections import Counter
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "corral"
BUDGET = Path(__file__).with_suffix(".json")
parse = functools.cache(ast.parse)  # of the house rules too, which read the same files


def count_lines(source: str) -> int:
    """Return the lines of code of a file."""
    left_out: set[int] = set()
    found = {n for n, line in enumerate(source.split("\n"), 1) if line.strip() and not line.strip().startswith("#")}
    for node in ast.walk(parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node, clean=False) is not None:
                left_out |= _lines_of(node.body[0])
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            left_out |= _lines_of(node)
        elif isinstance(node, (ast.Constant, ast.JoinedStr)):
            found |= _lines_of(node)  # a text has blank lines
    return len(found - left_out)


def _lines_of(node: ast.expr | ast.stmt) -> set[int]:
    return {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def lines_by_room() -> dict[str, int]:
    """Return the lines of code of each room and each package in it; of the files outside of rooms as `"corral"`."""
    counts: Counter[str] = Counter()
    for file in SRC.rglob("*.py"):
        folder = file.relative_to(SRC).parent.parts
        counts["/".join(folder[:2]) or "corral"] += count_lines(file.read_text(encoding="utf-8"))
    return dict(sorted(counts.items()))


def read_budget() -> dict[str, int]:
    """Return the largest number of lines of each room."""
    budget: dict[str, int] = json.loads(BUDGET.read_text(encoding="utf-8"))
    return budget


def main() -> None:
    """Print the table, and write the budget with `--write`: a number that is too small is never raised."""
    now, budget = lines_by_room(), read_budget() if BUDGET.exists() else {}
    for room in sorted(now.keys() | budget.keys()):
        print(f"{room:22} {now.get(room, 0):6,} of {budget.get(room, 0):6,}")
    print(f"{'all':22} {sum(now.values()):6,} of {sum(budget.values()):6,}")
    if "--write" in sys.argv:
        lowered = {room: min(lines, budget.get(room, lines)) for room, lines in now.items()}
        BUDGET.write_text(json.dumps(lowered, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
