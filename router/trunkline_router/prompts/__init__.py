"""From text and conversations to token ids, outside the event loop."""
