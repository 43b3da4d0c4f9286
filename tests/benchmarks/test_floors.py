"""The floors of `benchmarks/floors.py` compute the losses and gradients that Corral computes."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import corral_config
import floors
import floors_of_replay
import large_nets
import sac_side
import td3_side
from corral.core.returns import gae
from corral.learners.losses import backward
from measuring import HIDDEN, WIDE, Options

OPTIONS = Options(num_envs=8, seconds=0.0, seed=0, cap=0.0)
BATCH = 64
# Names that Corral gives the layers of a net with two hidden layers.
LAYERS = ("mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias")

Pieces = dict[str, Tensor]
"""Pieces of the parameters of a floor, or of their gradients, by the names and in the shapes that Corral gives them."""


def net_pieces(names: Sequence[str], parts: Sequence[Tensor]) -> Pieces:
    """Return the pieces of one net, given its weights `[in, out]` and biases in turn."""
    return {
        name: part.T if name.endswith("weight") else part.flatten() for name, part in zip(names, parts, strict=True)
    }


def dense_pieces(parts: Sequence[Tensor]) -> Pieces:
    first, first_bias, second, second_bias, *heads = parts
    found = {}
    for index, net in enumerate(("policy", "value")):
        names = [*(f"{net}_encoder.{layer}" for layer in LAYERS), f"{net}_head.weight", f"{net}_head.bias"]
        hidden = [first.chunk(2, 1)[index], first_bias.chunk(2, 1)[index], second[index], second_bias[index]]
        found |= net_pieces(names, [*hidden, *heads[2 * index : 2 * index + 2]])
    return found


def image_pieces(parts: Sequence[Tensor]) -> Pieces:
    layers = [f"policy_encoder.parts.0.layers.{index}" for index in (0, 2, 4, 7)] + ["policy_head", "value_head"]
    names = [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]
    return dict(zip(names[:6], parts[:6], strict=True)) | net_pieces(names[6:], parts[6:])


def q_pieces(parts: Sequence[Tensor], net: str = "q") -> Pieces:
    names = [f"{net}.{layer}.{kind}" for layer in ("encoder.mlp.0", "streams.0", "head") for kind in ("weight", "bias")]
    return net_pieces(names, parts)


def actor_pieces(parts: Sequence[Tensor], net: str = "actor") -> Pieces:
    names = [*(f"{net}.encoder.{layer}" for layer in LAYERS), f"{net}.head.0.weight", f"{net}.head.0.bias"]
    return net_pieces(names, parts)


def critic_pieces(parts: Sequence[Tensor], net: str = "q") -> Pieces:
    found = {}
    for index in range(2):
        names = [f"{net}.{index}.{name}" for name in (*LAYERS, "head.weight", "head.bias")]
        found |= net_pieces(names, [part[index] for part in parts])
    return found


class Compared:
    """Corral's module of a config, and parameters of a floor that are copies of its parameters."""

    def __init__(self, config: Any) -> None:
        with config.build() as algo:
            self.module, self.loss = algo.get_module(), algo.make_loss(algo.config)
        self.parameters, self.pairs = dict(self.module.named_parameters()), dict[str, tuple[Tensor, Tensor]]()
        self.rng = np.random.default_rng(3)
        with torch.no_grad():  # heads begin small, and targets as copies
            for parameter in self.parameters.values():
                parameter += 0.05 * self.normal(*parameter.shape)

    def normal(self, *shape: int) -> Tensor:
        return torch.from_numpy(self.rng.standard_normal(shape, dtype=np.float32))

    def copy(self, pieces: Callable[..., Pieces], shapes: Any, *net: str) -> list[Tensor]:
        """Return parameters of a floor, whose gradients `check` compares unless they are of a target network."""
        _, parts = floors.joined(shapes)
        with torch.no_grad():
            for name, piece in pieces(parts, *net).items():
                piece.copy_(self.parameters[name])
        if not net:
            grads = pieces([part.grad for part in parts])
            self.pairs |= {name: (self.parameters[name], grads[name]) for name in grads}
        return parts

    def check(self, losses: dict[str, Any], batch: dict[str, Tensor], **coefficients: float) -> None:
        """Compare the losses of a floor, by Corral's names, and all gradients with Corral's."""
        loss, reported = self.loss(self.module, batch, coefficients)
        groups = self.module.parameter_groups()
        moving = {name: groups[name] for name in loss} if isinstance(loss, dict) else groups
        backward(loss, moving, "default_policy", len(groups))
        for name, (parameter, grad) in self.pairs.items():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
        found = reported if isinstance(loss, dict) else {**reported, "loss": loss}
        assert {name: value.item() for name, value in losses.items()} == pytest.approx(
            {name: found[name].item() for name in losses}, rel=1e-5, abs=1e-5
        )


