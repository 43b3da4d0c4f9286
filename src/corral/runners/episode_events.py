"""The episode events of a runner; used only if somebody subscribed to one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from corral.callbacks.dispatch import BoundCall, callback_error
from corral.core.ids import DEFAULT_MODULE_ID
from corral.core.plain import is_plain
from corral.core.tree import copy_nested
from corral.data.episodes.rollout import EpisodeCarry, Rollout, episode_id

if TYPE_CHECKING:
    from corral.callbacks.dispatch import Dispatcher
    from corral.envs.env_host import EnvHost
    from corral.runners.lanes import Lanes

EPISODE_EVENTS = ("on_episode_created", "on_episode_start", "on_episode_step", "on_episode_end")


class EpisodeEvents:
    """Keeps one episode for each sub-env and fires its events in the order of the contract.

    For each row, sub-env by sub-env: a reset fires start; a step fires step, and if it ended the episode, end and then
    created for the successor. With same-step autoreset the successor starts at once. If the sub-env failed and was
    restarted, neither step nor end fires, but created and start for the successor. With several agents, an episode has
    a view of the lane of each agent, from its first observation to its end.

    Clients of a policy server begin their episodes themselves, each sub-env at its own pace. In a row, for each sub-env
    of which a client reports: a step fires step, and if it ended the episode, end; an episode that begins fires created
    and start. If the client left, nothing fires.

    Args:
        callbacks: Dispatcher of the subscribers.
        host: Host of the envs.
        arguments: What callbacks receive by name, the same in all sub-envs.
        episode_class: Class of the episodes.
        make_episode: Function `(id, env_index, rollout)` that returns a view of an episode that has not started.
        lanes: With several agents, the lanes of each module.
        begins_episodes: Whether the runner begins the episodes, and not the clients.
    """

    def __init__(
        self,
        callbacks: Dispatcher,
        host: EnvHost,
        arguments: Mapping[str, Any],
        *,
        episode_class: type[Any],
        make_episode: Callable[[str, int, Rollout], Any],
        lanes: Mapping[str, Lanes],
        begins_episodes: bool = True,
    ) -> None:
        """Bind the arguments that never change."""
        self._callbacks, self._host = callbacks, host
        self._episode_class, self._view = episode_class, make_episode
        self._lanes, self._begins_episodes = lanes, begins_episodes
        self._viewed: dict[str, NDArray[np.bool_]] = {}  # by module, lanes whose agents are in an episode
        self._episodes: list[Any] = []
        self._counts = [0] * host.num_envs  # episodes of the sub-env before the current one
        self._waiting: set[int] = set()  # sub-envs whose next row is only a reset
        self._every_row = callbacks.subscribed("on_episode_step")
        # Chunks keep their rollouts in memory, so they are kept only if a subscriber asks for them. Otherwise the small
        # columns are kept if a subscriber receives episodes at their end, which answer for all of their chunks.
        keeps_all = callbacks.wanted("on_episode_end", "prev_episode_chunks")
        joins = callbacks.wanted("on_episode_end", "episode") and episode_class.JOINS_CHUNKS
        self.keeps_small = joins and not keeps_all
        self._keeps_chunks = keeps_all or joins
        self._receives_whole = [
            joins and not is_named for is_named in callbacks.names("on_episode_end", "prev_episode_chunks")
        ]
        self._small: Any = None  # columns of the latest complete rollout, which chunks keep
        self._chunks: list[list[Any]] = [[] for _ in range(host.num_envs)]
        # The arguments are dicts that stay; a new episode is put into them. A step then only makes the call.
        self._calls: dict[str, list[list[BoundCall]]] = {event: [] for event in EPISODE_EVENTS}
        self._arguments: list[list[dict[str, Any]]] = []
        for i in range(host.num_envs):
            of_env = {
                "episode": None,
                "prev_episode_chunks": self._chunks[i],
                "sub_environment": host.sub_env(i),
                "env_index": i,
                **arguments,
            }
            self._arguments.append([of_env])
            for event, calls in self._calls.items():
                calls.append(bound := callbacks.bind(event, of_env))
                self._arguments[i] += [chosen for _, chosen in bound]

    def episode(self, env_index: int) -> Any:
        """Return the current episode of a sub-env, or `None`."""
        return self._episodes[env_index]

    def check_actions(self, part: Rollout, action_space: Any) -> None:
        """Refuse actions in the rollout of a module that only a callback of an episode can have written.

        Raises:
            CallbackError: An action of a valid step is outside the action space.
        """
        self._callbacks.check_actions(part.valid_rows(part.actions), action_space, *EPISODE_EVENTS)

    def show_modules(self, rl_module: Any) -> None:
        """Give callbacks other modules from now on."""
        for i in range(len(self._arguments)):
            self._put(i, "rl_module", rl_module)

    def _put(self, env_index: int, name: str, value: object) -> None:
        for arguments in self._arguments[env_index]:
            if name in arguments:
                arguments[name] = value

    def _fire(self, event: str, env_index: int) -> None:
        for function, arguments in self._calls[event][env_index]:
            try:
                function(**arguments)
            except Exception as error:
                raise callback_error(event, function, error, self._episodes[env_index]) from error

    def _create(self, env_index: int, rollout: Rollout) -> None:
        id_ = episode_id(self._id_prefix, env_index, self._counts[env_index])
        self._episodes[env_index] = episode = self._view(id_, env_index, rollout)
        self._put(env_index, "episode", episode)
        self._put(env_index, "sub_environment", self._host.sub_env(env_index))
        if self._keeps_chunks:
            self._chunks[env_index] = []
            self._put(env_index, "prev_episode_chunks", self._chunks[env_index])
        self._fire("on_episode_created", env_index)

    def _start(self, env_index: int, row: int, rollout: Rollout) -> None:
        episode = self._episodes[env_index]
        self._put(env_index, "sub_environment", self._host.sub_env(env_index))  # the reset may have failed in another
        episode.start(row, time.perf_counter())
        rollout.notes[row, env_index] = episode.notes
        self._fire("on_episode_start", env_index)

    def create_all(self, rollout: Rollout) -> None:
        """Make new episodes for all sub-envs, before they are reset; where clients begin them, forget the old ones."""
        self._waiting, self._viewed = set(), {}
        num_envs = len(self._arguments)
        self._enter(rollout)
        self._episodes = [None] * num_envs
        for i in range(num_envs) if self._begins_episodes else ():
            self._create(i, rollout)

    def _enter(self, rollout: Rollout) -> EpisodeCarry:
        """Read the carry that a rollout begins with."""
        assert rollout.carry is not None  # a runner's rollouts have one
        self._rollout, self._id_prefix = rollout, rollout.carry.id_prefix
        self._counts = rollout.carry.counts.tolist()
        return rollout.carry

    def start_all(self, rollout: Rollout) -> None:
        """Start all episodes, after the reset whose observations are in row 0."""
        self._view_agents(())
        for i in range(len(self._episodes)) if self._begins_episodes else ():
            self._start(i, 0, rollout)

    def continue_all(self, rollout: Rollout, paused_s: float) -> None:
        """Continue the unfinished episodes as chunks in another rollout, `paused_s` seconds after the last one."""
        last_time_s = float(self._rollout.row_times_s[-1]) if len(self._rollout.row_times_s) else 0.0
        returns, read = self._enter(rollout).returns.tolist(), rollout if rollout.written is None else rollout.written
        for i, episode in enumerate(self._episodes):
            if episode is None:
                continue
            self._episodes[i] = chunk = episode.continued_in(read, returns[i], last_time_s, paused_s)
            self._put(i, "episode", chunk)
            if chunk.is_reset:
                read.notes[0, i] = chunk.notes
                if self._keeps_chunks and len(episode):
                    self._chunks[i].append(self._kept(episode))
        self._viewed = {}
        self._view_agents(())

    def keep_small_columns(self, rollout: Rollout) -> None:
        """Note the small columns of a complete rollout, for chunks that end with it."""
        parts = {module_id: part.without_large() for module_id, part in rollout.by_module().items()}
        self._small = parts if self._lanes else parts[DEFAULT_MODULE_ID]

    def _kept(self, chunk: Any) -> Any:
        if self._lanes:
            chunk.read_complete_columns()
        return chunk if self._small is None else chunk.without_large_columns(self._small)

    def get_state(self) -> dict[str, Any]:
        """Return the unfinished episodes at the end of a rollout, with what user code noted on them if it is plain.

        Nothing where clients play them: these episodes end with this process.
        """
        if not self._begins_episodes:
            return {}
        return {
            "waiting": sorted(self._waiting),
            "episodes": [self._episode_state(i, episode) for i, episode in enumerate(self._episodes)],
        }

    def _episode_state(self, env_index: int, episode: Any) -> dict[str, Any]:
        custom, temporary = (_plain_part(notes) for notes in episode.notes)
        chunks = [*self._chunks[env_index], *([self._kept(episode)] if self._keeps_chunks and len(episode) else [])]
        return {
            "id": episode.id_,
            "t": episode.t,
            "age_s": episode.get_duration_s(),
            "is_reset": episode.is_reset,
            "notes": [custom, temporary],
            "chunks": [_plain_chunk(chunk) for chunk in chunks],
        }

    def set_state(self, state: Mapping[str, Any], carry: EpisodeCarry, now_s: float) -> None:
        """Continue the episodes of a state in the next rollout.

        Args:
            state: State that `get_state` returned.
            carry: Totals of these episodes.
            now_s: Clock reading at which the rollout before ended.
        """
        num_envs = len(self._arguments)
        before = Rollout({"rewards": np.zeros((0, num_envs)), "row_times_s": np.array([now_s])})
        before.carry, before.episode_class = carry, self._episode_class
        self._enter(before)
        self._waiting = {int(i) for i in state["waiting"]}
        self._episodes = []
        for i, saved in zip(range(num_envs), state["episodes"], strict=True):
            episode = self._view(saved["id"], i, before)
            custom, temporary = saved["notes"]
            episode.notes = copy_nested(custom), copy_nested(temporary)
            if saved["is_reset"]:
                episode.start(0, now_s - saved["age_s"])
                episode.continue_from(int(saved["t"]), float(carry.returns[i]))
                episode.end(False, False, 0)
            self._episodes.append(episode)
            self._put(i, "episode", episode)
            if self._keeps_chunks:
                self._chunks[i] = [self._episode_class.from_state(chunk) for chunk in saved["chunks"]]
                for chunk in self._chunks[i]:
                    chunk.notes = episode.notes
                self._put(i, "prev_episode_chunks", self._chunks[i])

    def fire_row(
        self, rollout: Rollout, t: int, done: NDArray[np.bool_], playing: NDArray[np.bool_] | None = None
    ) -> None:
        """Fire the events of one row.

        Args:
            rollout: Rollout in which row t is written.
            t: Row.
            done: Sub-envs whose episodes ended with the step, bool `[N]`.
            playing: Sub-envs whose episodes are still wanted, bool `[N]`; `None` is all.
        """
        self._view_agents(rollout.broken_in(t))
        terminated, truncated = rollout.terminated[t], rollout.truncated[t]
        ended = set(np.flatnonzero(done).tolist())
        reset, self._waiting = self._waiting, set()
        broken = rollout.broken_in(t)
        step_calls, special = self._calls["on_episode_step"], ended | reset | {*broken}
        indices: Sequence[int] = range(len(step_calls)) if self._every_row else sorted(special)
        for i in indices if playing is None else [i for i in indices if playing[i]]:
            if i not in special:
                try:
                    for function, arguments in step_calls[i]:
                        function(**arguments)
                except Exception as error:
                    raise callback_error("on_episode_step", function, error, self._episodes[i]) from error
            elif i in ended:
                self._episodes[i].end(bool(terminated[i]), bool(truncated[i]), t + 1)
                self._end(rollout, t, i)
            else:
                if i in broken:
                    self._break(rollout, t, i)
                self._start(i, t + 1, rollout)

    def _break(self, rollout: Rollout, t: int, env_index: int) -> None:
        """End an episode where its sub-env failed, and create its successor."""
        self._episodes[env_index].end(False, False, t)
        self._counts[env_index] += 1
        self._create(env_index, rollout)
        for module_id, lanes in self._lanes.items():  # the agents of the env that replaced the failed one
            for lane in np.flatnonzero(lanes.is_used & (lanes.envs == env_index)).tolist():
                self._add_agent(module_id, lanes, lane)

    def _end(self, rollout: Rollout, t: int, env_index: int) -> None:
        """Fire the events of a step that ended its episode, and create the successor."""
        self._fire_end(env_index)
        self._create(env_index, rollout)
        if rollout.same_step and not self._lanes:
            self._start(env_index, t + 1, rollout)
        else:  # until the row that resets it; in the same step, until its agents were observed
            self._waiting.add(env_index)

    def start_waiting(self, rollout: Rollout) -> None:
        """Start the episodes whose first observations came in the step that ended the ones before."""
        self._view_agents(())
        waiting, self._waiting = sorted(self._waiting), set()
        for env_index in waiting:
            self._start(env_index, rollout.num_rows, rollout)

    def _fire_end(self, env_index: int) -> None:
        """Fire step and end for an episode that has ended."""
        self._fire("on_episode_step", env_index)
        if self._keeps_chunks and (chunks := self._chunks[env_index]) and any(self._receives_whole):
            whole = self._episodes[env_index].joined(chunks)
            for receives, (_, chosen) in zip(
                self._receives_whole, self._calls["on_episode_end"][env_index], strict=True
            ):
                if receives and "episode" in chosen:
                    chosen["episode"] = whole
        self._fire("on_episode_end", env_index)
        self._counts[env_index] += 1

    # Episodes that clients begin.

    def fire_steps(self, rollout: Rollout, row: int, playing: NDArray[np.bool_] | None) -> None:
        """Fire the events of the steps of one row, in which clients reported them.

        Args:
            rollout: The exchanges of messages; see `Rollout.written`.
            row: Row, in which the steps were just written.
            playing: Sub-envs whose episodes are still wanted, bool `[N]`; `None` is all.
        """
        broken, read = rollout.broken_in(row), rollout.written
        self._view_agents(broken)
        for i in broken:
            if (episode := self._episodes[i]) is not None:
                episode.end(False, False, read.num_rows_of(i) - 1)
                self._episodes[i] = None
            self._counts[i] += 1
        done = rollout.terminated[row] | rollout.truncated[row]
        for i in np.flatnonzero(rollout["stepped"][row]).tolist():
            if (episode := self._episodes[i]) is None or not (playing is None or playing[i]):
                continue
            if not done[i]:
                if self._every_row:
                    self._fire("on_episode_step", i)
                continue
            # After the last step comes a row of the sub-env that holds the final observation.
            stop = read.num_rows_of(i) - 1
            episode.end(bool(rollout.terminated[row, i]), bool(rollout.truncated[row, i]), stop)
            self._fire_end(i)
            self._episodes[i] = None

    def fire_begun(self, rollout: Rollout, begun: Sequence[int]) -> None:
        """Fire the events of the episodes that begin in some sub-envs, in this order; `rollout` is what they read."""
        for i in begun:
            self._create(i, rollout)
        self._view_agents(())
        for i in begun:
            self._start(i, rollout.num_rows_of(i), rollout)

    # Several agents, which join and leave the episodes.

    def _view_agents(self, broken: Sequence[int]) -> None:
        """Add views of agents that joined, and end the views of agents that ended, except in sub-envs that failed."""
        for module_id, lanes in self._lanes.items():
            viewed = self._viewed.get(module_id, np.zeros(0, np.bool_))
            viewed = np.append(viewed, np.zeros(len(lanes) - len(viewed), np.bool_))
            if not broken and np.array_equal(viewed, lanes.is_used):
                continue
            self._viewed[module_id] = lanes.is_used.copy()
            for lane in np.flatnonzero(viewed & (~lanes.is_used | np.isin(lanes.envs, broken))).tolist():
                self._end_agent(lanes, lane, lanes.envs[lane] in broken)
            for lane in np.flatnonzero(lanes.is_used & ~viewed & ~np.isin(lanes.envs, broken)).tolist():
                self._add_agent(module_id, lanes, lane)

    def _add_agent(self, module_id: str, lanes: Lanes, lane: int) -> None:
        if (episode := self._episodes[int(lanes.envs[lane])]) is None:  # it is played, but does not count
            return
        rollout = lanes.rollout
        row = int(rollout.lane_rows[lane])
        agent = episode.add_view(rollout, lane, module_id, row)
        if row == 0 and rollout.carry is not None:
            agent.continue_from(int(rollout.carry.lengths[lane]), float(rollout.carry.returns[lane]))

    def _end_agent(self, lanes: Lanes, lane: int, is_broken: bool) -> None:
        """End the view of an agent; after its steps, a row of the lane holds only an observation."""
        episode, agent_id = self._episodes[int(lanes.envs[lane])], lanes.agents[lane]
        if episode is None or agent_id not in episode.agent_episodes:
            return
        stop = int(lanes.rollout.lane_rows[lane]) - 1
        ends = () if is_broken else (lanes.rollout.terminated, lanes.rollout.truncated)
        terminated, truncated = (bool(column[stop - 1, lane]) for column in ends) if ends else (False, False)
        episode.agent_episodes[agent_id].end(terminated, truncated, stop)


def _plain_part(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of the notes that a checkpoint can hold."""
    return {name: copy_nested(value) for name, value in notes.items() if is_plain(value)}


def _plain_chunk(chunk: Any) -> dict[str, Any]:
    """Return the state of a chunk without its notes, which it shares with its episode, and with plain infos only."""
    state = {**chunk.get_state(), "custom_data": {}, "temporary_data": {}}
    for part in [state, *(agent["episode"] for agent in state.get("agents", ()))]:
        if "infos" in part:
            part["infos"] = [_plain_part(info) for info in part["infos"]]
    return state
