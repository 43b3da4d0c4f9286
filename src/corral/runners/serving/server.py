"""The sockets of the policy server: who is connected, which seats a client has, and what it sent.

A client opens a session with `hello` and gets as many seats as it has envs. It sends one message at a time and waits
for the answer, so that a fast client takes no turns from a slow one. All waiting is in `PolicyServer.receive`, which is
called while the runner samples; between two samples the clients wait. Times that clients may take count only while the
server listens.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import math
import secrets
import selectors
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from corral.core.links import load_link
from corral.core.spaces import space_tree
from corral.core.text import printable
from corral.envs.seats import SeatsSpace
from corral.errors import ClientMessageError, ConfigError
from corral.runners.serving.agent_messages import describe_spaces, read_agent_entries
from corral.runners.serving.client import HEADER, PROTOCOL, pack_array, pack_message
from corral.runners.serving.listening import listen, max_connections
from corral.runners.serving.messages import Entries, read_entries, read_envs, read_message
from corral.runners.serving.sessions import Connection, Session, Ways

log = logging.getLogger("corral")

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_HELLO_BYTES = 65_536
"""Size of the first message of a connection, whose sender is not known yet."""
HELLO_TIMEOUT_S = 10.0
SILENT_PATIENCE = 10.0
"""A client of RLlink may be silent for so many times `client_timeout_s`, because it collects steps meanwhile."""
NOBODY_S = 10.0
"""Seconds without any client after which the log says where they connect."""
CHECK_EVERY_S = 0.25
"""Seconds between two looks at who is late."""
PAUSE_S = 1.0
"""Seconds for which no connection is accepted after the system refused one."""
MAX_LOG_LINES = 200
"""Lines about clients in a minute of the log."""
CLOSE_S = 1.0
"""Seconds for which a server that closes waits until its last messages are sent."""
_READ_BYTES = 1 << 18
_MAX_UNREAD = 1 << 24  # bytes that are read after an error, and thrown away
_MAX_TEXT = 1000  # characters of an error for a client


@dataclass(frozen=True)
class ServerSettings:
    """Where a policy server listens, and whom it serves.

    Attributes:
        address: `"host:port"` or `"unix:/path/of/the/socket"`; port 0 is any free port.
        token: What clients must say to be served; `None` serves all that reach the address.
        certificate: File of the certificate in PEM format, for TLS; `None` is plain text.
        key: File of its private key.
        max_message_bytes: Size of the largest message that a client may send.
        client_timeout_s: Seconds after which a client that is silent is cut off.
        reconnect_timeout_s: Seconds for which the episodes of a client whose connection broke are kept, or more if the
            server listened for less than a tenth of them.
        policy_interval_s: Seconds between two versions of the policy that a client is sent, at least.
    """

    address: str = "127.0.0.1:5555"
    token: str | None = None
    certificate: str | None = None
    key: str | None = None
    max_message_bytes: int = MAX_MESSAGE_BYTES
    client_timeout_s: float = 60.0
    reconnect_timeout_s: float = 30.0
    policy_interval_s: float = 0.1


@dataclass
class Received:
    """What clients sent since the last call.

    Attributes:
        entries: Sessions and what they reported.
        dropped: Seats whose episodes end here, because the client gave them up, left, or broke the protocol.
    """

    entries: list[tuple[Session, Entries]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Say whether there is anything."""
        return bool(self.entries or self.dropped)


