"""The policy: a module that chooses env actions for observations, without training code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from corral.core.action_masks import MASK_KEY, NO_LEGAL_ACTION, first_without_choice, has_mask_key
from corral.core.ids import DEFAULT_MODULE_ID
from corral.core.paths import resolve_path
from corral.core.spaces import space_tree
from corral.core.tree import Tree, leaves, map_tree, num_rows
from corral.envs.checks import mismatch
from corral.errors import CheckpointError, ObservationError, nearest
from corral.modules.distributions import FloatArray
from corral.modules.heuristic import HeuristicModule
from corral.modules.inference import Inference, RowStates
from corral.modules.module import Module
from corral.modules.spec import weights_limited
from corral.runs.policies.description import described_spec

if TYPE_CHECKING:
    from corral.modules.transforms.pipeline import Pipeline
    from corral.runs.checkpoint import Checkpoint


class Policy:
    """A module that chooses env actions. `load_policy` makes one from a checkpoint.

    `policy(obs)` returns the action for one observation, `policy.batch(obs)` the actions for a batch. Without
    exploration, an action is the most likely one, or the one with the highest value.

    A policy with memory remembers the observations that it was given, for each row of a batch; `reset()` begins another
    episode. A policy has memory if its module has, or if a transform looks back, as `FrameStack` does.
    `act(obs, states)` leaves the states to the caller.

    Attributes:
        module: The module, in evaluation mode.
        observation_space: Space of one observation; floats are float32, and other floats are cast.
        action_space: Space of one env action.
        pipeline: Transforms of the observations, with their statistics; `None` without transforms.
    """

    _CALLS: ClassVar[tuple[str, str]] = ("policy(obs)", "policy.batch(obs)")  # for one observation, and for a batch

    def __init__(self, module: Module, *, pipeline: Pipeline | None = None, seed: int | None = 0) -> None:
        """Keep the module, whose weights are read now.

        Args:
            module: The module.
            pipeline: Transforms of the observations.
            seed: Seed of the actions that are drawn with `explore=True`; `None` draws others in each process.
        """
        self._inference = Inference(module)
        self.module = self._inference.module
        self.pipeline = pipeline
        self.observation_space: spaces.Space[Any] = (
            module.observation_space if pipeline is None else pipeline.observation_space
        )
        self.action_space: spaces.Space[Any] = module.action_space
        self._spaces = space_tree(self.observation_space)
        distribution = module.distribution
        self._no_action: NDArray[Any] = np.zeros(distribution.action_shape, distribution.action_dtype)
        self._looks_back = pipeline is not None and pipeline.is_temporal
        self._states: Any = None  # since the last reset, from the first batch on
        self._rng = np.random.default_rng(seed)

    # States.

    @property
    def has_memory(self) -> bool:
        """Whether actions depend on earlier observations of the episode too."""
        return self._looks_back or self.module.has_memory()

    def initial_states(self, num_rows: int) -> Tree:
        """Return the states in which a policy with memory sees the first observations, a tree of `[num_rows, ...]`.

        They are the states of the module, or what the transforms remember, or a dict of both, with the keys `module`
        and `transforms`.
        """
        of_module = RowStates(self.module, num_rows).states if self.module.has_memory() else None
        return self._joined(of_module, self._initial_of_transforms(num_rows) if self._looks_back else None)

    def _initial_of_transforms(self, num_rows: int) -> dict[str, Any]:
        assert self.pipeline is not None
        return self.pipeline.initial_states(num_rows, self._no_action)

    def continued(self, states: Tree, *, begins: NDArray[np.bool_] | None = None, rewards: Any = None) -> Tree:
        """Return the states for the next observations, for those that `act` returned.

        Args:
            states: States of a policy with memory, a tree of `[B, ...]`.
            begins: In which rows an episode begins, bool `[B]`; `None` is nowhere.
            rewards: Rewards of the latest actions, `[B]`, for `PrevActionsPrevRewards`.
        """
        of_module, of_transforms = self._split(states)
        if of_module is not None and begins is not None:
            memory = RowStates(self.module, len(begins))
            memory.states = of_module
            memory.begin(begins)
            of_module = memory.states
        if of_transforms is not None and begins is not None:
            of_transforms = {**of_transforms, "begins": of_transforms["begins"] | begins}
        if of_transforms is not None and rewards is not None:
            of_transforms = {**of_transforms, "rewards": np.array(rewards, np.float64)}
        return self._joined(of_module, of_transforms)

    def reset(self) -> None:
        """Begin another episode: forget the observations so far. Without memory there is nothing to forget."""
        self._states = None

    # Actions.

    def __call__(self, obs: Tree, *, explore: bool = False) -> Any:
        """Return the env action for one observation.

        Args:
            obs: Observation as the env gives it: an array of the space's shape, or a dict or tuple of these.
            explore: Whether to draw the action from the policy's distribution. The distribution of action values, as
                DQN has them, is their softmax.

        Raises:
            ObservationError: The observation does not fit the observation space, holds NaN or infinity, or allows no
                action.
        """
        self.check_obs(obs)
        actions = self.batch(map_tree(lambda leaf: np.asarray(leaf)[None], obs), explore=explore)
        return map_tree(lambda leaf: leaf[0], actions)

    def note_rewards(self, rewards: Any) -> None:
        """Let the policy know the rewards of its latest actions, `[B]`; only `PrevActionsPrevRewards` looks at them."""
        if self._states is not None:
            self._states = self.continued(self._states, rewards=rewards)

    def batch(self, obs: Tree, *, explore: bool = False, begins: NDArray[np.bool_] | None = None) -> Any:
        """Return the env actions `[B, ...]` for observations, a tree of `[B, ...]`; see `__call__`.

        Actions of a Dict or Tuple space are a tree of arrays.

        Args:
            obs: Observations. With memory, B is the same until the next `reset()`.
            explore: Whether to draw the actions.
            begins: In which rows an episode begins, bool `[B]`; after `reset()` all do anyway.

        Raises:
            ObservationError: The observations do not fit the observation space, or hold NaN or infinity; or B changed.
        """
        if not self.has_memory:
            return self.act(obs, explore=explore)[0]
        size = num_rows(obs)
        if self._states is None:
            self._states = self.initial_states(size)
        if size != (before := len(leaves(self._states)[0])):
            raise ObservationError(
                f"the policy remembers episodes of {before} row(s), and is given {size}: call reset() first, or use "
                "another policy object."
            )
        if begins is not None:
            self._states = self.continued(self._states, begins=begins)
        actions, self._states = self.act(obs, self._states, explore=explore)
        return actions

    def act(self, obs: Tree, states: Tree = None, *, explore: bool = False) -> tuple[Any, Tree]:
        """Return the env actions `[B, ...]` and the next states for observations and states, trees of `[B, ...]`.

        Nothing is remembered: the caller keeps the states, which begin with `initial_states(B)`. Without memory they
        are `None`.

        Raises:
            ObservationError: The observations or the states do not fit the policy, or hold NaN or infinity.
        """
        shape = np.shape(next(iter(leaves(obs)), ()))
        self.check_obs(obs, batch=(shape[0] if shape else 1,))
        obs = map_tree(lambda space, leaf: np.asarray(leaf, space.dtype), self._spaces, obs)
        of_module, of_transforms = self._checked_states(states, num_rows(obs)) if self.has_memory else (None, None)
        if self.pipeline is not None:
            obs, of_transforms = self._transformed(self.pipeline, obs, of_transforms)
        self._inference.begin_sample(explore, self._rng)
        if of_module is None:
            inputs = self._outputs(obs)
        else:
            inputs, of_module = self._inference.step(obs, of_module)
        actions = np.asarray(self._choose(obs, inputs, explore))
        if self.module.ACTION_STATE is not None:
            of_module = {**(of_module or {}), self.module.ACTION_STATE: actions}
        if of_transforms is not None:
            of_transforms = {**of_transforms, "actions": actions}
        return self.module.distribution.to_env(actions), self._joined(of_module, of_transforms)

    @staticmethod
    def _transformed(pipeline: Pipeline, obs: Tree, states: Any) -> tuple[Tree, Any]:
        """Return observations as the module sees them, and the next states of the transforms."""
        if states is None:
            return pipeline.from_stored(obs), None
        parts = (states[name] for name in ("memories", "begins", "actions", "rewards"))
        stored, memories = pipeline.to_store(obs, *parts)
        begins = np.zeros(num_rows(obs), np.bool_)
        return pipeline.from_stored(stored), {**states, "memories": memories, "begins": begins}

    def _split(self, states: Tree) -> tuple[Tree, Any]:
        """Return the states of the module and of the transforms; `None` for what has no memory."""
        if not self._looks_back:
            return states, None
        return (states["module"], states["transforms"]) if self.module.has_memory() else (None, states)

    @staticmethod
    def _joined(of_module: Tree, of_transforms: Any) -> Tree:
        """Return the states of a policy; `_split` undoes it."""
        if of_module is None or of_transforms is None:
            return of_transforms if of_module is None else of_module
        return {"module": of_module, "transforms": of_transforms}

    def _checked_states(self, states: Tree, size: int) -> tuple[Tree, Any]:
        """Return the states of the module and of the transforms, with arrays `[B, ...]`.

        Raises:
            ObservationError: They are not like `initial_states`.
        """
        of = "transforms" if self._looks_back else "module"
        try:
            of_module, of_transforms = self._split(states)
            if self._looks_back:  # also where no states are given
                of_transforms = map_tree(_checked_state, self._initial_of_transforms(size), of_transforms)
            if self.module.has_memory():
                of = "module"
                of_module = map_tree(np.asarray, of_module)
                RowStates(self.module, 1).check(of_module, size)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ObservationError(f"state of the {of}: {error}; episodes begin with initial_states(B).") from error
        return of_module, of_transforms

    def check_obs(self, obs: Tree, *, batch: tuple[int, ...] = ()) -> None:
        """Check one observation, or observations with the axes `batch` before the axes of the observation space.

        Raises:
            ObservationError: The nesting, a shape, a dtype or a value does not fit, or the mask of one observation
                allows no action. In a batch some rows may be final observations, after which nobody acts.
        """
        if problem := mismatch(self._spaces, obs, "observation", batch=batch):
            remedy = "" if batch else " ({} takes one observation, {} takes a batch)".format(*self._CALLS)
            raise ObservationError(f"{problem}{remedy}.")
        if self.module.has_action_mask and not batch and has_mask_key(obs):
            legal = np.ravel(obs[MASK_KEY])[None] != 0
            if first_without_choice(legal, self.action_space, np.ones(1, np.bool_)) is not None:
                raise ObservationError(f"{NO_LEGAL_ACTION}.")

    def _outputs(self, obs: Tree) -> FloatArray:
        """Return the policy's outputs `[B, D]`; a module without a network has none, and D is 0."""
        if isinstance(self.module, HeuristicModule):
            return np.zeros((num_rows(obs), 0), np.float32)
        return self._inference(obs)

    def _choose(self, obs: Tree, inputs: FloatArray, explore: bool) -> Any:
        """Return module actions `[B, ...]` for observations and the policy's outputs `[B, D]`."""
        distribution = self.module.distribution
        if isinstance(self.module, HeuristicModule):
            return self.module.checked_actions(obs, self._rng)
        if not explore:
            return distribution.mode(inputs)
        return distribution.sample(inputs, distribution.noise(self._rng, (len(inputs),)))

    def export(self, file: str | Path) -> Path:
        """Write the policy to a file that other programs can read, and return its path.

        Scaling, clipping and squashing of actions are part of the file, and so are transforms of observations with
        their statistics. Where transforms look back, as `FrameStack` does, the file takes the observations after the
        last one that does: that one, and the transforms before it, are left to the caller. The batch size is free. See
        `docs/save-resume-deploy.md`.

        Args:
            file: `.onnx` writes ONNX (needs `pip install 'corral[onnx]'`), `.pt2` a program of `torch.export`,
                `.safetensors` the weights of the module alone, for `.rl_module(load_from=file)`.

        Returns:
            The file.

        Raises:
            ConfigError: The name ends differently, or a package is missing.
            ExportError: torch cannot trace the module's policy.
        """
        from corral.runs.policies.export import export_policy

        return export_policy(self, resolve_path(file, "the exported policy"))


