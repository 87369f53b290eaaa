"""A bug that one request's parameters trigger ends that request alone. Each test injects one at a place of the engine
that computes with them, and compares the others with what they get without it."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.worker.engine_rig import drive, make_engine, make_submit
from tests.worker.scheduling.maskers import Climbing
from tests.worker.scheduling.proposers import RandomProposer
from trunkline.engine.v1.engine_pb2 import EngineOutput, EngineRequest
from trunkline.status import CODE_INTERNAL, INTERNAL
from trunkline.v1.worker_pb2 import Submit
from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.engine import engine as engine_module
from trunkline_worker.engine.engine import Engine
from trunkline_worker.engine.messages import sequence_of, sequence_output
from trunkline_worker.model.cpu_decoder import CpuDecoder
from trunkline_worker.runner import sampler, torch_runner
from trunkline_worker.runner.gpu import row_table, step_sampling
from trunkline_worker.step.sampling_key import position_key

PROMPTS = {1: list(range(60, 100)), 2: list(range(40, 75)), 3: list(range(100, 160)), 4: [70, 71, 72]}
MARK = 7.25  # the unusual bias by which the injected bugs know their victim
VICTIM = 2


def submits(**of_victim: Any) -> list[Submit]:
    """Four requests of different kinds. The second one is the victim."""
    kinds: dict[int, dict[str, Any]] = {
        1: {"temperature": 0.0},
        VICTIM: {"temperature": 0.8, "logit_bias": {5: MARK}, "repetition_penalty": 1.2, **of_victim},
        3: {"temperature": 1.0, "logprobs": 3, "top_p": 0.9, "prompt_logprobs": 1},
        4: {"temperature": 0.9, "logit_bias": {9: 1.0}, "presence_penalty": 0.5},
    }
    return [
        make_submit(handle, PROMPTS[handle], max_tokens=6, ignore_eos=True, **{"seed": handle, **kind})
        for handle, kind in kinds.items()
    ]


def run(engine: Engine, requests: Iterable[Submit]) -> dict[int, list[EngineOutput]]:
    """All outputs of each request, until none is left; then the pool must be empty."""
    found: dict[int, list[EngineOutput]] = {}
    engine.accept(EngineRequest(submits=list(requests)))
    while engine.has_work:
        step = engine.step()
        for output in step.outputs if step is not None else ():
            found.setdefault(output.handle, []).append(output)
        if step is not None:
            for handle, token_id in zip(step.token_handles, step.token_ids, strict=True):
                found.setdefault(handle, []).append(EngineOutput(handle=handle, token_ids=[token_id]))
    engine.scheduler.check_integrity()
    assert engine.scheduler.blocks.num_live == 0
    return found


def tokens(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def is_victims(sampling: Any) -> bool:
    return any(bias == MARK for _, bias in sampling.logit_bias)


def check_that_only_the_victim_fails(make: Callable[[], Engine], inject: Callable[[], None], **of_victim: Any) -> None:
    expected = {handle: tokens(found) for handle, found in run(make(), submits(**of_victim)).items()}
    engine = make()
    inject()
    found = run(engine, submits(**of_victim))
    error = found[VICTIM][-1].error
    assert (error.code, error.reason) == (CODE_INTERNAL, INTERNAL)
    assert "injected" not in error.message, "clients are not told of internals"
    assert "injected" in found[VICTIM][-1].trace, "the log is"
    for handle in (1, 3, 4):
        assert tokens(found[handle]) == expected[handle]
        assert not any(output.HasField("error") for output in found[handle])
    assert drive(engine, [make_submit(9, PROMPTS[1], max_tokens=3)]).tokens[9], "the engine goes on"


ON_THE_HOST = [{"kernels": "c"}, {"kernels": "torch"}, {"kernels": "torch", "deterministic": True}]


def on_the_host(options: dict[str, Any]) -> Callable[[], Engine]:
    return lambda: make_engine(kv_blocks=64, **options)


@pytest.mark.parametrize("options", ON_THE_HOST, ids=str)
def test_in_penalties(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    real = sampler.adjust_logits

    def broken(logits: Any, row: Any) -> None:
        real(logits, row)
        if is_victims(row.sampling):
            raise ZeroDivisionError("injected")

    check_that_only_the_victim_fails(
        on_the_host(options), lambda: monkeypatch.setattr(sampler, "adjust_logits", broken)
    )


def test_in_the_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    real = position_key

    def broken(seed: int, position: int) -> int:
        if position > len(PROMPTS[VICTIM]) + 2 and seed == seed_of_victim:
            raise OverflowError("injected")
        return real(seed, position)

    seed_of_victim = sequence_of.__globals__["choice_seed"](VICTIM, 0)
    check_that_only_the_victim_fails(
        on_the_host({"kernels": "c"}), lambda: monkeypatch.setattr(sampler, "position_key", broken)
    )


@pytest.mark.parametrize("where", ["prompt", "output"])
def test_in_log_probabilities(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the prompt are asked for while it is computed, in chunks that sample nothing."""
    module: Any = torch_runner if where == "prompt" else sampler
    real = module.position_logprobs

    def broken(logits: Any, token_ids: list[int], num_top: list[int]) -> Any:
        if 7 in num_top:
            raise IndexError("injected")
        return real(logits, token_ids, num_top)

    check_that_only_the_victim_fails(
        on_the_host({"kernels": "c", "max_step_tokens": 16}),
        lambda: monkeypatch.setattr(module, "position_logprobs", broken),
        **({"prompt_logprobs": 7} if where == "prompt" else {"logprobs": 7}),
    )


