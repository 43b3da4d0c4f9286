from __future__ import annotations

import pickle
from typing import Any

import gymnasium as gym
import pytest

from corral.compat.rllib.algorithm import PPO, DQNConfig, DreamerV3Config, PPOConfig, SACConfig, TQCConfig
from corral.compat.rllib.config import AlgorithmConfig, NotProvided
from corral.compat.rllib.connectors import (
    FlattenObservations,
    FrameStackingEnvToModule,
    FrameStackingLearner,
    MeanStdFilter,
    PrevActionsPrevRewards,
)
from corral.compat.rllib.model_config import DefaultModelConfig
from corral.compat.rllib.modules import RLModuleSpec
from corral.compat.rllib.native import to_native
from corral.compat.rllib.settings import RENAMED, SETTINGS, TRAINING
from corral.envs.vector import EnvContext, make_vector_env
from corral.errors import ConfigError
from corral.exploration.epsilon import EpsilonGreedy
from corral.modules.transforms.observations import NormalizeObservations
from corral.modules.transforms.rewards import ClipRewards
from corral.modules.transforms.temporal import FrameStack


def native_of(config: AlgorithmConfig) -> Any:
    return to_native(config.environment("CartPole-v1"))


def test_ppo_begins_with_the_defaults_and_the_loss_of_rllib() -> None:
    native = native_of(PPOConfig())
    expected = {
        "lr": 5e-5,
        "train_batch_size_per_learner": 4000,
        "minibatch_size": 128,
        "num_epochs": 30,
        "lambda_": 1.0,
        "clip_param": 0.3,
        "vf_clip_param": None,  # limits values in Corral; RLlib limits squared errors
        "vf_loss_clip": 10.0,
        "vf_loss_coeff": 1.0,
        "kl_coeff": 0.2,
        "kl_target": 0.01,
        "kl_band": 2.0,
        "kl_factors": (1.5, 0.5),
        "entropy_coeff": 0.0,
        "grad_clip": None,
        "num_env_runners": 2,
        "num_envs_per_env_runner": 1,
    }
    assert {name: getattr(native, name) for name in expected} == expected
    model = {"fcnet_hiddens": [256, 256], "fcnet_activation": "tanh", "vf_share_layers": False, "free_log_std": False}
    assert {name: native.model_config[name] for name in model} == model


def test_without_the_kl_loss_its_coefficient_counts_for_nothing() -> None:
    native = native_of(PPOConfig().training(use_kl_loss=False, kl_coeff=0.3))
    assert (native.kl_coeff, native.kl_target) == (0.0, None)


def test_dqn_and_sac_begin_with_the_defaults_of_rllib() -> None:
    dqn = native_of(DQNConfig())
    assert (dqn.lr, dqn.train_batch_size_per_learner, dqn.grad_clip, dqn.dueling) == (5e-4, 32, 40.0, True)
    assert dqn.exploration_config == {"type": "EpsilonGreedy", "epsilon_schedule": [[0, 1.0], [10000, 0.05]]}
    assert dqn.replay_buffer_config == {
        "type": "prioritized",
        "capacity": 50_000,
        "alpha": 0.6,
        "beta": 0.4,
        "epsilon": 1e-12,
    }
    sac = to_native(SACConfig().environment("Pendulum-v1"))
    assert (sac.actor_lr, sac.critic_lr, sac.alpha_lr, sac.tau) == (3e-5, 3e-4, 3e-4, 0.005)
    assert (sac.num_steps_sampled_before_learning_starts, sac.target_network_update_freq) == (1500, 0)
    assert (sac.td_error_loss_fn, sac.exploration_config["random_timesteps"]) == ("huber", 0)
    assert to_native(SACConfig().environment("Pendulum-v1").training(n_step=(2, 5))).n_step == (2, 4)
    config = TQCConfig().environment("Pendulum-v1")
    tqc = to_native(config.training(n_quantiles=11, n_critics=5, top_quantiles_to_drop_per_net=3))
    assert (tqc.num_quantiles, tqc.num_critics, tqc.num_dropped_quantiles, tqc.actor_lr) == (11, 5, 3, 3e-5)
    tqc = to_native(TQCConfig().environment("Pendulum-v1"))
    assert (tqc.num_quantiles, tqc.num_critics, tqc.num_dropped_quantiles, tqc.twin_q) == (25, 2, 2, True)


