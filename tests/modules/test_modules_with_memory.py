"""Modules with memory: whole sequences against single steps, settings, and what the check of a new module refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from corral import AlgorithmConfig, APPOConfig, DQNConfig, IMPALAConfig, Module, PPOConfig, SACConfig, TD3Config
from corral.algorithms.algorithm import Algorithm
from corral.algorithms.config.validation import validate
from corral.core.tree import leaves, map_tree
from corral.errors import ConfigError
from corral.modules.inference import Inference, RowStates
from corral.modules.memory import initial_states, module_inputs, unroll
from corral.modules.recurrent import RecurrentActorCritic
from corral.modules.spec import ModuleSpec, check_module
from memory_modules import Accumulates, CountsSteps

BOX = spaces.Box(-1, 1, (3,), np.float32)
CAMERA = spaces.Dict(camera=spaces.Box(0, 255, (12, 12, 3), np.uint8), mode=spaces.Discrete(3, start=2))
LSTM: dict[str, Any] = {"use_lstm": True, "fcnet_hiddens": [8], "lstm_cell_size": 6, "conv_features": 8}
GRU: dict[str, Any] = {"use_gru": True, "fcnet_hiddens": [8], "gru_cell_size": 6, "conv_features": 8}
STARTS = np.array([True, False, False, True, True, False, False, False])


def build(
    settings: dict[str, Any], observations: Any = BOX, actions: Any = None, cls: Any = RecurrentActorCritic
) -> Any:
    return ModuleSpec(cls, observations, actions or spaces.Discrete(4), settings).build()


def batch_for(module: Any, starts: Any = STARTS) -> dict[str, Any]:
    """Return a batch of sequences with random observations and random states."""
    space = module.observation_space
    space.seed(3)
    obs = map_tree(lambda *rows: torch.from_numpy(np.stack(rows)), *(space.sample() for _ in starts))
    states = map_tree(lambda leaf: 0.1 * torch.randn_like(leaf), initial_states(module, len(starts)))
    return {"obs": obs, "states": states, "sequence_starts": torch.from_numpy(starts)}


@pytest.mark.parametrize("settings", [LSTM, GRU, LSTM | {"vf_share_layers": True}], ids=["lstm", "gru", "shared"])
@pytest.mark.parametrize("observations", [BOX, CAMERA], ids=["box", "camera"])
def test_whole_sequences_give_what_single_steps_give(settings: dict[str, Any], observations: Any) -> None:
    module = build(settings, observations, spaces.Box(-1, 1, (2,), np.float32))
    batch = batch_for(module)
    dist_inputs, values = module.policy_and_value(*module_inputs(batch))
    state: Any = None
    for row in range(len(STARTS)):
        one = map_tree(lambda leaf, row=row: leaf[row : row + 1], batch["obs"])
        if STARTS[row]:
            state = map_tree(lambda leaf, row=row: leaf[row : row + 1], batch["states"])
        assert values[row].item() == pytest.approx(module.value(one, state).item(), abs=1e-5)
        outputs, state = module.policy(one, state)
        assert torch.allclose(dist_inputs[row], outputs[0], atol=1e-5)
    both = unroll(module, *module_inputs(batch))  # what a custom module without its own form gets
    assert torch.allclose(both[0], dist_inputs, atol=1e-5) and torch.allclose(both[1], values, atol=1e-5)


def test_no_step_depends_on_another_sequence_or_on_the_padding() -> None:
    module = build(LSTM)
    batch = batch_for(module)
    batch["obs"].requires_grad_()
    dist_inputs, _ = module.policy_and_value(*module_inputs(batch))
    for row, first in ((2, 0), (3, 3), (6, 4)):
        [gradient] = torch.autograd.grad(dist_inputs[row].sum(), batch["obs"], retain_graph=True)
        moved = np.flatnonzero(gradient.abs().sum(1).numpy())
        assert moved.tolist() == list(range(first, row + 1))


@pytest.mark.parametrize("settings", [LSTM, GRU])
def test_inference_keeps_the_state_of_each_row(settings: dict[str, Any]) -> None:
    module = build(settings)
    inference, memory = Inference(module), RowStates(module, 2)
    state = initial_states(module, 2)
    rng = np.random.default_rng(0)
    for begins in ([True, True], [False, False], [False, True], [False, False]):
        obs = rng.standard_normal((2, 3)).astype(np.float32)
        memory.begin(np.array(begins))
        given = memory.step(inference, obs)
        state = map_tree(
            lambda leaf, first, begins=begins: torch.where(torch.tensor(begins)[:, None], first, leaf),
            state,
            initial_states(module, 2),
        )
        assert all(np.allclose(a, b, atol=1e-6) for a, b in zip(leaves(memory.before), leaves(state), strict=True))
        with torch.no_grad():
            outputs, state = module.policy(torch.from_numpy(obs), state)
        assert np.allclose(given, outputs, atol=1e-5)
        assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(leaves(memory.states), leaves(state), strict=True))


@pytest.mark.parametrize("base", [PPOConfig, IMPALAConfig, APPOConfig, DQNConfig, SACConfig])
def test_settings_of_layers_that_the_module_does_not_have_are_refused(base: Any) -> None:
    config = base(num_env_runners=0).environment("CartPole-v1")
    for settings, message in (
        ({"use_lstm": True, "use_gru": True}, "use_lstm and use_gru are both True"),
        ({"lstm_cell_size": 64}, "lstm_cell_size=64 has no effect without use_lstm=True"),
        ({"use_lstm": True, "gru_cell_size": 64}, "gru_cell_size=64 has no effect without use_gru=True"),
        ({"max_seq_len": 10}, "max_seq_len=10 has no effect .* use_lstm=True or use_gru=True"),
        ({"use_lstm": True, "max_seq_len": 0}, "max_seq_len"),
        ({"use_lstm": True, "lstm_cell_sise": 8}, "lstm_cell_size"),
    ):
        with pytest.raises(ConfigError, match=message):
            config.copy(model_config=settings).validate()
    for algorithm in (
        config,
        TD3Config().environment("Pendulum-v1"),
    ):  # as searches over settings say it
        with algorithm.copy(model_config={"use_lstm": False, "use_gru": False}).build() as algo:
            assert not algo.get_module().has_memory()


def test_algorithms_without_sequences_refuse_modules_with_memory_before_they_are_built() -> None:
    @dataclass(kw_only=True)
    class OwnConfig(AlgorithmConfig):
        """An algorithm that says nothing of sequences."""

        @property
        def algo_class(self) -> type[Algorithm]:
            return Algorithm

    config = OwnConfig().environment("CartPole-v1")
    with pytest.raises(ConfigError, match=r"use_lstm=True gives the module memory, and .* cannot train"):
        validate(config.copy(model_config={"use_lstm": True}))
    with pytest.raises(ConfigError, match=r"CountsSteps defines initial_state\(\), which gives the module memory"):
        validate(config.copy(module_class=CountsSteps))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replay_buffer_config": {"type": "prioritized"}}, "type='prioritized' draws single steps.*set type='unif"),
        ({"exploration_config": {"type": "ParameterNoise"}}, "ParameterNoise has no form for modules with memory"),
    ],
)
@pytest.mark.parametrize("base", [DQNConfig, SACConfig])
def test_settings_that_have_no_form_on_sequences_are_refused(base: Any, settings: dict[str, Any], message: str) -> None:
    config = base().environment("CartPole-v1").rl_module(model_config={"use_gru": True})
    config.copy(burn_in_len=4).validate()
    with pytest.raises(ConfigError, match=message):
        config.copy(**settings).validate()
    with pytest.raises(ConfigError, match="burn_in_len=4 has no effect on a module without memory"):
        config.copy(model_config={}, burn_in_len=4).validate()

    config = base().environment("CartPole-v1")

    class Own(config.default_module_class):  # type: ignore[misc, name-defined]
        def initial_state(self) -> Any:
            return torch.zeros(1)

    with pytest.raises(ConfigError, match=r"must be a subclass of .*Recurrent(Q|SAC)Module"):
        config.copy(model_config={}, module_class=Own).validate()


class Wrong(CountsSteps):
    """Returns what the setting `returns` makes of the dist_inputs and the next state."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.returns = args[2]["returns"]

    def policy(self, obs: Any, state: Any) -> Any:  # type: ignore[override]
        return self.returns(*super().policy(obs, state))


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (lambda out, state: out, r"must return a pair \(dist_inputs, next state\).* returns Tensor"),
        (lambda out, state: (out, {"count": torch.zeros(2, 5)}), r"state/count is float32\[2, 5\] .* float32\[2, 1\]"),
        (lambda out, state: (out, state["count"]), "state/count is missing"),
        (lambda out, state: (out, {**state, "more": state["count"]}), "state/more .* must be left out"),
        (lambda out, state: (out[:, :1], state), r"policy\(obs, state\)\[0\] must return a tensor float32\[2, 4\]"),
    ],
)
def test_a_new_module_whose_states_do_not_fit_is_refused(returns: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_module(build({"returns": returns}, cls=Wrong))


def test_a_state_that_is_no_tree_of_tensors_is_refused_and_good_modules_pass() -> None:
    class Nothing(CountsSteps):
        def initial_state(self) -> Any:
            return None

    with pytest.raises(ConfigError, match=r"Nothing.initial_state\(\) must return tensors.*NoneType"):
        check_module(build({}, cls=Nothing))
    for cls in (CountsSteps, Accumulates):
        check_module(build({}, cls=cls))
    check_module(build(LSTM, CAMERA))


def test_modules_without_memory_have_no_state() -> None:
    assert not Module.has_memory() and RecurrentActorCritic.has_memory()
    with pytest.raises(TypeError, match="has no memory"):
        PPOConfig().module_spec(BOX, spaces.Discrete(2)).build().initial_state()
    assert isinstance(build(LSTM).policy_encoder.rnn, nn.LSTM)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("share", [True, False])
def test_numpy_takes_the_steps_of_torch(kind: str, share: bool) -> None:
    settings = {f"use_{kind}": True, "vf_share_layers": share, "fcnet_hiddens": [8], f"{kind}_cell_size": 5}
    module = build(settings, BOX, spaces.Box(-1, 1, (2,), np.float32))
    inference = Inference(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))
    inference.refresh()
    assert inference.backend == "numpy"
    memory, states = RowStates(module, 4), initial_states(module, 4)
    for obs in np.random.default_rng(0).standard_normal((6, 4, 3)).astype(np.float32):
        given = memory.step(inference, obs)
        with torch.no_grad():
            outputs, states = module.policy(torch.from_numpy(obs), states)
        assert given.dtype == np.float32 and np.allclose(given, outputs, atol=1e-5)
        assert memory.states.keys() == states.keys()
        for name, state in states.items():
            assert memory.states[name].dtype == np.float32 and np.allclose(memory.states[name], state, atol=1e-5)


def test_numpy_leaves_modules_to_torch_that_it_cannot_compute() -> None:
    class Own(RecurrentActorCritic):
        def policy(self, obs: Any, state: Any) -> Any:  # type: ignore[override]
            return super().policy(obs, state)

    for module in (
        build(LSTM, CAMERA),
        build(LSTM | {"fcnet_activation": "gelu"}),
        build({"use_lstm": True, "lstm_cell_size": 600}),
        build(LSTM, cls=Own),
        build({}, cls=CountsSteps),
    ):
        assert Inference(module).backend == "torch"


@pytest.mark.parametrize("settings", [LSTM, GRU, LSTM | {"vf_share_layers": True}], ids=["lstm", "gru", "shared"])
def test_runners_compute_the_head_of_many_actions(settings: dict[str, Any]) -> None:
    inference = Inference(build(settings, actions=spaces.Discrete(600)))
    obs = np.ones((2, 3), np.float32)
    given = RowStates(inference.module, 2).step(inference, obs)
    with torch.no_grad():
        outputs, _ = inference.module.policy(torch.from_numpy(obs), initial_states(inference.module, 2))
    assert given.shape == (2, 600) and np.allclose(given, outputs, atol=1e-5)
