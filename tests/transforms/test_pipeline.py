"""Spaces, shapes and values of pipelines; what does not fit is refused by name."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from corral import (
    ClipObservations,
    FlattenObservations,
    FrameStack,
    NormalizeObservations,
    NormalizeRewards,
    PPOConfig,
    Transform,
)
from corral.core.tree import map_tree
from corral.errors import CheckpointError, ConfigError
from corral.modules.transforms.pipeline import Pipeline
from corral.modules.transforms.settings import describe_transform, make_transforms

VECTOR: Any = spaces.Box(-np.inf, np.inf, (3,), np.float32)
MIXED: Any = spaces.Dict(
    {
        "place": spaces.Box(-1.0, 1.0, (2,), np.float32),
        "kind": spaces.Discrete(3, start=1),
        "image": spaces.Box(0, 255, (8, 8), np.uint8),
    }
)


def build(*transforms: Transform, space: Any = VECTOR) -> Pipeline:
    pipeline = Pipeline.build(transforms, space, spaces.Discrete(2))
    assert pipeline is not None
    return pipeline


class Halve(Transform):
    """A user's transform: one class with one method."""

    def transform_obs(self, obs: Any) -> Any:
        return obs / 2


class FirstTwo(Transform):
    def transform_obs(self, obs: Any) -> Any:
        return obs[:, :2].astype(np.float64)


class PlaceOnly(Transform):
    def transform_obs(self, obs: Any) -> Any:
        return {"kind": obs["kind"], "place": obs["place"] * 2, "parts": (obs["image"], obs["place"] > 0)}


def test_the_space_of_your_own_transform_is_found_by_calling_it() -> None:
    assert build(FirstTwo()).module_space == spaces.Box(-np.inf, np.inf, (2,), np.float32)
    found = build(PlaceOnly(), space=MIXED).module_space
    assert found == spaces.Dict(
        {
            "kind": spaces.Discrete(3, start=1),
            "parts": spaces.Tuple([spaces.Box(0, 255, (8, 8), np.uint8), spaces.MultiBinary((2,))]),
            "place": spaces.Box(-np.inf, np.inf, (2,), np.float32),
        }
    )


def test_transforms_are_applied_in_order_to_batches_and_to_columns() -> None:
    pipeline, rng = build(Halve(), ClipObservations(-0.5, 0.5), FirstTwo()), np.random.default_rng(0)
    columns = rng.normal(size=(6, 4, 3)).astype(np.float32)
    expected = np.clip(columns / 2, -0.5, 0.5)[..., :2]
    np.testing.assert_array_equal(pipeline.columns_from_stored(columns), expected)
    np.testing.assert_array_equal(pipeline.from_stored(columns[3]), expected[3])
    assert pipeline.from_stored(columns[3]).dtype == np.float32


def test_normalising_uses_mean_and_deviation_of_all_fragments() -> None:
    pipeline, rng = build(NormalizeObservations()), np.random.default_rng(0)
    data = rng.normal([0, 5, -100], [1, 2, 30], (7, 10, 4, 3)).astype(np.float32)  # fragments [T + 1, N, 3]
    valid = rng.random((7, 9, 4)) < 0.8
    steps = np.concatenate([fragment[:-1][mask] for fragment, mask in zip(data, valid, strict=True)]).astype(np.float64)
    parts = [pipeline.measure((), part[:-1][mask], {}) for part, mask in zip(data, valid, strict=True)]
    one_by_one = pipeline
    for part in parts:
        one_by_one = one_by_one.merged([part])
    for merged in (pipeline.merged(parts), one_by_one):
        expected = np.clip((data[0, 0] - steps.mean(0)) / np.sqrt(steps.var(0) + 1e-8), -10, 10)
        np.testing.assert_allclose(merged.from_stored(data[0, 0]), expected, rtol=1e-4, atol=1e-5)
    assert (
        pipeline.from_stored(data[0, 0]).tolist() == np.clip(data[0, 0], -10, 10).tolist()
    )  # it did not change itself


def test_only_floating_point_parts_are_normalised() -> None:
    pipeline, rng = build(NormalizeObservations(clip=5.0), space=MIXED), np.random.default_rng(0)
    obs = {
        "place": rng.random((20, 2), np.float32),
        "kind": rng.integers(1, 4, 20),
        "image": rng.integers(0, 256, (20, 8, 8)).astype(np.uint8),
    }
    pipeline = pipeline.merged([pipeline.measure((), obs, {})])
    seen = pipeline.from_stored(obs)
    assert seen["kind"] is obs["kind"] and seen["image"] is obs["image"]
    np.testing.assert_allclose(seen["place"].mean(0), 0, atol=1e-6)
    assert pipeline.module_space["place"].high.tolist() == [5.0, 5.0]
    assert pipeline.module_space["image"] == MIXED["image"]


