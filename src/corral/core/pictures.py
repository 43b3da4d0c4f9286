"""Images and videos as files; needs Pillow."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

Array = np.ndarray[Any, Any]


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
