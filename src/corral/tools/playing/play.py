"""Episodes of a policy to look at: shown in a window, or recorded as mp4 or GIF."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gymnasium as gym

from corral.core.interrupts import interruptible
from corral.core.paths import resolve_path
from corral.envs.env_state import warn_of_statistics
from corral.envs.episode_resets import EpisodeReset, EpisodeResets
from corral.envs.sync_vector import SyncVectorEnv
from corral.envs.unread_parts import unread_wrappers
from corral.envs.vector import EnvContext, env_name, make_vector_env
from corral.envs.videos import Mp4Encoder, check_frame, frames_per_second, render
from corral.errors import ConfigError, EnvError, MissingPackageError
from corral.runs.policies.agent_policies import AgentPolicies
from corral.runs.policies.policy import Policy
from corral.tools.playing.player import MAX_EPISODE_STEPS, Faults, Player, acting_of, with_queues

PACKAGES = {"mp4": ("av", "av"), "gif": ("PIL", "pillow")}


class PlayedEpisode(NamedTuple):
    """An episode that was shown or recorded.

    Attributes:
        episode_return: Return, without discount.
        episode_len: Length in env steps.
        file: Recording; `None` if the episode was shown.
    """

    episode_return: float
    episode_len: int
    file: Path | None


@interruptible
def play_episodes(
    policy: Policy | AgentPolicies,
    env: Any,
    *,
    episodes: int = 3,
    record: str | Path | None = None,
    file_format: Literal["mp4", "gif"] = "mp4",
    env_config: Mapping[str, Any] | None = None,
    wrappers: Sequence[Callable[[Any], Any]] = (),
    seed: int | None = 0,
    explore: bool = False,
    max_episode_steps: int = MAX_EPISODE_STEPS,
) -> Iterator[PlayedEpisode]:
    """Play episodes in a window, or record each of them, and yield each one when it has ended.

    Args:
        policy: The policy, or the policies of several agents.
        env: A Gymnasium id, an import path, a class, or a factory. It must take `render_mode`, as a keyword argument or
            as a key of its `env_config`.
        episodes: Number of episodes.
        record: Directory for the recordings, which gets `episode-000.mp4` and so on; `None` opens a window.
        file_format: `"mp4"` or `"gif"`.
        env_config: Settings of the env.
        wrappers: Wrappers of the env; the first one is the innermost.
        seed: Seed of the first episode; each further one gets the next number. `None` draws others each time.
        explore: Whether the policy explores.
        max_episode_steps: Length from which an episode counts as one that never ends.

    Raises:
        ConfigError: A package is missing, or the policy is for other spaces than the env's.
        EnvError: The env raised an exception, cannot be rendered, or has an episode that does not end.
    """
    for name, value in (("episodes", episodes), ("max_episode_steps", max_episode_steps)):
        if value < 1:
            raise ConfigError(f"play: {name}={value} must be at least 1.")
    if record is not None:
        module_name, package = PACKAGES[file_format]
        if find_spec(module_name) is None:
            raise MissingPackageError(f"recording {file_format} needs {package}: run `pip install 'corral[play]'`.")
    name, mode = env_name(env), "human" if record is None else "rgb_array"
    with contextlib.ExitStack() as opened:
        pipeline = getattr(policy, "pipeline", None)
        blanking = [] if pipeline is None else unread_wrappers(pipeline.transforms)
        made = _make_env(env, name, mode, env_config or {}, [*wrappers, *blanking])
        opened.callback(made.close)
        resets = None if seed is None else [EpisodeReset(seed=seed + number) for number in range(episodes)]
        shown = _Show(policy, made, name, resets, explore=explore)
        shown.begin(episodes, max_episode_steps)
        files = (
            itertools.repeat(None) if record is None else _new_files(resolve_path(record, "the recording"), file_format)
        )
        for _, file in zip(range(episodes), files, strict=False):
            if file is None:
                collections.deque(shown.frames(), maxlen=0)
            else:
                (write_mp4 if file_format == "mp4" else write_gif)(file, shown.frames(), frames_per_second(made))
            _, episode_return, length = shown.latest
            yield PlayedEpisode(episode_return, length, file)


class _Show:
    """Episodes in one env, as frames.

    Attributes:
        latest: Index of the sub-env, return and length of the latest episode.
    """

    latest: tuple[int, float, int]

    def __init__(
        self,
        policy: Policy | AgentPolicies,
        env: gym.Env[Any, Any],
        name: str,
        resets: list[EpisodeReset] | None,
        *,
        explore: bool,
    ) -> None:
        self._env, self._faults = env, Faults(name)
        self._alone = with_queues(SyncVectorEnv([lambda: EpisodeResets(env)]), resets)
        self._act = acting_of(policy, self._alone, name, explore)
        self._actions, self._is_over = None, False

    def begin(self, num_episodes: int, max_episode_steps: int) -> None:
        """Choose how many episodes are played; nothing is played yet."""
        self._steps = Player(self._acting, self._alone, self._faults, max_episode_steps).play(num_episodes, None)

    def _acting(self, *args: Any) -> Any:
        """Return the actions; after an episode, when the env is only reset, nobody acts."""
        if not self._is_over:
            self._actions = self._act(*args)
        return self._actions

    def frames(self) -> Iterator[Any]:
        """Play the next episode, and yield what the env renders after the reset and after each step."""
        for ended in self._steps:
            self._is_over = bool(ended)
            yield self._faults.call("render", partial(render, self._env))
            if ended:
                [self.latest] = ended
                return


def _make_env(
    env: Any, name: str, mode: str, env_config: Mapping[str, Any], wrappers: Sequence[Callable[[Any], Any]]
) -> gym.Env[Any, Any]:
    """Return one env that is rendered in a mode."""
    needed = f"env {name!r} must take render_mode={mode!r}, as a keyword argument or as a key of its env_config"
    context = EnvContext({**env_config, "render_mode": mode})
    try:
        vector_env = make_vector_env(env, context, num_envs=None, wrappers=wrappers, check=False)
    except (ConfigError, EnvError) as error:
        if "render_mode" in f"{error} {error.__cause__ or ''}":
            raise EnvError(f"{needed}: {error}") from error
        raise
    if not isinstance(vector_env, SyncVectorEnv):
        vector_env.close()
        raise ConfigError(f"env {name!r} is a vector env, which cannot be shown: give a single env.")
    made: gym.Env[Any, Any] = vector_env.envs[0]
    if made.render_mode != mode:
        made.close()
        raise EnvError(f"{needed}, and its render_mode is {made.render_mode!r}.")
    warn_of_statistics(made, name)
    return made


def _new_files(directory: Path, file_format: str) -> Iterator[Path]:
    """Yield files that do not exist yet, with increasing numbers."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"play: record={str(directory)!r} cannot be made a directory: {error.strerror}.") from error
    for number in itertools.count():
        file = directory / f"episode-{number:03d}.{file_format}"
        if not file.exists():
            yield file


@interruptible
def write_mp4(file: Path, frames: Iterable[Any], fps: float) -> None:
    """Write frames to an mp4 file (H.264), one after another as they come; nothing is left of a failed recording."""
    part = _part(file)
    try:
        with contextlib.closing(Mp4Encoder(str(part), fps)) as encoder:
            for frame in frames:
                encoder.add(check_frame(frame))
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def write_gif(file: Path, frames: Iterable[Any], fps: float) -> None:
    """Write frames to a GIF file, one after another as they come; nothing is left of a failed recording."""
    from PIL import Image

    part, images = _part(file), (Image.fromarray(check_frame(frame)) for frame in frames)
    try:
        # Programs that show GIFs do not show more than 50 frames per second.
        next(images).save(part, "GIF", save_all=True, append_images=images, duration=max(20, round(1000 / fps)), loop=0)
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def _part(file: Path) -> Path:
    return file.with_name(f".{file.name}.part")
