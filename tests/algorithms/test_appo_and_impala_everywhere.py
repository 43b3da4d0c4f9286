"""APPO and IMPALA with all kinds of spaces, memory, masks, transforms and agents; what no other sweep has."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from at_least import all_of
from corral import (
    AlgorithmConfig,
    APPOConfig,
    ClipRewards,
    FlattenObservations,
    FrameStack,
    IMPALAConfig,
    NormalizeObservations,
    NormalizeRewards,
    PrevActionsPrevRewards,
)
from corral.algorithms.appo import appo_loss
from corral.algorithms.impala import impala_loss
from corral.core.tree import map_tree
from corral.testing import DoorCorridor
from exact_runs import StatefulDrift
from random_agents import RandomAgents

BASES = (IMPALAConfig, APPOConfig)
LSTM: dict[str, Any] = {"use_lstm": True, "lstm_cell_size": 8, "fcnet_hiddens": [8], "max_seq_len": 4}
GRU: dict[str, Any] = {"use_gru": True, "gru_cell_size": 8, "fcnet_hiddens": [8], "max_seq_len": 4}
TWO_LOCAL: dict[str, Any] = {"engine_name": "local", "num_env_runners": 2, "max_lag": 3}


def small(base: type[AlgorithmConfig], **settings: Any) -> AlgorithmConfig:
    """A config with several updates per iteration and, in APPO, a target policy that changes between them."""
    config = base().env_runners(num_env_runners=0, num_envs_per_env_runner=3, rollout_fragment_length=8)
    config.training(train_batch_size_per_learner=24, lr=0.01).debugging(seed=0)
    config.reporting(min_sample_timesteps_per_iteration=72).rl_module(model_config={"fcnet_hiddens": [8]})
    if base is APPOConfig:
        config.training(circular_buffer_num_batches=1, target_network_update_freq=3, tau=0.5, use_kl_loss=True)
    return config.copy(**settings)


class Anything(gym.Env[Any, Any]):
    """Random observations, and a reward for each action of the action space; other actions raise."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.observation_space, self.action_space = config["observations"], config["actions"]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.t += 1
        return self.observation_space.sample(), float(self.np_random.normal()), self.t >= 7, False, {}


BOX = spaces.Box(-1, 1, (2,), np.float32)
OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "box": BOX,
    "discrete": spaces.Discrete(4, start=2),
    "multi_discrete": spaces.MultiDiscrete([2, 3]),
    "dict": spaces.Dict(place=BOX, mode=spaces.Discrete(3)),
    "image": spaces.Box(0, 255, (12, 12, 3), np.uint8),
}
ACTIONS: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(3, start=-1),
    "box": spaces.Box(-2, 3, (2,), np.float32),
    "multi_discrete": spaces.MultiDiscrete([2, 3], start=[1, 5]),
    "multi_binary": spaces.MultiBinary(3),
    "dict": spaces.Dict(move=BOX, push=spaces.Discrete(2)),
}
PAIRS = [*((name, "discrete") for name in OBSERVATIONS), *(("dict", name) for name in ACTIONS if name != "discrete")]


def copied(module: Any) -> dict[str, Any]:
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("memory", [{}, pytest.param(GRU, marks=pytest.mark.slow)], ids=["plain", "gru"])
@pytest.mark.parametrize(("observations", "actions"), PAIRS)
@pytest.mark.parametrize("base", BASES)
def test_it_learns_with_all_spaces(
    base: type[AlgorithmConfig], observations: str, actions: str, memory: dict[str, Any]
) -> None:
    given = {"observations": OBSERVATIONS[observations], "actions": ACTIONS[actions]}
    config = small(base).environment(Anything, env_config=given)
    convolutions = {"conv_features": 8} if "image" in observations else {}
    config.rl_module(model_config={"fcnet_hiddens": [8], **convolutions, **memory})
    with config.build() as algorithm:
        before = copied(algorithm.get_module())
        result = algorithm.train()["learners"]["default_policy"]
        after = copied(algorithm.get_module())
    assert result["num_gradient_steps"] > 0 and all_of(np.isfinite(value) for value in result.values())
    assert all_of(not torch.equal(after[name], value) for name, value in before.items() if "policy" in name)


PIPELINES: dict[str, list[Any]] = {
    "normalized": [NormalizeObservations(), NormalizeRewards()],
    "stacked": [FlattenObservations(), FrameStack(2), NormalizeObservations()],
    "previous": [PrevActionsPrevRewards(), NormalizeObservations(), ClipRewards(0.5)],
}


