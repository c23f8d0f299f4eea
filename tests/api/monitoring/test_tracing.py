"""Traces with OpenTelemetry, received as a collector would."""

import gzip
from contextlib import contextmanager

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from support.commands import wait_until
from support.web import QuietHandler, answering, url_of


@contextmanager
def collecting():
    """(address, what was received): an OTLP collector."""
    received = []

    class Receiver(QuietHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            received.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

    with answering(Receiver) as server:
        yield url_of(server), received


def spans(received):
    return [
        (resource.resource, span)
        for path, request in received
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
        if path == "/v1/traces"
    ]


@pytest.mark.parametrize("several_served", [False, True])
def test_requests_become_spans_of_the_callers_trace(serve, indexed, several, several_served):
    folder, address = (several, "/collections/a") if several_served else (indexed, "")
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    with collecting() as (url, received):
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        _, client = serve(folder, "--read-only", before=f"os.environ.update({variables!r})")
        caller = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
        assert client.get(f"{address}/v1/images/1/similar", headers=caller).is_success
        wait_until(lambda: spans(received))
        assert client.get(f"{address}/v1/images/99").status_code == 404
        wait_until(lambda: len(spans(received)) == 2)  # and no health checks
    (resource, first), (_, second) = spans(received)
    assert {one.key: one.value.string_value for one in resource.attributes}["service.name"] == "hashseek"
    assert first.trace_id.hex() == trace_id != second.trace_id.hex()
    assert first.name.startswith("GET ")
    assert first.name.endswith("/v1/images/{image_id}/similar")


def test_without_the_extra_it_is_refused_in_one_line(hashseek, indexed):
    before = (
        "sys.modules['opentelemetry.instrumentation.fastapi'] = None; os.environ['OTEL_EXPORTER_OTLP_ENDPOINT'] = 'x'"
    )
    code, out, err = hashseek("serve", indexed, "--port", 0, before=before)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "hashseek[otel]" in err
