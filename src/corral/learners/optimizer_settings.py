"""The rules of the settings `optimizer`, `optimizer_config` and `lr_scheduler`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from corral.core.settings import import_path
from corral.errors import ConfigError, nearest
from corral.learners.optimizers import optimizer_settings, without_compiler

OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "rmsprop": "RMSprop"}


def optimizer_class(setting: Any) -> Any:
    """Return the optimizer class of the setting `optimizer`, or classes by group if they are given by group.

    Raises:
        ConfigError: The setting is not an optimizer class and does not name one, or learners cannot step it.
    """
    if isinstance(setting, Mapping):
        return {str(name): optimizer_class(part) for name, part in setting.items()}
    if isinstance(setting, str) and ":" in setting:
        try:
            setting = import_path(setting)
        except ConfigError as error:
            raise ConfigError(f"optimizer: {error}.") from error
    if inspect.isclass(setting) and issubclass(setting, torch.optim.Optimizer):
        closure = inspect.signature(setting.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ConfigError(
                f"optimizer: {setting.__name__}.step(closure) computes the loss several times per step, and a learner "
                "computes it once: use an optimizer whose step() needs no closure, such as Adam."
            )
        return setting
    if not isinstance(setting, str) or setting.lower() not in OPTIMIZERS:
        raise ConfigError(
            f"optimizer={setting!r} is not an optimizer. {nearest(str(setting), OPTIMIZERS)} Any other optimizer is "
            "given as its class, such as torch.optim.RAdam, or as an import path, 'torch.optim:RAdam'."
        )
    return getattr(torch.optim, OPTIMIZERS[setting.lower()])


def check_optimizer(config: Any) -> None:
    """Refuse an optimizer, its settings or a scheduler that cannot step a parameter.

    Args:
        config: A whole config.

    Raises:
        ConfigError: Names the settings and the remedy.
    """
    given, classes = config.optimizer_config, optimizer_class(config.optimizer)
    by_group = isinstance(classes, Mapping)
    if by_group and (
        wrong := sorted(name for name, part in given.items() if name not in classes or type(part) is not dict)
    ):
        raise ConfigError(
            f"optimizer_config={given}: optimizer gives one optimizer for each of the groups {sorted(classes)}, so "
            f"optimizer_config holds a dict of settings for each of them, and {wrong} do not fit."
        )
    for name, found in classes.items() if by_group else (("", classes),):
        settings = given.get(name, {}) if by_group else given
        if "lr" in settings:
            raise ConfigError(f"optimizer_config={settings} sets lr, which lr={config.lr} would override.")
        parameter = torch.nn.Parameter(torch.zeros(1, 1))
        parameter.grad = torch.zeros(1, 1)
        try:
            optimizer = without_compiler(found)([parameter], **optimizer_settings(found, settings))
            optimizer.step()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"optimizer_config={settings} does not suit optimizer={found.__name__}, or it cannot step a parameter "
                f"with a dense gradient: {error}. Change optimizer_config, or use another optimizer, such as Adam."
            ) from error
        _check_scheduler(config, optimizer)


def _check_scheduler(config: Any, optimizer: Any) -> None:
    """Refuse what makes no scheduler of torch for an optimizer, and schedules that a scheduler would override."""
    make = config.lr_scheduler
    if make is None:
        return
    rates = [name for name in config.group_fields()["training"] if name == "lr" or name.endswith("_lr")]
    if schedules := [name for name in rates if isinstance(getattr(config, name), (list, tuple))]:
        raise ConfigError(
            f"lr_scheduler={make!r:.80} sets the learning rates, so {', '.join(schedules)} cannot be a schedule too: "
            "give one number with which it begins, or leave lr_scheduler out."
        )
    try:
        scheduler = make(optimizer)
        optimizer.step()
        scheduler.step()
        scheduler.state_dict()
    except Exception as error:
        raise ConfigError(
            f"lr_scheduler={make!r:.80} must return a scheduler of torch that steps without arguments when it is "
            f"called with an optimizer, and it does not: {type(error).__name__}: {error}. Give, for example, "
            "functools.partial(torch.optim.lr_scheduler.StepLR, step_size=100)."
        ) from error
