"""Write the small models of Stable-Baselines3 that `from_sb3` must read, and what they do.

`make samples` calls it with a folder, to which it writes `<name>.zip`, as `model.save` does, and `<name>.npz` with
observations, and the actions and values that Stable-Baselines3 computes for them. The zips are compressed again without
the optimizers and the description of the machine, which nothing reads. The samples in `sb3_samples/` itself are of
Gymnasium 1.2, under which spaces have other fields; they stay as they are.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import A2C, DDPG, DQN, PPO, SAC, TD3
from torch import nn

NUM_ROWS = 64
LOPSIDED = spaces.Box(np.array([-1, 0.1], np.float32), np.array([3, 0.7], np.float32))


class Noise(gym.Env[Any, Any]):
    """Shows random observations, and rewards at random."""

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        """Take the spaces."""
        self.observation_space, self.action_space, self.steps = observation_space, action_space, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step; the tenth is the last one."""
        self.steps += 1
        return self.observation_space.sample(), float(self.np_random.normal()), self.steps == 10, False, {}


NUMBERS = spaces.Box(-1, 1, (3,), np.float32)
# A function, which the file has as a pickle; it has no globals, so that the pickle names no file of this machine.
SCHEDULE = eval(compile("lambda left: left * 3e-3", "schedule", "eval"), {"__name__": "__main__"})
OFF = {"learning_starts": 20, "buffer_size": 400, "batch_size": 8}
MODELS: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "ppo_cartpole": (
        PPO,
        "CartPole-v1",
        {"net_arch": [8, 6]},
        {"n_steps": 64, "batch_size": 32, "learning_rate": SCHEDULE},
    ),
    "ppo_lopsided": (
        PPO,
        Noise(NUMBERS, LOPSIDED),
        {"net_arch": {"pi": [6], "vf": [6]}, "activation_fn": nn.ELU, "log_std_init": -1},
        {"n_steps": 64, "batch_size": 32, "gamma": 0.9},
    ),
    "a2c_multi_discrete": (A2C, Noise(spaces.Discrete(5), spaces.MultiDiscrete([3, 4])), {"net_arch": [6]}, {}),
    "a2c_multi_binary": (A2C, Noise(spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(3)), {"net_arch": []}, {}),
    "dqn_cartpole": (DQN, "CartPole-v1", {"net_arch": [8, 6]}, {**OFF, "target_update_interval": 90}),
    "dqn_wide_step": (DQN, Noise(NUMBERS, spaces.Discrete(3)), {"net_arch": [6], "activation_fn": nn.GELU}, OFF),
    "sac_pendulum": (SAC, "Pendulum-v1", {"net_arch": {"pi": [8], "qf": [6, 4]}}, OFF),
    "sac_fixed_alpha": (
        SAC,
        Noise(NUMBERS, LOPSIDED),
        {"net_arch": [6], "n_critics": 1},
        {**OFF, "ent_coef": 0.2, "gamma": 0.9},
    ),
    "td3_pendulum": (TD3, "Pendulum-v1", {"net_arch": [8, 6], "activation_fn": nn.Tanh}, OFF),
    "ddpg_lopsided": (DDPG, Noise(NUMBERS, LOPSIDED), {"net_arch": [6]}, OFF),
}


def behaviour(model: Any) -> dict[str, np.ndarray]:
    """Return observations, actions without exploration, and values of a model."""
    space, policy = model.observation_space, model.policy
    space.seed(7)
    obs = np.stack([space.sample() for _ in range(NUM_ROWS)])
    if isinstance(space, spaces.Box) and not np.isfinite(space.high).all():  # the speeds of CartPole
        bound = np.clip(space.high, -3, 3)
        obs = np.random.default_rng(7).uniform(-bound, bound, obs.shape).astype(np.float32)
    found = {"obs": obs, "actions": model.predict(obs, deterministic=True)[0]}
    with torch.no_grad():
        tensor = policy.obs_to_tensor(obs)[0]
        if isinstance(model, (PPO, A2C)):
            found["values"] = policy.predict_values(tensor)[:, 0].numpy()
            if isinstance(model.action_space, spaces.Box):
                found["log_std"] = policy.log_std.expand(NUM_ROWS, -1).numpy()
            return found
        if isinstance(model, DQN):
            return {**found, "q": policy.q_net(tensor).numpy(), "target_q": policy.q_net_target(tensor).numpy()}
        shape = found["actions"].reshape(NUM_ROWS, -1).shape
        taken = np.random.default_rng(8).uniform(-1, 1, shape).astype(np.float32)  # in [-1, 1], as critics take them
        for name, critic in (("q", policy.critic), ("target_q", policy.critic_target)):
            found[name] = torch.stack(critic(tensor, torch.from_numpy(taken)))[..., 0].numpy()
        if isinstance(model, SAC):
            found["log_std"] = policy.actor.get_action_dist_params(tensor)[1].numpy()
            alpha = model.ent_coef_tensor if model.log_ent_coef is None else model.log_ent_coef.exp()
            found["alpha"] = alpha.reshape(()).numpy()
        return {**found, "taken": taken}


def compress(path: Path) -> None:
    """Pack a zip again, without what nothing reads."""
    with zipfile.ZipFile(path) as archive:
        kept = [name for name in archive.namelist() if "optimizer" not in name and name != "system_info.txt"]
        entries = {name: archive.read(name) for name in kept}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)  # with the date 1980


def make_sample(folder: Path, name: str) -> None:
    """Train a little, and write the model and what it does."""
    algo, env, policy_kwargs, settings = MODELS[name]
    model = algo("MlpPolicy", env, policy_kwargs=policy_kwargs, seed=0, device="cpu", **settings)
    model.learn(200)
    model.save(folder / f"{name}.zip")
    compress(folder / f"{name}.zip")
    np.savez_compressed(folder / f"{name}.npz", **behaviour(model))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for sample in MODELS:
        make_sample(Path(sys.argv[1]), sample)
