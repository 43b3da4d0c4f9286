"""`corral serve`: a run whose episodes are played by simulators in other programs."""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING, Any

from corral.core.space_descriptions import describe_space
from corral.envs.seats import SeatsSpace
from corral.envs.vector import resolve_env
from corral.errors import ConfigError
from corral.runners.serving.agent_messages import describe_agents
from corral.runners.serving.external_env import SPACES, spaces_of
from corral.tools.cli.train import run as run_training

if TYPE_CHECKING:
    from corral.algorithms.algorithm import Algorithm
    from corral.algorithms.config.config import AlgorithmConfig

EXTERNAL = "corral:ExternalEnv"
"""The env of the config of a run that is served."""
NUM_ENVS = 16


def run(options: argparse.Namespace) -> int:
    """Run `corral serve`; return the exit status."""
    if options.seeds is not None:
        raise ConfigError("--seeds: runs at the same time cannot share their clients: serve one run at a time.")
    given = {
        "address": _address(options),
        "token_file": options.token_file and str(options.token_file),
        "certificate": options.certificate and str(options.certificate),
        "key": options.key and str(options.key),
    }

    def prepare(config: AlgorithmConfig) -> None:
        serve_config(config, {name: value for name, value in given.items() if value is not None}, options.num_envs)

    return run_training(options, prepare=prepare, built=_say_where)


def _address(options: argparse.Namespace) -> str | None:
    """Return the address that the options give, or `None`.

    Raises:
        ConfigError: Both a socket and a port are given.
    """
    if options.unix is not None:
        if options.host is not None or options.port is not None:
            raise ConfigError("--unix names a socket of this machine: leave --host and --port out.")
        return f"unix:{options.unix}"
    if options.host is None and options.port is None:
        return None
    host = options.host or "127.0.0.1"
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{host}:{5555 if options.port is None else options.port}"


def serve_config(config: AlgorithmConfig, given: dict[str, Any], num_envs: int | None) -> None:
    """Change a config so that clients play the episodes of training, with the spaces of the env that it names.

    Evaluation stays in the env that it names.

    Args:
        config: The config.
        given: Settings of the policy server.
        num_envs: Episodes that are played at the same time; `None` is what the config has, or 16.

    Raises:
        ConfigError: The env cannot be made, so that its spaces are not known.
    """
    if not _is_external(config.env):
        own = {name: getattr(config, name) for name in ("env", "env_config", "wrappers", "action_masks")}
        described = _describe(config)
        for name in ("env", "env_config", "wrappers"):
            # Also an empty env_config: evaluation would otherwise have the one of the policy server.
            if name not in config.evaluation_config and (name != "wrappers" or own[name]):
                config.evaluation_config = {**config.evaluation_config, name: own[name]}
        config.env, config.wrappers, config.env_config = EXTERNAL, [], described
        if isinstance(config.action_masks, str):  # the client puts them into the observations
            config.evaluation_config = {"action_masks": config.action_masks, **config.evaluation_config}
            config.action_masks = True
    config.env_config = {**config.env_config, **given}
    if num_envs is not None:
        config.num_envs_per_env_runner = num_envs
    elif config.num_envs_per_env_runner is None:
        config.num_envs_per_env_runner = NUM_ENVS


def _is_external(env: Any) -> bool:
    return env is not None and getattr(resolve_env(env), "IS_EXTERNAL", False)


def _describe(config: AlgorithmConfig) -> dict[str, Any]:
    """Return descriptions of the spaces of a config's env, with its wrappers."""
    if config.env is None:
        raise ConfigError(
            "no env: name the env whose spaces the simulators have, with --env or in the file of --config; or describe "
            "its spaces in env_config of env corral:ExternalEnv."
        )
    found = spaces_of(config.env, config.env_config, config.all_wrappers)
    try:
        if not isinstance(found[0], SeatsSpace):
            return {name: describe_space(space) for name, space in zip(SPACES, found, strict=True)}
        described = describe_agents(found[0].seats)
        # Pairs, because keys in a file are texts, and agents may be numbers.
        return {f"{name}s": [[agent, one[name]] for agent, one in described.items()] for name in SPACES}
    except ValueError as error:
        raise ConfigError(f"a policy server cannot describe this space to clients: {error}") from error


def _say_where(algorithm: Algorithm) -> None:
    """Print where clients connect."""
    addresses = algorithm.env_runner_group.foreach_env_runner(lambda runner: runner.env.server.address)
    client = "MultiAgentPolicyClient" if algorithm.config.is_multi_agent else "PolicyClient"
    with contextlib.suppress(OSError, ValueError):  # standard output may be closed
        for address in addresses:
            print(f'Simulators connect to {address}, for instance with {client}("{address}").', flush=True)
