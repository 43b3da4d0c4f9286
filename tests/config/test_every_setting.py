"""Every setting of every config changes something that can be measured, or is refused or warned of.

The settings and their values come from the declarations: the sweep finds a new setting by itself. What it cannot vary
by its type has a value in `VALUES`, what waits for another part has this part in `WITH`, and what no short run can show
has the reason in `UNSEEN`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import logging
import math
import re
import tempfile
import typing
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import fsspec
import gymnasium as gym
import numpy as np
import pyarrow.parquet
import pytest
import torch
from pydantic import AfterValidator

from corral import Callback, FrameStack, RandomModule, SingleAgentEpisode, make_multi_agent
from corral.algorithms.config.without_effect import memory_class
from corral.algorithms.registry import ALGORITHMS, config_class
from corral.core.settings import OneOf, check_setting, is_union, setting_types
from corral.data.offline.config import ArraysInMemory
from corral.data.replay import ReplayConfig
from corral.errors import ConfigError, CorralError
from corral.exploration.build import BUILT_IN, exploration_class, settings_of
from corral.learners.learner import Learner
from corral.learners.ready_optimizers import ready_optimizers
from corral.learners.settings import LearningSpec

# One process makes each run that others are compared with.
pytestmark = pytest.mark.xdist_group("every_setting")

PARTS, INITIALIZERS = ("fcnet", "conv", "head", "rnn"), ("kernel_initializer", "bias_initializer")


class Scaled(torch.nn.Module):
    """Features that are the observations times a number."""

    def __init__(self, observation_space: Any, scale: float = 0.5) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.scale * obs


class Walk(gym.Env[Any, Any]):
    """A walk of a few steps. Its return depends on the actions; episodes raise after `fails_after` steps of an env."""

    def __init__(self, config: Any = None) -> None:
        settings = {"length": 5, "actions": "discrete", "obs": "box", "fails_after": 0, **(config or {})}
        self.length, self.fails_after = settings["length"], settings["fails_after"]
        self.observation_space = SPACES[settings["obs"]]
        self.action_space = SPACES[settings["actions"]]
        self.num_steps = 0

    def _obs(self) -> Any:
        obs = np.full(self.observation_space.shape, self.place, np.float32)
        obs.reshape(-1)[:2] = self.t, self.start
        return obs

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.place = 0, float(self.np_random.normal())
        self.start = self.place = self.place + (options or {}).get("shift", 0.0)
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.t, self.num_steps = self.t + 1, self.num_steps + 1
        if self.num_steps == self.fails_after:
            raise RuntimeError("the walk broke")
        move = np.concatenate([np.ravel(part) for part in (action if isinstance(action, tuple) else (action,))])
        self.place += float(move.sum())
        return self._obs(), self.place + 0.1 * self.t, self.t >= self.length, False, {"t": self.t}


SPACES: dict[str, gym.Space[Any]] = {
    "box": gym.spaces.Box(-100, 100, (3,), np.float32),
    "image": gym.spaces.Box(-100, 100, (8, 8, 3), np.float32),
    "discrete": gym.spaces.Discrete(3),
    "bounded": gym.spaces.Box(-1, 1, (1,), np.float32),
    "parts": gym.spaces.Tuple([gym.spaces.Discrete(2), gym.spaces.Discrete(3)]),
}


def recorded_walks(reward: float = 1.0, actions: str = "discrete") -> dict[str, Any]:
    """Eight walks of five steps to the right and to the left."""
    obs = np.arange(120, dtype=np.float32).reshape(40, 3) / 10
    ends = np.arange(1, 41) % 5 == 0
    taken: Any = np.arange(40) % 3
    if actions == "bounded":
        taken = (taken[:, None] - 1).astype(np.float32)
    return {"obs": obs, "actions": taken, "rewards": obs[:, 0] * reward, "terminated": ends}


def make_config(algo: str, *changes: Mapping[str, Any]) -> Any:
    actions = "bounded" if algo in ("TD3", "DDPG", "CQL", "TQC", "CrossQ") else "discrete"
    config: Any = config_class(algo)().environment(Walk, env_config={"actions": actions}).debugging(seed=1)
    config.learners(num_threads=1)  # convolutions with more wait for each other on a busy machine
    config.env_runners(num_envs_per_env_runner=2).rl_module(model_config={"fcnet_hiddens": [8]})
    if algo == "CrossQ":  # its critics are wide
        config.rl_module(model_config={"fcnet_hiddens": [8], "critic_hiddens": [8, 8]})
    if algo == "DreamerV3":
        config.rl_module(model_config={"max_seq_len": 4})
        config.training(model_size="nano", horizon=3, training_intensity=16.0)
    if algo in ("BC", "MARWIL"):
        config.offline_data(input_=recorded_walks())
        config.training(train_batch_size_per_learner=16, num_updates_per_iteration=3)
    elif algo in ("PPO", "PQN"):
        config.training(train_batch_size_per_learner=64, minibatch_size=16, num_epochs=2)
    elif algo in ("APPO", "IMPALA"):  # two updates per batch, in turn
        config.env_runners(num_env_runners=0, rollout_fragment_length=8).training(train_batch_size_per_learner=16)
        config.reporting(min_sample_timesteps_per_iteration=64)
    else:
        config.training(train_batch_size_per_learner=16, num_steps_sampled_before_learning_starts=20)
        config.reporting(min_sample_timesteps_per_iteration=40)
        if algo in ("CQL", "IQL"):
            config.offline_data(input_=recorded_walks(actions=actions))
            config.training(num_offline_updates=3, num_updates_per_iteration=3)
    for name, value in [change for each in changes for change in each.items()]:
        setattr(config, name, {**getattr(config, name), **value} if isinstance(value, dict) else value)
    return config


def values_of(hint: Any, default: Any) -> Iterator[Any]:
    """Yield values of a type that differ from the default."""
    arguments = typing.get_args(hint)
    number = default if isinstance(default, (int, float)) and not isinstance(default, bool) else 1
    if typing.get_origin(hint) is Annotated or is_union(hint):
        for part in arguments:
            yield from values_of(part, default)
    elif isinstance(hint, AfterValidator) and isinstance(hint.func, OneOf):
        yield from (name for name in hint.func.names if name != default)
    elif typing.get_origin(hint) is Literal:
        yield from (value for value in arguments if value != default)
    elif hint is type(None) and default is not None:
        yield None
    elif hint is bool and isinstance(default, (bool, type(None))):
        yield not default
    elif hint is int:
        yield from (value for value in (number * 2 + 1, math.ceil(number / 2), 0) if value != default)
    elif hint is float:
        yield from (value for value in (number * 2.0 + 1, number / 2, 0.0) if value != default)


class OwnLearner(Learner):
    """Takes no steps: the learning rate is 0."""

    def make_optimizer(self, module_id: str, module: Any, spec: LearningSpec) -> Any:
        return ready_optimizers({"all": torch.optim.SGD(module.parameters(), lr=0.0)})


class OwnEpisode(SingleAgentEpisode):
    """Reports its class."""


class AddToResult(Callback):
    def on_train_result(self, *, algorithm: Any, metrics_logger: Any, result: dict[str, Any]) -> None:
        result["added"] = 1.0


def add_to_result(result: dict[str, Any]) -> None:
    result["added"] = 2.0


def raise_error() -> None:
    raise ValueError("a callback broke")


def constant_evaluation(algorithm: Any, env_runner_group: Any) -> dict[str, Any]:
    return {"constant": 1.0}


def by_number(agent_id: Any, episode: Any) -> str:
    return "ab"[int(str(agent_id)[-1]) % 2]


def zero_loss(module: Any, batch: Any, coefficients: Any, default_loss: Any) -> Any:
    loss, reported, *_ = default_loss(module, batch, coefficients)
    zero = {name: 0 * part for name, part in loss.items()} if isinstance(loss, dict) else 0 * loss
    return zero, reported


def fill(weights: Any, val: float = 1.0) -> None:
    weights.fill_(val)


def report_threads(result: dict[str, Any]) -> None:
    result["num_threads"] = torch.get_num_threads()


def report_class(episode: Any, metrics_logger: Any) -> None:
    metrics_logger.log_value("own_episodes", float(isinstance(episode, OwnEpisode)))


def double_rewards(env: Any) -> Any:
    return gym.wrappers.TransformReward(env, lambda reward: 2 * reward)


# Values of settings that have none by their type, or only values that are slow.
VALUES: dict[str, Any] = {
    "env": lambda config: double_rewards(Walk(config)),
    "env_config": {"length": 4},
    "wrappers": [double_rewards],
    "env_task_fn": lambda train_results, task_settable_env, env_ctx: 1,
    "env_reset_fn": lambda episode_index: {"options": {"shift": 1.0}},
    "num_env_runners": 1,
    "num_learners": 2,
    "evaluation_num_env_runners": 1,
    "transforms": [FrameStack(2)],
    "episode_class": OwnEpisode,
    "custom_resources_per_env_runner": {"special": 1.0},
    "loss": zero_loss,
    "optimizer": "sgd",
    "optimizer_config": {"eps": 0.1},
    "lr_scheduler": functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.1),
    "n_step": 2,
    "kl_factors": [3.0, 0.3],
    "kl_band": 50.0,
    "replay_buffer_config": {"capacity": 30},
    "exploration_config": {"random_timesteps": 5},
    "module_class": RandomModule,
    "model_config": {"fcnet_hiddens": [4]},
    "load_from": "no/such/run",
    "load_parts": ["policy*"],
    "freeze_parts": ["*.bias"],
    "device": "cuda",
    "learner_class": OwnLearner,
    "callbacks_class": [AddToResult],
    "callback_functions": {"on_train_result": [add_to_result]},
    "evaluation_config": {"env_config": {"length": 3}},
    "custom_evaluation_function": constant_evaluation,
    "evaluation_sample_timeout_s": 1e-9,
    "evaluation_seeds": [1, 2],
    "evaluation_tasks": [1, 2],
    "policies": {"a", "b"},
    "policy_mapping_fn": lambda agent_id, episode: "a",
    "policies_to_train": ["a"],
    "algorithm_config_overrides_per_module": {"a": {"lr": 0.5}},
    "shared_layers": {"policy_encoder": ["a", "b"]},
    "critic_sees": "all",
    "min_time_s_per_iteration": 3.0,
    "metrics_num_episodes_for_smoothing": 1,
    "min_sample_timesteps_per_iteration": 200,
    "vf_clip_param": 1e-3,
    "target_kl": 1e-9,
    "circular_buffer_num_batches": 1,
    "grad_clip": 1e-3,
    "tau": 0.5,
    "target_network_update_freq": 50,
    "checkpoint_every_iterations": 1,
    "num_checkpoints_kept": 0,
    "vectorization": "async",
    "log_level": "WARNING",
    "best_checkpoint_mode": "min",
    "loggers": ["csv"],
    "best_checkpoint_metric": None,
    "store_buffer_in_checkpoints": False,
    "input_": ArraysInMemory(recorded_walks(2.0)),
    "max_advantage_weight": 1e-3,
    "num_offline_updates": 2,
    "num_updates_per_iteration": 1,
    "recorded_fraction": 0.25,
    "imitation_coeff": 1.0,
    "validation_fraction": 0.3,
    "map_directory": "no/such/directory",
    "output": "memory://every-setting",
    "output_max_rows_per_file": 10,
    "observation_space": gym.spaces.Box(-1, 1, (3,)),
    "action_space": gym.spaces.Discrete(4),
    "model_config.fcnet_hiddens": [4],
    "model_config.head_hiddens": [4],
    "model_config.conv_filters": [[4, 3, 1]],
    "model_config.action_distribution": "no:Such",
    "model_config.features_extractor": Scaled,
    "model_config.critic_hiddens": [4],
    "model_config.features_extractor_config": {"scale": 3.0},
    "model_config.log_std_bounds": [-1.0, 1.0],
    "model_config.use_layernorm": True,
    "model_config.head_use_layernorm": True,
    "replay_buffer_config.directory": "no/such/directory",
    "replay_buffer_config.capacity": 30,
    **{f"model_config.{part}_{name}": "ones" for part in PARTS for name in INITIALIZERS},
    **{f"model_config.{part}_{name}_kwargs": {"val": 2.0} for part in PARTS for name in INITIALIZERS},
    "exploration_config.beta_schedule": "linear_decay",
    "exploration_config.inverse_net_activation": "tanh",
    "exploration_config.forward_net_activation": "tanh",
    "exploration_config.sub_exploration": {"type": "StochasticSampling", "random_timesteps": 30},
    **{f"exploration_config.{name}_net_hiddens": [4] for name in ("inverse", "forward")},
    **{f"exploration_config.{part}_net_config": {"fcnet_hiddens": [4]} for part in ("feature", "distill", "encoder")},
    **{f"exploration_config.{name}_schedule": 0.3 for name in ("epsilon", "scale")},
}

AGENTS = {
    **{"env": make_multi_agent(Walk), "env_config": {"num_agents": 2}},
    **{"policies": {"a", "b"}, "policy_mapping_fn": by_number},
}
AGENTS_IN_TURN = {**AGENTS, "train_batch_size_per_learner": 32}  # two fragments of env steps, one of agent steps
IMAGES = {"env_config": {"obs": "image"}, "model_config": {"conv_filters": [[2, 3, 2]], "conv_features": 8}}
BOX = {"env_config": {"actions": "bounded"}}
LSTM = {"model_config": {"use_lstm": True, "max_seq_len": 4}}
# Runners of the local engine have sampled both fragments that they are asked for before the learners' next update.
IN_TURN = {"engine_name": "local", "num_env_runners": 2, "sample_async": True}
NO_BUFFER = {**IN_TURN, "use_circular_buffer": False}
FROM_DATA = {"input_": ArraysInMemory(recorded_walks())}
# The part that a setting waits for. In a config without it the setting must be refused or warned of.
WITH: dict[str, dict[str, Any]] = {
    "v_min": {"num_atoms": 5},
    "v_max": {"num_atoms": 5},
    "sigma0": {"noisy": True},
    "target_noise_clip": {"target_noise": 1.0},
    "grad_clip_by": {"grad_clip": 0.01},
    "kl_target": {"kl_coeff": 0.2},
    "kl_band": {"kl_coeff": 0.2, "kl_target": 1e-4},
    "kl_factors": {"kl_coeff": 0.2, "kl_target": 1e-4},
    "shuffle_batch_per_epoch": {"minibatch_size": 8},
    "clip_actions": {"normalize_actions": False, **BOX},
    "normalize_actions": BOX,
    "burn_in_len": LSTM,
    "model_config.features_extractor_config": {"model_config": {"features_extractor": Scaled}},
    "model_config.share_features": {"model_config": {"features_extractor": Scaled}},
    "on_error": {"callback_functions": {"on_episode_end": [raise_error]}},
    "evaluation_force_reset_envs_before_iteration": {
        **{"evaluation_duration_unit": "timesteps", "evaluation_duration": 14, "evaluation_interval": 1},
    },
    "evaluation_parallel_to_training": {"evaluation_interval": 1},
    **dict.fromkeys(("policy_mapping_fn", "policies_to_train", "count_steps_by"), AGENTS),
    **dict.fromkeys(("APPO.count_steps_by", "IMPALA.count_steps_by"), AGENTS_IN_TURN),
    **dict.fromkeys(("algorithm_config_overrides_per_module", "shared_layers", "critic_sees"), AGENTS),
    **{
        f"model_config.head_{name}": {"model_config": {"head_hiddens": [4], "use_layernorm": False}}
        for name in ("activation", "use_layernorm")
    },
    **{f"model_config.conv_{name}": IMAGES for name in ("activation", "features", *INITIALIZERS)},
    "model_config.image_scale": IMAGES,
    "model_config.channel_axis": IMAGES,
    **{f"model_config.{name}": BOX for name in ("initial_log_std", "free_log_std", "action_bounds", "log_std_bounds")},
    "model_config.log_std_clip": {**BOX, "model_config": {"initial_log_std": 3.0}},
    "model_config.action_parts": {"env_config": {"actions": "parts"}},
    **{f"model_config.{name}": LSTM for name in ("lstm_cell_size", "max_seq_len")},
    **{f"model_config.rnn_{name}": LSTM for name in INITIALIZERS},
    "model_config.gru_cell_size": {"model_config": {"use_gru": True}},
    **{
        f"model_config.{part}_{name}_kwargs": {
            **(IMAGES if part == "conv" else {}),
            "model_config": {
                f"{part}_{name}": fill,
                **({"conv": IMAGES, "rnn": LSTM}.get(part, {}).get("model_config", {})),
            },
        }
        for part in PARTS
        for name in INITIALIZERS
    },
    **{
        f"replay_buffer_config.{name}": {"replay_buffer_config": {"type": "prioritized"}}
        for name in ("alpha", "beta", "epsilon")
    },
    "max_lag": IN_TURN,
    "on_lag": {**IN_TURN, "max_lag": 1, "rollout_fragment_length": 32},
    "APPO.max_lag": NO_BUFFER,
    "APPO.on_lag": {**NO_BUFFER, "max_lag": 1, "rollout_fragment_length": 8},
    "IMPALA.on_lag": {**IN_TURN, "max_lag": 1, "rollout_fragment_length": 8},
    "circular_buffer_num_batches": {**IN_TURN, "use_circular_buffer": True},
    "circular_buffer_iterations_per_batch": {"use_circular_buffer": True},
    "APPO.kl_coeff": {"use_kl_loss": True},
    "APPO.kl_target": {"use_kl_loss": True, "lr": 0.05},
    **{name: {"output": "memory://every-setting"} for name in ("output_max_rows_per_file", "output_infos")},
    "moving_average_sqd_adv_norm_update_rate": {"beta": 2.0},
    **dict.fromkeys(("recorded_fraction", "imitation_coeff", "num_offline_updates"), FROM_DATA),
    "num_updates_per_iteration": {**FROM_DATA, "num_offline_updates": 2},
    "lagrangian_threshold": {"lagrangian": True},
    "TD3.burn_in_len": {},
    "DDPG.burn_in_len": {},
}
# What shows the effect of a setting.
SCENES: dict[str, dict[str, Any]] = {
    **{
        f"exploration_config.{name}": {"exploration_config": {"random_timesteps": 5}}
        for name in (
            *("stddev", "ou_theta", "ou_sigma", "ou_base_scale", "initial_scale", "final_scale", "scale_schedule"),
            *("target_epsilon", "sub_exploration"),
        )
    },
    "exploration_config.scale_timesteps": {"exploration_config": {"random_timesteps": 5, "final_scale": 0.5}},
    "episode_class": {"callback_functions": {"on_episode_end": [report_class]}},
    "num_threads": {"callback_functions": {"on_train_result": [report_threads]}},
    "restart_failed_sub_environments": {"env_config": {"fails_after": 15}},
    "on_evaluation_failure": {"evaluation_interval": 1, "evaluation_config": {"env_config": {"fails_after": 2}}},
    "best_checkpoint_mode": {"best_checkpoint_metric": "num_env_steps_sampled_lifetime"},
    "tau": {"target_network_update_freq": 20},
    **{f"APPO.{name}": {"circular_buffer_num_batches": 1} for name in ("tau", "target_network_update_freq")},
    **{f"APPO.{name}": {"lr": 0.05} for name in ("clip_param", "target_worker_clipping")},
    "double_q": {"lr": 1.0, "target_network_update_freq": 1000, "n_step": 1},
}
# Settings of all algorithms that others than the first one use in code of their own.
HELD_BY = {
    **dict.fromkeys(("APPO", "IMPALA"), ("max_lag", "on_lag", "count_steps_by")),
    "BC": (
        *("validation_fraction", "map_directory", "observation_space", "action_space", "gamma"),
        "num_updates_per_iteration",
    ),
    "MARWIL": ("input_", "gamma"),
}
# Settings that need processes.
IN_PROCESSES = ("num_env_runners", "num_learners", "evaluation_num_env_runners", "evaluation_parallel_to_training")
# Settings that are refused in other words.
NAMED_OTHERWISE = ("module_class", "load_from", "policies")
# What no short run on one machine shows, with the reason.
UNSEEN: dict[str, str] = {
    "disable_env_checking": "the check reports faulty envs, and changes nothing for others",
    "env_step_timeout_s": "only an env that hangs is stopped; tests/runners/test_restarts.py has one",
    "compile": "compiling takes a minute and changes no number; see tests/learners/test_compile.py",
    "learner_queue_size": "only runners that are faster than the learner fill the queue; see test_impala.py",
    "checkpoint_every_s": "a run of two iterations is over before a checkpoint is due",
}


LISTED = (*VALUES, *WITH, *SCENES, *UNSEEN)


def numbers(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield what a result holds, except times and the config."""
    for name, value in tree.items():
        if str(name).endswith(("_s", "_share", "_ms_mean")) or "sec" in str(name) or name in ("config", "bottleneck"):
            continue
        if isinstance(value, Mapping):
            yield from numbers(value, f"{path}{name}/")
        else:
            yield f"{path}{name}", str(value)


