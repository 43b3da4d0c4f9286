"""Optimizers of torch that follow `requires_grad`, start quickly and step one vector per group of parameters."""

from __future__ import annotations

import inspect
import itertools
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from corral.errors import ConfigError

# These optimizers treat every entry of a parameter alike, so they can step one vector that holds many parameters.
ELEMENTWISE_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop)
# This entry of their state is one number per parameter; all other entries are one number per entry of the parameter.
STEP = "step"
FIRST_LR = 1e-3

ParameterState = dict[str, Any]
"""Optimizer state of one parameter by name, such as Adam's moments."""

_LRS = ("lr", "initial_lr")
_OF_SCHEDULERS = frozenset(("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"))
"""Settings of a group that a scheduler of torch writes there when it is made."""
_DERIVED = frozenset(("schedule_phases", "anneal_func_type", "total_size", "step_ratio"))
"""What schedulers of torch compute from their settings when they are made."""
_MISSING = object()
_requires_grad, _grad = attrgetter("requires_grad"), attrgetter("grad")


class ModuleOptimizer:
    """An optimizer of torch for the parameters of one module, by group.

    Only parameters with `requires_grad` move; `sync` applies changes of `requires_grad`. A frozen parameter has no
    gradient, and its optimizer state waits until the parameter is unfrozen.

    With an elementwise optimizer, the parameters of a group become views of one vector per dtype, and so do their
    gradients. To clip and step one vector takes a tenth of the time of a dozen small tensors, which saves a sixth of
    the gradient step of a small net. Parameters that were frozen for a while have taken fewer steps than the others:
    they are joined in another vector. A parameter that two modules share is in no vector, because both modules have an
    optimizer; see `keep_apart`.

    Args:
        groups: Parameters by group, frozen parameters included.
        optimizer_class: Class of the optimizer.
        optimizer_config: Keyword arguments of the optimizer.
        lr_scheduler: Makes a scheduler of torch for the optimizer; `None` is none.

    Attributes:
        groups: All parameters, by group.
        trainable: Parameters with `requires_grad`, by group.
        steppable: The tensors that the optimizer steps, by group: vectors, or the parameters.
        is_flat: Whether parameters are views of vectors.
        torch_optimizer: The optimizer of torch.
        fingerprint: Checksum of which parameters are trainable.
        keeps_lrs: Whether the optimizer of torch has learning rates of its own, which nothing replaces.
    """

    keeps_lrs: ClassVar[bool] = False

    def __init__(
        self,
        groups: Mapping[str, Iterable[nn.Parameter]],
        optimizer_class: type[torch.optim.Optimizer],
        optimizer_config: Mapping[str, Any],
        lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    ) -> None:
        """Make the optimizer, and the vectors if it is elementwise.

        Raises:
            ConfigError: A parameter is in two groups, or the optimizer refuses the parameters.
        """
        self.groups = {name: list(dict.fromkeys(group)) for name, group in groups.items()}
        check_disjoint(self.groups)
        self.is_flat = optimizer_class in ELEMENTWISE_OPTIMIZERS
        self._settings = optimizer_settings(optimizer_class, optimizer_config)
        self._make_scheduler = lr_scheduler
        self._scheduler: Any = None  # made when the first learning rate is known
        self._has_stepped = False  # since the last `end_update`
        self.torch_optimizer = self.make_torch_optimizer(optimizer_class)
        self._first_settings = [_settings_of(group) for group in self.torch_optimizer.param_groups]
        self.trainable: dict[str, list[nn.Parameter]] = {}
        self.steppable: dict[str, list[nn.Parameter]] = {}
        self.fingerprint = 0
        self._all = list(itertools.chain.from_iterable(self.groups.values()))
        self._requires_grad: list[bool] = []
        self._apart: set[nn.Parameter] = set()  # parameters that are stepped as they are
        self._vectors: list[tuple[nn.Parameter, list[nn.Parameter]]] = []
        self._waiting: dict[nn.Parameter, ParameterState] = {}  # state of frozen parameters
        self._bound: list[nn.Parameter] = []  # parameters that are parts of vectors
        self._grads: list[Tensor] = []  # gradients of these parameters
        self._places: list[int] = []  # memory addresses of these parameters and gradients
        self._rebuild()

    def make_torch_optimizer(self, optimizer_class: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
        """Return the optimizer of torch for all groups.

        Raises:
            ConfigError: The optimizer refuses the parameters.
        """
        params: list[list[nn.Parameter]] = [[] if self.is_flat else group for group in self.groups.values()]
        try:
            return without_compiler(optimizer_class)([{"params": p} for p in params], **self._settings)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"optimizer: {optimizer_class.__name__} cannot train the module's parameters with {self._settings}: "
                f"{error} Use another optimizer, such as Adam, or a module with other parameters."
            ) from error

    # Following the parameters.

    def sync(self) -> None:
        """Apply what happened to the parameters since the last call; cheap if nothing happened.

        `requires_grad` may have changed, and parameters and gradients may have been replaced by other tensors
        (`p.data = ...`, `p.grad = None`, `p.grad.data = ...`, `module.zero_grad()`).
        """
        if list(map(_requires_grad, self._all)) != self._requires_grad:
            self._rebuild()
        elif self.is_flat:
            if [*map(Tensor.data_ptr, self._bound), *map(Tensor.data_ptr, self._grads)] != self._places:
                self._rebuild()
            elif not all(map(is_, map(_grad, self._bound), self._grads)):
                self._bind_gradients()

    def keep_apart(self, parameters: set[nn.Parameter]) -> None:
        """Join these parameters in no vector from now on, and all others again."""
        if parameters != self._apart:
            self._apart = set(parameters)
            self._rebuild()

    def _bind_gradients(self) -> None:
        """Make the gradients views of the vectors' gradients again; a missing gradient is zero."""
        for parameter, view in zip(self._bound, self._grads, strict=True):
            if parameter.grad is not view:
                if parameter.grad is None:
                    view.zero_()
                else:
                    view.copy_(parameter.grad)
                parameter.grad = view

    def _rebuild(self) -> None:
        """Find the trainable parameters again, and join them in new vectors if the optimizer is elementwise."""
        states = self._states() if self.is_flat else {}
        self._requires_grad = list(map(_requires_grad, self._all))
        self.fingerprint = zlib.crc32(bytes(self._requires_grad))
        self.trainable = {name: [p for p in group if p.requires_grad] for name, group in self.groups.items()}
        self.steppable = self.trainable
        for parameter in self._all:
            if not parameter.requires_grad:
                parameter.grad = None  # torch's optimizers leave parameters without a gradient alone
        if self.is_flat:
            self._join(states)

    def _join(self, states: Mapping[nn.Parameter, ParameterState]) -> None:
        """Join trainable parameters of one dtype, device and history in a vector, with their state and gradients."""
        for parameter in {*self._bound} - set(itertools.chain.from_iterable(self.trainable.values())):
            parameter.data = parameter.data.clone()  # no longer part of a vector
        self._waiting = {
            p: {key: value.clone() for key, value in state.items()}
            for p, state in states.items()
            if not p.requires_grad
        }
        self._vectors, self.steppable = [], {}
        self.torch_optimizer.state.clear()
        for name, settings in zip(self.trainable, self.torch_optimizer.param_groups, strict=True):
            alike: dict[Any, list[nn.Parameter]] = {}
            for parameter in self.trainable[name]:
                state = states.get(parameter, {})
                history = (frozenset(state), float(state.get(STEP, 0)))
                apart = parameter if parameter in self._apart else None
                alike.setdefault((parameter.dtype, parameter.device, history, apart), []).append(parameter)
            settings["params"] = self.steppable[name] = [
                flat_parameters(parts)[0] if apart is None else with_gradient(apart)
                for (*_, apart), parts in alike.items()
            ]
            self._vectors += zip(self.steppable[name], alike.values(), strict=True)
            on_device = settings.get("fused") or settings.get("capturable")  # where torch keeps the count of steps
            for vector, parts in zip(self.steppable[name], alike.values(), strict=True):
                if found := [states[part] for part in parts if states.get(part)]:
                    joined = {
                        key: torch.cat([state[key].reshape(-1) for state in found]).view_as(vector)
                        for key in found[0]
                        if key != STEP
                    }
                    if STEP in found[0]:
                        joined[STEP] = found[0][STEP].clone().to(vector.device if on_device else "cpu")
                    self.torch_optimizer.state[vector] = joined
        self._bound = [part for _, parts in self._vectors for part in parts]
        self._grads = [part.grad for part in self._bound if part.grad is not None]
        self._places = [*map(Tensor.data_ptr, self._bound), *map(Tensor.data_ptr, self._grads)]

    def _states(self) -> dict[nn.Parameter, ParameterState]:
        """Return the optimizer state of each parameter that has one, frozen parameters included."""
        states = dict(self._waiting)
        for vector, parts in self._vectors:
            state = {key: value for key, value in self.torch_optimizer.state[vector].items() if value is not None}
            if not state:
                continue
            sizes = [part.numel() for part in parts]
            pieces = {key: torch.split(value.reshape(-1), sizes) for key, value in state.items() if key != STEP}
            for index, part in enumerate(parts):
                states[part] = {key: split[index].view_as(part) for key, split in pieces.items()}
                if STEP in state:
                    states[part][STEP] = state[STEP]
        return states

    # Steps.

    def set_lr(self, lr: float | Mapping[str, float]) -> None:
        """Set the learning rate of all groups, or one per group; a scheduler begins with the first one, and stays."""
        if self._scheduler is not None:
            return
        if not self.keeps_lrs:
            for name, group in zip(self.groups, self.torch_optimizer.param_groups, strict=True):
                group["lr"] = lr[name] if isinstance(lr, Mapping) else lr
        if self._make_scheduler is not None:
            self._scheduler = self._make_scheduler(self.torch_optimizer)

    def end_update(self) -> dict[str, float]:
        """Return the learning rate of each group in this update.

        If the optimizer has stepped in this update, the scheduler sets the learning rates of the next one.

        Raises:
            ConfigError: The scheduler raised an error, because it has come to its end, for instance.
        """
        # An optimizer that was made elsewhere may have several `param_groups`, and all its parameters are one group.
        groups = zip(self.groups, self.torch_optimizer.param_groups, strict=False)
        lrs = {name: group["lr"] for name, group in groups}
        if self._scheduler is not None and self._has_stepped:
            try:
                self._scheduler.step()
            except Exception as error:
                raise ConfigError(
                    f"lr_scheduler: {type(self._scheduler).__name__} cannot take the step after an update: "
                    f"{type(error).__name__}: {error}. It steps once after each update of the module: give it as many "
                    "steps as there are updates, or use a scheduler without an end."
                ) from error
        self._has_stepped = False
        return lrs

    def zero_grad(self, names: Iterable[str] | None = None) -> None:
        """Set the gradients of groups to zero in place, of all groups by default."""
        for name in self.groups if names is None else names:
            for parameter in self.steppable[name]:
                if parameter.grad is not None:
                    parameter.grad.zero_()

    def step(self, names: Collection[str] | None = None) -> None:
        """Step the parameters of groups, of all groups by default; other parameters and their state stay."""
        hidden: list[tuple[nn.Parameter, Tensor | None]] = []
        if names is not None and len(names) < len(self.groups):
            others = (self.steppable[name] for name in self.groups if name not in names)
            hidden = [(parameter, parameter.grad) for parameter in itertools.chain.from_iterable(others)]
        for parameter, _ in hidden:
            parameter.grad = None  # torch's optimizers leave parameters without a gradient alone
        try:
            self.torch_optimizer.step()
            self._has_stepped = True
        finally:
            for parameter, gradient in hidden:
                parameter.grad = gradient

    # State.

    @property
    def made_for(self) -> list[Any]:
        """Name of the optimizer and shapes of all parameters, as plain data."""
        return [type(self.torch_optimizer).__name__, [list(parameter.shape) for parameter in self._all]]

    def state_dict(self) -> dict[str, Any]:
        """Return `{"state": {index of a parameter: state}}`, as torch's optimizers do, without copying.

        The result does not depend on which parameters are frozen or joined in vectors. If user code changed settings,
        `changed` holds the changed settings of each group. With a scheduler, `lr_scheduler` holds its state, and the
        settings of each group that changed, learning rates included.
        """
        found: dict[str, Any] = {}
        changed = self._changed_settings()
        if self._scheduler is not None:
            found["lr_scheduler"] = {"state": self._scheduler.state_dict(), "groups": changed}
        elif not self.keeps_lrs and any(changed := [_without_lr(settings) for settings in changed]):
            found["changed"] = changed
        if not self.is_flat:
            return {**self.torch_optimizer.state_dict(), **found}
        states = self._states()
        return {"state": {index: states[p] for index, p in enumerate(self._all) if p in states}, **found}

    def _changed_settings(self) -> list[dict[str, Any]]:
        """Return the settings of each group that are not those with which it began, with all learning rates.

        An optimizer with learning rates of its own keeps all settings.
        """
        groups = [_settings_of(group) for group in self.torch_optimizer.param_groups]
        if self.keeps_lrs:
            return groups
        return [
            {name: value for name, value in group.items() if name in _LRS or value != first.get(name, _MISSING)}
            for group, first in zip(groups, self._first_settings, strict=True)
        ]

    def describe_state(self, describe: Callable[[Any], str]) -> list[dict[str, str]] | None:
        """Return what the state of each parameter looks like after a step, by name; `None` if that cannot be known.

        One copy of one parameter at a time takes a step without gradient, so that there is room for it.

        Args:
            describe: Function that describes one entry of the state.
        """
        if self._make_scheduler is not None:
            return None  # it may cycle the momentum, and so add state to an optimizer
        settings = {name: value for name, value in self._settings.items() if name != "fused"}  # which takes threads
        found = []
        for parameter in self._all:
            copy = nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype))
            copy.grad = torch.zeros_like(copy)
            try:
                optimizer = type(self.torch_optimizer)([copy], **settings)
                optimizer.step()
            except Exception:  # it cannot step without the loss, for instance
                return None
            state = optimizer.state[copy]
            found.append({name: describe(value) for name, value in state.items() if value is not None})
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; the settings of this optimizer stay, unless user code changed them.

        An optimizer with learning rates of its own has all settings of the state.
        """
        if not self.is_flat:
            self.torch_optimizer.load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})
        if not self.keeps_lrs:
            changed = state_dict.get("changed") or [{}] * len(self._first_settings)
            for group, first, new in zip(self.torch_optimizer.param_groups, self._first_settings, changed, strict=True):
                group.update({**first, **new})
        self._load_scheduler(state_dict.get("lr_scheduler"))
        if not self.is_flat:
            return
        self.sync()  # so that state of parameters that were unfrozen since then is not left out
        states = {
            self._all[index]: {key: value.to(self._all[index].device) for key, value in state.items()}
            for index, state in state_dict["state"].items()
        }
        self._join(states)

    def _load_scheduler(self, state: Mapping[str, Any] | None) -> None:
        """Continue from the state of a scheduler; with `None`, the scheduler begins at the next learning rate."""
        self._scheduler = None
        if self._make_scheduler is None or state is None:
            return
        groups = list(zip(self.torch_optimizer.param_groups, state["groups"], strict=True))
        for group, saved in groups:
            group["lr"] = saved.get("initial_lr", saved["lr"])
            group.pop("initial_lr", None)
        self._scheduler = self._make_scheduler(self.torch_optimizer)
        self._scheduler.load_state_dict(_with_own_settings(state["state"], self._scheduler))
        for group, saved in groups:
            group.update({name: value for name, value in saved.items() if name not in _OF_SCHEDULERS})


def _with_own_settings(state: Mapping[str, Any], scheduler: Any) -> dict[str, Any]:
    """Return the saved state of a scheduler, with the settings that this scheduler of torch was made with.

    `load_state_dict` of torch would bring back the saved settings, such as `gamma`. Other classes say themselves what
    is a setting and what has come so far.
    """
    cls, found = type(scheduler), dict(state)
    if cls.__module__ != torch.optim.lr_scheduler.__name__:
        return found
    settings = (inspect.signature(cls).parameters.keys() | _DERIVED) - {"last_epoch", "lr_lambda"}
    for name, value in scheduler.state_dict().items():
        if not settings.isdisjoint((bare := name.lstrip("_"), bare.removesuffix("s"))):  # such as `max_lrs` of `max_lr`
            found[name] = value
    parts, saved = getattr(scheduler, "_schedulers", ()), state.get("_schedulers", ())
    if len(parts) == len(saved) > 0:  # of `SequentialLR` and `ChainedScheduler`
        found["_schedulers"] = [_with_own_settings(*pair) for pair in zip(saved, parts, strict=True)]
    return found


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _without_lr(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in _LRS}


def check_disjoint(groups: Mapping[str, Sequence[nn.Parameter]]) -> None:
    """Refuse groups that have parameters in common, with a `ConfigError`."""
    for (name, one), (other_name, other) in itertools.combinations(groups.items(), 2):
        if shared := sorted(list(parameter.shape) for parameter in {*one} & {*other}):
            raise ConfigError(
                f"parameter_groups: the groups {name!r} and {other_name!r} share parameters of shapes {shared}: put "
                "each parameter in one group."
            )


def optimizer_settings(
    optimizer_class: type[torch.optim.Optimizer], optimizer_config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of the config, with `fused=True` for Adam and AdamW unless the config chooses the form.

    The class may require `lr`, so it gets one, which `set_lr` replaces before the first step.
    """
    settings = {"lr": FIRST_LR, **optimizer_config}
    if optimizer_class in (torch.optim.Adam, torch.optim.AdamW) and "foreach" not in settings:
        settings.setdefault("fused", True)
    return settings