def test_none_and_not_provided_leave_a_setting_as_it_is_where_none_is_no_value() -> None:
    config = PPOConfig().env_runners(num_env_runners=None).training(gamma=None, lr=NotProvided)
    assert (config.num_env_runners, config.gamma, config.lr) == (2, 0.99, 5e-5)
    config.training(grad_clip=0.5, minibatch_size=None).training(grad_clip=None)
    assert (config.grad_clip, config.minibatch_size) == (None, None)
    dqn = DQNConfig().reporting(min_sample_timesteps_per_iteration=None)
    assert native_of(dqn).min_sample_timesteps_per_iteration == 0
    dreamer = DreamerV3Config().training(world_model_grad_clip_by_global_norm=None)
    assert native_of(dreamer).grad_clip == {"actor": 100.0, "critic": 100.0}


def test_a_dict_that_is_given_again_changes_its_keys_only() -> None:
    dqn = DQNConfig().training(replay_buffer_config={"capacity": 9}, model={"fcnet_hiddens": [8]})
    expected = {"type": "prioritized", "capacity": 9, "alpha": 0.6, "beta": 0.4, "epsilon": 1e-12}
    assert native_of(dqn).replay_buffer_config == expected
    dqn.training(replay_buffer_config={"type": "EpisodeReplayBuffer", "capacity": 7})
    assert dqn.replay_buffer_config == {"type": "EpisodeReplayBuffer", "capacity": 7}
    assert dqn.training(model={"fcnet_activation": "relu"}).model == {"fcnet_hiddens": [8], "fcnet_activation": "relu"}
    dqn.environment(env_config={"map": {"type": "a", "size": 3}}).environment(env_config={"map": {"type": "b"}})
    assert dqn.env_config == {"map": {"type": "b", "size": 3}}
    dqn.rl_module(algorithm_config_overrides_per_module={"a": {"lr": 0.1}})
    dqn.multi_agent(algorithm_config_overrides_per_module={"b": {"lr": 0.2}})
    assert dqn.algorithm_config_overrides_per_module == {"a": {"lr": 0.1}, "b": {"lr": 0.2}}
    dqn.exploration(exploration_config={"type": "EpsilonGreedy", "initial_epsilon": 0.5})
    dqn.exploration(exploration_config={"final_epsilon": 0.1})
    assert dqn.exploration_config == {"type": "EpsilonGreedy", "initial_epsilon": 0.5, "final_epsilon": 0.1}


def test_a_class_derived_from_epsilon_greedy_falls_in_as_many_steps_as_in_rllib() -> None:
    own = type("Own", (EpsilonGreedy,), {})
    for given, steps in (
        ({"type": own}, 100_000),
        ({"type": "PerWorkerEpsilonGreedy"}, 100_000),
        ({"type": own, "epsilon_timesteps": 50}, 50),
        ({"type": "EpsilonGreedy"}, None),
        ({"type": own, "epsilon_schedule": 0.1}, None),
    ):
        settings = native_of(DQNConfig().env_runners(exploration_config=given)).exploration_config
        assert settings.get("epsilon_timesteps") == steps


@pytest.mark.parametrize("kind", ["MultiAgentPrioritizedEpisodeReplayBuffer", "my.PrioritizedEpisodeReplayBuffer"])
def test_another_prioritised_buffer_of_episodes_has_the_alpha_of_rllib(kind: str) -> None:
    config = DQNConfig().training(replay_buffer_config={"type": kind, "capacity": 9, "beta": 0.5})
    settings = native_of(config).replay_buffer_config
    assert (settings["type"], settings["alpha"], settings["beta"]) == ("prioritized", 1.0, 0.5)


def test_what_is_written_into_a_copy_does_not_reach_the_config() -> None:
    config = PPOConfig().environment(env_config={"map": {"size": 3}})
    config.copy(copy_frozen=False).env_config["map"]["size"] = 4
    flat = config.to_dict()
    flat["env_config"]["map"]["size"] = 5
    flat["env_config"]["walls"] = True
    assert config.env_config == {"map": {"size": 3}}


