"""One request at one worker after the other."""
