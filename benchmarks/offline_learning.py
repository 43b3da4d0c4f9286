"""Learning from recorded data on Hopper: returns and CPU seconds of Corral and of d3rlpy, on the same files.

    python benchmarks/offline_learning.py record --data DIR
    python benchmarks/offline_learning.py corral IQL --data DIR --seed 0 --updates 50000
    python benchmarks/offline_learning.py d3rlpy IQL --data DIR --seed 0 --updates 50000

The data is 200,000 steps of a PPO policy that was stopped at a third of the return that TUNED.md measured. d3rlpy runs
in an environment of its own, with `pip install d3rlpy "gymnasium[mujoco]"`. The commands print a line of JSON after
each `--every` updates.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

ENV, NUM_STEPS, STOP_AT = "Hopper-v5", 200_000, 2410.4 / 3
NUM_EPISODES, HIDDENS, BATCH = 20, [256, 256], 256


def record(directory: str) -> dict[str, Any]:
    """Trains PPO until its return is `STOP_AT`, and records its episodes as it explores."""
    from corral.algorithms.registry import config_from_dict
    from corral.algorithms.tuned_settings import tuned_settings

    settings = tuned_settings(ENV, "PPO")
    del settings["stop"]
    with config_from_dict(settings).debugging(seed=0).build() as algo:
        while not algo.train()["env_runners"]["episode_return_mean"] >= STOP_AT:
            pass
        length = algo.latest_numbers["env_runners"]["episode_len_mean"]
        summary = algo.record(directory, num_episodes=round(NUM_STEPS / length), explore=True, seed=0)
    return {"summary": str(summary)}


def arrays(directory: str) -> dict[str, Any]:
    """Returns the columns of the first `NUM_STEPS` steps, for both systems."""
    path = Path(directory) / "columns.npz"
    if not path.exists():
        from corral.data.offline.sources import open_source

        parts = [
            {
                "obs": rows.obs[rows.valid],
                "next_obs": rows.obs[1:][rows.valid[:-1]],
                "actions": rows.actions[rows.valid],
                "rewards": rows.rewards[rows.valid],
                "terminated": rows.terminated[rows.valid],
                "truncated": rows.truncated[rows.valid],
            }
            for rows in open_source(directory).parts()
        ]
        whole = {name: np.concatenate([part[name] for part in parts])[:NUM_STEPS] for name in parts[0]}
        whole["truncated"][-1] |= not whole["terminated"][-1]
        np.savez(path, **whole)
    with np.load(path) as found:
        return dict(found)


def play(act: Any) -> float:
    """Returns the mean return of a function of one observation, over episodes of fixed seeds."""
    import gymnasium as gym

    env, returns = gym.make(ENV), []
    for seed in range(1000, 1000 + NUM_EPISODES):
        obs, _ = env.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(act(obs))
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    return float(np.mean(returns))


Progress = Iterator[tuple[float, float]]
"""After every part of the updates: CPU seconds of it, and the mean return after it."""


def with_corral(name: str, data: dict[str, Any], given: argparse.Namespace) -> Progress:
    """Trains an algorithm of Corral with its tuned settings, which are d3rlpy's."""
    from corral.algorithms.registry import config_from_dict
    from corral.algorithms.tuned_settings import tuned_settings

    settings = tuned_settings(ENV, name)
    del settings["stop"]
    config: Any = config_from_dict(settings).offline_data(input_=data).debugging(seed=given.seed)
    config.learners(num_threads=1, device=given.device, compile=given.compile)
    with config.build() as algo:
        for _ in range(given.updates // given.every):
            start_s = process_time()
            for _ in range(given.every // 1000):
                algo.train()
            cpu_s = process_time() - start_s
            yield cpu_s, play(lambda obs: algo.compute_single_action(obs, explore=False))


def with_d3rlpy(name: str, data: dict[str, Any], given: argparse.Namespace) -> Progress:
    """Trains the same algorithm of d3rlpy."""
    import d3rlpy
    import torch
    from d3rlpy.models import VectorEncoderFactory

    torch.set_num_threads(1)
    d3rlpy.seed(given.seed)
    dataset = d3rlpy.dataset.MDPDataset(
        observations=data["obs"].astype(np.float32),
        actions=data["actions"].astype(np.float32),
        rewards=data["rewards"].astype(np.float32),
        terminals=data["terminated"].astype(np.float32),
        timeouts=(data["truncated"] & ~data["terminated"]).astype(np.float32),
        action_space=d3rlpy.constants.ActionSpace.CONTINUOUS,
    )
    encoder = VectorEncoderFactory(HIDDENS)
    names = {"IQL": ("actor", "critic", "value"), "CQL": ("actor", "critic")}.get(name)
    encoders = {f"{part}_encoder_factory": encoder for part in names} if names else {"encoder_factory": encoder}
    config: Any = getattr(d3rlpy.algos, f"{name}Config")(batch_size=BATCH, compile_graph=given.compile, **encoders)
    algo = config.create(device={"cpu": "cpu:0", "cuda": "cuda:0"}[given.device])
    algo.build_with_dataset(dataset)
    start_s = process_time()
    for _ in algo.fitter(
        dataset,
        n_steps=given.updates,
        n_steps_per_epoch=given.every,
        show_progress=False,
        save_interval=10**9,
        logger_adapter=d3rlpy.logging.NoopAdapterFactory(),
    ):
        cpu_s = process_time() - start_s
        yield cpu_s, play(lambda obs: algo.predict(obs[None].astype(np.float32))[0])
        start_s = process_time()


def main() -> None:
    """Reads the command line, and prints what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=["record", "corral", "d3rlpy"])
    parser.add_argument("algo", nargs="?", choices=["BC", "CQL", "IQL"])
    parser.add_argument("--data", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=50_000)
    parser.add_argument("--every", type=int, default=10_000)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--compile", action="store_true", help="with each system's own compilation")
    given = parser.parse_args()
    if given.system == "record":
        print(json.dumps(record(given.data)))
        return
    train: Callable[..., Progress] = with_corral if given.system == "corral" else with_d3rlpy
    shown = {name: vars(given)[name] for name in ("system", "algo", "seed", "device", "compile")}
    for number, (cpu_s, found) in enumerate(train(given.algo, arrays(given.data), given), 1):
        numbers = {"updates": number * given.every, "return": found, "updates_per_cpu_s": given.every / cpu_s}
        print(json.dumps({**shown, **numbers}), flush=True)


if __name__ == "__main__":
    main()
