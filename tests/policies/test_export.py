"""Exported policies give the env actions of the policy, in ONNX Runtime and in torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from corral import Module, Policy
from corral.core.space_descriptions import described_space
from corral.core.tree import map_tree, named_leaves
from corral.errors import ConfigError, ExportError
from corral.modules.module import ActorCritic
from corral.modules.q_module import QModule
from corral.modules.sac_module import SACModule
from corral.modules.td3_module import TD3Module

# One process imports the exporters.
pytestmark = pytest.mark.xdist_group("graphs")

FLAT = spaces.Box(-1, 1, (4,))
IMAGE = spaces.Box(0, 255, (16, 16, 3), np.uint8)
# One leaf is named like the output; the two parts of a Tuple are leaves of their own.
NESTED = spaces.Dict(
    actions=spaces.Tuple([spaces.Discrete(3, start=2), spaces.Box(-1, 1, (2, 2))]),
    camera=spaces.Box(0, 255, (3, 12, 12), np.uint8),
    keys=spaces.MultiBinary(3),
)
BOUNDED = spaces.Box(np.array([[-2.0, 0.0]]), np.array([[3.0, 0.5]]), dtype=np.float64)
MIXED = spaces.Box(np.array([-2, 0, -np.inf], np.float32), np.array([3, np.inf, np.inf], np.float32))
MULTI = spaces.MultiDiscrete([[2, 3]], start=[[1, -4]])
SMALL = {"fcnet_hiddens": [16], "conv_features": 16}

CASES = [
    pytest.param(ActorCritic, NESTED, MULTI, {}, id="PPO-Dict-MultiDiscrete"),
    pytest.param(ActorCritic, FLAT, MIXED, {}, id="PPO-Box-Box"),
    pytest.param(
        QModule, IMAGE, spaces.Discrete(4, start=7), {"dueling": True, "noisy": True}, id="DQN-image-Discrete"
    ),
    pytest.param(SACModule, FLAT, BOUNDED, {}, id="SAC-Box-Box"),
    pytest.param(TD3Module, FLAT, BOUNDED, {}, id="TD3-Box-Box"),
    pytest.param(ActorCritic, spaces.Discrete(5, start=-2), spaces.MultiBinary([2, 2]), {}, id="PPO-Discrete-Binary"),
    pytest.param(ActorCritic, IMAGE, BOUNDED, {"action_bounds": "squash"}, id="PPO-image-squashed"),
    pytest.param(QModule, NESTED, spaces.Discrete(3), {"num_atoms": 7}, id="DQN-Dict-Discrete"),
    pytest.param(SACModule, NESTED, spaces.Discrete(3), {}, id="SAC-Dict-Discrete"),
    pytest.param(ActorCritic, FLAT, spaces.Box(-1, 1, ()), {"free_log_std": False}, id="PPO-Box-scalar"),
    pytest.param(ActorCritic, NESTED, MULTI, {"architecture": "simba"}, id="PPO-simba"),
    pytest.param(SACModule, FLAT, BOUNDED, {"architecture": "simba_v2"}, id="SAC-simba_v2"),
]


# Each export takes a second or more, and both formats write the same program: the fast tests share the cases.
FAST_ONNX = {"DQN-image", "SAC-Box-Box"}


def cases(*, slow: Callable[[str], bool]) -> list[Any]:
    return [
        pytest.param(*case.values, id=case.id, marks=[pytest.mark.slow] if slow(str(case.id)) else []) for case in CASES
    ]


def make_policy(cls: type[Module], observation_space: Any, action_space: Any, settings: dict[str, Any]) -> Policy:
    """Return a policy whose weights are far from the initial ones, so that actions reach their bounds."""
    torch.manual_seed(0)
    module = cls(observation_space, action_space, {**SMALL, **settings})
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    module.draw_noise()
    return Policy(module)


def batch_of(space: spaces.Space[Any], size: int) -> Any:
    space.seed(size)
    return map_tree(lambda *leaves: np.stack(leaves), *(space.sample() for _ in range(size)))


def check_same_actions(policy: Policy, run: Callable[[Any], Any]) -> None:
    for size in (1, 3, 40):
        obs = batch_of(policy.observation_space, size)
        expected, actions = policy.batch(obs), run(obs)
        assert (actions.shape, actions.dtype) == (expected.shape, policy.action_space.dtype)
        np.testing.assert_allclose(actions, expected, rtol=1e-5, atol=1e-5)
        assert all(policy.action_space.contains(np.asarray(action)) for action in actions)
    assert len(np.unique(expected)) > 1


@pytest.mark.slow_cases("simba")
@pytest.mark.parametrize(
    ("cls", "observation_space", "action_space", "settings"), cases(slow=lambda name: name in FAST_ONNX)
)
def test_a_program_of_torch_gives_the_env_actions(
    cls: Any, observation_space: Any, action_space: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    policy = make_policy(cls, observation_space, action_space, settings)
    extra = {"corral.json": ""}
    program = torch.export.load(str(policy.export(tmp_path / "policy.pt2")), extra_files=extra).module()
    check_same_actions(policy, lambda obs: program(map_tree(torch.from_numpy, obs)).numpy())
    assert described_space(json.loads(json.loads(extra["corral.json"])["action_space"])) == action_space


@pytest.mark.parametrize(
    ("cls", "observation_space", "action_space", "settings"), cases(slow=lambda name: name not in FAST_ONNX)
)
def test_onnx_gives_the_env_actions(
    cls: Any, observation_space: Any, action_space: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    ort = pytest.importorskip("onnxruntime")
    policy = make_policy(cls, observation_space, action_space, settings)
    session = ort.InferenceSession(policy.export(tmp_path / "new" / "policy.onnx"))
    check_same_actions(policy, lambda obs: session.run(["actions"], dict(named_leaves(obs, "obs")))[0])
    inputs = {node.name: node.shape for node in session.get_inputs()}
    spaces_by_name = dict(named_leaves(batch_of(observation_space, 1), "obs"))
    assert inputs == {name: ["batch", *leaf.shape[1:]] for name, leaf in spaces_by_name.items()}
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata["inputs"]) == list(inputs)
    assert json.loads(metadata["outputs"]) == ["actions"]
    assert described_space(json.loads(metadata["observation_space"])) == observation_space
    assert described_space(json.loads(metadata["action_space"])) == action_space


def test_a_missing_package_and_a_wrong_name_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy(ActorCritic, FLAT, spaces.Discrete(2), {})
    with pytest.raises(ConfigError, match=r"policy\.h5 must end with \.onnx .*\.pt2 .*or \.safetensors"):
        policy.export(tmp_path / "policy.h5")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ConfigError, match=r"onnxscript: run `pip install 'corral\[onnx\]'`"):
        policy.export(tmp_path / "policy.onnx")
    assert list(tmp_path.iterdir()) == []


class Branching(Module):
    """A policy that branches on the values of observations."""

    def __init__(self, observation_space: Any, action_space: Any, model_config: Any) -> None:
        super().__init__(observation_space, action_space, model_config)
        self.layer = torch.nn.Linear(4, 2)

    def policy(self, obs: Any) -> Any:
        return self.layer(obs) if obs.sum() > 0 else -self.layer(obs)

    def value(self, obs: Any) -> Any:
        return obs[:, 0]


class FixedSize(Branching):
    """A policy that fixes the batch size."""

    def policy(self, obs: Any) -> Any:
        return self.layer(obs.reshape(len(obs), 4))


@pytest.mark.parametrize("cls", [Branching, FixedSize])
def test_a_policy_that_cannot_be_traced_is_named_and_the_old_file_stays(cls: Any, tmp_path: Path) -> None:
    file = tmp_path / "policy.pt2"
    file.write_bytes(b"old")
    with pytest.raises(ExportError, match=cls.__name__):
        make_policy(cls, FLAT, spaces.Discrete(2), {}).export(file)
    assert file.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["policy.pt2"]
