"""What an algorithm has for one module in its own process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from corral.algorithms.driver_policy import DriverPolicy
from corral.core.tree import Tree, map_tree
from corral.modules.heuristic import HeuristicModule
from corral.modules.memory import initial_states
from corral.modules.module import Module
from corral.modules.pixels import Scaling
from corral.modules.transforms.observations import NormalizeObservations
from corral.modules.transforms.pipeline import Pipeline

if TYPE_CHECKING:
    from corral.data.replay import ReplayBuffer

log = logging.getLogger("corral")


@dataclass
class ModuleRecord:
    """One module of an algorithm: its config, what acts with it here, and the module that learns.

    Attributes:
        module_id: Its id.
        config: Its frozen config; with several agents, with the module's own settings in it.
        policy: The policy of this process, with the exploration, and the pipeline of transforms.
        module: The module in the learner of this process.
        shows_batches: Whether code of the user gets the batches of the module: a loss, a learner, a callback or an
            algorithm class. Batches then have columns that the algorithm's own loss does not read.
        has_weights: Whether the module can learn: it is no heuristic.
        has_memory: Whether the module has memory.
    """

    module_id: str
    config: Any
    policy: DriverPolicy
    module: Module
    shows_batches: bool
    has_weights: bool = field(init=False)
    has_memory: bool = field(init=False)
    _on_device: tuple[Pipeline, Callable[[Tree], Tree]] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Resolve what does not change, and say how images are read."""
        self.has_weights = not isinstance(self.module, HeuristicModule)
        self.has_memory = self.module.has_memory()
        log_images(self.module_id, self.module, self.policy.pipeline)

    def num_sequences(self, num_steps: int) -> int:
        """Return how many sequences a batch of about so many steps has: whole ones, and at least one per learner."""
        return max(1, int(self.config.num_learners), num_steps // self.module.max_seq_len)

    def draw_sequences(self, buffer: ReplayBuffer, num_steps: int, **form: Any) -> dict[str, Any]:
        """Return a batch of sequences, of about so many steps, for a module with memory; see `num_sequences`.

        Args:
            buffer: Buffer to draw from.
            num_steps: Steps of the batch.
            **form: Further arguments of `ReplayBuffer.sample_sequences`.
        """
        return buffer.sample_sequences(
            self.num_sequences(num_steps),
            map_tree(lambda leaf: leaf[0].numpy(force=True), initial_states(self.module, 1)),  # on a GPU, too
            seq_len=self.module.max_seq_len,
            burn_in=self.config.burn_in_len,
            **form,
        )

    def transform_stored(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch from a buffer, of arrays or tensors, with its observations as the module sees them."""
        pipeline = self.policy.pipeline
        if pipeline is None:
            return batch
        rewards = batch.get("rewards")
        from_stored = pipeline.from_stored if not isinstance(rewards, Tensor) else self._tensor_form(pipeline, rewards)
        return batch | {name: from_stored(batch[name]) for name in ("obs", "next_obs") if name in batch}

    def _tensor_form(self, pipeline: Pipeline, column: Tensor) -> Callable[[Tree], Tree]:
        """Return the pipeline as a function of tensors on a column's device; new statistics make another pipeline."""
        if self._on_device is None or self._on_device[0] is not pipeline:
            self._on_device = pipeline, pipeline.tensor_form(column.device)
        return self._on_device[1]


def log_images(module_id: str, module: Module, pipeline: Pipeline | None) -> None:
    """Log how the networks of a module read images; a warning where nothing says how to scale them."""
    # Known by their scaling: encoders of images, and world models, whose file nobody else imports.
    found: list[Any] = [part for part in module.modules() if isinstance(getattr(part, "scaling", None), Scaling)]
    encoders = {part.description: part for part in found}
    normalized = pipeline is not None and any(isinstance(each, NormalizeObservations) for each in pipeline.transforms)
    for description, encoder in encoders.items():
        if encoder.is_wide and not normalized:
            log.warning(
                "Module %r: %s. Networks learn badly from numbers far outside [-1, 1]: add "
                "transforms=[NormalizeObservations()] or, where the module takes it, set "
                "model_config={'image_scale': ...} to the number to multiply them by, 1.0 if they are right.",
                *(module_id, description),
            )
        else:
            log.info("Module %r: %s.", module_id, description)
