"""What all tests of serving have."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch


class _WithoutWeights(pickle.Pickler):
    def persistent_id(self, part: Any) -> Any:
        if isinstance(part, np.random.Generator):  # of a space, which may have drawn
            return "generator"
        return list(part.shape) if isinstance(part, torch.Tensor) else None


@pytest.fixture(scope="session", autouse=True)
def each_graph_once() -> Iterator[None]:
    """Export the graph of a policy once: it takes seconds, and does not depend on the weights."""
    from corral.runners.policy_file import PolicyFile

    export, known = PolicyFile._export, {}

    def export_once(file: Any) -> Any:
        key = io.BytesIO()
        try:
            _WithoutWeights(key).dump(file._actor.module)
        except (pickle.PicklingError, AttributeError):  # a class of one test
            return export(file)
        if key.getvalue() not in known:
            known[key.getvalue()] = export(file)
        graph, names = known[key.getvalue()]
        copied = type(graph)()
        copied.CopyFrom(graph)  # which is filled with the weights of the moment
        return copied, names

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PolicyFile, "_export", export_once)
        yield
