"""The service does what its OpenAPI document says, for requests that Schemathesis makes up from it."""

import os
import subprocess
import sys
from typing import Annotated

import pytest
from pydantic import TypeAdapter

from hashseek.api.app import create_app
from hashseek.api.messages.parameters import NoParameters
from hashseek.api.messages.schemas import AddedImage, Encoded, ImageRecord, ProblemDetails, SearchAnswer
from hashseek.api.settings import Settings

# What only the service can know, such as whether bytes are a picture, no schema can say.
CHECKS = ("--exclude-checks", "positive_data_acceptance", "--suppress-health-check", "too_slow")  # on a busy machine


# Each call gets a key of its own: the service answers a repeated one as before, without comparing bodies. A change of
# headers makes Schemathesis forget which one is missing on purpose.
HOOKS = """
import re
import uuid
import schemathesis
from schemathesis.generation.meta import CoverageScenario

@schemathesis.hook
def filter_case(context, case):
    # In a form, a value that is no list cannot be told from a list of one; empty labels count as not filled in.
    if case.media_type != "multipart/form-data" or not isinstance(case.body, dict):
        return True
    fields = case.operation.definition.raw["requestBody"]["content"][case.media_type]["schema"]["properties"]
    lists = [name for name, field in fields.items() if field.get("type") == "array"]
    given = [case.body[name] for name in lists if name in case.body]
    return all(isinstance(values, list) and "" not in values for values in given)

@schemathesis.hook
def before_call(context, case, **options):
    for name, value in (case.headers or {}).items():  # uvicorn itself refuses control characters, in plain text
        case.headers[name] = re.sub(r"[^ -~]", "", value)
    scenario = getattr(case.meta.phase.data, "scenario", None)
    is_valid = 1 <= len((case.headers or {}).get("Idempotency-Key", "")) <= 255
    if is_valid and scenario is not CoverageScenario.MISSING_PARAMETER:
        case.headers["Idempotency-Key"] = uuid.uuid4().hex
"""


@pytest.mark.parametrize(("kind", "role", "n_operations"), [("own_collection", "read", 26), ("several", None, 28)])
def test_generated_requests_get_declared_answers_and_no_server_error(
    request, serve, hashseek, tmp_path, kind, role, n_operations
):
    """With HASHSEEK_CASES, so many cases for each operation, and sequences of operations, too.

    Without it, the phase "coverage", which takes most of the time, runs for the service with every operation only.
    """
    file = tmp_path / "keys.toml"
    secret = hashseek("keys", "create", "me", "--role", role, "--keys", file)[1].strip() if role else ""
    _, client = serve(request.getfixturevalue(kind), *(("--keys", file) if role else ()))
    (tmp_path / "hooks.py").write_text(HOOKS)
    (tmp_path / "schemathesis.toml").write_text('hooks = "hooks"\n[parameters]\n"path.collection" = "a"\n')
    cases = os.environ.get("HASHSEEK_CASES")
    phases = "examples,fuzzing" + (",coverage" if cases or kind == "several" else "") + (",stateful" if cases else "")
    options = ("--max-examples", cases or "8", "--phases", phases, "--seed", "1", "--continue-on-failure", *CHECKS)
    options += ("--header", f"Authorization: Bearer {secret}") if role else ()
    url = f"{client.base_url}/openapi.json"
    done = subprocess.run(
        [sys.executable, "-c", "from schemathesis.cli import schemathesis as run; run()", "run", url, *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert f"Tested: {n_operations}" in done.stdout
    assert client.get("/healthz/ready").status_code == 200


def test_operations_have_stable_names(reader):
    paths = reader.get("/openapi.json").json()["paths"]
    names = [operation["operationId"] for operations in paths.values() for operation in operations.values()]
    assert sorted(names) == [
        "add_image",
        "add_images",
        "change_image",
        "change_image_by_key",
        "delete_image",
        "delete_image_by_key",
        "delete_images",
        "duplicates",
        "encode",
        "get_file",
        "get_image",
        "get_image_by_key",
        "get_report",
        "get_session",
        "keep_duplicates",
        "list_collections",
        "list_images",
        "list_reports",
        "live",
        "overview",
        "ready",
        "search",
        "sign_in",
        "sign_out",
        "similar",
        "stats",
    ]


def test_generated_clients_share_one_class_for_errors_and_have_one_for_searches(reader):
    document = reader.get("/openapi.json").json()
    for operations in document["paths"].values():
        for operation in operations.values():
            [content] = operation["responses"]["default"]["content"].values()
            assert content["schema"] == {"$ref": "#/components/schemas/ProblemDetails"}
    assert document["components"]["schemas"]["ProblemDetails"]["required"]
    search = document["paths"]["/v1/search"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert not search.keys() & {"oneOf", "anyOf", "allOf"}  # some generators type the whole body as Any then


def test_the_document_is_made_before_the_first_request(indexed, reader):
    """Made for a request, it would block all others for 200 ms."""
    assert create_app(Settings(indexed)).openapi_schema == reader.get("/openapi.json").json()


@pytest.mark.parametrize("model", [AddedImage, Encoded, ImageRecord, ProblemDetails, SearchAnswer])
def test_examples_of_answers_are_complete(model):
    for example in model.model_json_schema()["examples"]:
        assert model.model_validate(example).model_dump() == example


def test_every_field_of_a_request_has_a_valid_example_a_default_or_fixed_values():
    models = [NoParameters]
    for model in models:  # grows
        models += model.__subclasses__()
        described = model.model_json_schema()["properties"] if model.model_fields else {}
        bare = {name for name, field in described.items() if not field.keys() & {"examples", "default", "enum"}}
        assert bare <= {"image"}  # a file
        for field in model.model_fields.values():
            for example in field.examples or ():
                TypeAdapter(Annotated[field.annotation, field]).validate_python(example)
