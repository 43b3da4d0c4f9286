"""What central critics see, from a slow loop over what the env gave."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from agent_steps import AGENTS, Played
from at_least import all_of


def numbers_of_all(agent_id: Any, observations: Any, actions: Any, present: Any) -> Any:
    """Return what each agent sees, what it did, whether it is present, and whose critic it is."""
    rows = len(present[agent_id])
    columns = [observations[agent][:, 0] for agent in AGENTS]
    columns += [actions[agent] for agent in AGENTS] + [present[agent] for agent in AGENTS]
    return np.stack([*columns, np.full(rows, AGENTS.index(agent_id))], -1)


def ended(played: Played, agent: Any, t: int) -> bool:
    """Return whether an agent ended alone in the env step that led to time t."""
    return t > 0 and bool(played.terminateds[t - 1].get(agent) or played.truncateds[t - 1].get(agent))


def is_over(played: Played, t: int) -> bool:
    return t > 0 and bool(played.terminateds[t - 1].get("__all__") or played.truncateds[t - 1].get("__all__"))


def expected(played: Played) -> Iterator[tuple[float, list[float]]]:
    """Yield the number by which an agent's row is known, and what `numbers_of_all` gives for it, for all rows.

    A row is known by the number that the agent sees, or for a final row of an agent that was not observed in the end by
    minus its latest number.
    """
    waits: set[Any] = set()  # agents that have acted, and were not observed since
    latest: dict[Any, float] = {}
    for t in range(len(played) + 1):
        seen = {agent: float(obs[0]) for agent, obs in played.observations[t].items()}
        over = is_over(played, t)
        acting = {agent for agent in seen if not over and not ended(played, agent, t)}
        final = {agent for agent in waits if over or ended(played, agent, t)}
        together = final if over else acting
        known = {**latest, **{agent: number for agent, number in seen.items() if agent in acting | final}}
        before = played.actions[t - 1] if t else {}
        for agent in [agent for agent in AGENTS if agent in acting | final]:
            present = together | {agent}
            row = [known[each] if each in present else 0.0 for each in AGENTS]
            row += [float(before.get(each, 0)) for each in AGENTS] + [float(each in present) for each in AGENTS]
            yield known[agent] if agent in seen else -known[agent], [*row, float(AGENTS.index(agent))]
        latest = known
        waits = (waits - final - acting) | acting


def found(rollouts: Iterable[Any]) -> Iterator[tuple[float, Any]]:
    """Yield the rows that steps began with or led to, by their numbers as `expected` does."""
    for rollout in rollouts:
        for part in rollout.modules.values():
            for t, lane in np.argwhere(part.valid).tolist():
                for row in (t, t + 1):
                    number = float(part.obs[row, lane, 0])
                    unseen = row > t and number == float(part.obs[t, lane, 0])
                    yield -number if unseen else number, np.array(part["critic_obs"])[row, lane]


def assert_seen(episodes: Iterable[Played], rollouts: Iterable[Any], least: int) -> list[Any]:
    """Assert that critics saw what envs gave, in so many rows at least, and return the rows."""
    # Observations of two episodes may have the same numbers: each number has a list of rows.
    wanted: dict[float, list[list[float]]] = {}
    for played in episodes:
        for number, row in expected(played):
            wanted.setdefault(number, []).append(row)
    rows = list(found(rollouts))
    assert all_of((row.tolist() in wanted[number] for number, row in rows), least)
    return rows
