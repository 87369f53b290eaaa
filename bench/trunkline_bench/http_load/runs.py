"""The runs of aiperf, and their command lines."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

PROMPT_TOKENS, PROMPT_TOKENS_STDDEV = 128, 16
OUTPUT_TOKENS = 64  # at most
# The measured requests repeat these prompts, whose blocks are then cached.
WARM_UP_REQUESTS = 2
REQUEST_TIMEOUT_S = 60
CANCELLED_PERCENT, CANCELLED_AFTER_S = 20, 0.3
TURNS = 4
# Every answer has OUTPUT_TOKENS. Its text shows all of them, special tokens too: aiperf counts tokens by their text.
WHOLE: Mapping[str, bool] = {"ignore_eos": True, "skip_special_tokens": False}


@dataclass(frozen=True, slots=True)
class LoadRun:
    """One run of aiperf: `requests` in all, `at_once` in flight."""

    name: str
    endpoint: str  # of aiperf
    at_once: int
    requests: int
    extra: Mapping[str, bool] | None = None  # further fields of each request
    flags: tuple[str, ...] = ()
    turns: int = 1  # requests of a conversation
    cancels: bool = False  # some requests
    counts_usage: bool = True  # aiperf finds the usage in every answer

    @property
    def title(self) -> str:
        return f"{self.name}, {self.at_once} at once"

    @property
    def is_whole(self) -> bool:
        """Every answer has OUTPUT_TOKENS."""
        return self.extra is not None and self.extra.get("ignore_eos", False)

    def shortened(self, share: float) -> "LoadRun":
        """The same with a share of the requests, but at least with one for each that is in flight."""
        requests = max(self.at_once, round(self.requests * share))
        return replace(self, requests=requests - requests % self.turns)

    def arguments(self, url: str, model: str, seed: int, artifacts: str) -> list[str]:
        """Arguments of the command `aiperf`. The model's name is that of its tokenizer too."""
        size = [f"--request-count={self.requests}"]
        if self.turns > 1:
            size = [f"--conversation-num={self.requests // self.turns}", f"--conversation-turn-mean={self.turns}"]
        return [
            "profile",
            f"--model={model}",
            f"--url={url}",
            f"--endpoint-type={self.endpoint}",
            "--streaming",
            f"--concurrency={self.at_once}",
            *size,
            f"--isl={PROMPT_TOKENS}",
            f"--isl-stddev={PROMPT_TOKENS_STDDEV}",
            f"--osl={OUTPUT_TOKENS}",
            f"--random-seed={seed}",
            f"--warmup-request-count={WARM_UP_REQUESTS}",
            f"--request-timeout-seconds={REQUEST_TIMEOUT_S}",
            *((f"--extra-inputs={json.dumps(self.extra)}",) if self.extra else ()),
            *self.flags,
            "--no-gpu-telemetry",  # neither a GPU nor Prometheus metrics over HTTP are there to be read
            "--no-server-metrics",
            "--export-level=summary",
            "--ui=none",
            f"--artifact-dir={artifacts}",
        ]


RUNS = (
    LoadRun("chat", "chat", 1, 60, WHOLE),
    LoadRun("chat", "chat", 16, 192, WHOLE),
    LoadRun("chat", "chat", 64, 384, WHOLE),
    LoadRun("completions", "completions", 1, 60, WHOLE),
    LoadRun("completions", "completions", 16, 192, WHOLE),
    LoadRun("completions", "completions", 64, 384, WHOLE),
    LoadRun(
        f"chat, {CANCELLED_PERCENT} % cancelled",
        "chat",
        16,
        192,
        WHOLE,
        (f"--request-cancellation-rate={CANCELLED_PERCENT}", f"--request-cancellation-delay={CANCELLED_AFTER_S}"),
        cancels=True,
    ),
    LoadRun(f"chat, {TURNS} turns", "chat", 16, 128, turns=TURNS),
    # aiperf reads a usage in `response.completed` alone; answers that reach their limit end with `response.incomplete`.
    LoadRun("responses", "responses", 16, 128, WHOLE, counts_usage=False),
    # The endpoint refuses `skip_special_tokens`, so tokens are counted by usage.
    LoadRun("messages", "messages", 16, 128, {"ignore_eos": True}, ("--use-server-token-count",)),
)
