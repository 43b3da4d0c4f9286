"""An episode is played again in a new env: what is kept of it, and what is said where this fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from corral.envs.atari_env import PreprocessedAtariEnv
from corral.envs.env_state import check_env_state, continue_env, get_env_state, plays_again, set_surroundings
from corral.envs.episode_resets import EpisodeReset, EpisodeResets
from corral.envs.replay import layers_of, note_of
from corral.errors import CheckpointError
from corral.runs.checkpoint import codec
from exact_runs import Drift, differences


class Played:
    """An env that is stepped as a vector env steps it, with what would be kept of its episode."""

    def __init__(self, env: Any, stands_as: Any = None) -> None:
        self.env, self.note = env, note_of(env)
        if stands_as is None:
            self.reset(seed=4)
        else:  # an env that continues where another one stood
            self.start, self.actions, self.total = stands_as.start, [*stands_as.actions], stands_as.total
            self.obs, self.ended = stands_as.obs, stands_as.ended

    def reset(self, **given: Any) -> Any:
        self.start, self.actions, self.total, self.ended = {**self.note(), **given}, [], 0.0, False
        self.obs = np.copy(self.env.reset(**given)[0])
        return self.obs

    def play(self, num_steps: int, rng: np.random.Generator) -> list[Any]:
        """What some steps return; an episode that ended is followed by the next one."""
        self.env.action_space.seed(int(rng.integers(1000)))
        found: list[Any] = []
        for _ in range(num_steps):
            if self.ended:
                found.append(self.reset())
                continue
            self.actions.append(self.env.action_space.sample())
            obs, reward, terminated, truncated, _ = self.env.step(self.actions[-1])
            self.obs, self.ended, self.total = np.copy(obs), bool(terminated or truncated), self.total + float(reward)
            found.append([self.obs, float(reward), self.ended])
        return found

    def saved(self) -> Any:
        state = codec.decode(codec.encode(get_env_state(self.env, self.start)))
        check_env_state(state)
        return state

    @property
    def replay(self) -> dict[str, Any]:
        return {"actions": np.array(self.actions), "obs": self.obs, "ended": self.ended, "return": self.total}


def continued(one: Played, other: Any, limit_s: float = 60.0, **changed: Any) -> str:
    """Why another env does not continue where one stands, or `""`."""
    return continue_env(other, one.saved(), {**one.replay, **changed}, 0, time.monotonic() + limit_s)


def check_exact(make: Callable[[], Any], num_episodes: int = 3, num_steps: int = 30) -> None:
    """Assert that an env continues to the bit after some episodes."""
    one, other = Played(make()), make()
    try:
        rng = np.random.default_rng(1)
        for _ in range(num_episodes - 1):
            one.play(20, rng)
            one.reset()
        one.play(7, rng)
        assert continued(one, other) == ""
        again = Played(other, one)
        expected, found = (each.play(num_steps, np.random.default_rng(2)) for each in (one, again))
        assert len(expected) == num_steps and differences(expected, found) == []
    finally:
        one.env.close()
        other.close()


def pong() -> Any:
    gym.register_envs(pytest.importorskip("ale_py"))
    return gym.make("ALE/Pong-v5", obs_type="ram")


def preprocessed_pong() -> Any:
    gym.register_envs(pytest.importorskip("ale_py"))
    return PreprocessedAtariEnv(gym.spec("ALE/Pong-v5"), {"max_num_frames_per_episode": 120})


def reach() -> Any:
    gym.register_envs(pytest.importorskip("gymnasium_robotics"))
    return gym.wrappers.FlattenObservation(gym.make("FetchReach-v4", max_episode_steps=12))


def door_key() -> Any:
    wrappers = pytest.importorskip("minigrid.wrappers")
    return wrappers.ImgObsWrapper(gym.make("MiniGrid-DoorKey-5x5-v0", max_episode_steps=25))


def made(env_id: str, needs: str = "", **settings: Any) -> Any:
    def make() -> Any:
        if needs:
            pytest.importorskip(needs)
        return gym.make(env_id, **settings)

    return pytest.param(make, id=env_id + "".join(settings))


@pytest.mark.parametrize(
    "make",
    [
        *map(made, ("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCarContinuous-v0", "MountainCar-v0")),
        *map(made, ("FrozenLake-v1", "Blackjack-v1", "Taxi-v4", "CliffWalking-v1")),
        made("LunarLander-v3", "Box2D"),
        made("LunarLander-v3", "Box2D", continuous=True),
        *(made(env_id, "mujoco") for env_id in ("HalfCheetah-v5", "Hopper-v5", "Humanoid-v5", "Pusher-v5")),
        pytest.param(pong, id="Pong"),
        pytest.param(preprocessed_pong, id="Pong with preprocessing"),
        pytest.param(reach, id="FetchReach"),
        pytest.param(door_key, id="MiniGrid"),
    ],
)
def test_envs_that_people_have_continue_to_the_bit(make: Any) -> None:
    check_exact(make)


@pytest.mark.slow
def test_car_racing_continues_to_the_bit() -> None:
    pytest.importorskip("Box2D")
    check_exact(lambda: gym.make("CarRacing-v3"), num_steps=10)


def test_bipedal_walker_continues_or_says_that_it_does_not() -> None:
    """Its world lives over resets; see docs/checkpoints.md."""
    pytest.importorskip("Box2D")
    one = Played(gym.make("BipedalWalker-v3"))
    for _ in range(3):
        one.play(30, np.random.default_rng(1))
        one.reset()
    one.play(20, np.random.default_rng(1))
    assert continued(one, gym.make("BipedalWalker-v3")) in (
        "",
        "the steps of its episode led to another observation when they were played again",
    )


# What is noted at a reset.


class Tasked(Drift):
    """Its steps depend on its task, and its resets on their options; each reset is followed by the next task."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.task = self.next_task = 0

    def get_task(self) -> int:
        return self.next_task

    def set_task(self, task: int) -> None:
        self.next_task = task

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        found = super().reset(seed=seed)
        self.task = self.next_task + (options or {}).get("more", 0)
        self.next_task += 1
        return found

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return obs + np.float32(self.task), *rest


