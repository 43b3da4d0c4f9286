"""Weights & Biases, MLflow and Trackio: what is really in their files, read back with their own readers."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from corral.errors import ConfigError
from corral.runs.loggers import MLflowLogger, TrackioLogger, WandbLogger
from corral.runs.loggers.kept import name_of_run

CONFIG = {"algo": "PPO", "training": {"lr": 0.5, "grad_clip": None}}
IMAGE = np.random.default_rng(0).integers(0, 256, (4, 5, 3), np.uint8)
VIDEO = np.stack([np.full((4, 5, 3), level, np.uint8) for level in (0, 128, 255)])


def result(step: int, **values: Any) -> dict[str, Any]:
    return {"num_env_steps_sampled_lifetime": step, "config": {"lr": 1}, **values}


def results() -> list[dict[str, Any]]:
    """Return results with a value of each kind, 10 env steps apart."""
    media = {"image": IMAGE, "video": VIDEO, "spread": [1.0, 2.0, math.nan, 4.0], "views": [IMAGE, IMAGE]}
    first = {"env_runners": {"mean": 1.5}, "done": True, "bad": math.nan, "engine": "embedded", **media}
    return [result(10, **first), result(20, env_runners={"mean": 2}, bad=math.inf, engine="embedded")]


def write(logger: Any, run_dir: Path) -> None:
    """Write two results, and a third one after the run continued."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    logger.open(run_dir, CONFIG)
    for each in results():
        logger.log_result(each)
    logger.close()
    logger.resume(run_dir, CONFIG, 2, 20)
    logger.log_result(result(30, env_runners={"mean": 3}))
    logger.close()


def frames_of(file: Path) -> int:
    with Image.open(file) as image:
        return int(getattr(image, "n_frames", 1))


def pixels(file: Path) -> Any:
    with Image.open(file) as image:
        return np.asarray(image.convert("RGB"))


def records_of(file: Path) -> Iterator[bytes]:
    """Yield the records of an offline file of W&B: 7 bytes, then blocks of 32 KiB in the format of LevelDB's logs."""
    data, position, record = file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if (left := 32_768 - position % 32_768) < 7:  # no room for the next header
            position += left
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


