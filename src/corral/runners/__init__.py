"""Env runners: one, and groups of them."""
