"""Envs without `get_state` continue where they stood, by their attributes, or say which attribute is in the way."""

from __future__ import annotations

import collections
import enum
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from corral.checkpoint import codec
from corral.envs.attributes import ObstacleError, check_attributes
from corral.envs.continuation_test import find_lost_state
from corral.envs.env_state import check_env_state, continues, get_env_state, set_env_state
from corral.envs.seated_env import SeatedEnv
from corral.envs.vector import EnvContext, make_one
from corral.errors import CheckpointError
from exact_runs import differences


def played(env: Any, seed: int, num_steps: int) -> list[Any]:
    """What some steps with sampled actions return."""
    actions, is_vector = env.action_space, isinstance(env, gym.vector.VectorEnv)
    actions.seed(seed)
    steps: list[Any] = []
    for _ in range(num_steps):
        obs, reward, terminated, truncated, _ = env.step(actions.sample())
        steps.append([np.copy(obs) if isinstance(obs, np.ndarray) else obs, reward, terminated, truncated])
        if not is_vector and (terminated or truncated):
            steps.append(env.reset()[0])
    return steps


def continued(make: Callable[[], Any], num_steps: int = 60) -> list[str]:
    """How the steps of an env differ from the steps of another one that continued where it stood."""
    one, other = make(), make()
    try:
        one.reset(seed=4)
        played(one, 1, 15)
        state = codec.decode(codec.encode(get_env_state(one)))
        check_env_state(state)
        other.reset(seed=9)
        played(other, 5, 3)
        assert continues(other, state), state.get("obstacle")
        assert set_env_state(other, state) == ""
        return differences(played(one, 2, num_steps), played(other, 2, num_steps))
    finally:
        one.close()
        other.close()


@pytest.mark.parametrize(
    "env_id",
    [
        *("CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1"),
        *("FrozenLake-v1", "Taxi-v4", "Blackjack-v1", "CliffWalking-v1"),
    ],
)
def test_the_small_envs_of_gymnasium_continue(env_id: str) -> None:
    assert continued(lambda: gym.make(env_id)) == []


def test_an_env_that_renders_continues() -> None:
    pytest.importorskip("pygame")

    def make() -> Any:
        env = gym.make("CartPole-v1", render_mode="rgb_array")
        env.reset(seed=0)
        env.render()
        return env

    assert continued(make) == []


def test_the_native_vector_env_continues() -> None:
    assert continued(lambda: gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="vector_entry_point")) == []


@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Ant-v5", "Pusher-v5"])
def test_mujoco_continues_with_what_the_latest_step_computed(env_id: str) -> None:
    pytest.importorskip("mujoco")
    assert continued(lambda: gym.make(env_id)) == []


def test_a_changed_model_of_mujoco_continues() -> None:
    pytest.importorskip("mujoco")

    class Heavier(gym.Wrapper[Any, Any, Any, Any]):
        def reset(self, **kwargs: Any) -> Any:
            found = self.env.reset(**kwargs)
            model: Any = self.env.unwrapped.model  # type: ignore[attr-defined]
            model.body_mass[1:] = self.env.unwrapped.np_random.uniform(1.0, 3.0, len(model.body_mass) - 1)
            model.opt.gravity[2] = -5.0
            return found

    assert continued(lambda: Heavier(gym.make("Hopper-v5")), 20) == []


@pytest.mark.parametrize("env_id", ["ALE/Pong-v5", "ALE/Breakout-v5"])
def test_games_of_atari_continue_with_their_generators(env_id: str) -> None:
    gym.register_envs(pytest.importorskip("ale_py"))
    assert continued(lambda: gym.make(env_id)) == []


@pytest.mark.parametrize("name", ["tictactoe_v3", "connect_four_v3", "rps_v2"])
def test_classic_games_of_pettingzoo_continue(name: str) -> None:
    pytest.importorskip("pettingzoo")
    pytest.importorskip("pygame")
    module = pytest.importorskip(f"pettingzoo.classic.{name}")

    def legal(env: Any, rng: np.random.Generator) -> dict[str, Any]:
        game = env.unwrapped.env
        mask = game.observe(game.agent_selection)
        mask = mask["action_mask"] if isinstance(mask, dict) else np.ones(3)
        return {"action": int(rng.choice(np.flatnonzero(mask))), "agent": game.agent_selection}

    def play(env: Any, seed: int) -> list[Any]:
        rng, steps = np.random.default_rng(seed), []
        for _ in range(30):
            chosen = legal(env, rng)
            found = env.unwrapped.step({chosen["agent"]: chosen["action"]})
            steps.append([chosen, *(dict(part) for part in found[:4])])
            if found[2]["__all__"] or found[3]["__all__"]:
                env.unwrapped.reset()
        return steps

    one, other = (make_one(lambda context: module.env(), name, EnvContext({})) for _ in range(2))
    assert isinstance(one, SeatedEnv)
    for env in (one, other):
        env.reset(seed=3)
    for _ in range(3):
        chosen = legal(one, np.random.default_rng(0))
        one.unwrapped.step({chosen["agent"]: chosen["action"]})
    state = codec.decode(codec.encode(get_env_state(one)))
    assert set_env_state(other, state) == ""
    expected = play(one, 7)
    assert differences(expected, play(other, 7)) == []


