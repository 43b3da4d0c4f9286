"""A logger that writes the images and videos of results as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

from corral.core.metrics.result import flat_result
from corral.core.pictures import Array, encode_gif, encode_png
from corral.runs.loggers.writers import KindLogger

FOLDER = "images"
WRITTEN_ALREADY = "evaluation/videos"
"""Videos of evaluation are files in the run directory, with a whole range of colours and without this logger."""


class ImageLogger(KindLogger):
    """Writes each image of a result as `images/PATH/STEP.png`, and each video as a GIF, such as for `corral report`.

    PATH is the path in the result, such as `env_runners/visited_cells`; STEP is `num_env_steps_sampled_lifetime`.
    """

    def __init__(self, video_fps: float = 20.0, max_images: int = 16) -> None:
        """Import Pillow.

        Args:
            video_fps: Frames per second of videos; a GIF rounds the duration of a frame to hundredths of a second.
            max_images: Number of images or videos of a series that are written, the latest ones.

        Raises:
            ConfigError: The package pillow is missing, or a setting is out of range.
        """
        super().__init__("report", (), video_fps, max_images)

    def open(self, run_dir: Path, config: dict[str, Any]) -> None:
        """Store the directory; folders are made when there is an image."""
        self._folder = run_dir / FOLDER

    def resume(self, run_dir: Path, config: dict[str, Any], training_iteration: int, num_env_steps: int) -> None:
        """Remove the images of later steps, which the run will write again."""
        self.open(run_dir, config)
        for path in self._folder.rglob("*"):
            if path.suffix in (".png", ".gif") and path.stem.isdigit() and int(path.stem) > num_env_steps:
                path.unlink(missing_ok=True)

    def log_result(self, result: dict[str, Any]) -> None:
        """Write the images and videos of a result; each file is there when this returns."""
        step = int(result["num_env_steps_sampled_lifetime"])
        for path, value in flat_result(result).items():
            if path != WRITTEN_ALREADY:
                self.write(path, value, step)

    def write_image(self, path: str, image: Array, step: int) -> None:
        """Write an image, uint8 `[H, W, 3]` or `[H, W, 4]`, as PNG, without loss."""
        self._write_file(path, f"{step:012d}.png", encode_png(image))

    def write_video(self, path: str, frames: Array, step: int) -> None:
        """Write a video, uint8 `[T, H, W, 3]`, as an animated GIF: at most 256 colours per frame."""
        self._write_file(path, f"{step:012d}.gif", encode_gif(frames, self._video_fps))

    def _write_file(self, path: str, name: str, content: bytes) -> None:
        folder = self._folder.joinpath(*map(_folder_name, path.split("/")))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def _folder_name(part: str) -> str:
    """Return a name that a folder can have on every system; `..` is not the folder above."""
    return quote(part, safe=" ") if part.strip(".") else part.replace(".", "%2E")
