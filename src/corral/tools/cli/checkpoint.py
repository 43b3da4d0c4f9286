"""`corral checkpoint info`: what a checkpoint holds, without importing anything that it names."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from corral.algorithms.checkpoint_settings import call_with, of_script
from corral.core.places import place_of
from corral.core.text import printable
from corral.runs.checkpoint.directory import CONFIG, POLICIES, open_listed, read_consistently, read_json
from corral.runs.checkpoint.finding import find_checkpoint

MAX_TEXT = 200
MAX_DEPTH = 8


def print_info(options: argparse.Namespace) -> int:
    """Print what the checkpoint at `options.path` holds, and return the exit status 0.

    Raises:
        CheckpointError: There is no checkpoint, or a file is missing or damaged.
    """
    info = checkpoint_info(options.path)
    if options.json:
        print(json.dumps(info, indent=1))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    rows = [(_printable(name), _printable(value)) for name, value in _rows(info)]
    width = max(len(name) for name, _ in rows) + 2
    for name, value in rows:
        console.print(Text.assemble((name.ljust(width), "bold"), value))
    return 0


def checkpoint_info(path: str) -> dict[str, Any]:
    """Return what a checkpoint holds, in types that JSON has.

    Only its JSON files are read; the sizes of the others are compared with the sizes that were written.

    Raises:
        CheckpointError: There is no checkpoint, or a file is missing or damaged.
    """
    place = place_of(find_checkpoint(path))

    def read(metadata: dict[str, Any]) -> dict[str, Any]:
        config, policies = (read_json(place, metadata, name) for name in (CONFIG, POLICIES))
        for name, entry in metadata["files"].items():
            with open_listed(place, f"{metadata['data']}/{name}", entry["num_bytes"]):
                pass
        environment = config.get("environment")
        unnamed = metadata.get("unnamed")
        return {
            "path": str(place.location),
            **{name: value for name, value in metadata.items() if name not in ("data", "files", "sha256", "unnamed")},
            "env": environment.get("env") if isinstance(environment, dict) else None,
            "policies": policies,
            "supply_again": {**(unnamed if isinstance(unnamed, dict) else {}), **of_script(config)},
            "num_bytes": sum(entry["num_bytes"] for entry in metadata["files"].values()),
            "files": {name: entry["num_bytes"] for name, entry in metadata["files"].items()},
        }

    return read_consistently(place, read)


def _rows(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of the table: what is said and its value."""
    rows = [
        ("checkpoint", info["path"]),
        ("algorithm", f"{info.get('algo')} ({info.get('algorithm_class')})"),
        ("env", str(info["env"])),
        ("iteration", _number(info.get("training_iteration"))),
        ("env steps", _number(info.get("num_env_steps_sampled_lifetime"))),
        ("saved", f"{info.get('time')} by Corral {info.get('corral_version')}, format {info.get('format_version')}"),
    ]
    for module_id, policy in info["policies"].items():
        described = policy if isinstance(policy, dict) else {}
        rows += [
            (f"module {module_id}", str(described.get("module_class"))),
            ("  observations", _space(described.get("observation_space"))),
            ("  actions", _space(described.get("action_space"))),
        ]
    rows.append(("size", _size(info["num_bytes"])))
    rows += [(f"  {name}", _size(num_bytes)) for name, num_bytes in info["files"].items()]
    if info["supply_again"]:
        rows += [(f"give again {place}", str(text)) for place, text in info["supply_again"].items()]
        rows.append(("", call_with(info["supply_again"])))
    return rows


def _space(described: Any, depth: int = 0) -> str:
    """Return a described space as Gymnasium writes it, such as `Box(4,)`, `Discrete(2)`."""
    if not isinstance(described, dict) or depth > MAX_DEPTH:
        return "unknown" if described is None else "..."
    parts = described.get("spaces")
    if isinstance(parts, list):
        # The parts of a Dict come with their names.
        named = [part if isinstance(part, list) and len(part) == 2 else (None, part) for part in parts]
        inner = ", ".join(f"{'' if name is None else f'{name}: '}{_space(part, depth + 1)}" for name, part in named)
        return f"{described.get('type')}({inner})"
    sizes = next((described[name] for name in ("shape", "n", "nvec") if name in described), "")
    dtype = described.get("dtype")
    return f"{described.get('type')}({sizes}{f', {dtype}' if described.get('type') == 'Box' else ''})"


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, (int, float)) else str(value)


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"


def _printable(text: str) -> str:
    """Return a text from a file without characters that would control the terminal."""
    shown = printable(text[: MAX_TEXT + 1])
    return shown if len(shown) <= MAX_TEXT else f"{shown[:MAX_TEXT]} ..."
