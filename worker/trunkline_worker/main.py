"""`trunkline-worker`: one replica of one model."""

import asyncio
import secrets
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from trunkline.answer.answer_formats import format_of_template
from trunkline.grant import GrantKeys
from trunkline.protocol import OLDEST_PROTOCOL, PROTOCOL_VERSION
from trunkline.tls_files import TlsFileError
from trunkline.v1.worker_pb2 import GetModelResponse
from trunkline_runtime.garbage import keep_collecting, spare_what_stays
from trunkline_runtime.log import configure_logging, get_logger
from trunkline_runtime.server import GrpcServer, PortInUse, Signals, check_port_is_free
from trunkline_runtime.settings import instance_name, load_settings
from trunkline_runtime.telemetry.gpu_meter import GpuMeter
from trunkline_runtime.telemetry.otel_variables import valid_variables
from trunkline_runtime.telemetry.otlp_exporter import METRICS, is_exported
from trunkline_runtime.telemetry.scrape_tokens import ScrapeTokenError, ScrapeTokens
from trunkline_runtime.telemetry.span_queue import ExportCounts
from trunkline_runtime.tls import ServerTls
from trunkline_runtime.tracing import configure_tracing, shutdown_tracing
from trunkline_worker.engine.model_task import ModelTask, pooled_model
from trunkline_worker.front.cache_mirror import CacheMirror
from trunkline_worker.front.door import CallAuthorizer, Door, most_message_bytes
from trunkline_worker.front.draining import Draining
from trunkline_worker.front.front import Front
from trunkline_worker.front.grants import GrantDesk
from trunkline_worker.front.metrics_port import metrics_served
from trunkline_worker.front.service import SERVICE, WorkerService, add_to_server
from trunkline_worker.front.stats_log import log_stats
from trunkline_worker.front.telemetry.worker_metrics import WorkerMetrics
from trunkline_worker.front.text.tokenizer_files import TokenizerFiles, read_tokenizer_files
from trunkline_worker.front_settings import WorkerSettings
from trunkline_worker.link.engine_link import EngineLink, EngineStartError
from trunkline_worker.link.silence import Silence
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.config_json import read_spec

STOP_GRACE_S = 1.0  # after draining, for the last messages to be sent

EXIT_ENGINE_DIED = 1
EXIT_CANNOT_START = 2


def main() -> None:
    settings = load_settings(WorkerSettings, sys.argv[1:], prog="trunkline-worker", description=__doc__ or "")
    problem = settings.problem()
    if problem is not None:
        print(f"trunkline-worker: {problem}", file=sys.stderr)
        sys.exit(EXIT_CANNOT_START)
    worker_id = settings.worker_id or instance_name(settings.host, settings.port)
    configure_logging("worker", worker=worker_id)
    queue = configure_tracing("trunkline-worker", worker_id)
    spans = None if queue is None else queue.counts
    try:
        if settings.port:
            check_port_is_free(settings.host, settings.port)  # before the model is loaded, not after
        if settings.metrics_port > 0:
            check_port_is_free(settings.host, settings.metrics_port, "--metrics-port")
        tokens = ScrapeTokens.read(settings.metrics_token_file) if settings.metrics_token_file else ScrapeTokens([])
        tls = settings.tls.server_tls()
        directory = Path(settings.engine.model)
        ignored_keys = settings.engine.ignore_config_keys
        pooled = pooled_model(directory, ModelTask(settings.engine.task), ignored_keys=ignored_keys)
        spec = pooled or read_spec(directory, ignored_keys)
        files = read_tokenizer_files(directory, Path(settings.chat_template) if settings.chat_template else None)
        files.check_vocabulary(spec.vocab_size)  # before the weights are read, which takes minutes for a large model
        status = uvloop.run(serve(settings, worker_id, files, tls, tokens, spans))
    except (PortInUse, ModelError, EngineStartError, TlsFileError, ScrapeTokenError, OSError) as error:
        print(f"trunkline-worker: {error}", file=sys.stderr)
        status = EXIT_CANNOT_START
    if status == EXIT_ENGINE_DIED:
        print("trunkline-worker: the engine process died; see the log", file=sys.stderr)
    shutdown_tracing()
    sys.exit(status)


