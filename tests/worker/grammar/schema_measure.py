"""Measures what grammars of JSON schemas accept.

`python -m tests.worker.grammar.schema_measure SUITE` prints tables; SUITE is the folder of a draft's tests.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import jsonschema_rs

from tests.worker.grammar.byte_matcher import SCHEMA, DoesNotCompile, accepts, compact, matcher_of, sample
from tests.worker.grammar.real_schemas import RealSchema, real_schemas
from tests.worker.grammar.schema_instances import Instances, Ordered, changed
from trunkline.status import RequestRefused

SAMPLES = 5
MAX_SAMPLE_BYTES = 3_000


@dataclass
class Measure:
    """Counts of schemas, instances and samples, and what went wrong."""

    taken: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by reason
    refused_valid: int = 0  # valid instances of refused schemas
    accepted: int = 0  # valid instances
    missed: list[str] = field(default_factory=list)
    rejected: int = 0  # invalid instances
    wrong: list[str] = field(default_factory=list)  # invalid instances that are accepted, and invalid samples
    samples: int = 0

    def share(self) -> float:
        valid = self.accepted + len(self.missed)
        return self.accepted / valid if valid else 1.0

    def add(self, other: "Measure") -> None:
        self.taken += other.taken
        self.refused += other.refused
        self.refused_valid += other.refused_valid
        self.accepted += other.accepted
        self.missed += other.missed
        self.rejected += other.rejected
        self.wrong += other.wrong
        self.samples += other.samples

    def take(self, schema: Any, instances: Iterable[tuple[Any, bool]], name: str) -> None:
        """Counts a schema with its instances, of which each has whether it is valid."""
        try:
            matcher = matcher_of(SCHEMA, json.dumps(schema))
        except (RequestRefused, DoesNotCompile) as refused:
            self.refused[reason(refused)] += 1
            self.refused_valid += sum(valid for _, valid in instances)
            return
        self.taken += 1
        order = Ordered(schema)
        for instance, valid in instances:
            accepted = accepts(matcher, compact(order.ordered(instance)))
            if valid and accepted:
                self.accepted += 1
            elif valid:
                self.missed.append(f"{name}: {compact(instance)[:200]}")
            elif accepted:
                self.wrong.append(f"{name}: {compact(instance)[:200]}")
            else:
                self.rejected += 1


def reason(refused: Exception) -> str:
    """Why a schema is refused, without where."""
    if isinstance(refused, DoesNotCompile):
        return str(refused).partition(":")[0].partition("\n")[0][:60]
    _, _, message = str(refused).partition(": ")
    where, _, why = message.rpartition(": ")
    return f"`{where.rpartition('/')[2]}`: {why}" if where.startswith("/") else message


def suite(folder: Path, pattern: str = "*.json") -> dict[str, Measure]:
    """By file of JSON-Schema-Test-Suite, of which each is about a keyword."""
    measures = {}
    for path in sorted(folder.glob(pattern)):
        measure = measures[path.stem] = Measure()
        for group in json.loads(path.read_text()):
            tests = [(test["data"], test["valid"]) for test in group["tests"]]
            measure.take(group["schema"], tests, f"{path.stem}, {group['description']}")
    return measures


def real(schemas: Iterable[RealSchema]) -> dict[str, Measure]:
    """By source. Instances are drawn and changed at random; what they are, a validator says, and so of samples."""
    measures: dict[str, Measure] = {}
    for source, name, schema in schemas:
        measure = measures.setdefault(source, Measure())
        random = Random(name)
        validator = jsonschema_rs.validator_for(schema, validate_formats=True)
        before = measure.taken
        measure.take(schema, [(each, validator.is_valid(each)) for each in _drawn(schema, random)], name)
        if measure.taken > before:
            matcher = matcher_of(SCHEMA, json.dumps(schema))
            for _ in range(SAMPLES):
                text = sample(matcher, random, MAX_SAMPLE_BYTES)
                measure.samples += text is not None
                if text is not None and not validator.is_valid(parsed(text)):
                    measure.wrong.append(f"{name}: sample {text[:200]}")
    return measures


def parsed(text: str) -> Any:
    """A document, in which numbers that no float can hold are large ones: the length of exponents has no bound."""
    return json.loads(text, parse_float=lambda number: max(-1e300, min(1e300, float(number))))


def _drawn(schema: Any, random: Random) -> Iterator[Any]:
    instances = Instances(schema, random)
    for _ in range(10):
        instance = instances.draw(schema)
        yield instance
        for _ in range(6):
            yield changed(instance, random)


def total(measures: dict[str, Measure]) -> Measure:
    total = Measure()
    for measure in measures.values():
        total.add(measure)
    return total


def table(measures: dict[str, Measure], of: str) -> str:
    lines = [
        f"| {of} | schemas taken | refused | valid instances accepted | missed | invalid ones rejected | accepted |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, measure in [*measures.items(), ("all", total(measures))]:
        cells = (measure.taken, measure.refused.total(), measure.accepted, len(measure.missed), measure.rejected)
        lines.append(f"| {name} | {' | '.join(map(str, cells))} | {len(measure.wrong)} |")
    return "\n".join(lines)


def reasons(measures: dict[str, Measure]) -> str:
    lines = ["| refused because of | schemas |", "|---|---|"]
    lines += [f"| {why} | {count} |" for why, count in total(measures).refused.most_common()]
    return "\n".join(lines)


def main(folder: Path) -> None:
    parts = [
        ("JSON-Schema-Test-Suite, draft 2020-12, required", suite(folder), "file"),
        ("JSON-Schema-Test-Suite, optional", suite(folder / "optional"), "file"),
        ("JSON-Schema-Test-Suite, optional formats", suite(folder / "optional" / "format"), "file"),
        ("Schemas of programs", real(real_schemas()), "source"),
    ]
    print("# What grammars of JSON schemas accept\n")
    print("`python -m tests.worker.grammar.schema_measure SUITE`, where SUITE is the folder `tests/draft2020-12` of")
    print("JSON-Schema-Test-Suite. With llguidance 1.9.1. Instances count in the order of the schema's properties.")
    for title, measures, of in parts:
        everything = total(measures)
        every_valid = everything.accepted + len(everything.missed) + everything.refused_valid
        print(f"\n## {title}\n\n{table(measures, of)}\n\n{reasons(measures)}\n")
        print(f"Of the valid instances of schemas that are taken, {everything.share():.1%} are accepted; of all valid")
        print(f"instances, {everything.accepted / every_valid:.1%}.")
        if everything.samples and not everything.wrong:
            print(f"All of {everything.samples} random samples were valid.")
        if "required" in title:
            print("\nMissed:\n\n" + "\n".join(f"- `{missed}`" for missed in everything.missed))
        print("".join(f"\nWRONG: `{wrong}`\n" for wrong in everything.wrong), end="")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
