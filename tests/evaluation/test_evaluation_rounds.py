"""Evaluation rounds: which runner plays which episodes, in any form of round, and what comes of faults."""

from __future__ import annotations

import logging
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from troubled import LONG, evaluation_group, returns_of_seeds, standard_errors, trouble

from corral.callbacks.callback import Callback
from corral.core.metrics.logger import MetricsLogger
from corral.core.metrics.timers import Timers
from corral.envs.episode_resets import EpisodeReset
from corral.errors import CallbackError, CorralError, EnvError, WorkerDiedError
from corral.runners.evaluation import rounds
from corral.runners.evaluation.episodes import PlayedEpisodes, describe_episodes
from corral.runners.evaluation.rounds import MAX_FAILURES, Round, RoundPlan, play_round
from corral.runners.requests import SampleRequest
from corral.runners.runner import EnvRunner
from corral.runners.runner_group import EnvRunnerGroup
from corral.testing import CountingEnv

LATE_S = 0.5
SETTLE_S = 60.0


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest) -> Iterator[EnvRunnerGroup]:
    """Two runners with two sub-envs each, on an engine, or the embedded runner with four."""
    if request.param == "ray":
        request.getfixturevalue("ray_runtime")
    sizes = (0, 4) if request.param == "embedded" else (2, 2)
    with evaluation_group("local" if request.param == "embedded" else request.param, *sizes) as made:
        yield made


@pytest.fixture
def group(started: EnvRunnerGroup) -> EnvRunnerGroup:
    """The same runners in each test, idle and without trouble."""
    settle(started)
    return started


def settle(started: EnvRunnerGroup) -> None:
    """Wait until all runners are idle, and end their trouble."""
    deadline_s = time.monotonic() + SETTLE_S
    while len(started.mail.idle_runners()) < max(1, started.num_remote_workers):
        started.restore_runners()
        list(started.mail.take_replies())
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    give(started, None)
    play_round(started, RoundPlan(num_timesteps=1))  # a success, so that restarts are not delayed
    counted(started)


def give(group: EnvRunnerGroup, task: Any) -> None:
    group.foreach_env(lambda env: env.set_task(task))


def on(*engines: str) -> Any:
    """Run a test with these engines; one process runs all tests of an engine, which start its runners once."""
    params = {
        "process": pytest.param("process", marks=pytest.mark.xdist_group("rounds")),
        "ray": pytest.param("ray", marks=[pytest.mark.xdist_group("ray"), pytest.mark.slow]),
    }
    return pytest.mark.parametrize("started", [params.get(name, name) for name in engines], indirect=True)


def played_by(result: Round) -> dict[int, int]:
    return dict(sorted(Counter(record.worker_index for record in result.episodes).items()))


def play_in_time(group: EnvRunnerGroup, time_limit_s: float = 30.0, **plan: Any) -> tuple[Round, float]:
    """Return a round and its seconds, which may not be many more than its limit."""
    start = time.perf_counter()
    result = play_round(group, RoundPlan(time_limit_s=time_limit_s, **plan))
    seconds = time.perf_counter() - start
    assert seconds < time_limit_s + LATE_S
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    return result, seconds


def play_one(env_runner: EnvRunner) -> PlayedEpisodes:
    return describe_episodes(env_runner, env_runner.collect(SampleRequest(num_episodes=1)))


def counted(group: EnvRunnerGroup) -> dict[str, Any]:
    metrics = MetricsLogger()
    group.collect_metrics(metrics, Timers())
    found: dict[str, Any] = metrics.reduce()["env_runners"]
    return found


