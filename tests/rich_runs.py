"""Small runs that have something to remember in every part of the state."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from corral import (
    AlgorithmConfig,
    APPOConfig,
    Callback,
    CQLConfig,
    DQNConfig,
    FrameStack,
    IMPALAConfig,
    MARWILConfig,
    NormalizeObservations,
    NormalizeRewards,
    PPOConfig,
    PrevActionsPrevRewards,
    SACConfig,
    TD3Config,
)
from corral.callbacks.curriculum import LearningProgressSampler, ThresholdCurriculum
from corral.runs.checkpoint import codec
from corral.testing import BitFlippingEnv
from random_agents import RandomAgents


class Gusts(gym.Env[NDArray[np.float32], Any]):
    """A random walk that has a task, and fails now and then."""

    observation_space: Any = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        config = config or {}
        self.action_space: Any = spaces.Box(-1.0, 1.0, (2,), np.float32) if config.get("box") else spaces.Discrete(3)
        self.fails, self.ends = config.get("fails", 0.0), config.get("ends", 0.03)
        self.task, self.size = 1, config.get("size", 1)
        self.place, self.t = np.zeros(2), 0

    def get_task(self) -> Any:
        return self.task

    def set_task(self, task: Any) -> None:
        self.task = task

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place, self.t = self.np_random.normal(size=2), 0
        return self.place.astype(np.float32), {"task": self.task}

    def step(self, action: Any) -> Any:
        self.t += 1
        self.place = 0.9 * self.place + 0.1 * float(np.mean(action)) + 0.05 * self.draw() * self.size
        if self.np_random.random() < self.fails:
            raise OSError("the simulator is gone")
        over = bool(self.np_random.random() < self.ends)
        return self.place.astype(np.float32), self.task - float(np.abs(self.place).sum()), over, False, {"t": self.t}

    def draw(self) -> float:
        """The gust of a step."""
        return float(self.np_random.normal())


class SavedGusts(Gusts):
    """The same env with methods for its state, which draws from all generators of the process."""

    def draw(self) -> float:
        return random.gauss() + float(np.random.normal()) + torch.randn(()).item()

    def get_state(self) -> dict[str, Any]:
        return {"place": self.place, "t": self.t}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.place, self.t = np.array(state["place"]), state["t"]


class Busy(Callback):
    """Counts in every process, logs with every reduction, and raises exceptions, which are only counted."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_result(self, *, metrics_logger: Any, **kwargs: Any) -> None:
        self._log(metrics_logger)
        raise ValueError("of the algorithm")

    def on_sample_end(self, *, metrics_logger: Any, **kwargs: Any) -> None:
        self._log(metrics_logger)
        metrics_logger.log_value("rate_here", metrics_logger.peek("total_throughput"))
        raise ValueError("of a runner")

    def on_update_end(self, *, metrics_logger: Any, **kwargs: Any) -> None:
        self._log(metrics_logger)
        raise ValueError("of a learner")

    def _log(self, logger: Any) -> None:
        self.count += 1
        value = float((7 * self.count) % 5) + 1.0
        logger.log_value("now", self.count)
        logger.log_value("window", value, reduce="mean", window=3)
        logger.log_value("average", value, ema_coeff=0.3)
        logger.log_value("largest", -value, reduce="max")
        logger.log_value("total", value, reduce="sum", with_throughput=True)
        logger.log_value("ever", value, reduce="lifetime_sum", with_throughput=True)
        logger.log_value("shape", np.array([value, 2 * value]), reduce="mean", window=4)

    def on_episode_start(self, *, episode: Any, **kwargs: Any) -> None:
        episode.custom_data["began"] = self.count

    def on_episode_step(self, *, episode: Any, **kwargs: Any) -> None:
        episode.add_temporary_timestep_data("times", episode.t)

    def on_episode_end(self, *, episode: Any, prev_episode_chunks: Any, metrics_logger: Any, **kwargs: Any) -> None:
        chunks = [*prev_episode_chunks, episode]
        metrics_logger.log_value("chunks_seen", checksum(prev_episode_chunks), reduce="mean", window=20)
        times = episode.get_temporary_timestep_data("times")
        metrics_logger.log_value("times", float(sum(times)), reduce="mean", window=20)
        metrics_logger.log_value("began", episode.custom_data["began"], reduce="mean", window=20)
        metrics_logger.log_value("chunks", float(sum(chunk.get_rewards().sum() for chunk in chunks)), reduce="min")
        infos = codec.encode([chunk.get_infos() for chunk in chunks])
        metrics_logger.log_value("infos", float(zlib.crc32(infos)), reduce="mean", window=20)
        metrics_logger.log_value("duration_s", episode.get_duration_s(), reduce="mean", window=20)

    def get_state(self) -> Any:
        return {"count": self.count}

    def set_state(self, state: Any) -> None:
        self.count = state["count"]