def weights_of(algorithm: Any) -> dict[str, Any]:
    """Return a digest of each weight of each module."""
    return {
        f"{module_id}/{name}": hashlib.sha1(weights.numpy().tobytes()).hexdigest()
        for module_id in algorithm.module_ids
        for name, weights in algorithm.get_module(module_id).state_dict().items()
    }


def stages(algo: str, *settings: Mapping[str, Any], messages: list[str]) -> Iterator[dict[str, Any]]:
    """Yield what building, two iterations, a round of evaluation, and a run with files show, one after the other.

    Warnings until then are added to `messages`.
    """
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("corral").addHandler(handler)
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    try:
        with tempfile.TemporaryDirectory() as folder, make_config(algo, *settings).build() as algorithm:
            env = algorithm.env_runner.env.unwrapped if algorithm.env_runner else None
            yield {"vector_env": type(env), **weights_of(algorithm)}
            try:
                for _ in range(2):
                    yield {**dict(numbers(algorithm.train())), **weights_of(algorithm)}
                yield dict(numbers(algorithm.evaluate()))
                result = algorithm.fit(stop={"training_iteration": 4}, run_dir=f"{folder}/run", progress=False)
                yield dict(numbers(result))
            except (CorralError, ValueError, RuntimeError) as error:
                yield {"error": type(error)}
            files = [str(file.relative_to(folder)) for file in Path(folder).rglob("*")]
            log, best = (Path(folder, "run", name) for name in ("run.log", "checkpoints/best/metadata.json"))
            algorithm.stop()  # which writes what was recorded
            recorded = [pyarrow.parquet.read_table(memory.open(name)) for name in sorted(memory.store)]
            yield {
                "files": sorted({re.sub(r"data-\w+", "data", file) for file in files}),
                "logged": set(re.findall(r" (?:DEBUG|INFO|WARNING) \S+ \w+", log.read_text() if log.exists() else "")),
                "recorded": [(table.num_rows, table.column_names) for table in recorded],
                "best": json.loads(best.read_text())["training_iteration"] if best.exists() else None,
                **weights_of(algorithm),
            }
    finally:
        logging.getLogger("corral").removeHandler(handler)


