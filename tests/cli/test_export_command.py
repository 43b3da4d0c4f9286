"""`corral export`: the file acts as the policy does, and one that does not is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from corral import Algorithm, FrameStack, PPOConfig, load_policy, make_multi_agent
from corral.modules.module import ActorCritic
from corral.tools.cli.export import _acted
from corral.tools.cli.main import main
from corral.tools.cli.parser import make_parser
from file_limits import largest_file


class OtherWhenTraced(ActorCritic):
    """A policy that torch traces as another one."""

    def policy(self, obs: Any) -> Tensor:
        outputs = super().policy(obs)
        return -outputs if torch.compiler.is_exporting() else outputs


def saved(config: Any, path: Path) -> Path:
    with config.debugging(seed=0).build() as algorithm:
        algorithm.train()
        return Path(algorithm.save(path))


def small(config: Any) -> Any:
    return config.training(train_batch_size_per_learner=128, minibatch_size=64, num_epochs=1)


@pytest.fixture
def pendulum(tmp_path: Path) -> Path:
    return saved(small(PPOConfig().environment("Pendulum-v1")), tmp_path / "saved")


@pytest.mark.slow
def test_the_file_of_onnx_acts_as_the_policy_in_its_env(
    pendulum: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ort = pytest.importorskip("onnxruntime")
    assert main(["export", str(pendulum), "-o", str(tmp_path / "p.onnx"), "--episodes", "2"]) == 0
    assert "p.onnx: 400 observations, largest difference " in capsys.readouterr().out
    session, obs = ort.InferenceSession(tmp_path / "p.onnx"), np.array([[1.0, 0.0, 3.0]], np.float32)
    np.testing.assert_allclose(session.run(["actions"], {"obs": obs})[0], load_policy(pendulum).batch(obs), rtol=1e-5)


@pytest.mark.slow
def test_a_policy_with_memory_is_checked_in_its_env_and_with_recorded_episodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(PPOConfig().environment("Pendulum-v1")).rl_module(
        model_config={"use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 8}
    )
    config.env_runners(transforms=[FrameStack(num_frames=3)])
    run = saved(config, tmp_path / "saved")
    with Algorithm.from_checkpoint(run) as algorithm:
        algorithm.record(tmp_path / "recorded", num_episodes=1, seed=2)
    capsys.readouterr()
    for more in (["--episodes", "1"], ["--data", str(tmp_path / "recorded")]):
        assert main(["export", str(run), "-o", str(tmp_path / "p.pt2"), *more]) == 0
        assert "p.pt2: 200 observations, largest difference " in capsys.readouterr().out


def test_a_file_that_acts_otherwise_is_refused_and_replaces_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = saved(
        small(PPOConfig().environment("Pendulum-v1")).rl_module(module_class=OtherWhenTraced), tmp_path / "saved"
    )
    file = tmp_path / "p.pt2"
    file.write_bytes(b"old")
    assert main(["export", str(run), "-o", str(file), "--episodes", "1"]) == 1
    assert "does not act as its policy: 200 observations, largest difference" in capsys.readouterr().err
    assert file.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.pt2", "saved"]


def test_weights_are_those_that_load_from_takes(
    pendulum: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "p.safetensors"
    assert main(["export", str(pendulum), "-o", str(file)]) == 0
    assert "arrays, " in capsys.readouterr().out
    obs = np.array([[1.0, 0.0, 3.0]], np.float32)
    config = PPOConfig().environment("Pendulum-v1").rl_module(load_from=str(file)).debugging(seed=9)
    with config.build() as algorithm:
        np.testing.assert_array_equal(algorithm.compute_actions(obs, explore=False), load_policy(pendulum).batch(obs))
    assert main(["export", str(pendulum), "-o", str(file), "--episodes", "2"]) == 2
    assert "--episodes has no effect on .safetensors" in capsys.readouterr().err


class Pendulums(make_multi_agent("Pendulum-v1")):  # type: ignore[misc]
    """Two pendulums of one episode."""

    def __init__(self, env_config: Any) -> None:
        super().__init__({**env_config, "num_agents": 2})


def module_of_agent(agent_id: Any, episode: Any, **kwargs: Any) -> str:
    return "even" if agent_id == 0 else "odd"


def test_the_policy_of_one_of_several_agents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small(PPOConfig().environment(Pendulums))
    run = saved(config.multi_agent(policies={"even", "odd"}, policy_mapping_fn=module_of_agent), tmp_path / "saved")
    command = ["export", str(run), "-o", str(tmp_path / "p.pt2"), "--episodes", "1"]
    assert main(command) == 2
    assert "has the policies ['even', 'odd']: choose one, with --module" in capsys.readouterr().err
    assert main([*command, "--module", "odd"]) == 0
    assert "p.pt2: 200 observations" in capsys.readouterr().out
    obs = torch.tensor([[1.0, 0.0, 3.0]])
    found = torch.export.load(str(tmp_path / "p.pt2")).module()(obs)
    np.testing.assert_allclose(found, load_policy(run, module_id="odd").batch(obs.numpy()), rtol=1e-5)


def test_the_only_policy_of_several_agents_needs_no_name(tmp_path: Path) -> None:
    config = small(PPOConfig().environment(Pendulums).multi_agent(policies={"shared"}))
    with config.debugging(seed=0).build() as algorithm:
        run = algorithm.save(tmp_path / "saved")
    options = make_parser().parse_args(["export", str(run), "-o", "p.pt2", "--episodes", "1"])
    assert _acted(options, load_policy(run)).num_rows == 400  # two agents, 200 steps


def test_what_cannot_be_exported_or_checked_is_named(
    pendulum: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file, more, text in (
        ("p.h5", [], "p.h5 must end with .onnx (ONNX), .pt2 (torch.export) or .safetensors"),
        ("p.pt2", ["--data", "recorded", "--episodes", "1"], "--episodes has no effect with --data"),
        ("p.pt2", ["--episodes", "0"], "episodes=0 must be at least 1"),
        ("p.pt2", ["--module", "other"], "has no policy 'other'"),
        ("p.pt2", ["--env", "CartPole-v1"], "the policy takes observations of"),
    ):
        assert main(["export", str(pendulum), "-o", str(tmp_path / file), *more]) != 0
        assert text in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    place = tmp_path / "saved" / "metadata.json" / "p.onnx"  # in a file
    assert main(["export", str(pendulum), "-o", str(place)]) == 1
    assert f"corral: {place} cannot be written: " in capsys.readouterr().err
    assert main(["export", str(pendulum), "-o", str(tmp_path / "new" / "p.safetensors")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "saved"]


@pytest.mark.parametrize("name", ["p.safetensors", "p.pt2"])
def test_a_file_that_finds_no_room_is_named_and_replaces_nothing(
    name: str, pendulum: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    file.write_text("old")
    with largest_file(1000):
        assert main(["export", str(pendulum), "-o", str(file)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line == f"corral: {file} cannot be written: File too large; name another file."
    assert file.read_text() == "old" and {path.name for path in tmp_path.iterdir()} == {"saved", name}
