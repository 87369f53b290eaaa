"""What can be wrong with a model directory."""


class ModelError(Exception):
    """The model cannot be served. One line for a person, naming the file or setting."""
