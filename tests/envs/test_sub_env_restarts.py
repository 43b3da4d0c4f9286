"""Sub-envs that fail and are restarted: what is in the columns, the statistics and the events."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from corral.core.returns import gae
from corral.envs.sub_envs import restart_env
from corral.errors import CallbackError, EnvError
from corral.runners.runner import EnvRunner
from corral.testing import CountingEnv
from faulty import TroubleDictEnv, TroubleEnv
from handmade import MakeRunner

MODES = ["next_step", "same_step"]
VECTORIZATIONS = ["sync", "async"]

Make = Callable[..., EnvRunner]


@pytest.fixture
def make(make_runner: MakeRunner) -> Make:
    def make(env: Any = TroubleEnv, *, num_envs: int = 1, **settings: Any) -> EnvRunner:
        names = ("autoreset_mode", "vectorization", "env_step_timeout_s", "batch_mode")
        chosen = {name: settings.pop(name) for name in names if name in settings}
        events = {name: settings.pop(name) for name in [*settings] if name.startswith("on_")}
        return make_runner(
            env,
            num_envs=num_envs,
            env_config={"counts": {}, **settings},
            disable_env_checking=True,
            restart_failed_sub_environments=True,
            **chosen,
            **events,
        )

    return make


def times(rollout: Any, i: int = 0) -> list[int]:
    """Return the time within its episode that each observation of a sub-env shows."""
    obs = rollout.obs["pair"][0] if isinstance(rollout.obs, dict) else rollout.obs
    return [int(t) for t in obs[:, i, 1]]


class TestColumns:
    @pytest.mark.parametrize("vectorization", VECTORIZATIONS)
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("env", [TroubleEnv, TroubleDictEnv])
    def test_a_step_that_raises(self, make: Make, env: Any, mode: str, vectorization: str) -> None:
        runner = make(
            env,
            num_envs=2,
            autoreset_mode=mode,
            vectorization=vectorization,
            step_faults=[3],
            episode_length=5,
            vector_index=1,
        )
        rollout = runner.sample(num_timesteps=9)
        assert len(rollout) == 5
        assert times(rollout, 1) == [0, 1, 2, 0, 1, 2]
        assert rollout.valid[:, 1].tolist() == [True, True, False, True, True]
        assert rollout.rewards[:, 1].tolist() == [1, 2, 0, 1, 2]
        assert not rollout.done[:, 1].any()
        assert rollout.valid[:, 0].all()
        assert rollout.rewards[:, 0].tolist() == [1, 2, 3, 4, 5]
        assert rollout.done[:, 0].tolist() == [False] * 4 + [True]
        assert runner.num_sub_env_restarts == 1

    @pytest.mark.parametrize("vectorization", VECTORIZATIONS)
    @pytest.mark.parametrize("mode", MODES)
    def test_an_autoreset_that_raises_ends_nothing_but_the_sub_env(
        self, make: Make, mode: str, vectorization: str
    ) -> None:
        runner = make(num_envs=2, autoreset_mode=mode, vectorization=vectorization, reset_faults=[2], episode_length=3)
        rollout = runner.sample(num_timesteps=8)
        assert rollout.terminated[2, 0]
        assert rollout.next_obs_at(2, 0).tolist() == [0, 3]  # the episode ended as if nothing had happened
        if mode == "next_step":
            assert times(rollout)[:5] == [0, 1, 2, 3, 0]
            assert rollout.valid[:4, 0].tolist() == [True, True, True, False]
        else:
            assert times(rollout)[:5] == [0, 1, 2, 0, 1]
            assert rollout.valid.all()
        assert rollout.broken == []
        assert runner.num_sub_env_restarts == 1
        assert runner.metrics.peek("num_episodes") == 2

    @pytest.mark.parametrize("vectorization", VECTORIZATIONS)
    def test_the_very_first_reset(self, make: Make, vectorization: str) -> None:
        runner = make(num_envs=2, vectorization=vectorization, reset_faults=[1, 2], episode_length=3)
        rollout = runner.sample(num_timesteps=6)
        assert times(rollout) == [0, 1, 2, 3]
        assert rollout.valid.all()
        assert runner.num_sub_env_restarts == 1

    @pytest.mark.parametrize("vectorization", VECTORIZATIONS)
    def test_infos_match_the_new_reset(self, make: Make, vectorization: str) -> None:
        infos: list[Any] = []
        runner = make(
            TroubleDictEnv,
            vectorization=vectorization,
            step_faults=[2],
            episode_length=5,
            on_episode_start=lambda episode: infos.append(episode.get_infos(0)),
        )
        rollout = runner.sample(num_timesteps=3)
        assert infos == [{"started": True}] * 2
        assert [set(info) for info in rollout.info_rows[2].of_lanes.values()] == [{"started"}]

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("vectorization", VECTORIZATIONS)
    def test_a_step_whose_observation_is_none_counts_as_failed(self, make: Make, vectorization: str, mode: str) -> None:
        class Wrong(TroubleEnv):
            def step(self, action: int) -> Any:
                obs, reward, *_ = super().step(action)
                return (
                    (np.zeros(3, np.float32), 99.0, True, True, {}) if reward == 3 else (obs, reward, False, False, {})
                )

        rollout = make(Wrong, autoreset_mode=mode, vectorization=vectorization, episode_length=9).sample(
            num_timesteps=3
        )
        assert rollout.rewards[:, 0].tolist() == [1, 2, 0, 1]
        assert not rollout.done.any()
        assert times(rollout) == [0, 1, 2, 0, 1]
        assert rollout.final_obs == {}

    def test_gae_takes_the_failure_for_the_end_of_a_fragment(self) -> None:
        rewards = np.array([[1.0], [2.0], [0.0], [3.0], [4.0]])
        values = np.array([[0.5], [1.0], [1.5], [2.0], [2.5], [3.0]])
        no = np.zeros((5, 1), bool)
        valid = np.array([[True], [True], [False], [True], [True]])
        advantages, targets = gae(rewards, values[:-1], values[1:], no, no, valid, gamma=0.9, lambda_=0.8)
        # Row 1 bootstraps from V of the last observation before the failure, row 2's; nothing comes from row 3.
        second = 2.0 + 0.9 * 1.5 - 1.0
        first = 1.0 + 0.9 * 1.0 - 0.5 + 0.9 * 0.8 * second
        fifth = 4.0 + 0.9 * 3.0 - 2.5
        fourth = 3.0 + 0.9 * 2.5 - 2.0 + 0.9 * 0.8 * fifth
        np.testing.assert_allclose(advantages[:, 0], [first, second, 0, fourth, fifth], rtol=1e-6)
        np.testing.assert_allclose(targets[[0, 1, 3, 4]], (advantages + values[:-1])[[0, 1, 3, 4]], rtol=1e-6)


class TestStatistics:
    # Fragments of one row up to more than the run, so that the failure falls on their first, last and inner rows.
    @pytest.mark.parametrize("fragment", [1, 2, 3, 4, 5, 7, 40])
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("vectorization", VECTORIZATIONS)
    def test_a_broken_episode_counts_nowhere(self, make: Make, vectorization: str, mode: str, fragment: int) -> None:
        # Episodes of 4 steps return 10. Sub-env 1 breaks in its third episode's second step and, at once, again.
        runner = make(
            num_envs=2,
            autoreset_mode=mode,
            vectorization=vectorization,
            step_faults=[10, 11],
            episode_length=4,
            vector_index=1,
        )
        rollouts = []
        while sum(map(len, rollouts)) < 30:
            rollouts.append(runner.sample(num_timesteps=fragment))
        result = runner.metrics.reduce()
        assert (result["episode_return_min"], result["episode_return_max"]) == (10, 10)
        assert (result["episode_len_min"], result["episode_len_max"]) == (4, 4)
        ended = sum(int((rollout.done & rollout.valid).sum()) for rollout in rollouts)
        assert result["num_episodes"] == ended >= 9
        assert result["num_env_steps_sampled"] == sum(int(rollout.valid.sum()) for rollout in rollouts)
        assert runner.num_sub_env_restarts == 2
        assert sum(len(rollout.broken) for rollout in rollouts) == 2
        self.check_chunks(rollouts)

    @staticmethod
    def check_chunks(rollouts: list[Any]) -> None:
        """Put the chunks of each id together: every episode begins at 0, and only one of them is the broken one."""
        parts: dict[str, list[Any]] = {}
        for rollout in rollouts:
            for _, chunk in rollout.chunks():
                parts.setdefault(chunk.id_, []).append(chunk)
        unfinished = 0
        for chunks in parts.values():
            rewards = np.concatenate([chunk.get_rewards() for chunk in chunks]).tolist()
            assert rewards == [1, 2, 3, 4][: len(rewards)]
            assert [chunk.t_started for chunk in chunks] == np.cumsum([0, *map(len, chunks[:-1])]).tolist()
            assert chunks[-1].get_return() == sum(rewards)
            assert [chunk.is_done for chunk in chunks] == [False] * (len(chunks) - 1) + [len(rewards) == 4]
            unfinished += len(rewards) < 4
        assert 1 <= unfinished <= 3  # the broken one, and what the last rollout leaves

    def test_durations_start_with_the_new_sub_env(self, make: Make) -> None:
        runner = make(step_faults=[3], episode_length=4)
        rollout = runner.sample(num_timesteps=6)
        expected = rollout.row_times_s[6] - rollout.row_times_s[2]
        assert runner.metrics.peek("episode_duration_sec_mean") == pytest.approx(expected)


class TestEvents:
    @pytest.mark.parametrize("fragment", [1, 2, 3, 9])
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("vectorization", VECTORIZATIONS)
    def test_no_end_but_created_and_start(self, make: Make, vectorization: str, mode: str, fragment: int) -> None:
        trace: list[Any] = []
        broken: list[Any] = []

        def note(event: str) -> Callable[..., None]:
            return lambda episode: trace.append((event, ids.setdefault(episode.id_, len(ids)), episode.t))

        ids: dict[str, int] = {}
        runner = make(
            vectorization=vectorization,
            autoreset_mode=mode,
            step_faults=[3],
            episode_length=4,
            on_episode_created=note("created"),
            on_episode_start=[note("start"), lambda episode: broken.append(episode)],
            on_episode_step=note("step"),
            on_episode_end=note("end"),
        )
        rollouts = []
        while sum(map(len, rollouts)) < 7:
            rollouts.append(runner.sample(num_timesteps=min(fragment, 6 - sum(r.num_env_steps for r in rollouts))))
        assert trace[:11] == [
            ("created", 0, 0),
            ("start", 0, 0),
            ("step", 0, 1),
            ("step", 0, 2),
            ("created", 1, 0),
            ("start", 1, 0),
            ("step", 1, 1),
            ("step", 1, 2),
            ("step", 1, 3),
            ("step", 1, 4),
            ("end", 1, 4),
        ]
        # The columns tell the same episodes apart, by the same ids.
        seen = list(dict.fromkeys(chunk.id_ for rollout in rollouts for chunk in rollout))
        assert [ids[id_] for id_ in seen] == [0, 1]
        # Whoever kept the broken episode sees its own steps, and none of the successor's.
        if fragment == 9:
            assert broken[0].get_rewards().tolist() == [1, 2]
            assert broken[0].get_observations()[:, 1].tolist() == [0, 1, 2]
            assert not broken[0].is_done

    def test_chunks_of_a_broken_episode_are_not_its_successors(self, make: Make) -> None:
        chunks: list[list[int]] = []
        runner = make(
            step_faults=[3],
            episode_length=4,
            on_episode_end=lambda episode, prev_episode_chunks: chunks.append([len(c) for c in prev_episode_chunks]),
        )
        for _ in range(6):
            runner.sample(num_timesteps=1)
        assert chunks == [[1, 1, 1]]

    def test_the_new_sub_env_is_announced_before_its_reset(self, make: Make) -> None:
        log: list[Any] = []
        runner = make(
            num_envs=2,
            step_faults=[2],
            vector_index=1,
            log=log,
            on_sub_environment_created=lambda env_index, sub_environment, env_context: log.append(
                ("announced", env_index, env_context.vector_index)
            ),
        )
        runner.sample(num_timesteps=2)
        del log[:]
        old = runner.env.unwrapped.envs[1]  # type: ignore[attr-defined]
        runner.sample(num_timesteps=2)
        assert log == [("closed", 1), ("made", 1), ("announced", 1, 1), ("reset", 1)]
        assert runner.env.unwrapped.envs[1] is not old  # type: ignore[attr-defined]

    def test_a_callback_that_raises_is_no_failure_of_the_sub_env(self, make: Make) -> None:
        calls: list[int] = []

        def created(env_index: int) -> None:
            calls.append(env_index)
            if len(calls) > 1:
                raise KeyError("mine")

        runner = make(step_faults=[2], on_sub_environment_created=created)
        with pytest.raises(CallbackError, match=r"on_sub_environment_created.*mine"):
            runner.sample(num_timesteps=5)
        assert len(calls) == 2


class TestMakingAnew:
    @pytest.mark.parametrize("vectorization", VECTORIZATIONS)
    def test_is_tried_three_times(self, make: Make, vectorization: str) -> None:
        # Async makes two more in this process, for their spaces, before it starts one of its own.
        again = 2 if vectorization == "sync" else 4
        runner = make(num_envs=2, vectorization=vectorization, step_faults=[3], make_faults=[again], reset_faults=[2])
        rollout = runner.sample(num_timesteps=10)
        assert len(rollout.broken) == 1
        assert runner.num_sub_env_restarts == 1

    def test_each_attempt_has_another_seed(self) -> None:
        seeds: list[int | None] = []

        class Picky(CountingEnv):
            def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
                seeds.append(seed)
                if len(seeds) < 3:
                    raise OSError("no level can be made from this seed")
                return super().reset(seed=seed)

        restart_env(Picky(), Picky, seed=7)
        assert seeds[0] == 7 and len(set(seeds)) == 3

    @pytest.mark.parametrize("vectorization", VECTORIZATIONS)
    def test_that_fails_three_times_is_an_error_with_both_failures(self, make: Make, vectorization: str) -> None:
        runner = make(num_envs=2, vectorization=vectorization, step_faults=[3], reset_faults=[2, 3, 4])
        with pytest.raises(EnvError) as caught:
            runner.sample(num_timesteps=20)
        for word in (
            "env 'TroubleEnv', sub-env 0, step 2: raised in step(): OSError: fault 3 in step",
            "could not be restarted in 3 attempts: OSError: fault 4 in reset",
        ):
            assert word in str(caught.value)

    @pytest.mark.parametrize("vectorization", VECTORIZATIONS)
    def test_a_sub_env_that_fails_in_every_first_step(self, make: Make, vectorization: str) -> None:
        runner = make(num_envs=2, vectorization=vectorization, step_faults=range(2, 100), episode_length=9)
        with pytest.raises(
            EnvError, match=r"sub-env 0, step 3: .*fault 4 in step; it was restarted, and failed 3 times"
        ):
            for _ in range(10):
                runner.sample(num_timesteps=1)

    @pytest.mark.parametrize("vectorization", VECTORIZATIONS)
    def test_a_sub_env_that_makes_a_step_in_between_may_fail_again_and_again(
        self, make: Make, vectorization: str
    ) -> None:
        faults = [2, 4, 6, 8, 10]  # every other step
        runner = make(vectorization=vectorization, step_faults=faults, vector_index=0, episode_length=9)
        rollout = runner.sample(num_timesteps=6)
        assert rollout.num_env_steps == 6 and len(rollout.broken) == 5
        assert runner.num_sub_env_restarts == 5

    def test_both_sub_envs_in_one_row(self, make: Make) -> None:
        class Both(TroubleEnv):
            def step(self, action: int) -> Any:
                if self._config["counts"].setdefault(("both", self.index), 0) == 1:
                    self._config["counts"]["both", self.index] = 2
                    raise OSError("both")
                self._config["counts"]["both", self.index] += 1
                return super().step(action)

        for vectorization in VECTORIZATIONS:
            runner = make(Both, num_envs=2, vectorization=vectorization, episode_length=5)
            rollout = runner.sample(num_timesteps=6)
            assert rollout.broken == [(1, 0), (1, 1)]
            assert rollout.obs[2].tolist() == [[0, 0], [0, 0]]
            assert rollout.num_env_steps == 6

    @pytest.mark.parametrize("vectorization", VECTORIZATIONS)
    def test_the_task_is_handed_on(self, make: Make, vectorization: str) -> None:
        runner = make(num_envs=2, vectorization=vectorization, step_faults=[2])
        runner.foreach_env(lambda env: env.set_task({"level": env.index + 5}))
        runner.sample(num_timesteps=6)
        assert runner.num_sub_env_restarts == 1
        assert runner.foreach_env(lambda env: env.task) == [{"level": 5}, {"level": 6}]

    def test_the_log_has_the_original_traceback(self, make: Make, caplog: pytest.LogCaptureFixture) -> None:
        for vectorization in VECTORIZATIONS:
            runner = make(num_envs=2, vectorization=vectorization, step_faults=[2])
            caplog.clear()
            with caplog.at_level(logging.WARNING, "corral"):
                runner.sample(num_timesteps=6)
            assert "env 'TroubleEnv', sub-env 0, step 1: failed in step(): OSError: fault 2 in step." in caplog.text
            assert "faulty.py" in caplog.text

    def test_the_same_seed_gives_the_same_again(self, make: Make) -> None:
        class Random(TroubleEnv):
            def _obs(self) -> Any:
                return self.np_random.random(2).astype(np.float32)

        one, other = (make(Random, num_envs=2, step_faults=[3]).sample(num_timesteps=20).obs for _ in range(2))
        np.testing.assert_array_equal(one, other)

    def test_without_the_setting_it_is_an_error(self, make_runner: MakeRunner) -> None:
        runner = make_runner(TroubleEnv, env_config={"step_faults": [2], "counts": {}}, disable_env_checking=True)
        with pytest.raises(EnvError, match=r"step 1: raised in step\(\): OSError: fault 2"):
            runner.sample(num_timesteps=5)
        assert runner.num_sub_env_restarts == 0


class TestHanging:
    @pytest.mark.parametrize("vectorization", VECTORIZATIONS)
    @pytest.mark.parametrize("fault", ["step_faults", "reset_faults"])
    def test_a_sub_env_that_hangs_is_replaced(self, make: Make, fault: str, vectorization: str) -> None:
        runner = make(
            num_envs=2,
            vectorization=vectorization,
            env_step_timeout_s=0.2,
            how="sleep",
            episode_length=3,
            vector_index=1,
            **{fault: [2]},
        )
        rollout = runner.sample(num_timesteps=10)
        assert runner.num_sub_env_restarts == 1
        assert len(rollout.broken) == (fault == "step_faults")
        assert rollout.valid[:, 0].sum() + rollout.valid[:, 1].sum() == rollout.num_env_steps
