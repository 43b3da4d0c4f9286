"""RLlib's catalogs as names: Corral's default modules are built from their settings alone."""

from __future__ import annotations

from typing import Any

from corral.errors import ConfigError


class Catalog:
    """Stands for what makes the layers of a default module; a catalog of your own is refused.

    Raises:
        ConfigError: When one is made.
    """

    IS_DEFAULT = True

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Refuse."""
        raise ConfigError(
            f"{type(self).__name__}: catalogs are not served: set .rl_module(model_config=DefaultModelConfig(...)), or "
            "write a TorchRLModule."
        )


class PPOCatalog(Catalog):
    """The catalog of PPO."""

    IS_DEFAULT = True


class BCCatalog(Catalog):
    """The catalog of BC."""

    IS_DEFAULT = True


class DQNCatalog(Catalog):
    """The catalog of DQN."""

    IS_DEFAULT = True


class SACCatalog(Catalog):
    """The catalog of SAC."""

    IS_DEFAULT = True


class TQCCatalog(SACCatalog):
    """The catalog of TQC."""
