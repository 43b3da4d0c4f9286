"""Which agents each module acts for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from corral.core.ids import AgentID
from corral.core.seeding import get_global_rngs, set_global_rngs
from corral.core.spaces import module_observation_space, space_kinds
from corral.data.episodes.multi_agent_episode import MultiAgentEpisode
from corral.errors import ConfigError, nearest

if TYPE_CHECKING:
    from corral.envs.seats import SeatBlock, Seats
    from corral.runners.config import RunnerConfig

# How often the mapping is asked for each agent, to see which modules it may get: a mapping may draw among several, and
# every process must find the same ones, in the same order, for their spaces and lanes.
NUM_TRIALS = 20


def block_of_module(config: RunnerConfig, seats: Seats, module_id: str, agents: list[AgentID]) -> SeatBlock | None:
    """Return the block of seats with the agents of a module; `None` if no agent is known and there are several blocks.

    Raises:
        ConfigError: The agents have different spaces, or other spaces than `policies` gives.
    """
    blocks = [block for block in seats.blocks if set(block.agents).intersection(agents)]
    if len(blocks) > 1:
        first, second = (next(agent for agent in block.agents if agent in agents) for block in blocks[:2])
        raise ConfigError(
            f"multi_agent: module {module_id!r} acts for the agents {first!r} and {second!r}, whose spaces differ "
            f"({blocks[0].observation_space} and {blocks[1].observation_space}; {blocks[0].action_space} and "
            f"{blocks[1].action_space}): map them to different modules."
        )
    given = config.policies[module_id]
    fitting = [block for block in (blocks or seats.blocks) if _fits(block, given)]
    if blocks and not fitting:
        raise ConfigError(
            f"multi_agent: policies gives module {module_id!r} other spaces than the spaces of its agent "
            f"{next(iter(agents))!r}, which are {blocks[0].observation_space} and {blocks[0].action_space}."
        )
    return fitting[0] if len(fitting) == 1 else None


def _fits(block: SeatBlock, given: Mapping[str, Any]) -> bool:
    observation_space, action_space = given.get("observation_space"), given.get("action_space")
    if observation_space is not None:
        kinds = [space_kinds(module_observation_space(space)) for space in (observation_space, block.observation_space)]
        if kinds[0] != kinds[1]:
            return False
    return action_space is None or bool(action_space == block.action_space)


def agents_of_modules(config: RunnerConfig, seats: Seats) -> dict[str, list[AgentID]]:
    """Return the agents that each module may act for, by module id, where trials of the mapping show them.

    Raises:
        ConfigError: The mapping raises, or returns what is no module.
    """
    found: dict[str, list[AgentID]] = {module_id: [] for module_id in config.module_ids}
    mapping, rngs = make_mapping(config), get_global_rngs()
    try:
        for agent in seats.agents:
            trials = NUM_TRIALS if config.policy_mapping_fn is not None else 1
            for module_id in {mapping(agent, MultiAgentEpisode(), None) for _ in range(trials)}:
                found[module_id].append(agent)
    finally:
        set_global_rngs(rngs)  # a mapping may draw from them
    return found


def make_mapping(config: RunnerConfig) -> Callable[[AgentID, Any, Any], str]:
    """Return the function `(agent_id, episode, worker)` that gives the module of an agent, checked at each call.

    The function that it returns raises a `ConfigError` if the setting raises, or returns what is no module.
    """
    function, module_ids = config.policy_mapping_fn, config.module_ids
    takes_worker = function is not None and _takes(function, "worker")

    def map_agent(agent: AgentID, episode: Any, worker: Any) -> str:
        if function is None:
            module_id: Any = module_ids[0] if len(module_ids) == 1 else str(agent)
        else:
            try:
                module_id = function(agent, episode, **({"worker": worker} if takes_worker else {}))
            except Exception as error:
                raise ConfigError(
                    f"multi_agent: policy_mapping_fn(agent_id, episode) raised {type(error).__name__} for agent "
                    f"{agent!r}: {error}"
                ) from error
        if module_id not in module_ids:
            if function is None:
                raise ConfigError(
                    f"multi_agent: no module has the id of agent {agent!r}, and policies names {module_ids}: set "
                    "policy_mapping_fn, or name the modules after the agents."
                )
            raise ConfigError(
                f"multi_agent: policy_mapping_fn returned {module_id!r} for agent {agent!r}, and policies has no such "
                f"module. {nearest(str(module_id), module_ids)}"
            )
        return str(module_id)

    return map_agent


def begin_mapping(config: RunnerConfig) -> Callable[[], Callable[[AgentID], str]]:
    """Return the function that begins an episode outside of a runner, and gives the module of each of its agents.

    What it returns asks `policy_mapping_fn` once for each agent; see `make_mapping` for the errors.
    """
    mapping = make_mapping(config)

    def begin_episode() -> Callable[[AgentID], str]:
        episode = MultiAgentEpisode()
        episode.agent_to_module_mapping_fn = lambda agent, episode: mapping(agent, episode, None)
        return episode.module_for

    return begin_episode


def _takes(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some functions of C have no signature
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
