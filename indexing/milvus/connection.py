"""Calls to a Milvus server: retries temporary errors for a limited time, and turns others into Hashseek's errors.

pymilvus is imported on connecting. Every call can be repeated, since rows are written by id ("upsert"): so every error
that is not certainly permanent is retried until the time is up, for example while a server restarts.
"""

import logging
import os
import time
from typing import Any

from hashseek.indexing.milvus_uri import MilvusUri
from hashseek.retrieval.errors import BadCollection, BadConfig

CONNECT_SECONDS = 10.0
READ_SECONDS = 20.0  # for a call with all its retries
PROBE_SECONDS = 3.0  # the service must answer a probe within 5 s
WRITE_SECONDS = 90.0  # a server takes about half a minute to restart
_PAUSE_SECONDS = 0.5  # before each retry
_NOT_FOUND = (100, 800)  # collection, database
# Invalid parameters, authentication, and errors without a code of their own, such as invalid expressions and codes of
# another length; while a server starts, it returns other ones. The last one is gRPC's.
_PERMANENT = (1100, 1101, 1400, 1401, 65535, "PERMISSION_DENIED")


class StoreUnavailable(BadCollection):
    """The server that holds a collection does not answer; the same call may succeed later."""


class Connection:
    """A connection to the server of a URI. Safe to use from several threads.

    Attributes:
        is_stale: the collection has been dropped or replaced; all calls are refused.
    """

    def __init__(self, uri: MilvusUri, *, is_patient: bool = False) -> None:
        """Connect; with `is_patient`, reads may take as long as writes.

        Raises:
            BadConfig: pymilvus is not installed.
            StoreUnavailable: the server does not answer.
        """
        try:
            import grpc
            import pymilvus
        except ImportError:
            raise BadConfig(f"{uri} needs pymilvus: run pip install 'hashseek[milvus]'") from None
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL)  # it would log each try with its traceback
        self.uri = uri
        self.is_stale = False
        self._read_seconds = WRITE_SECONDS if is_patient else READ_SECONDS
        self._invalid = (pymilvus.exceptions.ParamError, pymilvus.exceptions.DataNotMatchException)
        self._errors = (pymilvus.MilvusException, grpc.RpcError, grpc.FutureTimeoutError)
        try:
            self._client: Any = pymilvus.MilvusClient(
                uri=f"{'https' if uri.tls == 'on' else 'http'}://{uri.server}",
                token=os.environ.get("HASHSEEK_MILVUS_TOKEN", "").strip(),  # a file ends in a line break
                timeout=CONNECT_SECONDS,
            )
        except self._errors as error:
            cause = error.__context__ if isinstance(error.__context__, grpc.RpcError) else error
            raise StoreUnavailable(
                f"there is no Milvus server at {uri.server}, or it refuses HASHSEEK_MILVUS_TOKEN "
                f"({_message(cause)}): start it, or correct the URI or the token"
            ) from None

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def read(self, method: str, **arguments: Any) -> Any:
        """Call a method of the client for this collection; reads are tried for `READ_SECONDS`, or as long as writes.

        Raises:
            StoreUnavailable: the server does not answer, or only with errors.
            BadCollection: there is no such collection, or Milvus refuses the call.
        """
        return self._call(method, self._read_seconds, arguments)

    def write(self, method: str, **arguments: Any) -> Any:
        """Like `read`, for calls that change something: tried for `WRITE_SECONDS`."""
        return self._call(method, WRITE_SECONDS, arguments)

    def probe(self, method: str, **arguments: Any) -> Any:
        """Like `read`, tried for `PROBE_SECONDS`."""
        return self._call(method, PROBE_SECONDS, arguments)

    def _call(self, method: str, seconds: float, arguments: dict[str, Any]) -> Any:
        if self.is_stale:
            raise StoreUnavailable(
                f"the collection {self.uri} was dropped or replaced since it was opened: open it again"
            )
        until = time.monotonic() + seconds
        while True:
            left = max(until - time.monotonic(), 1.0)
            try:
                return getattr(self._client, method)(self.uri.name, timeout=left, **arguments)
            except self._errors as error:
                code, text = _code(error), _message(error)
                if code in _NOT_FOUND:
                    raise BadCollection(
                        f"there is no collection {self.uri}: create it with `hashseek index add` and its URI"
                    ) from None
                if time.monotonic() + _PAUSE_SECONDS >= until:
                    raise StoreUnavailable(
                        f"Milvus at {self.uri.server} did not answer {method} within {seconds:.0f} s ({text}): "
                        "check the server and try again; everything reported as stored is stored"
                    ) from None
                if code in _PERMANENT or isinstance(error, self._invalid):
                    raise BadCollection(f"Milvus refuses {method} on {self.uri}: {text}") from None
            time.sleep(_PAUSE_SECONDS)


def _code(error: Any) -> int | str | None:
    """The number of an error of Milvus, or the name of one of gRPC."""
    code = getattr(error, "code", None)
    return code().name if callable(code) else code


def _message(error: Any) -> str:
    text = getattr(error, "message", None) or (error.details() if hasattr(error, "details") else None) or error
    return " ".join(str(text).split())[:200]
