"""RLlink 0.0.1, the protocol of RLlib for simulators that act themselves, without its pickles.

A message is a length of eight digits and a map, in JSON (Ray 2.40 to 2.46) or in msgpack with the arrays of
msgpack_numpy (later). Each of them becomes messages of Corral's own protocol, which the server takes as if the client
spoke it; nothing of a message is executed. A client has one seat, in which it plays one episode after another.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from corral.core.tree import Tree, leaves, map_tree
from corral.errors import ClientMessageError
from corral.runners.serving.client import HEADER, PROTOCOL, pack_array
from corral.runners.serving.messages import read_numbers, unpack_array

if TYPE_CHECKING:
    from corral.runners.serving.sessions import Connection, Ways

HEADER_BYTES = 8
TYPES = ("PING", "GET_CONFIG", "GET_STATE", "EPISODES", "EPISODES_AND_GET_STATE")
"""Types of messages of clients."""
ENV_STEPS_PER_SAMPLE = 200
"""Env steps that a client which asks for the config sends at once."""
INPUT = "onnx::Gemm_0"
_ENDS = {"terminated": ("is_terminated", "terminateds"), "truncated": ("is_truncated", "truncateds")}
_NO_CONFIG = (
    "GET_CONFIG: the config of RLlib is a pickle, which Corral neither sends nor reads: send JSON, whose config is "
    "plain, or use a client of Corral, such as corral.runners.serving.client"
)
_HTTP = (b"POST", b"GET ", b"PUT ", b"HEAD")
_NO_HTTP = "Corral speaks no HTTP and reads no pickles. Run scripts of RLlib with python -m corral.compat.rllib"


def recognize(connection: Connection, ways: Ways) -> bool:
    """Serve a client of RLlink from now on, or refuse one of HTTP in its language; return whether it is one of both.

    The first bytes of RLlink are digits of a length, and the ones of HTTP a method. As a length of the policy server's
    own protocol, both would be more than 500 MB.

    Args:
        connection: A connection that has no session, and whose first four bytes were read.
        ways: What the server does with messages.
    """
    first = bytes(connection.read[:4])
    if first.isdigit():
        link = RLlink(ways)
        connection.reader, connection.pack, connection.give_policy = link.read, link.pack, link.take_policy
        if ways.obs_space is None:
            ways.refuse(connection, "protocol", "this server has several agents, and a client of RLlink has one.")
    elif first in _HTTP:
        connection.pack = _http_error
        ways.refuse(connection, "protocol", _NO_HTTP)
    else:
        return False
    return True


def _http_error(message: Mapping[str, Any]) -> bytes:
    """Return an error as an answer of HTTP, other messages as nothing."""
    if message["type"] != "error":
        return b""
    text = message["message"].encode("ascii", "replace")
    headers = b"Content-Type: text/plain\r\nConnection: close\r\nContent-Length: %d" % len(text)
    return b"HTTP/1.1 501 %s\r\n%s\r\n\r\n%s" % (text, headers, text)


@dataclass
class Chunk:
    """Consecutive steps of an episode.

    Attributes:
        id_: Name of the episode, or `None` where the client gives none.
        obs: Observations, a tree of `[T + 1, ...]`.
        actions: Actions, a tree of `[T, ...]`.
        rewards: Rewards, float64 `[T]`.
        terminated: Whether the episode ended with the last observation.
        truncated: Whether it was cut off with it.
        outputs: What the policy said of the observations, float32 `[T, D]`, or `None` where the client does not say it.
    """

    id_: str | None
    obs: Tree
    actions: Tree
    rewards: NDArray[np.float64]
    terminated: bool
    truncated: bool
    outputs: NDArray[np.float32] | None = None


@dataclass
class Held:
    """The latest observation of an episode, which is reported together with its action, by the next chunk.

    Attributes:
        id_: Name of the episode.
        obs: The observation, a tree of `[1, ...]`.
        reward: Reward of the action before.
        begins: Whether the episode begins with it.
    """

    id_: str | None
    obs: Tree
    reward: float
    begins: bool


class RLlink:
    """One connection of a client that speaks RLlink: it takes turns with the server in Corral's own messages.

    Args:
        server: What the server does with messages.
    """

    def __init__(self, server: Ways) -> None:
        """Begin without an episode."""
        self._server = server
        self._due: deque[tuple[str, dict[str, Any]]] = deque()  # messages to take, with what their errors name
        self._held: Held | None = None
        self._is_json = False
        self._wants_state = False
        self._state: dict[str, Any] | None = None  # of the latest policy
        self._version: int | None = None  # of the weights that the client has
        self._next_id = 1

    def pack(self, message: Mapping[str, Any]) -> bytes:
        """Return a message of the server as bytes; a client that acts itself is told errors only.

        RLlink has no errors: clients of RLlib show the type of a message that they do not know, so it holds the text.
        """
        if message["type"] != "error":
            return b""
        return self._frame({"type": f"ERROR: {message['message']}", **{k: message[k] for k in ("code", "message")}})

    def _frame(self, message: Mapping[str, Any]) -> bytes:
        body: bytes = json.dumps(message).encode() if self._is_json else msgpack.packb(message)
        return b"%08d%s" % (len(body), body)

    def read(self, connection: Connection) -> bool:
        """Take what comes next of the messages that were read, unless one has to be answered first; see `Connection`.

        Raises:
            ClientMessageError: It does not fit the protocol.
        """
        if connection.session is not None and connection.session.waits:
            return False
        if self._due:
            place, message = self._due.popleft()
            self._next_id += 1
            try:
                self._server.take(connection, {**message, "id": self._next_id})
            except ClientMessageError as error:
                raise ClientMessageError(place + error.place.removeprefix("steps"), error.problem) from error
        elif self._wants_state:
            if self._state is None:
                return False  # until the runner has written the policy
            self._wants_state, self._version = False, self._state["weights_seq_no"]
            self._server.send(connection, self._frame({"type": "SET_STATE", **self._state}))
        elif (body := self._next_body(connection)) is None:
            return False
        else:
            self._translate(connection, body)
        return True

    def take_policy(self, connection: Connection, message: bytes) -> None:
        """Keep the policy for the next SET_STATE, and send it if the client waits for it.

        Args:
            connection: The connection.
            message: The message `policy` of Corral's protocol.
        """
        policy = msgpack.unpackb(message[HEADER.size :])
        try:
            part = outputs_alone(policy["model"])
        except Exception as error:  # onnx raises many
            problem = f"the policy cannot be sent by RLlink: {type(error).__name__}: {error}"
            self._server.refuse(connection, "policy", problem)
            return
        model = base64.b64encode(gzip.compress(part, compresslevel=1)).decode()
        self._state = {"onnx_file": model, "weights_seq_no": policy["weights_version"]}

    def _next_body(self, connection: Connection) -> bytes | None:
        """Return the body of the next message, or `None` where it was not read whole.

        Raises:
            ClientMessageError: The header is no length, or the length is larger than allowed.
        """
        data, limit = connection.read, self._server.limit(connection)
        if len(data) < HEADER_BYTES:
            return None
        header = bytes(data[:HEADER_BYTES])
        if not header.isdigit():
            raise ClientMessageError("header", f"must be a length of {HEADER_BYTES} digits, got {_shown(header)}")
        if (size := int(header)) > limit:
            first = " of the first message: send PING before" if connection.session is None else ""
            raise ClientMessageError("message", f"has {size:,} bytes: at most {limit:,} are accepted{first}")
        if len(data) < HEADER_BYTES + size:
            return None
        body = bytes(data[HEADER_BYTES : HEADER_BYTES + size])
        del data[: HEADER_BYTES + size]
        return body

    def _translate(self, connection: Connection, body: bytes) -> None:
        """Answer a message, or note the messages of Corral that it stands for.

        Raises:
            ClientMessageError: It is damaged, or needs a pickle.
        """
        self._is_json = body[:1] == b"{"
        message = read_message(body)
        kind = message["type"]
        if connection.session is None:  # with its first message, the client takes a seat
            hello = {"type": "hello", "protocol": PROTOCOL, "name": f"RLlink {connection.peer}"}
            self._server.take(connection, hello)
            if connection.session is None:
                return
            connection.session.may_be_silent = True
        connection.session.heard_s = self._server.now_s()
        if kind == "PING":
            self._server.send(connection, self._frame({"type": "PONG"}))
        elif kind == "GET_CONFIG":
            if not self._is_json:
                raise ClientMessageError("message", _NO_CONFIG)
            config = {"env_steps_per_sample": ENV_STEPS_PER_SAMPLE, "force_on_policy": True}
            self._server.send(connection, self._frame({"type": "SET_CONFIG", **config}))
        if "EPISODES" in kind:
            given = message.get("episodes")
            if not isinstance(given, list):
                raise ClientMessageError(f"{kind}.episodes", f"must be a list, got {_shown(given)}")
            for index, episode in enumerate(given):
                place = f"{kind}.episodes[{index}]"
                self._add(read_chunk(episode, self._server.obs_space, self._server.action_space, place), place)
        self._wants_state = kind.endswith("GET_STATE")
        if self._wants_state and self._state is None and connection.session is not None:
            self._server.want_policy(connection.session)

    def _add(self, chunk: Chunk, place: str) -> None:
        """Note the messages that report a chunk."""
        held = self._held
        if held is None or not _continues(chunk, held):
            if held is not None and not held.begins:  # its latest step is complete, and no other one follows
                self._due.append((place, _steps(held.obs, [held.reward], [False])))
                self._due.append((place, {"type": "drop", "envs": [0]}))
            held = Held(chunk.id_, _rows(chunk.obs, slice(0, 1)), 0.0, True)
        num_steps, is_over = len(chunk.rewards), chunk.terminated or chunk.truncated
        count = num_steps + is_over
        rewards = [held.reward, *chunk.rewards.tolist()]
        self._held = None
        if not is_over:
            last = slice(num_steps, num_steps + 1)
            self._held = Held(chunk.id_, _rows(chunk.obs, last), rewards[-1], held.begins and not num_steps)
        if not count or (not num_steps and held.begins):
            return
        message = _steps(_rows(chunk.obs, slice(count)), rewards[:count], [held.begins] + [False] * (count - 1))
        if num_steps:
            order = np.minimum(np.arange(count), num_steps - 1)  # an action is needed where the episode ended, too
            outputs = None if chunk.outputs is None else chunk.outputs[order]
            message |= self._choices(_rows(chunk.actions, order), outputs)
        for name in ("terminated", "truncated"):
            message[name] = [False] * (count - 1) + [getattr(chunk, name) and is_over]
        self._due.append((place, message))

    def _choices(self, actions: Tree, outputs: NDArray[np.float32] | None) -> dict[str, Any]:
        """Return the fields of `steps` that say how the client acted: by the policy that it was sent, or otherwise."""
        draws = None if outputs is None else _draws(actions, outputs, self._server.action_space)
        if draws is None or self._version is None:
            return {"actions": pack_array(actions)}
        return {"outputs": pack_array(outputs), "draws": pack_array(draws), "weights_version": self._version}


def _draws(actions: Tree, outputs: NDArray[np.float32], space: Tree) -> NDArray[np.float32] | None:
    """Return logits `[K, D]` whose largest ones are Discrete or MultiDiscrete actions; `None` for other spaces."""
    if isinstance(space, spaces.Discrete):
        sizes, starts = np.array([int(space.n)]), np.array([int(space.start)])
    elif isinstance(space, spaces.MultiDiscrete):
        sizes, starts = space.nvec.reshape(-1), space.start.reshape(-1)
    else:
        return None
    picks = np.reshape(actions, (len(outputs), -1)) - starts
    is_legal = picks.shape[1] == len(sizes) and picks.dtype.kind in "iu" and ((picks >= 0) & (picks < sizes)).all()
    if not is_legal or outputs.shape != (len(picks), sizes.sum()):
        return None  # as actions, they are refused with their place
    draws = np.zeros(outputs.shape, np.float32)
    np.put_along_axis(draws, picks + np.cumsum(sizes) - sizes, 1.0, 1)
    return draws


def outputs_alone(model: bytes) -> bytes:
    """Return the part of a policy file that computes the outputs of the policy from observations.

    The only input has the name that it has in the files of RLlib, by which its clients call it.
    """
    from onnx import load_model_from_string
    from onnx.utils import Extractor

    whole = load_model_from_string(model)
    names = [one.name for one in whole.graph.input if one.name != "uniform"]
    part = Extractor(whole).extract_model(names, ["outputs"])
    if len(names) == 1:
        for node in part.graph.node:
            for index, name in enumerate(node.input):
                if name == names[0]:
                    node.input[index] = INPUT
        part.graph.input[0].name = INPUT
    data: bytes = part.SerializeToString()
    return data


def _steps(obs: Tree, rewards: list[float], begins: list[bool]) -> dict[str, Any]:
    return {"type": "steps", "envs": [0] * len(rewards), "obs": pack_array(obs), "rewards": rewards, "begins": begins}


def _rows(tree: Tree, index: Any) -> Tree:
    return map_tree(lambda leaf: leaf[index], tree)


def _continues(chunk: Chunk, held: Held) -> bool:
    """Return whether a chunk continues an episode: it has the same name, or else the same observation."""
    if chunk.id_ is not None or held.id_ is not None:
        return chunk.id_ == held.id_
    pairs = zip(leaves(chunk.obs), leaves(held.obs), strict=True)
    return all(now.shape[1:] == before.shape[1:] and (now[:1] == before).all() for now, before in pairs)


# Reading.


def read_message(body: bytes) -> dict[str, Any]:
    """Return the message in a body, with arrays.

    Raises:
        ClientMessageError: It is no such message, or it holds a pickle.
    """
    try:
        if body[:1] == b"{":
            message = json.loads(body)
        else:
            message = msgpack.unpackb(body, ext_hook=_refuse_extension, object_hook=_decoded, strict_map_key=True)
    except ClientMessageError:
        raise
    except Exception as error:  # both raise many
        raise ClientMessageError("message", f"is neither JSON nor msgpack: {type(error).__name__}: {error}") from error
    if not isinstance(message, dict):
        raise ClientMessageError("message", f"must be a map, got {_shown(message)}")
    if not isinstance(kind := message.get("type"), str) or kind not in TYPES:
        raise ClientMessageError("type", f"must be one of {', '.join(TYPES)}, got {_shown(kind)}")
    return message


def _decoded(given: dict[Any, Any]) -> Any:
    """Return the array or number that a map of msgpack_numpy stands for, and other maps as they are.

    Raises:
        ClientMessageError: It stands for a pickle, or is damaged.
    """
    if b"nd" not in given:
        return given
    if given.get(b"kind") == b"O":
        problem = "holds an array of Python objects, which is a pickle: send numbers, texts, lists and maps"
        raise ClientMessageError("message", problem)
    shape = given.get(b"shape", []) if given[b"nd"] is True else []
    array = unpack_array(given.get(b"type"), shape, given.get(b"data"), "message")
    return array.astype(array.dtype.newbyteorder("="))


def read_chunk(given: Any, obs_space: Tree, action_space: Tree, place: str) -> Chunk:
    """Return the steps in one of `episodes`: the state of an episode of RLlib, or a map of lists.

    Args:
        given: What was sent.
        obs_space: Space of one observation, a tree of spaces without Dict and Tuple.
        action_space: Space of one action, such a tree too.
        place: Name of the episode in errors.

    Raises:
        ClientMessageError: A part is missing, or is of another form.
    """
    if not isinstance(given, dict):
        raise ClientMessageError(place, f"must be a map, got {_shown(given)}")
    is_state = "observations" in given
    name = given.get("id_")
    if not (name is None or isinstance(name, str)):
        raise ClientMessageError(f"{place}.id_", f"must be text, got {_shown(name)}")
    keys = ("observations" if is_state else "obs", "actions", "rewards")
    parts = [_part(given, key, space, place) for key, space in zip(keys, (obs_space, action_space, None), strict=True)]
    obs, actions, rewards = parts
    ends = {key: _flag(given, names, place) for key, names in _ENDS.items()}
    count = len(rewards)
    for key, tree, wanted in ((keys[0], obs, count + 1), (keys[1], actions, count)):
        for leaf in leaves(tree):
            if len(leaf) != wanted:
                raise ClientMessageError(f"{place}.{key}", f"must be {wanted} for {count} rewards, got {len(leaf)}")
    if rewards.ndim != 1:
        raise ClientMessageError(f"{place}.rewards", f"must be a list of numbers, got the shape {rewards.shape}")
    extra = given.get("extra_model_outputs") if is_state else given
    outputs = None
    if isinstance(extra, dict) and extra.get("action_dist_inputs") is not None:
        outputs = _part(extra, "action_dist_inputs", None, place).astype(np.float32)
        if outputs.ndim != 2 or len(outputs) != count:
            shape = f"must be a row for each of {count} actions, got the shape {outputs.shape}"
            raise ClientMessageError(f"{place}.action_dist_inputs", shape)
    return Chunk(name, obs, actions, rewards.astype(np.float64), **ends, outputs=outputs)


def _part(given: Mapping[Any, Any], key: str, space: Tree, place: str) -> Tree:
    """Return observations, actions or rewards, a tree of `[T, ...]`."""
    found, place = given.get(key), f"{place}.{key}"
    is_column, first = False, 0
    if isinstance(found, dict) and "data" in found:  # a buffer of RLlib, which begins with steps that were sent before
        first, is_column, found = found.get("lookback", 0), found.get("finalized") is True, found["data"]
        if type(first) is not int or first < 0:
            raise ClientMessageError(f"{place}.lookback", f"must be a number, got {_shown(first)}")
    if found is None:
        raise ClientMessageError(place, "is missing")
    return map_tree(lambda leaf: leaf[first:], _column(found, space, is_column, place))


def _column(given: Any, space: Tree, is_column: bool, place: str) -> Tree:
    """Return arrays `[T, ...]` of a column that was sent whole, or as a list of T entries."""
    if isinstance(space, (dict, tuple)):
        keys = list(space) if isinstance(space, dict) else list(range(len(space)))
        try:
            parts = [given[key] if is_column else [entry[key] for entry in given] for key in keys]
        except (TypeError, KeyError, IndexError) as error:
            raise ClientMessageError(place, f"must have the parts {', '.join(map(str, keys))}") from error
        columns = {
            key: _column(part, space[key], is_column, f"{place}.{key}") for key, part in zip(keys, parts, strict=True)
        }
        return columns if isinstance(space, dict) else tuple(columns.values())
    array = read_numbers(given, place)
    if array.ndim < 1:
        raise ClientMessageError(place, f"must be a list, got {_shown(given)}")
    return array


def _flag(given: Mapping[Any, Any], names: tuple[str, ...], place: str) -> bool:
    for name in names:
        if name in given:
            if type(given[name]) is not bool:
                raise ClientMessageError(f"{place}.{name}", f"must be true or false, got {_shown(given[name])}")
            return bool(given[name])
    return False


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ClientMessageError("message", f"holds the extension type {code} of msgpack: send numbers, text and arrays")


def _shown(value: Any) -> str:
    """Return a short value, or the type of another one, for an error message."""
    return repr(value[:40]) if isinstance(value, (str, bytes)) else type(value).__name__
