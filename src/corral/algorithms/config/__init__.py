"""The config: typed groups of settings, and their validation."""
