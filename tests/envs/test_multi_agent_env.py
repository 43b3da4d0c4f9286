"""`MultiAgentEnv`: where agents and spaces are found, groups of agents, and copies of a single-agent env."""

from __future__ import annotations

import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import corral
from corral import MultiAgentEnv
from corral.envs.env_state import find_obstacle, get_env_state
from corral.envs.multi_agent_env import AgentGroups, possible_agents
from corral.envs.seated_env import SeatedEnv
from corral.envs.seats import Seats
from corral.envs.vector import EnvContext, make_vector_env
from corral.errors import ConfigError, EnvError
from corral.testing import CountingEnv

BOX, FOUR = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(4)


class Team(MultiAgentEnv):
    """Agents 0 to 3 and `coach` act together; the reward of agent i is its action. It does what `faults` says."""

    def __init__(self, **faults: Any) -> None:
        super().__init__()
        self.agents = self.possible_agents = [0, 1, 2, 3, "coach"]
        self.observation_spaces = {
            agent: spaces.Box(-1, i + 1, (2,), np.float32) for i, agent in enumerate(self.agents)
        }
        self.action_spaces = {0: FOUR, 1: FOUR, 2: FOUR, 3: BOX, "coach": FOUR}
        self.faults, self.given = faults, list[Any]()

    def _see(self) -> dict[Any, Any]:
        agents = self.faults.get("observed", self.possible_agents)
        return {agent: np.float32([i, self.t]) for i, agent in enumerate(self.possible_agents) if agent in agents}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self._see(), {0: {"first": True}}

    def step(self, action_dict: Any) -> Any:  # type: ignore[override]
        self.given.append(action_dict)
        self.t += 1
        rewards = {agent: float(np.sum(action)) for agent, action in action_dict.items()}
        ends = self.faults.get("ends", {0: False, 2: False, "__all__": False})
        return self._see(), rewards, ends, {}, {0: {"t": self.t}, 1: {"n": 1}, "__common__": {"c": 1}}


@pytest.mark.parametrize("attribute", ["possible_agents", "agents", "_agent_ids"])
def test_a_set_of_agents_has_one_order_in_all_processes(attribute: str) -> None:
    class Named(MultiAgentEnv):
        def __init__(self) -> None:
            setattr(self, attribute, {f"agent_{i}" for i in range(9)})

    assert possible_agents(Named()) == [f"agent_{i}" for i in range(9)]


class TestSpaces:
    def test_the_three_ways_to_give_them(self) -> None:
        class ByDicts(MultiAgentEnv):
            possible_agents = ("a", "b")
            observation_spaces = {"a": BOX, "b": FOUR}  # noqa: RUF012
            action_spaces = {"a": FOUR, "b": FOUR}  # noqa: RUF012

        class ByDictSpaces(MultiAgentEnv):
            observation_space = spaces.Dict({"a": BOX, "b": FOUR})
            action_space = spaces.Dict({"a": FOUR, "b": FOUR})

        class Shared(MultiAgentEnv):
            observation_space, action_space = BOX, FOUR

            def __init__(self) -> None:
                self.agents = ["a", "b"]

        for made, b_space in ((ByDicts(), FOUR), (ByDictSpaces(), FOUR), (Shared(), BOX)):
            assert Seats.of(made).agents == ("a", "b")
            assert (made.get_observation_space("a"), made.get_action_space("a")) == (BOX, FOUR)
            assert (made.get_observation_space("b"), made.get_action_space("b")) == (b_space, FOUR)
        assert ByDicts().get_observation_space("c") is None

    def test_a_dict_space_that_all_agents_share_is_the_space_of_each(self) -> None:
        class Shared(MultiAgentEnv):
            possible_agents = ("a", "b")
            observation_space, action_space = spaces.Dict({"camera": BOX, "level": FOUR}), FOUR

        assert Seats.of(Shared()).blocks[0].observation_space == Shared.observation_space

    def test_methods_of_the_env_and_spaces_of_a_wrapper_come_first(self) -> None:
        class Own(Team):
            def get_action_space(self, agent_id: Any) -> Any:
                return spaces.Discrete(7)

        class Narrow(gym.Wrapper[Any, Any, Any, Any]):
            observation_spaces = dict.fromkeys([0, 1, 2, 3, "coach"], FOUR)

        [block] = Seats.of(Narrow(Own())).blocks
        assert (block.observation_space, block.action_space) == (FOUR, spaces.Discrete(7))

    def test_numbers_of_agents(self) -> None:
        env = Team()
        env.agents = [0]
        assert (env.num_agents, env.max_num_agents) == (1, 5)

    def test_a_step_must_be_defined(self) -> None:
        with pytest.raises(TypeError, match=r"MultiAgentEnv must define step\(action_dict\)"):
            MultiAgentEnv().step({})


