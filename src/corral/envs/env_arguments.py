"""What the class or factory of an env is called with: the `EnvContext`, or the keys of `env_config` by name."""

from __future__ import annotations

import difflib
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter
from typing import Any

import gymnasium as gym

from corral.errors import ConfigError, nearest_name

log = logging.getLogger("corral")

CONTEXT_NAMES = frozenset(
    {"config", "cfg", "conf", "c", "env_config", "env_cfg", "context", "ctx", "env_context", "env_ctx"}
)
"""Names of a first parameter that receives the whole `EnvContext`."""

MIN_LIKENESS = 0.82
"""Share of equal letters from which a key counts as a misspelt required parameter: `lengths` for `length`."""

_BATCH = frozenset({"num_envs", "device"})
_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_OF_DICTS = re.compile("EnvContext|[Dd]ict|Mapping")
_OF_VALUES = re.compile(r"\b(int|float|bool|str|bytes|list|tuple|set|Path|ndarray|Literal|Callable|Sequence)\b")


def call_factory(
    factory: Callable[..., Any],
    context: dict[str, Any],
    name: str,
    *,
    of_batch: Callable[[], dict[str, Any]] = dict,
    warns: bool = True,
) -> Any:
    """Return what a class or factory makes of an `env_config`.

    The rule, which docs/environments.md has too. The first parameter that can be given by position receives the whole
    `EnvContext` in these cases, unless it is a number, text or list by its annotation or its default:

    1. Its name is in `CONTEXT_NAMES`.
    2. It is a dict by its annotation or its default, and `env_config` has no key of its name.
    3. It is the only required parameter for which `env_config` has no value, and no key of `env_config` looks like its
       name.
    4. The factory takes only `*args`.

    All other parameters receive the values that `env_config` has under their names. Where no parameter receives the
    context, each key must be a parameter. A vector env of tensors, which has the parameters `num_envs` and `device`,
    receives N and the device of the learners.

    Args:
        factory: The class or factory.
        context: The `env_config`, an `EnvContext`.
        name: Name of the env for messages.
        of_batch: Function that returns `num_envs` and `device` for a vector env of tensors.
        warns: Whether to warn of keys that look like mistakes and that `**kwargs` takes.

    Raises:
        ConfigError: `env_config` has a key that is no parameter, or lacks a required one.
    """
    if (parameters := _parameters_of(factory)) is None:
        return factory(**context)
    given = {**(of_batch() if _makes_batch(parameters, context) else {}), **context}
    first = _context_parameter(parameters, given)
    if first is None:
        _check_keys(parameters, given, name)
    if first is None and warns:
        _warn_of_likely_mistakes(parameters, given, name)
    args: list[Any] = [] if first is None else [context]
    for parameter in parameters.values():
        if parameter.kind is not Parameter.POSITIONAL_ONLY or parameter is first:
            continue
        if parameter.name not in given and parameter.default is Parameter.empty:
            break
        args.append(given.pop(parameter.name, parameter.default))
    if first is None:
        return factory(*args, **given)
    by_name = [key for key, p in parameters.items() if p.kind in _BY_NAME and p is not first and key in given]
    return factory(*args, **{key: given[key] for key in by_name})


def check_env_config(factory: Callable[..., Any], env_config: Mapping[str, Any], name: str) -> None:
    """Refuse an `env_config` with which `call_factory` would refuse to make an env; nothing is called."""
    if (parameters := _parameters_of(factory)) is None:
        return
    given = {**dict.fromkeys(_BATCH if _makes_batch(parameters, env_config) else ()), **env_config}
    if _context_parameter(parameters, given) is None:
        _check_keys(parameters, given, name)


def _context_parameter(parameters: Mapping[str, Parameter], given: Mapping[str, Any]) -> Parameter | None:
    """Return the parameter that receives the context, or `None` if all are given by name; see `call_factory`."""
    by_position = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    first = next((p for p in parameters.values() if p.kind in (*by_position, Parameter.VAR_POSITIONAL)), None)
    if first is None:
        return None
    if first.kind is Parameter.VAR_POSITIONAL:
        return first if len(parameters) == 1 else None
    annotation = "" if first.annotation is Parameter.empty else str(first.annotation)
    is_dict = isinstance(first.default, dict) or bool(_OF_DICTS.search(annotation))
    if not is_dict and (isinstance(first.default, (int, float, str, list, tuple)) or _OF_VALUES.search(annotation)):
        return None
    if first.name in CONTEXT_NAMES:
        return first
    alike = difflib.get_close_matches(first.name, [str(key) for key in given], 1, MIN_LIKENESS)
    is_only_one = _lacking(parameters, given) == [first.name] and not alike
    return first if first.name not in given and (is_dict or is_only_one) else None


