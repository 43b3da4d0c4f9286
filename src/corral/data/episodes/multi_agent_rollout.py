"""The rollout of the env steps of several agents, with one rollout for each module."""

from __future__ import annotations

import copy
from bisect import bisect_right
from typing import Any

from corral.core.tree import Tree
from corral.data.episodes.lane_rollout import SeatCarry
from corral.data.episodes.multi_agent_episode import MultiAgentEpisode
from corral.data.episodes.rollout import Rollout


class MultiAgentRollout(Rollout):
    """The env steps of one `sample()` call of an env with several agents, and the rollouts of their modules.

    The columns belong to the env: `rewards` (the sum over the agents), `terminated` and `truncated` (of the whole
    episode), `valid` and `row_times_s`. Observations and actions are in the rollouts of the modules.

    Attributes:
        modules: Rollouts by module id; a module that took no step has none.
        seat_carry: What the agents had when the rollout began; `None` if no runner made it.
        num_agent_steps: Steps of all agents, once the rollout is complete: the valid entries of all modules.
        is_on_device: Whether the rollouts of the modules are `TensorRollout`s; `to_arrays` returns them as others have
            them.
    """

    __slots__ = ("is_on_device", "modules", "num_agent_steps", "seat_carry")

    def __init__(self, columns: dict[str, Tree], *, num_rows: int = 0) -> None:
        """Take the columns of the env steps; the runner adds the rollouts of the modules."""
        super().__init__(columns, num_rows=num_rows)
        self.episode_class = MultiAgentEpisode
        self.modules: dict[str, Any] = {}
        self.num_agent_steps = 0
        self.seat_carry: SeatCarry | None = None
        self.is_on_device = False

    @classmethod
    def of_tensors(cls, steps: Any, seat_carry: SeatCarry, num_agent_steps: int) -> MultiAgentRollout:
        """Return the rollout of the env steps in a complete `TensorRollout` and of its modules, which stay tensors."""
        found = cls(dict(steps.host.columns), num_rows=steps.num_rows)
        found.take_facts(steps)
        found.seat_carry, found.num_agent_steps, found.is_on_device = seat_carry, num_agent_steps, True
        found.set_modules(steps.modules)
        return found

    def to_arrays(self) -> MultiAgentRollout:
        """Return the rollout with arrays as columns; each column is copied to the host once."""
        found = self.with_modules({})
        found.is_on_device = False
        found.set_modules({module_id: part.to_arrays() for module_id, part in self.modules.items()})
        return found

    def by_module(self) -> dict[str, Rollout]:
        """Return the rollouts of the modules, by module id."""
        return dict(self.modules)

    def set_modules(self, modules: dict[str, Any]) -> None:
        """Set the complete rollouts of the modules, by module id."""
        # The parent that they know does not know them: in a circle of references, rollouts would stay in memory.
        parent = self.with_modules({})
        for module_id, part in modules.items():
            part.parent, part.module_id, part.info_rows = parent, module_id, self.info_rows
        self.modules = modules

    def with_modules(self, modules: dict[str, Any]) -> MultiAgentRollout:
        """Return this rollout with other modules; the columns are shared."""
        whole = copy.copy(self)
        whole.modules = modules
        return whole

    def without_infos(self) -> Rollout:
        """Return the rollout without infos and notes of callbacks, which may be large; the columns are shared."""
        bare = super().without_infos()
        assert isinstance(bare, MultiAgentRollout)
        bare.set_modules({module_id: copy.copy(part) for module_id, part in self.modules.items()})
        return bare

    # Episodes.

    def _view(self, id_: str, env_index: int) -> Any:
        return self.episode_class.view(id_, env_index, self, self.seat_carry)

    def chunks(self) -> list[tuple[int, Any]]:
        """Return the episodes as `episodes` does, each in a pair with its first row."""
        if self.is_on_device:
            return self.to_arrays().chunks()
        found = super().chunks()
        of_env: dict[int, list[tuple[int, MultiAgentEpisode]]] = {}
        for start, episode in found:
            of_env.setdefault(episode.env_index, []).append((start, episode))
        for module_id, part in self.modules.items():
            carry = part.carry
            for lane, start, stop, _ in part.spans():
                last_row = int(part.obs_rows[stop, lane]) - 1
                starts = of_env[int(part.lane_envs[lane])]
                episode = starts[bisect_right(starts, last_row, key=lambda pair: pair[0]) - 1][1]
                agent = episode.add_view(part, lane, module_id, start)
                if start == 0 and carry is not None:
                    agent.continue_from(int(carry.lengths[lane]), float(carry.returns[lane]))
                agent.end(bool(part.terminated[stop - 1, lane]), bool(part.truncated[stop - 1, lane]), stop)
        return found
