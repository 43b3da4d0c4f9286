"""What the views of RLlib's objects lack: the error says what to use instead."""

from __future__ import annotations

from typing import Any

from corral.errors import UnknownAttributeError, nearest_name

_EXPORT = "save() writes each module to learner_group/learner/rl_module/<module id>, for RLModule.from_checkpoint"
_PICKLES = "checkpoints hold no arguments of constructors: use save_to_path(path) and from_checkpoint(path)"
_TUNE = "it belongs to trials: run tune.Tuner, which gives each trial its names, files and resources"
_OFFLINE = "corral.estimate_return(algo.native, data) estimates the return from recorded data"
_RECORDED = "the data is read once: algo.native.data has it, by module id"
_NO_POLICIES = "Corral has no Policy classes: use an RLModule"
_ALGORITHM = "it is made with an algorithm: use config.build_algo()"
_LIFE = "Corral starts, restarts and ends its runners itself: see config.fault_tolerance(...)"

REMEDIES: dict[str, dict[str, str]] = {
    "Algorithm": {
        "export_policy_checkpoint": _EXPORT,
        "export_policy_model": f"{_EXPORT}; torch.save or torch.onnx.export take algo.get_module()",
        "export_model": f"{_EXPORT}; torch.save or torch.onnx.export take algo.get_module()",
        "import_policy_model_from_h5": "use restore_from_path(path, component=...) with a module of a checkpoint",
        "import_model": "use restore_from_path(path, component=...) with a module of a checkpoint",
        "get_metadata": "the files of a checkpoint have it, and train() returns the latest result",
        "get_checkpointable_components": _PICKLES,
        "get_ctor_args_and_kwargs": _PICKLES,
        "get_default_policy_class": _NO_POLICIES,
        "merge_algorithm_configs": "use config.update_from_dict(changes)",
        "merge_trainer_configs": "use config.update_from_dict(changes)",
        "evaluate_offline": _OFFLINE,
        "offline_data": _RECORDED,
        "offline_eval_runner_group": _OFFLINE,
        "train_buffered": "call train()",
        "reset": "stop() the algorithm, and build another one",
        "env_creator": "the env is config.env",
        "get_auto_filled_metrics": _TUNE,
        "resource_info": _TUNE,
        "trial_id": _TUNE,
        "trial_name": _TUNE,
        "trial_resources": _TUNE,
    },
    "LearnerGroup": {
        "add_module": "use algo.add_module(module_id, module_spec)",
        "remove_module": "use algo.remove_module(module_id)",
        "async_update": "Corral's learners are asked by update()",
        "get_stats": "results of learners are in result['learners']",
        "get_checkpointable_components": _PICKLES,
        "get_ctor_args_and_kwargs": _PICKLES,
    },
    "EnvRunner": {
        "set_weights": "use algo.set_weights(weights), which sends them to all runners",
        "make_module": "runners have the modules of the algorithm",
        "sample_get_state_and_metrics": "call sample(), get_state() and get_metrics()",
        "filters": "statistics of MeanStdFilter are in checkpoints",
        "lock": "a runner answers one call at a time",
        "set_global_vars": "runners know the env steps sampled so far",
        "get_host": "use foreach_env_runner(lambda runner: socket.gethostname())",
        "get_node_ip": "use foreach_env_runner(lambda runner: socket.gethostname())",
        "get_checkpointable_components": _PICKLES,
        "get_ctor_args_and_kwargs": _PICKLES,
        "get_metadata": _PICKLES,
    },
    "EnvRunnerGroup": {
        "add_workers": _LIFE,
        "reset": _LIFE,
        "probe_unhealthy_env_runners": _LIFE,
        "probe_unhealthy_workers": _LIFE,
        "fetch_ready_async_reqs": "use foreach_env_runner(func), which returns the results",
        "foreach_env_runner_async_fetch_ready": "use foreach_env_runner(func), which returns the results",
        "foreach_env_with_context": "use foreach_env(func)",
        "foreach_policy_to_train": "use foreach_policy(func)",
        "is_policy_to_train": "see config.policies_to_train",
        "add_policy": "use algo.add_policy(policy_id, ...)",
        "get_merged_env_runner_state": "Corral merges the states of transforms in every round",
        "num_in_flight_async_reqs": "use foreach_env_runner(func), which returns the results",
    },
    "AlgorithmConfig": {
        "build_learner": f"{_ALGORITHM}.learner_group",
        "build_learner_group": f"{_ALGORITHM}.learner_group",
        "get_default_policy_class": _NO_POLICIES,
        "get_torch_compile_worker_config": "use config.framework(torch_compile_learner=True)",
        "serialize": "use config.to_dict()",
        "get_state": "use config.to_dict()",
        "from_state": "use AlgorithmConfig.from_dict(settings)",
        "validate_train_batch_size_vs_rollout_fragment_length": "use config.validate()",
    },
    "MetricsLogger": {
        "activate_tensor_mode": "log tensors at any time",
        "deactivate_tensor_mode": "log tensors at any time",
        "peek_results": "results of reduce() are plain numbers",
    },
    "RLModule": {
        "get_checkpointable_components": _PICKLES,
        "get_ctor_args_and_kwargs": _PICKLES,
        "get_metadata": _PICKLES,
    },
}
"""By class of RLlib and name of an attribute, what to use in its place."""


def find(native: Any, owner: str, name: str) -> Any:
    """Return an attribute of an object of Corral for a view of it that has none of this name.

    Args:
        native: The object.
        owner: RLlib's class.
        name: Name of the attribute.

    Raises:
        UnknownAttributeError: There is none; the message says what to use, or the nearest name.
    """
    if name in REMEDIES[owner]:
        raise missing(owner, name)
    try:
        return getattr(native, name)
    except AttributeError:
        if hasattr(type(native), name):
            raise
        raise missing(owner, name, native) from None


def missing(owner: str, name: str, native: Any = None) -> UnknownAttributeError:
    """Return the error for an attribute that a view lacks."""

    def describe() -> str:
        if name in REMEDIES[owner]:
            return f"{owner}.{name} is not in Corral: {REMEDIES[owner][name]}."
        close = nearest_name(name, [known for known in dir(native) if not known.startswith("_")])
        hint = "" if close is None else f" Did you mean {close!r}?"
        return f"{owner} has no attribute {name!r}.{hint}"

    return UnknownAttributeError(describe)
