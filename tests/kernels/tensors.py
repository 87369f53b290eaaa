"""Tensors for tests."""

import torch

from trunkline_kernels.token_masks import RowMasks


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def masked_logits(vocab: int, num_words: int) -> tuple[torch.Tensor, RowMasks]:
    """Logits of five rows, some of which are not finite, and masks of three of them. Not all logits have a bit, or not
    all bits a logit."""
    logits = random(5, vocab).round(decimals=1)  # equal ones among them
    for row, value in ((0, torch.nan), (1, torch.inf), (2, -torch.inf), (4, -torch.inf)):
        logits[row, (vocab * 2) // 3] = value
    words = torch.randint(-(1 << 31), 1 << 31, (3, num_words), generator=torch.Generator().manual_seed(vocab)).int()
    words[1] = torch.tensor([0, -1, 1 << 30, -(1 << 31)]).int().repeat(num_words // 4 + 1)[:num_words]
    return logits, RowMasks(torch.tensor([4, 0, 2]), words)
