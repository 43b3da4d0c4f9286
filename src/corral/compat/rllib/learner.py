"""RLlib's learner classes: the interface that user code overrides and calls. `own_learner.py` runs them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from corral.compat.rllib.constants import ALL_MODULES, DEFAULT_MODULE_ID, DEFAULT_OPTIMIZER
from corral.compat.rllib.helpers import convert_to_tensor
from corral.compat.rllib.learner_metrics import LearnerMetrics
from corral.compat.rllib.modules import MultiRLModule, SelfSupervisedLossAPI
from corral.compat.rllib.pipelines import learner_pipeline
from corral.compat.rllib.schedules import Scheduler
from corral.core.tree import map_tree
from corral.errors import ConfigError
from corral.learners.losses import clip_gradients

Gradients = dict[Hashable, Tensor]
"""Gradients by parameter."""


class Learner:
    """Base class of learners. Corral's learner calls the methods below; a subclass may override them.

    Args:
        config: RLlib's config.
        module_spec: Not used; Corral builds the modules.
        module: The modules, a `MultiRLModule`.

    Attributes:
        config: RLlib's config.
        module: The modules, by id.
        metrics: Takes numbers to report.
    """

    framework: ClassVar[str] = "torch"
    TOTAL_LOSS_KEY: ClassVar[str] = "total_loss"

    def __init__(self, *, config: Any = None, module_spec: Any = None, module: Any = None, **settings: Any) -> None:
        """Keep config and modules."""
        self.config = config
        self._module: Any = MultiRLModule() if module is None else module
        self.metrics = LearnerMetrics(self._module)
        self._device = torch.device("cpu")
        self._is_built = False
        self._native: Any = None  # Corral's learner
        self._pipeline: Any = None
        self._registered: dict[tuple[str, str], torch.optim.Optimizer] = {}
        self._lr_schedules: dict[tuple[str, str], Scheduler] = {}
        self._norms: dict[str, dict[str, float]] = {}
        self._defaults: dict[str, Callable[[Any], Tensor]] = {}  # losses of the algorithm for the present minibatch
        self.curr_kl_coeffs_per_module: dict[str, Tensor] = {}
        self.entropy_coeff_schedulers_per_module: dict[str, Scheduler] = {}

    @property
    def module(self) -> Any:
        """The modules, by id."""
        return self._module

    @property
    def device(self) -> torch.device:
        """The device of the modules."""
        return self._device

    def build(self) -> None:
        """Make the pipeline of connectors and the optimizers, once."""
        if not self._is_built:
            self._is_built = True
            self.configure_optimizers()

    @property
    def _learner_connector(self) -> Any:
        """The pipeline of connectors from episodes to batches, made when it is first asked for."""
        if self._pipeline is None:
            module = next(iter(self.module.values()), None)
            spaces = getattr(module, "observation_space", None), getattr(module, "action_space", None)
            self._pipeline = learner_pipeline(self.config, *spaces)
        return self._pipeline

    # Optimizers.

    def configure_optimizers(self) -> None:
        """Register the optimizers of all modules."""
        for module_id in self.module.keys():  # a MultiRLModule is no dict
            if self.rl_module_is_compatible(self.module[module_id]):
                self.configure_optimizers_for_module(module_id, self.config.get_config_for_module(module_id))

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """Register Adam if a subclass calls this or takes its steps by hand; otherwise Corral has its own optimizer."""
        cls = type(self)
        overrides = cls.configure_optimizers_for_module is not Learner.configure_optimizers_for_module
        if overrides or steps_by_hand(cls, self.module):
            parameters = self.get_parameters(self.module[module_id])
            if parameters:
                self.register_optimizer(
                    module_id=module_id,
                    optimizer=torch.optim.Adam(parameters),
                    params=parameters,
                    lr_or_lr_schedule=(config or self.config).lr,
                )

    def register_optimizer(
        self,
        *,
        module_id: str = ALL_MODULES,
        optimizer_name: str = DEFAULT_OPTIMIZER,
        optimizer: torch.optim.Optimizer,
        params: Sequence[Any] = (),
        lr_or_lr_schedule: Any = None,
    ) -> None:
        """Let an optimizer step the parameters that it was made with.

        Args:
            module_id: Module that the parameters belong to.
            optimizer_name: Name of the optimizer.
            optimizer: The optimizer.
            params: Its parameters.
            lr_or_lr_schedule: Learning rate, or points `[env step, learning rate]`; `None` keeps the optimizer's.

        Raises:
            ConfigError: It is no optimizer of torch.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"register_optimizer: {optimizer!r:.60} is no optimizer of torch.")
        key = (module_id, optimizer_name)
        self._registered[key] = optimizer
        if lr_or_lr_schedule is not None:
            self._lr_schedules[key] = Scheduler(lr_or_lr_schedule)
            _set_lr(optimizer, self._lr_schedules[key].get_current_value())

    def get_optimizer(
        self, module_id: str = DEFAULT_MODULE_ID, optimizer_name: str = DEFAULT_OPTIMIZER
    ) -> torch.optim.Optimizer:
        """Return an optimizer of a module.

        Raises:
            KeyError: There is none of this name.
        """
        if (module_id, optimizer_name) in self._registered:
            return self._registered[module_id, optimizer_name]
        if self._native is not None and optimizer_name == DEFAULT_OPTIMIZER:
            found: torch.optim.Optimizer = self._native.torch_optimizer(module_id)
            return found
        raise KeyError(f"module {module_id!r} has no optimizer {optimizer_name!r}.")

    def get_optimizers_for_module(self, module_id: str = ALL_MODULES) -> list[tuple[str, torch.optim.Optimizer]]:
        """Return pairs of name and optimizer; of all modules by default."""
        found = [
            (name, optimizer)
            for (owner, name), optimizer in self._registered.items()
            if module_id in (ALL_MODULES, owner)
        ]
        if not found and self._native is not None and module_id != ALL_MODULES:
            found = [(DEFAULT_OPTIMIZER, self._native.torch_optimizer(module_id))]
        return found

    def filter_param_dict_for_optimizer(
        self, param_dict: Mapping[Hashable, Any], optimizer: torch.optim.Optimizer
    ) -> dict[Hashable, Any]:
        """Return the entries of a dict by parameter that belong to an optimizer."""
        references = (self.get_param_ref(param) for group in optimizer.param_groups for param in group["params"])
        return {reference: param_dict[reference] for reference in references if reference in param_dict}

    def get_parameters(self, module: Any) -> list[Any]:
        """Return the parameters of a module, or of a part of it."""
        return list(module.parameters()) if hasattr(module, "parameters") else []

    def get_param_ref(self, param: Any) -> Hashable:
        """Return what identifies a parameter."""
        found: Hashable = param
        return found

    # An update: these methods are called around it, and for each gradient step.

    def before_gradient_based_update(self, *, timesteps: Mapping[str, Any]) -> None:
        """Prepare an update; `timesteps` has the env steps that were sampled so far."""

    def after_gradient_based_update(self, *, timesteps: Mapping[str, Any]) -> None:
        """Finish an update. Corral steps schedules and schedulers itself."""

    def compute_losses(self, *, fwd_out: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the losses of a minibatch by module id, from outputs and columns by module id."""
        return {
            module_id: self._compute_loss(module_id, batch[module_id], outputs)
            for module_id, outputs in fwd_out.items()
            if module_id in batch and self.should_module_be_updated(module_id)
        }

    def _compute_loss(self, module_id: str, batch: Any, outputs: Any) -> Tensor:
        module, config = self.module[module_id].unwrapped(), self.config.get_config_for_module(module_id)
        if isinstance(module, SelfSupervisedLossAPI):
            return module.compute_self_supervised_loss(
                learner=self, module_id=module_id, config=config, batch=batch, fwd_out=outputs
            )
        return self.compute_loss_for_module(module_id=module_id, config=config, batch=batch, fwd_out=outputs)

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> Tensor:
        """Return the loss of the algorithm for a minibatch.

        Args:
            module_id: Id of the module.
            config: RLlib's config of the module.
            batch: Columns `[B, ...]` by RLlib's names.
            fwd_out: Outputs of the module.

        Raises:
            ConfigError: It was called outside of an update.
        """
        if module_id not in self._defaults:
            raise ConfigError(f"{type(self).__name__}: compute_loss_for_module is called by Corral's learner only.")
        return self._defaults[module_id](batch)

    def compute_gradients(self, loss_per_module: Mapping[str, Tensor], **settings: Any) -> Gradients:
        """Return the gradients of the sum of the losses by parameter."""
        for optimizer in self._registered.values():
            optimizer.zero_grad(set_to_none=True)
        sum(loss_per_module.values()).backward()  # type: ignore[union-attr]
        return {
            self.get_param_ref(param): param.grad
            for optimizer in self._registered.values()
            for group in optimizer.param_groups
            for param in group["params"]
            if param.grad is not None
        }

    def postprocess_gradients(self, gradients_dict: Gradients) -> Gradients:
        """Return the gradients after `postprocess_gradients_for_module` of each module."""
        found = dict(gradients_dict)
        for module_id in dict.fromkeys(owner for owner, _ in self._registered):
            config = self.config if module_id == ALL_MODULES else self.config.get_config_for_module(module_id)
            of_module: Gradients = {}
            for _, optimizer in self.get_optimizers_for_module(module_id):
                of_module |= self.filter_param_dict_for_optimizer(found, optimizer)
            found |= self.postprocess_gradients_for_module(
                module_id=module_id, config=config, module_gradients_dict=of_module
            )
        return found

    def postprocess_gradients_for_module(
        self, *, module_id: str, config: Any = None, module_gradients_dict: Gradients
    ) -> Gradients:
        """Return the gradients of a module, clipped as `grad_clip` says for each of its optimizers."""
        found, config = dict(module_gradients_dict), config or self.config
        for name, optimizer in self.get_optimizers_for_module(module_id):
            gradients = self.filter_param_dict_for_optimizer(found, optimizer)
            holders = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients.values()]
            for holder, gradient in zip(holders, gradients.values(), strict=True):
                holder.grad = gradient
            if holders:
                norms = clip_gradients({name: holders}, [name], config.grad_clip, config.grad_clip_by)
                self._norms.setdefault(module_id, {}).update(norms)
            clipped = zip(gradients, holders, strict=True)
            found |= {reference: holder.grad for reference, holder in clipped if holder.grad is not None}
        return found

    def apply_gradients(self, gradients_dict: Gradients) -> None:
        """Step all optimizers with these gradients."""
        for optimizer in self._registered.values():
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.grad = gradients_dict.get(self.get_param_ref(param))
        self._native.step_optimizers()

    def _update(self, batch: Mapping[str, Any], **settings: Any) -> tuple[Any, Any, Any]:
        """Take one gradient step, and return outputs, losses by module id, and nothing more to report."""
        fwd_out = self.module.forward_train(batch)
        losses = self.compute_losses(fwd_out=fwd_out, batch=batch)
        gradients = self.postprocess_gradients(self.compute_gradients(losses))
        self._native.check_finite(losses, gradients)
        self.apply_gradients(gradients)
        return fwd_out, losses, {}

    # Helpers.

    def rl_module_is_compatible(self, module: Any) -> bool:
        """Return whether a module has weights."""
        return bool(self.get_parameters(module)) or isinstance(module, nn.Module)

    def should_module_be_updated(self, module_id: str, multi_agent_batch: Any = None) -> bool:
        """Return whether a module learns, as `policies_to_train` says."""
        chosen = self.config.policies_to_train
        if chosen is None:
            return True
        return bool(chosen(module_id, multi_agent_batch)) if callable(chosen) else module_id in chosen

    def _get_tensor_variable(self, value: Any, dtype: Any = None, trainable: bool = False) -> Tensor:
        """Return a tensor on the learner's device."""
        if dtype is None:
            dtype = torch.float32 if trainable or isinstance(value, float) else torch.int32
        return torch.tensor(value, requires_grad=trainable, device=self._device, dtype=dtype)

    def _convert_batch_type(self, batch: Any, to_device: bool = True, **settings: Any) -> Any:
        """Return a batch with tensors in place of arrays."""
        if isinstance(batch, Mapping):
            return {name: self._convert_batch_type(part) for name, part in batch.items()}
        return map_tree(lambda column: convert_to_tensor(column, "torch").to(self._device), batch)

    def get_state(self, *args: Any, **settings: Any) -> dict[str, Any]:
        """Return weights and optimizers."""
        found: dict[str, Any] = self._native.get_state()
        return found

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from weights and optimizers."""
        self._native.set_state(state)


class TorchLearner(Learner):
    """A learner of torch modules; all learners are."""


class PPOLearner(Learner):
    """The learner of PPO."""


class PPOTorchLearner(PPOLearner, TorchLearner):
    """The learner of PPO."""


class IMPALALearner(Learner):
    """The learner of IMPALA."""


class IMPALATorchLearner(IMPALALearner, TorchLearner):
    """The learner of IMPALA."""


class APPOLearner(IMPALALearner):
    """The learner of APPO."""


class APPOTorchLearner(APPOLearner, IMPALATorchLearner):
    """The learner of APPO."""


class MARWILLearner(Learner):
    """The learner of MARWIL."""


class MARWILTorchLearner(MARWILLearner, TorchLearner):
    """The learner of MARWIL and BC."""


class DQNTorchLearner(TorchLearner):
    """The learner of DQN."""


class SACTorchLearner(DQNTorchLearner):
    """The learner of SAC."""


class TQCTorchLearner(SACTorchLearner):
    """The learner of TQC."""


class CQLTorchLearner(SACTorchLearner):
    """The learner of CQL."""


class IQLLearner(Learner):
    """The learner of IQL."""


class IQLTorchLearner(TorchLearner, IQLLearner):
    """The learner of IQL."""


DEFAULTS = {
    "PPO": PPOTorchLearner,
    "APPO": APPOTorchLearner,
    "IMPALA": IMPALATorchLearner,
    "DQN": DQNTorchLearner,
    "SAC": SACTorchLearner,
    "TQC": TQCTorchLearner,
    "MARWIL": MARWILTorchLearner,
    "BC": MARWILTorchLearner,
    "CQL": CQLTorchLearner,
    "IQL": IQLTorchLearner,
}
"""Learner classes of the algorithms, whose losses and steps are Corral's."""

BY_HAND = (
    *("configure_optimizers", "compute_losses", "compute_gradients", "postprocess_gradients", "apply_gradients"),
    *("postprocess_gradients_for_module", "_update"),
)
"""Methods that concern all modules at once: a learner that overrides one takes its gradient steps as RLlib's does."""


def steps_by_hand(cls: type[Learner], module: Any = None) -> bool:
    """Return whether a learner of a class steps all modules together, through its own methods."""
    is_joint = module is not None and type(module) is not MultiRLModule
    return is_joint or any(getattr(cls, name) is not getattr(Learner, name) for name in BY_HAND)


def _set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def make_target_network(main_net: Any) -> Any:
    """Return a copy of a module that does not learn."""
    return copy.deepcopy(main_net).requires_grad_(False)
