"""Recorded data that an algorithm writes: what it samples for training, or episodes of its policy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from corral.core.tree import Tree
from corral.data.offline.parquet import Description
from corral.data.offline.recorder import Recorder
from corral.envs.vector import env_name
from corral.errors import ConfigError
from corral.runners.requests import SampleRequest

if TYPE_CHECKING:
    from corral.algorithms.algorithm import Algorithm

_EPISODES_AT_ONCE = 100


@dataclass(frozen=True)
class RecordingSummary:
    """What was recorded.

    Attributes:
        num_episodes: Episodes; with several agents the episodes of agents.
        num_steps: Their steps.
        episode_return_mean: Mean of the sums of their rewards.
    """

    num_episodes: int
    num_steps: int
    episode_return_mean: float

    def __str__(self) -> str:
        return f"{self.num_episodes:,} episodes, {self.num_steps:,} steps, mean return {self.episode_return_mean:.2f}"


def describe_recording(algorithm: Algorithm) -> tuple[Description, dict[str, Callable[[Any], Tree]]]:
    """Return the description of recorded episodes, and by module id what converts module actions."""
    specs = algorithm.env_runner_group.module_specs
    spaces = {module_id: (spec.observation_space, spec.action_space) for module_id, spec in specs.items()}
    env = env_name(algorithm.config.env)
    to_env: dict[str, Callable[[Any], Tree]] = {
        module_id: record.module.distribution.to_env for module_id, record in algorithm.modules.items()
    }
    return Description(spaces, env, algorithm.config.algo_name), to_env


def make_recorder(algorithm: Algorithm, output: str) -> Recorder:
    """Return the recorder of what an algorithm samples for training."""
    config = algorithm.config
    return Recorder(
        output,
        *describe_recording(algorithm),
        max_rows_per_file=config.output_max_rows_per_file,
        with_infos=config.output_infos,
    )


def record_episodes(
    algorithm: Algorithm,
    output: str,
    *,
    num_episodes: int,
    explore: bool,
    seed: int | None,
    with_infos: bool,
    max_rows_per_file: int,
) -> RecordingSummary:
    """Play episodes, write them, and return a summary; see `Algorithm.record`."""
    if num_episodes < 1:
        raise ConfigError(f"record: num_episodes={num_episodes} must be at least 1.")
    if algorithm.config.env is None and "env" not in algorithm.config.evaluation_config:
        raise ConfigError(
            "record: episodes are played in an env, and none was given: call .environment(...), or give --env."
        )
    recorder = Recorder(
        output,
        *describe_recording(algorithm),
        max_rows_per_file=max_rows_per_file,
        with_infos=with_infos,
        with_logp=explore,  # the column is of the policy's distribution, which does not act when nothing explores
    )
    left = num_episodes
    with algorithm.evaluator.begun_again(seed), closing(recorder):  # which writes what is complete, after Ctrl-C, too
        while left:
            request = SampleRequest(
                num_episodes=min(left, _EPISODES_AT_ONCE),
                explore=explore,
                timestep=algorithm.num_env_steps_sampled_lifetime,
                with_infos=with_infos,
            )
            recorder.add(algorithm.evaluator.sample(request))
            left -= request.num_wanted
    return RecordingSummary(recorder.num_episodes_recorded, recorder.num_steps_recorded, recorder.episode_return_mean)
