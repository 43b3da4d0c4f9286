"""Settings of replay buffers, given with `.training(replay_buffer_config={...})`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field

from corral.core.schedules import Schedule
from corral.core.settings import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ScheduleBounds,
    check_values,
    parse_settings,
)
from corral.data.replay.buffer import ReplayBuffer
from corral.data.replay.frames import MAX_FRAMES
from corral.data.replay.prioritized import PrioritizedReplayBuffer
from corral.errors import ConfigError

if TYPE_CHECKING:
    from corral.data.replay.hindsight import GoalFunctions

SETTINGS_OF_TYPES = {"prioritized": ("alpha", "beta", "epsilon"), "hindsight": ("goal_strategy", "num_goals")}


@dataclass(kw_only=True)
class ReplayConfig:
    """Settings of a replay buffer.

    Attributes:
        type: How samples are drawn: `"uniform"`; `"prioritized"` (Schaul et al. 2016, arXiv:1511.05952); or
            `"hindsight"`, with other goals (Andrychowicz et al. 2017, arXiv:1707.01495), for envs whose observations
            are a Dict of `observation`, `achieved_goal` and `desired_goal`.
        capacity: Number of env steps that the buffer keeps.
        alpha: Exponent of the priorities, for prioritised replay; 0 draws uniformly.
        beta: Exponent of the importance weights, for prioritised replay: 1 corrects the bias completely; a number, or a
            schedule `[[step, value], ...]` over env steps.
        epsilon: Constant that is added to absolute TD errors, for prioritised replay.
        goal_strategy: From which steps of the episode other goals come, for hindsight replay: `"future"`, the step
            itself or a later one; `"final"`, the last one; `"episode"`, any.
        num_goals: Steps with another goal for each step with its own, for hindsight replay.
        frame_stack: Number of frames stacked in an observation, of which only the newest is stored; 1 for no stacks.
        directory: Directory for memory-mapped files of the columns; `None` keeps the columns in memory.
    """

    type: Literal["uniform", "prioritized", "hindsight"] = "uniform"
    capacity: PositiveInt = 50_000
    alpha: NonNegativeFloat = 0.6
    beta: Annotated[Schedule, AfterValidator(ScheduleBounds(0.0, 1.0))] = 0.4
    epsilon: PositiveFloat = 1e-6
    goal_strategy: Literal["future", "final", "episode"] = "future"
    num_goals: PositiveFloat = 4.0
    frame_stack: Annotated[int, Field(ge=1, le=MAX_FRAMES)] = 1
    directory: Path | None = None

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> ReplayConfig:
        """Return the config with these settings, after checking names and values.

        Raises:
            ConfigError: A name is unknown, a value is out of bounds, or a setting of another type is given.
        """
        kind = settings.get("type")
        if isinstance(kind, type) or (isinstance(kind, str) and ":" in kind):
            raise ConfigError(
                f"replay_buffer_config: type={kind!r} must be 'uniform', 'prioritized' or 'hindsight'. For a class "
                "of your own, override make_replay_buffer in a subclass of the algorithm: see docs/replay.md."
            )
        config = parse_settings(cls, settings, "replay_buffer_config")
        for kind, names in SETTINGS_OF_TYPES.items():
            given = [name for name in names if name in settings]
            if given and config.type != kind:
                raise ConfigError(
                    f"replay_buffer_config: {given[0]}={settings[given[0]]!r} contradicts type={config.type!r}: set "
                    f"type={kind!r}, or leave {given[0]} out."
                )
        return config

    def check_capacity(self, batch_size: int, batch_size_name: str) -> None:
        """Check that the buffer has room for a batch.

        Args:
            batch_size: Size of the samples that will be drawn, in env steps.
            batch_size_name: The setting's name, for the message.

        Raises:
            ConfigError: The capacity is less than a batch.
        """
        if self.capacity < batch_size:
            raise ConfigError(
                f"replay_buffer_config: capacity={self.capacity} is less than {batch_size_name}={batch_size}: a buffer "
                f"must hold at least one batch. Raise capacity or lower {batch_size_name}."
            )


def make_replay_buffer(
    config: ReplayConfig, *, num_runners: int, seed: int | None, find_goals: Callable[[], GoalFunctions] | None = None
) -> ReplayBuffer:
    """Return the buffer that a config describes.

    Args:
        config: The settings; `beta` is an argument of `sample`.
        num_runners: Number of runners that add rollouts.
        seed: Seed of the draws.
        find_goals: Returns what the env computes for other goals, which hindsight replay needs.

    Raises:
        ConfigError: A value is out of range, or the directory does not exist.
    """
    check_values(config, "replay_buffer_config")
    settings: dict[str, Any] = {"num_runners": num_runners, "directory": config.directory, "seed": seed}
    if config.type == "hindsight":
        from corral.data.replay.hindsight import HindsightReplayBuffer

        assert find_goals is not None
        if config.frame_stack > 1:
            raise ConfigError(
                "replay_buffer_config: type='hindsight' stores whole observations, and these are stacks of "
                f"{config.frame_stack} frames: leave out frame_stack and the transform FrameStack, or use another type."
            )
        settings |= {"goals": find_goals(), "strategy": config.goal_strategy, "num_goals": config.num_goals}
        return HindsightReplayBuffer(config.capacity, **settings)
    settings["frame_stack"] = config.frame_stack
    if config.type == "prioritized":
        return PrioritizedReplayBuffer(config.capacity, alpha=config.alpha, epsilon=config.epsilon, **settings)
    return ReplayBuffer(config.capacity, **settings)
