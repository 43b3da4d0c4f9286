"""A logger that writes TensorBoard event files."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.core.metrics.result import flat_result
from corral.core.pictures import Array, encode_gif, encode_png
from corral.core.settings import flat_settings
from corral.runs.loggers.histograms import histogram_of
from corral.runs.loggers.writers import KindLogger

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


COMPARED_GROUPS = ("environment", "env_runners", "training", "exploration", "rl_module", "learners", "debugging")
"""Groups of settings by which the tab HParams compares runs, with `algo`."""
COMPARED_NUMBERS = ("env_runners/episode_return_mean", "evaluation/env_runners/episode_return_mean")
"""Numbers of the result that the tab HParams shows for each run."""


class TensorBoardLogger(KindLogger):
    """Writes event files into the run directory, so that `tensorboard --logdir runs` compares runs.

    The step is `num_env_steps_sampled_lifetime`, the tag is the path in the result, such as
    `env_runners/episode_return_mean`. The tab HParams has settings and returns. `corral.runs.loggers.classify` gives
    the kind of each value. To change what is written, override one of the `write_` methods. All values of a result are
    written to the file together.

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
        super().__init__("tensorboard", ("torch.utils.tensorboard",), video_fps, max_images)
        self._texts: dict[str, str] = {}

    def open(self, run_dir: Path, config: dict[str, Any]) -> None:
        """Create an event file."""
        from torch.utils.tensorboard import SummaryWriter

        self._texts = {}
        self.writer = SummaryWriter(str(run_dir))
        self._write_settings(config)

    def resume(self, run_dir: Path, config: dict[str, Any], training_iteration: int, num_env_steps: int) -> None:
        """Create another event file, which tells TensorBoard to hide the points of later steps."""
        from torch.utils.tensorboard import SummaryWriter

        self._texts = {}
        # TensorBoard reads event files in the order of their names. After the second a name has the number of the
        # process and a count as text, where 10 comes before 9. So the file of a continued run has a second of its own.
        while any(run_dir.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
            time.sleep(0.01)
        self.writer = SummaryWriter(str(run_dir), purge_step=num_env_steps + 1)
        self._write_settings(config)

    def _write_settings(self, config: dict[str, Any]) -> None:
        """Write settings for the tab HParams: numbers, bools and texts as they are, and others as text."""
        from torch.utils.tensorboard.summary import hparams

        compared = {name: config[name] for name in ("algo", *COMPARED_GROUPS) if name in config}
        settings = {
            path: value if isinstance(value, (bool, int, float, str)) else str(value)
            for path, value in flat_settings(compared)
            if value is not None
        }
        experiment, session, _ = hparams(settings, dict.fromkeys(COMPARED_NUMBERS, 0.0))  # type: ignore[no-untyped-call]
        file_writer: Any = self.writer.file_writer
        for summary in (experiment, session) if settings else ():
            file_writer.add_summary(summary)

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

        if (found := histogram_of(values)) is not None:
            # Torch's own bins grow with the value, so that 195 and 205 would share one.
            self._pending.MergeFrom(histogram(path, *found))  # type: ignore[no-untyped-call]

    def write_image(self, path: str, image: Array, step: int) -> None:
        """Write an image, uint8 `[H, W, 3]` or `[H, W, 4]`, without loss."""
        self._add_image(path, image.shape, encode_png(image))

    def write_video(self, path: str, frames: Array, step: int) -> None:
        """Write a video, uint8 `[T, H, W, 3]`, as an animated GIF: at most 256 colours per frame."""
        self._add_image(path, frames.shape[1:], encode_gif(frames, self._video_fps))

    def _add_image(self, path: str, shape: tuple[int, ...], encoded: bytes) -> None:
        height, width, num_channels = shape
        image = {"height": height, "width": width, "colorspace": num_channels, "encoded_image_string": encoded}
        self._pending.value.add(tag=path, image=image)

    def close(self) -> None:
        if hasattr(self, "writer"):
            self.writer.close()