def _checked_state(here: NDArray[Any], given: Any) -> NDArray[Any]:
    array = np.asarray(given)
    if array.shape != here.shape or array.dtype != here.dtype:
        raise ValueError(f"{array.dtype}{list(array.shape)} must be {here.dtype}{list(here.shape)}")
    return array


def load_policy(
    path: str | Path,
    *,
    module_id: str | None = None,
    module_class: type[Module] | None = None,
    model_config: Mapping[str, Any] | None = None,
    transforms: Sequence[Any] | None = None,
    seed: int | None = 0,
) -> Policy:
    """Return the policy of a run or a checkpoint, without its env, its algorithm or its learner.

    Nothing that the checkpoint names is imported, except the class of a custom module.

    Args:
        path: A run directory, of which the best checkpoint is taken, or a checkpoint.
        module_id: Id of the module, if there are several.
        module_class: Class of the module, used if it cannot be imported from where it was when the policy was saved.
        model_config: Settings of a custom module that no file can hold, such as functions.
        transforms: Transforms of the observations, if no file can hold the settings of those that were used. They get
            the statistics of the checkpoint.
        seed: Seed of the actions that are drawn with `explore=True`; `None` draws others in each process.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, it has no such module or several and none was named, its
            module class cannot be imported, or the weights do not fit.
    """
    from corral.runs.checkpoint import find_checkpoint, read_checkpoint

    checkpoint = read_checkpoint(find_checkpoint(path, prefer="best"), with_state=False)
    return checkpoint_policy(
        checkpoint,
        module_id=module_id,
        module_class=module_class,
        model_config=model_config,
        transforms=transforms,
        seed=seed,
    )