@pytest.mark.parametrize(("old", "new"), [(old, new) for old, new in RENAMED.items() if old != "framework"])
def test_older_names_of_settings_mean_the_newer_ones(old: str, new: str) -> None:
    value = object()
    config = AlgorithmConfig()
    setattr(config, old, value)
    assert getattr(config, new) is value and getattr(config, old) is value and config[old] is value


def test_settings_are_attributes_and_keys_and_any_attribute_may_be_set() -> None:
    config = PPOConfig().update_from_dict({"num_workers": 3, "lambda": 0.9, "env_config": {"a": 1}, "callbacks": None})
    config["num_sgd_iter"] = 5
    config.my_own = {"free": True}
    config.environment(env_config={"b": 2})
    assert (config.num_env_runners, config["lambda"], config.num_epochs) == (3, 0.9, 5)
    assert config.env_config == {"a": 1, "b": 2}
    assert config.get("my_own") == {"free": True} and config.get("nothing", 7) == 7
    flat = config.to_dict()
    assert flat["lambda"] == 0.9 and "lambda_" not in flat and flat["my_own"] == {"free": True}
    again = PPOConfig.from_dict({name: flat[name] for name in flat if name != "my_own"})
    assert (again["lambda"], again.num_epochs, again.env_config) == (0.9, 5, {"a": 1, "b": 2})


def test_a_frozen_config_refuses_changes_and_its_copy_takes_them() -> None:
    config = PPOConfig().freeze()
    for change in (lambda: setattr(config, "lr", 1.0), lambda: config.training(lr=1.0), lambda: config.callbacks(None)):
        with pytest.raises(AttributeError, match=r"Cannot set attribute .* of an already frozen AlgorithmConfig"):
            change()
    assert config.copy().is_frozen and config.copy(copy_frozen=False).training(lr=1.0).lr == 1.0 and config.lr == 5e-5


def test_the_fragment_length_auto_splits_the_batch_as_rllib_does() -> None:
    config = AlgorithmConfig().env_runners(num_env_runners=4, num_envs_per_env_runner=3, rollout_fragment_length="auto")
    config.training(train_batch_size=2456)
    assert [config.get_rollout_fragment_length(worker_index=i) for i in range(5)] == [205, 205, 205, 205, 204]
    assert DQNConfig().training(n_step=(2, 5)).get_rollout_fragment_length() == 5
    assert SACConfig().env_runners(rollout_fragment_length="auto").get_rollout_fragment_length(worker_index=1) == 1


def test_a_batch_is_whole_fragments_and_at_least_as_large_as_asked() -> None:
    config = PPOConfig().env_runners(num_env_runners=2, num_envs_per_env_runner=3, rollout_fragment_length=50)
    native = native_of(config.training(train_batch_size=1000, minibatch_size=5000))
    assert native.train_batch_size_per_learner == 1200 and native.minibatch_size == 1200


def test_the_batch_is_divided_by_the_learners_unless_given_for_each() -> None:
    config = PPOConfig().learners(num_learners=2)
    assert native_of(config).train_batch_size_per_learner == 2000
    assert native_of(config.training(train_batch_size_per_learner=512)).train_batch_size_per_learner == 512


