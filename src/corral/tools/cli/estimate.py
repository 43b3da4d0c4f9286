"""`corral evaluate RUN --data PATH`: the return of a policy, estimated from recorded data without an env."""

from __future__ import annotations

import argparse
import json
from typing import Any

from corral.errors import ConfigError
from corral.runs.checkpoint import find_checkpoint, read_checkpoint
from corral.runs.policies.estimate_return import estimate_return
from corral.runs.policies.policy import checkpoint_policy

DEFAULT_GAMMA = 0.99
"""Discount per step where the run's config has none that is a number."""


def estimate(options: argparse.Namespace) -> int:
    """Estimate the return of a policy, and print the estimates."""
    checkpoint = read_checkpoint(find_checkpoint(options.path, prefer="best"), with_state=False)
    ids = sorted(checkpoint.policies.keys() & checkpoint.weights.keys())
    if options.module is None and len(ids) > 1:
        raise ConfigError(f"{checkpoint.path} has the modules {ids}: choose one of them, with --module {ids[0]}.")
    names = {"gradient_steps": "num_gradient_steps", "batch_size": "batch_size", "lr": "lr"}
    fit = {name: getattr(options, option) for option, name in names.items() if getattr(options, option) is not None}
    found = estimate_return(
        checkpoint_policy(checkpoint, module_id=options.module, seed=options.seed),
        options.data,
        methods=options.method or "all",
        gamma=gamma_of(checkpoint.config, options.module or ids[0]) if options.gamma is None else options.gamma,
        explore=options.explore,
        module_id=options.module,
        max_ratio=options.max_ratio,
        seed=options.seed,
        **fit,
    )
    iteration = checkpoint.metadata.get("training_iteration")
    if options.json:
        described = {"checkpoint": str(checkpoint.path), "training_iteration": iteration, "data": options.data}
        print(json.dumps({**described, "seed": options.seed, **found.to_dict()}))
    else:
        print(f"{'checkpoint':<20}{checkpoint.path} (iteration {iteration})\n{'data':<20}{options.data}\n{found}")
    return 0


def gamma_of(config: Any, module_id: str) -> float:
    """Return the discount with which a module of a run was trained."""
    groups = config if isinstance(config, dict) else {}
    of_all = (groups.get("training") or {}).get("gamma")
    of_modules = (groups.get("multi_agent") or {}).get("algorithm_config_overrides_per_module") or {}
    found = (of_modules.get(module_id) or {}).get("gamma", of_all)
    return float(found) if isinstance(found, (int, float)) else DEFAULT_GAMMA
