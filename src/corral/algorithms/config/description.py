"""Descriptions of settings: type, default, bounds and meaning, for `corral config` and the reference pages."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import typing
from collections.abc import Iterable
from typing import Any, Literal

from corral.algorithms.config.config import AlgorithmConfig
from corral.core.schedules import Schedule
from corral.core.settings import bounds_of, default_of, is_union, setting_types


@dataclasses.dataclass(frozen=True)
class SettingDescription:
    """What is known about a setting.

    Attributes:
        name: Name of the setting.
        types: Types that it takes, and choices, as Python code.
        default: Default value.
        bounds: Bounds, as texts that follow "must be".
        meaning: Its text in the docstring; `""` if a class of the user has none.
    """

    name: str
    types: list[str]
    default: Any
    bounds: list[str]
    meaning: str


def describe_settings(owner: type, names: Iterable[str] | None = None) -> list[SettingDescription]:
    """Return the descriptions of the settings of a dataclass, in its order.

    Args:
        owner: The dataclass.
        names: Which of its fields; `None` is all of them.
    """
    docs = {name: text for cls in reversed(owner.__mro__) for name, text in section_of(cls, "Attributes").items()}
    hints, bounded = typing.get_type_hints(owner), setting_types(owner)
    shown = None if names is None else set(names)
    return [
        SettingDescription(
            field.name,
            type_parts(hints[field.name]),
            default_of(field),
            bounds_of(bounded[field.name]),
            docs.get(field.name, ""),
        )
        for field in dataclasses.fields(owner)
        if shown is None or field.name in shown
    ]


def describe_config(cls: type[AlgorithmConfig]) -> dict[str, list[SettingDescription]]:
    """Return the descriptions of all settings of an algorithm, by group.

    The group `rl_module.model_config` holds the settings of the default module.
    """
    described = {setting.name: setting for setting in describe_settings(cls)}
    groups = {group: [described[name] for name in names] for group, names in cls.group_fields().items()}
    return {group: settings for group, settings in groups.items() if settings} | {
        "rl_module.model_config": describe_network(cls)
    }


def describe_network(cls: type[AlgorithmConfig]) -> list[SettingDescription]:
    """Return the descriptions of the settings of an algorithm's default module, with the defaults that it has there."""
    from corral.algorithms.config.without_effect import network_settings_of  # here, since these import torch
    from corral.modules.q_module import NORMALIZED_NETWORK

    config = cls()
    owner: Any = network_settings_of(config.default_module_class)
    own = dict(NORMALIZED_NETWORK) if config.module_settings.get("is_normalized") else {}
    # Widths depend on the observations too, so their default is `None`, and the text says what it stands for.
    hiddens = own.pop("fcnet_hiddens", getattr(owner, "DEFAULT_HIDDENS", ()))
    widths = {"`DEFAULT_HIDDENS`": hiddens, "`DEFAULT_BLOCKS`": getattr(owner, "DEFAULT_BLOCKS", ())}

    def adapted(setting: SettingDescription) -> SettingDescription:
        meaning = setting.meaning
        for name, found in widths.items():
            meaning = meaning.replace(name, f"`{list(found)}`")
        return dataclasses.replace(setting, default=own.get(setting.name, setting.default), meaning=meaning)

    return [] if owner is None else [adapted(setting) for setting in describe_settings(owner)]


def section_of(cls: type, heading: str) -> dict[str, str]:
    """Return the text of each entry in a section of a class's docstring, by name.

    Args:
        cls: A class with a Google-style docstring.
        heading: Heading of the section, such as `"Attributes"`.
    """
    _, found, section = inspect.cleandoc(cls.__doc__ or "").partition(f"{heading}:\n")
    texts: dict[str, list[str]] = {}
    name = ""
    for line in section.splitlines() if found else []:
        if not line.startswith("    "):  # a blank line, or the next section
            break
        if entry := re.match(r"    (\w+)(?: \([^)]*\))?: (.*)", line):
            name = entry[1]
            texts[name] = [entry[2]]
        elif name:
            texts[name].append(line.strip())
    return {name: " ".join(lines) for name, lines in texts.items()}


def summary_of(cls: type) -> str:
    """Return the first line of a class's docstring; `""` without one."""
    text = inspect.cleandoc(cls.__doc__ or "")
    return "" if text.startswith(f"{cls.__name__}(") else text.partition("\n")[0]  # a dataclass gets its signature


def type_parts(hint: Any) -> list[str]:
    """Return the members of a type as Python code: the members of a union, and the choices of a `Literal`."""
    if is_union(hint):
        members, schedule = list(typing.get_args(hint)), typing.get_args(Schedule)
        if set(schedule) <= set(members):
            members = [member for member in members if member not in schedule]
            return ["Schedule", *(part for member in members for part in type_parts(member))]
        return [part for member in members for part in type_parts(member)]
    if typing.get_origin(hint) is Literal:
        return [json.dumps(choice) for choice in typing.get_args(hint)]
    if hint is type(None):
        return ["None"]
    return [hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")]
