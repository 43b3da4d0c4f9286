"""Callbacks: the user's code at named events."""

from corral.callbacks.callback import EVENTS, Callback, Event

__all__ = ["EVENTS", "Callback", "Event"]
