"""The measures of asynchronous sampling, which `corral_side.py` takes; in `rllib_side.py` are RLlib's."""

from time import perf_counter
from typing import Any

import measuring
from measuring import Fields, Options

# A step of the stalling env takes a millisecond, and one in a hundred two hundred.
STEP_S, STALL_S, STALL_SHARE = 1e-3, 0.2, 0.01
BATCH = 500
# Iterations of a second, of which the first is not counted.
ITERATION_S = 1.0
# One of three evaluation runners blocks for so long in its first step.
BLOCKED_S = 40.0
ROUNDS = 6


def stalling(options: Options) -> Fields:
    """How many times the env steps of PPO APPO trains on, in an env of which some steps take 200 times as long."""
    from corral import APPOConfig, PPOConfig
    from timed_env import TimedEnv

    algorithms = {
        "ppo": PPOConfig().training(minibatch_size=64, num_epochs=10),
        "appo": APPOConfig(),
        "ppo_async": PPOConfig().training(minibatch_size=64, num_epochs=10).env_runners(sample_async=True),
    }
    names = list(algorithms) if options.seed % 2 else list(algorithms)[::-1]
    rates, busy, lags = {}, {}, {}
    for name in names:
        config = (
            algorithms[name]
            .environment(TimedEnv, env_config={"step_s": STEP_S, "stall_s": STALL_S, "stall_share": STALL_SHARE})
            .env_runners(num_env_runners=2, num_envs_per_env_runner=1)
            .training(train_batch_size_per_learner=BATCH)
            .rl_module(model_config={"fcnet_hiddens": measuring.WIDE})
            .reporting(min_time_s_per_iteration=ITERATION_S)
            .debugging(seed=options.seed)
        )
        with config.build() as algo:
            rates[name], busy[name], lags[name] = _train_for(algo, options.seconds)
    return {
        "times": rates["appo"] / rates["ppo"],
        "times_ppo_async": rates["ppo_async"] / rates["ppo"],
        "percent_busy": busy["appo"],
        "percent_busy_ppo": busy["ppo"],
        "percent_busy_ppo_async": busy["ppo_async"],
        "lag_mean": lags["appo"],
        "env_steps_per_s": rates,
    }


def _train_for(algo: Any, seconds: float) -> tuple[float, float, float]:
    """Returns trained env steps per second, percent of the time that the idlest runner samples, and the mean lag."""
    algo.train()
    start, first = perf_counter(), algo.num_env_steps_sampled_lifetime
    shares: dict[str, list[tuple[float, int]]] = {"1": [], "2": []}  # of the time, with env steps as weights
    lags = []
    while perf_counter() - start < seconds:
        result = algo.train()
        for index, costs in result["runner_group"]["by_runner"].items():
            if steps := costs["num_env_steps_sampled"]:
                share = costs["sample_ms_mean"] / (costs["sample_ms_mean"] + costs["idle_ms_mean"])
                shares[index].append((share, steps))
        lags.append(result["runner_group"].get("lag_mean", 0.0))
    rate = (algo.num_env_steps_sampled_lifetime - first) / (perf_counter() - start)
    busy = [sum(share * steps for share, steps in part) / sum(steps for _, steps in part) for part in shares.values()]
    return rate, 100 * min(busy), sum(lags) / len(lags)


def blocked_evaluation(options: Options) -> Fields:
    """Seconds by which a blocked evaluation runner of three makes the longest `train()` longer, from the second on."""
    longest = {blocked_s: _longest_round(options, blocked_s) for blocked_s in (0.0, BLOCKED_S)}
    return {"seconds": longest[BLOCKED_S] - longest[0.0], "seconds_without": longest[0.0]}


def _longest_round(options: Options, blocked_s: float) -> float:
    from corral import PPOConfig
    from timed_env import TimedEnv

    env_config = {"step_s": STEP_S, "spins": False}
    config = (
        PPOConfig()
        .environment(TimedEnv, env_config=env_config)
        .env_runners(num_envs_per_env_runner=1)
        .training(train_batch_size_per_learner=64, minibatch_size=32, num_epochs=1)
        .evaluation(
            evaluation_interval=1,
            evaluation_num_env_runners=3,
            evaluation_duration=3,
            evaluation_parallel_to_training=True,
            evaluation_config={"env_config": {**env_config, "blocks_s": blocked_s, "blocked_runner": 3}},
        )
        .debugging(seed=options.seed)
        .engine("process")
    )
    seconds = []
    with config.build() as algo:
        for _ in range(ROUNDS):
            start = perf_counter()
            algo.train()
            seconds.append(perf_counter() - start)
    return max(seconds[1:])
