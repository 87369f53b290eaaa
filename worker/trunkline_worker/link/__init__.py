"""The connection between the front process and the engine process."""
