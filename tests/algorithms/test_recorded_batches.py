"""Algorithms with a replay buffer that learn from recorded data: alone at first, then mixed with what they sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from corral import Algorithm, Callback, DQNConfig, IQLConfig, NormalizeObservations, PPOConfig, SACConfig, TD3Config
from corral.algorithms.registry import config_class
from corral.errors import ConfigError, DataError
from exact_runs import Drift

MARK = 100.0
"""First entry of the observations in the recorded data; observations of the env are far below."""


BOX = ("SAC", "TD3", "CrossQ")
"""Algorithms that get Box actions here."""


def recorded(is_box: bool, num_steps: int = 400) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(num_steps, 3)).astype(np.float32)
    obs[:, 0] = MARK
    actions = rng.uniform(-1, 1, (num_steps, 2)).astype(np.float32) if is_box else rng.integers(0, 3, num_steps)
    ends = np.arange(1, num_steps + 1) % 10 == 0
    return {"obs": obs, "actions": actions, "rewards": rng.normal(size=num_steps), "terminated": ends}


def with_data(algo: str, **training: Any) -> Any:
    """Return a config that learns from data for 12 updates, 4 in an iteration, and then samples 40 steps at a time."""
    is_box = algo in BOX
    config: Any = config_class(algo)().environment(Drift, env_config={"box": is_box}).debugging(seed=1)
    config.offline_data(input_=recorded(is_box)).learners(num_threads=1)
    critics = {"critic_hiddens": [8, 8]} if algo == "CrossQ" else {}  # which are wide by default
    config.rl_module(model_config={"fcnet_hiddens": [8], **critics})
    config.reporting(min_sample_timesteps_per_iteration=40)
    small = {
        "train_batch_size_per_learner": 16,
        "num_steps_sampled_before_learning_starts": 20,
        "num_offline_updates": 12,
        "num_updates_per_iteration": 4,
    }
    if "num_offline_updates" in training and training["num_offline_updates"] is None:
        del small["num_steps_sampled_before_learning_starts"]  # it has no effect
    return config.training(**{**small, **training})


class CountMarks(Callback):
    """Keeps the share of recorded steps in each batch."""

    shares: ClassVar[list[float]] = []

    def on_learn_on_batch(self, *, train_batch: Any, **kwargs: Any) -> None:
        self.shares.append(float((np.asarray(train_batch["obs"])[:, 0] == MARK).mean()))


ALGOS = ("SAC", "TD3", "CrossQ", "DQN", "IQL", "CQL")


@pytest.mark.parametrize("algo", ALGOS)
def test_the_data_comes_first_alone_and_then_in_each_batch(algo: str) -> None:
    CountMarks.shares = shares = []
    with with_data(algo, recorded_fraction=0.25).callbacks(CountMarks).build() as algorithm:
        for iteration in range(1, 4):
            result = algorithm.train()
            assert len(shares) == 4 * iteration and set(shares) == {1.0}
            assert result["num_env_steps_sampled_lifetime"] == 0
            # The first steps that are sampled are of the policy that the data gave.
            assert result["runner_group"]["weights_version"] == algorithm.learner_group.weights_version == 4 * iteration
        shares.clear()
        result = algorithm.train()
        assert result["num_env_steps_sampled_lifetime"] == 40
        assert result["env_runners"]["num_env_steps_sampled"] == 40
    assert shares and set(shares) == {0.25}


def test_all_of_the_data_or_none_of_it() -> None:
    for fraction in (0.0, 1.0):
        CountMarks.shares = shares = []
        config = with_data("SAC").copy(num_offline_updates=0, num_updates_per_iteration=1000)
        config.training(recorded_fraction=fraction)
        with config.callbacks(CountMarks).build() as algorithm:
            assert algorithm.train()["num_env_steps_sampled_lifetime"] == 40
        assert shares and set(shares) == {fraction}


@pytest.mark.parametrize("algo", ["SAC", "DQN"])
def test_without_a_number_of_updates_nothing_is_ever_sampled(algo: str) -> None:
    with with_data(algo, num_offline_updates=None).build() as algorithm:
        results = [algorithm.train() for _ in range(5)]
        assert algorithm.replay_buffers == {} and algorithm.env_runner_group.engine_name == "none"
        # The steps of the batches count, so that schedules and stop criteria have a clock.
        assert results[-1]["num_env_steps_sampled_lifetime"] == 5 * 4 * 16


def test_numbers_of_updates_that_change_count_from_the_next_iteration_on() -> None:
    with with_data("SAC", num_offline_updates=None).build() as algorithm:
        algorithm.train()
        algorithm.reconfigure(num_updates_per_iteration=3, train_batch_size_per_learner=32)
        result = algorithm.train()
        assert result["learners"]["__all_modules__"]["num_module_steps_trained"] == 3 * 32
        assert result["num_env_steps_sampled_lifetime"] == 4 * 16 + 3 * 32
        with pytest.raises(ConfigError, match="num_offline_updates can only be set before building"):
            algorithm.reconfigure(num_offline_updates=20)


def test_num_updates_of_none_is_one_pass_over_the_data() -> None:
    with with_data("SAC", num_offline_updates=60, num_updates_per_iteration=None).build() as algorithm:
        assert algorithm.train()["learners"]["__all_modules__"]["num_module_steps_trained_lifetime"] == 400
        for num_updates in (50, 60):
            algorithm.train()
            assert algorithm.recorded is not None and algorithm.recorded.num_updates == num_updates
        assert algorithm.train()["num_env_steps_sampled_lifetime"] == 40


def test_schedules_stand_still_while_nothing_is_sampled() -> None:
    lr = [[0, 1e-3], [1, 0.5]]
    with with_data("SAC", critic_lr=lr).build() as algorithm:
        rates = [algorithm.train()["learners"]["default_policy"]["critic_optimizer_learning_rate"] for _ in range(4)]
    assert rates[:3] == [1e-3] * 3 and rates[3] == 0.5


def test_targets_move_by_the_steps_of_the_batches() -> None:
    """With a batch of 16 and a frequency of 40, the target is the network after every third update."""
    config = with_data("DQN", target_network_update_freq=40, num_updates_per_iteration=1, lr=0.01)
    with config.build() as algorithm:
        module: Any = algorithm.get_module()
        moved, before = [], None
        for _ in range(9):
            algorithm.train()
            now = [value.clone() for name, value in module.state_dict().items() if "target" in name]
            moved.append(before is not None and any(not np.array_equal(a, b) for a, b in zip(now, before, strict=True)))
            before = now
    assert moved == [False, False, True] * 3


def test_rows_keep_together_where_sampled_and_recorded_ones_are_mixed() -> None:
    class SeesMarks(Callback):
        def on_learn_on_batch(self, *, train_batch: Any, **kwargs: Any) -> None:
            marks = [np.asarray(train_batch[name])[:, 0] == MARK for name in ("obs", "next_obs")]
            seen.extend(np.array_equal(mark, np.asarray(train_batch["recorded"]) > 0) for mark in marks)
            shares.append(float(marks[0].mean()))

    seen: list[bool] = []
    shares: list[float] = []
    with with_data("DQN", imitation_coeff=1.0, recorded_fraction=0.3).callbacks(SeesMarks).build() as algorithm:
        for _ in range(4):
            algorithm.train()
    assert all(seen) and set(shares) == {1.0, 5 / 16}


def test_no_two_buffers_draw_the_same_numbers() -> None:
    with with_data("DQN").copy(validation_fraction=0.2).build() as algorithm:
        assert algorithm.recorded is not None
        data = algorithm.recorded.modules["default_policy"]
        buffers: list[Any] = [algorithm.local_replay_buffer, data.train, data.validation]
        assert len({buffer.get_rng_state()["inc"] for buffer in buffers}) == 3  # which generators of one seed share


def test_priorities_match_the_sampled_steps() -> None:
    def errors_by_origin(module: Any, batch: Any, coefficients: Any, default_loss: Any) -> Any:
        loss, reported = default_loss(module, batch, coefficients)[:2]
        is_recorded = batch["obs"][:, 0] == MARK
        return loss, {**reported, "td_error": torch.where(is_recorded, 50.0, 0.25)}

    buffer_config = {"type": "prioritized", "capacity": 64, "alpha": 1.0, "epsilon": 1e-3}
    with with_data("DQN", replay_buffer_config=buffer_config, loss=errors_by_origin).build() as algorithm:
        for _ in range(5):
            algorithm.train()
        buffer: Any = algorithm.local_replay_buffer
        assert buffer.max_priority == 1.0  # of steps never drawn; no error of a recorded step came here
        priorities = buffer.get_state()["priorities"]
        assert (np.abs(priorities - 0.251) < 1e-6).sum() > 20
    config = with_data("DQN", replay_buffer_config={"type": "prioritized", "capacity": 64, "alpha": 1.0})
    config.reporting(min_sample_timesteps_per_iteration=200)  # rows of the ring are used again
    with config.build() as algorithm:
        for _ in range(5):
            algorithm.train()
        assert np.isfinite(algorithm.train()["learners"]["default_policy"]["td_error_mean"])


def test_actions_come_from_the_policy_once_it_has_learned() -> None:
    assert with_data("SAC").default_exploration["random_timesteps"] == 0
    assert with_data("TD3").default_exploration["random_timesteps"] == 0
    assert with_data("DQN").default_exploration["initial_epsilon"] == 0.02
    assert with_data("DQN", num_offline_updates=0).default_exploration["initial_epsilon"] == 1.0
    assert with_data("SAC", num_offline_updates=0).default_exploration["random_timesteps"] == 20


@pytest.mark.slow_cases("4")
@pytest.mark.parametrize("num_before", [1, 4])
@pytest.mark.parametrize("algo", ALGOS)
def test_training_continues_exactly_before_and_after_the_first_step(algo: str, num_before: int, tmp_path: Path) -> None:
    config = with_data(algo, store_buffer_in_checkpoints=True)
    with config.build() as algorithm:
        for _ in range(num_before):
            algorithm.train()
        path = algorithm.save(tmp_path / "checkpoint")
        if num_before == 1:  # the env begins again where it was restored
            expected = [algorithm.train()["learners"] for _ in range(2)]
        else:
            expected = []
    with Algorithm.from_checkpoint(path, input_=recorded(algo in BOX)) as restored:
        found = [restored.train() for _ in range(2)]
    if num_before == 1:
        assert [result["learners"] for result in found] == expected
        assert restored.num_env_steps_sampled_lifetime == 0
    else:
        assert restored.num_env_steps_sampled_lifetime == 120


def test_observations_are_normalized_by_the_data_and_then_by_what_is_sampled() -> None:
    config = with_data("SAC").env_runners(transforms=[NormalizeObservations()])
    with config.build() as algorithm:

        def mean() -> float:
            return float(
                algorithm.modules.get_transform_states()["default_policy"]["NormalizeObservations"]["mean/"][0]
            )

        assert mean() == pytest.approx(MARK)
        for _ in range(4):
            algorithm.train()
        assert 0.8 * MARK < mean() < MARK


@pytest.mark.parametrize("algo", ALGOS)
def test_the_loss_of_validation_episodes_neither_depends_on_a_checkpoint_nor_changes_training(
    algo: str, tmp_path: Path
) -> None:
    with with_data(algo).offline_data(validation_fraction=0.25).build() as algorithm:
        algorithm.train()
        path = algorithm.save(tmp_path / "checkpoint")
        expected = [algorithm.train()["learners"]["default_policy"] for _ in range(2)]
    with Algorithm.from_checkpoint(path, input_=recorded(algo in BOX)) as restored:
        assert [restored.train()["learners"]["default_policy"] for _ in range(2)] == expected
    assert np.isfinite(expected[0]["validation_loss"])


def test_a_run_without_data_can_continue_with_data(tmp_path: Path) -> None:
    data = recorded(is_box=True)
    config = with_data("SAC", num_offline_updates=0)
    config = config.copy(input_=None, recorded_fraction=0.5, num_updates_per_iteration=1000)
    with config.build() as algorithm:
        algorithm.train()
        path = algorithm.save(tmp_path / "checkpoint")
    with Algorithm.from_checkpoint(path, input_=data) as restored:
        assert restored.train()["num_env_steps_sampled_lifetime"] == 80


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: SACConfig().environment("Pendulum-v1").training(recorded_fraction=0.2), "recorded_fraction.*input_"),
        (lambda: SACConfig().environment("Pendulum-v1").training(num_offline_updates=5), "num_offline_updates.*input_"),
        (lambda: with_data("DQN", num_offline_updates=None, recorded_fraction=0.3), "recorded_fraction.*env steps"),
        (lambda: PPOConfig().environment("CartPole-v1").offline_data(input_="x"), "PPO does not learn from recorded"),
        (lambda: with_data("DQN").rl_module(model_config={"use_lstm": True}), "with memory learn from recorded data"),
        (lambda: with_data("TD3", num_offline_updates=None).environment(None), "observation_space"),
        (lambda: IQLConfig().environment("CartPole-v1"), "IQL learns from recorded data, and none was given"),
    ],
)
def test_what_cannot_be_is_refused(config: Any, message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        config().build()
    assert DQNConfig().samples and not IQLConfig().samples and TD3Config().recorded_fraction == 0.5
