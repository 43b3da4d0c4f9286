"""A logger that writes TensorBoard event files."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from corral.errors import ConfigError, MissingPackageError
from corral.loggers.base import Logger
from corral.loggers.values import classify
from corral.metrics.result import flat_result

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch.utils.tensorboard import SummaryWriter

Array = np.ndarray[Any, Any]
HISTOGRAM_BINS = 64
LARGEST = 1e38
"""Largest absolute value of a histogram, at which values are clipped: TensorBoard reads bins as 32-bit floats."""


class TensorBoardLogger(Logger):
    """Writes event files into the run directory, so that `tensorboard --logdir runs` compares runs.

    The step is `num_env_steps_sampled_lifetime`, the tag is the path in the result, such as
    `env_runners/episode_return_mean`. `corral.loggers.values` gives the kind of each value. To change what is
    written, override one of the `write_` methods. All values of a result are written to the file together.

    Attributes:
        writer: Torch's `SummaryWriter`, while the logger is open, for values that no method writes.
    """

    writer: SummaryWriter

    def __init__(self, video_fps: float = 20.0, max_images: int = 16) -> None:
        """Import TensorBoard.

        Args:
            video_fps: Frames per second of videos; a GIF rounds the duration of a frame to hundredths of a second.
            max_images: Number of images or videos of a series that are written, the latest ones.

        Raises:
            ConfigError: The package tensorboard or pillow is missing or too old, or a setting is out of range.
        """
        if not 0 < video_fps <= 100:
            raise ConfigError(f"TensorBoardLogger: video_fps={video_fps} must be above 0 and at most 100.")
        if max_images < 1:
            raise ConfigError(f"TensorBoardLogger: max_images={max_images} must be at least 1.")
        _check_packages()
        self._frame_duration_ms, self._max_images = 1000 / video_fps, max_images
        self._texts: dict[str, str] = {}

    def open(self, run_dir: Path) -> None:
        """Create an event file."""
        from torch.utils.tensorboard import SummaryWriter

        self._texts = {}
        self.writer = SummaryWriter(str(run_dir))

    def resume(self, run_dir: Path, training_iteration: int, num_env_steps: int) -> None:
        """Create another event file, which tells TensorBoard to hide the points of later steps."""
        from torch.utils.tensorboard import SummaryWriter

        self._texts = {}
        self.writer = SummaryWriter(str(run_dir), purge_step=num_env_steps + 1)

    def log_result(self, result: dict[str, Any]) -> None:
        """Write a result and flush it."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        step = int(result["num_env_steps_sampled_lifetime"])
        # One event for the whole result: one event per value takes ten times as long, and the file could end within a
        # result.
        self._pending = Summary()
        for path, value in flat_result(result).items():
            self.write(path, value, step)
        file_writer: Any = self.writer.file_writer  # torch annotates it as None only
        file_writer.add_summary(self._pending, step)
        self.writer.flush()

    def write(self, path: str, value: Any, step: int) -> None:
        """Pass a value to the method for its kind; a value without a method is not written.

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
        """Write a point of a curve: a bool as 0 or 1, and nothing for NaN and infinities."""
        if math.isfinite(value):
            self._pending.value.add(tag=path, simple_value=float(value))

    def write_text(self, path: str, value: str, step: int) -> None:
        """Write a text if it differs from the last text with this path."""
        from torch.utils.tensorboard.summary import text

        if self._texts.get(path) != value:
            self._texts[path] = value
            self._pending.MergeFrom(text(path, value))  # type: ignore[no-untyped-call]

    def write_histogram(self, path: str, values: Array, step: int) -> None:
        """Write the distribution of numbers `[size]`; non-finite ones are left out."""
        from torch.utils.tensorboard.summary import histogram

        values = np.asarray(values, np.float64)
        values = np.clip(values[np.isfinite(values)], -LARGEST, LARGEST)
        if values.size:
            # Bins of equal width: the width of torch's bins grows with the value, so that 195 and 205 share one. Edges
            # are given, since NumPy refuses to compute them for values that are nearly equal.
            edges = np.linspace(values.min(), values.max(), HISTOGRAM_BINS + 1)
            self._pending.MergeFrom(histogram(path, values, edges))  # type: ignore[no-untyped-call]

    def write_image(self, path: str, image: Array, step: int) -> None:
        """Write an image, uint8 `[H, W, 3]` or `[H, W, 4]`, without loss."""
        from PIL import Image

        self._add_image(path, image.shape, _encode([Image.fromarray(image)], "PNG"))

    def write_video(self, path: str, frames: Array, step: int) -> None:
        """Write a video, uint8 `[T, H, W, 3]`, as an animated GIF: at most 256 colours per frame."""
        from PIL import Image

        images = [Image.fromarray(frame).quantize(256) for frame in frames]
        encoded = _encode(
            images, "GIF", save_all=True, append_images=images[1:], duration=self._frame_duration_ms, loop=0
        )
        self._add_image(path, frames.shape[1:], encoded)

    def _add_image(self, path: str, shape: tuple[int, ...], encoded: bytes) -> None:
        height, width, num_channels = shape
        image = {"height": height, "width": width, "colorspace": num_channels, "encoded_image_string": encoded}
        self._pending.value.add(tag=path, image=image)

    def close(self) -> None:
        """Close the file."""
        if hasattr(self, "writer"):
            self.writer.close()


def _check_packages() -> None:
    """Raise a `MissingPackageError` if a package that writing needs cannot be imported."""
    try:
        import PIL.Image  # noqa: F401
        import torch.utils.tensorboard  # noqa: F401  (torch says when tensorboard is too old)
    except ImportError as error:
        message = f"TensorBoardLogger needs the packages tensorboard and pillow ({error}): "
        raise MissingPackageError(f"{message}pip install 'corral[tensorboard]'") from error


def _encode(images: list[Image], file_format: str, **settings: Any) -> bytes:
    file = io.BytesIO()
    images[0].save(file, format=file_format, **settings)
    return file.getvalue()
