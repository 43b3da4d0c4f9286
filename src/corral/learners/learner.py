"""The learner: turns batches into gradient steps. It knows modules and columns, and no env."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from corral.callbacks.dispatch import Dispatcher
from corral.core.columns import Columns
from corral.core.devices import find_device
from corral.core.interrupts import interruptible
from corral.core.metrics.logger import MetricsLogger
from corral.core.metrics.timers import Timers
from corral.core.seeding import get_rng, set_rng
from corral.core.tree import Tree, num_rows, slice_rows
from corral.core.views import Viewable
from corral.errors import CallbackError, ColumnError, ConfigError, LossError
from corral.learners.group_optimizers import GroupOptimizers, make_named_optimizer, make_optimizer
from corral.learners.learner_state import check_learner_state, get_learner_state, set_learner_state
from corral.learners.losses import Batch, Loss
from corral.learners.minibatches import Cuts
from corral.learners.optimizers import ModuleOptimizer
from corral.learners.settings import MAIN_LOSS, LearningSpec, UpdateSettings
from corral.learners.sharing import group_sharing, parameters_of_several, shared_parameters, take_turns
from corral.learners.update import LearnerPart, ModuleUpdate, Objective, to_tensors
from corral.modules.distributions import module_action_space
from corral.modules.inference import ActingWeights
from corral.modules.layers import ConstrainedLayer, Layers
from corral.modules.memory import module_inputs
from corral.modules.module import Module
from corral.modules.threads import num_threads_for, torch_threads

if TYPE_CHECKING:
    from corral.learners.distributed import Peers

log = logging.getLogger("corral")

NO_CHANGE = contextlib.nullcontext()
# Very large batches are evaluated in chunks of this many observations, to bound memory.
EVALUATION_CHUNK = 8192


class Learner(Viewable):
    """Minibatch gradient steps on one or more modules, each with its own loss, optimizer and settings.

    Args:
        modules: Modules by module id. The learner moves them to the device and keeps them. Modules may have parameters
            in common.
        specs: Loss and optimizer by module id; a module without an entry does not learn.
        device: `"auto"` (CUDA when there is one), or a torch device name.
        num_threads: Intra-op threads, or `"auto"`: one for small nets.
        seed: Seed of the generator for shuffling.
        compile: Whether `torch.compile` compiles the losses, or `"cuda_graphs"`; see `LearnersSettings`.
        precision: Precision of the products in layers when losses are computed, `"float32"` or `"bfloat16"`.
        callbacks: Callbacks of the learner's events; `None` is none.

    Attributes:
        modules: Modules by module id.
        device: Device of the modules.
        metrics: Logger passed to callbacks, whose values are in `result["learners"]`.
        timers: Timers of the seconds in callbacks, which are no seconds of learning.
        rng: Generator for shuffling.
        peers: Learners that take every gradient step together with this one, or `None`.
    """

    def __init__(
        self,
        modules: Mapping[str, Module],
        specs: Mapping[str, LearningSpec],
        *,
        device: str = "auto",
        num_threads: int | str = "auto",
        seed: int = 0,
        compile: bool | str = False,
        precision: str = "float32",
        callbacks: Dispatcher | None = None,
    ) -> None:
        """Move the modules to the device and make an optimizer for each that learns.

        Raises:
            ConfigError: A spec names no module, or the device does not compute in this precision.
        """
        if unknown := sorted(specs.keys() - modules.keys()):
            raise ConfigError(f"learner: there are specs for modules {unknown}, and only modules {sorted(modules)}.")
        self.device = find_device(device)
        self.modules: dict[str, Module] = {}
        self._compile, self._precision, self._num_threads_setting = compile, precision, num_threads
        if precision == "bfloat16":
            from corral.learners.low_precision import check_bfloat16

            check_bfloat16(self.device)
        if compile == "cuda_graphs" and self.device.type != "cuda":
            log.warning("learners: %s has no CUDA graphs, so compile='cuda_graphs' does what True does.", self.device)
            self._compile = True
        self._parts: dict[str, LearnerPart] = {}
        self._shared: dict[str, set[nn.Parameter]] = {}
        for module_id, module in modules.items():
            self.add_module(module_id, module, specs.get(module_id))
        self.rng = np.random.default_rng(seed)
        self.metrics = MetricsLogger()
        self.callbacks = callbacks or Dispatcher([], {})
        self.timers = Timers()
        self.peers: Peers | None = None
        self._make_update: Callable[..., ModuleUpdate] = ModuleUpdate

    def set_peers(self, peers: Peers) -> None:
        """Take every gradient step together with other learners from now on."""
        from corral.learners.joint_update import JointUpdate

        self.peers, self._make_update = peers, partial(JointUpdate, peers)

    def add_module(self, module_id: str, module: Module, spec: LearningSpec | None) -> None:
        """Move a module to the device and keep it; without a spec it does not learn."""
        module = module.to(self.device)
        threads = num_threads_for(module, self._num_threads_setting)
        constraints = [layer.constrain for layer in module.modules() if isinstance(layer, ConstrainedLayer)]
        part = LearnerPart(module_id, module, Layers(module), ActingWeights(module), threads, constraints)
        self._parts[module_id] = part
        if spec is not None:
            if self._precision == "bfloat16":
                from corral.learners.low_precision import warn_of_refused

                warn_of_refused(module_id, module, self.device)
            part.objectives[MAIN_LOSS] = Objective(spec.loss, self.make_optimizer(module_id, module, spec))
            for name, other in spec.others.items():
                adapted = self._adapt(module_id, other.loss)
                part.objectives[name] = Objective(adapted, make_named_optimizer(name, module, other))
            self.set_losses({module_id: spec.loss})
        self.modules[module_id] = module
        self._find_shared()

    def make_optimizer(self, module_id: str, module: Module, spec: LearningSpec) -> ModuleOptimizer | GroupOptimizers:
        """Return the optimizer of a module that learns; a subclass may return `ready_optimizers(...)`.

        Args:
            module_id: Id of the module.
            module: The module, on the learner's device.
            spec: How the module learns.

        Raises:
            ConfigError: The spec names other groups of parameters, or an optimizer refuses the parameters.
        """
        return make_optimizer(module.parameter_groups(), spec)

    def remove_module(self, module_id: str) -> None:
        """Forget a module, with its losses and its optimizers."""
        self.modules.pop(module_id, None)
        self._parts.pop(module_id, None)
        self._find_shared()

    def _find_shared(self) -> None:
        """Find the parameters that several modules or several optimizers of a module have; no vector joins these."""
        self._shared = shared_parameters(self.modules)
        for module_id, part in self._parts.items():
            apart = self._shared.get(module_id, set()) | parameters_of_several(
                objective.optimizer.groups for objective in part.objectives.values()
            )
            for objective in part.objectives.values():
                objective.optimizer.keep_apart(apart)

    def group_sharing(self, module_ids: Iterable[str]) -> list[list[str]]:
        """Return module ids in groups: modules of a group share parameters; see `corral.learners.sharing`."""
        return group_sharing(module_ids, self._shared) if self._shared else [[module_id] for module_id in module_ids]

    def optimizer(self, module_id: str, loss: str = MAIN_LOSS) -> ModuleOptimizer | GroupOptimizers:
        """Return the optimizer of a loss of a module."""
        return self._parts[module_id].objectives[loss].optimizer

    def torch_optimizer(self, module_id: str) -> torch.optim.Optimizer | None:
        """Return the optimizer of torch of a module; of several, the first."""
        return self.optimizer(module_id).torch_optimizer

    @property
    def optimizers(self) -> dict[str, ModuleOptimizer | GroupOptimizers]:
        """All optimizers, by module id, and for a named loss by `module_id/loss`."""
        return {
            module_id if name == MAIN_LOSS else f"{module_id}/{name}": objective.optimizer
            for module_id, part in self._parts.items()
            for name, objective in part.objectives.items()
        }

    @property
    def learning_ids(self) -> list[str]:
        """Ids of the modules that have a loss and an optimizer."""
        return [module_id for module_id, part in self._parts.items() if part.objectives]

    def set_losses(self, losses: Mapping[str, Loss]) -> None:
        """Use other main losses from the next update on, by module id.

        Raises:
            ConfigError: A module does not learn.
        """
        for module_id, loss in losses.items():
            if module_id not in self.learning_ids:
                self._refuse_loss(module_id, MAIN_LOSS)
            adapted = self._adapt(module_id, loss)
            self._parts[module_id].objectives[MAIN_LOSS] = Objective(adapted, self.optimizer(module_id))

    def _adapt(self, module_id: str, loss: Loss) -> Loss:
        """Return a loss that is compiled, and computes in the precision of the settings."""
        if self._compile:
            from corral.learners.compiled_losses import compile_loss

            loss = compile_loss(loss, module_id, cuda_graphs=self._compile == "cuda_graphs")
        if self._precision == "bfloat16":
            from corral.learners.low_precision import in_bfloat16

            loss = in_bfloat16(loss, self.device)
        return loss

    def _refuse_loss(self, module_id: str, loss: str) -> NoReturn:
        """Raise for a module that does not learn, or that has no such loss."""
        if module_id not in self.learning_ids:
            raise ConfigError(
                f"learner: module {module_id!r} has no loss and optimizer, so it cannot learn; the modules that learn "
                f"are {sorted(self.learning_ids)}."
            )
        raise ConfigError(
            f"learner: module {module_id!r} has no loss {loss!r}; it has {sorted(self._parts[module_id].objectives)}. "
            "Name it in `LearningSpec.others`."
        )

    def _fire(self, event: str, module_id: str, **arguments: Any) -> None:
        if event not in self.callbacks.heard:
            return
        start = time.perf_counter()
        self.callbacks.fire(
            event,
            learner=self,
            metrics_logger=self.metrics,
            policy_id=module_id,
            policy=self.modules[module_id],
            **arguments,
        )
        seconds = time.perf_counter() - start
        self.timers.add({"learning": -seconds, "callbacks": seconds})

    def log_into(self, metrics: MetricsLogger, timers: Timers) -> None:
        """Log into the metrics of the algorithm, under `learners`, and into its timers from now on."""
        self.metrics.become_view(metrics, "learners")
        self.timers = timers

    def update(self, batches: Mapping[str, Batch], settings: Mapping[str, UpdateSettings]) -> dict[str, dict[str, Any]]:
        """Take gradient steps on every module that has a batch and settings, and return the metrics by module id.

        Modules that share parameters take their steps in turn, one minibatch each; other modules one after another.

        Args:
            batches: Batches by module id; columns are NumPy arrays.
            settings: Settings by module id. A module without an entry does not learn, and its batch is not used.

        Returns:
            By module id: the loss's scalars and the norms of the gradients, averaged over the steps, and the columns
            that the loss reported, of the last epoch, as arrays `[B]` in the order of the batch.

        Raises:
            LossError: A batch is empty; or a loss or gradient is not finite: that step is not taken, and the weights
                stay finite; or a loss returns something else than `Loss` says, has no scalar for a group of parameters,
                or depends on no trainable parameter.
            ConfigError: A module with settings has no loss, or the settings name unknown groups of parameters, or a
                layer or parameter was replaced.
            ColumnError: A callback of `on_gradients` added or removed gradients, or changed their shape; or a loss
                asked for a column that the batch lacks.
            CallbackError: A callback raised, wrote an action outside the action space, or gave a result the name of a
                number that the learner reports.
        """
        results: dict[str, dict[str, Any]] = {}
        # Wrong settings of any module are refused before the first module takes a step.
        for module_id, each in settings.items():
            if module_id not in self._parts or each.loss not in self._parts[module_id].objectives:
                self._refuse_loss(module_id, each.loss)
        for group in self.group_sharing([module_id for module_id in batches if module_id in settings]):
            shown = {module_id: batches[module_id] for module_id in group}
            added: dict[str, dict[str, Any]] = {module_id: {} for module_id in group}  # by callbacks, to the results
            if "on_learn_on_batch" in self.callbacks.heard:
                shown = {
                    module_id: self._show_batch(module_id, shown[module_id], added[module_id]) for module_id in group
                }
            for module_id, batch in shown.items():
                if not num_rows(batch):
                    raise LossError(
                        f"learners/{module_id}: the batch is empty. Did a callback set all of `valid` to False?"
                    )
            # Small nets are faster with one thread; setting the number costs, so it is set only where it differs.
            num_threads = self._parts[group[0]].num_threads
            with NO_CHANGE if num_threads in (None, torch.get_num_threads()) else torch_threads(num_threads):
                reports = self.update_group(shown, settings)
            for module_id, metrics in reports.items():
                results[module_id] = metrics
                if self.callbacks.heard:
                    self._add_results(module_id, metrics, added[module_id])
                    self._fire("on_update_end", module_id, result=metrics)
        return results

    def _add_results(self, module_id: str, metrics: dict[str, Any], added: Mapping[str, Any]) -> None:
        """Add what callbacks of `on_learn_on_batch` put into their `result`."""
        if taken := sorted(metrics.keys() & added.keys()):
            raise CallbackError(
                f"on_learn_on_batch: a callback added {', '.join(map(repr, taken))} to `result`, and learners/"
                f"{module_id} reports numbers of these names: choose other names."
            )
        metrics |= added

    @interruptible
    def update_group(
        self, batches: Mapping[str, Batch], settings: Mapping[str, UpdateSettings]
    ) -> dict[str, dict[str, Any]]:
        """Take the gradient steps on modules that share parameters, or on one module, and return the metrics.

        A subclass may take them in another way. It then overrides `group_sharing` too, if modules without common
        parameters are to learn together.

        Args:
            batches: Batches of the modules by module id; columns are NumPy arrays.
            settings: Settings by module id, also of modules that are not in `batches`.

        Returns:
            By module id what the update reports, as `UpdateReport.results` returns it.
        """
        # A batch of arrays comes from runners on the CPU; a batch of tensors was sampled on a device and stays there.
        show_gradients = self._show_gradients if "on_gradients" in self.callbacks.heard else None
        updates = [
            (self._make_device_update if isinstance(batch.get("actions"), Tensor) else self._make_update)(
                self._parts[name], batch, settings[name], self.device, self.rng, show_gradients
            )
            for name, batch in batches.items()
        ]
        # Modules with common parameters alternate, so that none takes all its steps from weights that the other left.
        if len(updates) > 1:
            take_turns(updates)
        else:
            for minibatch in updates[0].minibatches():
                updates[0].step(minibatch)
        return {update.module_id: update.results() for update in updates}

    def _make_device_update(
        self, part: LearnerPart, batch: Batch, settings: UpdateSettings, *args: Any
    ) -> ModuleUpdate:
        """Return the update of a module from a batch of tensors."""
        from corral.learners.device_update import DeviceUpdate

        suits = DeviceUpdate.suits(part, settings) and self._make_update is ModuleUpdate
        return (DeviceUpdate if suits else self._make_update)(part, batch, settings, *args)

    def _show_batch(self, module_id: str, batch: Batch, added: dict[str, Any]) -> Batch:
        """Fire `on_learn_on_batch`, and return the batch as the callbacks left it; they may add to the results.

        Raises:
            CallbackError: A callback raised, or wrote an action outside the action space.
        """
        columns = Columns(batch, num_rows(batch))
        self._fire("on_learn_on_batch", module_id, train_batch=columns, result=added)
        if "actions" in columns.columns:
            space = module_action_space(self.modules[module_id].action_space)
            self.callbacks.check_actions(columns.columns["actions"], space, "on_learn_on_batch")
        return columns.columns

    def _show_gradients(
        self, module_id: str, optimizer: ModuleOptimizer | GroupOptimizers, groups: Collection[str]
    ) -> None:
        """Fire `on_gradients`; gradients that a callback replaced in the dict are copied to the parameters.

        Raises:
            ColumnError: Gradients were added or removed, or have another shape.
        """
        moving = {id(p) for name in groups for p in optimizer.groups[name]}
        named = self.modules[module_id].named_parameters()
        gradients = {name: p.grad for name, p in named if p.grad is not None and id(p) in moving}
        shown = dict(gradients)
        self._fire("on_gradients", module_id, gradients=shown)
        if shown.keys() != gradients.keys():
            raise ColumnError(
                f"on_gradients: gradients were added or removed: {sorted(shown.keys() ^ gradients.keys())}."
            )
        for name, gradient in gradients.items():
            new = shown[name]
            if new is gradient:
                continue
            if not isinstance(new, Tensor) or new.shape != gradient.shape:
                was = getattr(new, "shape", type(new).__name__)
                raise ColumnError(f"on_gradients: {name!r} must be a tensor {tuple(gradient.shape)}, and is {was}.")
            gradient.copy_(new)

    def values(self, module_id: str, obs: Tree, states: Tree = None) -> Any:
        """Return the module's state values, float32 `[B]`, for a tree of observations `[B, ...]`, arrays or tensors.

        Args:
            module_id: Id of the module.
            obs: Observations.
            states: For a module with memory, the states in which it sees them, a tree of `[B, ...]`.
        """
        inputs = {"obs": obs} if states is None else {"obs": obs, "states": states}
        module, num_threads = self.modules[module_id], self._parts[module_id].num_threads
        return evaluate_in_chunks(module, lambda module, rows: module.value(*rows.values()), inputs, num_threads)

    def add_critic_states(self, module_id: str, rollout: Any) -> None:
        """Add the states of a central critic with memory to the column `states` of a rollout of arrays."""
        module, num_threads = self.modules[module_id].eval(), self._parts[module_id].num_threads
        with torch_threads(num_threads), torch.inference_mode():
            seen = to_tensors({"obs": rollout["critic_obs"], "valid": rollout.valid}, self.device)
            found = module.critic_states(seen["obs"], seen["valid"])
        if found:
            arrays = {name: part.cpu().numpy() for name, part in found.items()}
            rollout.columns["states"] = {**rollout.states, **arrays}

    def dist_inputs(self, module_id: str, batch: Batch) -> Any:
        """Return the outputs of the module's policy, float32 `[B, d]`, for a batch of arrays or tensors."""
        module, num_threads = self.modules[module_id], self._parts[module_id].num_threads
        return evaluate_in_chunks(module, policy_of_rows, policy_columns(batch), num_threads)

    def get_weights(self) -> dict[str, dict[str, NDArray[Any]]]:
        """Return the weights by module id and parameter name; on the CPU they are views: copy them before an update."""
        return {
            module_id: {name: value.detach().cpu().numpy() for name, value in module.state_dict().items()}
            for module_id, module in self.modules.items()
        }

    def get_acting_weights(self) -> dict[str, dict[str, NDArray[Any]]]:
        """Return only the weights that runners need to act; on the CPU they are views: copy them before an update.

        Raises:
            ConfigError: A layer or parameter was replaced.
        """
        for module_id, part in self._parts.items():
            part.layers.check_same(module_id)
        return {module_id: part.acting.get() for module_id, part in self._parts.items()}

    def set_weights(self, weights: Mapping[str, Mapping[str, NDArray[Any]]]) -> None:
        """Copy weights into the modules, by module id and parameter name."""
        for module_id, arrays in weights.items():
            for name, value in self.modules[module_id].state_dict().items():
                value.copy_(torch.from_numpy(arrays[name]))

    def get_state(self) -> dict[str, Any]:
        """Return a copy of `weights` and `optimizers`, which all learners have in common."""
        return get_learner_state(self.modules, self.optimizers)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check that the learner can continue from a state, without changing anything; see `set_learner_state`."""
        check_learner_state(self.modules, self.optimizers, state)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; see `set_learner_state`."""
        set_learner_state(self.modules, self.optimizers, state)

    def get_own_state(self) -> dict[str, Any]:
        """Return a copy of what this learner does not have in common with others: `rng`, `callbacks` and `metrics`."""
        return {
            "rng": get_rng(self.rng),
            "callbacks": self.callbacks.get_state(),
            "metrics": self.metrics.get_state(),
        }

    def set_own_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `get_own_state`."""
        set_rng(self.rng, state["rng"])
        self.callbacks.set_state(state["callbacks"])
        self.metrics.set_state(state["metrics"])


def policy_columns(batch: Batch) -> Batch:
    """Return the columns of a batch that a policy reads."""
    if "sequence_starts" not in batch:
        return {"obs": batch["obs"]}
    names = ("obs", "states", "sequence_starts", "unit_starts", "critic_obs")
    return {name: batch[name] for name in names if name in batch}


def policy_of_rows(module: Module, rows: Batch) -> Tensor:
    """Return the outputs of a module's policy, float32 `[B, d]`, for columns of `policy_columns`, as tensors."""
    if "sequence_starts" not in rows:
        return module.policy(rows["obs"])
    return module.policy_and_value(*module_inputs(rows))[0]


