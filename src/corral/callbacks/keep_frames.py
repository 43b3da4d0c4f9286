"""A callback that keeps frames of episodes."""

from __future__ import annotations

from typing import Any

from corral.errors import EnvError

FRAMES = "frames"
"""Name of the temporary data that hold the frames."""


def keep_frames(*, episode: Any, sub_environment: Any) -> None:
    """Render each step of an episode, and keep the frames until it ends: `.callbacks(on_episode_step=keep_frames)`.

    A notebook shows some of the frames of such an episode. All of them, uint8 `[H, W, 3]`, are
    `episode.get_temporary_timestep_data("frames")`. Rendering takes far longer than sampling: use it to look, in an
    algorithm of its own or with few steps.

    Raises:
        EnvError: The env does not render images.
    """
    from corral.envs.videos import check_frame  # here: it imports gymnasium

    if (mode := getattr(sub_environment, "render_mode", None)) != "rgb_array":
        raise EnvError(
            f"keep_frames needs an env that renders images, and render_mode is {mode!r}: give it "
            "env_config={'render_mode': 'rgb_array'}."
        )
    episode.add_temporary_timestep_data(FRAMES, check_frame(sub_environment.render()))