class TestNumbers:
    @pytest.mark.parametrize(
        ("num_env_runners", "num_envs", "num_episodes", "shares"),
        [(0, 4, 10, [10]), (3, 2, 10, [4, 3, 3]), (7, 1, 10, [2, 2, 2, 1, 1, 1, 1]), (4, 2, 2, [1, 1])],
    )
    @pytest.mark.parametrize("in_pieces", [False, True])
    def test_episodes_are_spread_evenly(
        self, num_env_runners: int, num_envs: int, num_episodes: int, shares: list[int], in_pieces: bool
    ) -> None:
        with evaluation_group("local", num_env_runners, num_envs) as group:
            result, _ = play_in_time(group, num_episodes=num_episodes, in_pieces=in_pieces)
            if in_pieces:  # at most one per sub-env in each turn
                assert len(result.episodes) == num_episodes
                assert max(played_by(result).values()) - min(played_by(result).values()) <= num_envs
            else:
                assert list(played_by(result).values()) == shares
            assert result.is_complete and not result.truncated and not result.skipped
            assert result.num_env_steps == sum(record.episode_len for record in result.episodes)
            assert all(record.episode_return == record.episode_len for record in result.episodes)
            found = counted(group)
            assert found["num_episodes"] == num_episodes and found["num_env_steps_sampled"] == result.num_env_steps

    @pytest.mark.slow_cases("process")
    @on("embedded", "local", "process", "ray")
    @pytest.mark.parametrize("in_pieces", [False, True])
    def test_the_same_seeds_give_the_same_episodes_in_the_same_order(
        self, group: EnvRunnerGroup, in_pieces: bool
    ) -> None:
        seeds = range(5, 16)
        for _ in range(2):
            resets = [EpisodeReset(seed=seed) for seed in seeds]
            result, _ = play_in_time(group, num_episodes=11, in_pieces=in_pieces, resets=resets)
            assert [record.seed for record in result.episodes] == list(seeds)
            assert [record.episode_return for record in result.episodes] == returns_of_seeds(seeds)

    @on("embedded")
    def test_resets_are_used_in_turn(self, group: EnvRunnerGroup) -> None:
        result, _ = play_in_time(group, num_episodes=5, resets=[EpisodeReset(seed=3), EpisodeReset(seed=4)])
        assert [record.seed for record in result.episodes] == [3, 4, 3, 4, 3]

    @pytest.mark.parametrize(("num_env_runners", "in_pieces"), [(0, False), (3, False), (3, True)])
    def test_env_steps_are_rounded_up(self, num_env_runners: int, in_pieces: bool) -> None:
        num_runners = max(1, num_env_runners)
        settings = {"env": CountingEnv, "env_config": {"episode_length": 10**6}}
        with evaluation_group("local", num_env_runners, 2, **settings) as group:
            result, _ = play_in_time(group, num_timesteps=1001, in_pieces=in_pieces)
            assert result.num_env_steps == -(-1001 // (2 * num_runners)) * 2 * num_runners
            assert result.num_unfinished_episodes == 2 * num_runners and result.episodes == []
            assert result.is_complete

    def test_env_steps_continue_episodes_unless_forced_to_reset(self) -> None:
        with evaluation_group("local", 2, 2, env=CountingEnv, env_config={"episode_length": 7}) as group:
            for force_reset, lens in ((True, []), (False, [7] * 4), (True, [])):
                result, _ = play_in_time(group, num_timesteps=4 * 5, force_reset=force_reset)
                assert [record.episode_len for record in result.episodes] == lens

    def test_a_round_without_a_number_asks_whether_it_continues(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rounds, "END_S", 30.0)  # the machine may be busy
        with evaluation_group("local", 2, 3) as group:
            once = play_round(group, RoundPlan(), goes_on=lambda: False)
            assert played_by(once) == {1: 3, 2: 3} and once.is_complete
            answers = iter([True] * 20 + [False])
            longer = play_round(group, RoundPlan(), goes_on=lambda: next(answers))
            assert min(played_by(longer).values()) > 3 and longer.num_unfinished_episodes == 0

    def test_a_round_without_a_number_of_chosen_resets_plays_whole_episodes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rounds, "END_S", 30.0)
        resets = [EpisodeReset(seed=seed) for seed in range(6)]
        with evaluation_group("local", 2, 3) as group:
            once = play_round(group, RoundPlan(resets=resets), goes_on=lambda: False)
        assert [record.episode_return for record in once.episodes] == returns_of_seeds(range(6))

    def test_a_round_that_cuts_episodes_counts_what_ended(self) -> None:
        settings = {"env": CountingEnv, "env_config": {"episode_length": 40}}
        with evaluation_group("local", 1, 2, **settings) as group:
            once = play_round(group, RoundPlan(cuts_episodes=True), goes_on=lambda: False)
            assert (once.num_env_steps, once.episodes, once.num_unfinished_episodes) == (2, [], 2) and once.is_complete

    def test_rounds_without_a_number_continue_episodes_and_count_the_steps_of_older_weights(self) -> None:
        settings = {"env": CountingEnv, "env_config": {"episode_length": 3}}
        with evaluation_group("local", 1, 2, **settings) as group:
            plan = RoundPlan(cuts_episodes=True, force_reset=False)  # each plays one row
            found = [play_round(group, plan, goes_on=lambda: False) for _ in range(8)]
            lens = [[record.episode_len for record in result.episodes] for result in found]
            assert lens == [[], [], [3, 3], [], [], [3, 3], [], []]
            assert [result.num_env_steps_of_older_weights for result in found] == [0, 0, 4, 0, 0, 4, 0, 0]
            cut = [play_round(group, RoundPlan(cuts_episodes=True), goes_on=lambda: False) for _ in range(4)]
            assert not any(result.episodes or result.num_env_steps_of_older_weights for result in cut)

    def test_an_episode_of_older_weights_counts_once_however_many_pieces_follow(self) -> None:
        settings = {"env": CountingEnv, "env_config": {"episode_length": 3}}
        with evaluation_group("local", 1, 2, **settings) as group:
            plan = RoundPlan(cuts_episodes=True, force_reset=False)
            play_round(group, plan, goes_on=lambda: False)  # one row
            rows = iter(range(8))
            longer = play_round(group, plan, goes_on=lambda: next(rows) < 7)
            assert len(longer.episodes) >= 4  # each sub-env ends two or more, in several pieces
            assert longer.num_env_steps_of_older_weights == 2

    def test_of_two_answers_for_one_episode_the_first_counts(self) -> None:
        """Runner 1 plays what runner 2 has not answered, and both answer with their own episode."""
        with evaluation_group("local", 2, env=CountingEnv, env_config={"episode_length": 3}) as group:
            played = {index: group.foreach_env_runner(play_one, local_env_runner=False)[index - 1] for index in (1, 2)}
            play = rounds._Play(group, RoundPlan(num_episodes=1), lambda: True, lambda: False, {})
            play.first_runner[0] = 2
            for index in (1, 2):
                play.note(index, [0], played[index])
            assert [record.worker_index for record in play.result(None).episodes] == [1]

    def test_a_runner_is_late_by_the_number_of_episodes_that_it_plays_in_turn(self) -> None:
        with evaluation_group("local", 2, 2) as group:
            play = rounds._Play(group, RoundPlan(num_episodes=16), lambda: True, lambda: False, {})
            now = time.perf_counter()
            play.deadline_s, play.slowest_s = now + 10_000, 10.0  # of one episode
            asked: Any = SimpleNamespace(asked_s=now - 2 * 10.0 * rounds.PATIENCE_FACTOR)
            assert play.is_late(asked, [0, 1])  # side by side in its two sub-envs
            assert not play.is_late(asked, [*range(8)])  # four in turn, for which it has twice as long

    def test_plans_that_make_no_sense(self) -> None:
        with pytest.raises(CorralError, match="not both"):
            RoundPlan(num_episodes=1, num_timesteps=1)
        with pytest.raises(CorralError, match="reset arguments"):
            RoundPlan(num_timesteps=1, resets=[EpisodeReset(seed=1)])
        with evaluation_group("local", 0) as group, pytest.raises(CorralError, match="goes_on"):
            play_round(group, RoundPlan())


