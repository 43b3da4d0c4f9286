"""The one parser of settings: the names, types and bounds of dataclass fields.

A setting is a field of a dataclass. Its annotation holds its type and its bounds, as in
`num_epochs: PositiveInt = 1` or `tau: Annotated[float, Field(gt=0, le=1)] = 1.0`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import operator
import sys
import traceback
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticKnownError

from corral.core.familiar_names import meaning_of_key
from corral.core.import_places import hidden_modules
from corral.core.schedules import Schedule, schedule_problem
from corral.errors import ConfigError, MissingPackageError, nearest, nearest_name

T = TypeVar("T")

LARGEST_SEED = 2**63 - 1
"""Largest seed that the generators of torch and of most envs take."""


def import_path(path: str) -> Any:
    """Return what an import path names.

    Args:
        path: `"package.module:Name"`, or `"package.module.Name"`.

    Raises:
        ConfigError: The module cannot be imported, or does not have the name.
    """
    module_name, separator, qualname = path.strip().partition(":")
    if not separator:
        module_name, _, qualname = path.strip().rpartition(".")
    if not module_name or not qualname or module_name.startswith("."):
        raise ConfigError(f"{path!r} is not an import path such as 'package.module:Name'")
    found: Any = module_named(module_name, path)
    for name in qualname.split("."):
        if not hasattr(found, name):
            raise ConfigError(f"{path!r} cannot be imported: {_missing_name(module_name, found, name)}")
        found = getattr(found, name)
    return found


def module_named(name: str, path: str) -> Any:
    """Return the module that an import path names.

    Args:
        name: The part of the import path before the colon; `"train.py"` is the script that this process runs, or
            another script, of which only definitions run.
        path: The whole import path, for the message.

    Raises:
        ConfigError: The module cannot be imported, or is a script that is not found.
    """
    if name == main_name():
        return sys.modules["__main__"]
    if name.endswith(".py"):
        from corral.core.scripts import find_script

        if (script := find_script(name)) is not None:
            return script
        raise ConfigError(
            f"{path!r} cannot be imported: it is in the script {name}, and this process runs {main_name()}, next to "
            f"which there is no {name}, nor in the working directory. {_MOVE}"
        )
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if not (isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}.")):
            raise ConfigError(
                f"{path!r} cannot be imported: the module {name!r} raised: {error}.{hidden_modules()}".removesuffix(".")
            ) from error
        close = nearest_name(name, [file.stem for file in Path.cwd().glob("*.py")])
        hint = "" if close is None else f"; the nearest one in the working directory is {close!r}"
        raise ConfigError(
            f"{path!r} cannot be imported: {error}{hint}. The module must be in the working directory, on PYTHONPATH, "
            f"or installed.{hidden_modules()}".removesuffix(".")
        ) from error
    except MissingPackageError:
        raise
    except (Exception, SystemExit) as error:  # a script may end the process where it is imported
        raise ConfigError(
            f"{path!r} cannot be imported: the module {name!r} raised {type(error).__name__}: {error}{_line_of(error)}"
            f".{hidden_modules()}".removesuffix(".")
        ) from error


def _line_of(error: BaseException) -> str:
    """Return the line of the user's module that raised while it was imported, as the end of a message."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename not in (__file__, importlib.__file__)]
    line = next((frame for frame in own if not frame.filename.startswith("<frozen")), None)
    return "" if line is None else f" ({line.filename}, line {line.lineno})"


def path_of(value: Any) -> str:
    """Return the import path of a class or function, `"package.module:Name"`.

    The name `__main__` means something else in each process. What is in the script `train.py` has the path
    `"train.py:Name"`, which another script finds next to itself. Without a script, as in a notebook, the path is
    `"__main__:Name"`.
    """
    module_name = (_sender or main_name()) if value.__module__ == "__main__" else value.__module__
    return f"{module_name}:{value.__qualname__}"


