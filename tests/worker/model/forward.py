"""Logits of a loaded model, computed as an engine does: ragged batches of chunks over paged keys and values."""

import random

import torch

from trunkline_kernels.ragged_batch import PagedBatch, RaggedBatch, allocate_kv
from trunkline_worker.model.cpu_decoder import CpuDecoder
from trunkline_worker.model.decoder import Decoder
from trunkline_worker.model.loading import LoadedModel

CHUNKS = (1, 2, 5, 23)


@torch.inference_mode()
def ragged_logits(
    model: LoadedModel, sequences: list[list[int]], *, block_size: int = 4, chunks: tuple[int, ...] = CHUNKS
) -> list[torch.Tensor]:
    """[len(sequence), vocab] for each sequence."""
    spec, size = model.spec, block_size
    per_sequence = max(-(-len(tokens) // size) for tokens in sequences)
    num_blocks = per_sequence * len(sequences) + 1
    kv = allocate_kv(
        num_layers=spec.num_layers,
        num_blocks=num_blocks,
        block_size=size,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=model.dtype,
        device=model.device,
    ).layers
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
    tables = order[: len(sequences) * per_sequence].view(len(sequences), per_sequence)
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    computed = [0] * len(sequences)
    draw = random.Random(1)
    while any(done < len(tokens) for done, tokens in zip(computed, sequences, strict=True)):
        active = [i for i, tokens in enumerate(sequences) if computed[i] < len(tokens)]
        news = [min(len(sequences[i]) - computed[i], draw.choice(chunks)) for i in active]
        positions = torch.cat([torch.arange(computed[i], computed[i] + n) for i, n in zip(active, news, strict=True)])
        owners = torch.repeat_interleave(torch.tensor(active), torch.tensor(news))
        batch = RaggedBatch(
            positions=positions,
            slots=tables[owners, positions // size] * size + positions % size,
            query_lens=news,
            context_lens=[computed[i] + n for i, n in zip(active, news, strict=True)],
            block_tables=tables[active],
            block_size=size,
        )
        token_ids = torch.tensor([sequences[int(i)][int(p)] for i, p in zip(owners, positions, strict=True)])
        if isinstance(model.decoder, CpuDecoder):
            ends = torch.tensor([0, *news]).cumsum(0)
            addresses = torch.tensor([tables[i].data_ptr() for i in active])
            paged = PagedBatch(token_ids, ends, torch.tensor(batch.context_lens), addresses, size)
            rows = model.decoder.logits(model.decoder.forward(paged, kv))
        else:
            assert isinstance(model.decoder, Decoder)
            rows = model.decoder.logits(model.decoder.forward(token_ids, batch, kv))
        for i, part in zip(active, torch.split(rows, news), strict=True):
            logits[i].append(part)
            computed[i] += len(part)
    return [torch.cat(parts) for parts in logits]
