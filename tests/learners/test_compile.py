"""`.learners(compile=True)`: compiled losses give the same results, and state dicts stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from learner_cases import LossResult, make_learner, regression, squares, update
from torch import Tensor

from corral import AlgorithmConfig, APPOConfig, DQNConfig, IMPALAConfig, PPOConfig, SACConfig, TD3Config
from corral.core.ids import DEFAULT_MODULE_ID
from corral.errors import LossError
from corral.learners import losses, numpy_q_learning
from corral.learners.losses import Batch
from corral.modules.module import ActorCritic, Module
from corral.testing import IdentityEnv


@pytest.fixture(autouse=True)
def forget_compiled() -> Any:
    """Drop what a test compiled."""
    yield
    torch.compiler.reset()


def make_module() -> Module:
    torch.manual_seed(0)
    return ActorCritic(spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2), {"fcnet_hiddens": [8]})


def train_on_regression(compile: bool) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    learner = make_learner(make_module(), squares, compile=compile)
    results = [update(learner, regression(64), lr=0.01, minibatch_size=16) for _ in range(3)]
    return learner.modules["m"].state_dict(), results


@pytest.mark.slow
def test_compiled_gradient_steps_are_the_same() -> None:
    (compiled, results), (plain, expected) = train_on_regression(True), train_on_regression(False)
    assert [*compiled] == [*plain]
    for name, value in plain.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(results, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)


def config(cls: type[AlgorithmConfig], **learners: Any) -> AlgorithmConfig:
    training: dict[str, Any] = {"lr": 1e-3, "train_batch_size_per_learner": 64}
    if cls in (PPOConfig, IMPALAConfig, APPOConfig):
        training |= {"num_epochs": 2, "minibatch_size": 32, "entropy_coeff": [(0, 0.1), (1000, 0.0)]}
    else:
        training |= {"num_steps_sampled_before_learning_starts": 64}
    return (
        cls(num_env_runners=0, rollout_fragment_length="auto")  # IMPALA and APPO have other defaults
        .environment(
            IdentityEnv,
            env_config={"episode_length": 8, "space": "box" if cls in (SACConfig, TD3Config) else "discrete"},
        )
        .rl_module(model_config={"fcnet_hiddens": [16, 16]})
        .training(**training)
        .learners(**learners)
        .reporting(min_sample_timesteps_per_iteration=70)
        .debugging(seed=0)
    )


@pytest.mark.slow  # each compiles forward and backward passes with a C++ compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of torch's compiler, at its breaks
@pytest.mark.parametrize("cls", [PPOConfig, IMPALAConfig, APPOConfig, DQNConfig, SACConfig, TD3Config])
def test_compiled_runs_equal_other_runs_and_share_their_checkpoints(cls: type[AlgorithmConfig], tmp_path: Path) -> None:
    weights = []
    for compile in (True, False):
        with config(cls, compile=compile).build() as algorithm:
            for _ in range(3):
                algorithm.train()
            weights.append({name: value.clone() for name, value in algorithm.get_module().state_dict().items()})
            if compile:
                path = algorithm.save(tmp_path)
            else:
                algorithm.restore_from_path(path)
                restored = algorithm.get_module().state_dict()
                for name, value in restored.items():
                    torch.testing.assert_close(value, weights[0][name], rtol=0, atol=0)
                algorithm.train()
    for name, value in weights[0].items():
        assert "_orig_mod" not in name
        torch.testing.assert_close(value, weights[1][name], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_several_learners_compile() -> None:
    with config(PPOConfig, compile=True, num_learners=2).engine("process").build() as algorithm:
        totals = [algorithm.train()["learners"][DEFAULT_MODULE_ID]["total_loss"] for _ in range(2)]
        assert np.isfinite(totals).all()


def test_compilation_replaces_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def compiled(loss: Any) -> Any:
        def call(module: Module, batch: Batch, coefficients: Mapping[str, float]) -> LossResult:
            seen.append(batch["obs"])
            return loss(module, batch, coefficients)  # type: ignore[no-any-return]

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(numpy_q_learning, "dqn_loss_in_numpy", None)
    with config(DQNConfig, compile=True).build() as algorithm:
        algorithm.train()
    assert seen and all(isinstance(obs, Tensor) for obs in seen)


def test_a_compilation_that_fails_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler found")

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda loss: compile(loss, backend=broken))
    learner = make_learner(make_module(), squares, compile=True)
    with pytest.raises(LossError, match=r"no compiler found.*Leave compile=True out") as caught:
        update(learner, regression(64), lr=0.01)
    assert caught.value.__cause__ is not None


@pytest.mark.slow
def test_errors_of_the_loss_itself_stay_what_they_are() -> None:
    def wrong(module: Module, batch: Batch, coefficients: Mapping[str, float]) -> LossResult:
        raise LossError("the batch has no rewards")

    loss = losses.compile_loss(wrong)
    with pytest.raises(LossError, match=r"^the batch has no rewards$"):
        loss(make_module(), {}, {})