class TestUnbiased:
    """Half of the episodes are 20 times as long as the others; the mean return is known."""

    def returns(self, group: EnvRunnerGroup, num_rounds: int, goes_on: Any = None, **plan: Any) -> list[float]:
        found = []
        for _ in range(num_rounds):
            result = play_round(group, RoundPlan(**plan), goes_on=goes_on() if goes_on else None)
            found += [record.episode_return for record in result.episodes]
        return found

    @on("embedded", "local", "process")
    @pytest.mark.parametrize("in_pieces", [pytest.param(False, marks=pytest.mark.slow), True])
    def test_episodes(self, group: EnvRunnerGroup, in_pieces: bool) -> None:
        returns = self.returns(group, 40, num_episodes=15, in_pieces=in_pieces)
        assert len(returns) == 600 and abs(standard_errors(returns)) < 4

    @pytest.mark.slow
    @on("embedded", "process")
    def test_as_long_as_training_takes(self, group: EnvRunnerGroup) -> None:
        """Training ends while episodes are played. They all count; without them, too many would be short ones."""
        returns = self.returns(group, 100, lambda: iter([True, True, True, False]).__next__)
        assert len(returns) > 400 and abs(standard_errors(returns)) < 4

    @on("local")
    def test_as_long_as_training_takes_with_episodes_that_continue(self, group: EnvRunnerGroup) -> None:
        how = {"force_reset": False, "cuts_episodes": True}
        returns = self.returns(group, 200, lambda: iter([True, True, False]).__next__, **how)
        assert len(returns) > 400 and abs(standard_errors(returns)) < 4

    @on("local")
    def test_env_steps_that_continue_episodes(self, group: EnvRunnerGroup) -> None:
        returns = self.returns(group, 80, num_timesteps=80, force_reset=False)
        assert len(returns) > 400 and abs(standard_errors(returns)) < 4

    @on("local")
    def test_env_steps_that_cut_off_long_episodes_are_reported(
        self, group: EnvRunnerGroup, caplog: pytest.LogCaptureFixture
    ) -> None:
        rounds._warn_once.cache_clear()
        with caplog.at_level(logging.WARNING, "corral"):
            results = [play_round(group, RoundPlan(num_timesteps=80)) for _ in range(150)]
        returns = [record.episode_return for result in results for record in result.episodes]
        assert standard_errors(returns) < -5  # about -10, which is why the log warns
        assert sum(result.num_unfinished_episodes for result in results) > len(returns) / 10
        assert caplog.text.count("cut off more than one in ten episodes") == 1


