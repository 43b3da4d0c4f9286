"""`corral evaluate` and `corral play`: the policy of a run or a checkpoint in its env."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from corral.algorithms.config.config import AlgorithmConfig
from corral.core.seeding import module_seed
from corral.core.settings import parse_settings
from corral.envs.config import EnvironmentSettings
from corral.envs.vector import env_name
from corral.errors import CheckpointError, ConfigError
from corral.runners.mapping import begin_mapping
from corral.runs.checkpoint import Checkpoint, find_checkpoint, read_checkpoint
from corral.runs.checkpoint.imports import check_imports
from corral.runs.policies.agent_policies import AgentPolicies
from corral.runs.policies.policy import Policy, checkpoint_policy
from corral.tools.cli.experiment import parse_pair
from corral.tools.playing.evaluate import evaluate_policy
from corral.tools.playing.play import play_episodes
from corral.tools.playing.player import MAX_EPISODE_STEPS

OF_ENVS: dict[str, Any] = {
    "env": None,
    "env_config": [],
    "episodes": None,
    "seeds": None,
    "max_episode_steps": MAX_EPISODE_STEPS,
}
"""Options of `corral evaluate` that only an env reads, by name, with their defaults."""

OF_DATA = ("method", "module", "gamma", "max_ratio", "gradient_steps", "batch_size", "lr")
"""Options of `corral evaluate` that only estimates from data read."""

FAULTS = ("env_step_timeout_s", "restart_failed_sub_environments")
"""Settings of a run that also hold for the episodes that the command line plays."""


class Setup(NamedTuple):
    """A policy and its env.

    Attributes:
        path: Checkpoint that holds the policy.
        metadata: What `metadata.json` of the checkpoint holds.
        policy: The policy, or the policies of several agents.
        env: Its env, as in `.environment(env)`.
        env_config: Settings of the env.
        wrappers: Wrappers of the env.
        faults: What happens when the env fails, for `evaluate_policy`.
    """

    path: str
    metadata: Mapping[str, Any]
    policy: Policy | AgentPolicies
    env: Any
    env_config: dict[str, Any]
    wrappers: list[Any]
    faults: dict[str, Any]


def load_setup(options: argparse.Namespace) -> Setup:
    """Return the policy of a run or a checkpoint, and the env of its config, with the options in place of it.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or it names an env that is not taken from a checkpoint.
        ConfigError: The env cannot be imported, or no file can name it and no option gives it.
    """
    checkpoint = read_checkpoint(find_checkpoint(options.path, prefer="best"), with_state=False)
    changed = dict(parse_pair(text, "--env-config") for text in options.env_config)
    given = {"env"} if options.env else set()
    settings = {name: value for name, value in _mapping(checkpoint.config, "environment") if name not in given}
    if is_external := _is_external(checkpoint):
        settings = _env_of_evaluation(checkpoint, settings, options.env)
    _check_named(checkpoint, given | {f"env_config.{name}" for name in changed}, is_external)
    check_imports({"environment": settings}, checkpoint.path)
    environment = parse_settings(EnvironmentSettings, settings, str(checkpoint.path))
    if environment.env is None and not options.env and is_external:
        raise ConfigError(f"{checkpoint.path} learned from episodes of simulators: give an env, with --env.")
    if environment.env is None and not options.env:
        raise ConfigError(f"{checkpoint.path} learned from recorded data without an env: give one, with --env.")
    return Setup(
        str(checkpoint.path),
        checkpoint.metadata,
        _policy(checkpoint, options.seed),
        options.env or environment.env,
        {**environment.env_config, **changed},
        environment.all_wrappers,
        {name: value for name, value in _mapping(checkpoint.config, "fault_tolerance") if name in FAULTS},
    )


def _is_external(checkpoint: Checkpoint) -> bool:
    """Return whether simulators played the episodes, so that its settings of the env are settings of a server."""
    return str(dict(_mapping(checkpoint.config, "environment")).get("env")).endswith(":ExternalEnv")


def _env_of_evaluation(checkpoint: Checkpoint, settings: Mapping[str, Any], env: str | None) -> dict[str, Any]:
    """Return settings of the env in which a run was evaluated whose episodes simulators played.

    Args:
        checkpoint: A checkpoint of the run.
        settings: Settings of its env.
        env: Env of the options; the settings of another one do not apply to it.
    """
    evaluated = dict(dict(_mapping(checkpoint.config, "evaluation")).get("evaluation_config") or {})
    if env is not None and evaluated.get("env") != env:
        evaluated = {}
    found: dict[str, Any] = {"env": None, "env_config": {}, "wrappers": []}
    found |= {name: value for name, value in evaluated.items() if name in (*found, "action_masks")}
    return {**settings, **found}


def _policy(checkpoint: Checkpoint, seed: int | None) -> Policy | AgentPolicies:
    """Return the only policy of a checkpoint, or the policies of several agents with their mapping."""
    settings = dict(_mapping(checkpoint.config, "multi_agent"))
    if not settings.get("policies"):
        return checkpoint_policy(checkpoint, seed=seed)
    mapping = {"policy_mapping_fn": settings.get("policy_mapping_fn")}
    check_imports({"multi_agent": mapping}, checkpoint.path)
    config = AlgorithmConfig().copy(policies=[*settings["policies"]], **mapping)
    seeds = {module_id: None if seed is None else module_seed(seed, module_id) for module_id in config.module_ids}
    return AgentPolicies(
        {module_id: checkpoint_policy(checkpoint, module_id=module_id, seed=own) for module_id, own in seeds.items()},
        begin_mapping(config),
    )


def _mapping(values: Mapping[str, Any], name: str) -> Iterable[tuple[str, Any]]:
    found = values.get(name) or {}
    if not isinstance(found, dict):
        raise CheckpointError(f"the checkpoint is damaged: {name!r} is {type(found).__name__}, and should be a dict.")
    return found.items()


def _check_named(checkpoint: Checkpoint, given: set[str], is_external: bool) -> None:
    """Refuse settings of the env that no file can name, unless options give them, or a server has them."""
    remedies = {
        "env": "give it, with --env my_envs:MyEnv",
        "env_config": "give it, with --env-config NAME=VALUE",
        "wrappers": "use corral.evaluate_policy(corral.load_policy(path), env, wrappers=[...])",
    }
    for place, value in _mapping(checkpoint.metadata, "unnamed"):
        group, _, name = place.partition(".")
        if place == "multi_agent.policy_mapping_fn":
            raise ConfigError(
                f"{checkpoint.path}: no file can hold {place} of this run ({value}): train with a function of a file, "
                "policy_mapping_fn='my_file:my_function', or use evaluate_policy(algorithm, env)."
            )
        if (
            group == "environment"
            and not is_external
            and name not in given
            and (remedy := remedies.get(name.partition(".")[0]))
        ):
            raise ConfigError(f"{checkpoint.path}: no file can hold {place} of this run ({value}): {remedy}.")


def _refuse_others(options: argparse.Namespace) -> None:
    """Refuse options that would have no effect.

    Raises:
        ConfigError: Names the option.
    """
    if options.data is None:
        given = [name for name in OF_DATA if getattr(options, name) is not None]
        remedy = "needs --data PATH: an evaluation in the env does not read it"
    else:
        given = [name for name, default in OF_ENVS.items() if getattr(options, name) != default]
        remedy = "has no effect with --data: recorded episodes are evaluated, and no env plays"
    if given:
        raise ConfigError(f"--{given[0].replace('_', '-')} {remedy}.")


def evaluate(options: argparse.Namespace) -> int:
    """Run `corral evaluate`: play episodes, and print what they returned; with `--data`, estimate it from these."""
    _refuse_others(options)
    if options.data is not None:
        from corral.tools.cli.estimate import estimate  # here: an evaluation in an env needs nothing of it

        return estimate(options)
    setup = load_setup(options)
    found = evaluate_policy(
        setup.policy,
        setup.env,
        episodes=options.episodes,
        env_config=setup.env_config,
        wrappers=setup.wrappers,
        seed=options.seed,
        seeds=options.seeds,
        explore=options.explore,
        max_episode_steps=options.max_episode_steps,
        **setup.faults,
    )
    iteration = setup.metadata.get("training_iteration")
    if options.json:
        described = {"checkpoint": setup.path, "training_iteration": iteration, "env": env_name(setup.env)}
        print(json.dumps({**described, "seed": options.seed, "seeds": options.seeds, **found.to_dict()}))
    else:
        print(f"{'checkpoint':<20}{setup.path} (iteration {iteration})\n{'env':<20}{env_name(setup.env)}\n{found}")
    return 0


def _has_display() -> bool:
    """Return whether windows can open here, where that can be known."""
    return not sys.platform.startswith("linux") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def play(options: argparse.Namespace) -> int:
    """Run `corral play`: show or record episodes, and print the return of each one."""
    if options.format is not None and options.record is None:
        raise ConfigError("--format needs --record DIR: nothing is recorded without it.")
    setup = load_setup(options)
    if options.record is None and not _has_display():
        print("corral: no display was found: if no window opens, record with --record DIR.", file=sys.stderr)
    print(f"{setup.path} (iteration {setup.metadata.get('training_iteration')}) in {env_name(setup.env)}")
    played = play_episodes(
        setup.policy,
        setup.env,
        episodes=options.episodes,
        record=options.record,
        file_format=options.format or "mp4",
        env_config=setup.env_config,
        wrappers=setup.wrappers,
        seed=options.seed,
        explore=options.explore,
        max_episode_steps=options.max_episode_steps,
    )
    for number, episode in enumerate(played):
        where = "" if episode.file is None else f", {episode.file}"
        print(f"episode {number}: return {episode.episode_return:.2f}, {episode.episode_len} steps{where}", flush=True)
    return 0
