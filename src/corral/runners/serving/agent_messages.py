"""The messages of clients whose envs have several agents, checked: what was said of each agent, as arrays of seats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from corral.core.ids import AgentID
from corral.core.space_descriptions import describe_space
from corral.core.spaces import blank_array, space_tree
from corral.core.tree import Tree, map_tree
from corral.envs.seats import SeatBlock, Seats, SeatsSpace
from corral.errors import ClientMessageError
from corral.runners.serving.messages import (
    Entries,
    check_ends,
    check_fields,
    read_arrays,
    read_envs,
    read_flags,
    read_infos,
    read_rewards,
)

AGENT_FIELDS: dict[str, type | tuple[type, ...]] = {
    "entries": list,
    "obs": (dict, list),
    **dict.fromkeys(("rewards", "terminated", "truncated", "infos"), list),
}
"""Fields of what a message `steps` says of one agent, and their types."""
OF_ONE_AGENT = ("obs", "rewards", "actions", "outputs", "draws", "weights_version")
"""Fields of `steps` that a client of several agents cannot use."""


def describe_spaces(observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> dict[str, Any]:
    """Return what a client is told of the spaces: of one agent, or under `agents` of each agent by its name.

    Raises:
        ValueError: A space has no description; see `describe_space`.
    """
    if isinstance(observation_space, SeatsSpace):
        return {"agents": {str(agent): found for agent, found in describe_agents(observation_space.seats).items()}}
    return {"observation_space": describe_space(observation_space), "action_space": describe_space(action_space)}


def describe_agents(seats: Seats) -> dict[AgentID, dict[str, Any]]:
    """Return the descriptions of `observation_space` and `action_space` of each agent.

    Raises:
        ValueError: A space has no description; see `describe_space`.
    """
    described = {}
    for block in seats.blocks:
        action_space = spaces.Tuple(block.action_parts) if block.action_parts else block.action_space
        found = {"observation_space": block.observation_space, "action_space": action_space}
        for agent in block.agents:
            described[agent] = {name: describe_space(space) for name, space in found.items()}
    return described


def read_agent_entries(message: Mapping[str, Any], num_envs: int, seats: Seats) -> Entries:
    """Return what a message `steps` of several agents says.

    Args:
        message: The message.
        num_envs: Number of envs of the client.
        seats: Seats of the agents.

    Returns:
        The entries; `obs` is a tree as in a `SeatsSpace`, with an axis `[K]` in front, and `rewards` are sums over the
        agents.

    Raises:
        ClientMessageError: A part does not fit the spaces or the other parts; the error names it.
    """
    _refuse_fields_of_one_agent(message)
    if "agents" not in message:
        raise ClientMessageError("steps.agents", "is missing: this server has several agents")
    envs = read_envs(message["envs"], num_envs, "steps.envs")
    if (count := len(envs)) > 2 * num_envs:  # looked at first, because each entry has room for all agents
        problem = "an env has two at most, the last one of an episode and the first one of the next"
        raise ClientMessageError("steps.envs", f"has {count} entries of {num_envs} envs: {problem}")
    flags: dict[str, Any] = {
        name: read_flags(message.get(name), count, f"steps.{name}") for name in ("begins", "terminated", "truncated")
    }
    said = blank_seats(seats, count)
    infos: list[dict[str, Any]] = [{} for _ in range(count)]
    for seat, name, part in _agents(message["agents"], seats):
        place = f"steps.agents.{name}"
        _read_agent(part, place, seat, seats, flags["begins"], said)
        for info, of_agent in zip(infos, read_infos(part.get("infos"), count, f"{place}.infos") or (), strict=False):
            if of_agent:
                info.setdefault("agents", {})[seats.agents[seat]] = of_agent
    for info, common in zip(infos, read_infos(message.get("infos"), count, "steps.infos") or (), strict=False):
        if common:
            info["common"] = common
    entries = Entries(
        envs=envs,
        obs=said,
        rewards=said["rewards"].sum(1),
        infos=infos if any(infos) else None,
        counts=read_flags(message["counts"], count, "steps.counts") if "counts" in message else None,
        **flags,
    )
    check_ends(entries)
    return entries


def _refuse_fields_of_one_agent(message: Mapping[str, Any]) -> None:
    for name in OF_ONE_AGENT:
        if name in message:
            problem = "clients of several agents take the actions that the server chooses"
            if name in AGENT_FIELDS:
                problem = "this server has several agents: say it for each of them, under agents"
            raise ClientMessageError(f"steps.{name}", problem)


def _agents(given: Mapping[Any, Any], seats: Seats) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """Return seat, name and part of each agent of which a message says something."""
    seat_of = {str(agent): seat for seat, agent in enumerate(seats.agents)}
    for name, part in given.items():
        if name not in seat_of:
            known = ", ".join([*seat_of][:10]) + (", ..." if len(seat_of) > 10 else "")
            raise ClientMessageError(f"steps.agents.{str(name)[:60]}", f"is no agent of this server, which has {known}")
        if not isinstance(part, dict):
            raise ClientMessageError(f"steps.agents.{name}", f"must be a map, got {type(part).__name__}")
        check_fields(f"steps.agents.{name}", part, AGENT_FIELDS)
        yield seat_of[name], name, part


def blank_seats(seats: Seats, count: int) -> dict[str, Any]:
    """Return arrays of a `SeatsSpace` in which nobody was observed, with an axis `[count]` in front."""
    shape = (count, len(seats.agents))
    return {
        "obs": {block.name: _blank(block, count) for block in seats.blocks},
        "rewards": np.zeros(shape),
        **{name: np.zeros(shape, np.int8) for name in ("observed", "terminated", "truncated")},
    }


def _blank(block: SeatBlock, count: int) -> Tree:
    space = space_tree(block.observation_space)
    return map_tree(lambda leaf: blank_array(leaf, count, len(block.agents)), space)


def _read_agent(
    part: Mapping[str, Any], place: str, seat: int, seats: Seats, begins: NDArray[np.bool_], said: dict[str, Any]
) -> None:
    """Write what a message says of one agent into the arrays of all seats."""
    count = len(begins)
    block = next(block for block in seats.blocks if block.start <= seat < block.stop)
    if "obs" in part:
        rows = _read_rows(part["entries"], count, f"{place}.entries") if "entries" in part else np.arange(count)
        obs = read_arrays(part["obs"], space_tree(block.observation_space), len(rows), f"{place}.obs")
        at = rows, seat - block.start
        map_tree(lambda column, given: column.__setitem__(at, given), said["obs"][block.name], obs)
        said["observed"][rows, seat] = True
    elif part.get("entries"):
        raise ClientMessageError(f"{place}.obs", "is missing: entries are those in which the agent is observed")
    said["rewards"][:, seat] = read_rewards(part.get("rewards"), count, f"{place}.rewards")
    for name in ("terminated", "truncated"):
        said[name][:, seat] = flags = read_flags(part.get(name), count, f"{place}.{name}")
        if (both := flags & begins).any():
            index = int(np.flatnonzero(both)[0])
            raise ClientMessageError(f"{place}.{name}[{index}]", "an agent cannot end where its episode begins")
    if (early := (said["rewards"][:, seat] != 0) & begins).any():
        index = int(np.flatnonzero(early)[0])
        raise ClientMessageError(f"{place}.rewards[{index}]", "must be 0 where an episode begins")


def _read_rows(given: list[Any], count: int, place: str) -> NDArray[np.int64]:
    """Return numbers of entries, int64 `[J]`, each at most once."""
    if not given:
        return np.zeros(0, np.int64)
    rows = read_envs(given, count, place)
    if len(np.unique(rows)) < len(rows):
        raise ClientMessageError(place, "names an entry twice")
    return rows
