"""The head of a report."""

from trunkline_bench.reports.markdown import listed
from trunkline_bench.reports.provenance import facts, make_command


def test_facts_name_date_machine_versions_commit_and_command() -> None:
    found = listed(facts(make_command("it", ["--rounds", "3"]), "all of them", ("trunkline", "grpcio")))
    assert [line.partition(":")[0] for line in found.splitlines()] == [
        "- date", "- machine", "- versions", "- code", "- command",
    ]  # fmt: skip
    assert "grpcio 1." in found
    assert "commit " in found
    assert "`make it ARGS='--rounds 3'`" in found