class TestAgentGroups:
    GROUPS = {"team": [2, 0, 1], "solo": [3]}  # noqa: RUF012

    def test_groups_have_tuples_and_the_sum_of_the_rewards(self) -> None:
        team = Team()
        env = team.with_agent_groups(self.GROUPS)
        assert env.possible_agents == ["team", "solo", "coach"]
        kinds = [spaces.Box(-1, i + 1, (2,), np.float32) for i in range(5)]
        assert env.observation_spaces["team"] == spaces.Tuple([kinds[2], kinds[0], kinds[1]])
        assert env.action_spaces == {"team": spaces.Tuple([FOUR] * 3), "solo": spaces.Tuple([BOX]), "coach": FOUR}
        obs, infos = env.reset()
        assert [part.tolist() for part in obs["team"]] == [[2, 0], [0, 0], [1, 0]]
        assert obs["coach"].tolist() == [4, 0] and infos == {"team": {"_group_info": [{"first": True}]}}
        actions = {"team": (3, 1, 2), "solo": (np.float32([0.5, 0.25]),), "coach": 1}
        obs, rewards, terminateds, truncateds, infos = env.step(actions)
        assert {agent: np.sum(action) for agent, action in team.given[0].items()} == {
            2: 3,
            0: 1,
            1: 2,
            3: 0.75,
            "coach": 1,
        }
        assert rewards == {"team": 6.0, "solo": 0.75, "coach": 1.0}
        assert terminateds == {"team": False, "__all__": False} and truncateds == {}
        assert infos["team"] == {"_group_info": [{"t": 1}, {"n": 1}], "_group_rewards": [3.0, 1.0, 2.0]}
        assert infos["__common__"] == {"c": 1} and infos["solo"] == {"_group_rewards": [0.75]}

    def test_groups_have_seats(self) -> None:
        team = Team()
        env = make_vector_env(lambda: team.with_agent_groups(self.GROUPS), EnvContext({}), num_envs=1, check=False)
        seats = env.single_observation_space.seats  # type: ignore[attr-defined]
        assert seats.agents == ("team", "solo", "coach")
        assert env.envs[0].unwrapped is team  # type: ignore[attr-defined]
        env.reset()
        flat = {"block_0": [[[3, 1, 2]]], "block_1": [[[0.5, 0.25]]], "block_2": [[1]]}
        obs, rewards, *_ = env.step({name: np.array(rows) for name, rows in flat.items()})
        assert obs["rewards"].tolist() == [[6.0, 0.75, 1.0]] and rewards.tolist() == [7.75]
        assert {agent: np.sum(action) for agent, action in team.given[0].items()} == {
            2: 3,
            0: 1,
            1: 2,
            3: 0.75,
            "coach": 1,
        }
        assert obs["obs"]["block_0"][1][0, 0].tolist() == [0, 1]  # agent 0 is the second one of its team

    def test_members_end_together(self) -> None:
        env = Team(ends={0: True, 1: True, 2: True, "__all__": False}).with_agent_groups(self.GROUPS)
        env.reset()
        found = env.step({"team": (0, 0, 0), "solo": (np.zeros(2),), "coach": 0})
        assert found[2] == {"team": True, "__all__": False}

    @pytest.mark.parametrize(
        ("faults", "message"),
        [
            ({"observed": [0, 2, "coach"]}, "group 'team': agent 1 was not observed, or did not end, together"),
            ({"ends": {0: True, 2: True, "__all__": False}}, "group 'team': agent 1 was not observed, or did not end"),
        ],
    )
    def test_members_that_are_not_together(self, faults: Any, message: str) -> None:
        env = Team(**faults).with_agent_groups(self.GROUPS)
        with pytest.raises(EnvError, match=message):
            env.reset()
            env.step({"team": (0, 0, 0), "solo": (np.zeros(2),), "coach": 0})

    @pytest.mark.parametrize(
        ("groups", "message"),
        [
            ({"team": [0, 9]}, "group 'team' has agent 9, which is not in possible_agents"),
            ({"x": [0, 1], "y": [1]}, "group 'y' has agent 1, which is in two groups"),
            ({"coach": [0, 1]}, "group 'coach' has the id of an agent"),
            ({"x": []}, "group 'x' has no members"),
        ],
    )
    def test_bad_groups(self, groups: Any, message: str) -> None:
        with pytest.raises(EnvError, match=message):
            AgentGroups(Team(), groups)

    def test_spaces_may_be_given(self) -> None:
        wide = spaces.Tuple([spaces.Box(-9, 9, (2,), np.float32)] * 2)
        env = Team().with_agent_groups({"team": [0, 1]}, obs_space=wide, act_space=spaces.Tuple([FOUR, FOUR]))
        assert env.observation_spaces["team"] == env.observation_space == wide

    def test_the_state_of_the_env_inside_is_reached(self) -> None:
        class Saved(Team):
            def get_state(self) -> Any:
                return {"t": self.t}

            def set_state(self, state: Any) -> None:
                self.t = state["t"]

        env = SeatedEnv(Saved().with_agent_groups(self.GROUPS))
        env.reset()
        state = get_env_state(env)
        assert state["state"] == {"t": 0} and find_obstacle(env, state) == ""


