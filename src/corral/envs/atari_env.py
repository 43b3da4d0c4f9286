"""Atari games with the standard preprocessing, computed by the vector env of ale-py.

Mnih et al., 2015, https://doi.org/10.1038/nature14236, and Machado et al., 2018, https://arxiv.org/abs/1709.06009.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from corral.errors import ConfigError, nearest

PREPROCESSING = "preprocessing"
"""Key of `env_config` that turns the preprocessing on."""
# Settings of the vector env that do not apply, and why.
_DECIDED = {
    "num_envs": "set num_envs_per_env_runner",
    "autoreset_mode": "set autoreset_mode in env_runners",
    "batch_size": "all sub-envs are stepped together",
    "game": "the id names it",
    "life_loss_info": "with it a lost life ends an episode and no reset follows, so that the next step would be lost",
}
# Settings of the id that also apply with preprocessing; the frame skip of ids without one is 4, as in the papers.
_OF_ID = ("game", "repeat_action_probability", "full_action_space", "max_num_frames_per_episode")


def is_atari(spec: EnvSpec) -> bool:
    """Return whether an id is a game of ale-py."""
    return isinstance(spec.entry_point, str) and spec.entry_point.startswith("ale_py.")


def asks_for_preprocessing(spec: EnvSpec, env_config: Mapping[str, Any]) -> bool:
    """Return whether an id is a game of ale-py, and its settings turn the preprocessing on.

    Raises:
        ConfigError: The setting is neither True nor False.
    """
    given = env_config.get(PREPROCESSING, False)
    if is_atari(spec) and not isinstance(given, bool):
        raise ConfigError(f"env_config[{PREPROCESSING!r}]={given!r} of env {spec.id!r} must be True or False.")
    return is_atari(spec) and given


def make_atari_vector(
    spec: EnvSpec, num_envs: int, mode: AutoresetMode, env_config: Mapping[str, Any], **settings: Any
) -> Any:
    """Return the vector env of ale-py, whose observations are the last 4 preprocessed frames, uint8 `[N, 4, 84, 84]`.

    A frame is the greater of the last two screens, pixel by pixel, in shades of grey and with 84 rows and columns. Each
    action is repeated for 4 screens. An episode begins with up to 30 screens without action, and with the action
    "fire" where the game needs it. Rewards are the points of the game.

    Args:
        spec: Spec of the id.
        num_envs: Number of sub-envs N.
        mode: Autoreset mode: next-step or same-step.
        env_config: Settings of `ale_py.AtariVectorEnv` that differ from these, such as `stack_num`.
        settings: Further settings of `ale_py.AtariVectorEnv`.

    Raises:
        ConfigError: A setting is unknown, or does not apply.
    """
    from ale_py.vector_env import AtariVectorEnv

    given = {key: value for key, value in env_config.items() if key not in (PREPROCESSING, "render_mode")}
    known = set(inspect.signature(AtariVectorEnv).parameters) - set(_DECIDED)
    for key in given:
        if key in _DECIDED:
            raise ConfigError(f"env_config[{key!r}] does not apply to env {spec.id!r}: {_DECIDED[key]}.")
        if key not in known:
            raise ConfigError(
                f"env_config: env {spec.id!r} with preprocessing=True has no setting {key!r}. {nearest(key, known)}"
            )
    of_id = {key: value for key, value in spec.kwargs.items() if key in _OF_ID}
    env: Any = AtariVectorEnv.__new__(AtariVectorEnv)
    env.metadata = {}  # ale-py writes the autoreset mode into the dict of the class, which all vector envs share
    env.__init__(**{"reward_clipping": False, **of_id, **settings, **given}, num_envs=num_envs, autoreset_mode=mode)
    return env


class PreprocessedAtariEnv(gym.Env[NDArray[np.uint8], np.int64]):
    """One Atari game with the standard preprocessing: a single env with the observations of `make_atari_vector`.

    Args:
        spec: Spec of the id.
        env_config: Settings as in `make_atari_vector`; with `render_mode="rgb_array"`, `render` returns the newest
            frame as uint8 `[84, 84, 3]`.

    Raises:
        ConfigError: A setting is unknown, or does not apply.
    """

    def __init__(self, spec: EnvSpec, env_config: Mapping[str, Any]) -> None:
        """Make the game."""
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # 60 screens per second, 4 per step
        self.render_mode = env_config.get("render_mode")
        if self.render_mode not in (None, "rgb_array"):
            raise ConfigError(
                f"env {spec.id!r} with preprocessing=True shows no window: render_mode={self.render_mode!r} does not "
                "apply, and 'rgb_array' records videos."
            )
        self._games = make_atari_vector(spec, 1, AutoresetMode.NEXT_STEP, env_config, num_threads=1)
        self.observation_space = self._games.single_observation_space
        self.action_space = self._games.single_action_space
        self._newest: NDArray[np.uint8] | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Begin an episode; see `gymnasium.Env.reset`."""
        super().reset(seed=seed)
        # The games have a generator that nobody can read. With a seed for each episode, all that is random in one comes
        # from `np_random`, so that a restored run can play it again.
        obs, infos = self._games.reset(seed=int(self.np_random.integers(2**31)) if seed is None else seed)
        self._newest = obs[0]
        return obs[0], _first_infos(infos)

    def step(self, action: Any) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        """Repeat an action for 4 screens; see `gymnasium.Env.step`."""
        obs, rewards, terminated, truncated, infos = self._games.step(np.asarray(action)[None])
        self._newest = obs[0]
        return obs[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), _first_infos(infos)

    def render(self) -> Any:
        """Return the newest frame, uint8 `[84, 84, 3]`."""
        if self._newest is None or self.render_mode is None:
            return None
        frame = self._newest[-1]
        return frame if frame.ndim == 3 else np.repeat(frame[..., None], 3, axis=2)

    def close(self) -> None:
        """End the game."""
        self._games.close()


def _first_infos(infos: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    return {key: value[0] for key, value in infos.items() if key != "env_id"}
