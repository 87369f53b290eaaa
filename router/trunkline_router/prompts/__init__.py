"""Turns text and conversations into token ids, outside the event loop."""
