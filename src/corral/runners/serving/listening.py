"""Where a policy server listens: addresses, the socket, and how many connections it takes."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

from corral.errors import ConfigError

MAX_CONNECTIONS = 1024


def max_connections() -> int:
    """Return how many connections there may be: a quarter of the files that the process may open stay free."""
    try:
        import resource  # here, because Windows has none
    except ImportError:
        return MAX_CONNECTIONS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, max(1, soft * 3 // 4))


def listen(address: str) -> tuple[socket.socket, str]:
    """Return a listening socket, and the address with the port that was found.

    Raises:
        ConfigError: The address is no address, or cannot be used.
    """
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        _remove_stale(path)
        listener, target, shown = socket.socket(socket.AF_UNIX), path, address
    else:
        host, port = split_address(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener, target = socket.socket(family), (host, port)  # type: ignore[assignment]
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        shown = ""
    try:
        with _private_files() if address.startswith("unix:") else contextlib.nullcontext():
            listener.bind(target)
        listener.listen(MAX_CONNECTIONS)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"env_config: the policy server cannot listen at {address}: {error.strerror or error}. Another address is "
            "set with env_config={'address': 'host:port'}, or `corral serve --port`."
        ) from None
    listener.setblocking(False)
    if not shown:
        host = f"[{host}]" if ":" in host else host
        shown = f"{host}:{listener.getsockname()[1]}"
    return listener, shown


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of `"host:port"`.

    Raises:
        ConfigError: It has no such form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(
            f"env_config: address must be 'host:port', such as '127.0.0.1:5555', or 'unix:/path', got {address!r}."
        )
    return host.strip("[]"), int(port)


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    """Make files that only this user can use."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def _remove_stale(path: str) -> None:
    """Remove the socket of a server that is gone; nothing else is removed."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX) as probe:
                try:
                    probe.connect(path)
                except OSError:
                    os.unlink(path)
