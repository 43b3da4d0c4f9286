"""The settings of sampling."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field

from corral.callbacks.config import CallbacksSettings
from corral.core.config import ExplorationConfig, SettingGroup, runs_env_runners
from corral.core.settings import Importable, Need, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from corral.engines.base import Resources
from corral.envs.config import HostConfig
from corral.errors import ConfigError
from corral.metrics.config import ReportingSettings
from corral.modules.config import MultiAgentSettings, RLModuleSettings

if TYPE_CHECKING:
    from corral.envs.seats import Seats
    from corral.episodes.episode import SingleAgentEpisode
    from corral.episodes.multi_agent_episode import MultiAgentEpisode
    from corral.modules.module import Module
    from corral.modules.spec import ModuleSpec
    from corral.transforms.pipeline import Pipeline


def _transforms(value: Any) -> Any:
    from corral.transforms.settings import make_transforms

    return make_transforms(value)


Transforms = Annotated[list[Any], BeforeValidator(_transforms)]
"""Transforms, or what names them."""


@dataclass(kw_only=True)
class EnvRunnersSettings(SettingGroup):
    """Settings of sampling.

    Attributes:
        num_env_runners: Number of runners that the engine runs; 0 embeds one runner in the algorithm.
        num_envs_per_env_runner: Number of sub-envs N in the vector env of each runner; `None` means the algorithm's
            default or, if a factory returns a ready vector env, the number of this vector env.
        rollout_fragment_length: Env steps of each sub-env in one `sample()` call, or `"auto"`. `"auto"` samples the
            train batch in one round, in equal parts per runner; for off-policy algorithms, whose batches come from a
            replay buffer, it is 1. With a number, the train batch of an on-policy algorithm has whole rounds of all
            runners, which may be up to a tenth more steps than asked for.
        vectorization: `"sync"`, `"async"` (one process per sub-env), or `"auto"`: the native vector env of the id if
            there is one with this autoreset mode, N > 1, and there is neither a wrapper, nor a listener of
            `on_sub_environment_created`, nor a callback of an episode that names `sub_environment`; otherwise sync.
        autoreset_mode: When a sub-env is reset whose episode ended: `"next_step"` or `"same_step"`.
        explore: Whether to explore; with False, the most likely or best actions are chosen.
        batch_mode: `"truncate_episodes"` ends a fragment when it is long enough; `"complete_episodes"` returns whole
            episodes only.
        sample_timeout_s: Seconds that a round waits for runners of the engine. The algorithm learns from the fragments
            that have arrived by then. Later fragments count in a later round; no fragment is dropped.
        straggler_factor: Ratio of durations above which a round does not wait for a runner that is slower than the
            others in several rounds; its fragments count when they arrive. `None` always waits for all runners. A
            round of complete episodes waits for all runners too.
        sample_async: Whether runners of the engine sample while the algorithm learns: each has a next request before it
            has answered the one before, and a batch is made of the fragments that arrive first. They were sampled with
            older weights, see `max_lag`. One runner in this process has nobody to wait for, and samples in turn.
        max_lag: Largest lag of a fragment that is learned from with `sample_async`: the updates that the learners have
            made since the weights with which it was sampled. `None` has no limit.
        on_lag: What happens to fragments with a larger lag: `"drop"` drops and counts them; `"wait"` waits, up to
            `sample_timeout_s`, for fragments that the next update would make too old, and learns from them before.
        transforms: Transforms of observations and rewards between the env and the module, in order, such as
            `[FrameStack(4), NormalizeObservations()]`: instances or classes of `corral.Transform`, their names or
            import paths, or dicts with `type` and settings. See docs/transforms.md.
        episode_class: Class of the episodes that callbacks receive, a subclass of `corral.SingleAgentEpisode`, or with
            several agents of `corral.MultiAgentEpisode`, whose `agent_class` is the class of the episodes of agents.
        num_cpus_per_env_runner: CPUs that Ray reserves for each runner.
        num_gpus_per_env_runner: GPUs that Ray reserves for each runner; in processes on this machine the runners share
            the GPUs of the machine.
        custom_resources_per_env_runner: Other resources of a Ray cluster for each runner, by name; refused without Ray.
    """

    num_env_runners: NonNegativeInt = 0
    num_envs_per_env_runner: PositiveInt | None = None
    rollout_fragment_length: PositiveInt | Literal["auto"] = "auto"
    vectorization: Literal["auto", "sync", "async"] = "auto"
    autoreset_mode: Literal["next_step", "same_step"] = "next_step"
    explore: bool = True
    batch_mode: Literal["truncate_episodes", "complete_episodes"] = "truncate_episodes"
    sample_timeout_s: PositiveFloat = 60.0
    straggler_factor: Annotated[float, Field(ge=1)] | None = 3.0
    sample_async: bool = False
    max_lag: NonNegativeInt | None = None
    on_lag: Literal["drop", "wait"] = "drop"
    transforms: Transforms = field(default_factory=list)
    episode_class: Importable = None
    num_cpus_per_env_runner: NonNegativeFloat = 1
    num_gpus_per_env_runner: NonNegativeFloat = 0
    custom_resources_per_env_runner: dict[str, NonNegativeFloat] = field(default_factory=dict)

    NEEDS: ClassVar[Mapping[str, Need]] = {
        **dict.fromkeys(
            ("sample_timeout_s", "straggler_factor"),
            Need("env runners of the engine (num_env_runners)", attrgetter("num_env_runners")),
        ),
        "max_lag": Need(
            "sample_async=True and env runners of the engine (num_env_runners)",
            lambda config: config.sample_async and config.num_env_runners,
        ),
        "on_lag": Need("max_lag", lambda config: config.max_lag is not None),
        **dict.fromkeys(
            ("num_cpus_per_env_runner", "num_gpus_per_env_runner", "custom_resources_per_env_runner"),
            Need("env runners of the engine (num_env_runners, evaluation_num_env_runners)", runs_env_runners),
        ),
    }


class RunnerConfig(
    HostConfig,
    ExplorationConfig,
    ReportingSettings,
    MultiAgentSettings,
    CallbacksSettings,
    RLModuleSettings,
    EnvRunnersSettings,
):
    """What runners read of a config, and what their modules are made from."""

    if TYPE_CHECKING:
        in_evaluation: bool
        gamma: float

    @property
    def all_wrappers(self) -> list[Any]:
        """The wrappers of each sub-env, and one that blanks what transforms leave out and nothing can read."""
        if not any(getattr(each, "left_out", ()) for each in self.transforms):
            return super().all_wrappers
        from corral.envs.unread_parts import unread_wrappers

        return [*super().all_wrappers, *unread_wrappers(self.transforms)]

    def for_runner(self) -> Self:
        """Return a runner's own copy, in which only settings of the env can change; see `EnvRunner.make_env`."""
        other = copy.copy(self)
        other.__dict__["env_config"] = dict(self.env_config)
        return other.freeze(except_group="environment")

    @property
    def default_episode_class(self) -> type[SingleAgentEpisode] | type[MultiAgentEpisode]:
        """The class of episodes for `episode_class=None`, from which all others derive."""
        from corral.episodes.episode import SingleAgentEpisode
        from corral.episodes.multi_agent_episode import MultiAgentEpisode

        return MultiAgentEpisode if self.is_multi_agent else SingleAgentEpisode

    @property
    def default_module_class(self) -> type[Module]:
        """The module class for `module_class=None`; it names the settings of `model_config` too."""
        from corral.modules.module import ActorCritic
        from corral.modules.recurrent import RecurrentActorCritic

        return RecurrentActorCritic if self.asks_for_memory else ActorCritic

    @property
    def asks_for_memory(self) -> bool:
        """Whether `model_config` gives the default module an LSTM or a GRU."""
        return bool(self.model_config.get("use_lstm") or self.model_config.get("use_gru"))

    @property
    def module_settings(self) -> dict[str, Any]:
        """Settings of the algorithm that its modules need, which are added to `model_config`."""
        return {}

    def module_spec(self, observation_space: Any, action_space: Any) -> ModuleSpec:
        """Return the spec of the module for these spaces; `spec.build()` makes a module."""
        from corral.modules.spec import ModuleSpec
        from corral.transforms.pipeline import Pipeline

        pipeline = Pipeline.build(self.transforms, observation_space, action_space, gamma=self.gamma)
        if self.model_config.get("architecture") is not None:
            pipeline = self._with_transforms_of_architecture(pipeline, (observation_space, action_space))
        return ModuleSpec(
            self.module_class or self.default_module_class,
            observation_space,
            action_space,
            {
                **self.model_config,
                **self.module_settings,
                **({} if self.action_masks else {"action_masks": False}),
                **self._action_settings(action_space),
            },
            self.seed or 0,
            pipeline,
        )

    def _with_transforms_of_architecture(self, pipeline: Pipeline | None, spaces: tuple[Any, Any]) -> Pipeline | None:
        """Return the transforms of a module with those that the architecture of its network adds."""
        from corral.transforms.architectures import architecture_transforms
        from corral.transforms.pipeline import Pipeline

        if not hasattr(getattr(self.module_class or self.default_module_class, "CONFIG", None), "architecture"):
            return pipeline  # a module of the user's own, in which the setting may have another meaning
        space = spaces[0] if pipeline is None else pipeline.module_space
        added = architecture_transforms(self.model_config["architecture"], self.transforms, space)
        return Pipeline.build([*self.transforms, *added], *spaces, gamma=self.gamma)

    def _action_settings(self, action_space: Any) -> dict[str, Any]:
        """Return the settings of a module that `normalize_actions` and `clip_actions` stand for."""
        from gymnasium.spaces import Box

        from corral.core.spaces import space_tree
        from corral.core.tree import leaves

        if self.normalize_actions or not any(isinstance(leaf, Box) for leaf in leaves(space_tree(action_space))):
            return {}
        return {"action_bounds": "clip_unscaled" if self.clip_actions else "none"}

    def module_specs(
        self, observation_space: Any, action_space: Any, known: Mapping[str, ModuleSpec] | None = None
    ) -> dict[str, ModuleSpec]:
        """Return the specs of all modules by module id, for the spaces of an env as its vector env has them.

        Modules that no agent is mapped to have the spec in `known`, if there is one.

        Raises:
            ConfigError: The spaces of a module with several agents are not known, or not the spaces of its agents.
        """
        if self.is_multi_agent:
            return self._specs_of_agents(observation_space.seats, known or {})
        return {self.module_ids[0]: self.module_spec(observation_space, action_space)}

    def _specs_of_agents(self, seats: Seats, known: Mapping[str, ModuleSpec]) -> dict[str, ModuleSpec]:
        from corral.runners.mapping import NUM_TRIALS, agents_of_modules, block_of_module

        specs = {}
        for module_id, agents in agents_of_modules(self, seats).items():
            given = self.policies[module_id]
            block = block_of_module(self, seats, module_id, agents)
            observation_space = given.get("observation_space", None if block is None else block.observation_space)
            action_space = given.get("action_space", None if block is None else block.action_space)
            if (observation_space is None or action_space is None) and module_id in known:
                specs[module_id] = known[module_id]
                continue
            if observation_space is None or action_space is None:
                raise ConfigError(
                    f"multi_agent: no agent was mapped to module {module_id!r} in {NUM_TRIALS} trials, and the agents "
                    f"have several kinds of spaces: give its spaces, policies={{{module_id!r}: {{'observation_space': "
                    "..., 'action_space': ...}}."
                )
            specs[module_id] = self._spec_of_module(module_id, observation_space, action_space)
        return specs

    def _spec_of_module(self, module_id: str, observation_space: Any, action_space: Any) -> ModuleSpec:
        """Return the spec of one of several modules, with a seed of its own; else modules begin alike."""
        from corral.core.seeding import module_seed
        from corral.core.spaces import module_observation_space

        spec = self.for_module(module_id).module_spec(module_observation_space(observation_space), action_space)
        return dataclasses.replace(spec, seed=module_seed(self.seed, module_id))

    def module_specs_of_spaces(self, spaces: Mapping[str, tuple[Any, Any]]) -> dict[str, ModuleSpec]:
        """Return the specs of all modules by module id, without an env.

        Args:
            spaces: Observation space and action space by module id. Spaces in `policies` come first.

        Raises:
            ConfigError: The spaces of a module are not known.
        """
        from corral.core.spaces import module_observation_space

        specs = {}
        for module_id in self.module_ids:
            given = self.policies.get(module_id, {})
            known = spaces.get(module_id, (None, None))
            observation_space, action_space = (
                given.get(name) or found
                for name, found in zip(("observation_space", "action_space"), known, strict=True)
            )
            if observation_space is None or action_space is None:
                where = f"multi_agent(policies={{{module_id!r}: {{'observation_space': ..., 'action_space': ...}}}})"
                raise ConfigError(
                    "the spaces of the "
                    + (f"module {module_id!r}" if self.is_multi_agent else "module")
                    + " are not known, because the data does not hold them: give an env, or "
                    + (where if self.is_multi_agent else "environment(observation_space=..., action_space=...)")
                    + "."
                )
            if self.is_multi_agent:
                specs[module_id] = self._spec_of_module(module_id, observation_space, action_space)
            else:
                specs[module_id] = self.module_spec(module_observation_space(observation_space), action_space)
        return specs

    @property
    def runner_resources(self) -> Resources:
        """The resources that each runner needs."""
        return Resources(
            self.num_cpus_per_env_runner, self.num_gpus_per_env_runner, self.custom_resources_per_env_runner
        )
