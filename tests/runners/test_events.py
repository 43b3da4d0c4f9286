"""Events: their order is a contract, and what nobody listens to costs nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

from corral import Callback, PPOConfig
from corral.callbacks import EVENTS
from corral.errors import ConfigError
from corral.runners.runner import EnvRunner
from corral.testing import CountingEnv
from handmade import MakeRunner

Trace = list[tuple[str, int]]
EPISODE_EVENTS = ("created", "start", "step", "end")


def tracers(trace: Trace, events: tuple[str, ...] = EPISODE_EVENTS) -> dict[str, Callable[..., None]]:
    """Return a callable for each episode event that notes the event and the sub-env."""

    def note(event: str, env_index: int) -> None:
        trace.append((event, env_index))

    def noting(event: str) -> Callable[..., None]:
        return lambda env_index: note(event, env_index)

    return {f"on_episode_{event}": noting(event) for event in events}


def events(*lines: str) -> Trace:
    """Read a trace written as `"created 0 1 2"`: an event and the sub-envs that it fired for in turn."""
    return [(line.split()[0], int(i)) for line in lines for i in line.split()[1:]]


class TestGoldenTraces:
    """The literal order of events. If one of these changes, users' code breaks."""

    def test_one_env_next_step(self, make_runner: MakeRunner) -> None:
        trace: Trace = []
        runner = make_runner(env_config={"episode_length": 2}, **tracers(trace))
        runner.sample(num_timesteps=3)
        first = events("created 0", "start 0", "step 0", "step 0", "end 0", "created 0", "start 0", "step 0")
        assert trace == first
        runner.sample(num_timesteps=1)
        assert trace == first + events("step 0", "end 0", "created 0")
        runner.sample(num_timesteps=1)  # the row of the reset fires no step event and counts no step
        assert trace == first + events("step 0", "end 0", "created 0", "start 0", "step 0")

    def test_one_env_same_step(self, make_runner: MakeRunner) -> None:
        trace: Trace = []
        runner = make_runner(autoreset_mode="same_step", env_config={"episode_length": 2}, **tracers(trace))
        runner.sample(num_timesteps=3)
        first = events("created 0", "start 0", "step 0", "step 0", "end 0", "created 0", "start 0", "step 0")
        assert trace == first
        runner.sample(num_timesteps=1)
        assert trace == first + events("step 0", "end 0", "created 0", "start 0")

    def test_three_envs_next_step(self, make_runner: MakeRunner) -> None:
        trace: Trace = []
        runner = make_runner(num_envs=3, env_config={"episode_length": 1, "stagger": True}, **tracers(trace))
        runner.sample(num_timesteps=5)
        first = [
            *events("created 0 1 2", "start 0 1 2"),
            *events("step 0", "end 0", "created 0", "step 1 2"),
            *events("start 0", "step 1", "end 1", "created 1", "step 2"),
        ]
        assert trace == first
        runner.sample(num_timesteps=2)
        assert trace == first + events("step 0", "end 0", "created 0", "start 1", "step 2", "end 2", "created 2")

    def test_three_envs_same_step(self, make_runner: MakeRunner) -> None:
        trace: Trace = []
        config = {"episode_length": 1, "stagger": True}
        runner = make_runner(num_envs=3, autoreset_mode="same_step", env_config=config, **tracers(trace))
        runner.sample(num_timesteps=6)
        assert trace == [
            *events("created 0 1 2", "start 0 1 2"),
            *events("step 0", "end 0", "created 0", "start 0", "step 1 2"),
            *events("step 0", "end 0", "created 0", "start 0"),
            *events("step 1", "end 1", "created 1", "start 1", "step 2"),
        ]

    def test_native_vector_env_with_a_time_limit(self, make_runner: MakeRunner) -> None:
        trace: Trace = []

        def native() -> CartPoleVectorEnv:
            return CartPoleVectorEnv(num_envs=2, max_episode_steps=2)  # too short to fall over

        runner = make_runner(native, num_envs=None, disable_env_checking=True, **tracers(trace))
        runner.sample(num_timesteps=6)
        assert trace == [
            *events("created 0 1", "start 0 1"),
            *events("step 0 1"),
            *events("step 0", "end 0", "created 0", "step 1", "end 1", "created 1"),
            *events("start 0 1"),
            *events("step 0 1"),
        ]

    def test_time_limit_of_a_wrapper(self, make_runner: MakeRunner) -> None:
        trace: Trace = []
        ends: list[tuple[bool, bool]] = []
        runner = make_runner(
            env_config={"episode_length": 9},
            wrappers=[partial(gym.wrappers.TimeLimit, max_episode_steps=2)],
            **tracers(trace, ("created", "start", "step")),
            on_episode_end=lambda episode: ends.append((episode.is_terminated, episode.is_truncated)),
        )
        runner.sample(num_timesteps=3)
        assert trace == events("created 0", "start 0", "step 0 0", "created 0", "start 0", "step 0")
        assert ends == [(False, True)]

    def test_one_env_by_episodes(self, make_runner: MakeRunner) -> None:
        trace: Trace = []
        make_runner(env_config={"episode_length": 2}, **tracers(trace)).sample(num_episodes=2)
        assert trace == [
            *events("created 0", "start 0", "step 0 0", "end 0"),
            *events("created 0", "start 0", "step 0 0", "end 0"),
            *events("created 0"),
        ]

    def test_three_envs_by_episodes_stop_at_the_last_end(self, make_runner: MakeRunner) -> None:
        trace: Trace = []
        make_runner(num_envs=3, env_config={"episode_length": 2}, **tracers(trace)).sample(num_episodes=2)
        assert trace == [
            *events("created 0 1 2", "start 0 1 2", "step 0 1"),  # sub-env 2 has no episode to play
            *events("step 0", "end 0", "created 0", "step 1", "end 1", "created 1"),
        ]

    def test_all_events_of_a_runner(self, make_runner: MakeRunner) -> None:
        trace: list[str] = []
        names = [name for name, event in EVENTS.items() if event.process == "env_runner"]
        runner = make_runner(env_config={"episode_length": 1}, **{name: partial(trace.append, name) for name in names})
        runner.sample(num_timesteps=1)
        assert trace == [
            "on_sub_environment_created",
            "on_environment_created",
            "on_episode_created",
            "on_episode_start",
            "on_episode_step",
            "on_episode_end",
            "on_episode_created",
            "on_postprocess_trajectory",
            "on_sample_end",
        ]

    @pytest.mark.parametrize("subscribed", [("start",), ("end",), ("created", "end"), ("step",)])
    def test_the_order_does_not_depend_on_who_listens(
        self, make_runner: MakeRunner, subscribed: tuple[str, ...]
    ) -> None:
        whole: Trace = []
        part: Trace = []
        config = {"episode_length": 1, "stagger": True}
        for runner in (
            make_runner(num_envs=3, env_config=config, **tracers(whole)),
            make_runner(num_envs=3, env_config=config, **tracers(part, subscribed)),
        ):
            for n in (4, 1, 7):
                runner.sample(num_timesteps=n)
        assert part == [entry for entry in whole if entry[0] in subscribed]


