"""The trainable, without Tune around it: the calls that Tune makes of it, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cloudpickle
import pytest

pytest.importorskip("ray")

from walk_env import Walk

import corral.compat.tune
from corral import Callback, PPOConfig
from corral.testing import IdentityEnv

SETTINGS: dict[str, Any] = {"env": IdentityEnv, "lr": 1e-3, "engine_name": "local"}


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a trainable with settings; they are stopped at the end."""
    monkeypatch.setattr("ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH", str(tmp_path))
    made: list[Any] = []
    base = PPOConfig().env_runners(num_envs_per_env_runner=4)
    base.training(train_batch_size_per_learner=64, minibatch_size=None, num_epochs=1)

    def make(**settings: Any) -> Any:
        made.append(corral.compat.tune.trainable(base)({**SETTINGS, **settings}))
        return made[-1]

    yield make
    for trainable in made:
        trainable.stop()


class Counting(Callback):
    """An instance that changes while it runs."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_result(self, *, metrics_logger: Any, **kwargs: Any) -> None:
        self.count += 1
        metrics_logger.log_value("count", self.count, reduce="item")


def test_trials_that_share_an_actor_share_no_callback(make: Any) -> None:
    one = make(callbacks=Counting())
    assert [one.train()["count"] for _ in range(3)] == [1, 2, 3]
    one.reset({**SETTINGS, "callbacks": Counting()})
    assert one.train()["count"] == 1
    one.base_config.callbacks(Counting())  # one instance for all trials
    for _ in range(2):
        one.reset({**SETTINGS})
        assert one.train()["count"] == 1


def lr(result: dict[str, Any]) -> float:
    value: float = result["learners"]["default_policy"]["default_optimizer_learning_rate"]
    return value


def test_a_checkpoint_goes_to_another_trainable(make: Any, tmp_path: Path) -> None:
    one, other = make(), make(lr=1e-2)
    for _ in range(2):
        result = one.train()
    saved = one.save(str(tmp_path / "checkpoint"))
    other.restore(saved)
    last = other.train()
    assert (last["training_iteration"], lr(last)) == (3, 1e-2)
    assert last["timesteps_total"] == result["timesteps_total"] + last["env_runners"]["num_env_steps_sampled"]
    assert last["num_env_steps_sampled_lifetime"] == last["timesteps_total"]


def test_a_checkpoint_continues_exactly(make: Any, tmp_path: Path) -> None:
    settings = {"env": Walk, "seed": None}  # each trainable draws another seed
    one, other = make(**settings), make(**settings)
    one.train()
    saved = one.save(str(tmp_path / "checkpoint"))
    expected = [one.train() for _ in range(2)]
    other.train()
    other.restore(saved)
    results = [other.train() for _ in range(2)]
    for result, wanted in zip(results, expected, strict=True):
        for part in ("learners", "num_env_steps_sampled_lifetime"):
            assert result[part] == wanted[part]
        for name in ("episode_return_mean", "episode_len_max", "num_episodes_lifetime"):
            # An early mean is reported as NaN.
            assert result["env_runners"][name] == pytest.approx(wanted["env_runners"][name], rel=0, abs=0, nan_ok=True)


def test_new_settings_and_a_checkpoint_keep_the_algorithm(make: Any, tmp_path: Path) -> None:
    def note(result: Any) -> None:
        pass

    def sent(settings: dict[str, Any]) -> dict[str, Any]:
        settings = {**settings, "callbacks": {"on_train_result": note, "callbacks_class": Counting()}}
        copied: dict[str, Any] = cloudpickle.loads(cloudpickle.dumps(settings))
        return copied

    one = make(**sent({}))
    algorithm, runner = one.algorithm, one.algorithm.env_runner
    one.train()
    saved = one.save(str(tmp_path / "checkpoint"))
    one.train()
    # A function or an instance that is sent again is another object, and the same setting.
    assert one.reset(sent({**SETTINGS, "lr": 1e-2}))
    one.restore(saved)
    result = one.train()
    assert one.algorithm is algorithm and algorithm.env_runner is runner
    assert (result["training_iteration"], lr(result)) == (2, 1e-2)


def test_settings_may_change_back(make: Any, tmp_path: Path) -> None:
    one = make()
    algorithm = one.algorithm
    saved = one.save(str(tmp_path / "checkpoint"))
    for rate in (1e-2, 1e-3, 1e-2):
        assert one.reset({**SETTINGS, "lr": rate})
        one.restore(saved)
        assert lr(one.train()) == rate
    assert one.algorithm is algorithm


def test_new_settings_without_a_checkpoint_are_another_trial(make: Any) -> None:
    one = make()
    algorithm = one.algorithm
    first = one.train()
    one.train()
    assert one.reset({**SETTINGS, "lr": 1e-2})
    result = one.train()
    assert one.algorithm is not algorithm and algorithm.env_runner.env.closed
    assert (result["training_iteration"], lr(result)) == (1, 1e-2)
    assert result["num_env_steps_sampled_lifetime"] == first["num_env_steps_sampled_lifetime"]
    assert one.algorithm.config.seed != algorithm.config.seed  # none was given: trials differ


@pytest.mark.parametrize("change", [{"optimizer": "sgd"}, {"env_config": {"episode_length": 4}}])
def test_a_reset_with_settings_of_the_build_builds_a_new_algorithm(make: Any, change: dict[str, Any]) -> None:
    one = make()
    algorithm = one.algorithm
    assert one.reset({**SETTINGS, **change})
    assert one.algorithm is not algorithm and algorithm.env_runner.env.closed
    name, value = next(iter(change.items()))
    assert getattr(one.algorithm.config, name) == value
    assert one.train()["training_iteration"] == 1


def test_a_callback_ends_its_trial_and_not_the_next_one_in_the_actor(make: Any, tmp_path: Path) -> None:
    def stop_once(*, algorithm: Any, result: Any, **kwargs: Any) -> None:
        if result["training_iteration"] == 2:
            algorithm.request_stop("solved")

    one = make(callbacks={"on_train_result": stop_once})
    saved = one.save(str(tmp_path / "checkpoint"))
    assert [one.train()["done"] for _ in range(2)] == [False, True]
    assert one.reset({**SETTINGS, "callbacks": {"on_train_result": stop_once}})
    one.restore(saved)
    assert not one.train()["done"]


def test_stop_closes_the_envs(make: Any) -> None:
    one = make()
    env = one.algorithm.env_runner.env
    one.stop()
    assert env.closed
