"""What `evaluation_config` changes: callbacks in each spelling, settings that RLlib reads there, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from corral.compat.rllib.algorithm import BCConfig, DQNConfig, MARWILConfig, PPOConfig, SACConfig
from corral.compat.rllib.callbacks import RLlibCallback
from corral.compat.rllib.config import AlgorithmConfig
from corral.compat.rllib.native import to_native
from corral.errors import ConfigError
from corral.exploration import Exploration


def small() -> PPOConfig:
    config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0).debugging(seed=0)
    return config.training(train_batch_size=100, minibatch_size=50, num_epochs=1)


class Evaluated(RLlibCallback):
    seen: list[bool]

    def on_episode_end(self, *, env_runner: Any, **kwargs: Any) -> None:
        self.seen.append(env_runner.config.in_evaluation)


class Trained(RLlibCallback):
    seen: list[bool]

    def on_episode_end(self, *, env_runner: Any, **kwargs: Any) -> None:
        self.seen.append(env_runner.config.in_evaluation)


def note(*, env_runner: Any, **kwargs: Any) -> None:
    Evaluated.seen.append(env_runner.config.in_evaluation)


@pytest.mark.parametrize(
    "settings",
    [
        {"callbacks": Evaluated},
        {"callbacks_class": Evaluated},
        {"callbacks_class": [Evaluated]},
        AlgorithmConfig.overrides(callbacks=Evaluated),
        AlgorithmConfig.overrides(callbacks_class=Evaluated),
        PPOConfig().callbacks(Evaluated),
        {"callbacks_class": None, "callbacks_on_episode_end": note},
        AlgorithmConfig.overrides(callbacks_class=None, callbacks_on_episode_end=note),
        PPOConfig().callbacks(on_episode_end=note),
    ],
    ids=lambda settings: type(settings).__name__ if isinstance(settings, AlgorithmConfig) else ",".join(settings),
)
def test_callbacks_of_evaluation_run_in_evaluation_only_and_in_place_of_the_ones_of_training(settings: Any) -> None:
    Evaluated.seen, Trained.seen = [], []
    config = small().callbacks(Trained)
    config.evaluation(evaluation_interval=1, evaluation_duration=2, evaluation_config=settings)
    with config.build() as algo:
        algo.train()
    assert Evaluated.seen == [True, True] and set(Trained.seen) == {False}


def test_functions_of_training_remain_where_evaluation_replaces_the_class() -> None:
    Evaluated.seen = []
    config = small().callbacks(Trained, on_episode_end=note)
    config.evaluation(evaluation_interval=1, evaluation_duration=2, evaluation_config={"callbacks_class": Evaluated})
    with config.build() as algo:
        algo.evaluate()
    assert Evaluated.seen == [True] * 4  # by the class, and by the function


@pytest.mark.parametrize(
    ("config", "ignored"),
    [
        (PPOConfig, {"lr": 0.5, "gamma": 0.5, "lambda": 0.5, "kl_coeff": 0.0, "minibatch_size": 7, "num_epochs": 99}),
        (PPOConfig, {"batch_mode": "complete_episodes", "rollout_fragment_length": 7, "train_batch_size": 1000}),
        (PPOConfig, {"model": {"fcnet_hiddens": [3]}, "num_workers": 3, "sample_timeout_s": 3.0}),
        (PPOConfig, {"evaluation_interval": 3, "evaluation_duration": 99, "min_time_s_per_iteration": 100}),
        (PPOConfig, {"num_learners": 2, "clip_rewards": True, "env_task_fn": len, "log_level": "DEBUG"}),
        (PPOConfig, {"policies_to_train": [], "learner_class": int, "keep_per_episode_custom_metrics": True}),
        (DQNConfig, {"lr": 0.5, "n_step": 3, "replay_buffer_config": {"capacity": 9}, "target_network_update_freq": 1}),
        (SACConfig, {"lr": 0.5, "actor_lr": 0.5, "initial_alpha": 2.0}),
        (BCConfig, {"lr": 0.5, "input": "sampler", "dataset_num_iters_per_learner": 3}),
        (MARWILConfig, {"lr": 0.5, "input": "sampler", "beta": 0.2, "output": None}),
    ],
)
def test_settings_without_effect_in_evaluation_are_ignored_there(config: Any, ignored: dict[str, Any]) -> None:
    made = (
        config()
        .environment("Pendulum-v1" if config is SACConfig else "CartPole-v1")
        .evaluation(evaluation_config={"explore": False, **ignored})
    )
    if issubclass(config, MARWILConfig):
        made.offline_data(input_="data")
    native = to_native(made)
    native.validate()
    assert native.evaluation_config == {"explore": False}
    if "lr" in ignored:
        assert made.get_evaluation_config_object().lr == 0.5  # what callbacks see as `env_runner.config`


def test_evaluation_plays_with_the_settings_that_it_reads() -> None:
    def to_one(agent_id: Any, episode: Any, **kwargs: Any) -> str:
        return "one"

    config = small().multi_agent(policies={"one", "two"}, policy_mapping_fn=lambda agent_id, *args, **kwargs: "two")
    own = {"num_envs_per_worker": 3, "multiagent": {"policy_mapping_fn": to_one, "policies_to_train": []}}
    found = to_native(config.evaluation(evaluation_config=own)).evaluation_config
    assert found == {"explore": True, "num_envs_per_env_runner": 3, "policy_mapping_fn": to_one}
    found = to_native(DQNConfig().evaluation(evaluation_config={"explore": True, "epsilon": 0.1})).evaluation_config
    assert found == {"explore": True, "exploration_config": {"type": "EpsilonGreedy", "epsilon_schedule": 0.1}}


class Noted(Exploration):
    """Draws from the policy, and keeps what RLlib's explorations read of its distribution."""

    seen: list[tuple[Any, ...]]

    def __init__(self, action_space: Any, *, scale: float, worker_index: int, **kwargs: Any) -> None:
        super().__init__(action_space, worker_index=worker_index, **kwargs)
        self.scale = scale

    def get_exploration_action(self, *, action_distribution: Any, timestep: int, explore: bool = True) -> Any:
        actions = action_distribution.sample() if explore else action_distribution.deterministic_sample()
        logp, entropy = action_distribution.sampled_action_logp(), action_distribution.entropy()
        assert np.array_equal(logp, action_distribution.logp(actions)) and (0 < entropy).all()
        assert not action_distribution.kl(action_distribution).any() and action_distribution.model is self.model
        self.seen.append((self.config.in_evaluation, self.worker_index, self.scale, explore))
        return actions, logp


