"""Samples next tokens from hidden states, for each kind of decoder."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from trunkline_worker.model.cpu_decoder import CpuDecoder
from trunkline_worker.model.decoder import Decoder
from trunkline_worker.model.loading import LoadedModel
from trunkline_worker.runner.batch_rows import Row
from trunkline_worker.runner.sampler import NOT_FINITE, Sampled, is_plain_greedy, sample, sample_isolated

# Takes hidden states [num_rows, hidden] and their rows.
StepSample = Callable[[Tensor, list[Row]], Sampled]


def step_sample(model: LoadedModel) -> StepSample:
    """Returns the sampling function for the model's decoder."""
    decoder = model.decoder
    if isinstance(decoder, CpuDecoder):
        return partial(sample_isolated, decoder.logits, partial(_with_c_kernels, decoder, model.deterministic))
    assert isinstance(decoder, Decoder), "the Triton kernels have a runner of their own"
    return partial(sample_isolated, decoder.logits, partial(_on_the_host, model.deterministic))


def _with_c_kernels(decoder: CpuDecoder, deterministic: bool, logits: Tensor, rows: list[Row]) -> Sampled:
    if not all(map(is_plain_greedy, rows)):
        return sample(logits.float(), rows, row_by_row=deterministic)
    ids = decoder.greedy(logits)
    return Sampled(
        [None if token_id < 0 else token_id for token_id in ids],
        errors={i: NOT_FINITE for i, token_id in enumerate(ids) if token_id < 0},
    )


def _on_the_host(deterministic: bool, logits: Tensor, rows: list[Row]) -> Sampled:
    return sample(logits.cpu(), rows, row_by_row=deterministic)
