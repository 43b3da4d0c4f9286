"""Settings without effect, because a part that reads them is off: they are refused, or warned of.

What a setting needs is in its annotation, as a `Need`; needs that only the env can meet are here.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from gymnasium import spaces

from corral.core.action_masks import has_mask, without_mask
from corral.core.config import runs_env_runners
from corral.core.settings import default_of, find_unused
from corral.core.spaces import space_tree
from corral.core.tree import leaves
from corral.engines import engine_for
from corral.errors import ConfigError
from corral.exploration.build import exploration_class, resolved, settings_of
from corral.modules.distributions import ActionDistribution, DiagGaussian
from corral.modules.make_distribution import make_distribution
from corral.modules.module import Module, NetworkConfig
from corral.modules.networks import has_image
from corral.modules.q_module import QForm, QModule
from corral.modules.recurrent_q_module import RecurrentQModule
from corral.modules.recurrent_sac_module import RecurrentSACModule
from corral.modules.sac_module import SACModule
from corral.modules.spec import ModuleSpec

if TYPE_CHECKING:
    from corral.algorithms.config.config import AlgorithmConfig

log = logging.getLogger("corral")

ConfigT = TypeVar("ConfigT", bound="AlgorithmConfig")

# Groups in which settings without effect are refused. Others may wait for runners, learners or rounds that are off.
_REFUSED = ("training", "rl_module")


def _find_unused(config: AlgorithmConfig, groups: Collection[str]) -> dict[str, str]:
    """Return the settings of one module's config that have no effect, with what each needs.

    Returns:
        Texts that follow "has no effect without", by name; `model_config.NAME` for a setting of the default module.
    """
    homes = {name for group in groups for name in config.group_fields()[group]}
    found = {name: need for name, need in find_unused(config).items() if name in homes}
    network = network_settings(config) if "rl_module" in groups else None
    of_network = {} if network is None else find_unused(network)
    found |= {f"model_config.{name}": need for name, need in of_network.items()}
    return {name: need.text for name, need in found.items() if need.is_refused}


def without_unused_settings(
    config: ConfigT, keep: Collection[str] = (), *, groups: Collection[str] = _REFUSED
) -> ConfigT:
    """Return a copy of a config with the defaults of settings that have no effect.

    Args:
        config: The config of one module, or with several modules the settings that they have in common.
        keep: Settings that stay as they are.
        groups: Groups of the settings; by default those whose settings without effect are refused.
    """
    found = {name.partition(".") for name in _find_unused(config, groups)}
    unused = {key if dot else name for name, dot, key in found if name not in keep}
    fields = {f.name: f for f in dataclasses.fields(config) if f.name in unused}
    model_config = {name: value for name, value in config.model_config.items() if name not in unused}
    return config.copy(**{name: default_of(f) for name, f in fields.items()}, model_config=model_config)


def refuse_settings_without_effect(config: AlgorithmConfig) -> None:
    """Refuse settings of learning and of the network that no module reads."""
    if config.origin is not None:  # of another library, which ignores them too
        return
    first, *others = [config.for_module(each) for each in config.policies] or [config]
    for path, need in _find_unused(first, _REFUSED).items():
        if all(path in _find_unused(other, _REFUSED) for other in others):
            name, _, key = path.partition(".")
            value = getattr(first, name)
            what = f"model_config: {key}={value[key]!r:.80}" if key else f"{name}={value!r:.80}"
            raise ConfigError(f"{what} has no effect without {need}: give both, or leave it out.")


def warn_of_settings_without_effect(config: AlgorithmConfig) -> None:
    """Warn of settings of runners, learners and rounds that are off, and of resources that nothing reserves."""
    refused = {name for group in _REFUSED for name in config.group_fields()[group]}
    for name, need in find_unused(config).items() if config.origin is None else ():
        if name not in refused or not need.is_refused:
            log.warning("%s=%r has no effect without %s.", name, getattr(config, name), need.text)
    _warn_of_schedules(config)
    _warn_of_exploration(config)
    on_ray = engine_for(config.engine_name) == "ray"
    for who, runs in (("env_runner", runs_env_runners(config)), ("learner", bool(config.num_learners))):
        num_gpus = getattr(config, f"num_gpus_per_{who}")
        if runs and not on_ray and getattr(config, f"num_cpus_per_{who}") != 1:
            log.warning("num_cpus_per_%s has no effect without Ray: processes share all CPUs of the machine.", who)
        if num_gpus and not on_ray and not _has_gpu():
            log.warning("num_gpus_per_%s=%g has no effect: torch finds no GPU on this machine.", who, num_gpus)


def warn_of_rounds_that_nothing_plays(config: AlgorithmConfig) -> None:
    """Warn of settings of evaluation in a run without code of the user, which alone could ask for a round."""
    if config.evaluation_interval is not None or config.callbacks_class or config.callback_functions:
        return
    for name in config.group_fields()["evaluation"]:
        value = getattr(config, name)
        if value != _default(config, name) and name != "evaluation_parallel_to_training":  # which `validate` warns of
            log.warning("%s=%r has no effect without evaluation_interval: no round is played.", name, value)


def _warn_of_exploration(config: AlgorithmConfig) -> None:
    """Warn of explorations that no runner uses, because none explores."""
    if config.origin is not None:
        return
    evaluation = config.evaluation_config
    used = config.explore or (evaluation.get("explore") and "exploration_config" not in evaluation)
    if config.exploration_config and not used:
        log.warning("exploration_config=%r has no effect without explore=True.", config.exploration_config)
    given = evaluation.get("exploration_config")
    if given and evaluation.get("explore") is False:
        log.warning("evaluation_config: exploration_config=%r has no effect with explore=False.", given)


def _warn_of_schedules(config: AlgorithmConfig) -> None:
    """Warn of a learning rate that no parameters have, and of settings of explorations that change nothing."""
    rates = [f"{group}_lr" for group in config.LR_GROUPS]
    if rates and config.lr != _default(config, "lr") and None not in [getattr(config, name) for name in rates]:
        log.warning("lr=%r has no effect: %s are given.", config.lr, ", ".join(rates))
    settings = resolved(config.exploration_config, config.default_exploration)
    cls = exploration_class(settings["type"])
    if cls.__name__ == "RE3" and "rho" in settings and settings.get("beta_schedule", "constant") == "constant":
        log.warning("exploration_config: rho=%r has no effect without beta_schedule='linear_decay'.", settings["rho"])
    by_actor = cls.by_actor and max(1, config.num_env_runners) * (config.num_envs_per_env_runner or 1) > 1
    for schedule, (first, last, *durations) in cls.schedules.items():
        values = {**settings_of(cls), **settings}
        for name in (schedule, first, last, *durations) if by_actor else ():
            if name in config.exploration_config:
                log.warning("exploration_config: %s has no effect on %s with several actors.", name, cls.__name__)
        for name in durations if values[first] == values[last] and values[schedule] is None else ():
            if name in config.exploration_config:
                log.warning("exploration_config: %s has no effect: %s and %s are the same.", name, first, last)


def _default(config: AlgorithmConfig, name: str) -> Any:
    return next(default_of(field) for field in dataclasses.fields(config) if field.name == name)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def network_settings(config: AlgorithmConfig) -> NetworkConfig | None:
    """Return the checked settings of the default module; `None` for another module, which checks its own."""
    base = config.default_module_class
    if (config.module_class or base) is not base:
        return None
    kind = network_settings_of(base)
    return None if kind is None else kind.parse(config.model_config)


def network_settings_of(base: type[Module]) -> type[NetworkConfig] | None:
    """Return the class of the settings that `model_config` may hold for a default module."""
    # The settings of the module with memory include the others, and messages name all of them.
    return (memory_class(base) or base).CONFIG if base in (QModule, SACModule) else base.CONFIG


def memory_class(base: type[Module]) -> type[Module] | None:
    """Return the class with memory of the modules of DQN or SAC; `None` for modules of other algorithms."""
    if issubclass(base, QModule):
        return RecurrentQModule
    return RecurrentSACModule if issubclass(base, SACModule) else None


_PLAIN = {"action_bounds": "clip", "action_parts": "independent", "action_distribution": None}
"""What modules have that take no such settings."""


def _has_image(spec: ModuleSpec, network: NetworkConfig) -> bool:
    return has_image(without_mask(spec.module_space), network)


def _has_hidden_layers(spec: ModuleSpec, network: NetworkConfig) -> bool:
    return bool(network.hiddens_for(without_mask(spec.module_space)))


def _has_box(spec: ModuleSpec, network: NetworkConfig | None = None) -> bool:
    return any(isinstance(leaf, spaces.Box) for leaf in leaves(space_tree(spec.action_space)))


def _distribution(spec: ModuleSpec, network: NetworkConfig) -> ActionDistribution:
    """Return the distribution of a module; modules that take no such settings have the plain one."""
    given = (spec.model_config.get(name, getattr(network, name, plain)) for name, plain in _PLAIN.items())
    return make_distribution(spec.action_space, *given)


def _has_deviation(spec: ModuleSpec, network: NetworkConfig) -> bool:
    return bool(len(_distribution(spec, network).log_std_columns))


def _has_one_gaussian(spec: ModuleSpec, network: NetworkConfig) -> bool:
    return isinstance(_distribution(spec, network), DiagGaussian) and _has_deviation(spec, network)


def _has_mask(spec: ModuleSpec, network: NetworkConfig | None = None) -> bool:
    return has_mask(spec.module_space, spec.action_space)


# What settings of the default module need of the spaces: the check and the text, by name.
_NEEDS_OF_SPACES: dict[str, tuple[Callable[[ModuleSpec, NetworkConfig], bool], str]] = {
    **dict.fromkeys(
        (
            *("conv_activation", "conv_features", "conv_kernel_initializer", "conv_bias_initializer"),
            *("channel_axis", "image_scale"),
        ),
        (_has_image, "an image in the observations"),
    ),
    **dict.fromkeys(
        ("fcnet_kernel_initializer", "fcnet_bias_initializer"),
        (_has_hidden_layers, "fcnet_hiddens, which nets for images do not have by default"),
    ),
    **dict.fromkeys(
        ("fcnet_activation", "use_layernorm"),
        (
            lambda spec, network: _has_hidden_layers(spec, network) or bool(network.head_hiddens),
            "fcnet_hiddens or head_hiddens, which nets for images do not have by default",
        ),
    ),
    "share_features": (
        lambda spec, network: _has_image(spec, network) or network.features_extractor is not None,
        "an image in the observations, or features_extractor: nothing before the hidden layers learns",
    ),
    "action_masks": (_has_mask, "a mask in the observations"),
    "action_bounds": (_has_box, "Box actions"),
    **dict.fromkeys(
        ("initial_log_std", "log_std_bounds", "log_std_clip"),
        (_has_deviation, "Box actions, whose deviation is learned"),
    ),
    "free_log_std": (_has_one_gaussian, "Box actions alone, with a Gaussian distribution"),
    "action_parts": (
        lambda spec, network: isinstance(spec.action_space, (spaces.Dict, spaces.Tuple)),
        "Dict or Tuple actions",
    ),
}


def refuse_settings_without_use(config: AlgorithmConfig, specs: Mapping[str, ModuleSpec]) -> None:
    """Refuse settings of the default module for which the spaces of no module have a use; warn of settings of the env.

    Args:
        config: The config of all modules.
        specs: The specs of the modules, by module id.

    Raises:
        ConfigError: Names the setting, its value and what it needs.
    """
    if config.origin is not None:
        return
    for need, is_met, names in (
        ("Box actions", _has_box, ("normalize_actions", "clip_actions")),
        ("a mask in the observations", _has_mask, ("action_masks",)),
    ):
        if not any(map(is_met, specs.values())):
            for name in names:
                if getattr(config, name) != getattr(type(config), name):
                    log.warning("%s=%r has no effect without %s.", name, getattr(config, name), need)
    first = config.for_module(next(iter(specs)))
    for name, need in find_useless(config, specs).items():
        value = first.model_config[name]
        raise ConfigError(f"model_config: {name}={value!r:.80} has no effect without {need}: leave it out.")


def find_useless(config: AlgorithmConfig, specs: Mapping[str, ModuleSpec]) -> dict[str, str]:
    """Return the given settings of the default module for which the spaces of no module have a use, with their need.

    Args:
        config: The config of all modules.
        specs: The specs of the modules, by module id.
    """
    first, *others = [_unused_settings(config.for_module(module_id), spec) for module_id, spec in specs.items()]
    return {name: need for name, need in first.items() if all(name in each for each in others)}


def _unused_settings(config: AlgorithmConfig, spec: ModuleSpec) -> dict[str, str]:
    """Return the given settings of a module's network for which its spaces have no use, with what they need."""
    network = network_settings(config)
    if network is None:
        return {}
    given, built = [field for field in dataclasses.fields(network) if field.name in config.model_config], network
    if issubclass(config.default_module_class, QModule):  # which may have other layers than these settings alone say
        built = QForm.of(spec.model_config).network_config(
            type(network), config.model_config, without_mask(spec.module_space)
        )
    return {
        field.name: _NEEDS_OF_SPACES[field.name][1]
        for field in given
        if field.name in _NEEDS_OF_SPACES
        and getattr(network, field.name) != default_of(field)
        and not _NEEDS_OF_SPACES[field.name][0](spec, built)
    }
