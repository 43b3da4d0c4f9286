"""The runner: its columns hold what the envs gave, neither more nor less."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corral import PPOConfig
from corral.core.ids import DEFAULT_MODULE_ID
from corral.core.tree import named_leaves
from corral.data.episodes.rollout import Rollout
from corral.runners.runner import EnvRunner
from corral.testing import CountingEnv, IdentityEnv, TimeLimitCorridor
from handmade import MakeRunner

MODES = ["next_step", "same_step"]
COLUMNS = ("obs", "actions", "rewards", "terminated", "truncated", "valid", "dist_inputs", "logp")


@dataclass
class Row:
    """What one row of one sub-env must hold; `led_to` is the observation after the step."""

    obs: list[int]
    reward: float
    terminated: bool
    truncated: bool
    valid: bool
    led_to: list[int]


def counting_rows(length: int, ends: str, mode: str) -> Iterator[Row]:
    """Yield the rows of a `CountingEnv`, by its documentation."""
    episode = 0
    while True:
        truncates = ends == "truncated" or (ends == "alternate" and episode % 2 == 1)
        for t in range(1, length + 1):
            over = t == length
            yield Row([episode, t - 1], t, over and not truncates, over and truncates, True, [episode, t])
        if mode == "next_step":
            yield Row([episode, length], 0, False, False, False, [episode + 1, 0])
        episode += 1


def assert_rows(rollouts: list[Rollout], env_index: int, expected: Iterator[Row]) -> None:
    """Compare rollouts in a row with the expected rows of one sub-env."""
    for rollout in rollouts:
        for t in range(len(rollout)):
            row = next(expected)
            assert rollout.obs[t, env_index].tolist() == row.obs
            assert rollout.rewards[t, env_index] == row.reward
            assert rollout.terminated[t, env_index] == row.terminated
            assert rollout.truncated[t, env_index] == row.truncated
            assert rollout.valid[t, env_index] == row.valid
            assert rollout.next_obs_at(t, env_index).tolist() == row.led_to


def ready_counting(env_config: Any) -> gym.vector.VectorEnv[Any, Any, Any]:
    """Return a vector env of Gymnasium's own, for the path of ready and native vector envs."""
    mode = AutoresetMode[env_config["mode"].upper()]
    made = [lambda i=i: CountingEnv(env_config.at(i)) for i in range(env_config["n"])]
    return gym.vector.SyncVectorEnv(made, autoreset_mode=mode)


