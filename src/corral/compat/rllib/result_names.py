"""Numbers of a result under the names that they have on RLlib's new stack."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from corral.core.ids import ALL_MODULES, DEFAULT_AGENT_ID, DEFAULT_MODULE_ID
from corral.core.metrics.result import flat_result

_LIFETIME = "_lifetime"


def add_names_of_runners(runners: dict[str, Any]) -> None:
    """Add numbers by agent and module, and names that were in use until 2.50, to the group `env_runners`.

    Args:
        runners: The group; changed.
    """
    for end in ("", _LIFETIME):
        if (by_agent := runners.pop(f"num_agent_steps_sampled_by_agent{end}", None)) is not None:
            runners[f"num_agent_steps_sampled{end}"] = by_agent  # RLlib gives no sum
    if "agent_episode_return_mean" not in runners and "module_episode_return_mean" not in runners:
        _add_only_agent(runners)
    for kind in ("agent", "module"):
        if (returns := runners.get(f"{kind}_episode_return_mean")) is not None:
            runners.setdefault(f"{kind}_episode_returns_mean", returns)
    for kind in ("mean", "min", "max"):
        if (name := f"episode_return_{kind}") in runners:
            runners.setdefault(f"episode_reward_{kind}", runners[name])


def _add_only_agent(runners: dict[str, Any]) -> None:
    """Add what RLlib reports of the one agent and module of a single-agent env."""
    ids = {"agent": DEFAULT_AGENT_ID, "module": DEFAULT_MODULE_ID}
    for kind, identity in ids.items():
        if "episode_return_mean" in runners:
            runners[f"{kind}_episode_return_mean"] = {identity: runners["episode_return_mean"]}
        for end in ("", _LIFETIME):
            steps = runners.get(f"num_env_steps_sampled{end}")
            if steps is not None:
                runners.setdefault(f"num_{kind}_steps_sampled{end}", {identity: steps})


_SAME = (
    (re.compile(r"^(sampler_results/)?(env_runners/)?"), "env_runners/"),
    (re.compile(r"/policy_reward_(\w+)/"), r"/module_episode_return_\1/"),
    (re.compile(r"/episode_reward_"), "/episode_return_"),
    (re.compile(r"_episode_returns_mean/"), "_episode_return_mean/"),
)
_OF_ONLY_AGENT = re.compile(rf"/(agent|module)(_episode_return_mean)/({DEFAULT_AGENT_ID}|{DEFAULT_MODULE_ID})$")


def other_names(result: Mapping[str, Any], names: Collection[str]) -> Iterator[str]:
    """Yield the other paths in a result of numbers of the runners, given their paths in Corral's results."""
    for path in flat_result(result):
        native = path
        for pattern, same in _SAME:
            native = pattern.sub(same, native)
        if native in names or _OF_ONLY_AGENT.sub(r"/episode_return_mean", native) in names:
            yield path


def add_names_of_learners(learners: Mapping[str, Any], algorithm: Any = None, lag: float | None = None) -> None:
    """Add names of losses, and counts of modules, weights and updates to the group `learners`.

    Args:
        learners: The group, whose parts are changed.
        algorithm: Algorithm of Corral, which has the modules.
        lag: Mean number of updates by which weights that sampled were older; `None` without asynchronous sampling.
    """
    modules = {name: part for name, part in learners.items() if name != ALL_MODULES and isinstance(part, dict)}
    for name, numbers in modules.items():
        if algorithm is not None and name in algorithm.module_ids:
            _add_counts(numbers, algorithm, name)
        steps = numbers.get("num_gradient_steps", math.nan) * numbers.get("module_train_batch_size_mean", math.nan)
        if math.isfinite(steps):  # NaN before the first update
            numbers.setdefault("num_module_steps_trained", round(steps))
        if lag is not None:
            numbers.setdefault("diff_num_grad_updates_vs_sampler_policy", lag)
        _add_names_of_algorithm(numbers)
        if "critic_loss" in numbers and algorithm is not None and name in algorithm.modules:
            config = algorithm.modules[name].config
            if "world_model_loss" in numbers:
                numbers |= {of_rllib: numbers[own] for own, of_rllib in _OF_DREAMER.items()}
            else:
                _add_names_of_critics(numbers, bool(config.twin_q) and not hasattr(config, "num_critics"))
    if isinstance(together := learners.get(ALL_MODULES), dict):
        _add_sums(modules, together)
    if algorithm is not None and algorithm.config.lr_scheduler is not None:
        _show_next_rates(modules, algorithm)


def _add_names_of_algorithm(numbers: dict[str, Any]) -> None:
    """Add the names under which RLlib's algorithms report numbers of their losses."""
    if "mean_ratio" in numbers:
        _add_names_of_async(numbers)
    if "mean_kl" in numbers:
        numbers.setdefault("mean_kl_loss", numbers["mean_kl"])
    if "qf_mean" in numbers and "critic_loss" not in numbers and "total_loss" in numbers:  # DQN has no other loss
        numbers.setdefault("qf_loss", numbers["total_loss"])
    if "sqd_adv_norm" in numbers:  # MARWIL
        numbers.setdefault("moving_avg_sqd_adv_norm", numbers["sqd_adv_norm"])
        numbers.setdefault("vf_explained_variance", numbers["vf_explained_var"])


