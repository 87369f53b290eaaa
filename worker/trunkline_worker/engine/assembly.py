"""Puts the parts of an engine together for a loaded model, as the settings say."""

import os
import select
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

from trunkline.status import INTERNAL
from trunkline.v1.worker_pb2 import Capability, GetModelResponse, GrammarKind, Task
from trunkline_worker.cache.blocks import KVBlocks
from trunkline_worker.cache.prefix_tree import PrefixTree
from trunkline_worker.engine.engine import Engine, ModelLimits
from trunkline_worker.engine.guided_sequences import GuidedSequences
from trunkline_worker.engine.model_task import ModelTask, pooled_model
from trunkline_worker.engine.pooled_assembly import build_encoder_engine, check_encoder_settings, describe_pooling
from trunkline_worker.engine.rehearsal import activation_bytes, rehearse
from trunkline_worker.engine.settings_description import description_of_settings, kv_memory_fraction, scheduler_limits
from trunkline_worker.engine.step_floor import StepFloor, model_work
from trunkline_worker.engine.step_runner import executor_for, step_runner
from trunkline_worker.grammar.grammar_link import GrammarLink, Refused
from trunkline_worker.link.channel import shared_file
from trunkline_worker.model.checkpoint.gguf_file import is_gguf
from trunkline_worker.model.checkpoint.model_file import read_file
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.encoders.encoder_config import PooledEncoder
from trunkline_worker.model.encoders.encoder_loading import load_encoder
from trunkline_worker.model.kv_budget import check_block_count, kv_block_count, usable_bytes
from trunkline_worker.model.loading import LoadedModel, load_model
from trunkline_worker.scheduler.scheduler import Scheduler
from trunkline_worker.scheduler.stats import EngineStats
from trunkline_worker.settings import EngineSettings
from trunkline_worker.step.model_work import peak_rates

# Of the texts that one router's session may keep: thousands of usual grammars, 16 of the largest.
MAX_SESSION_GRAMMAR_BYTES = 4 << 20

# On a CPU, other processes use the cores once there are requests. So the first prompts are computed in shorter steps,
# until the first fit, and then until steps are in time.
CPU_LATENESS = 3.0


def assemble(
    settings: EngineSettings, device: torch.device, report: Callable[[str], None], gpu_name: str
) -> tuple[Engine, GetModelResponse, list[str]]:
    """Loads the model, and returns its engine, its description without the worker's names, and notes for the operator.
    Raises ModelError or OutOfMemory if it cannot be served.

    report: called with the progress; gpu_name: as torch reports it
    """
    directory = Path(settings.model)
    pooled = pooled_model(
        directory,
        ModelTask(settings.task),
        any_dimensions=settings.any_dimensions,
        ignored_keys=settings.ignore_config_keys,
    )
    if isinstance(pooled, PooledEncoder):
        check_encoder_settings(settings)
        encoder = load_encoder(
            directory,
            pooled,
            dtype=settings.dtype,
            device=device,
            kernels=settings.kernels,
            deterministic=settings.deterministic,
            context_length=settings.context_length,
        )
        return *build_encoder_engine(settings, encoder, device, report), []
    model = load_model(
        directory,
        dtype=settings.dtype,
        device=device,
        load_format=settings.load_format,
        kernels=settings.kernels,
        quantization=settings.quantization,
        kv_dtype=settings.kv_dtype,
        deterministic=settings.deterministic,
        context_length=settings.context_length,
        ignore_config_keys=settings.ignore_config_keys,
        pooled=pooled,
    )
    report("allocating KV blocks")
    engine, description = build_engine(settings, model, device, report, gpu_name)
    return engine, description, [*model.notes, *take_grammars(engine, description, settings)]


def build_engine(
    settings: EngineSettings,
    model: LoadedModel,
    device: torch.device,
    report: Callable[[str], None] | None = None,
    gpu_name: str = "",
) -> tuple[Engine, GetModelResponse]:
    """An engine for a loaded model, and its description without the worker's names.

    report: called with the progress of warming up and of the rehearsal; None: neither is done
    gpu_name: as torch reports it
    """
    num_blocks = kv_blocks_for(settings, model, device)
    tree = PrefixTree(model.execution_fingerprint(settings.block_size), settings.block_size)
    stats = EngineStats(time.perf_counter())
    runner = step_runner(model, settings, num_blocks=num_blocks, report=report)
    executor = executor_for(runner, settings, device.type)
    limits = scheduler_limits(settings, is_pooled=model.head is not None)
    scheduler = Scheduler(limits, KVBlocks(num_blocks, tree), stats)
    scheduler.cost.routing = model.spec.routing
    if report is not None:
        report("measuring what steps cost")
        rehearse(
            runner,
            scheduler.cost,
            scheduler.limits,
            context_length=model.context_length,
            num_blocks=num_blocks,
            block_size=settings.block_size,
        )
        if device.type == "cpu" and model.head is None:
            scheduler.cost.recent_lateness = CPU_LATENESS
    model.decoder.expert_loads.clear()  # no request has computed a step yet
    engine = Engine(
        scheduler,
        executor,
        ModelLimits(
            min(model.context_length, num_blocks * settings.block_size),
            frozenset(model.eos_token_ids),
            pools_every_state=model.head is not None and model.head.needs_every_state,
        ),
        clock_s=time.perf_counter,
        price_per_hour=settings.price_per_hour,
        floor=step_floor(model, settings, gpu_name),
    )
    return engine, description_of(model, settings, device, num_blocks=num_blocks, run_ahead=executor.run_ahead)


