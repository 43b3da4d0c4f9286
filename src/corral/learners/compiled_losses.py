"""Losses that `torch.compile` compiles, into CUDA graphs where asked for."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from corral.core.seeding import get_global_rngs, set_global_rngs
from corral.core.tree import map_tree
from corral.learners.losses import Batch, Loss, find_fault
from corral.modules.module import Module

log = logging.getLogger("corral")

NOT_COMPILED = (
    "torch.compile failed on the loss, and training continues without it. It needs a C++ compiler such as gcc, and on "
    "a GPU Triton. Install what the reason names, or leave compile=%r out of .learners(...)"
)
NOT_CAPTURED = (
    "CUDA graphs cannot record the loss, and training continues with the loss compiled without them, as with "
    "compile=True. Change what the reason names, or set compile=True instead of compile=%r"
)
CUDA_GRAPHS = {
    "triton.cudagraphs": True,  # what the mode "reduce-overhead" of torch.compile sets
    "triton.cudagraph_or_error": True,  # without it, only torch's own log would say what runs without CUDA graphs
}

# What `_compile_graph`, which torch calls, tells the loss that is running.
_failures: list[tuple[str, str]] = []
_new_graphs: list[fx.GraphModule] = []


def compile_loss(loss: Loss, module_id: str, *, cuda_graphs: bool = False) -> Loss:
    """Return a loss that `torch.compile` compiles when it is first called; the module and its weights stay as they are.

    Where the compilation fails, the loss runs without it from the same call on, and a warning names the reason.

    Args:
        loss: The loss.
        module_id: Id of the module that it trains, for the warning.
        cuda_graphs: Whether CUDA graphs replay what was compiled. The module must be on a CUDA device.
    """
    compiled: Callable[..., Any] | None = None
    records = cuda_graphs
    warned: set[str] = set()

    def call(module: Module, batch: Batch, coefficients: Mapping[str, float]) -> Any:
        nonlocal compiled, records
        if compiled is loss:
            return loss(module, batch, coefficients)
        if cuda_graphs:
            _begin_replay(module)
        restore = _remember(module) if compiled is None else None  # a loss may be half done when its compilation fails
        _failures.clear()
        _new_graphs.clear()
        while True:
            try:
                if compiled is None:  # not earlier: it imports torch's compiler, which takes two seconds
                    compiled = _compiled(loss, records)
                result = _call(compiled, module, batch, coefficients, is_first=restore is not None)
                break
            except torch._dynamo.exc.TorchDynamoException as error:
                _failures.append((NOT_CAPTURED if records else NOT_COMPILED, _reason(error)))
                compiled, records = None if records else loss, False
                if restore is not None:
                    restore()
        if _failures:
            _warn(module_id, "cuda_graphs" if cuda_graphs else True, warned)
            if any(message == NOT_COMPILED for message, _ in _failures):
                compiled = loss
        return _copied(result) if cuda_graphs and find_fault(result, batch) is None else result

    return call


def _call(
    compiled: Callable[..., Any], module: Module, batch: Batch, coefficients: Mapping[str, float], *, is_first: bool
) -> Any:
    """Return what a compiled loss returns; its backward pass is compiled too when this function returns."""
    result = compiled(module, batch, coefficients)
    if (is_first or _new_graphs) and find_fault(result, batch) is None:
        _compile_backward(module, result)
    return result


def _warn(module_id: str, setting: bool | str, warned: set[str]) -> None:
    """Warn of each kind of failure, unless it is among those that were warned of, and add it to them."""
    for message, reason in _failures:
        if message not in warned:
            warned.add(message)
            log.warning(f"learners/{module_id}: {message}: %s.", setting, reason)


def _reason(error: Exception) -> str:
    """Return what an error says, without the advice on debugging that torch adds."""
    return f"{' '.join(str(error).strip().partition(chr(10) * 2)[0].split())} ({type(error).__name__})"


def _compiled(loss: Loss, cuda_graphs: bool) -> Callable[..., Any]:
    """Return what `torch.compile` makes of a loss, or the loss, if it does not work at all with this Python."""
    import torch._functorch.config as functorch_config

    # A backward pass that frees what it has used cannot run for several losses one after another. torch asks this
    # setting when a loss is compiled, and again in each backward pass, so it stays.
    functorch_config.donated_buffer = False
    try:
        return torch.compile(loss, backend=_compile_graph, options={"cuda_graphs": cuda_graphs})
    except (RuntimeError, ImportError) as error:
        _failures.append((NOT_COMPILED, _reason(error)))
        return loss


def _compile_graph(graph: fx.GraphModule, inputs: Sequence[Tensor], options: Mapping[str, bool]) -> Callable[..., Any]:
    """Compile a part of a loss; what cannot be compiled runs as it is, so that no part of the loss runs twice."""
    from torch._inductor import compile

    _new_graphs.append(graph)
    compiled: Callable[..., Any]
    if options["cuda_graphs"]:
        compiled = compile(graph, list(inputs), options=CUDA_GRAPHS)  # an error compiles the loss without them
        return compiled
    plain = fx.GraphModule(graph, copy.deepcopy(graph.graph))  # a compilation changes the graph
    try:
        compiled = compile(graph, list(inputs))
    except torch._dynamo.exc.RestartAnalysis:  # torch compiles this part again, with more numbers that may change
        raise
    except Exception as error:  # of whatever the compiler calls
        compiled = partial(_run, (NOT_COMPILED, _reason(error)), plain)
    return compiled


def _run(failure: tuple[str, str], graph: Callable[..., Any], *inputs: Any) -> Any:
    """Run a part of a loss that was not compiled, now or for a loss before."""
    _failures.append(failure)
    return graph(*inputs)


def _compile_backward(module: Module, result: Any) -> None:
    """Compute gradients once, so that what fails in the compilation of the backward pass fails here.

    That the graph is kept tells the compiler that several losses may be minimised one after another.
    """
    losses = result[0].values() if isinstance(result[0], Mapping) else result[:1]
    learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
    scalars = [scalar for scalar in losses if scalar.requires_grad]
    try:
        if scalars:
            torch.autograd.grad(sum(scalars), learning, retain_graph=True, allow_unused=True)
    except Exception as error:  # what is wrong with the loss itself fails again without compilation
        raise torch._dynamo.exc.TorchDynamoException(f"the backward pass: {error}") from error


def _remember(module: Module) -> Callable[[], None]:
    """Return a function that restores what a loss may move: the buffers of the module and the global random numbers."""
    rngs, before = get_global_rngs(), [buffer.clone() for buffer in module.buffers()]

    def restore() -> None:
        set_global_rngs(rngs)
        for buffer, was in zip(module.buffers(), before, strict=True):
            buffer.copy_(was)

    return restore


def _begin_replay(module: Module) -> None:
    """Let the next replay overwrite what the last one returned.

    The first gradient of a parameter would be memory of the graph. So each parameter has a gradient before.
    """
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _copied(result: Any) -> Any:
    """Return copies of what a loss returned, which the next replay does not overwrite; the loss keeps its gradient."""
    loss, reported = result
    return map_tree(torch.clone, loss), {name: value.detach().clone() for name, value in reported.items()}
