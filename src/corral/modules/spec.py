"""The description of a module: made once, in the driver, and sent to every process that builds a copy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode

from corral.core.action_masks import MASK_KEY
from corral.core.tree import Tree, map_tree
from corral.errors import CheckpointError, ConfigError
from corral.modules.distributions import ILLEGAL
from corral.modules.heuristic import HeuristicModule
from corral.modules.module import Module
from corral.modules.networks import example_obs

if TYPE_CHECKING:
    from corral.modules.transforms.pipeline import Pipeline

MAX_ILLEGAL = ILLEGAL / 1000  # other large numbers do as well
_SPARE = 2**25
"""Numbers that a module may have in addition to four times its weights in a checkpoint, such as tables and copies."""
_FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.arange, torch.linspace)
_file_size: ContextVar[int | None] = ContextVar("file_size", default=None)
NUMPY_FLOATS = (torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class ModuleSpec:
    """Everything that a module is built from; two builds of one spec give equal weights.

    Attributes:
        module_class: Subclass of `Module`.
        observation_space: Space of one observation of the env.
        action_space: Space of one action of the env.
        model_config: The settings of the class.
        seed: Seed of the initial weights.
        pipeline: Transforms between the env and the module; `None` if the module sees what the env gives.
        critic_space: Space of what a central critic sees; `None` if the module values its observations.
    """

    module_class: type[Module]
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    model_config: Mapping[str, Any]
    seed: int = 0
    pipeline: Pipeline | None = None
    critic_space: spaces.Space[Any] | None = None

    @property
    def module_space(self) -> spaces.Space[Any]:
        """Space of one observation as the module sees it."""
        return self.observation_space if self.pipeline is None else self.pipeline.module_space

    def build(self) -> Module:
        """Return a new module; no global random state is changed.

        Raises:
            ConfigError: The class does not call `super().__init__`, or has weights of a dtype that NumPy does not have.
            CheckpointError: It needs far more memory than the weights that it will get; see `weights_limited`.
        """
        name, settings = self.module_class.__name__, dict(self.model_config)
        if self.critic_space is not None:
            settings["critic_space"] = self.critic_space
        unfinished = (
            f"{name}.__init__ must begin with super().__init__(observation_space, action_space, model_config), which "
            "builds `distribution` and makes the module ready for layers."
        )
        size = _file_size.get()
        with torch.random.fork_rng(devices=[]), contextlib.nullcontext() if size is None else _Limited(size):
            torch.default_generator.manual_seed(self.seed)
            try:
                module = self.module_class(self.module_space, self.action_space, settings)
            except AttributeError as error:
                if "before Module.__init__() call" in str(error):
                    raise ConfigError(unfinished) from error
                raise
        if not hasattr(module, "distribution"):
            raise ConfigError(unfinished)
        module.critic_space = self.critic_space  # though the class may give the base other settings than it was given
        for weight, value in module.state_dict().items():
            if value.dtype.is_floating_point and value.dtype not in NUMPY_FLOATS:
                raise ConfigError(
                    f"{name}: the weight {weight!r} is {value.dtype}, and weights travel to runners as NumPy arrays, "
                    "which have no such dtype: keep weights in torch.float32, and compute in other dtypes under "
                    "torch.autocast in the module's methods."
                )
        return module


@contextlib.contextmanager
def weights_limited(weights: Mapping[str, Mapping[str, NDArray[Any]]]) -> Iterator[None]:
    """Let modules that are built in the block use about as much memory as their weights in a checkpoint do.

    The settings of a forged checkpoint may ask for layers that no machine can hold: what the file holds says how large
    they can be, before anything is allocated.

    Args:
        weights: Weights by the ids of the modules.
    """
    token = _file_size.set(sum(array.size for arrays in weights.values() for array in arrays.values()))
    try:
        yield
    finally:
        _file_size.reset(token)


class _Limited(TorchFunctionMode):
    """Refuses to make tensors that have more numbers than the weights of a file let expect."""

    def __init__(self, file_size: int) -> None:
        super().__init__()
        self._file_size, self._num_left = file_size, 4 * file_size + _SPARE

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES:
            try:
                self._num_left -= func(*args, **{**kwargs, "device": "meta"}).numel()
            except RuntimeError:  # torch cannot count so many
                self._num_left = -1
            if self._num_left < 0:
                raise CheckpointError(
                    f"its settings ask for a module that is far larger than its weights, which are {self._file_size:,} "
                    "numbers: it is damaged or forged."
                )
        return func(*args, **kwargs)


def check_module(module: Module) -> None:
    """Call the methods of a module on two observations, as runners and learners will.

    The module may keep what it computes, as buffers; the caller should not train this copy.

    Raises:
        ConfigError: A method returns something else than a tensor of the expected shape and dtype, or does not take
            what a central critic sees.
    """
    obs = example_obs(module.observation_space)
    if isinstance(module, HeuristicModule):
        _check_choice(module, map_tree(lambda leaf: leaf.numpy(), obs))
        return
    was_training, calls = module.training, module.eval().outputs(obs)
    call = ""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        while True:
            try:
                call, output, shape = next(calls)
            except ConfigError:
                raise
            except StopIteration:
                break
            except Exception as error:  # an observation that an env may never give; sampling tries what it gives
                if module.critic_space is None or not call:  # the policy comes first
                    break
                raise ConfigError(
                    f"{type(module).__name__}: `value`, and `policy_and_value(obs, state, mask, critic_obs)` if the "
                    f"class has it, must take what critic_sees gives, entries of {module.critic_space!s:.300}: "
                    f"{type(error).__name__}: {error}. Make the layers of the critic for self.critic_space, or leave "
                    "critic_sees out."
                ) from error
            given = type(output).__name__
            if isinstance(output, torch.Tensor):
                given = f"{output.dtype}{list(output.shape)}".removeprefix("torch.")
            if given != (expected := f"float32{[2, *shape]}"):
                raise ConfigError(
                    f"{type(module).__name__}.{call} must return a tensor {expected} for 2 observations, and returns "
                    f"{given}."
                )
            if module.has_action_mask and call.startswith("policy"):
                _check_mask(module, call, output, obs)
    module.train(was_training)


def _check_mask(module: Module, call: str, output: torch.Tensor, obs: Tree) -> None:
    """Refuse a policy that gives illegal actions a probability; values of a policy have another width."""
    if output.ndim == 2 and ((module.mask_outputs(obs, output) <= MAX_ILLEGAL) & (output > MAX_ILLEGAL)).any():
        raise ConfigError(
            f"{type(module).__name__}.{call} allows actions that {MASK_KEY} of the observations does not allow: return "
            "self.mask_outputs(obs, dist_inputs), or set .environment(action_masks=False)."
        )


def _check_choice(module: HeuristicModule, obs: Tree) -> None:
    """Let rules choose actions for two observations, and check what they return."""
    try:
        module.checked_actions(obs, np.random.default_rng(0))
    except ConfigError:
        raise
    except Exception:  # for an observation that an env may never give; sampling tries what it gives
        return
