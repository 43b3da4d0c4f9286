"""The Python client of the policy server, in one file that needs msgpack and NumPy and nothing of Corral.

A simulator that drives itself asks for its actions:

    with PolicyClient("127.0.0.1:5555", num_envs=2) as client:
        actions = client.begin(obs)                          # two episodes begin; obs is [2, ...]
        while True:
            obs, rewards, terminated, truncated = ...        # the simulator steps with the actions
            actions = client.step(obs, rewards, terminated, truncated)

With `acts_locally=True`, the server sends the policy, as an ONNX file, and the client chooses the actions itself, for
which it needs onnxruntime: the same calls return at once, and the steps are sent in larger messages.

The protocol is described on the page "The protocol of the policy server"; `exchange` is one request of it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import ssl
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgpack
import numpy as np
from numpy.typing import NDArray

log = logging.getLogger("corral.client")

PROTOCOL = 1
"""Version of the protocol."""
HEADER = struct.Struct(">I")
"""What comes before each message: its length in bytes, an unsigned integer of 4 bytes, the highest byte first."""
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Size of a message that a client accepts; the server says in `welcome` what it accepts."""

MAX_DELAY_S = 1.0
"""Seconds after which a client that acts itself sends its steps, also if they are few."""
_ONNX_DTYPES: dict[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(bool)": np.bool_,
    **{f"tensor({name})": np.dtype(name) for sign in ("", "u") for name in (f"{sign}int{n}" for n in (8, 16, 32, 64))},
}


_ALL, _COMMON = "__all__", "__common__"
"""Keys of flags of the whole episode, and of infos of no agent in particular."""


class ClientError(RuntimeError):
    """The server refused a message: `code` is the kind of the error, and the message says what was wrong and where."""

    def __init__(self, code: str, message: str) -> None:
        """Keep the code."""
        super().__init__(message)
        self.code = code


class EpisodesLost(ClientError):
    """The server does not know the episodes of this client any more: reset all envs, and call `begin` again.

    It was started again, or the client was away for longer than the server waits.
    """


class ServerStopped(ClientError):
    """The training is over, or the server was not reached for `retry_s` seconds."""


def pack_message(message: Mapping[str, Any]) -> bytes:
    """Return a message as the bytes that are sent: its length, and the message in msgpack."""
    body: bytes = msgpack.packb(message, default=_plain)
    return HEADER.pack(len(body)) + body


