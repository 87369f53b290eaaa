"""Turns tokens into text, and sends text as soon as no later token can change it."""