def test_flattening_gives_one_vector_with_one_hot_parts() -> None:
    pipeline = build(FlattenObservations(), space=MIXED)
    obs = {
        "place": np.array([[0.5, -0.5]], np.float32),
        "kind": np.array([2]),
        "image": np.arange(64, dtype=np.uint8).reshape(1, 8, 8),
    }
    assert pipeline.module_space.shape == (64 + 3 + 2,)
    expected = [*range(64), 0, 1, 0, 0.5, -0.5]  # in the order of the space, which sorts its keys
    assert pipeline.from_stored(obs).tolist() == [expected]


def test_flattening_takes_numbers_of_small_dtypes_as_tensors_too() -> None:
    pipeline = build(FlattenObservations(), space=spaces.MultiDiscrete([3, 200], np.uint8, start=[0, 7]))
    obs = np.array([[1, 157], [2, 7], [0, 206]], np.uint8)
    expected = np.concatenate([np.eye(3)[obs[:, 0]], np.eye(200)[obs[:, 1] - 7]], 1)
    assert np.array_equal(pipeline.from_stored(obs), expected)
    assert np.array_equal(pipeline.tensors_from_stored(torch.from_numpy(obs)), expected)


def test_flattening_leaves_keys_out() -> None:
    (transform,) = make_transforms([{"type": "FlattenObservations", "left_out": ["image", "kind"]}])
    assert describe_transform(transform)["left_out"] == ("image", "kind")
    obs = {"place": np.array([[0.5, -0.5]], np.float32), "kind": np.array([2]), "image": np.zeros((1, 8, 8), np.uint8)}
    assert build(transform, space=MIXED).from_stored(obs).tolist() == [[0.5, -0.5]]
    for wrong in (["nothing"], ["image", "kind", "place"]):
        with pytest.raises(ConfigError, match=r"left_out=.* must be some of the keys \['image', 'kind', 'place'\]"):
            build(FlattenObservations(left_out=tuple(wrong)), space=MIXED)


@pytest.mark.parametrize(("center", "scale"), [(True, False), (False, True), (False, False)])
def test_normalising_may_leave_the_mean_or_the_deviation(center: bool, scale: bool) -> None:
    obs = np.random.default_rng(0).normal(3.0, 0.5, (50, 3)).astype(np.float32)
    pipeline = build(NormalizeObservations(center=center, scale=scale), space=VECTOR)
    pipeline = pipeline.merged([pipeline.measure((), obs, {})])
    expected = (obs - (obs.mean(0) if center else 0)) / (obs.std(0) if scale else 1)
    np.testing.assert_allclose(pipeline.from_stored(obs), expected.clip(-10, 10), rtol=1e-4, atol=1e-5)
    copied = pickle.loads(pickle.dumps(pipeline.transforms[0]))
    assert (copied.center, copied.scale) == (center, scale)


@pytest.mark.parametrize("transforms", [[FlattenObservations()], [FrameStack(2)], [NormalizeObservations()]])
@pytest.mark.parametrize("mask", [spaces.MultiBinary(2), spaces.Box(0, 1, (2,), np.float32)], ids=["bits", "floats"])
def test_an_action_mask_stays_a_mask(transforms: list[Transform], mask: spaces.Space[Any]) -> None:
    space = spaces.Dict(action_mask=mask, observations=spaces.Dict(VECTOR=VECTOR))
    pipeline = build(*transforms, space=space)
    obs = {"action_mask": np.array([[1, 0]], mask.dtype), "observations": {"VECTOR": np.ones((1, 3), np.float32)}}
    stored, _ = pipeline.to_store(obs, pipeline.initial_memories(1), np.ones(1, bool), None, None)
    seen = pipeline.from_stored(stored)
    assert pipeline.module_space["action_mask"] == space["action_mask"]  # type: ignore[index]
    assert seen["action_mask"] is obs["action_mask"]
    assert pipeline.module_space.contains(map_tree(lambda leaf: leaf[0], seen))


