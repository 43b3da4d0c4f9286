"""Seeds and states of random generators: the global ones of a process, which envs and modules use, and runners' own."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from corral.core.ids import DEFAULT_MODULE_ID
from corral.core.tree import copy_nested


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch in this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # For devices that are not there, torch would write down where it was called from, which takes milliseconds.
    (torch if torch.accelerator.is_available() else torch.default_generator).manual_seed(seed)


def module_seed(seed: int | None, module_id: str) -> int:
    """Return the seed of what belongs to one module: the seed of the run for the module of a single agent."""
    if module_id == DEFAULT_MODULE_ID:
        return seed or 0
    entropy = [seed or 0, *module_id.encode()]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0]) >> 1


def runner_seeds(seed: int, worker_index: int, num_restarts: int, in_evaluation: bool) -> list[np.random.SeedSequence]:
    """Return the seeds of a runner's envs, of its actions, of the ids of its episodes, and of its process.

    Runners that differ in any of the arguments draw different numbers.

    Args:
        seed: Seed of the run.
        worker_index: 0 for the embedded runner, 1 and up for others.
        num_restarts: How many runners the runner replaces, one after another.
        in_evaluation: Whether the runner evaluates, rather than collects steps to train on.
    """
    entropy = [seed, worker_index, num_restarts, int(in_evaluation)]
    # Zeros at the end would not change the numbers of a seed below 2**32, but the numbers of a larger seed.
    while entropy[-1] == 0 and len(entropy) > 2:
        entropy.pop()
    return np.random.SeedSequence(entropy).spawn(4)


def id_prefix(seeds: np.random.SeedSequence) -> str:
    """Return the beginning of the ids of a runner's episodes, which tells runs and runners apart."""
    return seeds.generate_state(2, np.uint32).tobytes().hex()


# States of generators, as plain data. Setting a state that does not fit raises TypeError, ValueError or KeyError.


def get_global_rngs() -> dict[str, Any]:
    """Return the states of the global generators of Python, NumPy and torch (on the CPU) in this process."""
    version, numbers, gauss = random.getstate()
    return {
        "python": [version, np.array(numbers, np.uint32), gauss],
        "numpy": copy_nested(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state().numpy(),
    }


def set_global_rngs(state: Mapping[str, Any]) -> None:
    """Set the global generators of this process to states of `get_global_rngs`; all of them, or none."""
    before = get_global_rngs()
    try:
        _set_global_rngs(state)
    except BaseException:
        _set_global_rngs(before)
        raise


def check_global_rngs(state: Mapping[str, Any]) -> None:
    """Check that the global generators can take a state; they are where they were then."""
    before = get_global_rngs()
    set_global_rngs(state)
    set_global_rngs(before)


def _set_global_rngs(state: Mapping[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(torch.tensor(state["torch"]))


def get_rng(rng: np.random.Generator) -> dict[str, Any]:
    """Return the state of a generator."""
    state: dict[str, Any] = copy_nested(rng.bit_generator.state)
    return state


def set_rng(rng: np.random.Generator, state: Mapping[str, Any]) -> None:
    """Set a generator to a state of `get_rng`."""
    check_rng(rng, state)
    bits: Any = rng.bit_generator
    bits.state = state


def check_rng(rng: np.random.Generator, state: Mapping[str, Any]) -> None:
    """Check that a generator can take a state, without changing it."""
    bits: Any = type(rng.bit_generator)(0)
    bits.state = state


def check_bits(state: Mapping[str, Any]) -> None:
    """Check a state of `get_rng` of a generator of NumPy that is not at hand."""
    kinds = (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
    bits: Any = {kind.__name__: kind for kind in kinds}[state["bit_generator"]](0)
    bits.state = state


def get_seeds(seeds: np.random.SeedSequence) -> dict[str, Any]:
    """Return which seeds a sequence will give next: its entropy, its place, and how many seeds were drawn from it."""
    entropy = seeds.entropy
    return {
        "entropy": list(entropy) if isinstance(entropy, (list, tuple)) else entropy,
        "spawn_key": list(seeds.spawn_key),
        "num_drawn": seeds.n_children_spawned,
    }


def make_seeds(state: Mapping[str, Any]) -> np.random.SeedSequence:
    """Return a sequence that gives the seeds that come next after `get_seeds`."""
    return np.random.SeedSequence(
        state["entropy"], spawn_key=tuple(state["spawn_key"]), n_children_spawned=state["num_drawn"]
    )
