"""Our engine against Hugging Face transformers, with continuous batching and with static batches."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from trunkline_bench.gpu.ceilings import Rows
from trunkline_bench.gpu.engine.engine_run import running
from trunkline_bench.gpu.shapes import Shapes

GIVE_UP_S = 90.0
# For continuous batching, fastest first.
ATTENTIONS = ("kernels-community/flash-attn3", "flash_attention_2", "sdpa", "paged|sdpa", "paged|eager")


def measure(shapes: Shapes) -> Rows:
    """Output tokens per second of our engine and of transformers. The times include prompts."""
    requests, prompt_tokens, output_tokens = shapes.peer
    with running(shapes, max_running_requests=requests) as run:
        prompts = [run.prompt(handle, prompt_tokens) for handle in range(requests)]
        started_s = time.perf_counter()
        for handle, prompt in enumerate(prompts):
            run.submit(handle, prompt, output_tokens)
        run.run()
        ours = requests * output_tokens / (time.perf_counter() - started_s)
    yield {"what": "ours", "output_tok_per_s": ours}
    import transformers  # takes seconds, and only this stage needs it

    model = _model(transformers, shapes)
    # Static batches first, since they cannot hang: a stopped manager finishes all requests that are left.
    yield _tried("generate, sdpa", ours, partial(_static, transformers, model, prompts, output_tokens))
    for attention in ATTENTIONS:  # until one works
        row = _tried(f"generate_batch, {attention}", ours, partial(
            _continuous, transformers, model, prompts, output_tokens, attention, tiny=shapes.tiny
        ))  # fmt: skip
        yield row
        if "failed" not in row:
            return


def _tried(name: str, ours: float, way: Callable[[], tuple[int, float]]) -> dict[str, object]:
    try:
        tokens, seconds = way()
    except Exception as error:  # reported, and the next way is tried
        return {"what": name, "failed": f"{type(error).__name__}: {error}"[:200]}
    return {"what": name, "output_tok_per_s": tokens / seconds, "ours": ours / (tokens / seconds)}


def _model(transformers: Any, shapes: Shapes) -> Any:
    config = transformers.AutoConfig.from_pretrained(shapes.model)
    with torch.device(shapes.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=shapes.dtype)
    return model.eval()


def _generation_config(transformers: Any, output_tokens: int) -> Any:
    return transformers.GenerationConfig(
        max_new_tokens=output_tokens, min_new_tokens=output_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )


def _continuous(
    transformers: Any, model: Any, prompts: list[list[int]], output_tokens: int, attention: str, *, tiny: bool
) -> tuple[int, float]:
    """Output tokens, and seconds from the first request to the last result, without allocation and graph capture."""
    model.set_attn_implementation(attention)
    options: dict[str, Any] = {
        "generation_config": transformers.GenerationConfig(
            max_new_tokens=output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
    }
    if tiny:  # by default it takes most of the machine's memory
        options["continuous_batching_config"] = transformers.ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=64)
    with model.continuous_batching_context_manager(**options) as manager:
        _served(manager, prompts[:2], output_tokens)
        started_s = time.perf_counter()
        tokens = _served(manager, prompts, output_tokens)
        seconds = time.perf_counter() - started_s
    assert tokens == len(prompts) * output_tokens, f"{tokens} tokens came out"
    return tokens, seconds


def _served(manager: Any, prompts: list[list[int]], output_tokens: int) -> int:
    """Runs these prompts. Returns the number of output tokens."""
    manager.add_requests(inputs=prompts, max_new_tokens=output_tokens)
    tokens = done = 0
    give_up_s = time.perf_counter() + GIVE_UP_S
    while done < len(prompts):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            tokens += len(result.generated_tokens)
            done += 1
        assert result is not None or manager.is_running(), "the manager has stopped"
        assert time.perf_counter() < give_up_s, f"only {done} of {len(prompts)} are done after {GIVE_UP_S:.0f} s"
    return tokens


def _static(transformers: Any, model: Any, prompts: list[list[int]], output_tokens: int) -> tuple[int, float]:
    model.set_attn_implementation("sdpa")
    ids = torch.tensor(prompts, device=model.device)
    config = _generation_config(transformers, output_tokens)
    with torch.inference_mode():
        model.generate(ids[:2], attention_mask=torch.ones_like(ids[:2]), generation_config=config)
        started_s = time.perf_counter()
        found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return (found.shape[1] - ids.shape[1]) * len(prompts), time.perf_counter() - started_s
