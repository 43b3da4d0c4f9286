"""Agents in seats: their arrays against a slow reference, who acts, and what an env must not return."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given as each_of
from hypothesis import settings
from hypothesis import strategies as st

from corral.core.tree import copy_nested, map_tree
from corral.envs.multi_agent_env import MultiAgentEnv
from corral.envs.seated_env import SeatedEnv
from corral.envs.seats import Seats
from corral.errors import EnvError

BOX = spaces.Box(-np.inf, np.inf, (2,), np.float32)
DICT = spaces.Dict({"image": spaces.Box(0, 255, (2, 2), np.uint8), "pair": spaces.Tuple((spaces.Discrete(3), BOX))})
OBS_SPACES = [BOX, spaces.Discrete(4, start=2), DICT, BOX, spaces.MultiBinary(3), spaces.MultiDiscrete([2, 5])]
ACTION_SPACES = [
    spaces.Discrete(3),
    spaces.Discrete(2, start=-1),
    spaces.MultiDiscrete([2, 4]),
    spaces.Discrete(3),
    spaces.Box(-1, 1, (2,), np.float32),
    spaces.MultiBinary(2),
]
AGENTS: list[Any] = ["alice", 1, "bob", "carol", 7, "dave"]


class Scripted(MultiAgentEnv):
    """Returns what its script says, and keeps the actions that it was given."""

    def __init__(self, resets: list[Any], steps: list[Any], kinds: bool = False, agents: Any = ("a", "b")) -> None:
        super().__init__()
        self.possible_agents = list(agents)
        if kinds:
            self.possible_agents = AGENTS
            self.observation_spaces = dict(zip(AGENTS, OBS_SPACES, strict=True))
            self.action_spaces = dict(zip(AGENTS, ACTION_SPACES, strict=True))
        else:
            self.observation_space, self.action_space = BOX, spaces.Discrete(3)
        self.resets, self.steps, self.given = iter(resets), iter(steps), list[Any]()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return next(self.resets)

    def step(self, action_dict: Any) -> Any:  # type: ignore[override]
        self.given.append(dict(action_dict))
        return next(self.steps)


def see(*agents: str, value: float = 1.0) -> dict[str, Any]:
    return {agent: np.full(2, value, np.float32) for agent in agents}


def seated(*steps: Any, first: Any = None, agents: Any = ("a", "b")) -> SeatedEnv:
    """Return a seated env of two agents after its reset; what a step leaves out is empty."""
    whole = [(*step, *[{}, {}, {"__all__": False}, {}, {}][len(step) :]) for step in steps]
    env = SeatedEnv(Scripted([(see("a", "b") if first is None else first, {})], whole, agents=agents))
    env.reset()
    return env


def act(env: SeatedEnv, *actions: int) -> Any:
    return env.step({"block_0": np.array(actions or (0,) * len(env.seats.agents))})


# A slow reference.


def random_script(rng: np.random.Generator, num_episodes: int) -> tuple[list[Any], list[Any]]:
    """Return resets and steps in which agents join, wait, get rewards and end at random."""
    resets, steps = [], []
    samplers = {agent: space for agent, space in zip(AGENTS, OBS_SPACES, strict=True)}

    def some(agents: list[Any], at_least: int = 0) -> list[Any]:
        num = rng.integers(min(at_least, len(agents)), len(agents) + 1)
        return [agents[i] for i in rng.permutation(len(agents))[:num]]

    for space in samplers.values():
        space.seed(int(rng.integers(1000)))
    for _ in range(num_episodes):
        ended: set[Any] = set()
        resets.append(
            ({agent: samplers[agent].sample() for agent in some(AGENTS, 1)}, {"__common__": {"n": len(steps)}})
        )
        seen, over = set(resets[-1][0]), False
        while not over:
            alive = [agent for agent in AGENTS if agent not in ended]
            terminateds = {agent: bool(rng.random() < 0.1) for agent in some(alive)}
            truncateds = {agent: bool(rng.random() < 0.1) for agent in some(alive)}
            now = {agent for agent in alive if terminateds.get(agent) or truncateds.get(agent)}
            continuing = [agent for agent in alive if agent not in now]
            over = bool(rng.random() < 0.1) or not continuing
            observed = some(alive) if over else some([*now]) + some(continuing, 1)
            flags = terminateds if rng.random() < 0.5 else truncateds
            flags["__all__"] = over
            terminateds.setdefault("__all__", False)
            rewards = {agent: float(rng.normal()) for agent in some(alive)} | {agent: 0.0 for agent in some([*ended])}
            infos = {agent: {"x": 1} for agent in observed} if rng.random() < 0.3 else {}
            obs = {agent: samplers[agent].sample() for agent in observed}
            steps.append((obs, rewards, terminateds, truncateds, infos))
            ended, seen = ended | now, seen | set(observed)
            over = over or seen <= ended
    return resets, steps


def check_arrays(env: SeatedEnv, given: Any, obs: Any, rewards: Any, terminateds: Any, truncateds: Any) -> None:
    """Compare the arrays of one step with the dicts of the env, one agent after another."""
    for block in env.seats.blocks:
        for row, agent in enumerate(block.agents):
            seat = env.seats.agents.index(agent)
            assert block.start + row == seat
            assert given["observed"][seat] == (agent in obs)
            assert given["rewards"][seat] == rewards.get(agent, 0.0)
            assert given["terminated"][seat] == terminateds.get(agent, False)
            assert given["truncated"][seat] == truncateds.get(agent, False)
            part = map_tree(lambda leaf, row=row: leaf[row], given["obs"][block.name])
            if agent in obs:
                map_tree(np.testing.assert_array_equal, part, obs[agent])
            else:
                blank = 2 if agent == 1 else 0  # the first number of its discrete space
                map_tree(lambda leaf, blank=blank: np.testing.assert_array_equal(leaf, blank), part)


@each_of(seed=st.integers(0, 2**16), num_steps=st.integers(1, 30))
@settings(max_examples=12, deadline=None)
def test_arrays_are_what_the_agents_received_and_only_agents_that_have_to_act_are_asked(
    seed: int, num_steps: int
) -> None:
    resets, steps = random_script(np.random.default_rng(seed), num_steps)
    scripted = Scripted(resets, steps, kinds=True)
    env = SeatedEnv(scripted)
    env.action_space.seed(seed)
    ends, t = 0, 0
    for first in resets:
        given, infos = env.reset()
        assert env.observation_space.contains(given)
        check_arrays(env, given, first[0], {}, {}, {})
        assert infos == {"agents": {}, "common": first[1]["__common__"]}
        must_act, ended, over = set(first[0]), set(), False
        while not over:
            obs, rewards, terminateds, truncateds, infos = steps[t]
            actions = env.action_space.sample()
            given, reward, terminated, truncated, found = env.step(actions)
            check_arrays(env, given, obs, rewards, terminateds, truncateds)
            assert env.observation_space.contains(given)
            assert reward == pytest.approx(sum(rewards.values()))
            assert found == ({"agents": infos, "common": None} if infos else {})
            asked = scripted.given[t]
            assert asked.keys() == must_act
            for agent, action in asked.items():
                assert scripted.action_spaces is not None and scripted.action_spaces[agent].contains(action)
                block = next(block for block in env.seats.blocks if agent in block.agents)
                np.testing.assert_array_equal(action, actions[block.name][block.agents.index(agent)])
            ended |= {agent for agent in AGENTS if terminateds.get(agent) or truncateds.get(agent)}
            must_act = set(obs) - ended
            over, t = terminated or truncated, t + 1
            assert env.acting.tolist() == [not over and agent in must_act for agent in env.seats.agents]
        ends += 1
    assert (ends, t) == (len(resets), len(steps))  # every episode ended where the script ends it


class TestSeats:
    def test_agents_with_equal_spaces_are_next_to_each_other(self) -> None:
        seats = Seats.of(Scripted([], [], kinds=True))
        assert seats.agents == ("alice", "carol", 1, "bob", 7, "dave")
        assert [(block.name, block.agents, block.start, block.stop) for block in seats.blocks[:2]] == [
            ("block_0", ("alice", "carol"), 0, 2),
            ("block_1", (1,), 2, 3),
        ]
        assert seats.blocks[0].observation_space == BOX and seats.blocks[0].action_space == spaces.Discrete(3)

    def test_an_observation_has_an_array_for_each_block(self) -> None:
        space = SeatedEnv(Scripted([], [], kinds=True)).observation_space
        assert space["obs"]["block_0"].shape == (2, 2)
        assert space["obs"]["block_2"]["image"].dtype == np.uint8 and space["obs"]["block_2"]["image"].shape == (
            1,
            2,
            2,
        )
        assert space["rewards"].dtype == np.float64 and space["observed"].shape == (6,)

    def test_the_parts_of_tuple_actions_are_joined_and_given_back_as_tuples(self) -> None:
        parts = {
            "discrete": spaces.Tuple((spaces.Discrete(3), spaces.MultiDiscrete([[2, 4]]), spaces.Discrete(2, start=5))),
            "floats": spaces.Tuple((spaces.Box(-1, 1, (2, 1), np.float32), spaces.Box(0, 2, (1,), np.float32))),
            "bits": spaces.Tuple((spaces.MultiBinary(2), spaces.MultiBinary((1, 2)))),
        }
        scripted = Scripted([(see(*parts), {})], [(see(*parts), {}, {"__all__": False}, {}, {})] * 20, agents=parts)
        scripted.action_spaces = parts
        env = SeatedEnv(scripted)
        assert env.seats.blocks[0].action_space == spaces.MultiDiscrete([3, 2, 4, 2], start=[0, 0, 0, 5])
        low, high = np.float32([-1, -1, 0]), np.float32([1, 1, 2])
        assert env.seats.blocks[1].action_space == spaces.Box(low, high, dtype=np.float32)
        assert env.seats.blocks[2].action_space == spaces.MultiBinary(4)
        env.reset()
        env.action_space.seed(0)
        for _ in range(20):
            actions = env.action_space.sample()
            env.step(actions)
            for i, (agent, space) in enumerate(parts.items()):
                given = scripted.given[-1][agent]
                assert space.contains(given)
                flat = np.concatenate([np.ravel(part) for part in given])
                np.testing.assert_array_equal(flat, actions[f"block_{i}"][0])

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"possible_agents": ["a", "a"]}, "agent 'a' is in possible_agents twice"),
            ({"possible_agents": ["1", "a", 1]}, "agent 1 is in possible_agents twice, as a string or an integer"),
            ({"possible_agents": ["a", ("b", 1)]}, r"agent \('b', 1\): an agent id must be a string or an integer"),
            ({"possible_agents": ["a", True]}, "agent True: an agent id must be"),
            ({"possible_agents": ["a", "__all__"]}, "agent '__all__': an agent id must be"),
            ({"possible_agents": []}, "there are no agents: set possible_agents"),
            ({"observation_spaces": {"a": BOX}}, r"agent 'b' has no observation space.*observation_spaces\['b'\]"),
            ({"action_space": None}, "agent 'a' has no action space, but None"),
            ({"action_spaces": {"a": spaces.Discrete(2), "b": BOX.shape}}, "agent 'b' has no action space"),
            ({"observation_space": spaces.Text(3)}, "agent 'a': unsupported observation space Text"),
            ({"action_space": DICT}, "agent 'a': unsupported action space Box.*uint8.* at action_space/image"),
            ({"action_space": spaces.Tuple((BOX, spaces.Text(3)))}, "agent 'a': unsupported action space Text"),
        ],
    )
    def test_agents_without_seats(self, changes: dict[str, Any], message: str) -> None:
        env = Scripted([], [])
        vars(env).update(changes)
        with pytest.raises(EnvError, match=message):
            SeatedEnv(env)


class TestEnds:
    def test_the_episode_ends_when_all_agents_have_ended(self) -> None:
        env = seated((see("a", "b"), {}, {"a": True, "__all__": False}), (see("b"), {}, {}, {"b": True}))
        assert act(env)[2:4] == (False, False)
        assert env.acting.tolist() == [False, True] and env.ended.tolist() == [True, False]
        assert act(env)[2:4] == (False, True)
        assert not env.acting.any()

    def test_agents_that_never_joined_do_not_keep_an_episode_alive(self) -> None:
        env = seated(({}, {"a": 1.0}, {"a": True}), first=see("a"), agents=("a", "b", "c"))
        assert act(env)[1:4] == (1.0, True, False)

    def test_a_flag_of_an_agent_that_has_ended_is_not_another_end(self) -> None:
        env = seated((see("b"), {}, {"a": True, "__all__": False}), (see("b"), {}, {"a": True, "__all__": False}))
        assert act(env)[0]["terminated"].tolist() == [1, 0]
        assert act(env)[0]["terminated"].tolist() == [0, 0]

    def test_a_time_limit_of_gymnasium_truncates_all_agents(self) -> None:
        step = (see("a", "b"), {}, {"__all__": False}, {"__all__": False}, {})
        env = SeatedEnv(gym.wrappers.TimeLimit(Scripted([(see("a", "b"), {})], [step] * 3), 3))
        env.reset()
        assert [act(env)[2:4] for _ in range(3)] == [(False, False), (False, False), (False, True)]

    def test_another_reset_begins_another_episode(self) -> None:
        steps = [(see("b"), {}, {"a": True, "__all__": False}, {}, {}), (see("a", "b"), {}, {"__all__": False}, {}, {})]
        env = SeatedEnv(Scripted([(see("a", "b"), {})] * 2, steps))
        env.reset()
        act(env)
        obs, _ = env.reset()
        assert obs["terminated"].tolist() == [0, 0] and obs["observed"].tolist() == [1, 1]
        assert act(env)[0]["observed"].tolist() == [1, 1]

    def test_a_reset_in_the_middle_of_an_episode_forgets_who_joined(self) -> None:
        steps = [(see("a", "b"), {}, {"__all__": False}, {}, {})] * 2
        steps[1] = (see("a", "b"), {}, {"a": True, "__all__": False}, {}, {})
        env = SeatedEnv(Scripted([(see("a", "b"), {})] * 2, steps))
        env.reset()
        act(env)
        env.reset()
        assert act(env)[2:4] == (False, False) and env.acting.tolist() == [False, True]


BAD = {
    "an unknown agent is observed": (
        (see("a", "z"),),
        r"observations have agent 'z', which is not in possible_agents \[",
    ),
    "__all__ is observed": ((see("a", "__all__"),), "observations have agent '__all__'"),
    "an unknown agent is rewarded": ((see("a"), {"z": 1.0}), "rewards have agent 'z', which is not in"),
    "an unknown agent terminates": ((see("a"), {}, {"z": False, "__all__": False}), "terminateds have agent 'z'"),
    "an unknown agent is truncated": ((see("a"), {}, {"__all__": False}, {"z": True}), "truncateds have agent 'z'"),
    "no __all__": ((see("a", "b"), {}, {"a": False}), "terminateds must tell under the key '__all__'"),
    "a shape": (({"a": np.zeros(3, np.float32)},), r"observation of agent 'a' must have shape \(2,\), got \(3,\)"),
    "a shape of one": (
        ({**see("a"), "b": np.zeros(3)},),
        r"observation of agent 'b' must have shape \(2,\), got \(3,\)",
    ),
    "shapes that would be broadcast": (
        ({"a": np.zeros(1, np.float32), "b": np.zeros(1, np.float32)},),
        r"observation of agent 'a' must have shape \(2,\), got \(1,\)",
    ),
    "a dtype": (({**see("a"), "b": np.array(["x", "y"])},), "observation of agent 'b' must have dtype float32"),
    "NaN": (({**see("a"), "b": np.float32([0, np.nan])},), "observation of agent 'b' holds NaN or infinity"),
    "infinity": (({"b": np.float32([0, np.inf])},), "observation of agent 'b' holds NaN or infinity"),
    "no array": (({"b": None},), "observation of agent 'b' must"),
    "no dict": ((None,), r"observations from step\(\) must be a dict by agent id, got None"),
    "a list of rewards": ((see("a"), [1.0]), r"rewards from step\(\) must be a dict by agent id, got \[1.0\]"),
    "a reward that is None": (
        (see("a"), {"a": 1.0, "b": None}),
        "reward of agent 'b' must be one finite number, got None",
    ),
    "a reward that is NaN": ((see("a"), {"b": np.nan}), "reward of agent 'b' must be one finite number, got nan"),
    "rewards": ((see("a"), {"a": np.ones(2)}), "reward of agent 'a' must be one finite number, got array"),
    "an info of an unknown agent": (
        (see("a"), {}, {"__all__": False}, {}, {"z": {"x": 1}}),
        "infos have agent 'z', which",
    ),
    "an info that is no dict": (
        (see("a"), {}, {"__all__": False}, {}, {"a": 3}),
        "info of agent 'a' must be a dict, got 3",
    ),
    "a flag that is a string": ((see("a"), {}, {"__all__": "False"}), "terminateds must be bools by agent id"),
    "flags": ((see("a"), {}, {"a": np.ones(2, bool), "__all__": False}), "terminateds must be bools by agent id"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_a_step_must_not_return(name: str) -> None:
    step, message = BAD[name]
    env = seated(step)
    with pytest.raises(EnvError, match=message):
        act(env)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ((see("a", "b"),), "agent 'a' has an observation, and its episode has ended in an earlier step"),
        ((see("b"), {"a": 0.5, "b": 1.0}), "agent 'a' has reward 0.5, and its episode has ended in an earlier step"),
    ],
)
def test_what_an_agent_that_has_ended_must_not_receive(step: Any, message: str) -> None:
    env = seated((see("b"), {"a": 2.0}, {"a": True, "__all__": False}), (see("b"), {"a": 0.0}), step)
    act(env)
    act(env)  # a reward of 0 does no harm
    with pytest.raises(EnvError, match=message):
        act(env)


@pytest.mark.parametrize(
    ("space", "value", "message"),
    [
        (spaces.Discrete(4), 4, r"observation of agent 'a' is outside Discrete\(4\)"),
        (spaces.Discrete(4), 1.5, "observation of agent 'a' must have dtype int64"),
        (DICT, {"image": np.zeros((2, 2), np.uint8)}, "observation of agent 'a' must be a dict with keys"),
        (DICT, {"image": np.zeros((2, 2), np.uint8), "pair": (0, np.zeros(2)), "more": 1}, "agent 'a' must be a dict"),
        (DICT, {"image": np.zeros((2, 2), np.uint8), "pair": (0, np.zeros(3))}, "observation of agent 'a'/pair/1 must"),
        (DICT, {"image": np.zeros((2, 2)), "pair": (0, np.zeros(2))}, "agent 'a'/image must have dtype uint8"),
    ],
)
def test_fields_of_observations_are_named(space: Any, value: Any, message: str) -> None:
    env = Scripted([({"a": value}, {})], [], agents=("a", "b"))
    env.observation_space = space
    with pytest.raises(EnvError, match=message):
        SeatedEnv(env).reset()


@pytest.mark.parametrize("returned", [see("a"), (see("a"), None), (see("a"), {}, 0)])
def test_a_reset_returns_two_dicts(returned: Any) -> None:
    with pytest.raises(EnvError, match=r"reset\(\) must return \(observations, infos\)"):
        SeatedEnv(Scripted([returned], [])).reset()


def test_a_step_returns_five_values() -> None:
    env = SeatedEnv(Scripted([(see("a"), {})], [(see("a"), {}, {}, {})]))
    env.reset()
    with pytest.raises(
        EnvError, match=r"step\(\) must return \(observations, rewards, terminateds, truncateds, infos\)"
    ):
        act(env)


@pytest.mark.parametrize(
    "values",
    [
        [np.float64([1, 2]), np.float64([3, 4])],
        [[1, 2], [3, 4]],
        [np.float32([1, 2]), [3.0, 4.0]],
        [np.int16([1, 2]), np.int16([3, 4])],
    ],
)
def test_observations_of_other_types_are_cast(values: Any, caplog: pytest.LogCaptureFixture) -> None:
    env = seated(first=dict(zip("ab", values, strict=True)))
    np.testing.assert_array_equal(env._obs["obs"]["block_0"], [[1, 2], [3, 4]])


def test_large_but_finite_observations_are_right() -> None:
    obs, *_ = act(seated((see("a", "b", value=3e38),)))
    assert (obs["obs"]["block_0"] == np.float32(3e38)).all()


def test_values_stay_until_the_next_step_only() -> None:
    env = seated((see("b", value=5.0), {"b": 1.0}), (see("a", value=7.0),), (see("a"), {"a": 1.0, "b": 2.0}))
    seen = [copy_nested(act(env)[0]) for _ in range(3)]
    assert [one["obs"]["block_0"][:, 0].tolist() for one in seen] == [[0, 5], [7, 0], [1, 0]]
    assert [one["rewards"].tolist() for one in seen] == [[0, 1], [0, 0], [1, 2]]
    assert [list(given) for given in env.unwrapped.given] == [["a", "b"], ["b"], ["a"]]
