"""`corral report` and `corral plot`: what run directories hold, as a page or as a picture."""

from __future__ import annotations

import argparse
import contextlib
import os
import threading
import webbrowser
from pathlib import Path
from typing import Any

from corral.errors import ConfigError


def add_report_commands(commands: Any) -> None:
    """Add the commands to the command line.

    Args:
        commands: Subparsers of the command line.
    """
    page = commands.add_parser("report", help="write a page with the curves, times, faults and settings of runs")
    _add_runs(page)
    page.add_argument("-o", "--output", type=Path, help="the HTML file to write; report.html if left out")
    page.add_argument("--open", action="store_true", help="open the page in the browser")
    page.add_argument(
        "--watch", action="store_true", help="serve the page until Ctrl-C; it follows the runs while they write"
    )
    page.add_argument(
        "--port", type=int, help="with --watch, the port to serve at, 0 for any that is free; 8642 if left out"
    )
    page.add_argument(
        "--host",
        help="with --watch, the address to serve at; 127.0.0.1 if left out, which only this machine can read",
    )
    page.add_argument(
        "--threshold",
        type=float,
        help="a return of which the page says when the runs reached it; Gymnasium's for the env if left out",
    )
    page.set_defaults(run="corral.tools.cli.report:report")

    picture = commands.add_parser("plot", help="draw a number of runs over training")
    _add_runs(picture)
    picture.add_argument(
        "--x", choices=("steps", "time"), default="steps", help="env steps or seconds; steps if left out"
    )
    picture.add_argument(
        "--y",
        default="episode_return_mean",
        metavar="KEY",
        help="a number of the result, such as learners/default_policy/total_loss; episode_return_mean if left out",
    )
    picture.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("curves.png"),
        help="the picture to write, .png, .svg or .pdf; curves.png if left out",
    )
    picture.set_defaults(run="corral.tools.cli.report:plot")


def _add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run directory, or a directory that holds some")


def report(options: argparse.Namespace) -> int:
    """Write the page of runs, or serve it until an interrupt; return the exit status 0.

    Raises:
        ConfigError: Options do not go together.
    """
    if options.watch:
        return _watch(options)
    if options.port is not None or options.host is not None:
        raise ConfigError("--port and --host need --watch, which serves the page.")
    from corral.tools.report import write_report

    path = write_report(options.runs, options.output or Path("report.html"), threshold=options.threshold)
    print(f"The report is stored in {path}", flush=True)
    if options.open:
        webbrowser.open(path.absolute().as_uri())
    return 0


def _watch(options: argparse.Namespace) -> int:
    if options.output is not None:
        raise ConfigError("--output cannot be used with --watch, which writes no file: leave one of them out.")
    from corral.tools.report.server import HOST, PORT, served_report

    os.nice(10)  # the runs go first
    host, port = options.host or HOST, PORT if options.port is None else options.port
    with served_report(options.runs, host, port, threshold=options.threshold) as server:
        url = f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/"
        print(f"The report is at {url} and follows the runs; Ctrl-C ends it.", flush=True)
        if options.open:
            webbrowser.open(url)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    return 0


def plot(options: argparse.Namespace) -> int:
    """Draw the picture of runs, and return the exit status 0."""
    from corral.tools.report import write_plot

    path = write_plot(options.runs, options.output, x=options.x, y=options.y)
    print(f"The picture is stored in {path}", flush=True)
    return 0
