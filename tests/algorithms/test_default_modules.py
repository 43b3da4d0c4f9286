"""Configs of users that name a default module of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor, nn

from corral import APPOConfig, DQNConfig, IMPALAConfig, Module, PPOConfig
from corral.errors import ConfigError
from corral.modules.q_module import QModule


class Net(Module):
    """A plain module."""

    def __init__(self, observation_space: Any, action_space: Any, model_config: Any) -> None:
        super().__init__(observation_space, action_space, model_config)
        self.actor = nn.Linear(4, self.distribution.num_inputs)
        self.critic = nn.Linear(4, 1)

    def policy(self, obs: Any) -> Tensor:
        return self.actor(obs)

    def value(self, obs: Any) -> Tensor:
        return self.critic(obs).squeeze(-1)


class Other(Net):
    """Another one, which is no `OwnDefault`."""


class Lacking(Module):
    """A module without a policy."""


class OwnQ(QModule):
    """A network of values."""


@dataclass(kw_only=True)
class OwnConfig(PPOConfig):
    default: Any = Net

    @property
    def default_module_class(self) -> type[Module]:
        return self.default


@dataclass(kw_only=True)
class OwnIMPALAConfig(IMPALAConfig):
    @property
    def default_module_class(self) -> type[Module]:
        return Net


@dataclass(kw_only=True)
class OwnAPPOConfig(APPOConfig):
    @property
    def default_module_class(self) -> type[Module]:
        return Net


@dataclass(kw_only=True)
class OwnQConfig(DQNConfig):
    @property
    def default_module_class(self) -> type[Module]:
        return OwnQ


@pytest.mark.parametrize("base", [OwnConfig, OwnIMPALAConfig, OwnAPPOConfig])
def test_a_plain_module_is_a_default(base: Any) -> None:
    config = base(num_env_runners=0, train_batch_size_per_learner=64, rollout_fragment_length="auto")
    config.environment("CartPole-v1").reporting(min_sample_timesteps_per_iteration=64)
    with config.build() as algorithm:
        algorithm.train()
        assert isinstance(algorithm.get_module(), Net)


def test_another_module_may_take_its_place() -> None:
    class Unrelated(Module):
        policy, value = Net.policy, Net.value

    OwnConfig().environment("CartPole-v1").rl_module(Other).validate()
    OwnConfig().environment("CartPole-v1").rl_module(Unrelated).validate()
    OwnQConfig().environment("CartPole-v1").rl_module(QModule).validate()


def test_what_a_module_must_define_is_still_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"Lacking must define policy\(self, obs\)"):
        OwnConfig(default=Lacking).environment("CartPole-v1").validate()
    with pytest.raises(ConfigError, match=r"must be a subclass of corral.modules.q_module.QModule"):
        OwnQConfig().environment("CartPole-v1").rl_module(Net).validate()