@pytest.mark.parametrize("chosen", [{"seed": 7}, {"options": {"more": 2}}, {"task": 5}, {}])
def test_an_episode_is_played_again_with_the_arguments_of_its_reset(chosen: dict[str, Any]) -> None:
    def make() -> Any:
        return EpisodeResets(Tasked({"mean_length": 10**6}), reset_fn=None)

    one = Played(make())
    one.env.env.set_task(3)
    one.env.queue.append(EpisodeReset(**chosen))
    one.reset()
    one.env.env.set_task(9)  # for the next episode
    one.play(5, np.random.default_rng(0))
    other = make()
    other.queue.append(EpisodeReset(seed=1))
    assert continued(one, other) == ""
    assert other.env.task == one.env.env.task != 0 and len(other.queue) == 1  # for the next episode
    for name, _ in chosen.items():  # each argument counts
        without = one.saved()
        without["start"][name] = None
        assert "other" in continue_env(make(), without, one.replay, 0, time.monotonic() + 60)


def test_what_no_checkpoint_can_hold_is_named() -> None:
    one = Played(EpisodeResets(Drift(), reset_fn=None))
    one.env.queue.append(EpisodeReset(options={"of": object()}))
    one.reset()
    assert "a checkpoint cannot hold the options of its reset, {'of': <object" in one.saved()["obstacle"]


class Nested(gym.Env[Any, Any]):
    """An env that holds others, as many do that wrap an env without being a wrapper."""

    def __init__(self) -> None:
        self.env, self.envs = Drift(), [Drift(), Drift()]
        self.config = {"env": "Drift"}
        self.observation_space, self.action_space = self.env.observation_space, self.env.action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        found = [env.reset(seed=seed) for env in (self.env, *self.envs)]
        return sum(obs for obs, _ in found), {}

    def step(self, action: Any) -> Any:
        found = [env.step(action) for env in (self.env, *self.envs)]
        return sum(each[0] for each in found), 1.0, any(each[2] for each in found), False, {}


def test_generators_of_envs_inside_an_env_are_kept() -> None:
    assert [type(layer) for layer in layers_of(Nested())] == [Nested, Drift, Drift, Drift]
    check_exact(Nested)


class Parted(Drift):
    """A part of it draws from the generator of the env, which it was given in the first reset."""

    dice: Any = None

    def reset(self, **kwargs: Any) -> Any:
        found = super().reset(**kwargs)
        self.dice = self.dice or self.np_random
        return found

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return obs + np.float32(self.dice.normal()), *rest


def test_parts_of_an_env_keep_its_generator() -> None:
    check_exact(Parted)


def normalized() -> Any:
    env = gym.wrappers.NormalizeReward(gym.wrappers.NormalizeObservation(Drift({"mean_length": 30})))
    env = gym.wrappers.NormalizeReward(env, gamma=0.5)  # two of one kind, each with statistics of its own
    return gym.wrappers.FrameStackObservation(gym.wrappers.RecordEpisodeStatistics(env), 2)


