"""Models of Stable-Baselines3: they act as they did there, train further, and refuse what is not plain by its name."""

from __future__ import annotations

import io
import json
import re
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import corral
from at_least import at_least
from corral import Algorithm, from_sb3, load_policy
from corral.compat.sb3 import files as sb3_files
from corral.errors import CheckpointError

SAMPLES = Path(__file__).parent / "sb3_samples"
OLD_NAMES = sorted(path.stem for path in SAMPLES.glob("*.zip"))
NAMES = [*OLD_NAMES, *(f"pinned/{path.stem}" for path in sorted(SAMPLES.glob("pinned/*.zip")))]
"""The samples of earlier versions, and those that `make samples` writes with the pinned versions."""
OFF_POLICY = {
    "num_steps_sampled_before_learning_starts": 16,
    "train_batch_size_per_learner": 8,
    "replay_buffer_config": {"capacity": 100},
}


class Noise(gym.Env[Any, Any]):
    """Shows random observations of a space."""

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        return self.observation_space.sample(), float(self.np_random.normal()), False, self.np_random.random() < 0.1, {}


def computed(name: str) -> dict[str, Any]:
    """Return what Stable-Baselines3 computed for observations."""
    with np.load(SAMPLES / f"{name}.npz") as arrays:
        return dict(arrays)


