"""What each value of a result is taken for."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corral.core.columns import describe
from corral.core.result_values import classify
from corral.runs.loggers import JSONLinesLogger


def zeros(*shape: int, dtype: Any = np.uint8) -> np.ndarray[Any, Any]:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "none"),
        (3, "number"),
        (True, "number"),
        (math.nan, "number"),
        (np.float32(0.5), "number"),
        (np.bool_(True), "number"),
        (np.array(2), "number"),
        (torch.tensor(0.5, requires_grad=True), "number"),
        ("learning", "text"),
        (np.str_("learning"), "text"),
        (zeros(4, 5, 3), "image"),
        (zeros(4, 5, 4), "image"),
        (torch.zeros(4, 5, 3, dtype=torch.uint8), "image"),
        (zeros(2, 4, 5, 3), "video"),
        (zeros(4, 5, 1), "array"),
        (zeros(4, 3), "array"),
        (zeros(2, 4, 5, 4), "array"),
        (zeros(0, 5, 3), "array"),
        (zeros(0, 4, 5, 3), "array"),
        (zeros(4, 5, 3, dtype=np.float32), "array"),
        (zeros(4, 5, 3, dtype=np.int64), "array"),
        (zeros(7, dtype=np.bool_), "array"),
        (torch.ones(3, dtype=torch.bfloat16), "array"),
        (zeros(7, dtype=np.complex64), "other"),
        (np.array(["a"]), "other"),
        (Path("x"), "other"),
        ({1, 2}, "other"),
        ([1, "a"], "other"),
        ([1, None], "other"),
        ([[1], [2]], "other"),
    ],
)
def test_kinds_of_single_values(value: Any, kind: str) -> None:
    assert (classify(value).kind, classify(value).series) == (kind, False)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ([], "number"),
        ([1, 2.5, np.float32(3), True], "number"),
        ((1, 2), "number"),
        (["a", "b"], "text"),
        ([zeros(4, 5, 3), zeros(6, 7, 4)], "image"),
        ([zeros(2, 4, 5, 3)], "video"),
        ([zeros(3), zeros(2, 2)], "array"),
    ],
)
def test_kinds_of_series(value: Any, kind: str) -> None:
    assert (classify(value).kind, classify(value).series) == (kind, True)


def test_data_is_in_plain_types() -> None:
    for value, data in [(np.float32(0.5), 0.5), (np.array(True), True), (torch.tensor(7), 7), (np.int8(3), 3)]:
        assert classify(value).data == data
        assert type(classify(value).data) is type(data)
    numbers = classify([np.float64(1.5), np.int64(2)]).data
    assert numbers == [1.5, 2] and [type(number) for number in numbers] == [float, int]
    halves = classify(torch.tensor([0.5, 2.0], dtype=torch.bfloat16, requires_grad=True)).data
    assert isinstance(halves, np.ndarray) and halves.tolist() == [0.5, 2.0]


def test_an_int_that_no_float_can_hold_is_an_infinity(tmp_path: Path) -> None:
    assert [classify(sign * 10**5000).data for sign in (1, -1)] == [math.inf, -math.inf]
    logger = JSONLinesLogger()
    logger.open(tmp_path, {})
    logger.log_result({"huge": 10**5000, "large": 10**300})
    logger.close()
    assert json.loads((tmp_path / "result.jsonl").read_text()) == {"huge": None, "large": 10**300}


def test_descriptions_name_dtype_and_shape() -> None:
    assert describe(zeros(84, 84, 3)) == "uint8[84, 84, 3]"
    assert describe(zeros(5, dtype=np.float32)) == "float32[5]"


def test_importing_the_loggers_is_light() -> None:
    heavy = ("torch", "tensorboard", "PIL", "gymnasium")
    code = f"import sys, corral.runs.loggers; print(*[name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