def test_settings_that_corral_lacks_raise_with_the_remedy_and_harmless_ones_do_not() -> None:
    with pytest.raises(ConfigError, match=r"use_gae=False: this setting of RLlib is not in Corral: use `lambda_=1.0`"):
        native_of(PPOConfig().training(use_gae=False))
    with pytest.raises(ConfigError, match=r"framework='tf2': Corral learns with torch"):
        native_of(PPOConfig().framework("tf2"))
    with pytest.raises(ConfigError, match=r"'custom_model' belongs to RLlib's older stack"):
        native_of(PPOConfig().training(model={"custom_model": "mine"}))
    with pytest.raises(ConfigError, match=r"input_='/tmp/x': PPO learns from an env: use BCConfig, MARWILConfig"):
        native_of(PPOConfig().offline_data(input_="/tmp/x"))
    native_of(PPOConfig().framework("torch").resources(num_gpus=0).api_stack(True, True).environment(render_env=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.training(lrr=1), r"training: unknown setting 'lrr'. Did you mean 'lr'"),
        (lambda c: c.update_from_dict({"num_workerz": 1}), r"unknown setting 'num_workerz'"),
        (
            lambda c: c.callbacks(on_episode_endd=print),
            r"unknown event 'on_episode_endd'. Did you mean 'on_episode_end'",
        ),
        (lambda c: native_of(c.rl_module(model_config={"fcnet_hidens": [3]})), r"Did you mean 'fcnet_hiddens'"),
        (
            lambda c: native_of(c.callbacks(on_train_result=lambda resultt: 1)),
            r"takes 'resultt'.*Did you mean 'result'",
        ),
        (
            lambda c: native_of(c.rl_module(rl_module_spec=RLModuleSpec(dict))),
            r"module_class=<class 'dict'> is no RLModule",
        ),
        (lambda c: AlgorithmConfig().build_algo(), r"no algorithm: use PPOConfig"),
    ],
)
def test_mistakes_raise_with_the_nearest_name(change: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        change(PPOConfig())


def test_overrides_check_names_and_configs_of_modules_have_them() -> None:
    with pytest.raises(KeyError, match=r"'lrr' is no setting"):
        PPOConfig.overrides(lrr=1)
    config = PPOConfig().multi_agent(
        policies={"a", "b"}, algorithm_config_overrides_per_module={"a": PPOConfig.overrides(lr=0.01)}
    )
    assert config.get_config_for_module("a").lr == 0.01 and config.get_config_for_module("b") is config


def test_evaluation_differs_from_training_in_what_its_config_says() -> None:
    config = PPOConfig().evaluation(evaluation_interval=2, evaluation_config={"explore": False, "env_config": {"a": 1}})
    native = native_of(config)
    assert native.evaluation_config == {"explore": False, "env_config": {"a": 1}}
    assert config.get_evaluation_config_object().in_evaluation and not config.in_evaluation
    assert native_of(DQNConfig()).evaluation_config == {"explore": False}


def test_a_default_model_config_is_translated() -> None:
    model = DefaultModelConfig(fcnet_hiddens=[32], conv_filters=[[16, [4, 4], [2, 2]]], use_lstm=True, lstm_cell_size=8)
    found = native_of(PPOConfig().rl_module(model_config=model)).model_config
    assert found["fcnet_hiddens"] == [32] and found["vf_share_layers"] is True
    assert found["conv_filters"] == [[16, [4, 4], [2, 2], "same"]] and found["conv_features"] is None
    assert (found["use_lstm"], found["lstm_cell_size"], found["max_seq_len"]) == (True, 8, 20)


def test_built_in_connectors_become_transforms() -> None:
    def connect(env: Any, spaces: Any, device: Any) -> list[Any]:
        return [MeanStdFilter(clip_by_value=5.0), FrameStackingEnvToModule(num_frames=3), FlattenObservations()]

    config = PPOConfig().env_runners(env_to_module_connector=connect)
    config.training(learner_connector=lambda obs_space, act_space: FrameStackingLearner(num_frames=3))
    found = native_of(config).transforms
    assert [type(each).__name__ for each in found] == ["NormalizeObservations", "FrameStack", "FlattenObservations"]
    assert isinstance(found[0], NormalizeObservations) and found[0].clip == 5.0
    assert isinstance(found[1], FrameStack) and found[1].num_frames == 3
    made = PPOConfig().env_runners(env_to_module_connector=lambda env: PrevActionsPrevRewards(n_prev_actions=2))
    (previous,) = native_of(made).transforms
    assert (previous.num_actions, previous.num_rewards) == (2, 1)
    with pytest.raises(ConfigError, match=r"MeanStdFilter: update_stats=False is not in Corral"):
        native_of(PPOConfig().env_runners(env_to_module_connector=lambda env: MeanStdFilter(update_stats=False)))


@pytest.mark.parametrize(("clip_rewards", "limit"), [(True, "sign"), (2, 2.0)])
def test_clipped_rewards_are_the_sign_or_within_a_limit(clip_rewards: Any, limit: Any) -> None:
    (found,) = native_of(PPOConfig().environment(clip_rewards=clip_rewards)).transforms
    assert isinstance(found, ClipRewards) and found.limit == limit
    assert native_of(PPOConfig().environment(clip_rewards=False)).transforms == []


def test_a_generic_config_builds_the_algorithm_that_it_names() -> None:
    config = AlgorithmConfig(algo_class=PPO).environment("CartPole-v1")
    with config.training(lr=0.123, train_batch_size=300, minibatch_size=30).build() as algo:
        assert (algo.config.lr, algo.config.train_batch_size, algo.native.config.lr) == (0.123, 300, 0.123)


def test_every_setting_has_a_class_and_what_is_not_the_same_says_why() -> None:
    for group in (*SETTINGS.values(), *TRAINING.values()):
        for name, setting in group.items():
            assert setting.kind == "same" or setting.note, name


def test_a_config_survives_pickling() -> None:
    config = PPOConfig().environment("CartPole-v1").training(lr=0.5)
    assert pickle.loads(pickle.dumps(config)).to_dict()["lr"] == 0.5


def test_an_env_may_be_a_class_with_one_argument() -> None:
    class Corridor(gym.Env[Any, Any]):
        observation_space = gym.spaces.Discrete(3)
        action_space = gym.spaces.Discrete(2)

        def __init__(self, config: Any) -> None:
            self.length = config["length"]
            assert config.worker_index == 0

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return 0, {}

        def step(self, action: Any) -> Any:
            return 0, 1.0, True, False, {}

    config = PPOConfig().environment(Corridor, env_config={"length": 5}).env_runners(num_env_runners=0)
    with config.training(train_batch_size=32, minibatch_size=32, num_epochs=1).build() as algo:
        assert algo.env_runner.env.envs[0].unwrapped.length == 5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SACConfig().training(lr=3e-4), "lr=0.0003: SAC has actor_lr, critic_lr and alpha_lr"),
        (SACConfig().rl_module(model_config={"fusionnet_hiddens": [9]}), "fusionnet_hiddens=.*use `fcnet_hiddens`"),
        (SACConfig().rl_module(model_config=DefaultModelConfig(free_log_std=True)), "free_log_std=True"),
        (
            PPOConfig().rl_module(model_config={"use_lstm": True, "lstm_kernel_initializer": "orthogonal_"}),
            "lstm_kernel_initializer=",
        ),
    ],
)
def test_settings_without_effect_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        to_native(config.environment("Pendulum-v1"))


