"""The floors of the training cases: one lean loop per algorithm.

A floor takes the same env steps and gradient steps as Corral, with the same settings and the same maths, and does
nothing else: no metrics, callbacks, checks or choices. What a library needs on top of it is its own cost. Small nets
act in NumPy. The parameters of a loop are views of one vector, which one fused optimizer steps. Nets of one shape are
one batched product, so that weights are `[in, out]`, and `[2, in, out]` for two nets. No gradient is computed that
nothing uses. `tests/benchmarks/test_floors.py` compares the losses and gradients with Corral's.

The floors of PPO are here, the others in `floors_of_replay.py`.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

import measuring
from measuring import Fields, Options

Parts = Sequence[Tensor]
NUM_ENVS, CLIP, GAMMA, LAMBDA = 8, 0.2, 0.99, 0.95


def joined(shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, list[Tensor]]:
    """Return a vector with its gradient, and parameters of these shapes that are views of it, as their gradients are.

    Weights are drawn with the deviation that keeps the size of what they are given; biases, whose last two sizes begin
    with 1, are zero.
    """
    sizes = [math.prod(shape) for shape in shapes]
    vector = torch.zeros(sum(sizes))
    vector.grad = torch.zeros_like(vector)
    parts = []
    for data, grad, shape in zip(vector.split(sizes), vector.grad.split(sizes), shapes, strict=True):
        part = data.view(shape)
        if len(shape) == 4:  # a convolution, [out, in, height, width]
            part.normal_(0.0, math.prod(shape[1:]) ** -0.5)
        elif len(shape) > 1 and shape[-2] > 1:
            part.normal_(0.0, shape[-2] ** -0.5)
        part.requires_grad_().grad = grad.view(shape)
        parts.append(part)
    return vector, parts


def arrays(parts: Parts) -> list[Any]:
    """Return the memory of parameters as arrays."""
    return [part.detach().numpy() for part in parts]


def in_numpy(weights: Sequence[Any], obs: Any, activation: Any) -> Any:
    """Return what a net gives for observations, with weights and biases in turn, and no activation at the end."""
    hidden = obs
    for weight, bias in zip(weights[:-2:2], weights[1:-2:2], strict=True):
        hidden = hidden @ weight
        hidden += bias
        activation(hidden, out=hidden)
    return hidden @ weights[-2] + weights[-1]


def relu(x: Any, out: Any) -> None:
    """Set negative entries to zero."""
    np.maximum(x, 0.0, out=out)


class Tanh(torch.autograd.Function):
    """Tanh in NumPy, which takes a sixth of the time of torch where MKL computes it on a CPU of AMD."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Compute the tanh, and keep it for its derivative."""
        outputs = torch.from_numpy(np.tanh(x.detach().numpy()))
        ctx.save_for_backward(outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Multiply by one minus the square of the tanh."""
        return torch.ops.aten.tanh_backward(grad, ctx.saved_tensors[0])


def dense_shapes(inputs: int, width: int, outputs: int) -> list[tuple[int, ...]]:
    """Return the shapes of policy and value net: first layers side by side, second layers stacked, and two heads."""
    heads = [(width, outputs), (1, outputs), (width, 1), (1, 1)]
    return [(inputs, 2 * width), (1, 2 * width), (2, width, width), (2, 1, width), *heads]


def dense_outputs(parts: Parts, obs: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits `[B, n]` and values `[B]` of separate nets."""
    first, first_bias, second, second_bias, policy, policy_bias, value, value_bias = parts
    hidden = Tanh.apply(torch.addmm(first_bias, obs, first))
    hidden = hidden.view(len(obs), 2, -1).transpose(0, 1)
    hidden = Tanh.apply(torch.baddbmm(second_bias, hidden, second))
    return torch.addmm(policy_bias, hidden[0], policy), torch.addmm(value_bias, hidden[1], value).squeeze(1)


def image_shapes(outputs: int) -> list[tuple[int, ...]]:
    """Return the shapes of the convolutions of Mnih et al. 2015, 512 features, and two heads."""
    convolutions = [(32, 4, 8, 8), (32,), (64, 32, 4, 4), (64,), (64, 64, 3, 3), (64,)]
    return [*convolutions, (3136, 512), (1, 512), (512, outputs), (1, outputs), (512, 1), (1, 1)]


def image_outputs(parts: Parts, obs: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits `[B, n]` and values `[B]` of shared layers, for images uint8 `[B, 84, 84, 4]`."""
    hidden = obs.permute(0, 3, 1, 2).float().mul_(1 / 255)
    for weight, bias, stride in zip(parts[:6:2], parts[1:6:2], (4, 2, 1), strict=True):
        hidden = functional.conv2d(hidden, weight, bias, stride).relu_()
    features, features_bias, policy, policy_bias, value, value_bias = parts[6:]
    hidden = torch.addmm(features_bias, hidden.flatten(1), features).relu_()
    return torch.addmm(policy_bias, hidden, policy), torch.addmm(value_bias, hidden, value).squeeze(1)


def ppo_loss(
    logits: Tensor, values: Tensor, actions: Tensor, logp: Tensor, advantages: Tensor, value_targets: Tensor
) -> Tensor:
    """Return the clipped surrogate and half the squared error of the values; `actions` are `[B, 1]`."""
    ratio = (logits.log_softmax(-1).gather(1, actions).squeeze(1) - logp).exp()
    surrogate = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
    return 0.5 * functional.mse_loss(values, value_targets) - surrogate


def gae(rewards: Any, values: Any, terminated: Any, truncated: Any, valid: Any) -> tuple[Any, Any]:
    """Return advantages and value targets `[T, N]`, for values `[T + 1, N]`; rows that only reset are not valid."""
    deltas = np.where(valid, rewards + GAMMA * np.where(terminated, 0.0, values[1:]) - values[:-1], 0.0)
    decays = np.where(terminated | truncated | ~valid, 0.0, GAMMA * LAMBDA)
    running = np.zeros(deltas.shape[1])
    for delta, decay in zip(deltas[::-1], decays[::-1], strict=True):  # each delta becomes an advantage
        running *= decay
        running += delta
        delta[...] = running
    return deltas, deltas + values[:-1]


def ppo(
    options: Options, envs: Any, parts: Parts, vector: Tensor, outputs: Any, act: Any, *, num_steps: int, lr: float
) -> Fields:
    """Return the trained env steps per second of PPO.

    Args:
        options: The command line.
        envs: A vector env that resets in the step after an end.
        parts: The parameters.
        vector: The vector that holds them.
        outputs: Function of parameters and observations, tensors, that gives logits and values.
        act: Function of the observations of a row that gives logits and, if they cost nothing, values.
        num_steps: Env steps of an iteration.
        lr: Learning rate.
    """
    rng, optimizer = np.random.default_rng(options.seed), torch.optim.Adam([vector], lr=lr, fused=True)
    space, room = envs.single_observation_space, 2 * num_steps // NUM_ENVS
    obs = np.empty((room + 1, NUM_ENVS, *space.shape), space.dtype)
    rewards, values = np.empty((2, room + 1, NUM_ENVS), np.float32)
    terminated, truncated, done = np.zeros((3, room + 1, NUM_ENVS), np.bool_)
    actions, logits = np.empty((room, NUM_ENVS), np.int64), np.empty((room, NUM_ENVS, 2), np.float32)
    obs[0], _ = envs.reset(seed=options.seed)
    last, was_done = 0, done[0].copy()

    def train() -> int:
        nonlocal last, was_done
        obs[0] = obs[last]
        noise = -np.log(rng.standard_exponential(logits.shape, dtype=np.float32))
        done[0], row, steps = was_done, 0, 0
        while steps < num_steps:
            steps += NUM_ENVS - int(np.count_nonzero(done[row]))
            logits[row], values[row] = act(obs[row])
            actions[row] = (logits[row] + noise[row]).argmax(1)
            obs[row + 1], rewards[row], terminated[row], truncated[row], _ = envs.step(actions[row])
            np.logical_or(terminated[row], truncated[row], out=done[row + 1])
            row += 1
        last, was_done, valid = row, done[row].copy(), ~done[:row]
        with torch.inference_mode():
            if np.isnan(values[0, 0]):
                _, found = outputs(parts, torch.from_numpy(obs[: row + 1].reshape(-1, *space.shape)))
                values[: row + 1] = found.numpy().reshape(-1, NUM_ENVS)
            else:
                _, values[row] = act(obs[row])
        advantages, targets = gae(rewards[:row], values[: row + 1], terminated[:row], truncated[:row], valid)
        advantages = advantages[valid]
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        columns = [obs[:row][valid], logits[:row][valid], actions[:row][valid][:, None], advantages, targets[valid]]
        batch = [torch.from_numpy(column) for column in columns]
        batch[1] = batch[1].log_softmax(-1).gather(1, batch[2]).squeeze(1)
        batch[3:] = batch[3].float(), batch[4].float()
        ends = np.linspace(0, steps, max(1, round(steps / 256)) + 1).astype(int).tolist()
        for _ in range(4):
            order = torch.from_numpy(rng.permutation(steps))
            shuffled = [column.index_select(0, order) for column in batch]
            for start, stop in itertools.pairwise(ends):
                rows, logp, *others = (column[start:stop] for column in shuffled)
                loss = ppo_loss(*outputs(parts, rows), others[0], logp, *others[1:])
                vector.grad.zero_()
                loss.backward()
                norm = math.sqrt(torch.dot(vector.grad, vector.grad))
                if norm > 0.5:
                    vector.grad.mul_(0.5 / norm)
                optimizer.step()
        return steps

    return measuring.training_rate(train, options)


def ppo_dense(options: Options, width: int) -> Fields:
    """Trained env steps per second of PPO on CartPole-v1 with separate nets of two layers of this width."""
    envs = gymnasium.make_vec(measuring.ENV, num_envs=NUM_ENVS, vectorization_mode="vector_entry_point")
    vector, parts = joined(dense_shapes(4, width, 2))
    parts[4].data.mul_(0.01)
    first, first_bias, second, second_bias, policy, policy_bias, *_ = arrays(parts)
    weights = [first[:, :width], first_bias[:, :width], second[0], second_bias[0], policy, policy_bias]

    def act(obs: Any) -> tuple[Any, float]:
        return in_numpy(weights, obs, np.tanh), math.nan

    return ppo(options, envs, parts, vector, dense_outputs, act, num_steps=2048, lr=3e-4)


def ppo_narrow(options: Options) -> Fields:
    """Trained env steps per second of PPO with nets of 64-64."""
    return ppo_dense(options, measuring.HIDDEN[0])


def ppo_wide(options: Options) -> Fields:
    """Trained env steps per second of PPO with nets of 512-512."""
    return ppo_dense(options, measuring.WIDE[0])


class Images:
    """Steps `ImageEnv`s one after the other, as a vector env does that resets in the step after an end."""

    def __init__(self, num_envs: int) -> None:
        """Make the envs."""
        from image_env import ImageEnv

        self.envs = [ImageEnv() for _ in range(num_envs)]
        self.single_observation_space = ImageEnv.observation_space
        self.ended = [False] * num_envs

    def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
        """Reset all envs."""
        return np.stack([env.reset(seed=seed + index)[0] for index, env in enumerate(self.envs)]), {}

    def step(self, actions: Any) -> tuple[Any, ...]:
        """Step or reset each env."""
        given = zip(self.envs, actions.tolist(), self.ended, strict=True)
        results = [
            (env.reset()[0], 0.0, False, False) if ended else env.step(action)[:4] for env, action, ended in given
        ]
        obs, rewards, terminated, truncated = zip(*results, strict=True)
        self.ended = [a or b for a, b in zip(terminated, truncated, strict=True)]
        return obs, rewards, terminated, truncated, {}


def ppo_images(options: Options) -> Fields:
    """Trained env steps per second of PPO on images; acting computes policy and value in one pass."""
    vector, parts = joined(image_shapes(2))
    parts[8].data.mul_(0.01)

    def act(obs: Any) -> tuple[Any, Any]:
        with torch.inference_mode():
            logits, values = image_outputs(parts, torch.from_numpy(obs))
        return logits.numpy(), values.numpy()

    return ppo(options, Images(NUM_ENVS), parts, vector, image_outputs, act, num_steps=1024, lr=2.5e-4)
