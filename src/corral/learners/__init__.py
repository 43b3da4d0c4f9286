"""Gradient steps: one learner, and groups of them."""
