"""Checkpoints that earlier versions wrote are loaded, act as they did, and train on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_samples import LEARNS_FROM_DATA, RECORDED, SAMPLES, behaviour

from corral import Algorithm, DQNConfig, make_multi_agent
from corral.algorithms.registry import ALGORITHMS
from corral.modules.module import NetworkConfig
from corral.modules.q_module import QModule
from corral.runs.checkpoint import FORMAT_VERSION, read_checkpoint


def test_there_is_a_sample_of_each_algorithm() -> None:
    versions = [f"version-{version}" for version in range(1, FORMAT_VERSION + 1)]
    assert sorted(path.name for path in SAMPLES.iterdir()) == versions
    for algo in ALGORITHMS:
        assert (SAMPLES / versions[-1] / algo / "metadata.json").is_file()


@pytest.mark.filterwarnings("ignore:corral.testing.envs is corral.testing now:DeprecationWarning")
@pytest.mark.parametrize(
    "sample", sorted(SAMPLES.glob("version-*/*.json")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_a_sample_is_loaded_acts_as_before_and_trains_on(sample: Path) -> None:
    did = json.loads(sample.read_text(encoding="utf-8"))
    path = sample.with_suffix("")
    before = sorted(sample.parent.rglob("*"))
    assert f"version-{read_checkpoint(path).metadata['format_version']}" == sample.parent.name
    data = {"input_": RECORDED} if sample.stem in LEARNS_FROM_DATA else {}
    with Algorithm.from_checkpoint(path, **data) as algo:
        does = behaviour(algo)
        assert np.allclose(does["actions"], did["actions"], rtol=1e-5, atol=1e-6)
        assert {**does, "actions": did["actions"]} == did
        steps = did["num_env_steps_sampled_lifetime"]
        result = algo.train()
        assert result["training_iteration"] == did["training_iteration"] + 1
        assert result["num_env_steps_sampled_lifetime"] > steps
    assert sorted(sample.parent.rglob("*")) == before  # loading leaves nothing behind


TwoPoles: Any = make_multi_agent("CartPole-v1")


class OwnNetworkConfig(NetworkConfig):
    """Settings of a user's class, with defaults of its own."""

    DEFAULT_HIDDENS = (24,)


class OwnQModule(QModule):
    CONFIG = OwnNetworkConfig


class OwnDQNConfig(DQNConfig):
    """A user's own class of settings."""


@pytest.mark.parametrize("base", [DQNConfig, OwnDQNConfig])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dueling": True, "model_config": {"head_hiddens": [8]}},
        {"module_class": OwnQModule},
        {"policies": {"a": {}, "b": {"model_config": {"fcnet_hiddens": [8]}}}, "env": TwoPoles},
    ],
    ids=["plain", "heads", "own module", "two modules"],
)
def test_networks_of_dqn_from_before_they_were_normalised_are_kept(
    base: type[DQNConfig], settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("dueling", "noisy", "sigma0", "num_atoms", "v_min", "v_max")
    with monkeypatch.context() as patch:
        earlier = property(lambda config: {name: getattr(config, name) for name in names})
        patch.setattr(DQNConfig, "module_settings", earlier)
        config = base().environment("CartPole-v1").debugging(seed=0).copy(**settings)
        if "policies" in settings:
            config.environment(env_config={"num_agents": 2})
            config.multi_agent(policy_mapping_fn=first_or_second)
        with config.build() as algo:
            algo.save(tmp_path / "earlier")
            weights = {name: algo.get_module(name).state_dict() for name in algo.module_ids}
    for saved, path in (("earlier", "again"), ("again", "once more")):
        env = {"env": TwoPoles} if "policies" in settings else {}
        with Algorithm.from_checkpoint(tmp_path / saved, **env) as algo:
            for name, expected in weights.items():
                found = algo.get_module(name).state_dict()
                assert found.keys() == expected.keys() and not any("encoder.mlp.1" in key for key in found)
                assert all(map(torch.equal, found.values(), expected.values()))
            algo.save(tmp_path / path)


def first_or_second(agent_id: int, episode: Any) -> str:
    return "ab"[agent_id]


def test_a_module_of_a_user_keeps_its_own_defaults() -> None:
    with DQNConfig().environment("CartPole-v1").rl_module(OwnQModule).build() as algo:
        shapes = [tuple(weight.shape) for weight in algo.get_module().q.parameters()]
        assert shapes == [(24, 4), (24,), (2, 24), (2,)]
