"""`write_report`: one HTML file, which needs no server and no network."""

from __future__ import annotations

import base64
import functools
import gzip
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from corral import __version__
from corral.core.paths import resolve_path
from corral.tools.report.comparison import compare_groups
from corral.tools.report.figures import group_color
from corral.tools.report.groups import Group, group_runs, repeated_seeds
from corral.tools.report.live import COLUMNS as LIVE_COLUMNS
from corral.tools.report.media import collect_media
from corral.tools.report.output import missing_package, write_file
from corral.tools.report.runs import RunsReader
from corral.tools.report.search_figures import search_section
from corral.tools.report.searches import SearchFiles, find_searches
from corral.tools.report.sections import (
    evaluation_section,
    faults_figures,
    learning_section,
    losses_section,
    more_section,
    time_section,
)
from corral.tools.report.tables import SUMMARY_COLUMNS, fault_rows, settings_of, summary_rows

REPORT_FILE = "report.html"


def write_report(
    runs: str | Path | Sequence[str | Path], path: str | Path = REPORT_FILE, *, threshold: float | None = None
) -> Path:
    """Write a report on runs as one HTML file, which needs no server and no network, and return its path.

    Runs that differ only in the seed are one experiment: their curves are shown as mean with a 95% interval. Files that
    are missing or damaged are named in the report, and everything else is shown. Of a search, all trials are shown in
    figures, and the runs of the best ones.

    Args:
        runs: Directories of runs, or directories that hold such directories, up to three levels below, as searches do.
        path: The file to write; an existing one is replaced.
        threshold: Return of which the report says when the runs reached it; `None` is the one that Gymnasium has for
            the env, if it has one.

    Returns:
        The path of the file.

    Raises:
        RunDirectoryError: A directory does not exist, or holds no run.
        ReportError: The file cannot be written.
        ConfigError: The packages of the extra `report` are not installed.
    """
    target = resolve_path(path, "the report")
    reader = RunsReader([runs] if isinstance(runs, (str, Path)) else runs)
    return write_file(target, make_page(reader, threshold=threshold))


def make_page(reader: RunsReader, live_version: int | None = None, threshold: float | None = None) -> bytes:
    """Return the page on runs; see `write_report`.

    Args:
        reader: Reads the runs.
        live_version: Number of the page among those that a server has made, for a page that asks the server for the
            present numbers, and for the next page when there is one.
        threshold: See `write_report`.

    Raises:
        RunDirectoryError: A directory does not exist, or holds no run.
        MissingPackageError: The packages of the extra `report` are not installed.
    """
    plotly_js = _packed_plotly_js()
    groups, searches = group_runs(reader.read()), find_searches(reader.paths)
    return _page(groups, searches, plotly_js, live_version, threshold).encode("utf-8", errors="replace")


def _packed_plotly_js() -> str:
    """Return the code of plotly.js, which the page holds, packed.

    Raises:
        MissingPackageError: The packages of the extra `report` are not installed.
    """
    try:
        import jinja2  # noqa: F401
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise missing_package("a report", error) from error
    return _packed(get_plotlyjs())


@functools.cache
def _packed(code: str) -> str:
    """Return a text by gzip and in base64, with less than half of its size; the page unpacks it."""
    return base64.b64encode(gzip.compress(code.encode(), mtime=0)).decode()


def _page(
    groups: Sequence[Group],
    searches: Sequence[SearchFiles],
    plotly_js: str,
    live_version: int | None,
    threshold: float | None,
) -> str:
    """Return the text of the page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    runs = [run for group in groups for run in group.runs]
    colors = [group_color(index) for index in range(len(groups))]
    environment = Environment(
        loader=PackageLoader("corral.tools.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.get_template("report.html.jinja").render(
        title=groups[0].label if len(groups) == 1 else f"{len(groups)} experiments",
        num_runs=len(runs),
        version=__version__,
        written=f"{datetime.now():%Y-%m-%d %H:%M:%S}",
        columns=SUMMARY_COLUMNS,
        rows=summary_rows(groups, colors),
        comparisons=compare_groups(groups, colors, threshold),
        repeated={group.label: seeds for group in groups if (seeds := repeated_seeds(group))},
        sections=[
            *map(search_section, searches),
            *(section(groups) for section in (learning_section, evaluation_section, losses_section, time_section)),
        ],
        more=more_section(groups),
        faults=fault_rows(runs),
        fault_figures=faults_figures(groups),
        settings=settings_of(groups),
        media=collect_media(runs),
        plotly_js=plotly_js,
        live_columns=LIVE_COLUMNS,
        live_version=live_version,
    )
