"""The floors of DQN, SAC and TD3; see `floors.py`.

A row of the replay buffer holds all columns of a step, so that one `take` draws a batch.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

import measuring
from floors import GAMMA, Parts, arrays, in_numpy, joined, relu
from measuring import Fields, Options

TAU, TARGET_ENTROPY, NOISE, NOISE_CLIP = 0.005, -1.0, 0.2, 0.5
CRITIC_SHAPES = [(2, 4, 256), (2, 1, 256), (2, 256, 256), (2, 1, 256), (2, 256, 1), (2, 1, 1)]


def dqn_gradients(weights: Sequence[Any], targets: Sequence[Any], grads: Sequence[Any], batch: Any) -> Any:
    """Return Huber's loss of one-step Q-learning, and leave its gradients in `grads`.

    Args:
        weights: Weights and biases of the net in turn.
        targets: Weights and biases of the target net.
        grads: Arrays for the gradients.
        batch: Rows of observation, next observation, action, reward and 1 where the episode terminated.
    """
    obs, next_obs, (actions, rewards, terminated) = batch[:, :4], batch[:, 4:8], batch[:, 8:].T
    rows, actions = np.arange(len(batch)), actions.astype(np.int64)
    w0, b0, w1, b1, w2, b2 = weights
    first = obs @ w0
    first += b0
    relu(first, out=first)
    second = first @ w1
    second += b1
    relu(second, out=second)
    next_values = in_numpy(targets, next_obs, relu).max(1)
    errors = (second @ w2 + b2)[rows, actions] - (rewards + GAMMA * (1 - terminated) * next_values)
    slopes = errors.clip(-1, 1)
    grad = np.zeros((len(batch), w2.shape[1]), np.float32)
    grad[rows, actions] = slopes / len(batch)
    for index, inputs, weight in ((4, second, w2), (2, first, w1), (0, obs, None)):
        np.matmul(inputs.T, grad, out=grads[index])
        np.add.reduce(grad, axis=0, out=grads[index + 1][0])
        if weight is not None:
            grad = grad @ weight.T
            grad *= inputs > 0
    return (slopes * (errors - 0.5 * slopes)).mean()


def adam(theta: Any, grad: Any, moments: Any, scratch: Any, step: int, lr: float) -> None:
    """Take a step of Adam with the usual constants; `moments` and `scratch` are `[2, n]`."""
    (first, second), (square, root) = moments, scratch
    np.multiply(grad, grad, out=square)
    first *= np.float32(0.9)
    first += np.multiply(grad, np.float32(0.1), out=root)
    second *= np.float32(0.999)
    second += np.multiply(square, np.float32(0.001), out=square)
    np.sqrt(second, out=root)
    root *= np.float32((1 - 0.999**step) ** -0.5)
    root += np.float32(1e-8)
    np.divide(first, root, out=root)
    root *= np.float32(lr / (1 - 0.9**step))
    theta -= root


def dqn(options: Options) -> Fields:
    """Env steps per second of DQN, in NumPy alone."""
    rng, env = np.random.default_rng(options.seed), gymnasium.make(measuring.ENV, disable_env_checker=True)
    vector, parts = joined([(4, 64), (1, 64), (64, 64), (1, 64), (64, 2), (1, 2)])
    theta, grad = vector.numpy(), vector.grad.numpy()
    weights, grads = arrays(parts), [part.grad.numpy() for part in parts]
    targets = [array.copy() for array in weights]
    moments, scratch = np.zeros((2, 2, len(theta)), np.float32)
    ring = np.empty((50_000, 11), np.float32)
    obs, _ = env.reset(seed=options.seed)
    steps = updates = 0

    def train() -> int:
        nonlocal obs, steps, updates
        for _ in range(1000):
            epsilon = max(0.02, 1.0 - 0.98 * steps / 10_000)
            if rng.random() < epsilon:
                action = int(rng.integers(2))
            else:
                action = int(in_numpy(weights, obs[None], relu).argmax())
            next_obs, reward, terminated, truncated, _ = env.step(action)
            row = ring[steps % len(ring)]
            row[:4], row[4:8], row[8:] = obs, next_obs, (action, reward, terminated)
            steps += 1
            obs = env.reset()[0] if terminated or truncated else next_obs
            if steps >= 500 and steps % 4 == 0:
                updates += 1
                batch = ring.take(rng.integers(min(steps, len(ring)), size=32), axis=0)
                dqn_gradients(weights, targets, grads, batch)
                norm = math.sqrt(grad @ grad)
                if norm > 10:
                    np.multiply(grad, np.float32(10 / norm), out=grad)
                adam(theta, grad, moments, scratch, updates, lr=5e-4)
            if steps % 500 == 0:
                for target, weight in zip(targets, weights, strict=True):
                    target[...] = weight
        return 1000

    return measuring.training_rate(train, options)


def actor_shapes(outputs: int) -> list[tuple[int, ...]]:
    """Return the shapes of an actor of Pendulum-v1 with two layers of 256."""
    return [(3, 256), (1, 256), (256, 256), (1, 256), (256, outputs), (1, outputs)]


def actor_outputs(parts: Parts, obs: Tensor) -> Tensor:
    """Return what an actor gives, `[B, n]`."""
    hidden = torch.addmm(parts[1], obs, parts[0]).relu_()
    return torch.addmm(parts[5], torch.addmm(parts[3], hidden, parts[2]).relu_(), parts[4])


def critic_outputs(parts: Parts, obs_and_actions: Tensor) -> Tensor:
    """Return the values of both critics, `[2, B]`, or of one if the parts are of one."""
    hidden = torch.baddbmm(parts[1], obs_and_actions.expand(len(parts[0]), -1, -1), parts[0]).relu_()
    hidden = torch.baddbmm(parts[3], hidden, parts[2]).relu_()
    return torch.baddbmm(parts[5], hidden, parts[4]).squeeze(2)


def squashed(outputs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return actions in [-1, 1] and their log-densities `[B]`, of one dimension."""
    mean, log_std = outputs.chunk(2, 1)
    log_std = log_std.clamp(-20, 2)
    before = torch.addcmul(mean, log_std.exp(), noise)
    slope = 2 * (math.log(2) - before - functional.softplus(-2 * before))
    return before.tanh(), -(0.5 * noise * noise + log_std + slope).squeeze(1) - 0.5 * math.log(2 * math.pi)


