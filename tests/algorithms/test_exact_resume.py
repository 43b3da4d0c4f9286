"""A run that is saved, loaded in a new process and continued gives what the uninterrupted run gives, to the bit."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

import exact_runs
import warm
from exact_runs import differences, make_config, play, without_times

SAME_STEP: dict[str, Any] = {"autoreset_mode": "same_step"}
ASYNC: dict[str, Any] = {"vectorization": "async", "num_envs_per_env_runner": 2}
TWO: dict[str, Any] = {"num_env_runners": 2, "engine_name": "process"}
PRIORITIZED: dict[str, Any] = {"replay_buffer_config": {"type": "prioritized", "capacity": 500}}
NOISY: dict[str, Any] = {"exploration_config": {"type": "ParameterNoise", "random_timesteps": 20}}
# Rounds whose episodes continue in the next round; the second one comes after the checkpoint.
IN_TURN: dict[str, Any] = {
    "evaluation_interval": 2,
    "evaluation_duration": 20,
    "evaluation_duration_unit": "timesteps",
    "evaluation_force_reset_envs_before_iteration": False,
}
IN_PARALLEL: dict[str, Any] = {
    "evaluation_interval": 1,
    "evaluation_duration": 7,
    "evaluation_parallel_to_training": True,
    "evaluation_num_env_runners": 2,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("PPO", {}),
    "ppo_evaluating": ("PPO", IN_TURN),
    "ppo_lstm": ("PPO", IN_TURN | {"model_config": {"fcnet_hiddens": [8], "use_lstm": True, "max_seq_len": 5}}),
    "impala": ("IMPALA", SAME_STEP | {"broadcast_interval": 4, "use_circular_buffer": True}),
    "appo_lstm": (
        "APPO",
        IN_TURN
        | {"model_config": {"fcnet_hiddens": [8], "use_lstm": True, "max_seq_len": 5}}
        | {"use_kl_loss": True, "circular_buffer_num_batches": 3, "tau": 0.5},
    ),
    "pqn_gru": (
        "PQN",
        IN_TURN | SAME_STEP | {"model_config": {"fcnet_hiddens": [8], "use_gru": True, "max_seq_len": 5}},
    ),
    "dqn": ("DQN", PRIORITIZED | SAME_STEP),
    "sac": ("SAC", NOISY),
    "sac_discrete": ("SAC-discrete", {}),
    "td3": ("TD3", {"policy_delay": 3, "n_step": (1, 3)}),
    "dreamerv3": ("DreamerV3", IN_TURN | SAME_STEP),
}
SLOW: dict[str, tuple[str, dict[str, Any]]] = {
    f"{algo}{runners and '-two'}{mode and '-same_step'}{vector and '-async'}": (
        algo,
        (TWO if runners else {}) | (SAME_STEP if mode else {}) | (ASYNC if vector else {}),
    )
    for algo in ("PPO", "DQN", "SAC", "SAC-discrete", "TD3")
    for runners in ("", "two")
    for mode in ("", "same_step")
    for vector in ("", "async")
}
# Envs without `get_state`, with the packages that they need.
KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    name: (algo, {"env": env_id, "env_config": {}, "wrappers": [], "num_envs_per_env_runner": num_envs})
    for name, algo, env_id, num_envs in (
        ("ppo_cartpole", "PPO", "CartPole-v1", 3),  # the native vector env
        ("dqn_cartpole", "DQN", "CartPole-v1", 1),
        ("sac_pendulum", "SAC", "Pendulum-v1", 1),
        ("ppo_halfcheetah", "PPO", "HalfCheetah-v5", 2),
        ("dqn_pong", "DQN", "ALE/Pong-v5", 1),
    )
}
PACKAGES = {"ppo_halfcheetah": "mujoco", "dqn_pong": "ale_py"}
KNOWN["dqn_pong"][1]["model_config"] = {"conv_filters": [[4, 8, 8], [4, 8, 8]], "fcnet_hiddens": [8]}
CASES["ppo_cartpole"], CASES["sac_pendulum"] = KNOWN["ppo_cartpole"], KNOWN["sac_pendulum"]
SLOW["PPO-curiosity"] = ("PPO", SAME_STEP | {"exploration_config": {"type": "RND", "embed_dim": 8}})
SLOW["DQN-gru"] = (
    "DQN",
    {"burn_in_len": 2, "model_config": {"fcnet_hiddens": [8], "use_gru": True, "max_seq_len": 4}},
)
SLOW["TQC"] = ("TQC", NOISY)
SLOW["CrossQ"] = ("CrossQ", {})
SLOW["SAC-simba_v2"] = ("SAC", {"model_config": {"architecture": "simba_v2", "fcnet_hiddens": [8]}})
SLOW["TD3-simba_v2"] = ("TD3", {"model_config": {"architecture": "simba_v2", "fcnet_hiddens": [8]}})
SLOW["DQN-simba"] = ("DQN", {"model_config": {"architecture": "simba", "fcnet_hiddens": [8]}})
SLOW["TQC-shared_features"] = (
    "TQC",
    {"model_config": {"fcnet_hiddens": [8], "features_extractor": exact_runs.Features, "share_features": True}},
)
SLOW["SAC-evaluating"] = ("SAC", IN_PARALLEL)
SLOW["DDPG"] = ("DDPG", {})
SLOW["SAC-lstm"] = ("SAC", {"model_config": {"fcnet_hiddens": [8], "use_lstm": True, "max_seq_len": 4}})
SLOW["PPO-two_learners"] = ("PPO", {"num_learners": 2, "engine_name": "process"})
SLOW["APPO-two_learners"] = ("APPO", {"num_learners": 2, "engine_name": "process"})
SLOW["IMPALA-async"] = ("IMPALA", ASYNC)
SLOW["DQN-noisy"] = ("DQN", {"noisy": True})


def resume(directory: Path, names: list[str]) -> None:
    """Continue checkpoints in a new process."""
    warm.run([sys.executable, exact_runs.__file__, str(directory), *names], timeout=300).check_returncode()


def train(folder: Path, algo_name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train, save, and train on; return what happened after saving."""
    config = make_config(algo_name, **settings)
    folder.mkdir()
    (folder / "config.pickle").write_bytes(pickle.dumps(config))
    with config.build() as algo:
        play(algo)
        algo.save(folder / "saved")
        return play(algo)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """What came after saving, in the run that was never interrupted and in the one that was continued, by case."""
    directory = tmp_path_factory.mktemp("runs")
    expected = {name: train(directory / name, *case) for name, case in CASES.items()}
    resume(directory, list(CASES))
    return {name: (expected[name], pickle.loads((directory / name / "resumed.pickle").read_bytes())) for name in CASES}


