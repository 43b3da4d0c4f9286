"""What a script defines, for another script that restores what the first one saved: its definitions run, and no more.

A checkpoint names a class of the script `train.py` as `"train.py:Name"`. Importing the script would train again.
"""

from __future__ import annotations

import ast
import symtable
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from corral.errors import ConfigError

_known: dict[str, Script] = {}
_WITH_OWN_NAMES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Script(ModuleType):
    """The definitions of a script as a module: a name runs the statements that it needs when it is first asked for.

    The module is not among the imported ones, so that its classes travel to other processes with their source.

    Args:
        name: Name of the file, as checkpoints have it.
        file: The file.
    """

    def __init__(self, name: str, file: Path) -> None:
        """Parse the file; nothing of it runs."""
        super().__init__(name)
        self.__file__ = str(file)
        vars(self)["__statements__"] = list(flat_statements(ast.parse(file.read_text(encoding="utf-8")).body))

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            statements = vars(self)["__statements__"]
            _run(self, statements, _needed(statements, name))
        if name not in vars(self):
            raise AttributeError(f"{self.__file__} defines no {name!r}")
        return vars(self)[name]


def find_script(name: str) -> Script | None:
    """Return the script of a name, next to the script that runs or in the working directory; `None` if there is none.

    Args:
        name: Name of a file without a directory, such as `"train.py"`.

    Raises:
        ConfigError: The file is no Python.
    """
    if name in _known:
        return _known[name]
    main = getattr(sys.modules["__main__"], "__file__", None)
    places = [Path(main).parent] if main else []
    for file in (place / name for place in (*places, Path.cwd())):
        if Path(name).name == name and file.is_file():
            try:
                _known[name] = Script(name, file.absolute())
            except (SyntaxError, UnicodeDecodeError) as error:
                raise ConfigError(f"{file} cannot be read as a script: {error}.") from error
            return _known[name]
    return None


def found_script(name: str) -> Script | None:
    """Return a script that `find_script` has found before."""
    return _known.get(name)


def _needed(statements: list[ast.stmt], name: str) -> list[int]:
    """Return the indices of the statements that define or change a name, and what these need."""
    homes = homes_of(statements)
    needed: set[int] = set()
    waiting = [name]
    while waiting:
        for index in homes.get(waiting.pop(), ()):
            if index not in needed:
                needed.add(index)
                waiting += read_names(ast.unparse(statements[index]))
    return sorted(needed)


def _run(module: Script, statements: list[ast.stmt], indices: list[int]) -> None:
    """Run those statements that have not run yet.

    Raises:
        ConfigError: One of them raised.
    """
    new = [statements[index] for index in indices if not isinstance(statements[index], ast.Pass)]
    future = [each for each in statements if isinstance(each, ast.ImportFrom) and each.module == "__future__"]
    code = compile(ast.Module([*future, *new], []), str(module.__file__), "exec", dont_inherit=True)
    name = module.__name__
    sys.modules[name] = module  # dataclasses look there for the types of their fields
    try:
        exec(code, vars(module))
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{module.__file__}: its definitions raised {type(error).__name__}: {error}") from error
    finally:
        del sys.modules[name]
    for index in indices:
        statements[index] = ast.Pass()


# Source.


def read_names(source: str) -> set[str]:
    """Return the names of its module that a piece of source reads, also inside functions and classes."""
    return set(_globals(symtable.symtable(source, "", "exec")))


def _globals(table: symtable.SymbolTable) -> Iterator[str]:
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module"):
            yield symbol.get_name()
    for inner in table.get_children():
        yield from _globals(inner)


def local_name(alias: ast.alias) -> str:
    """Return the name that an import binds."""
    return alias.asname or alias.name.partition(".")[0]


def flat_statements(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a script, and what `if __name__ == "__main__"` defines in its first level."""
    for each in statements:
        if _is_main(each):
            kinds = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
            yield from (inner for inner in each.body if isinstance(inner, kinds))  # type: ignore[attr-defined]
        else:
            yield each


def _is_main(statement: ast.stmt) -> bool:
    """Return whether a statement is `if __name__ == "__main__"`."""
    return isinstance(statement, ast.If) and any(
        isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test)
    )


def homes_of(statements: list[ast.stmt]) -> dict[str, list[int]]:
    """Return by name the indices of the statements that define or change it, such as `SIZES += [32]`."""
    homes: dict[str, list[int]] = {}
    for index, each in enumerate(statements):
        for name in bound_names(each):
            homes.setdefault(name, []).append(index)
    return homes


def bound_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement, or a part of it, defines or changes at its own level."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from map(local_name, node.names)
    elif not isinstance(node, _WITH_OWN_NAMES):
        if isinstance(getattr(node, "ctx", None), ast.Store):
            changed = node
            while isinstance(changed, (ast.Attribute, ast.Subscript)):  # as in `TABLE["key"] = value`
                changed = changed.value
            if isinstance(changed, ast.Name):
                yield changed.id
        for part in ast.iter_child_nodes(node):
            yield from bound_names(part)