def test_settings_that_rllib_does_not_read_are_no_errors():
    unread = {"fusionnet_hiddens": [9], "lstm_kernel_initializer": "orthogonal_"}
    assert native_of(PPOConfig().rl_module(model_config=unread)).model_config == native_of(PPOConfig()).model_config


def test_adam_of_sac_divides_by_the_epsilon_of_rllib():
    native = to_native(SACConfig().environment("Pendulum-v1"))
    assert native.optimizer_config == {"eps": 1e-7} and native.td_error_loss_fn == "huber"


EPISODES = "PrioritizedEpisodeReplayBuffer"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (PPOConfig().training(use_kl_loss=False, kl_coeff=0.5), {"kl_coeff": 0.0, "kl_target": None}),
        (PPOConfig().training(kl_coeff=0.0), {"kl_coeff": 0.0, "kl_target": None}),
        (
            PPOConfig().training(entropy_coeff_schedule=[[0, 0.1], [10, 0.0]]),
            {"entropy_coeff": [(0.0, 0.1), (10.0, 0.0)]},
        ),
        (PPOConfig().training(lr_schedule=[[0, 0.1], [10, 0.0]]), {"lr": [(0.0, 0.1), (10.0, 0.0)]}),
        (DQNConfig().training(adam_epsilon=0.25), {"optimizer_config": {"eps": 0.25}}),
        (DQNConfig(), {"optimizer_config": {}}),
        (DQNConfig().training(n_step=(2, 5)), {"n_step": (2, 4), "rollout_fragment_length": 5}),
        (DQNConfig().training(n_step=3), {"n_step": 3, "rollout_fragment_length": 3}),
        (
            DQNConfig().training(
                replay_buffer_config={
                    "type": EPISODES,
                    "capacity": 9,
                    "prioritized_replay_alpha": 0.1,
                    "prioritized_replay_beta": 0.2,
                    "prioritized_replay_eps": 0.3,
                }
            ),
            {
                "replay_buffer_config": {
                    "type": "prioritized",
                    "capacity": 9,
                    "alpha": 0.1,
                    "beta": 0.2,
                    "epsilon": 0.3,
                }
            },
        ),
        (PPOConfig().env_runners(remote_worker_envs=True), {"vectorization": "async"}),
        (PPOConfig().env_runners(gym_env_vectorize_mode="ASYNC"), {"vectorization": "async"}),
        (PPOConfig(), {"vectorization": "sync", "delay_between_env_runner_restarts_s": 1.0}),
        (
            PPOConfig().fault_tolerance(delay_between_env_runner_restarts_s=7.0),
            {"delay_between_env_runner_restarts_s": 7.0},
        ),
    ],
)
def test_settings_of_older_and_newer_scripts_reach_the_config_of_corral(
    config: AlgorithmConfig, expected: dict[str, Any]
) -> None:
    native = native_of(config)
    assert {name: getattr(native, name) for name in expected} == expected


