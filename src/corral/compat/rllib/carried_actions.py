"""Distributions of RLlib's modules that choose actions themselves, or with a distribution class of their own.

What such a module returns is random, so the outputs of its policy carry the actions to the runner: the inputs of the
distribution, then an action that explores, then one that does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from corral.compat.rllib.distributions import distribution_class
from corral.core.spaces import space_tree
from corral.core.tree import Tree, leaves, map_tree
from corral.errors import ConfigError
from corral.modules.distributions import ActionDistribution, FloatArray
from corral.modules.make_distribution import make_distribution

_ACTIONS, _INPUTS = "actions", "action_dist_inputs"
_OF = ("get_train_action_dist_cls", "get_exploration_action_dist_cls", "get_inference_action_dist_cls")
_FORWARD = ("forward_exploration", "forward_inference", "_forward_exploration", "_forward_inference")


class CarriedActions(ActionDistribution):
    """Takes actions from the outputs of a policy, and their likelihood from a distribution class of RLlib.

    Args:
        space: Action space.
        distribution_class: Class of RLlib whose `from_logits` takes the inputs.
        num_logits: Width of the inputs.
    """

    def __init__(self, space: spaces.Space[Any], distribution_class: Any, num_logits: int) -> None:
        """Keep the arguments."""
        self._space, self._class, self._num_logits = space, distribution_class, num_logits
        self._plain = make_distribution(space)
        self.action_shape, self.action_dtype = self._plain.action_shape, self._plain.action_dtype
        self._width = int(np.prod(self.action_shape, dtype=int))
        self.num_inputs, self.num_noise = num_logits + 2 * self._width, 0

    def carry(self, logits: Tensor, explored: Any, inferred: Any) -> Tensor:
        """Return outputs `[B, num_inputs]` that carry two actions, each nested like the space."""
        return torch.cat([logits, self._flat(explored, len(logits)), self._flat(inferred, len(logits))], -1)

    def pad(self, logits: Tensor) -> Tensor:
        """Return outputs `[B, num_inputs]` that carry no actions, for losses."""
        return torch.nn.functional.pad(logits, (0, 2 * self._width))

    def _flat(self, actions: Any, size: int) -> Tensor:
        return torch.cat([leaf.reshape(size, -1).to(torch.float32) for leaf in leaves(actions)], -1)

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
        return np.zeros((*shape, 0), np.float32)

    def sample(self, dist_inputs: FloatArray, noise: FloatArray) -> NDArray[Any]:
        return self._actions(dist_inputs, self._num_logits)

    def mode(self, dist_inputs: FloatArray) -> NDArray[Any]:
        return self._actions(dist_inputs, self._num_logits + self._width)

    def _actions(self, dist_inputs: FloatArray, start: int) -> NDArray[Any]:
        chosen = dist_inputs[:, start : start + self._width]
        return chosen.reshape(len(chosen), *self.action_shape).astype(self.action_dtype)

    def random(self, rng: np.random.Generator, batch_size: int) -> NDArray[Any]:
        return self._plain.random(rng, batch_size)

    def random_logp(self, actions: NDArray[Any]) -> FloatArray:
        return self._plain.random_logp(actions)

    def to_env(self, actions: NDArray[Any]) -> Tree:
        return self._plain.to_env(actions)

    def env_mode(self, dist_inputs: Tensor) -> Tree:
        """Refuse to be exported.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError("a module of RLlib with a distribution of its own cannot be exported.")

    def logp(self, dist_inputs: Tensor, actions: Tensor) -> Tensor:
        logp: Tensor = self._of(dist_inputs).logp(self._nested(actions))
        return logp

    def entropy(self, dist_inputs: Tensor) -> Tensor:
        entropy: Tensor = self._of(dist_inputs).entropy()
        return entropy

    def kl(self, dist_inputs: Tensor, other_inputs: Tensor) -> Tensor:
        divergence: Tensor = self._of(dist_inputs).kl(self._of(other_inputs))
        return divergence

    def _of(self, dist_inputs: Tensor) -> Any:
        return self._class.from_logits(dist_inputs[:, : self._num_logits].clone())  # some classes write into it

    def _nested(self, actions: Tensor) -> Any:
        """Return module actions nested like the space."""
        if not isinstance(self._space, (spaces.Dict, spaces.Tuple)):
            return actions
        start = 0

        def take(part: spaces.Space[Any]) -> Tensor:
            nonlocal start
            width = int(np.prod(part.shape or (), dtype=int))
            columns = actions[:, start : start + width]
            start += width
            return columns.squeeze(-1) if isinstance(part, spaces.Discrete) else columns

        return map_tree(take, space_tree(self._space))


