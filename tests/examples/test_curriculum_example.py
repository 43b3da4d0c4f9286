"""The example in examples/curriculum/: with the curriculum PPO crosses the corridor, and without it hardly ever."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

import example_files

SOLVED = 0.9


def test_the_curriculum_crosses_the_longest_corridor() -> None:
    reached, arrivals = example_files.load("curriculum/growing_corridor.py").train(seed=0, curriculum=True)
    assert arrivals >= SOLVED
    middle = [cells for _, cells in reached[4:12]]
    assert min(middle) > 2 and max(middle) < 24  # it learns shorter ones first


@pytest.mark.slow
def test_five_of_five_seeds(tmp_path: Path) -> None:
    arrivals = example_files.load("curriculum/growing_corridor.py").main(seeds=5, path=tmp_path / "plot.svg")
    assert min(arrivals[True]) >= SOLVED
    assert sorted(arrivals[False])[:4] == [0.0] * 4  # one seed may be led there by the first values, see the example
    lines = ElementTree.parse(tmp_path / "plot.svg").findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 10
