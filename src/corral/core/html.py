"""HTML for the output of a notebook cell: tables, parts that open at a click, and pictures."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from corral.core.pictures import encode_gif, encode_png

NUM_DIGITS = 6
LONGEST_TEXT = 300
WIDTH = 320
"""Width in pixels at which pictures are shown at most."""

MAX_FRAMES = 100


def html_table(rows: Iterable[Sequence[Any]], header: Sequence[str] = ()) -> str:
    """Return a table.

    Args:
        rows: Values of each row; the first one is a name. `Markup` is kept, anything else becomes text.
        header: Titles of the columns.
    """
    head = "".join(f"<th style='text-align:left'>{html.escape(title)}</th>" for title in header)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table>{f'<thead><tr>{head}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"


def html_details(title: str, content: str, *, is_open: bool = False) -> str:
    """Return a part of which only the title is seen until it is clicked."""
    return f"<details{' open' * is_open}><summary>{html.escape(title)}</summary>{content}</details>"


def html_heading(text: str) -> str:
    """Return a line in bold."""
    return f"<div><b>{html.escape(text)}</b></div>"


class Markup(str):
    """Text that is HTML already."""


def html_image(image: np.ndarray[Any, Any], title: str = "", width: int = WIDTH) -> Markup:
    """Return an image, uint8 `[H, W, 3]` or `[H, W, 4]`, with a title below it, at most `width` pixels wide.

    An image of more than 640 pixels in a row has every second, third, ... pixel only, so that notebooks stay small.
    """
    return _figure(lambda: (encode_png(_thinned(image)), "image/png"), title, width)


def html_video(frames: np.ndarray[Any, Any], fps: float, title: str = "") -> Markup:
    """Return a video, uint8 `[T, H, W, 3]`, as an animated picture with a title below it.

    A video of more than 100 frames has every second, third, ... frame only, each as much longer; pixels are left out as
    in `html_image`.
    """
    stride = -(-len(frames) // MAX_FRAMES)
    return _figure(lambda: (encode_gif(_thinned(frames[::stride]), fps / stride), "image/gif"), title, WIDTH)


def _thinned(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return images `[..., H, W, C]` with at most `2 * WIDTH` pixels in a row and in a column."""
    stride = -(-max(pixels.shape[-3:-1]) // (2 * WIDTH))
    return pixels[..., ::stride, ::stride, :]


def _figure(encode: Callable[[], tuple[bytes, str]], title: str, width: int) -> Markup:
    if find_spec("PIL") is None:
        return Markup("<i>pictures need Pillow: pip install pillow</i>")
    content, media_type = encode()
    url = f"data:{media_type};base64,{base64.b64encode(content).decode('ascii')}"
    caption = f"<figcaption>{html.escape(title)}</figcaption>" if title else ""
    image = f"<img src='{url}' alt='{html.escape(title)}' style='max-width:{width}px;max-height:{width}px'>"
    return Markup(f"<figure style='display:inline-block;margin:4px;text-align:center'>{image}{caption}</figure>")


def _cell(value: Any) -> str:
    return f"<td style='text-align:left'>{value if isinstance(value, Markup) else html.escape(short_text(value))}</td>"


def short_text(value: Any) -> str:
    """Return a value of a table as text: numbers with six digits, arrays of more than eight numbers by their shape."""
    if isinstance(value, str):
        text = value
    elif isinstance(value, (bool, np.bool_)):
        text = str(bool(value))
    elif isinstance(value, (float, np.floating)):
        text = f"{value:.{NUM_DIGITS}g}"
    elif isinstance(value, np.ndarray) and not value.ndim:
        text = short_text(value.item())
    elif isinstance(value, dict):
        text = "{" + ", ".join(f"{key}: {short_text(part)}" for key, part in value.items()) + "}"
    elif isinstance(value, np.ndarray) and value.size > 8:
        text = f"{value.dtype}{list(value.shape)}"
    elif isinstance(value, np.ndarray):
        text = np.array2string(value, precision=4, suppress_small=True, separator=", ").replace("\n", "")
    elif isinstance(value, (list, tuple)) and len(value) <= 8:
        text = "[" + ", ".join(map(short_text, value)) + "]"
    else:
        text = str(value)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}..."
