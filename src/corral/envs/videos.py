"""Videos of episodes: frames are encoded one after another, in the process of the env."""

from __future__ import annotations

import io
import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from corral.errors import EnvError

Frame = NDArray[np.uint8]
"""An image, uint8 `[H, W, 3]`."""

DEFAULT_FPS = 30
_NO_DISPLAY = re.compile("OpenGL|opengl|glGetError|EGL|GLFW")
PREVIEW_SIZE, PREVIEW_FRAMES = 160, 200
"""Largest width and height in pixels, and largest number of frames, of the small copy of a video."""


@dataclass(frozen=True)
class Video:
    """Video of an episode.

    Attributes:
        mp4: The file (H.264), with every frame.
        preview: Small copy for loggers, uint8 `[T, H, W, 3]`.
    """

    mp4: bytes
    preview: NDArray[np.uint8]


def check_frame(frame: Any) -> Frame:
    """Return what an env rendered.

    Raises:
        EnvError: It is no image.
    """
    if isinstance(frame, np.ndarray) and frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3:
        return frame
    got = f"{frame.dtype}{list(frame.shape)}" if isinstance(frame, np.ndarray) else type(frame).__name__
    raise EnvError(f"render() must return an image, uint8 [H, W, 3], and returned {got}.")


def render(env: gym.Env[Any, Any]) -> Any:
    """Return what an env renders.

    Raises:
        EnvError: MuJoCo finds no display to draw on; the message says what to set.
    """
    try:
        return env.render()
    except Exception as error:
        if not _NO_DISPLAY.search(f"{type(error).__name__} {error}"):
            raise
        raise EnvError(
            f"there is nothing to draw on ({type(error).__name__}: {error!s:.80}). Without a display, set the "
            "environment variable MUJOCO_GL=egl, or MUJOCO_GL=osmesa where there is no GPU, before the program starts"
        ) from error


def frames_per_second(env: gym.Env[Any, Any]) -> float:
    """Return the speed at which episodes of an env are shown."""
    fps = env.metadata.get("render_fps")
    return float(fps) if isinstance(fps, (int, float)) and math.isfinite(fps) and fps > 0 else DEFAULT_FPS


class Mp4Encoder:
    """Encodes frames as mp4 (H.264) as they come.

    Args:
        file: Path of the file, or an open file.
        fps: Frames per second.
    """

    def __init__(self, file: Any, fps: float) -> None:
        """Begin the file."""
        import av

        self._av, self._fps = av, fps
        self._container = av.open(file, "w", format="mp4")
        self._stream: Any = None

    def add(self, frame: Frame) -> None:
        """Encode a frame."""
        # The format stores colours for squares of 2 x 2 pixels.
        even = np.pad(frame, ((0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0)), mode="edge")
        if self._stream is None:
            self._stream = self._container.add_stream("libx264", rate=Fraction(self._fps).limit_denominator(1000))
            self._stream.height, self._stream.width, self._stream.pix_fmt = *even.shape[:2], "yuv420p"
        self._container.mux(self._stream.encode(self._av.VideoFrame.from_ndarray(even, format="rgb24")))

    def close(self) -> None:
        """End the file."""
        try:
            if self._stream is not None:
                self._container.mux(self._stream.encode())
        finally:
            self._container.close()


class VideoWriter:
    """Video of an episode that is being played: the file so far in memory, and the small copy of some frames."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        """Begin a video of an env that was just reset, with its first frame."""
        self._env, self._file = env, io.BytesIO()
        self._encoder = Mp4Encoder(self._file, frames_per_second(env))
        self._small: list[Frame] = []
        self._num_frames, self._every = 0, 1
        self.add()

    def add(self) -> None:
        """Render a frame and add it."""
        frame = check_frame(render(self._env))
        self._encoder.add(frame)
        if self._num_frames % self._every == 0:
            self._small.append(_shrunk(frame))
        if len(self._small) > PREVIEW_FRAMES:
            self._small, self._every = self._small[::2], 2 * self._every
        self._num_frames += 1

    def finish(self) -> Video:
        """End the video and return it."""
        self._encoder.close()
        return Video(self._file.getvalue(), np.stack(self._small))


def _shrunk(frame: Frame) -> Frame:
    """Return the means of equal squares of an image, so that it is small enough for a preview."""
    side = math.ceil(max(frame.shape[:2]) / PREVIEW_SIZE)
    if side == 1:
        return frame.copy()
    rows, columns = (max(1, size // side) for size in frame.shape[:2])
    cut = frame[: rows * side, : columns * side]
    small: Frame = cut.reshape(rows, -1, columns, cut.shape[1] // columns, 3).mean(axis=(1, 3)).astype(np.uint8)
    return small
