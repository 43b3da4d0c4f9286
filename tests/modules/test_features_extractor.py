"""A features extractor of the user, written once, in the networks of all algorithms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from at_least import all_of
from corral import Algorithm, load_policy
from corral.algorithms.registry import config_class
from corral.errors import CheckpointError, ConfigError
from corral.runs.checkpoint.imports import check_imports

SPACE = spaces.Dict({"grid": spaces.Box(0, 255, (8, 8, 3), np.uint8), "speed": spaces.Box(-1, 1, (2,), np.float32)})


class Signs(gym.Env[Any, Any]):
    """Env of one step: action 1, or above 0, is right if the sum of the speeds is positive, else the other."""

    def __init__(self, config: Any) -> None:
        self.observation_space = SPACE
        is_box = config["box"]
        self.action_space = spaces.Box(-1, 1, (1,), np.float32) if is_box else spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.speed = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return {"grid": np.zeros((8, 8, 3), np.uint8), "speed": self.speed}, {}

    def step(self, action: Any) -> Any:
        chosen = action[0] > 0 if isinstance(self.action_space, spaces.Box) else action == 1
        reward = float(chosen == (self.speed.sum() > 0))
        return {"grid": np.zeros((8, 8, 3), np.uint8), "speed": self.speed}, reward, True, False, {}


class SpeedFeatures(nn.Module):
    """Reads the speeds alone; counts its calls."""

    num_made = 0

    def __init__(self, observation_space: Any, width: int = 8) -> None:
        super().__init__()
        assert list(observation_space.spaces) == ["grid", "speed"]
        self.layers = nn.Sequential(nn.Linear(2, width), nn.Tanh())
        type(self).num_made += 1

    def forward(self, obs: Any) -> torch.Tensor:
        assert obs["grid"].dtype == torch.uint8
        features: torch.Tensor = self.layers(obs["speed"])
        return features


BOX = ("SAC", "TQC", "CrossQ", "TD3", "DDPG")
# Networks that have an encoder of their own, without targets.
NETWORKS = {"PPO": 2, "APPO": 2, "IMPALA": 2, "DQN": 1, "SAC": 3, "TQC": 3, "CrossQ": 3, "TD3": 3, "DDPG": 2}


def make_config(algo: str, **model: Any) -> Any:
    config: Any = config_class(algo)().environment(Signs, env_config={"box": algo in BOX}).debugging(seed=0)
    small = {"critic_hiddens": [16]} if algo == "CrossQ" else {}
    extractor = {"features_extractor": SpeedFeatures, "features_extractor_config": {"width": 6}}
    config.rl_module(model_config={"fcnet_hiddens": [16], **extractor, **small, **model})
    if algo in ("APPO", "IMPALA"):
        config.env_runners(num_env_runners=0, num_envs_per_env_runner=4, rollout_fragment_length=16)
        config.training(train_batch_size_per_learner=64)
    elif algo == "PPO":
        config.training(train_batch_size_per_learner=64, minibatch_size=32)
    else:
        config.training(num_steps_sampled_before_learning_starts=8, train_batch_size_per_learner=8)
        config.training(replay_buffer_config={"capacity": 500})
        return config.reporting(min_sample_timesteps_per_iteration=16)
    return config.reporting(min_sample_timesteps_per_iteration=64)


@pytest.mark.parametrize("algo", NETWORKS)
def test_every_algorithm_learns_with_it(algo: str, tmp_path: Path) -> None:
    with make_config(algo).build() as algorithm:
        before = {name: value.clone() for name, value in algorithm.get_module().state_dict().items()}
        algorithm.train()
        algorithm.train()
        after = algorithm.get_module().state_dict()
        weights = [name for name in after if "extractor.layers.0.weight" in name and not name.startswith("target_")]
        assert len(weights) == NETWORKS[algo]
        assert all(after[name].shape == (6, 2) and not torch.equal(after[name], before[name]) for name in weights)
        assert not any("conv" in name or "ImageEncoder" in name for name in after)
        algorithm.save(tmp_path)
        obs = {"grid": np.zeros((8, 8, 3), np.uint8), "speed": np.array([0.5, -0.2], np.float32)}
        expected = algorithm.compute_single_action(obs, explore=False)
    np.testing.assert_allclose(load_policy(tmp_path)(obs), expected, rtol=1e-5)
    with Algorithm.from_checkpoint(tmp_path) as restored:  # the file names the class
        assert_same_weights(restored.get_module().state_dict(), after)


def assert_same_weights(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("algo", ["PPO", "DQN", "SAC"])
def test_it_works_with_memory(algo: str) -> None:
    with make_config(algo, use_lstm=True, lstm_cell_size=8, max_seq_len=4).build() as algorithm:
        algorithm.train()
        assert any("extractor.layers.0.weight" in name for name in algorithm.get_module().state_dict())


def test_shared_layers_of_ppo_have_one(tmp_path: Path) -> None:
    before = SpeedFeatures.num_made
    with make_config("PPO", vf_share_layers=True).build() as algorithm:
        names = [name for name in algorithm.get_module().state_dict() if "extractor.layers.0.weight" in name]
        module: Any = algorithm.get_module()
        assert module.policy_encoder is module.value_encoder and len(names) == 2
    assert SpeedFeatures.num_made > before


def test_it_may_be_named_by_its_import_path() -> None:
    config = make_config("PPO", features_extractor="test_features_extractor:SpeedFeatures")
    with config.build() as algorithm:
        assert type(algorithm.get_module().policy_encoder.extractor).__name__ == "SpeedFeatures"


def returns_list(space: Any) -> Any:
    class Lists(nn.Module):
        def forward(self, obs: Any) -> Any:
            return [obs["speed"]]

    return Lists()


def returns_columns(space: Any) -> Any:
    class Columns(nn.Module):
        def forward(self, obs: Any) -> Any:
            return obs["speed"].sum(-1)

    return Columns()


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ({"features_extractor_config": {"depth": 3}}, "features_extractor=SpeedFeatures raised TypeError when it was"),
        ({"features_extractor": lambda space, width: 3}, "returned int: it must return a torch.nn.Module"),
        (
            {"features_extractor": returns_list, "features_extractor_config": {}},
            r"features_extractor=returns_list returned list for two observations: it must return features, float32 \[2",
        ),
        (
            {"features_extractor": returns_columns, "features_extractor_config": {}},
            r"features_extractor=returns_columns returned torch.float32 \[2\] for two observations",
        ),
        ({"conv_features": 64}, "conv_features=64 has no effect without the built-in encoder: leave out features_ext"),
        ({"features_extractor": None}, r"features_extractor_config=.* has no effect without features_extractor"),
    ],
)
def test_what_cannot_work_is_refused_at_build(model: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_config("PPO", **model).build()


@pytest.mark.parametrize(
    ("path", "problem"),
    [("torch:load", "is no class of torch.nn.Module"), ("os:system", "is in Python's standard library")],
)
def test_a_checkpoint_names_only_modules_of_torch(path: str, problem: str) -> None:
    with pytest.raises(
        CheckpointError, match=f"features_extractor='{path}' is not taken from a checkpoint: it {problem}"
    ):
        check_imports({"rl_module": {"model_config": {"features_extractor": path}}}, "here")


# One extractor for actor and critics.

SHARED = ("SAC", "TQC", "CrossQ", "TD3", "DDPG")


@pytest.mark.parametrize("algo", SHARED)
def test_actor_and_critics_may_share_it(algo: str, tmp_path: Path) -> None:
    with make_config(algo, share_features=True).build() as algorithm:
        module: Any = algorithm.get_module()
        assert all_of(critic.encoder is module.actor.encoder for critic in module.q)
        # CrossQ has no target networks.
        assert all(critic.encoder is module.target_q[0].encoder for critic in module.target_q)
        weight = module.actor.encoder.extractor.layers[0].weight
        groups = {name: {*map(id, group)} for name, group in module.parameter_groups().items()}
        assert [name for name, group in groups.items() if id(weight) in group] == ["critic"]
        before = weight.clone()
        algorithm.train()
        algorithm.train()
        assert not torch.equal(module.actor.encoder.extractor.layers[0].weight, before)
        weights = {name: value.clone() for name, value in module.state_dict().items()}
        algorithm.save(tmp_path)
        obs = {"grid": np.zeros((8, 8, 3), np.uint8), "speed": np.array([0.5, -0.2], np.float32)}
        expected = algorithm.compute_single_action(obs, explore=False)
    np.testing.assert_allclose(load_policy(tmp_path)(obs), expected, rtol=1e-5)
    with Algorithm.from_checkpoint(tmp_path) as restored:
        assert_same_weights(restored.get_module().state_dict(), weights)
        module = restored.get_module()
        assert all_of(critic.encoder is module.actor.encoder for critic in module.q)
        restored.train()


@pytest.mark.parametrize("algo", ["SAC", "TD3"])
def test_the_critics_alone_train_what_is_shared(algo: str) -> None:
    """With shared features the gradients of the critics are the sum over separate networks with the same weights."""
    with make_config(algo, share_features=True).build() as one, make_config(algo).build() as other:
        shared, separate = one.get_module(), other.get_module()
        weights = shared.state_dict()
        names = {
            name: name.replace("actor.head.0", "actor.encoder.mlp.0").replace("actor.head.2", "actor.head.0")
            for name in weights
            if algo == "TD3" or "actor.head.3" not in name
        }
        separate.load_state_dict({names[name]: value for name, value in weights.items() if name in names}, strict=True)
        rng = torch.Generator().manual_seed(0)
        obs = {"grid": torch.zeros(5, 8, 8, 3, dtype=torch.uint8), "speed": torch.randn(5, 2, generator=rng)}
        actions = torch.rand(5, 1, generator=rng)
        torch.testing.assert_close(shared.policy(obs), separate.policy(obs))
        for target in (False, True):
            torch.testing.assert_close(
                shared.q_values(obs, actions, target=target), separate.q_values(obs, actions, target=target)
            )
        for module in (shared, separate):
            (module.q_values(obs, actions).square().sum() + module.policy(obs).square().sum()).backward()
        gradient = shared.q[0].encoder.extractor.layers[0].weight.grad
        torch.testing.assert_close(
            gradient, sum(critic.encoder.extractor.layers[0].weight.grad for critic in separate.q)
        )
        assert separate.actor.encoder.extractor.layers[0].weight.grad.abs().sum() > 0


def test_the_loss_of_the_actor_leaves_shared_features_alone() -> None:
    with make_config("SAC", share_features=True).build() as algorithm:
        module: Any = algorithm.get_module()
        obs = {"grid": torch.zeros(3, 8, 8, 3, dtype=torch.uint8), "speed": torch.randn(3, 2)}
        actions, _ = module.sample(obs, torch.randn(3, 1))
        module.sought(obs, actions).sum().backward()
        assert (
            module.q[0].encoder.extractor.layers[0].weight.grad is None
            or (module.q[0].encoder.extractor.layers[0].weight.grad == 0).all()
        )
        assert all(parameter.grad.abs().sum() > 0 for parameter in module.actor.head[2].parameters())


def test_it_is_called_once_for_all_critics() -> None:
    class Counted(SpeedFeatures):
        num_calls = 0

        def forward(self, obs: Any) -> torch.Tensor:
            Counted.num_calls += 1
            return super().forward(obs)

    def calls(**model: Any) -> int:
        with make_config("TQC", features_extractor=Counted, **model).build() as algorithm:
            obs = {"grid": torch.zeros(3, 8, 8, 3, dtype=torch.uint8), "speed": torch.randn(3, 2)}
            Counted.num_calls = 0
            algorithm.get_module().q_values(obs, torch.zeros(3, 1))
            return Counted.num_calls

    assert calls() == 2 and calls(share_features=True) == 1


def test_sharing_that_cannot_work_is_refused() -> None:
    from corral.modules.sac_module import SACModule

    class OwnActor(SACModule):
        def make_actor(self) -> nn.Module:
            return nn.Linear(3, 2)

    class OwnCritic(SACModule):
        def make_critic(self) -> nn.Module:
            return nn.Linear(3, 1)

    for cls, problem in ((OwnActor, "make_actor returned Linear"), (OwnCritic, "make_critic returned Linear")):
        with pytest.raises(ConfigError, match=f"share_features=True needs .*{problem}"):
            cls(spaces.Box(-1, 1, (3,)), spaces.Box(-1, 1, (1,)), {"share_features": True})
    with pytest.raises(ConfigError, match="share_features=True has no effect without a module without memory"):
        make_config("SAC", share_features=True, use_lstm=True).build()
    config: Any = config_class("SAC")().environment("Pendulum-v1").rl_module(model_config={"share_features": True})
    with pytest.raises(ConfigError, match="share_features=True has no effect without an image in the"):
        config.build()
