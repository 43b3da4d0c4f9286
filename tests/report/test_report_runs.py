"""Run directories as records: whole, damaged, continued, and still being written."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corral import PPOConfig
from corral.core.run_files import SET_ASIDE
from corral.errors import RunDirectoryError
from corral.runs.loggers.run import Run
from corral.testing import CountingEnv
from corral.tools.report.groups import differing_settings, group_runs, repeated_seeds
from corral.tools.report.run_log import NOT_ENDED
from corral.tools.report.runs import find_run_dirs, read_run, read_runs
from written_runs import config, result, write_run

RETURN = "env_runners/episode_return_mean"


def test_a_run_is_read_as_columns(tmp_path: Path) -> None:
    rows = [result(1, None), {**result(2, 4.0), "won": True, "late": 5}, {**result(3, 6.0), "won": False, "late": None}]
    run = read_run(write_run(tmp_path / "run", results=rows))
    np.testing.assert_array_equal(run.numbers[RETURN], [np.nan, 4, 6])
    np.testing.assert_array_equal(run.numbers["late"], [np.nan, 5, np.nan])
    np.testing.assert_array_equal(run.numbers["won"], [np.nan, 1, 0])
    assert run.texts["bottleneck/part"] == ["learning"] * 3
    assert (run.num_results, run.last(RETURN), run.last("late"), run.name) == (3, 6.0, 5.0, "run")
    assert (run.setting("training", "lr"), run.problems, run.log.ending) == (0.001, (), "finished")


@pytest.mark.parametrize(
    ("end", "num_results", "num_problems"),
    [
        ('{"training_iteration": 4, "env_runn', 3, 0),  # still being written, or cut off
        ("\0\0\0\n", 3, 1),
        ("[1, 2]\n", 3, 1),
        (f"{'[' * 100_000}\n", 3, 1),
        (f'{{"training_iteration": 4, "huge": 1{"0" * 400}, "infinite": Infinity}}\n', 4, 0),
        ("\n\n", 3, 0),
    ],
    ids=["half", "zeros", "list", "deep", "huge", "blank"],
)
def test_what_can_be_read_of_damaged_results_is_read(
    end: str, num_results: int, num_problems: int, tmp_path: Path
) -> None:
    path = write_run(tmp_path / "run")
    with (path / "result.jsonl").open("a", encoding="utf-8") as file:
        file.write(end)
    run = read_run(path)
    assert run.num_results == num_results
    assert run.last(RETURN) == 3
    assert len(run.problems) == num_problems
    if num_problems:
        assert "result.jsonl has 1 line that is damaged" in run.problems[0]


def test_a_run_without_files_says_which_are_missing(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    for name in ("config.yaml", "run.log"):
        (path / name).unlink()
    assert read_run(path).problems == ("There is no config.yaml.",)
    (path / "config.yaml").write_text("a: [", encoding="utf-8")
    (path / "result.jsonl").write_text("", encoding="utf-8")
    assert read_run(path).problems == (
        "config.yaml cannot be read: it is damaged.",
        "result.jsonl holds no result yet.",
    )


def test_results_that_were_written_again_replace_the_earlier_ones(tmp_path: Path) -> None:
    rows = [result(i, value) for i, value in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0), (3, 30.0), (4, 40.0))]
    run = read_run(write_run(tmp_path / "run", results=rows))
    assert run.numbers[RETURN].tolist() == [1, 20, 30, 40]
    assert run.numbers["training_iteration"].tolist() == [1, 2, 3, 4]


def test_the_log_says_how_a_run_ended_and_what_went_wrong(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    (path / "run.log").write_text(
        "2026-01-01 00:00:00,000 INFO corral: Run in run, seed 0.\n"
        "2026-01-01 00:00:01,000 WARNING corral: Runner 1 died.\n"
        "2026-01-01 00:00:02,000 ERROR corral: Run failed.\n"
        "Traceback (most recent call last):\nValueError: no\n"
        "2026-01-01 00:00:03,000 INFO corral: Run in run continues from iteration 2, seed 0.\n",
        encoding="utf-8",
    )
    log = read_run(path).log
    assert (log.ending, log.num_continued) == ("has not ended, or its process was killed", 1)
    assert dict(log.counts) == {"WARNING": 1, "ERROR": 1}
    assert log.entries[1].text.splitlines()[-1] == "ValueError: no"
    with (path / "run.log").open("a", encoding="utf-8") as file:
        file.write("2026-01-01 00:00:04,000 WARNING corral: Run ended by SIGTERM.\n")
    assert read_run(path).log.ending == "ended by SIGTERM"


def test_runs_are_found_in_directories_of_runs(tmp_path: Path) -> None:
    for name in ("set/seed-1", "set/seed-0", "one"):
        write_run(tmp_path / name)
    (tmp_path / "set" / "notes.txt").write_text("", encoding="utf-8")
    assert [path.name for path in find_run_dirs(tmp_path / "set")] == ["seed-0", "seed-1"]
    runs = read_runs([tmp_path / "one", tmp_path, str(tmp_path / "set")])
    assert [run.name for run in runs] == ["one", "set/seed-0", "set/seed-1"]


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunDirectoryError, match=r"empty is not the directory of a run: neither it nor"):
        read_runs([write_run(tmp_path / "run"), tmp_path / "empty"])
    with pytest.raises(RunDirectoryError, match=r"absent is not the directory of a run: it does not exist"):
        read_runs([tmp_path / "absent"])
    with pytest.raises(RunDirectoryError, match=r"result\.jsonl is not the directory of a run: it is a file"):
        read_runs([tmp_path / "run" / "result.jsonl"])
    with pytest.raises(RunDirectoryError, match="no run was given"):
        read_runs([])


def test_runs_that_differ_in_the_seed_are_one_group(tmp_path: Path) -> None:
    for name, settings in {
        "a": config(0),
        "b": config(1) | {"stop": {"num_env_steps": 2000}},
        "c": config(0, lr=0.01),
        "d": config(0, algo="DQN"),
    }.items():
        write_run(tmp_path / name, settings=settings)
    shutil.copytree(tmp_path / "a", tmp_path / "e")
    (tmp_path / "e" / "config.yaml").unlink()
    groups = group_runs(read_runs([tmp_path]))
    assert {group.label: [run.name for run in group.runs] for group in groups} == {
        "PPO CartPole-v1, lr=0.001": ["a", "b"],
        "PPO CartPole-v1, lr=0.01": ["c"],
        "DQN CartPole-v1": ["d"],
        "e": ["e"],
    }
    assert differing_settings(groups[:3]) == {
        "algo": ["PPO", "PPO", "DQN"],
        "training.lr": ["0.001", "0.01", "0.001"],
    }


def test_a_label_names_first_what_tells_the_most_experiments_apart(tmp_path: Path) -> None:
    common = [("batch", 1, 2), ("epochs", 1, 2), ("clip", 1, 2), ("width", 1, 2)]
    for name, side, lr in (("a", 1, 0.1), ("b", 1, 0.2), ("c", 2, 0.1), ("d", 2, 0.2)):
        training = {key: values[side - 1] for key, *values in common} | {"lr": lr}
        write_run(tmp_path / name, settings=config() | {"training": training})
    labels = [group.label for group in group_runs(read_runs([tmp_path]))]
    assert labels[0] == "PPO CartPole-v1, batch=1, lr=0.1, clip=1, ..."
    assert len({*labels}) == 4 and not any("(" in label for label in labels)


def test_a_label_leaves_out_what_changes_no_learning(tmp_path: Path) -> None:
    quiet = {"engine": {"engine_name": "ray"}, "evaluation": {"evaluation_interval": 5}, "learners": {"num_threads": 1}}
    write_run(tmp_path / "a", settings=config(0, lr=0.1))
    write_run(tmp_path / "b", settings=config(0, lr=0.2) | quiet)
    assert [group.label for group in group_runs(read_runs([tmp_path]))] == [
        "PPO CartPole-v1, lr=0.1",
        "PPO CartPole-v1, lr=0.2",
    ]
    write_run(tmp_path / "c", settings=config(0, lr=0.2) | quiet | {"learners": {"num_threads": 2}})
    labels = [group.label for group in group_runs(read_runs([tmp_path]))]  # only the threads tell b and c apart
    assert len({*labels}) == 3 and "num_threads=1" in labels[1] and "num_threads=2" in labels[2]


def test_runs_in_another_env_or_another_config_of_it_are_another_group(tmp_path: Path) -> None:
    write_run(tmp_path / "a", settings=config(0))
    write_run(tmp_path / "b", settings=config(1, env="Acrobot-v1"))
    write_run(tmp_path / "c", settings=config(2) | {"environment": {"env": "CartPole-v1", "env_config": {"wind": 2}}})
    groups = group_runs(read_runs([tmp_path]))
    assert [[run.name for run in group.runs] for group in groups] == [["a"], ["b"], ["c"]]


def test_what_a_run_writes_makes_no_other_group(tmp_path: Path) -> None:
    write_run(tmp_path / "a", settings=config(0))
    own = {"checkpointing": {"checkpoint_every_s": 60}, "reporting": {"loggers": ["csv", "tensorboard"]}}
    write_run(tmp_path / "b", settings=config(1) | own)
    (group,) = group_runs(read_runs([tmp_path]))
    assert len(group.runs) == 2 and repeated_seeds(group) == []


def test_seeds_that_several_runs_have_are_named(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 1), ("c", 0)):
        write_run(tmp_path / name, settings=config(seed))
    (group,) = group_runs(read_runs([tmp_path]))
    assert repeated_seeds(group) == ["0"]


def test_attempts_that_could_not_continue_are_no_runs(tmp_path: Path) -> None:
    for name in ("seed-0", "seed-1", f"{SET_ASIDE}/seed-0-1"):
        write_run(tmp_path / "set" / name)
    assert [run.name for run in read_runs([tmp_path])] == ["seed-0", "seed-1"]
    assert len(read_runs([tmp_path / "set" / SET_ASIDE])) == 1  # where it is named


def test_a_run_that_fit_wrote_and_continued(tmp_path: Path) -> None:
    settings = PPOConfig().environment(CountingEnv).training(train_batch_size_per_learner=32, minibatch_size=16)
    for stop in (2, 4):
        resume = {"resume": tmp_path / "run"} if stop == 4 else {"run_dir": tmp_path / "run"}
        with settings.debugging(seed=0).build() as algorithm:
            last = algorithm.fit(stop={"training_iteration": stop}, progress=False, **resume)
    run = read_run(tmp_path / "run")
    assert run.numbers["training_iteration"].tolist() == [1, 2, 3, 4]
    assert run.last("time_total_s") == last["time_total_s"]
    assert (run.problems, run.log.ending, run.log.num_continued) == ((), "finished", 1)
    assert run.setting("debugging", "seed") == 0
    lines = (tmp_path / "run" / "result.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[-1])["bottleneck"]["part"] == run.texts["bottleneck/part"][-1]


@pytest.mark.parametrize("level", ["WARNING", "ERROR"])
def test_the_log_says_at_every_level_how_a_run_ended(level: Any, tmp_path: Path) -> None:
    config = PPOConfig().environment(CountingEnv).debugging(log_level=level)
    with pytest.raises(KeyboardInterrupt), Run(config, tmp_path, []):
        raise KeyboardInterrupt
    assert read_run(tmp_path).log.ending == "interrupted"
    with Run(config, tmp_path, [], restore=lambda path: (1, 16)):
        assert read_run(tmp_path).log.ending == NOT_ENDED
        logging.getLogger("corral").info("not at this level")
    log = read_run(tmp_path).log
    assert (log.ending, log.num_continued) == ("finished", 1)
    assert "not at this level" not in (tmp_path / "run.log").read_text(encoding="utf-8")
