"""The settings of sampling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from corral.core.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


def _transforms(value: Any) -> Any:
    from corral.transforms.settings import make_transforms

    return make_transforms(value)


Transforms = Annotated[list[Any], BeforeValidator(_transforms)]
"""Transforms, or what names them."""


@dataclass(kw_only=True)
class EnvRunnersSettings:
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
        transforms: Transforms of observations and rewards between the env and the module, in order, such as
            `[FrameStack(4), NormalizeObservations()]`: instances or classes of `corral.Transform`, their names or
            import paths, or dicts with `type` and settings. See docs/transforms.md.
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
    transforms: Transforms = field(default_factory=list)
    num_cpus_per_env_runner: NonNegativeFloat = 1
    num_gpus_per_env_runner: NonNegativeFloat = 0
    custom_resources_per_env_runner: dict[str, NonNegativeFloat] = field(default_factory=dict)
