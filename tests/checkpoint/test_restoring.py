"""An algorithm continues from its checkpoint as if it had never stopped; only its envs begin again."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import warm
from corral import DQN, PPO, Algorithm, Callback, DQNConfig, PPOConfig
from corral.algorithms.checkpoint_settings import unnamed
from corral.core.ids import DEFAULT_MODULE_ID
from corral.envs.torch_envs import TorchCartPole
from corral.errors import CallbackError, CheckpointError, ConfigError
from corral.learners.settings import UpdateSettings
from corral.modules.module import ActorCritic
from corral.runs.checkpoint import read_checkpoint, write_checkpoint
from corral.testing import CountingEnv, IdentityEnv
from user_files import MY_ALGO, SMALL, write_my_algo

LR = [[0, 1e-2], [10_000, 0.0]]


def config(**settings: Any) -> PPOConfig:
    config = PPOConfig().environment(IdentityEnv).env_runners(num_envs_per_env_runner=4)
    config.training(train_batch_size_per_learner=128, minibatch_size=32, num_epochs=2, lr=LR)
    return config.debugging(seed=0).copy(**settings)


def batch() -> dict[str, Any]:
    """A batch of PPO's, the same each time."""
    rng = np.random.default_rng(5)
    dist_inputs = np.zeros((64, 4), np.float32)
    return {
        "obs": rng.integers(4, size=64),
        "actions": rng.integers(4, size=64),
        "logp": np.full(64, np.log(0.25), np.float32),
        "dist_inputs": dist_inputs,
        **{name: rng.normal(size=64).astype(np.float32) for name in ("values", "advantages", "value_targets")},
    }


def step(algo: Any) -> dict[str, float]:
    """Take gradient steps on the same batch in the same order of draws, and return their metrics."""
    results: dict[str, dict[str, float]] = algo.learner_group.update(
        {DEFAULT_MODULE_ID: batch()},
        {
            DEFAULT_MODULE_ID: UpdateSettings(
                lr=1e-3,
                num_epochs=2,
                minibatch_size=16,
                grad_clip=algo.config.grad_clip,
                coefficients={"kl_coeff": 0.1, "entropy_coeff": 0.01, "clip_param": 0.2},
            )
        },
    )
    return results[DEFAULT_MODULE_ID]


def weights(algo: Any) -> dict[str, Any]:
    return {name: value.clone() for name, value in algo.get_module().state_dict().items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "rmsprop", "sgd", torch.optim.NAdam])
