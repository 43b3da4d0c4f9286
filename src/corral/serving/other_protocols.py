"""What the policy server says to clients that do not speak its protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from corral.serving.rllink import RLlink, Ways

if TYPE_CHECKING:
    from corral.serving.sessions import Connection

__all__ = ["Ways", "recognize"]

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
