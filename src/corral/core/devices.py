"""Devices of torch by their names in settings."""

from __future__ import annotations

import torch


def find_device(device: str) -> torch.device:
    """Return a device by its name; `"auto"` is CUDA if there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)
