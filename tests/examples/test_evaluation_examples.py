"""The examples in examples/evaluation/ do what they say."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import example_files

CORRIDOR = example_files.EXAMPLES / "evaluation" / "custom_evaluation.py"


@pytest.mark.slow
@pytest.mark.xdist_group("corridor")
@pytest.mark.parametrize("custom", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_corridor_prints_what_it_evaluates(custom: bool) -> None:
    options = [] if custom else ["--no-custom-eval"]
    done = subprocess.run(
        [sys.executable, str(CORRIDOR), *options], capture_output=True, text=True, timeout=300, check=True
    )
    lines = done.stdout.splitlines()
    announced = [
        *("Update corridor length to 4", "Update corridor length to 7"),
        *(f"Custom evaluation round {i}" for i in range(1, 5)),
    ]
    assert lines[: -7 if custom else -6] == (announced if custom else [])
    found = {name: float(value) for name, value in re.findall(r"^  (\w+): (\S+)$", done.stdout, re.MULTILINE)}
    assert found["num_episodes"] == (40 if custom else 10)
    assert found.get("foo") == (1 if custom else None)
    assert 0.0 <= found["episode_return_min"] <= found["episode_return_mean"] <= found["episode_return_max"] <= 1.0
    # Whoever walks straight needs as many steps as the corridor is long.
    assert found["episode_len_mean"] >= (5.5 if custom else 10)
