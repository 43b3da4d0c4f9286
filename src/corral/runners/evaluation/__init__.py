"""Evaluation during training: rounds of episodes in runners of their own, and their statistics."""