def _plain(value: Any) -> Any:
    """Return a number or an array of NumPy, as infos have them, as a number or lists of numbers."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"cannot send {value!r:.80}: messages have numbers, texts, lists and dicts")


def pack_array(array: Any) -> Any:
    """Return an array as it is in messages: dtype, shape and bytes; of a dict or tuple of arrays, each one of them."""
    if isinstance(array, Mapping):
        return {name: pack_array(part) for name, part in array.items()}
    if isinstance(array, tuple):
        return [pack_array(part) for part in array]
    array = np.asarray(array, order="C")
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": array.tobytes()}


def unpack_array(packed: Any) -> Any:
    """Return the array of `pack_array`; a dict of several arrays is a dict, and a list of several is a tuple."""
    if isinstance(packed, list):
        return tuple(unpack_array(part) for part in packed)
    if set(packed) == {"dtype", "shape", "data"}:
        if any(length < 0 for length in packed["shape"]):  # which NumPy would replace by what fits
            raise ValueError(f"an array of shape {packed['shape']}")
        return np.frombuffer(packed["data"], packed["dtype"]).reshape(packed["shape"]).copy()
    return {name: unpack_array(part) for name, part in packed.items()}


class PolicyClient:
    """A connection to a policy server, over which the episodes of one or more envs are played.

    Where the connection breaks, the client connects again, and its episodes continue. It raises `EpisodesLost` if the
    server does not know them any more.

    Args:
        address: Where the server listens: `"host:port"`, or `"unix:/path/of/the/socket"`.
        num_envs: Number of envs whose episodes are played over this connection.
        token: What the server asks for, if it asks for a token.
        tls: A file of certificates in PEM format, one of which the server must have, or an `ssl.SSLContext`; `None` is
            a connection in plain text.
        name: Name of this client in messages of the server.
        retry_s: Seconds for which the client tries to reach a server that does not answer.
        timeout_s: Seconds that the server may take for an answer, in which it may also train.
        acts_locally: Whether the client chooses the actions itself, by the policy that the server sends.
        steps_per_message: Steps of each env that a client which acts itself sends at once; it sends fewer of them
            where they take longer than `MAX_DELAY_S`.
        seed: Seed of the actions of a client that acts itself; `None` is a random one.

    Attributes:
        observation_space: Description of one observation, as the server sent it.
        action_space: Description of one action.
        weights_version: Version of the weights that chose the latest actions.

    Raises:
        ClientError: The server refused the connection; the message says why.
        ServerStopped: No server answered for `retry_s` seconds.
    """

    observation_space: dict[str, Any]
    action_space: dict[str, Any]
    HAS_AGENTS = False

    def __init__(
        self,
        address: str,
        num_envs: int = 1,
        *,
        token: str | None = None,
        tls: str | Path | ssl.SSLContext | None = None,
        name: str = "",
        retry_s: float = 60.0,
        timeout_s: float = 600.0,
        acts_locally: bool = False,
        steps_per_message: int = 32,
        seed: int | None = None,
    ) -> None:
        """Connect."""
        self.address, self.num_envs = address, num_envs
        self._token, self._name, self._retry_s, self._timeout_s = token, name, retry_s, timeout_s
        is_file = isinstance(tls, (str, Path))
        self._tls: Any = ssl.create_default_context(cafile=str(tls)) if is_file else tls
        self._session: str | None = None
        self._socket: Any = None
        self._next_id = 1
        self._max_bytes = MAX_MESSAGE_BYTES
        self.weights_version = 0
        self._local = _LocalActor(self, steps_per_message, seed) if acts_locally else None
        self._connect()

    # Episodes.

    def begin(self, obs: Any, envs: Sequence[int] | None = None) -> Any:
        """Begin an episode in some envs, and return their first actions.

        Args:
            obs: First observations of the episodes, `[K, ...]`: an array, or a dict or tuple of arrays; with several
                agents a list of K dicts by agent.
            envs: Numbers of the envs, K of them; `None` is all of them.

        Returns:
            Actions `[K, ...]`, in the units of the env; with several agents a list of K dicts by agent.

        Raises:
            ClientError: The server refused the message.
            EpisodesLost: See there.
            ServerStopped: See there.
        """
        envs = self._all(envs)
        return self.exchange(envs, obs, begins=[True] * len(envs))

    def step(
        self,
        obs: Any,
        rewards: Any,
        terminated: Any = None,
        truncated: Any = None,
        *,
        envs: Sequence[int] | None = None,
        next_obs: Any = None,
    ) -> Any:
        """Report what the latest actions led to, and return the next actions.

        Args:
            obs: Observations `[K, ...]`; where an episode ended, its last observation.
            rewards: Rewards of the latest actions, `[K]`.
            terminated: Whether the episode ended, bool `[K]`; `None` is nowhere.
            truncated: Whether the episode was cut off, for instance by a time limit, bool `[K]`.
            envs: Numbers of the envs, K of them; `None` is all of them.
            next_obs: First observations of the next episodes, `[K, ...]`, of which the ones are used where an episode
                ended; without it, `begin` begins the next episodes.

        Returns:
            Actions of the envs that continue, `[K, ...]` if `next_obs` is given or no episode ended.
        """
        envs = self._all(envs)
        terminated, truncated = (
            np.zeros(len(envs), np.bool_) if flags is None else np.asarray(flags, np.bool_)
            for flags in (terminated, truncated)
        )
        ended = np.flatnonzero(terminated | truncated)
        if next_obs is None or not len(ended):
            return self.exchange(envs, obs, rewards=rewards, terminated=terminated, truncated=truncated)
        order = np.sort(np.append(np.arange(len(envs)), ended))  # entries whose episodes ended come twice
        begins = np.arange(len(order)) - np.searchsorted(order, order) > 0
        actions = self.exchange(
            np.asarray(envs)[order].tolist(),
            _map(
                lambda now, then: np.where(_column(begins, now), np.asarray(then)[order], np.asarray(now)[order]),
                obs,
                next_obs,
            ),
            rewards=np.where(begins, 0.0, np.asarray(rewards, np.float64)[order]),
            begins=begins,
            terminated=np.where(begins, False, terminated[order]),
            truncated=np.where(begins, False, truncated[order]),
        )
        return actions

    def drop(self, envs: Sequence[int] | None = None) -> None:
        """Give up the unfinished episodes of some envs, of which the server keeps the complete steps."""
        if self._local is not None:
            self._local.flush()
        self._request({"type": "drop", "envs": list(self._all(envs))})

    def exchange(
        self,
        envs: Sequence[int],
        obs: Any,
        *,
        rewards: Any = None,
        begins: Any = None,
        terminated: Any = None,
        truncated: Any = None,
        actions: Any = None,
        infos: Sequence[Mapping[str, Any]] | None = None,
        counts: Any = None,
    ) -> Any:
        """Send one message `steps`, and return the actions of the entries that want one.

        Args:
            envs: Number of the env of each of K entries. An env may have several, in the order of time.
            obs: Observations `[K, ...]`: an array, or a dict or tuple of arrays.
            rewards: Reward of the action before, `[K]`; `None` is 0.
            begins: Whether an episode begins with the observation, bool `[K]`.
            terminated: Whether the episode ended with it, bool `[K]`; then it gets no action.
            truncated: Whether the episode was cut off with it, bool `[K]`.
            actions: Actions `[K, ...]` that the client takes itself, which only algorithms that learn from any actions
                accept; no action is returned then.
            infos: An info for each entry, which callbacks can read.
            counts: Whether the episode that begins counts, bool `[K]`; one that does not is played with the policy,
                and neither learned from nor in the metrics. `None` is true everywhere.

        Returns:
            Actions `[M, ...]` of the entries that did not end and have no action of their own, in their order.
        """
        flags = {"begins": begins, "terminated": terminated, "truncated": truncated, "counts": counts}
        if self._local is not None:
            if actions is None:
                return self._local.exchange(envs, obs, rewards, infos, flags)
            self._local.flush()
        acted = {} if actions is None else {"actions": pack_array(actions)}
        answer = self._send(envs, obs, rewards, infos, flags, acted)
        try:
            self.weights_version = int(answer["weights_version"])
            return unpack_array(answer["actions"])
        except Exception as error:
            raise self._damaged(error) from error

    def _send(
        self, envs: Sequence[int], obs: Any, rewards: Any, infos: Any, flags: Mapping[str, Any], acted: dict[str, Any]
    ) -> dict[str, Any]:
        """Send one message `steps`, and return the answer; `acted` are its fields of a client that acts itself."""
        message = {"obs": pack_array(obs), **acted}
        if rewards is not None:
            message["rewards"] = np.asarray(rewards, np.float64).tolist()
        return self._send_entries(envs, message, infos, flags)

    def _send_entries(
        self, envs: Sequence[int], message: dict[str, Any], infos: Any, flags: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Send one message `steps` with infos and flags of K entries, and return the answer.

        Flags are left out where they say nothing: `counts` is true everywhere then, and the others are false.
        """
        for name, given in flags.items():
            if given is not None and np.any(np.asarray(given, np.bool_) != (name == "counts")):
                message[name] = np.asarray(given, np.bool_).tolist()
        if infos is not None and any(infos):
            message["infos"] = [dict(info) for info in infos]
        return self._request({"type": "steps", "envs": [*envs], **message})

    def close(self) -> None:
        """End the session; the server drops episodes that are not over."""
        if self._local is not None and self._socket is not None:
            self._retry_s = 0.0
            with contextlib.suppress(ClientError):
                self._local.flush()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendall(pack_message({"type": "bye"}))
            self._disconnect()
        self._session = None

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the client."""
        if error is not None and self._local is not None:
            self._local.forget()  # sending steps may take a while
        self.close()

    # Messages.

    def _all(self, envs: Sequence[int] | None) -> Sequence[int]:
        return range(self.num_envs) if envs is None else envs

    def _request(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message and return the answer; it is sent again where the connection broke in between."""
        message["id"], self._next_id = self._next_id, self._next_id + 1
        data = pack_message(message)
        if len(data) > self._max_bytes:
            raise ClientError("too_large", f"a message of {len(data):,} bytes: the server takes {self._max_bytes:,}.")
        began_s, broke_s = time.monotonic(), -math.inf
        while True:
            tried_s = time.monotonic()
            try:
                if self._socket is None:
                    self._connect()
                self._socket.sendall(data)
                while (answer := self._receive()).get("id") != message["id"]:
                    pass  # an answer that was sent again after a broken connection
                return answer
            except (OSError, EOFError) as error:
                self._disconnect()
                now_s = time.monotonic()
                if (
                    now_s - tried_s > self._retry_s or broke_s < began_s
                ):  # the connection held, or broke for the first time
                    broke_s = now_s
                if now_s - broke_s > self._retry_s or now_s - began_s > self._timeout_s:
                    raise ServerStopped("stopped", f"the server at {self.address} does not answer: {error}") from error
                log.warning("The connection to %s broke: %s. Connecting again.", self.address, error)

    def _receive(self) -> dict[str, Any]:
        """Return the next message of the server; errors of the server are raised."""
        (num_bytes,) = HEADER.unpack(self._read(HEADER.size))
        if num_bytes > MAX_MESSAGE_BYTES:
            raise ClientError("too_large", f"the server sent a message of {num_bytes:,} bytes")
        body = self._read(num_bytes)
        try:
            message: dict[str, Any] = msgpack.unpackb(body)
            kind = message["type"]
            refusal = (message["code"], message["message"]) if kind == "error" else None
        except Exception as error:  # msgpack raises many
            raise self._damaged(error) from error
        if refusal is not None:
            self._disconnect()
            raise ClientError(*refusal)
        if kind == "bye":
            self._disconnect()
            raise ServerStopped("stopped", message.get("message", "the training is over"))
        if kind == "policy" and self._local is not None:
            try:
                self._local.set_policy(message["model"], message["num_uniform"], message["weights_version"])
            except Exception as error:  # onnxruntime raises many
                raise self._damaged(error) from error
            return self._receive()
        return message

    def _damaged(self, error: Exception) -> ClientError:
        """Close the connection, and return the error for a message that is no message."""
        self._disconnect()
        return ClientError("message", f"the server sent a damaged message: {type(error).__name__}: {error}")

    def _read(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            part = self._socket.recv(min(num_bytes - len(data), 1 << 20))
            if not part:
                raise EOFError("the server closed the connection")
            data += part
        return bytes(data)

    def _connect(self) -> None:
        """Connect, and say hello, until the server answers or `retry_s` is over."""
        gives_up_s, pause_s, said = time.monotonic() + self._retry_s, 0.05, self._session
        while True:
            try:
                self._open()
                hello = {"type": "hello", "protocol": PROTOCOL, "num_envs": self.num_envs, "name": self._name}
                hello |= {"token": self._token} if self._token is not None else {}
                hello |= {"session": said} if said is not None else {}
                hello |= {"wants_policy": True} if self._local is not None else {}
                self._socket.sendall(pack_message(hello))
                welcome = self._receive()
                break
            except ssl.SSLCertVerificationError as error:  # which no later try would change
                self._disconnect()
                problem = f"the certificate of the server at {self.address} is not accepted: {error.verify_message}"
                raise ClientError("tls", problem) from error
            except ClientError as error:
                if error.code != "busy" or time.monotonic() > gives_up_s:
                    raise
            except (OSError, EOFError) as error:
                self._disconnect()
                if time.monotonic() > gives_up_s:
                    raise ServerStopped("stopped", f"no server answers at {self.address}: {error}") from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)
        self._read_spaces(welcome)
        self._session, self._max_bytes = welcome["session"], welcome["max_message_bytes"]
        if self._local is None:
            self.weights_version = welcome["weights_version"]
        if said is not None and not welcome["resumed"]:
            if self._local is not None:
                self._local.forget()
                self._local.forget_policy()
            raise EpisodesLost("lost", f"the server at {self.address} does not know the episodes of this client.")

    def _read_spaces(self, welcome: Mapping[str, Any]) -> None:
        if "agents" in welcome:
            self._disconnect()
            problem = f"the server at {self.address} has several agents: use MultiAgentPolicyClient."
            raise ClientError("agents", problem)
        self.observation_space, self.action_space = welcome["observation_space"], welcome["action_space"]

    def _open(self) -> None:
        if self.address.startswith("unix:"):
            found = socket.socket(socket.AF_UNIX)
            try:
                found.settimeout(self._timeout_s)
                found.connect(self.address.removeprefix("unix:"))
            except BaseException:
                found.close()
                raise
        else:
            host, _, port = self.address.rpartition(":")
            host = host.strip("[]")
            found = socket.create_connection((host, int(port)), self._timeout_s)
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                found = self._tls.wrap_socket(found, server_hostname=host)
        self._socket = found

    def receive_policy(self) -> None:
        """Wait for the first policy, with which a client can act itself."""
        self._request({"type": "ping"})
        while self._local is not None and not self._local.has_policy:
            self._request({"type": "ping"})

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class MultiAgentPolicyClient(PolicyClient):
    """A client whose envs have several agents, with the same arguments as `PolicyClient`.

    What belongs to the agents of K envs is a list of K dicts by agent, as they are in RLlib's `MultiAgentEnv`: agents
    that were observed and have not ended act in the next step. Under `"__all__"`, flags say whether the whole episode
    ended. Agents are told apart by their names as text.

    Attributes:
        agents: By agent, descriptions of its `observation_space` and `action_space`, as the server sent them.

    Raises:
        ClientError: The server refused the connection, or has one agent.
        ServerStopped: No server answered for `retry_s` seconds.
    """

    HAS_AGENTS = True

    agents: dict[str, dict[str, Any]]

    def step(
        self,
        obs: Any,
        rewards: Any,
        terminated: Any = None,
        truncated: Any = None,
        *,
        envs: Sequence[int] | None = None,
        next_obs: Any = None,
    ) -> Any:
        """Report what the latest actions led to, and return the next actions.

        Args:
            obs: Observations, a list of K dicts by agent; where an agent ended, its last observation, if it has one.
            rewards: Rewards since the step before, a list of K dicts by agent.
            terminated: Whether agents ended, a list of K dicts by agent; `None` is nowhere.
            truncated: Whether agents were cut off, a list of K dicts by agent.
            envs: Numbers of the envs, K of them; `None` is all of them.
            next_obs: First observations of the next episodes, a list of K dicts by agent, of which the ones are used
                where the episode ended for all agents; without it, `begin` begins the next episodes.

        Returns:
            Actions, a list of K dicts by agent.

        Raises:
            ValueError: Something is no list of K dicts.
        """
        envs = self._all(envs)
        _check_dicts(len(envs), obs=obs, rewards=rewards, terminated=terminated, truncated=truncated)
        said: list[list[Any]] = [[] for _ in range(6)]
        none: list[Mapping[Any, Any]] = [{}] * len(envs)
        columns = obs, rewards, terminated or none, truncated or none
        for index, env in enumerate(envs):
            parts = [column[index] for column in columns]
            for column, part in zip(said, [env, *parts, False], strict=True):
                column.append(part)
            if next_obs is not None and any(flags.get(_ALL) for flags in parts[2:]):
                for column, part in zip(said, [env, next_obs[index], {}, {}, {}, True], strict=True):
                    column.append(part)
        all_envs, obs, rewards, terminated, truncated, begins = said
        actions = self.exchange(
            all_envs, obs, rewards=rewards, begins=begins, terminated=terminated, truncated=truncated
        )
        continues = {env: part for env, part in zip(all_envs, actions, strict=True)}  # the last entry of each env
        return [continues[env] for env in envs]

    def exchange(
        self,
        envs: Sequence[int],
        obs: Any,
        *,
        rewards: Any = None,
        begins: Any = None,
        terminated: Any = None,
        truncated: Any = None,
        actions: Any = None,
        infos: Sequence[Mapping[str, Any]] | None = None,
        counts: Any = None,
    ) -> Any:
        """Send one message `steps`, and return the actions of the agents that act next.

        Args:
            envs: Number of the env of each of K entries. An env may have several, in the order of time.
            obs: Observations, a list of K dicts by agent.
            rewards: Rewards since the entry before, a list of K dicts by agent.
            begins: Whether an episode begins with the observations, bool `[K]`.
            terminated: Whether agents ended with them, a list of K dicts by agent.
            truncated: Whether agents were cut off with them, a list of K dicts by agent.
            actions: Not possible with several agents.
            infos: Infos, a list of K dicts by agent; the one under `"__common__"` is of no agent in particular.
            counts: Whether the episode that begins counts, bool `[K]`; see `PolicyClient.exchange`.

        Returns:
            Actions, a list of K dicts by agent, which are empty where nobody acts.

        Raises:
            ValueError: Actions are given, or something is no list of K dicts.
        """
        if actions is not None:
            raise ValueError("clients of several agents take the actions that the server chooses")
        given = {"rewards": rewards, "terminated": terminated, "truncated": truncated, "infos": infos}
        _check_dicts(len(envs), obs=obs, **given)
        flags = {"begins": begins, "counts": counts}
        for name, of_all in (("terminated", terminated), ("truncated", truncated)):
            flags[name] = None if of_all is None else [bool(of_env.get(_ALL)) for of_env in of_all]
        common = None if infos is None else [of_env.get(_COMMON) or {} for of_env in infos]
        answer = self._send_entries(envs, {"agents": _columns_of_agents(obs, **given)}, common, flags)
        ids = {str(agent): agent for of_env in obs for agent in of_env}
        try:
            self.weights_version = int(answer["weights_version"])
            latest = {env: index for index, env in enumerate(envs)}
            chosen: list[dict[Any, Any]] = [{} for _ in envs]
            for name, part in answer["agents"].items():
                column = unpack_array(part["actions"])
                for row, env in enumerate(part["envs"]):
                    chosen[latest[env]][ids[name]] = _pick(column, row)
            return chosen
        except Exception as error:
            raise self._damaged(error) from error

    def _read_spaces(self, welcome: Mapping[str, Any]) -> None:
        if "agents" not in welcome:
            self._disconnect()
            raise ClientError("agents", f"the server at {self.address} has one agent: use PolicyClient.")
        self.agents = welcome["agents"]


