"""Modules with memory on sequences: how rows of a batch become padded sequences, and what unrolls a module over them.

A module with memory defines `initial_state()` and `policy(obs, state) -> (dist_inputs, state)`. In a batch for such a
module the rows of each sequence are adjacent, and two columns say what the sequences are: `sequence_starts`, bool
`[M]`, and `states`, a tree of `[M, ...]`, the states before each step. Losses read the other columns as in any batch.
What stays together in minibatches is another matter: the column `unit_starts`, bool `[M]`, says it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from corral.core.tree import Tree, map_tree, named_leaves
from corral.errors import ConfigError

if TYPE_CHECKING:
    from corral.modules.module import Module


def module_inputs(batch: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of `Module.policy_and_value` for a batch of tensors.

    For a module without memory this is the column `obs` alone. For a module with memory these are padded sequences:
    observations `[B, L, ...]`, the first states `[B, ...]` and the mask, bool `[B, L]`. `policy_and_value` returns
    outputs for the entries that the mask selects, `[M, ...]`, in the order of the rows of the batch. Entries outside of
    the mask repeat the last observation of their sequence. What a central critic sees is the fourth argument.
    """
    if "sequence_starts" not in batch:
        return (batch["obs"], None, None, batch["critic_obs"]) if "critic_obs" in batch else (batch["obs"],)
    starts: Tensor = batch["sequence_starts"]
    firsts = starts.nonzero().squeeze(1)
    ends = torch.cat([firsts[1:], firsts.new_tensor([len(starts)])])
    longest = int((ends - firsts).max())
    rows = firsts.unsqueeze(1) + torch.arange(longest, device=firsts.device)
    mask = rows < ends.unsqueeze(1)
    rows = torch.minimum(rows, ends.unsqueeze(1) - 1)
    return (
        map_tree(lambda column: column[rows], batch["obs"]),
        map_tree(lambda column: column[firsts], batch["states"]),
        mask,
        *((map_tree(lambda column: column[rows], batch["critic_obs"]),) if "critic_obs" in batch else ()),
    )


def unroll(module: Any, obs: Tree, state: Tree, mask: Tensor, critic_obs: Tree = None) -> tuple[Tensor, Tensor]:
    """Call `policy` and `value` of a module with memory at each time of padded sequences; see `module_inputs`.

    Returns:
        `dist_inputs`, float32 `[M, D]`, and values, float32 `[M]`.

    Raises:
        ConfigError: The states of the module hold actions, which are not known here.
    """
    if module.ACTION_STATE is not None:
        raise ConfigError(
            f"{type(module).__name__} needs the latest action in its state ({module.ACTION_STATE!r}), which only "
            "DreamerV3 writes there when it learns: leave out ACTION_STATE, or use the transform "
            "PrevActionsPrevRewards."
        )
    outputs, values = [], []
    for t in range(mask.shape[1]):
        now = map_tree(lambda column, t=t: column[:, t], obs)
        seen = now if critic_obs is None else map_tree(lambda column, t=t: column[:, t], critic_obs)
        values.append(module.value(seen, state))
        dist_inputs, state = module.policy(now, state)
        outputs.append(dist_inputs)
    return torch.stack(outputs, 1)[mask], torch.stack(values, 1)[mask]


def burn_in(module: Any, batch: Mapping[str, Any], *, target: bool = False) -> dict[str, Any]:
    """Return a batch of sequences without the steps that only bring the states up to date.

    Stored states are of older weights. The first steps of a sequence, which `burns_in` marks, bool `[M]`, are only
    unrolled, without gradients; the other steps begin with the state after them (Kapturowski et al. 2019, section 3).

    Args:
        module: Module whose `policy` takes an argument `target`.
        batch: Columns `obs`, `states`, `sequence_starts` and `burns_in` `[M, ...]`.
        target: Whether the target network unrolls them.

    Returns:
        The columns `obs`, `states` and `sequence_starts` of the other steps.
    """
    columns = {name: batch[name] for name in ("obs", "states", "sequence_starts")}
    burns: Tensor = batch["burns_in"]
    if not burns.any():
        return columns
    obs, state, mask = module_inputs({name: map_tree(lambda leaf: leaf[burns], columns[name]) for name in columns})
    with torch.no_grad():
        for t in range(mask.shape[1]):
            _, after = module.policy(map_tree(lambda leaf, t=t: leaf[:, t], obs), state, target=target)
            goes_on = mask[:, t]
            state = map_tree(
                lambda new, old, on=goes_on: torch.where(on.reshape(-1, *[1] * (old.ndim - 1)), new, old), after, state
            )
    firsts = torch.zeros_like(burns)  # the first steps after a burn-in
    firsts[1:] = burns[:-1] & ~burns[1:]
    states = map_tree(torch.clone, batch["states"])
    map_tree(lambda column, now: column.__setitem__(firsts, now), states, state)
    columns |= {"states": states, "sequence_starts": (batch["sequence_starts"] & ~burns) | firsts}
    return {name: map_tree(lambda leaf: leaf[~burns], column) for name, column in columns.items()}