@pytest.mark.parametrize(
    ("config", "shapes", "pieces", "outputs"),
    [
        (corral_config.ppo_config, floors.dense_shapes(4, HIDDEN[0], 2), dense_pieces, floors.dense_outputs),
        (large_nets.wide_config, floors.dense_shapes(4, WIDE[0], 2), dense_pieces, floors.dense_outputs),
        (large_nets.images_config, floors.image_shapes(2), image_pieces, floors.image_outputs),
    ],
    ids=["narrow", "wide", "images"],
)
def test_ppo(config: Any, shapes: Any, pieces: Any, outputs: Any) -> None:
    compared = Compared(config(OPTIONS))
    parts = compared.copy(pieces, shapes)
    assert len(compared.pairs) == len(compared.parameters)
    space, rng = compared.module.observation_space, compared.rng
    is_image = space.dtype == np.uint8
    obs = (
        torch.from_numpy(rng.integers(0, 256, (BATCH, *space.shape), np.uint8))
        if is_image
        else compared.normal(BATCH, 4)
    )
    actions = torch.from_numpy(rng.integers(0, 2, BATCH))
    logp, advantages, value_targets = (
        -0.7 + 0.3 * compared.normal(BATCH),
        compared.normal(BATCH),
        compared.normal(BATCH),
    )
    loss = floors.ppo_loss(*outputs(parts, obs), actions[:, None], logp, advantages, value_targets)
    loss.backward()
    columns = {"logp": logp, "advantages": advantages, "value_targets": value_targets}
    batch = {"obs": obs, "actions": actions, **columns}
    compared.check({"loss": loss}, batch, clip_param=0.2, entropy_coeff=0.0, kl_coeff=0.0)