def test_each_learning_rate_of_sac_is_its_own() -> None:
    config = SACConfig().environment("Pendulum-v1").training(actor_lr=0.1, critic_lr=0.2, alpha_lr=0.3)
    native = to_native(config)
    assert (native.actor_lr, native.critic_lr, native.alpha_lr) == (0.1, 0.2, 0.3)
    old = {"actor_learning_rate": 0.4, "critic_learning_rate": 0.5, "entropy_learning_rate": 0.6}
    native = to_native(SACConfig().environment("Pendulum-v1").training(optimization_config=old))
    assert (native.actor_lr, native.critic_lr, native.alpha_lr) == (0.4, 0.5, 0.6)


def test_overrides_of_a_module_win_over_the_settings_of_its_policy() -> None:
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .multi_agent(
            policies={"a": (None, None, None, {"lr": 0.1, "gamma": 0.5}), "b": (None, None, None, {})},
            policy_mapping_fn=lambda agent_id, *args, **kwargs: "a",
            policies_to_train=["b"],
            algorithm_config_overrides_per_module={"a": PPOConfig.overrides(lr=0.2)},
        )
    )
    native = to_native(config)
    assert native.algorithm_config_overrides_per_module == {"a": {"lr": 0.2, "gamma": 0.5}}
    assert [*native.policies_to_train] == ["b"]
    assert native.policy_mapping_fn("x", None) == "a"


def test_connectors_are_made_again_for_another_env() -> None:
    seen: list[Any] = []

    def connect(env: Any, spaces: Any, device: Any) -> list[Any]:
        seen.append(env.single_observation_space.shape)
        return [MeanStdFilter()]

    config = PPOConfig().env_runners(env_to_module_connector=connect)
    to_native(config.environment("CartPole-v1"))
    to_native(config.environment("Pendulum-v1"))
    assert seen == [(4,), (3,)]


def test_functions_at_events_are_settings_that_each_config_has() -> None:
    """Tune refuses to restore trials with settings that the first config did not have."""
    plain, listening = PPOConfig(), PPOConfig().callbacks(on_algorithm_init=print, on_episode_end=[print, print])
    assert plain.to_dict().keys() == listening.to_dict().keys()
    assert plain.callback_functions == {}
    assert listening.callback_functions == {"on_algorithm_init": [print], "on_episode_end": [print, print]}
    assert listening.callbacks(on_episode_end=None).callback_functions == {"on_algorithm_init": [print]}
    again = PPOConfig.from_dict(listening.to_dict())
    assert again.callback_functions == {"on_algorithm_init": [print]}


@pytest.mark.parametrize("env_config", [{}, {"length": 3}])
def test_the_first_parameter_of_an_env_receives_the_context_whatever_its_name_is(env_config: dict[str, Any]) -> None:
    seen: list[Any] = []

    class Named(gym.Env[Any, Any]):
        observation_space, action_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)

        def __init__(self, c=None) -> None:  # type: ignore[no-untyped-def]
            seen.append(c)

    class Unusual(Named):
        def __init__(self, settings=None) -> None:  # type: ignore[no-untyped-def]
            seen.append(settings)

    for env in (Named, Unusual) if env_config else (Named,):
        native = to_native(PPOConfig().environment(env, env_config=env_config))
        native.validate()
        make_vector_env(native.env, EnvContext(native.env_config), num_envs=1, check=False).close()
        assert isinstance(seen[-1], EnvContext) and seen[-1] == env_config
