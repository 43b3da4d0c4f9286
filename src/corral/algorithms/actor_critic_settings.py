"""Settings of off-policy algorithms with an actor and critics, and of critics over atoms."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal

from corral.core.settings import Need, NonNegativeSchedule, PositiveInt
from corral.errors import ConfigError

AUTO_ATOMS = 101
"""Atoms of SimbaV2 (Lee et al. 2025, arXiv:2502.15280)."""


HAS_ATOMS = Need("num_atoms above 1", lambda config: config.num_critic_atoms > 1)


@dataclass(kw_only=True, repr=False)
class ActorCriticSettings:
    """Settings of off-policy algorithms with an actor and critics: an update per env step, and targets that follow.

    The buffer keeps 1,000,000 env steps, unless `replay_buffer_config` has a `capacity`; memory is allocated as steps
    arrive.

    Attributes:
        twin_q: Whether there are two critics, of which the lower value is used (Fujimoto et al. 2018,
            arXiv:1802.09477).
        actor_lr: Learning rate of the actor, or a schedule over env steps; `None` is `lr`.
        critic_lr: Learning rate of the critics, or a schedule over env steps; `None` is `lr`.
    """

    DEFAULT_CAPACITY: ClassVar[int] = 1_000_000
    LR_GROUPS: ClassVar[tuple[str, ...]] = ("actor", "critic")

    train_batch_size_per_learner: int = 256
    rollout_fragment_length: int | Literal["auto"] = 1
    target_network_update_freq: int = 0
    tau: float | Literal["auto"] = 5e-3
    twin_q: bool = True
    actor_lr: NonNegativeSchedule | None = None
    critic_lr: NonNegativeSchedule | None = None

    def check_settings(self) -> None:
        """Refuse actions in the units of the env; see `refuse_env_units`."""
        refuse_env_units(self)


@dataclass(kw_only=True, repr=False)
class CriticAtomSettings(ActorCriticSettings):
    """Settings of critics that may learn the distribution of the return over atoms, and whose actor squashes actions.

    Attributes:
        num_atoms: Number of returns over which each critic learns a distribution (Bellemare et al. 2017,
            arXiv:1707.06887), for Box actions; 1 learns the mean return. `None` is 101 with the architecture
            `"simba_v2"`, and 1 without it or with a `module_class` that is not for atoms.
        v_min: Smallest of these returns.
        v_max: Largest of these returns.
    """

    LEARNS_ATOMS: ClassVar[bool] = True
    """Whether the algorithm has a loss for critics over atoms."""

    num_atoms: Annotated[PositiveInt | None, Need("SAC, TD3 or DDPG", attrgetter("LEARNS_ATOMS"))] = None
    v_min: Annotated[float, HAS_ATOMS] = -5.0
    v_max: Annotated[float, HAS_ATOMS] = 5.0

    @property
    def num_critic_atoms(self) -> int:
        """Atoms of each critic; 1 learns the mean return."""
        if not self.LEARNS_ATOMS:
            return 1
        if self.num_atoms is not None:
            return self.num_atoms
        config: Any = self  # a whole config
        lacks_atoms = config.asks_for_memory or self._module_lacks_atoms
        return AUTO_ATOMS if config.model_config.get("architecture") == "simba_v2" and not lacks_atoms else 1

    @property
    def _module_lacks_atoms(self) -> bool:
        """Whether the user gave a class of modules whose critics give no logits."""
        cls = getattr(self, "module_class", None)
        return cls is not None and not hasattr(cls, "logits")

    @property
    def atom_settings(self) -> dict[str, Any]:
        """What a module with critics over atoms needs; empty without atoms."""
        if self.num_critic_atoms == 1:
            return {}
        return {"num_atoms": self.num_critic_atoms, "v_min": self.v_min, "v_max": self.v_max}

    def check_settings(self) -> None:
        """Refuse atoms without an interval, with memory, or with other critics.

        Raises:
            ConfigError: Names the setting.
        """
        config: Any = self
        if self.num_critic_atoms == 1:
            return
        if self.v_min >= self.v_max:
            raise ConfigError(f"v_min={self.v_min} must be below v_max={self.v_max}: the atoms are between them.")
        if self._module_lacks_atoms:
            raise ConfigError(
                f"num_atoms={self.num_critic_atoms}: the critics of module_class={config.module_class.__name__} "
                "give no logits: subclass CategoricalSACModule or CategoricalTD3Module of "
                "corral.modules.categorical_critics, or leave num_atoms out."
            )
        if config.asks_for_memory:
            raise ConfigError(
                f"num_atoms={self.num_critic_atoms}: modules with memory learn the mean return: leave it out."
            )


def refuse_env_units(config: Any) -> None:
    """Refuse actions in the units of the env, which a policy whose Box actions are in [-1, 1] cannot have.

    Raises:
        ConfigError: Names the setting.
    """
    if not config.normalize_actions:
        raise ConfigError(
            f"normalize_actions=False: {config.algo_name} squashes Box actions by tanh and maps them to the bounds: "
            "leave it out."
        )