class TestColumns:
    @pytest.mark.parametrize("ends", ["terminated", "truncated", "alternate"])
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("num_envs", [1, 2, 3])
    def test_hold_what_the_envs_gave(self, make_runner: MakeRunner, num_envs: int, mode: str, ends: str) -> None:
        config = {"episode_length": 2, "stagger": True, "ends": ends}
        runner = make_runner(num_envs=num_envs, autoreset_mode=mode, env_config=config)
        # Fragments end in the middle of episodes, on their last steps and on resets.
        rollouts = [runner.sample(num_timesteps=n) for n in (1, 1, 1, 2, 3, 5, 8, 1, 20)]
        for i in range(num_envs):
            assert_rows(rollouts, i, counting_rows(2 + i, ends, mode))
        for before, after in itertools.pairwise(rollouts):
            np.testing.assert_array_equal(before.obs[-1], after.obs[0])

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("kind", ["async", "ready"])
    def test_hold_the_same_from_other_vector_envs(self, make_runner: MakeRunner, kind: str, mode: str) -> None:
        config = {"episode_length": 2, "stagger": True, "ends": "alternate", "mode": mode, "n": 3}
        if kind == "async":
            runner = make_runner(num_envs=3, vectorization="async", autoreset_mode=mode, env_config=config)
        else:
            runner = make_runner(ready_counting, num_envs=3, env_config=config, disable_env_checking=True)
        rollouts = [runner.sample(num_timesteps=n) for n in (4, 1, 13)]
        for i in range(3):
            assert_rows(rollouts, i, counting_rows(2 + i, "alternate", mode))

    def test_hold_what_a_native_vector_env_gave(self, make_runner: MakeRunner) -> None:
        given: list[tuple[Any, ...]] = []

        class Recording(gym.vector.VectorWrapper):
            def reset(self, *, seed: Any = None, options: Any = None) -> Any:
                obs, infos = super().reset(seed=seed, options=options)
                given.append((obs.copy(),))
                return obs, infos

            def step(self, actions: Any) -> Any:
                obs, rewards, terminated, truncated, infos = super().step(actions)
                given.append((obs.copy(), rewards.copy(), terminated.copy(), truncated.copy(), actions.copy()))
                return obs, rewards, terminated, truncated, infos

        def native() -> Recording:
            return Recording(gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="vector_entry_point"))

        runner = make_runner(native, num_envs=None, disable_env_checking=True)
        rollouts = [runner.sample(num_timesteps=n) for n in (100, 1, 150)]
        (first,), *steps = given
        np.testing.assert_array_equal(rollouts[0].obs[0], first)
        was_done = np.zeros(3, bool)
        rows = [(rollout, t) for rollout in rollouts for t in range(len(rollout))]
        for (rollout, t), (obs, rewards, terminated, truncated, actions) in zip(rows, steps, strict=True):
            np.testing.assert_array_equal(rollout.obs[t + 1], obs)
            np.testing.assert_array_equal(rollout.rewards[t], rewards)
            np.testing.assert_array_equal(rollout.terminated[t], terminated)
            np.testing.assert_array_equal(rollout.truncated[t], truncated)
            np.testing.assert_array_equal(rollout.actions[t], actions)
            np.testing.assert_array_equal(rollout.valid[t], ~was_done)
            was_done = terminated | truncated
        assert sum(int((~rollout.valid).sum()) for rollout in rollouts) >= 3

    @pytest.mark.parametrize("mode", MODES)
    def test_final_observation_of_an_end_on_the_last_row(self, make_runner: MakeRunner, mode: str) -> None:
        runner = make_runner(autoreset_mode=mode, env_config={"episode_length": 3, "ends": "truncated"})
        rollout = runner.sample(num_timesteps=3)
        assert rollout.truncated[-1, 0]
        assert rollout.next_obs_at(2, 0).tolist() == [0, 3]
        assert runner.sample(num_timesteps=3).next_obs_at(len(rollout) - 1, 0)[0] == 1

    @pytest.mark.parametrize("vectorization", ["sync", "async"])
    @pytest.mark.parametrize("mode", MODES)
    def test_nested_observations(self, make_runner: MakeRunner, mode: str, vectorization: str) -> None:
        runner = make_runner(NestedEnv, num_envs=2, autoreset_mode=mode, vectorization=vectorization)
        rollout = runner.sample(num_timesteps=12)
        for t, n in np.argwhere(rollout.valid):
            now, after = rollout.obs["t"][t, n], rollout.next_obs_at(t, n)
            assert rollout.obs["pair"][0][t, n].tolist() == [now, -now]
            assert after["t"] == now + 1
            assert after["pair"][0].tolist() == [now + 1, -now - 1]
            assert rollout.terminated[t, n] == (now == 2)
        dtypes = {path: column.dtype for path, column in named_leaves(rollout.obs)}
        assert dtypes == {"pair/0": np.float32, "pair/1": np.int8, "t": np.int64}

    def test_actions_reach_the_env_in_its_own_units(self, make_runner: MakeRunner) -> None:
        runner = make_runner(IdentityEnv, num_envs=2, env_config={"space": "discrete_from_minus_2"})
        rollout = runner.sample(num_timesteps=200)
        pays = rollout.actions - 2 == rollout.obs[:-1]
        np.testing.assert_array_equal(rollout.rewards[rollout.valid], pays[rollout.valid])