def test_an_exploration_of_evaluation_gets_what_explorations_of_rllib_get() -> None:
    Noted.seen = []
    config = small().evaluation(
        evaluation_interval=1,
        evaluation_duration=1,
        evaluation_config={"explore": True, "exploration_config": {"type": Noted, "scale": 2.0}},
    )
    with config.build() as algo:
        algo.train()
    assert Noted.seen and set(Noted.seen) == {(True, 0, 2.0, True)}


def test_a_setting_that_only_training_can_have_is_refused_where_rllib_would_read_it() -> None:
    config = small().evaluation(evaluation_config={"observation_filter": "MeanStdFilter"})
    with pytest.raises(ConfigError, match="evaluation_config: transforms"):
        config.validate()


def test_dicts_of_evaluation_are_added_to_the_settings_that_are_there() -> None:
    config = DQNConfig().evaluation(evaluation_config={"env_config": {"a": 1}})
    config.evaluation(evaluation_config={"env_config": {"b": 2}, "exploration_config": {"type": "Random"}})
    assert config.evaluation_config == {
        "explore": False,
        "env_config": {"a": 1, "b": 2},
        "exploration_config": {"type": "Random"},
    }
    config.evaluation(evaluation_config={"exploration_config": {"type": "SoftQ", "temperature": 2.0}})
    assert config.evaluation_config["exploration_config"] == {"type": "SoftQ", "temperature": 2.0}
    assert config.evaluation(evaluation_config=None).evaluation_config is None


def test_the_env_of_a_config_for_evaluation_has_no_settings_of_the_env_of_training() -> None:
    own = PPOConfig().environment("Acrobot-v1", env_config={"y": 1})
    native = to_native(small().environment(env_config={"x": 1}).evaluation(evaluation_config=own))
    assert native.evaluation_config["env"] == "Acrobot-v1"
    assert native.evaluation_config["env_config"] == {"y": 1}


def test_a_config_as_evaluation_config_is_used_as_it_is() -> None:
    config = small().environment(env_config={"a": 1}).env_runners(explore=False)
    other = PPOConfig().environment(env_config={"b": 2}).debugging(seed=3)
    evaluated = config.evaluation(evaluation_config=other).get_evaluation_config_object()
    assert (evaluated.env, evaluated.env_config, evaluated.explore) == ("CartPole-v1", {"a": 1, "b": 2}, True)
    assert evaluated.in_evaluation and evaluated.get_evaluation_config_object() is None
    assert not other.in_evaluation
    native = to_native(config)
    assert native.evaluation_config == {"env_config": {"a": 1, "b": 2}, "explore": True, "seed": 3}


@pytest.mark.parametrize(("unit", "mode"), [("episodes", "complete_episodes"), ("timesteps", "truncate_episodes")])
def test_the_config_of_evaluation_says_what_its_runners_sample(unit: str, mode: str) -> None:
    config = small().evaluation(evaluation_duration_unit=unit, evaluation_num_env_runners=2)
    evaluated = config.get_evaluation_config_object()
    assert (evaluated.batch_mode, evaluated.num_env_runners, evaluated.evaluation_config) == (mode, 2, None)


Change = Callable[[AlgorithmConfig], Any]


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config.update_from_dict({"callbacks_class": Evaluated}),
        lambda config: config.update_from_dict({"callbacks_on_episode_end": note}),
        lambda config: setattr(config, "callbacks_on_episode_end", note),
        lambda config: config.__setitem__("callbacks", Evaluated),
    ],
)
def test_callbacks_of_training_have_the_same_spellings(change: Change) -> None:
    Evaluated.seen = []
    config = small()
    change(config)
    with config.build() as algo:
        algo.train()
    assert Evaluated.seen and not any(Evaluated.seen)


def test_evaluation_explores_in_as_many_sub_envs_as_training_unless_it_is_told_otherwise() -> None:
    config = small().env_runners(num_envs_per_env_runner=4).evaluation(evaluation_interval=1, evaluation_duration=2)
    with config.build() as algo:
        assert algo.train()["evaluation"]["explore"] is True
        (num_envs,) = algo.eval_env_runner_group.foreach_env_runner(lambda runner: runner.num_envs)
        assert num_envs == 4
    with config.copy(copy_frozen=False).env_runners(explore=False).build() as algo:
        assert algo.train()["evaluation"]["explore"] is False
