"""A step's cost, fitted to measured steps; it replaces a device profile if the device could be measured.

As a file (calibration.py writes one) it is a JSON object with `decode` and `mixed`, each with the seconds per unit of
each of FEATURES, and `kv_tokens`, the capacity of the measured worker's KV pool in tokens, or null.
"""

import json
from dataclasses import dataclass, replace
from reprlib import repr as short  # keeps errors to one line, however long a value is
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trunkline_bench.simulation.costs.step_work import StepWork

Sample = tuple[StepWork, float]  # seconds

FEATURES = ("steps", "rows", "sampled", "sequences", "decode_kv_tokens", "chunk_kv_tokens", "chunk_pairs")
MOST_COEFFICIENT_S = 3600.0  # larger values are mistakes in the file
MOST_KV_TOKENS = 1_000_000_000
SMALLEST_STEPS = {"decode": StepWork(1, 0, 0, 1, 1, 0, 0.0), "mixed": StepWork(2, 0, 0, 1, 0, 2, 3.0)}


class FittedCostError(Exception):
    """A text is not a fitted cost. The message is one line with the field and the problem."""


def features(work: StepWork) -> list[float]:
    """The values of FEATURES, in which the time is linear."""
    return [
        1.0, work.num_rows, work.num_sampled, work.num_sequences, work.decode_kv_tokens, work.chunk_kv_tokens,
        work.chunk_pairs,
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class FittedCost:
    """Seconds per unit of each feature. Decode-only steps have their own coefficients, because small matrix products
    are bound by memory and large ones by arithmetic."""

    decode: tuple[float, ...]
    mixed: tuple[float, ...]
    kv_tokens: int | None = None  # capacity of the measured worker's KV pool; None: unknown

    def kv_blocks(self, block_size: int) -> int | None:
        """Number of blocks in a pool of the measured size; None if that is unknown."""
        return None if self.kv_tokens is None else self.kv_tokens // block_size

    def with_host_s(self, host_s: float) -> "FittedCost":
        """The cost of an engine that does not overlap host and device: every step takes `host_s` longer."""
        decode, mixed = ((steps + host_s, *others) for steps, *others in (self.decode, self.mixed))
        return replace(self, decode=decode, mixed=mixed)

    def to_json(self) -> str:
        """An exact representation: from_json() returns an equal cost."""
        coefficients = {name: dict(zip(FEATURES, getattr(self, name), strict=True)) for name in SMALLEST_STEPS}
        return json.dumps({**coefficients, "kv_tokens": self.kv_tokens}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "FittedCost":
        """Raises FittedCostError."""
        try:
            found = json.loads(text)
        except ValueError as error:
            raise FittedCostError(f"not JSON: {error}") from None
        except RecursionError:
            raise FittedCostError("JSON is nested too deeply") from None
        fields = _object(found, "", ("decode", "mixed"), ("kv_tokens",))
        kv_tokens = fields.get("kv_tokens")
        if kv_tokens is not None and (type(kv_tokens) is not int or not 1 <= kv_tokens <= MOST_KV_TOKENS):
            raise FittedCostError(
                f"kv_tokens is {short(kv_tokens)}; it must be a whole number from 1 to {MOST_KV_TOKENS}, or null"
            )
        cost = cls(_coefficients(fields, "decode"), _coefficients(fields, "mixed"), kv_tokens)
        for name, work in SMALLEST_STEPS.items():
            if not cost.step_time_s(work):
                raise FittedCostError(f"{name}: a step of {work.num_tokens} tokens would take no time")
        return cost

    def step_time_s(self, work: StepWork) -> float:
        coefficients = self.mixed if work.chunk_kv_tokens else self.decode
        return sum(c * x for c, x in zip(coefficients, features(work), strict=True))

    def run_times_s(self, work: StepWork, count: int) -> NDArray[np.float64]:
        # Added in the order of step_time_s, so that the sums have equal bits.
        columns: list[float | NDArray[np.float64]] = list(features(work))
        columns[4] = work.decode_kv_tokens + work.num_sequences * np.arange(count, dtype=np.float64)
        total: float | NDArray[np.float64] = 0
        for coefficient, column in zip(self.decode, columns, strict=True):
            total = total + coefficient * column
        return np.broadcast_to(np.asarray(total, np.float64), count)


def _coefficients(fields: dict[str, Any], name: str) -> tuple[float, ...]:
    """Coefficients in the order of FEATURES."""
    found = _object(fields[name], f"{name}.", FEATURES)
    for feature, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_COEFFICIENT_S:
            raise FittedCostError(
                f"{name}.{feature} is {short(value)}; it must be a number of seconds from 0 to {MOST_COEFFICIENT_S:g}"
            )
    return tuple(float(found[feature]) for feature in FEATURES)


def _object(found: Any, prefix: str, required: tuple[str, ...], others: tuple[str, ...] = ()) -> dict[str, Any]:
    """Checks that `found` is an object with exactly these fields. prefix: its own name and a dot.

    Raises FittedCostError."""
    if not isinstance(found, dict):
        raise FittedCostError(f"{prefix.rstrip('.') or 'the file'} is not an object with {', '.join(required)}")
    for name in required:
        if name not in found:
            raise FittedCostError(f"{prefix}{name} is missing")
    for name in found:
        if name not in required + others:
            raise FittedCostError(f"{short(prefix + name)} is unknown; allowed: {', '.join(required + others)}")
    return found


def fit(samples: list[Sample]) -> FittedCost:
    """Fits a cost by least squares of the relative error, without negative coefficients. Outliers weigh less."""
    decode = [sample for sample in samples if not sample[0].chunk_kv_tokens]
    mixed = [sample for sample in samples if sample[0].chunk_kv_tokens]
    return FittedCost(_fit(decode or samples), _fit(mixed or samples))


def _fit(samples: list[Sample]) -> tuple[float, ...]:
    rows = np.array([features(work) for work, _ in samples])
    times = np.array([time_s for _, time_s in samples])
    scale = np.maximum(rows.max(axis=0), 1.0)
    matrix = rows / scale / times[:, None]
    used = np.ones(rows.shape[1], bool)
    weights = np.ones(len(samples))
    solution = np.zeros(rows.shape[1])
    for _ in range(4 * rows.shape[1]):
        solution = np.zeros(rows.shape[1])
        solution[used] = np.linalg.lstsq(matrix[:, used] * weights[:, None], weights, rcond=1e-9)[0]
        if (solution < 0).any():
            used[solution.argmin()] = False
            continue
        residual = np.abs(matrix @ solution - 1)
        weights = np.minimum(1.0, np.sqrt(0.2 / np.maximum(residual, 1e-9)))
    # The fit gives the time of a typical step; scale it to the total time, on which throughput depends.
    solution = np.maximum(solution, 0.0)
    total = float((rows / scale @ solution).sum())
    return tuple((solution / scale * times.sum() / total).tolist())
