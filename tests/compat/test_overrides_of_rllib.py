"""Methods of RLlib's `Algorithm` that a class of a script overrides: called as RLlib does, or refused."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from corral import PPOConfig as NativePPOConfig
from corral.callbacks.callback import Callback
from corral.compat.rllib.algorithm import PPO, Algorithm, PPOConfig
from corral.compat.rllib.batch_infos import _waiting
from corral.compat.rllib.callbacks import RLlibCallback
from corral.compat.rllib.overrides import BY_SCRIPTS, CALLED, REFUSED, REFUSED_OF_EXPLORATIONS
from corral.errors import CallbackError, ConfigError, CorralError
from corral.exploration.base import Exploration


def small(algo_class: Any = None, **evaluation: Any) -> PPOConfig:
    config = PPOConfig(algo_class=algo_class).environment("CartPole-v1").env_runners(num_env_runners=0)
    config.training(train_batch_size=40, minibatch_size=40, num_epochs=1, model={"fcnet_hiddens": [8]})
    return config.evaluation(**evaluation)


# The tables.


def methods_of_rllib() -> Iterator[str]:
    """Yield the names that the classes of RLlib's algorithm define, read from their files."""
    found = find_spec("ray")
    if found is None or found.origin is None:
        pytest.skip("ray is not installed")
    for file, name in (
        ("rllib/algorithms/algorithm.py", "Algorithm"),
        ("rllib/utils/checkpoints.py", "Checkpointable"),
        ("tune/trainable/trainable.py", "Trainable"),
    ):
        tree = ast.parse((Path(found.origin).parent / file).read_text(encoding="utf-8"))
        (owner,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        yield from (node.name for node in owner.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def test_every_method_of_rllib_is_in_one_table() -> None:
    methods = {*methods_of_rllib()} - {"__init__", "__repr__"}
    assert len(methods) > 80 and methods <= CALLED | BY_SCRIPTS | REFUSED.keys()
    assert not CALLED & BY_SCRIPTS and not (CALLED | BY_SCRIPTS) & REFUSED.keys()


def test_what_is_called_is_there_for_super() -> None:
    assert all(hasattr(Algorithm, name) for name in CALLED)


@pytest.mark.parametrize("name", REFUSED)
def test_a_method_that_is_never_called_is_refused(name: str) -> None:
    mixin = type("Mixin", (), {name: lambda self, *args, **kwargs: None})
    with pytest.raises(ConfigError, match=rf"Mine\.{name}: Corral does not call this method: .{{8,}}\.$"):
        type("Mine", (mixin, PPO), {})(config=small())


# Training.


def test_a_step_and_log_result_make_the_result_that_callbacks_and_scripts_get() -> None:
    order: list[tuple[str, Any]] = []

    class Mine(PPO):
        def step(self) -> dict[str, Any]:
            result = super().step()
            order.append(("step", result["training_iteration"]))
            return {**result, "mine": 7}

        def log_result(self, result: dict[str, Any]) -> None:
            order.append(("log_result", result["mine"]))
            super().log_result(result)
            order.append(("logged", result["mine"]))

    class Seen(RLlibCallback):
        def on_train_result(
            self, *, algorithm: Any, result: dict[str, Any], metrics_logger: Any, **kwargs: Any
        ) -> None:
            order.append(("on_train_result", result["mine"]))
            assert algorithm.iteration == len(order) // 4 + 1
            result["mine"] += 1
            metrics_logger.log_value("logged_late", 1.0, reduce="sum")

    with small(Mine).callbacks(Seen).build() as algo:
        results = [algo.train() for _ in range(2)]
    assert [result["mine"] for result in results] == [8, 8]
    assert [result["logged_late"] for result in results] == [1.0, 1.0]
    calls = [("log_result", 7), ("on_train_result", 7), ("logged", 8)]
    assert order == [("step", 1), *calls, ("step", 2), *calls]


def test_log_result_alone_is_called_before_callbacks_of_the_result() -> None:
    class Mine(PPO):
        def log_result(self, result: dict[str, Any]) -> None:
            result["mine"] = 7
            super().log_result(result)

    class Seen(RLlibCallback):
        def on_train_result(self, *, result: dict[str, Any], **kwargs: Any) -> None:
            result["seen"] = result["mine"]

    with small(Mine).callbacks(Seen).build() as algo:
        assert algo.train()["seen"] == 7


def test_a_step_may_make_a_result_of_its_own_but_no_other_object() -> None:
    class Mine(PPO):
        returns: Any = None

        def step(self) -> Any:
            return self.returns

    with small(Mine).build() as algo:
        algo.returns = {"env_runners": {"episode_return_mean": 3.0}}
        assert algo.train()["episode_reward_mean"] == 3.0
        algo.returns = None
        with pytest.raises(CorralError, match=r"Mine\.step returned None: return a dict"):
            algo.train()


def test_a_method_may_be_assigned_to_an_object() -> None:
    with small().build() as algo:
        algo.training_step = lambda: algo.metrics.log_value("assigned", 3, reduce="sum")
        assert algo.train()["assigned"] == 3


def test_runners_are_restored_before_each_step_and_round() -> None:
    calls: list[Any] = []

    class Mine(PPO):
        def restore_env_runners(self, env_runner_group: Any) -> list[int]:  # type: ignore[override]
            found = super().restore_env_runners(env_runner_group)
            calls.append((env_runner_group is not None and env_runner_group._native is self._of_evaluation, found))
            return found

        @property
        def _of_evaluation(self) -> Any:
            return self.native.eval_env_runner_group

        def training_step(self) -> None:
            calls.append("step")
            super().training_step()

    with small(Mine, evaluation_interval=1, evaluation_duration=1).build() as algo:
        algo.train()
        assert calls == [(False, []), "step", (True, [])]
        # As after the restart of runner 1 while it sampled.
        algo.native._callbacks.fire(
            *("on_env_runners_recreated",),
            **{"algorithm": algo.native, "env_runner_group": algo.native.env_runner_group},
            **{"env_runner_indices": [1], "is_evaluation": False},
        )
        assert algo.restore_env_runners(algo.env_runner_group) == [1]
        assert algo.restore_env_runners(algo.env_runner_group) == []


# Evaluation.


def test_evaluation_during_training_calls_evaluate_and_takes_its_metrics() -> None:
    order: list[str] = []

    class Mine(PPO):
        def _before_evaluate(self) -> None:
            order.append("before")

        def evaluate(self, parallel_train_future: Any = None) -> dict[str, Any]:
            assert parallel_train_future is None
            order.append("evaluate")
            found = super().evaluate(parallel_train_future)
            return {**found, "mine": len(found["env_runners"]["episode_returns"])}

    config = small(Mine, evaluation_interval=2, evaluation_duration=3)
    config.callbacks(on_evaluate_start=lambda **kw: order.append("start"))
    with config.build() as algo:
        assert "mine" not in algo.train()["evaluation"] and order == []
        assert algo.train()["evaluation"]["mine"] == 3
        assert order == ["evaluate", "before", "start"]
        kept = algo.train()["evaluation"]
        assert kept["mine"] == 3 and not kept["fresh"]
        assert algo.evaluate()["mine"] == 3


def test_evaluate_may_play_nothing_but_must_return_metrics() -> None:
    class Old(PPO):
        found: Any = None

        def evaluate(self) -> Any:  # type: ignore[override]
            return self.found

    with small(Old, evaluation_interval=1).build() as algo:
        algo.found = {"score": 2.0}
        assert algo.train()["evaluation"]["score"] == 2.0
        algo.found = None
        with pytest.raises(CorralError, match="evaluate returned None: return the metrics of the round, a dict"):
            algo.train()


@pytest.mark.parametrize("name", ["evaluate", "_before_evaluate"])
def test_a_class_with_its_own_evaluation_cannot_evaluate_while_it_trains(name: str) -> None:
    cls = type("Mine", (PPO,), {name: lambda self, parallel_train_future=None: {}})
    config = small(cls, evaluation_interval=1, evaluation_parallel_to_training=True, evaluation_num_env_runners=1)
    with pytest.raises(ConfigError, match=rf"Mine\.{name}.*evaluation_parallel_to_training"):
        config.build()


# Checkpoints and the end.


def test_save_and_restore_call_the_methods_of_checkpoints(tmp_path: Path) -> None:
    class Mine(PPO):
        note = "begun"

        def save_checkpoint(self, checkpoint_dir: str) -> str:
            (Path(checkpoint_dir) / "note.txt").write_text(self.note)
            super().save_checkpoint(checkpoint_dir)
            return checkpoint_dir

        def load_checkpoint(self, checkpoint_dir: str) -> None:
            self.note = (Path(checkpoint_dir) / "note.txt").read_text()
            super().load_checkpoint(checkpoint_dir)

    with small(Mine).build() as algo:
        algo.train()
        algo.note = "kept"
        saved = algo.save(f"file://{tmp_path}/new/here")
        assert saved.checkpoint.path == f"{tmp_path}/new/here"
        algo.note = "changed"
        algo.train()
        algo.restore(saved)
        assert algo.note == "kept" and algo.iteration == 1
        algo.save_checkpoint = lambda checkpoint_dir: {"note": 1}
        with pytest.raises(ConfigError, match=r"save_checkpoint returned \{'note': 1\}: write files into"):
            algo.save(tmp_path / "other")


def test_a_trial_of_tune_saves_restores_and_changes_its_config_by_the_methods_of_the_class(tmp_path: Path) -> None:
    """The calls that Tune makes of a trial, without Tune around it."""
    pytest.importorskip("ray")
    from corral.compat.rllib.tune import make_trainable

    class Mine(PPO):
        note = "begun"

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            super().save_checkpoint(checkpoint_dir)
            (Path(checkpoint_dir) / "note.txt").write_text(self.note)

        def load_checkpoint(self, checkpoint_dir: str) -> None:
            super().load_checkpoint(checkpoint_dir)
            self.note = (Path(checkpoint_dir) / "note.txt").read_text()

        def reset_config(self, new_config: Any) -> bool:
            self.note = f"lr={new_config['lr']}"
            return True

    trials = [make_trainable(Mine)(small(Mine).to_dict()) for _ in range(2)]
    trials[0].train()
    assert trials[0].reset({"lr": 0.5}) and trials[0].algorithm.note == "lr=0.5"
    trials[0].save(str(tmp_path))
    trials[1].restore(str(tmp_path))
    assert trials[1].algorithm.note == "lr=0.5" and trials[1].algorithm.iteration == 1
    for trial in trials:
        trial.stop()


def test_stop_calls_cleanup_and_ends_everything_whatever_it_does() -> None:
    class Mine(PPO):
        def cleanup(self) -> None:
            raise RuntimeError("own cleanup")

    algo = small(Mine).build()
    with pytest.raises(RuntimeError, match="own cleanup"):
        algo.stop()
    with pytest.raises(CorralError, match="was stopped"):
        algo.native.train()


def test_a_class_is_kept_if_its_config_names_its_base(tmp_path: Path) -> None:
    with Named(config=small()) as algo:
        path = algo.save_to_path(tmp_path / "saved")
    with Algorithm.from_checkpoint(path) as again:
        assert type(again) is Named


class Named(PPO):
    """An algorithm that a checkpoint can name."""


# Envs.


class Checks(PPO):
    seen: list[Any] = []  # noqa: RUF012

    @staticmethod
    def validate_env(env: Any, env_context: Any) -> None:
        Checks.seen.append((type(env.unwrapped).__name__, env_context.vector_index, env_context["limit"]))
        if env_context["limit"] < 0:
            raise ValueError("limit below 0")


class Limited(gym.Wrapper[Any, Any, Any, Any]):
    def __init__(self, config: Any) -> None:
        super().__init__(gym.make("CartPole-v1"))


def limited(limit: int, **env_runners: Any) -> PPOConfig:
    config = small(Checks, evaluation_interval=1, evaluation_duration=1)
    config.evaluation(evaluation_config={"env_config": {"limit": 100}})  # whose envs are not validated, as in RLlib
    return config.environment(Limited, env_config={"limit": limit}).env_runners(**env_runners)


def test_envs_that_sample_for_training_are_validated() -> None:
    Checks.seen.clear()
    with limited(3, num_envs_per_env_runner=2).build() as algo:
        assert Checks.seen == [("CartPoleEnv", 0, 3), ("CartPoleEnv", 1, 3)]
        algo.train()
        assert len(Checks.seen) == 2
    with pytest.raises(CallbackError, match="limit below 0"):
        limited(-1).build()


def test_a_validation_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Checks\.validate_env.*gym_env_vectorize_mode='async'"):
        limited(3, gym_env_vectorize_mode="async").build()
    cls = type("Mine", (PPO,), {"validate_env": lambda self, env, env_context: None})
    with pytest.raises(ConfigError, match=r"Mine\.validate_env.*add @staticmethod"):
        small(cls).build()


# Corral's own algorithms.


def test_an_algorithm_of_corral_that_overrides_evaluate_is_asked_too() -> None:
    import corral

    class Mine(corral.PPO):
        def evaluate(self) -> Any:
            return {**super().evaluate(), "mine": 1}

    class Config(corral.PPOConfig):
        @property
        def algo_class(self) -> Any:
            return Mine

    config = Config(env="CartPole-v1", evaluation_interval=1, evaluation_duration=1)
    config.training(train_batch_size_per_learner=64, minibatch_size=64, num_epochs=1)
    with config.callbacks(Callback).build() as algo:
        assert algo.train()["evaluation"]["mine"] == 1


# Explorations.


class Own(Exploration):
    def __init__(
        self,
        action_space: Any,
        *,
        framework: str,
        policy_config: Any,
        model: Any,
        num_workers: int,
        worker_index: int,
        constructor_arg: str = "",
    ) -> None:
        assert policy_config["exploration_config"]["constructor_arg"] == constructor_arg
        super().__init__(
            action_space,
            framework=framework,
            policy_config=policy_config,
            model=model,
            num_workers=num_workers,
            worker_index=worker_index,
        )

    def get_exploration_action(self, *, action_distribution: Any, timestep: Any, explore: bool = True) -> Any:
        assert self.num_envs == 3 and self.rng is action_distribution.rng and self.policy_config["lr"] == 0.25
        assert type(self.config) is NativePPOConfig  # as explorations of Corral have it, from which a class may derive
        action = action_distribution.sample() if explore else action_distribution.deterministic_sample()
        return action, action_distribution.logp(action)


def exploring(kind: Any, **settings: Any) -> PPOConfig:
    config = small().training(lr=0.25).env_runners(num_envs_per_env_runner=3)
    return config.exploration(exploration_config={"type": kind, **settings})


def test_an_exploration_may_have_exactly_the_constructor_of_rllib() -> None:
    with exploring(Own, constructor_arg="value").build() as algo:
        assert algo.train()["num_env_steps_sampled_lifetime"] > 0


@pytest.mark.parametrize("name", REFUSED_OF_EXPLORATIONS)
def test_a_method_of_an_exploration_that_is_never_called_is_refused(name: str) -> None:
    base = type("Base", (Own,), {name: lambda self, *args, **kwargs: None})
    cls = type("Mine", (base,), {})  # which inherits it from a class of the script
    with pytest.raises(ConfigError, match=rf"exploration Mine\.{name}: Corral does not call this method: override"):
        exploring(cls, constructor_arg="value").build()


# Infos of batches.


class Infos(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole whose every second step has an info: the observation before the step."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.num_steps, self.before = 0, np.zeros(4)

    def reset(self, **settings: Any) -> Any:
        self.before, info = super().reset(**settings)
        return self.before, info

    def step(self, action: Any) -> Any:
        before = self.before
        self.before, *others, _ = super().step(action)
        self.num_steps += 1
        return self.before, *others, {"before": before} if self.num_steps % 2 else {}


def test_infos_are_in_the_batches_that_callbacks_are_shown() -> None:
    seen: list[tuple[Any, Any]] = []

    def look(train_batch: Any, **kwargs: Any) -> None:
        seen.extend(zip(train_batch["obs"], train_batch["infos"], strict=True))

    config = small().environment(Infos).callbacks(on_learn_on_batch=look).training(minibatch_size=20)
    with config.build() as algo:
        algo.train()
        algo.train()
        assert len(seen) == 80 and len(_waiting) == 20
    assert not _waiting
    with_info = [(obs, info) for obs, info in seen if info]
    assert len(with_info) == 40 and all(np.array_equal(obs, info["before"]) for obs, info in with_info)


def test_infos_cost_nothing_where_no_callback_is_shown_batches() -> None:
    with small().environment(Infos).build() as algo:
        assert not algo.native.READS_INFOS and algo.native.batch_infos is None
        algo.train()
    assert not _waiting
