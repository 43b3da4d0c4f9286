"""Runs of `fit`: which checkpoints they keep, how they end, and how they continue."""

from __future__ import annotations

import csv
import json
import logging
import math
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from corral import Algorithm, Below, DQNConfig, Module, PPOConfig
from corral.algorithms.run_checkpoints import RunCheckpoints
from corral.errors import CheckpointError, ConfigError, CorralError, RunDirectoryError, StopCriterionError
from corral.runs.checkpoint import find_checkpoint, read_checkpoint
from corral.runs.loggers import CSVLogger, JSONLinesLogger, Logger, TensorBoardLogger, default_loggers
from corral.runs.loggers.run import locked
from corral.testing import CountingEnv, FaultyEnv, IdentityEnv
from corral.tools.cli.exit_status import status_of
from file_limits import largest_file
from small import small


def fit(config: Any, run_dir: Path, num_iterations: int, **arguments: Any) -> dict[str, Any]:
    return train(config, num_iterations, run_dir=run_dir, **arguments)


def resume(config: Any, run_dir: Path, num_iterations: int, **arguments: Any) -> dict[str, Any]:
    return train(config, num_iterations, resume=run_dir, **arguments)


def train(config: Any, num_iterations: int, **arguments: Any) -> dict[str, Any]:
    with config.build() as algo:
        result: dict[str, Any] = algo.fit(
            stop={"training_iteration": num_iterations}, **{"progress": False, **arguments}
        )
        return result


def names(run_dir: Path) -> set[str]:
    """Return the checkpoints of a run by name; what a write that failed left is none."""
    return {path.parent.name for path in (run_dir / "checkpoints").glob("*/metadata.json")}


