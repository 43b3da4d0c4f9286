"""Dicts with all settings of RLlib 2.60, as its `to_dict()` makes them, and the specs of all modules."""

import gymnasium as gym
import pytest

from corral.compat.rllib import whole_dicts
from corral.compat.rllib.algorithm import BCConfig, CQLConfig, IQLConfig, MARWILConfig, PPOConfig, SACConfig
from corral.compat.rllib.modules import MultiRLModule, MultiRLModuleSpec, RLModule, RLModuleSpec
from corral.compat.rllib.native import to_native
from corral.errors import ConfigError

WHOLE_MODEL = {
    **whole_dicts._MODEL,
    **dict.fromkeys(("fcnet_weights_initializer", "conv_filters", "custom_model", "encoder_latent_dim")),
    **{"framestack": True, "dim": 84, "grayscale": False, "zero_mean": True, "custom_model_config": {}},
}
AT_DEFAULTS = {
    **whole_dicts._OFFLINE,
    **whole_dicts._OTHERS,
    **dict.fromkeys(whole_dicts._REMOVED_NAMES, -1),
    **{name: {} if name in ("_per_module_overrides", "_model_config") else None for name in whole_dicts._SECOND_NAMES},
    **{"_is_online": True, "_prior_exploration_config": {"type": "StochasticSampling"}},
    **{"sync_filters_on_rollout_workers_timeout_s": 10.0, "stats_cls_lookup": dict.fromkeys(whole_dicts._STATISTICS)},
    **{"callbacks_on_episode_end": None, "callbacks_on_train_result": None, "create_env_on_driver": False},
    **{"framework": "torch", "input": "sampler", "policies": {"default_policy": (None, None, None, None)}},
    "model": WHOLE_MODEL,
}


@pytest.mark.parametrize("cls", [PPOConfig, SACConfig, MARWILConfig, BCConfig, CQLConfig, IQLConfig])
def test_all_keys_at_their_defaults_change_nothing(cls):
    settings = dict(AT_DEFAULTS)
    if issubclass(cls, SACConfig):
        settings |= {
            "optimization": dict(whole_dicts._SAC_LEARNING_RATES),
            "q_model_config": dict(whole_dicts._SAC_MODEL),
            "policy_model_config": dict(whole_dicts._SAC_MODEL),
        }
    if issubclass(cls, MARWILConfig):
        settings |= {"_set_off_policy_estimation_methods": False, "model": {**WHOLE_MODEL, "vf_share_layers": False}}
    found = to_native(cls.from_dict(settings).environment("Pendulum-v1"))
    expected = to_native(cls().environment("Pendulum-v1"))
    assert {name: repr(each) for name, each in vars(found).items() if name != "_origin"} == {
        name: repr(each) for name, each in vars(expected).items() if name != "_origin"
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("offline_evaluation_duration", 7),
            ("ignore_offline_eval_runner_failures", True),
            ("_dont_auto_sync_env_runner_states", True),
        ),
        *(("worker_cls", int), ("stats_cls_lookup", {"mean": int})),
    ],
)
def test_other_values_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name}=.*is not in Corral: "):
        PPOConfig.from_dict({name: value})


def test_a_whole_model_keeps_what_differs():
    config = PPOConfig.from_dict({"model": {**WHOLE_MODEL, "fcnet_hiddens": [7]}}).environment("CartPole-v1")
    assert to_native(config).model_config["fcnet_hiddens"] == [7]
    assert to_native(config).model_config["vf_share_layers"] is False
    with pytest.raises(ConfigError, match="use_attention"):
        to_native(PPOConfig.from_dict({"model": {**WHOLE_MODEL, "use_attention": True}}).environment("CartPole-v1"))


def test_second_names_count_where_the_first_are_absent():
    config = PPOConfig.from_dict({"_train_batch_size_per_learner": 77, "_model_config": {"fcnet_hiddens": [5]}})
    assert config.train_batch_size_per_learner == 77 and config.model_config == {"fcnet_hiddens": [5]}
    overrides = {"a": {"lr": 0.5}}
    both = {"algorithm_config_overrides_per_module": overrides, "_per_module_overrides": {}}
    config = PPOConfig.from_dict(both)
    assert config.algorithm_config_overrides_per_module == overrides
    assert set(config._per_module_overrides) == {"a"} and config._per_module_overrides["a"].lr == 0.5


class _Mine(RLModule):
    pass


class _Other(RLModule):
    pass


class _Together(MultiRLModule):
    pass


def test_spec_of_all_modules():
    env, config = gym.make("CartPole-v1"), PPOConfig()
    config.rl_module(
        rl_module_spec=MultiRLModuleSpec(
            multi_rl_module_class=_Together,
            rl_module_specs={"a": RLModuleSpec(module_class=_Mine), "critic": RLModuleSpec(_Other, learner_only=True)},
        )
    )
    other = RLModuleSpec(module_class=_Other)
    spec = config.get_multi_rl_module_spec(
        policy_dict={"a": None, "b": (None, env.action_space, env.action_space, {})},
        single_agent_rl_module_spec=other,
        env=env,
        inference_only=True,
    )
    assert spec.multi_rl_module_class is _Together and list(spec.rl_module_specs) == ["a", "b"]
    assert [part.module_class for part in spec.rl_module_specs.values()] == [_Mine, _Other]
    assert spec["a"].observation_space == env.observation_space and spec["b"].observation_space == env.action_space
    assert spec["a"].inference_only and not other.inference_only
    learners = config.get_multi_rl_module_spec(policy_dict={"a": None}, env=env)
    assert set(learners.rl_module_specs) == {"a", "critic"}
