"""Building an algorithm from a checkpoint: what is given again, and what a checkpoint cannot make it call."""

from __future__ import annotations

import json
import logging
import pickle
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from forging import data, forge

from corral import PPO, SAC, Algorithm, Callback, PPOConfig, SACConfig
from corral.algorithms.checkpoint_settings import unnamed
from corral.core.settings import main_name, path_of, set_sender
from corral.errors import CheckpointError, ConfigError
from corral.runs.checkpoint import read_checkpoint, write_checkpoint
from corral.runs.checkpoint.imports import check_import
from corral.testing import CountingEnv, IdentityEnv
from small import small


class Noting(Callback):
    """Keeps what it was given."""

    def __init__(self) -> None:
        self.iterations: list[int] = []

    def on_train_result(self, *, result: Any, **kwargs: Any) -> None:
        self.iterations.append(result["training_iteration"])


class Made(CountingEnv):
    """An env that counts how often it is made."""

    num_made = 0

    def __init__(self, config: Any = None) -> None:
        type(self).num_made += 1
        super().__init__(config)


def make_env(size: int = 4) -> gym.Env[Any, Any]:
    """A function that makes an env."""
    return CountingEnv({"episode_length": size})


def test_another_seed_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The generators continue, so that runs from one checkpoint with several seeds would be the same."""
    with small().build() as algo:
        path = algo.save(tmp_path / "checkpoint")
    PPO.from_checkpoint(path, seed=0, lr=1e-4).stop()
    assert not caplog.messages
    PPO.from_checkpoint(path, seed=7).stop()
    assert caplog.messages == [
        "seed=7 has no effect: it only sets how a run begins, and this run continues from a checkpoint."
    ]
    with SACConfig().environment(IdentityEnv).build() as algo:
        path = algo.save(tmp_path / "sac")
    SAC.from_checkpoint(path, initial_alpha=3.0).stop()
    assert "initial_alpha=3.0 has no effect: it only sets how a run begins" in caplog.text


@pytest.mark.parametrize("kl_coeff", [0.2, 5.0])
def test_a_coefficient_that_is_given_again_is_not_hidden_by_the_adaptive_one(kl_coeff: float, tmp_path: Path) -> None:
    with small(kl_coeff=0.2, kl_target=1e-6, lr=0.01).build() as algo:
        before = [algo.train()["learners"]["default_policy"]["curr_kl_coeff"] for _ in range(3)]
        path = algo.save(tmp_path / "checkpoint")
    assert before[0] == 0.2 and before[2] > 0.2
    with PPO.from_checkpoint(path, kl_coeff=kl_coeff) as algo:
        found = algo.train()["learners"]["default_policy"]["curr_kl_coeff"]
    assert found == (5.0 if kl_coeff == 5 else before[2] * 2)


# What is given again.


def test_settings_without_import_path_are_warned_of_once_and_given_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = small(env=lambda env_config: CountingEnv(env_config), num_env_runners=1, engine_name="local")
    with given.callbacks(Noting()).build() as algo, caplog.at_level(logging.WARNING, "corral"):
        algo.train()
        path = algo.save(tmp_path / "checkpoint")
        algo.save(path)
    [said] = [record.getMessage() for record in caplog.records]
    for part in ("environment.env (<function", "callbacks.callbacks_class.0 (<", "from_checkpoint(path, env=...,"):
        assert part in said
    unnamed = read_checkpoint(path).metadata["unnamed"]
    assert list(unnamed) == ["environment.env", "callbacks.callbacks_class.0"]
    with pytest.raises(ConfigError, match=r"with from_checkpoint\(path, env=\.\.\., callbacks_class=\.\.\.\)"):
        PPO.from_checkpoint(path)
    with pytest.raises(ConfigError, match=r"with from_checkpoint\(path, callbacks_class=\.\.\.\)"):
        PPO.from_checkpoint(path, env=CountingEnv)
    callback = Noting()
    with PPO.from_checkpoint(path, env=CountingEnv, callbacks_class=callback, num_env_runners=0) as other:
        assert other.env_runner is not None and other.config.env is CountingEnv
        assert other.train()["training_iteration"] == 2
    assert callback.iterations == [2]


def test_any_setting_replaces_the_saved_one(tmp_path: Path) -> None:
    seen: list[int] = []
    with small(env_config={"episode_length": 4}).callbacks(Noting).build() as algo:
        path = algo.save(tmp_path / "checkpoint")
    with PPO.from_checkpoint(
        path,
        lr=5e-4,
        env_config={"episode_length": 8},
        callbacks_class=None,
        callback_functions={"on_train_result": lambda result: seen.append(result["training_iteration"])},
    ) as other:
        assert other.config.lr == 5e-4 and other.config.callbacks_class == []
        assert other.train()["env_runners"]["episode_len_mean"] == 8
    assert seen == [1]


def test_an_unknown_or_wrong_setting_is_an_error_before_anything_is_built(tmp_path: Path) -> None:
    with small().build() as algo:
        path = algo.save(tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match=r"from_checkpoint: unknown setting 'num_env_runer'.*'num_env_runners'"):
        PPO.from_checkpoint(path, num_env_runer=0)
    with pytest.raises(ConfigError, match="num_env_runners='many' must be an integer"):
        PPO.from_checkpoint(path, num_env_runners="many")


def test_a_setting_that_is_given_is_not_imported_from_the_checkpoint(tmp_path: Path) -> None:
    path = hostile(tmp_path, {"environment": {"env": "no_such_package:Env"}})
    with pytest.raises(ConfigError, match="no_such_package"):
        PPO.from_checkpoint(path)
    with PPO.from_checkpoint(path, env=CountingEnv) as algo:
        assert algo.config.env is CountingEnv


def test_a_function_of_a_module_with_envs_makes_them(tmp_path: Path) -> None:
    with small(env=make_env, env_config={"size": 6}).build() as algo:
        path = algo.save(tmp_path / "checkpoint")
    with PPO.from_checkpoint(path) as other:
        assert other.train()["env_runners"]["episode_len_mean"] == 6


def test_a_class_of_exploration_is_found_by_its_import_path(tmp_path: Path) -> None:
    from corral.exploration.base import StochasticSampling

    with small(exploration_config={"type": StochasticSampling}).build() as algo:
        path = algo.save(tmp_path / "checkpoint")
    with PPO.from_checkpoint(path) as other:
        assert type(other.exploration) is StochasticSampling


# What a checkpoint cannot make it call.


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a small algorithm."""
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    with small().build() as algo:
        algo.save(path)
    return path


