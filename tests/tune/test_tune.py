"""Trials of real Tune: killed and resumed, changed in place, and run by a function of the user's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

pytest.importorskip("ray")

from ray import cloudpickle, tune
from ray.tune.schedulers import PopulationBasedTraining
from walk_env import Walk

import corral.compat.tune
from corral import Callback, PPOConfig, make_multi_agent
from corral.errors import ConfigError
from corral.testing import IdentityEnv
from user_files import SMALL, write_my_algo

pytestmark = [pytest.mark.usefixtures("ray_runtime"), pytest.mark.xdist_group("ray")]

# Trials are other processes, which cannot import this file.
for module in (__name__, "walk_env"):
    cloudpickle.register_pickle_by_value(sys.modules[module])


def run_config(tmp_path: Path, **settings: Any) -> tune.RunConfig:
    return tune.RunConfig(storage_path=str(tmp_path), verbose=0, **settings)


class Histories(tune.Callback):
    """Keeps what each trial reported.

    Tune's own history can lose lines of a trial that was restored: Ray then copies the file of its results back from
    the storage, where it can be older.
    """

    def __init__(self) -> None:
        self.results: dict[str, list[dict[str, Any]]] = {}

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        self.results.setdefault(trial.trial_id, []).append(dict(result))

    def of(self, result: tune.Result) -> pd.DataFrame:
        return pd.json_normalize(self.results[result.metrics["trial_id"]], sep="/")


class Witness(Callback):
    """Notes what happens to algorithms in files, and kills the process of one of them in its third iteration."""

    def note(self, algorithm: Any, what: str) -> None:
        with Path(algorithm.config.env_config["notes"], what).open("a") as file:
            file.write(f"{os.getpid()}\n")

    def on_algorithm_init(self, *, algorithm: Any, **kwargs: Any) -> None:
        self.note(algorithm, "built")

    def on_checkpoint_loaded(self, *, algorithm: Any, **kwargs: Any) -> None:
        self.note(algorithm, f"loaded-{algorithm.training_iteration}")

    def on_train_result(self, *, algorithm: Any, **kwargs: Any) -> None:
        doomed = algorithm.config.lr == algorithm.config.env_config.get("doomed_lr")
        if doomed and algorithm.training_iteration == 3:
            try:
                Path(algorithm.config.env_config["notes"], "killed").touch(exist_ok=False)
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)


def notes(directory: Path, what: str) -> list[str]:
    return (directory / what).read_text().split()


@pytest.mark.slow
@pytest.mark.parametrize("lrs", [[1e-3, 3e-3], [1e-3, 2e-3, 3e-3, 4e-3]])
def test_of_several_trials_one_is_killed_and_continues(lrs: list[float], tmp_path: Path) -> None:
    corral.compat.tune.register()
    env_config, histories = {"notes": str(tmp_path), "doomed_lr": 3e-3}, Histories()
    results = tune.Tuner(
        "PPO",
        param_space={
            "env": IdentityEnv,
            "callbacks": Witness,
            "lr": tune.grid_search(lrs),
            "training": SMALL,
            "environment.env_config": env_config,
        },
        run_config=run_config(
            tmp_path / "results",
            stop={"training_iteration": 5},
            callbacks=[histories],
            failure_config=tune.FailureConfig(max_failures=1),
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
        ),
    ).fit()
    assert len(results) == len(lrs) and results.errors == []
    assert len(notes(tmp_path, "built")) == len(lrs) + 1  # the killed one twice
    [pid] = notes(tmp_path, "loaded-2")
    for result in results:
        doomed = result.config["lr"] == 3e-3
        history = histories.of(result)
        assert history["training_iteration"].tolist() == [1, 2, 3, 4, 5]
        assert history["iterations_since_restore"].tolist() == ([1, 2, 1, 2, 3] if doomed else [1, 2, 3, 4, 5])
        assert history["pid"].nunique() == (2 if doomed else 1)
        assert (str(history["pid"].iloc[-1]) == pid) == doomed
        # Every step counts once: the steps of the iteration that was killed are not among them.
        sampled = history["env_runners/num_env_steps_sampled"].cumsum().tolist()
        assert history["num_env_steps_sampled_lifetime"].tolist() == sampled
        assert history["env_runners/num_env_steps_sampled_lifetime"].tolist() == sampled
        assert history["timesteps_total"].tolist() == sampled
        assert result.metrics["config"]["lr"] == result.config["lr"]
    best = results.get_best_result("env_runners/episode_return_mean", "max")
    with PPOConfig().environment(IdentityEnv).build() as algo:
        algo.restore_from_path(best.checkpoint.path)
        assert algo.training_iteration == 5


class FailsOnce(Callback):
    """Raises in the third iteration, if nobody has before."""

    def on_train_result(self, *, algorithm: Any, **kwargs: Any) -> None:
        if algorithm.training_iteration == 3:
            try:
                Path(algorithm.config.env_config["notes"], "failed").touch(exist_ok=False)
            except FileExistsError:
                return
            raise RuntimeError("the disk of the cluster is gone")


@pytest.mark.slow
def test_an_experiment_that_failed_is_restored_and_continues_exactly(tmp_path: Path) -> None:
    trainable = corral.compat.tune.trainable(PPOConfig().debugging(seed=0).callbacks(FailsOnce))

    results = {}
    for name in ("whole", "failed"):
        (tmp_path / name).mkdir()
        if name == "whole":
            (tmp_path / name / "failed").touch()  # nothing fails here
        tuner = tune.Tuner(
            trainable,
            param_space={
                "env": Walk,
                "training": SMALL,
                "env_config": {"notes": str(tmp_path / name)},
            },
            run_config=run_config(
                tmp_path / name,
                name="experiment",
                stop={"training_iteration": 5},
                checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
            ),
        )
        [results[name]] = tuner.fit()
    assert "the disk of the cluster is gone" in str(results["failed"].error)
    assert results["failed"].metrics["training_iteration"] == 2
    path = str(tmp_path / "failed" / "experiment")
    [restored] = tune.Tuner.restore(path, trainable, resume_errored=True).fit()
    assert restored.error is None
    assert restored.metrics_dataframe["training_iteration"].tolist() == [1, 2, 3, 4, 5]
    for name in ("total_loss", "entropy", "gradients_default_optimizer_global_norm"):
        key = f"learners/default_policy/{name}"
        assert restored.metrics_dataframe[key].tolist() == results["whole"].metrics_dataframe[key].tolist()


def module_of_agent(agent_id: int, episode: Any) -> str:
    return ["left", "right"][agent_id]


class AddsOnce(Callback):
    """Gives the agent on the right a copy of the module on the left after the first iteration."""

    def on_train_result(self, *, algorithm: Any, **kwargs: Any) -> None:
        if algorithm.training_iteration == 1:
            algorithm.add_module("copy", copy_from="left", policies_to_train=["left", "right", "copy"])


@pytest.mark.slow
def test_the_settings_of_one_module_are_searched_and_its_return_is_the_metric(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    config = PPOConfig().environment(
        make_multi_agent(IdentityEnv), env_config={"num_agents": 2, "notes": str(tmp_path / "notes")}
    )
    config.multi_agent(policies={"left", "right"}, policy_mapping_fn=module_of_agent).debugging(seed=0)
    config.callbacks([AddsOnce, FailsOnce])
    path = "multi_agent.algorithm_config_overrides_per_module.left.lr"
    metric = "env_runners/module_episode_return_mean/left"
    histories = Histories()
    results = tune.Tuner(
        corral.compat.tune.trainable(config),
        param_space={
            "training": SMALL,
            path: tune.grid_search([0.0, 1e-2]),
            "multi_agent.policies.right.model_config.fcnet_hiddens": [4],
        },
        tune_config=tune.TuneConfig(metric=metric, mode="max"),
        run_config=run_config(
            tmp_path / "results",
            stop={"training_iteration": 4},
            callbacks=[histories],
            failure_config=tune.FailureConfig(max_failures=1),
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
        ),
    ).fit()
    assert results.errors == [] and (tmp_path / "notes" / "failed").exists()  # one trial was restored, with its copy
    for result in results:
        learned = result.metrics["learners"]
        assert learned.keys() == {"left", "right", "copy", "__all_modules__"}
        assert learned["left"]["default_optimizer_learning_rate"] == result.config[path]
        assert histories.of(result)["training_iteration"].tolist() == [1, 2, 3, 4]
    best = results.get_best_result()
    means = [result.metrics["env_runners"]["module_episode_return_mean"]["left"] for result in results]
    assert best.metrics["env_runners"]["module_episode_return_mean"]["left"] == max(means)


@pytest.mark.slow
def test_population_based_training_changes_lr_in_place(tmp_path: Path) -> None:
    low, high, new = 1e-4, 1e-3, 5e-3
    rate = "learners/default_policy/default_optimizer_learning_rate"
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        metric=rate,  # so that it is known which trial is the poor one
        mode="max",
        perturbation_interval=2,
        quantile_fraction=0.5,
        resample_probability=1.0,
        hyperparam_mutations={"lr": lambda: new},
    )
    base = PPOConfig().callbacks(Witness, on_train_result=lambda result: None)
    results = tune.Tuner(
        # There is room for one trial only, so that the two take turns in one process.
        tune.with_resources(corral.compat.tune.trainable(base), {"CPU": 3}),
        param_space={
            "env": IdentityEnv,
            "lr": tune.grid_search([low, high]),
            "training": SMALL,
            "env_config": {"notes": str(tmp_path)},
        },
        tune_config=tune.TuneConfig(scheduler=scheduler, reuse_actors=True),
        run_config=run_config(tmp_path / "results", stop={"training_iteration": 6}),
    ).fit()
    assert results.errors == []
    poor = next(result for result in results if result.metrics_dataframe[rate].iloc[0] == low)
    assert set(poor.metrics_dataframe[rate]) == {low, new}
    built = notes(tmp_path, "built")
    assert len(built) == 2 and len(set(built)) == 1  # one for each trial, and none for the copy or the turns
    pids = {str(pid) for result in results for pid in result.metrics_dataframe["pid"]}
    assert pids == set(built)
    assert set(notes(tmp_path, "loaded-2")) == pids


@pytest.mark.parametrize("trainable", ["PPO", PPOConfig])
def test_a_misspelt_setting_is_found_before_any_trial(trainable: Any, tmp_path: Path) -> None:
    corral.compat.tune.register()
    chosen = trainable if isinstance(trainable, str) else corral.compat.tune.trainable(trainable)
    tuner = tune.Tuner(chosen, param_space={"env": IdentityEnv, "lrr": 1e-3}, run_config=run_config(tmp_path))
    with pytest.raises(ConfigError, match=r"param_space: unknown setting 'lrr'. Did you mean 'lr'?"):
        tuner.fit()


@pytest.mark.slow
def test_a_function_may_report_a_result_as_it_is(tmp_path: Path) -> None:
    def train_fn(settings: dict[str, Any]) -> None:
        with corral.compat.tune.configured(PPOConfig(), settings).build() as algo:
            for _ in range(2):
                tune.report(algo.train())

    results = tune.Tuner(
        train_fn,
        param_space={"env": IdentityEnv, "training": SMALL},
        run_config=run_config(tmp_path),
    ).fit()
    assert results.errors == []
    assert results[0].metrics_dataframe["training_iteration"].tolist() == [1, 2]
    assert results[0].metrics["num_env_steps_sampled_lifetime"] >= 128
    assert results[0].config["env"] is IdentityEnv


TUNE_A_USERS_ALGORITHM = """
import sys
import ray
from ray import tune
import corral, corral.compat.tune
from corral.testing import IdentityEnv

