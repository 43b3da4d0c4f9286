"""Envs whose dynamics are computed by torch for all sub-envs at once, on the CPU or on a GPU.

No method that runs in a step waits for the device: what belongs to ended episodes is chosen by `torch.where`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from corral.core.devices import find_tensor_device
from corral.envs.tensor_env import TensorVectorEnv
from corral.errors import CheckpointError, ConfigError, EnvError


class TorchEnv(TensorVectorEnv):
    """Base of envs whose dynamics are three functions on tensors; the class keeps the time, and resets what has ended.

    A subclass sets the two spaces and writes `sample_states`, `advance` and `observe`.

    Args:
        num_envs: Number of sub-envs N.
        device: Device of all tensors.
        max_episode_steps: Steps after which an episode is truncated.

    Raises:
        ConfigError: `num_envs` or `max_episode_steps` is less than 1.
    """

    def __init__(self, num_envs: int, device: str | torch.device, max_episode_steps: int) -> None:
        """Make the generator of all sub-envs; the first reset makes their states."""
        for name, value in (("num_envs", num_envs), ("max_episode_steps", max_episode_steps)):
            if value < 1:
                raise ConfigError(f"{type(self).__name__}: {name} must be at least 1, not {value}.")
        self.num_envs, self.max_episode_steps = num_envs, max_episode_steps
        self.device = find_tensor_device(device)
        self._generator = torch.Generator(self.device)
        self._generator.seed()
        self._states: Tensor | None = None
        self._num_steps = torch.zeros(num_envs, dtype=torch.int64, device=self.device)

    @abstractmethod
    def sample_states(self, generator: torch.Generator) -> Tensor:
        """Return new initial states `[N, S]` of all sub-envs."""

    @abstractmethod
    def advance(self, states: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states after one step, and write into none of the arguments.

        Args:
            states: States `[N, S]`.
            actions: Actions `[N, ...]`, in the units of the action space.

        Returns:
            The next states `[N, S]`; rewards, float32 `[N]`; and `terminated`, bool `[N]`.
        """

    @abstractmethod
    def observe(self, states: Tensor) -> Tensor:
        """Return the observations, a new tensor float32 `[N, ...]`, of states `[N, S]`."""

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Reset all sub-envs; see `TensorVectorEnv.reset`. There are no options."""
        if seed is not None:
            self._generator.manual_seed(seed)
        self._states = self.sample_states(self._generator)
        self._num_steps = torch.zeros_like(self._num_steps)
        return self.observe(self._states), {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Step all sub-envs; see `TensorVectorEnv.step`. Every step gives `final_obs` of all sub-envs.

        Raises:
            EnvError: The env has not been reset, or the actions have another shape.
        """
        shape = (self.num_envs, *(self.single_action_space.shape or ()))
        if self._states is None:
            raise EnvError(f"{type(self).__name__} was stepped before its first reset: call reset().")
        if actions.shape != shape:
            raise EnvError(f"{type(self).__name__} needs actions of shape {list(shape)}, not {list(actions.shape)}.")
        states, rewards, terminated = self.advance(self._states, actions)
        num_steps = self._num_steps + 1
        truncated = num_steps >= self.max_episode_steps
        ended = terminated | truncated
        self._states = torch.where(ended[:, None], self.sample_states(self._generator), states)
        self._num_steps = torch.where(ended, 0, num_steps)
        return self.observe(self._states), rewards, terminated, truncated, {"final_obs": self.observe(states)}

    def get_state(self) -> dict[str, Any]:
        """Return the states, the steps of each episode and the generator as arrays.

        Raises:
            EnvError: The env has not been reset.
        """
        if self._states is None:
            raise EnvError(f"{type(self).__name__} has no state before its first reset: call reset().")
        return {
            "states": self._states.cpu().numpy().copy(),
            "num_steps": self._num_steps.cpu().numpy().copy(),
            "generator": self._generator.get_state().numpy(),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_state`.

        Raises:
            CheckpointError: The state is of another number of sub-envs, or of another kind of device.
        """
        states = torch.tensor(state["states"], device=self.device)
        if len(states) != self.num_envs:
            raise CheckpointError(
                f"{type(self).__name__}: the state is of num_envs={len(states)}, and this env has "
                f"num_envs={self.num_envs}."
            )
        try:
            self._generator.set_state(torch.tensor(state["generator"]))
        except RuntimeError as error:
            raise CheckpointError(
                f"{type(self).__name__}: the state of the generator is not of device {self.device.type!r} ({error}). "
                "Continue on the kind of device on which the run began."
            ) from error
        self._states, self._num_steps = states, torch.tensor(state["num_steps"], device=self.device)


class TorchCartPole(TorchEnv):
    """The cart-pole of Gymnasium's CartPole-v1, with float32 states (position, velocity, angle, angular velocity).

    Barto, Sutton and Anderson, "Neuronlike adaptive elements that can solve difficult learning control problems",
    1983; https://gymnasium.farama.org/environments/classic_control/cart_pole. Actions are int64 `[N]`: 0 pushes to the
    left, 1 to the right. Each step gives a reward of 1, also the last one.

    Args:
        num_envs: Number of sub-envs N.
        device: Device of all tensors.
        max_episode_steps: Steps after which an episode is truncated.

    Raises:
        ConfigError: `num_envs` or `max_episode_steps` is less than 1.
    """

    GRAVITY = 9.8  # m / s^2
    CART_MASS, POLE_MASS = 1.0, 0.1  # kg
    HALF_LENGTH = 0.5  # of the pole, in m
    FORCE = 10.0  # N
    STEP_S = 0.02
    MAX_POSITION = 2.4  # m
    MAX_ANGLE = math.radians(12)
    INITIAL_BOUND = 0.05  # of each number of an initial state

    def __init__(self, num_envs: int, device: str | torch.device = "cpu", max_episode_steps: int = 500) -> None:
        """Set the spaces."""
        super().__init__(num_envs, device, max_episode_steps)
        high = np.array([2 * self.MAX_POSITION, np.inf, 2 * self.MAX_ANGLE, np.inf], np.float32)
        self.single_observation_space = spaces.Box(-high, high)
        self.single_action_space = spaces.Discrete(2)

    def sample_states(self, generator: torch.Generator) -> Tensor:
        """Return states of which each number is uniform within `INITIAL_BOUND` of 0."""
        uniform = torch.rand((self.num_envs, 4), generator=generator, device=self.device)
        return (2 * uniform - 1) * self.INITIAL_BOUND

    def advance(self, states: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states after one step of Euler's method, rewards of 1, and which ones are out of bounds."""
        position, velocity, angle, angular_velocity = states.unbind(1)
        force = torch.where(actions == 1, self.FORCE, -self.FORCE)
        sin, cos, mass = angle.sin(), angle.cos(), self.CART_MASS + self.POLE_MASS
        pole_moment = self.POLE_MASS * self.HALF_LENGTH
        push = (force + pole_moment * angular_velocity.square() * sin) / mass
        angular_acceleration = (self.GRAVITY * sin - cos * push) / (
            self.HALF_LENGTH * (4 / 3 - self.POLE_MASS * cos.square() / mass)
        )
        acceleration = push - pole_moment * angular_acceleration * cos / mass
        change = torch.stack((velocity, acceleration, angular_velocity, angular_acceleration), 1)
        states = states + self.STEP_S * change
        terminated = (states[:, 0].abs() > self.MAX_POSITION) | (states[:, 2].abs() > self.MAX_ANGLE)
        return states, torch.ones_like(position), terminated

    def observe(self, states: Tensor) -> Tensor:
        """Return a copy of the states."""
        return states.clone()


class TorchPendulum(TorchEnv):
    """The pendulum of Gymnasium's Pendulum-v1, with float32 states (angle from upright, angular velocity).

    https://gymnasium.farama.org/environments/classic_control/pendulum. Actions are torques, float32 `[N, 1]`, which are
    clipped to [-2, 2]. No episode terminates.

    Args:
        num_envs: Number of sub-envs N.
        device: Device of all tensors.
        max_episode_steps: Steps after which an episode is truncated.

    Raises:
        ConfigError: `num_envs` or `max_episode_steps` is less than 1.
    """

    GRAVITY = 10.0  # m / s^2
    MASS, LENGTH = 1.0, 1.0  # kg, m
    MAX_TORQUE = 2.0  # N m
    MAX_SPEED = 8.0  # rad / s
    STEP_S = 0.05
    INITIAL_BOUNDS = (math.pi, 1.0)  # of the angle and the angular velocity of an initial state

    def __init__(self, num_envs: int, device: str | torch.device = "cpu", max_episode_steps: int = 200) -> None:
        """Set the spaces."""
        super().__init__(num_envs, device, max_episode_steps)
        high = np.array([1, 1, self.MAX_SPEED], np.float32)
        self.single_observation_space = spaces.Box(-high, high)
        self.single_action_space = spaces.Box(-self.MAX_TORQUE, self.MAX_TORQUE, (1,))
        self._initial_bounds = torch.tensor(self.INITIAL_BOUNDS, device=self.device)

    def sample_states(self, generator: torch.Generator) -> Tensor:
        """Return states that are uniform within `INITIAL_BOUNDS` of 0."""
        uniform = torch.rand((self.num_envs, 2), generator=generator, device=self.device)
        return (2 * uniform - 1) * self._initial_bounds

    def advance(self, states: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states after one step, the negative costs of angle, speed and torque, and `terminated`, all False.

        The cost is of the state before the step. The angle moves by the speed after the step.
        """
        angle, speed = states.unbind(1)
        torque = actions[:, 0].clamp(-self.MAX_TORQUE, self.MAX_TORQUE)
        from_upright = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        costs = from_upright.square() + 0.1 * speed.square() + 0.001 * torque.square()
        gravity_part = 3 * self.GRAVITY / (2 * self.LENGTH) * angle.sin()
        acceleration = gravity_part + 3 / (self.MASS * self.LENGTH**2) * torque
        speed = (speed + self.STEP_S * acceleration).clamp(-self.MAX_SPEED, self.MAX_SPEED)
        states = torch.stack((angle + self.STEP_S * speed, speed), 1)
        return states, -costs, torch.zeros_like(angle, dtype=torch.bool)

    def observe(self, states: Tensor) -> Tensor:
        """Return cosine and sine of the angle, and the angular velocity."""
        angle, speed = states.unbind(1)
        return torch.stack((angle.cos(), angle.sin(), speed), 1)