_OF_DREAMER = {
    "world_model_loss": "WORLD_MODEL_L_total",
    "observation_loss": "WORLD_MODEL_L_decoder",
    "reward_loss": "WORLD_MODEL_L_reward",
    "continue_loss": "WORLD_MODEL_L_continue",
    "dynamics_loss": "WORLD_MODEL_L_dynamics",
    "representation_loss": "WORLD_MODEL_L_representation",
    "actor_loss": "ACTOR_L_total",
    "critic_loss": "CRITIC_L_total",
}

_OPTIMIZERS = {"actor": "policy", "critic": "qf", "alpha": "alpha", "value": "value"}


def _add_names_of_critics(numbers: dict[str, Any], twin_q: bool) -> None:
    """Add the names that the learners of SAC, TQC, CQL and IQL report.

    Corral has the sum of the losses of the critics, and RLlib the loss of each, which here is their mean. TQC has one.
    """
    qf_loss = numbers["critic_loss"] / (1 + twin_q)
    if "conservative_loss" in numbers:  # CQL, whose errors RLlib does not halve
        numbers["cql_loss"] = 2 * numbers["conservative_weight"] * numbers["conservative_loss"]
        qf_loss = 2 * qf_loss + numbers["cql_loss"]
    elif "value_loss" in numbers:  # IQL, whose errors RLlib halves with two critics only
        qf_loss *= 1 if twin_q else 2
        numbers["vf_loss"] = numbers["value_loss"]
    numbers |= {"policy_loss": numbers["actor_loss"], "qf_loss": qf_loss}
    if twin_q:
        numbers["qf_twin_loss"] = qf_loss
    if (alpha := numbers.get("alpha")) is not None:
        numbers |= {"alpha_value": alpha, "log_alpha_value": math.log(alpha) if alpha > 0 else math.nan}
        numbers["logps"] = -numbers["entropy"]
    for group, name in _OPTIMIZERS.items():
        for start, end in (("", "learning_rate"), ("gradients_", "global_norm")):
            if (value := numbers.get(f"{start}{group}_optimizer_{end}")) is not None:
                numbers[f"{start}{name}_{end}"] = value


def _add_names_of_async(numbers: dict[str, Any]) -> None:
    """Add the names that the learners of APPO and IMPALA report.

    RLlib's IMPALA has sums over the batch under the names that elsewhere are means.
    """
    if "curr_kl_coeff" in numbers:  # APPO
        numbers.setdefault("mean_IS", numbers["mean_ratio"])
        numbers.setdefault("mean_kl_loss", 0.0)
    elif "mean_vf_loss" not in numbers:
        num_steps = numbers.get("module_train_batch_size_mean", math.nan)
        numbers |= {"mean_pi_loss": numbers["policy_loss"], "pi_loss": numbers["policy_loss"] * num_steps}
        numbers |= {"mean_vf_loss": numbers["vf_loss"], "vf_loss": numbers["vf_loss"] * num_steps}


def _show_next_rates(modules: Mapping[str, dict[str, Any]], algorithm: Any) -> None:
    """Replace learning rates by the ones after the step of torch's schedulers, which RLlib reports."""
    for module_id, rates in algorithm.view.learner_group.foreach_learner(_rates_of)[0].get().items():
        for name, rate in rates.items():
            if math.isfinite(modules.get(module_id, {}).get(name, math.nan)):
                modules[module_id][name] = rate


def _rates_of(learner: Any) -> dict[str, dict[str, float]]:
    """Return the learning rates of a learner by module id and the name in results."""
    return {
        module_id: {
            f"{name}_learning_rate": float(optimizer.param_groups[0]["lr"])
            for name, optimizer in learner.get_optimizers_for_module(module_id)
        }
        for module_id in learner.module.keys()  # a MultiRLModule is no dict
    }


def _add_counts(numbers: dict[str, Any], algorithm: Any, module_id: str) -> None:
    """Add the numbers of updates and weights of a module."""
    numbers.setdefault("weights_seq_no", float(algorithm.learner_group.weights_version))
    for key, count in _num_weights(algorithm.get_module(module_id)).items():
        numbers.setdefault(key, count)


def _add_sums(modules: Mapping[str, dict[str, Any]], together: dict[str, Any]) -> None:
    """Add numbers of all modules together, and the ones of the only module."""
    for key in ("num_trainable_parameters", "num_non_trainable_parameters"):
        if all(key in numbers for numbers in modules.values()):
            together.setdefault(key, sum(numbers[key] for numbers in modules.values()))
    if len(modules) == 1:
        (numbers,) = modules.values()
        for end in ("", _LIFETIME):
            steps = together.get(f"num_module_steps_trained{end}")
            if steps is not None:
                numbers[f"num_module_steps_trained{end}"] = steps
                together.setdefault(f"num_env_steps_trained{end}", steps)


def _num_weights(module: Any) -> dict[str, int]:
    """Return the numbers of weights that learn and of weights that do not."""
    found = {"num_trainable_parameters": 0, "num_non_trainable_parameters": 0}
    for parameter in module.parameters():
        found["num_trainable_parameters" if parameter.requires_grad else "num_non_trainable_parameters"] += (
            parameter.numel()
        )
    return found