@dataclass
class Wide(Transform):
    said: int = 3

    def observation_space(self, space: Any) -> Any:
        return spaces.Box(-1.0, 1.0, (self.said,), np.float32)

    def transform_obs(self, obs: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([obs, obs], -1)


class Shrinks(Transform):
    def transform_obs(self, obs: NDArray[Any]) -> NDArray[Any]:
        return obs if len(obs) == 2 else obs[:, :1]


class Loses(Transform):
    def transform_obs(self, obs: NDArray[Any]) -> Any:
        return obs.sum()


class Raises(Transform):
    def transform_obs(self, obs: NDArray[Any]) -> Any:
        return obs["camera"]  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        ([Wide()], r"Wide returned float32\[2, 6\] for 2 observations, and its space is Box"),
        ([Loses()], r"Loses.transform_obs must return arrays of numbers \[B, ...\] .* float32\[\]"),
        ([Raises()], r"Raises.transform_obs raised IndexError for two observations of Box"),
        ([FlattenObservations(), Wide(said=5)], "Wide returned"),
    ],
)
def test_a_transform_that_does_not_fit_its_space_is_named(transforms: list[Transform], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(*transforms)


def own(**methods: Any) -> Transform:
    """Return a transform of a new class with these methods."""
    return cast("Transform", type("Own", (Transform,), methods)())


def doubled_in_place(self: Any, values: Any) -> Any:
    values *= 2
    return values


CALLS = itertools.count()


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"transform_observations": lambda self, obs: obs}, "Own defines neither transform_obs.obs. nor"),
        (
            {"transform_obs": doubled_in_place},
            "transform_obs changed its argument, .* return new arrays",
        ),
        ({"transform_obs": lambda self, obs: obs + next(CALLS)}, "transform_obs returned other values"),
        (
            {"transform_rewards": doubled_in_place},
            "transform_rewards changed its argument, .* return a new array",
        ),
        ({"transform_rewards": lambda self, rewards: rewards + next(CALLS)}, "transform_rewards returned other values"),
        ({"transform_rewards": lambda self, rewards: rewards - rewards.mean()}, "each reward alone"),
        ({"transform_rewards": lambda self, rewards: rewards.sum()}, r"float32\[2, 3\] .* returned float32\[\]"),
        ({"transform_rewards": lambda self, rewards: None}, "returned object"),
        ({"transform_rewards": lambda self, rewards: rewards.no}, "transform_rewards raised AttributeError"),
    ],
)
def test_a_transform_that_breaks_the_contract_is_named(methods: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^transforms: .*{message}"):
        build(own(**methods))


def test_a_transform_that_changes_the_shape_later_is_named() -> None:
    with pytest.raises(ConfigError, match=r"Shrinks returned float32\[5, 1\] for 5 observations"):
        build(Shrinks()).from_stored(np.zeros((5, 3), np.float32))


def test_nothing_to_normalise_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"NormalizeObservations: Discrete.* has no floating-point Box"):
        build(NormalizeObservations(), space=spaces.Discrete(4))


def test_statistics_of_another_space_are_refused_by_name() -> None:
    other = build(NormalizeObservations(), space=spaces.Box(-1.0, 1.0, (5,), np.float32))
    with pytest.raises(CheckpointError, match=r"statistics of NormalizeObservations do not fit: mean/ is float64\[5\]"):
        build(NormalizeObservations()).check_state(other.state)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("NormaliseObservations", "no transform 'NormaliseObservations'. Did you mean 'NormalizeObservations'"),
        (
            {"type": "ClipRewards", "most": 4},
            r"unexpected keyword argument .most.*It takes limit",
        ),
        ({"num_frames": 4}, "has no 'type'"),
        (dict, "is no transform"),
        ({"type": "NormalizeObservations", "clip": -1.0}, "clip=-1.0"),
    ],
)
def test_what_is_no_transform_is_refused_at_the_call(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PPOConfig().env_runners(transforms=[given])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"type": "NormalizeObservations", "clip": "a"}, "NormalizeObservations: clip='a' must be a number"),
        ({"type": "NormalizeObservations", "epsilon": 0}, "NormalizeObservations: epsilon=0 must be"),
        ({"type": "NormalizeRewards", "clip": float("nan")}, "NormalizeRewards: clip=nan must be"),
        ({"type": "NormalizeRewards", "gamma": True}, "NormalizeRewards: gamma=True must be a number"),
        ({"type": "NormalizeRewards", "gamma": 2}, "NormalizeRewards: gamma=2 must be"),
        ({"type": "ClipObservations", "low": None}, "ClipObservations: low=None must be a number"),
        ({"type": "ClipObservations", "low": float("nan")}, "ClipObservations: low=nan must be"),
        ({"type": "ClipObservations", "low": 3, "high": 3}, "ClipObservations: low=3.0 must be below high=3.0"),
        ({"type": "ClipRewards", "limit": True}, "ClipRewards: limit=True must be"),
        ({"type": "ClipRewards", "limit": "Sign"}, "ClipRewards: limit='Sign' must be .*'sign'"),
        ({"type": "FrameStack", "num_frames": 1}, "FrameStack: num_frames=1 must be"),
    ],
)
def test_a_setting_of_a_wrong_type_or_out_of_bounds_is_named(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"transforms: {message}"):
        PPOConfig().env_runners(transforms=[given])


