"""Policies in use: loaded without training code, exported, measured and shown."""