_BLANKS: dict[str, tuple[Any, Any, str]] = {
    "rewards": (0.0, float, ""),
    **dict.fromkeys(("terminated", "truncated"), (False, bool, _ALL)),
    "infos": ({}, dict, _COMMON),
}
"""What a message says of an agent where nothing is given, the type of what is, and the key that is no agent."""


def _check_dicts(count: int, **columns: Any) -> None:
    """Check that what belongs to agents is a list with a dict for each entry, or `None`."""
    for name, column in columns.items():
        is_list = isinstance(column, Sequence) and len(column) == count
        if column is not None and not (is_list and all(isinstance(part, Mapping) for part in column)):
            problem = f"must be a list of {count} dicts by agent, one for each entry"
            raise ValueError(f"{name} {problem}, got {column!r:.80}")


def _columns_of_agents(obs: Any, **columns: Any) -> dict[str, dict[str, Any]]:
    """Return what a message `steps` says of each agent, from lists of K dicts by agent."""
    parts: dict[str, dict[str, Any]] = {}
    for index, of_env in enumerate(obs):
        for agent, one in of_env.items():
            part = parts.setdefault(str(agent), {"entries": [], "obs": []})
            part["entries"].append(index)
            part["obs"].append(one)
    for part in parts.values():
        part["obs"] = pack_array(_stack(part["obs"]))
    for name, column in columns.items():
        blank, kind, of_nobody = _BLANKS[name]
        for index, of_env in enumerate(column or ()):
            for agent, value in of_env.items():
                if value and agent != of_nobody:
                    parts.setdefault(str(agent), {}).setdefault(name, [blank] * len(obs))[index] = kind(value)
    return parts


