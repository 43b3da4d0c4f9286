"""Rows of tensors in a graph of objects are kept over a change."""

from __future__ import annotations

from typing import Any

import torch

from corral.envs.tensor_rows import RowKeeper, find_holders
from host_transfers import no_host_transfers

MASK = torch.tensor([True, False, True])
KEPT, NEW = [1.0, 1.0, 1.0], [2.0, 1.0, 2.0]


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape or (3,))


class Thing:
    """An object with any attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def keep(thing: Thing, change: Any) -> None:
    """Let rows 0 and 2 have what a change makes of an object, and row 1 what it was before."""
    keeper = RowKeeper({"thing": thing})
    change()
    with no_host_transfers():
        keeper.keep_rows_except(MASK)


def test_rows_are_kept_whether_a_change_writes_into_a_tensor_or_replaces_it() -> None:
    part = Thing(written=ones(), replaced=ones(3, 2))
    thing = Thing(
        part=part, by_key={"a": ones(), 3: ones(), part: ones()}, in_list=[ones(), [ones()]], in_tuple=(ones(), "x")
    )
    thing.same_tuple = (ones(),)
    thing.back = thing  # a graph with a cycle

    def change() -> None:
        part.written[:] = 2
        part.replaced = 2 * ones(3, 2)
        for key in thing.by_key:
            thing.by_key[key] = 2 * ones()
        thing.in_list[0] += 1
        thing.in_list[1] = [2 * ones()]
        thing.in_tuple = (2 * ones(), "x")
        thing.same_tuple[0][:] = 2

    keep(thing, change)
    assert part.replaced.tolist() == [[number] * 2 for number in NEW]
    in_containers = [
        *thing.by_key.values(),
        thing.in_list[0],
        thing.in_list[1][0],
        thing.in_tuple[0],
        thing.same_tuple[0],
    ]
    for tensor in (part.written, *in_containers):
        assert tensor.tolist() == NEW


def test_rows_along_another_axis_and_flags_are_kept() -> None:
    thing = Thing(history=torch.zeros(5, 3, 2), flags=torch.zeros(3, dtype=torch.bool))

    def change() -> None:
        thing.history[2] = 1
        thing.flags = ~thing.flags

    keep(thing, change)
    assert thing.history.sum((0, 2)).tolist() == [2, 0, 2]
    assert torch.equal(thing.flags, MASK)


def test_what_belongs_to_all_rows_is_put_back() -> None:
    one, other = Thing(rows=ones()), Thing(rows=ones())
    thing = Thing(number=1, goal=one, goals=[one, other], scale=torch.ones(2), nothing=None)

    def change() -> None:
        thing.number, thing.goal, thing.scale, thing.nothing = 2, other, 2 * thing.scale, "text"
        thing.goals.reverse()
        thing.goals.append(one)
        one.rows[:], other.rows[:] = 2, 2

    keep(thing, change)
    assert (thing.number, thing.goal, thing.goals, thing.nothing) == (1, one, [one, other], None)
    assert thing.scale.tolist() == [1, 1]
    assert one.rows.tolist() == other.rows.tolist() == NEW


def test_new_objects_and_tensors_stay_with_the_kept_rows_of_what_they_replace() -> None:
    thing = Thing(part=Thing(rows=ones(), number=1), by_key={"a": ones()}, nothing=None)
    thing.part.itself = thing.part

    def change() -> None:
        thing.part, thing.by_key = Thing(rows=2 * ones(), number=2), {"a": 2 * ones(), "b": 2 * ones()}
        thing.nothing = thing.later = 2 * ones()
        thing.part.itself = thing.part

    keep(thing, change)
    assert (thing.part.rows.tolist(), thing.part.number, thing.by_key["a"].tolist()) == (NEW, 1, NEW)
    assert thing.by_key["b"].tolist() == thing.nothing.tolist() == thing.later.tolist() == [2.0] * 3


def test_one_tensor_in_two_places_stays_one() -> None:
    thing = Thing(a=ones(), c=ones())
    thing.b = thing.a

    def change() -> None:
        thing.a = thing.b = thing.c = 2 * ones()

    keep(thing, change)
    assert thing.a is thing.b and thing.a is not thing.c
    thing.c[:] = 5
    assert thing.a.tolist() == NEW


def test_functions_and_classes_are_no_part_of_a_graph() -> None:
    def function() -> None:
        """Hold a tensor as an attribute."""

    function.rows = ones()  # type: ignore[attr-defined]
    thing = Thing(function=function, cls=Thing, module=torch, method=ones().sum, part={"x": [1]})
    assert find_holders({"thing": thing}) == [thing, thing.part, [1]]
