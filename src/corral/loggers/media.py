"""Images, videos and histograms, as loggers encode them."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

Array = np.ndarray[Any, Any]
HISTOGRAM_BINS = 64
LARGEST = 1e38
"""Largest absolute value of a histogram, at which values are clipped: TensorBoard reads bins as 32-bit floats."""


def encode_png(image: Array) -> bytes:
    """Return an image, uint8 `[H, W, 3]` or `[H, W, 4]`, as PNG, without loss."""
    from PIL import Image

    return _encode([Image.fromarray(image)], "PNG")


def encode_gif(frames: Array, fps: float) -> bytes:
    """Return a video, uint8 `[T, H, W, 3]`, as an animated GIF: at most 256 colours per frame.

    Args:
        frames: The video.
        fps: Frames per second; a GIF rounds the duration of a frame to hundredths of a second.
    """
    from PIL import Image

    images = [Image.fromarray(frame).quantize(256) for frame in frames]
    return _encode(images, "GIF", save_all=True, append_images=images[1:], duration=1000 / fps, loop=0)


def _encode(images: list[Image], file_format: str, **settings: Any) -> bytes:
    file = io.BytesIO()
    images[0].save(file, format=file_format, **settings)
    return file.getvalue()


def histogram_of(values: Array) -> tuple[Array, Array] | None:
    """Return the finite ones of numbers `[size]`, clipped, and the edges `[65]` of bins of equal width.

    `None` if no number is finite. Edges are given, since NumPy computes none for values that are nearly equal.
    """
    values = np.asarray(values, np.float64)
    values = np.clip(values[np.isfinite(values)], -LARGEST, LARGEST)
    if not values.size:
        return None
    return values, np.linspace(values.min(), values.max(), HISTOGRAM_BINS + 1)
