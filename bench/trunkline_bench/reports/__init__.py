"""What the reports of measurements share: where figures come from, statistics, Markdown tables."""
