"""RLlib's learner classes, whose losses take the place of the algorithm's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from corral.compat.rllib.episodes import COLUMNS
from corral.compat.rllib.modules import AdaptedModule, MultiRLModule, view_module
from corral.errors import ConfigError

_NATIVE_NAMES = dict(COLUMNS)
_RLLIB_NAMES = {native: name for name, native in COLUMNS.items()}


class _Numbers:
    """Keeps what a learner logs in one gradient step.

    Attributes:
        scalars: Values by name.
    """

    def __init__(self) -> None:
        """Start without values."""
        self.scalars: dict[str, Tensor] = {}

    def log_value(self, key: Any, value: Any, **settings: Any) -> None:
        """Report a scalar; the result holds the mean over the gradient steps of an update."""
        name = key[-1] if isinstance(key, tuple) else key
        self.scalars[str(name)] = torch.as_tensor(value, dtype=torch.float32).detach().mean()

    def log_dict(self, values: Mapping[str, Any], *, key: Any = None, **settings: Any) -> None:
        """Report scalars by name."""
        for name, value in values.items():
            self.log_value(name, value)

    def peek(self, key: Any, default: Any = None) -> Any:
        """Return a scalar of this gradient step."""
        name = key[-1] if isinstance(key, tuple) else key
        return self.scalars.get(name, default)


class Learner:
    """Base class of learners: override `compute_loss_for_module`.

    Args:
        config: RLlib's config.
        modules: Modules of RLlib by id.

    Attributes:
        config: RLlib's config.
        module: The modules, by id.
        metrics: Takes numbers to report.
    """

    framework: ClassVar[str] = "torch"

    def __init__(self, config: Any = None, modules: Mapping[str, Any] | None = None, **settings: Any) -> None:
        """Keep config and modules."""
        self.config, self.metrics = config, _Numbers()
        self._module = self.module = MultiRLModule(modules)
        self._default: Callable[[Any], Tensor] | None = None
        self._device = torch.device("cpu")

    def build(self) -> None:
        """Prepare what the loss needs, once."""

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> Tensor:
        """Return the loss of the algorithm for a minibatch.

        Args:
            module_id: Id of the module.
            config: RLlib's config of the module.
            batch: Columns `[B, ...]` by RLlib's names.
            fwd_out: Outputs of the module.
        """
        if self._default is None:
            raise ConfigError(f"{type(self).__name__}: compute_loss_for_module is called by Corral's learner only.")
        return self._default(batch)

    def get_parameters(self, module: Any) -> list[Any]:
        """Return the parameters of a module."""
        return list(module.parameters())

    def get_param_ref(self, param: Any) -> Any:
        """Return what identifies a parameter."""
        return param


_OTHER = (
    *("configure_optimizers_for_module", "configure_optimizers", "compute_gradients", "apply_gradients", "update"),
    *("before_gradient_based_update", "after_gradient_based_update", "postprocess_gradients", "_update"),
    *("postprocess_gradients_for_module", "compute_losses", "register_optimizer", "forward_train"),
)
TorchLearner = PPOLearner = PPOTorchLearner = DQNTorchLearner = SACTorchLearner = Learner


class _Batch(dict[str, Any]):
    """Columns by RLlib's names; Corral's names are found too."""

    def __missing__(self, name: str) -> Any:
        return self[_RLLIB_NAMES[name]] if name in _RLLIB_NAMES else self._raise(name)

    def _raise(self, name: str) -> Any:
        raise KeyError(name)


class _Outputs(Mapping[str, Any]):
    """Outputs of a module, computed when they are first read.

    Args:
        compute: Returns them.
    """

    def __init__(self, compute: Callable[[], Mapping[str, Any]]) -> None:
        """Compute nothing yet."""
        self._compute = compute
        self._found: Mapping[str, Any] | None = None

    def _get(self) -> Mapping[str, Any]:
        if self._found is None:
            self._found = self._compute()
        return self._found

    def __getitem__(self, name: str) -> Any:
        return self._get()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._get())

    def __len__(self) -> int:
        return len(self._get())


class LearnerLoss:
    """The loss of a learner class, as Corral calls losses: see `corral.learners.losses.OwnLoss`.

    Args:
        learner_class: The class.
        module_id: Id of the module that learns.
        config: RLlib's config of the module.

    Raises:
        ConfigError: The class overrides a method that Corral does not call.
    """

    def __init__(self, learner_class: type[Learner], module_id: str, config: Any) -> None:
        """Check the class."""
        for name in _OTHER:
            if hasattr(learner_class, name):
                raise ConfigError(
                    f"learner_class: Corral does not call {learner_class.__name__}.{name}: override "
                    "compute_loss_for_module, or use Corral's settings optimizer, loss and lr_scheduler."
                )
        self.learner_class, self.module_id, self.config = learner_class, module_id, config
        self.learner: Learner | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but the learner, which each process makes."""
        return {**vars(self), "learner": None}

    def __call__(
        self, module: Any, batch: Mapping[str, Any], coefficients: Mapping[str, float], default_loss: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a minibatch, and what to report."""
        view = view_module(module)
        if self.learner is None or self.learner.module[self.module_id] is not view:
            self.learner = self.learner_class(config=self.config, modules={self.module_id: view})
            self.learner.build()
        learner = self.learner
        learner.metrics = _Numbers()
        computed: dict[int, Any] = {}
        named = _Batch({_RLLIB_NAMES.get(name, name): column for name, column in batch.items()})

        def compute_default(given: Mapping[str, Any] = named) -> Any:
            if id(given) not in computed or given is not named:
                native = {_NATIVE_NAMES.get(name, name): column for name, column in given.items()}
                computed[id(given)] = default_loss(module, native, coefficients)
            return computed[id(given)]

        def compute_outputs() -> Mapping[str, Any]:
            if isinstance(module, AdaptedModule):
                found: Mapping[str, Any] = module.rl_module.forward_train(named)
                return found
            outputs = compute_default()[2]
            return {_RLLIB_NAMES.get(name, name): value for name, value in outputs.items()}

        learner._default = lambda given: compute_default(given)[0]
        loss = learner.compute_loss_for_module(
            module_id=self.module_id, config=self.config, batch=named, fwd_out=_Outputs(compute_outputs)
        )
        reported = next(iter(computed.values()))[1] if computed else {}
        return loss, {**reported, **learner.metrics.scalars}


def make_target_network(main_net: Any) -> Any:
    """Return a copy of a module that does not learn."""
    return copy.deepcopy(main_net).requires_grad_(False)