def test_in_what_the_engine_takes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sequence_of

    def broken(submit: Submit, *args: Any, **options: Any) -> Any:
        if submit.handle == VICTIM:
            raise ValueError("injected")
        return real(submit, *args, **options)

    check_that_only_the_victim_fails(
        on_the_host({"kernels": "c"}), lambda: monkeypatch.setattr(engine_module, "sequence_of", broken)
    )


def test_in_what_the_engine_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sequence_output

    def broken(news: Any) -> EngineOutput:
        if news.sequence_id == VICTIM:
            raise TypeError("injected")
        return real(news)

    check_that_only_the_victim_fails(
        on_the_host({"kernels": "c"}), lambda: monkeypatch.setattr(engine_module, "sequence_output", broken)
    )


@pytest.mark.parametrize(
    "module",
    [pytest.param(row_table, id="parameters"), pytest.param(step_sampling, id="bias", marks=pytest.mark.slow)],
)
def test_on_the_device(module: Any, monkeypatch: pytest.MonkeyPatch, shallow_model: Path) -> None:
    def outputs() -> dict[int, list[EngineOutput]]:
        engine = make_engine(shallow_model, kv_blocks=16, kernels="triton", max_step_tokens=16, max_running_requests=2)
        plain: dict[str, Any] = {"max_tokens": 2, "ignore_eos": True, "repetition_penalty": 1.2}
        marked = make_submit(VICTIM, [40, 41, 42], **plain, temperature=0.8, logit_bias={5: MARK})
        return run(engine, [make_submit(1, [60, 61], **plain, logit_bias={7: 1.0}), marked])

    name = "sampling_columns" if module is row_table else "_bias"
    real = getattr(module, name)

    def broken(*args: Any) -> Any:
        if is_victims(args[-1].sampling):
            raise OverflowError("injected")
        return real(*args)

    expected = outputs()
    monkeypatch.setattr(module, name, broken)
    found = outputs()
    assert tokens(found[1]) == tokens(expected[1])
    assert len(tokens(expected[VICTIM])) == 2
    assert [output.error.reason for output in found[VICTIM]] == [INTERNAL]
    assert "injected" in found[VICTIM][0].trace


class Faulty(RandomProposer, Climbing):
    """A proposer and masker whose `method` raises an exception for the victim, once it has an output token; `fault`
    None: the method is as it should be."""

    def __init__(self, method: str, fault: Callable[[], Any] | None) -> None:
        RandomProposer.__init__(self, lambda _: [], 2048, seed=1)
        Climbing.__init__(self, 2048)
        real = getattr(self, method)

        def broken(sequence: Sequence, *args: Any) -> Any:
            is_hit = fault is not None and sequence.sequence_id == VICTIM and sequence.num_output > 0
            return fault() if fault is not None and is_hit else real(sequence, *args)

        setattr(self, method, broken)

    def constrains(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in (1, VICTIM)


def fails() -> None:
    raise KeyError("injected")


def gives_too_many_masks() -> NDArray[np.int32]:
    return np.full((20, 64), -1, np.int32)


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize(
    ("method", "fault"),
    [
        ("follows", fails),
        ("holds", fails),
        ("propose", fails),
        ("constrains", fails),
        ("masks", fails),
        ("masks", gives_too_many_masks),
    ],
)
def test_in_what_is_proposed_or_masked(method: str, fault: Callable[[], Any], run_ahead: int) -> None:
    def outputs(fault: Callable[[], Any] | None) -> dict[int, list[EngineOutput]]:
        engine = make_engine(kv_blocks=64, run_ahead=run_ahead, deterministic=True)
        engine.scheduler.runs.proposer = engine.scheduler.masker = Faulty(method, fault)
        return run(engine, submits())

    expected, found = outputs(None), outputs(fault)
    for handle in (1, 3, 4):
        assert tokens(found[handle]) == tokens(expected[handle])
        assert len(tokens(found[handle])) == 6
    last = found[VICTIM][-1]
    assert last.error.reason == INTERNAL
    assert ("injected" if fault is fails else "20 masks") in last.trace
    assert tokens(found[VICTIM]) == tokens(expected[VICTIM])[: len(tokens(found[VICTIM]))], "none is unconstrained"
    assert len(tokens(found[VICTIM])) < 6


def test_a_bug_of_the_model_itself_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose model cannot be computed must end, so that its requests continue on another worker."""
    engine = make_engine(kv_blocks=64)
    engine.accept(EngineRequest(submits=submits()))

    def broken(*_: Any, **_of: Any) -> Any:
        raise RuntimeError("injected")

    monkeypatch.setattr(CpuDecoder, "forward", broken)
    with pytest.raises(RuntimeError, match="injected"):
        engine.step()
