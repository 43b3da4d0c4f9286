"""`batch_mode="complete_episodes"`: whole episodes, all that began in time, and nothing else."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from at_least import all_of, at_least
from corral import PPOConfig
from corral.data.episodes.rollout import Rollout
from corral.errors import EnvError
from corral.runners.runner import EnvRunner
from corral.testing import CountingEnv
from faulty import TroubleEnv
from handmade import MakeRunner

MODES = ["next_step", "same_step"]


def episodes_of(rollout: Rollout, i: int) -> list[list[float]]:
    """Return the rewards of the valid steps of a sub-env, cut where the observation says that an episode begins."""
    rows = np.flatnonzero(rollout.valid[:, i])
    starts = np.flatnonzero(rollout.obs[rows, i, 1] == 0)
    assert len(rows) == 0 or starts[0] == 0
    return [part.tolist() for part in np.split(rollout.rewards[rows, i], starts[1:])] if len(rows) else []


@given(
    wanted=st.integers(1, 30),
    num_envs=st.integers(1, 3),
    mode=st.sampled_from(MODES),
    length=st.integers(1, 6),
    ends=st.sampled_from(["terminated", "truncated", "alternate"]),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whole_episodes_and_all_that_began_in_time(
    wanted: int, num_envs: int, mode: str, length: int, ends: str
) -> None:
    config = PPOConfig().environment(CountingEnv, env_config={"episode_length": length, "stagger": True, "ends": ends})
    config.env_runners(num_envs_per_env_runner=num_envs, autoreset_mode=mode, batch_mode="complete_episodes")
    runner = EnvRunner(config.debugging(seed=0))
    for _ in range(2):
        rollout = runner.sample(num_timesteps=wanted)
        assert rollout.num_env_steps == rollout.valid.sum() >= wanted
        assert rollout.valid[-1].any()
        # What one would count by hand: rows up to the threshold, then each sub-env's current episode to its end.
        step = 1 if mode == "same_step" else 0  # same-step episodes of length L take L rows, others L + 1
        taken, threshold = 0, 0
        while taken < wanted:
            taken += sum((threshold % (length + i + 1 - step)) < length + i for i in range(num_envs))
            threshold += 1
        for i in range(num_envs):
            period = length + i + 1 - step
            begun = -(-threshold // period)
            assert episodes_of(rollout, i) == [[float(t) for t in range(1, length + i + 1)]] * begun
        assert runner.metrics.peek("num_env_steps_sampled") == rollout.num_env_steps
        assert len(rollout.episodes()) == int((rollout.done & rollout.valid).sum())
        assert all(episode.is_done for episode in rollout)
        runner.metrics.reduce()
    runner.stop()


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("mode", MODES)
def test_statistics_are_of_these_episodes_alone(make_runner: MakeRunner, mode: str, vectorization: str) -> None:
    runner = make_runner(
        num_envs=3,
        env_config={"episode_length": 2, "stagger": True},
        autoreset_mode=mode,
        vectorization=vectorization,
        batch_mode="complete_episodes",
    )
    returns: list[float] = []
    for _ in range(3):
        rollout = runner.sample(num_timesteps=4)
        returns += [episode.get_return() for episode in rollout]
    result = runner.metrics.reduce()
    assert result["num_episodes"] == len(returns) == len({e for r in [rollout] for e in r}) * 3
    assert result["episode_return_mean"] == pytest.approx(np.mean(returns))
    assert (result["episode_len_min"], result["episode_len_max"]) == (2, 4)


@pytest.mark.parametrize("mode", MODES)
def test_short_episodes_are_not_favoured(make_runner: MakeRunner, mode: str) -> None:
    """Half of the episodes take 1 step, half 20; of those that are counted, half must be long."""

    class Uneven(CountingEnv):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            answer = super().reset(seed=seed, options=options)
            self._length = 20 if self.np_random.random() < 0.5 else 1
            return answer

    runner = make_runner(Uneven, num_envs=4, autoreset_mode=mode, batch_mode="complete_episodes")
    lengths: list[int] = []
    for _ in range(150):
        lengths += [len(episode) for episode in runner.sample(num_timesteps=40)]
    # Over rollouts, steps by episodes is the mean length of all that began (Wald): 10.5.
    assert np.mean(lengths) == pytest.approx(10.5, rel=0.1)


class TestEvents:
    @pytest.mark.parametrize("mode", MODES)
    def test_statistics_are_of_the_episodes_that_count(self, make_runner: MakeRunner, mode: str) -> None:
        count: Counter[str] = Counter()
        ended: list[str] = []
        runner = make_runner(
            num_envs=3,
            env_config={"episode_length": 2, "stagger": True},
            autoreset_mode=mode,
            batch_mode="complete_episodes",
            on_episode_created=lambda: count.update(["created"]),
            on_episode_start=lambda: count.update(["start"]),
            on_episode_step=lambda: count.update(["step"]),
            on_episode_end=lambda episode: ended.append(episode.id_),
        )
        for _ in range(3):
            count.clear()
            ended.clear()
            rollout = runner.sample(num_timesteps=7)
            assert count["step"] == rollout.num_env_steps
            # In the order of time, and all with the ids that the columns give.
            assert sorted(ended) == sorted(episode.id_ for episode in rollout)
            assert count["created"] == len(ended) + 3
            assert len(ended) <= count["start"] <= count["created"]

    def test_the_next_sample_begins_with_a_reset(self, make_runner: MakeRunner) -> None:
        trace: list[str] = []
        runner = make_runner(
            batch_mode="complete_episodes",
            on_episode_created=lambda: trace.append("created"),
            on_episode_start=lambda: trace.append("start"),
            on_episode_end=lambda: trace.append("end"),
        )
        for _ in range(2):
            assert runner.sample(num_timesteps=4).num_env_steps == 6
            assert trace == ["created", "start", "end"] * 2 + ["created"]
            trace.clear()


class TestWithNumEpisodes:
    @pytest.mark.parametrize("mode", MODES)
    def test_is_as_ever(self, make_runner: MakeRunner, mode: str) -> None:
        one, other = (
            make_runner(num_envs=2, autoreset_mode=mode, batch_mode=batch_mode).sample(num_episodes=5)
            for batch_mode in ("complete_episodes", "truncate_episodes")
        )
        np.testing.assert_array_equal(one.valid, other.valid)
        np.testing.assert_array_equal(one.obs, other.obs)

    def test_nothing_wanted_gives_nothing(self, make_runner: MakeRunner) -> None:
        assert len(make_runner(batch_mode="complete_episodes").sample(num_timesteps=0)) == 0


class TestWithFailures:
    def make(self, make_runner: MakeRunner, **settings: Any) -> EnvRunner:
        config = {"counts": {}, "episode_length": 4, **settings.pop("env_config")}
        chosen = {"batch_mode": "complete_episodes", "restart_failed_sub_environments": True, **settings}
        return make_runner(TroubleEnv, env_config=config, disable_env_checking=True, **chosen)

    @pytest.mark.parametrize("mode", MODES)
    # Of steps 1 to 14 of sub-env 0, one fails: before the threshold, at it, after it.
    @pytest.mark.parametrize("faults", [[n] for n in range(1, 15)] + [[3, 4], [7, 8], [11, 15]])
    @pytest.mark.parametrize("by_episodes", [False, True])
    def test_a_broken_episode_is_not_part_of_the_sample(
        self, make_runner: MakeRunner, by_episodes: bool, faults: list[int], mode: str
    ) -> None:
        steps: Counter[str] = Counter()
        ended: list[str] = []
        runner = self.make(
            make_runner,
            num_envs=2,
            autoreset_mode=mode,
            env_config={"step_faults": faults},
            on_episode_step=lambda episode: steps.update([episode.id_]),
            on_episode_end=lambda episode: ended.append(episode.id_),
        )
        for _ in range(2):
            steps.clear()
            ended.clear()
            rollout = runner.sample(**({"num_episodes": 5} if by_episodes else {"num_timesteps": 17}))
            for i in range(2):
                assert all(episode == [1, 2, 3, 4] for episode in at_least(1, episodes_of(rollout, i)))
            assert rollout.num_env_steps >= 17 if not by_episodes else rollout.num_env_steps == 20
            assert [episode.id_ for episode in rollout] != []
            assert {episode.id_ for episode in rollout} == set(ended)
            assert all_of(steps[id_] == 4 for id_ in ended)
        result = runner.metrics.reduce()
        assert (result["episode_return_min"], result["episode_return_max"]) == (10, 10)

    @pytest.mark.parametrize("mode", MODES)
    def test_other_episodes_replace_the_steps_of_a_broken_episode(self, make_runner: MakeRunner, mode: str) -> None:
        class Shorter(TroubleEnv):
            """The first episode would take 6 steps, and fails in the last; all others take one."""

            def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
                answer = super().reset(seed=seed, options=options)
                self._length = 6 if self._counts["reset", self.index] == 1 else 1
                return answer

        ended: list[str] = []
        runner = make_runner(
            Shorter,
            env_config={"counts": {}, "step_faults": [6]},
            autoreset_mode=mode,
            batch_mode="complete_episodes",
            restart_failed_sub_environments=True,
            disable_env_checking=True,
            on_episode_end=lambda episode: ended.append(episode.id_),
        )
        rollout = runner.sample(num_timesteps=5)
        assert rollout.num_env_steps == 5
        assert episodes_of(rollout, 0) == [[1]] * 5
        assert [episode.id_ for episode in rollout] == ended

    @pytest.mark.parametrize("by_episodes", [False, True])
    def test_an_env_that_never_comes_to_an_end(self, make_runner: MakeRunner, by_episodes: bool) -> None:
        runner = self.make(make_runner, env_config={"step_faults": range(2, 10_000, 2)})
        with pytest.raises(EnvError, match=r"failed in 10\d episodes, and 0 were complete"):
            runner.sample(**({"num_episodes": 1} if by_episodes else {"num_timesteps": 10}))
