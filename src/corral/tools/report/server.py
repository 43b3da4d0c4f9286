"""`served_report`: the report as a page that follows its runs, on this machine unless another address is given."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any, cast

from corral.core.run_files import RESULTS_FILE
from corral.errors import CorralError, ReportError
from corral.tools.report.live import live_row
from corral.tools.report.page import make_page
from corral.tools.report.runs import RunsReader
from corral.tools.report.searches import find_searches

HOST, PORT = "127.0.0.1", 8642
PAUSE = 100
"""Times the duration of reading the runs for which they are not read again: it takes 1% of one core at most."""


class LiveReport:
    """The page and the present numbers of runs, read again when their files change, at most as often as `PAUSE` says.

    Attributes:
        version: Number of pages that were made so far.
    """

    def __init__(self, runs: Sequence[str | Path], threshold: float | None = None) -> None:
        """Make the first page.

        Args:
            runs: As for `write_report`.
            threshold: As for `write_report`.

        Raises:
            RunDirectoryError: A directory does not exist, or holds no run.
            MissingPackageError: The packages of the extra `report` are not installed.
        """
        self._reader, self._threshold = RunsReader(runs), threshold
        self._lock = threading.Lock()
        self.version = 0
        self._page, self._rows = b"", dict[str, Any]()
        self._seen: dict[str, Any] = {}
        self._not_before_s = {"page": 0.0, "rows": 0.0}
        self.page()
        self._not_before_s["page"] = 0.0  # the first page also imported and packed what every page needs

    def page(self) -> bytes:
        """Return the page."""
        with self._lock:
            self._renew("page", self._make_page)
            return self._page

    def status(self) -> bytes:
        """Return the present numbers of each run as JSON, with the version of the page."""
        with self._lock:
            self._renew("rows", self._read_rows)
            self._renew("page", self._make_page)
            return json.dumps({"version": self.version, "rows": self._rows}).encode()

    def _renew(self, what: str, make: Callable[[dict[str, Path]], None]) -> None:
        if (start_s := time.monotonic()) < self._not_before_s[what]:
            return
        found = self._reader.find()
        seen: dict[str, Any] = {name: _state_of_files(path) for name, path in found.items()}
        seen[""] = find_searches(self._reader.paths)  # trials that are not among the best ones have no run here
        if seen != self._seen.get(what):
            make(found)
            self._seen[what] = seen
        end_s = time.monotonic()
        self._not_before_s[what] = end_s + PAUSE * (end_s - start_s)

    def _make_page(self, run_dirs: dict[str, Path]) -> None:
        self._page = make_page(self._reader, live_version=self.version + 1, threshold=self._threshold)
        self.version += 1

    def _read_rows(self, run_dirs: dict[str, Path]) -> None:
        self._rows = {name: live_row(run_dir) for name, run_dir in run_dirs.items()}


def _state_of_files(run_dir: Path) -> list[tuple[int, int]]:
    """Return what changes when a run writes: sizes and times of its files; nothing for a file that is missing."""
    found = []
    for name in (RESULTS_FILE, "run.log"):
        try:
            stat = (run_dir / name).stat()
        except OSError:
            continue
        found.append((stat.st_size, stat.st_mtime_ns))
    return found


@contextmanager
def served_report(
    runs: Sequence[str | Path], host: str = HOST, port: int = PORT, *, threshold: float | None = None
) -> Iterator[ThreadingHTTPServer]:
    """Serve the report of runs in a thread of its own, until the end of the block.

    Args:
        runs: As for `write_report`.
        host: Address to listen on; others than a loopback address let other machines read the report.
        port: Port; 0 is any that is free, in `server_port` of what the block gets.
        threshold: As for `write_report`.

    Raises:
        ReportError: The address cannot be used.
        RunDirectoryError: A directory does not exist, or holds no run.
        MissingPackageError: The packages of the extra `report` are not installed.
    """
    report = LiveReport(runs, threshold)

    class Handler(_Handler):
        live = report

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ReportError(f"cannot listen at {host}:{port}: {reason}; choose another --port or --host.") from error
    thread = threading.Thread(target=server.serve_forever, name="corral report", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    live: LiveReport
    timeout = 30.0  # of a connection that sends nothing

    def do_GET(self) -> None:
        """Answer with the page, or with the present numbers."""
        answers = {"/": (self.live.page, "text/html; charset=utf-8"), "/status": (self.live.status, "application/json")}
        if not self._is_addressed():
            self.send_error(HTTPStatus.FORBIDDEN, "The Host header names another machine.")
        elif self.path not in answers:
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            make, kind = answers[self.path]
            try:
                self._send(make(), kind)
            except CorralError as error:  # such as a directory that was removed
                self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, explain=str(error))

    def _is_addressed(self) -> bool:
        """Return whether a request is for this server.

        A page of another site could otherwise read the report, under a name of its own that leads to this machine.
        """
        address, *_ = cast(tuple[str, int], self.server.server_address)
        if not ip_address(address).is_loopback:
            return True
        name = self.headers.get("Host", "").rsplit(":", 1)[0].strip("[]")
        return name in ("localhost", address)

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Write no line for each request."""