def run(
    algo: str, *settings: Mapping[str, Any], depth: int | None = None, messages: list[str] | None = None
) -> list[dict[str, Any]]:
    """Return what the first stages show, or all."""
    with contextlib.closing(stages(algo, *settings, messages=[] if messages is None else messages)) as shown:
        return [*itertools.islice(shown, depth)]


CONTEXTS: dict[str, Mapping[str, Any]] = {"": {}}


@functools.cache
def plain_run(algo: str, key: str, depth: int | None) -> list[dict[str, Any]]:
    return run(algo, CONTEXTS[key], depth=depth)


def outcome(algo: str, context: Mapping[str, Any], path: str, value: Any) -> str:
    """Return whether a value of a setting is refused, warned of, changes something, or has no effect.

    What two iterations show is not looked for in a longer run, and of a module, what building shows.
    """
    place, _, rest = path.partition(".")
    name = path.rpartition(".")[2]
    CONTEXTS.setdefault(key := repr(context), context)
    for depth in (1, 3, None) if place == "model_config" else (3, None):  # building, two iterations, all
        messages: list[str] = []
        try:
            shown = run(algo, context, {place: {name: value} if rest else value}, depth=depth, messages=messages)
        except CorralError as error:
            return "refused" if name in str(error) or path in NAMED_OTHERWISE else f"refused without its name: {error}"
        if shown != plain_run(algo, key, depth):
            return "changed"
    return "warned of" if any(re.search(rf"\b{name}\b", message) for message in messages) else "without effect"


