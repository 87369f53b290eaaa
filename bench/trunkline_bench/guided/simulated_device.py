"""An executor whose device only takes time, and whose model writes given texts under real masks."""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trunkline_worker.step.plan import Masks, StepPlan, StepResult

SAMPLE_SHARE = 0.05  # of a step's time: its second part, which waits for the masks
LONGEST_PIECE = 16  # bytes of a token that is sampled
PLAIN_TOKEN = 7  # what sequences without a mask get


class Text:
    """A text that a sequence writes: with the longest tokens that its masks allow."""

    def __init__(self, text: bytes, ids: Mapping[bytes, int], pieces: Mapping[int, bytes], eos: int) -> None:
        """ids: tokens by their bytes; pieces: the reverse"""
        self._text, self._eos = text, eos
        self._candidates = [  # at each position, longest first
            [
                (ids[piece], len(piece))
                for end in range(min(at + LONGEST_PIECE, len(text)), at, -1)
                if (piece := text[at:end]) in ids
            ]
            for at in range(len(text))
        ]
        self._pieces = pieces

    def after(self, at: int, token: int) -> int:
        """The position after a token that had to follow. Raises ValueError if it is not of the text."""
        if token == self._eos:
            return at
        piece = self._pieces[token]
        if not self._text.startswith(piece, at):
            raise ValueError(f"{piece!r} must follow instead of {self._text[at : at + 20]!r}")
        return at + len(piece)

    def next(self, at: int, mask: NDArray[np.int32]) -> tuple[int, int]:
        """The next token, and the position after it. Raises ValueError if the mask allows none of the text."""
        for token, length in self._candidates[at] if at < len(self._text) else [(self._eos, 0)]:
            if mask[token >> 5] >> (token & 31) & 1:
                return token, at + length
        raise ValueError(f"the mask excludes {self._text[at : at + 20]!r}")


@dataclass(slots=True)
class _Step:
    plan: StepPlan
    begins_s: float
    ends_s: float | None = None  # None: it waits for masks
    result: StepResult | None = None


class SimulatedDevice:
    """Each step takes the same time. Its second part begins when the masks are there, as on a real device."""

    run_ahead = 1

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._steps: deque[_Step] = deque()
        self._free_s = 0.0
        self.texts: dict[int, Text] = {}  # by sequence
        self._at: dict[int, int] = {}  # position in its text
        self.num_steps = 0
        self.num_masked = self.num_late = self.num_forced = self.num_guided = 0

    def launch(self, plan: StepPlan) -> None:
        step = _Step(plan, max(time.perf_counter(), self._free_s))
        self._steps.append(step)
        if not plan.needs_host:
            self._sample(step, {})

    def sample(self, masks: Masks) -> None:
        np.stack([words[0] for words in masks.values()] or [np.zeros(1, np.int32)])  # as for the copy to a device
        self._sample(self._steps[-1], masks)

    def ends_s(self) -> float | None:
        """When the oldest step ends; None: there is none, or it waits for masks."""
        return self._steps[0].ends_s if self._steps else None

    def is_done(self) -> bool:
        ends_s = self.ends_s()
        return ends_s is not None and time.perf_counter() >= ends_s

    def collect(self) -> StepResult:
        step = self._steps.popleft()
        assert step.ends_s is not None
        assert step.result is not None
        time.sleep(max(0.0, step.ends_s - time.perf_counter()))
        step.result.device_time_s = step.ends_s - step.begins_s
        self.num_steps += 1
        return step.result

    def _sample(self, step: _Step, masks: Masks) -> None:
        plan = step.plan
        result = step.result = StepResult(plan.step_id, [None] * len(plan.steps))
        masked = set(plan.masked)
        self.num_masked += len(masked)
        self.num_late += len(masked - masks.keys())
        for index, entry in enumerate(plan.steps):
            if not entry.samples or (index in masked and index not in masks):
                continue
            run = plan.runs.get(index)
            forced = list(run.token_ids) if run is not None else []
            text, at = self.texts.get(entry.sequence_id), self._at.get(entry.sequence_id, 0)
            if text is None:
                result.token_ids[index] = PLAIN_TOKEN
                continue
            for token in forced:
                at = text.after(at, token)
            sampled = []
            if run is None or run.num_samples:
                token, at = text.next(at, masks[index][0])
                sampled = [token]
            self._at[entry.sequence_id] = at
            self.num_forced += len(forced)
            self.num_guided += len(forced) + len(sampled)
            if run is None:
                result.token_ids[index] = sampled[0]
            else:
                result.runs[index] = forced + sampled
        forward_s = step.begins_s + (1 - SAMPLE_SHARE) * self._step_s
        step.ends_s = self._free_s = max(forward_s, time.perf_counter()) + SAMPLE_SHARE * self._step_s
