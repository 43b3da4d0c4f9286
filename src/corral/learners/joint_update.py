"""An update of one module that several learners take together."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from corral.errors import LossError
from corral.learners.distributed import Peers
from corral.learners.minibatches import Cuts, row_bounds
from corral.learners.settings import Stop
from corral.learners.update import Minibatch, ModuleUpdate


class JointUpdate(ModuleUpdate):
    """An update in which the gradients of each step are averaged over all learners, weighted by rows.

    All learners take as many gradient steps, and must have the same trainable parameters.

    Args:
        peers: The learners.
        *arguments: Arguments of `ModuleUpdate`, without `smallest`.
    """

    def __init__(self, peers: Peers, *arguments: Any) -> None:
        """Cut the batch into as many minibatches as the other learners.

        Raises:
            LossError: The learners have frozen different parameters.
            ConfigError: See `ModuleUpdate`.
        """
        part, batch, settings, *_ = arguments
        self._peers, optimizer, cuts = peers, part.objectives[settings.loss].optimizer, Cuts(batch)
        optimizer.sync()
        self._sizes, units, fingerprints = self._peers.gather(cuts.size, cuts.num_units, optimizer.fingerprint)
        if len(set(fingerprints)) > 1:
            raise LossError(
                f"learners/{part.module_id}: the learners have frozen different parameters. Change requires_grad in "
                "all of them, with learner_group.foreach_module or in a callback that runs in every learner."
            )
        super().__init__(*arguments, smallest=(min(self._sizes), min(units)))

    def minibatches(self) -> Iterator[Minibatch]:
        """Yield the minibatches; see `ModuleUpdate.minibatches`."""
        for minibatch in super().minibatches():
            if minibatch.place[1] == 0:
                self._shares = self._find_shares()
            yield minibatch

    def results(self) -> dict[str, Any]:
        """Return what this learner's gradient steps reported, and copy the first learner's buffers."""
        self._peers.copy_buffers(self.module)
        return super().results()

    def _find_shares(self) -> Sequence[float]:
        """Return this learner's share of the rows of each minibatch of an epoch."""
        own = self.cuts.sizes()
        if "unit_starts" in self._batch:  # the sizes of the minibatches of others do not follow from their batches
            in_all = np.sum(self._peers.gather(*own), axis=1)
        else:
            in_all = np.sum([np.diff(row_bounds(size, len(own))) for size in self._sizes], axis=0)
        shares: list[float] = (np.array(own) / in_all).tolist()
        return shares

    def _compute_gradients(self, loss: Any, is_finite: bool, groups: Collection[str], minibatch: Minibatch) -> bool:
        is_finite = super()._compute_gradients(loss, is_finite, groups, minibatch)
        steppable = [parameter for name in groups for parameter in self.optimizer.steppable[name]]
        return self._peers.average(steppable, self._shares[minibatch.place[1]], not is_finite)

    def _error(self, error: LossError) -> LossError:
        return self._peers.problems(error)

    def _asks_to_stop(self, stop: Stop) -> bool:
        """Return whether `stop` ends the epochs; all learners get the first one's answer."""
        means = self._peers.average_scalars(self.report.epoch_means(), self.cuts.size)
        [answers] = self._peers.gather(int(stop(means)))
        return bool(answers[0])
