"""Names in the directories of runs that several packages know."""

from __future__ import annotations

RESULTS_FILE, PROGRESS_FILE = "result.jsonl", "progress.csv"
SEEDS_FILE = "seeds.json"
"""File in the directory of a set, which `corral train --seeds` writes."""

SET_ASIDE = "without-checkpoint"
"""Directory in a set with the runs that could not continue, which a report does not search."""

EXPERIMENT_FILE = "experiment.yaml"
"""File in the directory of a set or of a search with the settings of its runs, for `--config`."""

SEARCH_FILE = "search.json"
"""File in the directory of a search with its trials, which `corral search` writes."""
