"""The dict that `train()` returns, and its HTML for the output of a notebook cell."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from typing import Any

from corral.core.html import html_details, html_image, html_table, html_video
from corral.core.metrics.result import flat_result
from corral.core.metrics.summary import summary
from corral.core.result_values import classify

VIDEO_FPS = 20.0
MAX_PICTURES = 8


class Result(dict[str, Any]):
    """A result: a nested dict of numbers, which a notebook shows as a summary, pictures and tables."""

    def _repr_html_(self) -> str:
        return result_html(self)


def result_html(result: Mapping[str, Any]) -> str:
    """Return the summary of a result, its images and videos, and a table of each group, which opens at a click.

    Args:
        result: Result of `Algorithm.train()`, `fit()` or `evaluate()`; the last one has no summary.
    """
    text = (
        f"<pre style='font-family:monospace'>{html.escape(summary(result))}</pre>"
        if result.keys() >= {"training_iteration", "num_env_steps_sampled_lifetime"}
        else ""
    )
    alone = {name: value for name, value in result.items() if not isinstance(value, Mapping)}
    groups = {name: flat_result(value) for name, value in result.items() if isinstance(value, Mapping)}
    tables = [
        html_details(f"{name} ({len(values)})", html_table(values.items()))
        for name, values in [*groups.items(), ("others", alone)]
        if values
    ]
    return f"<div>{text}{''.join(_pictures(result))}{''.join(tables)}</div>"


def _pictures(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the images and videos of a result, the first eight."""
    found = [(path, *classify(value)) for path, value in flat_result(result).items()]
    pictures = [
        (path, kind, picture)
        for path, kind, is_series, data in found
        if kind in ("image", "video")
        for picture in (data if is_series else [data])
    ]
    for path, kind, picture in pictures[:MAX_PICTURES]:
        yield html_image(picture, path) if kind == "image" else html_video(picture, VIDEO_FPS, path)
    if len(pictures) > MAX_PICTURES:
        yield f"<div>and {len(pictures) - MAX_PICTURES} more images and videos</div>"
