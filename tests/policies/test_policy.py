"""Policies that are loaded from checkpoints act as the algorithm did, without its code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from corral import DQNConfig, Module, Policy, PPOConfig, load_policy
from corral.algorithms.registry import config_class
from corral.core.spaces import space_tree
from corral.core.tree import leaves, map_tree
from corral.errors import CheckpointError, ObservationError
from corral.modules.module import ActorCritic
from corral.modules.spec import ModuleSpec
from corral.runs.policies.description import described_spec, policy_description

POSITION = spaces.Box(-1, 1, (3,))
CAMERA = spaces.Dict(camera=spaces.Box(0, 255, (12, 12, 3), np.uint8), mode=spaces.Discrete(3, start=2))
BOUNDED = spaces.Box(np.array([-2.0, 0.0]), np.array([3.0, 0.5]), dtype=np.float64)


class SpacesEnv(gym.Env[Any, Any]):
    """Observations at random; an episode of 5 steps, with a reward of 1 each."""

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.observation_space.seed(seed)
        self._num_steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        self._num_steps += 1
        return self.observation_space.sample(), 1.0, self._num_steps == 5, False, {}


def small_config(algo: str, observation_space: Any, action_space: Any) -> Any:
    config: Any = config_class(algo)()
    if algo in ("APPO", "IMPALA"):
        config.env_runners(num_env_runners=0)
    config.environment(SpacesEnv, env_config={"observation_space": observation_space, "action_space": action_space})
    has_image = any(len(leaf.shape or ()) == 3 for leaf in leaves(space_tree(observation_space)))
    model_config = {"fcnet_hiddens": [16], **({"conv_features": 16} if has_image else {})}
    return config.rl_module(model_config=model_config).debugging(seed=1)


def batch_of(space: spaces.Space[Any], size: int) -> Any:
    space.seed(5)
    return map_tree(lambda *leaves: np.stack(leaves), *(space.sample() for _ in range(size)))


@pytest.mark.parametrize(
    ("algo", "observation_space", "action_space", "settings"),
    [
        ("PPO", CAMERA, spaces.MultiDiscrete([2, 3], start=[1, 5]), {}),
        ("PPO", POSITION, BOUNDED, {"action_bounds": "squash"}),
        ("APPO", CAMERA, spaces.MultiDiscrete([2, 3], start=[1, 5]), {}),
        ("IMPALA", POSITION, BOUNDED, {"action_bounds": "squash"}),
        ("DQN", POSITION, spaces.Discrete(4, start=3), {}),
        ("DQN", CAMERA, spaces.Discrete(2), {"noisy": True, "dueling": True, "num_atoms": 5}),
        ("SAC", CAMERA, BOUNDED, {}),
        ("TD3", POSITION, BOUNDED, {}),
    ],
)
def test_a_loaded_policy_acts_exactly_as_the_algorithm(
    algo: str, observation_space: Any, action_space: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    config = small_config(algo, observation_space, action_space)
    if algo == "DQN":
        config.training(**settings)
    else:
        config.rl_module(model_config={**config.model_config, **settings})
    obs = batch_of(observation_space, 6)
    with config.build() as algorithm:
        with torch.no_grad():
            for parameter in algorithm.get_module().parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        algorithm.set_state(algorithm.get_state())  # the changed weights reach the driver's copy
        policy = load_policy(algorithm.save(tmp_path / "checkpoint"))
        assert policy.observation_space == observation_space
        assert policy.action_space == action_space
        actions = policy.batch(obs)
        expected = algorithm.compute_actions(obs, explore=False)
        np.testing.assert_array_equal(actions, expected)
        assert actions.dtype == expected.dtype == action_space.dtype
        trained = algorithm.get_module().state_dict()
        assert all(torch.equal(weight, trained[name]) for name, weight in policy.module.state_dict().items())
        first = map_tree(lambda leaf: leaf[0], obs)
        np.testing.assert_array_equal(policy(first), algorithm.compute_single_action(first, explore=False))
        assert action_space.contains(policy(first))


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of PPO on CartPole-v1."""
    config = PPOConfig().environment("CartPole-v1").debugging(seed=0)
    with config.training(train_batch_size_per_learner=256, num_epochs=1).build() as algorithm:
        algorithm.train()
        return Path(algorithm.save(tmp_path_factory.mktemp("cartpole") / "checkpoint"))


def test_loading_imports_neither_env_nor_learner_nor_algorithm(cartpole: Path) -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import corral; policy = corral.load_policy(sys.argv[1]);"
        "policy([0.0] * 4); print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(cartpole)], capture_output=True, text=True, check=True)
    imported = done.stdout.split()
    rooms = {".".join(name.split(".")[1:3]) for name in imported if name.startswith("corral.")}
    lowest = {room for room in rooms if room.partition(".")[0] in ("core", "modules", "envs")}
    assert {"runs.policies"} < rooms - lowest <= {"errors", "moved", "runs", "runs.policies", "runs.checkpoint"}
    packages = {name.partition(".")[0] for name in imported}
    assert not packages & {"ray", "rich", "yaml", "tensorboard"}
    assert not [name for name in imported if name.startswith("gymnasium.envs.classic_control")]


