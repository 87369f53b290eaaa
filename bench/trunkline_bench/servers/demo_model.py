"""Path of the demo model."""

from pathlib import Path

DEMO_MODEL = Path(__file__).parents[3] / "deploy" / "demo" / "tiny-tales"
