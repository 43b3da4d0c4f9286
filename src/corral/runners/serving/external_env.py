"""The env of a runner whose sub-envs are in other programs, which ask for actions when they want them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from corral.core.space_descriptions import described_space
from corral.core.spaces import unsupported
from corral.envs.multi_agent_env import MultiAgentEnv
from corral.envs.seats import Seats, SeatsSpace
from corral.envs.vector import EnvContext, make_vector_env
from corral.errors import ConfigError, EnvError, nearest
from corral.runners.serving.listening import split_address
from corral.runners.serving.server import PolicyServer, ServerSettings

log = logging.getLogger("corral")

SPACES = ("observation_space", "action_space")
SPACES_OF_AGENTS = ("observation_spaces", "action_spaces")
FILES = ("token_file",)
SETTINGS = tuple(field.name for field in fields(ServerSettings))


class ExternalEnv(VectorEnv[Any, Any, Any]):
    """A vector env whose sub-envs are seats: simulators in other programs play their episodes in them.

    The programs connect to the policy server of the runner; see the page "Train a simulator that drives itself". A
    runner samples when they ask for actions, and each of them at its own pace: nobody waits for the slowest.

    The `env_config` holds the spaces: `observation_space` and `action_space`, as spaces of Gymnasium or as their
    descriptions; with several agents `observation_spaces` and `action_spaces`, dicts of these by agent; or `spaces_of`,
    the id of an env that has the same spaces. The other keys are the settings of
    `ServerSettings`, and `token_file`, a file that holds the token. Runners listen at different ports: the embedded
    runner and the first other one at the port of `address`, the next one at the next port, and so on.

    Args:
        env_config: These settings, as a runner gives them.
        num_envs: Number of seats N.

    Attributes:
        server: The policy server.

    Raises:
        ConfigError: A key is unknown, a space is missing, or the address cannot be used.
    """

    IS_EXTERNAL = True
    OBSTACLE = "its episodes are played by other programs, which begin new ones"
    """Why the env of a run that continues restarts its episodes."""

    def __init__(self, env_config: Mapping[str, Any], num_envs: int = 1) -> None:
        """Find the spaces, and listen."""
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = find_spaces(env_config)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        settings = server_settings(env_config, getattr(env_config, "worker_index", 0))
        self.server = PolicyServer(settings, self.single_observation_space, self.single_action_space, num_envs)
        log.info("The policy server listens at %s, for %d envs.", self.server.address, num_envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Return no observation: episodes begin when clients begin them."""
        return None, {}

    def step(self, actions: Any) -> Any:
        """Refuse to be stepped; the runner exchanges messages with the clients by `server`."""
        raise NotImplementedError("an ExternalEnv is not stepped: its clients step themselves.")

    def close_extras(self, **kwargs: Any) -> None:
        """Say bye to all clients."""
        self.server.close()


def server_settings(env_config: Mapping[str, Any], worker_index: int) -> ServerSettings:
    """Return the settings of the policy server of a runner.

    Raises:
        ConfigError: A key is unknown, or a value is wrong.
    """
    known = (*SPACES, *SPACES_OF_AGENTS, "spaces_of", *SETTINGS, *FILES)
    for key in env_config:
        if key not in known:
            raise ConfigError(f"env_config: an ExternalEnv has no setting {key!r}. {nearest(key, known)}")
    given = {name: env_config[name] for name in SETTINGS if env_config.get(name) is not None}
    for name, value in given.items():
        is_number = isinstance(getattr(ServerSettings, name), (int, float))
        if is_number and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
            raise ConfigError(f"env_config: {name} must be a number above 0, got {value!r}.")
        if not is_number and not isinstance(value, str):
            raise ConfigError(f"env_config: {name} must be text, got {value!r}.")
    settings = _with_token(ServerSettings(**given), env_config.get("token_file"))
    if settings.address.startswith("unix:"):
        return replace(settings, address=settings.address + (f"-{worker_index}" if worker_index > 1 else ""))
    host, port = split_address(settings.address)
    host = f"[{host}]" if ":" in host else host
    return replace(settings, address=f"{host}:{port + max(0, worker_index - 1) if port else 0}")


