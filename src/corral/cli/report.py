"""`corral report` and `corral plot`: what run directories hold, as a page or as a picture."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path
from typing import Any


def add_report_commands(commands: Any) -> None:
    """Add the commands to the command line.

    Args:
        commands: Subparsers of the command line.
    """
    page = commands.add_parser("report", help="write a page with the curves, times, faults and settings of runs")
    _add_runs(page)
    page.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), help="the HTML file to write; report.html if left out"
    )
    page.add_argument("--open", action="store_true", help="open the page in the browser")
    page.set_defaults(run="corral.cli.report:report")

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
    picture.set_defaults(run="corral.cli.report:plot")


def _add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run directory, or a directory that holds some")


def report(options: argparse.Namespace) -> int:
    """Write the page of runs, and return the exit status 0."""
    from corral.report import write_report

    path = write_report(options.runs, options.output)
    print(f"The report is stored in {path}", flush=True)
    if options.open:
        webbrowser.open(path.absolute().as_uri())
    return 0


def plot(options: argparse.Namespace) -> int:
    """Draw the picture of runs, and return the exit status 0."""
    from corral.report import write_plot

    path = write_plot(options.runs, options.output, x=options.x, y=options.y)
    print(f"The picture is stored in {path}", flush=True)
    return 0