class NestedEnv(gym.Env[Any, Any]):
    """Episodes of three steps whose nested observation holds the step count in every part."""

    observation_space: Any = spaces.Dict(
        {"t": spaces.Discrete(4), "pair": spaces.Tuple((spaces.Box(-9, 9, (2,), np.float32), spaces.MultiBinary(2)))}
    )
    action_space: Any = spaces.Discrete(2)

    def _obs(self) -> dict[str, Any]:
        return {"t": self._t, "pair": (np.array([self._t, -self._t], np.float32), np.array([1, 0], np.int8))}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._t = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self._t += 1
        return self._obs(), 1.0, self._t == 3, False, {}


class TestSampleByTimesteps:
    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(
        wanted=st.lists(st.integers(0, 12), min_size=1, max_size=6),
        num_envs=st.integers(1, 3),
        mode=st.sampled_from(MODES),
        length=st.integers(1, 4),
    )
    def test_returns_at_least_n_and_fewer_than_n_plus_num_envs(
        self, wanted: list[int], num_envs: int, mode: str, length: int
    ) -> None:
        config = PPOConfig().copy(env=CountingEnv, env_config={"episode_length": length, "stagger": True}, seed=0)
        runner = EnvRunner(config.copy(num_envs_per_env_runner=num_envs, autoreset_mode=mode))
        for n in wanted:
            rollout = runner.sample(num_timesteps=n)
            assert n <= rollout.num_env_steps < max(1, n + num_envs)
            assert rollout.num_env_steps == rollout.valid.sum()
            assert len(rollout.obs) == len(rollout) + 1

    def test_zero_gives_an_empty_rollout_and_changes_nothing(self, make_runner: MakeRunner) -> None:
        runner, other = make_runner(num_envs=2), make_runner(num_envs=2)
        assert len(runner.sample(num_timesteps=0)) == 0
        runner.sample(num_timesteps=4)
        empty = runner.sample(num_timesteps=0)
        assert (len(empty), empty.num_env_steps) == (0, 0)
        assert empty.rewards.shape == empty.logp.shape == (0, 2)
        other.sample(num_timesteps=4)
        np.testing.assert_array_equal(runner.sample(num_timesteps=6).obs, other.sample(num_timesteps=6).obs)

    @pytest.mark.parametrize(
        "arguments",
        [{}, {"num_timesteps": 1, "num_episodes": 1}, {"num_timesteps": -1}, {"num_episodes": -1}],
        ids=["neither", "both", "negative steps", "negative episodes"],
    )
    def test_arguments_that_make_no_sense(self, make_runner: MakeRunner, arguments: dict[str, int]) -> None:
        with pytest.raises(ValueError, match="num_timesteps and num_episodes"):
            make_runner().sample(**arguments)

    def test_force_reset_without_steps_counts_in_the_next_sample(self, make_runner: MakeRunner) -> None:
        runner = make_runner(num_envs=2)
        runner.sample(num_timesteps=4)
        assert runner.sample(num_timesteps=0, force_reset=True).num_env_steps == 0
        assert not runner.sample(num_timesteps=4).continues

    def test_force_reset_starts_new_episodes(self, make_runner: MakeRunner) -> None:
        runner = make_runner(num_envs=2, env_config={"episode_length": 5})
        runner.sample(num_timesteps=4)
        rollout = runner.sample(num_timesteps=10, force_reset=True)
        assert rollout.obs[0].tolist() == [[1, 0], [1, 0]]
        runner.metrics.reduce()
        assert runner.metrics.peek("episode_len_max") == 5


