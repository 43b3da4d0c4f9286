"""Envs of PettingZoo, played through seats and directly: the same games."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given as each_of
from hypothesis import settings
from hypothesis import strategies as st

from corral.envs.env_state import find_obstacle, get_env_state, set_env_state
from corral.envs.multi_agent_env import MultiAgentEnv
from corral.envs.pettingzoo_env import ParallelPettingZooEnv, PettingZooEnv, from_pettingzoo
from corral.envs.seated_env import SeatedEnv
from corral.envs.vector import EnvContext, make_vector_env
from corral.errors import EnvError

pettingzoo = pytest.importorskip("pettingzoo")
from pettingzoo.classic.connect_four import connect_four  # noqa: E402
from pettingzoo.classic.rps import rps  # noqa: E402
from pettingzoo.classic.tictactoe import tictactoe  # noqa: E402

Steps = dict[str, list[tuple[Any, ...]]]


class Dwindling(pettingzoo.AECEnv):
    """Three agents in turn. After each turn everybody gets a reward; agent i ends after its turn number i + 2.

    Agent `c` is truncated, the others terminate. What an agent that has ended sees is nothing, or the time.
    """

    metadata = {"name": "dwindling", "render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, blind: bool = False, endless: bool = False) -> None:
        super().__init__()
        self.possible_agents = ["a", "b", "c"]
        self.blind, self.level = blind, 0
        self.render_mode = "rgb_array"
        self.num_closed = 0

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 99, (2,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(5)

    def reset(self, seed: Any = None, options: Any = None) -> None:
        self.agents, self.t = [*self.possible_agents], 0
        self.turns = dict.fromkeys(self.agents, 0)
        self.rewards, self._cumulative_rewards = dict.fromkeys(self.agents, 0.0), dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}
        self.agent_selection = "a"

    def observe(self, agent: str) -> Any:
        ended = self.terminations[agent] or self.truncations[agent]
        return None if ended and self.blind else np.float32([self.t, self.possible_agents.index(agent)])

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self.t += 1
        self.turns[agent] += 1
        self.rewards = {other: float(action) + i for i, other in enumerate(self.agents)}
        self.infos = {other: {"t": self.t} for other in self.agents}
        if self.turns[agent] == self.possible_agents.index(agent) + 2:
            (self.truncations if agent == "c" else self.terminations)[agent] = True
        live = [other for other in self.agents if not (self.terminations[other] or self.truncations[other])]
        later = [other for other in live if other > agent]
        self.agent_selection = (later or live or [agent])[0]
        self._accumulate_rewards()
        self._deads_step_first()

    def render(self) -> Any:
        return np.full((2, 2, 3), self.t, np.uint8)

    def close(self) -> None:
        self.num_closed += 1


class Together(pettingzoo.ParallelEnv):
    """Three agents that act together; agent i ends after i + 2 steps, `c` by truncation."""

    metadata = {"name": "together"}  # noqa: RUF012
    possible_agents = ("a", "b", "c")

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 99, (2,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(5)

    def _obs(self) -> dict[str, Any]:
        return {agent: np.float32([self.t, ord(agent)]) for agent in self.agents}

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self.agents, self.t = [*self.possible_agents], 0
        return self._obs(), {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        assert [*actions] == self.agents
        self.t += 1
        obs, rewards = self._obs(), {agent: float(action) for agent, action in actions.items()}
        ends = {agent: self.t == ord(agent) - ord("a") + 2 for agent in self.agents}
        terminations = {agent: end and agent != "c" for agent, end in ends.items()}
        truncations = {agent: end and agent == "c" for agent, end in ends.items()}
        self.agents = [agent for agent in self.agents if not ends[agent]]
        return obs, rewards, terminations, truncations, {agent: {} for agent in ends}


def choose(rng: np.random.Generator, obs: Any, num: int) -> int:
    legal = np.flatnonzero(obs["action_mask"]) if isinstance(obs, dict) else np.arange(num)
    return int(rng.choice(legal))


def add(found: Steps, agent: str, obs: Any, *rest: Any) -> None:
    if isinstance(obs, dict):
        obs = obs["observation"]
    found.setdefault(agent, []).append((None if obs is None else obs.tolist(), *rest))


def direct(env: Any, seed: int) -> Steps:
    """Play an AEC env as its documents show; return what each agent sees, with its action."""
    rng, found = np.random.default_rng(seed), Steps()
    env.reset(seed=seed)
    for agent in env.agent_iter():
        obs, reward, terminated, truncated, _ = env.last()
        action = None if terminated or truncated else choose(rng, obs, 3)
        add(found, agent, obs, float(reward), terminated, truncated, action)
        env.step(action)
    return found


def in_seats(made: Any, seed: int) -> tuple[Steps, tuple[bool, bool]]:
    """Play the same game in seats; return the same, and the flags of the last step."""
    rng, found = np.random.default_rng(seed), Steps()
    env = SeatedEnv(made)
    given, _ = env.reset(seed=seed)
    over = terminated = truncated = False
    while True:
        actions = {name: np.zeros(space.shape, np.int64) for name, space in env.action_space.items()}
        for block in env.seats.blocks:
            for row, agent in enumerate(block.agents):
                seat = block.start + row
                ends = bool(given["terminated"][seat]), bool(given["truncated"][seat])
                if not given["observed"][seat] and not any(ends):
                    assert given["rewards"][seat] == 0.0  # it is waiting, and its rewards are added up
                    continue
                obs: Any = given["obs"][block.name]
                obs = {key: part[row] for key, part in obs.items()} if isinstance(obs, dict) else obs[row]
                obs = obs if given["observed"][seat] else None
                action = None
                if env.acting[seat]:
                    action = actions[block.name][row] = choose(rng, obs, 3)
                add(found, agent, obs, float(given["rewards"][seat]), *ends, action)
        if over:
            return found, (terminated, truncated)
        given, _, terminated, truncated, _ = env.step(actions)
        over = terminated or truncated


@each_of(seed=st.integers(0, 2**16))
@settings(max_examples=8, deadline=None)
@pytest.mark.parametrize(
    "make",
    [tictactoe.env, connect_four.env, rps.env, Dwindling, lambda: Dwindling(blind=True)],
    ids=["tictactoe", "connect_four", "rps", "dwindling", "blind"],
)
def test_turn_based_games_are_the_ones_of_direct_play(make: Any, seed: int) -> None:
    expected = direct(make(), seed)
    found, flags = in_seats(from_pettingzoo(make()), seed)
    assert found == expected
    assert sum(flags) == 1
    if make is tictactoe.env:
        assert sum(steps[-1][1] for steps in found.values()) == 0.0  # one wins what the other loses


def test_an_agent_gets_the_rewards_since_its_turn() -> None:
    """Written out: with the actions 1, 2 and 3 in turn, agents a, b and c get 1, 2 and 3 more, and their index."""
    env = PettingZooEnv(Dwindling())
    assert {agent: obs.tolist() for agent, obs in env.reset()[0].items()} == {"a": [0, 0]}
    steps = [env.step({agent: action}) for agent, action in zip("abc", (1, 2, 3), strict=True)]
    assert [rewards for _, rewards, *_ in steps] == [{"b": 2.0}, {"c": 3.0 + 4.0}, {"a": 1.0 + 2.0 + 3.0}]
    assert [[*obs] for obs, *_ in steps] == [["b"], ["c"], ["a"]]
    obs, rewards, terminateds, truncateds, _ = env.step({"a": 0})  # its second turn is its last
    assert terminateds == {"a": True, "b": False, "__all__": False} and not any(truncateds.values())
    assert obs.keys() == {"a", "b"} and rewards == {"a": 0.0, "b": 3.0 + 4.0 + 1.0}
    assert [*env.agents] == ["b", "c"]


def test_agents_that_act_together() -> None:
    env, aec = SeatedEnv(ParallelPettingZooEnv(Together())), Together()
    given, _ = env.reset()
    obs, _ = aec.reset()
    rng, terminated, truncated, num_steps = np.random.default_rng(0), False, False, 0
    while aec.agents:
        actions = rng.integers(5, size=3)
        given, reward, terminated, truncated, _ = env.step({"block_0": actions})
        acting = {agent: actions["abc".index(agent)] for agent in aec.agents}
        obs, rewards, terminations, truncations, _ = aec.step(acting)
        num_steps += 1
        assert reward == sum(rewards.values())
        for seat, agent in enumerate("abc"):
            assert given["observed"][seat] == (agent in obs)
            assert given["obs"]["block_0"][seat].tolist() == (obs[agent].tolist() if agent in obs else [0, 0])
            assert given["rewards"][seat] == rewards.get(agent, 0.0)
            assert given["terminated"][seat] == terminations.get(agent, False)
            assert given["truncated"][seat] == truncations.get(agent, False)
        assert (terminated or truncated) == (not aec.agents)
    assert (num_steps, terminated, truncated) == (4, False, True)  # the last one was truncated


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize(
    "env",
    ["pettingzoo.classic.rps.rps:parallel_env", "pettingzoo.classic.rps.rps:env", rps.parallel_env, Dwindling],
    ids=["parallel", "aec", "factory", "class"],
)
def test_envs_are_taken_as_they_are(env: Any, vectorization: str) -> None:
    made = make_vector_env(env, EnvContext({}), num_envs=2, vectorization=vectorization)
    made.reset(seed=0)
    made.action_space.seed(0)
    for _ in range(20):
        obs, *_ = made.step(made.action_space.sample())
        assert obs["observed"].any(axis=1).all()
    made.close()


def test_ids_of_its_registry() -> None:
    if not hasattr(pettingzoo, "make"):
        pytest.skip("this version of PettingZoo has no ids")
    context = EnvContext({"env_type": "aec", "id": "classic/rps-v2", "num_actions": 5})
    made = make_vector_env("pettingzoo:make", context, num_envs=1)
    assert made.single_action_space["block_0"].nvec.tolist() == [5, 5]  # type: ignore[index]
    made.close()


def test_settings_of_the_env_are_keyword_arguments() -> None:
    made = make_vector_env("pettingzoo.classic.rps.rps:parallel_env", EnvContext({"num_actions": 5}), num_envs=1)
    assert made.single_action_space["block_0"].nvec.tolist() == [5, 5]  # type: ignore[index]
    made.close()


def test_attributes_of_the_inner_env_can_be_read() -> None:
    inner = Dwindling()
    env = PettingZooEnv(inner)
    env.reset()
    assert isinstance(env, MultiAgentEnv) and env.unwrapped is env and env.env is inner
    assert env.level == 0 and env.metadata["name"] == "dwindling" and env.render_mode == "rgb_array"
    assert env.render().shape == (2, 2, 3)
    assert not hasattr(env, "absent")
    env.close()
    assert inner.num_closed == 1


def test_an_env_with_methods_for_its_state_continues() -> None:
    class Saved(Dwindling):
        NAMES = ("agents", "t", "turns", "rewards", "_cumulative_rewards", "terminations", "truncations", "infos")

        def get_state(self) -> dict[str, Any]:
            return {name: getattr(self, name) for name in (*self.NAMES, "agent_selection")}

        def set_state(self, state: dict[str, Any]) -> None:
            vars(self).update(state)

    env, other = SeatedEnv(PettingZooEnv(Saved())), SeatedEnv(PettingZooEnv(Saved()))
    for one in (env, other):
        one.reset()
    actions = {"block_0": np.array([1, 2, 3])}
    for _ in range(5):
        env.step(actions)
    state = get_env_state(env)
    assert find_obstacle(other, state) == ""
    set_env_state(other, state)
    assert other.ended.tolist() == [True, False, False]
    for _ in range(3):
        found, again = env.step(actions), other.step(actions)
        assert found[1:] == again[1:] and found[0]["rewards"].tolist() == again[0]["rewards"].tolist()
    assert find_obstacle(SeatedEnv(PettingZooEnv(Dwindling())), state) == "it has no get_state and set_state any more"


def test_an_env_without_a_list_of_its_agents() -> None:
    class Unknown(Dwindling):
        def __init__(self) -> None:
            super().__init__()
            del self.possible_agents

    with pytest.raises(EnvError, match="env 'Unknown': PettingZoo's Unknown has no possible_agents"):
        make_vector_env(Unknown, EnvContext({}), num_envs=1)


def test_a_wrapper_that_shows_one_agent_is_an_env_of_one_agent() -> None:
    class OneAgent(pettingzoo.utils.BaseWrapper, gym.Env):  # type: ignore[misc]
        """As in PettingZoo's tutorials for libraries of one agent."""

        observation_space, action_space = spaces.Box(0, 99, (2,), np.float32), spaces.Discrete(5)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            self.env.reset(seed=seed)
            return self.env.observe("a"), {}

        def step(self, action: Any) -> Any:
            return np.zeros(2, np.float32), 0.0, True, False, {}

    made = make_vector_env(lambda: OneAgent(Dwindling()), EnvContext({}), num_envs=1)
    assert made.single_action_space == spaces.Discrete(5)
    made.close()
