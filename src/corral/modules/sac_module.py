"""The modules of soft actor-critic and its kin: an actor, critics with a head, target critics and a temperature.

The head says what the outputs of the critics stand for: `corral.modules.critics`. The modules of TQC, CrossQ, CQL,
TD3 and IQL derive from the classes here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from gymnasium import spaces
from torch import Tensor, nn

from corral.core.action_masks import MASK_KEY
from corral.core.settings import PositiveInt
from corral.core.spaces import is_bounded_floats, remedy_for_bounds
from corral.core.tree import Tree
from corral.errors import ConfigError
from corral.modules.critics import Follower, ScalarHead
from corral.modules.distributions import ActionDistribution, SquashedGaussian
from corral.modules.module import LogStdRange, Module, NetworkConfig
from corral.modules.networks import Encoder, LogStdBounds, LogStdClamp

# Fraction of the largest entropy of Discrete actions that "auto" aims at; see `SACModule.auto_target_entropy`.
TARGET_ENTROPY_SHARE = 0.5
# Widths of the blocks of critics with an architecture, as Lee et al. 2024 (arXiv:2410.09754) and 2025 have them.
CRITIC_BLOCKS = (512, 512)


@dataclass
class SACNetworkConfig(NetworkConfig):
    """Settings of the default module of SAC, for each of its networks.

    Attributes:
        critic_hiddens: Widths of the hidden layers of the critics; `None` is `fcnet_hiddens`. With an architecture it
            is two blocks of width 512 unless `fcnet_hiddens` is given.
        share_features: Whether actor and critics read the same features, of one `features_extractor` or of the same
            convolutions. The critics train them, and the actor reads them without gradients (Yarats et al. 2021,
            arXiv:1910.01741, section 5).
        log_std_bounds: Lower and upper bound of the log standard deviation of Box actions, kept by a sigmoid; `None`
            clamps it to [-20, 2], as Haarnoja et al. 2018 do.
    """

    DEFAULT_HIDDENS: ClassVar[tuple[int, ...]] = (256, 256)
    DEFAULT_BLOCKS: ClassVar[tuple[int, ...]] = (128,)

    critic_hiddens: tuple[PositiveInt, ...] | None = None
    share_features: bool = False
    log_std_bounds: LogStdRange | None = None

    def critic_hiddens_for(self, space: spaces.Space[Any]) -> list[int]:
        """Return the widths of the hidden layers of critics; see `find_critic_hiddens`."""
        return find_critic_hiddens(self, space)


def find_critic_hiddens(config: Any, space: spaces.Space[Any]) -> list[int]:
    """Return the widths of the hidden layers of critics, given settings with `critic_hiddens`."""
    if config.critic_hiddens is not None:
        return list(config.critic_hiddens)
    if config.architecture is not None and config.fcnet_hiddens is None:
        return list(CRITIC_BLOCKS)
    return list(config.hiddens_for(space))


class ActorNetwork(nn.Module):
    """A network from observations to `dist_inputs`, `[B, D]`: an encoder and a head.

    If it shares features with critics, the hidden layers are in the head, and the encoder gets no gradients from here.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        num_inputs: int,
        config: NetworkConfig,
        *,
        clamp_log_std: bool = False,
    ) -> None:
        """Build the layers; the weights of the head start small, so the initial policy is almost constant."""
        super().__init__()
        hiddens = config.hiddens_for(observation_space)
        self.shares_features = bool(getattr(config, "share_features", False))
        self.encoder = Encoder(observation_space, [] if self.shares_features else hiddens, config)
        num_features = self.encoder.num_outputs
        head: list[nn.Module] = []
        if self.shares_features:
            head, num_features = [*config.make_layers(num_features, hiddens)], [num_features, *hiddens][-1]
        head += [
            *config.make_head_layers(num_features),
            config.make_last_layer(num_features, num_inputs, 0.01),
        ]
        if clamp_log_std:
            bounds = getattr(config, "log_std_bounds", None)
            head.append(LogStdClamp() if bounds is None else LogStdBounds(*bounds))
        self.head = nn.Sequential(*head)

    def forward(self, obs: Tree) -> Tensor:
        """Map observations, a tree of `[B, ...]`, to `[B, D]`."""
        features = self.encoder(obs)
        dist_inputs: Tensor = self.head(features.detach() if self.shares_features else features)
        return dist_inputs