def iterations(run_dir: Path) -> list[int]:
    with (run_dir / "progress.csv").open(newline="", encoding="utf-8") as file:
        rows = [int(row["training_iteration"]) for row in csv.DictReader(file)]
    lines = (run_dir / "result.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["training_iteration"] for line in lines] == rows
    return rows


# What is kept.


def test_a_run_keeps_the_last_and_the_best_checkpoint(tmp_path: Path) -> None:
    result = fit(small(), tmp_path, 3)
    assert names(tmp_path) == {"iteration-000003", "best"}
    last = read_checkpoint(find_checkpoint(tmp_path), with_state=False)
    assert last.metadata["training_iteration"] == 3
    best = read_checkpoint(find_checkpoint(tmp_path, prefer="best"), with_state=False)
    assert best.metadata["best"]["metric"] == "env_runners/episode_return_mean"
    assert best.metadata["best"]["value"] >= result["env_runners"]["episode_return_mean"]
    with Algorithm.from_checkpoint(find_checkpoint(tmp_path)) as algo:
        assert algo.train()["training_iteration"] == 4


def test_periodic_checkpoints_and_how_many_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corral.algorithms.run_checkpoints.WRITE_PAUSE", 0)
    seen: list[set[str]] = []

    class Looking(Logger):
        def open(self, run_dir: Path, config: Any) -> None:
            self.run_dir = run_dir

        def log_result(self, result: dict[str, Any]) -> None:
            if (self.run_dir / "checkpoints").exists():
                seen.append(names(self.run_dir) - {"best"})

    config = small(checkpoint_every_iterations=2, num_checkpoints_kept=2)
    fit(config, tmp_path, 8, loggers=[Looking()])
    assert seen == [
        {"iteration-000001"},  # in case that the run is killed before the first one is due
        {"iteration-000002"},
        {"iteration-000002"},
        {"iteration-000002", "iteration-000004"},
        {"iteration-000002", "iteration-000004"},
        {"iteration-000004", "iteration-000006"},
        {"iteration-000004", "iteration-000006"},
    ]
    assert names(tmp_path) == {"iteration-000006", "iteration-000008", "best"}


def test_what_a_crash_cut_off_is_not_counted_among_the_checkpoints_that_stay(tmp_path: Path) -> None:
    fit(small(checkpoint_every_iterations=1, num_checkpoints_kept=2), tmp_path, 3)
    for iteration in (7, 8, 9):  # later ones, which were not written to their end
        (tmp_path / "checkpoints" / f"iteration-{iteration:06d}").mkdir()
    resume(small(checkpoint_every_iterations=1, num_checkpoints_kept=2), tmp_path, 5)
    assert names(tmp_path) == {"iteration-000004", "iteration-000005", "best"}


def test_a_resume_with_another_metric_chooses_the_best_checkpoint_again(tmp_path: Path) -> None:
    fit(small(best_checkpoint_metric="num_env_steps_sampled_lifetime"), tmp_path, 2)
    other = "env_runners/num_env_steps_sampled"  # smaller than the number of the other metric
    resume(small(best_checkpoint_metric=other), tmp_path, 3)
    best = read_checkpoint(find_checkpoint(tmp_path, prefer="best"), with_state=False)
    assert (best.metadata["best"]["metric"], best.metadata["training_iteration"]) == (other, 3)


def test_a_run_without_a_checkpoint_begins_again_only_at_its_begin(tmp_path: Path) -> None:
    fit(small(), tmp_path, 3)
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        resume(small(), tmp_path, 4)
    fit(small(), tmp_path / "one", 1)
    shutil.rmtree(tmp_path / "one" / "checkpoints")
    with small().build() as algo:
        algo.train()
        with pytest.raises(CheckpointError, match="this algorithm has already trained 1 iterations: build a new one"):
            algo.fit(stop={"training_iteration": 2}, resume=tmp_path / "one", progress=False)
    assert resume(small(), tmp_path / "one", 2)["training_iteration"] == 2
    assert iterations(tmp_path / "one") == [1, 2]


class Clock:
    """A clock that moves only when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr("corral.algorithms.run_checkpoints.time.monotonic", lambda: self.now_s)


def test_writing_takes_at_most_one_fiftieth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[float] = []
    with small(checkpoint_every_s=60.0, best_checkpoint_metric=None).build() as algo:
        clock = Clock(monkeypatch)
        save = algo.save

        def slow_save(path: Any) -> Any:
            written.append(clock.now_s)
            clock.now_s += 3.0  # so that the pause is 150 s
            return save(path)

        monkeypatch.setattr(algo, "save", slow_save)
        checkpoints = RunCheckpoints(algo, tmp_path, late_keys=False, warn=lambda subject, message: None)
        for _ in range(500):
            clock.now_s += 1.0
            algo.training_iteration += 1
            checkpoints.update({"training_iteration": algo.training_iteration})
    assert [round(later - earlier) for earlier, later in zip([1000.0, *written], written, strict=False)] == [
        60,
        153,
        153,
    ]


def test_checkpoints_by_iterations_wait_for_no_pause(tmp_path: Path) -> None:
    fit(small(checkpoint_every_iterations=1, num_checkpoints_kept=9), tmp_path, 4)
    assert names(tmp_path) == {*(f"iteration-00000{iteration}" for iteration in range(1, 5)), "best"}


@pytest.mark.parametrize(
    ("broken", "which"),
    [
        ((3,), "iteration-000003 is an incomplete checkpoint"),
        ((2, 3), "iteration-000002 to iteration-000003 are 2 incomplete checkpoints"),
    ],
)
def test_checkpoints_that_were_not_written_to_their_end_are_told_in_one_line(
    broken: tuple[int, ...], which: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(small(checkpoint_every_iterations=1, num_checkpoints_kept=9), tmp_path, 3)
    for iteration in broken:
        (tmp_path / "checkpoints" / f"iteration-{iteration:06d}" / "metadata.json").unlink()
    caplog.clear()
    resume(small(), tmp_path, 4)
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == [f"{which}: the run continues from iteration {broken[0] - 1}."]
    assert iterations(tmp_path) == [1, 2, 3, 4]


@pytest.mark.parametrize("by_logger", [False, True])
def test_a_run_directory_that_is_removed_ends_the_run_with_its_place(by_logger: bool, tmp_path: Path) -> None:
    def remove(result: dict[str, Any]) -> None:
        if result["training_iteration"] == 2:
            shutil.rmtree(tmp_path / "run")

    class Removed(JSONLinesLogger):
        def log_result(self, result: dict[str, Any]) -> None:
            remove(result)
            (tmp_path / "run" / "mine").touch()

    config = small() if by_logger else small().callbacks(on_train_result=remove)
    loggers = [Removed()] if by_logger else default_loggers()
    with pytest.raises(RunDirectoryError, match=rf"the run directory {tmp_path / 'run'} was removed") as caught:
        fit(config, tmp_path / "run", 9, loggers=loggers)
    assert status_of(caught.value) == 6
    kept = read_checkpoint(find_checkpoint(tmp_path / "run"))
    assert kept.metadata["training_iteration"] == 2  # the last state is written all the same


def test_the_best_state_is_the_one_of_its_iteration_though_it_is_written_later(tmp_path: Path) -> None:
    values = iter([math.nan, 1.0, 5.0, math.nan, 4.0, math.inf])
    weights: dict[int, Any] = {}

    def score(algorithm: Any, result: dict[str, Any]) -> None:
        result["score"] = next(values)
        weights[algorithm.training_iteration] = algorithm.get_state()["learners"]["weights"]

    config = small(best_checkpoint_metric="score").callbacks(on_train_result=score)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("corral.algorithms.run_checkpoints.COPY_PAUSE", 0)
        fit(config, tmp_path, 6)
    best = read_checkpoint(tmp_path / "checkpoints" / "best", with_state=False)
    assert best.metadata["training_iteration"] == 3
    assert best.metadata["best"] == {"metric": "score", "mode": "max", "value": 5.0}
    for name, array in weights[3]["default_policy"].items():
        np.testing.assert_array_equal(best.weights["default_policy"][name], array)


def test_the_best_checkpoint_of_a_run_that_continues_is_kept_until_it_is_beaten(tmp_path: Path) -> None:
    for scores, expected in (([3.0, 5.0], 2), ([4.0], 2), ([2.0, 6.0], 5)):
        values = iter(scores)

        def score(result: dict[str, Any], values: Iterator[float] = values) -> None:
            result["score"] = next(values)

        config = small(best_checkpoint_metric="score").callbacks(on_train_result=score)
        done = len(iterations(tmp_path)) if (tmp_path / "progress.csv").exists() else 0
        (resume if done else fit)(config, tmp_path, done + len(scores))
        best = read_checkpoint(tmp_path / "checkpoints" / "best", with_state=False)
        assert best.metadata["training_iteration"] == expected


def test_the_smallest_number_may_be_the_best(tmp_path: Path) -> None:
    def score(result: dict[str, Any]) -> None:
        result["score"] = abs(result["training_iteration"] - 2)

    config = small(best_checkpoint_metric="score", best_checkpoint_mode="min").callbacks(on_train_result=score)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("corral.algorithms.run_checkpoints.COPY_PAUSE", 0)
        fit(config, tmp_path, 4)
    best = read_checkpoint(tmp_path / "checkpoints" / "best", with_state=False)
    assert best.metadata["training_iteration"] == 2


@pytest.mark.parametrize("settings", [{}, {"num_env_runners": 2, "engine_name": "local"}], ids=["embedded", "runners"])
def test_a_metric_of_the_best_that_never_appears_is_an_error_before_anything_is_sampled(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    config = small(best_checkpoint_metric="episode_retrun_mean", **settings)
    with pytest.raises(
        ConfigError, match=r"best_checkpoint_metric 'episode_retrun_mean' does not appear.*return_mean'"
    ):
        fit(config, tmp_path / "run", 9)
    assert not (tmp_path / "run").exists()


def test_nothing_is_written_on_request(tmp_path: Path) -> None:
    fit(small(num_checkpoints_kept=0, best_checkpoint_metric=None), tmp_path, 2)
    assert not (tmp_path / "checkpoints").exists()


def test_the_best_checkpoint_has_no_replay_buffer(tmp_path: Path) -> None:
    config = DQNConfig().environment(CountingEnv).debugging(seed=0)
    config.training(train_batch_size_per_learner=8, num_steps_sampled_before_learning_starts=8)
    config.training(store_buffer_in_checkpoints=True).rl_module(model_config={"fcnet_hiddens": [4]})
    fit(config.reporting(min_sample_timesteps_per_iteration=20), tmp_path, 2)

    def has_buffer(name: str) -> bool:
        checkpoint = read_checkpoint(tmp_path / "checkpoints" / name)
        return bool(checkpoint.arrays) or "replay_buffer" in checkpoint.state

    assert has_buffer("iteration-000002") and not has_buffer("best")


def test_a_checkpoint_that_cannot_be_written_warns_once_and_training_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corral.algorithms.run_checkpoints.WRITE_PAUSE", 0)
    config = small(checkpoint_every_iterations=1, num_checkpoints_kept=9)
    with config.build() as algo:
        save = algo.save

        def full_for_a_while(path: Any) -> Any:
            if algo.training_iteration not in (2, 3):
                return save(path)
            with largest_file(100):
                return save(path)

        monkeypatch.setattr(algo, "save", full_for_a_while)
        algo.fit(stop={"training_iteration": 4}, run_dir=tmp_path, progress=False)
    assert names(tmp_path) == {"iteration-000001", "iteration-000004", "best"}
    [warning] = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert "iteration-000002 cannot be written: " in warning and "File too large" in warning


# How it ends.


def test_a_run_that_ends_in_its_second_iteration_keeps_the_checkpoint_of_the_first(tmp_path: Path) -> None:
    """It is written again, with the steps since then, under the name of the early one that goes with the next one."""
    updates = iter([False, True])

    def interrupt() -> None:
        if next(updates):
            raise KeyboardInterrupt

    config = small().callbacks(on_learn_on_batch=interrupt)
    with pytest.raises(KeyboardInterrupt):
        fit(config, tmp_path / "run", 5)
    assert "iteration-000001" in names(tmp_path / "run")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError, SystemExit])
def test_however_a_run_ends_its_last_state_is_kept(error: type[BaseException], tmp_path: Path) -> None:
    def fail(result: dict[str, Any]) -> None:
        if result["training_iteration"] == 3:
            raise error("now")

    config = small().callbacks(on_train_result=fail)
    with pytest.raises((error, CorralError)):
        fit(config, tmp_path, 9)
    assert read_checkpoint(find_checkpoint(tmp_path)).metadata["training_iteration"] == 3
    assert resume(small(), tmp_path, 5)["training_iteration"] == 5
    assert iterations(tmp_path) == [1, 2, 3, 4, 5]


def test_an_interrupt_between_two_loggers_loses_no_row(tmp_path: Path) -> None:
    class Interrupted(CSVLogger):
        def row(self, result: dict[str, Any]) -> dict[str, Any]:
            if result["training_iteration"] == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return super().row(result)

    with pytest.raises(KeyboardInterrupt):
        fit(small(), tmp_path, 9, loggers=[Interrupted(), JSONLinesLogger()])
    assert read_checkpoint(find_checkpoint(tmp_path)).metadata["training_iteration"] == 2
    assert iterations(tmp_path) == [1, 2]
    assert (tmp_path / "run.log").read_text(encoding="utf-8").count("Iteration 2: ") == 1
    resume(small(), tmp_path, 3)
    assert iterations(tmp_path) == [1, 2, 3]


def test_lines_that_a_power_failure_damaged_are_left_out(tmp_path: Path) -> None:
    fit(small(), tmp_path, 2)
    for name in ("progress.csv", "result.jsonl"):
        with (tmp_path / name).open("ab") as file:
            file.write(b"\0\0\xff\0\n")
    resume(small(), tmp_path, 3)
    assert iterations(tmp_path) == [1, 2, 3]


def test_a_function_may_need_what_a_checkpoint_does_not_keep_of_a_result(tmp_path: Path) -> None:
    fit(small(), tmp_path, 2)

    def stop(result: dict[str, Any]) -> bool:
        return bool(result["config"]["debugging"]["seed"] == 0 and result["training_iteration"] >= 3)

    with small().build() as algo:
        assert algo.fit(stop=stop, resume=tmp_path, progress=False)["training_iteration"] == 3


def test_an_env_that_raises_in_the_middle_of_an_iteration_keeps_the_state(tmp_path: Path) -> None:
    config = small(FaultyEnv, env_config={"fault": "raise_step", "at_step": 50})
    with pytest.raises(CorralError):
        fit(config, tmp_path, 100)
    assert read_checkpoint(find_checkpoint(tmp_path)).metadata["training_iteration"] == len(iterations(tmp_path))


def test_a_callback_may_end_the_run_after_the_iteration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def enough(algorithm: Any) -> None:
        if algorithm.training_iteration == 2:
            algorithm.request_stop("the budget is spent")

    with small().callbacks(on_train_result=enough).build() as algo:
        result = algo.fit(stop={"training_iteration": 9}, run_dir=tmp_path)
        assert result["training_iteration"] == 2 and algo.stop_requested is None
    assert iterations(tmp_path) == [1, 2]
    assert "Stopped: the budget is spent." in (tmp_path / "run.log").read_text(encoding="utf-8")
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"the budget is spent. The run is stored in {tmp_path}")


def test_a_request_to_stop_is_for_one_run(tmp_path: Path) -> None:
    def fail(algorithm: Any, result: dict[str, Any]) -> None:
        if result["training_iteration"] == 1:
            algorithm.request_stop("no more")
            raise ZeroDivisionError

    with small().callbacks(on_train_result=fail).build() as algo:
        with pytest.raises(CorralError):
            algo.fit(stop={"training_iteration": 3}, run_dir=tmp_path / "a", progress=False)
        assert (
            algo.fit(stop={"training_iteration": 3}, run_dir=tmp_path / "b", progress=False)["training_iteration"] == 3
        )


def test_a_loop_of_the_user_sees_the_request_to_stop() -> None:
    def enough(algorithm: Any, result: dict[str, Any]) -> None:
        if result["training_iteration"] == 2:
            algorithm.request_stop()

    with small().callbacks(on_train_result=enough).build() as algo:
        while not algo.stop_requested:
            result = algo.train()
    assert result["training_iteration"] == 2
    assert algo.stop_requested == "request_stop() was called"


def test_functions_and_numbers_below_a_limit_end_a_run(tmp_path: Path) -> None:
    with small().build() as algo:
        stop = {"second": lambda result: bool(result["training_iteration"] == 2), "num_env_steps": 10_000}
        assert algo.fit(stop=stop, run_dir=tmp_path / "a", progress=False)["training_iteration"] == 2
        stop = {"learners/default_policy/entropy": Below(100.0)}
        assert algo.fit(stop=stop, run_dir=tmp_path / "b", progress=False)["training_iteration"] == 2  # met already
    assert yaml.safe_load((tmp_path / "b" / "config.yaml").read_text())["stop"] == {
        "learners/default_policy/entropy": {"below": 100.0}
    }
    assert iterations_or_none(tmp_path / "b") == []


def iterations_or_none(run_dir: Path) -> list[int]:
    return iterations(run_dir) if (run_dir / "progress.csv").stat().st_size else []


def test_save_has_another_name(tmp_path: Path) -> None:
    with small().build() as algo:
        assert read_checkpoint(algo.save_to_path(tmp_path / "here")).metadata["training_iteration"] == 0


# Continuing.


def test_a_run_continues_in_its_directory(tmp_path: Path) -> None:
    loggers = [*default_loggers(), TensorBoardLogger()]
    fit(small(), tmp_path, 2, loggers=loggers)
    first = resume(small(), tmp_path, 4)
    assert first["training_iteration"] == 4
    assert first["num_env_steps_sampled_lifetime"] == 4 * 32
    assert iterations(tmp_path) == [1, 2, 3, 4]
    # TensorBoard was on, so it stays on, though nobody asked for it again.
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    assert [(event.step, event.value) for event in accumulator.Scalars("training_iteration")] == [
        (32 * iteration, iteration) for iteration in (1, 2, 3, 4)
    ]
    log = (tmp_path / "run.log").read_text(encoding="utf-8")
    assert "continues from iteration 2" in log and log.count("Run finished.") == 2


def test_results_beyond_the_checkpoint_are_cut(tmp_path: Path) -> None:
    class Short(CSVLogger):
        def row(self, result: dict[str, Any]) -> dict[str, Any]:
            return {"num_env_steps_sampled_lifetime": result["num_env_steps_sampled_lifetime"], "x": 1}

    class Bare(JSONLinesLogger):
        def line(self, result: dict[str, Any]) -> dict[str, Any]:
            return {"x": 1}

    def loggers() -> list[Logger]:
        return [*default_loggers(), Short("short.csv"), Bare("bare.jsonl"), TensorBoardLogger()]

    fit(small(num_checkpoints_kept=9), tmp_path, 2, loggers=loggers())
    with small().build() as algo:  # a process that was killed after its last checkpoint
        algo.restore_from_path(find_checkpoint(tmp_path))
        opened = loggers()
        for logger in opened:
            logger.resume(tmp_path, {}, 2, 64)
        for _ in range(2):
            result = algo.train()
            for logger in opened:
                logger.log_result(result)
        for logger in opened:
            logger.close()
    assert iterations(tmp_path) == [1, 2, 3, 4]
    with (tmp_path / "result.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"training_iteration": 2, "half')
    with (tmp_path / "progress.csv").open("a", encoding="utf-8") as file:
        file.write("1,2")
    resume(small(), tmp_path, 3, loggers=loggers())
    assert iterations(tmp_path) == [1, 2, 3]
    steps = (tmp_path / "short.csv").read_text(encoding="utf-8").split()
    assert steps == ["num_env_steps_sampled_lifetime,x", "32,1", "64,1", "96,1"]
    assert len((tmp_path / "bare.jsonl").read_text(encoding="utf-8").splitlines()) == 5  # nothing says which is which
    accumulator = EventAccumulator(str(tmp_path))
    accumulator.Reload()
    assert [event.step for event in accumulator.Scalars("training_iteration")] == [32, 64, 96]
    assert not list(tmp_path.glob("*.new"))


def test_a_run_that_met_its_criteria_ends_without_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(small(), tmp_path, 3)
    changing = ("run.log", "config.yaml")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name not in changing}
    trained: list[int] = []
    config = small().callbacks(on_train_result=lambda: trained.append(1))
    result = resume(config, tmp_path, 3, progress="auto")
    assert (trained, result["training_iteration"]) == ([], 3)
    printed = capsys.readouterr().out
    assert printed.startswith("Done after 3 iterations, 96 env steps, ")
    assert "training_iteration=3 reached 3." in printed
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name not in changing}
    assert after == before


def test_the_stop_criteria_of_the_run_are_found(tmp_path: Path) -> None:
    with small().build() as algo:
        stop = {"training_iteration": 2, "learners/default_policy/entropy": Below(-50.0)}
        algo.fit(stop=stop, run_dir=tmp_path, progress=False)
        assert algo.fit(resume=tmp_path, progress=False)["training_iteration"] == 2
        algo.fit(resume=tmp_path, stop={"third": lambda result: result["training_iteration"] == 3}, progress=False)
        with pytest.raises(ConfigError, match="third must be a number, got 'the function"):
            algo.fit(resume=tmp_path, progress=False)
        with pytest.raises(StopCriterionError, match="no stop criterion"):
            algo.fit(run_dir=tmp_path / "new", progress=False)


def test_other_settings_may_differ_and_are_told(tmp_path: Path) -> None:
    fit(small(lr=1e-3), tmp_path, 1)
    resume(small(lr=1e-4), tmp_path, 2)
    log = (tmp_path / "run.log").read_text(encoding="utf-8")
    assert "Settings that differ from the run's: training.lr: 0.0001, was 0.001." in log
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["training"]["lr"] == 1e-4


class Other(Module):
    def policy(self, obs: Any) -> Any: ...

    def value(self, obs: Any) -> Any: ...


class WiderEnv(CountingEnv):
    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        space = self.observation_space
        assert isinstance(space, gym.spaces.Box)
        self.observation_space = gym.spaces.Box(-1e9, 1e9, (space.shape[0] + 1,), np.float32)

    def reset(self, **arguments: Any) -> Any:
        obs, info = super().reset(**arguments)
        return np.append(obs, 0).astype(np.float32), info

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return np.append(obs, 0).astype(np.float32), *rest


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DQNConfig().environment(CountingEnv), "algo: 'DQN', was 'PPO'"),
        (small(model_config={"fcnet_hiddens": [5]}), r"rl_module.model_config: \{'fcnet_hiddens': \[5\]\}, was"),
        (small(WiderEnv), "observation_space: .*, was "),
    ],
    ids=["algorithm", "module", "spaces"],
)
def test_a_run_of_another_algorithm_module_or_env_is_refused(config: Any, message: str, tmp_path: Path) -> None:
    fit(small(), tmp_path, 1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=message):
        resume(config, tmp_path, 2)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    resume(small(), tmp_path, 2)  # the lock was released


def test_a_run_of_an_env_with_other_actions_of_the_same_shape_is_refused(tmp_path: Path) -> None:
    def identity(space: str) -> PPOConfig:
        return small(IdentityEnv, env_config={"space": space})

    fit(identity("discrete"), tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"action_space: .*'start': -2.*, was .*"):
        resume(identity("discrete_from_minus_2"), tmp_path, 2)
    assert resume(identity("discrete"), tmp_path, 2)["training_iteration"] == 2


def test_what_cannot_continue_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is not the directory of a run: it does not exist"):
        resume(small(), tmp_path / "nowhere", 1)
    with pytest.raises(RunDirectoryError, match=r"is not the directory of a run: it has no config.yaml"):
        resume(small(), tmp_path, 1)
    fit(small(num_checkpoints_kept=0, best_checkpoint_metric=None), tmp_path / "run", 1)
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        resume(small(), tmp_path / "run", 2)
    with small().build() as algo, pytest.raises(ConfigError, match="a run continues in its own directory"):
        algo.fit(stop={"training_iteration": 1}, run_dir=tmp_path / "a", resume=tmp_path / "run")


def test_a_run_whose_checkpoints_could_never_be_written_begins_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corral.algorithms.run_checkpoints.WRITE_PAUSE", 0)
    with small(checkpoint_every_iterations=1).build() as algo:
        save = algo.save

        def full(path: Any) -> Any:
            with largest_file(100):
                return save(path)

        monkeypatch.setattr(algo, "save", full)
        monkeypatch.setattr("corral.algorithms.run_checkpoints.write_checkpoint", lambda path, **_: full(path))
        with pytest.raises(CheckpointError, match=r"of iteration 3: there is none in .*File too large"):
            algo.fit(stop={"training_iteration": 3}, run_dir=tmp_path, progress=False)
    monkeypatch.undo()
    assert not names(tmp_path)
    assert len((tmp_path / "result.jsonl").read_text().splitlines()) == 3
    assert resume(small(checkpoint_every_iterations=1), tmp_path, 4)["training_iteration"] == 4
    assert "has no checkpoint yet: the run begins again" in caplog.text
    lines = [json.loads(line) for line in (tmp_path / "result.jsonl").read_text().splitlines()]
    assert [line["training_iteration"] for line in lines] == [1, 2, 3, 4]
    assert len(names(tmp_path)) > 1
    # A run that had checkpoints and lost them is not begun again: that would overwrite its results.
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        resume(small(), tmp_path, 5)


def test_a_directory_has_one_run_at_a_time(tmp_path: Path) -> None:
    fit(small(), tmp_path, 1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with locked(tmp_path), pytest.raises(RunDirectoryError, match="belongs to a run that has not ended"):
        resume(small(), tmp_path, 2)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert resume(small(), tmp_path, 2)["training_iteration"] == 2


def test_a_directory_that_cannot_be_read_or_locked_is_named(tmp_path: Path) -> None:
    too_long = tmp_path / ("x" * 300)
    with small().build() as algo:
        for settings in ({"run_dir": too_long}, {"resume": too_long}):
            with pytest.raises(RunDirectoryError, match=r"x cannot be (written|read): File name too long"):
                algo.fit(stop={"training_iteration": 1}, progress=False, **settings)
    (tmp_path / ".lock").mkdir()
    with pytest.raises(RunDirectoryError, match="cannot be written: "), locked(tmp_path):
        pass