def test_a_rollout_says_whose_it_is_and_whether_it_continues(make_runner: MakeRunner) -> None:
    runner = make_runner(CountingEnv, num_envs=2, worker_index=3)
    rollouts = [runner.sample(num_timesteps=4) for _ in range(2)]
    rollouts += [runner.sample(num_episodes=1), runner.sample(num_timesteps=4)]
    rollouts.append(runner.sample(num_timesteps=4, force_reset=True))
    assert [rollout.continues for rollout in rollouts] == [False, True, False, False, False]
    assert {rollout.worker_index for rollout in rollouts} == {3}


class TestSampleByEpisodes:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("num_envs", [1, 2, 3])
    @pytest.mark.parametrize("num_episodes", [1, 2, 5])
    def test_gives_exactly_n_complete_episodes(
        self, make_runner: MakeRunner, num_episodes: int, num_envs: int, mode: str
    ) -> None:
        runner = make_runner(num_envs=num_envs, autoreset_mode=mode, env_config={"episode_length": 3})
        rollout = runner.sample(num_episodes=num_episodes)
        assert int((rollout.done & rollout.valid).sum()) == num_episodes
        assert rollout.num_env_steps == 3 * num_episodes
        assert rollout.rewards[rollout.valid].sum() == 6 * num_episodes
        for n in range(num_envs):  # whole episodes only
            steps = rollout.obs[:-1][rollout.valid[:, n], n, 1]
            assert steps.tolist() == [0, 1, 2] * (len(steps) // 3)

    def test_metrics_count_these_episodes_alone(self, make_runner: MakeRunner) -> None:
        runner = make_runner(num_envs=3, env_config={"episode_length": 3})
        runner.sample(num_episodes=4)
        result = runner.metrics.reduce()
        assert result["num_episodes"] == 4
        assert result["episode_return_mean"] == 6
        assert result["num_env_steps_sampled"] == 12

    @pytest.mark.parametrize("mode", MODES)
    def test_resets_before_and_after(self, make_runner: MakeRunner, mode: str) -> None:
        runner = make_runner(num_envs=2, autoreset_mode=mode, env_config={"episode_length": 3, "stagger": True})
        runner.sample(num_timesteps=2)
        during = runner.sample(num_episodes=1)
        assert during.obs[0].tolist() == [[1, 0], [1, 0]]
        after = runner.sample(num_timesteps=2)
        assert after.obs[0, :, 1].tolist() == [0, 0]
        assert (after.obs[0, :, 0] > 1).all()

    def test_zero_gives_an_empty_rollout(self, make_runner: MakeRunner) -> None:
        rollout = make_runner().sample(num_episodes=0)
        assert (len(rollout), rollout.num_env_steps) == (0, 0)


def set_policy_bias(runner: EnvRunner, bias: list[float]) -> None:
    """Make the policy say the same in every state."""
    weights = {name: value.numpy().copy() for name, value in runner.module.state_dict().items()}
    weights["policy_head.weight"][:] = 0
    weights["policy_head.bias"][:] = bias
    runner.set_weights({DEFAULT_MODULE_ID: weights}, version=1)


class TestActions:
    def test_explore_false_takes_the_most_likely(self, make_runner: MakeRunner) -> None:
        runner = make_runner(TimeLimitCorridor, num_envs=2)
        set_policy_bias(runner, [0.0, 0.1])
        for _ in range(2):
            assert (runner.sample(num_timesteps=20, explore=False).actions == 1).all()
            assert (runner.sample(num_timesteps=60).actions == 0).any()

    def test_explore_is_by_default_what_the_config_says(self, make_runner: MakeRunner) -> None:
        runner = make_runner(TimeLimitCorridor, explore=False)
        set_policy_bias(runner, [0.0, 0.1])
        assert (runner.sample(num_timesteps=50).actions == 1).all()
        assert (runner.sample(num_timesteps=50, explore=True).actions == 0).any()

    def test_samples_follow_the_policy(self, make_runner: MakeRunner) -> None:
        runner = make_runner(TimeLimitCorridor, num_envs=2)
        set_policy_bias(runner, [0.0, float(np.log(3))])
        rollout = runner.sample(num_timesteps=2000)
        assert 0.7 < rollout.actions[rollout.valid].mean() < 0.8

    def test_random_actions_ignore_the_policy(self, make_runner: MakeRunner) -> None:
        runner = make_runner(TimeLimitCorridor, num_envs=2)
        set_policy_bias(runner, [-100.0, 100.0])
        assert (runner.sample(num_timesteps=100).actions == 1).all()
        rollout = runner.sample(num_timesteps=1000, random_actions=True)
        assert 0.4 < rollout.actions[rollout.valid].mean() < 0.6

    def test_dist_inputs_are_the_modules_own(self, make_runner: MakeRunner) -> None:
        runner = make_runner("CartPole-v1", num_envs=3)
        rollout = runner.sample(num_timesteps=60)
        with torch.no_grad():
            outputs = runner.module.policy(torch.from_numpy(rollout.obs[:-1].reshape(-1, 4)))
        np.testing.assert_allclose(rollout.dist_inputs.reshape(-1, 2), outputs.numpy(), atol=1e-5)

    def test_logp_of_discrete_actions(self, make_runner: MakeRunner) -> None:
        rollout = make_runner("CartPole-v1", num_envs=3).sample(num_timesteps=60)
        expected = torch.distributions.Categorical(logits=torch.from_numpy(rollout.dist_inputs)).log_prob(
            torch.from_numpy(rollout.actions)
        )
        np.testing.assert_allclose(rollout.logp, expected.numpy(), atol=1e-5)

    def test_logp_of_box_actions(self, make_runner: MakeRunner) -> None:
        rollout = make_runner(IdentityEnv, num_envs=2, env_config={"space": "box"}).sample(num_timesteps=40)
        mean, log_std = np.split(rollout.dist_inputs, 2, axis=-1)
        normal = torch.distributions.Normal(torch.from_numpy(mean), torch.from_numpy(log_std).exp())
        expected = normal.log_prob(torch.from_numpy(rollout.actions)).sum(-1)
        np.testing.assert_allclose(rollout.logp, expected.numpy(), atol=1e-4)


def columns(rollouts: list[Rollout], num_rows: int | None = None) -> dict[str, Any]:
    joined = {
        name: np.concatenate([getattr(rollout, name)[: len(rollout)] for rollout in rollouts])[:num_rows]
        for name in COLUMNS
    }
    return joined


class TestStreams:
    @pytest.mark.parametrize("num_envs", [1, 3])
    def test_the_same_seed_gives_the_same_columns(self, make_runner: MakeRunner, num_envs: int) -> None:
        first, second, third = (make_runner("CartPole-v1", num_envs=num_envs, seed=seed) for seed in (1, 1, 2))
        one, same, other = (columns([runner.sample(num_timesteps=90)]) for runner in (first, second, third))
        for name in COLUMNS:
            np.testing.assert_array_equal(one[name], same[name], strict=True)
        assert one["obs"].shape != other["obs"].shape or (one["obs"] != other["obs"]).any()

    def test_runners_of_one_config_differ(self, make_runner: MakeRunner) -> None:
        one, other = (make_runner("CartPole-v1", worker_index=i).sample(num_timesteps=5).obs[0] for i in (1, 2))
        assert (one != other).all()

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("num_envs", [1, 2, 3])
    def test_cutting_differently_gives_the_same_stream(self, make_runner: MakeRunner, num_envs: int, mode: str) -> None:
        whole, cut = (
            make_runner("CartPole-v1", num_envs=num_envs, vectorization="sync", autoreset_mode=mode) for _ in range(2)
        )
        one = [whole.sample(num_timesteps=180)]
        pieces = [cut.sample(num_timesteps=n) for n in (1, 63, 2, 0, 50, 64)]
        num_rows = min(len(one[0]), sum(map(len, pieces)))
        assert num_rows * num_envs > 150
        expected, found = columns(one, num_rows), columns(pieces, num_rows)
        for name in COLUMNS:
            np.testing.assert_array_equal(found[name], expected[name])

    def test_a_kept_rollout_is_not_written_again(self, make_runner: MakeRunner) -> None:
        runner = make_runner("CartPole-v1", num_envs=2)
        kept = runner.sample(num_timesteps=30)
        before = copy.deepcopy(columns([kept]))
        for n in (30, 10, 60):
            runner.sample(num_timesteps=n)
        after = columns([kept])
        for name in COLUMNS:
            np.testing.assert_array_equal(after[name], before[name])

    def test_changes_of_a_rollout_do_not_reach_the_next_one(self, make_runner: MakeRunner) -> None:
        seen: list[Any] = []

        def scale_in_place(samples: Any) -> None:
            seen.append(samples.obs.tolist())
            samples.obs.fill(-1.0)

        runner = make_runner(env_config={"episode_length": 9}, on_sample_end=scale_in_place)
        for _ in range(3):
            runner.sample(num_timesteps=2)
        assert seen == [[[[0, t]] for t in (start, start + 1, start + 2)] for start in (0, 2, 4)]

    def test_a_callback_that_raises_costs_the_unfinished_episodes_alone(self, make_runner: MakeRunner) -> None:
        fail = [True]

        def once(episode: Any) -> None:
            if episode.t == 2 and fail:
                fail.pop()
                raise RuntimeError("in a callback")

        runner = make_runner(on_episode_step=once)
        with pytest.raises(RuntimeError, match="in a callback"):
            runner.sample(num_timesteps=9)
        assert_rows([runner.sample(num_timesteps=3)], 0, skip_episode(counting_rows(3, "terminated", "next_step")))


def skip_episode(rows: Iterator[Row]) -> Iterator[Row]:
    return (row for row in rows if row.obs[0] >= 1)


class TestMetrics:
    def test_counts_and_means(self, make_runner: MakeRunner) -> None:
        runner = make_runner(num_envs=2, env_config={"episode_length": 2, "stagger": True})
        for _ in range(3):
            runner.sample(num_timesteps=6)
        result = runner.metrics.reduce()
        steps = result["num_env_steps_sampled"]
        assert 18 <= steps <= 21
        assert result["num_env_steps_sampled_lifetime"] == steps
        assert (result["episode_len_min"], result["episode_len_max"]) == (2, 3)
        assert (result["episode_return_min"], result["episode_return_max"]) == (3, 6)

    def test_keys_are_there_before_the_first_episode_ends(self, make_runner: MakeRunner) -> None:
        runner = make_runner(env_config={"episode_length": 50})
        runner.sample(num_timesteps=5)
        result = runner.metrics.reduce()
        assert np.isnan(result["episode_return_mean"])
        assert result["num_episodes"] == 0


class LongerEachTime(CountingEnv):
    """The return of an episode is its number, from 1."""

    def reset(self, **kwargs: Any) -> Any:
        self._length = self._episode + 2
        return super().reset(**kwargs)

    def step(self, action: int) -> Any:
        obs, _, *rest = super().step(action)
        return obs, 1.0, *rest


@pytest.mark.parametrize(("window", "mean"), [(1, 4.0), (2, 3.5), (3, 3.0), (100, 2.5)])
def test_returns_are_smoothed_over_the_latest_episodes(make_runner: MakeRunner, window: int, mean: float) -> None:
    env = {"env": LongerEachTime, "disable_env_checking": True}
    runner = make_runner(**env, metrics_num_episodes_for_smoothing=window)
    for _ in range(10):  # four episodes, of 1, 2, 3 and 4 steps
        runner.sample(num_timesteps=1)
    assert runner.metrics.peek("num_episodes") == 4
    assert runner.metrics.peek("episode_return_mean") == runner.metrics.peek("episode_len_mean") == mean
