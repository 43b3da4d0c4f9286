"""Contexts that count, or refuse, what waits for the device of a tensor: a CPU tests what would stall a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

TRANSFERS = frozenset(
    getattr(Tensor, name)
    for name in ("__array__", "__bool__", "__float__", "__index__", "__int__", "cpu", "item", "numpy", "tolist")
)
OPERATORS = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim"})
"""Operators that give a number, or a tensor whose shape depends on values."""


class HostTransferError(AssertionError):
    """Something waited for the device."""


class _Calls(TorchFunctionMode):
    """Notes methods that read values of a tensor; on the CPU some of them call no operator."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TRANSFERS:
            self._note(func.__name__)
            with torch._C.DisableTorchFunction(), _Silent():
                return func(*args, **(kwargs or {}))
        if func is Tensor.to and any(torch.device(arg).type == "cpu" for arg in _devices(args, kwargs)):
            self._note("to")
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    """Notes operators that give a number or a shape which depends on values, also inside other functions."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        is_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if (name in OPERATORS or is_mask) and not _Silent.depth:
            self._note(name)
        return func(*args, **(kwargs or {}))


class _Silent:
    """A block whose operators are part of a call that was noted already."""

    depth = 0

    def __enter__(self) -> None:
        _Silent.depth += 1

    def __exit__(self, *exception: object) -> None:
        _Silent.depth -= 1


def _devices(args: Any, kwargs: Any) -> list[Any]:
    return [arg for arg in [*args, *(kwargs or {}).values()] if isinstance(arg, (str, torch.device))]


@contextmanager
def no_host_transfers() -> Iterator[None]:
    """Raise `HostTransferError` where code reads values of tensors in Python, or indexes by a mask."""

    def refuse(name: str) -> None:
        raise HostTransferError(f"{name} waits for the device")

    with _Operators(refuse), _Calls(refuse):
        yield


@contextmanager
def count_host_transfers() -> Iterator[Counter[str]]:
    """Count what waits for the device, by name; not `Tensor.to`, which moves tensors to a device too."""
    found: Counter[str] = Counter()

    def count(name: str) -> None:
        if name != "to":
            found[name] += 1

    with _Operators(count), _Calls(count):
        yield found
