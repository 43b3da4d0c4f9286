"""Names of RLlib's objects: each is served, or the error says what to use instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import corral
from corral.compat.rllib.algorithm import PPO, PPOConfig
from corral.compat.rllib.callbacks import RLlibCallback
from corral.compat.rllib.episodes import SingleAgentEpisode
from corral.compat.rllib.helpers import NotProvided, _gym_env_creator
from corral.compat.rllib.lookback_buffers import InfiniteLookbackBuffer
from corral.compat.rllib.metrics import MetricsLogger
from corral.compat.rllib.missing import REMEDIES
from corral.compat.rllib.modules import MultiRLModuleSpec, RLModule, RLModuleSpec
from corral.compat.rllib.policies import PolicySpec
from corral.compat.rllib.runners import EnvRunnerGroup
from corral.core.metrics.reduction_settings import MetricsError
from corral.errors import CheckpointError, ConfigError, EnvError, UnknownAttributeError


def small() -> PPOConfig:
    config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0).debugging(seed=0)
    return config.training(train_batch_size=100, minibatch_size=50, num_epochs=1)


def of_two_modules() -> PPOConfig:
    config = small().environment(corral.make_multi_agent("CartPole-v1"), env_config={"num_agents": 2})
    return config.multi_agent(policies={"p0", "p1"}, policy_mapping_fn=lambda agent, *args, **kwargs: f"p{agent}")


@pytest.fixture(scope="module")
def algo() -> Iterator[PPO]:
    with small().evaluation(evaluation_interval=1, evaluation_duration=1).build_algo() as made:
        made.train()
        yield made


OBS = np.full(4, 0.1, np.float32)


def weights_of(algo: Any, module_id: str = "default_policy") -> dict[str, Any]:
    found: dict[str, Any] = algo.get_module(module_id).get_state()
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


# Modules and learners in files.


def test_a_default_module_is_saved_and_loaded_alone(algo: PPO, tmp_path: Path) -> None:
    module = algo.get_module()
    loaded = RLModule.from_checkpoint(module.save_to_path(tmp_path / "module"))
    assert same(loaded.get_state(), module.get_state())
    with small().debugging(seed=7).build_algo() as other:
        other.get_module().restore_from_path(tmp_path / "module")
        assert same(weights_of(other), module.get_state())


def test_learners_continue_from_their_files(tmp_path: Path) -> None:
    with small().build_algo() as one, small().debugging(seed=7).build_algo() as other:
        one.train()
        path = one.learner_group.save_to_path(tmp_path / "learners")
        other.learner_group.restore_from_path(path)
        assert same(weights_of(other), weights_of(one))
        (in_runner,) = other.env_runner_group.foreach_env_runner("get_weights")
        assert same(in_runner["default_policy"], weights_of(one))
        states = [repr(each.learner_group.get_state()) for each in (one, other)]
        without_times = [re.sub(r"'period_s': [-.e\d]+", "", state) for state in states]
        assert without_times[0] == without_times[1]  # of the optimizer too
        assert Path(path, "learner/rl_module/default_policy/module_state.safetensors").is_file()
        with pytest.raises(CheckpointError, match=r"restored by algo.restore_from_path"):
            other.learner_group.restore_from_path(one.save_to_path(tmp_path / "whole"))


@pytest.mark.parametrize(
    "load",
    [
        lambda group, path: group.load_module_state(multi_rl_module_ckpt_dir=path),
        lambda group, path: group.load_module_state(multi_rl_module_ckpt_dir=path, modules_to_load={"p0", "p1"}),
        lambda group, path: group.load_module_state(rl_module_ckpt_dirs={"p0": f"{path}/p0", "p1": Path(path) / "p1"}),
        lambda group, path: group.restore_from_path(path, component="learner/rl_module"),
    ],
)
def test_weights_of_modules_are_loaded_from_directories(load: Callable[..., Any], tmp_path: Path) -> None:
    with of_two_modules().build_algo() as one, of_two_modules().debugging(seed=7).build_algo() as other:
        saved = one.save_to_path(tmp_path / "whole")
        assert not same(weights_of(other, "p1"), weights_of(one, "p1"))
        load(other.learner_group, str(Path(saved, "learner_group/learner/rl_module")))
        assert all(same(weights_of(other, name), weights_of(one, name)) for name in ("p0", "p1"))


def test_all_modules_of_a_checkpoint_are_a_component_of_the_algorithm(tmp_path: Path) -> None:
    with of_two_modules().build_algo() as one, of_two_modules().debugging(seed=7).build_algo() as other:
        saved = Path(one.save_to_path(tmp_path / "whole"))
        component = "learner_group/learner/rl_module"
        other.restore_from_path(saved / component, component=component)
        assert all(same(weights_of(other, name), weights_of(one, name)) for name in ("p0", "p1"))
        with pytest.raises(CheckpointError, match="component='env_runner'"):
            other.restore_from_path(saved, component="env_runner")


def test_loading_nothing_is_refused_as_in_rllib(algo: PPO) -> None:
    with pytest.raises(ValueError, match="rl_module_ckpt_dirs"):
        algo.learner_group.load_module_state()
    with pytest.raises(ValueError, match="modules_to_load needs"):
        algo.learner_group.load_module_state(modules_to_load={"a"}, rl_module_ckpt_dirs={"a": "b"})
    with pytest.raises(ConfigError, match="losses of PPO"):
        algo.learner_group.update_from_episodes(episodes=algo.env_runner.sample(num_episodes=1))


# Algorithms, runners and groups.


def test_parts_of_an_algorithm(algo: PPO) -> None:
    assert Path(algo.logdir).is_dir() and algo.logdir == algo.logdir
    assert algo.evaluation_config.in_evaluation and algo.evaluation_config.is_frozen
    assert algo.env_to_module_connector is algo.env_runner.connectors[0]
    assert algo.module_to_env_connector is algo.env_runner.connectors[1]
    assert algo.get_config() is algo.config and algo.restore_workers() == []
    assert algo.eval_env_runner.config.in_evaluation


def test_spaces_and_weights_of_runners(algo: PPO) -> None:
    spaces = algo.env_runner.get_spaces()
    assert spaces.keys() == {"__env__", "__env_single__", "default_policy"}
    assert spaces["default_policy"] == (algo.env_runner.env.envs[0].observation_space, gym.spaces.Discrete(2))
    assert algo.env_runner_group.get_spaces() == spaces == algo.env_runner.spaces
    assert same(algo.env_runner.get_weights()["default_policy"], weights_of(algo))
    assert algo.env_runner.num_workers == 0 and algo.env_runner.assert_healthy() is None
    assert algo.env_runner_group.foreach_worker_with_id(lambda i, worker: (i, worker.worker_index)) == [(0, 0)]


def test_callbacks_of_runners_are_a_list_that_has_the_attributes_of_the_first(algo: PPO) -> None:
    class Counting(RLlibCallback):
        def __init__(self) -> None:
            self.num_ended = 0

        def on_episode_end(self, **kwargs: Any) -> None:
            self.num_ended += 1

    with small().callbacks(Counting).build_algo() as made:
        made.train()
        (count,) = made.env_runner_group.foreach_env_runner(lambda runner: runner._callbacks[0].num_ended)
        assert count == made.env_runner.callbacks.num_ended > 0
        assert isinstance(made.callbacks[0], Counting)
    noted: list[Any] = []
    with small().callbacks({"on_episode_end": noted.append}).build_algo() as made:
        made.train()
        assert isinstance(made.env_runner.callbacks[0], RLlibCallback) and noted
    assert type(algo.env_runner.callbacks[0]) is RLlibCallback  # which does nothing


def test_a_group_of_a_config_has_a_runner_in_this_process() -> None:
    group = EnvRunnerGroup(config=small())
    (episodes,) = group.foreach_env_runner(lambda runner: runner.sample(num_episodes=2))
    assert [episode.is_done for episode in episodes] == [True, True]
    group.stop()
    with pytest.raises(ConfigError, match=r"num_env_runners=0; or use config.build_algo\(\).env_runner_group"):
        EnvRunnerGroup(config=small().env_runners(num_env_runners=2))


# Configs and specs.


def test_specs_of_a_config() -> None:
    env = gym.make("CartPole-v1")
    spec = PPOConfig().get_rl_module_spec(env=env)
    assert (spec.observation_space, spec.action_space) == (env.observation_space, env.action_space)
    config = PPOConfig().multi_agent(policies={"a", "b"}, policies_to_train=["a"])
    with pytest.raises(ConfigError, match="there are several modules"):
        config.get_rl_module_spec(env=env)
    specs, is_trained = config.get_multi_agent_setup(env=env)
    assert specs.keys() == {"a", "b"} and specs["a"].observation_space == env.observation_space
    assert [is_trained(name, None) for name in "ab"] == [True, False]
    spaces = {"a": (env.observation_space, gym.spaces.Discrete(3)), "__env__": (env.observation_space, None)}
    specs, is_trained = config.get_multi_agent_setup(policies={"a": PolicySpec()}, spaces=spaces)
    assert specs["a"].action_space == gym.spaces.Discrete(3)
    with pytest.raises(ValueError, match="observation_space of 'a' is not known"):
        config.get_multi_agent_setup(policies=["a"])
    assert config.is_online and not config.is_offline and config.uses_new_env_runners
    assert config.multiagent["policies_to_train"] == ["a"]


def test_policies_have_the_spaces_of_their_agents() -> None:
    class Different(corral.MultiAgentEnv):
        possible_agents = agents = ["x", "y"]  # noqa: RUF012
        observation_spaces = {"x": gym.spaces.Discrete(2), "y": gym.spaces.Discrete(3)}  # noqa: RUF012
        action_spaces = dict.fromkeys("xy", gym.spaces.Discrete(2))

        def get_observation_space(self, agent_id: Any) -> Any:
            return self.observation_spaces[agent_id]

        def get_action_space(self, agent_id: Any) -> Any:
            return self.action_spaces[agent_id]

    config = PPOConfig().multi_agent(policies={"x", "y"}, policy_mapping_fn=lambda agent, *args, **kwargs: agent)
    specs, _ = config.get_multi_agent_setup(env=Different())
    assert [specs[name].observation_space.n for name in "xy"] == [2, 3]
    config.multi_agent(policy_mapping_fn=lambda agent, *args, **kwargs: "x")
    with pytest.raises(ValueError, match="mapped to 'x' have different spaces"):
        config.get_multi_agent_setup(env=Different())


@pytest.mark.parametrize(
    "wrong",
    [
        {"policies": 3},
        {"policies": "p0"},
        {"policies": {"a": 3}},
        {"policies": {"a": (None, None)}},
        {"policies": {"a": PolicySpec(config=3)}},
        {"policy_mapping_fn": "a"},
        {"policies_to_train": "a"},
        {"policies_to_train": 3},
        {"count_steps_by": "steps"},
    ],
)
def test_wrong_values_of_multi_agent_are_errors_of_the_type_that_rllib_raises(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PPOConfig().multi_agent(**wrong)


def test_values_of_multi_agent_that_are_not_given_are_taken() -> None:
    config = PPOConfig().multi_agent(policies={"a": None, "b": (None, None, None, {})}, policy_mapping_fn=NotProvided)
    assert config.policies.keys() == {"a", "b"} and config.policy_mapping_fn is None


def test_specs_are_updated_by_others() -> None:
    spec = RLModuleSpec(model_config={"a": 1})
    spec.update(RLModuleSpec(model_config={"b": 2}, inference_only=True))
    assert spec.model_config == {"b": 2} and spec.inference_only and not spec.learner_only
    spec.update(RLModuleSpec(model_config={"c": 3}, catalog_class=int), override=False)
    assert spec.model_config == {"b": 2} and spec.catalog_class is int
    with pytest.raises(ValueError, match="no RLModuleSpec"):
        spec.update({"model_config": {}})  # type: ignore[arg-type]
    whole = spec.as_multi_rl_module_spec()
    whole.update(MultiRLModuleSpec(rl_module_specs={"other": spec}))
    assert whole.rl_module_specs.keys() == {"default_policy", "other"} and whole.as_multi_rl_module_spec() is whole
    whole.update(RLModuleSpec(model_config={"d": 4}, module_class=int))  # of one module: only what is missing
    assert spec.to_dict()["model_config"] == {"b": 2} and spec.module_class is int
    whole.update(MultiRLModuleSpec(rl_module_specs={"other": RLModuleSpec(model_config={"e": 5})}))
    assert whole["other"] is spec and spec.model_config == {"e": 5} and spec.module_class is int
    whole.add_modules({"other": RLModuleSpec(model_config={"f": 6})}, override=False)
    assert whole["other"] is spec and spec.model_config == {"f": 6}
    whole.update(MultiRLModuleSpec(rl_module_specs={"other": RLModuleSpec()}), override=True)
    assert whole["other"].module_class is None
    whole.remove_modules("other")
    assert whole.rl_module_specs.keys() == {"default_policy"}


def test_the_creator_of_gymnasium_envs() -> None:
    assert _gym_env_creator({"render_mode": None}, "CartPole-v1").spec.id == "CartPole-v1"
    assert _gym_env_creator({"a": 1}, dict) == {"a": 1}
    with pytest.raises(EnvError, match="NoSuch-v0"):
        _gym_env_creator({}, "NoSuch-v0")


# Metrics.


def test_values_of_a_logger_are_replaced_and_deleted() -> None:
    logger = MetricsLogger(root=True)
    logger.log_value(("a", "b"), 1.0, reduce="sum")
    logger.log_value("c", 2.0, reduce="min")
    assert logger.stats == {"a": {"b": 1.0}, "c": 2.0} and ("a", "b") in logger and "d" not in logger
    logger.set_value("c", 5.0)
    assert logger.peek("c") == 5.0
    logger.delete("a", "b")
    assert logger.stats == {"c": 5.0}
    logger.log_value("a", 3.0)  # the group is gone, too
    with pytest.raises(KeyError, match="d"):
        logger.delete("d")
    logger.delete("d", key_error=False)
    assert logger.compile()["a"] == 3.0
    with pytest.raises(ConfigError, match="stats_cls_lookup"):
        MetricsLogger(stats_cls_lookup={})


def test_own_keys_of_the_library_are_not_deleted(algo: PPO) -> None:
    with pytest.raises(MetricsError):
        algo.native.metrics.delete(("env_runners", "num_env_steps_sampled_lifetime"))


# Episodes.


@pytest.mark.parametrize("infos", [[0, 1, 2], ["a", "b", "c"], [None, (1, 2), 0.5], [{"a": 1}, {}, {"b": 2}]])
def test_infos_of_episodes_built_by_hand_may_be_no_dicts(infos: list[Any]) -> None:
    episode = SingleAgentEpisode(
        observations=[OBS, OBS, OBS], actions=[0, 1], rewards=[1.0, 2.0], infos=infos, len_lookback_buffer=0
    )
    expected = [{} if info is None else info for info in infos]
    assert episode.get_infos() == expected and episode.infos[1] == infos[1]
    assert episode.get_infos([0, -1]) == [expected[0], infos[-1]]
    episode.add_env_step(OBS, 0, 3.0, infos="more")
    assert episode.get_infos(-1) == "more" and episode[1:3].get_infos() == [*expected[1:], "more"]
    assert episode.cut().get_infos() == ["more"]
    assert SingleAgentEpisode.from_state(episode.get_state()).get_infos() == [*expected, "more"]


def with_lookback() -> SingleAgentEpisode:
    return SingleAgentEpisode(
        observations=[i * np.ones(2) for i in range(6)],
        actions=[0, 1, 0, 1, 1],
        rewards=[0.0, 1.0, 2.0, 3.0, 4.0],
        infos=[{"t": t} for t in range(6)],
        extra_model_outputs={"action_logp": [-0.0, -1.0, -2.0, -3.0, -4.0]},
        observation_space=gym.spaces.Box(0, 9, (2,)),
        action_space=gym.spaces.Discrete(2),
        len_lookback_buffer=2,
    )


def test_data_of_an_episode_are_arrays_from_the_first_step_on() -> None:
    episode = with_lookback()
    assert episode.is_numpy and episode.to_numpy() is episode and episode.finalize() is episode


def test_buffers_of_an_episode_have_its_lookback_in_front() -> None:
    episode = with_lookback()
    assert (len(episode.rewards), len(episode.rewards.data), episode.rewards.lookback) == (3, 5, 2)
    assert (len(episode.observations), len(episode.infos.data), len(episode.actions)) == (4, 6, 3)
    assert episode.rewards[0] == 2.0 and episode.rewards[-1] == 4.0 and episode.rewards[1:].tolist() == [3.0, 4.0]
    assert episode.rewards.get(-1, neg_index_as_lookback=True) == 1.0
    assert episode.rewards.get(slice(2, 5), fill=0.0).tolist() == [4.0, 0.0, 0.0]
    assert episode.actions.get([0, 1], one_hot_discrete=True).tolist() == [[1, 0], [0, 1]]
    assert episode.observations[0:2, 0].tolist() == [2, 3] and episode.observations[0, 1] == 2
    assert episode.observations.data[0].tolist() == [0, 0] and episode.observations.space.shape == (2,)
    assert len(episode.extra_model_outputs["action_logp"].data) == 5
    assert [info["t"] for info in episode.infos] == [2, 3, 4, 5]


def test_buffers_are_used_as_the_arrays_that_they_hold() -> None:
    rewards = with_lookback().rewards
    assert np.sum(rewards) == rewards.sum() == sum(rewards) == 9.0 and rewards.shape == (3,)
    assert (2 * rewards + rewards).tolist() == [6.0, 9.0, 12.0] and (rewards == [2, 3, 4]).all()
    assert np.concatenate([rewards, rewards]).shape == (6,) and rewards[rewards > 2].tolist() == [3.0, 4.0]


def test_writes_to_a_buffer_are_writes_to_the_episode() -> None:
    episode = with_lookback()
    episode.rewards[0] = 7.0
    episode.rewards.set(-1.0, at_indices=-1, neg_index_as_lookback=True)
    episode.observations[0, 1] = 5.0
    assert episode.get_rewards(slice(-2, 1), neg_index_as_lookback=True).tolist() == [0.0, -1.0, 7.0]
    assert episode.get_observations(0).tolist() == [2, 5]
    episode.extra_model_outputs["action_logp"][0] = -9.0
    assert episode.get_extra_model_outputs("action_logp", 0) == -9.0
    with pytest.raises(AttributeError, match="use add_env_step"):
        episode.rewards.append(1.0)


@pytest.mark.parametrize("is_finalized", [False, True])
def test_a_buffer_of_its_own_grows(is_finalized: bool) -> None:
    buffer = InfiniteLookbackBuffer([0, 1, 2, 3], lookback=1)
    if is_finalized:
        buffer.finalize()
    assert buffer.finalized is is_finalized and list(buffer) == [1, 2, 3] and len(buffer) == 3
    buffer.append(4)
    hot = InfiniteLookbackBuffer([0, 1], space=gym.spaces.Discrete(2)).get([-1], one_hot_discrete=True)
    assert np.asarray(hot).tolist() == [[0.0, 1.0]]
    buffer.concat(InfiniteLookbackBuffer([5]))
    buffer.pop()
    buffer[0] = 9
    assert list(buffer) == [9, 2, 3, 4] and buffer.get(-1, neg_index_as_lookback=True) == 0
    assert buffer.get(9, fill=-1) == -1 and buffer.len_incl_lookback() == 5
    with pytest.raises(IndexError):
        buffer[9]


# What is not there.

OBJECTS: dict[str, Callable[[Any], Any]] = {
    "Algorithm": lambda algo: algo,
    "LearnerGroup": lambda algo: algo.learner_group,
    "EnvRunner": lambda algo: algo.env_runner,
    "EnvRunnerGroup": lambda algo: algo.env_runner_group,
    "AlgorithmConfig": lambda algo: algo.config,
    "MetricsLogger": lambda algo: algo.metrics,
    "RLModule": lambda algo: algo.get_module(),
}


@pytest.mark.parametrize("owner", OBJECTS)
def test_names_that_are_not_there_say_what_to_use(owner: str, algo: PPO) -> None:
    view = OBJECTS[owner](algo)
    for name, remedy in REMEDIES[owner].items():
        assert not hasattr(view, name)
        with pytest.raises(UnknownAttributeError) as caught:
            getattr(view, name)
        assert str(caught.value) == f"{owner}.{name} is not in Corral: {remedy}."
    with pytest.raises(AttributeError, match="no attribute 'nothing_like_it'"):
        view.nothing_like_it  # noqa: B018


def test_a_name_that_is_near_is_named(algo: PPO) -> None:
    with pytest.raises(AttributeError, match=r"EnvRunner has no attribute 'num_envz'. Did you mean 'num_envs'\?"):
        algo.env_runner.num_envz  # noqa: B018
