"""Timers of the parts of an iteration, and the setting that changes the largest part."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

# Part of an iteration -> the setting that changes it, in the order of the result and of the display.
PARTS = {
    "env_step": "env_runners.num_envs_per_env_runner",
    "inference": "rl_module.model_config",
    "storage": "env_runners.num_envs_per_env_runner",
    "waiting": "env_runners.num_env_runners",
    "exploring": "exploration.exploration_config",
    "returns": "training.train_batch_size_per_learner",
    "replay": "training.replay_buffer_config",
    "learning": "training.minibatch_size",
    "syncing": "training.train_batch_size_per_learner",
    "callbacks": "callbacks",
    "evaluating": "evaluation.evaluation_duration",
}

SIMULATORS = "the speed and the number of the simulators"
"""What changes the share of env steps where programs that drive themselves play the episodes."""

WORTH_A_PROCESS_S = 5e-4
"""Seconds that a step of a sub-env takes at least where a process of its own pays: asking it takes about 100 us."""


class _Block:
    """A timed block. It is a class, because entering and leaving a generator takes five times as long."""

    __slots__ = ("_part", "_start", "_timers")

    def __init__(self, timers: Timers, part: str) -> None:
        self._timers, self._part = timers, part

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self._timers.seconds[self._part] += time.perf_counter() - self._start


class Timers:
    """Seconds spent in each part since the last `take`."""

    def __init__(self) -> None:
        """Start at zero."""
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def time(self, part: str) -> _Block:
        """Return a context manager that adds the wall-clock seconds of its block to a part."""
        return _Block(self, part)

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add the seconds that another `Timers` took."""
        for part, value in seconds.items():
            self.seconds[part] += value

    def take(self) -> dict[str, float]:
        """Return the seconds of each part, and start again at zero."""
        taken, self.seconds = self.seconds, dict.fromkeys(PARTS, 0.0)
        return taken


def timer_results(
    seconds: Mapping[str, float],
    iteration_s: float,
    *,
    num_single_steps: float = 0,
    num_envs: int = 1,
    setting_of_arrays: str = "",
    is_served: bool = False,
    is_replayed: bool = False,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return `result["timers"]` and `result["bottleneck"]`.

    Args:
        seconds: Seconds by part, summed over runners that worked at the same time.
        iteration_s: Wall-clock seconds of the iteration.
        num_single_steps: Env steps of the iteration if runners step their sub-envs one by one; 0 if they do not.
        num_envs: Sub-envs of one runner.
        setting_of_arrays: The setting because of which an env of tensors is stepped on arrays; `""` if it is not.
        is_served: Whether the runners wait for simulators that drive themselves.
        is_replayed: Whether each env step is learned from several times, in updates of one batch each.

    Returns:
        The timers: `iteration_s`, `<part>_s`, and `<part>_share` of the iteration, with `other_share` for the rest. The
        shares sum to 1; with several runners they are shares of the work of all runners. And the bottleneck: the `part`
        with the largest share, the `share`, and the `setting` that changes it. More sub-envs that are stepped one by
        one gain nothing: processes of their own do where their steps are slow, and more runners otherwise. Where an env
        of tensors is stepped on arrays, sampling gets faster without the setting that asks for arrays. No setting makes
        a simulator faster that drives itself.
    """
    whole = max(iteration_s, sum(seconds.values()))
    shares = {part: seconds[part] / whole for part in PARTS}
    timers = {"iteration_s": iteration_s}
    timers |= {f"{part}_s": seconds[part] for part in PARTS}
    timers |= {f"{part}_share": share for part, share in shares.items()}
    timers["other_share"] = 1 - sum(shares.values())
    largest = max(shares, key=shares.__getitem__)
    setting = PARTS[largest]
    if largest == "env_step" and num_single_steps:
        is_slow = seconds["env_step"] > WORTH_A_PROCESS_S * num_single_steps
        setting = "env_runners.vectorization" if is_slow and num_envs > 1 else PARTS["waiting"]
    if is_served and largest in ("env_step", "waiting"):
        setting = SIMULATORS
    if is_replayed and largest == "learning":
        setting = "training.training_intensity"
    if setting_of_arrays and largest in ("env_step", "inference", "storage"):
        setting = setting_of_arrays
    return timers, {"part": largest, "share": shares[largest], "setting": setting}