@pytest.mark.parametrize("mode", ["next_step", pytest.param("same_step", marks=pytest.mark.slow)])
@pytest.mark.parametrize("memory", [LSTM, GRU, {"fcnet_hiddens": [8]}], ids=["lstm", "gru", "plain"])
@pytest.mark.parametrize("transforms", PIPELINES)
@pytest.mark.parametrize("base", BASES)
def test_the_module_gives_in_learning_what_it_gave_in_acting(
    base: type[AlgorithmConfig], transforms: str, memory: dict[str, Any], mode: str
) -> None:
    """With masks, stored states and transforms, the ratios of fragments of the present weights are 1."""
    config = small(base, model_config=memory, autoreset_mode=mode, transforms=PIPELINES[transforms])
    config.environment(DoorCorridor, env_config={"length": 3})  # raises at illegal actions
    with config.build() as algorithm:
        algorithm.train()
        parts = [rollout.transformed() for rollout in algorithm.sample(60)]
        batch = algorithm.make_batch("default_policy", parts)  # type: ignore[attr-defined]
        tensors = {name: map_tree(lambda leaf: torch.from_numpy(leaf.copy()), batch[name]) for name in batch}
        outputs: dict[str, Any] = {}
        none = {"entropy_coeff": 0.0, "kl_coeff": 0.0}
        if base is APPOConfig:
            appo_loss(algorithm.get_module(), tensors, none, clip_param=0.4, vf_loss_coeff=0.5, outputs=outputs)
            legal = tensors["obs"]["action_mask"] == 1
            assert ((tensors["target_dist_inputs"] < -1e6) == ~legal).all() and not legal.all()
        else:
            impala_loss(algorithm.get_module(), tensors, none, vf_loss_coeff=0.5, outputs=outputs)
        np.testing.assert_allclose(outputs["logp"].detach().numpy(), batch["logp"], atol=1e-5)
        np.testing.assert_allclose(outputs["values"].detach().numpy(), batch["values"], atol=1e-5)


@pytest.mark.parametrize("base", BASES)
def test_the_draws_from_a_circular_buffer_continue_exactly(base: type[AlgorithmConfig]) -> None:
    """Runners of the local engine have sampled nothing that the iteration has not learned from."""
    config = small(base, **TWO_LOCAL, use_circular_buffer=True).environment(StatefulDrift)
    config.training(circular_buffer_num_batches=4)
    with config.copy().build() as algorithm:
        algorithm.train()
        state = algorithm.get_state()
        expected = [algorithm.train()["learners"]["default_policy"] for _ in range(2)]
    for seed, same in ((None, True), (9, False)):
        if seed is not None:
            state["attributes"]["draw_rng"] = np.random.default_rng(seed).bit_generator.state
        with config.copy().build() as restored:
            restored.set_state(state)
            assert ([restored.train()["learners"]["default_policy"] for _ in range(2)] == expected) == same


@pytest.mark.parametrize("runners", [pytest.param({}, marks=pytest.mark.slow), TWO_LOCAL], ids=["embedded", "local"])
@pytest.mark.parametrize("base", BASES)
def test_agents_with_memory_and_transforms_learn_in_modules_of_their_own(
    base: type[AlgorithmConfig], runners: dict[str, Any]
) -> None:
    """Agents come and go; fragments of the local engine are some updates old."""
    config = small(base, transforms=[NormalizeRewards(), PrevActionsPrevRewards()], **runners)
    config.environment(RandomAgents, env_config={"num_agents": 3}).env_runners(num_envs_per_env_runner=2)
    config.rl_module(model_config=LSTM).multi_agent(
        policies={"one", "other"}, policy_mapping_fn=lambda agent, *a, **k: "one" if agent == "a0" else "other"
    )
    results = []
    for _ in range(2):
        with config.copy().build() as algorithm:
            before = {name: copied(algorithm.get_module(name)) for name in ("one", "other")}
            results.append([algorithm.train()["learners"] for _ in range(2)])
            for name, part in before.items():
                after = copied(algorithm.get_module(name))
                assert all_of(not torch.equal(after[key], value) for key, value in part.items() if "policy" in key)
    np.testing.assert_equal(results[0], results[1])


@pytest.mark.parametrize("training", [{"kl_coeff": 0.0}, {"kl_coeff": 1e-323, "kl_target": 1e3}], ids=str)
def test_a_penalty_without_weight_is_no_penalty(training: dict[str, float]) -> None:
    """The smallest weights fall to 0 when they are halved."""
    with small(APPOConfig, **training).environment("CartPole-v1").build() as algorithm:
        for _ in range(2):
            result = algorithm.train()["learners"]["default_policy"]
    assert result["curr_kl_coeff"] == 0.0 and np.isfinite(result["policy_loss"])


@pytest.mark.parametrize("base", BASES)
def test_a_state_replaces_what_an_interrupted_iteration_left(base: type[AlgorithmConfig]) -> None:
    """An iteration that ends in the middle leaves a batch, which a restored run does not learn from."""
    breaks: list[bool] = []

    def interrupt() -> None:
        if breaks and breaks.pop():
            raise KeyboardInterrupt

    config = small(base, **TWO_LOCAL).environment("CartPole-v1").callbacks(on_update_end=interrupt)
    with config.copy().build() as algorithm, config.copy().build() as other:
        algorithm.train()
        state = algorithm.get_state()
        breaks.append(True)
        with pytest.raises(KeyboardInterrupt):
            algorithm.train()
        for restored in (algorithm, other):
            restored.set_state(state)
        results = [each.train()["learners"]["default_policy"] for each in (algorithm, other)]
        np.testing.assert_equal(results[0], results[1])
