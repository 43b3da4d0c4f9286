"""The weights that travel to the runners, as arrays that are found once."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from corral.modules.module import Module


class ActingWeights:
    """What acting needs of a module's weights, by name: views on the CPU, and copies of what lies elsewhere.

    To ask a module for its state by name takes longer than to copy the weights of a small net.
    """

    def __init__(self, module: Module) -> None:
        """Take the module."""
        self._module = module
        self._parameters = list(module.parameters())
        self._arrays: dict[str, NDArray[Any]] = {}
        self._places: list[int] = []

    def get(self) -> dict[str, NDArray[Any]]:
        """Return the arrays; views are to be copied at once, and the dict may be kept."""
        places = [parameter.data_ptr() for parameter in self._parameters]
        if places != self._places:
            weights = self._module.acting_weights()
            self._arrays = {name: value.detach().cpu().numpy() for name, value in weights.items()}
            on_cpu = all(value.device.type == "cpu" for value in weights.values())
            self._places = places if on_cpu else []
        return dict(self._arrays)
