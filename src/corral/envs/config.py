"""The settings of the env."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, Protocol

from pydantic import BeforeValidator

from corral.core.config import SAMPLES, Config
from corral.core.settings import Importable, Need


def _as_space(value: Any) -> Any:
    if not (isinstance(value, dict) and "type" in value):  # a `Dict` space is a `Mapping` too
        return value
    from corral.core.space_descriptions import described_space  # here: it imports gymnasium

    return described_space(value)


NO_ENV = Need("recorded data and env=None: an env has spaces", lambda config: config.env is None)


@dataclass(kw_only=True)
class EnvironmentSettings:
    """Settings of the env.

    Attributes:
        env: A Gymnasium id, a class, a factory `fn(env_config)`, or an import path `"package.module:Name"`.
        observation_space: Space of one observation, for an algorithm that learns from recorded data without an env.
        action_space: Space of one action, for such an algorithm.
        env_config: Settings that the env receives; see docs/environments.md.
        wrappers: Callables `fn(env) -> env`, applied to each sub-env; the first one is the innermost.
        env_task_fn: Function `fn(train_results, task_settable_env, env_ctx)` that returns the task of a sub-env, called
            after each iteration in its process; see docs/curricula.md.
        env_reset_fn: Function called before each reset of a sub-env, in its process, which returns a dict with any of
            `seed`, `options` and `task`; see docs/curricula.md. Sub-envs are then stepped one by one.
        disable_env_checking: Whether to skip the check of spaces, reset and first step at the start.
        action_masks: Where the masks of legal actions are: in Dict observations under `action_mask` (True), in infos
            under `action_mask`, in the method `action_masks()` of the env, or nowhere (False).
        normalize_actions: Whether modules and episodes have Box actions in [-1, 1], which are clipped and mapped to
            finite bounds for the env. Otherwise they have the units of the env everywhere.
        clip_actions: Whether Box actions that are not normalised are clipped to the bounds for the env.
    """

    env: Any = None
    observation_space: Annotated[Annotated[Any, BeforeValidator(_as_space)], NO_ENV] = None
    action_space: Annotated[Annotated[Any, BeforeValidator(_as_space)], NO_ENV] = None
    env_config: dict[str, Any] = field(default_factory=dict)
    wrappers: list[Importable] = field(default_factory=list)
    env_task_fn: Annotated[Importable, SAMPLES] = None
    env_reset_fn: Importable = None
    disable_env_checking: bool = False
    action_masks: bool | Literal["infos", "method"] = True
    normalize_actions: bool = True
    clip_actions: Annotated[bool, Need("normalize_actions=False", lambda config: not config.normalize_actions)] = False

    @property
    def all_wrappers(self) -> list[Any]:
        """The wrappers of each sub-env: `wrappers`, and the one that puts action masks into observations."""
        if not isinstance(self.action_masks, str):
            return self.wrappers
        from corral.envs.mask_wrapper import ActionMasks

        return [*self.wrappers, partial(ActionMasks, source=self.action_masks)]


class HostConfig(Config, Protocol):
    """What an `EnvHost` reads of a config."""

    env: Any
    env_config: dict[str, Any]
    env_task_fn: Any
    env_reset_fn: Any
    disable_env_checking: bool
    normalize_actions: bool
    num_env_runners: int
    num_envs_per_env_runner: int | None
    num_gpus_per_env_runner: float
    vectorization: Literal["auto", "sync", "async"]
    autoreset_mode: Literal["next_step", "same_step"]
    restart_failed_sub_environments: bool
    env_step_timeout_s: float | None
    worker_timeout_s: float | Literal["auto"] | None
    start_timeout_s: float
    in_evaluation: bool
    device: str

    @property
    def all_wrappers(self) -> list[Any]:
        """The wrappers of each sub-env."""

    @property
    def default_num_envs(self) -> int:
        """The number of sub-envs N if `num_envs_per_env_runner` is `None` and the env does not give a number."""

    @property
    def chooses_resets(self) -> bool:
        """Whether the arguments of each reset are chosen, so that sub-envs have the wrapper `EpisodeResets`."""
