"""The event loop's lag is exported as a metric if the standard variables ask for metrics."""

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint

from trunkline_runtime.loop_lag import LoopLag
from trunkline_runtime.metrics import LAG, export_lag, metric_reader


def exported(reader: InMemoryMetricReader) -> float:
    data = reader.get_metrics_data()
    assert data is not None
    (metric,) = data.resource_metrics[0].scope_metrics[0].metrics
    assert (metric.name, metric.unit) == (LAG, "s")
    (point,) = metric.data.data_points
    assert isinstance(point, NumberDataPoint)
    return float(point.value)


def test_each_export_has_the_longest_lag_since_the_one_before() -> None:
    lag, reader = LoopLag(), InMemoryMetricReader()
    provider = export_lag(lag, "trunkline-router", reader)
    for most_s in (0.4, 0.1, 0.0):
        lag.note(most_s)
        lag.note(most_s / 2)
        assert exported(reader) == most_s
    provider.shutdown()


def test_nothing_is_exported_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_METRICS_EXPORTER", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", raising=False)
    assert metric_reader("trunkline-router") is None


def test_an_exporter_that_is_not_known_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "carrier-pigeon")
    with pytest.raises(SystemExit) as ended:
        metric_reader("trunkline-router")
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "trunkline-router: OTEL_METRICS_EXPORTER=carrier-pigeon is not supported; allowed: otlp, console, none\n"
    )


@pytest.mark.parametrize("name", ["otlp", "console"])
def test_metrics_are_exported_where_the_variable_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", name)
    reader = metric_reader("trunkline-router")
    assert reader is not None
    reader.shutdown()


def test_a_variable_that_the_library_refuses_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "-5")
    with pytest.raises(SystemExit):
        metric_reader("trunkline-router")
    assert capsys.readouterr().err.startswith("trunkline-router: metrics cannot be exported")
