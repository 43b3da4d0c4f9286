"""RLlib's `PolicyClient`: a simulator that drives itself calls Corral's policy server by RLlib's names."""

from __future__ import annotations

import logging
import ssl
import uuid
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from corral.core.tree import map_tree
from corral.errors import ConfigError
from corral.runners.serving import client as serving

log = logging.getLogger("corral.client")


@dataclass
class _Episode:
    """An episode that is being played, over a connection of its own."""

    client: serving.PolicyClient
    counts: bool
    has_begun: bool = False
    reward: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)


class PolicyClient:
    """A client with RLlib's calls of a policy server of Corral.

    Each episode that is being played has a connection of its own and takes a seat of the server, so that threads may
    play several at the same time. A connection is used again for later episodes.

    Args:
        address: `"http://host:port"`, `"host:port"`, `"https://host:port"` for TLS, or `"unix:/path"`.
        inference_mode: `"local"` chooses the actions in this process, by the policy that the server sends, which needs
            onnxruntime here, and onnx and onnxscript at the server. Where they are missing, and for policies that only
            the server can act with, a warning says so, and the actions come from the server, as with `"remote"`.
        update_interval: No effect: the server sends newer weights with the answers to the steps that it gets.
        session: A session of `requests`; only `None` is accepted, because the server speaks no HTTP.

    Raises:
        ConfigError: The address is none, or a session is given.
        ValueError: The mode is neither of both.
    """

    def __init__(
        self, address: str, inference_mode: str = "local", update_interval: float = 10.0, session: Any = None
    ) -> None:
        """Keep the settings; the first episode connects."""
        if inference_mode not in ("local", "remote"):
            raise ValueError(f"inference_mode must be 'local' or 'remote', got {inference_mode!r:.60}.")
        if session is not None:
            raise ConfigError("PolicyClient: the policy server of Corral speaks no HTTP: leave session out.")
        self.address = address
        self._place, self._tls = _place_of(address)
        self._playing: dict[str, _Episode] = {}
        self._idle: list[serving.PolicyClient] = []
        self._clients: list[serving.PolicyClient] = []
        self._acts_locally = inference_mode == "local"
        weakref.finalize(self, _close, self._clients)

    def start_episode(self, episode_id: str | None = None, training_enabled: bool = True) -> str:
        """Begin an episode, and return its id.

        Args:
            episode_id: Its id; `None` makes one.
            training_enabled: Whether it is learned from and counts in the metrics.

        Raises:
            ValueError: An episode of this id is being played.
            corral.runners.serving.client.ClientError: The server refused the connection, such as where no seat is free.
        """
        name = uuid.uuid4().hex if episode_id is None else episode_id
        if name in self._playing:
            raise ValueError(f"episode {name!r} is being played already.")
        if not self._idle:
            self._clients.append(self._connect(f"PolicyClient {name:.8}"))
            self._idle.append(self._clients[-1])
        self._playing[name] = _Episode(self._idle.pop(), training_enabled)
        return name

    def get_action(self, episode_id: Any, observation: Any) -> Any:
        """Return the action of the policy for an observation, in the units of the env.

        Args:
            episode_id: Id of the episode, or a list of ids.
            observation: Observation, or by id of the episode if there are several.

        Raises:
            ValueError: No such episode is being played.
            corral.runners.serving.client.ClientError: The server refused the observation, or the episode is lost.
        """
        if isinstance(episode_id, (list, tuple)):
            return {each: self.get_action(each, observation[each]) for each in episode_id}
        return map_tree(lambda leaf: leaf[0], self._report(episode_id, observation))

    def log_action(self, episode_id: str, observation: Any, action: Any) -> None:
        """Report an action that the simulator took itself; see `get_action`.

        Only algorithms that learn from any actions, such as DQN and SAC, accept it.
        """
        self._report(episode_id, observation, actions=_row(action))

    def log_returns(
        self,
        episode_id: str,
        reward: float,
        info: Mapping[str, Any] | None = None,
        multiagent_done_dict: Mapping[Any, bool] | None = None,
    ) -> None:
        """Add a reward of the latest action; the next call for the episode reports the sum of them.

        Args:
            episode_id: Id of the episode.
            reward: The reward. Before the first action it is dropped, as in RLlib.
            info: What callbacks can read; entries that no message can hold are left out.
            multiagent_done_dict: Not served: RLlib's clients of several agents use `MultiAgentPolicyClient`.

        Raises:
            ConfigError: The reward is of several agents.
            ValueError: No such episode is being played.
        """
        episode = self._episode(episode_id)
        if multiagent_done_dict is not None or isinstance(reward, Mapping):
            raise ConfigError(
                "PolicyClient: these rewards are of several agents: use MultiAgentPolicyClient of "
                "corral.runners.serving.client."
            )
        if episode.has_begun:
            episode.reward += float(reward)
        elif reward:
            log.warning("PolicyClient: a reward of %g before the first action of an episode is dropped.", reward)
        if info:
            episode.info = _sendable(info)

    def end_episode(self, episode_id: str, observation: Any) -> None:
        """End an episode as terminated, as RLlib does; see `get_action`.

        Args:
            episode_id: Id of the episode.
            observation: Its last observation.
        """
        if self._episode(episode_id).has_begun:
            self._report(episode_id, observation, terminated=[True])
        self._idle.append(self._playing.pop(episode_id).client)

    def update_policy_weights(self) -> None:
        """Do nothing: with each answer of the server come its latest weights."""

    def _connect(self, name: str) -> serving.PolicyClient:
        if self._acts_locally:
            try:
                client = serving.PolicyClient(self._place, tls=self._tls, name=name, acts_locally=True)
                client.receive_policy()
                return client
            except ImportError as error:
                problem = str(error)
            except serving.ClientError as error:
                if error.code != "policy":
                    raise
                problem = str(error)
            log.warning("PolicyClient: the server chooses the actions, also with inference_mode='local': %s", problem)
            self._acts_locally = False
        return serving.PolicyClient(self._place, tls=self._tls, name=name)

    def _episode(self, episode_id: str) -> _Episode:
        if episode_id not in self._playing:
            raise ValueError(f"no episode {episode_id!r} is being played: call start_episode first.")
        return self._playing[episode_id]

    def _report(self, episode_id: str, observation: Any, **settings: Any) -> Any:
        """Report an observation and what led to it, and return the actions `[1, ...]`, or none `[0, ...]`."""
        episode = self._episode(episode_id)
        begins, reward, info = not episode.has_begun, episode.reward, episode.info
        episode.has_begun, episode.reward, episode.info = True, 0.0, {}
        if begins and not episode.counts:
            settings["counts"] = [False]
        if info:
            settings["infos"] = [info]
        try:
            return episode.client.exchange([0], _row(observation), rewards=[reward], begins=[begins], **settings)
        except serving.ClientError as error:
            del self._playing[episode_id]
            if isinstance(error, serving.EpisodesLost):  # the connection is a new one, for other episodes
                self._idle.append(episode.client)
            raise