def _lacking(parameters: Mapping[str, Parameter], given: Mapping[str, Any]) -> list[str]:
    """Return the names of required parameters without a value."""
    kinds = (*_BY_NAME, Parameter.POSITIONAL_ONLY)
    return [
        key for key, p in parameters.items() if p.kind in kinds and p.default is Parameter.empty and key not in given
    ]


def _makes_batch(parameters: Mapping[str, Parameter], given: Mapping[str, Any]) -> bool:
    """Return whether a factory makes a vector env of tensors, which receives N and a device."""
    takes_both = parameters.keys() >= _BATCH and next(iter(parameters)) not in CONTEXT_NAMES
    return takes_both and _BATCH.issuperset(_lacking(parameters, given))


def _check_keys(parameters: Mapping[str, Parameter], given: Mapping[str, Any], name: str) -> None:
    """Refuse keys that are no parameter, and required parameters without a key."""
    names = [key for key, p in parameters.items() if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
    takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
    for key in given:
        if key not in names and not takes_any:
            hint = " To receive the whole env_config, call its first parameter 'config'." if names else ""
            raise ConfigError(_unknown(key, name, names, hint=hint))
    if lacking := _lacking(parameters, given):
        listed = " and ".join(map(repr, lacking))
        raise ConfigError(f"env {name!r} needs {listed}, which env_config {dict(given)!r:.200} lacks.")


def _warn_of_likely_mistakes(parameters: Mapping[str, Parameter], given: Mapping[str, Any], name: str) -> None:
    """Warn of keys that `**kwargs` takes and that look like a parameter without a value."""
    without = [key for key, p in parameters.items() if p.kind in _BY_NAME and key not in given]
    for key in given.keys() - parameters.keys():
        if near := nearest_name(key, without):
            log.warning(
                "env %r receives env_config[%r] in its **kwargs. Did you mean its parameter %r?", name, key, near
            )


def _unknown(key: str, name: str, names: list[str], *, said: str = "", hint: str = "") -> str:
    """Return the message for a key of `env_config` that the env does not take."""
    near = nearest_name(key, names)
    remedy = f" Did you mean {near!r}?" if near else hint
    takes = said or f"its parameters are {', '.join(names)}" if names or said else "it has no parameters"
    return f"env_config[{key!r}] does not apply to env {name!r}: {takes}.{remedy}"


@contextmanager
def naming_keys(env: str | Callable[..., Any], name: str, context: Mapping[str, Any]) -> Iterator[None]:
    """Turn Python's error for a keyword argument that no class of an env takes into a `ConfigError` for `env_config`.

    Args:
        env: What makes the env: of an id, the parameters are listed.
        name: Name of the env for messages.
        context: The `env_config`.
    """
    try:
        yield
    except TypeError as error:
        found = re.search(r"([\w.]*)\(\) got an unexpected keyword argument '(\w+)'", str(error))
        if found is None or found[2] not in context:
            raise
        names = _parameters_of_id(env) if isinstance(env, str) else []
        if found[2] in (names or _parameters_of(env) or ()):  # which the env gives something inside it that refuses it
            raise
        said = "" if names else f"{found[1]}() has no such parameter"
        # With the names of its parameters the message says everything, and a command prints no traceback.
        raise ConfigError(_unknown(found[2], name, names, said=said)) from (None if names else error)


def _parameters_of(factory: Any) -> Mapping[str, Parameter] | None:
    """Return the parameters of a class or factory by name; `None` of an id, or of a class in C without a signature."""
    try:
        return inspect.signature(factory).parameters
    except (ValueError, TypeError):
        return None


def _parameters_of_id(env_id: str) -> list[str]:
    """Return the names of the parameters that an id takes: of its class, its base classes, and of `gymnasium.make`."""
    spec = gym.spec(env_id.rpartition(":")[2])
    made: Any = spec.entry_point or spec.vector_entry_point
    made = gym.envs.registration.load_env_creator(made) if isinstance(made, str) else made
    names: dict[str, None] = {}
    for part in made.__mro__ if inspect.isclass(made) else [made]:
        signature = inspect.signature(part.__init__ if inspect.isclass(part) else part).parameters
        names |= dict.fromkeys(key for key, p in signature.items() if p.kind in _BY_NAME and key != "self")
        if not any(p.kind is Parameter.VAR_KEYWORD for p in signature.values()):
            break
    return [*names, *(key for key in ("max_episode_steps",) if key not in names)]