def test_running_statistics_are_those_of_the_beginning_of_the_episode() -> None:
    check_exact(normalized)
    one, other = Played(normalized()), normalized()
    one.play(50, np.random.default_rng(0))
    assert continued(one, other) == ""
    rms = [env.get_wrapper_attr("obs_rms") for env in (one.env, other)]
    assert rms[0].count == rms[1].count > 40 and np.array_equal(rms[0].mean, rms[1].mean)
    assert other.get_wrapper_attr("episode_count") == one.env.get_wrapper_attr("episode_count") > 0
    queues = [env.get_wrapper_attr("return_queue") for env in (one.env, other)]
    assert queues[0] == queues[1] and queues[0].maxlen == queues[1].maxlen is not None


class Saved(Drift):
    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.seeds: list[int | None] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seeds.append(seed)
        return super().reset(seed=seed)

    def get_state(self) -> Any:
        return {"place": self._place, "episodes": self._episodes}

    def set_state(self, state: Any) -> None:
        self._place, self._episodes = state["place"], state["episodes"]


def test_an_env_with_methods_is_reset_with_a_seed_and_has_the_wrappers_of_before() -> None:
    one, other = Played(gym.wrappers.TimeLimit(Saved(), 9)), gym.wrappers.TimeLimit(Saved(), 9)
    assert continue_env(other, one.saved(), None, 5, 0.0) == "" and other.unwrapped.seeds == [5]
    found = continue_env(gym.wrappers.OrderEnforcing(Saved()), one.saved(), None, 5, 0.0)
    assert found == "its wrappers were ['TimeLimit'] and are ['OrderEnforcing']"
    unknown = one.saved()
    unknown["wrappers"][0][1] = None  # as another version of Gymnasium has it
    assert continue_env(other, unknown, None, 5, 0.0) == "the state of one of its wrappers was not saved"


