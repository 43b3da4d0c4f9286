"""The weights that are sent to the runners, as arrays that are looked up once."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from corral.modules.module import Module


class ActingWeights:
    """The weights of a module that runners need to act, by name: views on the CPU, copies from other devices.

    Collecting a module's `state_dict` takes longer than copying the weights of a small net, so it is done again only
    when a parameter has moved in memory.
    """

    def __init__(self, module: Module) -> None:
        """Keep the module."""
        self._module = module
        self._parameters = list(module.parameters())
        self._arrays: dict[str, NDArray[Any]] = {}
        self._places: list[int] = []

    def get(self) -> dict[str, NDArray[Any]]:
        """Return the arrays; copy views before the next update. The dict may be kept."""
        places = [parameter.data_ptr() for parameter in self._parameters]
        if places != self._places:
            weights = self._module.acting_weights()
            self._arrays = {name: value.detach().cpu().numpy() for name, value in weights.items()}
            on_cpu = all(value.device.type == "cpu" for value in weights.values())
            self._places = places if on_cpu else []
        return dict(self._arrays)
