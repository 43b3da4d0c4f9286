"""Envs computed by torch: they step as Gymnasium's do, reset what ended, and never wait for the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from corral.core.plain import misfits
from corral.envs.tensor_env import TensorEnvAdapter, TensorVectorEnv
from corral.envs.torch_envs import TorchCartPole, TorchEnv, TorchPendulum
from corral.errors import CheckpointError, ConfigError, EnvError
from host_transfers import HostTransferError, no_host_transfers

ENVS = {"CartPole-v1": TorchCartPole, "Pendulum-v1": TorchPendulum}
INITIAL_BOUNDS = {"CartPole-v1": [0.05] * 4, "Pendulum-v1": [math.pi, 1.0]}
each_env = pytest.mark.parametrize("env_id", ENVS)


def random_actions(env: TorchEnv, rng: np.random.Generator) -> Tensor:
    """Return actions; some torques are outside of the bounds, where the pendulum clips them."""
    if isinstance(env, TorchCartPole):
        return torch.from_numpy(rng.integers(0, 2, env.num_envs))
    return torch.from_numpy(rng.uniform(-2.5, 2.5, (env.num_envs, 1)).astype(np.float32))


@each_env
def test_each_step_is_that_of_gymnasium(env_id: str) -> None:
    num_envs, max_episode_steps = 8, 25
    env, rng = ENVS[env_id](num_envs, max_episode_steps=max_episode_steps), np.random.default_rng(0)
    reference = gym.make(env_id, max_episode_steps=max_episode_steps, disable_env_checker=True)
    reference.reset(seed=0)
    assert env.single_observation_space == reference.observation_space
    assert env.single_action_space == reference.action_space
    env.reset(seed=0)
    ends = {"terminated": 0, "truncated": 0}
    for _ in range(200):
        state, actions = env.get_state(), random_actions(env, rng)
        obs, rewards, terminated, truncated, infos = env.step(actions)
        assert (obs.dtype, rewards.dtype) == (torch.float32, torch.float32)
        assert (terminated.dtype, truncated.dtype) == (torch.bool, torch.bool)
        for i in range(num_envs):
            # Gymnasium's env takes over the state of one sub-env.
            base: Any = reference.unwrapped
            base.state, base.steps_beyond_terminated = state["states"][i].astype(np.float64), None
            reference._elapsed_steps = int(state["num_steps"][i])  # type: ignore[attr-defined]
            wanted = reference.step(actions[i].numpy() if actions.ndim == 2 else int(actions[i]))
            np.testing.assert_allclose(infos["final_obs"][i].numpy(), wanted[0], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(float(rewards[i]), wanted[1], rtol=1e-4, atol=1e-5)
            assert (bool(terminated[i]), bool(truncated[i])) == wanted[2:4]
            if not (wanted[2] or wanted[3]):
                assert torch.equal(obs[i], infos["final_obs"][i])
        ends["terminated"] += int(terminated.sum())
        ends["truncated"] += int(truncated.sum())
    assert ends["truncated"] > 5
    assert (ends["terminated"] > 20) == (env_id == "CartPole-v1")


@each_env
def test_ended_sub_envs_alone_begin_again_and_draw_from_the_whole_initial_range(env_id: str) -> None:
    num_envs = 64
    env, rng, drawn = ENVS[env_id](num_envs, max_episode_steps=7), np.random.default_rng(1), []
    env.reset(seed=3)
    for _ in range(70):
        before = env.get_state()
        *_, terminated, truncated, _ = env.step(random_actions(env, rng))
        ended, after = (terminated | truncated).numpy(), env.get_state()
        np.testing.assert_array_equal(after["num_steps"], np.where(ended, 0, before["num_steps"] + 1))
        drawn.append(after["states"][ended])
    states, bounds = np.concatenate(drawn), np.array(INITIAL_BOUNDS[env_id])
    assert len(states) >= 640
    assert (np.abs(states) <= bounds).all()
    # 640 uniform numbers come within 5 % of both bounds, and their mean is near 0.
    assert (states.max(0) > 0.95 * bounds).all() and (states.min(0) < -0.95 * bounds).all()
    assert (np.abs(states.mean(0)) < 0.15 * bounds).all()


def test_a_state_out_of_bounds_ends_only_its_own_episode() -> None:
    env = TorchCartPole(3)
    env.reset(seed=0)
    state = env.get_state()
    state["states"][1] = [2.39, 1.0, 0.0, 0.0]
    env.set_state(state)
    obs, rewards, terminated, truncated, infos = env.step(torch.ones(3, dtype=torch.int64))
    assert terminated.tolist() == [False, True, False] and truncated.tolist() == [False] * 3
    assert rewards.tolist() == [1.0, 1.0, 1.0]
    assert infos["final_obs"][1, 0].item() == pytest.approx(2.41)
    assert obs[1].abs().max() <= 0.05
    assert torch.equal(obs[[0, 2]], infos["final_obs"][[0, 2]])


def play(env: TorchEnv, num_steps: int, seed: int) -> list[Tensor]:
    """Return all observations and rewards of random actions."""
    rng, columns = np.random.default_rng(seed), []
    for _ in range(num_steps):
        obs, rewards, *_ = env.step(random_actions(env, rng))
        columns += [obs, rewards]
    return columns


def are_equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@each_env
def test_one_seed_gives_one_run(env_id: str) -> None:
    env, other = (ENVS[env_id](4, max_episode_steps=20) for _ in range(2))
    first = env.reset(seed=5)[0]
    run = play(env, 100, seed=0)
    for again in (env, other):
        assert torch.equal(again.reset(seed=5)[0], first)
        assert are_equal(play(again, 100, seed=0), run)
    assert not torch.equal(env.reset(seed=6)[0], first)
    assert not torch.equal(env.reset()[0], env.reset()[0])


@each_env
def test_unseeded_envs_differ(env_id: str) -> None:
    assert not torch.equal(ENVS[env_id](4).reset()[0], ENVS[env_id](4).reset()[0])


@each_env
def test_a_restored_env_continues_exactly(env_id: str) -> None:
    env, other = (ENVS[env_id](4, max_episode_steps=20) for _ in range(2))
    env.reset(seed=1)
    play(env, 33, seed=0)
    state = env.get_state()
    assert not list(misfits(state))
    run = play(env, 100, seed=1)
    other.set_state(state)
    assert are_equal(play(other, 100, seed=1), run)
    other.set_state(state)  # neither the run nor what was restored has written into the state
    assert are_equal(play(other, 100, seed=1), run)


@each_env
def test_no_later_step_and_no_caller_writes_into_tensors_of_the_other(env_id: str) -> None:
    env, other = (ENVS[env_id](4, max_episode_steps=5) for _ in range(2))
    kept, copies = [], []
    rng, same_rng = np.random.default_rng(0), np.random.default_rng(0)
    obs, same_obs = env.reset(seed=2)[0], other.reset(seed=2)[0]
    for _ in range(20):
        kept.append(obs)
        copies.append(obs.clone())
        obs, rewards, terminated, truncated, infos = env.step(random_actions(env, rng))
        kept += [rewards, terminated, truncated, infos["final_obs"]]
        copies += [tensor.clone() for tensor in kept[-4:]]
        same_obs.fill_(float("nan"))
        same_obs, *others, same_infos = other.step(random_actions(other, same_rng))
        assert torch.equal(same_obs, obs)
        for tensor in (*others, same_infos["final_obs"]):
            tensor.fill_(1)
    assert are_equal(kept, copies)


class OneBuffer(TensorVectorEnv):
    """Writes each observation into one tensor, and gives no final observations; episodes have two steps."""

    def __init__(self) -> None:
        self.num_envs, self.device = 2, torch.device("cpu")
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.obs = torch.zeros(2, 1)

    def reset(self, **arguments: Any) -> Any:
        return self.obs.zero_(), {}

    def step(self, actions: Tensor) -> Any:
        self.obs += 1
        return self.obs, torch.ones(2), self.obs[:, 0] % 2 == 0, torch.zeros(2, dtype=torch.bool), {}


def test_an_env_may_write_each_observation_into_one_tensor() -> None:
    env = TensorEnvAdapter(OneBuffer())
    seen = [env.reset()[0]]
    for _ in range(2):
        obs, *_, infos = env.step(np.zeros(2, np.int64))
        seen.append(obs)
    assert [array.tolist() for array in seen] == [[[0.0]] * 2, [[1.0]] * 2, [[2.0]] * 2]
    assert infos["final_obs"].tolist() == [[1.0]] * 2  # from which the last action was chosen


@each_env
def test_a_step_never_waits_for_the_device(env_id: str) -> None:
    env, rng = ENVS[env_id](4, max_episode_steps=3), np.random.default_rng(0)
    env.reset(seed=0)
    for _ in range(8):
        actions = random_actions(env, rng)
        with no_host_transfers():
            env.step(actions)


@pytest.mark.parametrize(
    "transfer",
    [
        *(lambda mask: bool(mask.any()), Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.nonzero),
        *(lambda mask: mask.sum().item(), lambda mask: int(mask.sum()), lambda mask: float(mask.sum())),
        *(lambda mask: mask.to("cpu"), lambda mask: torch.zeros(len(mask))[mask], lambda mask: torch.where(mask)),
        *(lambda mask: torch.zeros(len(mask)).index_put_((mask,), torch.ones(())), lambda mask: np.asarray(mask)),
        *(
            lambda mask: torch.zeros(len(mask)).__setitem__(mask, torch.ones(())),
            lambda mask: "no" if mask.all() else "yes",
        ),
    ],
)
def test_a_transfer_in_a_step_would_be_found(transfer: Callable[[Tensor], Any]) -> None:
    class Waiting(TorchCartPole):
        def advance(self, states: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            found = super().advance(states, actions)
            transfer(found[2])
            return found

    env = Waiting(4)
    env.reset(seed=0)
    with pytest.raises(HostTransferError), no_host_transfers():
        env.step(torch.ones(4, dtype=torch.int64))


def test_wrong_use_names_the_remedy() -> None:
    with pytest.raises(ConfigError, match="num_envs must be at least 1, not 0"):
        TorchCartPole(0)
    with pytest.raises(ConfigError, match="max_episode_steps must be at least 1, not 0"):
        TorchPendulum(2, max_episode_steps=0)
    env = TorchCartPole(2)
    for use in (env.get_state, lambda: env.step(torch.zeros(2, dtype=torch.int64))):
        with pytest.raises(EnvError, match=r"call reset\(\)"):
            use()
    env.reset(seed=0)
    with pytest.raises(EnvError, match=r"actions of shape \[2\], not \[2, 1\]"):
        env.step(torch.zeros(2, 1, dtype=torch.int64))
    state = env.get_state()
    with pytest.raises(CheckpointError, match="num_envs=2, and this env has num_envs=3"):
        TorchCartPole(3).set_state(state)
    with pytest.raises(CheckpointError, match="device 'cpu'"):
        env.set_state({**state, "generator": state["generator"][:16]})
