"""What became of each request: its record, log line, outcome and HTTP status. And the rate limits of many rooms."""