Setting = tuple[str, str, Any, Any]
"""Name of an algorithm, path, type and default of a setting."""


def settings_of_configs() -> Iterator[Setting]:
    """Yield the settings of all configs, each with the first algorithm that has it and with those that change it."""
    known: set[str] = set()
    for algo in ALGORITHMS:
        cls, config = config_class(algo), make_config(algo)
        for name, hint in setting_types(cls).items():
            if name not in known or name in inspect.get_annotations(cls) or name in HELD_BY.get(algo, ()):
                yield algo, name, hint, getattr(config, name)
        known |= setting_types(cls).keys()


def settings_of_parts() -> Iterator[Setting]:
    """Yield the settings in `model_config`, each with the first default module that has it, and of a replay buffer."""
    known: set[str] = set()
    for algo in ("PPO", "DQN", "SAC", "TD3"):
        network = config_class(algo)().default_module_class
        owner: Any = (memory_class(network) or network).CONFIG
        settings = owner()
        for name, hint in setting_types(owner).items():
            if name not in known or name.startswith("head_"):  # heads differ
                yield algo, f"model_config.{name}", hint, getattr(settings, name)
        known |= setting_types(owner).keys()
    for name, hint in setting_types(ReplayConfig).items():
        yield "DQN", f"replay_buffer_config.{name}", hint, getattr(ReplayConfig(), name)


