"""Reads the tensors of a PoolingSpec into a head."""

from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from trunkline_worker.model.checkpoint.checkpoint import HEAD, STORED_DTYPES, Checkpoint
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.pooling.pooling_head import PoolingHead, Projection
from trunkline_worker.model.pooling.pooling_spec import AnswerTokens, PoolingSpec, ProjectionSpec


def head_tensors(spec: PoolingSpec) -> list[str]:
    """Returns the tensors of all heads that a decoder's checkpoint may have. read_head() reads those that are used."""
    projections = spec.head if isinstance(spec.head, tuple) else ()
    return [HEAD, *(f"{projection.name}.weight" for projection in projections)]


def read_head(spec: PoolingSpec, checkpoint: Checkpoint | None, embedding: Tensor, *, is_tied: bool) -> PoolingHead:
    """Returns the head, on the device of the model. Raises ModelError if a tensor is missing or has another shape.

    embedding: the model's [vocab, hidden]; is_tied: logits are made with it
    """
    if checkpoint is None:
        raise ModelError("load_format=dummy is for models that generate")
    if isinstance(spec.head, AnswerTokens):
        matrix = embedding
        if not is_tied and HEAD in checkpoint:
            matrix = checkpoint.tensor(HEAD, [list(embedding.shape)], tuple(STORED_DTYPES), embedding.device)
        # The probability of one of two is the sigmoid of their difference.
        weight = matrix[spec.head.yes][None].float()
        if spec.head.no is not None:
            weight = weight - matrix[spec.head.no].float()
        return PoolingHead(spec.pooling, (Projection(weight, None, "identity", None, 0.0),))
    return PoolingHead(spec.pooling, tuple(map(partial(_projection, checkpoint, embedding.device), spec.head)))


def _projection(model: Checkpoint, device: torch.device, spec: ProjectionSpec) -> Projection:
    with ExitStack() as stack:
        checkpoint = model if spec.folder is None else stack.enter_context(Checkpoint(spec.folder))

        def read(name: str, *shape: int) -> Tensor:
            target = torch.empty(shape, dtype=torch.float32, device=device)
            checkpoint.read_into(target, name)
            return target

        norm = None
        if spec.norm is not None:
            norm_bias = read(f"{spec.norm}.bias", spec.rows) if spec.norm_bias else None
            norm = read(f"{spec.norm}.weight", spec.rows), norm_bias
        return Projection(
            weight=read(f"{spec.name}.weight", spec.rows, spec.inner),
            bias=read(f"{spec.name}.bias", spec.rows) if spec.bias else None,
            activation=spec.activation,
            norm=norm,
            norm_eps=spec.norm_eps,
        )