class CriticNetwork(nn.Module):
    """A network of action values: `[B]` for given Box actions, `[B, n]` for all Discrete actions.

    With `num_outputs` it gives so many numbers for Box actions, `[B, num_outputs]`, such as quantiles.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        config: NetworkConfig,
        *,
        num_outputs: int | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        """Build the layers; the first hidden layer reads the encoded observation and the Box action.

        Other networks may have the `encoder` too; `None` makes one.
        """
        super().__init__()
        self._is_scalar = num_outputs is None and not isinstance(action_space, spaces.Discrete)
        hiddens = config.critic_hiddens_for(observation_space)
        self.encoder = Encoder(observation_space, [], config) if encoder is None else encoder
        num_features = self.encoder.num_outputs
        num_values = num_outputs or 1
        if isinstance(action_space, spaces.Discrete):
            num_values = int(action_space.n)
        else:
            num_features += math.prod(action_space.shape or ())
        layers = config.make_layers(num_features, hiddens)
        num_features = hiddens[-1] if hiddens else num_features
        self.mlp = nn.Sequential(*layers, *config.make_head_layers(num_features))
        self.head = config.make_last_layer(num_features, num_values, 1.0)

    def forward(self, obs: Tree, actions: Tensor | None = None, features: Tensor | None = None) -> Tensor:
        """Map observations, and Box actions float32 `[B, d]`, to values `[B]`, `[B, n]` or `[B, num_outputs]`.

        Args:
            obs: Observations, a tree of `[B, ...]`.
            actions: Box actions in [-1, 1].
            features: What the encoder gives for the observations, if that is known.
        """
        features = self.encoder(obs) if features is None else features
        if actions is not None:
            features = torch.cat([features, actions], -1)
        values: Tensor = self.head(self.mlp(features))
        return values.squeeze(-1) if self._is_scalar else values


def shared_encoder(actor: nn.Module, config: Any) -> Encoder | None:
    """Return the encoder of an actor that the critics have too, or `None` if they do not share it.

    Raises:
        ConfigError: They should share it, and the actor is of another class.
    """
    if not getattr(config, "share_features", False):
        return None
    if not isinstance(actor, ActorNetwork):
        raise ConfigError(
            f"model_config: share_features=True needs the default actor, and make_actor returned {type(actor).__name__}"
            ": leave it out, and share layers in make_actor and make_critic."
        )
    return actor.encoder


def shares_features(actor: nn.Module, critics: nn.ModuleList) -> bool:
    """Return whether the critics have the encoder of the actor.

    Raises:
        ConfigError: They should share it, and a critic has another encoder, so that nothing would train the actor's.
    """
    if not (isinstance(actor, ActorNetwork) and actor.shares_features):
        return False
    if others := [critic for critic in critics if getattr(critic, "encoder", None) is not actor.encoder]:
        raise ConfigError(
            f"model_config: share_features=True needs critics with the encoder of the actor, and make_critic returned "
            f"{type(others[0]).__name__} without it: leave it out, or take `self.actor.encoder` there."
        )
    return True


def own_parameters(actor: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that the loss of an actor moves, without an encoder that it shares with critics."""
    if isinstance(actor, ActorNetwork) and actor.shares_features:
        return list(actor.head.parameters())
    return list(actor.parameters())