def settings_of_explorations() -> Iterator[Setting]:
    """Yield the settings of the built-in explorations."""
    for kind in BUILT_IN:
        cls = exploration_class(kind)
        algo = "PPO" if cls.on_policy else "DQN" if gym.spaces.Discrete in cls.action_spaces else "TD3"
        for name, default in settings_of(cls).items():
            hint = type(default) if isinstance(default, (bool, int, float)) else Any
            yield algo, f"exploration_config.{kind}.{name}", hint, default


def check(algo: str, path: str, hint: Any, default: Any) -> None:
    """Try values of a setting until one shows something; what waits for a part must not be accepted without it."""
    if path in UNSEEN:
        pytest.skip(UNSEEN[path])
    place, *keys = path.split(".")
    name, names = (keys or [place])[-1], (f"{algo}.{path}", path, f"{place}.{(keys or [place])[-1]}")
    values = next(([VALUES[key]] for key in names if key in VALUES), None) or list(values_of(hint, default))
    values = [value for value in values if is_accepted(algo, place, name, bool(keys), value)]
    assert values, f"VALUES needs a value of {path}: its type {hint} gives none that is accepted, except {default!r}"
    part = next((WITH[key] for key in names if key in WITH), None)
    context = part or next((SCENES[key] for key in names if key in SCENES), {})
    kind = {"exploration_config": {"type": keys[0]}} if len(keys) == 2 else {}
    context = {**context, **{place: {**context.get(place, {}), **given} for place, given in kind.items()}}
    seen: dict[str, str] = {}
    for value in values:
        seen[repr(value)] = outcome(algo, context, path, value)
        if seen[repr(value)] in ("changed", "refused", "warned of"):
            break
    else:
        pytest.fail(f"{algo}: {path} has no effect, and nothing says so: {seen}")
    if part is not None:
        without = outcome(algo, kind, path, value)
        # Some algorithms have the part by default, with another value.
        assert without in ("refused", "warned of", "changed"), f"{algo}: {path}={value!r} without {part} is {without}"


