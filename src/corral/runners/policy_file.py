"""The policy as an ONNX file with which clients choose their actions themselves.

The graph is exported once; later versions of the weights replace the numbers in it. Its inputs are the observations
and numbers drawn uniformly from (0, 1), so that it explores as the runner does, and every client can seed it.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from corral.core.spaces import space_tree
from corral.core.tree import Tree, leaves, map_tree, named_leaves
from corral.errors import ConfigError, ExportError, MissingPackageError
from corral.exploration.base import Exploration, Random, StochasticSampling
from corral.exploration.epsilon import EpsilonGreedy, SoftQ
from corral.exploration.intrinsic import IntrinsicReward
from corral.exploration.noise import GaussianNoise
from corral.modules.distributions import ActionDistribution, Deterministic
from corral.modules.exporting import silence_exporter
from corral.modules.networks import example_obs
from corral.runners.actor import Actor

OBS, UNIFORM, ACTIONS, OUTPUTS, DRAWS = "obs", "uniform", "actions", "outputs", "draws"
_LOWEST = 1e-7  # limits of the uniform numbers, so that their logarithms are finite in float32


class PolicyFile:
    """Writes the policy of an actor, with its exploration, as an ONNX file.

    The inputs are `obs`, or `obs/KEY` and so on of nested observations, floats as float32 and other numbers in the
    dtypes of the spaces, and `uniform`, float32 `[B, num_uniform]`. The outputs are `actions`, or `actions/KEY` and so
    on, in the units of the env; `outputs`, float32 `[B, D]`, which the policy computes from the observations; and
    `draws`, float32 `[B, D]`, whose mode is the action.

    Args:
        actor: The actor.

    Attributes:
        num_uniform: Width of `uniform`.

    Raises:
        MissingPackageError: onnx or onnxscript is missing.
        ConfigError: Only the runner can choose the actions of this policy; the message says why.
        ExportError: The module cannot be exported.
    """

    def __init__(self, actor: Actor) -> None:
        """Export the graph."""
        if missing := [name for name in ("onnx", "onnxscript") if find_spec(name) is None]:
            names = " and ".join(missing)
            raise MissingPackageError(f"the policy as a file needs {names}: run `pip install 'corral[onnx]'`.")
        if problem := _obstacle(actor):
            raise ConfigError(f"the policy cannot act in clients: {problem}: let the server choose the actions.")
        self._actor = actor
        self.num_uniform = 1 + actor.distribution.num_uniform
        self._model, self._names = self._export()
        self._num_constants = len(self._model.graph.initializer)

    def describe(self, *, timestep: int, explore: bool, random_actions: bool) -> tuple[float, float]:
        """Return how the actions explore: the share that is drawn uniformly, and the factor of the noise of the others.

        Args:
            timestep: Env steps of all runners so far.
            explore: Whether the actions explore.
            random_actions: Whether all of them are drawn uniformly from the action space.
        """
        if random_actions:
            return 1.0, 0.0
        return _noise(self._actor.exploration, timestep) if explore else (0.0, 0.0)

    def write(self, random_share: float, spread: float) -> bytes:
        """Return the file for the weights of now; see `describe`."""
        from onnx.numpy_helper import from_array

        values, graph = self._values(random_share, spread), self._model.graph
        del graph.initializer[self._num_constants :]
        graph.initializer.extend(from_array(values[name], name) for name in self._names)
        data: bytes = self._model.SerializeToString()
        return data

    def _values(self, random_share: float, spread: float) -> dict[str, NDArray[Any]]:
        """Return the numbers in the graph that change, by name."""
        weights = {f"weights.{name}": value.numpy() for name, value in self._actor.module.state_dict().items()}
        return {**weights, "random_share": np.array(random_share, np.float32), "spread": np.array(spread, np.float32)}

    def _export(self) -> tuple[Any, list[str]]:
        """Return the graph as an ONNX model, and the names of the numbers that it reads."""
        module, distribution = self._actor.module, self._actor.distribution
        obs, values = example_obs(module.observation_space), map_tree(torch.from_numpy, self._values(0.0, 1.0))
        graph, examples = _Graph(module, distribution), (values, obs, torch.full((2, self.num_uniform), 0.5))
        free = torch.export.Dim("batch")
        shapes = map_tree(lambda _: None, values), map_tree(lambda _: {0: free}, obs), {0: free}
        names = [name for name, _ in named_leaves(obs, OBS)]
        action_names = [name for name, _ in named_leaves(space_tree(module.action_space), ACTIONS)]
        try:
            with torch.no_grad(), silence_exporter():
                program = torch.export.export(graph, examples, dynamic_shapes=shapes, strict=False)
                made: Any = torch.onnx.export(
                    program,
                    input_names=[*values, *names, UNIFORM],
                    output_names=[*action_names, OUTPUTS, DRAWS],
                    dynamo=True,
                    verbose=False,
                )
        except Exception as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ExportError(f"the policy of {type(module).__name__} cannot be exported to ONNX: {reason}") from error
        model = made.model_proto
        inputs = [entry for entry in model.graph.input if entry.name not in values]
        del model.graph.input[:]
        model.graph.input.extend(inputs)
        # Numbers that the graph does not read, such as the weights of a value function, are left out.
        read = set(_names_read(model.graph))
        return model, [name for name in values if name in read]


class _Graph(nn.Module):
    """From numbers that change, observations and uniform numbers to env actions, outputs and draws."""

    def __init__(self, module: Any, distribution: ActionDistribution) -> None:
        super().__init__()
        self._policy = (_Policy(module),)  # in a tuple, so that its weights are no part of the graph
        self._distribution = distribution

    def forward(self, values: dict[str, Tensor], obs: Tree, uniform: Tensor) -> tuple[Tensor, ...]:
        weights = {name.replace("weights", "module", 1): value for name, value in values.items() if "." in name}
        outputs = torch.func.functional_call(self._policy[0], weights, (obs,))
        numbers = uniform[:, 1:].clamp(_LOWEST, 1 - _LOWEST)
        drawn = self._distribution.drawn_inputs(outputs, numbers, values["spread"])
        at_random = self._distribution.random_inputs(outputs, numbers)
        draws = torch.where(uniform[:, :1] < values["random_share"], at_random, drawn)
        return *leaves(self._distribution.env_mode(draws)), outputs, draws


class _Policy(nn.Module):
    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, obs: Tree) -> Tensor:
        outputs: Tensor = self.module.policy(obs)
        return outputs


def _names_read(graph: Any) -> Iterator[str]:
    """Yield the names of the values that the nodes of an ONNX graph read, in branches and loops too."""
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _names_read(inner)


def _obstacle(actor: Actor) -> str:
    """Return why only the runner can choose the actions, or nothing."""
    exploration, kind = _choosing(actor.exploration), type(actor.distribution)
    if actor.is_heuristic:
        return f"{type(actor.module).__name__} chooses them by rules in Python"
    if actor.memory is not None:
        return "the module has memory, whose states are in the runner"
    if actor.transforms is not None:
        return "transforms change the observations in the runner"
    if actor.module.is_noisy:
        return "the noise of the module's weights is in the runner"
    if kind.drawn_inputs is ActionDistribution.drawn_inputs:
        return f"the action distribution {kind.__name__} has no method drawn_inputs"
    known = (StochasticSampling, Random, EpsilonGreedy, SoftQ, *([GaussianNoise] if kind is Deterministic else []))
    if type(exploration) not in known:
        return f"the exploration is {type(exploration).__name__}, and not {' or '.join(one.__name__ for one in known)}"
    return ""


def _choosing(exploration: Exploration) -> Exploration:
    """Return the exploration that chooses actions; one with an intrinsic reward leaves that to another one."""
    return _choosing(exploration.sub) if isinstance(exploration, IntrinsicReward) else exploration


def _noise(exploration: Exploration, timestep: int) -> tuple[float, float]:
    """Return the share of random actions, and the factor of the noise of the others."""
    chosen: Any = _choosing(exploration)
    if isinstance(chosen, Random) or timestep < getattr(chosen, "random_timesteps", 0):
        return 1.0, 0.0
    if isinstance(chosen, EpsilonGreedy):
        return float(chosen.epsilons(timestep, 1)), 0.0
    if isinstance(chosen, SoftQ):
        return 0.0, float(chosen.get_metrics(timestep)["temperature"])
    if isinstance(chosen, GaussianNoise):
        return 0.0, float(chosen.scales(timestep, 1)) * chosen.stddev
    return 0.0, 1.0
