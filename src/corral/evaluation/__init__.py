"""Evaluation: rounds of whole episodes, and their statistics."""
