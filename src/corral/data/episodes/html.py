"""Episodes as HTML, for the output of a notebook cell: a table, and frames where the episode has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from corral.core.html import html_heading, html_image, html_table, short_text
from corral.core.tree import Tree, named_leaves
from corral.data.episodes.infos import NotSent
from corral.data.episodes.notes import Notes

NUM_FIRST, NUM_LAST = 8, 4
"""Number of the first and of the last steps in the table of a longer episode."""

NUM_FRAMES, FRAME_WIDTH = 6, 120


def episode_html(episode: Any) -> str:
    """Return the state of an episode, a table of its steps in this chunk, and frames.

    Frames are what user code added as temporary data, such as `corral.callbacks.keep_frames`, and else observations
    that are images.
    """
    content = _about(episode, episode.t)
    if not episode.is_reset:
        return f"<div>{content}</div>"
    obs, num_steps = episode.get_observations(), len(episode)
    rows: list[tuple[Any, ...]] = [
        (episode.t_started + i, _text(episode.get_observations(i)), *_step_texts(episode, i))
        for i in range(num_steps + 1)
        if i < NUM_FIRST or i > num_steps - NUM_LAST
    ]
    if len(rows) <= num_steps:
        rows.insert(NUM_FIRST, ("...", "", "", ""))
    content += html_table(rows, ("t", "observation", "action", "reward"))
    return f"<div>{content}{_frames(episode.notes, obs)}</div>"


def multi_agent_episode_html(episode: Any) -> str:
    """Return the state of an episode of several agents, a table of its agents, and the frames of `episode_html`.

    Args:
        episode: A `MultiAgentEpisode`.
    """
    rows = [
        (str(agent_id), str(part.module_id), part.t, part.get_return(), "yes" if part.is_done else "no")
        for agent_id, part in sorted(episode.agent_episodes.items(), key=lambda entry: str(entry[0]))
    ]
    content = _about(episode, episode.env_t) + html_table(rows, ("agent", "module", "agent steps", "return", "ended"))
    return f"<div>{content}{_frames(episode.notes, {})}</div>"


def _about(episode: Any, num_env_steps: int) -> str:
    about = {
        "id": episode.id_,
        "sub-env": episode.env_index,
        "env steps": num_env_steps,
        "return": episode.get_return() if num_env_steps else 0.0,
        "state": "terminated" if episode.is_terminated else "truncated" if episode.is_truncated else "ongoing",
    }
    return html_heading(type(episode).__name__) + html_table(about.items())


def _step_texts(episode: Any, i: int) -> tuple[str, str]:
    """Return action and reward of a step; empty texts for the last observation, which no action follows."""
    return (_text(episode.get_actions(i)), _text(episode.get_rewards(i))) if i < len(episode) else ("", "")


def _text(value: Tree) -> str:
    """Return one observation, action or reward as text."""
    named = [(name, short_text(np.asarray(leaf))) for name, leaf in named_leaves(value)]
    return named[0][1] if len(named) == 1 else ", ".join(f"{name}: {text}" for name, text in named)


def _frames(notes: Notes, obs: Tree) -> str:
    """Return some frames of the whole episode, equally far apart, in a row."""
    found: Sequence[Any] = ()
    temporary: Mapping[str, Any] = {} if isinstance(notes[1], NotSent) else notes[1]
    for kept in temporary.values():
        if kept and all(map(_is_image, kept)):
            found = kept
    if not len(found):
        found = next((leaf for _, leaf in named_leaves(obs) if len(leaf) and _is_image(leaf[0])), ())
    positions = np.unique(np.linspace(0, len(found) - 1, NUM_FRAMES).astype(int)) if len(found) else ()
    return "".join(html_image(np.asarray(found[i]), f"frame {i + 1} of {len(found)}", FRAME_WIDTH) for i in positions)


def _is_image(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3 and value.shape[2] in (3, 4)
