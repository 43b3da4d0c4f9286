"""When algorithms with a replay buffer begin to learn, and what they need of a loss and a module."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from corral import DQNConfig, NormalizeObservations, SACConfig
from corral.algorithms.dqn import DQN, dqn_loss
from corral.algorithms.off_policy import OffPolicyConfig
from corral.core.tree import map_tree
from corral.data.replay import ReplayBuffer, ReplayConfig
from corral.errors import ConfigError, LossError
from corral.modules.q_module import QModule
from corral.testing import CountingEnv, IdentityEnv

CONFIGS: dict[str, type[OffPolicyConfig]] = {"dqn": DQNConfig, "sac": SACConfig}


def config(algorithm: str, starts: int, **buffer: Any) -> OffPolicyConfig:
    """Return a config with episodes of three steps, each of which takes four rows of the ring: one only resets."""
    made = CONFIGS[algorithm]().environment(CountingEnv).rl_module(model_config={"fcnet_hiddens": [4]})
    made.training(
        num_steps_sampled_before_learning_starts=starts,
        train_batch_size_per_learner=8,
        replay_buffer_config={"capacity": 64, **buffer},
    )
    return made.env_runners(rollout_fragment_length=4).debugging(seed=0)


def steps_at_first_update(config: OffPolicyConfig, max_rounds: int = 40) -> int | None:
    """Return how many env steps had been sampled when the first update was made; `None` if none was made."""
    with config.build() as algo:
        for _ in range(max_rounds):
            algo.training_step()
            if algo.learner_group.weights_version:
                return algo.num_env_steps_sampled_lifetime
    return None


@pytest.mark.parametrize("starts", [50, 63, 64])
@pytest.mark.parametrize("type", ["uniform", "prioritized"])
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("algorithm", CONFIGS)
def test_learning_starts_after_as_many_steps_as_asked_for(algorithm: str, n_step: int, type: str, starts: int) -> None:
    made = config(algorithm, starts, type=type).training(n_step=n_step)
    assert steps_at_first_update(made) in range(starts, starts + 4)


@pytest.mark.parametrize("algorithm", CONFIGS)
def test_both_observations_of_a_batch_are_as_the_module_sees_them(algorithm: str) -> None:
    made = config(algorithm, 8).env_runners(transforms=[NormalizeObservations()])
    with made.build() as algo:
        algo.train()
        buffer, pipeline = algo.local_replay_buffer, algo.get_pipeline()
        before = buffer.get_rng_state()
        batch = algo._draw("default_policy")
        buffer.set_rng_state(before)
        stored: Any = buffer.sample(8, n_step=made.n_step, gamma=made.gamma)
        for name in ("obs", "next_obs"):
            np.testing.assert_array_equal(batch[name], pipeline.from_stored(stored[name]))
            assert not np.array_equal(batch[name], stored[name])


@pytest.mark.parametrize("runners", [{"num_env_runners": 2}, {"num_envs_per_env_runner": 3}])
@pytest.mark.parametrize("algorithm", CONFIGS)
def test_steps_of_several_runners_and_sub_envs_count(algorithm: str, runners: dict[str, int]) -> None:
    made = config(algorithm, 60).env_runners(**runners).engine("local")
    first = steps_at_first_update(made)
    assert first is not None and 60 <= first < 60 + 4 * max(runners.values())


def test_a_start_beyond_the_capacity_is_a_number_of_steps_too() -> None:
    assert steps_at_first_update(config("dqn", 100)) in range(100, 104)


def test_a_restored_buffer_still_knows_how_many_steps_it_got() -> None:
    made = config("dqn", 64).training(store_buffer_in_checkpoints=True).environment(IdentityEnv)
    with made.build() as algo, made.build() as restored:
        for _ in range(16):
            algo.training_step()
        restored.set_state(algo.get_state())
        version = restored.learner_group.weights_version
        assert algo.learner_group.weights_version == 1
        restored.training_step()
        assert restored.learner_group.weights_version == version + 1


def without_td_error(*args: Any, **kwargs: Any) -> Any:
    loss, reported = dqn_loss(*args, **kwargs)
    return loss, {name: value for name, value in reported.items() if name != "td_error"}


def mean_td_error(*args: Any, **kwargs: Any) -> Any:
    loss, reported = dqn_loss(*args, **kwargs)
    return loss, {**reported, "td_error": reported["td_error"].mean()}


def nested_td_error(*args: Any, **kwargs: Any) -> Any:
    loss, reported = dqn_loss(*args, **kwargs)
    return loss, {**reported, "td_error": reported["td_error"].unsqueeze(1)}


@pytest.mark.parametrize("type", ["uniform", "prioritized"])
@pytest.mark.parametrize(
    ("loss", "given"),
    [
        (without_td_error, "reported none"),
        (mean_td_error, "reported one number"),
        (nested_td_error, r"reported float32\[8, 1\]"),
    ],
)
def test_a_loss_that_reports_no_td_error_for_each_row_is_refused(loss: Any, given: str, type: str) -> None:
    class Custom(DQN):
        def make_loss(self, config: Any) -> Any:
            return partial(loss, double_q=False, huber=True)

    with (
        Custom(config("dqn", 16, type=type)) as algo,
        pytest.raises(LossError, match=f"'td_error', float32\\[8\\].*{given}"),
    ):
        algo.train()


def test_a_module_that_cannot_move_its_target_is_refused_when_the_algorithm_is_built() -> None:
    class Fixed(QModule):
        update_target = None  # type: ignore[assignment]

    with pytest.raises(ConfigError, match=r"Fixed must define update_target\(self, tau\)"):
        config("dqn", 16).rl_module(module_class=Fixed).build()


@pytest.mark.parametrize("n_step", [3, (2, 3)])
@pytest.mark.parametrize("algorithm", CONFIGS)
def test_batches_have_the_steps_and_the_discount_of_the_config(algorithm: str, n_step: Any) -> None:
    """Episodes have three steps, so transitions of three steps, and of fewer at the end of an episode."""
    seen: dict[int, set[float]] = {}

    def note(train_batch: Any) -> None:
        for num_steps, discount in zip(train_batch["num_steps"], train_batch["discounts"], strict=True):
            seen.setdefault(int(num_steps), set()).add(round(float(discount), 6))

    made = config(algorithm, 16).training(n_step=n_step, gamma=0.5).reporting(min_sample_timesteps_per_iteration=64)
    with made.callbacks(on_learn_on_batch=note).build() as algo:
        algo.train()
    assert seen == {1: {0.5}, 2: {0.25}, 3: {0.125}}


class LatestTwice(ReplayBuffer):
    """Draws each transition twice."""

    def sample(self, batch_size: int, **settings: Any) -> Any:
        batch = super().sample(batch_size // 2, **settings)
        return map_tree(lambda column: np.concatenate([column, column]), batch)


class DQNOfLatest(DQN):
    """DQN with a buffer of its own."""

    def make_replay_buffer(self, module_id: str, config: ReplayConfig) -> ReplayBuffer:
        return LatestTwice(config.capacity, seed=self.config.seed)


def test_an_algorithm_makes_a_buffer_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DQNConfig, "algo_class", DQNOfLatest)
    seen: list[Any] = []
    config = DQNConfig().environment("CartPole-v1").debugging(seed=0)
    config.training(num_steps_sampled_before_learning_starts=50, train_batch_size_per_learner=8)
    config.reporting(min_sample_timesteps_per_iteration=60)
    config.callbacks(on_learn_on_batch=lambda train_batch: seen.append(train_batch["obs"].copy()))
    with config.build() as algo:
        algo.train()
    assert seen and all((obs[:4] == obs[4:]).all() and len(obs) == 8 for obs in seen)


@pytest.mark.parametrize("kind", [LatestTwice, "my_buffers:Latest"])
def test_a_class_of_a_buffer_is_refused_with_the_place_where_it_belongs(kind: Any) -> None:
    config = DQNConfig().environment("CartPole-v1").training(replay_buffer_config={"type": kind})
    with pytest.raises(ConfigError, match="override make_replay_buffer in a subclass of the algorithm"):
        config.build()
