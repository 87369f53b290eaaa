"""An engine process whose model says what a file prescribes; started by tests.playing.worker.

Everything else of the engine is real: it computes the model, and samples from logits that prefer one token by far.
"""

import argparse
import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tests.playing.families import ANSWERS
from trunkline_worker.engine import engine_process
from trunkline_worker.model.loading import LoadedModel
from trunkline_worker.runner import torch_runner
from trunkline_worker.runner.batch_rows import Row
from trunkline_worker.runner.sampler import Sampled, sample
from trunkline_worker.settings import EngineSettings

CERTAIN = 100.0  # a logit; every other one is 0. More than the noise of a draw can make up for


class Script:
    """The answers of a model directory."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._answers: dict[str, str] = json.loads((directory / ANSWERS).read_text())
        self.answer_to = lru_cache(maxsize=256)(self._answer_to)

    def _answer_to(self, prompt: bytes) -> list[int]:
        """Returns the tokens of the answer whose key comes last in a prompt, which is given as int64 tokens."""
        text = self._tokenizer.decode(np.frombuffer(prompt, np.int64).tolist(), skip_special_tokens=False)
        key = max(self._answers, key=lambda key: (text.rfind(key), len(key)))
        answer = self._answers[key] if key in text else ""
        ids: list[int] = self._tokenizer.encode(answer, add_special_tokens=False).ids
        return ids


class Player:
    """Samples the prescribed tokens, then the token that ends an answer."""

    def __init__(self, script: Script, model: LoadedModel) -> None:
        self._script = script
        self._vocab_size = model.spec.vocab_size
        self._end = min(model.eos_token_ids)

    def sample(self, hidden: Tensor, rows: list[Row]) -> Sampled:
        logits = torch.zeros(len(rows), self._vocab_size)
        for place, row in enumerate(rows):
            answer = self._script.answer_to(row.span(0, row.prompt_len).tobytes())
            logits[place, [*answer, self._end][min(row.num_output, len(answer))]] = CERTAIN
        return sample(logits, rows, row_by_row=False)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=EngineSettings.from_json, required=True)
    directory = Path(parser.parse_known_args()[0].settings.model)
    script = Script(directory)
    torch_runner.step_sample = lambda model: Player(script, model).sample
    engine_process.main()


if __name__ == "__main__":
    main()