class PolicyServer:
    """Listens for clients, and exchanges messages with them.

    Args:
        settings: Where it listens, and whom it serves.
        observation_space: Space of one observation; with several agents a `SeatsSpace`.
        action_space: Space of one action, in the units of the env; not used with several agents.
        num_seats: Episodes that can be played at the same time.

    Attributes:
        address: Where it listens, with the port that it found.
        sessions: Clients by the names of their sessions.
        playing: Whether an episode is played in a seat, bool `[N]`.
        num_dropped: Episodes so far that ended because their client left or gave them up.
        weights_version: Version of the weights of now.
        output_space: Space of what the policy says of one observation.
        lacking: Clients that act themselves, and have no policy yet.

    Raises:
        ConfigError: The address cannot be used, or a file of TLS cannot be read.
    """

    def __init__(self, settings: ServerSettings, observation_space: Any, action_space: Any, num_seats: int) -> None:
        """Listen."""
        self._settings = settings
        self._seats = observation_space.seats if isinstance(observation_space, SeatsSpace) else None
        self._obs_space: Any = None
        self._action_space: Any = None
        if self._seats is None:
            self._obs_space, self._action_space = space_tree(observation_space), space_tree(action_space)
        self._described = describe_spaces(observation_space, action_space)
        self.playing = np.zeros(num_seats, np.bool_)
        self._free = list(range(num_seats))
        self.sessions: dict[str, Session] = {}
        self._connections: dict[Connection, None] = {}  # in the order in which they came
        self._ready: dict[Connection, None] = {}  # those that may have a message to take
        self.num_dropped = 0
        self.weights_version = 0
        self.output_space = Box(-np.inf, np.inf, (0,))
        self.lacking: list[Session] = []
        self._received = Received()
        self._tls = self._make_tls()
        self._listener, self.address = listen(settings.address)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._paused_until_s: float | None = None
        self._max_connections = max_connections()
        self._log = _ClientLog()
        self._away_s = 0.0  # seconds in which the server did not listen
        self._left_s = time.monotonic()
        self._checked_s = 0.0
        self._empty_since_s: float | None = self._now_s

    def _make_tls(self) -> ssl.SSLContext | None:
        if self._settings.certificate is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self._settings.certificate, self._settings.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"env_config: certificate {self._settings.certificate!r} and key {self._settings.key!r} cannot be used "
                f"for TLS: {error}."
            ) from None
        return context

    # Time.

    @property
    def _now_s(self) -> float:
        """Seconds for which the server has listened, from some start."""
        return time.monotonic() - self._away_s

    # Receiving.

    def receive(self, timeout_s: float) -> Received:
        """Wait until clients sent something that concerns their episodes, and return it; answer everything else.

        Args:
            timeout_s: Seconds after which it returns in any case.
        """
        self._away_s += time.monotonic() - self._left_s
        ends_s = self._now_s + timeout_s
        try:
            while not (self._received or self.lacking):
                left_s = ends_s - self._now_s
                if left_s < 0:
                    break
                for key, events in self._selector.select(0.0 if self._ready else min(left_s, CHECK_EVERY_S)):
                    if key.data is None:
                        self._accept()
                    else:
                        self._serve(key.data, events)
                ready, self._ready = self._ready, {}
                for connection in ready:
                    self._take_turn(connection)
                if self._now_s - self._checked_s > CHECK_EVERY_S:
                    self._check_times()
        finally:
            self._left_s = time.monotonic()
        received, self._received = self._received, Received()
        return received

    def _accept(self) -> None:
        try:
            found, peer = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # the client has gone
            return
        except OSError as error:  # there are too many open files, or no memory
            self._selector.unregister(self._listener)
            self._paused_until_s = self._now_s + PAUSE_S
            self._log.once(f"connections wait, because the system accepts no more: {error}.")
            return
        if len(self._connections) >= self._max_connections and not self._close_silent():
            self._log.once(f"refused a connection, because there are {self._max_connections}.")
            found.close()
            return
        name = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "local"
        try:
            found.setblocking(False)
            if isinstance(peer, tuple):
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._tls is not None:
                found = self._tls.wrap_socket(found, server_side=True, do_handshake_on_connect=False)
        except OSError:  # the client has gone
            found.close()
            return
        connection = Connection(found, name, self._now_s, self._read_message, self._send)
        connection.shakes_hands = self._tls is not None
        self._connections[connection] = None
        self._selector.register(found, selectors.EVENT_READ, connection)

    def _close_silent(self) -> bool:
        """Close the oldest connection that has no session, and return whether there was one."""
        found = next((one for one in self._connections if one.session is None), None)
        if found is not None:
            self._close(found)
        return found is not None

    def _serve(self, connection: Connection, events: int) -> None:
        if connection not in self._connections:  # closed for another one, in the same turn
            return
        try:
            if connection.shakes_hands and not self._shake_hands(connection):
                return
            if events & selectors.EVENT_WRITE:
                self._flush(connection)
            if events & selectors.EVENT_READ:
                self._read(connection)
        except (OSError, ssl.SSLError) as error:
            self._end(connection, f"lost the connection: {error}")

    def _shake_hands(self, connection: Connection) -> bool:
        try:
            connection.socket.do_handshake()
        except ssl.SSLWantReadError:
            self._selector.modify(connection.socket, selectors.EVENT_READ, connection)
            return False
        except ssl.SSLWantWriteError:
            self._selector.modify(connection.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)
            return False
        connection.shakes_hands = False
        self._selector.modify(connection.socket, selectors.EVENT_READ, connection)
        return True

    def _read(self, connection: Connection) -> None:
        """Read what is there; no more is read than can be looked at."""
        while self._has_room(connection) and not connection.is_over:
            try:
                part = connection.socket.recv(_READ_BYTES)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            connection.read += part
            connection.is_over = not part
            if len(part) < _READ_BYTES and self._tls is None:
                break
        self._ready[connection] = None
        was_full, connection.is_full = connection.is_full, not self._has_room(connection)
        if was_full or connection.is_full or connection.is_over:
            self._watch(connection)

    def _has_room(self, connection: Connection) -> bool:
        return len(connection.read) <= self._limit(connection) + 2 * _READ_BYTES

    def _watch(self, connection: Connection) -> None:
        """Wait for what the socket can do next: bring more of what the client sends, or take what is unsent."""
        reads = not (connection.is_over or connection.is_full)
        wanted = (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if connection.unsent else 0)
        known = self._selector.get_map().get(connection.socket)
        if wanted and known is None:
            self._selector.register(connection.socket, wanted, connection)
        elif wanted and known is not None and known.events != wanted:
            self._selector.modify(connection.socket, wanted, connection)
        elif not wanted and known is not None:
            self._selector.unregister(connection.socket)

    def _limit(self, connection: Connection) -> int:
        return MAX_HELLO_BYTES if connection.session is None else self._settings.max_message_bytes

    def _take_turn(self, connection: Connection) -> None:
        """Take the next message of a connection, after it was sent the answer to the one before.

        Whatever is wrong with the message costs this client its session, and nobody else anything. A client that sends
        many messages at once takes turns with the others.
        """
        if connection not in self._connections or connection.is_ending or connection.unsent:
            return
        took = False
        try:
            took = connection.reader(connection)
            if connection.is_full and connection in self._connections and self._has_room(connection):
                self._read(connection)
        except ClientMessageError as error:
            self._refuse(connection, "protocol", str(error))
        except (OSError, ssl.SSLError) as error:
            self._end(connection, f"lost the connection: {error}")
        except Exception as error:  # of a message for which no check was thought of
            log.debug("policy server: a message could not be taken.", exc_info=True)
            self._refuse(connection, "protocol", f"the message cannot be used: {type(error).__name__}: {error}")
        if took:
            self._ready[connection] = None
        elif connection.is_over and not connection.is_ending and not connection.unsent:
            self._end(connection, "closed the connection")

    def _read_message(self, connection: Connection) -> bool:
        """Take the next message if it was read whole, and return whether it was.

        Raises:
            ClientMessageError: It does not fit the protocol.
        """
        data, session = connection.read, connection.session
        if len(data) < HEADER.size:
            return False
        (size,) = HEADER.unpack_from(data)
        limit = self._limit(connection)
        if size > limit:
            if session is None and self._speaks_another_protocol(connection):
                return not connection.is_ending
            self._refuse(connection, "too_large", f"a message of {size:,} bytes: at most {limit:,} are accepted.")
            return False
        if session is not None and session.waits:
            if len(data) > limit + HEADER.size:
                self._refuse(connection, "protocol", "messages were sent before the answer to the last one.")
            return False
        if len(data) < HEADER.size + size:
            return False
        body = bytes(data[HEADER.size : HEADER.size + size])
        del data[: HEADER.size + size]
        self._take(connection, read_message(body))
        return True

    def _speaks_another_protocol(self, connection: Connection) -> bool:
        """Serve a client by its own protocol from now on, or refuse it there; return `False` if it is none we know."""
        does = self._take, self._refuse, self._send, self._want_policy, self._limit, lambda: self._now_s
        ways = Ways(*does, self._obs_space, self._action_space)
        return bool(load_link("rllib.rllink").recognize(connection, ways))

    def _take(self, connection: Connection, message: Mapping[str, Any]) -> None:
        """Do what a message asks for.

        Raises:
            ClientMessageError: It does not fit the protocol.
        """
        session, kind = connection.session, message["type"]
        if session is None:
            if kind != "hello":
                raise ClientMessageError("type", f"the first message must be hello, got {kind}")
            self._welcome(connection, message)
            return
        session.heard_s = self._now_s
        if kind == "hello":
            raise ClientMessageError("type", "hello was said already")
        if kind == "bye":
            self._end_session(session)
            self._close(connection)
            return
        number = message["id"]
        if number == session.last_id:
            if not session.waits:  # the answer was lost with the connection before
                self._send(connection, session.answer)
            return
        if number < session.last_id:
            raise ClientMessageError(f"{kind}.id", f"must be larger than the last one, {session.last_id}, got {number}")
        if kind == "steps":
            self._received.entries.append((session, self._read_steps(session, message)))
            session.last_id, session.waits = number, True
            return
        if kind == "drop":
            seats = session.seats[read_envs(message["envs"], len(session.seats), "drop.envs")]
            self._drop(np.unique(seats))
        session.last_id = number
        self._answer(session, {"type": "done", "id": number, "weights_version": self.weights_version})

    def _read_steps(self, session: Session, message: Mapping[str, Any]) -> Entries:
        """Return what a message `steps` says, if it comes at the right time from the right client."""
        num_envs, newest = len(session.seats), self.weights_version
        if self._seats is None:
            spaces = self._obs_space, self._action_space, self.output_space
            entries = read_entries(message, num_envs, *spaces)
        else:
            entries = read_agent_entries(message, num_envs, self._seats)
        if entries.draws is not None:
            if session.policy is None:
                raise ClientMessageError("steps.draws", "only clients that were sent the policy act by it")
            if not 0 <= entries.weights_version <= newest:
                problem = f"must be 0 to {newest}, got {entries.weights_version}"
                raise ClientMessageError("steps.weights_version", problem)
        self._check_order(session, entries)
        return entries

    def _check_order(self, session: Session, entries: Entries) -> None:
        """Check that episodes begin where none is played, and continue where one is; note where one is played then."""
        seats, ends = session.seats[entries.envs], entries.ends
        playing = self.playing[seats]
        if len(seats) > 1 and len(np.unique(seats)) < len(seats):
            latest: dict[int, bool] = {}  # whether an episode is played after the latest entry of each seat
            for index, (seat, ended) in enumerate(zip(seats.tolist(), ends.tolist(), strict=True)):
                if latest.get(seat) and not entries.is_acted and not entries.begins[index]:
                    problem = "takes a step with an action that it was not told yet"
                    raise ClientMessageError(f"steps.envs[{index}]", f"env {entries.envs[index]} {problem}")
                playing[index] = latest.get(seat, playing[index])
                latest[seat] = not ended
        if (bad := entries.begins == playing).any():
            index = int(np.flatnonzero(bad)[0])
            problem = "begins an episode, and the one before is not over" if playing[index] else "has no episode"
            raise ClientMessageError(f"steps.envs[{index}]", f"env {entries.envs[index]} {problem}")
        self.playing[seats] = ~ends  # of several entries of one seat, the last one stays

    # Sessions.

    def _welcome(self, connection: Connection, hello: Mapping[str, Any]) -> None:
        token = self._settings.token
        if hello["protocol"] != PROTOCOL:
            known = f"this server speaks version {PROTOCOL} of the protocol, and the client {hello['protocol']}."
            self._refuse(connection, "version", known)
            return
        given = hello.get("token", "").encode("utf-8", "surrogatepass")
        if token is not None and not hmac.compare_digest(token.encode(), given):
            self._refuse(connection, "token", "this server serves only clients that say its token.")
            return
        num_envs = hello.get("num_envs", 1)
        if not num_envs >= 1:
            raise ClientMessageError("hello.num_envs", f"must be at least 1, got {num_envs}")
        session = self.sessions.get(hello.get("session", ""))
        is_known = session is not None and len(session.seats) == num_envs
        if session is None or not is_known:
            if num_envs > len(self._free):
                self._end_unused()
            if num_envs > len(self._free):
                self._refuse_without_seats(connection, num_envs)
                return
            self._free.sort()
            seats, self._free = self._free[:num_envs], self._free[num_envs:]
            name = printable(hello.get("name", "")[:60]) or connection.peer
            session = Session(secrets.token_hex(16), name, np.array(seats), self._now_s)
            self.sessions[session.id_] = session
            self._log(logging.INFO, "client %s came with %d envs.", session.name, num_envs)
        elif session.connection is not None:
            self._close(session.connection)  # it is broken, and this end has not noticed
        session.connection, session.left_s, session.heard_s = connection, None, self._now_s
        connection.session = session
        session.wants_policy, session.policy = False, None
        if hello.get("wants_policy", False):
            self._want_policy(session)
        welcome = {
            "type": "welcome",
            "protocol": PROTOCOL,
            "session": session.id_,
            "resumed": is_known,
            "max_message_bytes": self._settings.max_message_bytes,
            "weights_version": self.weights_version,
            **self._described,
        }
        self._send(connection, connection.pack(welcome))

    def _want_policy(self, session: Session) -> None:
        """Let a client have the policy, with which it acts itself."""
        session.wants_policy = True
        if session not in self.lacking:
            self.lacking.append(session)

    def _refuse_without_seats(self, connection: Connection, num_envs: int) -> None:
        kept = sum(len(session.seats) for session in self.sessions.values() if session.connection is None)
        has = f"the client has {num_envs} envs, and {len(self._free)} of {len(self.playing)} seats are free"
        if num_envs <= len(self._free) + kept:
            within = f"within reconnect_timeout_s={self._settings.reconnect_timeout_s:g}"
            self._refuse(connection, "busy", f"{has}: {kept} are kept for clients that may come back {within}.")
            return
        remedy = "set env_runners(num_envs_per_env_runner=...) to the number of envs of all clients."
        self._refuse(connection, "full", f"{has}: {remedy}")

    def lose(self, session: Session) -> None:
        """Forget a client and its episodes; it comes back as a client whose episodes were lost."""
        self._end_session(session)
        if session.connection is not None:
            self._close(session.connection)

    def _drop(self, seats: NDArray[np.int64]) -> None:
        dropped = seats[self.playing[seats]].tolist()
        self._received.dropped += dropped
        self.playing[dropped] = False
        self.num_dropped += len(dropped)

    def _end_unused(self) -> None:
        """End the sessions whose connections broke before their first message, or whose clients do not come back.

        The `welcome` of the former may be lost, so that their clients come back as new ones, which need these seats.
        """
        for session in [*self.sessions.values()]:
            is_over = session.last_id < 0 or (session.may_be_silent and not session.waits)
            if session.connection is None and is_over:
                self._end_session(session)

    def _end_session(self, session: Session) -> None:
        """Forget a client; its episodes end here."""
        if self.sessions.pop(session.id_, None) is None:
            return
        if session in self.lacking:
            self.lacking.remove(session)
        self._drop(session.seats)
        # All of its seats, because what it sent last may have ended an episode in which the runner still waits for a
        # step. `receive` has returned that: it takes one message of a connection, and then nothing more.
        self._received.dropped += session.seats.tolist()
        self._free += session.seats.tolist()

    def _end(self, connection: Connection, reason: str) -> None:
        """Close a connection that broke; its client may come back."""
        session = connection.session
        self._close(connection)
        if session is not None and session.connection is connection:
            session.connection, session.left_s, session.heard_s = None, time.monotonic(), self._now_s
            self._log(logging.INFO, "client %s %s.", session.name, reason)

    def _refuse(self, connection: Connection, code: str, message: str) -> None:
        """Tell a client what was wrong, and end its session and its connection."""
        session, message = connection.session, printable(message[:_MAX_TEXT])
        name = connection.peer if session is None else session.name
        if code == "busy":  # it asks again, each second
            self._log.once(f"a client waits: {message}")
        else:
            self._log(logging.WARNING, "client %s was cut off: %s", name, message)
        if session is not None:
            self._end_session(session)
        connection.is_ending, connection.since_s = True, self._now_s
        connection.read.clear()
        with contextlib.suppress(OSError):
            self._send(connection, connection.pack({"type": "error", "code": code, "message": message}))

    def _close(self, connection: Connection) -> None:
        if connection in self._connections:
            del self._connections[connection]
            if connection.socket in self._selector.get_map():
                self._selector.unregister(connection.socket)
            connection.socket.close()

    def _check_times(self) -> None:
        """Cut off who takes too long."""
        now = self._now_s
        self._checked_s = now
        if self.sessions:
            self._empty_since_s = now
        elif self._empty_since_s is not None and now - self._empty_since_s > NOBODY_S:
            log.warning("policy server: no client is connected, and sampling waits; they connect to %s.", self.address)
            self._empty_since_s = None  # once, until somebody was there again
        for connection in [*self._connections]:
            if (connection.session is None or connection.is_ending) and now - connection.since_s > HELLO_TIMEOUT_S:
                self._close(connection)
        if self._paused_until_s is not None and now > self._paused_until_s:
            self._paused_until_s = None
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        for session in [*self.sessions.values()]:
            self._check_session(session, now)

    def _check_session(self, session: Session, now: float) -> None:
        if session.left_s is not None:
            if session.may_be_silent and not session.waits:
                self._end_session(session)
                return
            # In all: a client that was started again waits for these seats. While the server did not listen at all,
            # nobody could come back.
            limit_s = self._settings.reconnect_timeout_s
            if time.monotonic() - session.left_s > limit_s and now - session.heard_s > limit_s / 10:
                self._log(logging.WARNING, "client %s did not come back; its episodes are dropped.", session.name)
                self._end_session(session)
            return
        factor, limit_s = SILENT_PATIENCE if session.may_be_silent else 1.0, self._settings.client_timeout_s
        if not session.waits and now - session.heard_s > factor * limit_s:
            times = f"{factor:g} times " if session.may_be_silent else ""
            self.cut_off(session, "timeout", f"it was silent for {times}client_timeout_s={limit_s:g} seconds.")

    def cut_off(self, session: Session, code: str, problem: str) -> None:
        """End the session of a client that cannot be served any more, and tell it code and text of the error."""
        if session.connection is not None:
            self._refuse(session.connection, code, problem)
        else:
            self._end_session(session)

    # Sending.

    def needs_policy(self, session: Session, policy: Any) -> bool:
        """Return whether a client acts by another policy than this one, for at least `policy_interval_s`."""
        if not session.wants_policy or session.policy == policy:
            return False
        return session.policy is None or time.monotonic() - session.policy_s >= self._settings.policy_interval_s

    def send_policy(self, session: Session, policy: Any, message: bytes) -> None:
        """Send a client the policy with which it acts from now on.

        Args:
            session: The client.
            policy: What it is made of; see `needs_policy`.
            message: The message `policy` as bytes.
        """
        if session.connection is not None:
            session.policy, session.policy_s = policy, time.monotonic()
            session.connection.give_policy(session.connection, message)
            self._ready[session.connection] = None

    def answer(self, session: Session, actions: Any) -> None:
        """Send the actions of a client's latest message, a tree of `[M, ...]`."""
        self._send_actions(session, {"actions": pack_array(actions)})

    def answer_agents(self, session: Session, actions: Mapping[str, tuple[NDArray[np.int64], Any]]) -> None:
        """Send the actions of several agents: by agent, the seats in which it acts and its actions, `[M, ...]`."""
        numbers = {agent: np.searchsorted(session.seats, seats).tolist() for agent, (seats, _) in actions.items()}
        parts = {agent: {"envs": numbers[agent], "actions": pack_array(part)} for agent, (_, part) in actions.items()}
        self._send_actions(session, {"agents": parts})

    def _send_actions(self, session: Session, actions: Mapping[str, Any]) -> None:
        message = {"type": "actions", "id": session.last_id, **actions}
        self._answer(session, {**message, "weights_version": self.weights_version})

    def _answer(self, session: Session, message: Mapping[str, Any]) -> None:
        if session.id_ not in self.sessions:
            return
        connection = session.connection
        pack = pack_message if connection is None else connection.pack
        session.answer, session.waits, session.heard_s = pack(message), False, self._now_s
        if connection is not None:
            self._send(connection, session.answer)
            self._ready[connection] = None  # the client may have sent more

    def _send(self, connection: Connection, data: bytes) -> None:
        connection.unsent += data
        try:
            self._flush(connection)
        except (OSError, ssl.SSLError) as error:
            self._end(connection, f"lost the connection: {error}")

    def _flush(self, connection: Connection) -> None:
        """Send what can be sent now; the rest is sent when the socket takes it."""
        while connection.unsent:
            try:
                sent = connection.socket.send(connection.unsent)
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                break
            del connection.unsent[:sent]
        if connection not in self._connections:
            return
        self._watch(connection)
        if not connection.unsent:
            self._ready[connection] = None  # messages wait until the answers before are sent
            if connection.is_ending:
                self._linger(connection)

    def _linger(self, connection: Connection) -> None:
        """Close a connection whose last message is sent, so that the client can still read it."""
        with contextlib.suppress(OSError):
            connection.socket.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError, ssl.SSLError):  # unread data would reset the connection, with the message
            for _ in range(
                _MAX_UNREAD // _READ_BYTES
            ):  # of a client that never ends, the rest is lost with the message
                if not connection.socket.recv(_READ_BYTES):
                    break
        self._close(connection)

    def close(self) -> None:
        """Say bye to all clients, and stop listening."""
        for connection in [*self._connections]:
            with contextlib.suppress(OSError, ssl.SSLError):
                self._send(connection, connection.pack({"type": "bye", "message": "the training is over"}))
        ends_s = time.monotonic() + CLOSE_S
        while any(connection.unsent for connection in self._connections) and time.monotonic() < ends_s:
            for key, _ in self._selector.select(0.05):
                if key.data is not None:
                    with contextlib.suppress(OSError, ssl.SSLError):
                        self._flush(key.data)
        for connection in [*self._connections]:
            self._close(connection)
        self._selector.close()
        self._listener.close()
        if self.address.startswith("unix:"):
            Path(self.address.removeprefix("unix:")).unlink(missing_ok=True)


class _ClientLog:
    """Lines about clients in the log, a limited number in a minute: a client that comes in a loop fills no disk."""

    def __init__(self) -> None:
        self._since_s, self._count = -math.inf, 0
        self._said: set[str] = set()

    def __call__(self, level: int, text: str, *values: Any) -> None:
        if (now_s := time.monotonic()) - self._since_s > 60:
            if self._count > MAX_LOG_LINES:
                log.warning("policy server: %d lines about clients were left out.", self._count - MAX_LOG_LINES)
            self._since_s, self._count = now_s, 0
            self._said.clear()
        self._count += 1
        if self._count <= MAX_LOG_LINES:
            log.log(level, f"policy server: {text}", *values)

    def once(self, text: str) -> None:
        """Log a warning, once in a minute."""
        if text not in self._said or time.monotonic() - self._since_s > 60:
            self(logging.WARNING, "%s", text)
            self._said.add(text)
