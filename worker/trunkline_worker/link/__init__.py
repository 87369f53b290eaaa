"""Between the process of the front and that of the engine."""
