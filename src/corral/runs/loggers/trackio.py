"""A logger that writes to Trackio, whose dashboard runs on this machine or in a Space of Hugging Face."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from corral.core.metrics.result import flat_result
from corral.core.pictures import Array, encode_gif
from corral.runs.loggers.histograms import histogram_of
from corral.runs.loggers.kept import keep, kept, name_of_run
from corral.runs.loggers.writers import KindLogger, check_service_settings

KEPT = "trackio.json"
SET_HERE = ("config", "resume")


class TrackioLogger(KindLogger):
    """Writes to Trackio, whose database is on this machine unless `space_id` or `server_url` is given.

    The step is `num_env_steps_sampled_lifetime`; the name of a curve is the path in the result. The name of the run is
    in `trackio.json` in the run directory, so that a run that continues is the same run there. To change what is
    written, override one of the `write_` methods. One process writes one run at a time.

    Attributes:
        run: The run of trackio, while the logger is open, for values that no method writes.
    """

    is_service: ClassVar[bool] = True

    def __init__(
        self,
        project: str = "corral",
        name: str | None = None,
        video_fps: float = 20.0,
        max_images: int = 16,
        **settings: Any,
    ) -> None:
        """Import trackio.

        Args:
            project: Project of the run.
            name: Name of the run; `None` is the name of the run directory. If the project on this machine has a run of
                that name, a number is added.
            video_fps: Frames per second of videos.
            max_images: Number of images or videos of a series that are written, the latest ones.
            **settings: Further arguments of `trackio.init`, such as `space_id`, `server_url` or `group`.

        Raises:
            ConfigError: The package trackio is missing, or a setting is out of range or set by this logger.
        """
        check_service_settings("TrackioLogger", settings, SET_HERE)
        super().__init__("trackio", ("trackio",), video_fps, max_images)
        self._project, self._name, self._settings = project, name, settings
        self.run: Any = None

    def open(self, run_dir: Path, config: dict[str, Any]) -> None:
        name = _free_name(self._project, self._name or name_of_run(run_dir))
        self._begin(run_dir, config, {"project": self._project, "name": name}, resume="never")

    def resume(self, run_dir: Path, config: dict[str, Any], training_iteration: int, num_env_steps: int) -> None:
        """Continue the run with the name in the run directory; start one if there is none."""
        if "name" not in (found := kept(run_dir / KEPT)):
            return self.open(run_dir, config)
        self._begin(run_dir, config, found, resume="allow")

    def _begin(self, run_dir: Path, config: dict[str, Any], identity: dict[str, str], resume: str) -> None:
        import trackio

        self._texts: dict[str, str] = {}
        settings = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False, **self._settings}
        self.run = trackio.init(config=config, resume=resume, **{**settings, **identity})
        keep(run_dir / KEPT, identity)

    def log_result(self, result: dict[str, Any]) -> None:
        """Write a result; trackio stores it in the background, within half a second."""
        step = int(result["num_env_steps_sampled_lifetime"])
        self._pending: dict[str, Any] = {}
        with tempfile.TemporaryDirectory() as directory:
            self._directory = Path(directory)  # of videos, which trackio copies
            for path, value in flat_result(result).items():
                self.write(path, value, step)
            self.run.log(self._pending, step=step)

    def write_number(self, path: str, value: float, step: int) -> None:
        """Write a point of a curve: a bool as 0 or 1, and nothing for NaN and infinities."""
        if math.isfinite(value):
            self._pending[path] = int(value) if isinstance(value, bool) else value

    def write_text(self, path: str, value: str, step: int) -> None:
        """Write a text if it differs from the last text with this path."""
        import trackio

        if self._texts.get(path) != value:
            self._texts[path] = value
            self._pending[path] = trackio.Markdown(value)

    def write_image(self, path: str, image: Array, step: int) -> None:
        """Write an image, uint8 `[H, W, 3]` or `[H, W, 4]`, without loss."""
        import trackio

        self._pending[path] = trackio.Image(image)

    def write_video(self, path: str, frames: Array, step: int) -> None:
        """Write a video, uint8 `[T, H, W, 3]`, as an animated GIF: at most 256 colours per frame."""
        import trackio

        # From a file, since trackio encodes arrays with ffmpeg, which may not be installed.
        file = self._directory / f"{len(self._pending)}.gif"
        file.write_bytes(encode_gif(frames, self._video_fps))
        self._pending[path] = trackio.Video(str(file))

    def write_histogram(self, path: str, values: Array, step: int) -> None:
        """Write the distribution of numbers `[size]`; non-finite ones are left out."""
        import trackio

        if (found := histogram_of(values)) is not None:
            self._pending[path] = trackio.Histogram(np_histogram=np.histogram(*found))

    def close(self) -> None:
        """End the run, after its results are stored, which takes at most half a minute."""
        if self.run is not None:
            import trackio

            run, self.run = self.run, None
            if trackio.context_vars.current_run.get() is run:
                trackio.finish()  # so that nothing is left to end when Python ends
            else:
                run.finish()


def _free_name(project: str, name: str) -> str:
    """Return a name that no run of a project on this machine has: the name, or the name with a number."""
    import trackio

    try:
        taken = {run.name for run in trackio.Api().runs(project)}
    except ValueError:  # there is no such project yet
        return name
    number = 1
    while (free := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    return free
