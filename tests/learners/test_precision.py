"""`.learners(precision="bfloat16")`: layers multiply in bfloat16, and all other numbers stay float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from learner_cases import make_learner, regression, squares, update
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from corral import (
    Algorithm,
    AlgorithmConfig,
    APPOConfig,
    CrossQConfig,
    DQNConfig,
    IMPALAConfig,
    PPOConfig,
    SACConfig,
    TD3Config,
    TQCConfig,
)
from corral.core.ids import DEFAULT_MODULE_ID
from corral.envs.torch_envs import TorchCartPole
from corral.errors import ConfigError
from corral.learners.low_precision import check_bfloat16, refused_products
from corral.modules.module import ActorCritic, Module
from corral.testing import IdentityEnv

PRODUCTS = ("mm", "addmm", "bmm", "matmul", "linear", "convolution", "convolution_backward", "mkldnn_rnn_layer")


class SeenOps(TorchDispatchMode):
    """Writes down which dtypes the ops of torch read."""

    def __init__(self) -> None:
        super().__init__()
        self.products: set[torch.dtype] = set()
        self.others: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        read = {arg.dtype for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()}
        if name in PRODUCTS:
            self.products |= read
        else:
            self.others.setdefault(name, set()).update(read)
        return func(*args, **(kwargs or {}))


def make_config(cls: type[AlgorithmConfig] = PPOConfig, *, precision: str = "bfloat16", **settings: Any) -> Any:
    is_box = cls in (SACConfig, TD3Config, TQCConfig, CrossQConfig)
    training: dict[str, Any] = {"lr": 1e-3, "train_batch_size_per_learner": 64}
    if cls in (PPOConfig, IMPALAConfig, APPOConfig):
        training |= {"num_epochs": 2, "minibatch_size": 32}
    else:
        training |= {"num_steps_sampled_before_learning_starts": 64}
    model = settings.pop("model_config", {"fcnet_hiddens": [16, 16]})
    return (
        cls(num_env_runners=0, rollout_fragment_length="auto")
        .environment(IdentityEnv, env_config={"episode_length": 8, "space": "box" if is_box else "discrete"})
        .rl_module(model_config=model)
        .training(**training | settings)
        .learners(precision=precision)
        .reporting(min_sample_timesteps_per_iteration=70)
        .debugging(seed=0)
    )


def weights_of(algorithm: Algorithm) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in algorithm.get_module().state_dict().items()}


def are_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, second[name]) for name, value in first.items())


def make_module(model_config: dict[str, Any] | None = None) -> Module:
    torch.manual_seed(0)
    space = spaces.Box(-1, 1, (3,), np.float32)
    return ActorCritic(space, spaces.Discrete(2), model_config or {"fcnet_hiddens": [64, 64]})


def test_only_products_of_layers_are_in_bfloat16() -> None:
    learner = make_learner(make_module(), squares, precision="bfloat16")
    with SeenOps() as seen:
        update(learner, regression(64), lr=0.01)
    assert seen.products == {torch.bfloat16}
    casts = {"_to_copy", "t", "detach", "view", "expand", "sum", "transpose"}  # `sum`: the gradient of a bias
    wrong = {name for name, dtypes in seen.others.items() if torch.bfloat16 in dtypes} - casts
    assert not wrong
    with SeenOps() as plain:
        update(make_learner(make_module(), squares), regression(64), lr=0.01)
    assert plain.products == {torch.float32}


def test_weights_gradients_and_optimizer_stay_float32() -> None:
    learner = make_learner(make_module(), squares, precision="bfloat16")
    result = update(learner, regression(64), lr=0.01)
    for parameter in learner.modules["m"].parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is None or parameter.grad.dtype == torch.float32
    optimizer = learner.torch_optimizer("m")
    assert optimizer is not None
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    assert states and {value.dtype for value in states} == {torch.float32}
    assert isinstance(result["total_loss"], float)


def test_losses_are_close_and_values_of_states_the_same() -> None:
    obs = regression(64)["obs"]
    learners = [make_learner(make_module(), squares, precision=name) for name in ("float32", "bfloat16")]
    values = [learner.values("m", obs) for learner in learners]
    np.testing.assert_array_equal(values[0], values[1])
    exact, low = (
        [update(learner, regression(64), lr=0.01, minibatch_size=16)["total_loss"] for _ in range(5)]
        for learner in learners
    )
    assert low != exact
    assert low == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (PPOConfig, {}),
        (PPOConfig, {"model_config": {"fcnet_hiddens": [16], "use_lstm": True}}),
        (PPOConfig, {"model_config": {"fcnet_hiddens": [16], "use_gru": True}}),
        (PPOConfig, {"model_config": {"architecture": "simba_v2", "fcnet_hiddens": [16, 16]}}),
        (IMPALAConfig, {}),
        (APPOConfig, {}),
        (DQNConfig, {}),
        (DQNConfig, {"num_atoms": 11, "noisy": True}),
        (SACConfig, {}),
        (SACConfig, {"num_atoms": 11}),
        (TD3Config, {}),
        (TQCConfig, {}),
        (CrossQConfig, {"model_config": {"fcnet_hiddens": [16, 16], "critic_hiddens": [32, 32]}}),
    ],
)
def test_each_algorithm_learns_in_it(cls: type[AlgorithmConfig], settings: dict[str, Any]) -> None:
    found: dict[str, tuple[dict[str, Tensor], float]] = {}
    for precision in ("float32", "bfloat16"):
        with make_config(cls, precision=precision, **settings).build() as algorithm:
            loss = algorithm.train()["learners"][DEFAULT_MODULE_ID]["total_loss"]
            found[precision] = weights_of(algorithm), loss
    (exact, exact_loss), (low, low_loss) = found["float32"], found["bfloat16"]
    assert not are_equal(exact, low)
    assert low_loss == pytest.approx(exact_loss, rel=0.1, abs=0.05)
    for name, value in low.items():
        assert value.dtype == exact[name].dtype and value.isfinite().all()


def test_rollouts_that_stay_on_the_device_learn_in_it() -> None:
    weights = []
    for precision in ("float32", "bfloat16"):
        config = PPOConfig().environment(TorchCartPole).env_runners(num_envs_per_env_runner=16).debugging(seed=5)
        config.training(train_batch_size_per_learner=320, minibatch_size=64, num_epochs=2).learners(precision=precision)
        with config.build() as algorithm:
            with SeenOps() as seen:
                algorithm.train()
            weights.append(weights_of(algorithm))
        # Actions are chosen in float32.
        assert seen.products == ({torch.float32} if precision == "float32" else {torch.float32, torch.bfloat16})
    assert not are_equal(*weights)
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=0, atol=0.02)


def test_a_run_that_continues_keeps_it(tmp_path: Path) -> None:
    with make_config().build() as algorithm:
        algorithm.train()
        path = algorithm.save(tmp_path)
        algorithm.train()
        expected = weights_of(algorithm)
    with Algorithm.from_checkpoint(path) as restored:
        assert restored.config.precision == "bfloat16"
        restored.train()
        assert are_equal(weights_of(restored), expected)
    with make_config(precision="float32").build() as other:
        other.restore_from_path(path)
        other.train()
        assert not are_equal(weights_of(other), expected)


@pytest.mark.slow
def test_learners_of_the_engine_learn_in_it() -> None:
    found = {}
    for precision in ("float32", "bfloat16"):
        config = make_config(precision=precision).learners(num_learners=1).engine("process")
        with config.build() as algorithm:
            algorithm.train()
            found[precision] = weights_of(algorithm)
    assert not are_equal(found["float32"], found["bfloat16"])
    for name, value in found["float32"].items():
        torch.testing.assert_close(found["bfloat16"][name], value, rtol=0, atol=0.02)


def test_a_device_without_bfloat16_is_refused() -> None:
    check_bfloat16(torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"precision='bfloat16': the device 'meta' does not compute in bfloat16"):
        check_bfloat16(torch.device("meta"))


def test_layers_that_the_machine_refuses_are_named_and_compute_in_float32(caplog: pytest.LogCaptureFixture) -> None:
    """A CPU without instructions for bfloat16 has no LSTM in it, and says so only in its first product."""
    refused = torch.lstm in refused_products("cpu")
    with make_config(model_config={"fcnet_hiddens": [8], "use_lstm": True}).build():
        assert ("computes LSTM only in float32" in caplog.text) == refused
    caplog.clear()
    with make_config().build():
        assert "only in float32" not in caplog.text


@pytest.mark.slow
def test_ppo_learns_cart_pole_in_it() -> None:
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_envs_per_env_runner=8)
        .training(train_batch_size_per_learner=1024, minibatch_size=128, num_epochs=8, lr=1e-3)
        .learners(precision="bfloat16")
        .debugging(seed=0)
    )
    with config.build() as algorithm:
        returns = [algorithm.train()["env_runners"]["episode_return_mean"] for _ in range(20)]
    assert returns[0] < 50 and max(returns) > 120
