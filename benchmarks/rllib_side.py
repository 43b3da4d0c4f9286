"""Takes one measurement of RLlib (new API stack) in this process and prints it as a JSON line (see `run.py`).

RLlib is given its fastest honest settings where a measure is about speed at equal work: everything in this
process (no remote learners, and no remote env runners but where a measure is about two of them), and the env's
own NumPy vector implementation (`gym_env_vectorize_mode="vector_entry_point"`), which on CartPole is faster
than its default "sync" mode, a Python loop over single envs.
"""

from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any

import measuring
import ray_runtime
from measuring import Fields, Options


def _config(options: Options, num_envs: int, num_env_runners: int = 0) -> Any:
    """Returns a PPO config with the learner in this process and the net that all systems are measured with."""
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    return (
        PPOConfig()
        .environment(measuring.ENV)
        .env_runners(
            num_env_runners=num_env_runners,
            num_envs_per_env_runner=num_envs,
            gym_env_vectorize_mode="vector_entry_point",
        )
        .learners(num_learners=0)
        .rl_module(
            model_config=DefaultModelConfig(
                fcnet_hiddens=measuring.HIDDEN, fcnet_activation="tanh", vf_share_layers=False
            )
        )
        .debugging(seed=options.seed, log_level="ERROR")
    )


def _sampler(config: Any) -> Callable[[], int]:
    """Builds a local env runner; returns a function that samples once and says how many steps that were."""
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

    runner = SingleAgentEnvRunner(config=config)
    return lambda: sum(len(episode) for episode in runner.sample(num_timesteps=measuring.STEPS_PER_SAMPLE))


def sampling(options: Options) -> Fields:
    """Env steps per second of a local SingleAgentEnvRunner."""
    return measuring.sampling_rate(_sampler(_config(options, options.num_envs)), options)


def ppo(options: Options) -> Fields:
    """Trained env steps per second of PPO at the hyperparameters that all systems share."""
    return _ppo(options, num_env_runners=0)


def ppo_memory(options: Options) -> Fields:
    """Trained env steps per second of PPO with an LSTM."""
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    ray_runtime.start()
    model_config = DefaultModelConfig(
        fcnet_hiddens=[measuring.LSTM],
        fcnet_activation="tanh",
        head_fcnet_hiddens=[],
        vf_share_layers=False,
        use_lstm=True,
        lstm_cell_size=measuring.LSTM,
        max_seq_len=measuring.SEQUENCE,
    )
    config = _ppo_config(options, num_env_runners=0).rl_module(model_config=model_config)
    return measuring.training_rate(measuring.trainer(config.build_algo()), options)


def dqn(options: Options) -> Fields:
    """Env steps per second of DQN at the hyperparameters that all systems share."""
    from ray.rllib.algorithms.dqn import DQNConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    ray_runtime.start()
    config = (
        DQNConfig()
        .environment(measuring.ENV)
        .env_runners(num_env_runners=0, rollout_fragment_length=4)
        .learners(num_learners=0)
        .training(
            lr=5e-4,
            train_batch_size_per_learner=32,
            num_steps_sampled_before_learning_starts=500,
            replay_buffer_config={"type": "EpisodeReplayBuffer", "capacity": 50_000},
            target_network_update_freq=500,
            tau=1.0,
            n_step=1,
            double_q=False,
            dueling=False,
            grad_clip=10.0,
            gamma=0.99,
            epsilon=[(0, 1.0), (10_000, 0.02)],
        )
        .rl_module(
            model_config=DefaultModelConfig(
                fcnet_hiddens=measuring.HIDDEN, fcnet_activation="relu", head_fcnet_hiddens=[]
            )
        )
        .reporting(min_sample_timesteps_per_iteration=500)
        .debugging(seed=options.seed)
    )
    return measuring.training_rate(measuring.trainer(config.build_algo()), options)


def group_ppo(options: Options) -> Fields:
    """The same with two remote env runners."""
    return _ppo(options, num_env_runners=2)


