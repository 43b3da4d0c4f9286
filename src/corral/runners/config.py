"""The settings of sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, Self

from pydantic import BeforeValidator, Field

from corral.core.config import RUNS_ENV_RUNNERS, SAMPLES, ExplorationConfig
from corral.core.settings import Importable, Need, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from corral.engines.base import Resources
from corral.envs.config import HostConfig

if TYPE_CHECKING:
    from corral.data.episodes.episode import SingleAgentEpisode
    from corral.data.episodes.multi_agent_episode import MultiAgentEpisode
    from corral.modules.spec import ModuleSpec


def _transforms(value: Any) -> Any:
    from corral.modules.transforms.settings import make_transforms

    return make_transforms(value)


Transforms = Annotated[list[Any], BeforeValidator(_transforms)]
"""Transforms, or what names them."""


HAS_RUNNERS = Need("env runners of the engine (num_env_runners)", attrgetter("num_env_runners"))
SAMPLES_ASYNC = Need(
    "sample_async=True and env runners of the engine (num_env_runners)",
    lambda config: config.sample_async and config.num_env_runners,
)


@dataclass(kw_only=True)
class EnvRunnersSettings:
    """Settings of sampling.

    Attributes:
        num_env_runners: Number of runners that the engine runs; 0 embeds one runner in the algorithm.
        num_envs_per_env_runner: Number of sub-envs N of each runner; `None` means the algorithm's default, or the
            number of a ready vector env.
        rollout_fragment_length: Env steps of each sub-env in one `sample()` call. `"auto"` samples the train batch in
            one round; for off-policy algorithms it is 1. With a number, the train batch of an on-policy algorithm has
            whole rounds of all runners.
        vectorization: `"sync"`, `"async"` (one process per sub-env), or `"auto"`: the native vector env of the id where
            possible, otherwise sync; see docs/environments.md.
        autoreset_mode: Whether a sub-env whose episode ended is reset in the next step or in the same step.
        explore: Whether to explore; otherwise the most likely or best actions are chosen.
        batch_mode: Whether a fragment ends when it is long enough, or holds whole episodes only.
        sample_timeout_s: Seconds that a round waits for runners of the engine. Fragments that arrive later count in a
            later round.
        straggler_factor: How many times slower than the others a runner may be before rounds do not wait for it; its
            fragments count when they arrive. `None` waits for all runners, and so does a round of complete episodes.
        sample_async: Whether runners of the engine sample while the algorithm learns; see
            docs/asynchronous-sampling.md.
        max_lag: Largest lag, in updates of the learners, of a fragment that is learned from with `sample_async`; `None`
            has no limit.
        on_lag: What happens to fragments with a larger lag: `"drop"` drops and counts them; before an update that would
            make them too old, `"wait"` waits for them, up to `sample_timeout_s`.
        transforms: Transforms of observations and rewards between the env and the module, in order, such as
            `[FrameStack(4), NormalizeObservations()]`; see docs/transforms.md.
        episode_class: Class of the episodes that callbacks receive: a subclass of `corral.SingleAgentEpisode`, or with
            several agents of `corral.MultiAgentEpisode`.
        num_cpus_per_env_runner: CPUs that Ray reserves for each runner.
        num_gpus_per_env_runner: GPUs that Ray reserves for each runner; processes share the GPUs of the machine.
        custom_resources_per_env_runner: Other resources of a Ray cluster for each runner, by name.
    """

    num_env_runners: Annotated[NonNegativeInt, SAMPLES] = 0
    num_envs_per_env_runner: PositiveInt | None = None
    rollout_fragment_length: Annotated[PositiveInt | Literal["auto"], SAMPLES] = "auto"
    vectorization: Literal["auto", "sync", "async"] = "auto"
    autoreset_mode: Literal["next_step", "same_step"] = "next_step"
    explore: bool = True
    batch_mode: Annotated[Literal["truncate_episodes", "complete_episodes"], SAMPLES] = "truncate_episodes"
    sample_timeout_s: Annotated[PositiveFloat, SAMPLES, HAS_RUNNERS] = 60.0
    straggler_factor: Annotated[Annotated[float, Field(ge=1)] | None, SAMPLES, HAS_RUNNERS] = 3.0
    sample_async: Annotated[bool, SAMPLES] = False
    max_lag: Annotated[NonNegativeInt | None, SAMPLES, SAMPLES_ASYNC] = None
    on_lag: Annotated[Literal["drop", "wait"], SAMPLES, Need("max_lag", lambda config: config.max_lag is not None)] = (
        "drop"
    )
    transforms: Transforms = field(default_factory=list)
    episode_class: Importable = None
    num_cpus_per_env_runner: Annotated[NonNegativeFloat, RUNS_ENV_RUNNERS] = 1
    num_gpus_per_env_runner: Annotated[NonNegativeFloat, RUNS_ENV_RUNNERS] = 0
    custom_resources_per_env_runner: Annotated[dict[str, NonNegativeFloat], RUNS_ENV_RUNNERS] = field(
        default_factory=dict
    )

    DEFAULT_NUM_ENVS: ClassVar[int] = 1
    """The algorithm's default of the number of sub-envs."""

    @property
    def runner_resources(self) -> Resources:
        """The resources that each runner needs."""
        return Resources(
            self.num_cpus_per_env_runner, self.num_gpus_per_env_runner, self.custom_resources_per_env_runner
        )


class RunnerConfig(HostConfig, ExplorationConfig, Protocol):
    """What runners read of a config, and what their modules are made from."""

    batch_mode: Literal["truncate_episodes", "complete_episodes"]
    explore: bool
    sample_timeout_s: float
    straggler_factor: float | None
    max_lag: int | None
    on_lag: Literal["drop", "wait"]
    episode_class: Any
    restart_failed_env_runners: bool
    ignore_env_runner_failures: bool
    max_num_env_runner_restarts: int
    num_consecutive_env_runner_failures_tolerance: int
    delay_between_env_runner_restarts_s: float
    metrics_num_episodes_for_smoothing: int
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"]
    policies: dict[str, dict[str, Any]]
    policy_mapping_fn: Any
    critic_sees: Any

    @property
    def is_multi_agent(self) -> bool:
        """Whether the env has several agents."""

    @property
    def module_ids(self) -> list[str]:
        """Ids of all modules."""

    @property
    def default_episode_class(self) -> type[SingleAgentEpisode] | type[MultiAgentEpisode]:
        """The class of episodes for `episode_class=None`."""

    @property
    def runner_resources(self) -> Resources:
        """The resources that each runner needs."""

    def for_module(self, module_id: str) -> Self:
        """Return a frozen copy with the settings of one module in place of those that all modules have in common."""

    def for_runner(self) -> Self:
        """Return a runner's own copy, in which only settings of the env can change."""

    def module_specs_of_spaces(self, spaces: Mapping[str, tuple[Any, Any]]) -> dict[str, ModuleSpec]:
        """Return the specs of all modules by module id, without an env."""

    def module_specs(
        self, observation_space: Any, action_space: Any, known: Mapping[str, ModuleSpec] | None = None
    ) -> dict[str, ModuleSpec]:
        """Return the specs of all modules by module id, for the spaces of an env as its vector env has them."""
