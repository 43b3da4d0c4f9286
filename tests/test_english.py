"""The check of the words that CONTRIBUTING.md lists."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("check_english", ROOT / "tools" / "check_english.py")
assert _spec is not None and _spec.loader is not None
check_english = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check_english)

PHRASES = check_english.read_phrases((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))


def test_the_list_is_read_from_the_page() -> None:
    assert PHRASES["anew"].startswith("again")
    assert {"mended", "for ever", "as far as", "those of"} <= PHRASES.keys()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("The env is made anew.", 1),
        ("It runs\nAs far\nas it can.", 2),  # over the end of a line, in capitals
        ("    Attributes:\n        rng: Of the shuffling.\n", 2),
    ],
)
def test_hard_words_are_found(text: str, line: int) -> None:
    assert [found for found, _ in check_english.find_problems(text, PHRASES)] == [line]


@pytest.mark.parametrize("text", ["recommended", "A manewver.", "        rng: Generator for shuffling.\n"])
def test_plain_words_are_not(text: str) -> None:
    assert [*check_english.find_problems(text, PHRASES)] == []


def test_code_is_read_by_its_strings_and_comments_alone(tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text('anew = 1\n# made anew\nmessage = f"go {anew} anew"\n', encoding="utf-8")
    found = [first for first, text in check_english.texts_of(path) for _ in check_english.find_problems(text, PHRASES)]
    assert found[0] == 2 and set(found) <= {2, 3}


@pytest.mark.parametrize(
    ("first_line", "num_found"),
    [("Take one update.", 1), ("Take one update, and return the metrics.", 0), ("Map `[B, in]` to `[B, out]`.", 0)],
)
def test_docstrings_say_first_what_is_returned(first_line: str, num_found: int) -> None:
    source = f'def update() -> dict:\n    """{first_line}\n\n    More text, which returns nothing."""\n'
    assert len([*check_english.find_unclear_returns(source)]) == num_found
    assert not [*check_english.find_unclear_returns(source.replace("dict", "None"))]
