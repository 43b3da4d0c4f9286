"""Functions that make a Gymnasium vector env from the settings of `.environment(...)`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode, VectorEnv

from corral.core.import_places import hidden_modules
from corral.core.tree import copy_containers
from corral.envs.adapted_vector import ENVPOOL, EnvPoolVectorEnv, check_pool_id, make_pool
from corral.envs.async_vector import NO_LIMITS, AsyncLimits, make_async
from corral.envs.atari_env import (
    PREPROCESSING,
    PreprocessedAtariEnv,
    asks_for_preprocessing,
    is_atari,
    make_atari_vector,
)
from corral.envs.checks import check_env, check_spaces, named
from corral.envs.env_arguments import call_factory, naming_keys
from corral.envs.env_ids import id_hint, import_module, import_package, is_of_missing_package, newest_version
from corral.envs.episode_resets import EpisodeResets
from corral.envs.foreign_vector import adapt_vector_env
from corral.envs.masked_resets import MaskedResets
from corral.envs.multi_agent_env import MultiAgentEnv
from corral.envs.pettingzoo_env import from_pettingzoo
from corral.envs.seated_env import SeatedEnv
from corral.envs.seats import SeatsSpace
from corral.envs.sharing import describe_making, note_owner, refuse_owned, refuse_same_object
from corral.envs.step_timeout import limited
from corral.envs.sub_envs import AbsentSubEnvs, Restarts, close_quietly
from corral.envs.sync_vector import SyncVectorEnv
from corral.errors import ConfigError, CorralError, EnvError, EnvTimeoutError, MissingPackageError, nearest

log = logging.getLogger("corral")


class EnvContext(dict[str, Any]):
    """The `env_config` that a factory of an env receives: a dict, with the indices of the runner and the sub-env.

    Attributes:
        worker_index: Index of the runner: 0 for the embedded runner, 1 and up for the others.
        num_workers: Number of runners in addition to the embedded one.
        vector_index: Index of the sub-env in its vector env.
        remote: Whether each sub-env has a process of its own, as with `vectorization="async"`.
        num_envs: Number of sub-envs N of the runner, for factories that return a vector env.
        device: Setting `device` of the learners where they are in the same process, for vector envs of tensors.
    """

    def __init__(
        self,
        env_config: dict[str, Any],
        worker_index: int = 0,
        num_workers: int = 0,
        vector_index: int = 0,
        remote: bool = False,
        num_envs: int = 1,
        device: str = "cpu",
    ) -> None:
        """Copy the config and keep the indices."""
        super().__init__(env_config)
        self.worker_index = worker_index
        self.num_workers = num_workers
        self.vector_index = vector_index
        self.remote = remote
        self.num_envs, self.device = num_envs, device

    def at(self, vector_index: int) -> EnvContext:
        """Return the context of another sub-env of the same runner."""
        place = self.worker_index, self.num_workers, vector_index, self.remote
        return EnvContext(self, *place, self.num_envs, self.device)


def env_name(env: Any) -> str:
    """Return the name of the setting `env` for messages and run directories; without an env there is recorded data."""
    if env is None:
        return "recorded data"
    return env if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)


def resolve_env(env: Any) -> str | Callable[..., Any]:
    """Return the id if `env` is a registered id, else the class or factory.

    Args:
        env: A Gymnasium id, an id of EnvPool such as `"envpool:Pong-v5"`, a `"package.module:Name"` import path, a
            class, or a factory `fn(env_config)`.

    Raises:
        ConfigError: The id is unknown, or the import fails; the message names the nearest known id.
        MissingPackageError: The env is in a package that is not installed.
    """
    factory: Callable[..., Any]
    if callable(env):
        factory = env
        return factory
    if not isinstance(env, str):
        remedy = ""
        if isinstance(env, (gym.Env, VectorEnv)):
            remedy = f" Each sub-env needs its own: write .environment(lambda env_config: {describe_making(env)})."
        raise ConfigError(
            f"environment: env must be an id, a class or a factory, got {type(env).__name__} {env!r}.{remedy}"
        )
    module_name, _, attribute = env.partition(":")
    if attribute:
        if not module_name or module_name.startswith("."):
            raise ConfigError(f"environment: env {env!r} is not an import path such as 'package.module:Name'.")
        module = import_module(module_name, env)  # may register ids: "my_package:MyEnv-v0"
        if env.startswith(ENVPOOL):
            check_pool_id(env, module)
            return env
        if callable(getattr(module, attribute, None)):
            factory = getattr(module, attribute)
            return factory
    env_id = attribute or env
    import_package(env_id)
    try:
        gym.spec(env_id)
    except gym.error.Error as error:
        if attribute:
            close = _nearest_env(module, attribute)
            raise ConfigError(f"environment: module {module_name!r} has no env {attribute!r}. {close}") from error
        kind = MissingPackageError if is_of_missing_package(env_id) else ConfigError
        raise kind(f"environment: unknown env id {env_id!r}. {id_hint(env_id)}") from error
    return str(env)


def _nearest_env(module: Any, attribute: str) -> str:
    """Return what a module has in place of an env that it does not have, as the end of a message."""
    path = f"{module.__name__}.{attribute}"
    if hasattr(module, "__path__") and attribute.isidentifier() and find_spec(path):  # as in PettingZoo
        return f"{path} is a module: name what makes the env in it, such as '{path}:parallel_env'."
    own = vars(module)  # without the names that a package imports when they are first used, which may be envs
    names = [name for name in dir(module) if callable(own.get(name, callable)) and not name.startswith("_")]
    return nearest(attribute, names) + hidden_modules()


@contextmanager
def _needs_said(env_id: str) -> Iterator[None]:
    """Turn the error for a missing package into one line: what to install, or which version replaces the env."""
    try:
        yield
    except (gym.error.DependencyNotInstalled, ImportError) as error:
        said = str(error).rstrip(".").replace("gymnasium[mujoco]", "corral[mujoco]")
        newest = newest_version(env_id.rpartition(":")[2])
        remedy = f" Did you mean {newest!r}?" if newest not in (None, env_id) else ""
        if isinstance(error, ModuleNotFoundError):
            remedy = f" Run `pip install {error.name}`.{remedy}"
        is_missing = isinstance(error, (gym.error.DependencyNotInstalled, ModuleNotFoundError))
        kind = MissingPackageError if is_missing else EnvError
        raise kind(f"env {env_id!r} cannot be made here: {said}.{remedy}") from error


def make_vector_env(env: Any, context: EnvContext, **settings: Any) -> VectorEnv[Any, Any, Any]:
    """Return the vector env of one runner; see `VectorEnvMaker`, whose other attributes are the settings."""
    return VectorEnvMaker(env=env, context=context, **settings).make()


@dataclass(kw_only=True)
class VectorEnvMaker:
    """Makes the vector env of one runner.

    Attributes:
        env: Setting `env`; see `resolve_env`. A factory may return a ready `VectorEnv`, which is used unchanged, or a
            vector env of another library; see `adapt_vector_env`.
        context: Config and indices; its `vector_index` is ignored.
        num_envs: Number of sub-envs N, or `None` if the user did not set it.
        default_num_envs: Number of sub-envs if `num_envs` is `None`; a ready `VectorEnv` has its own number.
        vectorization: `"sync"`, `"async"` (one process per sub-env), or `"auto"`: the native vector env of the id if
            there is one with this autoreset mode, N > 1, `wrappers` and `outermost` are empty and `needs_sub_envs` is
            False; else `"sync"`.
        autoreset_mode: `"next_step"` or `"same_step"`.
        wrappers: Wrappers of each sub-env; the first one is the innermost.
        outermost: Wrapper of each sub-env around `wrappers`, which receives the context of the sub-env too.
        check: Whether to check spaces, reset and first step.
        seed: Seed of the global generators in the processes of async sub-envs.
        needs_sub_envs: Whether callbacks need the sub-envs, which a native vector env does not have.
        limits: Time limits of async sub-envs; the limit per step also applies to the check.
        restarts: Restarts of failed sub-envs; with `None`, a failure is raised.
    """

    env: Any
    context: EnvContext
    num_envs: int | None
    default_num_envs: int = 1
    vectorization: str = "auto"
    autoreset_mode: str = "next_step"
    wrappers: Sequence[Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]] = ()
    outermost: Callable[[gym.Env[Any, Any], EnvContext], gym.Env[Any, Any]] | None = None
    check: bool = True
    seed: int = 0
    needs_sub_envs: bool = False
    limits: AsyncLimits = NO_LIMITS
    restarts: Restarts | None = None

    def __post_init__(self) -> None:
        """Resolve the env.

        Raises:
            ConfigError: The id is unknown.
            MissingPackageError: The env is in a package that is not installed.
        """
        self._resolved, self._name = resolve_env(self.env), env_name(self.env)
        self._n = self.context.num_envs = self.num_envs or self.default_num_envs
        self._mode = AutoresetMode[self.autoreset_mode.upper()]
        self._make_one = self._maker()

    def make(self) -> VectorEnv[Any, Any, Any]:
        """Return the vector env.

        Raises:
            ConfigError: Settings contradict a ready vector env.
            MissingPackageError: A package that the env needs is not installed.
            EnvError: The env raised an exception, or returned a value outside its spaces.
        """
        if getattr(self._resolved, "IS_EXTERNAL", False):
            return self._make_external()
        plain = self.vectorization == "auto" and self._n > 1 and not (self.wrappers or self.outermost)
        with ExitStack() as opened:  # closes the envs if anything raises
            if isinstance(self._resolved, str) and plain and not self.needs_sub_envs:
                native = _make_native(self._resolved, self._name, self._n, self._mode, self.context)
                if native is not None:
                    opened.callback(native.close)  # it has no wrappers that count the reset and the step of the check
                    self._check_vector_env(native)
                    opened.pop_all()
                    return native
            first = self._make_one(0, self.check or self.vectorization == "async")
            refuse_owned(first, self._name)  # before anything closes it
            opened.callback(lambda: first.close())
            if isinstance(first, VectorEnv):
                self._refuse_contradictions(first)
                first = self._resetting(first)
                self._check_vector_env(first)
                # EnvPool makes its sub-envs again with its seed.
                if self.check and not isinstance(first, EnvPoolVectorEnv):
                    first = self._resetting(self._make_first_again(first))
                if self.needs_sub_envs and not hasattr(first.unwrapped, "envs"):
                    log.warning(
                        "env %r has no sub-envs in this process: on_sub_environment_created does not fire, and "
                        "sub_environment is None in events of episodes.",
                        self._name,
                    )
                vector_env: VectorEnv[Any, Any, Any] = first
            else:
                has_agents = isinstance(getattr(first, "observation_space", None), SeatsSpace)
                if has_agents and self._mode == AutoresetMode.SAME_STEP:  # the last rewards would be overwritten
                    raise ConfigError(
                        f"autoreset_mode='same_step' contradicts env {self._name!r}, which has several agents: leave "
                        "autoreset_mode out."
                    )
                if self.check:
                    self._check_once(first)
                    first = first if self.vectorization == "async" else self._make_first_again(first)
                with _errors_of(self._name, "its sub-envs were put into one vector env"):
                    if self.vectorization == "async":
                        # `first` is closed on return: only its spaces were needed.
                        asked = self._n, self._mode, first, self.seed, self.limits, self.restarts
                        return make_async(self._make_one, *asked)
                    envs = [first, *self._make_others(opened)]
                    refuse_same_object(envs, self._name)
                    makers = [lambda made=made: made for made in envs]
                    vector_env = SyncVectorEnv(
                        makers, autoreset_mode=self._mode, make=self._make_one, restarts=self.restarts
                    )
            opened.pop_all()
            note_owner(vector_env)
            return vector_env

    def _maker(self) -> Callable[..., Any]:
        """Return the function that makes sub-env i, or all sub-envs of an id of EnvPool; processes receive it."""
        resolved, name, n, context = self._resolved, self._name, self._n, self.context
        wrappers, outermost = self.wrappers, self.outermost
        warns = iter([True])  # once, though the first sub-env is made again after its check

        def make(vector_index: int, is_spare: bool = False) -> Any:
            given = context.at(vector_index)
            if is_spare:  # it is only looked at, and what it changes inside of its env_config must not stay
                given.update(copy_containers(dict(given)))
            if isinstance(resolved, str) and resolved.startswith(ENVPOOL):
                with _errors_of(name, f"EnvPool made it with env_config {dict(context)}"):
                    return make_pool(name, n, context)
            return make_one(resolved, name, given, wrappers, outermost, warns=next(warns, False))

        return make

    def _make_others(self, opened: ExitStack) -> Iterator[Any]:
        """Make the sub-envs after the first one, which are closed if anything raises."""
        for index in range(1, self._n):
            env = self._make_one(index)
            opened.callback(env.close)
            yield env

    def _make_first_again(self, checked: Any) -> Any:
        """Return a new env in place of one that the check has reset and stepped, which wrappers count."""
        close_quietly(checked)
        return self._make_one(0)

    def _make_external(self) -> VectorEnv[Any, Any, Any]:
        """Return an `ExternalEnv`, whose clients decide what others decide by settings.

        Raises:
            ConfigError: A setting is given that its clients decide, or one of `env_config` is wrong.
        """
        resets = "env_reset_fn and the seeds, tasks and videos of evaluation"
        for name, is_given, remedy in (
            ("vectorization", self.vectorization != "auto", "leave it at 'auto'"),
            ("autoreset_mode", self.autoreset_mode != "next_step", "leave it unset"),
            ("wrappers", self.wrappers, "wrap the env in the client, and put action masks into Dict observations"),
            (resets, self.outermost is not None, "leave them out"),
        ):
            if is_given:
                raise ConfigError(
                    f"environment: {name} does not apply to an ExternalEnv, whose clients decide it: {remedy}."
                )
        make: Any = self._resolved
        env: VectorEnv[Any, Any, Any] = make(self.context, self._n)
        return env

    def _resetting(self, env: VectorEnv[Any, Any, Any]) -> VectorEnv[Any, Any, Any]:
        """Return a vector env that resets its sub-envs: the same, or a wrapper of one that resets only by a mask."""
        if env.metadata.get("autoreset_mode") != AutoresetMode.DISABLED:
            return env
        outermost: Any = self.outermost or EpisodeResets
        return MaskedResets(env, lambda lane, index: outermost(lane, self.context.at(index)))

    def _refuse_contradictions(self, env: VectorEnv[Any, Any, Any]) -> None:
        """Refuse settings that do not apply to a ready vector env."""
        of_pool = "which EnvPool steps as a whole" if self._name.startswith(ENVPOOL) else ""
        described = f"{self._name!r}, {of_pool or 'whose factory returned a VectorEnv'}"
        mode = env.metadata.get("autoreset_mode")
        if self.num_envs is not None and self.num_envs != env.num_envs:
            raise ConfigError(
                f"num_envs_per_env_runner={self.num_envs} contradicts env {described} of {env.num_envs}: leave "
                f"num_envs_per_env_runner unset, or set it to {env.num_envs}."
            )
        if self.vectorization != "auto" or self.wrappers:
            raise ConfigError(
                f"vectorization={self.vectorization!r} and wrappers={list(self.wrappers)} do not apply to env "
                f"{described}: put wrappers of vector envs around it in a factory, and leave vectorization at 'auto'."
            )
        if self.outermost is not None and mode != AutoresetMode.DISABLED:
            raise ConfigError(
                f"env {described}: it resets its sub-envs itself, so that env_reset_fn, evaluation_seeds, "
                "evaluation_tasks and evaluation_num_videos cannot choose how episodes begin: let a factory return a "
                "single env, or a VectorEnv with metadata['autoreset_mode']=DISABLED, whose reset takes "
                "options['reset_mask']."
            )
        if self.autoreset_mode == "same_step" and mode == AutoresetMode.NEXT_STEP:
            raise ConfigError(
                f"autoreset_mode='same_step' contradicts env {described} with metadata['autoreset_mode']=NEXT_STEP: "
                "leave autoreset_mode unset."
            )

    def _check_vector_env(self, env: VectorEnv[Any, Any, Any]) -> None:
        """Check a vector env that Corral did not build: its spaces, its autoreset mode, and one reset and step."""
        check_spaces(env, self._name)
        if env.metadata.get("autoreset_mode") not in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
            raise EnvError(
                f"env {self._name!r}: metadata['autoreset_mode'] of a VectorEnv must be AutoresetMode.NEXT_STEP, "
                f"SAME_STEP or DISABLED, got {env.metadata.get('autoreset_mode')!r}: without it, episodes cannot be "
                "told apart."
            )
        if self.check:
            self._check_once(env)

    def _check_once(self, env: Any) -> None:
        """Check an env, within a limit for its first reset and step: together twice the limit of a later step."""
        limit_s = self.limits.step_timeout_s and 2 * self.limits.step_timeout_s
        try:
            with limited(limit_s, "twice env_step_timeout_s"):
                check_env(env, self._name)
        except EnvTimeoutError as error:
            raise EnvTimeoutError(f"env {self._name!r}: its first reset and step {error}.") from error.__cause__


@contextmanager
def _errors_of(name: str, when: str) -> Iterator[None]:
    """Turn any exception of an env into an `EnvError` that names the env."""
    try:
        yield
    except CorralError:
        raise
    except Exception as error:
        raise EnvError(f"env {name!r} raised when {when}: {type(error).__name__}: {error}") from error


def _make_native(
    env_id: str, name: str, num_envs: int, mode: AutoresetMode, context: EnvContext
) -> VectorEnv[Any, Any, Any] | None:
    """Return the native vector env of an id, or `None` if there is none with this autoreset mode."""
    if env_id.startswith(ENVPOOL):
        return None
    spec = gym.spec(env_id.rpartition(":")[2])
    # The vector env of ale-py always preprocesses, so that it is another env than the one of `gymnasium.make`.
    if is_atari(spec) and not asks_for_preprocessing(spec, context):
        return None
    if (spec.vector_entry_point is None or spec.additional_wrappers) and not is_atari(spec):
        return None
    when = f"its native vector env was made with env_config {dict(context)}"
    with _errors_of(name, when), naming_keys(env_id, name, context), _needs_said(env_id):
        native: VectorEnv[Any, Any, Any]
        if is_atari(spec):
            native = make_atari_vector(spec, num_envs, mode, context)
        else:
            native = gym.make_vec(env_id, num_envs=num_envs, vectorization_mode="vector_entry_point", **context)
    if native.metadata.get("autoreset_mode") == mode:
        _explain_sub_envs(native, name)
        return native
    log.info("env %r: its native vector env does not reset in mode %s, so sub-envs are stepped one by one.", name, mode)
    native.close()
    return None


def _explain_sub_envs(native: VectorEnv[Any, Any, Any], name: str) -> None:
    """Let `native.envs`, which does not exist, say how to get sub-envs; `native` then has a subclass of its class."""
    base = native.unwrapped
    cls = type(base)
    if not hasattr(base, "envs"):
        absent = AbsentSubEnvs(
            f"the native vector env of {name!r} has no sub-envs: set .env_runners(vectorization='sync'), or name the "
            "argument sub_environment in a callback of an episode event, which does the same"
        )
        base.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__, "envs": absent})


def make_one(
    resolved: str | Callable[..., Any],
    name: str,
    context: EnvContext,
    wrappers: Sequence[Any] = (),
    outermost: Any = None,
    *,
    warns: bool = True,
) -> Any:
    """Return one env with its wrappers, or the ready `VectorEnv` of a factory; a multi-agent env has seats."""
    when = f"sub-env {context.vector_index} was made with env_config {dict(context)}"
    with _errors_of(name, when), naming_keys(resolved, name, context):
        if isinstance(resolved, str):
            with _needs_said(resolved):
                made = _make_id(resolved, context)
        else:
            warns = warns and context.vector_index == 0
            made = call_factory(resolved, context, name, of_batch=partial(_of_batch, context), warns=warns)
        with named(name):
            made = adapt_vector_env(from_pettingzoo(made))
        if isinstance(made, gym.Env):
            for wrapper in wrappers:
                made = wrapper(made)
            if isinstance(made.unwrapped, MultiAgentEnv):
                with named(name):
                    made = SeatedEnv(made, name)
            made = made if outermost is None else outermost(made, context)
    if not isinstance(made, (gym.Env, VectorEnv)):
        raise EnvError(
            f"env {name!r}: expected a gymnasium Env or VectorEnv, a corral.MultiAgentEnv or an env of PettingZoo, got "
            f"{type(made).__name__}."
        )
    return made


def _of_batch(context: EnvContext) -> dict[str, Any]:
    """Return the number of sub-envs, and the device of the learners."""
    from corral.core.devices import find_device  # it imports torch, which processes of sub-envs do not need

    return {"num_envs": context.num_envs, "device": find_device(context.device)}


def _make_id(env_id: str, context: EnvContext) -> gym.Env[Any, Any]:
    """Return the env of a Gymnasium id; an Atari game may ask for preprocessing."""
    if env_id.startswith(ENVPOOL):
        raise ConfigError(f"env {env_id!r}: EnvPool has no single envs, which are needed here: use a Gymnasium id.")
    resolve_env(env_id)  # in the process of a sub-env, its package may not be imported yet
    spec = gym.spec(env_id.rpartition(":")[2])
    settings = dict(context)
    if asks_for_preprocessing(spec, settings):
        return PreprocessedAtariEnv(spec, settings)
    if is_atari(spec):
        settings.pop(PREPROCESSING, None)
    return gym.make(env_id, disable_env_checker=True, **settings)
