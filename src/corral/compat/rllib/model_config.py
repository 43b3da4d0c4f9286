"""RLlib's `DefaultModelConfig`, and its translation into Corral's `model_config`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from corral.errors import ConfigError, nearest


@dataclass
class DefaultModelConfig:
    """Settings of RLlib's default modules, with RLlib's names and defaults."""

    fcnet_hiddens: list[int] = field(default_factory=lambda: [256, 256])
    fcnet_activation: str = "tanh"
    fcnet_kernel_initializer: Any = None
    fcnet_kernel_initializer_kwargs: dict[str, Any] | None = None
    fcnet_bias_initializer: Any = None
    fcnet_bias_initializer_kwargs: dict[str, Any] | None = None
    fcnet_use_layernorm: bool = False
    conv_filters: Any = None
    conv_activation: str = "relu"
    conv_kernel_initializer: Any = None
    conv_kernel_initializer_kwargs: dict[str, Any] | None = None
    conv_bias_initializer: Any = None
    conv_bias_initializer_kwargs: dict[str, Any] | None = None
    head_fcnet_hiddens: list[int] = field(default_factory=list)
    head_fcnet_activation: str | None = "relu"
    head_fcnet_kernel_initializer: Any = None
    head_fcnet_kernel_initializer_kwargs: dict[str, Any] | None = None
    head_fcnet_bias_initializer: Any = None
    head_fcnet_bias_initializer_kwargs: dict[str, Any] | None = None
    head_fcnet_use_layernorm: bool = False
    free_log_std: bool = False
    log_std_clip_param: float = 20.0
    vf_share_layers: bool = True
    use_lstm: bool = False
    max_seq_len: int = 20
    lstm_cell_size: int = 256
    lstm_use_prev_action: bool = False
    lstm_use_prev_reward: bool = False
    lstm_kernel_initializer: Any = None
    lstm_kernel_initializer_kwargs: dict[str, Any] | None = None
    lstm_bias_initializer: Any = None
    lstm_bias_initializer_kwargs: dict[str, Any] | None = None
    fusionnet_hiddens: list[int] = field(default_factory=lambda: [256, 256])
    fusionnet_activation: str = "tanh"
    fusionnet_kernel_initializer: Any = None
    fusionnet_kernel_initializer_kwargs: dict[str, Any] | None = None
    fusionnet_bias_initializer: Any = None
    fusionnet_bias_initializer_kwargs: dict[str, Any] | None = None


_ACTIVATIONS = {"swish": "silu", None: "linear"}
# The parts of the settings of DQN, SAC, TQC and CQL that RLlib shows to their modules as well.
_OF_ALGORITHM = {"double_q", "dueling", "epsilon", "num_atoms", "std_init", "v_max", "v_min", "twin_q", "num_actions"}
_OF_ALGORITHM |= {"n_quantiles", "n_critics", "top_quantiles_to_drop_per_net"}
_ACTOR_CRITICS = ("PPO", "APPO", "IMPALA", "MARWIL", "BC")
_SEPARATE = ("PPO", "APPO", "MARWIL", "BC")  # whose policy and value function share layers only if the settings say so
_WITHOUT_EFFECT = {"uses_new_env_runners", "_uses_new_env_runners"}
_OLD_MODEL_IGNORED = {"custom_model_config", "framestack", "dim", "grayscale", "zero_mean", "_disable_preprocessor_api"}


def translated(settings: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    """Return Corral's `model_config` for settings of RLlib's default modules; others are left out.

    Args:
        settings: The settings by RLlib's names.
        algorithm: Name of the algorithm.
    """
    known = {f.name: getattr(DefaultModelConfig(), f.name) for f in dataclasses.fields(DefaultModelConfig)}
    known["vf_share_layers"] = algorithm not in _SEPARATE
    return _translate({**known, **{name: value for name, value in settings.items() if name in known}}, algorithm)


def to_model_config(config: Any) -> dict[str, Any]:
    """Return Corral's `model_config` for the default modules of a config of RLlib.

    Raises:
        ConfigError: A setting is unknown, or Corral lacks it.
    """
    if config.ALGORITHM == "DreamerV3":
        if given := getattr(config.rl_module_spec, "model_config", None) or config.model_config:
            raise ConfigError(f"model_config={given!r:.60}: the networks of DreamerV3 have `model_size` alone.")
        return {"max_seq_len": config.batch_length_T}
    settings = _given(config)
    known = {f.name: getattr(DefaultModelConfig(), f.name) for f in dataclasses.fields(DefaultModelConfig)}
    for name in settings:
        if name not in known and name not in _OF_ALGORITHM:
            raise ConfigError(
                f"model_config: {name!r} is no setting of RLlib's default modules. {nearest(name, known)}"
            )
    _refuse_unserved({name: value for name, value in settings.items() if value != known.get(name)}, config.ALGORITHM)
    return _translate({**known, **settings}, config.ALGORITHM)


def _refuse_unserved(differing: Mapping[str, Any], algorithm: str) -> None:
    """Refuse settings that RLlib reads and Corral lacks.

    Args:
        differing: Settings with other values than RLlib's defaults.
        algorithm: Name of the algorithm.

    Raises:
        ConfigError: Names the setting and the remedy.
    """
    for name, value in differing.items():
        if name.startswith("lstm_") and "_initializer" in name and differing.get("use_lstm"):
            remedy = "the layers of an LSTM start as torch makes them: leave it out"
        elif name.startswith("fusionnet_") and algorithm in ("SAC", "TQC", "CQL", "IQL"):
            remedy = f"the critic of {algorithm} is one network on observations and actions: use `fcnet_hiddens`"
        elif name == "free_log_std" and algorithm in ("SAC", "TQC", "CQL"):
            remedy = f"the standard deviations of {algorithm} depend on the observation: leave it out"
        else:
            continue
        raise ConfigError(f"model_config: {name}={value!r:.60}: this setting of RLlib is not in Corral: {remedy}.")


def settings_of_default(config: Any, module_id: str) -> dict[str, Any]:
    """Return all settings of a default module of a config of RLlib, by RLlib's names."""
    spec = config.rl_module_spec
    if hasattr(spec, "spec_of") and spec.spec_of(module_id).model_config is not None:
        config = config.copy(copy_frozen=False).rl_module(model_config=spec.spec_of(module_id).model_config)
    return {**dataclasses.asdict(DefaultModelConfig()), **_given(config)}


