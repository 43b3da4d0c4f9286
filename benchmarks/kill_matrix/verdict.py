"""What must be true after a trial: nothing is lost, nothing is left running, and nothing is silent."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from corral.core.metrics.result import describe_faults
from corral.errors import CheckpointError
from corral.runs.checkpoint import find_checkpoint, read_checkpoint
from kill_matrix.cells import ITERATIONS, Cell

INTERRUPTED = (129, 130, 143)
OWN_STATUSES = (1, 2, 3, 4, 5, 6, 7)


@dataclass
class Attempt:
    """One run of the command.

    Attributes:
        status: Exit status; negative for the signal that ended the process.
        errors: What it wrote to standard error.
        left: Processes that were left, as texts.
        is_late: Whether it had to be killed because it did not end.
        seconds: How long it took.
        happened: What failed, where, and in which process, so far in the trial.
        checkpoint: Iteration of the newest complete checkpoint afterwards; -1 for none; a text for what is wrong.
    """

    status: int
    errors: str
    left: list[str]
    is_late: bool
    seconds: float
    happened: str
    checkpoint: int | str


def rows_of(run_dir: Path) -> list[Any]:
    """Return the results of a run; a line that is no JSON is its text."""
    file = run_dir / "result.jsonl"
    rows: list[Any] = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            rows.append(line)
    return rows


def state_of_checkpoint(run_dir: Path) -> int | str:
    """Return the iteration of the newest complete checkpoint; -1 if there is no checkpoint, a text if it is damaged."""
    checkpoints = run_dir / "checkpoints"
    if not checkpoints.is_dir() or not any((path / "metadata.json").exists() for path in checkpoints.iterdir()):
        return -1
    try:
        return int(read_checkpoint(find_checkpoint(run_dir)).metadata["training_iteration"])
    except CheckpointError as error:
        return str(error)


def digest_of_weights(run_dir: Path) -> str:
    """Return a digest of the weights in the newest checkpoint of a run."""
    digest = hashlib.sha256()
    weights = read_checkpoint(find_checkpoint(run_dir), with_state=False).weights
    for module_id, arrays in sorted(weights.items()):
        for name, array in sorted(arrays.items()):
            digest.update(f"{module_id}/{name}/{array.dtype}/{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


# After each run of the command.


def after_attempt(cell: Cell, run_dir: Path, attempt: Attempt, *, is_disturbed: bool) -> list[str]:
    """Return what is wrong after one run of the command.

    Args:
        cell: The cell.
        run_dir: Directory of the run.
        attempt: The run of the command.
        is_disturbed: Whether the fault came in it; otherwise it must have succeeded.
    """
    problems = [f"left running: {left}" for left in attempt.left]
    if attempt.is_late:
        problems.append(f"the run did not end: {attempt.errors[-1500:]}")
        return problems
    if isinstance(attempt.checkpoint, str):
        problems.append(f"the newest checkpoint is not whole: {attempt.checkpoint}")
    else:
        may_lack = cell.kind in ("disk", "memory") and "cannot be written" in attempt.errors + _text(
            run_dir / "run.log"
        )
        problems += _checkpoint_is_new(run_dir, attempt.checkpoint, may_lack=may_lack)
    if attempt.status == 0:
        return problems
    if not is_disturbed:
        problems.append(f"status {attempt.status} without a fault: {attempt.errors[-1500:]}")
    elif attempt.status not in statuses_of(cell):
        problems.append(f"status {attempt.status} is not one of {statuses_of(cell)}: {attempt.errors[-1500:]}")
    elif attempt.status > 0 and attempt.status not in INTERRUPTED:
        problems += _says_why(attempt, may_be_foreign=cell.kind == "memory")
    return problems


def statuses_of(cell: Cell) -> tuple[int, ...]:
    """Return the exit statuses with which a run may end by the fault of a cell."""
    if cell.phase == "resume":
        return (-9, *INTERRUPTED, 3, 5, 7, 1)
    if cell.kind == "memory" and cell.actor == "driver":
        return (0, *OWN_STATUSES, -6, -11)  # C++ code that gets no memory aborts
    if cell.kind == "end":
        return (*INTERRUPTED, -1, -2, -15)  # before there is a handler, while the process starts
    return {
        "dies": (-9,),
        "ends": (3, 5, 1) if cell.kind == "memory" else (3, 5),
        "any": (0, *OWN_STATUSES, -9),
        "warns": (0, 7),  # 7 where the last state could not be written either
    }.get(cell.expects, (0,))


def _says_why(attempt: Attempt, *, may_be_foreign: bool = False) -> list[str]:
    """Return a problem if there is no message that names a thing and a place; a foreign error may have a traceback."""
    lines = [line for line in attempt.errors.splitlines() if line.startswith("corral: ")]
    if may_be_foreign and "OpenBLAS error" in attempt.errors:  # it ends the process by itself
        return []
    has_traceback = may_be_foreign and "Traceback (most recent call last)" in attempt.errors
    if not lines and not has_traceback:
        return [f"status {attempt.status} and no message: {attempt.errors[-500:]!r}"]
    if lines and len(lines[-1]) < 30 and not has_traceback:
        return [f"a message that says little: {lines[-1]!r}"]
    return []


def _checkpoint_is_new(run_dir: Path, iteration: int, *, may_lack: bool) -> list[str]:
    """Return a problem if the newest checkpoint is older than promised: one follows each result."""
    rows = [row for row in rows_of(run_dir) if isinstance(row, dict)]
    last = max((int(row["training_iteration"]) for row in rows), default=0)
    if iteration < last - 1 and last > 1 and not may_lack:
        return [f"the newest checkpoint is of iteration {iteration}, and there is a result of iteration {last}"]
    if iteration > last and not may_lack:
        return [f"the newest checkpoint is of iteration {iteration}, and the last result of {last}"]
    return []


# At the end.


def at_the_end(
    cell: Cell, run_dir: Path, record: Path, attempts: Sequence[Attempt], reference: Mapping[str, Any]
) -> list[str]:
    """Return what is wrong after the last run of the command."""
    last = attempts[-1]
    problems = [] if last.happened else ["the fault did not happen"]
    if last.is_late:
        return problems
    if last.status != 0:
        return [*problems, f"the run cannot be finished: status {last.status}: {last.errors[-1500:]}"]
    rows, log = rows_of(run_dir), _text(run_dir / "run.log")
    said = log + "".join(attempt.errors for attempt in attempts)
    problems += results_are_unbroken(rows, may_lack="may be missing" in said)
    problems += _table_agrees(run_dir, rows, may_lack="may be missing" in said)
    if rows and isinstance(rows[-1], dict):
        problems += _run_is_complete(cell, rows[-1], last)
        if cell.expects in ("survives", "skips") and len(attempts) == 1:
            problems += is_not_silent(cell, rows, log)
            problems += steps_add_up(record, rows[-1], slack=8 * cell.num_runners)
    if cell.expects == "warns" and "WARNING" not in log and "annot" not in said:
        problems.append("silent: a full disk, and no warning")
    if cell.is_exact and digest_of_weights(run_dir) != reference["weights"]:
        problems.append("the weights are not the weights of an undisturbed run")
    return problems


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def results_are_unbroken(rows: Sequence[Any], *, may_lack: bool = False) -> list[str]:
    """Return what is wrong with the results: iterations 1 to n, each once, and steps that add up.

    Args:
        rows: The lines of result.jsonl.
        may_lack: Whether the run has said that results may be missing.
    """
    if not rows:
        return [] if may_lack else ["there are no results"]
    if damaged := [row for row in rows if not isinstance(row, dict)]:
        return [f"{len(damaged)} lines of result.jsonl are no JSON, such as {damaged[0]!r:.100}"]
    iterations = [int(row["training_iteration"]) for row in rows]
    problems = []
    if iterations != sorted(set(iterations)) or (not may_lack and iterations != list(range(1, len(rows) + 1))):
        problems.append(f"the iterations are {iterations}")
    for before, row in zip([None, *rows], rows, strict=False):
        lifetime, of_runners = row["num_env_steps_sampled_lifetime"], row["env_runners"]
        if of_runners["num_env_steps_sampled_lifetime"] != lifetime:
            problems.append(f"iteration {row['training_iteration']}: two counts of env steps: {lifetime} and others")
        added = lifetime - (0 if before is None else before["num_env_steps_sampled_lifetime"])
        follows = row["training_iteration"] == 1 + (0 if before is None else before["training_iteration"])
        if follows and added != of_runners["num_env_steps_sampled"]:
            problems.append(
                f"iteration {row['training_iteration']}: {added} more env steps, and "
                f"{of_runners['num_env_steps_sampled']} sampled"
            )
    return problems


def _table_agrees(run_dir: Path, rows: Sequence[Any], *, may_lack: bool) -> list[str]:
    """Return a problem if progress.csv has other iterations than result.jsonl."""
    with (run_dir / "progress.csv").open(newline="", encoding="utf-8", errors="replace") as file:
        found = [row.get("training_iteration") for row in csv.DictReader(file)]
    wanted = [str(row["training_iteration"]) for row in rows if isinstance(row, dict)]
    return [] if found == wanted or may_lack else [f"progress.csv has the iterations {found}, and not {wanted}"]


def _run_is_complete(cell: Cell, row: Mapping[str, Any], last: Attempt) -> list[str]:
    problems = []
    iteration = row["training_iteration"]
    if iteration < ITERATIONS or (cell.engine == "local" and iteration != ITERATIONS):
        problems.append(f"the run ended at iteration {iteration}, and not {ITERATIONS}")
    if last.checkpoint != iteration:
        problems.append(f"the last checkpoint is of iteration {last.checkpoint}, and not {iteration}")
    wanted = min(cell.num_runners, 2)
    if cell.expects == "survives" and row["fault_tolerance"]["num_healthy_workers"] < wanted:
        problems.append(f"not recovered: {row['fault_tolerance']}")
    return problems


def is_not_silent(cell: Cell, rows: Sequence[Any], log: str) -> list[str]:
    """Return a problem if a fault that the run survived shows in no counter, or not in the log."""
    problems = []
    health, evaluation = rows[-1]["fault_tolerance"], rows[-1].get("evaluation", {})
    if cell.actor == "evaluation":
        skipped = [row for row in rows if row["evaluation"]["truncated"] or row["evaluation"]["skipped"]]
        counted = bool(skipped) or evaluation["num_env_runner_failures"] > 0
        described = any(describe_faults(row) for row in rows)
    else:
        counted = health["num_env_runner_failures"] > 0
        described = bool(describe_faults(rows[-1]))
    if not counted:
        problems.append(f"silent: no counter shows the fault: {health}, {evaluation.get('num_remote_worker_restarts')}")
    if not described:
        problems.append("silent: describe_faults() says nothing")
    if " WARNING " not in log and " ERROR " not in log:
        problems.append("silent: run.log has no warning")
    return problems


def steps_add_up(record: Path, row: Mapping[str, Any], slack: int = 0) -> list[str]:
    """Return a problem if env steps were counted that were not taken, or the other way round.

    Args:
        record: Directory of the record.
        row: The last result.
        slack: Steps that runners may have taken besides: a fragment that did not arrive counts as what was asked for,
            and sub-envs that reset take some more.
    """
    taken = sum(int(np.fromfile(file, np.int64)[0]) for file in record.glob("*.runner-steps"))
    health, kept = row["fault_tolerance"], row["num_env_steps_sampled_lifetime"]
    most = kept + health["num_env_steps_lost"] + health["num_env_steps_in_flight"]
    if not kept <= taken <= most + slack:
        return [f"{taken} env steps were taken, {kept} counted, and {most} counted with lost ones and those in flight"]
    return []


# After an export.


def after_export(file: Path, before: bytes | None, attempt: Attempt, *, is_over: bool) -> list[str]:
    """Return what is wrong after `corral export`: the file is the old one or a whole new one.

    Args:
        file: The file.
        before: Content of the file before; `None` if there was none.
        attempt: The run of the command.
        is_over: Whether it was not disturbed, and must have succeeded.
    """
    problems = [f"left running: {left}" for left in attempt.left]
    if attempt.is_late or (is_over and attempt.status):
        return [*problems, f"export ended with status {attempt.status}: {attempt.errors[-1000:]}"]
    if not attempt.happened:
        problems.append("the fault did not happen")
    content = file.read_bytes() if file.exists() else None
    if attempt.status == 0 and content in (None, before):
        problems.append("export says that it succeeded, and there is no new file")
    if content not in (None, before):
        problems += _is_whole(file)
    elif content != before:
        problems.append("the file that was there is gone")
    if attempt.status > 0 and attempt.status not in INTERRUPTED:
        problems += _says_why(attempt)
    litter = [entry.name for entry in file.parent.iterdir() if entry.name.startswith(".policy")]
    if litter and attempt.status >= 0 and not is_over:
        problems.append(f"export left {litter}")
    return problems


def _is_whole(file: Path) -> list[str]:
    try:
        if file.suffix == ".safetensors":
            from safetensors.numpy import load_file

            load_file(file)
        else:
            import zipfile

            with zipfile.ZipFile(file) as archive:
                if bad := archive.testzip():
                    raise ValueError(bad)
    except Exception as error:
        return [f"the exported file is damaged: {error!r}"]
    return []
