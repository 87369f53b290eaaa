"""Where the benchmarks of the scheduler find traces and leave results."""

from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
RESULTS = REPOSITORY / "bench" / "results" / "scheduler"
TRACES = REPOSITORY.parent / "shared" / "traces"
AZURE = TRACES / "azure_2023_conversation.csv"