def test_numbers_may_come_as_words_and_one_bound_may_be_infinite() -> None:
    (clip,) = make_transforms([{"type": "ClipObservations", "low": "-inf", "high": "0.5"}])
    assert clip == ClipObservations(-np.inf, 0.5)
    np.testing.assert_array_equal(clip.transform_obs(np.array([[-1e9, 2.0]], np.float32)), [[-1e9, 0.5]])


def test_a_config_takes_instances_classes_names_and_dicts() -> None:
    names = ["NormalizeObservations", {"type": "NormalizeObservations", "clip": 10.0}, NormalizeObservations]
    for given in (*names, "corral.modules.transforms.observations:NormalizeObservations"):
        assert PPOConfig().env_runners(transforms=[given]).transforms == [NormalizeObservations()]
    config = PPOConfig().env_runners(transforms=[NormalizeObservations(clip=3.0), Halve()])
    assert eval(repr(config)).transforms[0] == NormalizeObservations(clip=3.0)


def test_statistics_before_a_stack_are_of_the_observations_of_the_env() -> None:
    transforms = [NormalizeObservations(), FrameStack(2), NormalizeRewards()]
    config = PPOConfig().environment("Pendulum-v1").env_runners(num_envs_per_env_runner=3, transforms=transforms)
    with config.training(train_batch_size_per_learner=96, minibatch_size=None, num_epochs=1).build() as algo:
        steps = []
        for _ in range(3):
            [rollout] = algo.sample(96)
            steps.append(rollout.obs[:-1][rollout.valid])
        pipeline = algo.get_pipeline("default_policy")
        state = pipeline.state["NormalizeObservations"]
        np.testing.assert_allclose(state["mean/"], np.concatenate(steps).mean(0, dtype=np.float64), rtol=1e-6)
        assert state["count"] == sum(map(len, steps))


def test_statistics_between_two_transforms_that_look_back_are_refused() -> None:
    with pytest.raises(ConfigError, match="NormalizeObservations stands between two transforms that look at earlier"):
        build(FrameStack(2), NormalizeObservations(), FrameStack(2))


COUNTS: Any = spaces.Dict(
    {
        "place": spaces.Box(-1.0, 1.0, (2,), np.float32),
        "counts": spaces.Box(0, 1000, (3,), np.int64),
        "level": spaces.Box(0, 10, (), np.uint8),
        "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
        "kind": spaces.Discrete(3),
        "action_mask": spaces.Box(0, 1, (2,), np.int8),
    }
)


def test_vectors_of_integers_are_normalised_if_asked_for() -> None:
    pipeline, rng = build(NormalizeObservations(integers=True), space=COUNTS), np.random.default_rng(0)
    obs = {
        "place": rng.random((50, 2), np.float32),
        "counts": rng.integers(0, 1000, (50, 3)),
        "level": rng.integers(0, 11, 50).astype(np.uint8),
        "image": rng.integers(0, 256, (50, 8, 8, 3)).astype(np.uint8),
        "kind": rng.integers(0, 3, 50),
        "action_mask": np.ones((50, 2), np.int8),
    }
    pipeline = pickle.loads(pickle.dumps(pipeline.merged([pipeline.measure((), obs, {})])))
    seen = pipeline.from_stored(obs)
    for name in ("place", "counts", "level"):
        numbers = obs[name].astype(np.float64)
        expected = (numbers - numbers.mean(0)) / np.sqrt(numbers.var(0) + 1e-8)
        np.testing.assert_allclose(seen[name], expected, rtol=1e-4, atol=1e-4)
        assert seen[name].dtype == np.float32 == pipeline.module_space[name].dtype
    for name in ("image", "kind", "action_mask"):
        assert seen[name] is obs[name] and pipeline.module_space[name] == COUNTS[name]
    tensors = pipeline.tensors_from_stored({name: torch.from_numpy(np.asarray(leaf)) for name, leaf in obs.items()})
    np.testing.assert_allclose(tensors["counts"], seen["counts"], rtol=1e-5, atol=1e-5)


def test_a_space_of_integers_alone_says_how_to_normalise_it() -> None:
    space = spaces.Box(0, 9, (4,), np.int32)
    with pytest.raises(ConfigError, match=r"no floating-point Box.*set integers=True for Boxes of integers"):
        build(NormalizeObservations(), space=space)
    with pytest.raises(ConfigError, match="leave the transform out"):
        build(NormalizeObservations(integers=True), space=spaces.Discrete(4))
    pipeline = build(NormalizeObservations(integers=True), space=space)
    pipeline = pipeline.merged([pipeline.measure((), np.array([[0, 1, 2, 3], [2, 3, 4, 9]], np.int32), {})])
    assert pipeline.from_stored(np.array([[0, 1, 2, 9]], np.int32)).round(3).tolist() == [[-1, -1, -1, 1]]