class TestCounts:
    @pytest.mark.parametrize("mode", ["next_step", "same_step"])
    @pytest.mark.parametrize("num_envs", [1, 3])
    def test_by_timesteps(self, make_runner: MakeRunner, num_envs: int, mode: str) -> None:
        trace: Trace = []
        config = {"episode_length": 2, "stagger": True}
        runner = make_runner(num_envs=num_envs, autoreset_mode=mode, env_config=config, **tracers(trace))
        num_steps = 0
        for n in (1, 2, 6, 0, 10, 3):
            rollout = runner.sample(num_timesteps=n)
            num_steps += rollout.num_env_steps
            count = Counter(event for event, _ in trace)
            # With next-step autoreset, what ended in the last row starts in the first row of the next sample.
            if len(rollout):
                waiting = int(rollout.done[-1].sum()) if mode == "next_step" else 0
            assert count["created"] == count["end"] + num_envs
            assert count["start"] == count["created"] - waiting
            assert count["step"] == num_steps

    @pytest.mark.parametrize("num_episodes", [1, 4])
    def test_one_env_by_episodes(self, make_runner: MakeRunner, num_episodes: int) -> None:
        trace: Trace = []
        make_runner(**tracers(trace)).sample(num_episodes=num_episodes)
        count = Counter(event for event, _ in trace)
        assert (count["created"], count["start"], count["end"]) == (num_episodes + 1, num_episodes, num_episodes)

    @pytest.mark.parametrize("vectorization", ["auto", "sync"])
    def test_steps_of_an_episode_are_its_length(self, make_runner: MakeRunner, vectorization: str) -> None:
        steps: Counter[str] = Counter()
        lengths: dict[str, int] = {}
        runner = make_runner(
            "CartPole-v1",
            num_envs=3,
            vectorization=vectorization,
            on_episode_step=lambda episode: steps.update([episode.id_]),
            on_episode_end=lambda episode: lengths.update({episode.id_: episode.t}),
        )
        for n in (100, 7, 200):
            runner.sample(num_timesteps=n)
        assert len(lengths) > 5
        assert {id_: steps[id_] for id_ in lengths} == lengths
        result = runner.metrics.reduce()
        assert result["num_episodes"] == len(lengths)
        assert result["episode_len_mean"] == pytest.approx(np.mean(list(lengths.values())))


