"""A module that does not keep its contract is refused when it is built, by class, method and shape."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from corral import DQNConfig, Module, PPOConfig, SACConfig
from corral.algorithms.config.config import AlgorithmConfig
from corral.errors import ConfigError
from corral.modules.q_module import QModule
from corral.modules.sac_module import SACModule
from corral.modules.spec import ModuleSpec, check_module
from corral.testing import CountingEnv, IdentityEnv

BOX = {"env": IdentityEnv, "env_config": {"space": "box"}}


class Good(Module):
    def __init__(self, observation_space: Any, action_space: Any, model_config: Any) -> None:
        super().__init__(observation_space, action_space, model_config)
        self.pi, self.vf = nn.Linear(2, self.distribution.num_inputs), nn.Linear(2, 1)

    def policy(self, obs: Any) -> Any:
        return self.pi(obs)

    def value(self, obs: Any) -> Any:
        return self.vf(obs).squeeze(-1)


class Column(Good):
    def value(self, obs: Any) -> Any:
        return self.vf(obs)


class Transposed(Good):
    def policy(self, obs: Any) -> Any:
        return self.pi(obs)[:, :1]


class OneOnly(Good):
    def policy_and_value(self, obs: Any) -> Any:
        return self.policy(obs)


class ColumnOfBoth(Good):
    def policy_and_value(self, obs: Any) -> Any:
        return self.policy(obs), self.vf(obs)


class Half(Good):
    def value(self, obs: Any) -> Any:
        return super().value(obs).half()


class NumbersOnly(Good):
    def value(self, obs: Any) -> Any:
        return super().value(obs).numpy()


class NoSuper(Module):
    def __init__(self, observation_space: Any, action_space: Any, model_config: Any) -> None:
        self.layer = nn.Linear(2, 2)

    policy = value = Good.policy


class NoSuperAndNoLayers(NoSuper):
    def __init__(self, observation_space: Any, action_space: Any, model_config: Any) -> None:
        self.width = 3


class Brain(Good):
    def __init__(self, observation_space: Any, action_space: Any, model_config: Any) -> None:
        super().__init__(observation_space, action_space, model_config)
        self.to(torch.bfloat16)


class NarrowQ(QModule):
    def make_network(self) -> nn.Module:
        return nn.Linear(2, 3)


class NoGreedy(QModule):
    def q_values(self, obs: Any, *, target: bool = False) -> Tensor:
        return super().q_values(obs, target=target).amax(-1)


class ColumnOfCritic(SACModule):
    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, obs: Tensor, actions: Tensor) -> Any:
            return self.layer(torch.cat([obs, actions], -1))

    def make_critic(self) -> nn.Module:
        return self.Critic()


class NarrowActor(SACModule):
    def make_actor(self) -> nn.Module:
        return nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("config", "module_class", "message"),
    [
        (
            PPOConfig(),
            Column,
            "Column.value(obs) must return a tensor float32[2] for 2 observations, and returns float32[2, 1]",
        ),
        (
            PPOConfig(),
            Transposed,
            "Transposed.policy(obs) must return a tensor float32[2, 2] for 2 observations, and returns float32[2, 1]",
        ),
        (PPOConfig(), OneOnly, "OneOnly.policy_and_value(obs)[1] must return a tensor float32[2]"),
        (
            PPOConfig(),
            ColumnOfBoth,
            "ColumnOfBoth.policy_and_value(obs)[1] must return a tensor float32[2] for 2 observations",
        ),
        (PPOConfig(), Half, "and returns float16[2]"),
        (
            PPOConfig(),
            NumbersOnly,
            "NumbersOnly.value(obs) must return a tensor float32[2] for 2 observations, and returns ndarray",
        ),
        (PPOConfig(), NoSuper, "NoSuper.__init__ must begin with super().__init__(observation_space,"),
        (PPOConfig(), NoSuperAndNoLayers, "NoSuperAndNoLayers.__init__ must begin with super().__init__("),
        (PPOConfig(), Brain, "Brain: the weight 'pi.weight' is torch.bfloat16"),
        (DQNConfig(), NarrowQ, "NarrowQ.q(obs) must return a tensor float32[2, 2]"),
        (DQNConfig(), NoGreedy, "NoGreedy.q_values(obs) must return a tensor float32[2, 2]"),
        (
            SACConfig().environment(**BOX),
            ColumnOfCritic,
            "ColumnOfCritic.q[0](obs, actions) must return a tensor float32[2]",
        ),
        (SACConfig().environment(**BOX), NarrowActor, "NarrowActor.actor(obs) must return a tensor float32[2, 4]"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_error_names_class_method_and_shapes(
    config: AlgorithmConfig, module_class: type[Module], message: str
) -> None:
    config = config if config.env is not None else config.environment(CountingEnv)
    with pytest.raises(ConfigError, match=re.escape(message)):
        config.rl_module(module_class).build()


class Counter(Good):
    """Counts the observations it has seen, and draws from torch's global generator."""

    def __init__(self, observation_space: Any, action_space: Any, model_config: Any) -> None:
        super().__init__(observation_space, action_space, model_config)
        self.register_buffer("seen", torch.zeros(()))

    def value(self, obs: Any) -> Any:
        self.seen = self.seen + len(obs)
        return super().value(obs) + 0 * torch.rand(len(obs))


def test_the_check_leaves_no_trace() -> None:
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    observation_space.seed(3)
    expected = [observation_space.sample() for _ in range(2)]
    observation_space.seed(3)
    module = ModuleSpec(Counter, observation_space, spaces.Discrete(2), {}).build()
    random_state = torch.random.get_rng_state()
    check_module(module)
    assert module.training and torch.equal(torch.random.get_rng_state(), random_state)
    np.testing.assert_array_equal([observation_space.sample() for _ in range(2)], expected)
    with PPOConfig().environment(CountingEnv).rl_module(Counter).build() as algo:
        assert algo.get_module().seen == 0  # the module that learns is another copy


def test_floats_arrive_as_float32() -> None:
    space = spaces.Dict(a=spaces.Box(-np.inf, np.inf, (2,), np.float64), b=spaces.Box(0, 9, (1,), np.int64))
    dtypes = []

    class Noted(Good):
        def policy(self, obs: Any) -> Any:
            dtypes.append((obs["a"].dtype, obs["b"].dtype))
            return self.pi(obs["a"])

        def value(self, obs: Any) -> Any:
            return self.vf(obs["a"]).squeeze(-1)

    check_module(Noted(space, spaces.Discrete(2), {}))
    assert dtypes == [(torch.float32, torch.int64)]
