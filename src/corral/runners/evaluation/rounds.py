"""Evaluation rounds: which runner plays which episodes, and what happens when runners fail, stall or never end.

The episodes of a round are numbered before it begins, and a number counts when its episode has been played to its end,
wherever that was. So short episodes count no more often than long ones. Three rules keep this so when something goes
wrong: episodes of a runner that failed are played again by others; episodes of a runner that has not answered are given
to others only when it has taken several times as long as the slowest answer, because the first answer counts, and would
too often be a short episode if this came earlier; and a round that the limit ends says that it is truncated.

A round without a number is played in small pieces, of env steps where it can be, so that it ends when it is told to.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType

from corral.core.interrupts import interruptible, raise_if_ending
from corral.envs.episode_resets import EpisodeReset
from corral.errors import CorralError
from corral.runners.evaluation.episodes import PlayedEpisode, PlayedEpisodes, describe_episodes, describe_with_videos
from corral.runners.requests import SampleRequest
from corral.runners.runner_group import EnvRunnerGroup
from corral.runners.runner_handle import PendingSample

log = logging.getLogger("corral")

# Seconds after the time limit in which the answers of runners that ended there arrive.
GRACE_S = 0.3
# Seconds between two looks at all runners; in between, only those that have answered are looked at.
POLL_S = 0.05
# Failures of a runner after which a round gives it nothing more; a restart takes seconds.
MAX_FAILURES = 2
# Parts in which what a runner has to do of a number of env steps is handed out in pieces, or given to others.
NUM_PARTS = 8
# A runner that takes so many times as long as the slowest answer, and so many seconds at least, is not waited for.
PATIENCE_FACTOR, PATIENCE_S = 4.0, 0.5
# The same where episodes are handed out in pieces.
PIECE_PATIENCE_FACTOR, PIECE_PATIENCE_S = 2.0, 0.25
# Seconds that a piece of a round without a number takes, about; and the most by which the next piece is larger.
PIECE_S, PIECE_GROWTH = 0.05, 8
# Seconds after the end of training in which a round without a number lets the episodes under way end.
END_S = 0.2
# Part of the episodes that may be unfinished when a number of env steps ends, before the log warns of it.
UNFINISHED_PART = 0.1


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """What an evaluation round plays. Give one of the two numbers, or none to play as long as a function says.

    Attributes:
        num_episodes: Episodes, exactly.
        num_timesteps: Env steps, rounded up so that all sub-envs of all runners take the same number.
        in_pieces: Whether runners are given one episode per sub-env at a time. Otherwise each is given its whole part
            at once.
        force_reset: Whether env steps begin with a reset of all sub-envs. Episodes always do.
        cuts_episodes: Whether a round without a number ends at once, in the middle of episodes. Otherwise those that
            are under way may end within `END_S`, so that statistics favour short episodes only if others take longer.
        resets: Reset arguments of the episodes, in turn; `None` leaves them to the runners.
        num_videos: Number of episodes that are recorded, the first ones.
        timestep: Env steps that training has sampled, which schedules of the exploration use.
        training_iteration: Finished iterations of training, which `env_reset_fn` may ask for.
        time_limit_s: Seconds that the round may take. Without a number, they count from when it last continued, and
            every request to a runner has the same limit.
    """

    num_episodes: int | None = None
    num_timesteps: int | None = None
    in_pieces: bool = False
    force_reset: bool = True
    cuts_episodes: bool = False
    resets: Sequence[EpisodeReset] | None = None
    num_videos: int = 0
    timestep: int = 0
    training_iteration: int | None = None
    time_limit_s: float = 120.0

    def __post_init__(self) -> None:
        """Refuse a plan that makes no sense."""
        if self.num_episodes is not None and self.num_timesteps is not None:
            raise CorralError("an evaluation round takes num_episodes or num_timesteps, and not both.")
        if self.resets is not None and (self.num_timesteps is not None or not self.resets):
            raise CorralError("an evaluation round of env steps takes no reset arguments: give num_episodes.")


@dataclass(frozen=True, kw_only=True)
class Round:
    """What came of an evaluation round.

    Attributes:
        episodes: The episodes in the order of their numbers; for a number of env steps, by runner and then by time.
        num_env_steps: Env steps that arrived, also of unfinished episodes.
        num_episodes_missing: Episodes that should have been played, and were not.
        missing_by_runner: By index of the runner that was given them first, the episodes that are missing, or for a
            number of env steps, the env steps.
        num_episodes_taken_over: Episodes that another runner played than the one that was given them first.
        num_unfinished_episodes: Episodes of which steps arrived, and not the last one.
        num_env_steps_of_older_weights: Env steps of the episodes that were taken before the round, with older weights.
        late: Calls for env steps that runners had not answered, by runner, which the next round may count.
        is_complete: Whether all was played that the plan asked for.
        error: The failure after which no runner was left to play what is missing, if that ended the round.
    """

    episodes: list[PlayedEpisode] = field(default_factory=list)
    num_env_steps: int = 0
    num_episodes_missing: int = 0
    missing_by_runner: dict[int, int] = field(default_factory=dict)
    num_episodes_taken_over: int = 0
    num_unfinished_episodes: int = 0
    num_env_steps_of_older_weights: int = 0
    late: dict[int, PendingSample] = field(default_factory=dict)
    is_complete: bool = True
    error: BaseException | None = None

    @property
    def truncated(self) -> bool:
        """Whether something is missing, although something was played."""
        return not self.is_complete and not self.skipped

    @property
    def skipped(self) -> bool:
        """Whether nothing was played, because there was no runner to play it."""
        return self.error is not None and not self.episodes and not self.num_env_steps


def play_round(
    group: EnvRunnerGroup,
    plan: RoundPlan,
    *,
    goes_on: Callable[[], bool] | None = None,
    is_cancelled: Callable[[], bool] = lambda: False,
    late: Mapping[int, PendingSample] = MappingProxyType({}),
) -> Round:
    """Play an evaluation round on the runners of a group, with their latest weights, and return it.

    It takes `time_limit_s` at most, and half a second more. Runners that have not answered then are left alone: they
    are given nothing until they answer, and are replaced when that takes another `time_limit_s`. An embedded runner,
    and runners of the local engine, are in this process: there the limit interrupts an env only if this is the main
    thread.

    Args:
        group: Group of evaluation runners.
        plan: What to play.
        goes_on: Without a number in the plan, a function that says whether the round continues. Every runner that is
            free is given one piece at least. When it has returned False once, the round ends within `END_S`, about.
        is_cancelled: Function that says that nobody wants the round any more; it ends with what is there.
        late: What the last round returned as `late`. Without `force_reset`, these answers count when they arrive.

    Raises:
        CorralError: The group was stopped, or there is neither a number nor a function.
        Exception: What a callback or the user's settings raised in a runner; a restart would not help.
    """
    if goes_on is None and plan.num_episodes is None and plan.num_timesteps is None:
        raise CorralError("an evaluation round takes num_episodes, num_timesteps or goes_on.")
    return _Play(group, plan, goes_on or (lambda: False), is_cancelled, late).play()


class _Play:
    """A round that is being played.

    What is to be played has numbers. A number is an episode, or some steps of all sub-envs of a runner.
    """

    def __init__(
        self,
        group: EnvRunnerGroup,
        plan: RoundPlan,
        goes_on: Callable[[], bool],
        is_cancelled: Callable[[], bool],
        late: Mapping[int, PendingSample],
    ) -> None:
        self.group, self.plan, self.goes_on, self.is_cancelled = group, plan, goes_on, is_cancelled
        self.late = {} if plan.force_reset else dict(late)
        self.num_runners = max(1, group.num_remote_workers)
        self.is_open = plan.num_episodes is None and plan.num_timesteps is None
        chooses_resets = plan.resets is not None or plan.num_videos > 0
        self.in_steps = plan.num_timesteps is not None or (self.is_open and not chooses_resets)
        self.num_numbers = plan.num_episodes or 0
        self.piece = group.num_envs  # numbers
        self.num_steps: list[int] = []  # that are left of each number, if they are steps
        if plan.num_timesteps is not None:
            rows = math.ceil(plan.num_timesteps / (self.num_runners * group.num_envs))
            count = min(rows, NUM_PARTS)
            self.num_steps = [group.num_envs * ((rows + i) // count) for i in range(count)] * self.num_runners
            self.num_numbers, self.piece = len(self.num_steps), 1
        self.waiting = deque(range(self.num_numbers))  # numbers that no runner has
        self.pending: dict[int, tuple[PendingSample, list[int]]] = {}  # numbers that a runner has, by runner
        self.looked_s = -math.inf  # at all runners
        self.answered: list[int] = []  # runners that have answered or are ready again since the last look
        self.found: dict[int, PlayedEpisode | None] = {}  # by number
        self.stepped: list[PlayedEpisode] = []  # of steps
        self.lens_before: dict[int, list[int]] = {}  # by runner, steps of its unfinished episodes before the round
        self.num_older_steps = 0
        self.slowest_s: float | None = None  # answer so far, per episode in turn of a sub-env, or per number
        # Of a round without a number: rows of the next piece, by runner; whether it ends, and the pieces handed out
        # since then, with the sub-envs of each runner whose episode has not ended.
        self.piece_rows: dict[int, int] = {}
        self.is_closing = False
        self.last_pieces: set[int] = set()
        self.open_envs: dict[int, set[int]] = {}
        self.first_runner: dict[int, int] = {}  # by number
        self.asked: set[int] = set()  # runners
        self.out: set[int] = set()  # runners that this round gives nothing more
        self.num_failures: Counter[int] = Counter()
        self.num_unfinished: Counter[int] = Counter()
        self.num_env_steps = 0
        self.error: BaseException | None = None

    @interruptible
    def play(self) -> Round:
        self.began_s = time.perf_counter()
        self.deadline_s = self.began_s + self.plan.time_limit_s
        is_anybody_left = True
        while is_anybody_left and not self.is_cancelled():
            raise_if_ending()
            now = time.perf_counter()
            if looks_at_all := now - self.looked_s >= POLL_S:
                self.looked_s = now
            self.answered += self.group.restore_runners(known_only=not looks_at_all)
            self.take()
            self.continue_or_close()
            self.hand_out(looks_at_all)
            now = time.perf_counter()
            if self.is_closing and (not self.pending or now > self.deadline_s):
                break
            if (not self.is_open and len(self.found) == self.num_numbers) or now > self.deadline_s + GRACE_S:
                break
            if self.pending:
                self.group.mail.wait_for_sample(POLL_S)
            elif now > self.deadline_s:
                break
            else:
                is_anybody_left = self.group.recovery.lost_because() is None and len(self.out) < self.num_runners
                if is_anybody_left:
                    self.group.recovery.wait(POLL_S)
        return self.result(None if is_anybody_left else self.group.recovery.lost_because() or self.error)

    def hand_out(self, looks_at_all: bool) -> None:
        """Give idle runners what no runner has, and after a while, what others have not answered."""
        answered, self.answered = self.answered, []
        found = self.group.mail.idle_runners(None if looks_at_all else answered)
        idle, late = [index for index in found if index not in self.out], self.late_numbers() if looks_at_all else []
        in_pieces = self.plan.in_pieces or self.is_open or bool(self.asked)  # else this is the first time
        for position, index in enumerate(idle):
            size = self.piece if in_pieces else math.ceil(len(self.waiting) / (len(idle) - position))
            if self.is_open and not self.waiting and self.wants_more(index):
                self.add_piece(index)
            left_s = self.deadline_s - time.perf_counter()
            if left_s > 0 and (numbers := self.next_numbers(size, late)):
                self.ask(index, numbers, left_s)

    def continue_or_close(self) -> None:
        """Ask whether an open round continues; then its time limit counts from now, and else it ends soon."""
        if self.is_open and not self.is_closing:
            self.is_closing = not self.goes_on()
            self.deadline_s = time.perf_counter() + (END_S if self.is_closing else self.plan.time_limit_s)

    def wants_more(self, index: int) -> bool:
        """Return whether a runner is given another piece of a round without a number."""
        if not self.is_closing or index not in self.asked:
            return True
        is_any_open = bool(self.open_envs.get(index, True))
        return is_any_open and self.in_steps and not self.plan.cuts_episodes

    def add_piece(self, index: int) -> None:
        """Add a piece for a runner: an episode per sub-env, or as many env steps as take some fraction of a second."""
        size = 1 if self.in_steps else self.group.num_envs
        if self.in_steps:
            self.num_steps.append(self.piece_rows.setdefault(index, 1) * self.group.num_envs)
            if self.is_closing and not self.plan.cuts_episodes:
                self.last_pieces.add(self.num_numbers)
                self.open_envs.setdefault(index, set(range(self.group.num_envs)))
        self.waiting.extend(range(self.num_numbers, self.num_numbers + size))
        self.num_numbers += size

    def next_numbers(self, size: int, late: list[int]) -> list[int]:
        """Return what a runner is to play, at most so much: what no runner has, and then what is late."""
        if self.waiting:
            return [self.waiting.popleft() for _ in range(min(size, len(self.waiting)))]
        numbers, late[:size] = late[:size], []
        return numbers

    def late_numbers(self) -> list[int]:
        """Return what one runner alone has, and has not answered for long."""
        if self.is_open:
            return []
        num_players = Counter(number for _, numbers in self.pending.values() for number in numbers)
        late = [number for call, numbers in self.pending.values() if self.is_late(call, numbers) for number in numbers]
        return [number for number in late if num_players[number] == 1 and number not in self.found]

    def is_late(self, call: PendingSample, numbers: list[int]) -> bool:
        """Return whether others play what a runner has not answered: after half of the time limit, or much earlier."""
        now = time.perf_counter()
        if self.deadline_s - now <= self.plan.time_limit_s / 2:
            return True
        if self.slowest_s is None:
            return False
        pieces = self.plan.in_pieces
        factor, least_s = (PIECE_PATIENCE_FACTOR, PIECE_PATIENCE_S) if pieces else (PATIENCE_FACTOR, PATIENCE_S)
        return now - call.asked_s > max(least_s, factor * self.slowest_s * self.num_turns(numbers))

    def num_turns(self, numbers: list[int]) -> int:
        """Return how many numbers a runner plays one after the other, if episodes of its sub-envs run side by side."""
        return len(numbers) if self.in_steps else math.ceil(len(numbers) / self.group.num_envs)

    def ask(self, index: int, numbers: list[int], left_s: float) -> None:
        """Let a runner play."""
        limit_s = self.plan.time_limit_s if self.is_open else left_s  # the next round may continue an open one
        if self.group.engine_name == "local" and len(self.out) < self.num_runners - 1:
            limit_s = min(limit_s, self.plan.time_limit_s / 2)  # so that there is time for the others
        whole = SampleRequest(
            num_episodes=len(numbers),
            timestep=self.plan.timestep,
            training_iteration=self.plan.training_iteration,
            time_limit_s=limit_s,
            digest=describe_episodes,
        )
        if self.in_steps:
            num_timesteps = sum(self.num_steps[number] for number in numbers)
            force_reset = index not in self.asked
            request = replace(
                whole,
                num_episodes=None,
                num_timesteps=num_timesteps,
                force_reset=force_reset and self.plan.force_reset,
            )
        elif self.plan.resets is not None or min(numbers) < self.plan.num_videos:
            digest = describe_with_videos if min(numbers) < self.plan.num_videos else describe_episodes
            request = replace(whole, resets=tuple(self.reset_of(number) for number in numbers), digest=digest)
        else:
            request = whole
        call = self.group.mail.ask(index, request, timeout_s=left_s + self.plan.time_limit_s)
        self.pending[index] = call, numbers
        self.asked.add(index)
        for number in numbers:
            self.first_runner.setdefault(number, index)

    def reset_of(self, number: int) -> EpisodeReset:
        reset = EpisodeReset() if self.plan.resets is None else self.plan.resets[number % len(self.plan.resets)]
        return replace(reset, is_recorded=True) if number < self.plan.num_videos else reset

    def take(self) -> None:
        """Receive answers; what a runner did not play waits for another."""
        for index, call, reply in self.group.mail.take_replies():
            if index not in self.pending or self.pending[index][0] is not call:  # an answer to an earlier round
                if self.late.pop(index, None) is call and not isinstance(reply, BaseException):
                    self.group.mail.keep_logged(index, reply.metrics, reply.seconds)
                    self.note_late(reply.rollout)
                continue
            _, numbers = self.pending.pop(index)
            self.answered.append(index)
            if isinstance(reply, BaseException):
                self.error = reply
                self.num_failures[index] += 1
            else:
                self.group.mail.keep_logged(index, reply.metrics, reply.seconds)
                seconds = time.perf_counter() - call.asked_s
                self.slowest_s = max(self.slowest_s or 0.0, seconds / self.num_turns(numbers))
                self.plan_next_piece(index, seconds)
                self.note(index, numbers, reply.rollout)
            missing = [number for number in numbers if number not in self.found]
            if missing:
                elsewhere = {number for _, others in self.pending.values() for number in others}
                missing = [number for number in missing if number not in elsewhere]
            if not (self.is_open and self.in_steps):
                self.waiting.extendleft(reversed(missing))
            if self.num_failures[index] == MAX_FAILURES or (missing and not isinstance(reply, BaseException)):
                self.out.add(index)  # it fails again and again, or its limit ended it

    def note(self, index: int, numbers: list[int], played: PlayedEpisodes) -> None:
        """Note what a runner played."""
        self.num_env_steps += played.num_env_steps
        if self.in_steps:
            self.num_unfinished[index] = played.num_unfinished  # its next steps continue these episodes
            before = self.lens_before.setdefault(index, list(played.lens_before))
            for episode in played.episodes:
                if numbers[0] in self.last_pieces:
                    if episode.env_index not in self.open_envs[index]:
                        continue  # of the episodes that begin now, only short ones would end in time
                    self.open_envs[index].remove(episode.env_index)
                self.stepped.append(episode)
                self.num_older_steps += before[episode.env_index]
                before[episode.env_index] = 0
            if numbers[0] in self.last_pieces:
                self.num_unfinished[index] = len(self.open_envs[index])
            left = played.num_env_steps
            for number in numbers:
                taken = min(left, self.num_steps[number])
                left, self.num_steps[number] = left - taken, self.num_steps[number] - taken
                if self.num_steps[number] == 0:
                    self.found[number] = None
            return
        self.num_unfinished[index] += played.num_unfinished
        for position, episode in zip(played.positions, played.episodes, strict=True):
            number = numbers[position]
            if self.plan.resets is not None:
                reset = self.reset_of(number)
                episode = replace(episode, seed=reset.seed, task=reset.task)
            self.found.setdefault(number, episode)

    def note_late(self, played: PlayedEpisodes) -> None:
        """Note what a runner played for the round before this one."""
        self.num_env_steps += played.num_env_steps
        self.stepped += played.episodes
        self.num_older_steps += sum(episode.episode_len for episode in played.episodes)

    def plan_next_piece(self, index: int, seconds: float) -> None:
        """Choose the size of the next piece of a runner by the seconds of the last one."""
        if index in self.piece_rows:
            rows = self.piece_rows[index]
            self.piece_rows[index] = max(1, min(rows * PIECE_GROWTH, int(rows * PIECE_S / seconds)))

    def result(self, error: BaseException | None) -> Round:
        missing = [number for number in range(self.num_numbers) if number not in self.found]
        by_runner: Counter[int] = Counter()
        for number in missing:
            if number in self.first_runner:
                by_runner[self.first_runner[number]] += self.num_steps[number] if self.num_steps else 1
        played = [(number, self.found[number]) for number in sorted(self.found)]
        episodes = [episode for _, episode in played if episode is not None]
        result = Round(
            episodes=episodes or sorted(self.stepped, key=lambda episode: episode.worker_index),
            num_env_steps=self.num_env_steps,
            num_episodes_missing=0 if self.in_steps else len(missing),
            missing_by_runner=dict(sorted(by_runner.items())),
            num_episodes_taken_over=sum(
                episode is not None and episode.worker_index != self.first_runner[number] for number, episode in played
            ),
            num_unfinished_episodes=self.num_unfinished.total(),
            num_env_steps_of_older_weights=self.num_older_steps,
            late=self.late | {index: call for index, (call, _) in self.pending.items()} if self.in_steps else {},
            # A round without a number has played what it could in its time, if it has played anything.
            is_complete=bool(self.found) if self.is_open else not missing and self.num_numbers > 0,
            error=error,
        )
        if self.in_steps and self.plan.force_reset:
            _warn_of_unfinished(result)
        return result


def _warn_of_unfinished(result: Round) -> None:
    """Warn if many episodes are unfinished, which are long ones more often than short ones."""
    unfinished, complete = result.num_unfinished_episodes, len(result.episodes)
    if unfinished > UNFINISHED_PART * (unfinished + complete):
        _warn_once(
            "evaluation: the end of the round cut off more than one in ten episodes, and most of all long ones: their "
            "returns are missing in the statistics. Set evaluation_duration to a number of episodes, with "
            "evaluation_duration_unit='episodes'; or continue them in the next round, with 'timesteps' and "
            "evaluation_force_reset_envs_before_iteration=False."
        )


@cache
def _warn_once(message: str) -> None:
    log.warning(message)