class TestEpisode:
    @pytest.mark.parametrize("mode", ["next_step", "same_step"])
    def test_is_done_at_its_last_step_event(self, make_runner: MakeRunner, mode: str) -> None:
        seen: list[tuple[int, bool]] = []
        make_runner(
            autoreset_mode=mode, on_episode_step=lambda episode: seen.append((episode.t, episode.is_done))
        ).sample(num_timesteps=6)
        assert seen == [(1, False), (2, False), (3, True)] * 2

    @pytest.mark.parametrize("mode", ["next_step", "same_step"])
    def test_spans_samples(self, make_runner: MakeRunner, mode: str) -> None:
        steps: list[tuple[int, float]] = []
        ended: list[Any] = []
        runner = make_runner(
            autoreset_mode=mode,
            env_config={"episode_length": 5},
            on_episode_step=lambda episode: steps.append((episode.t, episode.get_return())),
            on_episode_end=lambda episode: ended.append(episode),
        )
        for n in (2, 2, 3, 3):
            runner.sample(num_timesteps=n)
        assert steps == [(1, 1), (2, 3), (3, 6), (4, 10), (5, 15)] * 2
        first, second = ended
        assert (first.t_started, len(first), first.t, first.get_return()) == (0, 5, 5, 15)
        assert first.get_rewards().tolist() == [1, 2, 3, 4, 5]
        assert first.get_observations().tolist() == [[0, t] for t in range(6)]
        assert second.get_observations(-1).tolist() == [1, 5]
        assert first.id_ != second.id_

    def test_chunks_keep_their_data(self, make_runner: MakeRunner) -> None:
        chunks: list[Any] = []
        runner = make_runner(env_config={"episode_length": 5}, on_episode_step=lambda episode: chunks.append(episode))
        runner.sample(num_timesteps=2)
        runner.sample(num_timesteps=2)
        early, late = chunks[0], chunks[-1]
        assert early.id_ == late.id_
        assert (early.t_started, len(early), early.get_rewards().tolist()) == (0, 2, [1, 2])
        assert (late.t_started, len(late), late.get_rewards().tolist()) == (2, 2, [3, 4])
        assert early.get_observations().tolist() == [[0, 0], [0, 1], [0, 2]]

    def test_custom_data_is_carried_over(self, make_runner: MakeRunner) -> None:
        totals: list[tuple[str, int]] = []

        def created(episode: Any) -> None:
            episode.custom_data["note"] = episode.id_
            episode.custom_data["steps"] = 0

        def step(episode: Any) -> None:
            episode.custom_data["steps"] += 1

        def end(episode: Any) -> None:
            assert episode.custom_data["note"] == episode.id_
            totals.append((episode.id_, episode.custom_data["steps"]))

        runner = make_runner(
            num_envs=2,
            env_config={"episode_length": 3, "stagger": True},
            on_episode_created=created,
            on_episode_step=step,
            on_episode_end=end,
        )
        for _ in range(7):
            runner.sample(num_timesteps=3)
        assert len(totals) == len({id_ for id_, _ in totals}) > 4
        assert {steps for _, steps in totals} == {3, 4}

    def test_before_its_reset_it_holds_no_observation(self, make_runner: MakeRunner) -> None:
        states: list[tuple[bool, int]] = []

        def created(episode: Any) -> None:
            states.append((episode.is_reset, len(episode)))
            with pytest.raises(IndexError, match="has not been reset"):
                episode.get_observations()

        first_obs: list[list[float]] = []
        make_runner(
            on_episode_created=created,
            on_episode_start=lambda episode: first_obs.append(episode.get_observations(0).tolist()),
        ).sample(num_timesteps=4)
        assert states == [(False, 0)] * 2
        assert first_obs == [[0, 0], [1, 0]]

    @pytest.mark.parametrize("mode", ["next_step", "same_step"])
    def test_last_observation_is_the_final_one(self, make_runner: MakeRunner, mode: str) -> None:
        last: list[list[float]] = []
        make_runner(
            autoreset_mode=mode,
            on_episode_end=lambda episode: last.append(episode.get_observations(-1).tolist()),
        ).sample(num_timesteps=7)
        assert last == [[0, 3], [1, 3]]


