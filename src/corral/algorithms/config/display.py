"""A config as text, the calls that make it, and as HTML for the output of a notebook cell."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from corral.algorithms.config.settings import MAIN_SETTINGS
from corral.core.html import html_details, html_heading, html_table
from corral.core.settings import default_of, path_of
from corral.modules.transforms.settings import describe_transform
from corral.modules.transforms.transform import Transform

if TYPE_CHECKING:
    from corral.algorithms.config.config import AlgorithmConfig

LONGEST_LINE = 100
LONGEST_STRING = 200
MOST_ENTRIES = 10
HUGE = 1000  # what is longer is cut also where Python could make the config from the text


def display(config: AlgorithmConfig) -> str:
    """Return the class of a config and what differs from the defaults of that class, as calls of the setters.

    Classes and functions are import paths. Where settings are plain values and import paths, Python makes an equal
    config from the text. Spaces are shown as they print, other objects by the name of their class.
    """
    calls = [f"{type(config).__name__}()"]
    for group in config.group_fields():
        if arguments := _arguments(config, group):
            calls.append(f".{group}({', '.join(arguments)})")
    line = "".join(calls)
    return line if len(line) <= LONGEST_LINE else "(\n    " + "\n    ".join(calls) + "\n)"


def display_html(config: AlgorithmConfig) -> str:
    """Return the settings that differ from the defaults as a table, and all settings in groups that open at a click."""
    changed, parts = [], []
    defaults = {field.name: default_of(field) for field in dataclasses.fields(config)}
    for group, names in config.group_fields().items():
        rows = [
            (name, *(_text(value, cut=True) for value in (getattr(config, name), defaults[name]))) for name in names
        ]
        changed += [(f"{group}.{row[0]}", *row[1:]) for row in rows if _is_changed(config, row[0])]
        if rows:
            parts.append(html_details(f"{group} ({len(rows)})", html_table(rows, ("setting", "value", "default"))))
    table = (
        html_table(changed, ("setting", "value", "default")) if changed else "<div>All settings are the defaults.</div>"
    )
    return f"<div>{html_heading(type(config).__name__)}{table}{''.join(parts)}</div>"


def changed_arguments(config: AlgorithmConfig, group: str) -> list[tuple[str, Any]]:
    """Return name and value of the arguments of a group's setter for what differs from the defaults.

    The name of an argument that is given by position is "".
    """
    changed = {name: getattr(config, name) for name in config.group_fields()[group] if _is_changed(config, name)}
    if group == "callbacks":
        first = "callbacks_class"
        changed |= changed.pop("callback_functions", {})
    else:
        first = MAIN_SETTINGS.get(group, "")
    main = [("", changed.pop(first))] if first in changed else []
    return main + list(changed.items())


def _arguments(config: AlgorithmConfig, group: str) -> list[str]:
    return [f"{name}={_text(value)}" if name else _text(value) for name, value in changed_arguments(config, group)]


def _is_changed(config: AlgorithmConfig, name: str) -> bool:
    field = next(field for field in dataclasses.fields(config) if field.name == name)
    default, value = default_of(field), getattr(config, name)
    try:
        return type(value) is not type(default) or bool(value != default)
    except Exception:  # such as a dict of arrays, which do not compare to one bool
        return True


def _text(value: Any, *, cut: bool = False) -> str:
    """Return a value as Python code where it has a short one; with `cut`, only the beginning of a long one."""
    if isinstance(value, str):
        return repr(value[:LONGEST_STRING] + "..." if len(value) > (LONGEST_STRING if cut else HUGE) else value)
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if _is_space(value):  # before mappings and sequences, which some spaces are too
        text = " ".join(repr(value).split())
        return f"<{text if len(text) <= LONGEST_STRING else text[:LONGEST_STRING] + '...'}>"
    if isinstance(value, Mapping):
        return (
            "{" + _join((f"{_text(key)}: {_text(part, cut=cut)}" for key, part in value.items()), len(value), cut) + "}"
        )
    if isinstance(value, list):
        return "[" + _join((_text(part, cut=cut) for part in value), len(value), cut) + "]"
    if isinstance(value, tuple):
        return (
            "("
            + _join((_text(part, cut=cut) for part in value), len(value), cut)
            + ("," if len(value) == 1 else "")
            + ")"
        )
    if isinstance(value, Transform):
        return _text(describe_transform(value), cut=cut)
    if hasattr(value, "__qualname__"):
        path = path_of(value)
        if "<" not in path:
            return repr(path)
        return f"<{value.__name__.strip('<>')}>"  # a lambda, or something that a function made, has no import path
    return f"<{type(value).__name__}>"


def _is_space(value: Any) -> bool:
    spaces = sys.modules.get("gymnasium.spaces")  # imported if there is a space
    return spaces is not None and isinstance(value, spaces.Space)


def _join(parts: Iterable[str], number: int, cut: bool) -> str:
    is_long = number > (MOST_ENTRIES if cut else HUGE)
    return ", ".join([*itertools.islice(parts, MOST_ENTRIES), "..."] if is_long else parts)