def _given(config: Any) -> dict[str, Any]:
    """Return the settings of default modules that a config gives; only IMPALA shares layers unless it says so."""
    given = getattr(config.rl_module_spec, "model_config", None) or config.model_config
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        return dataclasses.asdict(given)
    settings = {**_of_old_model(config), **_with_new_names(given or {})}
    if config.ALGORITHM in _SEPARATE:
        settings.setdefault("vf_share_layers", False)
    return settings


def _with_new_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the names of 2.60 in place of older ones."""
    found = {}
    for name, value in settings.items():
        if name in _WITHOUT_EFFECT:
            continue
        name = f"head_{name.removeprefix('post_')}" if name.startswith("post_fcnet_") else name
        found[name.replace("_weights_", "_kernel_").replace("_initializer_config", "_initializer_kwargs")] = value
    return found


def _of_old_model(config: Any) -> dict[str, Any]:
    """Return the settings of the older `model` dict by their names in `model_config`."""
    found: dict[str, Any] = {}
    known = {f.name for f in dataclasses.fields(DefaultModelConfig)}
    old = {**_with_new_names(config.model), **{"vf_share_layers": config.get("vf_share_layers")}}
    for name, value in old.items():
        if value is None or name in _OLD_MODEL_IGNORED:
            continue
        if name not in known:
            raise ConfigError(
                f"model: {name!r} belongs to RLlib's older stack (ModelV2), which Corral does not serve: use an "
                "RLModule, or settings of the default module."
            )
        found[name] = value
    return found


def _translate(settings: Mapping[str, Any], algorithm: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "fcnet_hiddens": list(settings["fcnet_hiddens"]),
        "fcnet_activation": _ACTIVATIONS.get(settings["fcnet_activation"], settings["fcnet_activation"]),
        "use_layernorm": settings["fcnet_use_layernorm"],
    }
    if settings["conv_filters"] is not None:
        found["conv_filters"] = [_to_filter(each) for each in settings["conv_filters"]]
        found |= {"conv_activation": settings["conv_activation"], "conv_features": None}
    found |= {
        "head_hiddens": list(settings["head_fcnet_hiddens"]),
        "head_activation": _ACTIVATIONS.get(settings["head_fcnet_activation"], settings["head_fcnet_activation"]),
        "head_use_layernorm": settings["head_fcnet_use_layernorm"],
    }
    for native, name in {"fcnet": "fcnet", "conv": "conv", "head": "head_fcnet"}.items():
        for part in ("kernel_initializer", "bias_initializer"):  # without one, layers start as torch makes them
            is_read = native != "head" or algorithm == "DQN"  # RLlib's PPO and SAC do not read the heads' settings
            found[f"{native}_{part}"] = (is_read and settings[f"{name}_{part}"]) or "torch"
            found[f"{native}_{part}_kwargs"] = (is_read and settings[f"{name}_{part}_kwargs"]) or {}
    if algorithm in _ACTOR_CRITICS:
        found |= {name: settings[name] for name in ("free_log_std", "vf_share_layers")}
        if settings["log_std_clip_param"] != DefaultModelConfig.log_std_clip_param:  # the default limits nothing
            found["log_std_clip"] = settings["log_std_clip_param"]
    if settings["use_lstm"]:
        found |= {
            "use_lstm": True,
            "lstm_cell_size": settings["lstm_cell_size"],
            "max_seq_len": settings["max_seq_len"],
        }
    return found


def _to_filter(given: Any) -> list[Any]:
    """Return a filter of Corral: RLlib pads images with zeros, so that only the stride makes them smaller."""
    return [*given, "same"] if len(given) == 3 else list(given)
