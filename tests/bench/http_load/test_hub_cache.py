"""A cache of the Hugging Face hub that was written without the hub."""

from pathlib import Path

from huggingface_hub import snapshot_download

from trunkline_bench.http_load.hub_cache import write_hub_cache
from trunkline_bench.servers.demo_model import DEMO_MODEL


def test_a_client_finds_the_tokenizer_without_the_network(tmp_path: Path) -> None:
    write_hub_cache(tmp_path, "trunkline/tiny-tales", DEMO_MODEL)
    found = Path(snapshot_download("trunkline/tiny-tales", cache_dir=tmp_path / "hub", local_files_only=True))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (found / name).read_bytes() == (DEMO_MODEL / name).read_bytes()
    assert not list(found.glob("*.safetensors"))