def values_of(module: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Return what the module computes of what Stable-Baselines3 computed."""
    obs = torch.from_numpy(found["obs"])
    with torch.no_grad():
        same = {"log_std": module.policy(obs).chunk(2, -1)[1].numpy()} if "log_std" in found else {}
        if "values" in found:
            return same | {"values": module.value(obs).numpy()}
        taken = [torch.from_numpy(found["taken"])] if "taken" in found else []
        return same | {
            name: module.q_values(obs, *taken, target=name == "target_q").numpy() for name in ("q", "target_q")
        }


def small(model: Any) -> Any:
    """Return the config of a model with an env, and with little to do in an iteration."""
    space, policy = model.policy.observation_space, model.policy
    config = model.config.environment(
        Noise, env_config={"observation_space": space, "action_space": policy.action_space}
    )
    config.env_runners(num_envs_per_env_runner=2).debugging(seed=0)
    if type(config).__name__ == "PPOConfig":
        return config.training(train_batch_size_per_learner=64, minibatch_size=32, num_epochs=1)
    return config.training(**OFF_POLICY).reporting(min_sample_timesteps_per_iteration=40)


@pytest.mark.parametrize("folder", ["", "pinned/"])
def test_there_is_a_sample_of_each_algorithm(folder: str) -> None:
    found = {path.stem.partition("_")[0] for path in SAMPLES.glob(f"{folder}*.zip")}
    assert found == {"ppo", "a2c", "dqn", "sac", "td3", "ddpg"}


@pytest.mark.parametrize("name", NAMES)
def test_a_model_acts_and_values_as_in_stable_baselines3(name: str) -> None:
    found, policy = computed(name), from_sb3(SAMPLES / f"{name}.zip").policy
    actions = policy.batch(found["obs"])
    assert actions.shape == found["actions"].shape
    assert policy.action_space.contains(policy(found["obs"][0]))
    if np.issubdtype(actions.dtype, np.floating):
        assert np.allclose(actions, found["actions"], rtol=0, atol=1e-5)
        assert np.ptp(actions) > 1e-4  # they are no constant
    else:
        assert np.array_equal(actions, found["actions"])
    for part, values in values_of(policy.module, found).items():
        assert np.allclose(values, found[part], rtol=0, atol=1e-5), part
        assert np.ptp(values) > 1e-3
    if "alpha" in found:
        assert policy.module.log_alpha.exp().item() == pytest.approx(found["alpha"].item())
    if "target_q" in found:
        assert not np.allclose(found["q"], found["target_q"], atol=1e-5)  # so that one cannot stand for the other


@pytest.mark.parametrize("name", OLD_NAMES)
def test_training_begins_with_the_weights_of_the_model(name: str, tmp_path: Path) -> None:
    model = from_sb3(SAMPLES / f"{name}.zip")
    start = {key: value.clone() for key, value in model.policy.module.state_dict().items()}
    with small(model).build() as algo:
        weights = algo.get_module().state_dict()
        assert weights.keys() == start.keys()
        assert all(torch.equal(weights[key], start[key]) for key in start)  # target networks and temperature too
        obs = computed(name)["obs"]
        assert np.allclose(algo.compute_actions(obs, explore=False), model.policy.batch(obs), atol=1e-6)
        algo.train()
        assert not all(torch.equal(algo.get_module().state_dict()[key], start[key]) for key in start)
        saved = algo.save(tmp_path / "checkpoint")
        trained = algo.compute_actions(obs, explore=False)
    assert np.allclose(load_policy(saved).batch(obs), trained, atol=1e-6)
    with Algorithm.from_checkpoint(saved, env=Noise, env_config=algo.config.env_config) as algo:
        algo.train()


def test_models_before_version_1_8_may_share_their_first_layers(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    first, second = (nn.Linear(inputs, 8) for inputs in (4, 8))
    own = {name: nn.Linear(8, 6) for name in ("policy", "value")}
    heads = {"action_net": nn.Linear(6, 2), "value_net": nn.Linear(6, 1)}
    layers = {"shared_net.0": first, "shared_net.2": second} | {f"{name}_net.0": layer for name, layer in own.items()}
    named = {f"mlp_extractor.{name}": layer for name, layer in layers.items()} | heads
    weights = {f"{name}.{key}": value for name, layer in named.items() for key, value in layer.state_dict().items()}
    module: Any = from_sb3(changed(tmp_path, "ppo_cartpole", with_weights(lambda _: weights))).policy.module
    obs = torch.randn(5, 4, generator=rng)
    features = second(first(obs).tanh()).tanh()
    assert torch.allclose(module.policy(obs), heads["action_net"](own["policy"](features).tanh()), atol=1e-6)
    assert torch.allclose(module.value(obs), heads["value_net"](own["value"](features).tanh())[:, 0], atol=1e-6)


def test_the_config_has_the_discount_and_the_temperature_of_the_model() -> None:
    config: Any = from_sb3(SAMPLES / "sac_fixed_alpha.zip").config
    assert (type(config).__name__, config.gamma, config.alpha_lr, config.twin_q) == ("SACConfig", 0.9, 0, False)
    model = from_sb3(SAMPLES / "sac_fixed_alpha.zip")
    with small(model).build() as algo:
        algo.train()
        assert algo.get_module().log_alpha.item() == pytest.approx(np.log(0.2))  # ent_coef=0.2 is fixed
    learned: Any = from_sb3(SAMPLES / "sac_pendulum.zip")
    assert learned.config.alpha_lr is None
    assert learned.policy.module.log_alpha.item() < 0
    assert type(from_sb3(SAMPLES / "ddpg_lopsided.zip").config).__name__ == "DDPGConfig"


def test_a_policy_that_has_learned_is_not_replaced_by_random_actions() -> None:
    learned = from_sb3(SAMPLES / "td3_pendulum.zip")
    config = small(learned)
    config.exploration(exploration_config={**config.exploration_config, "stddev": 0.0})
    with config.build() as algo:
        rollout = algo.env_runner.sample(num_timesteps=8, explore=True)
    obs, taken = rollout["obs"][: len(rollout["actions"])], 2 * rollout["actions"]
    chosen = learned.policy.batch(obs.reshape(-1, 3)).reshape(taken.shape)
    assert np.allclose(taken[rollout["valid"]], chosen[rollout["valid"]], atol=1e-5)
    with small(from_sb3(SAMPLES / "dqn_cartpole.zip")).build() as algo:
        assert algo.train()["env_runners"]["epsilon"] == pytest.approx(0.02)


class OtherWidths(corral.Module):
    """The network of PPO with other layers for the values, under the names of Stable-Baselines3."""

    def __init__(self, observation_space: Any, action_space: Any, model_config: Any) -> None:
        super().__init__(observation_space, action_space, model_config)
        policy, value = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Sequential(nn.Linear(4, 5), nn.Tanh())
        self.mlp_extractor = nn.ModuleDict({"policy_net": policy, "value_net": value})
        self.action_net, self.value_net = nn.Linear(8, 2), nn.Linear(5, 1)

    def policy(self, obs: Any) -> torch.Tensor:
        found: torch.Tensor = self.action_net(self.mlp_extractor["policy_net"](obs))
        return found

    def value(self, obs: Any) -> torch.Tensor:
        found: torch.Tensor = self.value_net(self.mlp_extractor["value_net"](obs)).squeeze(-1)
        return found


def test_a_module_with_the_same_names_loads_what_is_refused(tmp_path: Path) -> None:
    space, actions = spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2)
    weights = OtherWidths(space, actions, {}).state_dict()
    path = changed(tmp_path, "ppo_cartpole", with_weights(lambda _: weights))
    with pytest.raises(
        CheckpointError, match=r"policy the hidden layers \[8\] and the values \[5\].*load_from='policy.pth'"
    ):
        from_sb3(path)
    with zipfile.ZipFile(path) as archive:
        archive.extract("policy.pth", tmp_path)
    config = corral.PPOConfig().environment(Noise, env_config={"observation_space": space, "action_space": actions})
    with config.rl_module(module_class=OtherWidths, load_from=tmp_path / "policy.pth").build() as algo:
        assert all(
            torch.equal(value, weights[name]) for name, value in at_least(1, algo.get_module().state_dict().items())
        )


def test_a_module_of_several_takes_the_weights_too() -> None:
    model = from_sb3(SAMPLES / "ppo_cartpole.zip")
    config = corral.PPOConfig().environment(corral.make_multi_agent("CartPole-v1"), env_config={"num_agents": 2})
    config.rl_module(model_config=model.config.model_config)  # type: ignore[attr-defined]
    config.multi_agent(policies={"old", "new"}, policy_mapping_fn=lambda agent_id, episode: ["old", "new"][agent_id])
    with config.build() as algo:
        algo.load_module_weights(SAMPLES / "ppo_cartpole.zip", "old")
        obs = computed("ppo_cartpole")["obs"]
        actions = algo.compute_actions(obs, explore=False, module_id="old")
        assert np.array_equal(actions, computed("ppo_cartpole")["actions"])


def test_nothing_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a pickle was read")

    for name in ("pickle.loads", "pickle.load", "cloudpickle.loads", "cloudpickle.load"):
        monkeypatch.setattr(name, refuse)
    from_sb3(SAMPLES / "ppo_cartpole")  # without the ending
    assert "stable_baselines3" not in sys.modules


# What is refused.

Change = Callable[[dict[str, Any], dict[str, bytes]], Any]


def changed(tmp_path: Path, name: str, change: Change) -> Path:
    """Return a copy of a sample with other entries."""
    with zipfile.ZipFile(SAMPLES / f"{name}.zip") as archive:
        entries = {entry: archive.read(entry) for entry in archive.namelist()}
    data = json.loads(entries["data"])
    change(data, entries)
    entries = {"data": json.dumps(data).encode(), **{key: value for key, value in entries.items() if key != "data"}}
    with zipfile.ZipFile(tmp_path / "changed.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, content in entries.items():
            archive.writestr(entry, content)
    return tmp_path / "changed.zip"


def with_weights(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Return a change of the weights of the policy."""

    def of_entries(data: dict[str, Any], entries: dict[str, bytes]) -> None:
        weights = torch.load(io.BytesIO(entries["policy.pth"]), weights_only=True)
        found = change(weights)
        torch.save(weights if found is None else found, packed := io.BytesIO())
        entries["policy.pth"] = packed.getvalue()

    return of_entries


def with_policy_kwargs(**kwargs: Any) -> Change:
    return lambda data, entries: data["policy_kwargs"].update(kwargs)


class Runs:
    """Unpickling it would raise."""

    def __reduce__(self) -> Any:
        return (exec, ("raise AssertionError('code of the file ran')",))


REFUSED: dict[str, tuple[str, Change, str]] = {
    "other policies": (
        "ppo_cartpole",
        lambda data, entries: data["policy_class"].update(__module__="sb3_contrib.qrdqn.policies"),
        r"policy_class is of the module 'sb3_contrib.qrdqn.policies'. Only the default MlpPolicy",
    ),
    "a features extractor": (
        "ppo_cartpole",
        with_policy_kwargs(features_extractor_class="<class '__main__.Mine'>"),
        "features_extractor_class=\"<class '__main__.Mine'>\" of the policy is not plain",
    ),
    "gSDE": (
        "sac_pendulum",
        lambda data, entries: data.update(use_sde=True),
        "use_sde=True of the policy is not plain",
    ),
    "settings of custom policies": ("ppo_cartpole", with_policy_kwargs(depth=3), "depth=3 of the policy is not plain"),
    "functions as activations": (
        "td3_pendulum",
        with_policy_kwargs(activation_fn="<function <lambda> at 0x7f>"),
        "activation_fn=<function <lambda> at 0x7f> is none of tanh, relu",
    ),
    "other layers": (
        "ppo_cartpole",
        with_weights(lambda weights: weights.update({"features_extractor.cnn.0.weight": torch.zeros(2, 2)})),
        "it has weights features_extractor.cnn.0.weight, which no MlpPolicy has",
    ),
    "layers that are missing": (
        "dqn_cartpole",
        with_weights(lambda weights: {key: weights[key] for key in weights if key != "q_net_target.q_net.4.bias"}),
        "q_net_target.q_net.4.bias is missing in its weights",
    ),
    "other widths of the values": (
        "ppo_cartpole",
        with_weights(
            lambda weights: [weights.pop(f"mlp_extractor.value_net.2.{part}") for part in ("weight", "bias")] and None
        ),
        r"net_arch gives the policy the hidden layers \[8, 6\] and the values \[8\]",
    ),
    "three critics": (
        "sac_pendulum",
        with_weights(
            lambda weights: weights.update(
                {key.replace("qf1", "qf2"): value for key, value in weights.items() if "qf1" in key}
            )
        ),
        "SAC has 3 critics",
    ),
    "widths that do not fit the space": (
        "ppo_cartpole",
        lambda data, entries: data["action_space"].update(n="3"),
        r"changed.zip: its weights do not fit observations Box.* and actions Discrete\(3\): .*policy_head.weight",
    ),
    "layers of another rank": (
        "ppo_cartpole",
        with_weights(lambda weights: weights.update({"action_net.weight": torch.zeros(2, 2, 2)})),
        "its weights do not fit observations .*policy_head.weight",
    ),
    "no policy": ("ppo_cartpole", lambda data, entries: entries.pop("policy.pth"), "it has no policy.pth"),
    "no temperature": (
        "sac_pendulum",
        lambda data, entries: entries.pop("pytorch_variables.pth"),
        "log_ent_coef is missing in its weights",
    ),
    "a pickle in place of weights": (
        "ppo_cartpole",
        with_weights(lambda weights: {"action_net.weight": Runs()}),
        "policy.pth is not read as weights: UnpicklingError: Weights only load failed",
    ),
    "a whole network in place of weights": (
        "ppo_cartpole",
        with_weights(lambda weights: nn.Linear(2, 2)),
        "policy.pth is not read as weights: UnpicklingError",
    ),
    "other things than tensors": (
        "ppo_cartpole",
        with_weights(lambda weights: {"action_net.weight": [1.0]}),
        "policy.pth is not read as weights: AttributeError",
    ),
    "weights that are larger than the file": (
        "ppo_cartpole",
        with_weights(lambda weights: weights.update({"action_net.weight": torch.zeros(1).expand(10**6, 10**6)})),
        "policy.pth is not read as weights: ValueError: its tensors have 4000000.* bytes, more than the 1073741824",
    ),
    "damaged weights": (
        "ppo_cartpole",
        lambda data, entries: entries.update({"policy.pth": entries["policy.pth"][:-300]}),
        "policy.pth is not read as weights: BadZipFile",
    ),
    "images": (
        "ppo_cartpole",
        lambda data, entries: data["observation_space"].update(
            {"_shape": [9, 9, 3], "dtype": "uint8", "low_repr": "0", "high_repr": "255"}
        ),
        r"its observations are images \[9, 9, 3\]",
    ),
    "small images": (
        "ppo_cartpole",
        lambda data, entries: data["observation_space"].update({"_shape": [2, 2, 1], "dtype": "uint8"}),
        r"its observations are images \[2, 2, 1\]",
    ),
    "large images of floats": (
        "ppo_cartpole",
        lambda data, entries: data["observation_space"].update(
            {"_shape": [9, 9, 3], "low_repr": "0", "high_repr": "1"}
        ),
        r"its weights do not fit observations Box\(0.0, 1.0, \(9, 9, 3\), float32\)",
    ),
    "observations in parts": (
        "ppo_cartpole",
        lambda data, entries: data["observation_space"].update({":type:": "<class 'gymnasium.spaces.dict.Dict'>"}),
        "its observations are nested, in a Dict",
    ),
    "bounds that are cut short": (
        "ppo_lopsided",
        lambda data, entries: data["action_space"].update(low="[-1. ... 0.1]"),
        r"the text of action_space does not say what it is .*give it, from_sb3\(path, action_space=env.action_space\)",
    ),
    "bounds that are rounded": (
        "ppo_lopsided",
        lambda data, entries: data["action_space"].update(high="[3.         0.00123457]"),
        "the text of action_space does not say what it is .*the bound 0.00123457 is rounded",
    ),
    "spaces that are too large": (
        "ppo_cartpole",
        lambda data, entries: data["observation_space"].update({"_shape": [10**12], "low_repr": "0", "high_repr": "1"}),
        "the text of observation_space does not say what it is",
    ),
    "numbers that are too large": (
        "ppo_lopsided",
        lambda data, entries: data["action_space"].update(high="[3.00000000e+999999999 1.]"),
        "the text of action_space does not say what it is",
    ),
    "actions that begin at another number": (
        "ppo_cartpole",
        lambda data, entries: data["action_space"].update(start="3"),
        r"action_space is Discrete\(2, start=3\), .* leaves start out.*action_space=gymnasium.spaces.Discrete\(2\)",
    ),
    "parts of actions that begin at another number": (
        "a2c_multi_discrete",
        lambda data, entries: data["action_space"].update(start="[0 1]"),
        r"leaves start out.*action_space=gymnasium.spaces.MultiDiscrete\(\[3, 4\]\)",
    ),
    "observations that begin at another number": (
        "a2c_multi_discrete",
        lambda data, entries: data["observation_space"].update(start="1"),
        r"observation_space is Discrete\(5, start=1\), .* leaves start out",
    ),
}


READ = [
    ("ppo_cartpole", "policy_class"),
    *(("ppo_cartpole", name) for name in ("policy_kwargs", "use_sde", "_last_original_obs", "gamma")),
    *(("ppo_cartpole", f"observation_space {name}") for name in (":type:", "dtype", "_shape", "low", "high")),
    *(("ppo_lopsided", f"action_space {name}") for name in ("low", "high", "low_repr", "high_repr", "_shape", "dtype")),
    *(("ppo_cartpole", f"action_space {name}") for name in ("", ":type:", "n", "start", "dtype", "_shape")),
    *(("a2c_multi_discrete", f"action_space {name}") for name in ("nvec", "start", "_shape", "dtype")),
    *(("a2c_multi_binary", f"action_space {name}") for name in ("n", "_shape", "dtype")),
    *(("sac_fixed_alpha", name) for name in ("ent_coef", "gamma", "observation_space ")),
]
"""Each attribute that is read, of a sample and of its spaces."""


@pytest.mark.parametrize(("name", "place"), READ)
def test_an_attribute_that_is_null_or_missing_is_not_needed_or_named(name: str, place: str, tmp_path: Path) -> None:
    group, _, key = place.partition(" ")

    def with_value(value: Any, data: dict[str, Any], entries: dict[str, bytes]) -> None:
        holder, last = (data[group], key) if key else (data, group)
        holder.pop(last, None)
        if value is not Ellipsis:
            holder[last] = value

    for value in (..., None, [], {}, "text", [1, "x"], float("nan")):
        path = changed(tmp_path, name, partial(with_value, value))
        try:
            actions = from_sb3(path).policy.batch(computed(name)["obs"])
        except CheckpointError as error:
            assert str(error).startswith(str(path)) and group.removesuffix("_space") in str(error), error
            assert re.search(
                r"give (it|them)[,:] from_sb3|save the model again|Only the default MlpPolicy", str(error)
            ), error
        else:
            assert np.allclose(actions, computed(name)["actions"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_plain_is_refused_by_its_name(case: str, tmp_path: Path) -> None:
    name, change, message = REFUSED[case]
    path = changed(tmp_path, name, change)
    with pytest.raises(CheckpointError, match=message) as refused:
        from_sb3(path)
    assert str(refused.value).startswith(str(path))


def test_files_that_are_no_models_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="nowhere: there is no such file"):
        from_sb3(tmp_path / "nowhere")
    whole = (SAMPLES / "ppo_cartpole.zip").read_bytes()
    file = tmp_path / "model.zip"
    middle = whole.index(b"data") + 1000  # in the compressed JSON
    changed_inside = whole[:middle] + b"????" + whole[middle + 4 :]
    for content in (b"", b"text", whole[: len(whole) // 2], changed_inside):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model.zip is damaged, or no model \(.*\): save the model again"):
            from_sb3(file)
    for content in (b"{", b"[" * 200_000, b"[]", b"{}"):
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("data", content)
        with pytest.raises(CheckpointError, match=r"model.zip is damaged, or no model \(.*\): save the model again"):
            from_sb3(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("other", "text")
    with pytest.raises(
        CheckpointError, match=r"model.zip: it has no data, so that it is no model of Stable-Baselines3"
    ):
        from_sb3(file)
    monkeypatch.setattr(sb3_files, "MAX_JSON_BYTES", 100)
    with pytest.raises(CheckpointError, match=r"data has \d+ bytes, more than the 100 that are read"):
        from_sb3(SAMPLES / "ppo_cartpole.zip")
    monkeypatch.undo()
    monkeypatch.setattr(sb3_files, "MAX_WEIGHTS_BYTES", 100)
    with pytest.raises(CheckpointError, match=r"policy.pth has \d+ bytes, more than the 100 that are read"):
        from_sb3(SAMPLES / "ppo_cartpole.zip")


def test_weights_that_unpack_to_more_than_the_limit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pack(data: dict[str, Any], entries: dict[str, bytes]) -> None:
        with zipfile.ZipFile(packed := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data/0", bytes(200_000))
        entries["policy.pth"] = packed.getvalue()

    path = changed(tmp_path, "ppo_cartpole", pack)
    monkeypatch.setattr(sb3_files, "MAX_WEIGHTS_BYTES", 100_000)
    with pytest.raises(CheckpointError, match="it unpacks to 200000 bytes, more than the 100000 that are read"):
        from_sb3(path)


def test_spaces_may_be_given(tmp_path: Path) -> None:
    path = changed(tmp_path, "ppo_lopsided", lambda data, entries: data["action_space"].update(low="[-1. ... 0.1]"))
    low, high = np.array([-1, 0.1], np.float32), np.array([3, 0.7], np.float32)
    policy = from_sb3(path, action_space=spaces.Box(low, high)).policy
    found = computed("ppo_lopsided")
    assert np.allclose(policy.batch(found["obs"]), found["actions"], rtol=0, atol=1e-5)
    with pytest.raises(CheckpointError, match=r"actions Discrete\(2\): .*log_std"):
        from_sb3(path, action_space=spaces.Discrete(2))


def test_normalized_observations_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from_sb3(SAMPLES / "ppo_cartpole.zip")
    assert not caplog.records
    array = {":type:": "<class 'numpy.ndarray'>", ":serialized:": ""}
    from_sb3(changed(tmp_path, "ppo_cartpole", lambda data, entries: data.update(_last_original_obs=array)))
    assert "changed.zip was trained with VecNormalize, whose statistics are in a file of their own" in caplog.text
