"""The engine on the Triton kernels, interpreted: the same tokens as on the references."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.engine_rig import drive, make_engine, make_submit
from tests.worker.model.oracle import weights_of
from tests.worker.quantized.checkpoints import write_checkpoint
from tests.worker.quantized.stored_formats import FORMATS
from trunkline.engine.v1.engine_pb2 import EngineOutput
from trunkline_kernels.gpu import ragged_attention, tuned_tilings
from trunkline_kernels.gpu.tuned_tilings import ProductKey
from trunkline_kernels.quantized_weight import QuantizedWeight, dequantize
from trunkline_worker.engine.assembly import build_engine
from trunkline_worker.model import gpu_weight
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.config_json import read_spec
from trunkline_worker.model.decoder import Decoder
from trunkline_worker.model.gpu_decoder import Chip, GpuDecoder
from trunkline_worker.model.gpu_weight import timed_products
from trunkline_worker.model.loading import load_model
from trunkline_worker.model.weights import Linear, StoredLinear, whole_product
from trunkline_worker.settings import EngineSettings

DRAW = random.Random(3)
PROMPTS = [[DRAW.randrange(5, 400) for _ in range(length)] for length in (1, 16, 17, 33)]


def tokens(prompts: list[list[int]], *, model: Path, max_tokens: int = 3, **options: object) -> dict[int, list[int]]:
    engine = make_engine(model, **options)
    submits = [
        make_submit(handle, prompt, max_tokens=max_tokens, ignore_eos=True) for handle, prompt in enumerate(prompts)
    ]
    return drive(engine, submits).tokens


@pytest.fixture(scope="module")
def expected(shallow_model: Path) -> dict[int, list[int]]:
    return tokens(PROMPTS, model=shallow_model, kernels="torch", kv_blocks=64)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"max_step_tokens": 7, "max_running_requests": 3},  # chunks beside decodes
        pytest.param({"kv_blocks": 5}, marks=pytest.mark.slow),  # preemptions
        pytest.param({"deterministic": True}, marks=pytest.mark.slow),
        pytest.param({"batching": "static", "batch_size": 3}, marks=pytest.mark.slow),  # padding rows
        pytest.param({"deterministic": True, "max_step_tokens": 9, "max_running_requests": 3}, marks=pytest.mark.slow),
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_tokens_are_those_of_the_twins(
    expected: dict[int, list[int]], options: dict[str, Any], shallow_model: Path
) -> None:
    # Interpreted, steps take long, and deterministic ones longer: the longest prompts are left out.
    prompts = PROMPTS[: 2 if "deterministic" in options else 3]
    found = tokens(prompts, model=shallow_model, kernels="triton", **{"kv_blocks": 64, **options})
    assert found == {handle: expected[handle] for handle in range(len(prompts))}


PERSISTENT = ("persistent_linear", "add_persistent_linear", "persistent_gated_linear")


def write_table(file: Path, model: Path, tiling: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product of the model's layers has this tiling; the engine reads it."""
    products = timed_products(read_spec(model).layers[0])
    keys = [ProductKey(kernel, "", 64, columns, inner, "float8_e4m3fn") for kernel, columns, inner in products]
    tuned_tilings.write(file, {key: (tiling, {}) for key in keys})
    monkeypatch.setenv(tuned_tilings.VARIABLE, str(file))


