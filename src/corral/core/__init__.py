"""Modules, distributions, returns, schedules and the learner: the maths, which knows no environment."""
