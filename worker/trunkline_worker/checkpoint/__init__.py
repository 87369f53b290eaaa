"""The files of a model, and what they say."""
