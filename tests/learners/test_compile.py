"""`.learners(compile=True)`: compiled losses give the same results, and state dicts stay as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from learner_cases import LossResult, Net, make_learner, regression, squares, update
from torch import Tensor

from corral import AlgorithmConfig, APPOConfig, DQNConfig, IMPALAConfig, PPOConfig, SACConfig, TD3Config
from corral.core.ids import DEFAULT_MODULE_ID
from corral.errors import LossError
from corral.learners import compiled_losses, numpy_q_learning
from corral.learners.losses import Batch
from corral.modules.module import ActorCritic, Module
from corral.testing import IdentityEnv

# One process imports the compiler.
pytestmark = pytest.mark.xdist_group("compile")


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
def test_compiled_gradient_steps_are_the_same(caplog: pytest.LogCaptureFixture) -> None:
    (compiled, results), (plain, expected) = train_on_regression(True), train_on_regression(False)
    assert not warnings_of(caplog)  # nothing ran without compilation
    assert [*compiled] == [*plain]
    for name, value in plain.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(results, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)


def test_minibatches_of_another_size_are_compiled_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For the second size torch makes the backward pass together with the loss, and would free what the loss keeps."""
    from torch._dynamo.backends.debugging import aot_eager_decomp_partition  # all of the compiler except code in C++

    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs: aot_eager_decomp_partition(graph, inputs))
    learners = make_learner(make_module(), squares, compile=True), make_learner(make_module(), squares)
    for num_rows in (48, 40):
        ours, plain = (update(learner, regression(num_rows), lr=0.01, minibatch_size=num_rows) for learner in learners)
        assert ours == pytest.approx(plain, rel=1e-3)
    assert not warnings_of(caplog)


