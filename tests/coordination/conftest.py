"""The three forms of coordination: everything in this process, callers in processes of their own, and Ray."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from forms import IN_WORKERS, Form, InWorkers, register_by_value

from corral import coordination
from corral.errors import CoordinationError


@pytest.fixture(autouse=True)
def _as_users_have_them(new_interpreters: None) -> None:
    """Start new interpreters in each test of this folder: they learn of coordination where they begin."""


@pytest.fixture(params=["local", "process", pytest.param("ray", marks=pytest.mark.xdist_group("ray"))])
def form(request: pytest.FixtureRequest) -> Form:
    if request.param == "ray":
        request.getfixturevalue("ray_runtime")
    register_by_value(request.module)
    name: Form = request.param
    return name


@pytest.fixture
def in_workers(form: Form) -> InWorkers:
    return IN_WORKERS[form]


@pytest.fixture
def name() -> Iterator[str]:
    """Give a name that no actor has; at the end all actors are removed whose names begin with it."""
    unique = f"actor-{uuid.uuid4().hex[:8]}"
    yield unique
    for suffix in ("", "-2"):
        try:
            coordination.remove(unique + suffix)
        except CoordinationError:
            pass
