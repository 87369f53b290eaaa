"""Faults put into the runner on purpose: the device that is not there notices each of them."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.worker.device.device import FakeDevice
from tests.worker.device.faults import (
    DeviceFault,
    EarlyRead,
    GraphFault,
    HostSync,
    LaunchFault,
    MixedDevices,
    Race,
    UnsafeCopy,
)
from tests.worker.device.models import spec_of
from tests.worker.device.session import drive, plans_for, session
from trunkline_kernels.gpu import dependent_launch, rms_norm
from trunkline_kernels.gpu.decode_attention import decode_attention
from trunkline_kernels.gpu.decode_plan import DecodePlan
from trunkline_kernels.gpu.device_batch import DeviceBatch
from trunkline_kernels.gpu.device_rows import DeviceRows
from trunkline_worker.model import gpu_decoder, gpu_weight
from trunkline_worker.model.gpu_decoder import GpuDecoder
from trunkline_worker.runner.gpu import gpu_runner, step_inputs, step_sampling
from trunkline_worker.runner.gpu.gpu_runner import GpuRunner
from trunkline_worker.runner.gpu.step_inputs import StepInputs
from trunkline_worker.runner.gpu.step_programs import StepPrograms
from trunkline_worker.runner.gpu.transfers import Arriving, FromDevice
from trunkline_worker.settings import EngineSettings

Mutation = Callable[[pytest.MonkeyPatch], object]
OPTIONS: dict[str, Any] = {"max_step_tokens": 300, "max_running_requests": 4}
NUM_BLOCKS, CONTEXT, STEPS = 400, 1024, 40


def run() -> None:
    with session(spec_of("qwen3-0.6b", layers=1), num_blocks=NUM_BLOCKS, context_length=CONTEXT, **OPTIONS) as found:
        drive(found, plans_for(found, EngineSettings("model", **OPTIONS), NUM_BLOCKS, CONTEXT, seed=5), STEPS)


def replaced(owner: Any, name: str, mutant: Callable[..., Any]) -> Mutation:
    """The mutant is called with what it replaces, then with that one's arguments."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        real = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **kwargs: mutant(real, *args, **kwargs))

    return mutate


# The host waits.


def reads_a_token(real: Any, *args: Any, **options: Any) -> Any:
    samples = real(*args, **options)
    samples.tokens.max().item()
    return samples


def selects_by_mask(real: Any, decoder: GpuDecoder, hidden: Tensor) -> Tensor:
    found: Tensor = real(decoder, hidden)
    return found[found[:, 0] > 0]


def waits_for_its_event(real: Any, home: FromDevice) -> Any:
    event = real(home)
    event.synchronize()
    return event


# Host and device in one operation.


def indexes_from_the_host(real: Any, arrays: list[Any], device: torch.device) -> list[Tensor]:
    return [torch.from_numpy(array.copy()) for array in arrays]


def scales_by_a_host_tensor(real: Any, decoder: GpuDecoder, hidden: Tensor) -> Tensor:
    scaled: Tensor = real(decoder, hidden) * torch.tensor(2.0)
    return scaled


# Copies.


def on_its_way(array: Any, device: torch.device, *, pinned: bool = True, non_blocking: bool = True) -> Tensor:
    host = torch.empty(array.shape, dtype=torch.from_numpy(array).dtype, pin_memory=pinned)
    host.numpy()[...] = array
    sent = host.to(device, non_blocking=non_blocking)
    LAST[:] = [host]
    return sent


LAST: list[Tensor] = []


def sends_pageable_memory(real: Any, arrays: list[Any], device: torch.device) -> list[Tensor]:
    return [on_its_way(array, device, pinned=False) for array in arrays]


def sends_and_waits(real: Any, arrays: list[Any], device: torch.device) -> list[Tensor]:
    return [on_its_way(array, device, non_blocking=False) for array in arrays]


def refills_what_it_sent(real: Any, arrays: list[Any], device: torch.device) -> list[Tensor]:
    sent = []
    for array in arrays:
        sent.append(on_its_way(array, device))
        LAST[0].numpy()[...] = 77
    return sent


def one_buffer_for_all_steps(patch: pytest.MonkeyPatch) -> None:
    kept: dict[int, Tensor] = {}

    def zeros(*size: int, **options: Any) -> Tensor:
        if not options.get("pin_memory"):
            return torch.zeros(*size, **options)
        return kept.setdefault(size[0], torch.zeros(*size, **options)).zero_()

    patch.setattr(
        step_inputs, "torch", SimpleNamespace(zeros=zeros, int32=torch.int32, empty=torch.empty, int64=torch.int64)
    )


# Results.


def reads_at_once(real: Any, arriving: Arriving) -> list[Tensor]:
    return arriving._tensors


def marks_before_the_copies(real: Any, home: FromDevice, tensors: list[Tensor]) -> Arriving:
    marked = home.event()
    sent: Arriving = real(home, tensors)
    return Arriving(sent._tensors, sent._computed, marked)


