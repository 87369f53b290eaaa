"""What the worker tells of its choices and steps: timelines, spans, log lines and metrics."""
