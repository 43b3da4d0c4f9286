"""The config: setters, types, copies, dictionaries, and the contradictions that validate() refuses."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from at_least import at_least
from corral import AlgorithmConfig, Callback, DQNConfig, PPOConfig
from corral.algorithms.registry import config_class, config_from_dict
from corral.core.space_descriptions import describe_space
from corral.errors import ConfigError
from corral.learners.optimizer_settings import optimizer_class
from corral.modules.module import ActorCritic
from corral.testing import CountingEnv


def valid() -> PPOConfig:
    return PPOConfig().environment("CartPole-v1")


def test_setters_chain_and_change_only_what_they_are_given() -> None:
    config = PPOConfig()
    before = config.to_dict()
    assert config.training(gamma=0.9, clip_param=0.3).env_runners(explore=False).debugging(seed=3) is config
    assert (config.gamma, config.clip_param, config.explore, config.seed) == (0.9, 0.3, False, 3)
    after = config.to_dict()
    changed = {("training", "gamma"), ("training", "clip_param"), ("env_runners", "explore"), ("debugging", "seed")}
    for group in PPOConfig.group_fields():
        for name, value in before[group].items():
            assert (after[group][name] != value) is ((group, name) in changed)


def test_a_setter_does_not_touch_what_an_earlier_call_set() -> None:
    config = PPOConfig().environment("CartPole-v1", env_config={"a": 1}).training(lr=0.1)
    config.environment(disable_env_checking=True).training(gamma=0.5).rl_module(model_config={"fcnet_hiddens": [8]})
    config.rl_module()
    assert (config.env, config.env_config, config.lr) == ("CartPole-v1", {"a": 1}, 0.1)
    assert config.model_config == {"fcnet_hiddens": [8]}


def test_configs_do_not_share_their_defaults() -> None:
    one, other = PPOConfig(), PPOConfig()
    one.model_config["fcnet_hiddens"] = [8]
    assert other.model_config == {}


@pytest.mark.parametrize(
    ("setter", "name", "message"),
    [
        ("training", "gama", r"training: unknown setting 'gama'\. Did you mean 'gamma'\?"),
        ("training", "clip_params", r"Did you mean 'clip_param'\?"),
        ("training", "num_envs_per_env_runner", r"belongs to \.env_runners\(\.\.\.\)"),
        ("env_runners", "lr", r"belongs to \.training\(\.\.\.\)"),
        ("env_runners", "lambda_", r"belongs to \.training\(\.\.\.\)"),
        ("environment", "seed", r"belongs to \.debugging\(\.\.\.\)"),
        ("debugging", "sed", r"Did you mean 'seed'\?"),
    ],
)
def test_unknown_names_raise_at_the_call_with_a_hint(setter: str, name: str, message: str) -> None:
    config = PPOConfig()
    before = config.to_dict()
    with pytest.raises(ConfigError, match=message):
        getattr(config, setter)(**{name: 1})
    assert config.to_dict() == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", "fast"),
        ("lr", [[0]]),
        ("gamma", None),
        ("gamma", float("nan")),
        ("num_epochs", 2.5),
        ("num_epochs", True),
        ("gamma", True),
        ("lr", True),
        ("lr", [[0, True]]),
        ("rollout_fragment_length", True),
        ("minibatch_size", np.True_),
        ("custom_resources_per_env_runner", {"slot": True}),
        ("minibatch_size", "many"),
        ("vectorization", "Sync"),
        ("rollout_fragment_length", "automatic"),
        ("env_config", 3),
        ("seed", "x"),
        ("explore", "perhaps"),
        ("clip_param", [0.1]),
    ],
)
def test_values_of_the_wrong_type_raise_and_name_the_setting(name: str, value: Any) -> None:
    config = PPOConfig()
    before = getattr(config, name)
    with pytest.raises(ConfigError, match=rf"^{name}="):
        setattr(config, name, value)
    with pytest.raises(ConfigError, match=rf"^{name}="):
        PPOConfig.overrides(**{name: value})
    assert getattr(config, name) == before


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("lr", "3e-3", 3e-3),
        ("num_epochs", "4", 4),
        ("explore", "false", False),
        ("minibatch_size", "128", 128),
        ("seed", "7", 7),
        ("rollout_fragment_length", "32", 32),
        ("rollout_fragment_length", "auto", "auto"),
    ],
)
def test_strings_from_a_shell_become_the_type_of_the_setting(name: str, text: str, value: Any) -> None:
    config = PPOConfig()
    setattr(config, name, text)
    assert getattr(config, name) == value
    assert type(getattr(config, name)) is type(value)


def test_attributes_may_be_set_directly() -> None:
    config = PPOConfig()
    config.lr = 0.5
    assert config.to_dict()["training"]["lr"] == 0.5
    with pytest.raises(AttributeError, match="no setting 'lrr'"):
        config.lrr = 0.5  # type: ignore[attr-defined]


def test_a_frozen_config_refuses_changes_and_its_copy_takes_them() -> None:
    config = valid().freeze()
    assert config.is_frozen
    with pytest.raises(AttributeError, match="Cannot set attribute 'lr' of an already frozen PPOConfig"):
        config.lr = 0.5
    with pytest.raises(AttributeError, match="frozen"):
        config.training(lr=0.5)
    other = config.copy(lr=0.5)
    assert (other.lr, other.is_frozen, other.env) == (0.5, False, "CartPole-v1")
    assert config.lr != 0.5


def test_a_copy_is_independent() -> None:
    config = valid().environment(env_config={"a": 1, "b": {"c": [1]}}).callbacks(on_sample_end=lambda samples: None)
    other = config.copy()
    assert other == config
    other.env_config["a"] = 2
    other.env_config["b"]["c"].append(2)
    other.env_config["b"]["d"] = 3
    other.callbacks(on_sample_end=lambda samples: None)
    assert config.env_config == {"a": 1, "b": {"c": [1]}}
    assert len(config.callback_functions["on_sample_end"]) == 1
    with pytest.raises(ConfigError, match="Did you mean 'gamma'"):
        config.copy(gama=1)


def test_changing_a_dictionary_does_not_change_the_config() -> None:
    config = valid().environment(env_config={"a": 1}).freeze()
    config.to_dict()["environment"]["env_config"]["a"] = 2
    config.to_dict()["training"]["lr"] = 9
    assert config.env_config == {"a": 1}
    assert config.lr != 9


def test_overrides_are_checked_settings() -> None:
    assert PPOConfig.overrides(explore="false", gamma=1) == {"explore": False, "gamma": 1.0}
    with pytest.raises(ConfigError, match=r"overrides: unknown setting 'explor'\. Did you mean 'explore'\?"):
        PPOConfig.overrides(explor=False)


schedules = st.floats(0, 1) | st.lists(st.floats(0, 1), min_size=1, max_size=4).map(
    lambda values: [(100.0 * index, value) for index, value in enumerate(values)]
)
valid_settings = st.fixed_dictionaries(
    {},
    optional={
        "lr": schedules,
        "entropy_coeff": schedules,
        "clip_param": st.floats(0.01, 1) | st.just([(0.0, 0.2), (100.0, 0.0)]),
        "gamma": st.floats(0, 1),
        "lambda_": st.floats(0, 1),
        "num_epochs": st.integers(1, 50),
        "minibatch_size": st.none() | st.integers(1, 512),
        "train_batch_size_per_learner": st.integers(512, 10_000),
        "vectorization": st.sampled_from(["auto", "sync", "async"]),
        "explore": st.booleans(),
        "seed": st.none() | st.integers(0, 2**31),
        "num_threads": st.just("auto") | st.integers(1, 8),
        "env_config": st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=3),
        "model_config": st.fixed_dictionaries({}, optional={"fcnet_hiddens": st.lists(st.integers(1, 512))}),
    },
)


@given(changes=valid_settings)
@settings(max_examples=60, deadline=None)
def test_a_config_survives_the_round_trip_through_a_dictionary(changes: dict[str, Any]) -> None:
    config = valid().copy(**changes)
    config.validate()
    for name, value in changes.items():
        assert getattr(config, name) == value
    again = PPOConfig.from_dict(config.to_dict())
    assert again == config
    assert config_from_dict(config.to_dict()) == config
    assert again.to_dict() == config.to_dict()


def test_a_part_of_a_dictionary_leaves_the_defaults() -> None:
    config = PPOConfig.from_dict({"algo": "PPO", "training": {"lr": "1e-2"}})
    assert config == PPOConfig().training(lr=0.01)


@pytest.mark.parametrize(
    ("given_dict", "message"),
    [
        ({"train": {}}, r"unknown group 'train'\. Did you mean 'training'\?"),
        ({"training": {"lrr": 1}}, "unknown setting 'lrr'"),
        ({"training": 3}, "group 'training' must hold settings"),
        ({"algo": "DQN"}, "'DQN'"),
        ({1: {}}, r"unknown group 1\. Known names: "),
        ({"training": {1: 2}}, r"unknown setting 1\. It takes lr"),
        ({"environment": {"wrappers": [".mine:Wrapper"]}}, r"'\.mine:Wrapper' is not an import path such as"),
    ],
)
def test_wrong_dictionaries(given_dict: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PPOConfig.from_dict(given_dict)


def test_algorithms_are_found_by_name() -> None:
    assert config_class("ppo") is config_class("PPO") is PPOConfig
    with pytest.raises(ConfigError, match=r"'PPPO'\. Did you mean 'PPO'"):
        config_class("PPPO")
    with pytest.raises(ConfigError, match="'algo' is missing"):
        config_from_dict({"training": {}})


def test_set_path() -> None:
    config = PPOConfig().rl_module(model_config={"fcnet_activation": "relu"})
    config.set_path("training.lr", "0.01").set_path("rl_module.model_config.fcnet_hiddens", [8])
    assert config.lr == 0.01
    assert config.model_config == {"fcnet_activation": "relu", "fcnet_hiddens": [8]}


def test_a_path_reaches_the_settings_of_a_module() -> None:
    policies = {"red": {"model_config": {"fcnet_hiddens": [64], "fcnet_activation": "relu"}}, "blue": None}
    config = PPOConfig().multi_agent(policies=policies)
    config.set_path("multi_agent.policies.red.model_config.fcnet_hiddens", [8])
    config.set_path("multi_agent.policies.blue.model_config.fcnet_hiddens", [4])
    assert config.policies == {
        "red": {"model_config": {"fcnet_hiddens": [8], "fcnet_activation": "relu"}},
        "blue": {"model_config": {"fcnet_hiddens": [4]}},
    }
    assert policies["red"] == {"model_config": {"fcnet_hiddens": [64], "fcnet_activation": "relu"}}
    config.set_path("multi_agent.algorithm_config_overrides_per_module.red.lr", 0.1)
    assert config.algorithm_config_overrides_per_module == {"red": {"lr": 0.1}}
    with pytest.raises(ConfigError, match=r"policies: 'red': unknown setting 'model'"):
        config.set_path("multi_agent.policies.red.model.fcnet_hiddens", [8])


def test_a_path_finds_a_key_with_dots() -> None:
    config = PPOConfig().environment("CartPole-v1", env_config={"maze.size": 3, "wind": {}})
    config.set_path("environment.env_config.maze.size", 4).set_path("environment.env_config.wind.north", 1)
    assert config.env_config == {"maze.size": 4, "wind": {"north": 1}}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("train.lr", r"'train\.lr'\. Did you mean 'training\.lr'\?"),
        ("lr", r"'lr'\. Did you mean 'training\.lr'\?"),
        ("training", "training"),
        ("training.lrr", "'lrr'"),
        ("training.lr.fast", r"training\.lr"),
        ("training.copy.x", "'copy'"),
        ("rl_module.model_config.fcnet_hiddens.0", r"model_config\.fcnet_hiddens=\[64, 64\] is not a dict"),
    ],
)
def test_a_path_that_names_nothing(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PPOConfig().rl_module(model_config={"fcnet_hiddens": [64, 64]}).set_path(path, 1)


# Each contradiction, and every word that its message must hold.
REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"clip_param": 0.0}, ["clip_param=0.0", "positive", "0.2"]),
    ({"clip_param": [(0, 0.0), (9, 0.0)]}, ["clip_param=[", "positive", "0.2"]),
    (
        {"minibatch_size": 513, "train_batch_size_per_learner": 512},
        ["minibatch_size=513", "train_batch_size_per_learner"],
    ),
    (
        {
            "rollout_fragment_length": 100,
            "num_envs_per_env_runner": 3,
            "train_batch_size_per_learner": 1000,
        },
        ["rollout_fragment_length=100", "train_batch_size_per_learner=1000", "'auto'"],
    ),
    ({"kl_target": 0.01, "kl_coeff": 0.0}, ["kl_target=0.01", "kl_coeff=0.0"]),
    ({"kl_target": 0.01, "kl_coeff": [(0, 0.2), (10, 0.1)]}, ["kl_target=0.01", "kl_coeff="]),
    ({"optimizer_config": {"lr": 0.1}}, ["optimizer_config", "lr"]),
    ({"env": None}, ["environment"]),
    ({"env": "CartPoll-v1"}, ["CartPoll-v1"]),
    ({"optimizer": "adm"}, ["'adm'", "Did you mean 'adam'"]),
    ({"optimizer": int}, ["optimizer"]),
    ({"optimizer": torch.optim.LBFGS}, ["LBFGS.step(closure)", "such as Adam"]),
]

# Each value out of bounds, and every word that the message of the setter must hold.
OUT_OF_BOUNDS: list[tuple[dict[str, Any], list[str]]] = [
    ({"num_env_runners": -1}, ["num_env_runners=-1", "at least 0"]),
    ({"num_envs_per_env_runner": 0}, ["num_envs_per_env_runner=0", "at least 1"]),
    ({"rollout_fragment_length": 0}, ["rollout_fragment_length=0"]),
    ({"train_batch_size_per_learner": 0}, ["train_batch_size_per_learner=0"]),
    ({"minibatch_size": 0}, ["minibatch_size=0"]),
    ({"num_epochs": 0}, ["num_epochs=0"]),
    ({"metrics_num_episodes_for_smoothing": 0}, ["metrics_num_episodes_for_smoothing=0"]),
    ({"min_time_s_per_iteration": -1.0}, ["min_time_s_per_iteration=-1.0"]),
    ({"num_threads": 0}, ["num_threads=0"]),
    ({"seed": -1}, ["seed=-1"]),
    ({"gamma": 1.1}, ["gamma=1.1", "[0, 1]"]),
    ({"lambda_": -0.1}, ["lambda_=-0.1", "[0, 1]"]),
    ({"clip_param": -0.1}, ["clip_param=-0.1", "at least 0"]),
    ({"vf_clip_param": -1.0}, ["vf_clip_param=-1.0", "positive"]),
    ({"kl_target": -1.0}, ["kl_target=-1.0", "positive"]),
    ({"vf_loss_coeff": -1.0}, ["vf_loss_coeff=-1.0"]),
    ({"grad_clip": 0.0}, ["grad_clip=0.0", "None"]),
    ({"lr": -1.0}, ["lr", "at least 0"]),
    ({"lr": [(10, 1e-3)]}, ["lr", "must be 0"]),
    ({"lr": []}, ["lr", "at least one"]),
    ({"entropy_coeff": [(0, 1.0), (0, 0.5)]}, ["entropy_coeff", "must rise"]),
    ({"kl_coeff": -0.1}, ["kl_coeff", "at least 0"]),
    ({"straggler_factor": 0.5}, ["straggler_factor=0.5", "at least 1"]),
    ({"sample_timeout_s": 0}, ["sample_timeout_s=0", "positive"]),
    ({"custom_resources_per_env_runner": {"arm": -1}}, ["custom_resources_per_env_runner", "-1 must be at least 0"]),
    ({"lr": [[0, 1e-3], [10, -1e-3]]}, ["lr=", "at least 0", "-0.001"]),
    ({"lr": [[0, float("inf")]]}, ["lr=", "finite"]),
    ({"rollout_fragment_length": 0}, ["rollout_fragment_length=0 must be at least 1 or 'auto'"]),
    ({"minibatch_size": "many"}, ["minibatch_size='many' must be an integer or None"]),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=[str(changes)[:60] for changes, _ in REFUSED])
def test_validate_refuses_and_names_the_settings(changes: dict[str, Any], words: list[str]) -> None:
    config = valid().copy(**changes)
    with pytest.raises(ConfigError) as error:
        config.validate()
    message = str(error.value)
    assert all(word in message for word in at_least(1, words)), message


@pytest.mark.parametrize(("changes", "words"), OUT_OF_BOUNDS, ids=[str(changes)[:60] for changes, _ in OUT_OF_BOUNDS])
def test_a_value_out_of_bounds_is_refused_at_the_setter(changes: dict[str, Any], words: list[str]) -> None:
    [name] = changes
    group = next(group for group, names in PPOConfig.group_fields().items() if name in names)
    config = valid()
    before = config.to_dict()
    for set_value in (getattr(config, group), config.copy, PPOConfig.overrides):
        with pytest.raises(ConfigError) as error:
            set_value(**changes)
        message = str(error.value)
        assert all(word in message for word in at_least(1, words)), message
    assert config.to_dict() == before


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"minibatch_size": 512, "train_batch_size_per_learner": 512},
        {"rollout_fragment_length": 10, "num_envs_per_env_runner": 5, "train_batch_size_per_learner": 1000},
        {"rollout_fragment_length": 10, "num_envs_per_env_runner": 3, "train_batch_size_per_learner": 1000},
        {"kl_target": 0.01, "kl_coeff": 0.2},
        {"optimizer": torch.optim.SGD, "optimizer_config": {"momentum": 0.9}},
        {"optimizer": "SGD"},
        {"env": CountingEnv},
        {"lr": [(0, 1e-3), (1000, 0)]},
    ],
    ids=str,
)
def test_validate_takes_what_fits_together(changes: dict[str, Any]) -> None:
    valid().copy(**changes).validate()


def test_batches_of_several_agents_are_compared_in_their_own_steps() -> None:
    """A minibatch counts the steps of a module, of which several agents take more than one per env step."""
    agents = valid().multi_agent(policies={"main", "other"}, policy_mapping_fn=lambda agent_id, episode: "main")
    agents.copy(minibatch_size=600, train_batch_size_per_learner=512).validate()
    counted = agents.copy(count_steps_by="agent_steps", rollout_fragment_length=3, num_envs_per_env_runner=4)
    counted.copy(train_batch_size_per_learner=512).validate()
    buffered = DQNConfig().environment("CartPole-v1").multi_agent(policies={"main"})
    with pytest.raises(ConfigError, match=r"minibatch_size=65 .*train_batch_size_per_learner=64"):
        buffered.training(minibatch_size=65, train_batch_size_per_learner=64).validate()


def test_a_contradiction_stops_build_before_any_env_is_made() -> None:
    made = []

    def env(config: Any) -> CountingEnv:
        made.append(config)
        return CountingEnv(config)

    with pytest.raises(ConfigError, match="minibatch_size"):
        PPOConfig().environment(env).training(minibatch_size=10, train_batch_size_per_learner=5).build()
    assert made == []


def test_building_leaves_the_users_config_as_it_was() -> None:
    config = valid().env_runners(num_envs_per_env_runner=2)
    before = config.to_dict()
    with config.build() as algo:
        assert algo.config.is_frozen
        assert algo.config.seed is not None  # the resolved config holds the seed that was picked
    assert not config.is_frozen
    assert config.to_dict() == before


def test_the_plain_config_builds_nothing() -> None:
    with pytest.raises(ConfigError, match="use PPOConfig"):
        AlgorithmConfig().environment("CartPole-v1").build()


class Counting(Callback):
    """Named by its import path in the tests below."""


def count(result: dict[str, Any]) -> None:
    """Named by its import path in the tests below."""


def test_classes_and_functions_may_be_import_paths() -> None:
    config = config_from_dict(
        {
            "algo": "PPO",
            "environment": {"env": "CartPole-v1", "wrappers": ["gymnasium.wrappers:RecordEpisodeStatistics"]},
            "rl_module": {"module_class": "corral.modules.module:ActorCritic"},
            "training": {"optimizer": "torch.optim:Adam"},
            "callbacks": {
                "callbacks_class": [f"{__name__}:Counting"],
                "callback_functions": {"on_train_result": [f"{__name__}:count"]},
                "on_error": "log",
            },
        }
    )
    assert config.wrappers == [gym.wrappers.RecordEpisodeStatistics]
    assert config.module_class is ActorCritic
    assert optimizer_class(config.optimizer) is torch.optim.Adam
    assert (config.callbacks_class, config.callback_functions) == ([Counting], {"on_train_result": [count]})
    with config.build() as algo:
        assert algo.config.on_error == "log"
    for value in (Counting, Counting(), print, lambda: None):
        config.callbacks_class = [value]
        assert config.callbacks_class == [value]


def test_files_and_paths_name_events_as_the_setter_does() -> None:
    path = f"{__name__}:count"
    config = config_from_dict({"algo": "PPO", "callbacks": {"on_train_result": path, "on_error": "log"}})
    assert (config.callback_functions, config.on_error) == ({"on_train_result": [count]}, "log")
    config = PPOConfig().set_path("callbacks.on_train_result", [path, path])
    assert config.callback_functions == {"on_train_result": [count, count]}
    with pytest.raises(ConfigError, match=r"unknown event 'on_trein_result'. Did you mean 'on_train_result'"):
        config.set_path("callbacks.on_trein_result", path)


def test_the_setter_of_callbacks_takes_import_paths() -> None:
    path, function = f"{__name__}:Counting", f"{__name__}:count"
    config = PPOConfig().callbacks(path, on_train_result=function)
    assert (config.callbacks_class, config.callback_functions) == ([Counting], {"on_train_result": [count]})
    config.add_callbacks([path, Counting], on_train_result=[function, count])
    assert config.callbacks_class == [Counting] * 3
    assert config.callback_functions == {"on_train_result": [count] * 3}
    with pytest.raises(ConfigError, match=r"callbacks_class=.*Nobody"):
        config.callbacks(f"{__name__}:Nobody")


def test_a_second_call_of_callbacks_replaces_what_it_names_and_nothing_else() -> None:
    class Other(Callback): ...

    def at_end() -> None: ...

    config = PPOConfig().callbacks([Counting, Other], on_train_result=[count, count], on_episode_end=at_end)
    config.callbacks(on_train_result=count)
    assert config.callback_functions == {"on_train_result": [count], "on_episode_end": [at_end]}
    assert config.callbacks_class == [Counting, Other]
    config.callbacks(Other)
    assert config.callbacks_class == [Other]
    assert config.callback_functions == {"on_train_result": [count], "on_episode_end": [at_end]}
    config.callbacks(on_episode_end=None, on_train_result=[])
    assert (config.callbacks_class, config.callback_functions) == ([Other], {})
    with pytest.raises(ConfigError, match="on_episode_ends"):
        config.callbacks(Counting, on_episode_ends=at_end)
    assert config.callbacks_class == [Other], "a call that is refused changes nothing"


@pytest.mark.parametrize("env", [".mine:Env", ":Env"])
def test_an_env_of_a_relative_module_is_refused(env: str) -> None:
    with pytest.raises(ConfigError, match=r"is not an import path such as 'package\.module:Name'"):
        PPOConfig().environment(env).validate()


def test_none_given_to_a_setter_is_a_value() -> None:
    config = PPOConfig().environment("CartPole-v1").rl_module(ActorCritic)
    assert config.rl_module(model_config={}).environment(disable_env_checking=True).module_class is ActorCritic
    assert config.rl_module(module_class=None).module_class is None
    assert config.environment(None).env is None
    with pytest.raises(ConfigError, match="engine_name=None must be"):
        config.engine(engine_name=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="on_error=None must be"):
        config.callbacks(on_error=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["nowhere:Counting", f"{__name__}:Nobody"])
def test_an_import_path_that_leads_nowhere_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"callbacks_class=.*(nowhere|Nobody)"):
        config_from_dict({"algo": "PPO", "callbacks": {"callbacks_class": [path]}})


def test_a_policy_takes_a_dict_space_or_the_description_of_one() -> None:
    space = gym.spaces.Dict({"board": gym.spaces.MultiBinary(9), "turn": gym.spaces.Discrete(2)})
    for form in (space, describe_space(space)):
        config = PPOConfig().multi_agent(policies={"main": {"observation_space": form}})
        assert config.policies["main"]["observation_space"] == space