def copies_where_it_computes(real: Any, home: FromDevice, device: torch.device) -> None:
    real(home, device)
    home._stream = torch.cuda.current_stream()


def does_not_wait_for_the_step(real: Any, home: FromDevice, device: torch.device) -> None:
    real(home, device)
    home._stream.wait_event = lambda event: None  # type: ignore[union-attr, method-assign]


def keeps_no_memory(real: Any, device: FakeDevice, stream: Any, tensor: Tensor) -> None:
    """As if record_stream() were not called."""


# Graphs.


def captures_when_used(patch: pytest.MonkeyPatch) -> None:
    def run(real: Any, programs: StepPrograms, layout: Any, shape: Any, rows: Any = None) -> Any:
        if shape in programs.shapes and shape not in programs._graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                programs._graphs[shape] = graph, real(programs, layout, shape)
        return real(programs, layout, shape, rows)

    replaced(GpuRunner, "warm_up", forgets_the_graphs)(patch)
    replaced(StepPrograms, "run", run)(patch)


def forgets_the_graphs(real: Any, runner: GpuRunner, report: Any) -> None:
    real(runner, report)
    runner._programs._graphs.clear()


def captures_only_half(real: Any, programs: StepPrograms, report: Any) -> None:
    shapes, programs.shapes = programs.shapes, programs.shapes[::2]
    real(programs, report)
    programs.shapes = shapes


def waits_inside_the_capture(real: Any, plan: DecodePlan, *args: Any) -> None:
    torch.cuda.synchronize()
    real(plan, *args)


def sends_inside_the_capture(real: Any, source: Tensor, index: Tensor) -> Tensor:
    on_its_way(np.zeros(3, np.int32), torch.device("cuda"))
    found: Tensor = real(source, index)
    return found


def copies_its_inputs(real: Any, inputs: StepInputs, *args: Any) -> DeviceBatch:
    batch: DeviceBatch = real(inputs, *args)
    return replace(batch, context_lens=batch.context_lens.clone())


def moves_its_inputs(real: Any, runner: GpuRunner, report: Any) -> None:
    real(runner, report)
    inputs = runner._programs._inputs
    inputs._buffer = torch.zeros_like(inputs._buffer)


def captures_the_shortest(real: Any, inputs: StepInputs, batch: DeviceBatch, longest: int) -> None:
    as_warm_up_calls_it = len(batch.token_ids) == longest
    real(inputs, batch, 1 if as_warm_up_calls_it else longest)


def fewer_programs_each_time(patch: pytest.MonkeyPatch) -> None:
    count = itertools.count()
    real = decode_attention

    def mutant(*args: Any, plan: DecodePlan, **options: Any) -> None:
        fewer = plan.num_ranges - next(count) // 50
        divisions = {
            window: replace(division, ranges=division.ranges[:fewer]) for window, division in plan.divisions.items()
        }
        real(*args, plan=replace(plan, num_ranges=fewer, divisions=divisions), **options)

    patch.setattr(gpu_decoder, "decode_attention", mutant)


def launches_more_for_chunks(patch: pytest.MonkeyPatch) -> None:
    tiles = [0]

    def send(real: Any, inputs: StepInputs, layout: Any, shape: Any) -> None:
        tiles[0] = len(layout.tiles)
        real(inputs, layout, shape)

    def attention(real: Any, *args: Any, **options: Any) -> None:
        for _ in range(2 if tiles[0] else 1):
            real(*args, **options)

    replaced(StepInputs, "send", send)(patch)
    replaced(gpu_decoder, "ragged_attention", attention)(patch)


# Launches.


def narrow_slots(real: Any, inputs: StepInputs, *args: Any) -> DeviceBatch:
    batch: DeviceBatch = real(inputs, *args)
    return replace(batch, slots=batch.slots.int())


def wide_contexts(real: Any, inputs: StepInputs, *args: Any) -> DeviceBatch:
    batch: DeviceBatch = real(inputs, *args)
    return replace(batch, decode_lens=batch.decode_lens.long())


def transposed_gate(real: Any, gate_up: Tensor, **options: Any) -> Tensor:
    found: Tensor = real(gate_up.t().contiguous().t(), **options)
    return found


def strided_rows(real: Any, x: Tensor, weight: Tensor, eps: float, **options: Any) -> Tensor:
    found: Tensor = real(torch.cat([x, x], dim=1)[:, : x.shape[1]], weight, eps, **options)
    return found


def room_for_one(real: Any, **sizes: Any) -> DecodePlan:
    plan: DecodePlan = real(**{**sizes, "max_seqs": 1})
    return plan


def room_for_one_arrival(real: Any, **sizes: Any) -> DecodePlan:
    plan: DecodePlan = real(**sizes)
    return replace(plan, arrivals=plan.arrivals[:1])


def starts_no_kernel_early(real: Any, dependent: bool) -> dict[str, bool]:
    return {}


def starts_every_kernel_early(patch: pytest.MonkeyPatch) -> None:
    patch.setenv(dependent_launch.VARIABLE, "off")
    patch.setattr(rms_norm, "launch_options", lambda dependent: {"launch_pdl": True})


