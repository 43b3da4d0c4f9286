"""An env that counts its steps in a file, and raises or lets a signal come in the step that it is told."""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from corral.testing import CountingEnv

ERRORS: dict[str, type[BaseException]] = {
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": SystemExit,
    "OSError": OSError,
}


class CountedEnv(CountingEnv):
    """Counts the steps that it took in a file of its own, which survives its process.

    Config:
        record: Directory of the files.
        at: Step of this env at which it fails, from 1, if it is sub-env `vector_index` and nothing failed before.
        how: Name of an exception, or `SIGINT` for the signal to this process.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.record, self.at, self.how = (
            Path(config["record"]),
            config.get("at"),
            config.get("how", "KeyboardInterrupt"),
        )
        self.is_faulty = config.vector_index == config.get("vector_index", 0)
        self.steps = np.memmap(self.record / f"{uuid.uuid4().hex}.steps", np.int64, "w+", shape=(1,))

    def step(self, action: int) -> Any:
        if self.is_faulty and self.at == self.steps[0] + 1 and self._claim_fault():
            if self.how == "SIGINT":
                os.kill(os.getpid(), signal.SIGINT)
            else:
                raise ERRORS[self.how]("as it was told")
        result = super().step(action)
        self.steps[0] += 1
        return result

    def _claim_fault(self) -> bool:
        """Return whether this env is the one to fail: the first that asks, of all processes."""
        try:
            (self.record / "failed").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def steps_taken(record: Path) -> int:
    """Return the steps of all envs, closed ones included."""
    return sum(int(np.fromfile(file, np.int64).sum()) for file in record.glob("*.steps"))  # a new file is empty
