"""Policies with action masks: loaded, exported, evaluated and asked for one action."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corral import Algorithm, DQNConfig, Policy, PPOConfig, SACConfig, evaluate_policy, load_policy
from corral.core.tree import map_tree, named_leaves
from corral.envs.mask_wrapper import ActionMasks
from corral.errors import ObservationError
from corral.testing import DoorCorridor
from corral.tools.cli.main import main


def trained(kind: Any, path: Path, *, masks: str = "observations", sizes: Any = (20,)) -> Path:
    config = kind().environment(DoorCorridor, env_config={"masks": masks, "sizes": list(sizes), "length": 3})
    config.environment(action_masks=True if masks == "observations" else masks)
    config.rl_module(model_config={"fcnet_hiddens": [8]}).reporting(min_sample_timesteps_per_iteration=64)
    training = {"minibatch_size": 64} if kind is PPOConfig else {"num_steps_sampled_before_learning_starts": 32}
    with config.training(train_batch_size_per_learner=64, **training).debugging(seed=0).build() as algo:
        algo.train()
        return Path(algo.save(path))


def random_obs(policy: Policy, rows: int) -> dict[str, Any]:
    """Return random observations whose masks are random too; each entry of an action has a legal value."""
    rng = np.random.default_rng(0)
    shapes = {key: space.shape for key, space in policy.observation_space.spaces.items()}  # type: ignore[attr-defined]
    mask = (rng.random((rows, *shapes["action_mask"])) < 0.2).astype(np.int8)
    mask[:, [1, -1]] = 1
    return {"action_mask": mask, "observations": rng.random((rows, *shapes["observations"]), np.float32)}


@pytest.mark.parametrize(("kind", "sizes"), [(PPOConfig, (4, 5)), (DQNConfig, (20,)), (SACConfig, (20,))])
def test_loaded_and_exported_policies_keep_to_the_mask(kind: Any, sizes: Any, tmp_path: Path) -> None:
    policy = load_policy(trained(kind, tmp_path / "checkpoint", sizes=sizes))
    obs = random_obs(policy, 40)
    actions = policy.batch(obs)
    offsets = np.cumsum([0, *sizes[:-1]])
    for explore in (False, True):
        chosen = policy.batch(obs, explore=explore).reshape(40, -1) + offsets
        assert np.take_along_axis(obs["action_mask"], chosen, 1).all()
    first = map_tree(lambda leaf: leaf[0], obs)
    np.testing.assert_array_equal(policy(first), actions[0])
    program = torch.export.load(str(policy.export(tmp_path / "policy.pt2"))).module()
    np.testing.assert_array_equal(program(map_tree(torch.from_numpy, obs)).numpy(), actions)
    first["action_mask"][:] = 0
    with pytest.raises(ObservationError, match="action_mask allows no action"):
        policy(first)


@pytest.mark.slow
def test_onnx_keeps_to_the_mask(tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    policy = load_policy(trained(PPOConfig, tmp_path / "checkpoint"))
    obs = random_obs(policy, 40)
    session = ort.InferenceSession(policy.export(tmp_path / "policy.onnx"))
    actions = session.run(["actions"], dict(named_leaves(obs, "obs")))[0]
    np.testing.assert_array_equal(actions, policy.batch(obs))


@pytest.mark.parametrize("masks", ["observations", "infos", "method"])
def test_a_checkpoint_is_evaluated_with_its_masks(
    masks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trained(PPOConfig, tmp_path / "checkpoint", masks=masks)
    wrappers = [] if masks == "observations" else [lambda env: ActionMasks(env, masks)]  # type: ignore[arg-type]
    env_config = {"masks": masks, "length": 3}
    found = evaluate_policy(load_policy(path), DoorCorridor, episodes=5, env_config=env_config, wrappers=wrappers)
    assert found.num_episodes == 5
    assert main(["evaluate", str(path), "--episodes", "5"]) == 0
    assert f"{found.episode_return_mean:.2f}" in capsys.readouterr().out
    with Algorithm.from_checkpoint(path) as algo:
        algo.train()
        obs = random_obs(load_policy(path), 1)
        first = map_tree(lambda leaf: leaf[0], obs)
        assert first["action_mask"][algo.compute_single_action(first)] == 1
        first["action_mask"][:] = 0
        with pytest.raises(ObservationError, match="action_mask allows no action"):
            algo.compute_single_action(first)