def evaluate_in_chunks(
    module: Module,
    evaluate: Callable[[Module, Batch], Tensor],
    batch: Batch,
    num_threads: int | None,
) -> Any:
    """Return what a function of a module and columns returns, in evaluation mode and without gradients.

    The result is an array, or for columns of tensors a tensor on the device of the module.
    """
    parts: list[Any] = []
    bounds = Cuts(batch).bounds
    if module.training:
        module.eval()
    device = next(module.parameters()).device
    size = len(bounds) - 1
    units = max(1, EVALUATION_CHUNK * size // max(1, num_rows(batch)))  # rows, or sequences
    first = batch["obs"]
    while isinstance(first, (dict, tuple)):
        first = next(iter(first.values() if isinstance(first, dict) else first))
    stays = isinstance(first, Tensor)  # on the device, where a loss may read it, which inference mode forbids
    with torch_threads(num_threads), torch.no_grad() if stays else torch.inference_mode():
        for unit in range(0, max(1, size), units):
            chunk = slice_rows(batch, int(bounds[unit]), int(bounds[min(unit + units, size)]))
            outputs = evaluate(module, to_tensors(chunk, device))
            parts.append(outputs if stays else outputs.cpu().numpy())
    return torch.cat(parts) if stays else np.concatenate(parts)
