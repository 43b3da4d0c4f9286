"""Callbacks: user code that runs at named events."""

from corral.callbacks.callback import EVENTS, Callback, Event, make_multi_callbacks
from corral.callbacks.keep_frames import keep_frames

__all__ = ["EVENTS", "Callback", "Event", "keep_frames", "make_multi_callbacks"]
