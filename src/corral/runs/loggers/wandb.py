"""A logger that writes to Weights & Biases."""

from __future__ import annotations

import io
import logging
import math
import os
import uuid
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from corral.core.metrics.result import flat_result
from corral.core.pictures import Array, encode_gif
from corral.errors import ConfigError
from corral.runs.loggers.histograms import histogram_of
from corral.runs.loggers.kept import keep, kept, name_of_run
from corral.runs.loggers.writers import KindLogger, check_service_settings

log = logging.getLogger("corral")
KEPT = "wandb.json"
SET_HERE = ("id", "dir", "config", "resume", "reinit", "allow_val_change")
INIT_TIMEOUT_S, FINISH_TIMEOUT_S = 30.0, 60.0


class WandbLogger(KindLogger):
    """Writes to Weights & Biases, online or offline; files are stored in `wandb/` in the run directory.

    The curves are drawn over `num_env_steps_sampled_lifetime`; the name of a curve is the path in the result. A run
    that cannot reach the service is written offline, for `wandb sync`. The id of the run is in `wandb.json` in the run
    directory, so that a run that continues is the same run there. To change what is written, override one of the
    `write_` methods.

    Attributes:
        run: The run of wandb, while the logger is open, for values that no method writes.
    """

    is_service: ClassVar[bool] = True

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        video_fps: float = 20.0,
        max_images: int = 16,
        **settings: Any,
    ) -> None:
        """Import wandb.

        Args:
            project: Project of the run; `None` is the environment variable WANDB_PROJECT, or `corral` without it.
            name: Name of the run; `None` is the name of the run directory.
            video_fps: Frames per second of videos.
            max_images: Number of images or videos of a series that are written, the latest ones.
            **settings: Further arguments of `wandb.init`, such as `entity`, `tags`, `group` or `mode="offline"`.

        Raises:
            ConfigError: The package wandb or pillow is missing, or a setting is out of range or set by this logger.
        """
        check_service_settings("WandbLogger", settings, SET_HERE)
        super().__init__("wandb", ("wandb",), video_fps, max_images)
        self._project, self._name, self._settings = project, name, settings
        self.run: Any = None

    def open(self, run_dir: Path, config: dict[str, Any]) -> None:
        """Start a run.

        Raises:
            ConfigError: Nobody is logged in, and the mode is not offline.
        """
        project = self._project or os.environ.get("WANDB_PROJECT") or "corral"
        self._begin(run_dir, config, {"id": uuid.uuid4().hex[:8], "project": project})

    def resume(self, run_dir: Path, config: dict[str, Any], training_iteration: int, num_env_steps: int) -> None:
        """Continue the run with the id in the run directory; start one if there is none."""
        if "id" not in (found := kept(run_dir / KEPT)):
            return self.open(run_dir, config)
        self._begin(run_dir, config, found)

    def _begin(self, run_dir: Path, config: dict[str, Any], identity: dict[str, str]) -> None:
        import wandb

        self._texts: dict[str, str] = {}
        settings = {
            "name": self._name or name_of_run(run_dir),
            "config": config,
            "dir": str(run_dir.absolute()),
            "resume": "allow",
            "reinit": "create_new",  # another run of this process stays as it is
            "allow_val_change": True,
            "settings": wandb.Settings(
                console="off", init_timeout=INIT_TIMEOUT_S, finish_timeout=FINISH_TIMEOUT_S
            ),  # the progress that is shown is no output to keep
            **self._settings,
            **identity,
        }
        try:
            self.run = wandb.init(**settings)
        except wandb.errors.UsageError as error:
            raise ConfigError(
                f"WandbLogger: {error} Run `wandb login`, or set the environment variable WANDB_MODE=offline."
            ) from error
        except wandb.errors.CommError as error:
            log.warning("Weights & Biases cannot be reached, and the run is written offline: %s", error)
            self.run = wandb.init(**{**settings, "mode": "offline"})
        self.run.define_metric("*", step_metric="num_env_steps_sampled_lifetime")
        keep(run_dir / KEPT, identity)

    def log_result(self, result: dict[str, Any]) -> None:
        """Write a result; wandb sends it in the background."""
        step = int(result["num_env_steps_sampled_lifetime"])
        self._pending: dict[str, Any] = {}
        for path, value in flat_result(result).items():
            self.write(path, value, step)
        self.run.log(self._pending)

    def write_number(self, path: str, value: float, step: int) -> None:
        """Write a point of a curve: a bool as 0 or 1, and nothing for NaN and infinities."""
        if math.isfinite(value):
            self._pending[path] = int(value) if isinstance(value, bool) else value

    def write_text(self, path: str, value: str, step: int) -> None:
        """Write a text if it differs from the last text with this path."""
        if self._texts.get(path) != value:
            self._texts[path] = self._pending[path] = value

    def write_image(self, path: str, image: Array, step: int) -> None:
        """Write an image, uint8 `[H, W, 3]` or `[H, W, 4]`, without loss."""
        import wandb

        self._pending[path] = wandb.Image(image)

    def write_video(self, path: str, frames: Array, step: int) -> None:
        """Write a video, uint8 `[T, H, W, 3]`, as an animated GIF: at most 256 colours per frame."""
        import wandb

        self._pending[path] = wandb.Video(io.BytesIO(encode_gif(frames, self._video_fps)), format="gif")

    def write_histogram(self, path: str, values: Array, step: int) -> None:
        """Write the distribution of numbers `[size]`; non-finite ones are left out."""
        import wandb

        if (found := histogram_of(values)) is not None:
            self._pending[path] = wandb.Histogram(np_histogram=np.histogram(*found))

    def close(self) -> None:
        """End the run; results that could not be sent within a minute stay in the files, for `wandb sync`."""
        if self.run is not None:
            self.run.finish()
            self.run = None
