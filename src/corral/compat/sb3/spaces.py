"""Spaces as the files of Stable-Baselines3 have them: a pickle, which is not read, and the text of the attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from corral.core.space_descriptions import described_space


def space_of_text(text: Mapping[str, Any]) -> spaces.Space[Any]:
    """Return a space.

    Args:
        text: Its class under `:type:`, and the text of its attributes.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, OverflowError: The text does not say what it is.
    """
    return described_space(_description(text))


def kind_of_text(text: Any) -> str:
    """Return the name of the class of a space, such as `"Box"`; `""` if the text does not say it."""
    name = text.get(":type:") if isinstance(text, Mapping) else None
    return str(name or "").rpartition(".")[2].removesuffix("'>")


def _description(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `described_space` takes for the text of a space."""
    kind = kind_of_text(text)
    found: dict[str, Any] = {"type": kind, "dtype": text.get("dtype")}
    if kind == "Box":
        shape = text["_shape"]
        return found | {"shape": shape} | {name: _bounds(text, name, shape) for name in ("low", "high")}
    if kind == "Discrete":
        return found | {"n": int(text["n"]), "start": int(text.get("start", 0))}
    if kind == "MultiBinary":
        return found | {"n": int(text["n"]) if isinstance(text["n"], str) else text["n"]}
    if kind == "MultiDiscrete":
        nvec = _numbers(text["nvec"], text["_shape"], int)
        start = _numbers(text["start"], text["_shape"], int) if "start" in text else np.zeros_like(nvec)
        return found | {"nvec": nvec.tolist(), "start": start.tolist()}
    return found


def _bounds(text: Mapping[str, Any], name: str, shape: Sequence[int]) -> Any:
    """Return the bounds of a Box as nested lists, or as one number that all entries have.

    NumPy prints eight decimals at most, and long arrays with dots in their middle. Gymnasium from 1.3 on prints the one
    number only if the space was printed before it was saved; without it there is the array.
    """
    one = text.get(f"{name}_repr")
    if isinstance(one, str) and "[" not in one:  # printed as one number, which is exact
        return float(one)
    return _numbers(text[name], shape, _bound).tolist()


def _numbers(text: str, shape: Sequence[int], number: Callable[[str], Any]) -> NDArray[Any]:
    """Return the array that NumPy printed."""
    words = text.replace("[", " ").replace("]", " ").split()
    return np.array([number(word) for word in words]).reshape(shape)


def _bound(word: str) -> float:
    """Return a bound that was printed with at least six digits, or whole."""
    digits, _, exponent = word.partition("e")
    if len(digits.partition(".")[2]) == 8 and 10.0 ** int(exponent or 0) > 100 * abs(float(word)):
        raise ValueError(f"the bound {word} is rounded")
    return float(word)
