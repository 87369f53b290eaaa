"""What sampling's parameters mean, in float64 and one token at a time."""

import numpy as np
from numpy.typing import NDArray

from trunkline_worker.runner.batch_rows import Row
from trunkline_worker.step.sampling_key import position_key, race_noise

Floats = NDArray[np.float64]
LARGEST = float(np.finfo(np.float32).max)


def adjusted(logits: NDArray[np.float32], row: Row) -> Floats:
    """Logits after bias, penalties and min_tokens. Each operation is rounded to float32 as the model's own numbers are,
    and bounded by the largest of them."""
    s, found = row.sampling, logits.astype(np.float64)
    output = row.tokens[row.prompt_len :].tolist()
    for token, bias in s.logit_bias:
        found[token] = _rounded(found[token] + bias)
    for token in set(row.tokens.tolist()):
        x = found[token]
        found[token] = _rounded(x / s.repetition_penalty if x > 0 else x * s.repetition_penalty)
    for token in set(output):
        penalty = float(np.float32(s.frequency_penalty * output.count(token) + s.presence_penalty))
        found[token] = _rounded(found[token] - penalty)
    if row.num_output < s.min_tokens:
        found[sorted(s.end_token_ids)] = -np.inf
    return found


def _rounded(value: float) -> float:
    return value if np.isinf(value) else float(np.float32(min(max(value, -LARGEST), LARGEST)))


def kept(logits: Floats, row: Row, slack: float) -> NDArray[np.bool_]:
    """What top_k, then top_p, then min_p keep. `slack` moves the edges of top_p and min_p: above 0 outwards."""
    s = row.sampling
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if 0 < s.top_k < len(order):
        order = [i for i in order if logits[i] >= logits[order[s.top_k - 1]]]
    weights = {i: float(np.exp((logits[i] - logits[order[0]]) / s.temperature)) for i in order}
    total, before = sum(weights.values()), 0.0
    found = np.zeros(len(logits), np.bool_)
    for place, i in enumerate(order):
        if place and s.top_p < 1.0 and before >= (s.top_p + slack) * total:
            break
        before += weights[i]
        found[i] = weights[i] >= s.min_p * (1 - slack) or place == 0
    return found


def drawn(logits: NDArray[np.float32], row: Row) -> int:
    """The token that a row gets."""
    found = adjusted(logits, row)
    if row.sampling.temperature == 0:
        return int(found.argmax())
    return int(np.where(kept(found, row, 0.0), scores(found, row), -np.inf).argmax())


def scores(logits: Floats, row: Row) -> Floats:
    """Scaled logits with each token's noise: the highest one that is kept is drawn."""
    noise = race_noise(np.array([position_key(row.sampling.seed, row.num_tokens)], np.uint64), np.arange(len(logits)))
    scaled: Floats = (logits - logits.max()) / row.sampling.temperature + noise
    return scaled
