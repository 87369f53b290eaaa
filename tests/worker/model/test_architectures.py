"""Every architecture against transformers: logits and greedy tokens, in ragged batches over paged KV."""

import random
from pathlib import Path

import pytest
import torch

from tests.parameters import one_in
from tests.worker.engine_rig import drive, make_engine, make_submit
from tests.worker.model.checkpoints import VARIANTS, VOCAB, write_checkpoint
from tests.worker.model.forward import ragged_logits
from tests.worker.model.oracle import base_config, their_model
from trunkline_worker.model.cpu_decoder import CpuDecoder
from trunkline_worker.model.loading import load_model

GREEDY_STEPS = 64
# What these compute is particular.
PARTICULAR = ("granite", "granite-biases", "olmo2", "phi4-mini", "smollm3-window")
WITH_EXPERTS = ("qwen3-moe-some-layers", "mixtral-window", "olmoe", "qwen2-moe")


def prompts() -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(3, VOCAB) for _ in range(length)] for length in (1, 3, 16, 17, 40, 55)]


@pytest.mark.parametrize(
    ("kernels", "deterministic"), [("auto", False), ("torch", False), ("torch", True)], ids=["c", "torch", "tiles"]
)
@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_logits_equal_transformers_in_a_ragged_batch_of_chunks(
    name: str, kernels: str, deterministic: bool, tmp_path: Path
) -> None:
    truth = write_checkpoint(name, tmp_path)
    model = load_model(tmp_path, device=torch.device("cpu"), kernels=kernels, deterministic=deterministic)
    assert isinstance(model.decoder, CpuDecoder) == (kernels == "auto")
    for tokens, logits in zip(prompts(), ragged_logits(model, prompts()), strict=True):
        expected = truth(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", one_in(2, [40, 4]))
def test_deterministic_bits_depend_neither_on_other_sequences_nor_on_chunks(
    kernels: str, dtype: str, block_size: int, tmp_path: Path
) -> None:
    # Products of 13 with 8 columns compute the last rows of a tile with another kernel on CPUs with AVX2. Every second
    # layer has a window: where it begins must not decide how sums are grouped.
    their_model(
        tmp_path,
        base_config("Qwen3ForCausalLM")
        | {"vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 13, "sliding_window": 19}
        | {"use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 3},
    )
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=dtype, kernels=kernels, deterministic=True)
    assert isinstance(model.decoder, CpuDecoder) == (kernels == "auto")
    assert any(model.spec.windows)
    together = ragged_logits(model, prompts(), block_size=block_size)
    for tokens, logits in zip(prompts(), together, strict=True):
        for chunk in (1, 7, len(tokens)):
            alone = ragged_logits(model, [tokens], block_size=block_size, chunks=(chunk,))
            assert torch.equal(alone[0], logits)


@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_greedy_tokens_equal_transformers_for_64_steps(name: str, tmp_path: Path) -> None:
    truth = write_checkpoint(name, tmp_path)
    engine = make_engine(tmp_path, kv_blocks=128, block_size=8, max_step_tokens=32)
    submits = [
        make_submit(i + 1, tokens, max_tokens=GREEDY_STEPS, ignore_eos=True) for i, tokens in enumerate(prompts())
    ]
    done = drive(engine, submits)
    for i, tokens in enumerate(prompts()):
        found = done.tokens[i + 1]
        assert len(found) == GREEDY_STEPS
        # Each is the likeliest after those before it: what generate() would choose, in one pass instead of 64.
        logits = truth(torch.tensor([tokens + found[:-1]])).logits[0, len(tokens) - 1 :]
        assert found == logits.argmax(-1).tolist(), f"prompt of {len(tokens)} tokens"


@pytest.mark.parametrize("name", PARTICULAR + WITH_EXPERTS)
@torch.inference_mode()
def test_preempted_requests_and_cached_prefixes_get_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    truth = write_checkpoint(name, tmp_path)
    engine = make_engine(
        tmp_path, kv_blocks=20, block_size=8, max_step_tokens=32, admission="optimistic", itl_target_ms=0.0
    )
    longest = prompts()[-1]
    asked = [longest, longest[:40], longest[:33] + prompts()[0], prompts()[3], prompts()[2]]
    submits = [make_submit(i, tokens, max_tokens=24, ignore_eos=True) for i, tokens in enumerate(asked, start=1)]
    cached = 0
    for _ in range(2):
        done = drive(engine, submits)
        cached += sum(done.cached.values())
        for i, tokens in enumerate(asked, start=1):
            found = done.tokens[i]
            logits = truth(torch.tensor([tokens + found[:-1]])).logits[0, len(tokens) - 1 :]
            assert found == logits.argmax(-1).tolist(), f"prompt of {len(tokens)} tokens"
    assert engine.scheduler.stats.preemptions > 0
    assert cached > 0


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("name", PARTICULAR)
def test_deterministic_bits_of_each_family_depend_on_no_other_row(name: str, kernels: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path)
    model = load_model(tmp_path, device=torch.device("cpu"), dtype="bfloat16", kernels=kernels, deterministic=True)
    assert isinstance(model.decoder, CpuDecoder) == (kernels == "auto")
    for tokens, logits in zip(prompts()[2:5], ragged_logits(model, prompts()[2:5]), strict=True):
        for chunk in (7, len(tokens)):
            assert torch.equal(ragged_logits(model, [tokens], chunks=(chunk,))[0], logits)


@pytest.mark.parametrize("name", PARTICULAR)
def test_c_kernels_in_bfloat16_stay_close_to_the_reference(name: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path)
    cpu = torch.device("cpu")
    c, plain = (load_model(tmp_path, device=cpu, dtype="bfloat16", kernels=kernels) for kernels in ("auto", "torch"))
    assert isinstance(c.decoder, CpuDecoder)
    for one, other in zip(ragged_logits(c, prompts()), ragged_logits(plain, prompts()), strict=True):
        scale = other.float().abs().max().item()
        torch.testing.assert_close(one.float(), other.float(), atol=0.05 * scale, rtol=0)


@pytest.mark.parametrize("name", one_in(2, PARTICULAR))
def test_triton_kernels_give_what_the_reference_does(name: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path)

    def found(kernels: str) -> tuple[list[float], dict[int, list[int]]]:
        # The second prompt's last layer computes only the token to sample from.
        submits = [
            make_submit(1, prompts()[3], max_tokens=2, ignore_eos=True, prompt_logprobs=0),
            make_submit(2, prompts()[2], max_tokens=2, ignore_eos=True),
        ]
        done = [drive(make_engine(tmp_path, kernels=kernels, kv_blocks=16), [submit]) for submit in submits]
        logprobs = [entry.chosen.logprob for entry in done[0].outputs[1][0].prompt.logprobs[1:]]
        return logprobs, done[0].tokens | done[1].tokens

    (expected, tokens), (logprobs, same) = found("torch"), found("triton")
    assert logprobs == pytest.approx(expected, abs=1e-4)
    assert same == tokens


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close_to_float32(dtype: str, tmp_path: Path) -> None:
    write_checkpoint("llama2-gqa-tied", tmp_path)
    tokens = prompts()[4]

    def logprobs(kind: str) -> list[float]:
        engine = make_engine(tmp_path, dtype=kind, kv_blocks=32)
        done = drive(engine, [make_submit(1, tokens, max_tokens=1, prompt_logprobs=0)])
        return [entry.chosen.logprob for entry in done.outputs[1][0].prompt.logprobs[1:]]

    assert logprobs(dtype) == pytest.approx(logprobs("float32"), abs=0.25)
