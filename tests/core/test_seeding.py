"""Seeds: of the global generators, and of runners, each of which draws numbers of its own."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from corral.core.seeding import runner_seeds, seed_everything


def numbers(*arguments: int) -> list[tuple[int, ...]]:
    seed, worker_index, num_restarts, in_evaluation = arguments
    found = runner_seeds(seed, worker_index, num_restarts, bool(in_evaluation))
    return [tuple(sequence.generate_state(2).tolist()) for sequence in found]


def test_any_difference_between_runners_changes_every_seed() -> None:
    everyone = list(itertools.product((0, 3, 2**40), (0, 1, 2), (0, 1, 2), (0, 1)))
    drawn = [number for arguments in everyone for number in numbers(*arguments)]
    assert len(set(drawn)) == 4 * len(everyone)
    assert numbers(3, 1, 1, 1) == numbers(3, 1, 1, 1)


def test_training_runners_draw_from_seed_and_index_alone() -> None:
    """Results of a seed stay as they were before runners had a role."""
    for seed in (0, 5, 2**40):
        plain = [tuple(s.generate_state(2).tolist()) for s in np.random.SeedSequence([seed, 2]).spawn(3)]
        again = [tuple(s.generate_state(2).tolist()) for s in np.random.SeedSequence([seed, 2, 1]).spawn(3)]
        assert numbers(seed, 2, 0, 0)[:3] == plain
        assert numbers(seed, 2, 1, 0)[:3] == again


def test_every_global_generator_starts_again() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    drawn = []
    for seed in (3, 2**32 + 3, 4, 3):
        seed_everything(seed)
        drawn.append(draw())
    first, _, other, again = drawn
    assert first == again
    assert all(one != two for one, two in zip(first, other, strict=True))


def test_devices_are_seeded_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """For devices that are not there, torch would note the stack of the caller, each time."""
    seeded: list[int] = []
    monkeypatch.setattr(torch, "manual_seed", seeded.append)
    for is_available in (False, True):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda value=is_available: value)
        seed_everything(7)
        assert seeded == [7] * is_available