def _place_of(address: str) -> tuple[str, Any]:
    """Return an address without its scheme, and what TLS needs.

    Raises:
        ConfigError: It names no host and port.
    """
    if address.startswith("unix:"):
        return address, None
    place = address.removeprefix("https://").removeprefix("http://").rstrip("/")
    if not place.rpartition(":")[2].isdecimal() or place.startswith(":"):
        raise ConfigError(f"PolicyClient: the address must be such as 'http://localhost:9900', got {address!r:.80}.")
    return place, ssl.create_default_context() if address.startswith("https://") else None


def _row(tree: Any) -> Any:
    """Return one observation or action, a tree, as a batch of one."""
    return map_tree(lambda leaf: np.asarray(leaf)[None], tree)


def _sendable(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of an info that a message can hold, arrays as lists."""
    found: dict[str, Any] = {}
    for name, value in info.items():
        plain = value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value
        try:
            serving.pack_message({"info": plain})
        except (TypeError, ValueError, OverflowError, RecursionError):
            log.debug("PolicyClient: %r of an info cannot be sent.", name)
        else:
            found[str(name)] = plain
    return found


def _close(clients: list[serving.PolicyClient]) -> None:
    """Tell the server that no episodes follow, so that others can have the seats."""
    for client in clients:
        client.close()