def counted(monkeypatch: pytest.MonkeyPatch, *names: str) -> set[str]:
    """Which of these functions a model's layers call from now on."""
    called: set[str] = set()

    def counting(name: str, real: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            called.add(name)
            return real(*arguments, **options)

        return run

    for name in names:
        monkeypatch.setattr(gpu_weight, name, counting(name, getattr(gpu_weight, name)))
    return called


@pytest.mark.slow
def test_contexts_that_are_cut_at_fixed_places(
    expected: dict[int, list[int]], shallow_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ragged_attention, "SPLIT", 32)
    seen = []
    merged = ragged_attention._merge_split

    class Counted:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            seen.append(grid)
            return merged[grid]

    monkeypatch.setattr(ragged_attention, "_merge_split", Counted())
    options: dict[str, Any] = {"max_step_tokens": 9, "max_running_requests": 3}  # chunks beside decodes
    found = tokens(PROMPTS, model=shallow_model, kernels="triton", kv_blocks=64, deterministic=True, **options)
    assert found == expected
    assert seen, "no decode came in pieces"


@pytest.mark.slow
def test_every_kind_of_sampling_is_the_twins(shallow_model: Path) -> None:
    ways: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 5, "top_k": 40, "top_p": 0.9},
        {"temperature": 0.7, "seed": 6, "min_p": 0.02, "logprobs": 3},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.25, "prompt_logprobs": 2},
        {"temperature": 0.0, "logit_bias": {17: 4.0, 30: -100.0}, "min_tokens": 3},
    ]

    def outputs(kernels: str) -> dict[int, list[EngineOutput]]:
        submits = [make_submit(n, PROMPTS[1 + n % 2], **{"max_tokens": 3, **way}) for n, way in enumerate(ways)]
        return drive(make_engine(shallow_model, kernels=kernels, kv_blocks=64), submits).outputs

    found, expected = outputs("triton"), outputs("torch")
    for handle in expected:
        assert len(found[handle]) == len(expected[handle])
        for one, other in zip(found[handle], expected[handle], strict=True):
            assert one.token_ids == other.token_ids
            for a, b in zip(
                [*one.logprobs, *one.prompt.logprobs], [*other.logprobs, *other.prompt.logprobs], strict=True
            ):
                assert a.chosen.token_id == b.chosen.token_id
                assert abs(a.chosen.rank - b.chosen.rank) <= 1, "far down two tokens differ by less than the kernels do"
                assert a.chosen.logprob == pytest.approx(b.chosen.logprob, abs=1e-4)
                assert [entry.token_id for entry in a.top] == [entry.token_id for entry in b.top]


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.slow
def test_quantised_weights_are_what_they_stand_for(kind: str, shallow_model: Path) -> None:
    settings = EngineSettings(str(shallow_model), dtype="float32", device="cpu", kv_blocks=64, quantization=kind)
    device = torch.device("cpu")
    quantised = load_model(shallow_model, dtype="float32", device=device, kernels="triton", quantization=kind)
    plain = load_model(shallow_model, dtype="float32", device=device, kernels="torch")
    assert isinstance(quantised.decoder, GpuDecoder)
    assert isinstance(plain.decoder, Decoder)
    weights = weights_of(plain)
    layers = []
    for layer, narrow in zip(weights.layers, quantised.decoder._layers, strict=True):
        wide: list[StoredLinear] = [
            Linear(dequantize(product.weight), product.bias)
            for product in narrow.products
            if isinstance(product.weight, QuantizedWeight)
        ]
        unquantized, first = (whole_product(one, torch.float32) for one in (layer.attention.qkv, wide[0]))
        assert not torch.equal(unquantized.matrix(torch.float32), first.matrix(torch.float32))
        layers.append(layer.with_products(wide))
    reference = Decoder(plain.spec, replace(weights, layers=layers), context_length=1024, deterministic=False)
    submits = [make_submit(n, prompt, max_tokens=4, ignore_eos=True) for n, prompt in enumerate(PROMPTS[1:2])]
    found, expected = (
        drive(build_engine(settings, model, device)[0], submits).tokens
        for model in (quantised, replace(plain, decoder=reference))
    )
    assert found == expected


@pytest.mark.parametrize("name", ["packed4-zeros", pytest.param("int8-channel", marks=pytest.mark.slow)])
def test_a_quantised_checkpoint_stays_quantised_but_where_parts_differ(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    form = replace(form, config=form.config | {"ignore": ["lm_head", "re:.*up_proj"]})
    write_checkpoint(tmp_path, form, plain=("up_proj",), num_hidden_layers=1)
    decoder = load_model(tmp_path, dtype="float32", device=torch.device("cpu"), kernels="triton").decoder
    assert isinstance(decoder, GpuDecoder)
    held = [isinstance(product.weight, QuantizedWeight) for product in decoder._layers[0].products]
    assert held == [True, True, False, True]
    prompts = [[5, 9, 3, 60, 41], [7]]
    assert tokens(prompts, model=tmp_path, kernels="triton", kv_blocks=64) == tokens(
        prompts, model=tmp_path, kernels="torch", kv_blocks=64
    )


EIGHT_BITS = [pytest.param({"quantization": "fp8"}, marks=pytest.mark.slow), {"kv_dtype": "fp8"}]


@pytest.mark.parametrize("options", EIGHT_BITS, ids=str)
def test_eight_bit_products_and_keys_serve(options: dict[str, Any], shallow_model: Path) -> None:
    """What they compute is checked kernel by kernel; rounding to 8 bits may change a token."""
    found = tokens(PROMPTS[1:2], model=shallow_model, kernels="triton", kv_blocks=64, **options)
    assert all(len(output) == 3 for output in found.values())


@pytest.mark.parametrize(
    "tiling",
    [
        {},
        {"rows": 16, "columns": 128, "inner": 32, "warps": 4, "stages": 1, "programs": 1},
    ],
    ids=str,
)
@pytest.mark.slow
def test_fp8_products_go_the_way_that_was_timed(
    tiling: dict[str, int], shallow_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the library or a persistent kernel, with the same tokens: both round to 8 bits as our own kernel does."""
    options: dict[str, Any] = {"model": shallow_model, "kernels": "triton", "kv_blocks": 64, "quantization": "fp8"}
    own = tokens(PROMPTS[1:2], **options)
    write_table(tmp_path / "tuned.json", shallow_model, tiling, monkeypatch)
    launched = counted(monkeypatch, *PERSISTENT, "library_fp8_linear")
    assert tokens(PROMPTS[1:2], **options) == own
    assert launched == (set(PERSISTENT) if tiling else {"library_fp8_linear"})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"quantization": "fp8", "kernels": "torch"}, "quantization=fp8 needs a GPU"),
        ({"kv_dtype": "fp8", "kernels": "auto"}, "kv_dtype=fp8 needs the Triton kernels"),
        (
            {"quantization": "int8", "kernels": "triton", "deterministic": True},
            "cannot be combined with --deterministic",
        ),
    ],
)
def test_what_does_not_go_together_is_one_line(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        make_engine(**options)


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ModelError, match="kernels=triton needs an NVIDIA or AMD GPU: use --kernels torch, or auto"):
        Chip.of(torch.device("cpu"))
