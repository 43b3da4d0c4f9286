"""VMAS's env as a tensor vector env: only what has ended is reset, and a restored env continues exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from corral.core.plain import misfits
from corral.envs.vmas_env import VmasVectorEnv, reset_rows

N = 6
SCENARIOS = ["balance", "navigation", "transport", "wheel", "simple_spread", "football", "dropout", "sampling", "drone"]
SCENARIOS += ["joint_passage", "simple_world_comm", "vel_control", "wind_flocking"]
FOOTBALL = {"ai_red_agents": True}


def needs_vmas() -> None:
    pytest.importorskip("vmas", reason="VMAS is not installed")


def make_vmas(scenario: str, seed: int) -> Any:
    """Return an env of VMAS itself."""
    needs_vmas()
    from vmas import make_env

    return make_env(scenario, num_envs=N, seed=seed, dict_spaces=True, terminated_truncated=True)


def random_actions(env: VmasVectorEnv) -> dict[Any, torch.Tensor]:
    """Return actions of all agents, in the form of the action space."""

    def sample(space: spaces.Space[Any]) -> torch.Tensor:
        return torch.from_numpy(np.stack([np.asarray(space.sample()) for _ in range(env.num_envs)]))

    assert isinstance(env.single_action_space, spaces.Dict)
    return {agent: sample(space) for agent, space in env.single_action_space.items()}


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two nests of dicts, tuples and tensors hold the same numbers; NaN equals NaN."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return bool(torch.equal(torch.nan_to_num(one.float()), torch.nan_to_num(other.float())))


def rows_of(tree: Any, mask: torch.Tensor) -> Any:
    if isinstance(tree, dict):
        return {key: rows_of(part, mask) for key, part in tree.items()}
    return tree[mask] if isinstance(tree, torch.Tensor) else [rows_of(part, mask) for part in tree]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_sub_envs_that_are_reset_equal_a_full_reset_and_the_others_an_env_without_one(scenario: str) -> None:
    # Three envs of VMAS with the same rows: one is never reset, one is reset as a whole, one in the rows of the mask.
    never, whole, rows = (make_vmas(scenario, seed=0) for _ in range(3))
    masks = {10: torch.tensor([True, False, True, True, False, False]), 25: torch.arange(N) == 4}
    was_reset = torch.zeros(N, dtype=torch.bool)
    obs: Any = None
    for t in range(50):
        for env in (never, whole, rows):
            env.seed(t)  # VMAS's envs share one random state: each of them draws the same numbers
            if env is never:
                actions = env.get_random_actions()
                env.seed(1000 + t)
            else:
                env.seed(1000 + t)
            found = env.step([action.clone() for action in actions])
            if env is never:
                of_never = found
            elif env is whole:
                of_whole = found
            else:
                of_rows = found
        assert are_equal(rows_of(of_rows, ~was_reset), rows_of(of_never, ~was_reset)), t
        if t >= 10:
            since_first = was_reset if t < 26 else masks[10] & ~masks[25]
            assert are_equal(rows_of(of_rows, since_first), rows_of(of_whole, since_first)), t
        if t == 10:
            whole.seed(77)
            fresh = whole.reset()
        if t in masks:
            rows.seed(77)
            obs = reset_rows(rows, masks[t], of_rows[0])
            was_reset |= masks[t]
            assert are_equal(rows_of(obs, ~masks[t]), rows_of(of_rows[0], ~masks[t]))
            assert (rows.steps == torch.where(was_reset, (t - 10) * masks[10], t + 1) * ~masks[t]).all()
        if t == 10:
            assert are_equal(rows_of(obs, masks[t]), rows_of(fresh, masks[t]))


def play(env: VmasVectorEnv, num_steps: int, seed: int) -> list[Any]:
    """Return all that the steps return with random actions."""
    env.single_action_space.seed(seed)
    return [env.step(random_actions(env)) for _ in range(num_steps)]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_restored_env_continues_exactly(scenario: str) -> None:
    needs_vmas()
    settings = FOOTBALL if scenario == "football" else {}
    env, other = (VmasVectorEnv(scenario, N, max_steps=13, seed=seed, **settings) for seed in (1, 2))
    env.reset(seed=3)
    play(env, 20, seed=0)
    state = env.get_state()
    assert not list(misfits(state))
    run = play(env, 20, seed=1)
    other.reset(seed=4)
    play(other, 4, seed=0)
    fresh = VmasVectorEnv(scenario, N, max_steps=13, **settings)
    for restored in (other, fresh):
        restored.set_state(state)
        assert are_equal(play(restored, 20, seed=1), run)
