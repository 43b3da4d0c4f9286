"""The order of all events over the life of an algorithm, and how callbacks of several kinds take turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from corral import Callback, PPOConfig, make_multi_callbacks
from corral.callbacks import EVENTS
from corral.callbacks.dispatch import Dispatcher
from corral.errors import CallbackError, ConfigError, CorralError, EnvError
from corral.runners.runner import EnvRunner
from corral.runs.loggers import CSVLogger, JSONLinesLogger, Logger, TensorBoardLogger
from corral.testing import CountingEnv, FaultyEnv


class FailsOnce(CountingEnv):
    """The first step in runner 1 raises; the env that replaces it works."""

    has_failed: ClassVar[bool] = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._is_faulty = config.worker_index == 1

    def step(self, action: int) -> Any:
        if self._is_faulty and not FailsOnce.has_failed:
            FailsOnce.has_failed = True
            raise ZeroDivisionError
        return super().step(action)


def config(num_envs: int = 1, batch_size: int = 2, **settings: Any) -> PPOConfig:
    config = PPOConfig().environment(CountingEnv, env_config={"episode_length": 2}, disable_env_checking=True)
    config.env_runners(num_envs_per_env_runner=num_envs)
    config.training(train_batch_size_per_learner=batch_size, minibatch_size=1, num_epochs=1)
    return config.debugging(seed=0).copy(**settings)


def noting(trace: list[str]) -> dict[str, Callable[[], None]]:
    return {name: (lambda name=name: trace.append(name.removeprefix("on_"))) for name in EVENTS}


EPISODE = ["episode_created", "episode_start", "episode_step", "episode_step", "episode_end", "episode_created"]
UPDATE = ["learn_on_batch", "gradients", "gradients", "update_end"]


def test_golden_trace_of_an_algorithm(tmp_path: Path) -> None:
    trace: list[str] = []

    class Noting(Logger):
        def open(self, run_dir: Path, config: Any) -> None:
            trace.append("-- open")

        def log_result(self, result: dict[str, Any]) -> None:
            trace.append("-- result")

    with config(evaluation_interval=2, evaluation_duration=1).callbacks(**noting(trace)).build() as algo:
        trace.append("-- built")
        algo.fit(stop={"training_iteration": 2}, run_dir=tmp_path, loggers=[Noting()])
        algo.restore_from_path(algo.save(tmp_path / "checkpoint"))
    assert trace == [
        *["sub_environment_created", "environment_created", "create_policy"],
        *["sub_environment_created", "environment_created", "algorithm_init", "-- built", "-- open"],
        *[*EPISODE, "postprocess_trajectory", "sample_end", *UPDATE, "train_result", "-- result"],
        # Next-step autoreset: the created episode starts in the next sample.
        *[*EPISODE[1:], "postprocess_trajectory", "sample_end", *UPDATE],
        *["evaluate_start", *EPISODE, "postprocess_trajectory", "sample_end", "evaluate_end"],
        *["train_result", "-- result"],
        "checkpoint_loaded",
        "algorithm_stop",
    ]
    # The two that are left out have traces of their own below.
    assert {f"on_{name}" for name in trace} >= set(EVENTS) - {"on_exception", "on_env_runners_recreated"}


def test_golden_trace_of_a_failure() -> None:
    trace: list[str] = []

    def fail(env_index: int) -> None:
        trace.append("-- fails")
        raise ValueError

    with (
        pytest.raises(CallbackError),
        config().callbacks(on_episode_start=fail).add_callbacks(**noting(trace)).build() as algo,
    ):
        algo.train()
    tail = trace[trace.index("algorithm_init") + 1 :]
    assert tail == ["episode_created", "-- fails", "exception", "algorithm_stop"]


def restarting() -> PPOConfig:
    """Return a config whose first of two runners fails once, and is recreated at once."""
    FailsOnce.has_failed = False
    made = config(num_env_runners=2, batch_size=4, engine_name="local", straggler_factor=None)
    return made.environment(FailsOnce).fault_tolerance(delay_between_env_runner_restarts_s=0.0)


def test_golden_trace_of_a_runner_that_is_recreated() -> None:
    trace: list[str] = []
    with restarting().callbacks(**noting(trace)).build() as algo:
        trace.append("-- built")
        algo.train()
    assert (
        trace[trace.index("-- built") + 1 :]
        == [
            *["episode_created", "episode_start"],  # of runner 1, whose step raises
            *["episode_created", *EPISODE[1:], "postprocess_trajectory", "sample_end"],
            *["sub_environment_created", "environment_created", "env_runners_recreated"],
            # Each runner gives one of the two steps that are missing.
            *["episode_created", "episode_start", "episode_step", "postprocess_trajectory", "sample_end"],
            *["episode_start", "episode_step", "postprocess_trajectory", "sample_end"],
            *["learn_on_batch", *["gradients"] * 4, "update_end", "train_result", "algorithm_stop"],
        ]
    )


def test_golden_trace_of_an_evaluation_runner() -> None:
    trace: list[str] = []
    evaluating = config(num_envs=2).callbacks(**noting(trace)).copy(in_evaluation=True, explore=False)
    runner = EnvRunner(evaluating.freeze())
    runner.sample(num_episodes=2)
    runner.stop()
    assert trace == [
        *["sub_environment_created", "sub_environment_created", "environment_created"],
        *["episode_created", "episode_created", "episode_start", "episode_start"],
        *["episode_step", "episode_step"],
        *["episode_step", "episode_end", "episode_created", "episode_step", "episode_end", "episode_created"],
        *["postprocess_trajectory", "postprocess_trajectory", "sample_end"],
    ]


def test_on_exception_sees_what_training_raises_once(tmp_path: Path) -> None:
    seen: list[BaseException] = []

    class Full(Logger):
        def open(self, run_dir: Path, config: Any) -> None: ...

        def log_result(self, result: dict[str, Any]) -> None:
            raise OSError("no space left")

    built = config().callbacks(on_exception=lambda algorithm, exception: seen.append(exception))
    with built.build() as algo:
        with pytest.raises(OSError, match="no space"):
            algo.fit(stop={"training_iteration": 2}, run_dir=tmp_path / "a", loggers=[Full()])
        with pytest.raises(OSError, match="no space"):
            algo.fit(stop={"training_iteration": 2}, run_dir=tmp_path / "b", loggers=[Full()])
        assert [str(error) for error in seen] == ["no space left"] * 2 and seen[0] is not seen[1]
        algo.training_step = lambda: {}["nothing"]  # type: ignore[method-assign]
        with pytest.raises(KeyError):
            algo.fit(stop={"training_iteration": 9}, run_dir=tmp_path / "c", loggers=[])  # which calls `train`
        assert len(seen) == 3


def test_a_building_that_fails_fires_no_stop() -> None:
    trace: list[str] = []

    def fail(policy: Any) -> None:
        raise ValueError("not this one")

    with pytest.raises(CallbackError, match="not this one"):
        config().callbacks(on_create_policy=fail).add_callbacks(**noting(trace)).build()
    assert "algorithm_stop" not in trace and "algorithm_init" not in trace


def test_every_event_is_given_the_arguments_of_the_list(tmp_path: Path) -> None:
    given: dict[str, set[str]] = {}

    def all_of(name: str) -> Callable[..., None]:
        return lambda **arguments: given.__setitem__(name, set(arguments))

    faulty = config().environment(FaultyEnv, env_config={"episode_length": 2, "at_step": 4, "vector_index": 0})
    listeners = {name: all_of(name) for name in EVENTS}
    with faulty.evaluation(evaluation_interval=1, evaluation_duration=1).callbacks(**listeners).build() as algo:
        algo.train()
        algo.restore_from_path(algo.save(tmp_path / "checkpoint"))
        with pytest.raises(EnvError):
            algo.train()
    with restarting().callbacks(**listeners).build() as algo:
        algo.train()
    assert given == {name: set(event.arguments) for name, event in EVENTS.items()}


def test_a_stopped_algorithm_does_not_train() -> None:
    algo = config().build()
    algo.stop()
    with pytest.raises(CorralError, match=r"was stopped.*build\(\)"):
        algo.train()


def test_weights_set_in_on_create_policy_are_those_that_train_and_act() -> None:
    def zero(policy: Any, policy_id: str) -> None:
        assert policy_id == "default_policy"
        for parameter in policy.parameters():
            parameter.data.zero_()

    with config().callbacks(on_create_policy=zero).build() as algo:
        assert all((value == 0).all() for value in algo.learner_group.get_weights()["default_policy"].values())
        assert algo.env_runner is not None
        rollout = algo.env_runner.sample(num_timesteps=4)
    assert (rollout.dist_inputs == 0).all()


class TestSubEnvironments:
    def test_each_is_shown_in_its_wrappers_with_its_index(self) -> None:
        seen: list[Any] = []

        def note(sub_environment: Any, env_context: Any, env_index: int, env_runner: Any) -> None:
            seen.append((sub_environment, env_context.vector_index, env_index, env_runner.worker_index))

        with (
            config(num_envs=3, num_env_runners=2, batch_size=6, engine_name="local")
            .callbacks(on_sub_environment_created=note)
            .build()
        ):
            assert [entry[1:] for entry in seen] == [(i, i, worker) for worker in (1, 2) for i in range(3)]
            assert all(isinstance(entry[0], CountingEnv) for entry in seen)

    def test_auto_steps_sub_envs_one_by_one_if_a_callback_names_sub_environment(self) -> None:
        kinds: list[str] = []

        def note(env: Any) -> None:
            kinds.append(type(env.unwrapped).__name__)

        cartpole = PPOConfig().environment("CartPole-v1").env_runners(num_envs_per_env_runner=2)
        for listening in ({}, {"on_sub_environment_created": lambda: None}):
            EnvRunner(cartpole.copy().callbacks(on_environment_created=note, **listening)).stop()
        assert kinds == ["CartPoleVectorEnv", "SyncVectorEnv"]

    def test_async_is_refused_with_the_remedy(self) -> None:
        class Listens(Callback):
            def on_sub_environment_created(self, **kwargs: Any) -> None: ...

        for callbacks in ({"callbacks_class": Listens}, {"on_sub_environment_created": lambda: None}):
            bad = config(vectorization="async").callbacks(**callbacks)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match=r"vectorization='async'.*on_sub_environment_created.*wrappers"):
                bad.validate()

    def test_a_vector_env_without_them_says_so(self, caplog: pytest.LogCaptureFixture) -> None:
        from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

        native = PPOConfig().environment(lambda: CartPoleVectorEnv(num_envs=2), disable_env_checking=True)
        EnvRunner(native.callbacks(on_sub_environment_created=lambda: None)).stop()
        assert "on_sub_environment_created does not fire" in caplog.text


class Naming(Callback):
    """Notes its name, and forgets `super().__init__()`."""

    log: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.calls = 0

    def on_sample_end(self, **kwargs: Any) -> None:
        self.calls += 1
        Naming.log.append(f"{type(self).__name__} {self.calls}")


class Second(Naming):
    pass


class Subset:
    """No subclass of `Callback`, and takes only what it needs."""

    def on_sample_end(self, samples: Any) -> None:
        Naming.log.append(f"Subset {len(samples)}")


class TestSeveral:
    def sample(self, *entries: Any, **functions: Any) -> list[str]:
        Naming.log = []
        runner = EnvRunner(config().callbacks(list(entries), **functions))
        for _ in range(2):
            runner.sample(num_timesteps=1)
        runner.stop()
        return Naming.log

    def test_classes_in_list_order_run_first_and_then_callables_in_list_order(self) -> None:
        functions = [lambda: Naming.log.append("first"), lambda: Naming.log.append("second")]
        once = ["Second 1", "Naming 1", "Subset 1", "first", "second"]
        assert self.sample(Second, Naming(), Subset, on_sample_end=functions)[:5] == once
        assert self.sample(Subset, Naming, on_sample_end=functions[::-1])[:4] == [
            "Subset 1",
            "Naming 1",
            "second",
            "first",
        ]

    def test_make_multi_callbacks_is_the_list(self) -> None:
        alike = self.sample(Naming, Subset, Second)
        assert alike == ["Naming 1", "Subset 1", "Second 1", "Naming 2", "Subset 1", "Second 2"]
        multi = make_multi_callbacks([Naming, Subset, Second])
        assert issubclass(multi, Callback)
        assert self.sample(multi) == self.sample(multi()) == alike
        assert self.sample(Second, multi)[:4] == ["Second 1", "Naming 1", "Subset 1", "Second 1"]
        assert self.sample(make_multi_callbacks([make_multi_callbacks([Naming]), Second]))[:2] == [
            "Naming 1",
            "Second 1",
        ]

    def test_a_subclass_of_several_adds_its_own(self) -> None:
        class Both(make_multi_callbacks([Naming, Second])):  # type: ignore[misc]
            def on_sample_end(self, **kwargs: Any) -> None:
                Naming.log.append("Both")

        assert self.sample(Both)[:3] == ["Naming 1", "Second 1", "Both"]

    def test_a_file_names_the_classes_of_several(self) -> None:
        assert PPOConfig().callbacks(make_multi_callbacks([Naming, Second])).callbacks_class == [Naming, Second]

    def test_a_method_made_in_the_constructor_counts(self) -> None:
        class Late(Callback):
            def __init__(self) -> None:
                self.on_sample_end = lambda **kwargs: Naming.log.append("late")  # type: ignore[method-assign]

        assert self.sample(Late) == ["late", "late"]

    def test_make_multi_callbacks_refuses_what_the_list_does(self) -> None:
        with pytest.raises(ConfigError, match="Callback subclass or instance"):
            PPOConfig().callbacks(make_multi_callbacks([Naming, int]))

    def test_instances_keep_their_state_and_classes_are_instantiated_again(self) -> None:
        instance = Naming()
        self.sample(instance)
        assert self.sample(instance, Naming) == ["Naming 3", "Naming 1", "Naming 4", "Naming 2"]

    def test_a_state_goes_to_the_class_that_it_is_of(self) -> None:
        class Holds(Callback):
            def __init__(self) -> None:
                self.held = 0

            def get_state(self) -> dict[str, int]:
                return {"held": self.held}

            def set_state(self, state: dict[str, int]) -> None:
                self.held = state["held"]

        class Other(Holds): ...

        saved, same, other = [Holds(), Holds()], [Holds(), Holds()], [Other(), Holds()]
        more = [Other(), Holds(), Naming(), Holds()]
        for number, callback in enumerate(saved, 1):
            callback.held = number
        state = Dispatcher(saved, {}).get_state()
        for instances in (same, other, more):
            Dispatcher(instances, {}).set_state(state)
        assert [callback.held for callback in same] == [1, 2]
        assert [callback.held for callback in other] == [0, 2]
        assert [callback.held for callback in more if isinstance(callback, Holds)] == [0, 1, 2]

    def test_algorithm_runner_and_learner_have_instances_of_their_own(self) -> None:
        made: list[Everywhere] = []

        class Everywhere(Callback):
            def __init__(self) -> None:
                made.append(self)
                self.seen: set[str] = set()

            def on_sample_end(self, **kwargs: Any) -> None:
                self.seen.add("env_runner")

            def on_update_end(self, **kwargs: Any) -> None:
                self.seen.add("learner")

            def on_train_result(self, **kwargs: Any) -> None:
                self.seen.add("algorithm")

        with config().callbacks(Everywhere).build() as algo:
            algo.train()
        assert sorted(sorted(callback.seen) for callback in made) == [["algorithm"], ["env_runner"], ["learner"]]


class TestMetrics:
    """What callbacks log is in the result of the same iteration, from every event."""

    @pytest.mark.parametrize(
        ("event", "group"),
        [
            ("on_create_policy", None),
            ("on_algorithm_init", None),
            ("on_train_result", None),
            ("on_sub_environment_created", "env_runners"),
            ("on_environment_created", "env_runners"),
            ("on_episode_created", "env_runners"),
            ("on_episode_start", "env_runners"),
            ("on_episode_step", "env_runners"),
            ("on_episode_end", "env_runners"),
            ("on_postprocess_trajectory", "env_runners"),
            ("on_sample_end", "env_runners"),
            ("on_learn_on_batch", "learners"),
            ("on_gradients", "learners"),
            ("on_update_end", "learners"),
        ],
    )
    def test_of_every_event_that_has_a_logger(self, event: str, group: str | None) -> None:
        def log(metrics_logger: Any) -> None:
            metrics_logger.log_value(("mine", "seen"), 2.0, window=3)

        assert "metrics_logger" in EVENTS[event].arguments
        with config().callbacks(**{event: log}).build() as algo:
            result = algo.train()
        assert (result[group] if group else result)["mine"]["seen"] == 2.0

    def test_every_iteration_s_own(self) -> None:
        def on_train_result(metrics_logger: Any, result: dict[str, Any]) -> None:
            metrics_logger.log_value("mine", result["training_iteration"], reduce="sum")
            metrics_logger.log_value(("env_runners", "steps"), 100, reduce="sum")
            metrics_logger.log_value("picture", np.full((2, 2, 3), result["training_iteration"], np.uint8))
            result["added"] = -result["training_iteration"]

        def on_episode_step(metrics_logger: Any) -> None:
            metrics_logger.log_value("steps", 1, reduce="sum")

        with config().callbacks(on_train_result=on_train_result, on_episode_step=on_episode_step).build() as algo:
            results = [algo.train() for _ in range(3)]
        assert [result["mine"] for result in results] == [1, 2, 3]
        assert [result["added"] for result in results] == [-1, -2, -3]
        assert [result["picture"][0, 0, 0] for result in results] == [1, 2, 3]
        # Logged under one key by the runner and by the algorithm: both count.
        assert [result["env_runners"]["steps"] for result in results] == [102, 102, 102]

    def test_a_key_stays_when_nothing_is_logged_to_it(self) -> None:
        def once(metrics_logger: Any, algorithm: Any) -> None:
            if algorithm.training_iteration == 1:
                metrics_logger.log_value("early", 5.0, reduce="mean")

        with config().callbacks(on_train_result=once).build() as algo:
            first, second = algo.train(), algo.train()
        assert first["early"] == 5.0
        assert np.isnan(second["early"])

    def test_every_logger_gets_them(self, tmp_path: Path) -> None:
        def log(metrics_logger: Any) -> None:
            metrics_logger.log_value("late", 7.0, window=1)

        with config().callbacks(on_train_result=log).build() as algo:
            loggers = [CSVLogger(), JSONLinesLogger(), TensorBoardLogger()]
            algo.fit(stop={"training_iteration": 1}, run_dir=tmp_path, loggers=loggers)
        accumulator = EventAccumulator(str(tmp_path))
        accumulator.Reload()
        assert [(event.step, event.value) for event in accumulator.Scalars("late")] == [(2, 7.0)]
        assert '"late": 7.0' in (tmp_path / "result.jsonl").read_text()
        head, row = (tmp_path / "progress.csv").read_text().splitlines()
        assert dict(zip(head.split(","), row.split(","), strict=True))["late"] == "7.0"

    def test_the_time_of_the_learner_s_callbacks_is_theirs(self) -> None:
        import time

        def wait() -> None:
            end = time.perf_counter() + 0.05
            while time.perf_counter() < end:
                pass

        with config().callbacks(on_learn_on_batch=wait, on_update_end=wait).build() as algo:
            timers = algo.train()["timers"]
        assert timers["callbacks_s"] >= 0.1
        assert timers["learning_s"] >= 0


def test_chunks_make_up_the_whole_episode() -> None:
    """`len(episode)` and the lengths of the chunks before it are the step events of the episode."""
    steps: dict[str, int] = {}
    ended: list[tuple[int, list[int], list[float]]] = []

    class Reads(Callback):
        def on_episode_step(self, *, episode: Any, **kwargs: Any) -> None:
            steps[episode.id_] = steps.get(episode.id_, 0) + 1

        def on_episode_end(self, *, episode: Any, prev_episode_chunks: list[Any], **kwargs: Any) -> None:
            chunks = [*prev_episode_chunks, episode]
            assert len({chunk.id_ for chunk in chunks}) == 1
            assert [chunk.t_started for chunk in chunks] == np.cumsum([0, *map(len, chunks)])[:-1].tolist()
            rewards = np.concatenate([chunk.get_rewards() for chunk in chunks]).tolist()
            ended.append((steps[episode.id_], [len(chunk) for chunk in chunks], rewards))

    runner = EnvRunner(config(num_envs=2, env_config={"episode_length": 7}).callbacks(Reads))
    for _ in range(12):
        runner.sample(num_timesteps=6)
    runner.stop()
    assert len(ended) > 6
    assert any(len(lengths) == 3 for _, lengths, _ in ended)
    for num_steps, lengths, rewards in ended:
        assert num_steps == sum(lengths) == 7
        assert rewards == [1, 2, 3, 4, 5, 6, 7]


def test_chunks_are_kept_only_for_callbacks_that_name_them() -> None:
    import gc
    import weakref

    for function, kept in ((lambda episode: None, False), (lambda prev_episode_chunks: None, True)):
        runner = EnvRunner(config(env_config={"episode_length": 1000}).callbacks(on_episode_end=function))
        rollouts = [weakref.ref(runner.sample(num_timesteps=3)) for _ in range(4)]
        gc.collect()
        assert [ref() is not None for ref in rollouts[:-1]] == [kept] * 3
        runner.stop()