def found_by_name(value: Any) -> bool:
    """Return whether the import path of a class or function leads back to it, in its own script at least."""
    if path_of(value).startswith("__main__:"):
        return False  # in a notebook, for example, where no other process ever finds it
    if _sender and value.__module__ == "__main__":
        return "<" not in value.__qualname__  # the script is not here: what no function defined is at its top level
    found: Any = sys.modules.get(value.__module__)
    if found is None and value.__module__.endswith(".py"):
        from corral.core.scripts import found_script

        found = found_script(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


_sender: str | None = None


def set_sender(name: str) -> None:
    """Say in which script everything was defined that this process got by pickle and that names `__main__`.

    Args:
        name: What `main_name` returned in the process that sent it.
    """
    global _sender
    _sender = None if name == main_name() else name


def names_script(path: Any) -> bool:
    """Return whether a value is the import path of something in a script, or in the module that this process runs."""
    module_name, colon, _ = path.partition(":") if isinstance(path, str) else ("", "", "")
    return bool(colon) and (module_name.endswith(".py") or module_name == main_name())


def main_name() -> str:
    """Return the name of the module that Python was started with: a module after `-m`, or a file.

    A program without `.py`, such as the console script `corral`, has this name only if no module has it.
    """
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return str(spec.name)
    name = Path(file).name if file else "__main__"
    return "__main__" if name.isidentifier() and (name in sys.modules or find_spec(name)) else name


_MOVE = (
    "Move the class or function into a module of its own, such as my_module.py, and name it 'my_module:Name'; or build "
    "the algorithm from your own config, and call its restore_from_path()"
)


def _missing_name(module_name: str, owner: Any, name: str) -> str:
    if module_name == "__main__":
        return f"'__main__' means the script that Python was started with, and here that is another script. {_MOVE}"
    if name == "<locals>":
        return "it was defined inside a function. Define it at the top level of a module"
    close = nearest(name, [known for known in dir(owner) if not known.startswith("_")])
    return f"{module_name!r} has no {name!r}. {close}{hidden_modules()}".removesuffix(".")


def imported(value: Any) -> Any:
    """Return what a string names as an import path, and anything else as it is."""
    return import_path(value) if isinstance(value, str) else value


@dataclasses.dataclass(frozen=True)
class Need:
    """What a setting needs to have an effect, in its annotation: `sigma0: Annotated[float, Need("noisy=True", ...)]`.

    Attributes:
        text: The need, as it follows "has no effect without".
        is_met: Function that is given all settings, and returns whether they meet the need. A lambda in an annotation
            sees no names of its module: where it needs some, the `Need` is a constant of the module.
        is_refused: Whether a setting of `training` or `rl_module` without its need is refused; otherwise a warning
            names it, because what it needs may be off for a while.
    """

    text: str
    is_met: Callable[[Any], object]
    is_refused: bool = True


def never(config: object) -> bool:
    """Return False, for the settings of a base that a class has no use for."""
    return False


@functools.cache
def needs_of(owner: type) -> dict[str, list[Need]]:
    """Return the needs of the settings of a class by name; the need of a subclass replaces the one of its base."""
    found: dict[str, list[Need]] = {}
    for own, bounded, _ in _annotations(owner):
        needs = {name: [mark for mark in _marks(bounded[name]) if isinstance(mark, Need)] for name in own}
        found |= {name: given for name, given in needs.items() if given}
    return found


def find_unused(settings: Any) -> dict[str, Need]:
    """Return the settings that differ from their defaults and have no effect, by name, with what they need first."""
    owner: type = type(settings)
    defaults = {field.name: field for field in dataclasses.fields(owner)}
    return {
        name: unmet[0]
        for name, needs in needs_of(owner).items()
        if not same_value(getattr(settings, name), default_of(defaults[name]))
        and (unmet := [need for need in needs if not need.is_met(settings)])
    }


@dataclasses.dataclass(frozen=True)
class ScheduleBounds:
    """A validator for schedules.

    Attributes:
        minimum: The smallest value allowed.
        maximum: The largest value allowed.
    """

    minimum: float = 0.0
    maximum: float = float("inf")

    def __call__(self, schedule: Schedule) -> Schedule:
        """Return the schedule.

        Raises:
            ValueError: A step or a value is not allowed.
        """
        if problem := schedule_problem(schedule, minimum=self.minimum, maximum=self.maximum):
            raise ValueError(problem)
        return schedule

    def __str__(self) -> str:
        """Return the bounds of the values as text."""
        if self.maximum == float("inf"):
            return f"at least {self.minimum:g}"
        return f"in [{self.minimum:g}, {self.maximum:g}]"


@dataclasses.dataclass(frozen=True)
class OneOf:
    """A validator for names that a table holds.

    Attributes:
        names: The names allowed.
    """

    names: tuple[str, ...]

    def __call__(self, name: str) -> str:
        """Return the name.

        Raises:
            ValueError: The name is not allowed.
        """
        if name not in self.names:
            raise ValueError(f"unknown name {name!r}. {nearest(name, self.names)}")
        return name

    def __str__(self) -> str:
        """Return the names as text."""
        return "one of " + ", ".join(self.names)


# Types of settings with the bounds that are used most.
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
AtLeastOne = Annotated[float, Field(ge=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
NonNegativeSchedule = Annotated[Schedule, AfterValidator(ScheduleBounds())]
Importable = Annotated[Any, BeforeValidator(imported)]
"""Anything; a string is an import path."""


def same_value(one: Any, other: Any) -> bool:
    """Return whether two values of a setting are equal; arrays are if all of their entries are."""
    return one is other or bool(np.all(one == other))


def check_names(place: str, given: Iterable[str], known: Collection[str], *, list_known: bool = False) -> None:
    """Refuse a name that is not known.

    Args:
        place: Where the names were given, for the message.
        given: The names that the user gave.
        known: The names allowed.
        list_known: Whether the message lists the names allowed even where one of them is near.

    Raises:
        ConfigError: A name is unknown. The nearest known name is in the message, or all of them.
    """
    for name in given:
        if name not in known:
            hint = meaning_of_key(name, known)
            if hint is None and (close := nearest_name(name, known)) is not None:
                hint = f"Did you mean {close!r}?"
            hint = "" if hint is None else f" {hint}"
            if not hint or list_known:
                hint += f" It takes {', '.join(known)}." if known else " It takes no settings."
            raise ConfigError(f"{place}: unknown setting {name!r}.{hint}")


def parse_settings(owner: type[T], settings: Mapping[str, Any], place: str) -> T:
    """Return an instance of a dataclass with settings, after checking their names and values.

    Args:
        owner: The dataclass.
        settings: Values by name of the field.
        place: Where the settings were given, for the messages.

    Raises:
        ConfigError: A name is unknown, or a value has the wrong type or is out of bounds.
    """
    cls: type = owner
    check_names(place, settings, setting_types(cls), list_known=True)
    return owner(**{name: check_setting(cls, name, value, f"{place}: ") for name, value in settings.items()})


def check_values(settings: Any, place: str = "") -> None:
    """Check all values of an instance of a dataclass, defaults included.

    Raises:
        ConfigError: A value has the wrong type or is out of bounds.
    """
    for field in dataclasses.fields(settings):
        check_setting(type(settings), field.name, getattr(settings, field.name), f"{place}: " if place else "")


def check_called(name: str, function: Any, *arguments: str, group: str = "multi_agent") -> None:
    """Refuse what is no function of these arguments; `policy_mapping_fn` may take `worker` too."""
    if function is None:
        return
    form = f"{name}({', '.join(arguments)})"
    if not callable(function):
        raise ConfigError(f"{group}: {name} must be a function {form}, got {function!r:.80}.")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # some functions of C have no signature
    worker = {"worker": None} if name == "policy_mapping_fn" and "worker" in signature.parameters else {}
    try:
        signature.bind(*arguments, **worker)
    except TypeError as error:
        raise ConfigError(f"{group}: {name} is called as {form}, and {function!r:.80} cannot be: {error}.") from None


def check_setting(owner: type, name: str, value: Any, prefix: str = "") -> Any:
    """Return a value converted to the type of a setting, such as `"3e-3"` from a shell to a float.

    Args:
        owner: The dataclass.
        name: The name of its field.
        value: The value to check.
        prefix: Text in front of the message of an error.

    Raises:
        ConfigError: The value has the wrong type or is out of bounds; the message names setting, value and bound.
    """
    adapter = _adapter(owner, name)
    if adapter is None:
        return value
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        problem = _problem(setting_types(owner)[name], value, error)
        raise ConfigError(f"{prefix}{name}={value!r:.200}{problem}.") from None


@functools.cache
def _adapter(owner: type, name: str) -> TypeAdapter[Any] | None:
    hint = setting_types(owner)[name]
    return None if hint is Any else _make_adapter(hint)


def _make_adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(_without_bools(hint), config=ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True))


def _without_bools(hint: Any) -> Any:
    """Return the type with the numbers in it refusing bools, which pydantic takes for 1 and 0."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    base, *marks = arguments if origin is Annotated else (hint,)
    if base is int or base is float:  # the last mark is asked first
        return Annotated[(base, *marks, BeforeValidator(_refuse_bool_for_int if base is int else _refuse_bool))]
    if origin is Annotated:
        return Annotated[(_without_bools(base), *marks)]
    if is_union(hint):
        return functools.reduce(operator.or_, map(_without_bools, arguments))
    if origin in (list, tuple, dict):
        return origin[tuple(map(_without_bools, arguments))]
    return hint


def _refuse_bool(value: Any, kind: Literal["int_type", "float_type"] = "float_type") -> Any:
    if isinstance(value, (bool, np.bool_)):
        raise PydanticKnownError(kind)
    return value


_refuse_bool_for_int = functools.partial(_refuse_bool, kind="int_type")


@functools.cache
def setting_types(owner: type) -> dict[str, Any]:
    """Return the type of each field of a dataclass, with its bounds.

    A class that annotates a field again to give it another default keeps the bounds of the next class in the order of
    its bases, unless it gives bounds itself or allows another type: after `num_epochs: PositiveInt = 1`,
    `num_epochs: int = 4` must be positive.
    """
    hints = _annotations(owner)
    return {field.name: _bounded_type(field.name, hints) for field in dataclasses.fields(owner)}


@functools.cache
def _annotations(owner: type) -> list[tuple[Mapping[str, Any], ...]]:
    """Return the annotations of a dataclass and its bases, the first base first: own, all, and all without marks."""
    return [
        (vars(cls)["__annotations__"], typing.get_type_hints(cls, include_extras=True), typing.get_type_hints(cls))
        for cls in reversed(owner.__mro__)
        if "__annotations__" in vars(cls)
    ]


def _marks(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()


def _bounded_type(name: str, hints: Iterable[tuple[Mapping[str, Any], ...]]) -> Any:
    """Return the type of a setting from the annotations of all classes that have it, the first one first."""
    found = found_type = None
    for own, bounded, plain in hints:
        if name not in own:
            continue
        hint = bounded[name]
        if any(isinstance(mark, Need) for mark in _marks(hint)):
            marks = [mark for mark in _marks(hint) if not isinstance(mark, Need)]
            hint = Annotated[(typing.get_args(hint)[0], *marks)] if marks else typing.get_args(hint)[0]
        if found is not None and hint == plain[name]:  # without bounds
            if hint == found_type:
                hint = found
            elif _members(hint) <= _members(found_type):
                hint = Annotated[hint, AfterValidator(BoundsOfBase(found))]
        found, found_type = hint, plain[name]
    return found


def _members(hint: Any) -> set[Any]:
    return set(typing.get_args(hint)) if is_union(hint) else {hint}


@dataclasses.dataclass(frozen=True)
class BoundsOfBase:
    """A validator for a setting that a subclass allows fewer types.

    Attributes:
        hint: The type with the bounds.
    """

    hint: Any

    @functools.cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return _make_adapter(self.hint)

    def __call__(self, value: Any) -> Any:
        """Return the value.

        Raises:
            ValueError: The value is out of bounds.
        """
        try:
            return self._adapter.validate_python(value)
        except ValidationError as error:
            raise ValueError(_problem(self.hint, value, error).lstrip(": ")) from None

    def __str__(self) -> str:
        """Return the bounds as text."""
        return ", ".join(bounds_of(self.hint))


def is_union(hint: Any) -> bool:
    """Return whether a type is a union, written as `A | B` or `Optional[A]`."""
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def flat_settings(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a config with their dotted paths; an empty dict is a value."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field of a dataclass."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def bounds_of(hint: Any) -> list[str]:
    """Return the bounds that a type holds as texts that follow "must be", such as `"at least 1"`."""
    if typing.get_origin(hint) is Annotated:
        base, *marks = typing.get_args(hint)
        return [*filter(None, [_interval(marks)]), *_validators(marks), *bounds_of(base)]
    if typing.get_origin(hint) is Literal:
        return []
    parts = [bound for part in typing.get_args(hint) for bound in bounds_of(part)]
    return parts if is_union(hint) else [f"each {bound}" for bound in dict.fromkeys(parts)]


def _validators(marks: Iterable[Any]) -> Iterator[str]:
    for mark in marks:
        if isinstance(mark, AfterValidator) and isinstance(mark.func, (ScheduleBounds, OneOf, BoundsOfBase)):
            yield str(mark.func)


def _interval(marks: Iterable[Any]) -> str:
    """Return the limits of a number as text; `""` where it has none."""
    limits: dict[str, Any] = {}
    for mark in marks:
        for limit in mark.metadata if isinstance(mark, FieldInfo) else [mark]:
            limits |= {name: getattr(limit, name) for name in ("ge", "gt", "le", "lt") if hasattr(limit, name)}
    if not limits:
        return ""
    if len(limits) == 2:
        lower, upper = limits.get("ge", limits.get("gt")), limits.get("le", limits.get("lt"))
        return f"in {'[' if 'ge' in limits else '('}{lower:g}, {upper:g}{']' if 'le' in limits else ')'}"
    if limits == {"gt": 0}:
        return "positive"
    words = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    [(name, limit)] = limits.items()
    return f"{words[name]} {limit:g}"


# What pydantic calls a wrong type -> what the value should have been.
_WANTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "finite_number": "finite",
    "string_type": "a string",
    "dict_type": "a dict",
    "list_type": "a list",
    "tuple_type": "a list",
    "path_type": "a path",
}
_OUT_OF_BOUNDS = ("greater_than_equal", "greater_than", "less_than_equal", "less_than")


def _problem(hint: Any, value: Any, error: ValidationError) -> str:
    """Return what follows `name=value` in the message: what the value should have been."""
    wanted, inside = [], []
    for line in error.errors(include_url=False):
        kind, culprit = line["type"], line["input"]
        if kind == "value_error":
            inside.append(str(line["ctx"]["error"]))
            continue
        if kind in _OUT_OF_BOUNDS:
            text = " or ".join(dict.fromkeys(bound.removeprefix("each ") for bound in bounds_of(hint)))
        else:
            text = line["ctx"]["expected"] if kind == "literal_error" else _WANTED.get(kind, "")
        if not text:
            inside.append(f"{culprit!r:.80}: {line['msg']}")
        elif culprit is value:
            wanted.append(text)
        else:
            inside.append(f"{culprit!r:.80} must be {text}")
    if inside:  # The type was the right one, and a part of the value is wrong.
        return ": " + "; ".join(dict.fromkeys(inside)).removesuffix(".")
    if is_union(hint) and type(None) in typing.get_args(hint):
        wanted.append("None")
    if wanted[:2] == ["a number", "a list"]:  # a schedule
        wanted[1] = "a schedule over env steps, such as [[0, 1e-3], [1_000_000, 0.0]], which is linear in between"
    *others, last = dict.fromkeys(wanted)
    return f" must be {', '.join(others)}{' or ' if others else ''}{last}"
