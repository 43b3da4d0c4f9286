"""Threads of torch's ops and of NumPy's matrix products: set for a block of code and restored after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn

# With fewer parameters, handing an op to a second thread costs more than the op (see benchmarks/).
SMALL_MODULE_PARAMETERS = 500_000

# Recurrent layers take one step of a sequence after another, so their ops are smaller than in other nets of the same
# size. A second thread saves a quarter of the time at most, and costs more where another process needs its
# core, because it waits in a loop between two ops.
SMALL_RECURRENT_PARAMETERS = 8 * SMALL_MODULE_PARAMETERS
_NO_CHANGE = nullcontext()


def torch_threads(num_threads: int | None) -> AbstractContextManager[None]:
    """Run a block with `num_threads` intra-op threads; `None` keeps torch's choice."""
    before = torch.get_num_threads()
    return _NO_CHANGE if num_threads is None or num_threads == before else _other_threads(num_threads, before)


@contextmanager
def _other_threads(num_threads: int, before: int) -> Iterator[None]:
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def limit_threads(num_threads: int | None) -> Iterator[None]:
    """Run a block with `num_threads` threads in torch and in NumPy; `None` keeps the choice of both.

    A second thread, even with little work, keeps a core busy: after each op it waits for the next one in a loop.
    """
    if num_threads is None:
        yield
        return
    with torch_threads(num_threads), _thread_pools().limit(limits=num_threads, user_api="blas"):
        yield


@cache
def _thread_pools() -> Any:
    """Return the thread pools of the libraries of this process; to find them takes some 10 ms."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def num_threads_for(module: nn.Module, setting: int | str) -> int | None:
    """Return the threads for a setting: an int itself; `"auto"` is 1 for small nets without convolutions.

    It does not depend on the load of the machine, so that a run gives the same numbers again.
    """
    if isinstance(setting, int):
        return setting
    parts = list(module.modules())
    is_recurrent = any(isinstance(part, (nn.RNNBase, nn.RNNCellBase)) for part in parts)
    limit = SMALL_RECURRENT_PARAMETERS if is_recurrent else SMALL_MODULE_PARAMETERS
    small = sum(parameter.numel() for parameter in module.parameters()) < limit
    return 1 if small and not any(isinstance(part, nn.Conv2d) for part in parts) else None
