"""Settings of replay buffers: what is taken, and what is refused with what message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from streams import Stream

from corral.data.replay import PrioritizedReplayBuffer, ReplayBuffer, ReplayConfig, make_replay_buffer
from corral.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"capacit": 1}, r"unknown setting 'capacit'. Did you mean 'capacity'\?.*type, capacity, alpha"),
        ({"capacity": 0}, "capacity=0 must be at least 1"),
        ({"capacity": "many"}, "capacity='many'"),
        ({"type": "best"}, "type='best'.*'uniform', 'prioritized' or 'hindsight'"),
        ({"alpha": 0.5}, r"alpha=0.5 contradicts type='uniform'.*set type='prioritized'"),
        ({"type": "uniform", "beta": 0.4}, "beta=0.4 contradicts type='uniform'"),
        ({"epsilon": 1e-3}, "epsilon=0.001 contradicts"),
        ({"type": "prioritized", "alpha": -1}, "alpha=-1 must be at least 0"),
        ({"type": "prioritized", "alpha": float("nan")}, "alpha=nan"),
        ({"type": "prioritized", "epsilon": 0}, "epsilon=0 must be positive"),
        ({"type": "prioritized", "beta": 1.1}, r"beta=1.1: values must be finite and in \[0, 1\]"),
        ({"type": "prioritized", "beta": -0.1}, r"beta=-0.1: values must be finite and in \[0, 1\]"),
        (
            {"type": "prioritized", "beta": [[0, 0.4], [10, 2]]},
            r"values must be finite and in \[0, 1\], got \[0.4, 2.0\]",
        ),
        ({"type": "prioritized", "beta": [[5, 0.4]]}, "first step of a schedule must be 0"),
        ({"frame_stack": 0}, r"frame_stack=0 must be in \[1, 255\]"),
        ({"frame_stack": 256}, r"frame_stack=256 must be in \[1, 255\]"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReplayConfig.parse(settings)


def test_a_capacity_below_the_batch_is_refused() -> None:
    config = ReplayConfig.parse({"capacity": 31})
    config.check_capacity(31, "train_batch_size")
    with pytest.raises(ConfigError, match="capacity=31 is less than train_batch_size=32"):
        config.check_capacity(32, "train_batch_size")


def test_makes_the_buffer_of_its_type(tmp_path: Path) -> None:
    uniform = make_replay_buffer(ReplayConfig.parse({}), num_runners=2, seed=0)
    assert type(uniform) is ReplayBuffer
    assert (uniform.capacity, uniform.num_runners, uniform.frame_stack) == (50_000, 2, 1)
    config = ReplayConfig.parse(
        {
            "type": "prioritized",
            "capacity": 7,
            "alpha": 1,
            "epsilon": 0.5,
            "beta": [[0, 0.4], [100, 1]],
            "frame_stack": 4,
            "directory": str(tmp_path),
        }
    )
    assert config.beta == [(0.0, 0.4), (100.0, 1.0)]
    buffer = make_replay_buffer(config, num_runners=1, seed=0)
    assert isinstance(buffer, PrioritizedReplayBuffer)
    assert (buffer.capacity, buffer.alpha, buffer.epsilon, buffer.frame_stack) == (7, 1.0, 0.5, 4)
    with pytest.raises(ConfigError, match="replay_buffer_config: alpha=-1 must be at least 0"):
        make_replay_buffer(ReplayConfig(type="prioritized", alpha=-1), num_runners=1, seed=0)


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_a_buffer_of_each_type_has_the_directory_and_the_seed_that_it_is_given(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        make_replay_buffer(ReplayConfig(type=kind, directory=tmp_path / "nowhere"), num_runners=1, seed=0)  # type: ignore[arg-type]
    batches = []
    for seed in (3, 3, 4):
        buffer = make_replay_buffer(ReplayConfig(type=kind), num_runners=2, seed=seed)  # type: ignore[arg-type]
        for runner in range(2):
            buffer.add(Stream(2, worker_index=runner, end_rate=0).next(20))
        assert len(buffer) == 80  # the runners do not overwrite each other's steps
        batches.append(buffer.sample(8)["indices"].tolist())
    assert batches[0] == batches[1] != batches[2]
