"""ThresholdCurriculum: when the next task follows, what it reports, and that it continues from a checkpoint."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from at_least import all_of
from corral import Algorithm, IMPALAConfig, MultiAgentEnv, PPOConfig
from corral.callbacks.curriculum import ThresholdCurriculum
from corral.core.metrics.logger import MetricsLogger
from corral.errors import CallbackError, ConfigError, EnvError
from corral.runs.checkpoint import read_checkpoint
from corral.testing import CountingEnv
from small import small
from user_files import SMALL


class Rewarding(CountingEnv):
    """Episodes of one step, whose reward is the task."""

    def __init__(self, config: Any = None) -> None:
        super().__init__({"episode_length": 1})
        self.task = (config or {}).get("task", 0)

    def get_task(self) -> Any:
        return self.task

    def set_task(self, task: Any) -> None:
        self.task = task

    def step(self, action: int) -> Any:
        obs, _, *rest = super().step(action)
        return obs, float(self.task), *rest


def config(curriculum: Any, env: Any = Rewarding, **settings: Any) -> PPOConfig:
    return small(env, **{**SMALL, "metrics_num_episodes_for_smoothing": 10, **settings}).callbacks(curriculum)


def tasks(algo: Algorithm) -> list[list[Any]]:
    return algo.env_runner_group.foreach_env(lambda env: env.task)


class Group:
    """Stands for the runners; it notes the tasks that it is given."""

    num_envs = 2
    mail = SimpleNamespace(parts_in_flight=list)

    def __init__(self) -> None:
        self.given: list[Any] = []

    def foreach_env_runner(self, fn: str, kwargs: dict[str, Any]) -> None:
        assert fn == "set_tasks"
        self.given += kwargs["tasks"]


class Driver:
    """Stands for the algorithm."""

    def __init__(self) -> None:
        self.env_runner_group = Group()
        self.metrics = MetricsLogger()
        self.config = PPOConfig().reporting(metrics_num_episodes_for_smoothing=10).evaluation(evaluation_interval=2)


def followed(curriculum: ThresholdCurriculum, results: list[dict[str, Any]]) -> list[int]:
    """Return the index of the task after each of some results."""
    driver, indices = Driver(), []
    curriculum.on_algorithm_init(algorithm=driver, metrics_logger=MetricsLogger())
    for result in results:
        curriculum.on_train_result(algorithm=driver, metrics_logger=MetricsLogger(), result=result)
        indices.append(curriculum.index)
    assert driver.env_runner_group.given == curriculum.tasks[: curriculum.index + 1]
    return indices


def result(value: float, num_episodes: float, **others: Any) -> dict[str, Any]:
    return {
        "env_runners": {"episode_return_mean": value, "num_episodes_lifetime": num_episodes},
        "loss": value,
        **others,
    }


NAN = float("nan")


def test_patience_counts_iterations_in_a_row() -> None:
    curriculum = ThresholdCurriculum("abc", [2.0, 3.0], metric="loss", patience=2)
    values = [NAN, 2.0, 1.9, 2.0, 2.5, 2.5, 2.5, 3.0, 3.1, 0.0, 9.0]
    assert followed(curriculum, [result(value, 0) for value in values]) == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2]


def test_thresholds_may_be_an_array() -> None:
    curriculum = ThresholdCurriculum("abc", np.array([2.0, 3.0]), metric="loss")  # type: ignore[arg-type]
    assert followed(curriculum, [result(value, 0) for value in (1.0, 2.5, 2.5, 3.5)]) == [0, 1, 1, 2]


def test_a_mean_over_episodes_of_the_task_before_does_not_count() -> None:
    curriculum = ThresholdCurriculum("abcd", 1.0)
    # After a change, 10 episodes are averaged, and 2 of the sub-envs were still at the task before.
    numbers = [10, 15, 21, 22, 23, 33, 34]
    assert followed(curriculum, [result(5.0, number) for number in numbers]) == [1, 1, 1, 2, 2, 2, 3]


def test_a_round_of_evaluation_counts_once() -> None:
    curriculum = ThresholdCurriculum("abc", 1.0, metric="evaluation/env_runners/episode_return_mean", patience=2)
    rounds = [(NAN, False), (5.0, True), (5.0, False), (5.0, True), (5.0, False), (5.0, True)]
    results = [
        result(0.0, 0, evaluation={"env_runners": {"episode_return_mean": value}, "fresh": fresh})
        for value, fresh in rounds
    ]
    assert followed(curriculum, results) == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("num_env_runners", [0, 2])
def test_all_sub_envs_get_the_task_and_the_result_reports_it(num_env_runners: int) -> None:
    curriculum = ThresholdCurriculum([1, 2, 7], [1.0, 5.0])
    with config(curriculum, num_env_runners=num_env_runners, engine_name="local").build() as algo:
        shape = max(1, num_env_runners)
        assert tasks(algo) == [[1, 1]] * shape
        first = algo.train()
        assert first["env_runners"]["episode_return_mean"] == 1.0
        assert first["curriculum"] == {"task_index": 1, "task_share": {"1": 0.0, "2": 1.0, "7": 0.0}}
        assert tasks(algo) == [[2, 2]] * shape
        second = algo.train()
        assert second["curriculum"]["task_index"] == 1  # 2 is below 5
        assert second["env_runners"]["episode_return_mean"] == 2.0


def test_a_metric_of_the_evaluation_which_keeps_its_own_task() -> None:
    metric = "evaluation/env_runners/episode_return_mean"
    made = config(ThresholdCurriculum([1, 2, 7], 3.0, metric=metric), env_config={"task": 3})
    with made.evaluation(evaluation_interval=2, evaluation_duration=2).build() as algo:
        results = [algo.train() for _ in range(5)]
        assert [result["curriculum"]["task_index"] for result in results] == [0, 1, 1, 2, 2]
        assert results[-1]["evaluation"]["env_runners"]["episode_return_mean"] == 3.0
        assert results[-1]["env_runners"]["episode_return_mean"] == 7.0


def test_it_continues_from_a_checkpoint(tmp_path: Path) -> None:
    with config(ThresholdCurriculum([1, 2, 7], [1.0, 5.0])).build() as algo:
        algo.train()
        algo.save(tmp_path / "saved")
        expected = algo.get_state()["callbacks"]
    restored = ThresholdCurriculum([1, 2, 7], [1.0, 5.0])
    with config(restored, num_env_runners=2, engine_name="local").build() as algo:
        algo.restore_from_path(tmp_path / "saved")
        assert algo.get_state()["callbacks"] == expected and restored.index == 1
        assert tasks(algo) == [[2, 2]] * 2


def test_tasks_that_no_checkpoint_can_hold_are_set_again(tmp_path: Path) -> None:
    made = config(ThresholdCurriculum([Fraction(1), Fraction(2), Fraction(7)], [1.0, 5.0]))
    with made.build() as algo:
        algo.train()
        algo.save(tmp_path / "saved")
    with made.build() as algo:
        algo.restore_from_path(tmp_path / "saved")
        assert tasks(algo) == [[2, 2]]


def test_a_second_algorithm_begins_with_the_first_task() -> None:
    made = config(ThresholdCurriculum([1, 2, 7], [1.0, 5.0]))
    for _ in range(2):
        with made.build() as algo:
            assert tasks(algo) == [[1, 1]]
            assert algo.train()["curriculum"]["task_index"] == 1


def test_a_state_of_more_tasks_is_refused() -> None:
    with pytest.raises(ConfigError, match="task with index 2, but there are only 2 tasks"):
        ThresholdCurriculum([1, 2], 1.0).set_state({"index": 2, "num_reached": 0, "num_episodes_before": 0})


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ThresholdCurriculum([], 1.0),
        lambda: ThresholdCurriculum([1, 2, 3], [1.0]),
        lambda: ThresholdCurriculum([1, 2], 1.0, patience=0),
    ],
    ids=["no tasks", "thresholds", "patience"],
)
def test_bad_arguments(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"ThresholdCurriculum: . tasks need"):
        wrong()


def test_an_unknown_metric_names_the_nearest() -> None:
    with config(ThresholdCurriculum([1, 2], 1.0, metric="env_runners/episode_return_meann")).build() as algo:
        with pytest.raises(CallbackError, match=r"Did you mean 'env_runners/episode_return_mean'\?$"):
            algo.train()


def test_a_metric_of_evaluation_needs_evaluation() -> None:
    curriculum = ThresholdCurriculum([1, 2], 1.0, metric="evaluation/env_runners/episode_return_mean")
    with pytest.raises(CallbackError, match=r"metric 'evaluation/env.*: set evaluation\(evaluation_interval=\.\.\.\)"):
        config(curriculum).build()


def test_an_env_without_tasks_is_named_at_build() -> None:
    with pytest.raises(CallbackError) as caught:
        config(ThresholdCurriculum([1, 2], 1.0), CountingEnv).build()
    assert isinstance(caught.value.__cause__, EnvError)
    assert "env 'CountingEnv' takes no tasks" in str(caught.value.__cause__)


class Pair(MultiAgentEnv):
    """Two agents, whose rewards are 1 with task 0 and otherwise 0, in episodes of 5 steps."""

    possible_agents = agents = ("a", "b")  # type: ignore[assignment]
    observation_spaces = dict.fromkeys("ab", spaces.Box(-1, 1, (1,), np.float32))  # type: ignore[assignment]
    action_spaces = dict.fromkeys("ab", spaces.Discrete(2))  # type: ignore[assignment]

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.task = 0

    def get_task(self) -> Any:
        return self.task

    def set_task(self, task: Any) -> None:
        self.task = task

    def _obs(self) -> Any:
        return {agent: np.zeros(1, np.float32) for agent in "ab"}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self._obs(), {}

    def step(self, actions: Any) -> Any:
        self.t += 1
        return self._obs(), dict.fromkeys("ab", float(self.task == 0)), {"__all__": self.t >= 5}, {}, {}


@pytest.mark.parametrize("name", ["agent_episode_return_mean/a", "module_episode_return_mean/main"])
def test_returns_of_agents_and_modules_pass_no_task_for_the_episodes_of_another(name: str) -> None:
    made = config(ThresholdCurriculum([0, 1, 2], 3.0, metric=f"env_runners/{name}"), Pair)
    with made.multi_agent(policies={"main"}).reporting(metrics_num_episodes_for_smoothing=30).build() as algo:
        assert [algo.train()["curriculum"]["task_index"] for _ in range(8)] == [1] * 8
        assert algo.train()["env_runners"]["episode_return_mean"] == 0.0  # the window holds no other episode


class Solo(Rewarding):
    """Episodes of 5 steps, with a reward of 1 per step of task 0 and otherwise of 0."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._length = 5

    def step(self, action: int) -> Any:
        obs, reward, *rest = super().step(action)
        return obs, float(reward == 0), *rest


