"""Derives a build of Corral's runner without the dispatch of callbacks, to measure what the dispatch costs.

The build is the runner's own source, folded for a runner to which nobody subscribed: tests whose outcome is then
known are decided, and the branches not taken, the calls that only serve callbacks and the keeping of infos are
removed. It follows the source as that changes, and is refused where it no longer removes anything or leaves
something behind, so that a measure cannot compare a thing with itself.
"""

import ast
import inspect
from dataclasses import dataclass
from typing import Any

METHODS = ("sample", "_reset", "_continue", "_step_rows", "_finish")
# What a runner has only for callbacks, by attribute; with the value where it is known if nobody subscribed.
KNOWN_ATTRIBUTES: dict[str, Any] = {"_events": None, "_keeps_infos": False}
CALLBACK_ATTRIBUTES = frozenset({*KNOWN_ATTRIBUTES, "_callbacks", "_keep_infos", "_last_infos"})
QUESTIONS = frozenset({"subscribed", "wanted"})  # to `_callbacks`; the answer is no
TIMER = "callbacks"

_UNKNOWN = object()


class FoldError(RuntimeError):
    """The source no longer has the form that this module knows how to fold."""


@dataclass(frozen=True)
class Build:
    """A runner class without the dispatch.

    Attributes:
        runner_class: A subclass of the runner with the methods that differ.
        removed: How many statements each of these methods lost.
        source: The source of these methods.
    """

    runner_class: type[Any]
    removed: dict[str, int]
    source: str


def build(runner_class: type[Any]) -> Build:
    """Returns a subclass of a runner class whose methods have no dispatch.

    Raises:
        FoldError: A method lost nothing, or kept something that is there for callbacks.
    """
    module = inspect.getmodule(runner_class)
    if module is None:
        raise FoldError(f"{runner_class} has no module to take its source from")
    methods, removed = fold(inspect.getsource(module), runner_class.__name__)
    name = f"{runner_class.__name__}WithoutDispatch"
    derived = ast.ClassDef(name, [ast.Name(runner_class.__name__, ast.Load())], [], list(methods), [])
    # Annotations stay unevaluated, as in the runner's own module.
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    tree = ast.fix_missing_locations(ast.Module([future, derived], []))
    namespace = dict(vars(module))
    exec(compile(tree, f"<{name}>", "exec"), namespace)
    return Build(namespace[name], removed, "\n\n".join(ast.unparse(method) for method in methods))


def fold(source: str, class_name: str) -> tuple[list[ast.FunctionDef], dict[str, int]]:
    """Returns the methods of a class in a module's source without the dispatch, and the statements each lost.

    Raises:
        FoldError: See `build`.
    """
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == class_name]
    found = {node.name: node for cls in classes for node in cls.body if isinstance(node, ast.FunctionDef)}
    if missing := [name for name in METHODS if name not in found]:
        raise FoldError(f"{class_name} has no {', '.join(missing)}")
    removed = {}
    for name in METHODS:
        method, before = found[name], _num_statements(found[name])
        folder = _Folder()
        folder.visit(method)
        removed[name] = before - _num_statements(method)
        if not removed[name]:
            raise FoldError(f"nothing was removed from {class_name}.{name}: what is there for callbacks has moved")
        if left := [ast.unparse(node) for node in ast.walk(method) if folder.serves_callbacks(node)]:
            raise FoldError(f"{class_name}.{name} keeps what is there for callbacks: {', '.join(left)}")
    return [found[name] for name in METHODS], removed