def checkpoint_policy(
    checkpoint: Checkpoint,
    *,
    module_id: str | None = None,
    module_class: type[Module] | None = None,
    model_config: Mapping[str, Any] | None = None,
    transforms: Sequence[Any] | None = None,
    seed: int | None = 0,
) -> Policy:
    """Return the policy of a checkpoint that was read; see `load_policy`."""
    ids = sorted(checkpoint.policies.keys() & checkpoint.weights.keys())
    if module_id is None and len(ids) > 1:
        raise CheckpointError(f"{checkpoint.path} has the policies {ids}: give module_id, the id of one of them.")
    if module_id is None:
        module_id = ids[0] if ids else DEFAULT_MODULE_ID
    if module_id not in ids:
        raise CheckpointError(f"{checkpoint.path} has no policy {module_id!r}. {nearest(module_id, ids)}")
    try:
        description = checkpoint.policies[module_id]
        spec = described_spec(description, module_class=module_class, model_config=model_config, transforms=transforms)
        with weights_limited({module_id: checkpoint.weights[module_id]}):
            module = spec.build()
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    except Exception as error:  # of a custom class, or of settings that do not fit it
        raise CheckpointError(
            f"{checkpoint.path}: its module cannot be built: {type(error).__name__}: {error}"
        ) from error
    weights = {name: torch.from_numpy(np.array(array)) for name, array in checkpoint.weights[module_id].items()}
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:  # names each weight that differs
        raise CheckpointError(
            f"{checkpoint.path}: its weights do not fit {type(module).__name__}: {error}. Give the class and the "
            "settings with which it was trained."
        ) from error
    module.drop_critic()
    return Policy(module, pipeline=spec.pipeline, seed=seed)