class _LocalActor:
    """Chooses the actions of a client by the policy that the server sends, and keeps the steps until they are sent."""

    def __init__(self, client: PolicyClient, steps_per_message: int, seed: int | None) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise ImportError(
                "a client with acts_locally=True needs onnxruntime: run `pip install onnxruntime`"
            ) from error
        if steps_per_message < 1:
            raise ValueError(f"steps_per_message must be at least 1, got {steps_per_message}")
        self._runtime = onnxruntime
        self._client, self._steps_per_message = client, steps_per_message
        self._rng = np.random.default_rng(seed)
        self._session: Any = None
        self.forget()

    @property
    def has_policy(self) -> bool:
        """Whether the server has sent a policy."""
        return self._session is not None

    def set_policy(self, model: bytes, num_uniform: int, weights_version: int) -> None:
        """Act by another policy from now on."""
        options = self._runtime.SessionOptions()
        options.intra_op_num_threads = 1  # the batches are small
        self._session = self._runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        inputs = self._session.get_inputs()
        self._inputs = [(one.name, _ONNX_DTYPES[one.type]) for one in inputs if one.name != "uniform"]
        self._num_uniform, self._client.weights_version = num_uniform, weights_version

    def forget(self) -> None:
        """Forget the steps that were not sent."""
        self._kept: list[dict[str, Any]] = []
        self._num_kept, self._since_s = 0, time.monotonic()

    def forget_policy(self) -> None:
        """Wait for another policy before the next actions; this one may be of another server."""
        self._session = None

    def exchange(self, envs: Sequence[int], obs: Any, rewards: Any, infos: Any, given: Mapping[str, Any]) -> Any:
        """Keep the entries, and return the actions of those that did not end; send what was kept if it is enough."""
        if not self.has_policy:
            self._client.receive_policy()
        count = len(envs)
        flags = {
            name: np.full(count, name == "counts") if of_all is None else np.asarray(of_all, np.bool_)
            for name, of_all in given.items()
        }
        wants = ~(flags["terminated"] | flags["truncated"])
        leaves = _leaves(self._client.observation_space, obs)
        inputs = zip(self._inputs, leaves, strict=True)
        feed: dict[str, Any] = {name: np.asarray(leaf, dtype)[wants] for (name, dtype), leaf in inputs}
        feed["uniform"] = self._rng.random((int(wants.sum()), self._num_uniform), np.float32)
        *actions, outputs, draws = self._session.run(None, feed)
        rewards = np.zeros(count) if rewards is None else np.asarray(rewards, np.float64)
        kept = {"envs": np.asarray(envs), "obs": obs, "rewards": rewards, "flags": flags}
        kept["infos"] = np.array(infos or [{}] * count, object)
        kept["acted"] = {"outputs": _spread(outputs, wants), "draws": _spread(draws, wants)}
        self._kept.append(_map(np.array, kept))  # copies, because simulators use their arrays again
        self._num_kept += count
        enough = self._num_kept >= self._steps_per_message * self._client.num_envs
        if enough or time.monotonic() - self._since_s > MAX_DELAY_S:
            self.flush()
        return _unflatten(self._client.action_space, iter(actions))

    def flush(self) -> None:
        """Send the steps that were kept; with the answer may come another policy."""
        if not self._kept:
            return
        kept = _map(lambda *part: np.concatenate(part), *self._kept)
        self.forget()
        kept["envs"] = kept["envs"].tolist()
        kept["acted"] = {name: pack_array(array) for name, array in kept["acted"].items()}
        kept["acted"]["weights_version"] = self._client.weights_version
        self._client._send(**kept)


