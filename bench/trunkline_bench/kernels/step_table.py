"""Tables of the prediction: every kind of launch of a step, the whole step, and the headline job."""

from collections.abc import Sequence
from dataclasses import dataclass

from trunkline_bench.kernels.device import Device
from trunkline_bench.kernels.work import Work
from trunkline_bench.reports import markdown

COLUMNS = (
    "launches", "programs", "at once", "waves", "MB", "GFLOP", "µs each", "ms a step", "of the roofline",
)  # fmt: skip
LEAST_SHOWN_US = 0.1  # of an output token


@dataclass(frozen=True, slots=True)
class Job:
    """Requests that arrive together."""

    requests: int
    prompt: int  # tokens
    output: int  # tokens


@dataclass(frozen=True, slots=True)
class JobPrediction:
    """Predicted times of a job."""

    prefill_s: float
    decode_s: float
    tokens: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / (self.prefill_s + self.decode_s)


def step_s(works: Sequence[Work], device: Device) -> float:
    """Time of a whole step, including gaps."""
    return sum(work.seconds(device) + work.gap_s(device) for work in works) + device.step_s


def job_prediction(job: Job, *, decode_step_s: float, prompt_step_s: float, prompt_step_tokens: int) -> JobPrediction:
    """The time of all prompts, then of one full step per output token. Decodes that run beside prompts compensate for
    the steps at the end that are not full.

    decode_step_s: at the mean context of the job
    """
    prefill_s = job.requests * job.prompt / prompt_step_tokens * prompt_step_s
    return JobPrediction(prefill_s, job.output * decode_step_s, job.requests * job.output)


def table(works: Sequence[Work], device: Device) -> str:
    """A row per kind of launch, one for the gaps between launches, and one for the step."""
    kinds: dict[Work, int] = {}
    for work in works:
        kinds[work] = kinds.get(work, 0) + 1
    rows: dict[str, list[str]] = {}
    for work, count in kinds.items():
        seconds = work.seconds(device)
        name = f"`{work.name}`"
        while name in rows:  # the same kernel with other arguments
            name += ", again"
        idle = f" + {work.idle_programs:,} idle" if work.idle_programs else ""
        rows[name] = [
            str(count), f"{work.programs:,}{idle}", f"{work.slots:,}", f"{work.waves:.2f}", f"{work.bytes / 1e6:,.1f}",
            f"{work.flops / 1e9:,.1f}", f"{seconds * 1e6:,.1f}", f"{count * seconds * 1e3:.3f}",
            f"{work.roofline_s(device) / seconds:.0%}",
        ]  # fmt: skip
    gaps = sum(work.gap_s(device) for work in works)
    blank = [""] * 5
    rows["gaps between launches"] = [str(len(works)), *blank, "", f"{gaps * 1e3:.3f}", ""]
    rows["between steps"] = ["1", *blank, "", f"{device.step_s * 1e3:.3f}", ""]
    total = step_s(works, device)
    bound = sum(work.roofline_s(device) for work in works)
    rows["**one step**"] = [str(len(works)), *blank, "", f"**{total * 1e3:.2f}**", f"{bound / total:.0%}"]
    return markdown.table(rows, COLUMNS)


def by_output_token(
    decode: Sequence[Work], prompts: Sequence[Work], job: Job, prompt_tokens: int, device: Device
) -> str:
    """A row per kind of launch with its part of the time of an output token, those that lose most first.

    decode, prompts: of a step of all requests, and of one with `prompt_tokens`
    """
    steps = {"decode": (decode, 1 / job.requests), "prompts": (prompts, job.prompt / job.output / prompt_tokens)}
    times_us: dict[str, tuple[float, float]] = {}  # predicted, least
    for step, (works, share) in steps.items():
        for work in works:
            name = f"{step}, `{work.name}`"
            found, least = times_us.get(name, (0.0, 0.0))
            times_us[name] = found + work.seconds(device) * share * 1e6, least + work.roofline_s(device) * share * 1e6
        gaps = sum(work.gap_s(device) for work in works) + device.step_s
        times_us[f"{step}, gaps"] = gaps * share * 1e6, 0.0
    rows = sorted(times_us.items(), key=lambda item: item[1][1] - item[1][0])
    small = [times for _, times in rows if times[0] < LEAST_SHOWN_US]
    shown = [(name, times) for name, times in rows if times[0] >= LEAST_SHOWN_US]
    for name, of in (("others", small), ("**all**", list(times_us.values()))):
        shown.append((name, (sum(each[0] for each in of), sum(each[1] for each in of))))
    return markdown.table(
        {name: [f"{found:.2f}", f"{least:.2f}", f"{found - least:.2f}"] for name, (found, least) in shown},
        ("µs", "least by the data sheet", "lost"),
    )


def sensitivity(rates: dict[str, tuple[float, float]], ranges: dict[str, tuple[float, float]], device: Device) -> str:
    """The job's rate at either end of each assumption's range, the largest effect first.

    rates: tokens per second at both ends, by the name of the assumption
    """
    rows = {
        f"`{name}`": [
            f"{getattr(device, name):.3g}", f"{ranges[name][0]:.3g}", f"{rates[name][0]:,.0f}",
            f"{ranges[name][1]:.3g}", f"{rates[name][1]:,.0f}",
        ]
        for name in sorted(rates, key=lambda name: rates[name][0] - rates[name][1])
    }  # fmt: skip
    return markdown.table(rows, ("assumed", "worst", "tok/s", "best", "tok/s "))
