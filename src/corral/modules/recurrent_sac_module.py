"""The module of SAC with memory: an encoder with an LSTM or a GRU, which actor and critics share."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from corral.core.action_masks import MASK_KEY
from corral.core.settings import Need
from corral.core.tree import Tree
from corral.modules.critics import Follower
from corral.modules.inference import numpy_layers
from corral.modules.memory import burn_in, find_learned_steps, memory_outputs, module_inputs
from corral.modules.module import MemoryConfig
from corral.modules.numpy_recurrent import RecurrentSteps, numpy_can_compute
from corral.modules.recurrent import RecurrentEncoder, State, is_flat
from corral.modules.sac_module import ActorNetwork, CriticNetwork, SACModule, SACNetworkConfig

Features = dict[str, Tensor]
"""Features of the steps, `online` and where needed `target`, from the encoder and from the target encoder, and the mask
of legal actions where observations hold one."""


@dataclass
class SACMemoryConfig(SACNetworkConfig, MemoryConfig):
    """Settings of the default module of SAC with memory; see `MemoryConfig` and `SACNetworkConfig`.

    The layers of `critic_hiddens` come after the recurrent layer; `None` is the last one of `fcnet_hiddens`.
    """

    share_features: Annotated[
        bool,
        Need(
            "a module without memory: with memory all networks read one encoder", lambda config: not config.has_memory
        ),
    ] = False

    @property
    def has_memory(self) -> bool:
        """Whether there is a recurrent layer."""
        return self.use_lstm or self.use_gru


class RecurrentSACModule(SACModule):
    """The default module with memory of SAC; see `MemoryConfig`, `use_lstm` and `use_gru`.

    The critics train the encoder; the actor reads its features without gradients (Yarats et al. 2021,
    arXiv:1910.01741, section 5). So one state serves both. The last hidden layer of actor and critics comes after the
    recurrent layer. The methods `sample` and `q_values` take `Features` in place of observations.
    """

    CONFIG = SACMemoryConfig

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        """Build the networks; see `SACModule`."""
        super().__init__(observation_space, action_space, model_config)
        config = SACMemoryConfig.parse(self.model_config)
        self.encoder = RecurrentEncoder(self.features_space, config.hiddens_for(self.features_space)[:-1], config)
        self.target_encoder = copy.deepcopy(self.encoder).requires_grad_(False)
        self._targets = Follower(target_q="q", target_encoder="encoder")
        self._critics_are_frozen = False

    def _head_config(self) -> tuple[Any, Any]:
        """Return the space of the features, and the settings of the layers that read them."""
        config = SACMemoryConfig.parse(self.model_config)
        space = spaces.Box(-np.inf, np.inf, (config.cell_size,), np.float32)
        hiddens = tuple(config.hiddens_for(self.features_space)[-1:])
        # The encoder has the convolutions, or the features extractor.
        return space, replace(config, fcnet_hiddens=hiddens, conv_filters=None, features_extractor=None)

    def make_actor(self) -> nn.Module:
        """Return a new network from features `[B, H]` to `[B, distribution.num_inputs]`."""
        space, config = self._head_config()
        return ActorNetwork(space, self.num_actor_outputs, config, clamp_log_std=not self.is_discrete)

    def make_critic(self) -> nn.Module:
        """Return a new critic of features `[B, H]`."""
        space, config = self._head_config()
        return CriticNetwork(space, self.action_space, config)

    def initial_state(self) -> State:
        """Return zeros; see `RecurrentEncoder.initial_state`."""
        return self.encoder.initial_state()

    def policy(self, obs: Tree, state: State | None = None, *, target: bool = False) -> Any:
        """Return `dist_inputs`, float32 `[B, D]`, and the next states of the encoder, or of the target encoder.

        Without states `obs` are `Features`, and only `dist_inputs` are returned; gradients reach the actor alone.
        """
        if state is None:
            return self.mask_outputs(obs, self.actor(obs["online"].detach()))
        features, after = (self.target_encoder if target else self.encoder).step(obs, state)
        return self.policy(self._with_mask(obs, {"online": features})), after

    def value(self, obs: Tree, state: State) -> Tensor:  # type: ignore[override]
        """Return the lowest of the critics' values of the most likely action, float32 `[B]`."""
        return super().value(self._with_mask(obs, {"online": self.encoder.step(obs, state)[0]}))

    def _with_mask(self, obs: Any, features: Features) -> Features:
        """Return features with the mask of the observations that they come from, if there is one."""
        return {**features, MASK_KEY: obs[MASK_KEY]} if self.has_action_mask else features

    def q_values(self, obs: Features, actions: Tensor | None = None, *, target: bool = False) -> Tensor:
        """Return the values of all critics for features; see `ActorAndCritics.q_values`."""
        features = obs["target" if target else "online"]
        return super().q_values(features.detach() if self._critics_are_frozen else features, actions, target=target)

    @contextmanager
    def frozen_critics(self) -> Iterator[None]:
        """Make values differentiable in the actions but not in critics and encoder inside the block."""
        self._critics_are_frozen = True
        try:
            with super().frozen_critics():
                yield
        finally:
            self._critics_are_frozen = False

    def at_steps(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the steps to learn from in a batch of sequences, with features as `obs` and `next_obs`."""
        at = find_learned_steps(batch)
        obs, state, mask = module_inputs(burn_in(self, batch))
        online = self.encoder(obs, state)[mask]
        with torch.no_grad():
            obs, state, mask = module_inputs(burn_in(self, batch, target=True))
            of_target = self.target_encoder(obs, state)[mask]
        kept = ("actions", "rewards", "discounts", "terminated", "weights", "noise", "next_noise")
        steps: dict[str, Any] = {name: batch[name][at.rows] for name in kept if name in batch}
        features = {"online": online[at.places]}
        next_features = {"online": online.detach()[at.next_places], "target": of_target[at.next_places]}
        if self.has_action_mask:
            legal = batch["obs"][MASK_KEY]
            features[MASK_KEY], next_features[MASK_KEY] = legal[at.rows], legal[at.next_rows]
        return {**steps, "obs": features, "next_obs": next_features}

    def outputs(self, obs: Tree) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
        """Call the methods; see `Module.outputs`."""
        yield from memory_outputs(self, obs, has_value=True)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters of `actor`, `critic`, which includes the encoder, and `alpha`."""
        groups = super().parameter_groups()
        return {**groups, "critic": [*groups["critic"], *self.encoder.parameters()]}

    def acting_weights(self) -> dict[str, Tensor]:
        """Return the weights of the encoder and of the actor."""
        return {name: value for name, value in self.state_dict().items() if name.startswith(("actor.", "encoder."))}

    def numpy_steps(self) -> RecurrentSteps | None:
        """Return the policy in NumPy for small layers on flat observations."""
        if type(self).policy is not RecurrentSACModule.policy or type(self.actor) is not ActorNetwork:
            return None
        layers, head = ([*self.encoder.encoder.mlp], self.encoder.rnn), [*self.actor.encoder.mlp, *self.actor.head]
        if not is_flat(self.encoder, self.observation_space) or not numpy_can_compute(*layers):
            return None
        return None if numpy_layers(head) is None else RecurrentSteps({"": layers}, head, None)
