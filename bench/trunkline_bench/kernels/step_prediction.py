"""A page with the predicted times of a decode step and of a job."""

from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

from trunkline_bench.kernels.device import H200, RANGES, Device
from trunkline_bench.kernels.kernel_work import works
from trunkline_bench.kernels.recorded_step import DTYPE, PLAIN, RecordedStep, decode_step, prompt_step
from trunkline_bench.kernels.step_table import (
    Job,
    JobPrediction,
    by_output_token,
    job_prediction,
    sensitivity,
    step_s,
    table,
)
from trunkline_worker.model.config_json import read_spec
from trunkline_worker.model.gpu_decoder import Chip
from trunkline_worker.model.loading import KV_DTYPES

CONFIGS = Path(__file__).parents[2] / "configs"
PROGRAM_SHARED_MEMORY = 227 << 10  # bytes that one program may use
PROMPT_STEP_TOKENS = 8192  # of a step that computes prompts, as in the headline stage of bench-gpu


def page(
    model: str, *, batch: int, context: int, weights: str = PLAIN, kv_dtype: str = PLAIN, device: Device = H200
) -> str:
    """The page as Markdown. The job has `batch` requests with this mean context: prompts and outputs of two thirds of
    `context` each.

    weights: one of FORMS; kv_dtype: "bfloat16" or "fp8"
    """
    chip = Chip(device.multiprocessors, PROGRAM_SHARED_MEMORY, (9, 0), dependent_launches=True)
    spec = read_spec(CONFIGS / model)
    length = context * 2 // 3
    kept: dict[str, Any] = {"weights": weights, "kv_dtype": KV_DTYPES.get(kv_dtype, DTYPE)}
    decode = decode_step(spec, chip, batch=batch, context=context, **kept)
    prompts = prompt_step(spec, chip, tokens=max(PROMPT_STEP_TOKENS, length), prompt=length, **kept)
    job = Job(batch, length, length)
    predicted = _predicted(decode, prompts, job, device)
    rates = {
        name: (
            _predicted(decode, prompts, job, _changed(device, name, worst)).tokens_per_s,
            _predicted(decode, prompts, job, _changed(device, name, best)).tokens_per_s,
        )
        for name, (worst, best) in RANGES.items()
    }
    options = "".join(
        f" --{name} {value}" for name, value in (("weights", weights), ("kv-dtype", kv_dtype)) if value != PLAIN
    )
    launched, launched_for_prompts = works(decode, device), works(prompts, device)
    assumed = ", ".join(f"{field.name} {getattr(device, field.name):.4g}" for field in fields(device)[1:])
    return (
        f"# A decode step of {model}, predicted\n\n"
        f"- date: {datetime.now(UTC):%Y-%m-%d}; versions: triton {triton.__version__}, torch {torch.__version__}\n"
        f"- command: `python -m trunkline_bench.kernels.resources --step {model} --batch {batch} --context {context}"
        f"{options}`"
        " (no GPU is used, and nothing is measured)\n"
        f"- assumptions about an {device.name}: {assumed}; sources: `trunkline_bench/kernels/device.py`\n"
        f"- job of {batch} requests of {length} tokens in and {length} out: prompts {predicted.prefill_s:.1f} s, "
        f"decodes {predicted.decode_s:.1f} s, **{predicted.tokens_per_s:,.0f} output tok/s**\n\n"
        f"## {batch} decodes with contexts of {context}\n\n{table(launched, device)}\n"
        f"## A step of {sum(prompts.query_lens):,} prompt tokens\n\n{table(launched_for_prompts, device)}\n"
        "## The time of an output token\n\nOf prompts and of decodes; the least is at the data sheet's rates.\n\n"
        f"{by_output_token(launched, launched_for_prompts, job, sum(prompts.query_lens), device)}\n"
        "## What the job would reach if one assumption is wrong\n\n"
        f"{sensitivity(rates, RANGES, device)}"
    )


def _changed(device: Device, name: str, value: float) -> Device:
    return replace(device, **{name: value})  # type: ignore[arg-type]


def _predicted(decode: RecordedStep, prompts: RecordedStep, job: Job, device: Device) -> JobPrediction:
    return job_prediction(
        job,
        decode_step_s=step_s(works(decode, device), device),
        prompt_step_s=step_s(works(prompts, device), device),
        prompt_step_tokens=sum(prompts.query_lens),
    )
