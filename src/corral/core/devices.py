"""Devices of torch, their widest floats, and a warning about envs whose data are there."""

from __future__ import annotations

import logging
from functools import cache

import torch

from corral.errors import ConfigError

log = logging.getLogger("corral")


def find_device(device: str | torch.device) -> torch.device:
    """Return a device by its name; `"auto"` is CUDA if there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def find_tensor_device(device: str | torch.device) -> torch.device:
    """Return a device as its tensors name it: `"cuda"` is `cuda:0`, or which one is current.

    Raises:
        ConfigError: There is no such device.
    """
    try:
        return torch.empty(0, device=find_device(device)).device
    except (AssertionError, RuntimeError) as error:
        raise ConfigError(f"device={str(device)!r}: torch has no such device: {error}") from error


def widened(column: torch.Tensor) -> torch.Tensor:
    """Return a column in float64, for sums over many steps; in float32 where a device has nothing wider."""
    return column.float() if column.device.type == "mps" else column.double()


@cache
def warn_of_missing_finals() -> None:
    """Warn, once in this process, of an env that ends an episode and does not give its last observation."""
    log.warning(
        "the env of tensors gives no infos['final_obs']: where an episode is cut off, the value of the observation "
        "before its last step stands in for the value of the last observation."
    )