class LearnedSteps(NamedTuple):
    """Where the steps to learn from are in a batch of sequences of a replay buffer.

    Attributes:
        rows: Their rows in the batch, int64 `[B]`.
        next_rows: Rows of the observations from which they bootstrap, `num_steps` rows further, int64 `[B]`.
        places: `rows` among the rows without the burn-in, int64 `[B]`.
        next_places: `next_rows` among the rows without the burn-in, int64 `[B]`.
    """

    rows: Tensor
    next_rows: Tensor
    places: Tensor
    next_places: Tensor


def find_learned_steps(batch: Mapping[str, Any]) -> LearnedSteps:
    """Return the steps to learn from, by the columns `learns`, `burns_in` and `num_steps`."""
    rows = batch["learns"].nonzero().squeeze(1)
    next_rows = rows + batch["num_steps"][rows]
    places = (~batch["burns_in"]).cumsum(0) - 1
    return LearnedSteps(rows, next_rows, places[rows], places[next_rows])


def at_rows(batch: Mapping[str, Any], column: Tensor) -> Tensor:
    """Return a column of the steps that a batch of sequences learns from as a column of all its rows, `[M]`."""
    whole = column.new_zeros(len(batch["learns"]))
    whole[batch["learns"]] = column
    return whole


def initial_states(module: Module, num_rows: int) -> Tree:
    """Return the initial states of a number of rows, a tree of tensors `[num_rows, ...]`.

    Raises:
        ConfigError: `initial_state` returns something else than a tree of tensors or arrays.
    """

    def repeat(name: str, leaf: Any) -> Tensor:
        try:
            tensor = torch.as_tensor(leaf).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"{type(module).__name__}.initial_state() must return tensors, or a dict or tuple of tensors, and "
                f"{name} is {type(leaf).__name__}."
            ) from error
        return tensor.expand(num_rows, *tensor.shape).clone()

    state = module.initial_state()
    names = iter([name for name, _ in named_leaves(state, "state")])
    return map_tree(lambda leaf: repeat(next(names), leaf), state)


def memory_outputs(
    module: Any, obs: Tree, *, has_value: bool, critic_obs: Tree = None
) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    """Call the methods of a module with memory on two observations; see `Module.outputs`.

    Raises:
        ConfigError: `policy` does not return a pair, or the next state has another shape than the initial state.
    """
    name, before = type(module).__name__, initial_states(module, 2)
    result = module.policy(obs, before)
    if not isinstance(result, tuple) or len(result) != 2:
        raise ConfigError(
            f"{name}.policy(obs, state) must return a pair (dist_inputs, next state), because {name} defines "
            f"initial_state(), and returns {type(result).__name__}."
        )
    dist_inputs, after = result
    yield "policy(obs, state)[0]", dist_inputs, (module.distribution.num_inputs,)
    check_states(name, before, after)
    if has_value:
        yield "value(obs, state)", module.value(obs if critic_obs is None else critic_obs, before), ()


def check_states(name: str, before: Tree, after: Tree) -> None:
    """Refuse next states of another nesting, shape or dtype than the states before.

    Raises:
        ConfigError: Names the class and the part.
    """
    expected, given = ({key: _described(leaf) for key, leaf in named_leaves(tree, "state")} for tree in (before, after))
    if expected != given:
        key = next(key for key in {**expected, **given} if expected.get(key) != given.get(key))
        raise ConfigError(
            f"{name}.policy(obs, state) must return a next state like initial_state(): {key} is "
            f"{given.get(key, 'missing')} for 2 observations, and must be {expected.get(key, 'left out')}."
        )


def _described(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}".removeprefix("torch.") if isinstance(leaf, Tensor) else type(leaf).__name__