@pytest.mark.parametrize(
    "obs", [np.zeros(3), np.zeros((1, 4)), np.full(4, np.nan), {"position": np.zeros(4)}, np.zeros(4, complex)]
)
def test_a_wrong_observation_is_the_error_of_compute_actions(obs: Any, cartpole: Path) -> None:
    policy = load_policy(cartpole)
    with pytest.raises(ObservationError, match="observation") as one:
        policy(obs)
    assert "policy.batch(obs) takes a batch" in str(one.value)
    with pytest.raises(ObservationError, match="observation"):
        policy.batch(map_tree(lambda leaf: np.asarray(leaf)[None], obs))


def test_exploration_is_off_and_seeded(cartpole: Path) -> None:
    obs = np.zeros((64, 4), np.float32)
    assert len(np.unique(load_policy(cartpole).batch(obs))) == 1
    drawn = [load_policy(cartpole, seed=seed).batch(obs, explore=True).tolist() for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert set(drawn[0]) == {0, 1}


def test_a_run_directory_gives_its_best_checkpoint(cartpole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = PPOConfig().environment("CartPole-v1").debugging(seed=7)
    with config.training(train_batch_size_per_learner=256, num_epochs=1).build() as algorithm:
        algorithm.save(run / "checkpoints" / "best")
        algorithm.train()
        algorithm.save(run / "checkpoints" / "iteration-000001")
    weights = load_policy(run).module.state_dict()
    best = load_policy(run / "checkpoints" / "best").module.state_dict()
    last = load_policy(run / "checkpoints" / "iteration-000001").module.state_dict()
    name = "policy_head.weight"
    assert torch.equal(weights[name], best[name])
    assert not torch.equal(weights[name], last[name])


class Net(Module):
    """A linear policy that needs a function in its settings."""

    def __init__(self, observation_space: Any, action_space: Any, model_config: Any) -> None:
        super().__init__(observation_space, action_space, model_config)
        self.layer = torch.nn.Linear(observation_space.shape[0], self.distribution.num_inputs)
        self.scale, self.activation = model_config["scale"], model_config["activation"]

    def policy(self, obs: Any) -> Any:
        return self.activation(self.scale * self.layer(obs))

    def value(self, obs: Any) -> Any:
        return obs[:, 0]


def test_a_local_module_class_must_be_given_again(tmp_path: Path) -> None:
    class Local(Net):
        pass

    settings = {"scale": 2.0, "activation": torch.tanh}
    config = PPOConfig().environment("CartPole-v1").rl_module(Local, model_config=settings)
    obs = np.linspace(-1, 1, 20, dtype=np.float32).reshape(5, 4)
    with config.build() as algorithm:
        path = algorithm.save(tmp_path / "checkpoint")
        expected = algorithm.compute_actions(obs, explore=False)
    with pytest.raises(CheckpointError, match=r"activation.*model_config=\{'activation': ...\}"):
        load_policy(path)
    with pytest.raises(CheckpointError, match=r"Local.*module_class="):
        load_policy(path, model_config={"activation": torch.tanh})
    policy = load_policy(path, module_class=Local, model_config={"activation": torch.tanh})
    np.testing.assert_array_equal(policy.batch(obs), expected)
    with pytest.raises(CheckpointError, match="weights do not fit Wider"):
        load_policy(path, module_class=Wider, model_config={"activation": torch.tanh})


class Wider(Net):
    """Another class with the same settings."""

    def __init__(self, observation_space: Any, action_space: Any, model_config: Any) -> None:
        super().__init__(observation_space, action_space, model_config)
        self.more = torch.nn.Linear(2, 2)


def test_actions_that_an_exploration_chooses_are_refused(tmp_path: Path) -> None:
    config = DQNConfig().environment("CartPole-v1").exploration(exploration_config={"type": "ThompsonSampling"})
    with config.build() as algorithm:
        path = algorithm.save(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="exploration"):
        load_policy(path)


GOOD = policy_description(ModuleSpec(ActorCritic, POSITION, spaces.Discrete(2), {"fcnet_hiddens": (8,)}))


def test_a_description_comes_back() -> None:
    spec = described_spec(GOOD)
    assert (spec.module_class, spec.observation_space) == (ActorCritic, POSITION)
    assert GOOD["module_class"] == "ActorCritic"
    assert isinstance(Policy(spec.build())(np.zeros(3)), np.int64)


@pytest.mark.parametrize(
    "change",
    [
        {"module_class": "os:system"},
        {"module_class": "subprocess:Popen"},
        {"module_class": "no_such_module:Net"},
        {"module_class": 3},
        {"module_class": "torch.nn:Linear"},
        {"observation_space": None},
        {"model_config": 5},
        {"unnamed": 5},
    ],
)
def test_a_damaged_description_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        described_spec({**GOOD, **change})


def test_a_module_that_is_called_returns_its_dist_inputs() -> None:
    module = described_spec(GOOD).build()
    obs = torch.linspace(-1, 1, 6).reshape(2, 3)
    assert torch.equal(module(obs), module.policy(obs))
    seen: list[Any] = []
    module.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    outputs = module(obs)
    assert seen[0][0] is obs
    assert seen[0][1] is outputs


def test_the_policy_of_an_algorithm_has_the_weights_of_now() -> None:
    obs = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    with PPOConfig().environment("CartPole-v1").debugging(seed=0).build() as algorithm:
        module = algorithm.get_module()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_()
            expected = module.policy(torch.from_numpy(obs)).numpy().argmax(-1)
        np.testing.assert_array_equal(algorithm.acting_policy().batch(obs), expected)