def without_compiler(optimizer_class: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return a class of the same name and behaviour that does not import torch's compiler.

    The methods of torch's own optimizers are wrapped so that `torch.compile` does not compile them, and the wrappers
    import the compiler: two seconds in every process that trains, as long as importing torch itself. Nothing is
    compiled here, so the wrapped methods are called directly. A class of another package is returned unchanged.
    """
    if not optimizer_class.__module__.startswith("torch."):
        return optimizer_class
    methods = {
        name: inspect.unwrap(method)
        for name, method in inspect.getmembers(optimizer_class, inspect.isfunction)
        if hasattr(method, "__wrapped__")
    }
    methods["step"] = _hooked(torch.no_grad()(inspect.unwrap(optimizer_class.step)))  # one of its wrappers did this too
    return type(optimizer_class.__name__, (optimizer_class,), methods)


def _hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step that uses torch's wrapper, which records it in the profiler, only if there are hooks."""
    with_hooks = torch.optim.Optimizer.profile_hook_step(step)

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        return (with_hooks if hooks else step)(self, *args, **kwargs)

    wrapper.hooked = True  # type: ignore[attr-defined]  # torch wraps a step without this mark
    return wrapper


def with_gradient(parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter, with a gradient of zero if it has none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter


def flat_parameters(trainable: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return parameters and their gradients joined in one vector per dtype; the parameters become views of it.

    Existing gradients are kept; missing gradients become zero.

    Returns:
        The vectors, for an optimizer that treats every entry alike.
    """
    vectors = []
    for dtype in dict.fromkeys(parameter.dtype for parameter in trainable):
        parts = [parameter for parameter in trainable if parameter.dtype == dtype]
        vector = nn.Parameter(torch.cat([part.detach().reshape(-1) for part in parts]))
        vector.grad = torch.zeros_like(vector)
        sizes = [part.numel() for part in parts]
        for part, data, grad in zip(
            parts, torch.split(vector.data, sizes), torch.split(vector.grad, sizes), strict=True
        ):
            view = grad.view_as(part)
            if part.grad is not None:
                view.copy_(part.grad)
            part.data, part.grad = data.view_as(part), view
        vectors.append(vector)
    return vectors