class Walled(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper without methods around an env that has them."""

    num_steps = 0

    def step(self, action: Any) -> Any:
        self.num_steps += 1
        obs, *rest = self.env.step(action)
        return obs + np.float32(self.num_steps), *rest

    def reset(self, **kwargs: Any) -> Any:
        self.num_steps = 0
        return self.env.reset(**kwargs)


def test_a_wrapper_without_methods_plays_the_episode_again_and_the_env_inside_is_asked() -> None:
    assert not plays_again(gym.wrappers.TimeLimit(Saved(), 9)) and plays_again(Walled(Saved()))
    check_exact(lambda: Walled(Saved()))
    one, other = Played(Walled(Saved({"mean_length": 10**6}))), Walled(Saved({"mean_length": 10**6}))
    one.reset()
    one.play(4, np.random.default_rng(0))
    assert continued(one, other) == ""
    assert other.env._episodes == one.env.env._episodes == 2 and other.num_steps == 4


# What is in the way.


def long_drift() -> Drift:
    return Drift({"mean_length": 10**6})


def test_each_difference_is_found_and_said() -> None:
    one = Played(long_drift())
    one.play(6, np.random.default_rng(0))
    assert continued(one, long_drift()) == ""
    changed = one.obs.copy()
    changed[1] = np.nextafter(changed[1], np.float32(np.inf))
    for given, words in (
        ({"obs": changed}, "the steps of its episode led to another observation when they were played again"),
        ({"actions": np.array([*one.actions[:-1], (one.actions[-1] + 1) % 3])}, "led to another observation"),
        ({"actions": np.array(one.actions[:-1])}, "the steps of its episode led to another observation"),
    ):
        assert words in continued(one, long_drift(), **given)
    doubled = gym.wrappers.TransformReward(long_drift(), lambda reward: 2 * reward)
    doubled.metadata = one.env.metadata
    found = continued(one, doubled)
    assert found == "the steps of its episode gave other rewards when they were played again"
    for limit in (4, 6):
        found = continued(one, gym.wrappers.TimeLimit(long_drift(), limit))
        assert found == "its episode ended earlier when it was played again"
    assert continue_env(long_drift(), one.saved(), "too long", 0, 0.0) == "too long"


def test_an_env_that_draws_more_is_found_although_it_shows_the_same() -> None:
    class Hidden(Drift):
        more = False

        def step(self, action: Any) -> Any:
            obs, _, *rest = super().step(action)
            return np.zeros_like(obs), 1.0, *rest

        def reset(self, **kwargs: Any) -> Any:
            obs, info = super().reset(**kwargs)
            if self.more:
                self.np_random.normal()
            return np.zeros_like(obs), info

    one, other = Played(Hidden({"mean_length": 10**6})), Hidden({"mean_length": 10**6})
    one.play(3, np.random.default_rng(0))
    other.more = True
    assert continued(one, other) == "it drew other random numbers when its episode was played again"


def test_a_replay_has_a_limit_of_time_and_may_raise() -> None:
    class Slow(Drift):
        def step(self, action: Any) -> Any:
            while True:
                time.sleep(0.01)

    class Late(Drift):
        def step(self, action: Any) -> Any:
            time.sleep(0.1)
            return super().step(action)

    class Broken(Drift):
        def step(self, action: Any) -> Any:
            raise OSError("no simulator")

    one = Played(long_drift())
    one.play(3, np.random.default_rng(0))
    began_s = time.monotonic()
    assert "could not be played again in time" in continued(one, Slow(), limit_s=0.2)
    assert time.monotonic() - began_s < 5
    assert "could not be played again in time" in continued(one, long_drift(), limit_s=0.0)
    with ThreadPoolExecutor(1) as other_thread:  # where no signal can interrupt a step
        found = other_thread.submit(continued, one, Late(), limit_s=0.05).result()
    assert "could not be played again in time" in found
    found = continued(one, Broken())
    assert found == "it raised OSError when its episode was played again: no simulator"


def test_a_vector_env_that_steps_as_a_whole_says_so() -> None:
    class Whole(gym.vector.SyncVectorEnv):
        pass

    env = Whole([Drift] * 2)
    env.reset(seed=1)
    assert get_env_state(env)["obstacle"] == (
        "Whole steps all its sub-envs at once, and has no get_state and set_state"
    )


@pytest.mark.parametrize("num_steps", [29, 34], ids=["ended", "in_the_middle"])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "phys2d/CartPole-v1", "phys2d/Pendulum-v0"])
def test_gymnasiums_own_vector_envs_continue(env_id: str, num_steps: int) -> None:
    if "phys2d" in env_id:
        pytest.importorskip("flax")

    def make() -> Any:
        return gym.make_vec(env_id, num_envs=3, vectorization_mode="vector_entry_point", max_episode_steps=9)

    def play(env: Any, num_steps: int) -> list[Any]:
        env.action_space.seed(3)
        return [[np.array(part) for part in env.step(env.action_space.sample())[:4]] for _ in range(num_steps)]

    one, other = make(), make()
    one.reset(seed=4)
    play(one, num_steps)
    state = codec.decode(codec.encode(get_env_state(one)))
    check_env_state(state)
    other.reset(seed=9)
    assert continue_env(other, state, None, 0, 0.0) == ""
    expected = play(one, 30)
    assert len(expected) == 30 and differences(expected, play(other, 30)) == []


@pytest.mark.parametrize("damage", ["generator", "wrapper", "game", "seed", "options", "lacks"])
def test_a_damaged_state_is_found_without_an_env(damage: str) -> None:
    one = Played(normalized())
    state = one.saved()
    if damage == "generator":
        state["kept"]["generators"][0]["bit_generator"] = "Popen"
    elif damage == "wrapper":
        state["kept"]["wrappers"][0][1].popitem()
    elif damage == "game":
        state["start"]["games"] = ["game"]
    elif damage == "lacks":
        del state["start"]["task"]
    else:
        state["start"][damage] = "text"
    with pytest.raises((KeyError, ValueError, TypeError, CheckpointError)):
        check_env_state(state)


def test_the_box_of_a_space_is_compared_in_the_dtype_of_modules() -> None:
    class Wide(Drift):
        observation_space: Any = spaces.Box(-np.inf, np.inf, (3,), np.float64)

        def reset(self, **kwargs: Any) -> Any:
            return super().reset(**kwargs)[0].astype(np.float64) + 1e-12, {}

    one = Played(Wide({"mean_length": 10**6}))
    assert continued(one, Wide({"mean_length": 10**6}), obs=one.obs.astype(np.float32), actions=np.zeros(0, int)) == ""


def test_a_state_of_before_episodes_were_played_again_begins_again() -> None:
    one, other = Played(long_drift()), long_drift()
    one.play(3, np.random.default_rng(0))
    old = {
        "np_random": one.saved()["kept"]["generators"][0],
        "wrappers": [],
        "attributes": {"layers": [], "objects": []},
    }
    check_env_state(old)
    assert continue_env(other, old, "not saved", 0, time.monotonic() + 60) == "its actions were not saved"
    other.reset(seed=0)
    set_surroundings(other, old)
    one.reset()
    assert np.array_equal(one.obs, other.reset()[0])