def test_advantages() -> None:
    rng = np.random.default_rng(0)
    rewards, values = rng.standard_normal((20, 3)), rng.standard_normal((21, 3))
    terminated, truncated, valid = rng.random((3, 20, 3)) < np.array([0.1, 0.1, 0.8])[:, None, None]
    expected = gae(rewards, values[:-1], values[1:], terminated, truncated, valid, gamma=0.99, lambda_=0.95)
    for ours, theirs in zip(floors.gae(rewards, values, terminated, truncated, valid), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_dqn() -> None:
    compared = Compared(corral_config.dqn_config(OPTIONS))
    shapes = [(4, 64), (1, 64), (64, 64), (1, 64), (64, 2), (1, 2)]
    parts, targets = compared.copy(q_pieces, shapes), compared.copy(q_pieces, shapes, "target_q")
    obs, next_obs, rewards = compared.normal(BATCH, 4), compared.normal(BATCH, 4), 3 * compared.normal(BATCH)
    actions = torch.from_numpy(compared.rng.integers(0, 2, BATCH))
    terminated = torch.from_numpy(compared.rng.random(BATCH) < 0.2)
    rows = torch.cat([obs, next_obs, torch.stack([actions, rewards, terminated], 1)], 1).float().numpy()
    grads = [part.grad.numpy() for part in parts]
    loss = floors_of_replay.dqn_gradients(floors.arrays(parts), floors.arrays(targets), grads, rows)
    batch = {"obs": obs, "next_obs": next_obs, "actions": actions, "rewards": rewards, "terminated": terminated}
    ones = torch.ones(BATCH)
    compared.check({"loss": loss}, batch | {"discounts": 0.99 * ones, "weights": ones})


def test_adam_in_numpy() -> None:
    rng = np.random.default_rng(0)
    theta = torch.nn.Parameter(torch.from_numpy(rng.standard_normal(100, dtype=np.float32)))
    ours, moments, scratch = (
        theta.detach().numpy().copy(),
        np.zeros((2, 100), np.float32),
        np.zeros((2, 100), np.float32),
    )
    optimizer = torch.optim.Adam([theta], lr=1e-2)
    for step in range(1, 6):
        theta.grad = torch.from_numpy(rng.standard_normal(100, dtype=np.float32))
        optimizer.step()
        floors_of_replay.adam(ours, theta.grad.numpy(), moments, scratch, step, lr=1e-2)
    np.testing.assert_allclose(ours, theta.detach().numpy(), rtol=1e-5, atol=1e-6)


def pendulum_batch(compared: Compared) -> tuple[Tensor, dict[str, Tensor]]:
    """Return rows as a floor has them, and Corral's columns, with actions in [-1, 1]."""
    rows = compared.normal(BATCH, 9)
    rows[:, 3] = rows[:, 3].tanh()
    rows[:, 8] = rows[:, 8] > 1
    columns = {"obs": rows[:, :3], "actions": rows[:, 3:4], "next_obs": rows[:, 4:7], "rewards": rows[:, 7]}
    ones = torch.ones(BATCH)
    return rows, {**columns, "terminated": rows[:, 8] == 1, "discounts": 0.99 * ones, "weights": ones}


def test_sac() -> None:
    compared = Compared(sac_side.config(OPTIONS))
    actor = compared.copy(actor_pieces, floors_of_replay.actor_shapes(2))
    critic = compared.copy(critic_pieces, floors_of_replay.CRITIC_SHAPES)
    targets = compared.copy(critic_pieces, floors_of_replay.CRITIC_SHAPES, "target_q")
    (log_alpha,) = compared.copy(lambda parts: {"log_alpha": parts[0]}, [()])
    assert len(compared.pairs) == len(actor) + 2 * len(critic) + 1
    rows, batch = pendulum_batch(compared)
    noise = compared.normal(2, BATCH, 1)
    losses = floors_of_replay.sac_gradients(actor, critic, targets, log_alpha, rows, noise)
    batch |= {"actions": batch["actions"].arctanh(), "noise": noise[0], "next_noise": noise[1]}
    names = ("critic_loss", "actor_loss", "alpha_loss")
    compared.check(dict(zip(names, losses, strict=True)), batch)


@pytest.mark.parametrize("moves_actor", [False, True])
def test_td3(moves_actor: bool) -> None:
    compared = Compared(td3_side.config(OPTIONS))
    actor = compared.copy(actor_pieces, floors_of_replay.actor_shapes(1))
    critic = compared.copy(critic_pieces, floors_of_replay.CRITIC_SHAPES)
    target_actor = compared.copy(actor_pieces, floors_of_replay.actor_shapes(1), "target_actor")
    targets = compared.copy(critic_pieces, floors_of_replay.CRITIC_SHAPES, "target_q")
    rows, batch = pendulum_batch(compared)
    noise = 2 * compared.normal(BATCH, 1)
    losses = floors_of_replay.td3_gradients(actor, critic, target_actor, targets, rows, noise, moves_actor)
    names = ("critic_loss", "actor_loss")[: 1 + moves_actor]
    batch |= {"next_noise": noise}
    compared.check(dict(zip(names, losses, strict=False)), batch, actor_coeff=float(moves_actor))
