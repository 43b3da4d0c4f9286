"""Models that Stable-Baselines3 saved: their weights, networks and spaces, read without unpickling anything.

`model.save("model.zip")` writes a zip with these entries, of which the first three are read:

    data                    the attributes of the model as JSON; one that JSON does not hold is a pickle, next to its
                            type and the text of its attributes
    policy.pth              the weights of the policy by name, of which torch loads tensors only
    pytorch_variables.pth   the temperature of SAC

The layers of the default policies have fixed names, so that names and shapes say what the networks are. Whatever else
is there is refused by its name.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from corral.compat.sb3.spaces import kind_of_text, space_of_text
from corral.core.paths import resolve_path
from corral.errors import CheckpointError
from corral.modules.networks import ACTIVATIONS

DATA, POLICY, VARIABLES = "data", "policy.pth", ("pytorch_variables.pth", "tensors.pth")
MAX_JSON_BYTES, MAX_WEIGHTS_BYTES = 2**26, 2**30

# Settings of a policy that do not change what it computes, without gSDE and images.
WITHOUT_EFFECT = {
    *("net_arch", "n_critics", "ortho_init", "log_std_init", "optimizer_class", "optimizer_kwargs"),
    *("share_features_extractor", "normalize_images", "full_std", "use_expln", "clip_mean"),
}
PLAIN_VALUES = {
    "use_sde": (False,),
    "squash_output": (False,),
    "features_extractor_class": ("<class 'stable_baselines3.common.torch_layers.FlattenExtractor'>",),
    "features_extractor_kwargs": ({}, None),
}
"""Values of other settings with which a policy is a default policy for flat observations."""
REMEDY = (
    "Only the default MlpPolicy of PPO, A2C, DQN, SAC, TD3 and DDPG is read. For another network, write a "
    "corral.Module with layers of the same names, and unpack policy.pth for .rl_module(load_from='policy.pth')"
)
# What replaces the first exploration, which is of no use to a policy that has learned.
AS_LEARNED: Mapping[str, dict[str, Any]] = {
    "DQN": {"initial_epsilon": 0.02},
    **{name: {"random_timesteps": 0} for name in ("SAC", "TD3", "DDPG")},
}
MIN_ALPHA = 1e-8
"""What stands for a temperature of 0, whose logarithm no weight can be."""

Array = NDArray[np.float32]
Layer = tuple[Array, Array]  # weight [out, in] and bias [out]


@dataclass(frozen=True)
class SB3File:
    """The content of a file that Stable-Baselines3 wrote, in Corral's terms.

    Attributes:
        path: The file.
        settings: Under `algo` the algorithm in Corral that has this network, and settings of its config by group.
        weights: Weights of its module by name, with the target networks.
        data: Attributes of the model, as JSON has them.
    """

    path: Path
    settings: dict[str, Any]
    weights: dict[str, Array]
    data: dict[str, Any]

    def space(self, name: str) -> spaces.Space[Any]:
        """Return the `"observation_space"` or the `"action_space"`, of which the file has the text.

        Raises:
            CheckpointError: Its text does not say what it is.
        """
        try:
            return space_of_text(self.data[name])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CheckpointError(
                f"{self.path}: the text of {name} does not say what it is ({type(error).__name__}: {error!s:.200}): "
                f"give it, from_sb3(path, {name}=env.{name})."
            ) from error


def read_sb3(path: str | Path) -> SB3File:
    """Return the content of a model that Stable-Baselines3 saved; nothing is unpickled or imported.

    Args:
        path: The zip file; as in Stable-Baselines3, the ending `.zip` may be left out.

    Raises:
        CheckpointError: There is no such file, it is damaged or no such model, or its policy is not a default one; the
            message names the part.
    """
    file = resolve_path(path, "the model of Stable-Baselines3")
    if not file.exists():
        file = next((other for other in [file.with_name(f"{file.name}.zip")] if other.exists()), file)
    try:
        with zipfile.ZipFile(file) as archive:
            data = json.loads(_entry(archive, DATA, MAX_JSON_BYTES))
            return SB3File(file, *_translated(archive, data), data)
    except FileNotFoundError:
        raise CheckpointError(f"{file}: there is no such file.") from None
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error
    except (
        Exception
    ) as error:  # the zip or the JSON is damaged, or JSON holds another type than Stable-Baselines3 writes
        problem = f"{type(error).__name__}: {error!s:.200}"
        raise CheckpointError(f"{file} is damaged, or no model ({problem}): save the model again.") from error


# The zip file.


def _entry(archive: zipfile.ZipFile, name: str, max_bytes: int) -> bytes:
    """Return an entry of the zip, which its size must fit."""
    if name not in archive.namelist():
        raise CheckpointError(
            f"it has no {name}, so that it is no model of Stable-Baselines3, which model.save(path) writes."
        )
    if (size := archive.getinfo(name).file_size) > max_bytes:
        raise CheckpointError(f"{name} has {size} bytes, more than the {max_bytes} that are read.")
    return archive.read(name)


def _tensors(archive: zipfile.ZipFile, name: str) -> dict[str, Array]:
    """Return the tensors of an entry by name, as float32 arrays."""
    content = _entry(archive, name, MAX_WEIGHTS_BYTES)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as inner:  # as `torch.save` writes it
            size = sum(part.file_size for part in inner.infolist())
        if size > MAX_WEIGHTS_BYTES:
            raise ValueError(f"it unpacks to {size} bytes, more than the {MAX_WEIGHTS_BYTES} that are read")
        found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        tensors = {str(key): tensor.detach() for key, tensor in found.items() if tensor is not None}
        # A tensor may repeat its numbers without holding them, and so be larger than any memory.
        if (size := sum(tensor.nbytes for tensor in tensors.values())) > MAX_WEIGHTS_BYTES:
            raise ValueError(f"its tensors have {size} bytes, more than the {MAX_WEIGHTS_BYTES} that are read")
        return {key: tensor.float().contiguous().numpy() for key, tensor in tensors.items()}
    except Exception as error:  # what is no tensor is a pickle, which torch refuses
        first_line = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{name} is not read as weights: {type(error).__name__}: {first_line:.200}") from error


# The networks.


class _Layers:
    """The weights of a policy, from which known layers are taken."""

    def __init__(self, weights: Mapping[str, Array]) -> None:
        """Keep the weights by name."""
        self.left = dict(weights)

    def take(self, name: str) -> Array:
        """Return the weights of a name, once."""
        if name not in self.left:
            raise CheckpointError(f"{name} is missing in its weights. {REMEDY}.")
        return self.left.pop(name)

    def linear(self, name: str) -> Layer:
        """Return a linear layer."""
        return self.take(f"{name}.weight"), self.take(f"{name}.bias")

    def stack(self, name: str) -> list[Layer]:
        """Return the linear layers of a stack, each of which is followed by an activation."""
        layers: list[Layer] = []
        while f"{name}.{2 * len(layers)}.weight" in self.left:
            layers.append(self.linear(f"{name}.{2 * len(layers)}"))
        return layers

    def network(self, name: str) -> tuple[list[Layer], Layer]:
        """Return the hidden layers and the last layer of a stack."""
        *hidden, last = self.stack(name) or [self.linear(f"{name}.0")]
        return hidden, last


def _named(name: str, layer: Layer) -> dict[str, Array]:
    return {f"{name}.weight": layer[0], f"{name}.bias": layer[1]}


def _stacked(name: str, layers: Sequence[Layer]) -> dict[str, Array]:
    """Return the weights of layers in a stack in which each is followed by an activation."""
    return {key: array for i, layer in enumerate(layers) for key, array in _named(f"{name}.{2 * i}", layer).items()}


def _widths(layers: Sequence[Layer]) -> list[int]:
    return [len(bias) for _, bias in layers]


Found = tuple[dict[str, Any], dict[str, Array]]
"""Settings, as `SB3File` has them, and weights by name."""


def _settings(algo: str, model_config: dict[str, Any], **training: Any) -> dict[str, Any]:
    return {"algo": algo, "rl_module": {"model_config": model_config}, "training": training}


def _actor_critic(layers: _Layers, data: Mapping[str, Any]) -> Found:
    """Return PPO with the networks of PPO and A2C; before version 1.8, policy and values may share the first layers."""
    shared, *own = (layers.stack(f"mlp_extractor.{name}_net") for name in ("shared", "policy", "value"))
    policy, value = own
    weights: dict[str, Array] = {}
    for name, hidden in (("policy", policy), ("value", value)):
        weights |= _stacked(f"{name}_encoder.mlp", shared or hidden)
        weights |= _stacked(f"{name}_hiddens", hidden if shared else [])
    weights |= _named("policy_head", layers.linear("action_net")) | _named("value_head", layers.linear("value_net"))
    if _widths(policy) != _widths(value):
        raise CheckpointError(
            f"net_arch gives the policy the hidden layers {_widths(policy)} and the values {_widths(value)}: Corral's "
            f"default module has the same for both. {REMEDY}."
        )
    model_config: dict[str, Any] = {"fcnet_hiddens": _widths(shared or policy)}
    if shared:
        model_config |= {"vf_share_layers": True, "head_hiddens": _widths(policy)}
    settings = _settings("PPO", model_config)
    if "log_std" in layers.left:  # Box actions in the units of the env
        weights["log_std"] = layers.take("log_std")
        settings["environment"] = {"normalize_actions": False, "clip_actions": True}
    return settings, weights


def _q_network(layers: _Layers, data: Mapping[str, Any]) -> Found:
    """Return DQN with a network and its target network; the last hidden layer is the stream of the head."""
    weights: dict[str, Array] = {}
    for here, there in (("q", "q_net.q_net"), ("target_q", "q_net_target.q_net")):
        hidden, last = layers.network(there)
        weights |= _stacked(f"{here}.encoder.mlp", hidden[:-1]) | _stacked(f"{here}.streams", hidden[-1:])
        weights |= _named(f"{here}.head", last)
    return _settings("DQN", {"fcnet_hiddens": _widths(hidden), "use_layernorm": False}), weights


def _critics(layers: _Layers, name: str, settings: dict[str, Any]) -> tuple[int, dict[str, Array]]:
    """Return the number of critics, and the weights of critics and targets; add their widths to settings."""
    weights: dict[str, Array] = {}
    num_critics = 0
    while any(f"critic.qf{num_critics}.{i}.weight" in layers.left for i in (0, 1)):
        for here, there in (("q", "critic"), ("target_q", "critic_target")):
            hidden, last = layers.network(f"{there}.qf{num_critics}")
            place = f"{here}.{num_critics}"
            weights |= _stacked(f"{place}.mlp", hidden) | _named(f"{place}.head", last)
        settings["critic_hiddens"] = _widths(hidden)
        num_critics += 1
    if num_critics not in (1, 2):
        raise CheckpointError(f"{name} has {num_critics} critics: Corral's has one or two. {REMEDY}.")
    return num_critics, weights


def _soft_actor_critic(layers: _Layers, data: Mapping[str, Any]) -> Found:
    """Return SAC with its critics, targets and temperature; means and deviations are one layer here."""
    hidden = layers.stack("actor.latent_pi")
    heads = [layers.linear(f"actor.{name}") for name in ("mu", "log_std")]
    model_config: dict[str, Any] = {"fcnet_hiddens": _widths(hidden)}
    num_critics, weights = _critics(layers, "SAC", model_config)
    weights |= _stacked("actor.encoder.mlp", hidden)
    weights |= _named("actor.head.0", (np.concatenate([w for w, _ in heads]), np.concatenate([b for _, b in heads])))
    settings = _settings("SAC", model_config, twin_q=num_critics == 2)
    layers.left.pop("ent_coef_tensor", None)
    if isinstance(data.get("ent_coef"), str):  # "auto", or "auto_0.1"
        log_alpha = float(layers.take("log_ent_coef").reshape(-1)[0])
    else:
        log_alpha = math.log(max(_number(data, "ent_coef"), MIN_ALPHA))
        settings["training"]["alpha_lr"] = 0.0
    weights["log_alpha"] = np.array(log_alpha, np.float32)
    return settings, weights


def _deterministic_actor(layers: _Layers, data: Mapping[str, Any]) -> Found:
    """Return TD3, or DDPG if there is one critic, with the targets of actor and critics."""
    weights: dict[str, Array] = {}
    for here, there in (("actor", "actor.mu"), ("target_actor", "actor_target.mu")):
        hidden, last = layers.network(there)
        weights |= _stacked(f"{here}.encoder.mlp", hidden) | _named(f"{here}.head.0", last)
    model_config: dict[str, Any] = {"fcnet_hiddens": _widths(hidden)}
    num_critics, of_critics = _critics(layers, "TD3", model_config)
    return _settings("TD3" if num_critics == 2 else "DDPG", model_config), weights | of_critics


FORMS: Mapping[str, tuple[Callable[[_Layers, Mapping[str, Any]], Found], str]] = {
    "stable_baselines3.common.policies": (_actor_critic, "tanh"),
    "stable_baselines3.dqn.policies": (_q_network, "relu"),
    "stable_baselines3.sac.policies": (_soft_actor_critic, "relu"),
    "stable_baselines3.td3.policies": (_deterministic_actor, "relu"),
}
"""What reads the weights of a policy, and its default activation, by the module of its class."""


def _translated(archive: zipfile.ZipFile, data: Mapping[str, Any]) -> Found:
    """Return the settings and the weights of a model."""
    policy_class = data["policy_class"]
    module = policy_class.get("__module__") if isinstance(policy_class, Mapping) else policy_class
    if not isinstance(module, str) or module not in FORMS:
        raise CheckpointError(f"policy_class is of the module {module!r:.80}. {REMEDY}.")
    _check_observations(data.get("observation_space"))
    read, activation = FORMS[module]
    chosen = _activation(data) or activation
    files = [POLICY, *(name for name in VARIABLES if name in archive.namelist())]
    layers = _Layers({key: array for name in files for key, array in _tensors(archive, name).items()})
    settings, found = read(layers, data)
    if layers.left:
        raise CheckpointError(f"it has weights {', '.join(sorted(layers.left)[:3])}, which no MlpPolicy has. {REMEDY}.")
    model_config = settings["rl_module"]["model_config"]
    if chosen != activation and any(model_config.values()):  # the widths of hidden layers, if there are some
        model_config["fcnet_activation"] = chosen
    if settings["algo"] in AS_LEARNED:
        settings["exploration"] = {"exploration_config": dict(AS_LEARNED[settings["algo"]])}
    settings["training"]["gamma"] = _number(data, "gamma")
    return settings, found


def _number(data: Mapping[str, Any], name: str) -> float:
    """Return an attribute of the model that is a finite number."""
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise CheckpointError(f"{name}={value!r:.80} is no number: save the model again.")
    return value


def _check_observations(text: Any) -> None:
    """Refuse observations of which the weights do not tell how Stable-Baselines3 prepares them for an `MlpPolicy`.

    It sorts the parts of a Dict in another way, and scales small images, which are flat numbers here.
    """
    kind = kind_of_text(text)
    if kind in ("Dict", "Tuple"):
        raise CheckpointError(f"its observations are nested, in a {kind}. {REMEDY}.")
    shape = text.get("_shape") if kind == "Box" else None
    if isinstance(shape, list) and len(shape) == 3 and text.get("dtype") in ("uint8", None):
        raise CheckpointError(f"its observations are images {shape}. {REMEDY}.")


def _activation(data: Mapping[str, Any]) -> str | None:
    """Return the activation that `policy_kwargs` names; `None` if it names none.

    Raises:
        CheckpointError: A setting of the policy is not plain.
    """
    given = {} if data.get("policy_kwargs") is None else data["policy_kwargs"]
    if not isinstance(given, Mapping):
        raise CheckpointError(f"policy_kwargs={given!r:.80} are no settings of a policy: save the model again.")
    for name, value in [("use_sde", bool(data.get("use_sde"))), *given.items()]:
        is_plain = name == "activation_fn" or name in WITHOUT_EFFECT or name.startswith(":")
        if not is_plain and value not in PLAIN_VALUES.get(name, ()):
            raise CheckpointError(f"{name}={value!r:.120} of the policy is not plain. {REMEDY}.")
    if given.get("activation_fn") is None:
        return None
    known, text = {str(cls): name for name, cls in ACTIVATIONS.items()}, str(given["activation_fn"])
    if text not in known:
        raise CheckpointError(f"activation_fn={text:.120} is none of {', '.join(ACTIVATIONS)}. {REMEDY}.")
    return known[text]