def checksum(chunks: Any) -> float:
    """A number that depends on all that chunks of an episode hold."""
    states = [chunk.get_state() for chunk in chunks]
    for state in states:
        state["module_ids"] = sorted(state.get("module_ids", ()))  # whose order nothing depends on
    return float(zlib.crc32(codec.encode(states)))


def limited(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    return gym.wrappers.TimeLimit(env, 20)


def choose_reset(env_index: int, episode_index: int) -> dict[str, int]:
    return {"seed": 100 * env_index + episode_index}


class ChangesSettings(Callback):
    """Changes settings of the optimizer by hand in the first iteration."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def on_train_result(self, *, algorithm: Any, **kwargs: Any) -> None:
        if algorithm.training_iteration == 1:
            optimizer = algorithm.learner_group.learner_here.torch_optimizer("default_policy")
            optimizer.param_groups[0].update(self.settings)


SMALL_NET: dict[str, Any] = {"fcnet_hiddens": [4]}
REPLAY: dict[str, Any] = {
    "train_batch_size_per_learner": 16,
    "num_steps_sampled_before_learning_starts": 20,
    "training_intensity": 2.0,
    "target_network_update_freq": 30,
}
IN_TURN: dict[str, Any] = {
    "evaluation_interval": 2,
    "evaluation_duration": 20,
    "evaluation_duration_unit": "timesteps",
    "evaluation_force_reset_envs_before_iteration": False,
}


def _begin(config: Any, env: Any = SavedGusts, **env_config: Any) -> Any:
    config.environment(env, env_config=env_config, wrappers=[limited])
    config.env_runners(num_envs_per_env_runner=3).debugging(seed=3).rl_module(model_config=SMALL_NET)
    if isinstance(config, PPOConfig):
        config.training(train_batch_size_per_learner=48, minibatch_size=24, num_epochs=1, lr=[[0, 1e-2], [900, 1e-3]])
    elif isinstance(config, IMPALAConfig):  # one runner in this process: between iterations nothing is under way
        config.env_runners(num_env_runners=0, rollout_fragment_length=4).training(train_batch_size_per_learner=12)
        config.reporting(min_sample_timesteps_per_iteration=48)
    elif not isinstance(config, MARWILConfig):
        config.training(**REPLAY).reporting(min_sample_timesteps_per_iteration=40)
    return config


def ppo() -> AlgorithmConfig:
    """PPO with evaluation that carries over, failing envs and a busy callback."""
    config = _begin(PPOConfig(), fails=0.02).evaluation(**IN_TURN).env_runners(rollout_fragment_length=4)
    config.training(kl_coeff=0.2, kl_target=1e-6).fault_tolerance(restart_failed_sub_environments=True)
    return config.callbacks(Busy, on_error="log")


def ppo_with_memory() -> AlgorithmConfig:
    """PPO with an LSTM, transforms and RND."""
    config = _begin(PPOConfig())
    config.rl_module(model_config={"fcnet_hiddens": [4], "use_lstm": True, "lstm_cell_size": 4, "max_seq_len": 5})
    config.env_runners(transforms=[NormalizeObservations(), PrevActionsPrevRewards(2, 2), NormalizeRewards()])
    rnd = {"type": "RND", "embed_dim": 4, "distill_net_config": {"fcnet_hiddens": [4]}}
    return config.exploration(exploration_config=rnd)


def ppo_in_a_curriculum() -> AlgorithmConfig:
    """PPO with Adafactor and a scheduler, RE3 whose weight decays, and a curriculum, on an env without methods."""
    config = _begin(PPOConfig(), Gusts, size=2)
    config.reporting(metrics_num_episodes_for_smoothing=1)
    config.env_runners(autoreset_mode="same_step").training(
        optimizer=torch.optim.Adafactor, optimizer_config={"weight_decay": 0.1}, lr=0.01, lr_scheduler=_decaying
    )
    re3 = {"type": "RE3", "embeds_dim": 4, "beta_schedule": "linear_decay", "k_nn": 3, "memory_size": 60}
    config.exploration(exploration_config=re3 | {"encoder_net_config": {"fcnet_hiddens": [4]}})
    config.callbacks(ThresholdCurriculum([2, 3, 4, 5, 6, 7], -100.0))
    return config.add_callbacks(ThresholdCurriculum([2, 3], 1.0, metric="num_env_steps_sampled_lifetime", patience=5))


def _decaying(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def dqn_with_priorities() -> AlgorithmConfig:
    """DQN with priorities, several steps, stacked frames and a schedule of epsilon."""
    config = _begin(DQNConfig())
    epsilon = {"type": "EpsilonGreedy", "initial_epsilon": 1.0, "final_epsilon": 0.1, "epsilon_timesteps": 200}
    config.exploration(exploration_config=epsilon).env_runners(transforms=[FrameStack(2)])
    replay = {"type": "prioritized", "capacity": 300}
    return config.training(replay_buffer_config=replay, n_step=(1, 3), target_network_update_freq=70)


def dqn_with_memory() -> AlgorithmConfig:
    """DQN with a GRU, whose states are in the buffer, and noisy weights."""
    config = _begin(DQNConfig(), Gusts, ends=0.3).env_runners(autoreset_mode="same_step")
    rnd = {"type": "RND", "embed_dim": 4, "distill_net_config": {"fcnet_hiddens": [4]}}
    config.exploration(exploration_config=rnd)
    memory = {"fcnet_hiddens": [4], "use_gru": True, "gru_cell_size": 4, "max_seq_len": 4}
    return config.rl_module(model_config=memory).training(burn_in_len=2)


def noisy_dqn() -> AlgorithmConfig:
    """DQN with noisy weights and normalized observations."""
    config = _begin(DQNConfig(), ends=0.5).environment(env_reset_fn=choose_reset)
    config.env_runners(transforms=[NormalizeObservations(), NormalizeRewards()]).callbacks(Busy, on_error="log")
    return config.training(noisy=True)


def sac_with_noise_of_weights() -> AlgorithmConfig:
    """SAC with noise of the policy's weights."""
    config = _begin(SACConfig(), box=True)
    return config.exploration(exploration_config={"type": "ParameterNoise", "random_timesteps": 10})


def td3_with_noise() -> AlgorithmConfig:
    """TD3 with an Ornstein-Uhlenbeck process."""
    config = _begin(TD3Config(), box=True).training(policy_delay=3)
    return config.exploration(exploration_config={"type": "OrnsteinUhlenbeckNoise", "random_timesteps": 10})


def impala() -> AlgorithmConfig:
    """IMPALA whose runner has weights that are some updates old, with RMSProp and evaluation that carries over."""
    config = _begin(IMPALAConfig(), fails=0.02).evaluation(**IN_TURN)
    config.fault_tolerance(restart_failed_sub_environments=True)
    config.training(broadcast_interval=5, optimizer="rmsprop", optimizer_config={"momentum": 0.5}, lr=0.01)
    return config.callbacks(Busy, on_error="log")


def appo() -> AlgorithmConfig:
    """APPO with an LSTM, transforms, an adaptive penalty, and a target policy between two changes."""
    config = _begin(APPOConfig()).training(use_kl_loss=True, kl_target=1e-4, lr=[[0, 1e-2], [900, 1e-3]])
    config.training(circular_buffer_num_batches=5, target_network_update_freq=1, tau=0.5)
    config.rl_module(model_config={"fcnet_hiddens": [4], "use_lstm": True, "lstm_cell_size": 4, "max_seq_len": 5})
    return config.env_runners(transforms=[NormalizeObservations(), PrevActionsPrevRewards(2, 2), NormalizeRewards()])


def _of_agents(config: Any, **env_config: Any) -> Any:
    config.environment(RandomAgents, env_config={"num_agents": 3} | env_config)
    config.env_runners(num_envs_per_env_runner=2).debugging(seed=3).rl_module(model_config=SMALL_NET)
    config.multi_agent(
        policies={"one", "other"}, policy_mapping_fn=lambda agent, *a, **k: "one" if agent == "a0" else "other"
    )
    return config


def ppo_with_agents() -> AlgorithmConfig:
    """PPO with several agents in two modules, with memory, transforms and a busy callback."""
    config = _of_agents(PPOConfig())
    config.training(train_batch_size_per_learner=40, minibatch_size=20, num_epochs=1)
    config.rl_module(model_config={"fcnet_hiddens": [4], "use_lstm": True, "lstm_cell_size": 4, "max_seq_len": 5})
    config.env_runners(transforms=[NormalizeRewards(), PrevActionsPrevRewards()], rollout_fragment_length=3)
    return config.callbacks(BusyWithAgents)


def dqn_with_agents() -> AlgorithmConfig:
    """DQN with several agents in two modules."""
    config = _of_agents(DQNConfig(), num_agents=5, seed=7)
    return config.training(**REPLAY).reporting(min_sample_timesteps_per_iteration=40)


def _recorded() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "obs": rng.normal(size=(60, 2)).astype(np.float32),
        "actions": rng.integers(0, 3, 60),
        "rewards": rng.normal(size=60),
        "terminated": np.arange(1, 61) % 10 == 0,
    }


