"""Where the demo model is."""

from pathlib import Path

DEMO_MODEL = Path(__file__).parents[3] / "deploy" / "demo" / "tiny-tales"
