"""Hindsight replay: goals come from the steps that the strategy names, and all that depends on goals follows."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from corral import DQNConfig
from corral.algorithms.registry import config_class
from corral.data.replay.config import ReplayConfig, make_replay_buffer
from corral.data.replay.hindsight import GoalFunctions, HindsightReplayBuffer
from corral.envs.goals import find_goal_functions
from corral.envs.vector import EnvContext
from corral.errors import CheckpointError, ConfigError
from corral.runners.runner import EnvRunner
from corral.testing import BitFlippingEnv, ReachEnv


class Diary(gym.Env[Any, Any]):
    """Env whose achieved goals say where they were achieved: `[sub-env, episode, t]`; episodes have 2 to 6 steps.

    Every third episode is truncated, the others terminate. The reward is 0 if the goal is achieved, and -1 elsewhere.
    """

    observation_space = spaces.Dict(
        dict.fromkeys(("observation", "achieved_goal", "desired_goal"), spaces.Box(-1e6, 1e6, (3,), np.float32))
    )
    action_space = spaces.Discrete(2)

    def __init__(self, config: Any) -> None:
        self.index, self.episode = config.vector_index + 10 * config.worker_index, -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self.obs(), {}

    def obs(self) -> dict[str, Any]:
        place = np.array([self.index, self.episode, self.t], np.float32)
        return {"observation": place, "achieved_goal": place, "desired_goal": np.full(3, -1, np.float32)}

    def step(self, action: Any) -> Any:
        self.t += 1
        over = self.t >= length_of(self.index, self.episode)
        return self.obs(), -1.0, over and self.episode % 3 > 0, over and self.episode % 3 == 0, {}


def length_of(index: Any, episode: Any) -> Any:
    return 2 + (3 * index + 2 * episode) % 5


def rewards_of(achieved: Any, desired: Any) -> Any:
    return (achieved == desired).all(-1) - 1.0


def make_runner(num_envs: int = 3, worker_index: int = 0, **settings: Any) -> EnvRunner:
    config = DQNConfig().environment(Diary).debugging(seed=0)
    config.rl_module(model_config={"fcnet_hiddens": [64, 64], "use_layernorm": False})
    config.env_runners(num_envs_per_env_runner=num_envs, **settings)
    return EnvRunner(config, worker_index=worker_index)


def make_buffer(capacity: int = 500, **settings: Any) -> HindsightReplayBuffer:
    given: dict[str, Any] = {"goals": GoalFunctions(rewards_of), "seed": 0, **settings}
    return HindsightReplayBuffer(capacity, **given)


def relabelled(batch: dict[str, Any]) -> Any:
    return (batch["obs"]["desired_goal"] >= 0).all(-1)


def check_goals(batch: dict[str, Any], strategy: str, newest: dict[tuple[int, int], int]) -> None:
    """Check each goal; `newest` has the last t of each episode that was added."""
    chosen = relabelled(batch)
    np.testing.assert_array_equal(batch["obs"]["desired_goal"], batch["next_obs"]["desired_goal"])
    for place, goal in zip(batch["obs"]["observation"][chosen], batch["obs"]["desired_goal"][chosen], strict=True):
        index, episode, t = place.astype(int)
        last = newest[index, episode]
        assert goal[:2].tolist() == [index, episode]
        if strategy == "final":
            assert goal[2] == last
        else:
            assert (t if strategy == "future" else 0) < goal[2] <= last
    reached = (batch["next_obs"]["achieved_goal"] == batch["obs"]["desired_goal"]).all(-1)
    np.testing.assert_array_equal(batch["rewards"], np.where(reached & chosen, 0.0, -1.0))


@pytest.mark.slow_cases("same_step")
@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("autoreset_mode", ["next_step", "same_step"])
@pytest.mark.parametrize("num_rows", [1, 4, 40])
def test_goals_are_of_the_steps_that_the_strategy_names(strategy: str, autoreset_mode: str, num_rows: int) -> None:
    """In rollouts of any length, of two runners, in a ring that has been written many times."""
    runners = [make_runner(worker_index=index, autoreset_mode=autoreset_mode) for index in (1, 2)]
    buffer, newest = make_buffer(60, strategy=strategy, num_runners=2), dict[tuple[int, int], int]()
    for _ in range(160 // num_rows):
        for runner in runners:
            rollout = runner.sample(num_timesteps=3 * num_rows)
            for row, lane in np.argwhere(rollout.valid).tolist():
                index, episode, t = rollout.obs["observation"][row, lane].astype(int).tolist()
                newest[index, episode] = t + 1
            buffer.add(rollout)
        batch = buffer.sample(200)
        check_goals(batch, strategy, newest)
    assert 0.7 < relabelled(batch).mean() < 0.9
    for runner in runners:
        runner.stop()


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_rollouts_that_are_not_added_leave_no_goals_to_other_episodes(strategy: str) -> None:
    """Neither do rollouts that are larger than the buffer, of which the last rows are kept."""
    runner, buffer = make_runner(autoreset_mode="same_step"), make_buffer(90, strategy=strategy)
    for turn in range(60):
        rollout = runner.sample(num_timesteps=3 * (50 if turn % 20 == 19 else 1 + turn % 4))
        if turn % 3:
            buffer.add(rollout)
            batch = buffer.sample(100)
            chosen, goals = relabelled(batch), batch["obs"]["desired_goal"]
            np.testing.assert_array_equal(goals[chosen, :2], batch["obs"]["observation"][chosen, :2])
    runner.stop()


def filled(num_rows: int = 100, **settings: Any) -> HindsightReplayBuffer:
    runner, buffer = make_runner(), make_buffer(**settings)
    buffer.add(runner.sample(num_timesteps=3 * num_rows))
    runner.stop()
    return buffer


def test_future_goals_are_drawn_evenly() -> None:
    buffer = filled(capacity=5000, num_goals=1e9)
    batch = buffer.sample(40_000)
    index, episode, t = batch["obs"]["observation"].astype(int).T
    whole = (episode > 0) & (length_of(index, episode) == 5) & (t == 1) & (episode < episode.max())
    counts = np.bincount(batch["obs"]["desired_goal"][whole, 2].astype(int), minlength=6)[2:]
    assert len(counts) == 4 and abs(counts / counts.sum() - 0.25).max() < 0.03


def test_as_many_steps_are_relabelled_as_were_asked_for() -> None:
    for num_goals in (0.25, 1.0, 4.0):
        share = relabelled(filled(num_goals=num_goals).sample(20_000)).mean()
        assert share == pytest.approx(num_goals / (1 + num_goals), abs=0.02)


def slow_sum(index: int, episode: int, t: int, goal: Any, n: int, gamma: float, stops: bool) -> tuple[float, int, bool]:
    """Return the sum of rewards, the number of steps, and whether the last one terminated, step by step."""
    total, length = 0.0, int(length_of(index, episode))
    for step in range(n):
        reached = goal.tolist() == [index, episode, t + step + 1]
        total += gamma**step * (0.0 if reached else -1.0)
        over = t + step + 1 == length
        terminated = reached if stops else over and episode % 3 > 0
        if terminated or over:
            return total, step + 1, terminated
    return total, n, False


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("n_step", [1, 3])
def test_all_columns_follow_the_goal(n_step: int, stops: bool) -> None:
    """A slow loop has the same sums of rewards, numbers of steps and next observations."""

    def terminates(achieved: Any, desired: Any) -> Any:
        return (achieved == desired).all(-1)

    goals = GoalFunctions(rewards_of, terminates if stops else None)
    batch = filled(goals=goals, num_goals=1e9, capacity=2000).sample(3000, n_step=n_step, gamma=0.9)
    assert relabelled(batch).all()
    seen = set[tuple[int, bool, bool]]()
    newest = batch["obs"]["observation"][:, 1].max() - 1  # the steps of the last episodes are not all there
    for row in np.flatnonzero(batch["obs"]["observation"][:, 1] < newest).tolist():
        index, episode, t = batch["obs"]["observation"][row].astype(int).tolist()
        total, steps, terminated = slow_sum(index, episode, t, batch["obs"]["desired_goal"][row], n_step, 0.9, stops)
        assert batch["rewards"][row] == pytest.approx(total)
        assert (batch["num_steps"][row], batch["terminated"][row]) == (steps, terminated)
        assert batch["discounts"][row] == pytest.approx(0.9**steps)
        assert batch["next_obs"]["observation"][row].tolist() == [index, episode, t + steps]
        seen.add((steps, terminated, bool(batch["truncated"][row])))
    assert len(seen) >= (3 if n_step == 1 else 5)


def test_rewards_are_changed_before_they_are_summed() -> None:
    batch = filled(num_goals=1e9).sample(500, n_step=2, gamma=0.5, reward_fn=lambda rewards: rewards * 10 + 1)
    inner = {1: (-9.0, 1.0), 2: (-9.0, 1.0)}
    sums = {
        sum(0.5**i * r for i, r in enumerate(each)) for n in inner for each in itertools.product(inner[n], repeat=n)
    }
    assert set(batch["rewards"].tolist()) <= sums and len(set(batch["rewards"].tolist())) > 3


def test_a_state_of_another_strategy_is_refused() -> None:
    with pytest.raises(CheckpointError, match="strategy='future'"):
        make_buffer(100, strategy="final").set_state(make_buffer(100).get_state())


def test_the_size_has_the_columns_of_the_episodes() -> None:
    buffer = make_buffer(90)
    assert buffer.nbytes == 0
    buffer = filled(capacity=90)
    arrays = [*buffer._columns.values(), *buffer._observations._columns]  # type: ignore[union-attr]
    assert buffer.nbytes == sum(column.grid.nbytes for column in arrays) + 3 * 8 * 3 * 31


def test_columns_may_be_in_files(tmp_path: Path) -> None:
    first, second = filled(directory=tmp_path).sample(50), filled().sample(50)
    np.testing.assert_array_equal(first["obs"]["desired_goal"], second["obs"]["desired_goal"])


# In an algorithm.


def small_dqn(**replay: Any) -> DQNConfig:
    config = DQNConfig().environment(BitFlippingEnv, env_config={"num_bits": 4}).debugging(seed=0)
    config.training(num_steps_sampled_before_learning_starts=50, train_batch_size_per_learner=16)
    config.training(replay_buffer_config={"type": "hindsight", "capacity": 1000, **replay})
    config.rl_module(model_config={"fcnet_hiddens": [16]})
    return config.reporting(min_sample_timesteps_per_iteration=100)


def test_the_buffer_of_an_algorithm_relabels_by_the_env() -> None:
    with small_dqn(num_goals=9).env_runners(num_envs_per_env_runner=2).build() as algorithm:
        for _ in range(2):
            algorithm.train()
        buffer = algorithm.local_replay_buffer
        assert isinstance(buffer, HindsightReplayBuffer)
        batch = buffer.sample(500)
        reached = (batch["next_obs"]["achieved_goal"] == batch["obs"]["desired_goal"]).all(-1)
        np.testing.assert_array_equal(batch["rewards"], reached - 1.0)
        np.testing.assert_array_equal(batch["terminated"], reached)
        assert 0.3 < reached.mean() < 0.9


def test_other_goals_leave_the_intrinsic_rewards() -> None:
    config = small_dqn(num_goals=9).exploration(exploration_config={"type": "RND"})
    with config.build() as algo:
        algo.train()
        rewards = algo.local_replay_buffer.sample(200)["rewards"]
    assert (rewards != rewards.round()).mean() > 0.9  # rewards of the env are -1 and 0


class OnceEach(BitFlippingEnv):
    """Computes the reward of one goal at a time."""

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return 0.0 if bool((achieved_goal == desired_goal).all()) and achieved_goal.ndim == 1 else -1.0


def test_functions_of_one_goal_are_called_for_each() -> None:
    with small_dqn(num_goals=9).environment(OnceEach).build() as algorithm:
        algorithm.train()
        batch = algorithm.local_replay_buffer.sample(200)
    assert set(batch["rewards"].tolist()) == {-1.0, 0.0}


class ByPlaces(BitFlippingEnv):
    """Computes the reward of one goal, and for ten goals of ten bits something else of the same shape."""

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return (achieved_goal == desired_goal).all(0) - 1.0


def test_a_function_of_one_goal_is_not_taken_for_one_of_many() -> None:
    """Also where the number of goals that are compared is the number of their entries."""
    for num_bits in range(2, 25):
        goals = find_goal_functions(ByPlaces, EnvContext({"num_bits": num_bits}))
        ones = np.ones((num_bits, num_bits), np.float32)
        assert goals.rewards_of(ones, np.triu(ones)).tolist() == [0.0] + [-1.0] * (num_bits - 1)
        goals.close()


class GivesRewards(gym.Wrapper[Any, Any]):
    """Changes the rewards, and says so in its method."""

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return 3.0 * (achieved_goal == desired_goal).all(-1)

    def step(self, action: Any) -> Any:
        obs, _, *others = self.env.step(action)
        return obs, self.compute_reward(obs["achieved_goal"], obs["desired_goal"], {}), *others


def test_a_wrapper_may_compute_the_rewards() -> None:
    config = small_dqn(num_goals=9).environment(wrappers=[GivesRewards, Renamed])
    with config.build() as algorithm:
        algorithm.train()
        batch = algorithm.local_replay_buffer.sample(300)
    reached = (batch["next_obs"]["achieved_goal"] == batch["obs"]["desired_goal"]).all(-1)
    np.testing.assert_array_equal(batch["rewards"], 3.0 * reached)


def test_only_steps_of_transitions_are_given_to_the_functions() -> None:
    """With several steps, and in batches in which no step gets another goal."""
    buffer = filled(num_goals=0.2)
    newest, calls = 100 / 2, []

    def checked(achieved: Any, desired: Any) -> Any:
        calls.append(len(achieved))
        assert len(achieved) and (achieved[:, :2] == desired[:, :2]).all() and (achieved[:, 1] < newest).all()
        return rewards_of(achieved, desired)

    buffer._goals = GoalFunctions(checked)
    for _ in range(50):
        buffer.sample(3, n_step=4)
    assert calls and len(calls) < 50


FORMS: dict[str, Any] = {
    "float64": lambda reached: np.asarray(reached, np.float64) - 1,
    "integers": lambda reached: np.asarray(reached, np.int32) - 1,
    "an axis more": lambda reached: np.asarray(reached - 1.0)[..., None],
    "a list": lambda reached: (reached - 1.0).tolist(),
}


def in_form(form: Any, for_one: bool = False) -> type[gym.Wrapper[Any, Any]]:
    """A wrapper whose method gives the rewards in a form, for many goals or for one alone."""

    class InForm(gym.Wrapper[Any, Any]):
        def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
            assert not for_one or achieved_goal.ndim == 1
            return form((achieved_goal == desired_goal).all(-1))

        def step(self, action: Any) -> Any:
            obs, _, *others = self.env.step(action)
            [reward] = np.ravel(self.compute_reward(obs["achieved_goal"], obs["desired_goal"], {}))
            return obs, reward, *others

    return InForm


@pytest.mark.parametrize("for_one", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_rewards_of_goals_may_have_another_dtype_and_an_axis_of_length_1(form: str, for_one: bool) -> None:
    with small_dqn(num_goals=9).environment(wrappers=[in_form(FORMS[form], for_one)]).build() as algorithm:
        algorithm.train()
        batch = algorithm.local_replay_buffer.sample(200)
        goals = algorithm.local_replay_buffer._goals  # type: ignore[attr-defined]
        ones = np.ones((3, 4), np.float32)
        assert goals.rewards_of(ones, np.tri(3, 4, 1, np.float32)).shape == (3,)
    reached = (batch["next_obs"]["achieved_goal"] == batch["obs"]["desired_goal"]).all(-1)
    np.testing.assert_array_equal(batch["rewards"], reached - 1.0)
    assert 0.3 < reached.mean() < 0.9


@pytest.mark.parametrize(
    ("form", "found"),
    [
        (lambda reached: np.stack([reached, reached], -1) - 1.0, r"float64\[2\]"),
        (lambda reached: np.asarray(reached).astype(str), r"<U5\[\]"),
    ],
)
def test_rewards_of_goals_that_are_not_numbers_are_refused(form: Any, found: str) -> None:
    class Numbers(in_form(form)):  # type: ignore[misc]
        """Hides from its steps what is wrong."""

        def step(self, action: Any) -> Any:
            return self.env.step(action)

    with pytest.raises(ConfigError, match=f"'BitFlippingEnv' gives {found} for the goals of one step"):
        small_dqn().environment(wrappers=[Numbers]).build()


@pytest.mark.parametrize("form", [lambda values: values[:1], lambda values: np.stack([values, values], -1)])
def test_rewards_of_another_shape_while_learning_are_refused(form: Any) -> None:
    """Not spread over all goals: a method may give something else for numbers of goals that were not tried."""
    buffer = filled()
    buffer._goals = GoalFunctions(lambda achieved, desired: form(rewards_of(achieved, desired)))
    with pytest.raises(ConfigError, match=r"compute_reward of the env must return finite numbers \[\d+\], got float"):
        buffer.sample(50)


class ReadsInfo(BitFlippingEnv):
    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return -1.0 - info["cost"]

    def step(self, action: Any) -> Any:
        return self._obs(), -1.0, False, False, {"cost": 0.0}


class Shaped(gym.RewardWrapper[Any, Any]):
    def reward(self, reward: Any) -> Any:
        return 2.0 * reward


class NoMethod(BitFlippingEnv):
    compute_reward = None  # type: ignore[assignment]

    def step(self, action: Any) -> Any:
        return self._obs(), 0.0, False, False, {}


class RewardsGoals(gym.RewardWrapper[Any, Any]):
    """Changes nothing that steps with random actions show where goals are hard to reach."""

    def reward(self, reward: Any) -> Any:
        return 5.0 if reward == 0 else reward


class Renamed(gym.Wrapper[Any, Any]):
    pass


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"env": "CartPole-v1", "env_config": {}},
            "needs observations that are a Dict with the keys observation, achieved_goal, desired_",
        ),
        ({"env": ReadsInfo}, "compute_reward of env 'ReadsInfo' raised KeyError with an empty info"),
        ({"env": NoMethod}, r"needs a method compute_reward\(achieved_goal, desired_goal, info\) of env 'NoMethod'"),
        (
            {"env_config": {"num_bits": 30}, "wrappers": [RewardsGoals, Renamed]},
            "RewardsGoals of env 'BitFlippingEnv' changes the reward of a goal that is achieved from 0.0 to 5.0",
        ),
        ({"wrappers": [Shaped]}, "gives -1.0 for the goals of a step whose reward was -2.0.*leave out wrappers"),
    ],
)
def test_envs_without_such_rewards_are_refused_at_build(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        small_dqn().environment(**change).build()


BITS = spaces.Box(0, 1, (4,), np.float32)
NESTED = spaces.Dict({"bits": spaces.MultiBinary(4)})


@pytest.mark.parametrize(
    ("achieved", "desired"),
    [
        (NESTED, NESTED),
        (spaces.Discrete(4), spaces.Discrete(3)),
        (BITS, spaces.Box(0, 1, (3,), np.float32)),
        (BITS, spaces.Box(0, 1, (4,), np.int64)),
        (BITS, spaces.MultiBinary(4)),
    ],
)
def test_achieved_and_desired_goals_of_different_spaces_are_refused(
    achieved: spaces.Space[Any], desired: spaces.Space[Any]
) -> None:
    class Unequal(BitFlippingEnv):
        def __init__(self, config: Any = None) -> None:
            super().__init__(config)
            goals = {"achieved_goal": achieved, "desired_goal": desired}
            self.observation_space = spaces.Dict({"observation": BITS, **goals})

    with pytest.raises(ConfigError, match=rf"goals of one space.*'Unequal' has .*{type(desired).__name__}"):
        find_goal_functions(Unequal, EnvContext({"num_bits": 4}))


class Ring(gym.Env[Any, Any]):
    """Five places in a ring, with goals that are numbers, or arrays of two dtypes."""

    action_space = spaces.Discrete(2)

    def __init__(self, config: Any) -> None:
        self.dtypes = config.get("dtypes")
        goals = [spaces.Box(0, 5, (1,), dtype) for dtype in self.dtypes or ()] or [spaces.Discrete(5)] * 2
        names = ("observation", "achieved_goal", "desired_goal")
        self.observation_space = spaces.Dict(dict(zip(names, (spaces.Discrete(5), *goals), strict=True)))

    def obs(self) -> dict[str, Any]:
        goals = self.place, self.goal
        if self.dtypes:
            goals = tuple(np.array([x / 7], dtype) for x, dtype in zip(goals, self.dtypes, strict=True))
        return {"observation": self.place, "achieved_goal": goals[0], "desired_goal": goals[1]}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.place, self.goal = 0, *self.np_random.integers(5, size=2).tolist()
        return self.obs(), {}

    def step(self, action: Any) -> Any:
        self.t, self.place = self.t + 1, (self.place + 2 * int(action) - 1) % 5
        obs = self.obs()
        reached = bool(self.compute_terminated(obs["achieved_goal"], obs["desired_goal"], {}))
        return obs, reached - 1.0, reached, self.t >= 6 and not reached, {}

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return np.all(abs(achieved_goal - desired_goal) < 1e-3, axis=-1 if self.dtypes else ())

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        return self.compute_terminated(achieved_goal, desired_goal, info) - 1.0


@pytest.mark.parametrize("dtypes", [None, (np.float64, np.float32), (np.float32, np.float64)])
def test_goals_may_be_numbers_and_arrays_of_different_precision(dtypes: Any) -> None:
    config = small_dqn(num_goals=9).environment(Ring, env_config={"dtypes": dtypes} if dtypes else {})
    with config.build() as algorithm:
        algorithm.train()
        batch = algorithm.local_replay_buffer.sample(300)
    reached = np.isclose(batch["next_obs"]["achieved_goal"], batch["obs"]["desired_goal"], atol=1e-3).reshape(-1)
    np.testing.assert_array_equal(batch["rewards"], reached - 1.0)
    np.testing.assert_array_equal(batch["terminated"], reached)
    assert 0.3 < reached.mean() < 0.9


def test_the_env_that_computes_rewards_changes_no_settings() -> None:
    class TakesOut(BitFlippingEnv):
        def __init__(self, config: Any) -> None:
            super().__init__({"num_bits": config["size"].pop("bits")})

    with small_dqn().environment(TakesOut, env_config={"size": {"bits": 4}}).build() as algorithm:
        assert algorithm.config.env_config == {"size": {"bits": 4}}


def test_the_env_that_computes_rewards_is_closed() -> None:
    made, closed = [], []

    class Closes(BitFlippingEnv):
        def __init__(self, config: Any = None) -> None:
            super().__init__(config)
            made.append(self)

        def close(self) -> None:
            closed.append(self)
            super().close()

    with small_dqn().environment(Closes).build() as algorithm:
        algorithm.train()
        num_open = len(made) - len(closed)
    assert num_open == 2 and len(closed) == len(made)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"type": "uniform", "num_goals": 2}, "num_goals=2 contradicts type='uniform': set type='hindsight'"),
        ({"type": "hindsight", "alpha": 0.5}, "alpha=0.5 contradicts type='hindsight': set type='prioritized'"),
        ({"type": "hindsight", "num_goals": 0}, "num_goals=0 must be positive"),
        ({"type": "hindsight", "goal_strategy": "next"}, "goal_strategy='next' must be"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ReplayConfig.parse(settings)


def test_stacks_of_frames_are_refused() -> None:
    with pytest.raises(ConfigError, match="stacks of 4 frames"):
        config = ReplayConfig.parse({"type": "hindsight", "frame_stack": 4})
        make_replay_buffer(config, num_runners=1, seed=0, find_goals=lambda: GoalFunctions(rewards_of))


def share_of_goals(config: Any, num_iterations: int) -> float:
    """Return the share of 50 episodes that end at their goals, after so many iterations of training."""
    with config.debugging(seed=0).learners(num_threads=1).build() as algorithm:
        for _ in range(num_iterations):
            algorithm.train()
        rollout = algorithm.env_runner.sample(num_episodes=50, explore=False)
        return float((rollout.rewards[rollout.valid & rollout.done] == 0).mean())


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["SAC", "TQC", "TD3"])
def test_a_point_is_reached_only_with_hindsight(algo: str) -> None:
    found = {}
    for kind in ("uniform", "hindsight"):
        config: Any = config_class(algo)().environment(ReachEnv).rl_module(model_config={"fcnet_hiddens": [64, 64]})
        config.training(replay_buffer_config={"type": kind}, num_steps_sampled_before_learning_starts=1000, lr=1e-3)
        found[kind] = share_of_goals(config.training(gamma=0.95), 5)
    assert found["uniform"] < 0.2 and found["hindsight"] >= 0.95


@pytest.mark.slow
def test_dqn_flips_bits_only_with_hindsight() -> None:
    found = {}
    for kind in ("uniform", "hindsight"):
        config = DQNConfig().environment(BitFlippingEnv, env_config={"num_bits": 12})
        config.training(replay_buffer_config={"type": kind}, lr=1e-3, target_network_update_freq=200, gamma=0.95)
        config.exploration(exploration_config={"epsilon_timesteps": 3000}).rl_module(
            model_config={"fcnet_hiddens": [128, 128]}
        )
        found[kind] = share_of_goals(config, 12)
    assert found["uniform"] < 0.2 and found["hindsight"] >= 0.9