def test_the_next_gradient_step_is_the_same_to_the_bit(optimizer: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizer": optimizer}
    if optimizer == "sgd":
        settings["optimizer_config"] = {"momentum": 0.9}
    with config(**settings).build() as algo:
        for _ in range(3):
            algo.train()
        path = algo.save(tmp_path / "checkpoint")
        before = weights(algo)
        metrics = step(algo)
        after = weights(algo)
    with config(**settings, seed=1).build() as other:
        other.train()  # it has moments, draws and weights of its own by now
        other.restore_from_path(path)
        assert same(weights(other), before)
        assert step(other) == metrics
        assert same(weights(other), after)
    with config(**settings, seed=1).build() as other:
        assert not same(weights(other), before)
        other.get_module().load_state_dict(before)
        step(other)
        assert not same(weights(other), after)  # the weights alone do not do it


@pytest.mark.slow
def test_a_new_process_continues_with_counters_schedules_and_windows(tmp_path: Path) -> None:
    with config(kl_coeff=0.2, kl_target=1e-6).build() as algo:
        results = [algo.train() for _ in range(4)]
        path = algo.save(tmp_path / "checkpoint")
    code = (
        "import json, sys; from corral import PPO; algo = PPO.from_checkpoint(sys.argv[1]); result = algo.train();"
        "algo.stop(); result.pop('config'); print(json.dumps(result))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    result, last = json.loads(done.stdout), results[-1]
    assert result["training_iteration"] == 5
    steps = result["num_env_steps_sampled_lifetime"]
    assert steps == last["num_env_steps_sampled_lifetime"] + result["env_runners"]["num_env_steps_sampled"]
    assert result["env_runners"]["num_env_steps_sampled_lifetime"] == steps
    episodes = last["env_runners"]["num_episodes_lifetime"] + result["env_runners"]["num_episodes"]
    assert result["env_runners"]["num_episodes_lifetime"] == episodes
    assert result["time_total_s"] > last["time_total_s"]
    learner = result["learners"][DEFAULT_MODULE_ID]
    assert learner["default_optimizer_learning_rate"] == pytest.approx(1e-2 * (1 - steps / 10_000))
    # The divergence lies far above its target: the coefficient doubles with each iteration.
    assert learner["curr_kl_coeff"] == 0.2 * 2**4
    assert result["learners"].keys() == last["learners"].keys() and result.keys() == last.keys() - {"config"}


def test_steps_of_an_iteration_that_an_exception_ended_are_where_its_weights_are(tmp_path: Path) -> None:
    samples_left = [3]  # the first iteration takes two samples, and the second one fails after its first

    def fail(samples: Any) -> None:
        samples_left[0] -= 1
        if samples_left[0] < 0:
            samples_left[0] = 100
            raise ValueError("enough")

    def num_trained(algo: Any) -> float:
        trained: float = algo.train()["learners"]["__all_modules__"]["num_env_steps_trained_lifetime"]
        return trained

    made = config(min_sample_timesteps_per_iteration=256).callbacks(on_sample_end=fail)
    with made.build() as algo:
        assert num_trained(algo) == 2 * 256  # two epochs of two batches
        before = algo.save(tmp_path / "before")
        with pytest.raises(CallbackError, match="enough"):
            algo.train()
        amid = algo.save(tmp_path / "amid")
        for path, num_batches in ((before, 4), (amid, 5)):
            algo.restore_from_path(path)
            assert num_trained(algo) == num_batches * 256


def test_windows_hold_the_episodes_of_before(tmp_path: Path) -> None:
    settings = {"env": CountingEnv, "env_config": {"episode_length": 4}}
    with config(**settings).build() as algo:
        algo.train()
        path = algo.save(tmp_path / "checkpoint")
    longer = {"env": CountingEnv, "env_config": {"episode_length": 8}}
    with config(**longer).build() as other:
        other.restore_from_path(path)
        # 1 + 2 + 3 + 4 of the episodes before, 36 of the new ones.
        result = other.train()["env_runners"]
    assert result["episode_return_min"] == 10 and result["episode_return_max"] == 36


def test_learning_continues_where_it_was(tmp_path: Path) -> None:
    with config(lr=3e-3, gamma=0.0).build() as algo:
        returns = [algo.train()["env_runners"]["episode_return_mean"] for _ in range(30)]
        path = algo.save(tmp_path / "checkpoint")
    assert returns[-1] > 14
    with PPO.from_checkpoint(path) as other:
        other.metrics.reset()  # what the next iterations show is theirs alone
        later = [other.train()["env_runners"]["episode_return_mean"] for _ in range(3)]
    assert min(later) > 14


@pytest.mark.parametrize("num_env_runners", [0, 2])
def test_runners_and_actions_get_the_weights(num_env_runners: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_env_runners": num_env_runners, "engine_name": "local"}
    obs = np.arange(4)
    with config(**settings).build() as algo:
        path = algo.save(tmp_path / "untrained")  # of version 0, as the version of the other one
        untrained, actions = weights(algo), algo.compute_actions(obs, explore=False)
    with config(**settings, seed=1).build() as other:
        other.compute_actions(obs, explore=False)
        other.restore_from_path(path)
        assert np.array_equal(other.compute_actions(obs, explore=False), actions)
        found = other.env_runner_group.foreach_env_runner(lambda runner: runner.module.state_dict())
        assert len(found) == max(1, num_env_runners)
        assert all(same(dict(state), untrained) for state in found)


class Noting(Callback):
    notes: list[tuple[int, float]]

    def __init__(self) -> None:
        self.notes = []

    def on_checkpoint_loaded(self, *, algorithm: Any, **kwargs: Any) -> None:
        weight = next(iter(algorithm.env_runner.module.state_dict().values()))
        self.notes.append((algorithm.training_iteration, float(weight.sum())))


def test_on_checkpoint_loaded_sees_the_restored_algorithm(tmp_path: Path) -> None:
    with config().build() as algo:
        algo.train()
        path = algo.save(tmp_path / "checkpoint")
        total = float(next(iter(algo.get_module().state_dict().values())).sum())
    callback = Noting()
    with config(seed=1).callbacks(callback).build() as other:
        assert callback.notes == []
        other.restore_from_path(path)
    assert callback.notes == [(1, total)]


def test_the_state_is_a_copy() -> None:
    with config().build() as algo:
        state = algo.get_state()
        before = json.dumps(state["metrics"], default=repr), weights(algo)
        algo.train()
        algo.set_state(state)
        assert same(weights(algo), before[1])
        assert json.dumps(algo.get_state()["metrics"]["keys"]) == json.dumps(state["metrics"]["keys"])
        assert algo.training_iteration == 0 and algo.num_env_steps_sampled_lifetime == 0


def test_a_default_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with config().build() as algo:
        algo.train()
        path = algo.save()
    assert path.parent == tmp_path / "checkpoints" and path.name.startswith("PPO-IdentityEnv-")
    assert path.name.endswith("-1")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_config": {"fcnet_hiddens": [8]}}, r"learners/default_policy: the weights do not fit.*model_config"),
        (
            {"env": CountingEnv},
            r"weights do not fit the module: .* is \[.*\] float32 in the state and \[.*\] float32 here",
        ),
        ({"optimizer": "sgd"}, r"the state was saved by Adam on parameters of shapes .*, and here is SGD"),
    ],
)
def test_what_does_not_fit_changes_nothing(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with config().build() as algo:
        algo.train()
        path = algo.save(tmp_path / "checkpoint")
    with config(**settings).build() as other:
        before = weights(other)
        with pytest.raises(CheckpointError, match=message):
            other.restore_from_path(path)
        assert same(weights(other), before) and other.training_iteration == 0
        other.train()


@pytest.mark.parametrize("env", ["CartPole-v1", "Acrobot-v1", TorchCartPole], ids=["native", "sub-envs", "tensors"])
@pytest.mark.parametrize("num_envs", [2, 8])
@pytest.mark.parametrize(
    "given",
    [{}, {"model_config": {"use_lstm": True}}, {"batch_mode": "complete_episodes"}],
    ids=["plain", "memory", "whole"],
)
def test_a_run_continues_with_another_number_of_sub_envs(
    env: Any, num_envs: int, given: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The learning continues exactly, and the episodes restart."""
    with config(env=env, num_epochs=1, **given).build() as algo:
        algo.train()
        algo.save(tmp_path / "it")
        num_steps, expected = algo.num_env_steps_sampled_lifetime, algo.learner_group.get_state()
    with PPO.from_checkpoint(tmp_path / "it", num_envs_per_env_runner=num_envs) as other:
        found = other.learner_group.get_state()
        result = other.train()
    for state in (found, expected):
        del state["by_learner"][0]["metrics"]  # which measure times
    np.testing.assert_equal(found, expected)
    assert f"sub-envs 0 to {num_envs - 1}: 4 sub-envs were saved, and here are {num_envs}" in caplog.text
    restored = result["restored"]
    assert (restored["num_envs_continued"], restored["num_envs_restarted"]) == (0, num_envs)
    assert result["num_env_steps_sampled_lifetime"] >= num_steps + 120  # what a row resets is no step


@pytest.mark.parametrize("env", ["CartPole-v1", TorchCartPole], ids=["arrays", "tensors"])
def test_a_replay_buffer_of_other_sub_envs_is_refused_before_anything_changes(env: Any, tmp_path: Path) -> None:
    config = DQNConfig().environment(env).env_runners(num_envs_per_env_runner=4).debugging(seed=0)
    with config.build() as algo:
        algo.train()
        algo.save(tmp_path / "it")
    with config.copy(num_envs_per_env_runner=8).build() as other:
        other.train()
        before = weights(other)
        with pytest.raises(CheckpointError, match="4 sub-envs, and here are 8: give num_envs_per_env_runner=4"):
            other.restore_from_path(tmp_path / "it")
        assert same(before, weights(other)) and other.training_iteration == 1
        other.train()


def test_another_algorithm_is_refused(tmp_path: Path) -> None:
    with config().build() as algo:
        path = algo.save(tmp_path / "checkpoint")
    with (
        DQNConfig().environment(IdentityEnv).build() as other,
        pytest.raises(CheckpointError, match="checkpoint is a checkpoint of PPO, and this is DQN"),
    ):
        other.restore_from_path(path)
    with pytest.raises(CheckpointError, match=r"is a checkpoint of corral\.algorithms\.ppo:PPO, and DQN is neither"):
        DQN.from_checkpoint(path)


def test_a_checkpoint_without_the_class_of_the_algorithm_is_read(tmp_path: Path) -> None:
    with config().build() as algo:
        path = algo.save(tmp_path / "checkpoint")
    checkpoint = read_checkpoint(path)
    contents = {name: getattr(checkpoint, name) for name in ("state", "weights", "config", "policies", "arrays")}
    metadata = {"algo": "PPO", "training_iteration": 0}  # as another program may write it
    write_checkpoint(path, **contents, metadata=metadata)
    with PPO.from_checkpoint(path) as other:
        other.restore_from_path(path)
        assert type(other) is PPO


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


@pytest.mark.parametrize("given", [{"weight_decay": 0.25}, {}])
@pytest.mark.parametrize("scheduler", [None, halving])
@pytest.mark.parametrize("optimizer", ["adamw", torch.optim.Adafactor])
def test_settings_of_the_optimizer_that_are_given_hold(
    optimizer: Any, scheduler: Any, given: dict[str, float], tmp_path: Path
) -> None:
    def settings_of(algo: Algorithm) -> Any:
        return algo.learner_group.learner_here.torch_optimizer(DEFAULT_MODULE_ID).param_groups[0]

    settings: dict[str, Any] = {"optimizer": optimizer, "lr_scheduler": scheduler}
    settings |= {"lr": 1e-3} if scheduler else {}
    with config(**settings, optimizer_config={"weight_decay": 0.5}).build() as algo:
        algo.train()
        path = algo.save(tmp_path / "checkpoint")
    with config(**settings, optimizer_config=given).build() as other:
        expected = settings_of(other)["weight_decay"]
        other.restore_from_path(path)
        assert settings_of(other)["weight_decay"] == expected == given.get("weight_decay", expected) != 0.5
        settings_of(other)["weight_decay"] = 0.75  # by hand, in the middle of the run
        other.train()
        path = other.save(tmp_path / "changed")
    with config(**settings, optimizer_config=given).build() as last:
        last.restore_from_path(path)
        assert settings_of(last)["weight_decay"] == 0.75
        last.train()
        assert settings_of(last)["weight_decay"] == 0.75


# From the checkpoint alone.


def test_from_checkpoint_has_the_config(tmp_path: Path) -> None:
    given = config(env_config={"space": "box"}, callbacks_class=[Noting], grad_clip_by="norm", wrappers=[])
    with given.build() as algo:
        algo.train()
        path = algo.save(tmp_path / "checkpoint")
        resolved = algo.config.to_dict()
    resolved["environment"]["env"] = "corral.testing:IdentityEnv"
    with PPO.from_checkpoint(path) as other:
        assert other.config.to_dict() == resolved
        assert other.training_iteration == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"policies": {"one": {"module_class": ActorCritic}, "other": {}}},
        {
            "policies": ["one", "other"],
            "algorithm_config_overrides_per_module": {"one": {"optimizer": torch.optim.SGD}},
        },
        {"evaluation_config": {"env": CountingEnv}},
    ],
)
def test_classes_in_settings_of_parts_are_saved_by_name(settings: dict[str, Any]) -> None:
    assert unnamed(config(**settings)) == {}


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"env": lambda env_config: IdentityEnv(env_config)}, "environment.env: <function <lambda>"),
        ({"env_config": {"space": IdentityEnv({"space": "box"}).action_space}}, "environment.env_config.space: Box"),
        ({"env_config": {"made_by": IdentityEnv}}, "environment.env_config.made_by: <class"),
        ({"env_config": {"levels": {3: 0.5}}}, "environment.env_config.levels: {3: 0.5}"),  # a file has "3"
        ({"callbacks_class": [Noting()]}, "callbacks.callbacks_class.0: <"),
        ({"callback_functions": {"on_train_result": [lambda: None]}}, "on_train_result.0: <function"),
    ],
)
def test_what_no_file_can_name_needs_a_config(settings: dict[str, Any], name: str, tmp_path: Path) -> None:
    with config(**settings).build() as algo:
        algo.train()
        path = algo.save(tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match=r"build the algorithm .* and call its restore_from_path") as caught:
        PPO.from_checkpoint(path)
    assert name in str(caught.value)
    with config(**settings).build() as other:
        other.restore_from_path(path)
        assert other.training_iteration == 1


@pytest.mark.slow
def test_learners_of_an_engine(tmp_path: Path) -> None:
    with config(optimizer="sgd").build() as other:
        misfit = other.save(tmp_path / "misfit")
    with config(num_learners=2, engine_name="process").build() as algo:
        algo.train()
        path = algo.save(tmp_path / "of_two")
        before, state = weights(algo), algo.get_state()["learners"]
        assert len(state["by_learner"]) == 2
        algo.reconfigure(vf_loss_coeff=0.0, grad_clip=1e-3)
        metrics, after = step(algo), weights(algo)
        assert metrics["gradients_default_optimizer_global_norm"] > 1e-3
        algo.train()
        with pytest.raises(CheckpointError, match="here is Adam on"):
            algo.restore_from_path(misfit)
        algo.restore_from_path(path)
        assert same(weights(algo), before)
        assert step(algo) == metrics and same(weights(algo), after)
        # One learner continues from the state of two, and two continue from the state of one.
        with config(seed=1).build() as single:
            single.restore_from_path(path)
            assert same(weights(single), before)
            assert repr(single.get_state()["learners"]["optimizers"]) == repr(state["optimizers"])
            single.train()
            path = single.save(tmp_path / "of_one")
            before = weights(single)
        algo.restore_from_path(path)
        assert same(weights(algo), before)
        assert algo.train()["training_iteration"] == 3


# Algorithms in files of users.


def python(code: str, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return warm.run([sys.executable, "-c", code, *arguments], cwd=cwd)


@pytest.mark.slow
def test_a_users_algorithm_is_restored_in_a_new_process(tmp_path: Path) -> None:
    write_my_algo(tmp_path)
    train = f"""
from my_algo import MyConfig
from corral.testing import IdentityEnv
config = MyConfig().environment(IdentityEnv).training(bonus=0.25, **{SMALL}).debugging(seed=0)
with config.build() as algo:
    for _ in range(2):
        algo.train()
    algo.save("saved")
"""
    assert python(train, tmp_path).stderr == ""
    metadata = json.loads((tmp_path / "saved" / "metadata.json").read_text())
    assert (metadata["algo"], metadata["algorithm_class"]) == ("my_algo:MyConfig", "my_algo:MyPPO")
    assert read_checkpoint(tmp_path / "saved").config["algo"] == "my_algo:MyConfig"
    restore = """
import sys
from corral import PPO, Algorithm
cls = {"PPO": PPO, "Algorithm": Algorithm}.get(sys.argv[1])
if cls is None:
    from my_algo import MyPPO as cls
with cls.from_checkpoint("saved") as algo:
    metrics = algo.train()["learners"]["default_policy"]
    print(type(algo).__name__, type(algo.config).__name__, metrics["bonus"], metrics["num_bonuses"])
"""
    for name in ("MyPPO", "Algorithm", "PPO"):
        done = python(restore, tmp_path, name)
        assert (done.stdout, done.stderr) == ("MyPPO MyConfig 0.25 3.0\n", "")


class Counted(PPO):
    """A user's algorithm without a config of its own."""


class Other(PPO):
    """Another one."""


def test_from_checkpoint_gives_the_class_that_it_is_called_on(tmp_path: Path) -> None:
    with config().build() as algo:
        algo.train()
        path = algo.save(tmp_path / "of_ppo")
    with Counted.from_checkpoint(path) as counted:
        assert type(counted) is Counted and type(counted.config) is PPOConfig
        assert counted.train()["training_iteration"] == 2
        of_counted = counted.save(tmp_path / "of_counted")
    for cls in (Counted, PPO, Algorithm):
        with cls.from_checkpoint(of_counted) as restored:
            assert type(restored) is Counted and restored.training_iteration == 2
    with pytest.raises(CheckpointError, match=r"is a checkpoint of .*:Counted, and Other is neither this class nor"):
        Other.from_checkpoint(of_counted)
    with config().build() as algo, pytest.raises(CheckpointError, match="checkpoint of Counted, and this is PPO"):
        algo.restore_from_path(of_counted)


def test_a_class_that_no_import_finds_is_found_by_the_call(tmp_path: Path) -> None:
    class Local(PPO):
        pass

    with Local(config()) as algo:
        path = algo.save(tmp_path / "checkpoint")
    with Local.from_checkpoint(path) as other:
        assert type(other) is Local
    with pytest.raises(ConfigError, match=r"<locals>.Local' cannot be imported"):
        PPO.from_checkpoint(path)


def test_a_config_that_no_import_finds_is_named(tmp_path: Path) -> None:
    @dataclass(kw_only=True)
    class LocalConfig(PPOConfig):
        pass

    given = LocalConfig().environment(IdentityEnv)
    with given.build() as algo:
        path = algo.save(tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match=r"\(algo: .*<locals>.LocalConfig\).* call its restore_from_path"):
        PPO.from_checkpoint(path)
    with given.build() as other:
        other.restore_from_path(path)


@pytest.mark.slow
def test_classes_of_a_script_are_found_by_the_script_only(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        MY_ALGO
        + f"""
if __name__ == "__main__":
    import sys
    from corral.testing import IdentityEnv
    if sys.argv[1] == "save":
        with MyConfig().environment(IdentityEnv).training(**{SMALL}).build() as algo:
            algo.save("saved")
    with MyPPO.from_checkpoint("saved") as algo:
        print(type(algo).__name__)
""",
        encoding="utf-8",
    )
    for what in ("save", "load"):
        done = warm.run([sys.executable, str(script), what], cwd=tmp_path)
        assert done.stdout == "MyPPO\n"
        said = r"Checkpoints .* algo \(train.py:MyConfig\) by import path: .* from another folder with .*algo=...\)\.\n"
        assert re.fullmatch(said if what == "save" else "", done.stderr)
    message = r"'train.py:MyConfig' cannot be imported: it is in the script train.py, .* Move the class .* of its own"
    with pytest.raises(ConfigError, match=message):
        Algorithm.from_checkpoint(tmp_path / "saved")


IN_THE_SCRIPT = """
import sys
import torch
from corral import Algorithm, PPOConfig
from corral.testing import CountingEnv

class MyEnv(CountingEnv):
    pass

class MyAdam(torch.optim.Adam):
    pass

if sys.argv[1] == "save":
    config = PPOConfig().environment(MyEnv).training(optimizer=MyAdam, **{SMALL})
    with config.env_runners(num_env_runners=1).engine("process").build() as algo:
        algo.save("saved")
else:
    with Algorithm.from_checkpoint("saved") as algo:
        algo.train()
        print(algo.env_runner_group.foreach_env(lambda env: type(env).__name__)[0][0])
"""


@pytest.mark.slow
def test_an_env_of_a_script_is_never_named_by_main(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(IN_THE_SCRIPT.replace("{SMALL}", str(SMALL)), encoding="utf-8")
    for started, name in (([str(script)], "train.py:MyEnv"), (["-m", "train"], "train:MyEnv")):
        path = tmp_path / "saved"
        shutil.rmtree(path, ignore_errors=True)
        for what, shown in (("save", ""), ("load", "MyEnv\n")):
            run = [sys.executable, *started, what]
            done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
            assert (done.returncode, done.stdout) == (0, shown), done.stderr
        assert not [file for file in path.rglob("*") if file.is_file() and b"__main__" in file.read_bytes()]
        assert read_checkpoint(path).config["environment"]["env"] == name
        if name == "train.py:MyEnv":
            with pytest.raises(ConfigError, match=r"env 'train.py:MyEnv' cannot .* Move .* call its restore_from"):
                Algorithm.from_checkpoint(path)


@pytest.mark.slow
def test_without_a_script_no_file_can_name_a_class(tmp_path: Path) -> None:
    code = IN_THE_SCRIPT.replace("{SMALL}", str(SMALL))
    subprocess.run([sys.executable, "-c", code, "save"], cwd=tmp_path, check=True)
    with pytest.raises(ConfigError, match=r"that no file can name \(environment.env: .*MyEnv.* restore_from_path"):
        Algorithm.from_checkpoint(tmp_path / "saved")
