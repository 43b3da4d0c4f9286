"""Episodes built by hand, and the type of the fixture that makes runners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from corral.data.episodes.episode import SingleAgentEpisode
from corral.runners.runner import EnvRunner

MakeRunner = Callable[..., EnvRunner]


def made(len_lookback_buffer: int | str = 3, **given: Any) -> SingleAgentEpisode:
    """Return an episode of four steps behind a lookback of three.

    Its rewards are 1 2 3 | 4 5 6 7, its observations and infos 0 1 2 | 3 4 5 6 7.
    """
    columns: dict[str, Any] = {
        "observations": [float(i) for i in range(8)],
        "infos": [{"i": i} for i in range(8)],
        "actions": list(range(10, 17)),
        "rewards": [float(i) for i in range(1, 8)],
        "extra_model_outputs": {"v": [i / 2 for i in range(7)]},
        "t_started": 5,
    }
    return SingleAgentEpisode("a", len_lookback_buffer=len_lookback_buffer, **columns | given)


def stepped(num_steps: int = 2, **last_step: Any) -> SingleAgentEpisode:
    """Return an episode that grew step by step: observation t, action t, reward t for the step that led to t."""
    episode = SingleAgentEpisode("b")
    episode.add_env_reset(0.0, {"i": 0})
    for t in range(1, num_steps + 1):
        episode.add_env_step(float(t), t, float(t), {"i": t}, **last_step if t == num_steps else {})
    return episode


def plain(tree: Any) -> Any:
    """Return a tree with lists in place of arrays."""
    if isinstance(tree, dict):
        return {key: plain(part) for key, part in tree.items()}
    return tuple(map(plain, tree)) if isinstance(tree, tuple) else np.asarray(tree).tolist()
