"""Reads the tensors of a PoolingSpec into a head."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from trunkline_worker.model.checkpoint.checkpoint import HEAD, STORED_DTYPES, Checkpoint, weight_files
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.pooling.pooling_head import PoolingHead, Projection
from trunkline_worker.model.pooling.pooling_spec import AnswerTokens, PoolingSpec, ProjectionSpec


def head_tensors(spec: PoolingSpec) -> list[str]:
    """Returns the tensors of all heads that a decoder's checkpoint may have. read_head() reads those that are used."""
    projections = spec.head if isinstance(spec.head, tuple) else ()
    return [HEAD, *(f"{projection.name}.weight" for projection in projections)]


def files_of_head(spec: PoolingSpec, directory: Path) -> list[Path]:
    """Returns the weight files of a head that are not the model's. Raises ModelError if one is missing."""
    projections = spec.head if isinstance(spec.head, tuple) else ()
    folders = [directory / projection.folder for projection in projections if projection.folder is not None]
    return [file for folder in folders for file in weight_files(folder)]


def read_head(
    spec: PoolingSpec, directory: Path, checkpoint: Checkpoint | None, embedding: Tensor, *, is_tied: bool
) -> PoolingHead:
    """Returns the head, on the device of the model. Raises ModelError if a tensor is missing, or has another shape or
    values that are not finite.

    embedding: the model's [vocab, hidden]; is_tied: logits are made with it
    """
    if checkpoint is None:
        raise ModelError("load_format=dummy is for models that generate")
    if isinstance(spec.head, AnswerTokens):
        matrix = embedding
        if not is_tied and HEAD in checkpoint:
            matrix = checkpoint.tensor(HEAD, [list(embedding.shape)], tuple(STORED_DTYPES), embedding.device)
            checkpoint.check_finite(matrix.dtype)
        # The probability of one of two is the sigmoid of their difference.
        weight = matrix[spec.head.yes][None].float()
        if spec.head.no is not None:
            weight = weight - matrix[spec.head.no].float()
        return PoolingHead(spec.pooling, (Projection(weight, None, "identity", None, 0.0),))
    read = partial(_projection, directory, checkpoint, embedding.device)
    return PoolingHead(spec.pooling, tuple(map(read, spec.head)))


def _projection(directory: Path, model: Checkpoint, device: torch.device, spec: ProjectionSpec) -> Projection:
    with ExitStack() as stack:
        checkpoint = model if spec.folder is None else stack.enter_context(Checkpoint(directory / spec.folder))

        def read(name: str, *shape: int) -> Tensor:
            target = torch.empty(shape, dtype=torch.float32, device=device)
            checkpoint.read_into(target, name)
            return target

        norm = None
        if spec.norm is not None:
            norm_bias = read(f"{spec.norm}.bias", spec.rows) if spec.norm_bias else None
            norm = read(f"{spec.norm}.weight", spec.rows), norm_bias
        projection = Projection(
            weight=read(f"{spec.name}.weight", spec.rows, spec.inner),
            bias=read(f"{spec.name}.bias", spec.rows) if spec.bias else None,
            activation=spec.activation,
            norm=norm,
            norm_eps=spec.norm_eps,
        )
        checkpoint.check_finite(torch.float32)
        return projection
