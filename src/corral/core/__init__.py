"""The ground of all other packages: trees, columns, schedules, seeds, returns. It knows no env and no network."""
