"""Corral's learner with a learner class of RLlib: its losses, its optimizers, and its methods around each step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from corral.compat.rllib.adapted_modules import AdaptedModule, joint_view, view_module
from corral.compat.rllib.constants import ALL_MODULES, NUM_ENV_STEPS_SAMPLED_LIFETIME, Columns
from corral.compat.rllib.episodes import COLUMNS
from corral.compat.rllib.learner import BY_HAND, Gradients, Learner, steps_by_hand
from corral.compat.rllib.learner_only import learner_only_modules
from corral.compat.rllib.schedules import Scheduler
from corral.core.devices import find_device
from corral.core.tree import leaves, map_tree
from corral.errors import ConfigError
from corral.learners.learner import Learner as NativeLearner
from corral.learners.losses import Loss, wrap_user_loss
from corral.learners.minibatches import Cuts, UpdateReport, loss_error
from corral.learners.ready_optimizers import ready_optimizers
from corral.learners.update import to_tensors

_NATIVE_NAMES = {
    **COLUMNS,
    Columns.TERMINATEDS: "terminated",
    Columns.TRUNCATEDS: "truncated",
    Columns.NEXT_OBS: "next_obs",
}
_RLLIB_NAMES = {native: name for name, native in _NATIVE_NAMES.items()}


class OwnLearner(NativeLearner):
    """A learner of Corral that calls the methods of a learner class of RLlib.

    Corral's steps stay as they are where the class only changes losses and optimizers of single modules. Otherwise all
    modules take their steps together, through the methods of the class.

    Args:
        learner_class: The class.
        config: RLlib's config.
        modules: As for Corral's learner.
        specs: As for Corral's learner.
        **settings: As for Corral's learner.

    Attributes:
        view: The instance of the class.
    """

    def __init__(
        self, learner_class: type[Learner], config: Any, modules: Mapping[str, Any], specs: Any, **settings: Any
    ) -> None:
        """Build the learner of RLlib, then the one of Corral.

        Raises:
            ConfigError: The class overrides a method that Corral does not call.
        """
        device = find_device(settings.get("device", "auto"))
        for module in modules.values():
            module.to(device)
        self._specs, self._modules_given = specs, modules
        self._default_losses: dict[str, Loss] = {}
        joined = joint_view(modules)
        joined._rl_modules |= learner_only_modules(config, device)
        self.view = learner_class(config=config, module=joined)
        self.view._native, self.view._device = self, device
        self._by_hand = steps_by_hand(learner_class, self.view.module)
        _check_class(learner_class, self._by_hand)
        self.view.build()
        super().__init__(modules, specs, **settings)
        self.metrics = self.view.metrics.native

    # Losses and optimizers.

    def set_losses(self, losses: Mapping[str, Loss]) -> None:
        """Use the losses of the class, with these losses as the losses of the algorithm."""
        self._default_losses |= losses
        super().set_losses({name: wrap_user_loss(_LossOf(self.view, name), loss) for name, loss in losses.items()})

    def make_optimizer(self, module_id: str, module: Any, spec: Any) -> Any:
        """Return the optimizers that the class registered for a module, or else Corral's."""
        if module_id not in self._modules_given:  # added while training
            self.view._module._rl_modules[module_id] = view_module(module)
            self.view.configure_optimizers_for_module(module_id, self.view.config)
        registered, cls = self.view._registered, type(self.view)
        if not self._by_hand and cls.configure_optimizers_for_module is Learner.configure_optimizers_for_module:
            return super().make_optimizer(module_id, module, spec)
        # By hand, the first module also holds the optimizers that belong to no module that learns.
        is_first = self._by_hand and module_id == next(iter(self._specs))
        own = {
            name if owner in (module_id, ALL_MODULES) else f"{owner}_{name}": optimizer
            for (owner, name), optimizer in registered.items()
            if owner == module_id or (is_first and owner not in self._specs)
        }
        return ready_optimizers(own, spec.lr_scheduler)

    def step_optimizers(self) -> None:
        """Step all optimizers."""
        for optimizer in self.optimizers.values():
            optimizer.step()

    # Updates.

    def update(self, batches: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Take gradient steps between `before_` and `after_gradient_based_update`, and return the metrics."""
        view = self.view
        timesteps = {NUM_ENV_STEPS_SAMPLED_LIFETIME: max((each.timestep for each in settings.values()), default=0)}
        for key, schedule in view._lr_schedules.items():
            if schedule.use_schedule:
                for group in view._registered[key].param_groups:
                    group["lr"] = schedule.update(timesteps[NUM_ENV_STEPS_SAMPLED_LIFETIME])
        view.before_gradient_based_update(timesteps=timesteps)
        results = super().update(batches, settings)
        view.after_gradient_based_update(timesteps=timesteps)
        for module_id, numbers in results.items():
            self._name_as_rllib(numbers)
            numbers |= {name: value.item() for name, value in view.metrics.take_means(module_id).items()}
        return results

    def _name_as_rllib(self, numbers: dict[str, Any]) -> None:
        """Give rates and norms of registered optimizers RLlib's names, which repeat no `optimizer`."""
        for _, name in self.view._registered:
            for start, end in (("", "learning_rate"), ("gradients_", "global_norm")):
                if (value := numbers.pop(f"{start}{name}_optimizer_{end}", None)) is not None:
                    numbers[f"{start}{name}_{end}"] = value

    def learn_from_episodes(self, episodes: Sequence[Any], settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Take gradient steps on the batch that the connectors make from episodes, and return what `update` returns."""
        view = self.view
        batch = view._learner_connector(
            rl_module=view.module, batch={}, episodes=list(episodes), shared_data={}, metrics=view.metrics
        )
        return self.learn_from_batch(batch, settings)

    def learn_from_batch(
        self, batch: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """Take gradient steps on columns by module id; see `update`."""
        columns = {
            module_id: {name: map_tree(_to_array, column) for name, column in NamedColumns(part).native().items()}
            for module_id, part in batch.items()
        }
        learning = {module_id: part for module_id, part in columns.items() if module_id in self.learning_ids}
        return self.update(
            {
                name: {key: column for key, column in part.items() if _is_column(column)}
                for name, part in learning.items()
            },
            {name: settings[name] for name in learning},
        )

    def group_sharing(self, module_ids: Iterable[str]) -> list[list[str]]:
        """Return one group with all modules, if they take their steps together."""
        return [list(module_ids)] if self._by_hand else super().group_sharing(module_ids)

    def update_group(self, batches: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Take the gradient steps on all modules together, by `_update` of the class, and return the metrics."""
        if not self._by_hand or not batches:
            return super().update_group(batches, settings)
        view, first = self.view, settings[next(iter(batches))]
        for module_id in batches:
            self.optimizer(module_id).set_lr(settings[module_id].lr)
            self.modules[module_id].train()
            _set_coefficients(view, module_id, settings[module_id].coefficients)
            view._defaults[module_id] = _DefaultLoss(self, module_id, settings[module_id].coefficients)
        steps = _Minibatches(batches, first, self.rng, partial(to_tensors, device=self.device))
        reports = {name: UpdateReport(cuts.size, steps.num_minibatches) for name, cuts in steps.cuts.items()}
        for step, minibatches in enumerate(steps):
            self._place = divmod(step, steps.num_minibatches)
            view._norms.clear()
            losses = view._update(minibatches)[1]
            for module_id, loss in losses.items():
                default = view._defaults.get(module_id)
                reported = default.reported if isinstance(default, _DefaultLoss) else {}
                if first.shuffle:  # columns are in the order of the batch only without
                    reported = {name: value for name, value in reported.items() if not value.ndim}
                norms = {**view._norms.get(module_id, {}), **view._norms.get(ALL_MODULES, {})}
                if module_id in reports:
                    reports[module_id].add(loss.detach(), reported, norms, None)
        lrs = {name: self.optimizer(name).end_update() for name in batches}
        return {
            name: {**report.results(), **{f"{key}_optimizer_learning_rate": lr for key, lr in lrs[name].items()}}
            for name, report in reports.items()
        }

    def check_finite(self, losses: Mapping[str, Tensor], gradients: Gradients) -> None:
        """Refuse losses and gradients that are not finite.

        Raises:
            LossError: One is not.
        """
        norm = math.hypot(*(float(gradient.norm()) for gradient in gradients.values())) if gradients else 0.0
        for module_id, loss in losses.items():
            if not math.isfinite(float(loss.detach())) or not math.isfinite(norm):
                raise loss_error(module_id, *self._place, loss.detach(), {}, {"": norm})


def _to_array(column: Any) -> Any:
    return column.detach().cpu().numpy() if isinstance(column, Tensor) else np.asarray(column)


def _is_column(column: Any) -> bool:
    return all(leaf.dtype != object for leaf in leaves(column))


_UNCALLED = (
    "update update_from_batch update_from_episodes additional_update additional_update_for_module add_module "
    "remove_module get_state set_state _make_module _make_batch_if_necessary _create_iterator_if_necessary "
    "_uncompiled_update _update_module_kl_coeff _log_metrics _log_steps_trained_metrics _get_clip_function "
    "_get_global_norm_function _set_optimizer_lr _get_optimizer_state _set_optimizer_state"
).split()


def _check_class(cls: type[Learner], by_hand: bool) -> None:
    """Refuse overridden methods that Corral does not call."""
    for name in _UNCALLED if by_hand else [*_UNCALLED, "should_module_be_updated"]:
        if getattr(cls, name, None) is not getattr(Learner, name, None):
            raise ConfigError(
                f"learner_class: Corral does not call {cls.__name__}.{name}: override compute_loss_for_module, "
                f"before_gradient_based_update, after_gradient_based_update, {', '.join(BY_HAND)}."
            )


class _Minibatches:
    """The minibatches of an update of several modules: as many of each, by module id, by RLlib's names.

    Args:
        batches: Columns by module id.
        settings: Epochs and sizes.
        rng: Generator for shuffling.
        to_device: Function from columns of arrays to columns of tensors.
    """

    def __init__(
        self, batches: Mapping[str, Any], settings: Any, rng: Any, to_device: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> None:
        """Cut the batches."""
        self._settings = settings
        self.cuts = {name: Cuts(batch) for name, batch in batches.items()}
        units = min(cuts.num_units for cuts in self.cuts.values())
        smallest, size = min(cuts.size for cuts in self.cuts.values()), settings.minibatch_size
        self.num_minibatches = min(units, max(1, round(smallest / size))) if size else 1
        self._batches = {name: to_device(dict(batch)) for name, batch in batches.items()}
        for cuts in self.cuts.values():
            cuts.cut(self.num_minibatches, rng if settings.shuffle else None)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in range(self._settings.num_epochs):
            epoch = {name: self._epoch(name) for name in self._batches}
            for parts in zip(*epoch.values(), strict=True):
                yield dict(zip(epoch, parts, strict=True))

    def _epoch(self, module_id: str) -> Iterator[NamedColumns]:
        order, bounds = self.cuts[module_id].draw()
        rows = None if order is None else torch.from_numpy(order)
        batch = self._batches[module_id]
        if rows is not None:
            batch = map_tree(lambda column: column.index_select(0, rows.to(column.device)), batch)
        for start, stop in itertools.pairwise(bounds):
            yield NamedColumns.of(map_tree(lambda column, a=start, b=stop: column[a:b], batch))


class NamedColumns(dict[str, Any]):
    """Columns by RLlib's names; Corral's names are found too."""

    @classmethod
    def of(cls, columns: Mapping[str, Any]) -> NamedColumns:
        """Return columns that have Corral's names by RLlib's."""
        return cls({_RLLIB_NAMES.get(name, name): column for name, column in columns.items()})

    def native(self) -> dict[str, Any]:
        """Return the columns by Corral's names."""
        return {_NATIVE_NAMES.get(name, name): column for name, column in self.items()}

    def __missing__(self, name: str) -> Any:
        if name in _RLLIB_NAMES:
            return self[_RLLIB_NAMES[name]]
        raise KeyError(name)


class Outputs(Mapping[str, Any]):
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


class _DefaultLoss:
    """The loss of the algorithm for the columns of a minibatch; it keeps what it reports."""

    def __init__(self, learner: OwnLearner, module_id: str, coefficients: Mapping[str, float]) -> None:
        """Keep the arguments."""
        self._learner, self._module_id, self._coefficients = learner, module_id, coefficients
        self.reported: dict[str, Tensor] = {}

    def __call__(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the loss."""
        module, loss_of = self._learner.modules[self._module_id], self._learner._default_losses[self._module_id]
        loss, reported = loss_of(module, NamedColumns(batch).native(), self._coefficients)
        self.reported = dict(reported)
        assert isinstance(loss, Tensor)  # losses of groups are refused with these learners
        return loss


class _LossOf:
    """The loss of a learner class for one module, as Corral calls losses: see `corral.learners.losses.UserLoss`.

    Args:
        view: The learner of RLlib.
        module_id: Id of the module.
    """

    def __init__(self, view: Learner, module_id: str) -> None:
        """Keep the arguments."""
        self._view, self._module_id = view, module_id

    def __call__(
        self, module: Any, batch: Mapping[str, Any], coefficients: Mapping[str, float], default_loss: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        """Return the loss of a minibatch, and what to report."""
        view, module_id = self._view, self._module_id
        named, computed = NamedColumns.of(batch), dict[int, Any]()
        _set_coefficients(view, module_id, coefficients)

        def compute_default(given: Mapping[str, Any] = named) -> Any:
            if given is not named or id(given) not in computed:
                computed[id(given)] = default_loss(module, NamedColumns(given).native(), coefficients)
            return computed[id(given)]

        def compute_outputs() -> Mapping[str, Any]:
            if isinstance(module, AdaptedModule):
                found: Mapping[str, Any] = module.forward_train(named)
                return found
            if not computed and hasattr(module, "policy_head"):
                return view_module(module).forward_train(named)  # type: ignore[no-any-return]
            outputs = compute_default()[2]
            return {_RLLIB_NAMES.get(name, name): value for name, value in outputs.items()}

        view._defaults[module_id] = lambda given: compute_default(given)[0]
        loss = view._compute_loss(module_id, named, Outputs(compute_outputs))
        reported = next(iter(computed.values()))[1] if computed else {}
        return loss, {**reported, **view.metrics.take_means(module_id)}


def _set_coefficients(view: Learner, module_id: str, coefficients: Mapping[str, float]) -> None:
    """Give the coefficients of PPO the places where RLlib's learner keeps them."""
    if "kl_coeff" in coefficients:
        view.curr_kl_coeffs_per_module[module_id] = torch.tensor(coefficients["kl_coeff"])
    if "entropy_coeff" in coefficients:
        view.entropy_coeff_schedulers_per_module[module_id] = Scheduler(coefficients["entropy_coeff"])