def half_the_tables(real: Any, **sizes: Any) -> DeviceRows:
    rows: DeviceRows = real(**{**sizes, "max_blocks": sizes["max_blocks"] // 2})
    return rows


def odd_alignment(real: Any, arrays: list[Any], device: torch.device) -> list[Tensor]:
    return [on_its_way(np.append(array[:1].reshape(-1)[:1], array), device)[1:].view(array.shape) for array in arrays]


def samples_cold(real: Any, runner: GpuRunner) -> None:
    """No rehearsal."""


def samples_one_row_for_all(real: Any, arrays: list[Any], device: torch.device) -> Any:
    for array in arrays:
        if array.shape[1:] == (2,):
            array[:] = array[0]
    return real(arrays, device)


MUTANTS: list[tuple[type[DeviceFault], str, Mutation]] = [
    (HostSync, "the host reads", replaced(gpu_runner, "sample_step", reads_a_token)),
    (HostSync, "index of a tensor", replaced(GpuDecoder, "logits", selects_by_mask)),
    (HostSync, "while a step is being launched", replaced(FromDevice, "event", waits_for_its_event)),
    (MixedDevices, "on the host", replaced(gpu_runner, "to_device", indexes_from_the_host)),
    (MixedDevices, "mul", replaced(GpuDecoder, "logits", scales_by_a_host_tensor)),
    (UnsafeCopy, "not pinned", replaced(step_sampling, "to_device", sends_pageable_memory)),
    (UnsafeCopy, "that blocks", replaced(step_sampling, "to_device", sends_and_waits)),
    (UnsafeCopy, "written to while", one_buffer_for_all_steps),
    (UnsafeCopy, "written to while", replaced(step_sampling, "to_device", refills_what_it_sent)),
    (UnsafeCopy, "the stream that computes", replaced(FromDevice, "__init__", copies_where_it_computes)),
    (EarlyRead, "has not arrived", replaced(Arriving, "wait", reads_at_once)),
    (EarlyRead, "has not arrived", replaced(FromDevice, "send", marks_before_the_copies)),
    (Race, "before another stream", replaced(FromDevice, "__init__", does_not_wait_for_the_step)),
    (Race, "record_stream", replaced(FakeDevice, "_told_of", keeps_no_memory)),
    (GraphFault, "while requests wait", captures_when_used),
    (GraphFault, "0 graphs were replayed", replaced(GpuRunner, "warm_up", forgets_the_graphs)),
    (GraphFault, "graphs were captured for", replaced(StepPrograms, "warm_up", captures_only_half)),
    (HostSync, "inside a capture", replaced(DecodePlan, "update", waits_inside_the_capture)),
    (GraphFault, "inside a capture", replaced(gpu_decoder, "gather_rows", sends_inside_the_capture)),
    (GraphFault, "made before it and freed", replaced(StepInputs, "batch", copies_its_inputs)),
    (GraphFault, "made before it and freed", replaced(GpuRunner, "warm_up", moves_its_inputs)),
    (LaunchFault, "more than the grid", replaced(StepInputs, "build", captures_the_shortest)),
    (GraphFault, "a grid of", fewer_programs_each_time),
    (GraphFault, "operations were captured", launches_more_for_chunks),
    (LaunchFault, "slots is torch.int32", replaced(StepInputs, "batch", narrow_slots)),
    (LaunchFault, "is torch.int64", replaced(StepInputs, "batch", wide_contexts)),
    (LaunchFault, "not contiguous", replaced(gpu_weight, "silu_and_mul", transposed_gate)),
    (LaunchFault, "not contiguous", replaced(gpu_decoder, "rms_norm", strided_rows)),
    (LaunchFault, "are read or written", replaced(DecodePlan, "allocate", room_for_one)),
    (LaunchFault, "are read or written", replaced(DecodePlan, "allocate", room_for_one_arrival)),
    (LaunchFault, "launch_pdl=False and DEPENDENT=True", replaced(rms_norm, "launch_options", starts_no_kernel_early)),
    (LaunchFault, "launch_pdl=True and DEPENDENT=False", starts_every_kernel_early),
    (LaunchFault, "what there is", replaced(DeviceRows, "allocate", half_the_tables)),
    (LaunchFault, "have the same place", replaced(step_sampling, "to_device", samples_one_row_for_all)),
    (LaunchFault, "past a multiple of 16", replaced(step_sampling, "to_device", odd_alignment)),
    (LaunchFault, "compiled while requests wait", replaced(GpuRunner, "_rehearse", samples_cold)),
]


@pytest.mark.parametrize(
    ("fault", "message", "mutation"), MUTANTS, ids=[f"{fault.__name__}-{n}" for n, (fault, *_) in enumerate(MUTANTS)]
)
def test_a_fault_is_noticed(
    fault: type[DeviceFault], message: str, mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    with pytest.raises(fault, match=message):
        run()


def test_without_a_fault_nothing_is_noticed() -> None:
    run()