def own_distribution(module: Any, base: type, example: Mapping[str, Any]) -> CarriedActions | None:
    """Return the distribution of a module that chooses actions itself, or has a class of its own; `None` for others.

    A module chooses them itself, too, if its outputs for inference are others than for exploration.

    Args:
        module: Module of RLlib.
        base: The base class whose methods name the class for the action space.
        example: A batch with two observations.
    """
    explored, cls = _probe(module, "forward_exploration", example), type(module)
    acts_alike = all(getattr(cls, name) is getattr(base, name) for name in _FORWARD)
    inferred = explored if acts_alike else _probe(module, "forward_inference", example)
    chooses = _ACTIONS in explored or _ACTIONS in inferred or not _are_alike(explored, inferred)
    if _INPUTS not in explored or not (chooses or names_distribution(module, base)):
        return None
    return CarriedActions(module.action_space, module.get_train_action_dist_cls(), explored[_INPUTS].shape[-1])


def names_distribution(module: Any, base: type) -> bool:
    """Return whether a module names another class of distributions than the one for the action space."""
    cls = type(module)
    overrides = module.action_dist_cls is not None or any(getattr(cls, name) is not getattr(base, name) for name in _OF)
    return overrides and any(getattr(module, name)() is not distribution_class(module.action_space) for name in _OF)


def acts_alike(module: Any, example: Mapping[str, Any], module_id: str | None = None) -> bool:
    """Return whether forward passes for exploration and for inference give the same inputs of the distribution."""
    found = [_probe(module, name, example) for name in ("forward_exploration", "forward_inference")]
    return _are_alike(*(each if module_id is None else each.get(module_id, {}) for each in found))


def _probe(module: Any, name: str, example: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the outputs of a forward pass, with the same random numbers at every call; none if it raises."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            found: Mapping[str, Any] = getattr(module, name)(map_tree(lambda leaf: leaf, dict(example)))
        except Exception:  # for observations that an env may never give; sampling tries what it gives
            return {}
    return found


def _are_alike(explored: Mapping[str, Any], inferred: Mapping[str, Any]) -> bool:
    """Return whether two forward passes give the same inputs of the distribution, or one of them gives none."""
    if _INPUTS not in explored or _INPUTS not in inferred:
        return True
    return torch.equal(explored[_INPUTS], inferred[_INPUTS])


def carried_outputs(
    module: Any, distribution: CarriedActions, batches: tuple[dict[str, Any], dict[str, Any]]
) -> Tensor:
    """Return outputs of a policy that carry the actions of exploration and of inference."""
    explored, inferred = module.forward_exploration(batches[0]), module.forward_inference(batches[1])
    actions = []
    for outputs, name in ((explored, "get_exploration_action_dist_cls"), (inferred, "get_inference_action_dist_cls")):
        if _ACTIONS in outputs:
            actions.append(outputs[_ACTIONS])
        else:
            found = getattr(module, name)().from_logits(outputs[_INPUTS].clone())
            actions.append((found if name == "get_exploration_action_dist_cls" else found.to_deterministic()).sample())
    return distribution.carry(explored[_INPUTS], *actions)
