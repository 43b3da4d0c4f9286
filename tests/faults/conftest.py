"""Engines, and a directory that faulty envs write to."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> str:
    """The engine's name, with a Ray runtime there if it is Ray."""
    if request.param == "ray":
        request.getfixturevalue("ray_runtime")
    name: str = request.param
    return name


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Where the envs leave their record."""
    directory = tmp_path / "record"
    directory.mkdir()
    return directory
