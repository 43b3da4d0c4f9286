"""`corral events`: the events that callbacks can listen to."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from corral.callbacks.callback import ARGUMENTS, EVENTS


def print_events(_: argparse.Namespace) -> int:
    """Print the events and their arguments, and return the exit status 0."""
    console = Console(highlight=False)
    for process in dict.fromkeys(event.process for event in EVENTS.values()):
        console.print(Text(f"In the process of the {process.replace('_', ' ')}\n", "bold underline"))
        for event in EVENTS.values():
            if event.process == process:
                console.print(Text(event.name, "bold cyan"))
                console.print(Padding(Text(event.fires), (0, 0, 0, 4), expand=False))
                console.print(
                    Padding(Text("arguments: " + ", ".join(event.arguments), "dim"), (0, 0, 1, 4), expand=False)
                )
    console.print(Text("Arguments (a callable may take any subset, by name)\n", "bold underline"))
    for name, meaning in ARGUMENTS.items():
        console.print(Text(name, "bold"))
        console.print(Padding(Text(meaning.replace("`", "")), (0, 0, 0, 4), expand=False))
    return 0
