"""Names that users of other libraries know, and what Corral calls them.

Messages about unknown names ask the tables of `compat/familiar_names.py` first, before they look for a name that is
spelt alike. The tables are read when the first such message is made.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Literal

from corral.core.links import load_link
from corral.errors import UnknownAttributeError, nearest_name

Meanings = tuple[tuple[str, str], ...]
"""Pairs: the path or name in Corral, and what differs in its meaning (`""` if nothing does)."""
Table = Literal["SETTINGS", "RESULTS", "CONFIG_METHODS", "ALGORITHM_METHODS", "EVENTS", "EVENT_ARGUMENTS"]

ALIASES: Mapping[str, Mapping[str, str]] = {
    "evaluation": {
        "evaluation_num_workers": "evaluation_num_env_runners",
        "custom_eval_function": "custom_evaluation_function",
    },
    "rl_module": {"freeze": "freeze_parts"},
}
"""Names that the setter of a group takes as well, also in files and on the command line: the setting by its alias."""


def familiar_table(name: Table) -> Mapping[str, Meanings]:
    """Return what names of other libraries mean, by the name there."""
    table: Mapping[str, Meanings] = getattr(load_link("familiar_names"), name)
    return table


def meaning_of(name: object, table: Table, known: Collection[str], owner: str = "") -> str | None:
    """Return a sentence with what Corral calls a name of another library, or `None` if the table does not have it.

    Args:
        name: What the user wrote.
        table: Name of a table.
        known: The names that the user could have meant; for `SETTINGS`, paths `group.name`. Meanings that are not among
            them are left out; if none is, the sentence says so.
        owner: The name of what lacks the name then.
    """
    meanings = familiar_table(table).get(name) if isinstance(name, str) else None
    if meanings is None:
        return None
    found = [(meant, note) for meant, note in meanings if not meant or ".".join(meant.split(".")[:2]) in known]
    shown = [_text(_call(meant) if table == "SETTINGS" else meant, note) for meant, note in found or meanings]
    missing = "" if found else f", which {owner or 'this'} does not have"
    return f"In Corral: {', or '.join(shown)}{missing}."


def meaning_of_key(name: object, known: Collection[str]) -> str | None:
    """Return `meaning_of` a key of a dict of settings, such as `model_config`, whose keys are known."""
    meanings = familiar_table("SETTINGS").get(name, ()) if isinstance(name, str) else ()
    # A meaning without a path says what to do with the name, in whatever dict it is.
    shown = [_text(key, note) for meant, note in meanings if not (key := meant.rpartition(".")[2]) or key in known]
    return f"In Corral: {', or '.join(shown)}." if shown else None


def _call(path: str) -> str:
    """Return the call that sets a setting, such as `.training(lr=...)` for `training.lr`."""
    group, name, key = [*path.split("."), "", ""][:3]
    return f".{group}({name}={{{key!r}: ...}})" if key else f".{group}({name}=...)" if name else ""


def _text(meant: str, note: str) -> str:
    return f"{meant} ({note})" if meant and note else meant or note


def attribute_error(owner: object, name: str, table: Table) -> UnknownAttributeError:
    """Return the error for an attribute that an object or class does not have."""
    return UnknownAttributeError(partial(_missing_attribute, owner, name, table))


def _missing_attribute(owner: object, name: str, table: Table) -> str:
    cls = (owner if isinstance(owner, type) else type(owner)).__name__
    known = [] if name.startswith("_") else [known for known in dir(owner) if not known.startswith("_")]
    hint = meaning_of(name, table, known, cls)
    if hint is None and (close := nearest_name(name, known)) is not None:
        hint = f"Did you mean {close!r}?"
    return f"{cls} has no attribute {name!r}.{'' if hint is None else f' {hint}'}"
