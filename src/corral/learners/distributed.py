"""Exchanges between learners in several processes: gradients, sizes and problems, with torch.distributed.

Each learner computes the gradient of the mean over its own rows. Weighted by rows, the gradients of all learners add up
to the gradient of the mean over all rows, which one learner with the whole batch would have computed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from corral.errors import LossError, WorkerDiedError

Address = tuple[str, int]
"""Host and port of the store where learners find each other."""

LOOPBACK = "127.0.0.1"


class LostPeerError(WorkerDiedError):
    """An exchange failed because another learner ended; the other learner's error says why."""


class Peers:
    """The learners that share every gradient step with this learner.

    All of them make the same calls in the same order: each call waits for the others.

    Args:
        rank: Index of this learner, from 0.
        num_learners: Number of learners.
        device: Device of the tensors that are exchanged.
    """

    def __init__(self, rank: int, num_learners: int, device: torch.device) -> None:
        """Keep the arguments; nothing is connected yet."""
        self.rank, self.num_learners, self._device = rank, num_learners, device
        self._store: Any = None
        self._has_problem = False

    # Connecting.

    def open(self, host: str | None, timeout_s: float) -> Address:
        """Open the store of the first learner, and return its address; host `None` is the address of this host."""
        # The store would listen on all interfaces of the host if it opened the port itself.
        server = socket.create_server((host or find_host_address(), 0))
        address: Address = server.getsockname()
        self._store = _store(*address, timeout_s, is_master=True, master_listen_fd=server.detach())
        return address

    def join(self, address: Address, backend: str, timeout_s: float) -> None:
        """Connect to all other learners, with the backend `"gloo"` or `"nccl"`."""
        if (
            address[0] == LOOPBACK
        ):  # else gloo looks up the host's name, which may resolve to another address or to none
            loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
            if loopback is not None:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        if self._store is None:
            self._store = _store(*address, timeout_s, is_master=False)
        dist.init_process_group(backend, store=self._store, rank=self.rank, world_size=self.num_learners)

    def leave(self) -> None:
        """Close the connections."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = None

    # Exchanges.

    def gather(self, *numbers: int) -> list[list[int]]:
        """Return these numbers of every learner: one list per number, by rank."""
        table = torch.zeros(len(numbers), self.num_learners, dtype=torch.int64, device=self._device)
        table[:, self.rank] = torch.tensor(numbers)
        _exchange(dist.all_reduce, table)
        rows: list[list[int]] = table.tolist()
        return rows

    def average_scalars(self, scalars: Mapping[str, float], size: int) -> dict[str, float]:
        """Return means over the rows of all learners, the same in all of them.

        Args:
            scalars: Means over the rows of this learner. A name that only some learners have is averaged over these.
            size: Number of rows of this learner.
        """
        told = self._gather_objects((dict(scalars), size))
        means = {}
        for name in dict.fromkeys(name for theirs, _ in told for name in theirs):
            values, sizes = zip(*((theirs[name], rows) for theirs, rows in told if name in theirs), strict=True)
            means[name] = sum(value * rows for value, rows in zip(values, sizes, strict=True)) / sum(sizes)
        return means

    def _gather_objects(self, own: Any) -> list[Any]:
        """Return an object of every learner, by rank."""
        objects: list[Any] = [None] * self.num_learners
        _exchange(dist.all_gather_object, objects, own)
        return objects

    def average(self, parameters: Sequence[nn.Parameter], weight: float, has_problem: bool) -> bool:
        """Replace each gradient by the learners' weighted sum, and return whether all of them are finite.

        There is one exchange per dtype.

        Args:
            parameters: Trainable parameters, the same in all learners. A gradient that only some learners have counts
                as 0 in the others.
            weight: Weight of this learner's gradients; the weights of all learners sum to 1.
            has_problem: Whether this learner's loss is not finite, so that its gradients are meaningless.

        Returns:
            Whether the losses and gradients of all learners are finite; the same answer in all learners. If not, the
            gradients must not be used, and `problems` says why.
        """
        self._has_problem = has_problem
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters) or [None]:  # with none, the problems
            if not self._average([parameter for parameter in parameters if parameter.dtype == dtype], weight):
                return False
        return True

    def _average(self, parameters: Sequence[nn.Parameter], weight: float) -> bool:
        """Average the gradients of parameters of one dtype."""
        gradients = [_gradient(parameter) for parameter in parameters]
        empty = [] if gradients else [torch.zeros(0, device=self._device)]
        own = torch.cat([gradient.reshape(-1) for gradient in gradients] + empty) * weight
        self._has_problem = self._has_problem or not bool(own.isfinite().all())
        marks = [float(parameter.grad is not None) for parameter in parameters]  # which parameters have a gradient
        marks += [float(self._has_problem and rank == self.rank) for rank in range(self.num_learners)]
        whole = torch.cat([own, own.new_tensor(marks)])
        _exchange(dist.all_reduce, whole)
        *parts, summed_marks = torch.split(whole, [*(gradient.numel() for gradient in gradients), len(marks)])
        counts = summed_marks.tolist()
        if any(counts[len(parameters) :]):
            return False
        for parameter, gradient, part, count in zip(parameters, gradients, parts, counts, strict=False):
            if count:
                gradient.copy_(part.view_as(gradient))
                parameter.grad = gradient
        return True

    def problems(self, error: LossError) -> LossError:
        """Return the error of the learners whose loss or gradients are not finite, the same in all learners."""
        texts = self._gather_objects(str(error) if self._has_problem else None)
        told = [f"learner {rank}: {text}" for rank, text in enumerate(texts, 1) if text is not None]
        return LossError("\n".join(told)) if told else error

    def copy_buffers(self, module: nn.Module) -> None:
        """Copy the first learner's buffers, such as running statistics of normalisation layers, to all learners."""
        for buffer in module.buffers():
            _exchange(dist.broadcast, buffer, src=0)


def _store(host: str, port: int, timeout_s: float, **settings: Any) -> Any:
    # With libuv, torch 2.6 takes no socket that listens already.
    settings |= {"timeout": timedelta(seconds=timeout_s), "wait_for_workers": False, "use_libuv": False}
    return dist.TCPStore(host, port, **settings)  # type: ignore[attr-defined]


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _exchange(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call a collective of torch.distributed, which raises a plain RuntimeError when another learner ended."""
    try:
        function(*args, **kwargs)
    except RuntimeError as error:
        raise LostPeerError(f"lost the connection to the other learners: {error}") from error


def find_host_address() -> str:
    """Return the address under which other hosts reach this host; the loopback address if there is no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it selects the interface for outgoing packets
        except OSError:
            return LOOPBACK
        address: str = probe.getsockname()[0]
        return address


def learner_device(setting: str, rank: int) -> str:
    """Return the device of one of several learners: `"auto"` and `"cuda"` assign the GPUs in turn."""
    if setting not in ("auto", "cuda") or not torch.cuda.is_available():
        return setting
    return f"cuda:{rank % torch.cuda.device_count()}"


def gpu_id(device: torch.device) -> str | None:
    """Return an identifier that is unique among the GPUs of all hosts; `None` for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def backend_for(gpu_ids: Sequence[str | None]) -> str:
    """Return `"nccl"` if each learner has its own GPU, which NCCL requires, else `"gloo"`."""
    return "nccl" if None not in gpu_ids and len(set(gpu_ids)) == len(gpu_ids) else "gloo"