class ForbiddenEpisode:
    """Stands in for the episode class where no episode may be made."""

    @classmethod
    def view(cls, *args: Any) -> None:
        raise AssertionError("an episode was made though nobody listens")


class TestNoSubscriber:
    def test_makes_no_episodes(self, make_runner: MakeRunner) -> None:
        class Unrelated(Callback):
            def on_sample_end(self, **kwargs: Any) -> None:
                pass

        runner = make_runner(callbacks_class=Unrelated, on_environment_created=lambda: None)
        listening = make_runner(on_episode_end=lambda: None)
        runner.episode_class = listening.episode_class = ForbiddenEpisode
        assert runner.sample(num_timesteps=10).num_env_steps == 10
        assert runner.sample(num_episodes=2).num_env_steps == 6
        with pytest.raises(AssertionError, match="nobody listens"):  # the stand-in is in place
            listening.sample(num_timesteps=1)


class TestArguments:
    def test_all_events_give_the_arguments_of_the_list(self, make_runner: MakeRunner) -> None:
        given: dict[str, set[str]] = {}

        def noting(event: str) -> Callable[..., None]:
            return lambda **kwargs: given.__setitem__(event, set(kwargs))

        names = {name: event for name, event in EVENTS.items() if event.process == "env_runner"}
        make_runner(**{name: noting(name) for name in names}).sample(num_timesteps=4)
        assert given == {name: set(event.arguments) for name, event in names.items()}

    def test_a_callable_gets_what_it_names(self, make_runner: MakeRunner) -> None:
        got: list[Any] = []
        runner = make_runner(
            env_config={"episode_length": 2},
            on_environment_created=lambda env_context, env: got.append((env_context["episode_length"], env.num_envs)),
            on_episode_end=lambda metrics_logger, rl_module, env_index: got.append(
                (metrics_logger, rl_module, env_index)
            ),
            on_sample_end=lambda samples, other=3: got.append((samples, other)),
        )
        rollout = runner.sample(num_timesteps=2)
        created, end, sample_end = got
        assert created == (2, 1)
        assert end == (runner.metrics, runner.module, 0)
        assert sample_end[0] is rollout
        assert sample_end[1] == 3

    def test_the_step_counter_is_logged_before_on_sample_end(self, make_runner: MakeRunner) -> None:
        counts: list[float] = []
        runner = make_runner(
            on_sample_end=lambda metrics_logger: counts.append(metrics_logger.peek("num_env_steps_sampled_lifetime"))
        )
        runner.sample(num_timesteps=3)
        runner.sample(num_timesteps=2)
        assert counts == [3, 5]