def drive(client: PolicyClient, envs: Sequence[Any], *, num_steps: int | None = None) -> int:
    """Play episodes of envs with the actions of a server, until the training is over, and return the env steps.

    Where the server lost the episodes, all envs are reset.

    Args:
        client: A client of as many envs.
        envs: Envs with Gymnasium's `reset()` and `step(action)`; with several agents as RLlib's `MultiAgentEnv`.
        num_steps: Env steps of all envs together after which to stop; `None` is no limit.
    """
    done, gather = 0, list if client.HAS_AGENTS else _stack
    while True:
        try:
            obs = gather([env.reset()[0] for env in envs])
            agents = [_Agents(of_env) for of_env in obs] if client.HAS_AGENTS else []
            actions = client.begin(obs)
            while num_steps is None or done < num_steps:
                found = [env.step(_pick(actions, i)) for i, env in enumerate(envs)]
                found = [one.note(step) for one, step in zip(agents, found, strict=True)] if agents else found
                done += len(envs)
                obs, next_obs = [step[0] for step in found], [step[0] for step in found]
                for i, (_, _, terminated, truncated, _) in enumerate(found):
                    if _is_over(terminated) or _is_over(truncated):
                        next_obs[i] = envs[i].reset()[0]
                        if agents:
                            agents[i] = _Agents(next_obs[i])
                rewards, terminated, truncated = ([step[k] for step in found] for k in (1, 2, 3))
                actions = client.step(gather(obs), rewards, terminated, truncated, next_obs=gather(next_obs))
            client.drop()
            return done
        except EpisodesLost as lost:
            log.warning("%s All envs begin new episodes.", lost)
        except ServerStopped:
            return done


