"""The settings of the network, and of the modules of several agents."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, TypeVar

from pydantic import BeforeValidator

from corral.core.config import Config
from corral.core.familiar_names import ALIASES
from corral.core.ids import ALL_MODULES, DEFAULT_MODULE_ID
from corral.core.settings import Importable, Need, check_names, imported
from corral.errors import ConfigError, nearest

if TYPE_CHECKING:
    from corral.modules.module import Module


def _path_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


@dataclass(kw_only=True)
class RLModuleSettings:
    """Settings of the network.

    Attributes:
        module_class: A `corral.Module` subclass; `None` means the default module.
        model_config: Settings of the module; `corral.modules.module.ModelConfig` lists the settings of the default
            module.
        load_from: Weights that the module starts with: a checkpoint, a run (its best checkpoint), or a file of weights,
            `.safetensors`, `.pt`, `.pth`, or `.zip` of Stable-Baselines3.
        load_parts: Patterns of the names of the weights that are loaded, such as `policy_encoder.*`.
        freeze_parts: Patterns of the names of the parameters that do not learn; `freeze` is another name of the
            setting.
    """

    module_class: Importable = None
    model_config: dict[str, Any] = field(default_factory=dict)
    load_from: Annotated[str | None, BeforeValidator(_path_text)] = None
    load_parts: Annotated[list[str], Need("load_from", attrgetter("load_from"))] = field(default_factory=lambda: ["*"])
    freeze_parts: list[str] = field(default_factory=list)

    @property
    def asks_for_memory(self) -> bool:
        """Whether `model_config` gives the default module an LSTM or a GRU."""
        return bool(self.model_config.get("use_lstm") or self.model_config.get("use_gru"))

    @property
    def default_module_class(self) -> type[Module]:
        """The module class for `module_class=None`; it names the settings of `model_config` too."""
        from corral.modules.module import ActorCritic
        from corral.modules.recurrent import RecurrentActorCritic

        return RecurrentActorCritic if self.asks_for_memory else ActorCritic

    @property
    def module_settings(self) -> dict[str, Any]:
        """Settings of the algorithm that its modules need, which are added to `model_config`."""
        return {}


_POLICY_SETTINGS = (*(each.name for each in fields(RLModuleSettings)), "observation_space", "action_space")


def _policies(value: Any) -> Any:
    """Return settings by module id from what a user may give: ids alone, or ids with settings or `None`."""
    if isinstance(value, str):
        raise ValueError(f"{value!r} is one id: give a set or a dict of ids, such as {{{value!r}}}")
    if not isinstance(value, (Mapping, Set, list, tuple)):
        raise ValueError("give a set or a list of module ids, or a dict of settings by module id")
    if not isinstance(value, Mapping):
        value = dict.fromkeys(sorted(value, key=str) if isinstance(value, Set) else value)
    found: dict[str, dict[str, Any]] = {}
    for module_id, settings in value.items():
        if not isinstance(module_id, str) or not module_id or "/" in module_id or module_id == ALL_MODULES:
            raise ValueError(f"{module_id!r} is no module id: ids are strings without a slash, not {ALL_MODULES!r}")
        if not isinstance(settings, Mapping | None):
            raise ValueError(
                f"policy {module_id!r} must have a dict with any of {', '.join(_POLICY_SETTINGS)}, or None, and has "
                f"{settings!r:.80}"
            )
        own = {ALIASES["rl_module"].get(name, name): part for name, part in (settings or {}).items()}
        check_names(f"policies: {module_id!r}", own, _POLICY_SETTINGS)
        found[module_id] = {name: _policy_setting(name, part) for name, part in own.items()}
    return found


def _policy_setting(name: str, value: Any) -> Any:
    """Return a setting of a module: a class that a string names, and a space that a file describes."""
    if name == "module_class":
        return imported(value)
    if name == "load_from":
        return _path_text(value)
    if not (name.endswith("_space") and isinstance(value, dict)):  # a `Dict` space is a `Mapping` too
        return value
    from corral.core.space_descriptions import described_space  # here: it imports gymnasium

    return described_space(value)


def _to_train(value: Any) -> Any:
    value = imported(value) if isinstance(value, str) and ":" in value else value
    if isinstance(value, str):
        raise ValueError(f"{value!r} is one id: give a list of ids, such as [{value!r}]")
    if not (value is None or callable(value) or isinstance(value, (Set, list, tuple))):
        raise ValueError("give a list of module ids, or a function (module_id)")
    return sorted(value, key=str) if isinstance(value, Set) else value


def _sharing(value: Any) -> Any:
    """Return lists of module ids by path from what a user may give: by path, the ids of one group or several groups."""
    if not isinstance(value, Mapping):
        raise ValueError('give a dict of module ids by the path of the layers, such as {"encoder": ["left", "right"]}')
    found: dict[str, list[list[str]]] = {}
    for path, given in value.items():
        if not isinstance(path, str) or not path:
            raise ValueError(f"{path!r} is no path of layers, such as 'encoder' or 'q.encoder'")
        if not isinstance(given, (Set, list, tuple)):
            raise ValueError(f"{path!r} must have a list of module ids, or a list of such lists, and has {given!r:.80}")
        groups = [given] if all(isinstance(part, str) for part in given) else given
        found[path] = [sorted(group) if isinstance(group, Set) else list(group) for group in groups]
    return found


def _critic(value: Any) -> Any:
    value = imported(value) if isinstance(value, str) and ":" in value else value
    if not (value is None or value == "all" or callable(value)):
        raise ValueError('give "all", or a function (agent_id, observations, actions, present)')
    return value


class ModulesConfig(Config, Protocol):
    """What choosing the settings of one module reads of a config."""

    policies: dict[str, dict[str, Any]]
    algorithm_config_overrides_per_module: dict[str, dict[str, Any]]


ModulesConfigT = TypeVar("ModulesConfigT", bound=ModulesConfig)


@dataclass(kw_only=True)
class MultiAgentSettings:
    """Settings of several agents.

    Attributes:
        policies: The modules that choose actions: a set or list of module ids, or a dict by module id of any of
            `module_class`, `model_config`, `observation_space` and `action_space`, which are otherwise as in the whole
            config and of the agents. Empty if there is one agent.
        policy_mapping_fn: Function `(agent_id, episode)` that returns the id of the module of an agent, called once in
            each episode; it may also take `worker`, the runner. With `None` all agents share the only module, or each
            agent has the module whose id is the agent's.
        policies_to_train: Ids of the modules that learn, or a function `(module_id)` that says whether a module does.
            `None` is all modules that have weights.
        count_steps_by: Whether batch sizes of training count env steps, in which several agents may act, or agent
            steps.
        algorithm_config_overrides_per_module: Settings of `.training(...)` and `.exploration(...)`, and `transforms`,
            that differ for a module, as in `{"main": {"lr": 1e-4}}`.
        shared_layers: Layers that modules have in common: ids of modules by the path of the layers, as in `{"encoder":
            ["left", "right"]}`, or several lists of ids for one path.
        critic_sees: What the critics of PPO, APPO and IMPALA see of the env step, while policies act by their own
            observations: `"all"` is the observations of all agents, and a function `(agent_id, observations, actions,
            present)` returns it, an array `[B, ...]`; see docs/multi-agent.md. `None` is the observation of the agent.
    """

    policies: Annotated[dict[str, dict[str, Any]], BeforeValidator(_policies)] = field(default_factory=dict)
    policy_mapping_fn: Importable = None
    policies_to_train: Annotated[Any, BeforeValidator(_to_train)] = None
    count_steps_by: Annotated[
        Literal["env_steps", "agent_steps"],
        Need(
            "an algorithm that samples its batches, such as PPO: other batches count steps of the module",
            attrgetter("SAMPLES_BATCHES"),
        ),
    ] = "env_steps"
    algorithm_config_overrides_per_module: dict[str, dict[str, Any]] = field(default_factory=dict)
    shared_layers: Annotated[dict[str, list[list[str]]], BeforeValidator(_sharing)] = field(default_factory=dict)
    critic_sees: Annotated[Any, BeforeValidator(_critic)] = None

    TAKES_CENTRAL_CRITIC: ClassVar[bool] = False
    """Whether the algorithm learns values with which `critic_sees` can work."""

    def check_settings(self) -> None:
        """Refuse layers that are shared with modules that do not exist, or shared twice, and critics that see nothing.

        Raises:
            ConfigError: Names the module and the layers, or the algorithm.
        """
        if self.is_multi_agent:
            _check_shared_layers(self)
        if self.critic_sees is not None and not self.TAKES_CENTRAL_CRITIC:
            raise ConfigError(
                f"multi_agent: critic_sees={self.critic_sees!r:.80} is for PPO, APPO and IMPALA, and "
                f"{type(self).__name__.removesuffix('Config')} has no critic that could see other agents: leave it out."
            )

    @property
    def is_multi_agent(self) -> bool:
        """Whether the env has several agents, whose modules are set with `.multi_agent(...)`."""
        return bool(self.policies)

    @property
    def module_ids(self) -> list[str]:
        """Ids of all modules."""
        return list(self.policies) or [DEFAULT_MODULE_ID]

    def for_module(self: ModulesConfigT, module_id: str) -> ModulesConfigT:
        """Return a frozen copy with the settings of one module in place of those that all modules have in common."""
        given = self.policies.get(module_id, {})
        own = {each.name: given[each.name] for each in fields(RLModuleSettings) if given.get(each.name) is not None}
        return self.copy(**{**own, **self.algorithm_config_overrides_per_module.get(module_id, {})}).freeze()

    def trains(self, module_id: str) -> bool:
        """Return whether `policies_to_train` includes a module; a module without weights does not learn anyway.

        Raises:
            ConfigError: `policies_to_train` is a function, and it raised an error.
        """
        chosen = self.policies_to_train
        if callable(chosen):
            try:
                return bool(chosen(module_id))
            except Exception as error:
                raise ConfigError(
                    f"multi_agent: policies_to_train({module_id!r}) raised {type(error).__name__}: {error}"
                ) from error
        return chosen is None or module_id in chosen


def _check_shared_layers(config: MultiAgentSettings) -> None:
    """Refuse groups of modules that do not exist or share nothing, and layers that would be shared twice."""
    taken: dict[str, list[str]] = {}
    for path, groups in config.shared_layers.items():
        for group in groups:
            for module_id in group:
                if module_id not in config.policies:
                    raise ConfigError(
                        f"shared_layers: there is no module {module_id!r}. {nearest(module_id, config.policies)}"
                    )
            if len(set(group)) < 2:
                raise ConfigError(
                    f"shared_layers: {path!r} has the modules {group}: name at least two, or leave it out."
                )
            for module_id in dict.fromkeys(group):
                for other in taken.get(module_id, []):
                    if f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}."):
                        raise ConfigError(
                            f"shared_layers: module {module_id!r} shares {other!r} and {path!r}, which overlap: name "
                            "its layers once."
                        )
                taken.setdefault(module_id, []).append(path)