@pytest.mark.xdist_group("exact")
@pytest.mark.parametrize("name", CASES)
def test_a_run_continues_exactly(name: str, runs: dict[str, tuple[Any, Any]]) -> None:
    expected, resumed = runs[name]
    assert differences(expected, resumed) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_a_run_of_any_form_continues_exactly(name: str, tmp_path: Path) -> None:
    expected = train(tmp_path / name, *SLOW[name])
    resume(tmp_path, [name])
    assert differences(expected, pickle.loads((tmp_path / name / "resumed.pickle").read_bytes())) == []


@pytest.mark.slow
@pytest.mark.parametrize("runners", ["embedded", "processes"])
@pytest.mark.parametrize("name", KNOWN)
def test_a_run_on_an_env_that_people_have_continues_exactly(name: str, runners: str, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES.get(name, "gymnasium"))
    algo_name, settings = KNOWN[name]
    expected = train(tmp_path / name, algo_name, settings | (TWO if runners == "processes" else {}))
    resume(tmp_path, [name])
    assert differences(expected, pickle.loads((tmp_path / name / "resumed.pickle").read_bytes())) == []


def test_saving_changes_nothing(tmp_path: Path) -> None:
    config = make_config("DQN")
    with config.build() as one, config.build() as other:
        for _ in range(2):
            expected = play(one)
            other.save(tmp_path / "saved")
            assert differences(expected, play(other)) == []


def test_the_comparison_can_fail() -> None:
    with make_config("PPO").build() as one, make_config("PPO", seed=4).build() as other:
        assert differences(without_times(one.train()), without_times(other.train()))