async def serve(
    settings: WorkerSettings,
    worker_id: str,
    files: TokenizerFiles,
    tls: ServerTls | None,
    tokens: ScrapeTokens,
    spans: ExportCounts | None,
) -> int:
    """Serves until a signal or the engine's death. Returns the exit status.  spans: what became of them"""
    log = get_logger()
    signals = Signals()
    epoch = secrets.randbits(64)
    mirror = CacheMirror(epoch)
    link = EngineLink()
    starting = asyncio.create_task(link.start(settings.engine))
    stopped = asyncio.create_task(signals.stop.wait())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await link.stop()
        return 0
    model = starting.result()
    model.model, model.worker_id, model.epoch = settings.model_name, worker_id, epoch
    grant_keys = GrantKeys.of(settings.grant_key, settings.grant_key_previous)
    describe_protocol(model, grant_keys)
    model.tokenizer_digest = files.digest
    model.answer_format = answer_format(settings, files)
    metrics = metrics_of(model, settings)
    front = Front(model, files.tokenizer, mirror, metrics=metrics)
    front.connect(link)
    link.follow(front.on_step, front.on_engine_death)
    mirror.set_load(link.first_load)

    def now_unix_ms() -> int:
        return int(time.time() * 1e3)

    authorizer = CallAuthorizer(grant_keys, worker_id, epoch, now_unix_ms, frozenset(settings.tls_router_names))
    server = GrpcServer(
        settings.host,
        settings.port,
        services=[SERVICE],
        max_request_bytes=most_message_bytes(model),
        gate=Door(authorizer, model),
        tls=tls,
        health_port=settings.tls.health_port,
    )

    draining = Draining(front, server.set_ready, signals.stop.is_set, settings.drain_timeout_s)
    desk = GrantDesk(grant_keys, epoch, now_unix_ms)
    service = WorkerService(front, files, draining, desk)
    add_to_server(service, server.grpc)
    beside = AsyncExitStack()
    try:
        await server.start()
        if metrics is not None:
            host, port = settings.host, settings.metrics_port
            gpu = GpuMeter.open(link.gpu_uuid)
            served = metrics_served(worker_id, host, port, metrics, service.backlog, tokens, tls, spans, gpu)
            await beside.enter_async_context(served)
        await server.set_ready(True)
        spare_what_stays()
        tell_ready(model, files, server.port)
        died = asyncio.create_task(front.dead.wait())
        silence = Silence(settings.engine.step_timeout_s)
        watching = asyncio.create_task(link.kill_when_silent(silence, front.is_idle))
        watching.add_done_callback(lambda task: task.cancelled() or task.result())
        collecting = asyncio.create_task(keep_collecting())
        collecting.add_done_callback(lambda task: task.cancelled() or task.result())
        if settings.stats_interval_s:
            logging_stats = asyncio.create_task(log_stats(front, settings.stats_interval_s))
            logging_stats.add_done_callback(lambda task: task.cancelled() or task.result())
        await asyncio.wait({stopped, died}, return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            return EXIT_ENGINE_DIED
        log.info("worker stopping", choices=front.num_choices)
        drained = asyncio.create_task(draining.drain())
        at_once = asyncio.create_task(signals.stop_now.wait())
        await asyncio.wait({drained, died, at_once}, return_when=asyncio.FIRST_COMPLETED)
        return EXIT_ENGINE_DIED if died.done() else 0
    finally:
        await server.stop(STOP_GRACE_S)
        await beside.aclose()
        await link.stop()
        log.info("worker stopped")


def tell_ready(model: GetModelResponse, files: TokenizerFiles, port: int) -> None:
    """Logs that the worker is ready, and what it cannot do."""
    log = get_logger()
    log.info("worker ready", model=model.model, port=port, device=model.device, dtype=model.dtype,
             kv_blocks=model.kv_blocks, context_length=model.context_length,
             start_up_s=round(model.start_up_s, 1))  # fmt: skip
    if files.template_problem:
        log.warning("the model is served without chat", model=model.model, problem=files.template_problem)
    if not model.eos_token_ids and not model.HasField("pooling"):
        log.warning("the model names no end-of-sequence token: output ends at max_tokens, a stop string or a stop "
                    "token alone", model=model.model)  # fmt: skip


def answer_format(settings: WorkerSettings, files: TokenizerFiles) -> str:
    """The format of the model's answers, as it is set or as the chat template shows; "": they are text."""
    name, reason = settings.answer_format, "--answer-format"
    if name == "auto":
        name, signs = format_of_template(files.templates)
        reason = f"the chat template has {' '.join(signs)}" if name else "the chat template has the marks of no format"
    get_logger().info("answer format chosen", answer_format=name or "none", reason=reason)
    return name if name != "none" else ""


def metrics_of(model: GetModelResponse, settings: WorkerSettings) -> WorkerMetrics | None:
    """The metrics to fill; None if they are neither served nor exported."""
    with valid_variables("trunkline-worker"):
        return WorkerMetrics(model) if settings.metrics_port >= 0 or is_exported(METRICS) else None


def describe_protocol(model: GetModelResponse, grant_keys: GrantKeys) -> None:
    """Sets what routers need to know before they open a session."""
    model.protocol_version = PROTOCOL_VERSION
    model.min_router_protocol = OLDEST_PROTOCOL
    model.grant_key_ids[:] = grant_keys.ids


if __name__ == "__main__":
    main()
