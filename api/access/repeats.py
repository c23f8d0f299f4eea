"""Changes that are sent again because their answer was lost: they are made once, and get the same answer."""

from collections import OrderedDict
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hashseek.api.access.limits import needed_role
from hashseek.api.messages.problems import problem
from hashseek.api.messages.schemas import NDJSON

HEADER = "Idempotency-Key"
MAX_LENGTH = 255
_KEPT_BYTES = 16 * 2**20  # of all answers
_OVERHEAD = 1000  # bytes of an answer besides its name and body

_Name = tuple[str, ...]  # of a change: client, key, method, path and query string


class RepeatedChanges:
    """Repeats the earlier answer to a change whose Idempotency-Key the same client has sent before.

    The latest 16 MiB of answers are kept in memory. Errors are not kept, since nothing was changed: such a change is
    tried again. So is a batch, whose images may have failed one by one; those that were stored are found as known.
    Bodies are not compared, because those of forms differ each time they are sent.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._in_progress: set[_Name] = set()
        self._answers: OrderedDict[_Name, list[Message]] = OrderedDict()
        self._n_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, repeat its earlier answer, or answer 503 while the first one is in progress."""
        changes = scope["type"] == "http" and needed_role(scope["method"], scope["path"]) in ("write", "admin")
        key = Headers(scope=scope).get(HEADER, "") if changes else ""
        if not 1 <= len(key) <= MAX_LENGTH:  # the routes refuse one that is too long
            await self.app(scope, receive, send)
            return
        client = scope.get("state", {}).get("key")
        name = ("" if client is None else client.name, key, scope["method"], scope["path"], str(scope["query_string"]))
        if name in self._answers:
            for message in self._answers[name]:
                await send(_copy(message))
        elif name in self._in_progress:
            detail = f"the first request with this {HEADER} is still in progress: try again in a second"
            refusal = problem(HTTPStatus.SERVICE_UNAVAILABLE, detail, kind="urn:hashseek:StillWorking")
            await refusal(scope, receive, send)
        else:
            await self._answer(name, scope, receive, send)

    async def _answer(self, name: _Name, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the service answer."""
        messages: list[Message] = []

        async def note(message: Message) -> None:
            messages.append(_copy(message))
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self._keep(name, messages)
                self._in_progress.discard(name)  # a client with the whole answer may repeat its request at once
            await send(message)

        self._in_progress.add(name)
        try:
            await self.app(scope, receive, note)
        finally:
            self._in_progress.discard(name)

    def _keep(self, name: _Name, answer: list[Message]) -> None:
        is_batch = Headers(raw=answer[0]["headers"]).get("content-type") == NDJSON
        if answer[0]["status"] >= HTTPStatus.BAD_REQUEST or is_batch:
            return
        self._answers[name] = answer
        self._n_bytes += _size(name, answer)
        while self._n_bytes > _KEPT_BYTES:
            self._n_bytes -= _size(*self._answers.popitem(last=False))


def _size(name: _Name, answer: list[Message]) -> int:
    return _OVERHEAD + sum(map(len, name)) + sum(len(message.get("body", b"")) for message in answer)


def _copy(message: Message) -> Message:
    """A copy of the message, since the middleware around the routes changes its headers."""
    return {**message, "headers": list(message["headers"])} if "headers" in message else dict(message)
