"""Write the sample files of other programs that Corral must read, with the versions that `requirements/` pins.

`make samples` runs it in an environment of its own; names of parts write only these. `foreign_versions.json` says which
versions wrote each folder, and `test_foreign_samples.py` fails when a pin is newer. Samples of older versions, which
must still load, are in other folders and are never written again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import gymnasium as gym

TESTS = Path(__file__).parent
VERSIONS = TESTS / "foreign_versions.json"
PARTS = {
    "policies/sb3_samples/pinned": ("stable-baselines3", "gymnasium"),
    "compat/data_of_rllib": ("ray",),
    "serving/rllink_messages": ("ray",),
    "offline/minari_samples": ("minari",),
    "loggers/tensorboard_sample": ("tensorboard",),
}
"""The packages whose files each folder holds."""


def write_stable_baselines3(folder: Path) -> None:
    """Write models, and what they compute."""
    run(TESTS / "policies" / "make_sb3_samples.py", folder)


def write_rllib(folder: Path) -> None:
    """Write recorded data."""
    run(folder / "make_data.py", folder)


def write_rllink(folder: Path) -> None:
    """Write messages of external envs."""
    run(TESTS / "serving" / "make_rllink_messages.py")


def run(script: Path, *args: Path) -> None:
    """Run a script of a part in a process of its own."""
    subprocess.run([sys.executable, str(script), *map(str, args)], check=True)


def write_minari(folder: Path) -> None:
    """Write a dataset in each format of files: two episodes of CartPole with actions 0 and 1 in turn."""
    os.environ["MINARI_DATASETS_PATH"] = str(folder)
    import minari

    for data_format in ("arrow", "hdf5"):
        shutil.rmtree(folder / "cartpole" / f"{data_format}-v0", ignore_errors=True)
        env = minari.DataCollector(gym.make("CartPole-v1"), data_format=data_format)
        for seed in range(2):
            env.reset(seed=seed)
            ended, step = False, 0
            while not ended:
                *_, terminated, truncated, _ = env.step(step % 2)
                ended, step = terminated or truncated, step + 1
        env.create_dataset(dataset_id=f"cartpole/{data_format}-v0", algorithm_name="in turn")
        env.close()
    for file in folder.glob("*.json"):  # of the folder of all datasets
        file.unlink()


def write_tensorboard(folder: Path) -> None:
    """Write the events of a run, as PyTorch's writer does."""
    from torch.utils.tensorboard import SummaryWriter

    shutil.rmtree(folder, ignore_errors=True)
    with SummaryWriter(str(folder)) as writer:
        for step in range(3):
            writer.add_scalar("train/loss", 1 / (step + 1), step)
    (file,) = folder.glob("events.out.tfevents.*")
    file.rename(folder / "events.out.tfevents.1700000000.host.1.0")  # without the name of this machine


def main(names: list[str]) -> None:
    """Write the parts, and note the versions of each one that was written."""
    writers = (write_stable_baselines3, write_rllib, write_rllink, write_minari, write_tensorboard)
    noted = json.loads(VERSIONS.read_text(encoding="utf-8")) if VERSIONS.exists() else {}
    for (folder, packages), write in zip(PARTS.items(), writers, strict=True):
        if not names or folder in names:
            (TESTS / folder).mkdir(parents=True, exist_ok=True)
            write(TESTS / folder)
            noted[folder] = {package: version(package) for package in packages}
            VERSIONS.write_text(json.dumps(noted, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
