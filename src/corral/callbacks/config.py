"""The settings of callbacks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from corral.core.settings import Importable, Need


@dataclass(kw_only=True)
class CallbacksSettings:
    """Settings of callbacks, which are functions that run at events; set by `.callbacks(...)`.

    Attributes:
        callbacks_class: `Callback` subclasses or instances, in order.
        callback_functions: Lists of callables by event name, in order.
        on_error: Whether an exception of a callback ends the run, or is logged and counted in
            `fault_tolerance/num_callback_errors`.
    """

    callbacks_class: list[Importable] = field(default_factory=list)
    callback_functions: dict[str, list[Importable]] = field(default_factory=dict)
    on_error: Annotated[
        Literal["raise", "log"], Need("callbacks", lambda config: config.callbacks_class or config.callback_functions)
    ] = "raise"
