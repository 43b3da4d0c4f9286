"""Recorded data: writing what runners sample, reading it from files and from memory, and checking it."""
