"""A step's cost, fitted to measured steps: what takes the place of a device profile where there is the device."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trunkline_bench.simulation.step_work import StepWork

Sample = tuple[StepWork, float]  # seconds


def features(work: StepWork) -> list[float]:
    """What time is linear in."""
    return [
        1.0, work.num_rows, work.num_sampled, work.num_sequences, work.decode_kv_tokens, work.chunk_kv_tokens,
        work.chunk_pairs,
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class FittedCost:
    """Seconds per feature; steps that only decode and others have coefficients of their own, because small matrix
    products are bound by memory and large ones by arithmetic."""

    decode: tuple[float, ...]
    mixed: tuple[float, ...]

    def step_time_s(self, work: StepWork) -> float:
        coefficients = self.mixed if work.chunk_kv_tokens else self.decode
        return sum(c * x for c, x in zip(coefficients, features(work), strict=True))

    def run_times_s(self, work: StepWork, count: int) -> NDArray[np.float64]:
        # In the order of step_time_s, so that the sums are equal to the last bit.
        columns: list[float | NDArray[np.float64]] = list(features(work))
        columns[4] = work.decode_kv_tokens + work.num_sequences * np.arange(count, dtype=np.float64)
        total: float | NDArray[np.float64] = 0
        for coefficient, column in zip(self.decode, columns, strict=True):
            total = total + coefficient * column
        return np.broadcast_to(np.asarray(total, np.float64), count)


def fit(samples: list[Sample]) -> FittedCost:
    """Least squares of the relative error, no coefficient negative; steps that were held up count less."""
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
    # The fit says what a typical step takes; what all of them take together is what throughput depends on.
    solution = np.maximum(solution, 0.0)
    total = float((rows / scale @ solution).sum())
    return tuple((solution / scale * times.sum() / total).tolist())
