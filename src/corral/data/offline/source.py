"""What a source of recorded data is, and the Parquet files that some sources read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gymnasium import spaces

from corral.core.places import Place
from corral.data.offline.episode_rows import EpisodeRows
from corral.data.offline.parquet import Description, import_pyarrow, read_description
from corral.errors import CheckpointError, CorralError, DataError

Spaces = tuple[spaces.Space[Any], spaces.Space[Any]]
"""Observation space and action space."""

MINARI = "minari:"
"""Beginning of a text that names a Minari dataset."""


@dataclass
class Source:
    """Recorded data.

    Attributes:
        parts: Function that returns an iterator over the episodes, in parts that fit into memory; it can be called
            several times, and gives the same each time.
        spaces: Spaces by module id, where the data says them.
        name: Where the data is, for messages.
        num_rows: Rows by module id, where they are known without reading everything.
    """

    parts: Callable[[], Iterator[EpisodeRows]]
    name: str
    spaces: Mapping[str, Spaces] = field(default_factory=dict)
    num_rows: Mapping[str, int] | None = None


@contextlib.contextmanager
def reading(where: str) -> Iterator[None]:
    """Refuse data whose reading raises an exception in a block; it may be any, since the file decides it.

    Raises:
        DataError: Reading raised an exception that is none of Corral's.
    """
    try:
        yield
    except CorralError:
        raise
    except Exception as error:
        form = f"{where} is damaged, or in no form that Corral knows"
        raise DataError(f"{form}: {type(error).__name__}: {error!s:.200}") from error


def without_damage(parts: Iterable[EpisodeRows], where: str) -> Iterator[EpisodeRows]:
    """Yield the parts of files.

    Raises:
        DataError: Reading them raised an exception.
    """
    with reading(where):
        yield from parts


@dataclass(frozen=True)
class ParquetPlace:
    """A Parquet file in a directory of any kind.

    Attributes:
        place: The directory.
        name: Name of the file in it.
    """

    place: Place
    name: str

    @property
    def path(self) -> str:
        """The whole path or URL."""
        return self.place.where(self.name)

    def use(self, function: Callable[[Any], Any]) -> Any:
        """Return what a function returns for the opened file, a `pyarrow.parquet.ParquetFile`.

        Raises:
            DataError: It is no Parquet file, cannot be read, or is damaged.
        """
        pa = import_pyarrow()
        with reading(self.path):
            try:
                with self.place.open(self.name) as (opened, _):
                    return function(pa.parquet.ParquetFile(pa.PythonFile(opened, mode="r")))
            except (pa.ArrowException, OSError, CheckpointError) as error:
                raise DataError(f"{self.path} cannot be read as a Parquet file: {error!s:.200}") from error

    def description(self) -> Description | None:
        """Return what Corral wrote into the metadata; `None` if it did not write the file."""
        found: Description | None = self.use(lambda file: read_description(file, self.path))
        return found

    def has_own_columns(self) -> bool:
        """Return whether it has the columns of files of Corral, whose metadata tools for tables do not keep."""
        return bool(self.use(lambda file: {"episode_id", "valid"} <= {*file.schema_arrow.names}))

    def num_rows(self) -> int:
        """Return the number of rows."""
        return int(self.use(lambda file: file.metadata.num_rows))
