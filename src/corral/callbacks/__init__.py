"""Callbacks: user code that runs at named events."""

from corral.callbacks.callback import EVENTS, Callback, Event, make_multi_callbacks

__all__ = ["EVENTS", "Callback", "Event", "make_multi_callbacks"]
