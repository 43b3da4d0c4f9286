"""Who is connected to a policy server: the connections, and the sessions of clients over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corral.core.tree import Tree
from corral.runners.serving.client import pack_message


@dataclass(eq=False)
class Connection:
    """A socket, with what was read from it and what is still to be sent.

    `reader` takes the next message that was read, and says whether there was one; `pack` writes the ones that are sent,
    and `give_policy` sends a message with the policy. The ones for clients of RLlink are in
    `compat/rllib/rllink.py`.
    """

    socket: Any
    peer: str
    since_s: float  # when it was opened, or began to end
    reader: Callable[[Connection], bool]
    give_policy: Callable[[Connection, bytes], None]
    pack: Callable[[Mapping[str, Any]], bytes] = pack_message
    read: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    session: Session | None = None
    shakes_hands: bool = False  # the TLS handshake is not over
    is_ending: bool = False  # to be closed when all is sent
    is_over: bool = False  # the client sends no more
    is_full: bool = False  # more is read when there is room


@dataclass(eq=False)
class Session:
    """A client, over one connection or several, one after the other.

    Attributes:
        id_: Secret name of the session, with which the client continues it.
        name: Name of the client in messages.
        seats: Seat of each env of the client, int64 `[K]`.
        last_id: Number of its latest message.
        waits: Whether that message is not answered yet.
        answer: The answer to that message as bytes.
        heard_s: When it last sent a message, was answered, or left, in seconds for which the server listened.
        left_s: When its connection broke, in seconds of the monotonic clock; `None` while it has one.
        may_be_silent: Whether the client may be silent for longer, and does not come back, as one of RLlink.
        wants_policy: Whether it acts itself, by the policy that the server sends.
        policy: What the latest policy that it was sent is made of, or `None`.
        policy_s: When that was, in seconds of the monotonic clock.
    """

    id_: str
    name: str
    seats: NDArray[np.int64]
    heard_s: float
    connection: Connection | None = None
    last_id: int = -1
    waits: bool = False
    answer: bytes = b""
    left_s: float | None = None
    may_be_silent: bool = False
    wants_policy: bool = False
    policy: Any = None
    policy_s: float = 0.0


@dataclass(frozen=True)
class Ways:
    """What a policy server does with messages of clients, for those that speak other protocols.

    Attributes:
        take: Takes a message of a connection.
        refuse: Ends a connection with the code and the text of an error.
        send: Sends bytes.
        want_policy: Lets a client have the policy from now on.
        limit: Returns the size in bytes of the largest message that a connection may send now.
        now_s: Returns the seconds for which the server has listened, from some start.
        obs_space: Space of one observation, a tree of spaces without Dict and Tuple; `None` with several agents.
        action_space: Space of one action, such a tree too.
    """

    take: Callable[[Connection, Mapping[str, Any]], None]
    refuse: Callable[[Connection, str, str], None]
    send: Callable[[Connection, bytes], None]
    want_policy: Callable[[Session], None]
    limit: Callable[[Connection], int]
    now_s: Callable[[], float]
    obs_space: Tree
    action_space: Tree
