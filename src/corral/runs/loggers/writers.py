"""The base of loggers with a method for each kind of value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from corral.core.result_values import classify
from corral.errors import ConfigError
from corral.runs.loggers.base import Logger, require

Array = np.ndarray[Any, Any]


class KindLogger(Logger):
    """Passes each value of a result to the method for its kind; `step` is the number of env steps so far.

    A kind is not written unless a subclass has its method.
    """

    def __init__(self, extra: str, modules: Sequence[str], video_fps: float, max_images: int) -> None:
        """Import what the logger needs.

        Args:
            extra: Extra of Corral that installs the modules.
            modules: Names of the modules, besides Pillow.
            video_fps: Frames per second of videos.
            max_images: Number of images or videos of a series that are written, the latest ones.

        Raises:
            ConfigError: A module is missing, or a setting is out of range; the message names the class of the logger.
        """
        name = type(self).__name__
        if not 0 < video_fps <= 100:
            raise ConfigError(f"{name}: video_fps={video_fps} must be above 0 and at most 100.")
        if max_images < 1:
            raise ConfigError(f"{name}: max_images={max_images} must be at least 1.")
        require(name, extra, "PIL.Image", *modules)
        self._video_fps, self._max_images = video_fps, max_images

    def write(self, path: str, value: Any, step: int) -> None:
        """Pass a value to the method for its kind.

        Args:
            path: Path of the value in the result, such as `env_runners/episode_return_mean`.
            value: Any value of a result. A series of numbers becomes one histogram, and a series of images one image
                each.
            step: Env steps so far.
        """
        kind, series, data = classify(value)
        match kind:
            case "number" if series:
                self.write_histogram(path, np.asarray(data, np.float64), step)
            case "number":
                self.write_number(path, data, step)
            case "text":
                self.write_text(path, "\n\n".join(data) if series else data, step)
            case "array":
                arrays = data if series else [data]
                self.write_histogram(path, np.concatenate([array.reshape(-1) for array in arrays]), step)
            case "image" | "video":
                write = self.write_image if kind == "image" else self.write_video
                if not series:
                    return write(path, data, step)
                for index, part in enumerate(data[-self._max_images :]):
                    write(f"{path}/{index}", part, step)

    def write_number(self, path: str, value: float, step: int) -> None:
        """Write a bool, an int or a float, which may be NaN."""
        return

    def write_text(self, path: str, value: str, step: int) -> None:
        """Write a text, whether it changed or not."""
        return

    def write_image(self, path: str, image: Array, step: int) -> None:
        """Write an image, uint8 `[H, W, 3]` or `[H, W, 4]`."""
        return

    def write_video(self, path: str, frames: Array, step: int) -> None:
        """Write a video, uint8 `[T, H, W, 3]`."""
        return

    def write_histogram(self, path: str, values: Array, step: int) -> None:
        """Write the distribution of numbers `[size]`, which may hold NaN."""
        return


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
