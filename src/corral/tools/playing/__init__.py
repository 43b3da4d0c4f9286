"""Whole episodes that a policy plays: evaluated, or shown."""
