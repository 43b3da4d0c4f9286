"""The replay buffers of an algorithm, by module: which there are, of what form, and their state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from corral.core.action_masks import has_mask_key
from corral.core.ids import DEFAULT_MODULE_ID
from corral.core.seeding import module_seed
from corral.data.replay import ReplayBuffer, ReplayConfig, make_replay_buffer
from corral.data.replay.memory import bytes_per_step, check_memory
from corral.errors import CheckpointError, ConfigError
from corral.modules.transforms.observations import NormalizeObservations
from corral.modules.transforms.pipeline import Pipeline
from corral.modules.transforms.temporal import FrameStack
from corral.modules.transforms.transform import TemporalTransform

if TYPE_CHECKING:
    from corral.algorithms.off_policy import OffPolicyAlgorithm, OffPolicyConfig
    from corral.data.replay.hindsight import GoalFunctions

log = logging.getLogger("corral")

AUTO_STORE_BYTES = 256_000_000
"""Size below which `store_buffer_in_checkpoints="auto"` stores a replay buffer."""


class ReplayBuffers(dict[str, Any]):
    """The replay buffer of each module that learns from sampled steps, by module id.

    Each has `add`, `sample`, `len`, `num_env_steps_added`, `get_state`, `set_state` and `close`.

    Attributes:
        configs: Settings of the buffers, by module id, for all modules that learn.
    """

    def __init__(self, algorithm: OffPolicyAlgorithm) -> None:
        """Begin without buffers."""
        super().__init__()
        self._algorithm = algorithm
        self.configs: dict[str, ReplayConfig] = {}
        self._warned_of_size = False

    def set_modules(self) -> None:
        """Make a buffer for each module that learns now and has none; close the buffers of removed modules.

        Raises:
            ConfigError: The settings do not fit the transforms, or the machine has less memory than the buffers take.
        """
        algorithm = self._algorithm
        takes_tensors = algorithm.sampler.takes_tensors
        for module_id in self.keys() - set(algorithm.module_ids):
            self.pop(module_id).close()
        for module_id in filter(algorithm.modules.trains, algorithm.module_ids):
            if module_id in self:
                continue
            config, pipeline = algorithm.module_config(module_id), algorithm.get_pipeline(module_id)
            self.configs[module_id] = with_frames(config.replay_config, pipeline)
            if config.samples:
                make = self._make_on_device if takes_tensors else algorithm.make_replay_buffer
                self[module_id] = make(module_id, self.configs[module_id])
        if not takes_tensors:
            check_memory(
                {
                    module_id: (config.capacity, self.bytes_per_step(module_id))
                    for module_id, config in self.configs.items()
                    if module_id in self and config.directory is None
                }
            )

    def make(self, module_id: str, config: ReplayConfig) -> ReplayBuffer:
        """Return a new buffer of a module, on arrays."""
        settings = self._algorithm.config
        return make_replay_buffer(
            config,
            num_runners=max(1, settings.num_env_runners),
            seed=module_seed(settings.seed, module_id),
            find_goals=self._find_goals,
        )

    def _make_on_device(self, module_id: str, config: ReplayConfig) -> Any:
        from corral.data.replay.device_buffer import DeviceReplayBuffer

        device = self._algorithm.env_runner_group.local_env_runner.env.device  # type: ignore[union-attr]
        return DeviceReplayBuffer(config.capacity, device, seed=module_seed(self._algorithm.config.seed, module_id))

    def _find_goals(self) -> GoalFunctions:
        """Return what the env computes for other goals."""
        from corral.envs.goals import find_goal_functions
        from corral.envs.vector import EnvContext

        config = self._algorithm.config.copy()  # the env may change what is inside of its env_config
        if config.is_multi_agent:
            raise ConfigError(
                "replay_buffer_config: type='hindsight' is for one agent, and this env has several: use type='uniform'."
            )
        return find_goal_functions(config.env, EnvContext(config.env_config), config.all_wrappers)

    def bytes_per_step(self, module_id: str) -> int:
        """Return the bytes that a step takes in the buffer of a module."""
        algorithm = self._algorithm
        module, pipeline = algorithm.learner_group.get_module(module_id), algorithm.get_pipeline(module_id)
        stored = module.observation_space if pipeline is None else pipeline.spaces[pipeline.num_stored]
        return bytes_per_step(stored, module.action_space, self.configs[module_id].frame_stack)

    # State, and the end.

    def get_state(self, *, large_arrays: str) -> dict[str, Any]:
        """Return the state of the buffers as a part of the algorithm's; empty if checkpoints do not hold them.

        Args:
            large_arrays: See `Algorithm.large_arrays`.
        """
        if not self or large_arrays == "left_out" or not self._are_stored():
            return {}
        states = {}
        for module_id, buffer in self.items():
            shared = large_arrays == "shared" and isinstance(buffer, ReplayBuffer)
            states[module_id] = buffer.get_state(**({"copy": False} if shared else {}))
        return {"replay_buffer": states if self._algorithm.config.is_multi_agent else states[DEFAULT_MODULE_ID]}

    def _are_stored(self) -> bool:
        """Return whether states include the buffers; warn once if they are too large for that."""
        setting = self._algorithm.config.store_buffer_in_checkpoints
        if setting != "auto":
            return setting
        num_bytes = sum(getattr(buffer, "nbytes", 0) for buffer in self.values())
        is_small = num_bytes < AUTO_STORE_BYTES
        if not (is_small or self._warned_of_size):
            self._warned_of_size = True
            log.warning(
                "Checkpoints do not hold the replay buffer, which takes %.0f MB: a restored algorithm fills a new one "
                "first. Set training(store_buffer_in_checkpoints=True) to store it, or False for no warning.",
                num_bytes / 1e6,
            )
        return is_small

    def setters(self, state: Mapping[str, Any]) -> list[Callable[[], None]]:
        """Return functions that set the buffers from the state of an algorithm; without a buffer in it there are none.

        Raises:
            CheckpointError: The state is of runners with another number of sub-envs.
        """
        algorithm = self._algorithm
        saved = state.get("replay_buffer", {})
        if not algorithm.config.is_multi_agent and "replay_buffer" in state:
            saved = {DEFAULT_MODULE_ID: saved}
        check_sub_envs(saved.values(), state["runners"]["runners"], algorithm.env_runner_group.num_envs)
        # A module that does not learn here has no buffer.
        return [partial(self[name].set_state, part) for name, part in saved.items() if name in self]

    def close(self) -> None:
        """Release the memory of the buffers."""
        for buffer in self.values():
            buffer.close()


def can_stay_on_device(config: OffPolicyConfig) -> bool:
    """Return whether the buffer of a module, and its batches, can stay on the device of the env."""
    replay = config.replay_config
    return (
        config.input_ is None
        and config.batch_mode == "truncate_episodes"  # else lanes are valid in different rows
        and replay.type == "uniform"
        and replay.directory is None
        and replay.frame_stack == 1
        and config.loss is None
        and config.learner_class is None
    )


def check_sub_envs(buffers: Iterable[Any], runners: Iterable[Any], num_envs: int) -> None:
    """Check that replay buffers whose rows have a step of each sub-env are of runners with as many sub-envs.

    Rows of a buffer with lanes do not: its lanes begin and end with agents and simulators.

    Args:
        buffers: States of the buffers.
        runners: States of the runners.
        num_envs: Number of sub-envs of each runner here.

    Raises:
        CheckpointError: The runners had another number of sub-envs.
    """
    has_rows = any("lanes" not in buffer and buffer.get("layout") for buffer in buffers)
    for runner in runners:
        saved = len(runner.get("num_episodes_over") or ()) or num_envs
        if has_rows and saved != num_envs:
            raise CheckpointError(
                f"replay_buffer: the state has the steps of {saved} sub-envs, and here are {num_envs}: give "
                f"num_envs_per_env_runner={saved}, or begin a new run with the weights of the checkpoint (load_from)."
            )


def with_frames(config: ReplayConfig, pipeline: Pipeline | None) -> ReplayConfig:
    """Return the settings of a replay buffer that stores stacks of frames once.

    Raises:
        ConfigError: The buffer would hold observations that were normalised by statistics of the past.
    """
    if pipeline is None or not pipeline.num_stored:
        return config
    *before, last = pipeline.transforms[: pipeline.num_stored]
    for transform in before:
        if isinstance(transform, NormalizeObservations):
            raise ConfigError(
                f"transforms: NormalizeObservations is before {type(last).__name__}, and a replay buffer would hold "
                f"observations with old statistics: put it after {type(last).__name__}."
            )
    is_alone = not any(isinstance(each, TemporalTransform) for each in before)
    if isinstance(last, FrameStack) and is_alone and not has_mask_key(pipeline.observation_space):
        return replace(config, frame_stack=last.num_frames)
    return config
