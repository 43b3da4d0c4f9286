"""Helpers of `ray.rllib.utils.torch_utils`: functions on tensors."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from corral.compat.rllib.constants import SMALL_NUMBER
from corral.compat.rllib.numpy_helpers import sorted_leaves
from corral.core.tree import map_tree

__all__ = [
    "clip_gradients",
    "compute_global_norm",
    "convert_to_torch_tensor",
    "copy_torch_tensors",
    "explained_variance",
    "flatten_inputs_to_1d_tensor",
    "global_norm",
    "huber_loss",
    "inverse_symlog",
    "l2_loss",
    "one_hot",
    "reduce_mean_ignore_inf",
    "sequence_mask",
    "set_torch_seed",
    "softmax_cross_entropy_with_logits",
    "symlog",
    "two_hot",
    "update_target_network",
]


def convert_to_torch_tensor(
    x: Any, device: Any = None, pin_memory: bool = False, use_stream: bool = False, stream: Any = None
) -> Any:
    """Return nested data as tensors on a device; floats become 32-bit ones, and `None` and strings stay.

    Args:
        x: Nested arrays, tensors and numbers.
        device: Device of the tensors, by default the CPU.
        pin_memory: Whether the tensors are in pinned memory first, if the device is a GPU.
        use_stream: Ignored: the current stream of the GPU is used.
        stream: Ignored, as `use_stream`.
    """
    place = torch.device(device if device is not None else "cpu")

    def convert(item: Any) -> Any:
        if isinstance(item, list) and any(isinstance(part, (list, dict, tuple, np.ndarray, Tensor)) for part in item):
            return [map_tree(convert, part) for part in item]
        if item is None or (isinstance(item, (str, np.ndarray)) and np.asarray(item).dtype.kind in "OSU"):
            return item
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a tensor of a read-only array
            tensor = item if isinstance(item, Tensor) else torch.from_numpy(np.asarray(item))
        if tensor.is_floating_point() and tensor.dtype != torch.float16:
            tensor = tensor.float()
        if pin_memory and place.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(place)

    return map_tree(convert, x)


def copy_torch_tensors(x: Any, device: Any = None) -> Any:
    """Return nested data with copies of the tensors, without their gradients, on a device if one is given."""

    def copy(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        return torch.clone(item.detach()) if device is None else item.detach().to(device, copy=True)

    return map_tree(copy, x)


def explained_variance(y: Tensor, pred: Tensor) -> Tensor:
    """Return 1 - var(y - pred) / var(y), at least -1."""
    target = y.squeeze()
    left = torch.var(target - pred.squeeze(), dim=0)
    return torch.clamp(1 - left / (torch.var(target, dim=0) + SMALL_NUMBER), min=-1.0)


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of all tensors together."""
    return torch.sqrt(torch.stack([tensor.square().sum() for tensor in tensors]).sum())


def compute_global_norm(gradients_list: Sequence[Tensor | None]) -> Tensor:
    """Return the L2 norm of all gradients together; `None` is no gradient."""
    found = [gradient for gradient in gradients_list if gradient is not None]
    return global_norm(found) if found else torch.tensor(0.0)


def clip_gradients(
    gradients_dict: dict[Any, Tensor | None], *, grad_clip: float | None = None, grad_clip_by: str = "value"
) -> Tensor | None:
    """Clip gradients in place, and return their norm if they are clipped by the norm of all.

    Args:
        gradients_dict: Gradients by parameter; `None` is no gradient.
        grad_clip: Largest value or norm; `None` clips nothing.
        grad_clip_by: `"value"`, `"norm"` of each gradient, or `"global_norm"`.

    Raises:
        ValueError: `grad_clip_by` is something else.
    """
    if grad_clip_by not in ("value", "norm", "global_norm"):
        raise ValueError(f"grad_clip_by must be 'value', 'norm' or 'global_norm', got {grad_clip_by!r}.")
    found = [gradient for gradient in gradients_dict.values() if gradient is not None]
    norm = compute_global_norm(found) if grad_clip_by == "global_norm" else None
    for gradient in found:
        if grad_clip is None:
            break
        if grad_clip_by == "value":
            gradient.clamp_(-grad_clip, grad_clip)
        else:
            size = gradient.norm() if norm is None else norm
            gradient.mul_(torch.clamp(grad_clip / (size + SMALL_NUMBER), max=1.0))
    return norm


def huber_loss(x: Tensor, delta: float = 1.0) -> Tensor:
    """Return Huber's loss: quadratic up to `delta`, linear beyond (https://en.wikipedia.org/wiki/Huber_loss)."""
    return nn.functional.huber_loss(x, torch.zeros_like(x), reduction="none", delta=delta)


def l2_loss(x: Tensor) -> Tensor:
    """Return half the sum of squares."""
    return 0.5 * x.square().sum()


