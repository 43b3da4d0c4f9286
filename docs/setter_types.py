"""Write `src/corral/config/setter_types.py`: keyword arguments of the setters, from the dataclasses of the config.

The module is committed, and a test compares it with what this script gives.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from corral.algorithms.registry import ALGORITHMS, config_class
from corral.config.config import ALSO_IN, AlgorithmConfig
from corral.config.settings import GROUPS, MAIN_SETTINGS
from corral.core.familiar_names import ALIASES
from corral.core.schedules import Schedule

MODULE = Path(__file__).parents[1] / "src" / "corral" / "config" / "setter_types.py"
HEAD = '''\
"""Keyword arguments of the config's setters, so that editors complete them and type checkers know them.

Written by docs/generate.py; run `make docs` after a change of a setting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from corral.config.config import AlgorithmConfig

ScheduleArg = float | Sequence[Sequence[float]]
"""A number, or `[[num_env_steps, value], ...]` joined by straight lines."""

IdsArg = Set[str] | list[str] | tuple[str, ...]
"""Ids of modules; a string alone is not a set of ids."""
'''

# What the setters take for settings whose values they convert, where that is more than what the config then holds.
CONVERTED = {
    "policies": "IdsArg | Mapping[str, Mapping[str, Any] | None]",
    "policies_to_train": "IdsArg | Callable[[str], bool] | str | None",
    "shared_layers": "Mapping[str, IdsArg | Sequence[Sequence[str]]]",
}


def type_text(hint: Any) -> str:
    """Return a type as Python code: what a setter takes, which is more than what the config then holds."""
    if hint == Schedule:
        return "ScheduleArg"
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        schedule, parts = set(typing.get_args(Schedule)), list(arguments)
        if schedule <= set(parts):
            return " | ".join(["ScheduleArg", *(type_text(part) for part in parts if part not in schedule)])
        return " | ".join(type_text(part) for part in parts)
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]".replace("'", '"')
    if origin in (list, tuple):
        return f"Sequence[{type_text(arguments[0])}]"
    if origin is dict:
        return f"Mapping[{', '.join(map(type_text, arguments))}]"
    if hint is type(None):
        return "None"
    if hint is Any:
        return "Any"
    if hint in (bool, int, float, str, AlgorithmConfig):
        return str(hint.__name__)
    raise TypeError(f"no text for the type {hint!r} of a setting")


def typed_dict(name: str, base: str, summary: str, hints: Mapping[str, Any]) -> str:
    """Return the code of a `TypedDict` whose keys may all be left out."""
    lines = [f"class {name}({base}, total=False):", f'    """{summary}"""', ""]
    types_of = {key: CONVERTED.get(key) or type_text(hint) for key, hint in hints.items()}
    return "\n".join([*lines, *(f"    {key}: {text}" for key, text in types_of.items())]) + "\n"


def module_text() -> str:
    """Return the code of the module."""
    of_config = typing.get_type_hints(AlgorithmConfig)
    parts = [HEAD]
    for group, owner in GROUPS.items():
        if group == "callbacks":  # its setter is written by hand: it takes events
            continue
        names = [f.name for f in dataclasses.fields(owner) if f.name != MAIN_SETTINGS.get(group)]
        names += ALSO_IN.get(group, ())
        args = owner.__name__.removesuffix("Settings") + "Args"
        summary = f"Settings of `.{group}(...)`; see `{owner.__name__}`."
        hints = {name: of_config[name] for name in names}
        hints |= {name: AlgorithmConfig | hints[name] for name in names if name == "evaluation_config"}
        hints |= {alias: of_config[name] for alias, name in ALIASES.get(group, {}).items()}
        parts.append(typed_dict(args, "TypedDict", summary, hints))
    for algo in ALGORITHMS:
        cls = config_class(algo)
        hints, base = typing.get_type_hints(cls), GROUPS["training"]
        known = {f.name for f in dataclasses.fields(base)}
        names = [name for name in cls.group_fields()["training"] if name not in known]
        summary = f"Settings of `.training(...)` of {algo}; see `{cls.__name__}`."
        parts.append(typed_dict(f"{algo}TrainingArgs", "TrainingArgs", summary, {name: hints[name] for name in names}))
    return "\n\n".join(parts)


def main() -> None:
    """Write the module."""
    MODULE.write_text(module_text(), encoding="utf-8")


if __name__ == "__main__":
    main()
