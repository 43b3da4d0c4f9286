"""Write `src/corral/algorithms/config/setter_types.py`: keyword arguments of the setters.

The module is committed, and a test compares it with what this script gives.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from corral.algorithms.config.config import ALSO_IN, AlgorithmConfig
from corral.algorithms.config.settings import GROUPS, MAIN_SETTINGS
from corral.algorithms.registry import ALGORITHMS, config_class
from corral.core.familiar_names import ALIASES
from corral.core.schedules import Schedule
from corral.learners.config import TrainingSettings

MODULE = Path(__file__).parents[1] / "src" / "corral" / "algorithms" / "config" / "setter_types.py"
HEAD = '''\
"""Keyword arguments of the config's setters, so that editors complete them and type checkers know them.

Written by docs/generate.py; run `make docs` after a change of a setting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from corral.algorithms.config.config import AlgorithmConfig

ScheduleArg = float | Sequence[Sequence[float]]
"""A number, or `[[num_env_steps, value], ...]` joined by straight lines."""

IdsArg = Set[str] | list[str] | tuple[str, ...]
"""Ids of modules; a string alone is not a set of ids."""
'''

# What the setters take for settings whose values they convert, where that is more than what the config then holds.
CONVERTED = {
    "policies": "IdsArg | Mapping[str, Mapping[str, Any] | None]",
    "policies_to_train": "IdsArg | Callable[[str], bool] | str | None",
    "critic_sees": 'Literal["all"] | Callable[..., Any] | str | None',
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
    entries = [f"    {key}: {text}" for key, text in types_of.items()]
    return "\n".join([*lines, *entries] if entries else lines[:2]) + "\n"


def args_name(owner: type) -> str:
    """Return the name of the `TypedDict` with the settings that a class adds to `.training(...)`."""
    if owner is TrainingSettings:
        return "TrainingArgs"
    is_config = issubclass(owner, AlgorithmConfig)
    return f"{owner.__name__.removesuffix('Config')}TrainingArgs" if is_config else f"{owner.__name__}Args"


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
    configs = [config_class(algo) for algo in ALGORITHMS]
    keys: dict[type, dict[str, Any]] = {}
    for cls in configs:
        for name, hint in typing.get_type_hints(cls).items():
            if name in cls.group_fields()["training"]:
                home = next(owner for owner in reversed(cls.__mro__) if name in inspect.get_annotations(owner))
                if keys.setdefault(home, {}).setdefault(name, hint) != hint:
                    raise TypeError(f"{cls.__name__}.{name} has another type than {home.__name__}.{name}")
    for owner in sorted({*keys, *configs} - {TrainingSettings}, key=lambda owner: (len(owner.__mro__), owner.__name__)):
        name, summary = args_name(owner), f"Settings of `.training(...)`; see `{owner.__name__}`."
        bases = [each for base in owner.__bases__ for each in base.__mro__ if each in keys or each in configs]
        nearest = [base for base in dict.fromkeys(bases) if not any(base in other.__mro__[1:] for other in bases)]
        base = ", ".join(map(args_name, nearest)) or "TypedDict"
        parts.append(typed_dict(name, base, summary, keys.get(owner, {})))
    return "\n\n".join(parts)


def main() -> None:
    """Write the module."""
    MODULE.write_text(module_text(), encoding="utf-8")


if __name__ == "__main__":
    main()
