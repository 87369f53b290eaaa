"""A checkpoint of DeepSeek's and Qwen's form, fp8 with a scale for 128 x 128 values: written, read and served."""

import json
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from trunkline_bench.gpu.ceilings import Rows
from trunkline_bench.gpu.engine.costs import rates
from trunkline_bench.gpu.engine.engine_run import running
from trunkline_bench.gpu.shapes import Shapes
from trunkline_kernels.quantized_weight import BLOCK, quantize_blocks
from trunkline_worker.model.checkpoint.checkpoint import EMBEDDING, HEAD
from trunkline_worker.model.config_json import read_spec
from trunkline_worker.model.weight_reading import DUMMY_STD, build_weights

CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}


def measure(shapes: Shapes) -> Rows:
    """Time to write and to load the checkpoint, and its prompt and output tokens per second, as costs.measure() has
    them for the model without a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        started_s = time.perf_counter()
        num_bytes = write(shapes, directory)
        yield {"what": "written", "gb": num_bytes / 1e9, "s": time.perf_counter() - started_s}
        with running(shapes, model=folder, load_format="auto") as run:
            yield {"what": "loaded", "s": run.load_s, "gb_per_s": num_bytes / 1e9 / run.load_s}
            prompts, output = rates(shapes, run)
            yield {"what": "fp8 in blocks", "prompt_tok_per_s": prompts, "output_tok_per_s": output}


def write(shapes: Shapes, directory: Path) -> int:
    """Writes the shapes' model with random weights, a file for each layer. Returns the bytes of its tensors."""
    spec = read_spec(shapes.model)
    products: dict[str, tuple[int, int]] = {}
    others: dict[str, torch.Size] = {}

    def note_product(name: str, rows: int, inner: int, device: torch.device) -> Tensor:
        products[name] = rows, inner
        return torch.empty(rows, inner, device=device)

    def note(target: Tensor, name: str) -> None:
        others[name] = target.shape

    build_weights(
        spec, shapes.dtype, torch.device("meta"), note, lambda linear: linear,
        names=(EMBEDDING, None if spec.tie_word_embeddings else HEAD), read_part=note_product,
    )  # fmt: skip
    config = json.loads((shapes.model / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": CONFIG}))
    generator = torch.Generator(shapes.device).manual_seed(0)
    files: dict[str, dict[str, Tensor]] = {}

    def draw(*size: int) -> Tensor:
        return torch.empty(size, dtype=shapes.dtype, device=shapes.device).normal_(std=DUMMY_STD, generator=generator)

    for name, (rows, inner) in products.items():
        weight = quantize_blocks(draw(rows, inner))
        tensors = files.setdefault(_file_of(name), {})
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"] = weight.data, weight.scale
    for name, size in others.items():
        values = torch.ones(size, dtype=shapes.dtype) if name.endswith("norm.weight") else draw(*size)
        files.setdefault(_file_of(name), {})[name] = values
    for file, tensors in files.items():
        save_file({name: tensor.cpu() for name, tensor in tensors.items()}, directory / file)
    names = {name: file for file, tensors in files.items() for name in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())


def _file_of(name: str) -> str:
    parts = name.split(".")
    return f"layer-{parts[2]}.safetensors" if parts[1:2] == ["layers"] else "others.safetensors"
