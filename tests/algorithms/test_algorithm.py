"""What holds for every algorithm: building, the result, acting, ending."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from at_least import at_least
from corral import Module, PPOConfig
from corral.core.metrics.logger import MetricsError
from corral.core.tree import Tree
from corral.errors import CallbackError, ConfigError, CorralError, LossError
from corral.runs.loggers import Run, default_loggers
from corral.testing import CountingEnv
from small import small as small_run


def small(env: Any = "CartPole-v1", **env_config: Any) -> PPOConfig:
    return small_run(env, env_config=env_config)


class Dropout(Module):
    """A module whose outputs are random in training mode."""

    def __init__(self, observation_space: Any, action_space: Any, model_config: Mapping[str, Any]) -> None:
        super().__init__(observation_space, action_space, model_config)
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.BatchNorm1d(64))
        self.policy_head, self.value_head = nn.Linear(64, 2), nn.Linear(64, 1)

    def policy(self, obs: Tree) -> Tensor:
        outputs: Tensor = self.policy_head(self.body(obs))
        return outputs

    def value(self, obs: Tree) -> Tensor:
        values: Tensor = self.value_head(self.body(obs))
        return values.squeeze(-1)


def test_acting_and_values_leave_dropout_and_batch_statistics_alone() -> None:
    with small().rl_module(Dropout).build() as algorithm:
        algorithm.train()
        obs = np.ones((1, 4), np.float32)
        statistics = algorithm.get_module().body[2].running_mean.clone()  # type: ignore[index, union-attr]
        values = [algorithm.learner_group.values("default_policy", obs).item() for _ in range(5)]
        assert len(set(values)) == 1
        actions = {algorithm.compute_single_action(obs[0], explore=False) for _ in range(20)}
        assert len(actions) == 1
        assert torch.equal(algorithm.get_module().body[2].running_mean, statistics)  # type: ignore[index, union-attr, arg-type]


class ClosingEnv(CountingEnv):
    """An env that counts how many of its kind are open."""

    open_envs: ClassVar[int] = 0

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__(config)
        config = config or {}
        if config.get("unmade") == getattr(config, "vector_index", 0):
            raise OSError("out of licences")
        if "action_space" in config:
            self.action_space = config["action_space"]
        if config.get("uneven") and getattr(config, "vector_index", 0):
            self.observation_space = spaces.Box(-1.0, 1e6, (3,), np.float32)
        type(self).open_envs += 1

    def close(self) -> None:
        type(self).open_envs -= 1


def fail(**_: Any) -> None:
    raise RuntimeError("not today")


@pytest.mark.parametrize(
    "config",
    [
        small(ClosingEnv, unmade=1),
        small(ClosingEnv, uneven=True),
        small(ClosingEnv, action_space=spaces.Dict({"a": spaces.Text(2)})),
        small(ClosingEnv, action_space=spaces.Box(-np.inf, np.inf, (1,))).rl_module(
            model_config={"action_bounds": "squash"}
        ),
        small(ClosingEnv).callbacks(on_environment_created=fail),
        small(ClosingEnv).callbacks(on_algorithm_init=fail),
        small(ClosingEnv).env_runners(num_env_runners=2).engine("local").callbacks(on_algorithm_init=fail),
    ],
)
def test_a_build_that_fails_closes_its_envs(config: PPOConfig) -> None:
    ClosingEnv.open_envs = 0
    with pytest.raises((CorralError, RuntimeError)):
        config.build()
    assert ClosingEnv.open_envs == 0


def test_stopping_continues_when_an_env_cannot_be_closed() -> None:
    class StubbornEnv(ClosingEnv):
        def close(self) -> None:
            super().close()
            raise OSError("the simulator hangs")

    ClosingEnv.open_envs = StubbornEnv.open_envs = 0
    with (
        small(StubbornEnv)
        .env_runners(num_env_runners=3, num_envs_per_env_runner=1)
        .engine("local")
        .build() as algorithm
    ):
        assert StubbornEnv.open_envs == 3
        algorithm.train()
    assert StubbornEnv.open_envs == 0
    assert algorithm.env_runner_group.num_healthy_remote_workers == 0


def test_weights_that_an_update_changed_before_it_failed_reach_the_runner() -> None:
    with small().build() as algorithm:
        group, learner_loss = algorithm.learner_group, algorithm.make_loss(algorithm.config)
        calls = 0

        def loss(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            value, scalars = learner_loss(*arguments)  # type: ignore[call-arg]
            return (value if calls == 1 else value * float("nan")), scalars

        group.set_losses({"default_policy": loss})
        version = group.weights_version
        with pytest.raises(LossError):
            algorithm.train()
        assert group.weights_version == version + 1
        algorithm.sync_weights()
        assert algorithm.env_runner is not None
        mine, trained = algorithm.env_runner.module.state_dict(), algorithm.get_module().state_dict()
        assert all(torch.equal(mine[name], trained[name]) for name in at_least(1, trained))


def test_the_result_counts_the_time_of_its_own_event() -> None:
    def linger(result: dict[str, Any]) -> None:
        until = time.perf_counter() + 0.05
        while time.perf_counter() < until:
            pass

    with small().callbacks(on_train_result=linger).build() as algorithm:
        results = [algorithm.train() for _ in range(2)]
    for result in results:
        timers = result["timers"]
        assert 0.05 <= timers["callbacks_s"] <= timers["iteration_s"]
        assert sum(value for name, value in timers.items() if name.endswith("_share")) == pytest.approx(1)
    assert results[1]["time_total_s"] >= 0.1


@pytest.mark.parametrize("name", ["timers", "config", "evaluation", "training_iteration"])
def test_names_of_the_result_are_not_for_metrics(name: str) -> None:
    def log(metrics_logger: Any) -> None:
        metrics_logger.log_value((name, "mine"), 1.0)

    with (
        small().callbacks(on_train_result=log).build() as algorithm,
        pytest.raises(CallbackError, match=f"on_train_result.*{name}/mine.*for something else") as caught,
    ):
        algorithm.train()
    assert isinstance(caught.value.__cause__, MetricsError)


def test_a_result_may_be_emptied_and_filled_by_a_callback() -> None:
    def keep_little(result: dict[str, Any]) -> None:
        result.clear()
        result["mine"] = 1
        result["timers"] = {"mine": 2.0}

    with small().callbacks(on_train_result=keep_little).build() as algorithm:
        result = algorithm.train()
    names = {"mine", "timers", "bottleneck", "time_total_s", "fault_tolerance", "early_means"}  # a mean is still early
    assert result.keys() == names
    assert result["timers"]["mine"] == 2.0 and result["timers"]["iteration_s"] > 0


def test_the_result_says_which_engine_runs() -> None:
    with small().build() as algorithm:
        assert algorithm.train()["engine"] == "embedded"
    with small().env_runners(num_env_runners=2).engine("local").build() as algorithm:
        result = algorithm.train()
    assert result["engine"] == "local"
    assert result["fault_tolerance"]["num_healthy_workers"] == 2


@pytest.mark.parametrize("device", ["gpu", pytest.param("cuda", marks=pytest.mark.skipif("torch.cuda.is_available()"))])
def test_a_device_that_is_not_there_is_refused_before_anything_starts(device: str) -> None:
    with pytest.raises(ConfigError, match=f"device='{device}'"):
        small().learners(device=device).validate()


@pytest.mark.skipif("not torch.cuda.is_available()")
def test_auto_takes_cuda_and_trains_there() -> None:
    with small().build() as algorithm:
        algorithm.train()
        assert next(algorithm.get_module().parameters()).is_cuda


def test_two_runs_of_one_second_take_two_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = small()
    with Run(config, None, default_loggers()) as one, Run(config, None, default_loggers()) as other:
        assert one.path != other.path
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_actions_of_a_batch_lie_in_the_space() -> None:
    with small("Pendulum-v1").build() as algorithm:
        actions = algorithm.compute_actions(np.zeros((5, 3), np.float32))
        assert actions.shape == (5, 1)
        assert all(spaces.Box(-2, 2, (1,)).contains(action) for action in actions)
        greedy = [algorithm.compute_single_action(np.zeros(3, np.float32), explore=False).item() for _ in range(3)]
        assert len(set(greedy)) == 1


class Drawing(CountingEnv):
    """Notes what the global generators give when it is made, as an env does that uses them."""

    drawn: ClassVar[list[tuple[float, float, float]]] = []

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__(config)
        self.drawn.append((random.random(), float(np.random.random()), torch.rand(()).item()))


def test_building_seeds_the_global_generators_of_python_numpy_and_torch() -> None:
    def drawn(seed: int, before: int) -> list[tuple[float, float, float]]:
        for seed_generator in (random.seed, np.random.seed, torch.manual_seed):
            seed_generator(before)
        Drawing.drawn.clear()
        PPOConfig().environment(Drawing).env_runners(num_envs_per_env_runner=1).debugging(seed=seed).build().stop()
        return [*Drawing.drawn]

    first = drawn(3, before=1)
    assert first and first == drawn(3, before=2)
    assert not {value for values in first for value in values} & {v for values in drawn(4, before=1) for v in values}