class Own(IdentityEnv):  # trials get it by pickle, and name it as a class of this script in their checkpoints
    pass

ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=256 * 2**20, log_to_driver=False)
corral.register_algorithm("Mine", "my_algo:MyConfig")
corral.compat.tune.register()
corral.compat.tune.register("my_algo:MyConfig")
from my_algo import MyConfig, MyPPO
for trainable in ("Mine", "my_algo:MyConfig", corral.compat.tune.trainable(MyConfig)):
    settings = {"env": Own, "training": %r, "bonus": 0.25, "algo": "my_algo:MyConfig"}
    results = tune.Tuner(trainable, param_space=settings, run_config=tune.RunConfig(
        storage_path=sys.argv[1], verbose=0, stop={"training_iteration": 2},
        checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
    )).fit()
    assert results.errors == [], results.errors
    metrics = results[0].metrics["learners"]["default_policy"]
    with MyPPO.from_checkpoint(results[0].checkpoint.path) as algo:
        assert algo.config.env is Own
        print("RESULT", metrics["bonus"], metrics["num_bonuses"], type(algo).__name__, algo.training_iteration)
"""


@pytest.mark.slow
def test_a_users_algorithm_runs_as_trials_by_path_by_name_and_by_class(tmp_path: Path) -> None:
    # A driver of its own: its trials import the user's file from the directory of the script.
    write_my_algo(tmp_path)
    script = tmp_path / "tune_it.py"
    script.write_text(TUNE_A_USERS_ALGORITHM % SMALL, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "results")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert found == ["RESULT 0.25 2.0 MyPPO 2"] * 3
