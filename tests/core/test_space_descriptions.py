"""Spaces in types that JSON holds."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from corral.core.space_descriptions import describe_space, described_space

SPACES = [
    spaces.Box(-1, 1, (3,)),
    spaces.Box(0, 255, (4, 84, 84), np.uint8),
    spaces.Box(np.array([-np.inf, 0.1, -2]), np.array([np.inf, 1, np.inf]), dtype=np.float64),
    spaces.Box(-np.inf, np.inf, ()),
    spaces.Box(0.1, 3, (2, 1), np.float16),
    spaces.Box(-(2**63), 2**63 - 1, (2,), np.int64),
    spaces.Discrete(3, start=-1),
    spaces.MultiDiscrete([2, 3], start=[1, -2]),
    spaces.MultiDiscrete([[2, 3], [4, 5]], dtype=np.int32),
    spaces.MultiBinary(4),
    spaces.MultiBinary([2, 3]),
    spaces.Dict(OrderedDict(z=spaces.Discrete(2), a=spaces.Tuple([spaces.Box(0, 1, (2,)), spaces.MultiBinary(1)]))),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_space_comes_back_through_json(space: spaces.Space[Any]) -> None:
    back = described_space(json.loads(json.dumps(describe_space(space), allow_nan=False)))
    assert back == space
    assert (back.dtype, back.shape) == (space.dtype, space.shape)
    if isinstance(space, spaces.Dict):
        assert isinstance(back, spaces.Dict)
        assert list(back.spaces) == list(space.spaces)  # modules read the leaves in this order


def test_bounds_that_are_the_same_everywhere_take_one_number() -> None:
    assert len(json.dumps(describe_space(spaces.Box(0, 255, (210, 160, 3), np.uint8)))) < 120


BOX = describe_space(spaces.Box(-1, 1, (3,)))


def nested(depth: int) -> dict[str, Any]:
    description = BOX
    for _ in range(depth):
        description = {"type": "Tuple", "spaces": [description]}
    return description


@pytest.mark.parametrize(
    "description",
    [
        None,
        {},
        {"type": "Graph"},
        {"type": "os:system"},
        {**BOX, "shape": [10**6, 10**6]},
        {**BOX, "shape": [-1]},
        {**BOX, "shape": "abc"},
        {**BOX, "low": [1, 2]},
        {**BOX, "low": "x"},
        {**BOX, "low": None},
        {**BOX, "dtype": "O"},
        {**BOX, "dtype": "no such"},
        {"type": "Discrete", "n": 0, "start": 0, "dtype": "int64"},
        {"type": "Discrete", "n": 2**70, "start": 0, "dtype": "int64"},
        {"type": "MultiDiscrete", "nvec": [[1], [2, 3]], "start": [0], "dtype": "int64"},
        {"type": "MultiBinary", "n": 10**12},
        {"type": "Dict", "spaces": [BOX]},
        {"type": "Tuple", "spaces": 3},
        nested(200),
    ],
    ids=lambda description: repr(description)[:60],
)
def test_a_damaged_description_is_one_kind_of_error(description: Any) -> None:
    with pytest.raises(ValueError, match=r"space|shape|dtype"):
        described_space(description)


def test_what_gymnasium_has_by_default_may_be_left_out() -> None:
    wanted = [spaces.Discrete(2), spaces.MultiDiscrete([2, 3]), spaces.Box(-1, 1, (3,))]
    given = [
        {"type": "Discrete", "n": 2},
        {"type": "MultiDiscrete", "nvec": [2, 3]},
        {"type": "Box", "shape": [3], "low": -1, "high": 1},
    ]
    assert [described_space(each) for each in given] == wanted
    assert [described_space(each).dtype for each in given] == [space.dtype for space in wanted]


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"type": "Discrete"}, "it lacks 'n'"),
        ({"type": "Bax", "n": 2}, "'Bax' is no type of space"),
        ({**BOX, "shape": 4}, "a shape is a list of lengths, and not 4"),
    ],
)
def test_the_error_names_what_is_wrong(description: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        described_space(description)


def test_a_space_that_corral_does_not_support_is_named() -> None:
    with pytest.raises(ValueError, match="Text"):
        describe_space(spaces.Dict(name=spaces.Text(3)))
