"""Policies as files that other programs read: ONNX, programs of `torch.export`, and weights."""

from __future__ import annotations

import io
import json
import os
import uuid
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gymnasium import Space
from numpy.typing import NDArray
from safetensors.numpy import save
from torch import Tensor, nn

import corral
from corral.core.space_descriptions import describe_space
from corral.core.spaces import space_tree
from corral.core.tree import Tree, leaves, map_tree, named_leaves
from corral.errors import ConfigError, ExportError, MissingPackageError
from corral.modules.exporting import silence_exporter
from corral.modules.heuristic import HeuristicModule
from corral.modules.memory import initial_states
from corral.modules.module import Module
from corral.modules.networks import example_obs

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from corral.modules.transforms.pipeline import Pipeline
    from corral.runs.policies.policy import Policy

INPUT, OUTPUT, BATCH = "obs", "actions", "batch"
STATE, NEXT_STATE = "state", "next_state"  # of a module with memory
METADATA_FILE = "corral.json"  # in a .pt2 file


def export_policy(policy: Policy, file: Path) -> Path:
    """Write a policy to a file, and return its path; see `Policy.export`."""
    suffix = check_suffix(file)
    if suffix == ".onnx" and (missing := [name for name in ("onnx", "onnxscript") if find_spec(name) is None]):
        raise MissingPackageError(f"export: .onnx needs {' and '.join(missing)}: run `pip install 'corral[onnx]'`.")
    if isinstance(policy.module, HeuristicModule):
        raise ExportError(
            f"{type(policy.module).__name__} chooses actions by rules in Python: only a module with a network can be "
            "exported."
        )
    if suffix == ".safetensors":
        data = save(module_weights(policy.module))
    else:
        policy.module.silence_noise()
        with silence_exporter():
            program = _program(policy)
            data = (_onnx_bytes if suffix == ".onnx" else _pt2_bytes)(program, policy)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    return file


def check_suffix(file: Path) -> str:
    """Return the suffix of the name of an exported file.

    Raises:
        ConfigError: The name ends with none of those that say a format.
    """
    if file.suffix not in (".onnx", ".pt2", ".safetensors"):
        raise ConfigError(
            f"export: {file} must end with .onnx (ONNX), .pt2 (torch.export) or .safetensors (the weights alone)."
        )
    return file.suffix


def module_weights(module: Module) -> dict[str, NDArray[Any]]:
    """Return the weights of a module by name, as `.rl_module(load_from=FILE)` takes them."""
    return {name: value.detach().cpu().contiguous().numpy() for name, value in module.state_dict().items()}


class _Graph(nn.Module):
    """From observations, a tree of `[B, ...]`, to env actions `[B, ...]`; with memory, also from states to states."""

    def __init__(self, module: Module, pipeline: Pipeline | None) -> None:
        super().__init__()
        self.module, self.pipeline = module, pipeline

    def forward(self, *inputs: Tree) -> Tree:
        obs, *states = inputs
        if self.pipeline is not None:
            obs = self.pipeline.tensors_from_stored(obs)
        outputs: Any = self.module.policy(obs, *states)
        if not states:
            return map_tree(Tensor.detach, self.module.distribution.env_mode(outputs))
        dist_inputs, after = outputs
        if self.module.ACTION_STATE is not None:
            after = {**after, self.module.ACTION_STATE: self.module.distribution.mode(dist_inputs)}
        after = map_tree(lambda _, leaf: leaf.detach(), states[0], after)  # in the order in which they are named
        actions = leaves(self.module.distribution.env_mode(dist_inputs))
        return (*(action.detach() for action in actions), *leaves(after))


def _input_space(policy: Policy) -> Space[Any]:
    """Return the space of the file's inputs: what the env gives, or where transforms look back, what they give."""
    pipeline = policy.pipeline
    return policy.observation_space if pipeline is None else pipeline.spaces[pipeline.num_stored]


def _examples(policy: Policy) -> tuple[Tree, ...]:
    """Return inputs of the file for two rows, as trees of tensors."""
    obs = example_obs(_input_space(policy))
    return (obs, initial_states(policy.module, 2)) if policy.module.has_memory() else (obs,)


def _program(policy: Policy) -> ExportedProgram:
    module, examples, batch = policy.module, _examples(policy), torch.export.Dim(BATCH)
    graph = _Graph(module, policy.pipeline)
    shapes = (map_tree(lambda _: {0: batch}, examples),)  # of *inputs
    try:
        with torch.no_grad():
            return torch.export.export(graph, examples, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ExportError(
            f"the policy of {type(module).__name__} cannot be exported: {reason} Its "
            "policy(obs) must use torch operations only, take any batch size, and not branch on values of tensors; "
            "`len(tensor)` fixes the batch size, `tensor.shape[0]` does not. In your own "
            "transforms, define transform_tensors(obs) if transform_obs uses NumPy."
        ) from error


def _metadata(policy: Policy) -> dict[str, str]:
    return {
        "corral_version": corral.__version__,
        "observation_space": json.dumps(describe_space(_input_space(policy))),
        "action_space": json.dumps(describe_space(policy.action_space)),
        "inputs": json.dumps(_input_names(policy)),
        "outputs": json.dumps(_output_names(policy.module)),
    }


def _input_names(policy: Policy) -> list[str]:
    parts = zip((INPUT, STATE), _examples(policy), strict=False)
    return [name for prefix, tree in parts for name, _ in named_leaves(tree, prefix)]


def _output_names(module: Module) -> list[str]:
    states = initial_states(module, 1) if module.has_memory() else {}
    actions = named_leaves(space_tree(module.action_space), OUTPUT)
    return [name for name, _ in (*actions, *named_leaves(states, NEXT_STATE))]


def _onnx_bytes(program: ExportedProgram, policy: Policy) -> bytes:
    made: Any = torch.onnx.export(
        program,
        input_names=_input_names(policy),
        output_names=_output_names(policy.module),
        dynamic_shapes=(map_tree(lambda _: {0: BATCH}, _examples(policy)),),  # names the axis
        dynamo=True,
        verbose=False,
    )
    made.model.metadata_props.update(_metadata(policy))
    serialized: bytes = made.model_proto.SerializeToString()
    return serialized


def _pt2_bytes(program: ExportedProgram, policy: Policy) -> bytes:
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={METADATA_FILE: json.dumps(_metadata(policy))})
    return file.getvalue()
