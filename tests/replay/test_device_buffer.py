"""Replay on the device of an env of tensors: the transitions, the draws and the learning of replay on arrays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from at_least import all_of
from corral import (
    Callback,
    ClipRewards,
    CrossQConfig,
    DQNConfig,
    NormalizeObservations,
    NormalizeRewards,
    SACConfig,
    TD3Config,
    TQCConfig,
)
from corral.data.episodes.rollout import Rollout
from corral.data.episodes.tensor_rollout import TensorRollout, empty_steps
from corral.data.offline.sources import open_source
from corral.data.replay import EmptyReplayBufferError, ReplayBuffer
from corral.data.replay.device_buffer import DeviceReplayBuffer
from corral.envs.tensor_env import TensorVectorEnv
from corral.envs.torch_envs import TorchCartPole, TorchPendulum
from corral.errors import CheckpointError, ConfigError, DataError, LossError
from exact_runs import check_continuation
from host_transfers import count_host_transfers

N = 8


class ShortPendulum(TorchPendulum):
    def __init__(self, num_envs: int, device: Any = "cpu") -> None:
        super().__init__(num_envs, device, max_episode_steps=30)


class ShortCartPole(TorchCartPole):
    def __init__(self, num_envs: int, device: Any = "cpu") -> None:
        super().__init__(num_envs, device, max_episode_steps=30)


class Pair(TensorVectorEnv):
    """Two agents, each of which sees noise."""

    possible_agents = ("left", "right")

    def __init__(self, num_envs: int, device: Any = "cpu") -> None:
        self.num_envs, self.device, self.count = num_envs, torch.device(device), 0
        box = spaces.Box(-1, 1, (2,), np.float32)
        self.single_observation_space = self.single_action_space = spaces.Dict(left=box, right=box)

    def observe(self) -> dict[str, Any]:
        return {agent: torch.rand(self.num_envs, 2) for agent in self.possible_agents}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.count = 0
        return self.observe(), {}

    def step(self, actions: Any) -> Any:
        self.count = (self.count + 1) % 20
        ends = torch.full((self.num_envs,), self.count == 0)
        rewards = {agent: action.sum(1) for agent, action in actions.items()}
        return self.observe(), rewards, torch.zeros_like(ends), ends, {"final_obs": self.observe()}


class Watched(Callback):
    """Listens to an event of episodes, so that the env is stepped on arrays."""

    def on_episode_end(self, **arguments: Any) -> None:
        pass


def make_config(config_class: Any = SACConfig, *, arrays: bool = False, **settings: Any) -> Any:
    env = ShortCartPole if config_class is DQNConfig else ShortPendulum
    config = config_class().environment(env).env_runners(num_envs_per_env_runner=N).debugging(seed=5)
    config.training(
        **{
            "train_batch_size_per_learner": 32,
            "training_intensity": 4,
            "num_steps_sampled_before_learning_starts": 10 * N,
            "replay_buffer_config": {"capacity": 40 * N},
            **settings,
        }
    )
    config.reporting(min_sample_timesteps_per_iteration=20 * N)
    critics = {"critic_hiddens": [32, 32]} if config_class is CrossQConfig else {}
    config.rl_module(model_config={"fcnet_hiddens": [32, 32], **critics})
    return config.callbacks(Watched) if arrays else config


def make_rollouts(rng: np.random.Generator, num_rows: int, *, continues: bool, first: Any) -> tuple[Any, Rollout]:
    """Return a rollout of tensors, and the same one of arrays, whose first observations are the last ones before it."""
    shape = (num_rows, 3)
    columns: dict[str, Any] = empty_steps(shape, torch.device("cpu"))
    obs = rng.normal(size=(num_rows + 1, 3, 2)).astype(np.float32)
    if continues:
        obs[0] = first
    columns |= {"obs": torch.from_numpy(obs), "actions": torch.from_numpy(rng.integers(0, 4, shape))}
    columns |= {name: torch.from_numpy(rng.random(shape) < 0.15) for name in ("terminated", "truncated")}
    columns["rewards"] = torch.from_numpy(rng.normal(size=shape).astype(np.float32))
    columns["valid"][:], columns["row_times_s"][:] = True, 0.0
    rollout = TensorRollout(columns, num_rows=num_rows)
    rollout.finals = [torch.from_numpy(rng.normal(size=(3, 2)).astype(np.float32)) for _ in range(num_rows)]
    rollout.continues, rollout.num_env_steps = continues, num_rows * 3
    return rollout, rollout.to_arrays()


@pytest.mark.parametrize("n_step", [1, 3, (1, 4)])
@pytest.mark.parametrize("capacity", [9, 30, 200])
@pytest.mark.parametrize("reward_fn", [None, lambda rewards: rewards.clip(-0.3, 0.5)])
def test_batches_are_those_of_the_buffer_on_arrays(n_step: Any, capacity: int, reward_fn: Any) -> None:
    rng = np.random.default_rng(capacity)
    on_device = DeviceReplayBuffer(capacity, torch.device("cpu"), seed=7)
    on_arrays = ReplayBuffer(capacity, seed=7)
    last: Any = None
    for step in range(25):
        continues = last is not None and rng.random() < 0.7
        tensors, arrays = make_rollouts(rng, int(rng.integers(1, 6)), continues=continues, first=last)
        last = arrays.obs[-1]
        on_device.add([tensors])
        on_arrays.add([arrays])
        assert (len(on_device), on_device.num_env_steps_added) == (len(on_arrays), on_arrays.num_env_steps_added)
        form = {"n_step": n_step, "gamma": 0.9, "reward_fn": reward_fn}
        batches = [buffer.sample(16, **form) for buffer in (on_device, on_arrays)]
        for name, column in batches[1].items():
            if name != "indices":  # on arrays they count past the end of the ring
                np.testing.assert_allclose(
                    batches[0][name].numpy(), column, rtol=1e-5, atol=1e-6, err_msg=f"{name} in {step}"
                )


def test_an_empty_buffer_has_nothing_to_draw() -> None:
    with pytest.raises(EmptyReplayBufferError):
        DeviceReplayBuffer(10, torch.device("cpu")).sample(4)


def test_states_of_other_buffers_are_refused() -> None:
    buffer, arrays = DeviceReplayBuffer(30, torch.device("cpu"), seed=7), ReplayBuffer(30)
    with pytest.raises(CheckpointError, match="capacity=30, and this buffer has capacity=60"):
        DeviceReplayBuffer(60, torch.device("cpu")).set_state(buffer.get_state())
    for one, other in ((buffer, arrays), (arrays, buffer)):
        with pytest.raises(CheckpointError, match="on arrays cannot continue"):
            one.set_state(other.get_state())


def test_a_buffer_on_a_device_is_no_recorded_data() -> None:
    with pytest.raises(DataError, match="is no data that Corral reads"):
        open_source(DeviceReplayBuffer(30, torch.device("cpu")))


def numbers_of(result: Mapping[str, Any]) -> dict[str, float]:
    found = {name: value for name, value in result["learners"]["default_policy"].items() if isinstance(value, float)}
    return {**found, "return": result["env_runners"]["episode_return_mean"]}


@pytest.mark.slow_cases("settings1", "settings2", "settings4", "settings5")
@pytest.mark.parametrize(
    ("config_class", "settings"),
    [
        *((SACConfig, settings) for settings in ({}, {"n_step": 3}, {"target_network_update_freq": 50})),
        *((TD3Config, settings) for settings in ({}, {"n_step": (1, 3)}, {"target_network_update_freq": 50})),
        (TQCConfig, {}),
        (CrossQConfig, {}),
        (DQNConfig, {}),
        (DQNConfig, {"num_atoms": 11, "v_max": 30.0, "n_step": (1, 3), "target_network_update_freq": 50}),
        (SACConfig, {"n_step": 3, "transforms": [NormalizeObservations(), NormalizeRewards()]}),
        (TD3Config, {"transforms": [NormalizeObservations(), ClipRewards(0.5)]}),
    ],
)
def test_learning_has_the_numbers_that_it_has_on_arrays(config_class: Any, settings: dict[str, Any]) -> None:
    results, training = [], {**settings}
    transforms = training.pop("transforms", [])
    for arrays in (False, True):
        algo = make_config(config_class, arrays=arrays, **training).env_runners(transforms=transforms).build()
        assert type(algo.local_replay_buffer) is (ReplayBuffer if arrays else DeviceReplayBuffer)
        # CrossQ, with batch statistics and a large learning rate, multiplies differences of rounding soon.
        results.append([numbers_of(algo.train()) for _ in range(2 if config_class is CrossQConfig else 3)])
        algo.stop()
    assert results[0][-1]["td_error_mean"] != 0
    for on_device, on_arrays in zip(*results, strict=True):
        assert on_device == pytest.approx(on_arrays, rel=1e-2, abs=1e-3, nan_ok=True)


@pytest.mark.parametrize("config_class", [SACConfig, TD3Config])
def test_random_actions_end_within_a_sample_where_they_end_on_arrays(config_class: Any) -> None:
    found = []
    for arrays in (False, True):
        algo = make_config(config_class, arrays=arrays).env_runners(rollout_fragment_length=20).build()
        [rollout] = algo.sample(20 * N)  # the first 10 rows are random
        algo.stop()
        found.append(np.asarray(rollout.actions))
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)
    assert np.abs(found[0]).max() > 0


@pytest.mark.parametrize("config_class", [SACConfig, TD3Config, DQNConfig])
def test_transfers_to_the_host_are_as_many_however_many_updates_an_iteration_has(config_class: Any) -> None:
    found = []
    for intensity in (2, 6):
        config = make_config(config_class, training_intensity=intensity)
        algo = config.env_runners(rollout_fragment_length=20).build()
        for _ in range(2):
            algo.train()
        with count_host_transfers() as transfers:
            result = algo.train()
        algo.stop()
        assert result["learners"]["__all_modules__"]["num_module_steps_trained"] == 20 * N * intensity
        found.append(transfers)
    assert found[0] == found[1]


@pytest.mark.parametrize("config_class", [SACConfig, TD3Config, DQNConfig])
def test_a_restored_run_continues_exactly(config_class: Any, tmp_path: Path) -> None:
    algo = make_config(config_class).build()
    for _ in range(2):
        algo.train()
    check_continuation(algo, tmp_path / "saved")


def test_no_step_is_taken_after_one_that_is_not_finite() -> None:
    """The updates of a training step are read together; weights stay as they were before the first that failed."""
    algo = make_config().env_runners(rollout_fragment_length=20).build()
    algo.train()
    buffer: Any = algo.local_replay_buffer
    sample, calls, weights = buffer.sample, [], []

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        batch = sample(*args, **kwargs)
        calls.append(1)
        if len(calls) == 3:
            weights.append({k: v.copy() for k, v in algo.learner_group.get_weights()["default_policy"].items()})
            batch["rewards"] = batch["rewards"] * torch.nan
        return batch

    buffer.sample = poisoned
    with pytest.raises(LossError, match="total_loss is nan"):
        algo.train()
    after = algo.learner_group.get_weights()["default_policy"]
    algo.stop()
    assert len(calls) > 4
    for name, array in weights[0].items():
        if "target" not in name:
            np.testing.assert_array_equal(array, after[name], err_msg=name)


def test_callbacks_of_updates_read_numbers() -> None:
    class Reads(Callback):
        found: list[Any] = []  # noqa: RUF012

        def on_update_end(self, *, result: Mapping[str, Any], **arguments: Any) -> None:
            self.found.append(result["total_loss"])

    algo = make_config().callbacks(Reads).build()
    algo.train()
    algo.stop()
    assert len(Reads.found) > 10
    assert all_of(isinstance(value, float) for value in Reads.found)


def test_a_module_that_asks_at_each_step_does_not_keep_others_waiting() -> None:
    """One module clips by norm, which asks the device at each step; reports of the other are read all the same."""
    config = make_config().multi_agent(
        policies=["left", "right"],
        policy_mapping_fn=lambda agent, episode, **others: agent,
        algorithm_config_overrides_per_module={"left": {"grad_clip": 1.0, "grad_clip_by": "norm"}},
    )
    algo = config.environment(Pair).build()
    for _ in range(2):
        learners = algo.train()["learners"]
    assert all(isinstance(learners[name]["total_loss"], float) for name in ("left", "right"))
    optimizer = algo.learner_group.learner_here.torch_optimizer("right")
    algo.stop()
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("arrays", [False, True])
def test_a_frozen_group_stays_and_the_others_learn(arrays: bool) -> None:
    algo = make_config(arrays=arrays).build()
    module = algo.get_module()
    groups = {name: list(parameters) for name, parameters in module.parameter_groups().items()}
    for parameter in groups["actor"]:
        parameter.requires_grad_(False)
    before = {name: [each.detach().clone() for each in group] for name, group in groups.items()}
    learners = algo.train()["learners"]["default_policy"]
    changed = {
        name: any(not torch.equal(now, was) for now, was in zip(groups[name], before[name], strict=True))
        for name in groups
    }
    algo.stop()
    assert changed == {"actor": False, "critic": True, "alpha": True}
    assert learners["gradients_actor_optimizer_global_norm"] == 0


def test_whole_episodes_are_replayed_on_arrays() -> None:
    algo = make_config().env_runners(batch_mode="complete_episodes").build()
    assert type(algo.local_replay_buffer) is ReplayBuffer
    algo.stop()


def test_stacks_of_frames_are_not_ignored() -> None:
    algo = make_config(replay_buffer_config={"capacity": 1000, "frame_stack": 4}).build()
    with pytest.raises(ConfigError, match="frame_stack=4, but the first and the last axis"):
        algo.train()
    algo.stop()


def test_other_buffers_get_arrays() -> None:
    algo = make_config(replay_buffer_config={"type": "prioritized", "capacity": 1000}).build()
    assert not isinstance(algo.local_replay_buffer, DeviceReplayBuffer)
    assert np.isfinite(algo.train()["learners"]["default_policy"]["total_loss"])
    algo.stop()


@pytest.mark.parametrize("num_modules", [1, 2])
def test_a_buffer_of_several_agents_is_refused_where_there_are_other_sub_envs(num_modules: int) -> None:
    """With one module for both agents the number of lanes, 8, is the number of sub-envs here."""

    def make(num_envs: int) -> Any:
        names = ["left", "right"][:num_modules]
        config = make_config().multi_agent(
            policies=names, policy_mapping_fn=lambda agent, episode, **others: agent if agent in names else names[0]
        )
        return config.environment(Pair).env_runners(num_envs_per_env_runner=num_envs).build()

    algo, other = make(4), make(8)
    algo.train()
    state = algo.get_state()
    with pytest.raises(CheckpointError, match="4 sub-envs, and here are 8: give num_envs_per_env_runner=4"):
        other.set_state(state)
    other.train()
    algo.stop()
    other.stop()