class _Folder(ast.NodeTransformer):
    """Folds one method for a runner to which nobody subscribed."""

    def __init__(self) -> None:
        """Starts without knowing any local name."""
        self._known_locals: dict[str, Any] = {}

    def serves_callbacks(self, node: ast.AST) -> bool:
        """Says whether a node is one of the names that are there for callbacks."""
        return (
            (isinstance(node, ast.Attribute) and node.attr in CALLBACK_ATTRIBUTES)
            or (isinstance(node, ast.Name) and node.id in self._known_locals)
            or (isinstance(node, ast.Constant) and node.value == TIMER)
        )

    def _mentions(self, node: ast.AST) -> bool:
        return any(self.serves_callbacks(part) for part in ast.walk(node))

    def _value(self, node: ast.expr) -> Any:
        """Returns what an expression is if nobody subscribed, or `_UNKNOWN`; what calls something else is unknown."""
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self._known_locals.get(name, _UNKNOWN)
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="_callbacks"), attr=question)):
                return False if question in QUESTIONS else _UNKNOWN
            case ast.Attribute(attr=name):
                return KNOWN_ATTRIBUTES.get(name, _UNKNOWN)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                value = self._value(operand)
                return _UNKNOWN if value is _UNKNOWN else not value
            case ast.BoolOp(op=operator, values=operands):
                return _decided([self._value(operand) for operand in operands], by=isinstance(operator, ast.Or))
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot() as operator], comparators=[right]):
                values = self._value(left), self._value(right)
                same = values[0] is values[1]
                return _UNKNOWN if _UNKNOWN in values else same is isinstance(operator, ast.Is)
        return _UNKNOWN

    def _is_known(self, node: ast.expr) -> bool:
        """Says whether an expression has a value because nobody subscribed, and not just because it is a constant."""
        return self._mentions(node) and self._value(node) is not _UNKNOWN

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        """Leaves out the operands that decide nothing."""
        self.generic_visit(node)
        node.values = [operand for operand in node.values if not self._is_known(operand)] or node.values[-1:]
        return node.values[0] if len(node.values) == 1 else node

    def visit_If(self, node: ast.If) -> ast.stmt | list[ast.stmt] | None:
        """Keeps the branch that is taken."""
        if self._is_known(node.test):
            taken = node.body if self._value(node.test) else node.orelse
            return _flat(self.visit(statement) for statement in taken)
        self.generic_visit(node)
        return node if node.body or node.orelse else None

    def visit_With(self, node: ast.With) -> ast.With | None:
        """Leaves out a block with nothing in it."""
        self.generic_visit(node)
        return node if node.body else None

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        """Leaves out what is called for callbacks."""
        return None if self._mentions(node) else node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign | None:
        """Leaves out what is kept for callbacks, in a tuple too, and knows the local names that held it."""
        self.generic_visit(node)
        (target, *others), value = node.targets, node.value
        if others:
            return node
        if not (isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)):
            return None if self._leaves_out(target, value) else node
        pairs = list(zip(target.elts, value.elts, strict=True))
        kept = [pair for pair in pairs if not self._leaves_out(*pair)]
        if not kept:
            return None
        if len(kept) == 1:
            node.targets, node.value = [kept[0][0]], kept[0][1]
        else:
            target.elts, value.elts = [pair[0] for pair in kept], [pair[1] for pair in kept]
        return node

    def _leaves_out(self, target: ast.expr, value: ast.expr) -> bool:
        if isinstance(target, ast.Name) and self._is_known(value):
            self._known_locals[target.id] = self._value(value)
            return True
        return isinstance(target, ast.Attribute) and target.attr in CALLBACK_ATTRIBUTES


def _decided(values: list[Any], *, by: bool) -> Any:
    """Returns what `and` (decided by False) or `or` (by True) makes of values, some of them unknown."""
    if any(value is not _UNKNOWN and bool(value) is by for value in values):
        return by
    return _UNKNOWN if _UNKNOWN in values else not by


def _flat(visited: Any) -> list[ast.stmt]:
    """Returns the statements that visits returned, each of them none, one or several."""
    return [statement for one in visited if one is not None for statement in (one if isinstance(one, list) else [one])]


def _num_statements(node: ast.AST) -> int:
    return sum(isinstance(part, ast.stmt) for part in ast.walk(node))