@pytest.mark.parametrize(
    "settings",
    [
        {"window": 30},
        {"window": 30, "reduce": "max"},
        {"reduce": "percentiles", "window": 30, "percentiles": [50]},
        {"reduce": "mean"},
        {"reduce": "ema", "ema_coeff": 0.05},
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_env_runners", [0, 2])
def test_own_metrics_pass_no_task_for_the_episodes_of_another(settings: dict[str, Any], num_env_runners: int) -> None:
    def log(episode: Any, metrics_logger: Any) -> None:
        metrics_logger.log_value("score", episode.get_return(), **settings)

    name = "env_runners/score/p50" if "percentiles" in settings else "env_runners/score"
    made = config(ThresholdCurriculum([0, 1, 2], 3.0, metric=name), Solo).callbacks(on_episode_end=log)
    with made.copy(num_env_runners=num_env_runners, engine_name="local").build() as algo:
        assert [algo.train()["curriculum"]["task_index"] for _ in range(10)] == [1] * 10


class First(Rewarding):
    """Episodes of one step, with a reward of 1 for task 0 and otherwise of 0."""

    def step(self, action: int) -> Any:
        obs, reward, *rest = super().step(action)
        return obs, float(reward == 0), *rest


@pytest.mark.parametrize("metric", ["episode_return_mean", "module_episode_return_mean/main"])
def test_fragments_that_runners_sampled_ahead_pass_no_task(metric: str) -> None:
    made = IMPALAConfig().environment(First).env_runners(num_envs_per_env_runner=2, rollout_fragment_length=20)
    if metric.startswith("module"):
        made.environment(Pair).multi_agent(policies={"main"}).env_runners(rollout_fragment_length=100)
    made.engine(engine_name="local").training(train_batch_size_per_learner=20)
    made.reporting(
        metrics_num_episodes_for_smoothing=5, min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=1
    )
    curriculum = ThresholdCurriculum([0, 1, 2], 0.5, metric=f"env_runners/{metric}")
    with made.callbacks(curriculum).build() as algo:
        results = [algo.train() for _ in range(10)]
    assert [result["curriculum"]["task_index"] for result in results] == [1] * 10
    assert results[1]["env_runners"]["episode_return_mean"] > 0.5  # of task 0, which a runner sampled ahead
    assert results[-1]["env_runners"]["episode_return_mean"] == 0.0


@pytest.mark.parametrize("settings", [{"window": 5}, {"reduce": "mean", "clear_on_reduce": True}], ids=str)
def test_own_metrics_of_fragments_that_runners_sampled_ahead_pass_no_task(settings: dict[str, Any]) -> None:
    driver, curriculum = Driver(), ThresholdCurriculum("abc", 0.5, metric="env_runners/score")
    runner, waiting = MetricsLogger(), list[Any]()  # fragments of 8 episodes that runners have sampled

    def sample() -> None:
        for _ in range(8):
            runner.log_value("score", 0.0 if driver.env_runner_group.given[-1] != "a" else 1.0, **settings)
        runner.log_value("num_episodes", 8, reduce="sum")
        waiting.append(runner.take())

    def set_tasks(*args: Any, **kwargs: Any) -> None:
        for _ in range(2 if driver.env_runner_group.given else 0):
            sample()  # what the runner was asked for comes first
        Group.foreach_env_runner(driver.env_runner_group, *args, **kwargs)

    group: Any = driver.env_runner_group
    group.foreach_env_runner, group.mail = set_tasks, SimpleNamespace(parts_in_flight=lambda: waiting)
    curriculum.on_algorithm_init(algorithm=driver, metrics_logger=MetricsLogger())
    indices, num_sampled = [], 0
    for iteration in range(1, 8):
        sample()
        driver.metrics.aggregate([waiting.pop(0)], key="env_runners")
        num_sampled = 8 * (iteration + len(waiting))
        group.num_episodes_over = {1: [num_sampled // 2] * 2}
        score = driver.metrics.reduce()["env_runners"]["score"]
        found = {"env_runners": {"score": score, "num_episodes_lifetime": 8 * iteration}}
        curriculum.on_train_result(algorithm=driver, metrics_logger=MetricsLogger(), result=found)
        indices.append(curriculum.index)
    assert num_sampled == 8 * 9 and indices == [1] * 7  # two fragments of the task before counted after the change


@pytest.mark.parametrize("clears", [False, True])
def test_an_own_metric_passes_tasks_that_are_learned(clears: bool) -> None:
    def log(episode: Any, metrics_logger: Any) -> None:
        metrics_logger.log_value("score", episode.get_return(), window=10, clear_on_reduce=clears)

    curriculum = ThresholdCurriculum([1, 2, 3], [1.0, 2.0], metric="env_runners/score")
    with config(curriculum).callbacks(on_episode_end=log).build() as algo:
        assert [algo.train()["curriculum"]["task_index"] for _ in range(5)] == [1, 1, 2, 2, 2]


def test_the_counts_of_an_own_metric_travel_in_checkpoints(tmp_path: Path) -> None:
    def log(episode: Any, metrics_logger: Any) -> None:
        metrics_logger.log_value("score", episode.get_return(), window=30)

    def make() -> PPOConfig:
        curriculum = ThresholdCurriculum([0, 1, 2], 3.0, metric="env_runners/score")
        return config(curriculum, Solo).callbacks(on_episode_end=log)

    with make().build() as algo:
        for _ in range(2):
            algo.train()
        algo.save(tmp_path / "saved")
    with make().build() as algo:
        algo.restore_from_path(tmp_path / "saved")
        assert [algo.train()["curriculum"]["task_index"] for _ in range(4)] == [1] * 4


def test_an_early_mean_passes_no_task() -> None:
    class Uneven(Solo):
        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self._length = [3, 100][context.vector_index]

    made = config(ThresholdCurriculum([0, 1], 2.0), Uneven).reporting(metrics_num_episodes_for_smoothing=500)
    with made.build() as algo:
        assert [algo.train()["curriculum"]["task_index"] for _ in range(4)] == [0, 0, 1, 1]  # of 37 rows each


class Harder(Rewarding):
    """The higher the task, the lower the return."""

    def step(self, action: int) -> Any:
        obs, _, *rest = super().step(action)
        return obs, 10.0 - 5.0 * self.task, *rest


RETURN = "env_runners/episode_return_mean"


def best_of(run_dir: Path) -> tuple[int, float]:
    metadata = read_checkpoint(run_dir / "checkpoints" / "best", with_state=False).metadata
    return metadata["training_iteration"], metadata["best"]["value"]


def test_returns_of_the_task_before_take_no_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the best checkpoint nor a criterion is about the easier task, also where both are in one window."""

    def is_done(result: dict[str, Any]) -> bool:
        found.append((result["curriculum"]["task_index"], result["env_runners"]["episode_return_mean"]))
        return bool(found[-1][0] == 1 and found[-1][1] > 7)

    monkeypatch.setattr("corral.algorithms.run_checkpoints.COPY_PAUSE", 0)
    found: list[tuple[float, float]] = []
    made = config(ThresholdCurriculum([0, 1], thresholds=9.0, patience=2), Harder)
    made.reporting(metrics_num_episodes_for_smoothing=50)  # an iteration has 64 episodes
    with made.build() as algo:
        stop = {"training_iteration": 9, "done": is_done}
        result = algo.fit(stop=stop, run_dir=tmp_path / "run", progress=False)
    index = [task for task, _ in found].index(1)
    assert result["training_iteration"] == 9 and result["env_runners"]["episode_return_mean"] == 5
    means = [mean for _, mean in found]
    assert means[index - 1] == 10 and np.isnan(means[index]) and set(means[-2:]) == {5.0}
    assert all_of(np.isnan(mean) or mean == 5 for mean in means[index:])
    first = next(i for i, mean in enumerate(means) if mean == 5)
    assert best_of(tmp_path / "run") == (first + 1, 5.0)


@pytest.mark.parametrize("tasks", [None, "training"])
def test_the_best_evaluated_value_stays_unless_it_is_of_the_task_in_force(tasks: Any, tmp_path: Path) -> None:
    made = config(ThresholdCurriculum([0, 1], thresholds=9.0), Harder)
    made.evaluation(evaluation_interval=1, evaluation_duration=2, evaluation_tasks=tasks)
    with made.build() as algo:
        algo.fit(stop={"training_iteration": 4}, run_dir=tmp_path / "run", progress=False)
    assert best_of(tmp_path / "run")[1] == (10.0 if tasks is None else 5.0)


def test_a_run_that_continues_keeps_the_best_checkpoint_of_the_task_in_force(tmp_path: Path) -> None:
    made = config(ThresholdCurriculum([0, 1], thresholds=9.0), Harder)
    with made.copy().build() as algo:
        algo.fit(stop={"training_iteration": 6}, run_dir=tmp_path / "run", progress=False)
    before = best_of(tmp_path / "run")
    assert before[1] == 5.0
    with made.copy().build() as algo:
        algo.fit(stop={"training_iteration": 8}, resume=tmp_path / "run", progress=False)
    assert best_of(tmp_path / "run") == before
