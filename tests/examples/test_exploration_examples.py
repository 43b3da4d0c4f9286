"""The examples in examples/exploration/ do what they say."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import example_files


def test_every_example_has_a_test() -> None:
    tested = set(re.findall(r'load\("exploration/(\w+)\.py"\)', Path(__file__).read_text(encoding="utf-8")))
    assert {path.stem for path in (example_files.EXAMPLES / "exploration").glob("*.py")} == tested


@pytest.mark.slow
def test_own_exploration(capsys: pytest.CaptureFixture[str]) -> None:
    example = example_files.load("exploration/own_exploration.py")
    returned, goes_right = example.main()
    assert returned > 0.6
    assert goes_right > 0.8
    assert capsys.readouterr().out.startswith(f"mean return {returned:.2f} while exploring")


@pytest.mark.slow
def test_repeated_random_actions_lead_further_than_single_ones() -> None:
    example = example_files.load("exploration/own_exploration.py")
    plain = {"type": "EpsilonGreedy", "epsilon_schedule": 0.1}
    single, repeated = ([example.main(kind, seed=seed)[1] for seed in range(3)] for kind in (plain, None))
    assert np.mean(single) < 0.75 and min(repeated) > 0.9
