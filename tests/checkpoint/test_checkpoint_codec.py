"""Plain data comes back from bytes as it was, and nothing in the bytes is run."""

from __future__ import annotations

import math
import pickle
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.errors import CheckpointError
from corral.runs.checkpoint.codec import decode, encode

keys = st.one_of(st.text(), st.integers(), st.booleans(), st.binary(), st.tuples(st.text(), st.integers()))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(2**64, 2**200),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
)
nested = st.recursive(
    scalars,
    lambda part: st.one_of(st.lists(part), st.tuples(part, part), st.dictionaries(keys, part, max_size=5)),
    max_leaves=20,
)


@given(nested)
@settings(max_examples=40, deadline=None)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    found = decode(encode(value))
    assert found == value
    assert types_of(found) == types_of(value)


def types_of(value: Any) -> Any:
    if isinstance(value, dict):
        return [(type(key), types_of(part)) for key, part in value.items()]
    return (type(value), [types_of(part) for part in value]) if isinstance(value, (list, tuple)) else type(value)


def test_floats_without_a_value() -> None:
    nan, *others = decode(encode([math.nan, math.inf, -math.inf, -0.0]))
    assert math.isnan(nan)
    assert others == [math.inf, -math.inf, 0.0] and math.copysign(1, others[-1]) == -1


ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.arange(10)[::-2],
    np.zeros((0, 4), np.uint8),
    np.array(3, np.int64),
    np.array([1 + 2j]),
    np.array([1.5], np.float16),
    np.array([1, 2], ">i4"),
    np.array(["a", "bcd"]),
    np.array([b"xyz"]),
    np.array(["2020-01-01"], "datetime64[D]"),
    np.array([(1, 2.5)], [("x", np.int32), ("y", np.float64)]),
    np.array([True, False]),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype.str}{list(array.shape)}")
def test_arrays_and_scalars_of_every_dtype(array: np.ndarray[Any, Any]) -> None:
    found = decode(encode({"a": array}))["a"]
    assert type(found) is np.ndarray and found.dtype == array.dtype and found.shape == array.shape
    assert np.array_equal(found, array)
    assert found.flags.writeable
    if array.size:
        scalar = array.reshape(-1)[0]
        back = decode(encode(scalar))
        assert type(back) is type(scalar) and back == scalar and back.dtype == scalar.dtype


def test_the_state_of_a_random_generator() -> None:
    for bit_generator in (np.random.PCG64(3), np.random.MT19937(3), np.random.Philox(3)):
        rng = np.random.Generator(bit_generator)
        rng.random(7)
        other = np.random.Generator(type(bit_generator)(0))
        other.bit_generator.state = decode(encode(rng.bit_generator.state))
        assert rng.random(5).tolist() == other.random(5).tolist()


class NoPlainData:
    pass


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"a": [1, {"b": NoPlainData()}]}, r"\['a'\]\[1\]\['b'\] is .*NoPlainData"),
        ({"a": {1, 2}}, r"\['a'\] is builtins.set"),
        ({"a": np.array([object()])}, r"\['a'\] is numpy.ndarray"),
        ({"a": np.ma.masked_array([1, 2])}, r"\['a'\] is .*MaskedArray"),
        ({NoPlainData(): 1}, "the key <.*NoPlainData.*> in the state"),
        (len, "it is builtins.builtin_function_or_method"),
    ],
)
def test_what_cannot_be_saved_is_named(state: Any, place: str) -> None:
    with pytest.raises(CheckpointError, match=place):
        encode(state)


def test_pickles_in_the_bytes_are_not_loaded(tmp_path: Any) -> None:
    class Harm:
        def __reduce__(self) -> Any:
            return open, (str(tmp_path / "harm"), "w")

    file = tmp_path / "array.npy"
    np.save(file, np.array([Harm()], object), allow_pickle=True)
    for code in range(128):
        for payload in (file.read_bytes(), pickle.dumps(Harm())):
            with pytest.raises(ValueError):
                decode(msgpack.packb(msgpack.ExtType(code, payload)))
    assert not (tmp_path / "harm").exists()


def test_data_that_was_cut_off_is_refused() -> None:
    data = encode({"a": (1, np.arange(10.0)), "b": "text"})
    for length in range(len(data)):
        with pytest.raises(ValueError):
            decode(data[:length])
