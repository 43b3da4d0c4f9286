"""Settings of replay buffers, given with `.training(replay_buffer_config={...})`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from corral.core.schedules import Schedule, validate_schedule
from corral.errors import ConfigError, nearest
from corral.replay.buffer import ReplayBuffer
from corral.replay.frames import MAX_FRAMES
from corral.replay.prioritized import PrioritizedReplayBuffer

PRIORITIZED_SETTINGS = ("alpha", "beta", "epsilon")


@dataclass(kw_only=True)
class ReplayConfig:
    """Settings of a replay buffer.

    Attributes:
        type: `"uniform"`, or `"prioritized"` (Schaul et al. 2016, arXiv:1511.05952).
        capacity: Env steps to keep.
        alpha: Exponent of the priorities, for prioritised replay; 0 draws uniformly.
        beta: Exponent of the importance weights, for prioritised replay, from 0 to 1; a number, or a schedule
            `[[step, value], ...]` over env steps.
        epsilon: Number added to absolute TD errors, for prioritised replay.
        frame_stack: Length of the stacks of frames that observations are; 1 if they are no stacks. Only the newest
            frame of each stack is stored.
        directory: Directory of the files that hold the columns, mapped into memory; `None` keeps them in memory.
    """

    type: Literal["uniform", "prioritized"] = "uniform"
    capacity: int = 50_000
    alpha: float = 0.6
    beta: Schedule = 0.4
    epsilon: float = 1e-6
    frame_stack: int = 1
    directory: Path | None = None

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> ReplayConfig:
        """Check names and values.

        Raises:
            ConfigError: A name is unknown, a value is out of range, or a setting of prioritised replay is given without
                it.
        """
        known = {field.name for field in fields(cls)}
        for name in settings:
            if name not in known:
                raise ConfigError(
                    f"replay_buffer_config: unknown setting {name!r}. {nearest(name, known)} "
                    f"It takes {', '.join(field.name for field in fields(cls))}."
                )
        try:
            config: ReplayConfig = TypeAdapter(cls).validate_python(dict(settings))
        except ValidationError as error:
            line = error.errors()[0]
            where = ".".join(map(str, line["loc"]))
            raise ConfigError(f"replay_buffer_config: {where}={line['input']!r}: {line['msg']}.") from None
        given = [name for name in PRIORITIZED_SETTINGS if name in settings]
        if given and config.type != "prioritized":
            raise ConfigError(
                f"replay_buffer_config: {given[0]}={settings[given[0]]!r} contradicts type={config.type!r}, which "
                f"draws evenly: set type='prioritized', or leave {given[0]} out."
            )
        config.validate()
        return config

    def validate(self, *, batch_size: int | None = None, batch_size_name: str = "batch_size") -> None:
        """Check values.

        Args:
            batch_size: Batch size of the samples that will be drawn, if known.
            batch_size_name: Name of the setting of the batch size, for the message.

        Raises:
            ConfigError: A value is out of range, or the capacity is less than the batch size.
        """
        for name, in_range, bounds in (
            ("capacity", self.capacity >= 1, "at least 1"),
            ("frame_stack", 1 <= self.frame_stack <= MAX_FRAMES, f"from 1 to {MAX_FRAMES}"),
            ("alpha", 0 <= self.alpha < math.inf, "finite, and at least 0"),
            ("epsilon", 0 < self.epsilon < math.inf, "finite, and more than 0"),
        ):
            if not in_range:
                raise ConfigError(f"replay_buffer_config: {name}={getattr(self, name)} must be {bounds}.")
        validate_schedule("replay_buffer_config: beta", self.beta)
        values = [self.beta] if isinstance(self.beta, int | float) else [value for _, value in self.beta]
        if max(values) > 1:
            raise ConfigError(f"replay_buffer_config: beta={self.beta}: values must be from 0 to 1.")
        if batch_size is not None and self.capacity < batch_size:
            raise ConfigError(
                f"replay_buffer_config: capacity={self.capacity} is less than {batch_size_name}={batch_size}: a buffer "
                f"must hold at least one batch. Raise capacity or lower {batch_size_name}."
            )


def make_replay_buffer(config: ReplayConfig, *, num_runners: int, seed: int | None) -> ReplayBuffer:
    """Return the buffer that a config describes.

    Args:
        config: The settings; `beta` is not used here but passed to each `sample`.
        num_runners: Number of runners that add rollouts.
        seed: Seed of the draws.

    Raises:
        ConfigError: A value is out of range, or the directory does not exist.
    """
    config.validate()
    if config.type == "prioritized":
        return PrioritizedReplayBuffer(
            config.capacity,
            alpha=config.alpha,
            epsilon=config.epsilon,
            num_runners=num_runners,
            frame_stack=config.frame_stack,
            directory=config.directory,
            seed=seed,
        )
    return ReplayBuffer(
        config.capacity,
        num_runners=num_runners,
        frame_stack=config.frame_stack,
        directory=config.directory,
        seed=seed,
    )