def _with_token(settings: ServerSettings, file: Any) -> ServerSettings:
    """Return the settings with the token of a file, if there is one."""
    if file is not None:
        if settings.token is not None:
            raise ConfigError("env_config: token and token_file both give the token: set one of them.")
        try:
            settings = replace(settings, token=Path(file).read_text(encoding="utf-8").strip())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"env_config: token_file {str(file)!r} cannot be read: {error}.") from error
    if settings.token == "":
        raise ConfigError("env_config: the token is empty: a token is a text that only clients know.")
    return settings


def find_spaces(env_config: Mapping[str, Any]) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
    """Return the spaces of one observation and one action.

    Raises:
        ConfigError: They are missing, or modules do not support them.
    """
    names = (*SPACES, *SPACES_OF_AGENTS, "spaces_of")
    given = tuple(name for name in names if env_config.get(name) is not None)
    if given == ("spaces_of",):
        found = spaces_of(env_config["spaces_of"])
    elif given == SPACES:
        observation_space, action_space = (_space(env_config[name], name) for name in SPACES)
        found = observation_space, action_space
    elif given == SPACES_OF_AGENTS:
        found = _seats(env_config)
    else:
        raise ConfigError(
            "env_config: an ExternalEnv needs observation_space and action_space, or with several agents "
            "observation_spaces and action_spaces by agent, or spaces_of, the id of an env that has the same spaces; "
            f"got {' and '.join(given) or 'none of them'}."
        )
    if isinstance(found[0], SeatsSpace):
        agents = found[0].seats.agents
        if len({str(agent) for agent in agents}) < len(agents):
            raise ConfigError(f"env_config: agents of a policy server need different names as text, got {agents}.")
    elif problem := unsupported(*found):
        raise ConfigError(f"env_config: {problem}.")
    return found


def _seats(env_config: Mapping[str, Any]) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
    """Return the spaces of the seats of several agents, whose spaces are given by agent."""
    by_agent: dict[str, dict[Any, Any]] = {}
    for name in SPACES_OF_AGENTS:
        try:
            given = dict(env_config[name])
        except (TypeError, ValueError):
            raise ConfigError(
                f"env_config: {name} must be a dict of spaces by agent, got {env_config[name]!r:.80}."
            ) from None
        by_agent[name] = {agent: _space(space, f"{name}[{agent!r}]") for agent, space in given.items()}
    env = MultiAgentEnv()
    env.possible_agents = [*by_agent["observation_spaces"]]
    env.observation_spaces, env.action_spaces = by_agent.values()
    if by_agent["action_spaces"].keys() != by_agent["observation_spaces"].keys():
        raise ConfigError("env_config: observation_spaces and action_spaces must have the same agents.")
    try:
        seats = Seats.of(env)
    except EnvError as error:
        raise ConfigError(f"env_config: {error}") from error
    return SeatsSpace(seats), seats.action_space


def _space(given: Any, name: str) -> spaces.Space[Any]:
    if isinstance(given, spaces.Space):
        return given
    try:
        return described_space(given)
    except ValueError as error:
        raise ConfigError(f"env_config: {name}: {error}.") from None  # the message says everything


def spaces_of(
    env: Any, env_config: Mapping[str, Any] | None = None, wrappers: Sequence[Any] = ()
) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
    """Return the spaces of an env with its wrappers, which is made and closed.

    Raises:
        ConfigError: The env is unknown.
        EnvError: It raised an exception.
    """
    context = EnvContext(dict(env_config or {}))
    made = make_vector_env(env, context, num_envs=None, wrappers=wrappers)
    found = made.single_observation_space, made.single_action_space
    made.close()
    return found
