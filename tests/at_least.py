"""Comparisons that nothing passes: what a test looks at must be there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def at_least(least: int, items: Iterable[T]) -> list[T]:
    """Return items as a list, of which there must be so many."""
    found = [*items]
    assert len(found) >= least, f"only {len(found)} of {least} are there"
    return found


def all_of(items: Iterable[object], least: int = 1) -> bool:
    """Return whether all items are true, of which there must be so many."""
    return all(at_least(least, items))