class _Agents:
    """The agents that have joined an episode, and those that have ended.

    An env may leave it to who plays it to see that nobody is left.
    """

    def __init__(self, obs: Mapping[Any, Any]) -> None:
        self._joined, self._ended = set(obs), set[Any]()

    def note(self, step: Any) -> Any:
        """Return a step of the env, which says that the episode is over where nobody is left."""
        obs, rewards, *flags, infos = step
        ends = [{agent for agent, flag in of_all.items() if flag} - self._ended - {_ALL} for of_all in flags]
        self._joined |= obs.keys()
        self._ended |= ends[0] | ends[1]
        is_over = any(map(_is_over, flags))
        if (ends[0] or ends[1]) and self._joined and self._joined <= self._ended and not is_over:
            which = 0 if ends[0] else 1
            flags[which] = {**flags[which], _ALL: True}
        return obs, rewards, *flags, infos


def _is_over(flag: Any) -> bool:
    """Return whether an episode ended, from its flag or from the flags of its agents."""
    return bool(flag.get(_ALL) if isinstance(flag, Mapping) else flag)


def _spread(rows: NDArray[np.float32], where: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return rows `[M, ...]` at M of K places, and zeros at the others."""
    found = np.zeros((len(where), *rows.shape[1:]), rows.dtype)
    found[where] = rows
    return found


def _parts(space: Mapping[str, Any]) -> list[tuple[Any, Any]] | None:
    """Return keys and descriptions of the parts of a Dict or Tuple space, or `None` for another space."""
    if space["type"] == "Dict":
        return [(key, part) for key, part in space["spaces"]]
    return [*enumerate(space["spaces"])] if space["type"] == "Tuple" else None


def _leaves(space: Mapping[str, Any], tree: Any) -> list[Any]:
    """Return the arrays of a tree in the order of a space."""
    parts = _parts(space)
    return [tree] if parts is None else [leaf for key, part in parts for leaf in _leaves(part, tree[key])]


def _unflatten(space: Mapping[str, Any], leaves: Any) -> Any:
    """Return the tree whose arrays come in the order of a space."""
    if (parts := _parts(space)) is None:
        return next(leaves)
    found = {key: _unflatten(part, leaves) for key, part in parts}
    return found if space["type"] == "Dict" else tuple(found.values())


def _map(fn: Any, *trees: Any) -> Any:
    """Return a tree of what a function returns for the leaves of trees of the same form."""
    first = trees[0]
    if isinstance(first, Mapping):
        return {name: _map(fn, *(tree[name] for tree in trees)) for name in first}
    if isinstance(first, tuple):
        return tuple(_map(fn, *parts) for parts in zip(*trees, strict=True))
    return fn(*trees)


def _stack(obs: Sequence[Any]) -> Any:
    return _map(lambda *leaf: np.stack([np.asarray(one) for one in leaf]), *obs)


def _pick(actions: Any, index: int) -> Any:
    return _map(lambda leaf: leaf[index], actions)


def _column(flags: NDArray[np.bool_], like: Any) -> NDArray[np.bool_]:
    """Return flags `[K]` with as many axes as an array `[K, ...]`."""
    return flags.reshape(-1, *[1] * (np.ndim(like) - 1))
