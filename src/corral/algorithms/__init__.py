"""Algorithms: one readable file each, on the same ring."""
