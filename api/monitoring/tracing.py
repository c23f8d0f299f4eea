"""Traces of requests with OpenTelemetry, an extra. The OTEL_* variables of OpenTelemetry set where they are sent."""

import os

from fastapi import FastAPI

from hashseek.retrieval.errors import BadConfig


def trace(app: FastAPI) -> None:
    """Send a span for every request to an OTLP collector, but not for health checks.

    Raises:
        BadConfig: the extra is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise BadConfig(
            f"an OTEL_EXPORTER_OTLP_* variable enables tracing, but {error.name} is not installed: run "
            "pip install 'hashseek[otel]', or unset the variable"
        ) from None
    os.environ.setdefault("OTEL_SERVICE_NAME", "hashseek")
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    FastAPIInstrumentor.instrument_app(
        app, tracer_provider=provider, excluded_urls="/healthz/", exclude_spans=["receive", "send"]
    )
