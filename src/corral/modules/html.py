"""A module as HTML, for the output of a notebook cell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from corral.core.html import html_heading, html_table

if TYPE_CHECKING:
    from corral.modules.module import Module


def module_html(module: Module) -> str:
    """Return the spaces of a module, a table of what holds its parameters, and the number of parameters."""
    rows = []
    for name, part in module.named_modules():
        own = dict(part.named_parameters(recurse=False))
        if own:
            shapes = ", ".join(f"{key} {list(parameter.shape)}" for key, parameter in own.items())
            frozen = "" if all(parameter.requires_grad for parameter in own.values()) else "frozen"
            size = sum(parameter.numel() for parameter in own.values())
            rows.append((name or "(itself)", type(part).__name__, shapes, f"{size:,}", frozen))
    about = {
        "observations": str(module.observation_space),
        "actions": str(module.action_space),
        "parameters": f"{sum(parameter.numel() for parameter in module.parameters()):,}",
    }
    table = html_table(rows, ("name", "layer", "shapes", "parameters", ""))
    return f"<div>{html_heading(type(module).__name__)}{html_table(about.items())}{table}</div>"
