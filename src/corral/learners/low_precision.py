"""Losses whose layers compute in bfloat16, and everything else in float32."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from corral.core.tree import map_tree
from corral.errors import ConfigError
from corral.learners.losses import Batch, Loss
from corral.modules.module import Module

# The products of layers of `torch.nn` with their weights. Expectations such as `probs @ atoms` are not among them.
LAYER_PRODUCTS = frozenset(
    (
        *(torch.nn.functional.linear, torch.nn.functional.bilinear),
        *(torch.conv1d, torch.conv2d, torch.conv3d),
        *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
        *(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu),
        *(torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell),
        torch.nn.functional.scaled_dot_product_attention,
        torch.nn.functional.multi_head_attention_forward,
    )
)


log = logging.getLogger("corral")

# What a processor without instructions for bfloat16 may refuse: torch has no other way to compute it there.
_RECURRENT = {torch.lstm: torch.nn.LSTM, torch.gru: torch.nn.GRU, torch.rnn_tanh: torch.nn.RNN}


@functools.cache
def refused_products(device_type: str) -> frozenset[Any]:
    """Return the functions of `LAYER_PRODUCTS` that raise an exception in bfloat16 on this machine."""
    refused = set()
    for function, layer in _RECURRENT.items():
        try:
            with torch.enable_grad(), torch.autocast(device_type, torch.bfloat16):
                outputs, _ = layer(1, 1, device=device_type)(torch.zeros(1, 1, 1, device=device_type))
                outputs.float().sum().backward()
        except RuntimeError:
            refused.add(function)
    return frozenset(refused)


def warn_of_refused(module_id: str, module: torch.nn.Module, device: torch.device) -> None:
    """Warn once of layers of a module that compute in float32, because the machine refuses bfloat16 for them."""
    names = [layer.__name__ for function, layer in _RECURRENT.items() if function in refused_products(device.type)]
    if found := sorted({type(part).__name__ for part in module.modules()} & {*names}):
        log.warning(
            "precision='bfloat16': the device %r computes %s only in float32, so these layers of module %r stay in "
            "float32.",
            str(device),
            ", ".join(found),
            module_id,
        )


def check_bfloat16(device: torch.device) -> None:
    """Refuse a device that does not compute in bfloat16.

    Raises:
        ConfigError: Names the device.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # with which torch says that it continues without autocast
            torch.autocast(device.type, torch.bfloat16)
        fits = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    except (RuntimeError, UserWarning):
        fits = False
    if not fits:
        raise ConfigError(
            f"precision='bfloat16': the device {str(device)!r} does not compute in bfloat16. Leave precision out of "
            ".learners(...), or use another device."
        )


def in_bfloat16(loss: Loss, device: torch.device) -> Loss:
    """Return a loss in which layers multiply in bfloat16; parameters, gradients and all other numbers stay float32."""
    mode = _LayersInBfloat16(device.type)

    def call(module: Module, batch: Batch, coefficients: Mapping[str, float]) -> Any:
        with mode:
            return loss(module, batch, coefficients)

    return call


class _LayersInBfloat16(TorchFunctionMode):
    """Lets torch cast what layers multiply to bfloat16, and casts their outputs back."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type
        self._products = LAYER_PRODUCTS - refused_products(device_type)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        if func not in self._products:
            return func(*args, **(kwargs or {}))
        with torch.autocast(self.device_type, torch.bfloat16):
            outputs = func(*args, **(kwargs or {}))
        return map_tree(_to_float32, outputs)


def _to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value