def hostile(directory: Path, changes: dict[str, Any], metadata: dict[str, Any] | None = None) -> Path:
    """Write a checkpoint with changed settings."""
    path = directory / "checkpoint"
    if not (path / "metadata.json").exists():
        with small().build() as algo:
            algo.save(path)
    found = read_checkpoint(path)
    settings = {
        group: {**values, **changes.get(group, {})} if isinstance(values, dict) else changes.get(group, values)
        for group, values in found.config.items()
    }
    contents = {name: getattr(found, name) for name in ("state", "weights", "policies", "arrays")}
    write_checkpoint(path, **contents, config=settings, metadata={**found.metadata, **(metadata or {})})
    return path


class Harm:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


TOUCH = "touch harm"
ENVS: list[tuple[str, dict[str, Any]]] = [
    ("os:system", {"command": TOUCH}),
    ("posix:system", {"command": TOUCH}),
    ("subprocess:Popen", {"args": ["touch", "harm"]}),
    ("subprocess:getoutput", {"cmd": TOUCH}),
    ("builtins:eval", {"source": "open('harm', 'w')"}),
    ("builtins:exec", {"source": "open('harm', 'w')"}),
    ("builtins:open", {"file": "harm", "mode": "w"}),
    ("pickle:load", {"file": "evil"}),
    ("logging.config:dictConfig", {"config": {}}),
    ("__main__:eval", {"source": "1"}),
    ("numpy:os.system", {"command": TOUCH}),
    ("numpy:load", {"file": "evil.npy", "allow_pickle": True}),
    ("torch:load", {"f": "evil.npy", "weights_only": False}),
    ("torch:os", {}),
    ("torch:nn", {}),
    ("torch:Tensor", {"size": 10**12}),
    ("cloudpickle:loads", {"data": "x"}),
    ("gymnasium:make", {"id": "antigravity:Env-v0"}),
    ("corral.core.settings:import_path", {"path": "antigravity:fly"}),
    ("antigravity:Env-v0", {}),
    ("this:s", {}),
    ("no_such_module:Env", {}),
    ("no\x00module:Env", {}),
    (":", {}),
    ("..:Env", {}),
]
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"env {env}": {"environment": {"env": env, "env_config": env_config}} for env, env_config in ENVS},
    "wrapper": {"environment": {"wrappers": ["os:system"]}},
    "wrapper with a dot": {"environment": {"wrappers": ["subprocess.Popen"]}},
    "class as wrapper": {"environment": {"wrappers": ["torch:Tensor"]}},
    "optimizer": {"training": {"optimizer": "subprocess:Popen", "optimizer_config": {"args": ["touch", "harm"]}}},
    "optimizer of torch": {"training": {"optimizer": "torch:load"}},
    "module": {"rl_module": {"module_class": "subprocess:Popen"}},
    "module of torch": {"rl_module": {"module_class": "torch:load"}},
    "callbacks": {"callbacks": {"callbacks_class": ["subprocess:Popen"]}},
    "callbacks of another kind": {"callbacks": {"callbacks_class": ["numpy:load"]}},
    "callback": {"callbacks": {"callback_functions": {"on_algorithm_init": ["os:system"]}}},
    "callback of another kind": {"callbacks": {"callback_functions": {"on_algorithm_init": ["numpy:load"]}}},
    "exploration": {"exploration": {"exploration_config": {"type": "subprocess:Popen", "args": ["touch", "harm"]}}},
    "exploration of another kind": {"exploration": {"exploration_config": {"type": "torch:load"}}},
    "env of evaluation": {"evaluation": {"evaluation_config": {"env": "os:system", "env_config": {"command": TOUCH}}}},
    "callbacks of evaluation": {"evaluation": {"evaluation_config": {"callbacks_class": ["subprocess:Popen"]}}},
    "tasks": {"environment": {"env_task_fn": "os:system"}},
    "resets": {"environment": {"env_reset_fn": "os:system"}},
    "resets of evaluation": {"evaluation": {"evaluation_config": {"env_reset_fn": "os:system"}}},
    "custom evaluation": {"evaluation": {"custom_evaluation_function": "os:system"}},
    "custom evaluation by its alias": {"evaluation": {"custom_eval_function": "os:system"}},
    "algo": {"algo": "subprocess:Popen"},
    "algo of another kind": {"algo": "numpy:load"},
    "unknown algo": {"algo": "nothing"},
    "algo as a number": {"algo": 7},
    "env as a number": {"environment": {"env": 7}},
    "wrappers as text": {"environment": {"wrappers": "os:system"}},
    "group as a list": {"environment": [1]},
    "unknown group": {"weather": {"rain": 1}},
    "unknown setting": {"environment": {"weather": 1}},
    "callbacks as a number": {"callbacks": {"callback_functions": 3}},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_config_cannot_make_it_call_just_anything(
    case: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("evil.npy", np.array([Harm("harm")], object), allow_pickle=True)
    Path("evil").write_bytes(pickle.dumps(Harm("harm")))
    found = read_checkpoint(saved)
    groups = {"weather": {}, **found.config} if case == "unknown group" else found.config
    changes = SETTINGS[case]
    settings = {
        group: {**values, **changes.get(group, {})}
        if isinstance(values, dict) and isinstance(changes.get(group, {}), dict)
        else changes.get(group, values)
        for group, values in groups.items()
    }
    contents = {name: getattr(found, name) for name in ("state", "weights", "policies", "arrays")}
    write_checkpoint("hostile", **contents, config=settings, metadata=found.metadata)
    before, modules = sorted(tmp_path.rglob("*")), {"antigravity", "this", "pickletools"} - sys.modules.keys()
    for cls in (PPO, Algorithm):
        with pytest.raises((CheckpointError, ConfigError), match="hostile") as caught:
            cls.from_checkpoint("hostile")
        assert len(str(caught.value).splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before
    assert not modules & sys.modules.keys()


@pytest.mark.parametrize(
    "path", ["subprocess:Popen", "os:system", "numpy:load", "torch:nn", "builtins:eval", "x", "", 7]
)
def test_the_class_of_the_algorithm_is_no_other_class(path: Any, saved: Path, tmp_path: Path) -> None:
    found = read_checkpoint(saved)
    contents = {name: getattr(found, name) for name in ("config", "state", "weights", "policies", "arrays")}
    write_checkpoint(tmp_path / "hostile", **contents, metadata={**found.metadata, "algorithm_class": path})
    for cls in (PPO, Algorithm):
        with pytest.raises((CheckpointError, ConfigError), match="hostile"):
            cls.from_checkpoint(tmp_path / "hostile")


def test_what_is_from_the_standard_library_is_refused_under_any_name(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_envs_of_today.py").write_text(
        "import gymnasium\nfrom os import system\nfrom subprocess import Popen\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, arguments in (("system", {"command": TOUCH}), ("Popen", {"args": ["touch", "harm"]})):
        path = hostile(tmp_path, {"environment": {"env": f"my_envs_of_today:{name}", "env_config": arguments}})
        with pytest.raises(CheckpointError, match="it is from Python's standard library"):
            PPO.from_checkpoint(path)
    assert not (tmp_path / "harm").exists()


def test_a_damaged_state_is_found_before_an_env_is_made(tmp_path: Path) -> None:
    with small(env=Made).build() as algo:
        path = algo.save(tmp_path / "checkpoint")
    Made.num_made = 0
    forge(path, "state.msgpack", pickle.dumps(Harm(str(tmp_path / "harm"))))
    with pytest.raises(CheckpointError, match=r"state\.msgpack is damaged"):
        PPO.from_checkpoint(path)
    assert Made.num_made == 0
    assert not (tmp_path / "harm").exists()


def test_the_env_of_a_checkpoint_may_be_the_id_of_a_package(tmp_path: Path) -> None:
    with small(env="CartPole-v1").build() as algo:
        path = algo.save(tmp_path / "checkpoint")
    with PPO.from_checkpoint(path) as other:
        assert other.config.env == "CartPole-v1"
    with PPO.from_checkpoint(hostile(tmp_path, {"environment": {"env": "gymnasium.envs:CartPole-v1"}})) as other:
        assert other.config.env == "gymnasium.envs:CartPole-v1"
    with PPO.from_checkpoint(path, env="gymnasium.envs.classic_control:CartPoleEnv") as other:
        assert other.config.env == "gymnasium.envs.classic_control:CartPoleEnv"


def test_a_checkpoint_of_an_earlier_version_loads_with_settings_that_are_refused_now(tmp_path: Path) -> None:
    with PPOConfig().environment("CartPole-v1").training(target_kl=0.1).build() as algo:
        saved = Path(algo.save(tmp_path / "saved"))
    settings = json.loads((data(saved) / "config.json").read_bytes())
    settings["training"]["num_epochs"] = 1  # so that target_kl has no effect
    settings["rl_module"]["model_config"] = {"head_activation": "relu"}
    forge(saved, "config.json", json.dumps(settings).encode())
    with PPO.from_checkpoint(saved) as restored:
        assert (restored.config.target_kl, restored.config.model_config) == (None, {})
    with pytest.raises(ConfigError, match=r"target_kl=0.2 has no effect without num_epochs above 1"):
        PPO.from_checkpoint(saved, target_kl=0.2)


def test_what_another_script_sent_is_named_by_that_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a trial of Tune, whose process is another script than the one that its checkpoints are read in."""

    class OfScript(CountingEnv): ...

    OfScript.__module__, OfScript.__qualname__ = "__main__", "OfScript"

    def local() -> None: ...

    local.__module__ = "__main__"
    assert unnamed(PPOConfig().environment(OfScript))
    monkeypatch.setattr("corral.core.settings._sender", None)  # undone at the end
    set_sender("train.py")
    config = PPOConfig().environment(OfScript)
    assert unnamed(config) == {}
    assert path_of(config.env) == "train.py:OfScript"
    assert unnamed(config.callbacks(on_train_result=local)), "what a function made is in no script"
    set_sender(main_name())
    assert unnamed(PPOConfig().environment(OfScript))


ENV_FILES = {
    "class of PettingZoo": "from pettingzoo import ParallelEnv\nclass Env(ParallelEnv): ...",
    "class without a base": "class Env:\n    def reset(self): ...\n    def step(self, action): ...",
    "module of PettingZoo": "import pettingzoo\ndef Env(): return pettingzoo.make('aec', 'classic/tictactoe_v3')",
    "module of EnvPool": "import envpool\ndef Env(): return envpool.make_gymnasium('CartPole-v1')",
    "function of Gymnasium": "from gymnasium import make\ndef Env(): return make('CartPole-v1')",
}
NO_ENV_FILES = {
    "class that only resets": "import gymnasium\nclass Env:\n    def reset(self): ...",
    "function next to no env": "import numpy\ndef Env(): return numpy.load('evil.npy')",
}


@pytest.mark.parametrize("case", [*ENV_FILES, *NO_ENV_FILES])
def test_envs_of_every_library_are_taken(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = next((name for name in ("pettingzoo", "envpool") if name in ENV_FILES.get(case, "")), "corral")
    pytest.importorskip(package)
    name = f"envs_with_a_{case.replace(' ', '_')}"
    (tmp_path / f"{name}.py").write_text({**ENV_FILES, **NO_ENV_FILES}[case], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    if case in ENV_FILES:
        check_import(f"{name}:Env", "env", "checkpoint")
    else:
        with pytest.raises(CheckpointError, match=r"it is no (class of envs|function of a module with envs)"):
            check_import(f"{name}:Env", "env", "checkpoint")


def test_the_function_of_pettingzoo_is_taken() -> None:
    pytest.importorskip("pettingzoo")
    check_import("pettingzoo:make", "env", "checkpoint")
