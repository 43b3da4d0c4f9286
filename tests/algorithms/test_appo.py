"""APPO: its loss against a slow reference, its target policy, and the weight of its penalty."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_impala import assert_same, config_of, softmax, weights_of

from corral.algorithms.appo import appo_loss


def test_the_loss_is_the_clipped_surrogate_against_the_target_policy() -> None:
    generator = torch.Generator().manual_seed(3)
    with config_of("APPO", num_env_runners=0).build() as algo:
        module, [rollout] = algo.get_module(), algo.sample(1)
        for weights in (algo._targets["default_policy"], module):  # three policies that differ
            with torch.no_grad():
                for parameter in weights.parameters():
                    parameter.add_(0.7 * torch.randn(parameter.shape, generator=generator))
        batch = algo.make_batch("default_policy", [rollout])
        tensors = {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in batch.items()}
        coefficients = {"entropy_coeff": 0.1, "kl_coeff": 0.7}
        loss, reported = appo_loss(
            module, tensors, coefficients, clip_param=0.3, vf_loss_coeff=0.4, target_worker_clipping=1.2
        )
        with torch.no_grad():
            logits, values = (part.numpy() for part in module.policy_and_value(tensors["obs"]))
            target_logits = algo._targets["default_policy"].policy(tensors["obs"]).numpy()
    np.testing.assert_allclose(batch["target_dist_inputs"], target_logits, rtol=1e-4, atol=1e-5)
    now, target, acted = (softmax(each) for each in (logits, target_logits, batch["dist_inputs"]))
    surrogates, weights_of_steps, clipped = [], [], 0
    for b, action in enumerate(batch["actions"]):
        weight = min(acted[b, action] / target[b, action], 1.2)
        ratio = weight * now[b, action] / acted[b, action]
        within = min(max(ratio, 0.7), 1.3)
        surrogates.append(min(ratio * batch["advantages"][b], within * batch["advantages"][b]))
        weights_of_steps.append(weight)
        clipped += within != ratio
    kl = np.mean((target * np.log(target / now)).sum(-1))
    entropy = -np.mean((now * np.log(now)).sum(-1))
    vf_loss = np.mean((values - batch["value_targets"]) ** 2) / 2
    assert reported["policy_loss"].item() == pytest.approx(-np.mean(surrogates), rel=1e-3)
    assert reported["mean_ratio"].item() == pytest.approx(np.mean(weights_of_steps), rel=1e-3)
    assert reported["clip_fraction"].item() == pytest.approx(clipped / len(surrogates), abs=1e-3)
    assert reported["mean_kl_loss"].item() == pytest.approx(kl, rel=1e-3)
    assert loss.item() == pytest.approx(-np.mean(surrogates) + 0.4 * vf_loss - 0.1 * entropy + 0.7 * kl, rel=1e-3)


def test_v_trace_estimates_the_values_of_the_target_policy() -> None:
    """With a target policy that is the acting policy all ratios are 1, whatever the policy that learns is."""
    with config_of("APPO", num_env_runners=0).build() as algo, config_of(num_env_runners=0).build() as on_policy:
        [rollout] = algo.sample(1)
        expected = on_policy.make_batch("default_policy", [rollout])
        with torch.no_grad():
            module = algo.get_module()
            module.load_state_dict(on_policy.get_module().state_dict())
            head = [name for name, _ in module.named_parameters() if "pi" in name or "policy" in name]
            for name, parameter in module.named_parameters():
                if name in head:
                    parameter.add_(1.0)
        assert head
        found = algo.make_batch("default_policy", [rollout])
    np.testing.assert_allclose(found["value_targets"], expected["value_targets"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tau", [1.0, 0.25])
def test_the_target_policy_moves_after_so_many_traversals(tau: float) -> None:
    training = {"circular_buffer_num_batches": 2, "target_network_update_freq": 2, "tau": tau}
    with config_of("APPO", num_env_runners=0, **training).build() as algo:
        first, moved = algo.target_weights["default_policy"], []
        first = {name: value.copy() for name, value in first.items()}
        for iteration in range(1, 9):  # each makes two updates; eight are two traversals
            algo.train()
            now = algo.target_weights["default_policy"]
            moved.append(any((now[name] != first[name]).any() for name in first))
            if iteration == 4:
                for name, value in weights_of(algo).items():
                    expected = first[name] + tau * (value - first[name])
                    np.testing.assert_allclose(now[name], expected, rtol=1e-4, atol=1e-6)
        assert moved == [False] * 3 + [True] * 5


def test_the_weight_of_the_penalty_adapts_to_the_divergence() -> None:
    training = {"use_kl_loss": True, "kl_coeff": 0.5, "kl_target": 1e-9, "lr": 1e-2}
    with config_of("APPO", num_env_runners=0, **training).build() as algo:
        coefficients = [algo.coefficients("default_policy")["kl_coeff"]]
        for _ in range(3):
            algo.train()
            coefficients.append(algo.coefficients("default_policy")["kl_coeff"])
    assert coefficients[0] == 0.5
    assert coefficients[1] in (0.5 * 1.5, 0.5 * 0.5 * 1.5)  # in the first update all policies are the same
    assert coefficients[3] == pytest.approx(coefficients[1] * 1.5**4)


def test_a_run_in_this_process_continues_exactly() -> None:
    training = {"use_kl_loss": True, "circular_buffer_num_batches": 2}
    with config_of("APPO", num_env_runners=0, **training).build() as algo:
        for _ in range(3):
            algo.train()
        state = algo.get_state()
        with config_of("APPO", num_env_runners=0, **training).build() as other:
            other.set_state(state)
            for _ in range(4):
                algo.train()
                other.train()
            assert_same(weights_of(algo), weights_of(other))
            assert_same(algo.target_weights["default_policy"], other.target_weights["default_policy"])
            assert algo.coefficients("default_policy") == other.coefficients("default_policy")
