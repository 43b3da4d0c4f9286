"""RLlib's `InfiniteLookbackBuffer`: what an episode's `observations`, `actions`, `rewards` and `infos` are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from corral.core.tree import leaves, map_tree
from corral.data.episodes.lookback import Indices, one_hot, overwrite, pick, positions


class InfiniteLookbackBuffer(NDArrayOperatorsMixin):
    """Entries of an episode by time step, with entries from before it in front. Else it is used as its arrays are.

    Args:
        data: List of entries, or a tree of arrays `[E, ...]`.
        lookback: How many of the first entries are from before the episode; index 0 is the first one after them.
        space: Space of one entry.

    Attributes:
        data: All entries, lookback included.
        lookback: Number of entries before index 0.
        space: Space of one entry, or `None`.
    """

    def __init__(self, data: Any = None, lookback: int = 0, space: Any = None) -> None:
        """Keep the entries."""
        self.data: Any = [] if data is None else data
        self.lookback, self.space = min(lookback, self.len_incl_lookback()), space
        self._write: Callable[..., None] | None = None

    @classmethod
    def of_episode(cls, read: Callable[..., Any], write: Callable[..., None] | None, lookback: int, space: Any) -> Any:
        """Return the entries that the getter of an episode returns; `write` is its setter."""
        found = cls(read(slice(-lookback, None), neg_index_as_lookback=True), lookback, space)
        found._write = write
        return found

    @property
    def finalized(self) -> bool:
        """Whether the entries are arrays."""
        return not isinstance(self.data, list)

    def finalize(self) -> None:
        """Stack a list of entries to arrays."""
        if not self.finalized and self.data:
            self.data = self._stacked()

    def _stacked(self) -> Any:
        if self.finalized:
            return self.data
        return map_tree(lambda *parts: np.stack([np.asarray(part) for part in parts]), *self.data)

    def __len__(self) -> int:
        return self.len_incl_lookback() - self.lookback

    def len_incl_lookback(self) -> int:
        """Return the number of entries, lookback included."""
        return len(leaves(self.data)[0]) if self.finalized else len(self.data)

    # Reading.

    def get(
        self,
        indices: Indices = None,
        *,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
        one_hot_discrete: bool = False,
        **settings: Any,
    ) -> Any:
        """Return entries: one for an int, otherwise several; see the getters of episodes."""
        where = positions(
            indices,
            self.len_incl_lookback(),
            self.lookback,
            neg_index_as_lookback=neg_index_as_lookback,
            clip=fill is None,
        )
        if self.finalized or one_hot_discrete:
            data = one_hot(self._stacked(), self.space, "space") if one_hot_discrete else self.data
            return pick(data, where, fill)
        if isinstance(where, int):
            return self._entry(where, fill)
        found = range(len(self.data))[where] if isinstance(where, slice) else where.tolist()
        return [self._entry(position, fill) for position in found]

    def _entry(self, position: int, fill: Any) -> Any:
        if 0 <= position < len(self.data):
            return self.data[position]
        if fill is None:
            raise IndexError(f"index out of range: there are {len(self.data)} entries, lookback included.")
        return fill

    def __getitem__(self, item: Any) -> Any:
        """Return entries; with several axes, a mask or the key of a Dict space as arrays and dicts are indexed."""
        if isinstance(item, (tuple, str)) or (isinstance(item, np.ndarray) and item.dtype == bool):
            return self.get()[item]
        return self.get(item)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.get())

    def __array__(self, dtype: Any = None, copy: Any = None) -> NDArray[Any]:
        return np.array(self.get(), dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **settings: Any) -> Any:
        """Compute with the entries after the lookback."""
        given = [each.get() if isinstance(each, InfiniteLookbackBuffer) else each for each in inputs]
        return getattr(ufunc, method)(*given, **settings)

    def __eq__(self, other: object) -> Any:
        """Compare entries as arrays or lists do."""
        return self.get() == (other.get() if isinstance(other, InfiniteLookbackBuffer) else other)

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "data" not in vars(self):
            raise AttributeError(name)
        return getattr(self.get(), name)  # such as `sum` and `shape` of an array, and `keys` of a dict

    def __repr__(self) -> str:
        return repr(self.get())

    # Writing.

    def set(self, new_data: Any, *, at_indices: Indices = None, neg_index_as_lookback: bool = False) -> None:
        """Overwrite entries, in the episode too; see the setters of episodes."""
        where = positions(
            at_indices, self.len_incl_lookback(), self.lookback, neg_index_as_lookback=neg_index_as_lookback
        )
        if self._write is not None:
            self._write(new_data=new_data, at_indices=at_indices, neg_index_as_lookback=neg_index_as_lookback)
        if self.finalized:
            overwrite(self.data, where, new_data)
        elif isinstance(where, (int, slice)):
            self.data[where] = new_data
        else:
            for position, value in zip(where.tolist(), new_data, strict=True):
                self.data[position] = value

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, (tuple, str)) or isinstance(key, np.ndarray):
            self.get()[key] = value
        else:
            self.set(value, at_indices=key)

    def append(self, item: Any) -> None:
        """Add one entry; an episode's own buffer is a view, to which only the episode adds."""
        self.extend([item])

    def extend(self, items: Sequence[Any]) -> None:
        """Add entries."""
        self._refuse_view("extend")
        if self.finalized:
            new = map_tree(lambda *parts: np.stack([np.asarray(part) for part in parts]), *items)
            self.data = map_tree(lambda *both: np.concatenate(both), self.data, new)
        else:
            self.data.extend(items)

    def concat(self, other: InfiniteLookbackBuffer) -> None:
        """Add the entries of another buffer."""
        self.extend(list(other.get()))

    def pop(self, index: int = -1) -> None:
        """Remove one entry."""
        self._refuse_view("pop")
        position = positions(index, self.len_incl_lookback(), self.lookback)
        if self.finalized:
            self.data = map_tree(lambda leaf: np.delete(leaf, position, 0), self.data)
        else:
            del self.data[position]

    def _refuse_view(self, method: str) -> None:
        if self._write is not None:
            raise AttributeError(f"{method}: the buffer of an episode is a view: use add_env_step of the episode.")
