"""A logger that writes to MLflow: to a database on this machine, or to a tracking server."""

from __future__ import annotations

import math
import os
import re
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from corral.core.metrics.result import flat_result
from corral.core.pictures import Array, encode_gif
from corral.core.settings import flat_settings
from corral.runs.loggers.histograms import histogram_of
from corral.runs.loggers.kept import keep, kept, name_of_run
from corral.runs.loggers.writers import KindLogger

KEPT = "mlflow.json"
CONFIG_FILE = "config.yaml"
CONNECT_TIMEOUT_S = 5.0
# Limits of MLflow: entries of one request, and characters.
MOST_METRICS, MOST_PARAMS, MOST_TAGS = 1000, 100, 100
LONGEST_NAME, LONGEST_VALUE = 250, 5000


class MLflowLogger(KindLogger):
    """Writes to MLflow: numbers as metrics, texts as tags, images and videos as artifacts, settings as parameters.

    The step is `num_env_steps_sampled_lifetime`; the name of a metric is the path in the result. MLflow has no
    histograms: `<path>/min`, `<path>/mean` and `<path>/max` are metrics. The id of the run is in `mlflow.json` in the
    run directory, so that a run that continues is the same run there. To change what is written, override one of the
    `write_` methods.

    Attributes:
        client: The `MlflowClient`, while the logger is open, for values that no method writes.
        run_id: Id of the run.
    """

    is_service: ClassVar[bool] = True

    def __init__(
        self,
        experiment: str | None = None,
        name: str | None = None,
        tracking_uri: str | None = None,
        video_fps: float = 20.0,
        max_images: int = 16,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Import mlflow.

        Args:
            experiment: Experiment of the run, which is made if necessary; `None` is the environment variable
                MLFLOW_EXPERIMENT_NAME, or `corral` without it.
            name: Name of the run; `None` is the name of the run directory.
            tracking_uri: Where MLflow stores runs, such as `sqlite:///mlflow.db` or `http://localhost:5000`; `None` is
                what MLflow is set to, as by the environment variable MLFLOW_TRACKING_URI.
            video_fps: Frames per second of videos.
            max_images: Number of images or videos of a series that are written, the latest ones.
            tags: Tags of the run.

        Raises:
            ConfigError: The package mlflow or pillow is missing, or a setting is out of range.
        """
        super().__init__("mlflow", ("mlflow",), video_fps, max_images)
        self._experiment, self._name, self._uri, self._tags = experiment, name, tracking_uri, dict(tags or {})
        self.client: Any = None
        self.run_id = ""

    def open(self, run_dir: Path, config: dict[str, Any]) -> None:
        self._connect(self._uri)
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "corral"
        found = self.client.get_experiment_by_name(name)
        experiment_id = self.client.create_experiment(name) if found is None else found.experiment_id
        run = self.client.create_run(experiment_id, run_name=self._name or name_of_run(run_dir), tags=self._tags)
        self.run_id = run.info.run_id
        keep(run_dir / KEPT, {"run_id": self.run_id, "tracking_uri": self.client.tracking_uri})
        self._write_params(config)
        self._write_config_file(run_dir)

    def resume(self, run_dir: Path, config: dict[str, Any], training_iteration: int, num_env_steps: int) -> None:
        """Continue the run with the id in the run directory; start one if there is none.

        Parameters keep their first values, as MLflow wants it; the artifact config.yaml has the present ones.
        """
        if "run_id" not in (found := kept(run_dir / KEPT)):
            return self.open(run_dir, config)
        self._connect(self._uri or found.get("tracking_uri"))
        self.run_id = found["run_id"]
        self.client.update_run(self.run_id, status="RUNNING")
        self._write_config_file(run_dir)

    def _connect(self, uri: str | None) -> None:
        from mlflow import get_tracking_uri
        from mlflow.tracking import MlflowClient

        self._texts: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._address = _address(uri or get_tracking_uri())
        self._check_connection()
        self.client = MlflowClient(tracking_uri=uri)

    def _check_connection(self) -> None:
        """Raise an `OSError` soon if there is no server: MLflow would try for minutes."""
        if self._address is not None:
            socket.create_connection(self._address, CONNECT_TIMEOUT_S).close()

    def _write_params(self, config: dict[str, Any]) -> None:
        from mlflow.entities import Param

        names: dict[str, str] = {}
        settings = flat_settings(config)
        params = [Param(_name_in(names, path), str(value)[:LONGEST_VALUE]) for path, value in settings]
        for start in range(0, len(params), MOST_PARAMS):
            self.client.log_batch(self.run_id, params=params[start : start + MOST_PARAMS])

    def _write_config_file(self, run_dir: Path) -> None:
        if (run_dir / CONFIG_FILE).exists():
            self.client.log_artifact(self.run_id, str(run_dir / CONFIG_FILE))

    def log_result(self, result: dict[str, Any]) -> None:
        """Write a result and wait until it is stored."""
        from mlflow.entities import Metric, RunTag

        self._check_connection()
        step, now_ms = int(result["num_env_steps_sampled_lifetime"]), time.time_ns() // 1_000_000
        self._numbers: dict[str, float] = {}
        self._new_texts: dict[str, str] = {}
        for path, value in flat_result(result).items():
            self.write(path, value, step)
        metrics = [Metric(name, value, now_ms, step) for name, value in self._numbers.items()]
        tags = [RunTag(name, value) for name, value in self._new_texts.items()]
        for start in range(0, len(metrics), MOST_METRICS):
            self.client.log_batch(self.run_id, metrics=metrics[start : start + MOST_METRICS])
        for start in range(0, len(tags), MOST_TAGS):
            self.client.log_batch(self.run_id, tags=tags[start : start + MOST_TAGS])

    def write_number(self, path: str, value: float, step: int) -> None:
        """Write a point of a curve: a bool as 0 or 1, and nothing for NaN and infinities."""
        if math.isfinite(value):
            self._numbers[_name_in(self._names, path)] = float(value)

    def write_text(self, path: str, value: str, step: int) -> None:
        """Write a text as a tag if it differs from the last text with this path; a tag holds the latest one."""
        if self._texts.get(path) != value:
            self._texts[path] = value
            self._new_texts[_name_in(self._names, path)] = value[:LONGEST_VALUE]

    def write_image(self, path: str, image: Array, step: int) -> None:
        """Write an image, uint8 `[H, W, 3]` or `[H, W, 4]`, without loss."""
        key = _name_in(self._names, path).replace(":", "_")  # MLflow refuses it in names of images only
        self.client.log_image(self.run_id, image, key=key, step=step)

    def write_video(self, path: str, frames: Array, step: int) -> None:
        """Write a video, uint8 `[T, H, W, 3]`, as the artifact `videos/<path>/<step>.gif`."""
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / f"{step}.gif"
            file.write_bytes(encode_gif(frames, self._video_fps))
            self.client.log_artifact(self.run_id, str(file), f"videos/{_name_in(self._names, path)}")

    def write_histogram(self, path: str, values: Array, step: int) -> None:
        """Write the smallest, the mean and the largest of numbers `[size]`; non-finite ones are left out."""
        if (found := histogram_of(values)) is not None:
            for name in ("min", "mean", "max"):
                self.write_number(f"{path}/{name}", float(getattr(found[0], name)()), step)

    def close(self) -> None:
        """End the run."""
        if self.client is not None:
            self._check_connection()
            self.client.set_terminated(self.run_id)
            self.client = None


def _address(uri: str) -> tuple[str, int] | None:
    """Return host and port of a server, or `None` where there is no server, or a proxy before it."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.scheme in getproxies():
        return None
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def _name_in(names: dict[str, str], path: str) -> str:
    """Return the name of a path, from the names by path, to which it is added: no two paths share a name."""
    if path not in names:
        name, number = _named(path), 1
        while name in names.values():
            number += 1
            end = f"_{number}"
            name = f"{_named(path)[: LONGEST_NAME - len(end)]}{end}"
        names[path] = name
    return names[path]


def _named(path: str) -> str:
    """Return a path as a name that MLflow takes: other characters become `_`, and so do parts that are empty or dots.

    MLflow refuses names such as `a//b` and `../a`, and with one such name the whole result.
    """
    parts = re.sub(r"[^\w\-. :/]", "_", path, flags=re.ASCII)[:LONGEST_NAME].split("/")
    return "/".join(part if part.strip(".") else "_" * max(1, len(part)) for part in parts)[:LONGEST_NAME].rstrip("/")
