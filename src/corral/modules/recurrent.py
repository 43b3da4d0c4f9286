"""The default modules with memory: an LSTM or a GRU behind the encoder of the observations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional

from corral.core.tree import Tree, map_tree
from corral.errors import ConfigError
from corral.modules.inference import numpy_layers
from corral.modules.module import ActorCritic, MemoryConfig, ModelConfig
from corral.modules.networks import Encoder, set_weights
from corral.modules.numpy_recurrent import RecurrentSteps, numpy_can_compute

State = dict[str, Tensor]


class RecurrentEncoder(nn.Module):
    """An encoder of observations with an LSTM (Hochreiter and Schmidhuber 1997) or a GRU (Cho et al. 2014) behind it.

    By default the weights of the recurrent layer start orthogonal and its biases with 0, except for the bias of the
    forget gate of an LSTM, which starts with 1 (Jozefowicz et al. 2015).
    """

    def __init__(self, space: spaces.Space[Any], hiddens: Sequence[int], config: MemoryConfig) -> None:
        """Build the encoder and the recurrent layer."""
        super().__init__()
        self.encoder = Encoder(space, hiddens, config)
        self.num_outputs = config.cell_size
        kind = nn.LSTM if config.use_lstm else nn.GRU
        self.rnn = kind(self.encoder.num_outputs, self.num_outputs, batch_first=True)
        for name, parameter in self.rnn.named_parameters():
            if name.startswith("weight"):
                set_weights(parameter, config, "rnn", "kernel", nn.init.orthogonal_)
            else:
                set_weights(parameter, config, "rnn", "bias", nn.init.zeros_)
            if name == "bias_ih_l0" and config.use_lstm and config.rnn_bias_initializer is None:
                nn.init.ones_(parameter.detach()[self.num_outputs : 2 * self.num_outputs])

    def initial_state(self) -> State:
        """Return zeros: the output `h` `[H]`, and for an LSTM the cell `c` `[H]`."""
        names = ("h", "c") if isinstance(self.rnn, nn.LSTM) else ("h",)
        return {name: torch.zeros(self.num_outputs) for name in names}

    def forward(self, obs: Tree, state: State) -> Tensor:
        """Return features `[B, L, H]` for observations `[B, L, ...]` and the states before them, `[B, H]`."""
        flat = map_tree(lambda leaf: leaf.flatten(0, 1), obs)
        inputs = self.encoder(flat).unflatten(0, (len(state["h"]), -1))
        first = tuple(part.unsqueeze(0) for part in state.values())
        features: Tensor = self.rnn(inputs, first if isinstance(self.rnn, nn.LSTM) else first[0])[0]
        return features

    def step(self, obs: Tree, state: State) -> tuple[Tensor, State]:
        """Return features `[B, H]`, which are the next `h`, and the next states, for observations `[B, ...]`.

        These are the equations of `torch.nn.LSTM` and `torch.nn.GRU` for one step, which is faster than the layers and
        can be exported.
        """
        rnn: Any = self.rnn
        from_inputs = functional.linear(self.encoder(obs), rnn.weight_ih_l0, rnn.bias_ih_l0)
        from_state = functional.linear(state["h"], rnn.weight_hh_l0, rnn.bias_hh_l0)
        if isinstance(rnn, nn.LSTM):
            into, keep, new, out = (from_inputs + from_state).chunk(4, -1)
            c = keep.sigmoid() * state["c"] + into.sigmoid() * new.tanh()
            h = out.sigmoid() * c.tanh()
            return h, {"h": h, "c": c}
        (reset, keep, new), (reset_h, keep_h, new_h) = from_inputs.chunk(3, -1), from_state.chunk(3, -1)
        new, keep = torch.tanh(new + torch.sigmoid(reset + reset_h) * new_h), torch.sigmoid(keep + keep_h)
        h = new + keep * (state["h"] - new)
        return h, {"h": h}


class RecurrentActorCritic(ActorCritic):
    """The default module with memory of policy-gradient algorithms; see `ModelConfig`, `use_lstm` and `use_gru`.

    Policy and value share the encoder and the recurrent layer, unless `vf_share_layers=False` gives each its own. The
    memory of a central critic begins empty in each rollout.
    """

    def make_encoder(
        self, hiddens: Sequence[int], config: ModelConfig, space: spaces.Space[Any] | None = None
    ) -> RecurrentEncoder:
        """Return an encoder with memory."""
        return RecurrentEncoder(self.features_space if space is None else space, hiddens, config)

    def initial_state(self) -> State:
        """Return the state of the policy's layer, and the state of the value's own layer with names `value_...`."""
        state: State = self.policy_encoder.initial_state()
        if self.critic_space is None and self.value_encoder is not self.policy_encoder:
            state |= {f"value_{name}": part for name, part in self.value_encoder.initial_state().items()}
        return state

    def policy(self, obs: Tree, state: State) -> tuple[Tensor, State]:  # type: ignore[override]
        """Return `dist_inputs`, float32 `[B, D]`, and the next states, for observations `[B, ...]` and states."""
        features, after = self.policy_encoder.step(obs, _part(state, ""))
        if "value_h" in state:
            _, own = self.value_encoder.step(obs, _part(state, "value_"))
            after |= {f"value_{name}": part for name, part in own.items()}
        return self._dist_inputs(obs, features), after

    def value(self, obs: Tree, state: State) -> Tensor:  # type: ignore[override]
        """Return state values, float32 `[B]`, for observations `[B, ...]` and the states before them."""
        features, _ = self.value_encoder.step(obs, _part(state, "value_" if "value_h" in state else ""))
        return self._values(features)

    def policy_and_value(  # type: ignore[override]
        self, obs: Tree, state: State, mask: Tensor, critic_obs: Tree = None
    ) -> tuple[Tensor, Tensor]:
        """Return `dist_inputs` `[M, D]` and values `[M]` of padded sequences; see `corral.modules.memory`.

        The recurrent layer computes whole sequences, which is several times faster than one step after another.
        """
        own = type(self)
        if own.policy is not RecurrentActorCritic.policy or own.value is not RecurrentActorCritic.value:
            if critic_obs is not None:  # what one step after another is given has no states of the critic
                raise ConfigError(
                    f"{own.__name__} overrides policy or value of RecurrentActorCritic, whose central critic has "
                    "memory: derive the class from corral.Module, or leave out multi_agent(critic_sees=...)."
                )
            return super(ActorCritic, self).policy_and_value(obs, state, mask)
        features = for_values = self.policy_encoder(obs, _part(state, ""))[mask]
        if "value_h" in state:
            seen = obs if critic_obs is None else critic_obs
            for_values = self.value_encoder(seen, _part(state, "value_"))[mask]
        rows = map_tree(lambda leaf: leaf[mask], obs) if self.has_action_mask else obs
        return self._dist_inputs(rows, features), self._values(for_values)

    def critic_states(self, critic_obs: Tree, valid: Tensor) -> State:
        """Return the states `value_...` of a central critic; see `Module.critic_states`."""
        initial: State = self.value_encoder.initial_state()
        first = {name: part.to(valid.device).expand(valid.shape[1], -1) for name, part in initial.items()}
        states = [first]
        for t, is_step in enumerate(valid):
            _, after = self.value_encoder.step(map_tree(lambda leaf, t=t: leaf[t], critic_obs), states[-1])
            states.append({name: torch.where(is_step[:, None], after[name], first[name]) for name in first})
        return {f"value_{name}": torch.stack([state[name] for state in states]) for name in first}

    def numpy_steps(self) -> RecurrentSteps | None:
        """Return the policy in NumPy for small layers on flat observations, if no subclass overrides `policy`."""
        has_more = len(self.policy_hiddens) or self.log_std_bounds is not None
        if type(self).policy is not RecurrentActorCritic.policy or has_more:
            return None
        if not is_flat(self.policy_encoder, self.observation_space):
            return None
        encoders = {"": self.policy_encoder}
        if self.critic_space is None and self.value_encoder is not self.policy_encoder:
            encoders["value_"] = self.value_encoder
        layers = {prefix: ([*encoder.encoder.mlp], encoder.rnn) for prefix, encoder in encoders.items()}
        head = [self.policy_head]
        if not all(numpy_can_compute(*of_encoder) for of_encoder in layers.values()) or numpy_layers(head) is None:
            return None
        return RecurrentSteps(layers, head, self.log_std)


def is_flat(encoder: RecurrentEncoder, observation_space: spaces.Space[Any]) -> bool:
    """Return whether an encoder reads the flat numbers of a Box."""
    return encoder.encoder.is_flat and isinstance(observation_space, spaces.Box)


def _part(state: State, prefix: str) -> State:
    return {name: state[prefix + name] for name in ("h", "c") if prefix + name in state}
