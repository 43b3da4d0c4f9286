"""Fixtures of the tests of RLlib's names."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from rllib_scripts import Run, run_script


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a script text, or a list of arguments, in a process of its own: the finder is global."""
    return partial(run_script, tmp_path)


# The faster tests run without Ray, which other tests have; `make slow` runs both.
@pytest.fixture(
    params=[pytest.param(True, id="with_ray", marks=pytest.mark.slow), pytest.param(False, id="without_ray")]
)
def run_in_both(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Run scripts as `run` does, in a test that runs twice: with Ray, and as if it were not installed."""
    if request.param:
        pytest.importorskip("ray")
    return partial(run_script, tmp_path, with_ray=request.param)
