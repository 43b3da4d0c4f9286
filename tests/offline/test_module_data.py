"""Recorded episodes in buffers: splits, statistics, transforms, and what followed each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from corral import ClipRewards, FrameStack, NormalizeObservations, NormalizeRewards, PrevActionsPrevRewards
from corral.data.offline.data import ModuleData, ModuleRows, load_module_data, returns_to_go
from corral.data.offline.episode_rows import rows_of_steps
from corral.data.offline.sources import open_source
from corral.data.replay import ReplayBuffer
from corral.errors import DataError
from corral.modules.module import ActorCritic
from corral.modules.spec import ModuleSpec
from corral.modules.transforms.pipeline import Pipeline
from corral.modules.transforms.rows import RowTransforms
from offline.test_episode_rows import BOX, DISCRETE, random_steps

SPEC = ModuleSpec(ActorCritic, BOX, DISCRETE, {})
DISTRIBUTION = SPEC.build().distribution


def module_rows(parts: list[dict[str, Any]]) -> ModuleRows:
    return ModuleRows(open_source(parts), "default_policy", SPEC, DISTRIBUTION)


def load(parts: list[dict[str, Any]], pipeline: Pipeline | None = None, **settings: Any) -> ModuleData:
    make = lambda num_rows, is_validation: ReplayBuffer(num_rows, seed=0)  # noqa: E731
    return load_module_data(module_rows(parts), pipeline, make, **settings)


def some_parts(num_parts: int = 4, size: int = 50) -> list[dict[str, Any]]:
    rng = np.random.default_rng(7)
    return [random_steps(rng, size, 5 * size * part) for part in range(num_parts)]


def places(buffer: ReplayBuffer) -> set[float]:
    return {float(obs[0]) for obs in buffer.get_steps()["obs"]}


def test_episodes_are_split_whole_and_evenly() -> None:
    parts = some_parts()
    episodes = [episode for part in parts for episode in rows_of_steps(**part).checked(BOX, DISCRETE).episodes()]
    data = load(parts, validation_fraction=0.25, seed=3)
    assert data.validation is not None
    train, validation = len(data.train.get_steps()["starts"]), len(data.validation.get_steps()["starts"])
    assert train + validation == data.num_steps == 200
    num_validation = int(data.validation.get_steps()["starts"].sum())
    assert abs(num_validation - 0.25 * len(episodes)) <= 1
    assert (
        int(data.train.get_steps()["starts"].sum())
        == len(episodes) - num_validation
        == data.num_episodes - num_validation
    )
    # The same for one seed, whatever the parts; and another choice for another seed.
    again = load(
        [{name: np.concatenate([part[name] for part in parts]) for name in parts[0]}], validation_fraction=0.25, seed=3
    )
    assert again.validation is not None
    assert again.validation.get_steps()["obs"].tolist() == data.validation.get_steps()["obs"].tolist()
    other = load(parts, validation_fraction=0.25, seed=4)
    assert other.validation is not None
    assert other.validation.get_steps()["obs"].tolist() != data.validation.get_steps()["obs"].tolist()


def test_a_split_that_leaves_nothing_is_refused() -> None:
    one = {name: column[:3] for name, column in random_steps(np.random.default_rng(0), 20).items()}
    one |= {"terminated": np.array([False, False, True]), "truncated": np.zeros(3, bool)}
    one["next_obs"][:2] = one["obs"][1:]
    with pytest.raises(DataError, match=r"validation_fraction=0.5 leaves none of 1 episodes"):
        load([one], validation_fraction=0.5)


def test_data_that_changes_while_it_is_read_is_refused() -> None:
    """A buffer has room for the rows that were counted, and would drop the oldest ones."""
    sizes = iter([50, 60])
    rows = ModuleRows(
        open_source(lambda: iter([random_steps(np.random.default_rng(0), next(sizes))])),
        "default_policy",
        SPEC,
        DISTRIBUTION,
    )
    with pytest.raises(DataError, match=r"gave \d+ rows when they were counted, and \d+ when they were read"):
        load_module_data(rows, None, lambda num_rows, is_validation: ReplayBuffer(num_rows))


@pytest.mark.parametrize("name", ["obs", "actions", "rewards", "terminated"])
def test_fingerprints_differ_between_other_data(name: str) -> None:
    one, two = some_parts(1), some_parts(1)
    changed = two[0][name].copy()
    changed[20] = not changed[20] if name == "terminated" else (changed[20] + 1) % 5
    two[0][name] = changed
    assert load(one).fingerprint == load(some_parts(1)).fingerprint != load(two).fingerprint


def test_data_of_another_module_is_refused() -> None:
    rows = ModuleRows(open_source(some_parts()), "other", SPEC, DISTRIBUTION)
    with pytest.raises(DataError, match="holds no episodes of module 'other'"):
        load_module_data(rows, None, lambda num_rows, is_validation: ReplayBuffer(num_rows))


def test_parts_of_other_observations_are_refused() -> None:
    one, two = some_parts(2)
    wide = gym.spaces.Box(-100, 100, (2,), np.float32)
    two = {**two, **{name: np.repeat(two[name], 2, 1) for name in ("obs", "next_obs")}}
    rows = ModuleRows(
        open_source([two, one]), "default_policy", ModuleSpec(ActorCritic, wide, DISCRETE, {}), DISTRIBUTION
    )
    with pytest.raises(DataError, match=r"list.1.: the column 'obs' is float32.*needs float32"):
        list(rows.parts())


def test_columns_may_be_mapped_to_files(tmp_path: Path) -> None:
    parts = some_parts()
    make = lambda num_rows, is_validation: ReplayBuffer(num_rows, directory=tmp_path, seed=0)  # noqa: E731
    mapped = load_module_data(module_rows(parts), None, make)
    for _ in range(3):
        one, two = mapped.train.sample(100), load(parts).train.sample(100)
        assert one["obs"].shape == two["obs"].shape
    assert places(mapped.train) == places(load(parts).train)


@pytest.mark.parametrize("gamma", [0.9, 1.0])
def test_returns_match_a_slow_loop(gamma: float) -> None:
    for seed in range(10):
        rows = rows_of_steps(**random_steps(np.random.default_rng(seed), 40)).checked(BOX, DISCRETE)
        rollout = rows.as_rollout(DISTRIBUTION)
        found = returns_to_go(rollout, gamma)
        for episode in zip(rows.starts, np.flatnonzero(~rows.valid), strict=True):
            start, stop = map(int, episode)
            for t in range(start, stop):
                expected = sum(gamma ** (k - t) * rows.rewards[k] for k in range(t, stop))
                assert found["returns"][t, 0] == pytest.approx(expected, abs=1e-4)
                assert found["steps_to_end"][t, 0] == stop - t
                bootstraps = gamma ** (stop - t) if rows.truncated[stop - 1] else 0.0
                assert found["bootstrap_discounts"][t, 0] == pytest.approx(bootstraps)


def test_final_observations_of_drawn_steps_are_found() -> None:
    parts = some_parts()
    data = load(parts, add_columns=lambda rollout: returns_to_go(rollout, 0.9))
    final = {}
    for part in parts:
        for episode in rows_of_steps(**part).checked(BOX, DISCRETE).episodes():
            final |= {float(obs[0]): float(episode.obs[-1, 0]) for obs in episode.obs[:-1]}
    batch = data.train.sample_steps(500)
    found = data.train.obs_after(batch["indices"], batch["steps_to_end"])
    assert [float(obs[0]) for obs in found] == [final[float(obs[0])] for obs in batch["obs"]]


def pipeline_of(*transforms: Any) -> Pipeline:
    pipeline = Pipeline.build(transforms, BOX, DISCRETE, gamma=0.9)
    assert pipeline is not None
    return pipeline


def test_statistics_cover_all_steps() -> None:
    parts = some_parts()
    pipeline = module_rows(parts).measure(pipeline_of(NormalizeObservations(), NormalizeRewards()))
    seen = np.concatenate([part["obs"] for part in parts])
    state = pipeline.state["NormalizeObservations"]
    np.testing.assert_allclose(state["mean/"], seen.mean(0), rtol=1e-5)
    # Discounted sums of the rewards so far, from the begin of each episode on.
    sums = []
    for part in parts:
        total = 0.0
        for reward, ended in zip(part["rewards"], part["terminated"] | part["truncated"], strict=True):
            total = reward + 0.9 * total
            sums.append(total)
            total = 0.0 if ended else total
    found = pipeline.rewards(np.array([1.0]))[0]
    assert found == pytest.approx(1 / np.sqrt(np.var(sums) + 1e-8), rel=1e-3)


@pytest.mark.parametrize(
    "transforms",
    [(FrameStack(3),), (PrevActionsPrevRewards(2, 2),), (NormalizeObservations(), FrameStack(2), ClipRewards())],
)
def test_temporal_transforms_see_each_episode_from_its_start(transforms: tuple[Any, ...]) -> None:
    """Episodes go side by side, sorted by length; a slow loop takes one after the other."""
    from corral.core.tree import leaves, map_tree

    rows = rows_of_steps(**random_steps(np.random.default_rng(5), 900)).checked(BOX, DISCRETE)
    pipeline = pipeline_of(*transforms)
    found = module_rows(some_parts()).as_rollout(rows, pipeline).for_replay().obs
    actions = DISTRIBUTION.from_env(rows.actions)
    for start, stop in zip(rows.starts, np.flatnonzero(~rows.valid) + 1, strict=True):
        alone = RowTransforms(pipeline, actions[0], 1)
        for t in range(int(start), int(stop)):
            alone(map_tree(lambda leaf, t=t: leaf[t : t + 1], rows.obs), np.array([t == start]))
            for expected, leaf in zip(leaves(alone.stored), leaves(found), strict=True):
                np.testing.assert_array_equal(leaf[t, 0], expected[0])
            alone.note_step(actions[t : t + 1], rows.rewards[t : t + 1], slice(None))
