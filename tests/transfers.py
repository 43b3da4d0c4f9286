"""Counts what a tensor is asked for that the host must wait for, on any device: also on the CPU, where nothing waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Calls of Python, and operations whose result has a size that only the data tell.
CALLS = frozenset(
    {
        *("item", "tolist", "cpu", "numpy", "nonzero", "argwhere", "masked_select", "unique", "equal", "allclose"),
        *("__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__", "is_nonzero"),
    }
)
OPERATIONS = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero"})


class _Calls(TorchFunctionMode):
    def __init__(self, found: Counter[str]) -> None:
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in CALLS:
            self._found[name] += 1
            with torch._C.DisableTorchFunction(), _without_operations():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name in OPERATIONS and not _silent:
            self._found[name] += 1
        return func(*args, **(kwargs or {}))


_silent: list[bool] = []


@contextmanager
def _without_operations() -> Iterator[None]:
    """Count the operations inside a call that is counted already not again."""
    _silent.append(True)
    try:
        yield
    finally:
        _silent.pop()


@contextmanager
def count_transfers() -> Iterator[Counter[str]]:
    """Count the calls and operations of the block for which the host waits, by name."""
    found: Counter[str] = Counter()
    with _Operations(found), _Calls(found):
        yield found