def cql_from_data_to_the_env() -> AlgorithmConfig:
    """CQL from recorded steps, which has just begun to sample, and still imitates."""
    config = _begin(CQLConfig()).offline_data(input_=_recorded())
    config.training(num_offline_updates=6, num_updates_per_iteration=3, num_imitation_updates=30)
    return config.training(train_batch_size_per_learner=8, lagrangian=True)


def marwil() -> AlgorithmConfig:
    """MARWIL from recorded steps, with statistics of transforms, validation, a moving scale and evaluation."""
    config = _begin(MARWILConfig()).evaluation(**IN_TURN)
    config.offline_data(input_=_recorded(), validation_fraction=0.3)
    config.env_runners(transforms=[NormalizeObservations(), NormalizeRewards()])
    config.training(num_updates_per_iteration=3, train_batch_size_per_learner=8, lr=[[0, 1e-2], [200, 1e-3]])
    return config.training(moving_average_sqd_adv_norm_update_rate=0.5)


class BusyWithAgents(Callback):
    """Notes on episodes of several agents, and reads earlier chunks."""

    def on_episode_start(self, *, episode: Any, **kwargs: Any) -> None:
        episode.custom_data["began"] = 7.0

    def on_episode_end(self, *, episode: Any, prev_episode_chunks: Any, metrics_logger: Any, **kwargs: Any) -> None:
        metrics_logger.log_value("began", episode.custom_data["began"], reduce="mean", window=20)
        chunks = [*prev_episode_chunks, episode]
        metrics_logger.log_value("chunks_seen", checksum(prev_episode_chunks), reduce="mean", window=20)
        metrics_logger.log_value("rewards", float(sum(chunk.get_return() for chunk in chunks)), reduce="max")


