"""`corral export`: the policy of a run or a checkpoint as a file that other programs read, checked against it."""

from __future__ import annotations

import argparse
import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from corral.core.tree import map_tree
from corral.data.offline.sources import open_source
from corral.errors import ConfigError, ExportError
from corral.runs.checkpoint import find_checkpoint, read_checkpoint
from corral.runs.policies.agent_policies import AgentPolicies
from corral.runs.policies.export import check_suffix, module_weights
from corral.runs.policies.export_check import MAX_ROWS, WatchedPolicy, check_export
from corral.runs.policies.policy import Policy, checkpoint_policy
from corral.tools.cli.policies import load_setup
from corral.tools.playing.evaluate import evaluate_policy

OF_ENVS = ("env", "env_config", "episodes")
"""Options that only an env reads."""


def export(options: argparse.Namespace) -> int:
    """Run `corral export`: write the file, check it, print what was compared, and return the exit status."""
    file: Path = options.output
    suffix = check_suffix(file)
    _refuse_others(options, suffix)
    checkpoint = read_checkpoint(find_checkpoint(options.path, prefer="best"), with_state=False)
    if options.module is None and len(ids := sorted(checkpoint.policies)) > 1:
        raise ConfigError(f"{checkpoint.path} has the policies {ids}: choose one, with --module.")
    policy = checkpoint_policy(checkpoint, module_id=options.module)
    # Next to the file and under another name, so that a file that does not act as the policy replaces nothing.
    written = file.with_name(f".{file.stem}.{uuid.uuid4().hex}{suffix}")
    try:
        with _writing(file):
            written.parent.mkdir(parents=True, exist_ok=True)
            written.touch()  # before anything takes time
            policy.export(written)
        if suffix == ".safetensors":
            compared = _check_weights(written, policy)
        else:
            compared = str(check_export(written, _acted(options, policy)))
        with _writing(file):
            os.replace(written, file)
    finally:
        with contextlib.suppress(OSError):
            written.unlink()
    print(f"{checkpoint.path} (iteration {checkpoint.metadata.get('training_iteration')})\n{file}: {compared}")
    return 0


@contextlib.contextmanager
def _writing(file: Path) -> Iterator[None]:
    """Name the file, and not the one under another name, where a block cannot write it.

    Raises:
        ExportError: It cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise ExportError(f"{file} cannot be written: {error.strerror or error}; name another file.") from error


def _refuse_others(options: argparse.Namespace, suffix: str) -> None:
    """Refuse options that would have no effect.

    Raises:
        ConfigError: Names the option.
    """
    given = [name for name in OF_ENVS if getattr(options, name) not in (None, [])]
    if suffix == ".safetensors":
        given += [] if options.data is None else ["data"]
        reason = "has no effect on .safetensors: weights are compared, and no observation is needed"
    else:
        given = given if options.data is not None else []
        reason = "has no effect with --data: its observations check the file, and no env plays"
    if given:
        raise ConfigError(f"--{given[0].replace('_', '-')} {reason}.")


def _check_weights(file: Path, policy: Policy) -> str:
    """Compare the weights in a file with the policy's."""
    expected, found = module_weights(policy.module), load_file(file)
    if expected.keys() != found.keys() or not all(np.array_equal(expected[name], found[name]) for name in expected):
        raise ExportError("the exported file does not hold the weights of its policy.")
    return f"{len(found)} arrays, {sum(array.size for array in found.values()):,} numbers"


def _acted(options: argparse.Namespace, policy: Policy) -> WatchedPolicy:
    """Return the policy after it has acted in its env, or on recorded observations."""
    watched = WatchedPolicy(policy)
    if options.data is not None:
        _act_on_data(watched, options.data, options.module)
        return watched
    setup = load_setup(options)
    acting: Policy | AgentPolicies = watched
    if isinstance(setup.policy, AgentPolicies):
        acting = setup.policy
        acting.policies[options.module or next(iter(acting.policies))] = watched  # unnamed, it is the only one
    evaluate_policy(
        acting,
        setup.env,
        episodes=3 if options.episodes is None else options.episodes,
        env_config=setup.env_config,
        wrappers=setup.wrappers,
        **setup.faults,
    )
    return watched


def _act_on_data(policy: WatchedPolicy, path: str, module_id: str | None) -> None:
    """Let a policy answer the recorded observations of its module, until it has enough of them."""
    for part in open_source(path).parts():
        for episode in part.episodes() if module_id in (None, part.module_id) else ():
            policy.reset()
            size = len(episode) - 1  # nobody acts in the final observation
            for rows in map(slice, range(size), range(1, size + 1)) if policy.has_memory else [slice(size)]:
                policy.batch(map_tree(lambda leaf, rows=rows: leaf[rows], episode.obs))
            if policy.num_rows >= MAX_ROWS:
                return