class ActorAndCritics:
    """Mixed into a `Module`: an actor, one or more critics, and target critics that follow them slowly.

    For custom networks, define `make_actor` or `make_critic`, or both, in a subclass. The constructor calls them; they
    may read `observation_space`, `features_space`, `action_space`, `distribution`, `is_discrete` and `model_config`. No
    parameter may belong to two of the networks: each group of parameters has its own optimizer settings and its own
    loss.

    Attributes:
        actor: Network from observations to the parameters of the policy.
        q: Critics.
        target_q: Target critics, without gradients.
        head: What the outputs of the critics stand for.
        is_discrete: Whether actions are Discrete; otherwise they are Box.
        model_config: Settings of the networks.
        FIXED: Settings of the distribution that users cannot change.
    """

    CONFIG: ClassVar[type[NetworkConfig]]
    FIXED: ClassVar[Mapping[str, Any]] = {}

    # What `Module` has.
    observation_space: spaces.Space[Any]
    features_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    distribution: ActionDistribution
    policy: Any

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        """Build the networks.

        Args:
            observation_space: Space of one observation.
            action_space: Space of one action.
            model_config: The algorithm's settings of the module, and the settings of the networks.

        Raises:
            ConfigError: The algorithm does not take the actions.
        """
        self.is_discrete = isinstance(action_space, spaces.Discrete)
        self.check_actions(action_space)
        settings = dict(model_config)
        names = ("action_masks", "action_bounds", "max_seq_len")
        own = {name: settings[name] for name in names if name in settings}
        super().__init__(observation_space, action_space, {**own, **self.FIXED})  # type: ignore[call-arg]
        self.head = self.read_settings(settings)
        num_critics = settings.pop("num_critics", 2 if settings.pop("twin_q", True) else 1)
        self.model_config = settings
        self.actor = self.make_actor()
        self.q = nn.ModuleList(self.make_critic() for _ in range(num_critics))
        self.shares_features = shares_features(self.actor, self.q)
        # Critics whose encoders have no weights read the same features, too.
        self._encodes_once = self.shares_features or all(
            type(critic) is CriticNetwork and not critic.encoder.state_dict() and critic.encoder.extractor is None
            for critic in self.q
        )
        self.target_q = self.make_targets()
        self._targets = Follower(target_q="q")

    def check_actions(self, action_space: spaces.Space[Any]) -> None:
        """Refuse an action space that the algorithm does not take.

        Raises:
            ConfigError: Names the algorithm and the space.
        """

    def read_settings(self, settings: dict[str, Any]) -> ScalarHead:
        """Take the settings that are not of the networks out of `settings`, and return the head of the critics."""
        return ScalarHead(0.5)

    @property
    def critic_shape(self) -> tuple[int, ...]:
        """Shape of what a critic gives for one observation and a Box action."""
        return self.head.shape

    @property
    def num_actor_outputs(self) -> int:
        """Number of outputs of the actor."""
        return self.distribution.num_inputs

    # Methods that a subclass may define.

    def make_actor(self) -> nn.Module:
        """Return a new network from observations (a tree of `[B, ...]`) to `[B, num_actor_outputs]`."""
        return ActorNetwork(self.features_space, self.num_actor_outputs, self.CONFIG.parse(self.model_config))

    def make_critic(self) -> nn.Module:
        """Return a new critic.

        For Box actions it is called as `critic(obs, actions)`, with actions float32 `[B, d]`, in [-1, 1] if they have
        bounds, and returns `[B, *critic_shape]`. For Discrete actions it is called as `critic(obs)` and returns
        `[B, n]`.
        """
        config: Any = self.CONFIG.parse(self.model_config)
        encoder, num_outputs = shared_encoder(self.actor, config), next(iter(self.critic_shape), None)
        return CriticNetwork(self.features_space, self.action_space, config, num_outputs=num_outputs, encoder=encoder)

    def make_targets(self) -> nn.ModuleList:
        """Return the target critics, copies of the critics."""
        return copy.deepcopy(self.q).requires_grad_(False)

    def outputs(self, obs: Tree) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
        """Call the networks, then the methods; see `Module.outputs`."""
        yield "actor(obs)", self.actor(obs), (self.num_actor_outputs,)
        for name in ("q", "target_q"):
            for index, critic in enumerate(getattr(self, name)):
                if isinstance(self.action_space, spaces.Discrete):
                    yield f"{name}[{index}](obs)", critic(obs), (int(self.action_space.n),)
                else:
                    zeros = torch.zeros(2, self.distribution.num_noise)
                    yield f"{name}[{index}](obs, actions)", critic(obs, zeros), self.critic_shape
        yield from super().outputs(obs)  # type: ignore[misc]

    # Methods that the algorithm calls.

    def q_values(self, obs: Tree, actions: Tensor | None = None, *, target: bool = False) -> Tensor:
        """Return the values of all critics: `[C, B]` for Box actions, `[C, B, n]` for Discrete ones.

        Box actions are in [-1, 1] if they have bounds. This method returns what the critics give; a module with another
        head names it otherwise, and returns the means here.
        """
        critics: Any = self.target_q if target else self.q
        if self._encodes_once:
            features = critics[0].encoder(obs)
            return torch.stack([critic(obs, actions, features) for critic in critics])
        arguments = (obs,) if actions is None else (obs, actions)
        return torch.stack([critic(*arguments) for critic in critics])

    def update_target(self, tau: float) -> None:
        """Move all targets towards their networks by a fraction `tau`; 1 copies the networks."""
        self._targets.move(self, tau)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters of `actor` and `critic`, and of what else the module has."""
        return {"actor": own_parameters(self.actor), "critic": list(self.q.parameters())}

    def acting_weights(self) -> dict[str, Tensor]:
        """Return the weights of the policy."""
        return {f"actor.{name}": value for name, value in self.actor.state_dict().items()}

    def layers_after(
        self, policy: Any, *last: nn.Module, log_std: nn.Parameter | None = None
    ) -> tuple[list[nn.Module], nn.Parameter | None] | None:
        """Return what `policy_layers` returns: the layers of the default actor on flat observations, and later ones.

        Args:
            policy: The method `policy` that computes these layers; with another one there is no such stack.
            *last: Layers after the actor.
            log_std: What the policy appends.
        """
        if type(self).policy is not policy or type(self.actor) is not ActorNetwork or not self.actor.encoder.is_flat:
            return None
        return [*self.actor.encoder.mlp, *self.actor.head, *last], log_std


class SACModule(ActorAndCritics, Module):
    """An actor, one or two critics with target critics that follow them slowly, and a temperature.

    For custom networks, define `make_actor` or `make_critic`, or both, in a subclass; see `ActorAndCritics`.

    Attributes:
        actor: Network from observations to `dist_inputs`.
        q: Critics.
        target_q: Target critics, without gradients.
        log_alpha: Logarithm of the temperature, float32 `[]`.
        is_discrete: Whether actions are Discrete; otherwise they are Box.
        has_targets: Whether there are target critics.
        BOX_ONLY: What a class takes that does not take Discrete actions, and the remedy.
    """

    MUST_DEFINE = ()
    CONFIG: ClassVar[type[NetworkConfig]] = SACNetworkConfig
    FIXED: ClassVar[Mapping[str, Any]] = {"action_bounds": "squash"}
    BOX_ONLY: ClassVar[tuple[str, str] | None] = None
    has_targets: ClassVar[bool] = True

    def check_actions(self, action_space: spaces.Space[Any]) -> None:
        """Refuse actions that are neither Discrete nor floats with finite bounds."""
        if self.is_discrete and self.BOX_ONLY:
            takes, remedy = self.BOX_ONLY
            raise ConfigError(f"{takes} a Box of floats, and the env's actions are {action_space}: {remedy}.")
        if not self.is_discrete and not is_bounded_floats(action_space):
            raise ConfigError(
                "SAC takes Discrete actions, or a Box of floats whose bounds are all finite, and the env's actions are "
                f"{action_space}: {remedy_for_bounds(action_space)}."
            )

    def read_settings(self, settings: dict[str, Any]) -> ScalarHead:
        """Make the temperature, and return the head of the critics."""
        self.log_alpha = nn.Parameter(torch.tensor(math.log(float(settings.pop("initial_alpha", 1.0)))))
        return super().read_settings(settings)

    def make_actor(self) -> nn.Module:
        """Return a new network from observations (a tree of `[B, ...]`) to `[B, distribution.num_inputs]`.

        For Box actions the outputs are means and log standard deviations before the tanh; `LogStdClamp` keeps the
        latter in a safe range. For Discrete actions they are logits.
        """
        config = self.CONFIG.parse(self.model_config)
        clamps = not self.is_discrete
        return ActorNetwork(self.features_space, self.num_actor_outputs, config, clamp_log_std=clamps)

    def policy(self, obs: Tree) -> Tensor:
        """Map observations to `dist_inputs`, float32 `[B, D]`."""
        dist_inputs: Tensor = self.actor(obs)
        return self.mask_outputs(obs, dist_inputs) if self.has_action_mask else dist_inputs

    def sample(self, obs: Tree, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the Box actions for noise `[B, d]`, float32 `[B, d]` in [-1, 1], and their log-density `[B]`.

        Both are differentiable in the actor (reparameterisation, Haarnoja et al. 2018, eq. 11 and appendix C).
        """
        assert isinstance(self.distribution, SquashedGaussian)
        return self.distribution.squashed_sample(self.policy(obs), noise)

    def value(self, obs: Tree) -> Tensor:
        """Return a low value of the most likely action, float32 `[B]`; see `ScalarHead.lowest`."""
        outputs = self.policy(obs)
        if self.is_discrete:
            best = outputs.argmax(-1, keepdim=True)
            return self.q_values(obs).amin(0).gather(-1, best).squeeze(-1)
        mean = outputs[:, : outputs.shape[1] // 2]
        return self.head.lowest(getattr(self, self.head.METHOD)(obs, mean.tanh()))

    @contextmanager
    def frozen_critics(self) -> Iterator[None]:
        """Make values differentiable in the actions but not in the critics inside the block, which saves work."""
        trainable = [parameter for parameter in self.q.parameters() if parameter.requires_grad]
        for parameter in trainable:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in trainable:
                parameter.requires_grad_(True)

    def auto_target_entropy(self, obs: Tree) -> float | Tensor:
        """Return the default target of the entropy, in nats.

        For Box actions it is minus the number of dimensions (Haarnoja et al. 2018b, arXiv:1812.05905, appendix D). For
        n Discrete actions it is `TARGET_ENTROPY_SHARE` of the largest entropy, log n; where observations hold a mask, n
        is the number of legal actions, and the target is the mean over the observations, a tree of `[B, ...]`.
        Christodoulou 2019 (arXiv:1910.07207) uses 0.98 of it, which keeps the policy close to uniform.
        """
        if self.has_action_mask:
            num_legal: Tensor = (obs[MASK_KEY] != 0).flatten(1).sum(-1)
            return num_legal.clamp(min=1).log().mean() * TARGET_ENTROPY_SHARE
        if isinstance(self.action_space, spaces.Discrete):
            return TARGET_ENTROPY_SHARE * math.log(int(self.action_space.n))
        return -float(self.distribution.num_noise)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters of `actor`, `critic` and `alpha`."""
        return {**super().parameter_groups(), "alpha": [self.log_alpha]}

    def policy_layers(self) -> tuple[list[nn.Module], nn.Parameter | None] | None:
        """Return the layers of the actor, if it is the default actor on flat observations."""
        return self.layers_after(SACModule.policy)
