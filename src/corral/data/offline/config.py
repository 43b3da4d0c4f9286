"""The settings of recorded data."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from corral.core.settings import Need, PositiveInt

HAS_INPUT = Need("input_", lambda config: config.input_ is not None)
HAS_OUTPUT = Need("output", attrgetter("output"))


class ArraysInMemory:
    """Columns of steps, given as the setting `input_`; results and files show their names only.

    Attributes:
        columns: Arrays or trees of arrays `[S, ...]` by name.
    """

    def __init__(self, columns: Mapping[str, Any]) -> None:
        """Take the columns without copying them."""
        self.columns = dict(columns)

    def __repr__(self) -> str:
        return f"ArraysInMemory({', '.join(self.columns)})"


def _as_input(value: Any) -> Any:
    """Return paths as texts, and columns in a form that is not copied with the config."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (list, tuple)):
        return [_as_input(part) for part in value]
    return ArraysInMemory(value) if isinstance(value, Mapping) else value


def _as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


@dataclass(kw_only=True)
class OfflineDataSettings:
    """Settings of recorded data: what an algorithm learns from, and what is recorded.

    Attributes:
        input_: Recorded episodes: a directory, file or URL of Parquet files, or a list of them; `"minari:ID"`; a dict
            of arrays; a replay buffer; and other forms. See docs/recorded-data.md.
        validation_fraction: Fraction of the episodes that are not learned from; the loss on them is in the result.
        map_directory: Directory for memory-mapped files of the columns; `None` keeps the columns in memory.
        output: Directory or URL to which the complete episodes that runners sample for training are written.
        output_max_rows_per_file: Rows after which a file is complete. A run that is killed loses the rows of one file.
        output_infos: Whether the infos of the envs are recorded, too, as JSON.
    """

    input_: Annotated[Any, BeforeValidator(_as_input)] = None
    validation_fraction: Annotated[Annotated[float, Field(ge=0, lt=1)], HAS_INPUT] = 0.0
    map_directory: Annotated[Annotated[str | None, BeforeValidator(_as_text)], HAS_INPUT] = None
    output: Annotated[str | None, BeforeValidator(_as_text)] = None
    output_max_rows_per_file: Annotated[PositiveInt, HAS_OUTPUT] = 100_000
    output_infos: Annotated[bool, HAS_OUTPUT] = False
