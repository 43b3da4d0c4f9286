"""Rollouts with known content, and what a replay buffer must make of them, in plain Python."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corral.core.tree import leaves
from corral.data.episodes.rollout import Rollout
from corral.data.replay import ReplayBuffer


class Stream:
    """The rollouts of one runner, drawn at random: no two observations are alike.

    `nested` makes observations dicts of a tuple; `end_rate` and `broken_rate` are probabilities per step.
    """

    def __init__(
        self,
        num_envs: int = 2,
        *,
        worker_index: int = 0,
        same_step: bool = False,
        nested: bool = False,
        end_rate: float = 0.3,
        broken_rate: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._n, self._worker, self._same_step, self._nested = num_envs, worker_index, same_step, nested
        self._end_rate, self._broken_rate = end_rate, broken_rate
        self._rng = np.random.default_rng([seed, worker_index])
        self._count = 0
        self._fresh = True
        self._last = self._observe()
        self._pending = np.zeros(num_envs, np.bool_)

    def _observe(self) -> NDArray[np.float32]:
        self._count += 1
        return np.array([[self._worker, n, self._count] for n in range(self._n)], np.float32)

    def _tree(self, obs: NDArray[np.float32]) -> Any:
        return {"a": (obs, (obs[..., 2:] % 200).astype(np.uint8)), "b": obs[..., 0] * 0.5} if self._nested else obs

    def next(self, num_rows: int, *, reset: bool = False, **added: Any) -> Rollout:
        """Return the next rollout; with `reset` all envs are reset first."""
        if reset:
            self._fresh, self._last, self._pending = True, self._observe(), np.zeros(self._n, np.bool_)
        shape, rng = (num_rows, self._n), self._rng
        obs, final, broken = [self._last], {}, []
        terminated, truncated, valid = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_), np.ones(shape, np.bool_)
        for t in range(num_rows):
            valid[t] = ~self._pending
            row, ended = self._observe(), rng.random(self._n) < self._end_rate
            for n in np.flatnonzero(valid[t]):
                if rng.random() < self._broken_rate:
                    valid[t, n] = False
                    broken.append((t, int(n)))
                elif ended[n]:
                    terminated[t, n], truncated[t, n] = [(True, False), (False, True), (True, True)][rng.integers(3)]
                    if self._same_step:
                        final[t, int(n)] = row[n].copy() + np.float32([0, 0, 0.5])
            self._pending = (terminated[t] | truncated[t]) & (not self._same_step)
            obs.append(row)
        columns = {
            "obs": self._tree(np.stack(obs)),
            "actions": rng.integers(0, 9, shape),
            "rewards": rng.normal(size=shape),
            "terminated": terminated,
            "truncated": truncated,
            "valid": valid,
            "dist_inputs": np.zeros((*shape, 2), np.float32),
            "row_times_s": np.zeros(num_rows),
            **added,
        }
        rollout = Rollout(columns, num_rows=num_rows)
        for (t, n), leaf in final.items():
            rollout.add_final_obs(t, n, self._tree(leaf))
        rollout.worker_index, rollout.broken = self._worker, broken
        rollout.continues, self._fresh, self._last = not self._fresh, False, obs[-1]
        return rollout


class Step(NamedTuple):
    """One transition."""

    obs: bytes
    action: int
    reward: float
    next_obs: bytes
    terminated: bool
    truncated: bool


class Reference:
    """The slow, obvious buffer: for each runner a list of rows, each with a `Step` or `None` for every sub-env."""

    def __init__(self, capacity: int, *, num_runners: int = 1, frame_stack: int = 1) -> None:
        self._capacity, self._num_runners, self._gap = capacity, num_runners, frame_stack
        self.rows: dict[int, list[list[Step | None]]] = {}

    def add(self, rollout: Rollout) -> None:
        rows = self.rows.setdefault(rollout.worker_index, [])
        if not rollout.continues:  # the rows between it and the rollout before it
            rows.extend([[None] * rollout.num_envs] * (self._gap if rows else self._gap - 1))
        for t in range(len(rollout)):
            rows.append([self._step(rollout, t, n) for n in range(rollout.num_envs)])

    def _step(self, rollout: Rollout, t: int, n: int) -> Step | None:
        if not rollout.valid[t, n]:
            return None
        return Step(
            key_of(rollout.obs, (t, n)),
            int(rollout.actions[t, n]),
            float(rollout.rewards[t, n]),
            key_of(rollout.next_obs_at(t, n), ()),
            bool(rollout.terminated[t, n]),
            bool(rollout.truncated[t, n]),
        )

    def sequences(self, n_step: int) -> dict[bytes, list[Step]]:
        """Return, by its first observation, the steps of each transition that must be there to be drawn."""
        found = {}
        for rows in self.rows.values():
            num_kept = -(-self._capacity // (len(rows[0]) * self._num_runners))
            for start in range(max(0, len(rows) - num_kept), len(rows)):
                for n, first in enumerate(rows[start]):
                    if first is None:
                        continue
                    steps: list[Step] = []
                    for row in rows[start : start + n_step]:
                        step = row[n]
                        if step is None or (steps and (steps[-1].terminated or steps[-1].truncated)):
                            break
                        steps.append(step)
                    found[first.obs] = steps
        return found


def key_of(obs: Any, index: Any) -> bytes:
    return b"".join(np.ascontiguousarray(leaf[index]).tobytes() for leaf in leaves(obs))


def assert_same(buffer: ReplayBuffer, reference: Reference, n_step: int | tuple[int, int], gamma: float = 0.9) -> None:
    """Draw until every transition must have come, and compare each with the reference."""
    smallest, largest = n_step if isinstance(n_step, tuple) else (n_step, n_step)
    expected = reference.sequences(largest)
    assert len(buffer) == len(expected)
    if not expected:
        return
    batch = buffer.sample(40 * len(expected), n_step=n_step, gamma=gamma)
    seen: dict[int, bytes] = {}
    for i, index in enumerate(batch["indices"].tolist()):
        key = key_of(batch["obs"], i)
        if index in seen:
            assert seen[index] == key
            continue
        seen[index] = key
        num_steps = int(batch["num_steps"][i])
        assert min(smallest, len(expected[key])) <= num_steps <= len(expected[key])
        steps = expected[key][:num_steps]
        assert batch["actions"][i] == steps[0].action
        np.testing.assert_allclose(batch["discounts"][i], gamma ** len(steps), rtol=1e-6)
        total = sum(gamma**k * step.reward for k, step in enumerate(steps))
        np.testing.assert_allclose(batch["rewards"][i], total, rtol=1e-5, atol=1e-6)
        assert key_of(batch["next_obs"], i) == steps[-1].next_obs
        assert (batch["terminated"][i], batch["truncated"][i]) == (steps[-1].terminated, steps[-1].truncated)
    assert sorted(seen.values()) == sorted(expected)