class TestFaults:
    @on("local", "process", "ray")
    @pytest.mark.parametrize("how", ["raise", "SIGKILL"])
    def test_episodes_of_a_runner_that_fails_go_to_the_others(
        self, group: EnvRunnerGroup, how: str, tmp_path: Path
    ) -> None:
        if how == "SIGKILL" and group.engine_name == "local":
            pytest.skip("that would be this process")
        give(group, trouble(1, how=how, once=f"{tmp_path}/done"))
        num_failures, seeds = group.num_failures, range(12)
        result, seconds = play_in_time(group, num_episodes=12, resets=[EpisodeReset(seed=seed) for seed in seeds])
        assert seconds < 15  # half of the limit, and they are played at once
        assert [record.episode_return for record in result.episodes] == returns_of_seeds(seeds)
        assert result.is_complete and not result.skipped and group.num_failures == num_failures + 1
        assert result.num_episodes_taken_over == 6 - played_by(result).get(1, 0)
        if group.engine_name == "local" or how == "SIGKILL":  # else it may continue before another one is done
            assert result.num_episodes_taken_over > 0

    @pytest.mark.slow_cases("process")
    @on("process", "ray")
    def test_episodes_of_a_runner_that_stalls_go_to_the_others_long_before_the_limit(
        self, group: EnvRunnerGroup, tmp_path: Path
    ) -> None:
        give(group, trouble(1, how="sleep", once=f"{tmp_path}/done"))
        num_failures, start = group.num_failures, time.perf_counter()
        result, seconds = play_in_time(group, 2.0, num_episodes=12)
        assert rounds.PATIENCE_S <= seconds < 1.0
        assert played_by(result) == {2: 12} and result.is_complete and result.num_episodes_taken_over == 6
        assert counted(group)["num_episodes"] == 12
        again, _ = play_in_time(group, 10.0, num_episodes=4)
        assert played_by(again) == {2: 4}  # the other one is busy until its limit
        while 1 not in group.mail.idle_runners():
            list(group.mail.take_replies())
            assert time.perf_counter() - start < 2.0 + LATE_S
        assert played_by(play_in_time(group, 10.0, num_episodes=4)[0]) == {1: 2, 2: 2}
        assert counted(group)["num_episodes"] == 8  # without the episodes of its late answer
        assert group.num_failures == num_failures

    @pytest.mark.slow_cases("process")
    @on("process", "ray")
    def test_a_frozen_runner_gets_nothing_and_is_replaced_after_twice_the_limit(
        self, group: EnvRunnerGroup, tmp_path: Path
    ) -> None:
        give(group, trouble(1, how="SIGSTOP", once=f"{tmp_path}/done"))
        num_failures, num_restarts = group.num_failures, group.num_remote_worker_restarts
        start = time.perf_counter()
        result, _ = play_in_time(group, 1.0, num_episodes=8)
        assert result.is_complete and result.num_episodes_taken_over == 4
        while group.num_failures == num_failures:
            assert played_by(play_in_time(group, 1.0, num_episodes=2)[0]) == {2: 2}
            assert time.perf_counter() - start < 2.0 + 2.0
        assert time.perf_counter() - start > 2.0
        while 1 not in played_by(result := play_in_time(group, 10.0, num_episodes=2)[0]):
            assert result.is_complete and time.perf_counter() - start < SETTLE_S
        assert group.num_remote_worker_restarts == num_restarts + 1

    @on("embedded", "local", "process", "ray")
    @pytest.mark.parametrize("how", ["endless", "sleep"])
    def test_the_limit_ends_a_round(self, group: EnvRunnerGroup, how: str) -> None:
        give(group, trouble(0, 1, 2, how=how, at=LONG + 2))
        result, seconds = play_in_time(group, 0.6, num_episodes=50)
        assert seconds >= 0.6
        assert result.truncated and not result.skipped and result.error is None
        assert result.num_episodes_missing == 50 - len(result.episodes) == sum(result.missing_by_runner.values())
        assert set(result.missing_by_runner) == ({0} if group.local_env_runner else {1, 2})
        assert result.episodes  # those that were complete by then
        assert how == "sleep" or result.num_unfinished_episodes == 4

    @on("process")
    def test_the_limit_ends_a_round_of_env_steps(self, group: EnvRunnerGroup) -> None:
        give(group, trouble(1, 2, how="endless"))
        start = time.perf_counter()
        result = play_round(group, RoundPlan(time_limit_s=0.5, num_timesteps=10**7))
        assert 0.5 <= time.perf_counter() - start < 0.5 + LATE_S
        assert result.truncated and set(result.missing_by_runner) == {1, 2}
        assert result.num_unfinished_episodes == 4
        assert 0 < 10**7 - sum(result.missing_by_runner.values()) == result.num_env_steps

    @on("process")
    @pytest.mark.parametrize("cuts_episodes", [False, True])
    def test_a_round_without_a_number_waits_for_no_endless_episode(
        self, group: EnvRunnerGroup, cuts_episodes: bool
    ) -> None:
        give(group, trouble(1, how="endless"))
        goes_on = iter([True] * 30 + [False])
        result = play_round(group, RoundPlan(cuts_episodes=cuts_episodes), goes_on=lambda: next(goes_on))
        assert result.is_complete and set(played_by(result)) <= {1, 2} and len(result.episodes) > 4
        assert 2 <= result.num_unfinished_episodes <= (4 if cuts_episodes else 2)

    @pytest.mark.slow_cases("process")
    @on("process")
    def test_a_round_without_a_number_waits_for_no_runner_that_stalls(
        self, group: EnvRunnerGroup, tmp_path: Path
    ) -> None:
        """Its answer counts in a later round if that continues episodes, and else nowhere."""
        for force_reset in (True, False):
            give(group, trouble(1, how="sleep", once=f"{tmp_path}/{force_reset}"))
            start = time.perf_counter()
            plan = RoundPlan(time_limit_s=2.0, force_reset=force_reset)
            result = play_round(group, plan, goes_on=lambda: False)
            assert time.perf_counter() - start < rounds.END_S + LATE_S
            assert set(played_by(result)) == {2} and set(result.missing_by_runner) == set(result.late) == {1}
            give_up_s, results = time.perf_counter() + 2.0 + 2 * LATE_S, [result]
            while 1 not in group.mail.idle_runners() or results[-1].late:
                results.append(play_round(group, plan, goes_on=lambda: False, late=results[-1].late))
                assert time.perf_counter() < give_up_s
                assert force_reset or len(results) < 3 or 1 in results[-1].late or 1 in group.mail.idle_runners()
            assert counted(group)["num_env_steps_sampled"] == sum(result.num_env_steps for result in results)
            settle(group)

    @on("embedded", "local")
    def test_envs_that_always_fail(self, group: EnvRunnerGroup) -> None:
        give(group, trouble(0, 1, 2, how="raise"))
        num_failures = group.num_failures
        result, seconds = play_in_time(group, num_episodes=5)
        assert seconds < 15 and result.skipped and not result.truncated
        assert isinstance(result.error, EnvError) and result.num_episodes_missing == 5
        assert group.num_failures - num_failures == max(1, group.num_remote_workers) * MAX_FAILURES
        settle(group)
        assert play_in_time(group, num_episodes=5)[0].is_complete

    @on("embedded", "local")
    def test_a_round_after_an_interrupt(self, group: EnvRunnerGroup, tmp_path: Path) -> None:
        give(group, trouble(0, 1, how="interrupt", at=LONG + 2, once=f"{tmp_path}/done"))
        with pytest.raises(KeyboardInterrupt):
            play_round(group, RoundPlan(num_episodes=20))
        result, _ = play_in_time(group, num_episodes=5)
        assert len(result.episodes) == 5 and result.num_episodes_taken_over == 0

    @pytest.mark.parametrize("how", ["raise", pytest.param("SIGKILL", marks=pytest.mark.slow)])
    def test_all_runners_dead(self, how: str) -> None:
        settings = {"env_config": {"trouble": trouble(1, 2, how=how)}, "restart_failed_env_runners": False}
        with evaluation_group("local" if how == "raise" else "process", 2, **settings) as group:
            for _ in range(2):
                result, seconds = play_in_time(group, num_episodes=5)
                assert seconds < 15 and result.skipped
                assert isinstance(result.error, EnvError if how == "raise" else WorkerDiedError)
            assert result.missing_by_runner == {}  # nobody was given anything in the second round
            assert group.num_failures == 2

    @pytest.mark.slow
    def test_a_round_waits_for_the_restart_of_its_only_runner(self, tmp_path: Path) -> None:
        env_config = {"trouble": trouble(1, how="SIGKILL", once=f"{tmp_path}/done")}
        with evaluation_group("process", 1, 2, env_config=env_config) as group:
            result, _ = play_in_time(group, num_episodes=5)
            assert played_by(result) == {1: 5} and group.num_remote_worker_restarts == 1

    @on("process")
    def test_slow_is_not_stalled(self, group: EnvRunnerGroup) -> None:
        """A runner that takes long, but less than `PATIENCE_S`, plays its own episodes."""
        give(group, trouble(1, how="slow"))
        result, _ = play_in_time(group, num_episodes=4)
        assert played_by(result) == {1: 2, 2: 2} and result.num_episodes_taken_over == 0

    @on("process")
    def test_with_pieces_a_slow_runner_plays_less(
        self, group: EnvRunnerGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It waits in its first piece for the other one, so that how fast the machine is decides nothing."""
        monkeypatch.setattr(rounds, "PIECE_PATIENCE_S", 1000.0)
        give(group, trouble(1, how="waits", gate=f"{tmp_path}/gate"))
        result, _ = play_in_time(group, num_episodes=40, in_pieces=True)
        assert played_by(result)[2] >= 23 and len(result.episodes) == 40 and result.num_episodes_taken_over == 0

    @pytest.mark.parametrize("num_env_runners", [0, 2])
    def test_errors_of_callbacks_are_no_faults(self, num_env_runners: int) -> None:
        class Failing(Callback):
            def on_episode_end(self, **kwargs: Any) -> None:
                raise ValueError("mine")

        with (
            evaluation_group("local", num_env_runners, callbacks_class=[Failing]) as group,
            pytest.raises(CallbackError, match="mine"),
        ):
            play_round(group, RoundPlan(num_episodes=2))

    @on("process")
    def test_samples_of_a_custom_function_after_a_round_that_was_cut(
        self, group: EnvRunnerGroup, tmp_path: Path
    ) -> None:
        """A late answer to a round is no rollout."""
        give(group, trouble(1, how="sleep", once=f"{tmp_path}/done"))
        play_in_time(group, 0.6, num_episodes=4)
        time.sleep(0.4)
        rollouts = group.sample(SampleRequest(num_episodes=4), Timers())
        assert sum(len(rollout.episodes()) for rollout in rollouts) == 4


def test_records_are_of_what_the_env_gave() -> None:
    """Callbacks may change the columns for training, not what is reported."""

    class Scaling(Callback):
        def on_sample_end(self, *, samples: Any, **kwargs: Any) -> None:
            samples.rewards *= 100.0

    with evaluation_group("local", 0, 2, callbacks_class=[Scaling]) as group:
        result = play_round(group, RoundPlan(num_episodes=6))
        assert [record.episode_return for record in result.episodes] == [float(r.episode_len) for r in result.episodes]
        assert {(record.worker_index, record.env_index) for record in result.episodes} == {(0, 0), (0, 1)}
        assert all(record.duration_s > 0 and record.seed is None for record in result.episodes)