class TestRefused:
    def test_an_argument_that_the_event_does_not_have(self) -> None:
        with pytest.raises(ConfigError, match="Did you mean 'episode'") as caught:
            PPOConfig().callbacks(on_episode_end=lambda episodes: None)
        for name in ("on_episode_end", "episodes", *EVENTS["on_episode_end"].arguments):
            assert name in str(caught.value)

    def test_an_argument_that_a_class_misspells(self) -> None:
        class Misspelt(Callback):
            def on_episode_end(self, *, episodes: Any, **kwargs: Any) -> None:  # type: ignore[override]
                pass

        for entry in (Misspelt, Misspelt()):
            with pytest.raises(ConfigError, match=r"on_episode_end.*'episodes'.*Did you mean 'episode'"):
                PPOConfig().callbacks(entry)

    def test_an_unknown_event_names_the_nearest(self) -> None:
        with pytest.raises(ConfigError, match=r"unknown event 'on_episode_ends'\. Did you mean 'on_episode_end'\?"):
            PPOConfig().callbacks(on_episode_ends=lambda: None)

    @pytest.mark.parametrize("given", [5, int, [Callback, 5], object()])
    def test_a_class_that_is_none(self, given: Any) -> None:
        with pytest.raises(ValueError, match="Callback subclass or instance"):
            PPOConfig().callbacks(given)

    def test_a_string_that_is_no_import_path(self) -> None:
        with pytest.raises(ConfigError, match=r"callbacks_class=.*'callback' is not an import path"):
            PPOConfig().callbacks("callback")
        with pytest.raises(ConfigError, match=r"callback_functions=.*'x' is not an import path"):
            PPOConfig().callbacks(on_train_result=[print, "x"])

    @pytest.mark.parametrize("given", [5, [print, 5]])
    def test_a_function_that_is_none(self, given: Any) -> None:
        with pytest.raises(ValueError, match="on_train_result must be callable"):
            PPOConfig().callbacks(on_train_result=given)

    def test_a_refused_call_changes_nothing(self) -> None:
        config = PPOConfig().callbacks(on_episode_end=print)
        with pytest.raises(ConfigError):
            config.callbacks(Callback, on_episode_end=lambda nonsense: None)
        assert config.callbacks_class == []
        assert config.callback_functions == {"on_episode_end": [print]}


class Naming(Callback):
    """Notes its name; forgets `super().__init__()`."""

    log: list[str]

    def __init__(self, name: str = "class") -> None:
        self.name = name

    def on_sample_end(self, *, env_runner: EnvRunner, **kwargs: Any) -> None:
        self.log.append(self.name)


class TestOrder:
    def test_add_callbacks_adds_and_none_removes_all(self, make_runner: MakeRunner) -> None:
        Naming.log = log = []
        config = PPOConfig().environment(CountingEnv).callbacks(on_sample_end=lambda: log.append("early"))
        config.callbacks(Naming).add_callbacks(on_sample_end=lambda: log.append("late"))
        EnvRunner(config).sample(num_timesteps=1)
        assert log == ["class", "early", "late"]
        log.clear()
        EnvRunner(config.copy().callbacks(None)).sample(num_timesteps=1)
        assert log == []
        EnvRunner(config.copy().callbacks(None, on_sample_end=lambda: log.append("new"))).sample(num_timesteps=1)
        assert log == ["new"]

    def test_every_runner_has_its_own_instance_of_a_class(self, make_runner: MakeRunner) -> None:
        class Counting(Callback):
            def __init__(self) -> None:
                self.steps = 0

            def on_episode_step(self, *, env_runner: EnvRunner, **kwargs: Any) -> None:
                self.steps += 1
                env_runner.metrics.log_value("mine", self.steps, reduce="max")

        one, other = make_runner(callbacks_class=Counting), make_runner(callbacks_class=Counting)
        one.sample(num_timesteps=5)
        other.sample(num_timesteps=2)
        assert (one.metrics.peek("mine"), other.metrics.peek("mine")) == (5, 2)