class TestCopies:
    def test_every_agent_plays_its_own_copy(self) -> None:
        cls = corral.make_multi_agent(CountingEnv)
        env = cls({"num_agents": 3, "episode_length": 4})
        assert env.possible_agents == [0, 1, 2] and issubclass(cls, MultiAgentEnv)
        obs, _ = env.reset(seed=1)
        assert [one.tolist() for one in obs.values()] == [[0, 0]] * 3  # episode and time
        steps = [env.step({0: 0, 1: 1, 2: 0}) for _ in range(4)]
        assert [rewards for _, rewards, *_ in steps] == [dict.fromkeys(range(3), float(t)) for t in (1, 2, 3, 4)]
        assert steps[2][2]["__all__"] is False and steps[3][2] == {0: True, 1: True, 2: True, "__all__": True}

    def test_agents_end_one_after_another(self) -> None:
        env = SeatedEnv(corral.make_multi_agent("CartPole-v1")({"num_agents": 4}))
        env.reset(seed=0)
        env.action_space.seed(0)
        alive, num_steps, over = 4, 0, False
        while not over:
            assert env.acting.sum() == alive
            obs, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            assert reward == alive
            alive, num_steps, over = alive - obs["terminated"].sum(), num_steps + 1, terminated or truncated
        assert alive == 0 and terminated and num_steps < 200

    def test_seeds_of_the_copies_differ_and_are_repeated(self) -> None:
        env, other = (corral.make_multi_agent("CartPole-v1")({"num_agents": 4}) for _ in range(2))
        first, again = env.reset(seed=3)[0], other.reset(seed=3)[0]
        assert len({obs.tobytes() for obs in first.values()}) == 4
        assert all((first[agent] == again[agent]).all() for agent in first)
        assert (env.reset()[0][0] != first[0]).any()

    def test_it_is_an_env_of_a_config(self) -> None:
        env = make_vector_env(
            corral.make_multi_agent("CartPole-v1"),
            EnvContext({"num_agents": 2, "render_mode": "rgb_array"}),
            num_envs=2,
        )
        env.reset(seed=0)
        sub_env = env.envs[0]  # type: ignore[attr-defined]
        assert sub_env.render_mode == "rgb_array" and sub_env.render().shape == (400, 1200, 3)
        env.close()

    def test_one_agent_by_default(self) -> None:
        assert corral.make_multi_agent(CountingEnv)().possible_agents == [0]

    def test_an_unknown_id(self) -> None:
        with pytest.raises(ConfigError, match="CartPole-v1"):
            corral.make_multi_agent("CartPol-v1")


def test_seats_and_their_space_travel_to_other_processes() -> None:
    space = SeatedEnv(Team()).observation_space
    other = pickle.loads(pickle.dumps(space))
    assert other == space and other.seats == space.seats


@pytest.mark.parametrize("kind", ["observation", "action"])
def test_an_agent_that_a_dict_of_spaces_lacks_is_named(kind: str) -> None:
    class Partly(MultiAgentEnv):
        possible_agents = ("left", "right")

    env, box = Partly(), spaces.Box(0, 1, (2,), np.float32)
    whole, part = (spaces.Dict(dict.fromkeys(names, box)) for names in (("left", "right"), ("left",)))
    env.observation_space, env.action_space = (part, whole) if kind == "observation" else (whole, part)
    with pytest.raises(EnvError, match=rf"agent 'right' has no {kind} space.*add 'right' to the Dict {kind}_space"):
        Seats.of(env)
    env.observation_space, env.action_space = spaces.Dict({"near": box, "far": box}), box
    assert Seats.of(env).blocks[0].agents == ("left", "right")  # a Dict that all agents share
