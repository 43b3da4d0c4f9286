"""Objects that code above the core shows in other forms, such as with the methods of another library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

V = TypeVar("V")
P = ParamSpec("P")


class Viewable:
    """Base of objects that keep their views: the forms in which code above the core shows them to users."""

    _views: Mapping[Any, Any] = MappingProxyType({})

    def view_as(self, make: Callable[Concatenate[Self, P], V], *args: P.args, **settings: P.kwargs) -> V:
        """Return what `make(self, ...)` returned when it was first asked for.

        Args:
            make: The class of the view, or a function that makes it. An object has one view of each.
            *args: Further arguments of `make`.
            **settings: Further arguments of `make`, by name.
        """
        if make not in self._views:
            self.keep_view(make, make(self, *args, **settings))
        found: V = self._views[make]
        return found

    def keep_view(self, make: Callable[..., V], view: V) -> None:
        """Set the view that `view_as(make)` returns."""
        self._views = {**self._views, make: view}