def _of_agents(config: Any) -> Any:
    """Returns a config with four agents in each env, all with one module."""
    from ray.rllib.examples.envs.classes.multi_agent import MultiAgentCartPole

    config.environment(MultiAgentCartPole, env_config={"num_agents": measuring.NUM_AGENTS})
    config.env_runners(gym_env_vectorize_mode="sync")
    return config.multi_agent(policies={"shared"}, policy_mapping_fn=lambda agent_id, episode, **kwargs: "shared")


def agents_sampling(options: Options) -> Fields:
    """Agent steps per second of a local MultiAgentEnvRunner."""
    from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner

    runner = MultiAgentEnvRunner(config=_of_agents(_config(options, options.num_envs)))

    def sample() -> int:
        return sum(episode.agent_steps() for episode in runner.sample(num_timesteps=measuring.STEPS_PER_SAMPLE))

    return measuring.sampling_rate(sample, options)


def agents_ppo(options: Options) -> Fields:
    """Trained agent steps per second of PPO with several agents."""
    ray_runtime.start()
    config = _of_agents(_ppo_config(options, num_env_runners=0))
    return measuring.training_rate(measuring.trainer(config.build_algo(), measuring.num_agent_steps), options)


def _ppo(options: Options, num_env_runners: int) -> Fields:
    """Trained env steps per second of PPO with so many remote env runners; with 0, in this process."""
    ray_runtime.start()
    train = measuring.trainer(_ppo_config(options, num_env_runners).build_algo())
    return measuring.training_rate(train, options, perf_counter if num_env_runners else process_time)


def _ppo_config(options: Options, num_env_runners: int) -> Any:
    """Returns a config of PPO at the hyperparameters that all systems share."""
    return _config(options, 8, num_env_runners).training(
        lr=3e-4,
        train_batch_size_per_learner=2048,
        minibatch_size=256,
        num_epochs=4,
        gamma=0.99,
        lambda_=0.95,
        clip_param=0.2,
        grad_clip=0.5,
        entropy_coeff=0.0,
        # The KL penalty is not part of the shared hyperparameters, and leaving it out saves RLlib work.
        use_kl_loss=False,
        vf_loss_coeff=0.5,
        vf_clip_param=float("inf"),
    )


def group_sampling(options: Options) -> Fields:
    """Env steps per second that two remote env runners bring to this process as episodes.

    The call is the one of RLlib's training, less the metrics that come with the episodes there.
    """
    ray_runtime.start()
    group = _config(options, options.num_envs, num_env_runners=2).build_algo().env_runner_group
    share = measuring.STEPS_PER_SAMPLE // 2

    def sample() -> int:
        parts = group.foreach_env_runner(lambda runner: runner.sample(num_timesteps=share), local_env_runner=False)
        assert len(parts) == 2, "an env runner has failed"
        return sum(len(episode) for episodes in parts for episode in episodes)

    return measuring.sampling_rate(sample, options, perf_counter)


def time_to_450(options: Options) -> Fields:
    """Trains PPO with RLlib's defaults (two remote env runners) until the mean episode return reaches 450."""
    from ray.rllib.algorithms.ppo import PPOConfig

    ray_runtime.start()
    config = PPOConfig().environment(measuring.ENV).debugging(seed=options.seed, log_level="ERROR")
    algo = config.build_algo()

    def train() -> tuple[float, int]:
        result = algo.train()
        mean = result["env_runners"].get("episode_return_mean", float("nan"))
        return float(mean), int(result["num_env_steps_sampled_lifetime"])

    return measuring.train_until_target(train, options)


def appo_time_to_450(options: Options) -> Fields:
    """Trains APPO with the settings of RLlib's tuned example for CartPole until the mean return reaches 450."""
    from ray.rllib.algorithms.appo import APPOConfig

    return _async_time_to_450(APPOConfig(), options)


def impala_time_to_450(options: Options) -> Fields:
    """Trains IMPALA with the settings of RLlib's tuned example for CartPole until the mean return reaches 450."""
    from ray.rllib.algorithms.impala import IMPALAConfig

    return _async_time_to_450(IMPALAConfig(), options)


