"""Trees, columns, schedules, seeds and returns: what all other packages build on, without envs and networks."""