class TestWandb:
    @pytest.fixture(autouse=True)
    def offline(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        wandb = pytest.importorskip("wandb")
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_SILENT", "true")
        yield
        wandb.teardown()  # which forgets the environment variables

    def rows(self, run_dir: Path, num_rows: int) -> tuple[list[dict[str, Any]], dict[str, Any], set[str]]:
        """Return the rows of all files of a run, its config, and its ids, once a process of W&B has written them."""
        deadline_s = time.monotonic() + 60
        while len((found := self.written(run_dir))[0]) < num_rows and time.monotonic() < deadline_s:
            time.sleep(0.1)
        return found

    def written(self, run_dir: Path) -> tuple[list[dict[str, Any]], dict[str, Any], set[str]]:
        from wandb.proto.wandb_internal_pb2 import Record

        rows, config, ids = [], {}, set()
        for file in sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb")):
            for data in records_of(file):
                record = Record()
                record.ParseFromString(data)
                if record.WhichOneof("record_type") == "run":
                    ids.add(record.run.run_id)
                    config |= {part.key: json.loads(part.value_json) for part in record.run.config.update}
                if record.WhichOneof("record_type") == "history":
                    rows.append({})
                    for item in record.history.item:
                        *outer, name = [*item.nested_key] or [item.key]
                        into = rows[-1]
                        for part in outer:
                            into = into.setdefault(part, {})
                        into[name] = json.loads(item.value_json)
        return rows, config, ids

    def test_everything_is_in_the_files_of_one_run(self, tmp_path: Path) -> None:
        write(WandbLogger(project="p"), tmp_path / "run")
        rows, config, ids = self.rows(tmp_path / "run", 3)
        assert len(ids) == 1 and config["training"] == CONFIG["training"]
        assert [(row["num_env_steps_sampled_lifetime"], row["env_runners/mean"]) for row in rows] == [
            (10, 1.5),
            (20, 2),
            (30, 3),
        ]
        first = rows[0]
        assert first["done"] == 1 and first["engine"] == "embedded" and "bad" not in first
        assert "engine" not in rows[1] and "bad" not in rows[1]
        assert first["spread"]["_type"] == "histogram" and sum(first["spread"]["values"]) == 3
        [files] = {path.parent for path in (tmp_path / "run" / "wandb").glob("offline-run-*/files/media")}
        np.testing.assert_array_equal(pixels(files / first["image"]["path"]), IMAGE)
        assert frames_of(files / first["video"]["path"]) == len(VIDEO)
        assert {"views/0", "views/1"} <= first.keys()

    def test_two_runs_of_a_process_stay_apart(self, tmp_path: Path) -> None:
        first, second = WandbLogger(project="p"), WandbLogger(project="p")
        for name, logger in (("first", first), ("second", second)):
            (tmp_path / name).mkdir()
            logger.open(tmp_path / name, CONFIG)
        for step, logger in ((10, first), (11, second), (20, first)):
            logger.log_result(result(step))
        first.close()
        second.log_result(result(21))
        second.close()
        steps = {}
        for name in ("first", "second"):
            rows, _, ids = self.rows(tmp_path / name, 2)
            assert len(ids) == 1
            steps[name] = [row["num_env_steps_sampled_lifetime"] for row in rows]
        assert steps == {"first": [10, 20], "second": [11, 21]}

    @pytest.mark.parametrize("name", ["id", "config", "dir", "resume", "reinit"])
    def test_what_the_logger_sets_is_refused(self, name: str) -> None:
        with pytest.raises(ConfigError, match=f"WandbLogger: {name} cannot be set"):
            WandbLogger(**{name: "x"})

    def test_a_run_of_a_set_is_named_after_the_set(self, tmp_path: Path) -> None:
        run_dir = tmp_path / "set" / "seed-3"
        run_dir.mkdir(parents=True)
        (tmp_path / "set" / "seeds.json").write_text("{}")
        logger = WandbLogger(project="p")
        logger.open(run_dir, CONFIG)
        assert logger.run.name == "set-seed-3"
        logger.close()

    def test_without_a_login_the_remedy_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        monkeypatch.delenv("WANDB_API_KEY", raising=False)
        with pytest.raises(ConfigError, match="WANDB_MODE=offline"):
            WandbLogger().open(tmp_path, CONFIG)


class TestTrackio:
    @pytest.mark.parametrize("name", ["config", "resume"])
    def test_what_the_logger_sets_is_refused(self, name: str) -> None:
        with pytest.raises(ConfigError, match=f"TrackioLogger: {name} cannot be set"):
            TrackioLogger(**{name: "x"})

    def test_everything_is_in_the_database_of_one_run(self, tmp_path: Path) -> None:
        pytest.importorskip("trackio")
        # In a process of its own, since trackio reads TRACKIO_DIR when it is imported.
        script = (
            "import sys; sys.path[:0] = sys.argv[1:3]\n"
            "from pathlib import Path; from test_services import TrackioLogger, write\n"
            "for name in ('a', 'b'):\n"
            "    (Path(name)).mkdir(); write(TrackioLogger(project='p'), Path(name) / 'run')\n"
            "import json, trackio\n"
            "from trackio.sqlite_storage import SQLiteStorage\n"
            "runs = {run.name: [SQLiteStorage.get_logs('p', run.name, run_id=run.id), run.config]"
            " for run in trackio.Api().runs('p')}\n"
            "print(json.dumps(runs))\n"
        )
        here = Path(__file__).parent
        done = subprocess.run(
            [sys.executable, "-c", script, str(here), str(here.parent)],
            cwd=tmp_path,
            env={**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        runs = json.loads(done.stdout.splitlines()[-1])
        assert set(runs) == {"run", "run-2"}  # two directories of one name are two runs
        rows, config = runs["run"]
        assert config["training"] == CONFIG["training"]
        assert [(row["step"], row["env_runners/mean"]) for row in rows] == [(10, 1.5), (20, 2), (30, 3)]
        first = rows[0]
        assert first["done"] == 1 and first["engine"]["_value"] == "embedded" and "engine" not in rows[1]
        assert "bad" not in first and "bad" not in rows[1]
        assert sum(first["spread"]["values"]) == 3 and {"views/0", "views/1"} <= first.keys()
        media = tmp_path / "trackio" / "media"
        np.testing.assert_array_equal(pixels(media / first["image"]["file_path"]), IMAGE)
        assert frames_of(media / first["video"]["file_path"]) == len(VIDEO)


class TestMLflow:
    @pytest.mark.filterwarnings("ignore")  # of SQLAlchemy and of MLflow's own code
    def test_everything_is_in_the_store_of_one_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("mlflow")
        monkeypatch.chdir(tmp_path)
        logger = MLflowLogger(experiment="e", tracking_uri=f"sqlite:///{tmp_path}/mlflow.db", tags={"who": "me"})
        write(logger, tmp_path / "run")
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
        experiment = client.get_experiment_by_name("e")
        assert experiment is not None
        [run] = client.search_runs([experiment.experiment_id])
        assert run.info.run_name == "run" and run.info.status == "FINISHED"
        assert run.data.params == {"algo": "PPO", "training.lr": "0.5", "training.grad_clip": "None"}
        history = client.get_metric_history(run.info.run_id, "env_runners/mean")
        assert [(point.step, point.value) for point in history] == [(10, 1.5), (20, 2.0), (30, 3.0)]
        assert run.data.metrics["done"] == 1 and "bad" not in run.data.metrics
        assert [run.data.metrics[f"spread/{name}"] for name in ("min", "max")] == [1.0, 4.0]
        assert run.data.tags["engine"] == "embedded" and run.data.tags["who"] == "me"
        directory = Path(client.download_artifacts(run.info.run_id, "", str(tmp_path)))
        assert yaml.safe_load((directory / "config.yaml").read_text()) == CONFIG
        assert frames_of(directory / "videos" / "video" / "10.gif") == len(VIDEO)
        [image] = (directory / "images").glob("image*.png")
        np.testing.assert_array_equal(pixels(image), IMAGE)

    @pytest.mark.filterwarnings("ignore")  # of SQLAlchemy and of MLflow's own code
    def test_a_run_continues_in_its_store_with_the_present_config(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("mlflow")
        monkeypatch.chdir(tmp_path)
        uri = f"sqlite:///{tmp_path}/mine.db"
        run_dir = tmp_path / "run"
        write(MLflowLogger(tracking_uri=uri), run_dir)
        (run_dir / "config.yaml").write_text("changed: true\n")
        later = MLflowLogger()  # the directory of the run names the store
        later.resume(run_dir, CONFIG, 3, 30)
        later.log_result(result(40, env_runners={"mean": 4}))
        later.close()
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=uri)
        history = client.get_metric_history(later.run_id, "env_runners/mean")
        assert [point.step for point in history] == [10, 20, 30, 40]
        file = client.download_artifacts(later.run_id, "config.yaml", str(tmp_path))
        assert Path(file).read_text() == "changed: true\n"

    @pytest.mark.filterwarnings("ignore")  # of SQLAlchemy and of MLflow's own code
    def test_a_name_that_mlflow_refuses_costs_no_other_number(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("mlflow")
        monkeypatch.chdir(tmp_path)
        uri = f"sqlite:///{tmp_path}/mlflow.db"
        logger = MLflowLogger(tracking_uri=uri)
        names = ["", "..", "/first", "last/", "a//b", "a/../b", "é", "a?", "a!", "a_", "x" * 300, "x" * 301]
        values = {name: float(number) for number, name in enumerate(names)}
        logger.open(tmp_path, {"env": {"a?": 1, "a!": 2, "": 3}})
        logger.log_result(result(10, **values, **{"seen:now": IMAGE}))
        logger.close()
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=uri)
        data = client.get_run(logger.run_id).data
        assert sorted(data.metrics.values()) == sorted([*values.values(), 10.0])
        assert {"a_", "a__2", "a__3", "_/first", "last/_", "a/_/b", "a/__/b"} <= {*data.metrics}
        assert sorted(data.params.values()) == ["1", "2", "3"]
        images = [file.path for file in client.list_artifacts(logger.run_id, "images") if file.path.endswith(".png")]
        assert len(images) == 1 and images[0].startswith("images/seen_now")

    def test_a_server_that_is_not_there_is_found_soon(self, tmp_path: Path) -> None:
        pytest.importorskip("mlflow")
        with pytest.raises(OSError):
            MLflowLogger(tracking_uri="http://127.0.0.1:9").open(tmp_path, CONFIG)


def test_services_name_a_run_after_its_directory_and_its_set(tmp_path: Path) -> None:
    run_dir = tmp_path / "set" / "seed-3"
    run_dir.mkdir(parents=True)
    assert name_of_run(run_dir) == "seed-3"
    (tmp_path / "set" / "seeds.json").write_text("{}")
    assert name_of_run(run_dir) == "set-seed-3"


@pytest.mark.parametrize(
    ("cls", "extra"), [(WandbLogger, "wandb"), (MLflowLogger, "mlflow"), (TrackioLogger, "trackio")]
)
def test_a_missing_package_is_named_at_once(cls: Any, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, extra, None)  # what Python does with a module that must not be imported
    with pytest.raises(ConfigError, match=rf"pip install 'corral\[{extra}\]'"):
        cls()
    with pytest.raises(ConfigError, match="video_fps=0"):
        cls(video_fps=0)
