"""How a runner samples from simulators in other programs, which ask for actions at their own pace.

A row is one exchange of messages: what clients sent closes steps and brings observations, and the next row begins with
the actions for them. The lanes have clocks of their own, as the lanes of several agents have, so that a client that is
slow costs the others nothing. Observations that come when a sample is over wait for the next one, and get its weights.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium.spaces import Box
from numpy.typing import NDArray

from corral.core.action_masks import NO_LEGAL_ACTION, first_illegal, legal_actions
from corral.core.ids import DEFAULT_MODULE_ID
from corral.core.interrupts import interruptible
from corral.core.spaces import blank_array
from corral.core.tree import Tree, map_tree
from corral.data.episodes.infos import Infos
from corral.data.episodes.rollout import Rollout
from corral.data.episodes.step_columns import outcomes
from corral.errors import CorralError
from corral.runners.lanes import Lanes
from corral.runners.requests import Episodes, SampleMode, SampleRequest, make_mode
from corral.runners.serving.client import pack_message
from corral.runners.serving.messages import Entries
from corral.runners.stepping import Stepping

if TYPE_CHECKING:
    from corral.runners.policy_file import PolicyFile
    from corral.runners.serving.server import PolicyServer
    from corral.runners.serving.sessions import Session

log = logging.getLogger("corral")

MIN_LOGP = -30.0
"""The smallest log-likelihood of an action that a client took by the policy, less 5 for each number of the action."""
WAIT_S = 0.2
"""Seconds after which waiting for clients is interrupted, to look at the clock."""


@dataclass
class Wave:
    """What clients report in one row: at most one step of a seat, and one episode that begins there.

    Attributes:
        entries: Entries whose `envs` are seats; the actions of clients that acted themselves are in `acted`.
        acted: Entries of these clients, one for each.
        session_ends: Sessions whose latest message has no later waves, with the seats that want an action, in order.
    """

    entries: Entries
    acted: list[Entries]
    session_ends: list[tuple[Session, NDArray[np.int64]]]


class FirstEpisodes(Episodes):
    """Exactly so many episodes: the first ones that begin, so that short ones are not preferred.

    An episode whose client left does not count, and the next one that begins takes its place.
    """

    def num_rows_wanted(self, rollout: Rollout) -> int:
        """Return 1, because any row may be the last, until all of these episodes are over."""
        if self.playing is None:
            self.playing, self._num_over = np.zeros(rollout.num_envs, np.bool_), 0
        return int(self._num_over < self._num_wanted)

    def settle(self, rollout: Rollout) -> None:
        """Fill `valid` of the last row, and choose the episodes that begin in it while some are wanted."""
        SampleMode.settle(self, rollout)
        assert self.playing is not None
        last = rollout.num_rows - 1
        rollout.valid[last] &= self.playing
        ended = rollout.valid[last] & rollout.done[last]
        self._num_over += int(np.count_nonzero(ended))
        self.playing = self.playing & ~ended
        self.playing[rollout.broken_in(last)] = False
        self._drop_broken(rollout)
        for seat in self.begun:
            if self._num_over + np.count_nonzero(self.playing) < self._num_wanted:
                self.playing[seat] = True


class ServedStepping(Stepping):
    """Exchanges messages with the clients of a policy server, and writes the steps that they report."""

    RESETS_AFTER_CUT = False
    HAS_METRICS = True
    BEGINS_EPISODES = False

    def __init__(self, *args: Any, **tools: Any) -> None:
        """Take the arguments of `Stepping`; the env is an `ExternalEnv`."""
        super().__init__(*args, **tools)
        num_seats = self.host.num_envs
        self._in_episode = np.zeros(num_seats, np.bool_)
        # Seats whose episode does not count: it began before the last reset, or its client said so.
        self._stale = np.zeros(num_seats, np.bool_)
        self._waves: deque[Wave] = deque()
        self._owed: list[tuple[Session, NDArray[np.int64]]] = []
        self._own = np.zeros(num_seats, np.bool_)  # seats whose client took its action itself
        self._by_policy = np.zeros(num_seats, np.bool_)  # seats whose client drew it with the policy they were sent
        self._versions = np.zeros(num_seats, np.int64)  # of the weights with which they did
        self._policy_file: PolicyFile | None = None
        self._policy_message: tuple[Any, bytes] | None = None  # the latest one, and what it is made of
        self._lags: list[int] = []  # in this sample, updates by which the weights of clients that act were older
        self._make_lanes()

    @property
    def _server(self) -> PolicyServer:
        server: PolicyServer = self.host.env.server  # type: ignore[attr-defined]
        return server

    def _make_lanes(self) -> None:
        """Make a lane for each seat, for the only module."""
        host, num_seats = self.host, self.host.num_envs
        self._actor = actor = self.actors[DEFAULT_MODULE_ID]
        self._lanes = Lanes(
            np.zeros(1, np.int64),
            [DEFAULT_MODULE_ID],
            num_envs=num_seats,
            block_size=1,
            observation_space=host.observation_space,
            action_space=actor.action_space,
            distribution=actor.distribution,
            history=actor.history,
            counts_by_end=True,
        )
        self._obs: Tree = map_tree(lambda space: blank_array(space, num_seats, 1), host.space)
        distribution = actor.distribution
        self._own_actions = np.zeros((num_seats, *distribution.action_shape), distribution.action_dtype)
        self._own_outputs = np.zeros((num_seats, distribution.num_inputs), np.float32)
        self._server.output_space = Box(-np.inf, np.inf, (distribution.num_inputs,))
        self._env_actions: Tree = map_tree(np.array, distribution.to_env(self._own_actions))
        self._log_lags()  # now, so that user code cannot take the names

    def get_metrics(self) -> dict[Any, float]:
        """Return the numbers of the clients."""
        return {
            "num_clients": float(sum(one.connection is not None for one in self._server.sessions.values())),
            "num_episodes_dropped_by_clients": float(self._server.num_dropped),
        }

    def _log_lags(self) -> None:
        """Log the lags of the actions in this sample, which are in the result over all samples of an iteration."""
        lags, self._lags = self._lags, []
        self.metrics.log_reserved({"policy_lag_mean": lags}, "mean")
        self.metrics.log_reserved({"policy_lag_max": lags}, "max")

    @staticmethod
    def make_mode(request: SampleRequest, *, whole_episodes: bool, name: str) -> SampleMode:
        """Return how far a sample goes; of a number of episodes, the first ones that begin count."""
        if request.num_episodes is not None:
            return FirstEpisodes(request.num_episodes, name)
        return make_mode(request, whole_episodes=whole_episodes, name=name)

    # A rollout.

    def allocate(self, num_rows: int) -> Rollout:
        """Return the record of the exchanges, with room for so many rows; see `Rollout.written`."""
        columns = outcomes(num_rows, self.host.num_envs)
        record = Rollout(columns | {"stepped": np.empty_like(columns["valid"])})
        record.same_step = True  # no row only resets a seat
        return record

    def _enter(self, rollout: Rollout) -> None:
        """Begin the rollout that is handed out; the totals of earlier episodes do not count after a reset."""
        self._server.weights_version = rollout.weights_version
        if not rollout.continues:
            self._lanes.begin_counting()
        self._lanes.begin(rollout.capacity, rollout)
        rollout.written = self._lanes.rollout
        rollout.written.episode_class = rollout.episode_class

    def begin(self, rollout: Rollout) -> None:
        """Count episodes that begin from now on. Clients cannot be reset, so they play the others to their ends."""
        self._stale |= self._in_episode
        self._enter(rollout)

    def receive_reset(self, rollout: Rollout, obs: Any) -> None:
        """Do nothing: first observations come from clients."""

    def resume(self, rollout: Rollout) -> None:
        """Begin with the steps that are open, and the observations that wait for actions."""
        self._enter(rollout)

    @interruptible
    def step_rows(self, rollout: Rollout, num_rows: int, mode: SampleMode) -> None:
        """Exchange messages with clients until `num_rows` rows are written, or nothing comes for a moment."""
        clock, seconds, start, events = time.perf_counter, self.timers.seconds, rollout.num_rows, self.events
        timestep = mode.timestep + mode.num_samplers * mode.num_steps
        while rollout.num_rows < start + num_rows:
            began = clock()
            # Actions for the seats that wait for one, and answers to the clients that wait for them.
            self._act(timestep, mode)
            if self._server.lacking or self._owed:
                self._answer(timestep, mode)
            inferred = clock()
            wave, dropped = self._next_wave()
            arrived = clock()
            seconds["inference"] += inferred - began
            seconds["env_step"] += arrived - inferred
            if wave is None and not dropped:
                break
            # What came is a row: first the steps that it closes, then the episodes that begin.
            row, begun = rollout.num_rows, list[int]()
            for column in rollout.columns.values():
                column[row] = 0
            rollout.row_times_s[row] = arrived
            rollout.num_rows = row + 1
            self._drop(rollout, row, dropped)
            if wave is not None:
                timestep += mode.num_samplers * self._apply_steps(rollout, row, wave.entries, mode)
            fired = clock()
            if events is not None:
                events.fire_steps(rollout, row, mode.playing)
            stored = clock()
            if wave is not None:
                begun = self._begin_episodes(rollout, row, wave.entries, mode)
                self._note_answers(wave)
            mode.begun, mode.unfinished = begun, self._in_episode & ~self._stale
            after = clock()
            seconds["storage"] += after - arrived - (stored - fired)
            if events is not None:
                events.fire_begun(rollout.written, begun)
                seconds["callbacks"] += clock() - after + (stored - fired)
        if rollout.num_rows > start:
            mode.settle(rollout)

    # Actions.

    def _act(self, timestep: int, mode: SampleMode) -> None:
        """Choose the actions of the seats that wait for one."""
        actor, lanes, own, by_policy = self._actor, self._lanes, self._own, self._by_policy
        if not np.count_nonzero(lanes.acts):
            return
        num_own = np.count_nonzero(own)
        if num_own and np.count_nonzero(by_policy) == np.count_nonzero(lanes.acts):
            actions, outputs, logp = self._own_actions, self._own_outputs, None
        else:
            actions, outputs, logp = actor.choose_in_lanes(lanes, timestep, mode)
            if num_own:
                actions = np.where(_like(own, actions), self._own_actions, actions)
                outputs = np.where(by_policy[:, None], self._own_outputs, outputs)
                logp = None if logp is None else np.where(own, np.nan, logp)
        if num_own:
            self._lags += (self._server.weights_version - self._versions[by_policy]).tolist()
            own[:] = by_policy[:] = False
        acting = lanes.act(actions, outputs, logp)
        env_actions = actor.distribution.to_env(actions)
        map_tree(lambda here, now: here.__setitem__(acting, now[acting]), self._env_actions, env_actions)

    def _answer(self, timestep: int, mode: SampleMode) -> None:
        """Send the actions to the clients that wait for them, and the policy to those that act by it."""
        server, owed = self._server, self._owed
        lacking, self._owed, server.lacking = server.lacking, [], []
        for session in (*lacking, *(session for session, _ in owed if session.wants_policy)):
            self._send_policy(session, timestep, mode)
        for session, seats in owed:
            self._send_actions(session, seats)

    def _send_actions(self, session: Session, seats: NDArray[np.int64]) -> None:
        """Answer a client that wants actions for some of its seats."""
        self._server.answer(session, map_tree(lambda leaf: leaf[seats], self._env_actions))

    def _send_policy(self, session: Session, timestep: int, mode: SampleMode) -> None:
        """Send a client the policy of now, if it has another one."""
        server = self._server
        try:
            if self._policy_file is None:
                from corral.runners.policy_file import PolicyFile

                self._policy_file = PolicyFile(self._actor)
        except CorralError as error:
            server.cut_off(session, "policy", str(error))
            return
        how: dict[str, Any] = {"timestep": timestep, "explore": mode.explore, "random_actions": mode.random_actions}
        noise = self._policy_file.describe(**how)
        if server.needs_policy(session, policy := (server.weights_version, *noise)):
            if self._policy_message is None or self._policy_message[0] != policy:
                fields = {"num_uniform": self._policy_file.num_uniform, "model": self._policy_file.write(*noise)}
                message = {"type": "policy", "weights_version": server.weights_version, **fields}
                self._policy_message = policy, pack_message(message)
            server.send_policy(session, *self._policy_message)

    # What clients report.

    def _next_wave(self) -> tuple[Wave | None, list[int]]:
        """Return what comes next, and the seats whose episodes ended without a last step; wait a moment for it."""
        received = self._server.receive(0.0 if self._waves else WAIT_S)
        if received.dropped:
            gone = np.array(received.dropped)
            for wave in self._waves:
                wave.entries = _without(wave.entries, gone)
                wave.acted = [_without(part, gone) for part in wave.acted]
        self._waves.extend(self._waves_of(received.entries))
        while self._waves:
            wave = self._waves.popleft()
            if len(wave.entries) or wave.session_ends:
                return wave, received.dropped
        return None, received.dropped

    def _waves_of(self, messages: list[tuple[Session, Entries]]) -> Iterator[Wave]:
        """Return messages of several clients in the order of time, with at most one step of each seat in a wave."""
        waves: list[list[Entries]] = []
        ends: list[list[tuple[Session, NDArray[np.int64]]]] = []
        for session, entries in messages:
            parts = self._parts_of(session, entries)
            if not parts:
                continue
            for index, part in enumerate(parts):
                if index == len(waves):
                    waves.append([])
                    ends.append([])
                waves[index].append(part)
            wants = entries.envs[:0] if entries.is_acted else entries.envs[~entries.ends]
            ends[len(parts) - 1].append((session, wants))
        for parts, sessions in zip(waves, ends, strict=True):
            yield Wave(join_entries(parts), [part for part in parts if part.is_acted], sessions)

    def _parts_of(self, session: Session, entries: Entries) -> list[Entries]:
        """Return a message in parts, one after another in time; cut off the client of one that cannot be used.

        All that depends on what the client chose is computed here, so that what fails costs this client only.
        """
        try:
            entries.envs = session.seats[entries.envs]
            problem = self._problem_of(entries)
            if not problem:
                return list(_split(entries))
        except Exception as error:  # of values for which no check was thought of
            log.debug("policy server: a message cannot be used.", exc_info=True)
            problem = f"steps: cannot be used: {type(error).__name__}: {error}"
        self._server.cut_off(session, "protocol", problem)
        return []

    def _problem_of(self, entries: Entries) -> str:
        """Return why a message cannot be used, or an empty text; note the module actions that its client took."""
        actor, acts = self._actor, ~entries.ends
        if entries.actions is not None and self.config.ON_POLICY:
            return (
                "steps.actions: the algorithm learns only from actions of its own policy: ask for actions, or use an "
                "off-policy algorithm such as DQN or SAC."
            )
        if actor.has_action_mask and (stuck := actor.first_without_choice(entries.obs, acts)) is not None:
            return f"steps.obs[{stuck}]: {NO_LEGAL_ACTION}."
        if entries.is_acted:
            distribution = actor.distribution
            if entries.draws is None:
                name, taken = "actions", distribution.from_env(entries.actions)
            else:
                name, taken = "draws", distribution.mode(entries.draws)
            finite = np.isfinite(taken.reshape(len(acts), -1)).all(1) | entries.ends
            if not finite.all():
                return f"steps.{name}[{int(finite.argmin())}]: stands for an action that is NaN or infinite."
            if actor.has_action_mask and (illegal := self._first_illegal(entries, taken)) is not None:
                return f"steps: the action of entry {illegal} is illegal by the action mask of its observation."
            if entries.outputs is not None and self.config.ON_POLICY:
                if (unlikely := self._first_unlikely(entries.outputs, taken, acts)) is not None:
                    return (
                        f"steps.draws[{unlikely}]: stands for an action that a policy with these outputs never draws."
                    )
            entries.taken = taken
        return ""

    def _first_unlikely(self, outputs: NDArray[np.float32], taken: NDArray[Any], acts: NDArray[np.bool_]) -> int | None:
        """Return the first entry whose action has a likelihood of almost 0: a ratio of likelihoods would overflow."""
        with torch.no_grad():
            logp = self._actor.distribution.logp(torch.from_numpy(outputs[acts]), torch.from_numpy(taken[acts])).numpy()
        bad = np.flatnonzero(acts)[~(logp >= MIN_LOGP - 5 * math.prod(taken.shape[1:]))]
        return int(bad[0]) if len(bad) else None

    def _first_illegal(self, entries: Entries, taken: NDArray[Any]) -> int | None:
        """Return the first entry whose client took an action that the mask of its observation does not allow."""
        legal = legal_actions(entries.obs) | entries.ends[:, None]  # an entry that ended has no action
        return first_illegal(legal, self._actor.action_space, taken)

    def _apply_steps(self, rollout: Rollout, row: int, entries: Entries, mode: SampleMode) -> int:
        """Write the steps that a wave reports, and return their number."""
        steps = _take(entries, ~entries.begins) if np.count_nonzero(entries.begins) else entries
        if not len(steps):
            return 0
        self._write_steps(rollout, row, steps)
        self._receive(rollout, row, steps, mode)
        if np.count_nonzero(ends := steps.ends):
            over = steps.envs[ends]
            self._in_episode[over] = self._stale[over] = False
        return len(steps)

    def _write_steps(self, rollout: Rollout, row: int, steps: Entries) -> None:
        """Write what belongs to the seats, not to agents."""
        seats = steps.envs
        rollout.rewards[row, seats] = steps.rewards
        rollout.terminated[row, seats], rollout.truncated[row, seats] = steps.terminated, steps.truncated
        rollout.columns["stepped"][row, seats] = ~self._stale[seats]

    def _begin_episodes(self, rollout: Rollout, row: int, entries: Entries, mode: SampleMode) -> list[int]:
        """Begin the episodes of a wave with their first observations, and return the seats of those that count."""
        if not np.count_nonzero(entries.begins):
            return []
        begun = _take(entries, entries.begins)
        seats = begun.envs
        self._use(seats)
        self._in_episode[seats] = True
        if begun.counts is not None:
            self._stale[seats] = ~begun.counts
        self._receive(rollout, row, begun, mode)
        counted: list[int] = seats[~self._stale[seats]].tolist()
        return counted

    def _use(self, seats: NDArray[np.int64]) -> None:
        """Let the module act in episodes that begin."""
        for seat in seats.tolist():
            self._lanes.use(seat, 0, 0.0)

    def _note_answers(self, wave: Wave) -> None:
        """Note which clients wait for an answer to a wave, and the actions that others took themselves."""
        self._owed += wave.session_ends
        for part in wave.acted:
            self._note_actions(part)

    def _receive(self, rollout: Rollout, row: int, entries: Entries, mode: SampleMode) -> None:
        """Give the observations of some seats to the lanes."""
        seats, shape = entries.envs, (self.host.num_envs, 1)
        map_tree(lambda here, given: here.__setitem__((seats, 0), given), self._obs, entries.obs)
        observed, terminated, truncated = (np.zeros(shape, np.bool_) for _ in range(3))
        rewards = np.zeros(shape)
        observed[seats, 0], rewards[seats, 0] = True, entries.rewards
        terminated[seats, 0], truncated[seats, 0] = entries.terminated, entries.truncated
        self._lanes.receive(self._obs, observed, rewards, terminated, truncated, terminated | truncated)
        if entries.infos is not None and mode.keeps_infos:
            pairs = zip(seats.tolist(), entries.infos, strict=True)
            found = rollout.info_rows.setdefault(row + 1, Infos({}))
            found.of_lanes.update({seat: info for seat, info in pairs if info})

    def _note_actions(self, entries: Entries) -> None:
        """Note the actions that a client took itself."""
        acts = ~entries.ends
        seats = entries.envs[acts]
        self._own[seats] = True
        assert entries.taken is not None
        self._own_actions[seats] = entries.taken[acts]
        if entries.outputs is not None:
            self._by_policy[seats], self._own_outputs[seats] = True, entries.outputs[acts]
            self._versions[seats] = entries.weights_version

    def _drop(self, rollout: Rollout, row: int, seats: list[int]) -> None:
        """Forget the episodes of clients that left."""
        for seat in seats:
            if not self._in_episode[seat]:
                continue
            self._drop_seat(rollout, seat)
            if not self._stale[seat]:
                rollout.broken.append((row, seat))
            self._in_episode[seat] = self._stale[seat] = self._own[seat] = self._by_policy[seat] = False

    def _drop_seat(self, rollout: Rollout, seat: int) -> None:
        """Drop the open step of the episode of a seat."""
        self._lanes.drop(seat)

    def finish(self, rollout: Rollout, mode: SampleMode) -> Rollout:
        """Return the complete rollout of the lanes, which keep the latest observations and the open steps."""
        if rollout.written is None:  # no step was asked for
            nothing = Rollout.allocate(0, self.host.num_envs, self.host.space, self._actor.distribution)
            self.complete(DEFAULT_MODULE_ID, nothing, mode)
            return nothing
        assert rollout.carry is not None
        if self._lags:
            self._log_lags()
        notes = self._lanes.rollout.notes
        part = self._lanes.finish(rollout)
        assert part.carry is not None
        part.carry = replace(part.carry, id_prefix=rollout.carry.id_prefix, start_times_s=rollout.carry.start_times_s)
        # Of the exchanges, what is handed out needs the times of the rows, and the infos.
        part.parent = Rollout({"row_times_s": rollout.row_times_s}, num_rows=rollout.num_rows)
        part.parent.info_rows = part.info_rows = rollout.info_rows
        # Else the record and what was written would hold each other, and stay in memory.
        self._lanes.rollout.parent = part.parent
        part.notes, part.episode_class, part.module_id = notes, rollout.episode_class, DEFAULT_MODULE_ID
        part.pipeline = None if self._actor.transforms is None else self._actor.transforms.pipeline
        self.complete(DEFAULT_MODULE_ID, part, mode)
        return part

    # State: clients of another process are gone, so that nothing of their episodes can continue.

    def get_unfinished(self) -> dict[str, Any]:
        """Return nothing: the episodes are in the clients."""
        return {}

    def check_unfinished(self, state: Mapping[str, Any]) -> None:
        """Accept any state, which is not used."""

    def set_unfinished(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""


_COLUMNS = [field.name for field in fields(Entries) if field.name not in ("infos", "weights_version")]


def _like(flags: NDArray[np.bool_], array: NDArray[Any]) -> NDArray[np.bool_]:
    """Return flags `[N]` with as many axes as an array `[N, ...]`."""
    return flags.reshape(-1, *[1] * (array.ndim - 1))


def _take(entries: Entries, index: NDArray[Any]) -> Entries:
    """Return some of the entries."""
    infos = entries.infos
    if infos is not None:
        infos = [infos[i] for i in np.arange(len(entries))[index].tolist()]
    columns = {
        name: map_tree(lambda leaf: leaf[index], value)
        for name in _COLUMNS
        if (value := getattr(entries, name)) is not None
    }
    return Entries(**columns, weights_version=entries.weights_version, infos=infos)


def _without(entries: Entries, seats: NDArray[np.int64]) -> Entries:
    return _take(entries, ~np.isin(entries.envs, seats))


def join_entries(parts: list[Entries]) -> Entries:
    """Return the entries of several clients, without actions that they took themselves."""
    if len(parts) == 1:
        return parts[0]
    columns = {
        name: map_tree(lambda *leaf: np.concatenate(leaf), *(getattr(part, name) for part in parts))
        for name in ("envs", "obs", "rewards", "begins", "terminated", "truncated")
    }
    infos, counts = None, None
    if any(part.infos is not None for part in parts):
        infos = [info for part in parts for info in (part.infos or [{}] * len(part))]
    if any(part.counts is not None for part in parts):
        counts = np.concatenate([np.ones(len(p), np.bool_) if p.counts is None else p.counts for p in parts])
    return Entries(**columns, infos=infos, counts=counts)


def _split(entries: Entries) -> Iterator[Entries]:
    """Return the entries in parts, one after the other in time, with at most one step of each seat in a part."""
    if len(entries) == 1 or len(np.unique(entries.envs)) == len(entries):
        yield entries
        return
    part_of, latest = np.zeros(len(entries), np.int64), dict[int, int]()
    for index, (seat, begins) in enumerate(zip(entries.envs.tolist(), entries.begins.tolist(), strict=True)):
        before = latest.get(seat, -1)
        part_of[index] = latest[seat] = max(before, 0) if begins else before + 1
    for part in range(int(part_of.max()) + 1):
        yield _take(entries, part_of == part)
