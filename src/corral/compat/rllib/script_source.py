"""The parts of a script's source that some of its names need, without the parts that only RLlib has."""

from __future__ import annotations

import argparse
import ast
import functools
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import corral
from corral.core.scripts import flat_statements, homes_of, local_name, read_names

_NATIVE = {"RLlibCallback": "Callback", "DefaultCallbacks": "Callback"}
"""Corral's names of classes of RLlib that scripts derive from."""

_MARKERS = ("override", "OverrideToImplementCustomLogic", "PublicAPI", "DeveloperAPI")
"""Decorators of RLlib that change nothing."""


class NotPortable(Exception):
    """Something has no form in Corral; the message says what and why."""


class Script:
    """The source of a script.

    Args:
        path: The file; without one, as in a notebook, nothing is found.

    Attributes:
        name: Name of the file.
    """

    def __init__(self, path: str | None) -> None:
        """Parse the file."""
        self.name = Path(path).name if path else "the script"
        self._text = Path(path).read_text(encoding="utf-8") if path else ""
        main = sys.modules["__main__"]
        is_main = path is not None and getattr(main, "__file__", None) == path
        self._variables = {k: v for k, v in vars(main).items() if k[:2] != "__"} if is_main else {}
        self._statements = list(flat_statements(ast.parse(self._text).body))

    def lambda_source(self, function: Any) -> str:
        """Return the source of a lambda of the script, on one line.

        Raises:
            NotPortable: It reads local variables of a function, or two lambdas begin on its line.
        """
        if function.__code__.co_freevars:
            raise NotPortable(f"a lambda that reads {', '.join(function.__code__.co_freevars)}, local variables")
        line = function.__code__.co_firstlineno
        found = [
            ast.unparse(node)
            for node in ast.walk(ast.parse(self._text))
            if isinstance(node, ast.Lambda) and node.lineno == line
        ]
        if len(set(found)) != 1:
            raise NotPortable(f"several lambdas begin in line {line} of {self.name}: give each a line of its own")
        return found[0]

    def definitions(self, names: Iterable[str], reader: str = "") -> list[str]:
        """Return the source of the statements that define some names, and all names that these need, in their order.

        Args:
            names: Names of the top level of the script.
            reader: Other source that reads these names, such as lambdas. Of parsed options, those are kept that any
                source reads.

        Raises:
            NotPortable: A name is of RLlib and not of Corral, or the script defines it only while it runs.
        """
        homes = homes_of(self._statements)
        needed: dict[int, set[str]] = {}
        values: dict[str, None] = {}
        waiting = list(names)
        called = set(waiting)  # in contrast to names that only annotate types
        sources = reader + "\n"
        while waiting:
            name = waiting.pop()
            statements = [self._statements[index] for index in homes.get(name, ())]
            if not statements or self._has_plain_value(name, statements[-1]):
                values[name] = None
                continue
            new = [index for index in homes[name] if name not in needed.setdefault(index, set())]
            for index in new:
                needed[index].add(name)
                if isinstance(self._statements[index], (ast.Import, ast.ImportFrom)):
                    continue
                source = self._segment(self._statements[index])
                waiting += [each for each in read_names(source) if each in homes or each in self._variables]
                called |= read_names(_without_annotations(source))
                sources += source + "\n"
        made = [_value_source(name, self._variables, self.name, sources) for name in values]
        parts = [self._sources(self._statements[index], needed[index], called) for index in sorted(needed)]
        return [*made, *(part for each in parts for part in each)]

    def _has_plain_value(self, name: str, statement: ast.stmt) -> bool:
        """Return whether a variable has a value of its own, which the script may have changed since the statement."""
        value = self._variables.get(name, self)
        is_assigned = not isinstance(statement, (ast.Import, ast.ImportFrom))
        return is_assigned and (isinstance(value, argparse.Namespace) or _is_literal(value))

    def registrations(self, name: str) -> list[str]:
        """Return the source of the expressions at the top level that contain a string.

        Args:
            name: The string, such as the id of an env that the script registers.
        """
        return [
            self._segment(each)
            for each in self._statements
            if isinstance(each, ast.Expr)
            and any(isinstance(node, ast.Constant) and node.value == name for node in ast.walk(each))
        ]

    def _sources(self, statement: ast.stmt, names: set[str], called: set[str]) -> list[str]:
        if isinstance(statement, ast.ImportFrom):
            found = []
            for alias in statement.names:
                try:
                    found += _import_from(statement, alias) if local_name(alias) in names else []
                except NotPortable:
                    if local_name(alias) in called:
                        raise
                    found += ["from typing import Any", f"{local_name(alias)} = Any"]  # a type of RLlib in annotations
            return found
        if isinstance(statement, ast.Import):
            aliases = [alias for alias in statement.names if local_name(alias) in names]
            for alias in aliases:
                if alias.name.startswith("ray"):
                    raise NotPortable(f"{alias.name}, a module of Ray")
            return [ast.unparse(ast.Import([alias])) for alias in aliases]
        return [self._segment(statement)]

    def _segment(self, statement: ast.stmt) -> str:
        first = min([statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", []))])
        lines = self._text.splitlines()[first - 1 : statement.end_lineno]
        markers = tuple(f"@{name}" for name in _MARKERS)
        return textwrap.dedent("\n".join(line for line in lines if not line.lstrip().startswith(markers)))


def _import_from(statement: ast.ImportFrom, alias: ast.alias) -> list[str]:
    """Return the statements that take the place of the import of one name."""
    module, local = "." * statement.level + (statement.module or ""), local_name(alias)
    if not module.startswith("ray"):
        return [_import(module, alias.name, local)]
    value = getattr(sys.modules.get(module), alias.name, None)
    if (copied_env := getattr(value, "copied_env", None)) is not None:
        return ["from corral import make_multi_agent", f"{local} = make_multi_agent({copied_env!r})"]
    native = _NATIVE.get(alias.name, alias.name)
    if native in corral.__all__ and (native != alias.name or value is getattr(corral, native)):
        return [_import("corral", native, local)]
    if isinstance(value, (str, int, float)):
        return [f"{local} = {value!r}"]
    home = getattr(value, "__module__", "")
    if isinstance(value, type) and home.startswith("corral.") and not home.startswith("corral.compat."):
        return [_import(home, value.__name__, local)]
    if module.startswith("ray.rllib.examples"):  # envs of RLlib's examples, which scripts use as they are
        copied = Script(sys.modules[module].__file__).definitions([alias.name])
        return copied if local == alias.name else [*copied, f"{local} = {alias.name}"]
    raise NotPortable(f"{alias.name} of {module}")


def _import(module: str, name: str, local: str) -> str:
    return f"from {module} import {name}" + ("" if name == local else f" as {local}")


def _value_source(name: str, variables: Mapping[str, Any], script: str, sources: str) -> str:
    """Return the statement that gives a variable of a script, which it assigned while it ran, the same value.

    Args:
        name: The variable.
        variables: All variables of the script.
        script: Name of the script.
        sources: Source that reads the variable: of parsed options only those are kept that it reads.

    Raises:
        NotPortable: The value has no literal.
    """
    value = variables.get(name)
    if isinstance(value, argparse.Namespace):
        read = {
            node.attr
            for node in ast.walk(ast.parse(sources))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
        }
        kept = {key: option for key, option in vars(value).items() if key in read}
        if all(map(_is_literal, kept.values())):
            options = ", ".join(f"{key}={option!r}" for key, option in kept.items())
            return f"{name} = argparse.Namespace({options})"
    if name in variables and _is_literal(value):
        return f"{name} = {value!r}"
    raise NotPortable(f"{name!r}, which {script} does not define at its top level")


def _is_literal(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_literal, value))
    if isinstance(value, dict):
        return all(map(_is_literal, (*value, *value.values())))
    return value is None or type(value) in (bool, int, float, str)


def _without_annotations(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(tree)


def unwrapped(function: Any) -> Any:
    """Return what a `functools.partial` calls in the end."""
    while isinstance(function, functools.partial):
        function = function.func
    return function
