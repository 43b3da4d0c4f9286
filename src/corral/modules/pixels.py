"""What the numbers of images are scaled to before a network sees them."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from corral.errors import ConfigError

Number = float | NDArray[np.float64]


class Scaling(NamedTuple):
    """What becomes of the numbers x of a Box: `(x - offset) * scale`, both one number, or one per entry of the Box.

    Attributes:
        offset: What is subtracted first.
        scale: What the difference is multiplied by.
        low: Smallest number of the Box.
        high: Largest number of the Box.
    """

    offset: Number
    scale: Number
    low: float
    high: float

    def __str__(self) -> str:
        """Return what becomes of the numbers, in words."""
        if self.changes_nothing:
            return f"numbers from {self.low:g} to {self.high:g} as they are"
        # The products first, which are exact at the bounds.
        low, high = (np.unique((number - np.asarray(self.offset)) * self.scale) for number in (self.low, self.high))
        return f"numbers from {self.low:g} to {self.high:g} scaled to {low[0]:.3g} to {high[-1]:.3g}"

    @property
    def changes_nothing(self) -> bool:
        """Whether the numbers stay as they are."""
        return bool(np.all(np.equal(self.offset, 0)) and np.all(np.equal(self.scale, 1)))

    @property
    def is_wide(self) -> bool:
        """Whether a network sees numbers that may be far outside [-1, 1], because nobody said how to scale them."""
        return self.changes_nothing and (self.low < -1 or self.high > 1)


def find_scaling(space: spaces.Box, image_scale: float | Literal["auto"] = "auto") -> Scaling:
    """Return how images are scaled: by their bounds, or by a number.

    Numbers within [-1, 1] stay as they are, and so do floats that may be negative, which the env or
    `NormalizeObservations` has scaled. Others are mapped to [0, 1], and integers that may be negative to within
    [-1, 1], so that 0 stays 0.

    Args:
        space: Box of the images, of any shape.
        image_scale: Number by which the numbers are multiplied; `"auto"` goes by the bounds.

    Raises:
        ConfigError: The bounds do not say how to scale the images.
    """
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    ends = float(low.min()), float(high.max())
    if image_scale != "auto":
        return Scaling(0.0, float(image_scale), *ends)
    no_low, no_high = np.isinf(low), np.isinf(high)
    dtype: np.dtype[Any] = np.dtype(space.dtype)
    is_float = dtype.kind == "f"
    if dtype.kind in "iu" and dtype.itemsize > 2:
        limits = np.iinfo(dtype.type)
        no_low, no_high = (space.low == limits.min) & (low < 0), space.high == limits.max
    is_signed = low < 0
    stays = (low >= -1) & (high <= 1) | is_signed & is_float
    if np.any((no_low | no_high) & ~stays):
        raise ConfigError(
            f"observation space {space}: images without bounds cannot be scaled: give the Box the smallest and the "
            "largest number that occur, or set model_config={'image_scale': 1.0}, which takes the numbers as they are, "
            "or another number to multiply them by."
        )
    with np.errstate(invalid="ignore"):  # infinities, which stay
        span = np.where(stays, 1.0, np.where(is_signed, np.maximum(-low, high), high - low))
    span[span == 0] = 1.0
    offset = np.where(stays | is_signed, 0.0, low)
    return Scaling(_one_number(offset), _one_number(1 / span), *ends)


def _one_number(numbers: NDArray[Any]) -> Number:
    """Return the only number of an array, or the array if they differ."""
    first = numbers.flat[0]
    return float(first) if np.all(numbers == first) else numbers