def critic_loss(critic: Parts, batch: Tensor, next_values: Tensor) -> Tensor:
    """Return the sum of both mean squared errors.

    Args:
        critic: Parameters of the critics.
        batch: Rows of observation, action, next observation, reward and 1 where the episode terminated.
        next_values: Values of the next observations, `[B]`.
    """
    targets = batch[:, 7] + GAMMA * (1 - batch[:, 8]) * next_values
    return (critic_outputs(critic, batch[:, :4]) - targets).square().mean(1).sum()


def sac_gradients(
    actor: Parts, critic: Parts, targets: Parts, log_alpha: Tensor, batch: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses of critics, actor and temperature, and add their gradients; `noise` is `[2, B, 1]`."""
    alpha = log_alpha.detach().exp()
    with torch.no_grad():
        next_actions, next_logp = squashed(actor_outputs(actor, batch[:, 4:7]), noise[1])
        next_values = critic_outputs(targets, torch.cat([batch[:, 4:7], next_actions], 1)).amin(0) - alpha * next_logp
    of_critics = 0.5 * critic_loss(critic, batch, next_values)
    actions, logp = squashed(actor_outputs(actor, batch[:, :3]), noise[0])
    fixed = [part.detach() for part in critic]
    of_actor = (alpha * logp - critic_outputs(fixed, torch.cat([batch[:, :3], actions], 1)).amin(0)).mean()
    (of_critics + of_actor).backward()
    slope = -logp.detach().mean() - TARGET_ENTROPY
    log_alpha.grad.copy_(slope)
    return of_critics, of_actor, log_alpha.detach() * slope


def td3_gradients(
    actor: Parts, critic: Parts, target_actor: Parts, targets: Parts, batch: Tensor, noise: Tensor, moves_actor: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the losses of critics and, if it moves, actor, and add their gradients; `noise` is `[B, 1]`."""
    with torch.no_grad():
        smoothed = actor_outputs(target_actor, batch[:, 4:7]).tanh_() + (NOISE * noise).clamp_(-NOISE_CLIP, NOISE_CLIP)
        next_values = critic_outputs(targets, torch.cat([batch[:, 4:7], smoothed.clamp_(-1, 1)], 1)).amin(0)
    of_critics, of_actor = critic_loss(critic, batch, next_values), None
    of_critics.backward()
    if moves_actor:
        actions = actor_outputs(actor, batch[:, :3]).tanh_()
        first = [part.detach()[:1] for part in critic]
        of_actor = -critic_outputs(first, torch.cat([batch[:, :3], actions], 1)).mean()
        of_actor.backward()
    return of_critics, of_actor


def on_pendulum(
    options: Options, act: Callable[[Any, Any], Any], update: Callable[[Any, Tensor], None], *, begin: int, num: int
) -> Fields:
    """Return the env steps per second of a loop with an update on 256 steps after each env step.

    Args:
        options: The command line.
        act: Function of a generator and an observation `[1, 3]` that gives an action in [-1, 1].
        update: Function of a generator and a batch.
        begin: Number of uniform random actions before the first update.
        num: Env steps of an iteration.
    """
    rng, env = np.random.default_rng(options.seed), gymnasium.make("Pendulum-v1", disable_env_checker=True)
    ring, steps = np.empty((100_000, 9), np.float32), 0
    obs, _ = env.reset(seed=options.seed)

    def train() -> int:
        nonlocal obs, steps
        for _ in range(num):
            action = rng.uniform(-1, 1, 1) if steps < begin else act(rng, obs[None])
            next_obs, reward, terminated, truncated, _ = env.step(2 * action)
            row = ring[steps % len(ring)]
            row[:3], row[3:4], row[4:7], row[7:] = obs, action, next_obs, (reward, terminated)
            steps += 1
            obs = env.reset()[0] if terminated or truncated else next_obs
            if steps >= begin:
                drawn = rng.integers(min(steps, len(ring)), size=256)
                update(rng, torch.from_numpy(ring.take(drawn, axis=0)))
        return num

    return measuring.training_rate(train, options)


def sac(options: Options) -> Fields:
    """Env steps per second of SAC, in which one vector holds the parameters of all three losses."""
    vector, parts = joined([*actor_shapes(2), *CRITIC_SHAPES, ()])
    actor, critic, log_alpha = parts[:6], parts[6:12], parts[12]
    start = sum(part.numel() for part in actor)
    followed, (target_vector, targets) = vector[start:-1], joined(CRITIC_SHAPES)
    target_vector.copy_(followed)
    optimizer, weights = torch.optim.Adam([vector], lr=3e-4, fused=True), arrays(actor)

    def act(rng: Any, obs: Any) -> Any:
        mean, log_std = in_numpy(weights, obs, relu)[0]
        return np.tanh(mean + np.exp(log_std.clip(-20, 2)) * rng.standard_normal(1, np.float32))

    def update(rng: Any, batch: Tensor) -> None:
        vector.grad.zero_()
        noise = torch.from_numpy(rng.standard_normal((2, 256, 1), np.float32))
        sac_gradients(actor, critic, targets, log_alpha, batch, noise)
        optimizer.step()
        target_vector.lerp_(followed, TAU)

    return on_pendulum(options, act, update, begin=100, num=200)


def td3(options: Options) -> Fields:
    """Env steps per second of TD3, whose actor and critics have a vector each."""
    (actor_vector, actor), (critic_vector, critic) = joined(actor_shapes(1)), joined(CRITIC_SHAPES)
    (target_actor_vector, target_actor), (target_vector, targets) = joined(actor_shapes(1)), joined(CRITIC_SHAPES)
    pairs = ((target_actor_vector, actor_vector), (target_vector, critic_vector))
    for target, vector in pairs:
        target.copy_(vector)
    of_actor, of_critics = (torch.optim.Adam([vector], lr=1e-3, fused=True) for _, vector in pairs)
    weights, updates = arrays(actor), 0

    def act(rng: Any, obs: Any) -> Any:
        action = np.tanh(in_numpy(weights, obs, relu)[0])
        return np.clip(action + 0.1 * rng.standard_normal(1, np.float32), -1, 1)

    def update(rng: Any, batch: Tensor) -> None:
        nonlocal updates
        updates += 1
        moves_actor = updates % 2 == 0
        noise = torch.from_numpy(rng.standard_normal((256, 1), np.float32))
        critic_vector.grad.zero_()
        actor_vector.grad.zero_()
        td3_gradients(actor, critic, target_actor, targets, batch, noise, moves_actor)
        of_critics.step()
        if moves_actor:
            of_actor.step()
            for target, vector in pairs:
                target.lerp_(vector, TAU)

    return on_pendulum(options, act, update, begin=500, num=500)
