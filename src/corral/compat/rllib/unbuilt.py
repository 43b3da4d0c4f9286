"""Algorithms of RLlib that Corral lacks: scripts can import them, for `isinstance` and the like, and not use them."""

from __future__ import annotations

from typing import Any, ClassVar

from corral.errors import NotServedError, UnknownAttributeError


class _Meta(type):
    """Class of the classes here, whose missing attributes say why they are missing."""

    REASON: ClassVar[str]

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnknownAttributeError(f"{cls.__name__}.{name}: Corral does not build this algorithm: {cls.REASON}.")


class Unbuilt(metaclass=_Meta):
    """Base class of the classes here.

    Raises:
        NotServedError: When an instance is made.
    """

    REASON: ClassVar[str] = ""

    def __new__(cls, *args: Any, **settings: Any) -> Any:
        """Raise."""
        raise NotServedError(f"{cls.__name__}: Corral does not build this algorithm: {cls.REASON}.")


def _make(name: str, reason: str) -> Any:
    about = f"Not built: {reason}."
    return _Meta(name, (Unbuilt,), {"REASON": reason, "__module__": __name__, "__doc__": about})


DreamerV3 = _make("DreamerV3", "it learns a model of the env; use PPOConfig or SACConfig")
DreamerV3Config = _make("DreamerV3Config", DreamerV3.REASON)
