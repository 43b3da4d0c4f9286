"""Runners that are closed when their test ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from handmade import MakeRunner

from corral import PPOConfig
from corral.env.runner import EnvRunner
from corral.testing import CountingEnv


@pytest.fixture
def make_runner() -> Iterator[MakeRunner]:
    """Make runners of a `CountingEnv`, or of what `env` says; other settings go by their plain names."""
    made: list[EnvRunner] = []

    def make(env: Any = CountingEnv, *, num_envs: int | None = 1, worker_index: int = 0, **settings: Any) -> EnvRunner:
        events = {name: settings.pop(name) for name in [*settings] if name.startswith("on_")}
        classes = {"callbacks_class": settings.pop("callbacks_class")} if "callbacks_class" in settings else {}
        # The check at start would use up the first episode of sub-env 0.
        settings = {"seed": 0, "disable_env_checking": env is CountingEnv, **settings}
        config = PPOConfig().copy(env=env, num_envs_per_env_runner=num_envs, **settings)
        runner = EnvRunner(config.callbacks(**classes, **events).freeze(), worker_index)
        made.append(runner)
        return runner

    yield make
    for runner in made:
        runner.stop()
