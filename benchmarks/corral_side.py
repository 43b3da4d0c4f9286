"""Takes one measurement of Corral in this process and prints it as a JSON line (see `run.py`)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import agents_side
import async_side
import checkpoint_cost
import cpu_time
import large_nets
import measuring
import q_learning_forms
import ray_runtime
import recorded_side
import replay_side
import runner_groups
import sac_side
import td3_side
from corral_config import config, dqn_config, net_config, ppo_config
from measuring import Fields, Options

ROOT = Path(__file__).resolve().parent.parent


def _no_op(episode: Any) -> None:
    """Subscribes to `on_episode_step` and does nothing."""


def _log_number(metrics_logger: Any) -> None:
    """Subscribes to `on_episode_step` and logs one number."""
    metrics_logger.log_value("x", 1.0, reduce="mean", window=100)


def _sampler(algo: Any) -> Callable[[], int]:
    """Returns a function that samples once and says how many env steps that were."""
    return lambda: int(algo.env_runner.sample(num_timesteps=measuring.STEPS_PER_SAMPLE).num_env_steps)


def sampling(options: Options) -> Fields:
    """Env steps per second of the embedded env runner."""
    with config(options, options.num_envs).build() as algo:
        return measuring.sampling_rate(_sampler(algo), options)


def ppo(options: Options) -> Fields:
    """Trained env steps per second of PPO at the hyperparameters that all systems share."""
    with ppo_config(options).build() as algo:
        return measuring.training_rate(measuring.trainer(algo), options)


def ppo_memory(options: Options) -> Fields:
    """Trained env steps per second of PPO with an LSTM."""
    memory = {"use_lstm": True, "lstm_cell_size": measuring.LSTM, "max_seq_len": measuring.SEQUENCE}
    config = ppo_config(options).rl_module(model_config={**net_config([measuring.LSTM]), **memory})
    with config.build() as algo:
        return measuring.training_rate(measuring.trainer(algo), options)


def dqn(options: Options) -> Fields:
    """Env steps per second of DQN at the hyperparameters that all systems share."""
    with dqn_config(options).build() as algo:
        return measuring.training_rate(measuring.trainer(algo), options)


def time_to_450(read_settings: Callable[[], dict[str, Any]]) -> measuring.Measure:
    """Returns the measure that trains with given settings until the mean episode return reaches 450."""

    def measure(options: Options) -> Fields:
        from corral.algorithms.registry import config_from_dict

        settings = read_settings()
        del settings["stop"]  # `train_until_target` has its own
        with config_from_dict(settings).debugging(seed=options.seed).build() as algo:

            def train() -> tuple[float, int]:
                result = algo.train()
                mean = result["env_runners"].get("episode_return_mean", float("nan"))
                return float(mean), int(result["num_env_steps_sampled_lifetime"])

            return measuring.train_until_target(train, options)

    return measure


def _example() -> dict[str, Any]:
    from corral.tools.cli.experiment import read_experiment

    return read_experiment(ROOT / "examples" / "cartpole.yaml")


def _tuned(algo: str) -> dict[str, Any]:
    from corral.algorithms.tuned_settings import tuned_settings

    return tuned_settings(measuring.ENV, algo)


def import_package(options: Options) -> Fields:
    """Seconds that `import corral` takes."""
    del options

    def do_import() -> None:
        import corral  # noqa: F401

    return measuring.time_import(do_import)


def import_ppo(options: Options) -> Fields:
    """Seconds until the PPO config can be used, for what `import corral` may have put off."""
    del options

    def do_import() -> None:
        from corral import PPOConfig  # noqa: F401

    return measuring.time_import(do_import)


def callbacks(options: Options) -> Fields:
    """Microseconds that a subscribed no-op costs per env step beyond its Python call, at 64 envs."""
    without = config(options, num_envs=64)
    subscribed = config(options, num_envs=64).callbacks(on_episode_step=_no_op)
    episode = object()
    with without.build() as algo_without, subscribed.build() as algo_subscribed:
        return measuring.callback_cost(
            _sampler(algo_without), _sampler(algo_subscribed), lambda: _no_op(episode=episode), options
        )


def callback_logging(options: Options) -> Fields:
    """Env steps per second with a subscriber that logs one number per step, the metrics taken after each sample."""
    with config(options, options.num_envs).callbacks(on_episode_step=_log_number).build() as algo:
        sample = _sampler(algo)

        def sample_and_collect() -> int:
            steps = sample()
            metrics, _, _ = algo.env_runner.get_metrics()
            assert ("x",) in metrics, "the callback has logged nothing"
            return steps

        return measuring.sampling_rate(sample_and_collect, options)


def log_value(options: Options) -> Fields:
    """Microseconds of one `log_value` of a mean with a window."""
    from corral.core.metrics.logger import MetricsLogger

    logger = MetricsLogger()
    fields = measuring.call_time(measuring.LOG_CALL, {"logger": logger}, options)
    assert logger.peek("x") == 1.0
    return fields


if __name__ == "__main__":
    measuring.run_measure(
        "corral",
        {
            "sampling": sampling,
            "ppo": ppo,
            "ppo_memory": ppo_memory,
            "ppo_wide": large_nets.ppo_wide,
            "ppo_images": large_nets.ppo_images,
            "compiled": large_nets.compiled(large_nets.wide_config),
            "compiled_sac": large_nets.compiled(sac_side.config),
            "dqn": dqn,
            "q_learning_forms": q_learning_forms.numpy_against_autograd,
            "sac": sac_side.sac,
            "sac_limit": sac_side.limit,
            "td3": td3_side.td3,
            "td3_return": td3_side.td3_return,
            "replay_sampling": replay_side.sampling,
            "replay_insertion": replay_side.insertion,
            "recorded_reading": recorded_side.reading,
            "recorded_memory": recorded_side.memory,
            "time_to_450": time_to_450(_example),
            "cpu_per_wall": cpu_time.cpu_per_wall,
            "checkpoints_ppo": checkpoint_cost.ppo,
            "checkpoints_dqn": checkpoint_cost.dqn,
            "import": import_package,
            "import_ppo": import_ppo,
            "callbacks": callbacks,
            "callback_logging": callback_logging,
            "log_value": log_value,
            "group_sampling": runner_groups.group_sampling,
            "group_ppo": runner_groups.group_ppo,
            "scaling": runner_groups.scaling,
            "process_start": runner_groups.process_start,
            "ray_start": runner_groups.ray_start,
            "weight_sync": runner_groups.weight_sync,
            "straggler": runner_groups.straggler,
            "stalling": async_side.stalling,
            "blocked_evaluation": async_side.blocked_evaluation,
            "appo_time_to_450": time_to_450(lambda: _tuned("APPO")),
            "impala_time_to_450": time_to_450(lambda: _tuned("IMPALA")),
            "agents_sampling": agents_side.sampling,
            "agents_ppo": agents_side.ppo,
            "cost_of_seats": agents_side.cost_of_seats,
        },
        finish=ray_runtime.stop,
    )