def is_accepted(algo: str, place: str, name: str, in_dict: bool, value: Any) -> bool:
    """Return whether a value is within the bounds that the type has."""
    owner = config_class(algo)
    try:
        if not in_dict:
            check_setting(owner, place, value)
        return True
    except ConfigError:
        return False


def named(settings: Iterator[Setting], *, slow: Collection[str] = ()) -> list[Any]:
    """Return the parameters of a test."""
    marks = {True: [pytest.mark.slow], False: []}
    return [pytest.param(*each, id=f"{each[0]}-{each[1]}", marks=marks[each[1] in slow]) for each in settings]


@pytest.mark.slow_cases(
    "min_time_s", "BC-", "MARWIL-", "CQL-", "IQL-", "DDPG-", "TQC-", "CrossQ-", "IMPALA-", "APPO-", "Dreamer"
)
@pytest.mark.parametrize(("algo", "path", "hint", "default"), named(settings_of_configs(), slow=IN_PROCESSES))
def test_a_setting_of_a_config_has_an_effect_or_is_refused(algo: str, path: str, hint: Any, default: Any) -> None:
    check(algo, path, hint, default)


@pytest.mark.slow_cases("SAC-model", "TD3-model")
@pytest.mark.parametrize(("algo", "path", "hint", "default"), named(settings_of_parts()))
def test_a_setting_of_a_part_has_an_effect_or_is_refused(algo: str, path: str, hint: Any, default: Any) -> None:
    check(algo, path, hint, default)


