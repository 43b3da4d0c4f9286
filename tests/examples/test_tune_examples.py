"""The examples of hyperparameter search do what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from example_files import load

SMALL = {"train_batch_size_per_learner": 128, "minibatch_size": None, "num_epochs": 1}


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_custom_workflow_raises_the_task_as_the_agent_learns(ray_runtime: Any, tmp_path: Path) -> None:
    result = load("tune/custom_workflow.py").main(num_iterations=9, storage_path=str(tmp_path), num_env_runners=1)
    assert result.error is None
    history = result.metrics_dataframe
    tasks, returns = history["task"].tolist(), history["env_runners/episode_return_mean"].tolist()
    assert tasks == sorted(tasks) and tasks[0] == 0 and tasks[-1] >= 1
    for i in range(1, len(tasks) - 1):
        raised = tasks[i] > tasks[i - 1]
        assert raised == (returns[i] > 12.8 and tasks[i - 1] < 2)
        assert not raised or returns[i + 1] < returns[i]  # the env in the runner's process shows the new cues
    assert history["engine"].unique().tolist() == ["ray"]
    assert {"algorithm", "task"} <= {entry.name for entry in Path(result.checkpoint.path).iterdir()}


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_grid_search_acts_with_the_best(ray_runtime: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    best = load("tune/grid_search.py").main(1, (1e-3,), storage_path=str(tmp_path), training=SMALL)
    assert best.config["lr"] == 1e-3 and best.metrics["training_iteration"] == 1
    assert capfd.readouterr().out.splitlines()[-1] in ("action: 0", "action: 1")


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_population_based_training_runs(ray_runtime: Any, tmp_path: Path) -> None:
    main = load("tune/population_based_training.py").main
    results = main(2, perturbation_interval=2, num_trials=2, storage_path=str(tmp_path), training=SMALL)
    assert results.errors == [] and len(results) == 2
    assert all(1e-4 < result.config["lr"] < 1e-2 for result in results)
    assert all(result.metrics["training_iteration"] == 2 for result in results)


@pytest.mark.slow
def test_search_with_optuna_prunes() -> None:
    optuna = pytest.importorskip("optuna")
    example = load("search_with_optuna.py")

    class Pruner(optuna.pruners.BasePruner):  # type: ignore[misc, name-defined]
        """Ends the second trial after its second iteration."""

        def prune(self, study: Any, trial: Any) -> bool:
            return bool(trial.number == 1 and trial.last_step == 1)

    study = example.main(num_trials=3, num_iterations=3, pruner=Pruner())
    states = [trial.state.name for trial in study.trials]
    assert states == ["COMPLETE", "PRUNED", "COMPLETE"]
    assert [len(trial.intermediate_values) for trial in study.trials] == [3, 2, 3]
    assert study.best_value == max(study.trials[0].value, study.trials[2].value)
    assert set(study.best_params) == {"lr", "entropy_coeff", "num_epochs"}
