"""The three forms of coordination: everything in this process, callers in processes of their own, and Ray."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator

import pytest
from forms import IN_WORKERS, Form, InWorkers, register_by_value

from corral import coordination
from corral.errors import CoordinationError


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the Ray that another test of this session may have started."""
    if "ray" in sys.modules:
        monkeypatch.setattr("ray.is_initialized", lambda: False)


@pytest.fixture(params=["local", "process", pytest.param("ray", marks=pytest.mark.xdist_group("ray"))])
def form(request: pytest.FixtureRequest) -> Form:
    request.getfixturevalue("ray_runtime" if request.param == "ray" else "without_ray")
    register_by_value(request.module)
    name: Form = request.param
    return name


@pytest.fixture
def in_workers(form: Form) -> InWorkers:
    return IN_WORKERS[form]


@pytest.fixture
def name() -> Iterator[str]:
    """Give a name that no actor has; at the end its actor is removed, and those of names that begin with it."""
    unique = f"actor-{uuid.uuid4().hex[:8]}"
    yield unique
    for suffix in ("", "-2"):
        try:
            coordination.remove(unique + suffix)
        except CoordinationError:
            pass
