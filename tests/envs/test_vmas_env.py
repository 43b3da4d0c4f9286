"""VMAS's env as a tensor vector env: only what has ended is reset."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from corral.envs.vmas_env import VmasVectorEnv, reset_rows
from corral.errors import ConfigError, MissingPackageError

N = 6
SCENARIOS = ["balance", "navigation", "transport", "wheel", "simple_spread", "football", "dropout", "drone"]
SETTINGS: dict[str, dict[str, Any]] = {
    # The red team of football draws numbers only for the sub-envs that need them, so that these depend on each other.
    "football": {"ai_red_agents": False},
}


def needs_vmas() -> None:
    pytest.importorskip("vmas", reason="VMAS is not installed")


def make_vmas(scenario: str, seed: int) -> Any:
    """Return an env of VMAS itself."""
    needs_vmas()
    from vmas import make_env

    return make_env(
        scenario, num_envs=N, seed=seed, dict_spaces=True, terminated_truncated=True, **SETTINGS.get(scenario, {})
    )


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
    # Three envs of VMAS with the same rows: one is never reset, one is reset as a whole, one in the rows of a mask.
    never, whole, rows = envs = [make_vmas(scenario, seed=0) for _ in range(3)]
    mask, later = torch.tensor([True, False, True, True, False, False]), torch.arange(N) == 4
    is_new, is_kept = torch.zeros(N, dtype=torch.bool), torch.ones(N, dtype=torch.bool)
    for t in range(50):
        never.seed(t)
        actions = never.get_random_actions()
        found = []
        for env in envs:
            env.seed(1000 + t)  # VMAS's envs share one random state: each of them draws the same numbers here
            found.append(env.step([action.clone() for action in actions]))
        assert are_equal(rows_of(found[2], is_kept), rows_of(found[0], is_kept)), t
        assert are_equal(rows_of(found[2], is_new), rows_of(found[1], is_new)), t
        if t in (10, 25):
            chosen = mask if t == 10 else later
            rows.seed(77)
            obs = reset_rows(rows, chosen, found[2][0])
            assert are_equal(rows_of(obs, ~chosen), rows_of(found[2][0], ~chosen))
            is_kept &= ~chosen
            assert rows.steps[chosen].eq(0).all() and rows.steps[is_kept].eq(t + 1).all()
        if t == 10:
            whole.seed(77)
            assert are_equal(rows_of(obs, mask), rows_of(whole.reset(), mask))
            is_new = mask


def play(env: VmasVectorEnv, num_steps: int, seed: int) -> list[Any]:
    """Return all that the steps return with random actions."""
    env.single_action_space.seed(seed)
    return [env.step(random_actions(env)) for _ in range(num_steps)]


@pytest.mark.parametrize(
    ("settings", "action_space"),
    [
        ({}, spaces.Box(-1.0, 1.0, (2,))),
        ({"continuous_actions": False}, spaces.Discrete(9)),
        ({"continuous_actions": False, "multidiscrete_actions": True}, spaces.MultiDiscrete([3, 3])),
    ],
)
def test_spaces_and_columns_are_what_the_contract_says(
    settings: dict[str, Any], action_space: spaces.Space[Any]
) -> None:
    needs_vmas()
    env = VmasVectorEnv("wheel", N, max_steps=4, n_agents=2, **settings)
    agents = ("agent_0", "agent_1")
    assert env.possible_agents == agents and env.num_envs == N and env.device == torch.device("cpu")
    assert isinstance(env.single_action_space, spaces.Dict) and isinstance(env.single_observation_space, spaces.Dict)
    assert env.single_action_space == spaces.Dict(dict.fromkeys(agents, action_space))
    obs, _ = env.reset(seed=0)
    for t in range(1, 10):
        actions = random_actions(env)
        copies = {agent: action.clone() for agent, action in actions.items()}
        obs, rewards, terminated, truncated, infos = env.step(actions)
        assert are_equal(actions, copies) and all(actions[agent].shape == copies[agent].shape for agent in agents)
        for agent in agents:
            space = env.single_observation_space[agent]
            assert (obs[agent].shape, obs[agent].dtype) == ((N, *(space.shape or ())), torch.float32)
            assert (rewards[agent].shape, rewards[agent].dtype) == ((N,), torch.float32)
        assert (terminated.dtype, truncated.dtype) == (torch.bool, torch.bool)
        assert truncated.tolist() == [t % 4 == 0] * N
        assert ("final_obs" in infos) == (t % 4 == 0)


def test_an_observation_may_be_a_dict_and_actions_out_of_bounds_are_clipped() -> None:
    needs_vmas()
    env, other = (VmasVectorEnv("football", N, n_blue_agents=2, dict_obs=True, seed=0) for _ in range(2))
    assert isinstance(env.single_observation_space["agent_blue_0"], spaces.Dict)
    obs, _ = env.reset(seed=0)
    assert obs["agent_blue_0"].keys() == env.single_observation_space["agent_blue_0"].keys()
    other.reset(seed=0)
    large, ones = (dict.fromkeys(env.possible_agents, torch.full((N, 2), value)) for value in (7.0, 1.0))
    assert are_equal(env.step(large), other.step(ones))


def test_one_terminated_sub_env_is_reset_and_its_last_observation_is_kept() -> None:
    needs_vmas()
    env = VmasVectorEnv("balance", N, max_steps=1000, seed=0)
    env.reset(seed=1)
    never = VmasVectorEnv("balance", N, seed=0)
    never.reset(seed=1)
    num_ended, is_kept = 0, torch.ones(N, dtype=torch.bool)
    kept, copies = [], []
    for _ in range(150):
        actions = random_actions(env)
        obs, rewards, terminated, truncated, infos = env.step(actions)
        wanted, wanted_rewards, *_ = never.vmas_env.step([*actions.values()])
        before = infos.get("final_obs", obs)
        assert are_equal(rows_of([before, rewards], is_kept), rows_of([wanted, wanted_rewards], is_kept))
        assert are_equal(rows_of(obs, ~terminated), rows_of(before, ~terminated))
        assert not truncated.any()
        if terminated.any() and not terminated.all():
            num_ended += int(terminated.sum())
            first = (obs["agent_0"] != before["agent_0"]).any(1)
            assert torch.equal(first, terminated)
            assert env.vmas_env.steps[terminated].eq(0).all() and env.vmas_env.steps[~terminated].gt(0).all()
        is_kept &= ~terminated
        kept += [*obs.values(), *before.values(), *rewards.values(), terminated, truncated]
        copies += [tensor.clone() for tensor in kept[len(copies) :]]
    assert num_ended > 3
    assert are_equal(kept, copies)  # no later step wrote into what an earlier one returned


def test_what_all_sub_envs_share_changes_only_when_all_of_them_are_reset() -> None:
    rows = make_vmas("simple_push", seed=0)
    rows.seed(0)
    obs = rows.reset()
    goal = rows.agents[0].goal
    for seed in range(20):
        rows.seed(seed)
        reset_rows(rows, torch.arange(N) < 3, obs)
        assert rows.agents[0].goal is goal
    goals = set()
    for seed in range(20):
        rows.seed(seed)
        rows.reset()
        goals.add(rows.agents[0].goal.name)
    assert len(goals) == 2


def test_seeds_reproduce_and_envs_share_no_random_state() -> None:
    needs_vmas()
    from vmas.simulator.environment import Environment

    of_vmas = list(Environment.vmas_random_state)
    env, other = (VmasVectorEnv("balance", N, max_steps=5, seed=seed) for seed in (1, 2))
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    first = env.reset(seed=9)[0]
    run = play(env, 12, seed=0)
    other.reset(seed=9)
    env.single_action_space.seed(0)
    other_run = []
    for _ in range(12):  # both draw in turn
        other_run.append(other.step(random_actions(env)))
        env.reset()
    assert are_equal(other_run, run)
    assert are_equal(other.reset(seed=9)[0], first)
    assert not are_equal(other.reset()[0], first)
    assert not are_equal(VmasVectorEnv("balance", N).reset()[0], VmasVectorEnv("balance", N).reset()[0])
    made = [VmasVectorEnv("balance", N, seed=4).reset()[0] for _ in range(2)]
    assert are_equal(*made)
    assert random.getstate() == before[0] and np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert torch.equal(Environment.vmas_random_state[0], of_vmas[0]) and Environment.vmas_random_state[2] == of_vmas[2]


def test_wrong_settings_name_the_remedy() -> None:
    needs_vmas()
    with pytest.raises(ConfigError, match=r"no scenario 'balanc'\. Did you mean 'balance'"):
        VmasVectorEnv("balanc", N)
    with pytest.raises(ConfigError, match="'n_agent'"):
        VmasVectorEnv("balance", N, n_agent=3)
    with pytest.raises(ConfigError, match="dict_spaces is always True: leave it out"):
        VmasVectorEnv("balance", N, dict_spaces=False)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vmas", None)
    with pytest.raises(MissingPackageError, match=r"run `pip install 'corral\[vmas\]'`"):
        VmasVectorEnv("balance", N)
