"""The tokenizer's files, as they travel to routers."""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from xxhash import xxh3_128

from trunkline_worker.model.errors import ModelError

REQUIRED = "tokenizer.json"
NAMES = (REQUIRED, "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """File name → contents, those that exist; and the tokenizer itself."""

    contents: dict[str, bytes]
    tokenizer: Tokenizer

    @property
    def digest(self) -> bytes:
        """Equal digests, equal files."""
        digest = xxh3_128()
        for name, data in self.contents.items():
            digest.update(f"{name}:{len(data)}:".encode() + data)
        return digest.digest()


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """Raises ModelError, one line, where tokenizer.json is missing or damaged."""
    if not (directory / REQUIRED).is_file():
        raise ModelError(f"{directory / REQUIRED} is missing: Trunkline reads tokenizers in this format only")
    contents = {name: (directory / name).read_bytes() for name in NAMES if (directory / name).is_file()}
    try:
        tokenizer = Tokenizer.from_buffer(contents[REQUIRED])
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{directory / REQUIRED} is damaged: {error}") from None
    return TokenizerFiles(contents, tokenizer)