def take_grammars(engine: Engine, description: GetModelResponse, settings: EngineSettings) -> list[str]:
    """Lets an engine take requests with grammars, and says so in its description. Without the library, a tokenizer that
    the library reads, or an end-of-sequence token to end outputs with, they are refused. Returns notes for the
    operator."""
    tokenizer = _tokenizer_path(Path(settings.model))
    eos = description.eos_token_ids
    if description.HasField("pooling") or not (eos and tokenizer.is_file() and find_spec("llguidance")):
        return []
    link = GrammarLink(tokenizer, vocab_size=description.vocab_size, eos_token_ids=eos)
    if not _works(link):
        link.close()
        return ["no request can have a grammar: the grammar process could not start, and its error is above"]
    engine.guided = GuidedSequences(link, engine.scheduler.sequences, description.vocab_size)
    description.capabilities.append(Capability.CAPABILITY_GRAMMARS)
    description.max_session_grammar_bytes = MAX_SESSION_GRAMMAR_BYTES
    return []


def _tokenizer_path(model: Path) -> Path:
    """Where other processes find tokenizer.json. That of a GGUF file is in memory, as long as this process lives."""
    path = model / "tokenizer.json"
    if not is_gguf(model):
        return path
    with shared_file(path.name, 0) as file:
        file.write(read_file(path))
        file.flush()
        return Path(f"/proc/{os.getpid()}/fd/{os.dup(file.fileno())}")


def _works(link: GrammarLink) -> bool:
    """Whether the grammar process starts, which reads the tokenizer. Waits until it has compiled a grammar."""
    digest = b""  # no other grammar's
    link.compile(digest, GrammarKind.GRAMMAR_KIND_CHOICE, '["a"]')
    link.flush()
    while not (news := link.take()):
        select.select([link], [], [], link.tick())
    link.withdraw(digest)
    return not any(isinstance(item, Refused) and item.error.reason == INTERNAL for item in news)


def kv_blocks_for(settings: EngineSettings, model: LoadedModel, device: torch.device) -> int:
    """The number of KV blocks: as set, or as many as fit. Raises OutOfMemory if that is too much or too few."""
    needed = activation_bytes(model, settings)  # first, because it frees memory cached while loading
    available = max(0, usable_bytes(device, settings.gpu_memory_share) - needed)
    block = model.block_format(settings.block_size)
    if settings.kv_blocks:
        check_block_count(settings.kv_blocks, block, free_bytes=available)
        return settings.kv_blocks
    return kv_block_count(
        block,
        free_bytes=available,
        fraction=kv_memory_fraction(settings, device),
        context_length=model.context_length,
        max_running=settings.max_running_requests,
    )


def description_of(
    model: LoadedModel, settings: EngineSettings, device: torch.device, *, num_blocks: int, run_ahead: int
) -> GetModelResponse:
    """What clients and routers are told of the engine and its model, without the worker's names."""
    description = description_of_settings(
        settings, device, num_blocks=num_blocks, block_size=settings.block_size, is_pooled=model.pooling is not None
    )
    description.task = Task.TASK_GENERATE
    description.fingerprint = model.execution_fingerprint(settings.block_size)
    description.architecture = model.spec.architecture
    description.vocab_size = model.spec.vocab_size
    description.context_length = model.context_length
    description.run_ahead = run_ahead
    description.eos_token_ids.extend(sorted(model.eos_token_ids))
    description.default_sampling.CopyFrom(model.default_sampling)
    description.dtype = str(model.dtype).removeprefix("torch.")
    if model.pooling is not None:
        describe_pooling(description, model.pooling, model.spec.hidden_size)
        # Tokenizers of decoders put nothing between the texts of a pair, and decoders know no token types.
        description.pooling.takes_no_pairs = not model.pooling.pair_template
    return description


def pick_device(name: str) -> torch.device:
    """The device that a setting names. Raises ModelError if it is not available."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("device=cuda, but torch finds no usable NVIDIA GPU: use --device cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def step_floor(model: LoadedModel, settings: EngineSettings, gpu_name: str) -> StepFloor:
    """The floor of a model's steps.  gpu_name: as torch reports it; empty: no GPU"""
    dtype = str(model.dtype).removeprefix("torch.")
    rates = peak_rates(
        gpu_name,
        dtype=dtype,
        # With other kinds beside fp8 the time is too low, but still a floor.
        quantization="fp8" if "fp8" in model.quantized_kinds else "none",
        tflops=settings.peak_tflops,
        gb_per_s=settings.peak_gb_per_s,
    )
    weights = model.weight_bytes
    work = model_work(
        model.spec,
        layer_bytes=weights.layers,
        head_bytes=weights.head,
        expert_bytes=weights.experts,
        kv_itemsize=model.kv_dtype.itemsize,
    )
    return StepFloor(work, rates)