@pytest.mark.slow_cases("TD3-", "PerWorker")
@pytest.mark.parametrize(("algo", "path", "hint", "default"), named(settings_of_explorations()))
def test_a_setting_of_an_exploration_has_an_effect_or_is_refused(algo: str, path: str, hint: Any, default: Any) -> None:
    check(algo, path, hint, default)


@pytest.mark.parametrize("algo", ["PPO", "IMPALA"])
def test_two_runs_of_one_config_show_the_same(algo: str) -> None:
    context = {**IN_TURN, "max_lag": 2} if algo == "IMPALA" else {}
    assert run(algo, context) == run(algo, context)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_another_default_takes_no_value_away(algo: str) -> None:
    cls = config_class(algo)
    for base in cls.__mro__[1:]:
        for name, hint in setting_types(base).items() if dataclasses.is_dataclass(base) else ():
            words = [value for value in values_of(hint, None) if value is None or isinstance(value, str)]
            refused = [value for value in words if not is_accepted(algo, name, name, False, value)]
            assert refused == [], name


def test_the_lists_name_only_settings_that_exist() -> None:
    sweeps = (settings_of_configs(), settings_of_parts(), settings_of_explorations())
    known = {path for sweep in sweeps for _, path, *_ in sweep}
    known |= {f"{path.split('.')[0]}.{path.rpartition('.')[2]}" for path in known}
    listed = {name.partition(".")[2] if name.partition(".")[0] in ALGORITHMS else name for name in LISTED}
    assert listed <= known, listed - known