def test_torch_may_begin_a_compilation_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It does so for losses with numbers that change, such as the noise of TD3's targets."""
    calls: list[str] = []

    def compile(graph: Any, inputs: Any) -> Any:
        calls.append("compile")
        if len(calls) == 1:
            raise torch._dynamo.exc.TensorifyScalarRestartAnalysis(restart_reason="a number changes")
        return graph

    monkeypatch.setattr(torch._inductor, "compile", compile)
    update(make_learner(make_module(), squares, compile=True), regression(64), lr=0.01)
    assert calls == ["compile"] * 2 and not warnings_of(caplog)


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
def test_compiled_runs_equal_other_runs_and_share_their_checkpoints(
    cls: type[AlgorithmConfig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = []
    for compile in (True, False):
        with config(cls, compile=compile).build() as algorithm:
            for _ in range(3):
                algorithm.train()
            weights.append({name: value.clone() for name, value in algorithm.get_module().state_dict().items()})
            if compile:
                assert not warnings_of(caplog)
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

    def compiled(loss: Any, **settings: Any) -> Any:
        def call(module: Module, batch: Batch, coefficients: Mapping[str, float]) -> LossResult:
            seen.append(batch["obs"])
            return loss(module, batch, coefficients)  # type: ignore[no-any-return]

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(numpy_q_learning, "dqn_loss_in_numpy", None)
    with config(DQNConfig, compile=True).build() as algorithm:
        algorithm.train()
    assert seen and all(isinstance(obs, Tensor) for obs in seen)


def squares_after_a_break(module: Module, batch: Batch, coefficients: Mapping[str, float]) -> LossResult:
    """A loss that torch compiles in two parts."""
    noise = torch.rand(())
    torch._dynamo.graph_break()
    errors = (module.value(batch["obs"]) - batch["y"]).square()
    return errors.mean(), {"noise": noise}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_training_goes_on_where_the_compilation_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: Any, **settings: Any) -> Any:
        raise RuntimeError("no compiler found\n\nSet TORCH_LOGS for more")

    monkeypatch.setattr(torch._inductor, "compile", fail)
    results = []
    for compile in (True, False):
        torch.manual_seed(3)
        learner = make_learner(Net(), squares_after_a_break, compile=compile)
        taken = [update(learner, regression(64), lr=0.01, minibatch_size=16) for _ in range(2)]
        results.append((taken, learner.modules["m"].state_dict()))
    (taken, weights), (expected, plain) = results
    assert taken == expected  # so the random numbers are the same too
    for name, value in plain.items():  # `count` among them, which each call of the loss moves
        assert torch.equal(weights[name], value), name
    [message] = warnings_of(caplog)
    assert message.startswith("learners/m: torch.compile failed on the loss, and training continues without it.")
    assert message.endswith("leave compile=True out of .learners(...): no compiler found (RuntimeError).")


def test_each_learner_names_what_torch_did_not_compile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where torch remembers how it failed for the learner before."""

    def fail(*arguments: Any, **settings: Any) -> Any:
        raise RuntimeError("no compiler found")

    monkeypatch.setattr(torch._inductor, "compile", fail)
    for _ in range(2):
        update(make_learner(make_module(), squares, compile=True), regression(64), lr=0.01)
    assert len(warnings_of(caplog)) == 2


def test_training_goes_on_where_torch_cannot_compile_at_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: Any, **settings: Any) -> Any:
        raise RuntimeError("torch.compile is not supported on Python 3.15+")

    monkeypatch.setattr(torch, "compile", refuse)
    learner = make_learner(make_module(), squares, compile=True)
    result = update(learner, regression(64), lr=0.01, minibatch_size=16)
    assert result == update(make_learner(make_module(), squares), regression(64), lr=0.01, minibatch_size=16)
    [message] = warnings_of(caplog)
    assert "torch.compile is not supported on Python 3.15+" in message


BROKEN_COMPILER = """
import logging, sys
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(levelname)s %(message)s")
from corral import PPOConfig
config = PPOConfig().environment("CartPole-v1").debugging(seed=0).learners(compile=True)
config.training(train_batch_size_per_learner=64, minibatch_size=32, num_epochs=2)
with config.build() as algorithm:
    for _ in range(2):
        print("steps", algorithm.train()["learners"]["default_policy"]["num_gradient_steps"])
"""


@pytest.mark.slow
def test_training_goes_on_without_a_compiler_for_cpp(tmp_path: Path) -> None:
    environ = {**os.environ, "CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", BROKEN_COMPILER], capture_output=True, text=True, check=True, timeout=300, env=environ
    )
    warned = [line for line in done.stdout.splitlines() if line.startswith("WARNING")]
    assert len(warned) == 1 and "no-such-compiler" in warned[0] and "leave compile=True out" in warned[0]
    assert [line for line in done.stdout.splitlines() if line.startswith("steps")] == ["steps 4.0"] * 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of torch's compiler, at its breaks
def test_training_goes_on_where_only_the_backward_pass_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._inductor import compile_fx
    from torch._inductor.utils import fresh_cache

    compile_inner = compile_fx.fx_codegen_and_compile

    def fail_in_backward(*arguments: Any, **settings: Any) -> Any:
        if settings["is_backward"]:
            raise RuntimeError("too many registers")
        return compile_inner(*arguments, **settings)

    monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", fail_in_backward)
    learners = make_learner(Net(), squares, compile=True), make_learner(Net(), squares)
    with fresh_cache():
        results = [[update(each, regression(64), lr=0.01, minibatch_size=16) for _ in range(2)] for each in learners]
    assert results[0] == results[1]
    weights, expected = (learner.modules["m"].state_dict() for learner in learners)
    for name, value in expected.items():  # `count` among them, which each call of the loss moves
        assert torch.equal(weights[name], value), name
    [message] = warnings_of(caplog)
    assert "too many registers" in message


def test_devices_without_cuda_graphs_compile_as_with_true(caplog: pytest.LogCaptureFixture) -> None:
    make_learner(make_module(), squares, compile="cuda_graphs")
    assert warnings_of(caplog) == ["learners: cpu has no CUDA graphs, so compile='cuda_graphs' does what True does."]


def test_training_goes_on_where_cuda_graphs_cannot_record(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse_graphs(graph: Any, inputs: Any, options: Mapping[str, Any] | None = None) -> Any:
        if options:
            raise RuntimeError("skipping cudagraphs due to cpu device (arg0_1)")
        return graph

    monkeypatch.setattr(torch._inductor, "compile", refuse_graphs)
    compiled = compiled_losses.compile_loss(squares, "m", cuda_graphs=True)
    results = [
        [update(learner, regression(64), lr=0.01, minibatch_size=16) for _ in range(2)]
        for learner in (make_learner(make_module(), loss) for loss in (compiled, squares))
    ]
    assert results[0] == results[1]
    [message] = warnings_of(caplog)
    assert message.startswith("learners/m: CUDA graphs cannot record the loss, and training continues")
    assert "cpu device" in message and "instead of compile='cuda_graphs'" in message


def test_what_steps_report_outlives_the_next_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs return the same memory at each replay; here a function does that on the CPU."""
    memory: dict[str, Tensor] = {}

    def replay(loss: Any, **settings: Any) -> Any:
        def call(*arguments: Any) -> Any:
            scalar, reported = loss(*arguments)
            for name, value in reported.items():
                memory.setdefault(name, torch.empty_like(value)).copy_(value.detach())
            return scalar, dict(memory)

        return call

    monkeypatch.setattr(torch, "compile", replay)
    compiled = compiled_losses.compile_loss(squares, "m", cuda_graphs=True)
    results = [
        update(make_learner(make_module(), loss), regression(64), lr=0.01, minibatch_size=16)
        for loss in (compiled, squares)
    ]
    assert results[0] == results[1]
    assert results[0]["mean_y"] != pytest.approx(memory["mean_y"].item())


def test_replays_do_not_own_the_gradients_of_parameters() -> None:
    """An optimizer without vectors would otherwise keep memory of the graph as the gradient."""
    module = make_module()
    compiled_losses._begin_replay(module)
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.slow
def test_errors_of_the_loss_itself_stay_what_they_are() -> None:
    def wrong(module: Module, batch: Batch, coefficients: Mapping[str, float]) -> LossResult:
        raise LossError("the batch has no rewards")

    loss = compiled_losses.compile_loss(wrong, "m")
    with pytest.raises(LossError, match=r"^the batch has no rewards$"):
        loss(make_module(), {}, {})
