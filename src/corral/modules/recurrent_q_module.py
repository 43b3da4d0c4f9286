"""Action values of modules with memory: a Q-network with an LSTM or a GRU, and its target network.

Kapturowski et al. 2019, "Recurrent Experience Replay in Distributed Reinforcement Learning" (R2D2).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor, nn

from corral.core.tree import Tree, map_tree
from corral.errors import ConfigError
from corral.modules.inference import numpy_layers
from corral.modules.memory import memory_outputs
from corral.modules.module import MemoryConfig
from corral.modules.numpy_recurrent import RecurrentSteps, numpy_can_compute
from corral.modules.q_module import QModule, QNetwork
from corral.modules.recurrent import RecurrentEncoder, State, is_flat


class RecurrentQModule(QModule):
    """The default module with memory of DQN; see `MemoryConfig`, `use_lstm` and `use_gru`.

    The recurrent layer comes before the last hidden layer.
    """

    CONFIG = MemoryConfig

    def __init__(self, *args: Any) -> None:
        """Build both networks; see `QModule`.

        Raises:
            ConfigError: `make_network` returns a network without the parts that are needed.
        """
        super().__init__(*args)
        if lacking := [name for name in ("encoder", "streams", "head") if not hasattr(self.q, name)]:
            raise ConfigError(
                f"{type(self).__name__}.make_network() returned {type(self.q).__name__} without {', '.join(lacking)}: "
                "it must return a network with an `encoder` like RecurrentEncoder, and with the layers after it, "
                "`streams` and `head`, as QNetwork has."
            )

    def make_network(self) -> nn.Module:
        """Return a new network with an `encoder` that has memory, and the layers after it, `streams` and `head`.

        The encoder has the methods of `corral.modules.recurrent.RecurrentEncoder`: it is called for sequences, `step`
        takes one step, and `initial_state` gives the state that it begins with.
        """
        return QNetwork(self.features_space, self.num_actions, self.network_config(), self.form, RecurrentEncoder)

    def initial_state(self) -> State:
        """Return zeros; see `RecurrentEncoder.initial_state`."""
        network: Any = self.q
        state: State = network.encoder.initial_state()
        return state

    def _outputs(self, obs: Tree, state: State, mask: Tensor, target: bool) -> Tensor:
        network: Any = self.target_q if target else self.q
        outputs: Tensor = network.head(network.streams(network.encoder(obs, state)[mask]))
        return outputs

    def _values(self, obs: Tree, outputs: Tensor) -> Tensor:
        if self.form.num_atoms > 1:
            outputs = outputs.reshape(outputs.shape[0], self.num_actions, -1).softmax(-1) @ self.atoms
        return self.mask_outputs(obs, outputs)

    def logits(self, obs: Tree, state: State, mask: Tensor, *, target: bool = False) -> Tensor:  # type: ignore[override]
        """Return the logits of the atoms of each action's return, `[M, n, atoms]`, for padded sequences.

        See `corral.modules.memory.module_inputs` for the arguments.
        """
        outputs = self._outputs(obs, state, mask, target)
        return outputs.reshape(outputs.shape[0], self.num_actions, -1)

    def q_values(self, obs: Tree, state: State, mask: Tensor, *, target: bool = False) -> Tensor:  # type: ignore[override]
        """Return the value of each action, float32 `[M, n]`, for padded sequences; see `QModule.q_values`."""
        rows = map_tree(lambda leaf: leaf[mask], obs) if self.has_action_mask else obs
        return self._values(rows, self._outputs(obs, state, mask, target))

    def policy(  # type: ignore[override]
        self, obs: Tree, state: State, *, target: bool = False
    ) -> tuple[Tensor, State]:
        """Return the action values `[B, n]` and the next states, for observations `[B, ...]` and states."""
        network: Any = self.target_q if target else self.q
        features, after = network.encoder.step(obs, state)
        return self._values(obs, network.head(network.streams(features))), after

    def value(self, obs: Tree, state: State) -> Tensor:  # type: ignore[override]
        """Return the value of the best action, float32 `[B]`."""
        return self.policy(obs, state)[0].amax(-1)

    def outputs(self, obs: Tree) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
        """Call the methods; see `Module.outputs`."""
        yield from memory_outputs(self, obs, has_value=True)

    def numpy_steps(self) -> RecurrentSteps | None:
        """Return the policy in NumPy for small layers on flat observations, with one atom."""
        if type(self).policy is not RecurrentQModule.policy or type(self.q) is not QNetwork or self.form.num_atoms > 1:
            return None
        encoder, head = cast(Any, self.q.encoder), [*self.q.streams, self.q.head]
        if not is_flat(encoder, self.observation_space):
            return None
        layers = [*encoder.encoder.mlp], encoder.rnn
        if not numpy_can_compute(*layers) or numpy_layers(head) is None:
            return None
        return RecurrentSteps({"": layers}, head, None)
