"""An exception in a callback: named, chained and fatal, or logged once and counted."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from corral import Callback, PPOConfig, make_multi_callbacks
from corral.errors import CallbackError, ConfigError
from corral.testing import CountingEnv
from small import small


def config(**events: Any) -> PPOConfig:
    return small(disable_env_checking=True, train_batch_size_per_learner=16, minibatch_size=8).callbacks(**events)


def divide(*_: Any) -> None:
    raise ZeroDivisionError("one over nothing.")


class Faulty(Callback):
    """Raises at the third step of each episode."""

    def on_episode_step(self, *, episode: Any, **kwargs: Any) -> None:
        if episode.t == 3:
            divide()


EPISODE_EVENTS = ("on_episode_created", "on_episode_start", "on_episode_step", "on_episode_end")
ALGORITHM_EVENTS = ("on_create_policy", "on_algorithm_init")
RUNNER_EVENTS = ("on_sub_environment_created", "on_environment_created", *EPISODE_EVENTS)
TRAIN_EVENTS = ("on_postprocess_trajectory", "on_sample_end", "on_learn_on_batch", "on_gradients", "on_update_end")


@pytest.mark.parametrize("event", [*ALGORITHM_EVENTS, *RUNNER_EVENTS, *TRAIN_EVENTS, "on_train_result"])
def test_event_and_callback_are_named_and_the_original_is_chained(event: str) -> None:
    with pytest.raises(CallbackError) as caught, config(**{event: lambda: divide()}).build() as algo:
        algo.train()
    message = str(caught.value)
    assert message.startswith(f"{event}: callback test_event_and_callback_are_named")
    assert "test_errors.py:" in message
    assert "raised ZeroDivisionError: one over nothing." in message
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert ("Episode " in message) == (event in (*EPISODE_EVENTS, "on_postprocess_trajectory"))


def test_a_class_is_named_by_its_method_and_the_episode_by_id_sub_env_and_step() -> None:
    ids: list[str] = []
    faulty = config(callbacks_class=Faulty, on_episode_start=lambda episode: ids.append(episode.id_))
    with faulty.build() as algo, pytest.raises(CallbackError) as caught:
        algo.train()
    assert "callback Faulty.on_episode_step raised" in str(caught.value)
    assert str(caught.value).endswith(f"Episode {ids[0]}, sub-env 0, step 3.")


@pytest.mark.parametrize("event", ["on_episode_step", "on_sample_end", "on_train_result", "on_gradients"])
def test_a_run_stops_cleanly_and_keeps_what_it_wrote(event: str, tmp_path: Path) -> None:
    calls: list[int] = []

    def late(**_: Any) -> None:
        calls.append(1)
        if len(calls) > limit:
            divide()

    limit = {"on_episode_step": 40, "on_sample_end": 2, "on_train_result": 2, "on_gradients": 5}[event]
    stopped: list[str] = []
    faulty = config(**{event: late}, on_algorithm_stop=lambda: stopped.append("stopped"))
    with faulty.build() as algo, pytest.raises(CallbackError):
        algo.fit(stop={"training_iteration": 100}, run_dir=tmp_path)
    # The third iteration is counted before `on_train_result`, so its result is kept too.
    num_results = 3 if event == "on_train_result" else 2
    assert len((tmp_path / "result.jsonl").read_text().splitlines()) == num_results
    log = (tmp_path / "run.log").read_text()
    assert "Run failed." in log and f"{event}: callback" in log and "ZeroDivisionError" in log
    assert stopped == ["stopped"]


def test_with_log_the_run_continues_and_each_callback_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    after: list[int] = []
    with config(
        on_error="log",
        callbacks_class=Faulty,
        on_episode_end=[lambda: divide(), lambda env_index: after.append(env_index)],
        on_train_result=lambda: divide(),
        on_update_end=lambda: divide(),
    ).build() as algo:
        caplog.set_level(logging.ERROR, "corral")
        first, second = algo.train(), algo.train()
    assert len(after) > 4  # the callable after the faulty one is called all the same
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "on_episode_step",
        "on_episode_end",
        "on_update_end",
        "on_train_result",
    ]
    assert "Faulty.on_episode_step raised ZeroDivisionError" in caplog.records[0].message
    assert caplog.records[0].exc_info is not None
    counts = [result["fault_tolerance"]["num_callback_errors"] for result in (first, second)]
    ended = [result["env_runners"]["num_episodes_lifetime"] for result in (first, second)]
    # Of each episode the third step and the end; of each iteration the update's end and the result.
    assert counts == [2 * ended[0] + 2, 2 * ended[1] + 4]


def test_errors_in_callbacks_of_evaluation_runners_count_from_their_first_round_on() -> None:
    def fail(env_runner: Any) -> None:
        assert not env_runner.config.in_evaluation

    with config(on_error="log", on_episode_end=fail).build() as algo:
        counts = [algo.train()["fault_tolerance"]["num_callback_errors"]]
        num_episodes = algo.evaluate()["env_runners"]["num_episodes"]
        counts.append(algo.train()["fault_tolerance"]["num_callback_errors"])
    assert counts == [0, num_episodes]


def test_without_errors_the_count_is_in_the_result_from_the_start() -> None:
    with config().build() as algo:
        assert algo.train()["fault_tolerance"]["num_callback_errors"] == 0


def test_an_interrupt_goes_straight_through() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    for on_error in ("raise", "log"):
        with config(on_error=on_error, on_episode_step=interrupt).build() as algo, pytest.raises(KeyboardInterrupt):
            algo.train()


def test_an_error_in_on_exception_does_not_hide_the_first(caplog: pytest.LogCaptureFixture) -> None:
    def oops() -> None:
        raise KeyError("second")

    with (
        config(on_sample_end=lambda: divide(), on_exception=oops).build() as algo,
        pytest.raises(CallbackError) as caught,
    ):
        algo.train()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "A callback raised at on_exception" in caplog.text


def test_an_error_in_on_algorithm_stop_still_closes_the_envs() -> None:
    class Closing(CountingEnv):
        closed = 0

        def close(self) -> None:
            Closing.closed += 1

    algo = config(on_algorithm_stop=lambda: divide()).environment(Closing).build()
    with pytest.raises(CallbackError, match="on_algorithm_stop"):
        algo.stop()
    assert Closing.closed == 2
    algo.stop()  # a second call does nothing


def test_on_error_takes_two_words() -> None:
    assert PPOConfig().on_error == "raise"
    with pytest.raises(ConfigError, match="on_error='ignore'"):
        PPOConfig().callbacks(on_error="ignore")  # type: ignore[arg-type]


def test_a_callable_that_hides_its_arguments_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"on_train_result.*Wrap it in a lambda"):
        PPOConfig().callbacks(on_train_result=min)
    PPOConfig().callbacks(on_train_result=partial(print, "an iteration"))


def test_with_log_the_episode_is_named_whatever_the_callable_takes(caplog: pytest.LogCaptureFixture) -> None:
    ids: list[str] = []
    faulty = config(
        on_error="log",
        on_episode_created=lambda episode: ids.append(episode.id_),
        on_episode_end=lambda env_index: divide(),
    )
    with faulty.build() as algo:
        algo.train()
    assert f"Episode {ids[0]}, sub-env 0, step 3." in caplog.records[0].message


def test_an_error_without_a_message_is_named_by_its_type() -> None:
    def check() -> None:
        raise AssertionError

    with config(on_sample_end=check).build() as algo, pytest.raises(CallbackError, match=r"raised AssertionError\.$"):
        algo.train()


def test_ids_are_not_used_again_after_an_error() -> None:
    created: list[str] = []
    steps: list[int] = []

    def fail_once() -> None:
        steps.append(1)
        if len(steps) == 20:
            divide()

    with config(
        on_episode_created=lambda episode: created.append(episode.id_), on_episode_step=fail_once
    ).build() as algo:
        with pytest.raises(CallbackError):
            algo.train()
            algo.train()
        for _ in range(3):
            algo.train()
    assert len(created) == len(set(created)) > 20


def test_what_cannot_work_is_refused_when_it_is_given() -> None:
    async def later(result: Any) -> None: ...

    class NeedsAName(Callback):
        def __init__(self, name: str) -> None: ...

    with pytest.raises(ConfigError, match=r"on_train_result.*later.*coroutine"):
        PPOConfig().callbacks(on_train_result=later)
    with pytest.raises(ConfigError, match=r"NeedsAName.*name.*instance"):
        PPOConfig().callbacks(NeedsAName)
    PPOConfig().callbacks(NeedsAName("given"))


class Misspelt(Callback):
    def on_episode_ends(self, **kwargs: Any) -> None: ...


class OfRLlib(Callback):
    @staticmethod
    def on_workers_recreated(**kwargs: Any) -> None: ...


class OfBaselines(Callback):
    def _on_step(self) -> bool:
        return True


class NoCallback:
    def on_sample_end(self, **kwargs: Any) -> None: ...

    @classmethod
    def on_sample_start(cls) -> None: ...


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Misspelt, r"Misspelt\.on_episode_ends would never be called.* Did you mean 'on_episode_end'\?"),
        (OfRLlib, r"OfRLlib\.on_workers_recreated would .* In Corral: on_env_runners_recreated \(worker_ids are"),
        (
            OfBaselines,
            r"OfBaselines\._on_step would .* In Corral: on_episode_step \(it fires for each step of each sub-env",
        ),
        (NoCallback, r"NoCallback\.on_sample_start would never be called"),
    ],
)
def test_a_method_that_is_named_like_an_event_and_is_none_is_refused(cls: type, message: str) -> None:
    class Child(cls): ...  # type: ignore[misc, valid-type]

    with pytest.raises(ConfigError, match=message):
        PPOConfig().callbacks(cls)
    for entry in (Child, Child(), make_multi_callbacks([Child])):
        with pytest.raises(ConfigError, match=message.partition(".")[2]):
            PPOConfig().callbacks(entry)


def test_a_method_made_in_the_constructor_is_refused_when_the_instance_is_made() -> None:
    class Late(Callback):
        def __init__(self) -> None:
            self.on_episode_ends = print

    with pytest.raises(ConfigError, match=r"Late\.on_episode_ends would never be called"):
        PPOConfig().environment(CountingEnv).callbacks(Late).build()


def test_helpers_and_values_of_a_class_may_have_any_other_name() -> None:
    class Helping(Callback):
        on_gpu = False

        @property
        def on_time(self) -> bool:
            raise AssertionError("reading it is the user's business")

        def note_end(self) -> None: ...

    PPOConfig().callbacks(Helping).add_callbacks(Helping())


def test_an_iteration_whose_result_a_callback_refused_is_over() -> None:
    """The next result has the numbers of the next iteration, as the count of iterations says."""
    failures = iter([True])

    def fail_once() -> None:
        if next(failures, False):
            divide()

    with config(on_train_result=fail_once).build() as algo, config().build() as other:
        with pytest.raises(CallbackError):
            algo.train()
        other.train()
        result, wanted = algo.train(), other.train()
    assert result["training_iteration"] == wanted["training_iteration"] == 2
    for name in ("num_env_steps_sampled", "num_env_steps_sampled_lifetime", "num_episodes", "episode_return_mean"):
        assert result["env_runners"][name] == wanted["env_runners"][name]
    assert result["learners"] == wanted["learners"]
    assert result["time_total_s"] > result["timers"]["iteration_s"]
