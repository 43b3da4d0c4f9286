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
