"""Metrics: named values that many workers log and one result reports."""
