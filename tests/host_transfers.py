"""A context in which nothing may wait for the device of a tensor, so that a CPU can test what would stall a GPU."""

from __future__ import annotations

from collections.abc import Iterator
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
    """Refuses methods that read values of a tensor; on the CPU some of them call no operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TRANSFERS:
            raise HostTransferError(f"Tensor.{func.__name__} waits for the device")
        if func is Tensor.to and any(torch.device(arg).type == "cpu" for arg in _devices(args, kwargs)):
            raise HostTransferError("Tensor.to waits for the device")
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    """Refuses operators that give a number or a shape which depends on values, also inside other functions."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        is_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in OPERATORS or is_mask:
            raise HostTransferError(f"the operator {name} waits for the device")
        return func(*args, **(kwargs or {}))


def _devices(args: Any, kwargs: Any) -> list[Any]:
    return [arg for arg in [*args, *(kwargs or {}).values()] if isinstance(arg, (str, torch.device))]


@contextmanager
def no_host_transfers() -> Iterator[None]:
    """Raise `HostTransferError` where code reads values of tensors in Python, or indexes by a mask."""
    with _Calls(), _Operators():
        yield
