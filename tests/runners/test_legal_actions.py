"""Masks from observations, infos and methods: runners keep to them, and name what is wrong with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from at_least import all_of
from corral import Algorithm, DQNConfig, MultiAgentEnv, PPOConfig, SACConfig, make_multi_agent
from corral.algorithms.config.config import AlgorithmConfig
from corral.errors import ConfigError, EnvError
from corral.testing import CountingEnv, DoorCorridor, IdentityEnv

SMALL = {"fcnet_hiddens": [8]}


def config_of(kind: type[AlgorithmConfig] = PPOConfig, masks: Any = "observations", **env_config: Any) -> Any:
    config = kind().environment(DoorCorridor, env_config={"masks": masks, **env_config})
    config.environment(action_masks=True if masks == "observations" else masks)
    config.rl_module(model_config=SMALL).debugging(seed=0)
    config.env_runners(num_envs_per_env_runner=3).reporting(min_sample_timesteps_per_iteration=200)
    if kind is PPOConfig:
        return config.training(train_batch_size_per_learner=300, minibatch_size=100)
    return config.training(num_steps_sampled_before_learning_starts=100, train_batch_size_per_learner=8)


@pytest.mark.parametrize("kind", [PPOConfig, DQNConfig, SACConfig])
def test_masks_of_observations_infos_and_a_method_give_the_same_run(kind: type[AlgorithmConfig]) -> None:
    """An illegal action raises in the env. The three runs take the same steps and learn the same."""
    found = []
    for masks, vectorization in (("observations", "sync"), ("infos", "sync"), ("method", "async")):
        config = config_of(kind, masks).env_runners(vectorization=vectorization)
        with config.build() as algo:
            result = algo.train()
            found.append((result["env_runners"]["episode_return_mean"], result["learners"]["default_policy"]))
            assert algo.env_runner.inference.backend == "numpy"
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("kind", "training"),
    [
        (PPOConfig, {"kl_coeff": 0.2, "entropy_coeff": 0.01}),
        (DQNConfig, {"num_atoms": 5, "n_step": 2, "dueling": True, "noisy": True}),
        (DQNConfig, {"double_q": False, "replay_buffer_config": {"type": "prioritized"}}),
    ],
)
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_variants_learn_finite_numbers(kind: type[AlgorithmConfig], training: dict[str, Any], mode: str) -> None:
    with config_of(kind, length=2).training(**training).env_runners(autoreset_mode=mode).build() as algo:
        learned = algo.train()["learners"]["default_policy"]
    assert all_of(np.isfinite(value) and abs(value) < 1e6 for value in learned.values())


def test_ratios_are_1_before_the_first_gradient_step() -> None:
    with config_of().build() as algo:
        rollout = algo.env_runner.sample(num_timesteps=300)
        module = algo.get_module()
        flat = {key: leaf[:-1].reshape(-1, leaf.shape[-1]) for key, leaf in rollout.obs.items()}
        with torch.no_grad():
            inputs = module.policy({key: torch.from_numpy(leaf) for key, leaf in flat.items()})
            logp = module.distribution.logp(inputs, torch.from_numpy(rollout.actions.reshape(-1)))
        np.testing.assert_allclose(logp.numpy(), rollout.logp.reshape(-1), atol=1e-5)


class Stuck(DoorCorridor):
    """Allows nothing at position 1; the first step of every episode leads there, or back."""

    def action_masks(self) -> Any:
        mask = super().action_masks()
        return mask & (self._position != 1)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_a_mask_without_a_legal_action_names_sub_env_and_step(vectorization: str) -> None:
    config = config_of().environment(Stuck).env_runners(vectorization=vectorization, num_envs_per_env_runner=1)
    with (
        config.build() as algo,
        pytest.raises(EnvError, match=r"env 'Stuck', sub-env 0, step \d+: action_mask allows no action"),
    ):
        algo.env_runner.sample(num_timesteps=100)


def test_the_first_stuck_sub_env_is_named() -> None:
    class OneStuck(DoorCorridor):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.index = config.vector_index

        def action_masks(self) -> Any:
            return super().action_masks() & (self.index != 2 or self._t < 3)

    config = config_of().environment(OneStuck)
    with (
        config.build() as algo,
        pytest.raises(EnvError, match=r"env 'OneStuck', sub-env 2, step 3: action_mask allows no action"),
    ):
        algo.env_runner.sample(num_timesteps=100)


class Told(CountingEnv):
    """Says what the class attribute `MASK` holds, in infos and by its method."""

    MASK: Any = None

    def action_masks(self) -> Any:
        return self.MASK

    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0], {} if self.MASK is None else {"action_mask": self.MASK}


@pytest.mark.parametrize(
    ("mask", "given"),
    [
        (np.ones(3, np.int8), r"int8 of shape \(3,\)"),
        (np.ones(2), r"float64 of shape \(2,\)"),
        (["left", "right"], r"<U5 of shape \(2,\)"),
        (None, "nothing"),
    ],
)
@pytest.mark.parametrize(("source", "place"), [("infos", r"infos\['action_mask'\]"), ("method", r"action_masks\(\)")])
def test_a_mask_of_another_length_or_dtype_is_refused(mask: Any, given: str, source: str, place: str) -> None:
    env = type("Told", (Told,), {"MASK": mask})
    config = PPOConfig().environment(env, action_masks=source)
    with pytest.raises(EnvError, match=f"env 'Told'.* {place} must be 2 bools or integers, .*, got {given}"):
        config.build()


def test_an_env_without_the_method_or_with_other_actions_is_refused() -> None:
    with pytest.raises(EnvError, match=r"action_masks='method' needs a method action_masks\(\) of the env"):
        PPOConfig().environment(CountingEnv, action_masks="method").build()
    config = PPOConfig().environment(IdentityEnv, env_config={"space": "box"}, action_masks="infos")
    with pytest.raises(EnvError, match=r"action masks need Discrete or MultiDiscrete actions, and the env has Box"):
        config.build()
    config.environment(make_multi_agent(IdentityEnv)).multi_agent(
        policies=["main"], policy_mapping_fn=lambda agent, episode: "main"
    )
    with pytest.raises(
        EnvError, match=r"action masks need Discrete or MultiDiscrete actions, and the env has \{0: Box"
    ):
        config.build()
    with pytest.raises(ConfigError, match="action_masks"):
        PPOConfig().environment(action_masks="observations")


def test_taxi_gives_its_masks_in_infos() -> None:
    config = PPOConfig().environment("Taxi-v4" if "Taxi-v4" in gym.registry else "Taxi-v3", action_masks="infos")
    config.env_runners(num_envs_per_env_runner=2).rl_module(model_config=SMALL)
    with config.build() as algo:
        rollout = algo.env_runner.sample(num_timesteps=400)  # type: ignore[union-attr]
        assert isinstance(rollout.observation_space, spaces.Dict)
        masks = rollout.obs["action_mask"][:-1][rollout.valid]
        assert masks[np.arange(len(masks)), rollout.actions[rollout.valid]].all()
        assert 0 < masks.mean() < 1


class Doors(VectorEnv[Any, Any, Any]):
    """A vector env of its own that gives masks in its observations: at step t only action `t % 3` is legal."""

    def __init__(self, config: Any) -> None:
        self.num_envs = 2
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.single_observation_space = spaces.Dict(action_mask=spaces.MultiBinary(3), clock=spaces.Discrete(9))
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, 2)
        self.single_action_space = spaces.Discrete(3)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, 2)

    def _see(self) -> Any:
        mask = np.tile(np.arange(3) == self._t % 3, (2, 1)).astype(np.int8)
        return {"action_mask": mask, "clock": np.full(2, self._t % 9)}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self._t = 0
        return self._see(), {}

    def step(self, actions: Any) -> Any:
        assert (actions == self._t % 3).all()
        self._t += 1
        nothing = np.zeros(2, np.bool_)
        return self._see(), np.ones(2), nothing, nothing, {}


def test_a_ready_vector_env_may_give_masks_in_its_observations() -> None:
    config = PPOConfig().environment(Doors).rl_module(model_config=SMALL)
    with config.training(train_batch_size_per_learner=64, minibatch_size=32).build() as algo:
        algo.train()
    with pytest.raises(ConfigError, match=r"ActionMasks.*around it in a factory"):
        config.environment(action_masks="infos").build()


class Takers(MultiAgentEnv):
    """Two agents take numbers in turn from what is left of five; agent `b` may be left with none.

    `masks` of the config tells where the masks are; `fair` lets `a` leave one for `b`.
    """

    possible_agents = ("a", "b")

    def __init__(self, config: Any) -> None:
        self.masks = config.get("masks", "observations")
        self.fair = config.get("fair", True)
        space = spaces.MultiBinary(5)
        self.action_space = spaces.Discrete(5)
        self.observation_space = spaces.Dict(action_mask=space, observation=space)
        if self.masks != "observations":
            self.observation_spaces = {"a": space, "b": space}

    def action_masks(self, agent_id: str) -> Any:
        return self.left

    def _see(self) -> Any:
        agent = self.possible_agents[self.turn]
        left = self.left.astype(np.int8)
        obs = {"action_mask": left, "observation": left} if self.masks == "observations" else left
        return {agent: obs}, {agent: {"action_mask": self.left.copy()}} if self.masks == "infos" else {}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.left, self.turn = np.ones(5, np.bool_), 0
        return self._see()

    def step(self, action_dict: Any) -> Any:  # type: ignore[override]
        (agent, action), *_ = action_dict.items()
        assert self.left[action]
        self.left[action] = False
        self.turn = 1 - self.turn
        if not self.fair and self.left.sum() == 2:
            self.left[:] = False
        obs, infos = self._see()
        done = self.fair and not self.left.any()
        return obs, {agent: float(action)}, {"__all__": done}, {"__all__": False}, infos


@pytest.mark.parametrize("masks", ["observations", "infos", "method"])
def test_agents_keep_to_their_masks(masks: str) -> None:
    config = PPOConfig().environment(Takers, env_config={"masks": masks}).multi_agent(policies=["p"])
    config.environment(action_masks=True if masks == "observations" else masks).debugging(seed=0)
    config.rl_module(model_config=SMALL).env_runners(num_envs_per_env_runner=2)
    with config.training(train_batch_size_per_learner=100, minibatch_size=50).build() as algo:
        result = algo.train()
        assert result["env_runners"]["episode_len_mean"] == 5
        assert result["env_runners"]["episode_return_mean"] == 10
        assert algo.env_runner.actors["p"].module.has_action_mask  # type: ignore[union-attr]


def test_an_agent_without_a_legal_action_is_named() -> None:
    config = PPOConfig().environment(Takers, env_config={"fair": False}).multi_agent(policies=["p"])
    with (
        config.build() as algo,
        pytest.raises(EnvError, match=r"env 'Takers', sub-env 0, step 3: agent 'b': action_mask allows no action"),
    ):
        algo.train()


@pytest.mark.parametrize("kind", [PPOConfig, DQNConfig, SACConfig])
def test_tic_tac_toe_of_pettingzoo_is_played_by_its_rules(kind: type[AlgorithmConfig]) -> None:
    tictactoe = pytest.importorskip("pettingzoo.classic.tictactoe.tictactoe")
    config = config_of(kind).environment(lambda _: tictactoe.raw_env(), env_config={}).multi_agent(policies=["p"])
    with config.build() as algo:
        result = algo.train()  # the env asserts that moves are legal
    assert 5 <= result["env_runners"]["episode_len_mean"] <= 9


@pytest.mark.parametrize("masks", ["observations", "infos", "method"])
def test_a_restored_run_continues_in_the_middle_of_its_episodes(masks: str, tmp_path: Path) -> None:
    with config_of(DQNConfig, masks).build() as algo:
        algo.train()
        path = algo.save(tmp_path / "checkpoint")
        expected = algo.train()
    with Algorithm.from_checkpoint(path) as algo:
        found = algo.train()
    assert found["learners"]["default_policy"] == expected["learners"]["default_policy"]
    assert found["env_runners"]["episode_return_mean"] == expected["env_runners"]["episode_return_mean"]