# Envs of users.


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Point(NamedTuple):
    x: int
    y: int


@dataclass
class Monster:
    place: Point
    colour: Colour
    memory: list[int] = field(default_factory=list)


class Slotted:
    __slots__ = ("__hidden", "count")

    def __init__(self) -> None:
        self.count, self.__hidden = 0, 0

    def advance(self) -> int:
        self.count += 1
        self.__hidden += self.count
        return self.__hidden


class Config(dict[str, Any]):
    """A config with an attribute, as factories of envs receive it."""

    level = 0


def doubled(value: float) -> float:
    return 2 * value


class Dungeon(gym.Env[Any, Any]):
    """Holds all that an env in pure Python may hold."""

    observation_space: Any = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space: Any = spaces.Discrete(4)

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        self.config = Config(config or {})
        self.config.level = 3
        self.other_rng, self.old_rng = random.Random(3), np.random.RandomState(3)
        self.counts: Any = collections.defaultdict(int)
        self.scale, self.rule = doubled, self.go_slowly
        self.slotted = Slotted()
        self.goals = spaces.Discrete(50, seed=3)
        self.colours = [Colour.RED, Colour.BLUE]
        self.steps = range(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.grid = np.zeros((3, 3), np.int64)
        self.cells = {"all": self.grid, "by_row": [1, 2]}  # the same array twice
        self.monsters = [Monster(Point(int(self.np_random.integers(3)), 1), Colour.BLUE)]
        self.latest: Any = self.monsters[0]
        self.past: Any = collections.deque(maxlen=4)
        self.seen: Any = set()
        self.t = 0
        return self._observe(), {}

    def go_slowly(self, action: int) -> int:
        return action

    def go_fast(self, action: int) -> int:
        return 3 * action

    def step(self, action: Any) -> Any:
        self.t += 1
        self.cells["all"][self.t % 3, int(action) % 3] += self.rule(int(action))
        self.past.append(int(action))
        self.seen.add(int(action))
        self.counts[int(action)] += 1
        self.config[str(self.t % 5)] = self.t
        if self.t % 6 == 0:
            self.monsters.append(Monster(Point(self.t, int(action)), Colour.RED))
            self.latest = self.monsters[-1]
            self.rule = self.go_fast if self.rule == self.go_slowly else self.go_slowly
        self.latest.memory.append(int(action))
        if self.latest.colour is Colour.RED:
            self.latest.place = self.latest.place._replace(y=self.t)
        return self._observe(), float(self._number()), self.t >= 40, False, {}

    def _number(self) -> float:
        drawn = self.np_random.normal() + self.other_rng.gauss(0, 1) + self.old_rng.normal() + self.goals.sample()
        remembered = sum(self.past) + sum(self.seen) + sum(self.counts.values()) + self.slotted.advance()
        return self.scale(drawn) + remembered + sum(sum(monster.memory) for monster in self.monsters)

    def _observe(self) -> Any:
        total = sum(value for value in self.config.values() if isinstance(value, int)) + self.config.level
        return np.array([self.grid.sum(), total, self.monsters[-1].place.y], np.float32)


class Shaped(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper of the user, with numbers of its own and a short way to the env."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.inner, self.bonus = env.unwrapped, np.zeros(2)

    def step(self, action: Any) -> Any:
        obs, reward, *rest = self.env.step(action)
        self.bonus += [self.inner.t, 1.0]
        return obs, float(reward) + float(self.bonus.sum()), *rest


def make_dungeon() -> Any:
    return Shaped(gym.wrappers.TimeLimit(Dungeon({"1": 1}), 30))


def test_an_env_and_a_wrapper_of_a_user_continue() -> None:
    assert find_lost_state(make_dungeon(), make_dungeon) == ""
    assert continued(make_dungeon) == []


def test_what_was_shared_is_shared_again_and_nothing_else() -> None:
    one, other = make_dungeon(), make_dungeon()
    for env in (one, other):
        env.reset(seed=1)
    assert set_env_state(other, get_env_state(one)) == ""
    made = other.unwrapped
    assert made.cells["all"] is made.grid and made.latest is made.monsters[0] and other.inner is made
    assert made.rule.__self__ is made
    assert made.grid is not one.unwrapped.grid and made.config is not one.unwrapped.config


class Lost(Dungeon):
    """Holds something that no file can hold."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held


def count_up() -> Any:
    number = 0

    def add() -> int:
        nonlocal number
        number += 1
        return number

    return add


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (threading.Lock(), "the attribute Lost.held is a _thread.lock"),
        ({"a": [iter([1])]}, r"the attribute Lost.held\['a'\]\[0\] is a builtins.list_iterator"),
        (np.array([object()]), "the attribute Lost.held is a numpy.ndarray"),
        (Monster(Point(0, 0), Colour.RED, (i for i in range(3))), "the attribute Lost.held.memory is a builtins.gener"),  # type: ignore[arg-type]
    ],
)
def test_an_attribute_that_cannot_be_saved_is_named(held: Any, message: str) -> None:
    env = Lost(held)
    env.reset(seed=1)
    state = get_env_state(env)
    with pytest.raises(AssertionError, match=message):
        assert not state["obstacle"], state["obstacle"]
    assert not continues(env, state)


def test_a_counter_in_a_function_is_found_by_its_value() -> None:
    one, other = Lost(count_up()), Lost(count_up())
    for env in (one, other):
        env.reset(seed=1)
    state = get_env_state(one)
    assert set_env_state(other, state) == ""
    one.held()
    assert "Lost.held" in set_env_state(other, get_env_state(one))


def test_arrays_that_share_memory_are_named() -> None:
    env = Dungeon()
    env.reset(seed=1)
    env.row = env.grid[0]  # type: ignore[attr-defined]
    assert "Dungeon.row shares its memory with Dungeon.grid" in get_env_state(env)["obstacle"]


class Elsewhere(gym.Env[Any, Any]):
    """Keeps its place where no attribute shows it."""

    observation_space: Any = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space: Any = spaces.Discrete(2)
    places: dict[int, float] = {}  # noqa: RUF012

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.places[id(self)] = 0.0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.places[id(self)] += 1.0
        return np.array([self.places[id(self)]], np.float32), 0.0, False, False, {}


def test_state_outside_of_all_attributes_is_found_at_build() -> None:
    assert "took other steps" in find_lost_state(Elsewhere(), Elsewhere)


def test_the_test_at_build_leaves_the_global_generators_alone() -> None:
    class Drawing(Dungeon):
        def step(self, action: Any) -> Any:
            obs, reward, *rest = super().step(action)
            return obs, reward + np.random.normal() + random.random(), *rest

    random.seed(1)
    np.random.seed(1)
    assert find_lost_state(Drawing(), Drawing) == ""
    found = random.random(), np.random.normal()
    random.seed(1)
    np.random.seed(1)
    assert found == (random.random(), np.random.normal())


# Files that are damaged, or that want more than an env.


def test_a_file_cannot_make_other_classes_than_the_envs_own() -> None:
    env = make_dungeon()
    env.reset(seed=1)
    state = get_env_state(env)
    for path in ("subprocess:Popen", "corral.algorithms.ppo:PPO", "os:_Environ"):
        forged = codec.decode(codec.encode(state))
        entry = next(entry for entry in forged["attributes"]["objects"] if entry[0] == "object")
        entry[1] = path
        other = make_dungeon()
        other.reset(seed=2)
        before = get_env_state(other)
        assert path in set_env_state(other, forged)
        set_env_state(other, before)


@pytest.mark.parametrize("damage", ["kind", "index", "container", "generator"])
def test_damaged_attributes_are_found_without_an_env(damage: str) -> None:
    env = make_dungeon()
    env.reset(seed=1)
    attributes = codec.decode(codec.encode(get_env_state(env)))["attributes"]
    check_attributes(attributes)
    entries = {entry[0]: entry for entry in attributes["objects"]}
    if damage == "kind":
        entries["array"][0] = "file"
    elif damage == "index":
        attributes["layers"][0][1]["bonus"] = (10_000,)
    elif damage == "container":
        entries["container"][1] = "Popen"
    else:
        entries["generator"][1] = {"bit_generator": "PCG64"}
    with pytest.raises((KeyError, IndexError, ValueError, TypeError, CheckpointError, ObstacleError)):
        check_attributes(attributes)