def ppo_that_samples_tasks() -> AlgorithmConfig:
    """PPO on tasks that are drawn by learning progress."""
    config = _begin(PPOConfig()).callbacks(ChangesSettings(betas=(0.5, 0.9)))
    return config.add_callbacks(LearningProgressSampler([1, 3, 9]))


def bandit() -> AlgorithmConfig:
    """A bandit that learns from its own statistics."""
    config = _begin(DQNConfig(), ends=0.5).training(optimizer=torch.optim.Adafactor)
    config.callbacks(ChangesSettings(d=0.01, weight_decay=0.3))
    return config.exploration(exploration_config={"type": "UpperConfidenceBound"})


def dqn_with_hindsight() -> AlgorithmConfig:
    """DQN that gives steps other goals, of several steps, from a buffer that has been written more than once."""
    config = _begin(DQNConfig(), BitFlippingEnv, num_bits=5)
    return config.training(replay_buffer_config={"type": "hindsight", "capacity": 90}, n_step=2)


FAST: dict[str, Callable[[], AlgorithmConfig]] = {
    made.__name__: made
    for made in (
        ppo,
        ppo_in_a_curriculum,
        ppo_that_samples_tasks,
        dqn_with_priorities,
        noisy_dqn,
        bandit,
        sac_with_noise_of_weights,
        td3_with_noise,
        impala,
        appo,
        marwil,
        cql_from_data_to_the_env,
        dqn_with_hindsight,
    )
}
SLOW: dict[str, Callable[[], AlgorithmConfig]] = {
    made.__name__: made for made in (ppo_with_memory, dqn_with_memory, ppo_with_agents, dqn_with_agents)
}
RUNS = FAST | SLOW
