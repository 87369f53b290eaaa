"""Encoders: models in which every token attends to all tokens of its text, or to a window on both sides."""