def one_hot(x: Tensor, space: gym.Space[Any]) -> Tensor:
    """Return one-hot vectors of the integers of a Discrete space, or of the columns of a MultiDiscrete one, joined.

    Raises:
        ValueError: The space is neither.
    """
    if isinstance(space, gym.spaces.Discrete):
        return nn.functional.one_hot(x.long(), int(space.n))
    if isinstance(space, gym.spaces.MultiDiscrete):
        columns = x.reshape(x.shape[0], -1).long()
        sizes = np.ravel(space.nvec).tolist()
        return torch.cat([nn.functional.one_hot(columns[:, i], n) for i, n in enumerate(sizes)], dim=-1)
    raise ValueError(f"one_hot needs a Discrete or MultiDiscrete space, got {space!r}.")


def flatten_inputs_to_1d_tensor(inputs: Any, spaces_struct: Any = None, time_axis: bool = False) -> Tensor:
    """Return nested tensors `[B, ...]` as one tensor `[B, n]`: parts of Discrete spaces one-hot, the rest flattened.

    The parts of a dict are joined in the order of its sorted keys.

    Args:
        inputs: Nested tensors `[B, ...]`, or `[B, T, ...]` with `time_axis`.
        spaces_struct: The spaces of the parts, in the same structure; `None` means that all parts are numbers.
        time_axis: Whether there is a time axis.
    """
    num_axes = 1 + int(time_axis)
    parts = sorted_leaves(inputs)
    spaces = [None] * len(parts) if spaces_struct is None else sorted_leaves(spaces_struct)
    rows = []
    for part, space in zip(parts, spaces, strict=True):
        shape = part.shape[:num_axes]
        if isinstance(space, (gym.spaces.Discrete, gym.spaces.MultiDiscrete)):
            whole = part.reshape(int(np.prod(shape)), -1)
            part = one_hot(whole.squeeze(-1) if isinstance(space, gym.spaces.Discrete) else whole, space)
        rows.append(part.reshape(*shape, -1).float())
    return torch.cat(rows, dim=-1)


def reduce_mean_ignore_inf(x: Tensor, axis: int | None = None) -> Tensor:
    """Return the mean of the values that are not minus infinity."""
    is_there = x != -torch.inf
    kept = torch.where(is_there, x, 0.0)
    return kept.sum() / is_there.sum() if axis is None else kept.sum(axis) / is_there.sum(axis)


def sequence_mask(lengths: Tensor, maxlen: int | None = None, dtype: Any = None, time_major: bool = False) -> Tensor:
    """Return a mask `[B, T]`, or `[T, B]` with `time_major`, that is true in the first `lengths` places."""
    size = int(lengths.max()) if maxlen is None else int(maxlen)
    mask = torch.arange(size, device=lengths.device) < lengths[:, None]
    return (mask.t() if time_major else mask).to(dtype or torch.bool)


def set_torch_seed(seed: int | None = None) -> None:
    """Seed torch; do nothing without a seed."""
    if seed is not None:
        torch.manual_seed(seed)


def softmax_cross_entropy_with_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy of label distributions `[B, n]` and logits `[B, n]`, `[B]`."""
    return -(labels * nn.functional.log_softmax(logits, dim=-1)).sum(-1)


def symlog(x: Tensor) -> Tensor:
    """Return sign(x) ln(|x| + 1) (https://arxiv.org/abs/2301.04104)."""
    return torch.sign(x) * torch.log1p(torch.abs(x))


def inverse_symlog(y: Tensor) -> Tensor:
    """Return the inverse of `symlog`: sign(y) (e^|y| - 1)."""
    return torch.sign(y) * torch.expm1(torch.abs(y))


def two_hot(
    value: Tensor,
    num_buckets: int = 255,
    lower_bound: float = -20.0,
    upper_bound: float = 20.0,
    device: Any = None,
    dtype: Any = None,
) -> Tensor:
    """Return `[B, num_buckets]` weights of the two buckets next to each value (https://arxiv.org/abs/2301.04104)."""
    step = (upper_bound - lower_bound) / (num_buckets - 1)
    place = (torch.clamp(value, lower_bound, upper_bound) - lower_bound) / step
    buckets = torch.arange(num_buckets, device=place.device)
    return torch.clamp(1 - torch.abs(place[:, None] - buckets), min=0.0).to(device=device, dtype=dtype)


def update_target_network(main_net: nn.Module, target_net: nn.Module, tau: float) -> None:
    """Move the parameters of the target net towards the main net by the share `tau`."""
    main = main_net.state_dict()
    with torch.no_grad():
        for name, target in target_net.state_dict().items():
            target.copy_(tau * main[name] + (1 - tau) * target)


def _dynamo_is_available() -> bool:
    """Return whether `torch.compile` works."""
    return hasattr(torch, "compile")
