"""RLlib's policy servers: settings that name one become an `ExternalEnv` that listens there."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from corral.compat.rllib.envs import resolve_env
from corral.compat.rllib.runners import EnvRunner
from corral.core.space_descriptions import describe_space
from corral.errors import ConfigError
from corral.runners.serving.external_env import ExternalEnv, spaces_of

if TYPE_CHECKING:
    from corral.compat.rllib.config import AlgorithmConfig

NUM_SEATS = 16
"""Episodes that can be played at the same time if the config leaves `num_envs_per_env_runner` at RLlib's default."""


class IOContext:
    """What the function of `offline_data(input_=...)` gets: which runner it is asked for.

    Args:
        config: The config.
        worker_index: Index of the runner, from 1; 0 is the embedded one.

    Attributes:
        worker: An object with `num_workers` and `worker_index`.
        input_config: The setting of this name.
    """

    def __init__(self, config: AlgorithmConfig, worker_index: int) -> None:
        """Keep both."""
        self.config, self.worker_index, self.log_dir = config, worker_index, None
        self.worker = SimpleNamespace(num_workers=config.num_env_runners, worker_index=worker_index)
        self.input_config = config.input_config


@dataclass
class PolicyServerInput:
    """Where a runner listens for clients, as the function of `offline_data(input_=...)` returns it.

    Attributes:
        ioctx: What the function got.
        address: Host name or IP address at which to listen.
        port: Port at which to listen.
        idle_timeout: No effect: a runner waits until simulators report steps.
        max_sample_queue_size: No effect: no steps are reported while nobody samples.
    """

    ioctx: Any
    address: str
    port: int
    idle_timeout: float = 3.0
    max_sample_queue_size: int = 20


class EnvRunnerServerForExternalInference(EnvRunner):
    """Setting of `env_runner_cls` with which runners listen for clients of RLlink, at `env_config["port"]`.

    As in RLlib, the embedded runner listens at that port, and others at the ports after it, on this machine.
    """


def served_settings(config: AlgorithmConfig) -> dict[str, Any]:
    """Return the settings of Corral in which a config whose runners are policy servers differs; else nothing.

    Raises:
        ConfigError: The ports of the runners do not follow one another, or the spaces are not known.
    """
    if not (servers := _servers_of_rllink(config) or _servers_of(config)):
        return {}
    first, host = servers[0].port, servers[0].address
    if [(server.address, server.port) for server in servers] != [(host, first + i) for i in range(len(servers))]:
        shown = ", ".join(f"{server.address}:{server.port}" for server in servers)
        raise ConfigError(
            f"input_: the runners would listen at {shown}: return PolicyServerInput(ioctx, ADDRESS, PORT + "
            "ioctx.worker_index - 1), because Corral's runners listen at ports that follow one another."
        )
    num_seats = NUM_SEATS if config.num_envs_per_env_runner == 1 else config.num_envs_per_env_runner
    return {
        "env": ExternalEnv,
        "env_config": {"address": f"{host}:{first}", **_described_spaces(config)},
        "vectorization": "auto",
        "num_envs_per_env_runner": num_seats,
        **_fragment_settings(config, num_seats),
    }


def _servers_of_rllink(config: AlgorithmConfig) -> list[PolicyServerInput]:
    runner_class, num_runners = config.env_runner_cls, int(config.num_env_runners)
    if not (isinstance(runner_class, type) and issubclass(runner_class, EnvRunnerServerForExternalInference)):
        return []
    port = int(config.env_config.get("port", 5555))
    return [
        PolicyServerInput(None, "localhost", port + i) for i in (range(1, num_runners + 1) if num_runners else (0,))
    ]


def _servers_of(config: AlgorithmConfig) -> list[PolicyServerInput]:
    """Return the servers of the runners that sample, in their order."""
    function, num_runners = config.input_, int(config.num_env_runners)
    if not callable(function):
        return []
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):
        return []
    found = [function(IOContext(config, index)) for index in _indices(num_runners)]
    return found if all(isinstance(server, PolicyServerInput) for server in found) else []


def _indices(num_runners: int) -> list[int]:
    """Return the indices of the runners that sample."""
    return [*range(1, num_runners + 1)] if num_runners else [0]


def _described_spaces(config: AlgorithmConfig) -> dict[str, Any]:
    observation_space, action_space = config.observation_space, config.action_space
    if observation_space is None or action_space is None:
        if config.env is None:
            raise ConfigError(
                "environment: a policy server needs the spaces: set .environment(observation_space=..., "
                "action_space=...), or an env that has the same."
            )
        observation_space, action_space = spaces_of(resolve_env(config.env), config.env_config)
    try:
        return {"observation_space": describe_space(observation_space), "action_space": describe_space(action_space)}
    except ValueError as error:
        raise ConfigError(f"environment: a policy server cannot describe this space to clients: {error}") from error


def _fragment_settings(config: AlgorithmConfig, num_seats: int) -> dict[str, Any]:
    """Return settings with which a batch has as many steps as RLlib's, which come from however many episodes."""
    length = config.rollout_fragment_length
    if config.ALGORITHM in ("APPO", "IMPALA"):
        return {} if length == "auto" else {"rollout_fragment_length": math.ceil(length / num_seats)}
    settings: dict[str, Any] = {"rollout_fragment_length": "auto"}
    if config.ALGORITHM in ("DQN", "SAC", "TQC") and config.training_intensity is None:  # one batch after each round
        n_step = config.n_step if isinstance(config.n_step, int) else max(config.n_step)
        steps = (n_step if length == "auto" else length) * max(1, int(config.num_env_runners))
        settings["training_intensity"] = config.total_train_batch_size / steps
    return settings
