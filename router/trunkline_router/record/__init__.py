"""What became of each request, and when: its record, the lines and counts made of it, and its status over HTTP."""
