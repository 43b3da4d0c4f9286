"""The way of the values of a result to the method of a logger for their kind, for all loggers that show media."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from corral.core.result_values import classify
from corral.errors import ConfigError

Array = np.ndarray[Any, Any]


class Writer(Protocol):
    """A logger with a method for each kind of value; `step` is the number of env steps so far."""

    def write(self, path: str, value: Any, step: int) -> None:
        """Write any value of a result; by default `write_by_kind`."""

    def write_number(self, path: str, value: float, step: int) -> None:
        """Write a bool, an int or a float, which may be NaN."""

    def write_text(self, path: str, value: str, step: int) -> None:
        """Write a text, whether it changed or not."""

    def write_image(self, path: str, image: Array, step: int) -> None:
        """Write an image, uint8 `[H, W, 3]` or `[H, W, 4]`."""

    def write_video(self, path: str, frames: Array, step: int) -> None:
        """Write a video, uint8 `[T, H, W, 3]`."""

    def write_histogram(self, path: str, values: Array, step: int) -> None:
        """Write the distribution of numbers `[size]`, which may hold NaN."""


def write_by_kind(writer: Writer, path: str, value: Any, step: int, *, max_images: int) -> None:
    """Pass a value to the method for its kind; a value without a method is not written.

    Args:
        writer: The logger.
        path: Path of the value in the result, such as `env_runners/episode_return_mean`.
        value: Any value of a result. A series of numbers becomes one histogram, and a series of images one image each.
        step: Env steps so far.
        max_images: Number of images or videos of a series that are written, the latest ones.
    """
    kind, series, data = classify(value)
    match kind:
        case "number" if series:
            writer.write_histogram(path, np.asarray(data, np.float64), step)
        case "number":
            writer.write_number(path, data, step)
        case "text":
            writer.write_text(path, "\n\n".join(data) if series else data, step)
        case "array":
            arrays = data if series else [data]
            writer.write_histogram(path, np.concatenate([array.reshape(-1) for array in arrays]), step)
        case "image" | "video":
            write = writer.write_image if kind == "image" else writer.write_video
            if not series:
                return write(path, data, step)
            for index, part in enumerate(data[-max_images:]):
                write(f"{path}/{index}", part, step)


def check_service_settings(logger: str, settings: Mapping[str, Any], reserved: Sequence[str]) -> None:
    """Refuse settings of a service that a logger sets itself.

    Raises:
        ConfigError: The message names the class of the logger and the settings.
    """
    if taken := [name for name in reserved if name in settings]:
        raise ConfigError(
            f"{logger}: {', '.join(taken)} cannot be set, since the logger gives the service the config of the run and "
            "continues the run that the run directory names."
        )


def check_media_settings(logger: str, video_fps: float, max_images: int) -> None:
    """Refuse settings of images and videos that are out of range.

    Raises:
        ConfigError: The message names the class of the logger, the setting and its bound.
    """
    if not 0 < video_fps <= 100:
        raise ConfigError(f"{logger}: video_fps={video_fps} must be above 0 and at most 100.")
    if max_images < 1:
        raise ConfigError(f"{logger}: max_images={max_images} must be at least 1.")
