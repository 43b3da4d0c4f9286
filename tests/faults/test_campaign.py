"""A training run in which runners are killed, raise, hang and are stopped at random, hundreds of times."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failing import FaultyEnv, faults, pids, steps_taken, wait_until_gone

from corral import PPOConfig
from corral.data.episodes.rollout import Rollout

NUM_FAULTS = {"local": 30, "process": 16, "ray": 12}  # `make campaign` takes 200
FRAGMENT = 10
RATES = {
    "local": {"raise": 0.005, "hang": 0.001},
    "process": {"kill": 0.0004, "raise": 0.005, "hang": 0.0006, "freeze": 0.0003},
    "ray": {"kill": 0.0004, "raise": 0.005, "hang": 0.0006, "freeze": 0.0003},
}


def level() -> tuple[int, int, int]:
    """Return this process's memory in MiB, open files, and threads."""
    gc.collect()
    resident_pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return resident_pages * os.sysconf("SC_PAGE_SIZE") >> 20, len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [
        "local",
        "process",
        pytest.param("ray", marks=pytest.mark.xdist_group("ray")),
    ],
    indirect=True,
)
def test_a_run_survives_hundreds_of_faults_and_counts_every_step_once(engine: str, record: Path) -> None:
    rollouts: list[Rollout] = []
    restarted: Counter[int] = Counter()
    config = (
        PPOConfig()
        .environment(FaultyEnv, env_config={"record": str(record), "rates": RATES[engine]}, disable_env_checking=True)
        .env_runners(num_env_runners=2, num_envs_per_env_runner=1)
        .training(train_batch_size_per_learner=2 * FRAGMENT, minibatch_size=2 * FRAGMENT, num_epochs=1)
        .rl_module(model_config={"fcnet_hiddens": [4]})
        .fault_tolerance(
            env_step_timeout_s=0.2,
            worker_timeout_s=3.0,
            delay_between_env_runner_restarts_s=0.01,
            num_consecutive_env_runner_failures_tolerance=50,
        )
        .callbacks(on_env_runners_recreated=lambda env_runner_indices: restarted.update(env_runner_indices))
        .engine(engine)
    )
    num_faults = int(os.environ.get("NUM_FAULTS", NUM_FAULTS[engine]))
    sampled, levels = 0, []
    with config.build() as algo:
        take = algo.env_runner_group.sample

        def sample(*arguments: Any, **settings: Any) -> list[Rollout]:
            rollouts.extend(arrived := take(*arguments, **settings))
            return arrived

        algo.env_runner_group.sample = sample  # type: ignore[method-assign]
        while len(faults(record)) < num_faults:
            result = algo.train()
            sampled += int(result["env_runners"]["num_env_steps_sampled"])
            if len(faults(record)) >= num_faults // 4 * (len(levels) + 1):
                levels.append(level())
        lost, health = algo.env_runner_group.counts.num_env_steps_lost, result["fault_tolerance"]
        in_flight = sum(len(runner.requests) for runner in algo.env_runner_group._runners.values()) * FRAGMENT
        taken = steps_taken(record)
    kinds = Counter(faults(record))
    assert set(kinds) <= set(RATES[engine]) and (num_faults < 200 or len(kinds) == len(RATES[engine]))

    kept = sum(rollout.num_env_steps for rollout in rollouts)
    assert kept == sampled == result["num_env_steps_sampled_lifetime"]
    assert kept == result["env_runners"]["num_env_steps_sampled_lifetime"]
    numbers = np.concatenate([rollout.obs[1:][rollout.valid] for rollout in rollouts])
    assert len(np.unique(numbers, axis=0)) == len(numbers) == kept  # no step was counted twice
    if engine == "local":
        assert taken == kept + lost
    else:  # of a runner that was killed, what it was asked for counts as lost
        assert kept < taken <= kept + lost + in_flight
    assert health["num_remote_worker_restarts"] >= restarted.total() >= num_faults - 4
    assert health["num_env_runner_failures"] >= num_faults - 4

    assert wait_until_gone(pids(record)) == set()
    (memory, files, threads), last = levels[0], levels[-1]
    assert last[0] - memory < 40
    assert last[1] - files <= 4 and last[2] - threads <= 2
    assert os.getpid() not in pids(record)