def _async_time_to_450(config: Any, options: Options) -> Fields:
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    ray_runtime.start(num_cpus=4)  # for two env runners and a learner, which would wait forever on a machine with two
    config.environment(measuring.ENV).training(vf_loss_coeff=0.05, entropy_coeff=0.0)
    config.rl_module(model_config=DefaultModelConfig(vf_share_layers=True))
    config.reporting(min_time_s_per_iteration=1)  # instead of 10, so that the end is seen sooner
    algo = config.debugging(seed=options.seed, log_level="ERROR").build_algo()

    def train() -> tuple[float, int]:
        result = algo.train()["env_runners"]
        mean = result.get("episode_return_mean", float("nan"))
        return float(mean), int(result.get("num_env_steps_sampled_lifetime") or 0)

    return measuring.train_until_target(train, options)


def import_package(options: Options) -> Fields:
    """Seconds that `import ray.rllib` takes."""
    del options

    def do_import() -> None:
        import ray.rllib  # noqa: F401

    return measuring.time_import(do_import)


def import_ppo(options: Options) -> Fields:
    """Seconds until the PPO config can be used, for what `import ray.rllib` may have put off."""
    del options

    def do_import() -> None:
        from ray.rllib.algorithms.ppo import PPOConfig  # noqa: F401

    return measuring.time_import(do_import)


def _no_op(**arguments: Any) -> None:
    """Subscribes to `on_episode_step`, taking all that RLlib passes, and does nothing."""


def callbacks(options: Options) -> Fields:
    """Microseconds that a subscribed no-op costs per env step beyond its Python call, at 64 envs.

    With no subscriber RLlib still builds the arguments and calls an empty hook for each step. That cost is in
    both halves and so not in the difference.
    """
    without = _config(options, num_envs=64)
    subscribed = _config(options, num_envs=64).callbacks(on_episode_step=_no_op)
    names = ("episode", "env_runner", "metrics_logger", "env", "rl_module", "env_index")
    arguments = dict.fromkeys(names, object())
    return measuring.callback_cost(_sampler(without), _sampler(subscribed), lambda: _no_op(**arguments), options)


def _log_number(metrics_logger: Any, **arguments: Any) -> None:
    """Subscribes to `on_episode_step`, taking all that RLlib passes, and logs one number."""
    metrics_logger.log_value("x", 1.0, reduce="mean", window=100)


def callback_logging(options: Options) -> Fields:
    """Env steps per second with a subscriber that logs one number per step, the metrics taken after each sample."""
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

    runner = SingleAgentEnvRunner(config=_config(options, options.num_envs).callbacks(on_episode_step=_log_number))

    def sample_and_collect() -> int:
        steps = sum(len(episode) for episode in runner.sample(num_timesteps=measuring.STEPS_PER_SAMPLE))
        assert "x" in runner.get_metrics(), "the callback has logged nothing"
        return steps

    return measuring.sampling_rate(sample_and_collect, options)


def log_value(options: Options) -> Fields:
    """Microseconds of one `log_value` of a mean with a window, of a logger as an env runner has it."""
    from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

    logger = MetricsLogger()
    fields = measuring.call_time(measuring.LOG_CALL, {"logger": logger}, options)
    assert logger.peek("x") == 1.0
    return fields


if __name__ == "__main__":
    ray_runtime.silence()
    measuring.run_measure(
        "rllib",
        {
            "sampling": sampling,
            "ppo": ppo,
            "ppo_memory": ppo_memory,
            "dqn": dqn,
            "time_to_450": time_to_450,
            "appo_time_to_450": appo_time_to_450,
            "impala_time_to_450": impala_time_to_450,
            "import": import_package,
            "import_ppo": import_ppo,
            "callbacks": callbacks,
            "callback_logging": callback_logging,
            "log_value": log_value,
            "group_sampling": group_sampling,
            "group_ppo": group_ppo,
            "agents_sampling": agents_sampling,
            "agents_ppo": agents_ppo,
        },
        finish=ray_runtime.stop,
    )
