"""Downloads images from http(s) URLs within limits, because a list of URLs may come from an untrusted source.

The host name is resolved here, and the connection goes to the very IP address that was checked, again after each
redirect. So neither a DNS answer nor a redirect can lead into a private network (server-side request forgery). Proxies
from the environment are not used, since we could not check what they connect to. That, and a single time limit for
the whole download, is why this uses http.client and not a client library.
"""

import http.client
import ipaddress
import random
import re
import socket
import ssl
import threading
import time
from collections.abc import Collection
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from urllib.parse import quote, urljoin, urlsplit

from hashseek.indexing.printing import printable
from hashseek.retrieval.errors import BadImage

MAX_BYTES = 32 * 2**20
SECONDS = 30.0
MAX_REDIRECTS = 5
RETRIES = 3
_FIRST_WAIT = 0.25  # seconds before the first retry; doubled for each further retry
_BLOCK = 2**16
_REDIRECTS = (301, 302, 303, 307, 308)
_RETRIABLE = (408, 425, 429, 500, 502, 503, 504)  # status codes worth another try
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")  # RFC 4291: all IPv6 addresses that are allocated
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # RFC 6052
_SPECIAL = [ipaddress.ip_network(text) for text in ("192.0.0.0/24", "3fff::/20")]  # RFC 6890, RFC 9637
_SCHEME = re.compile(r"https?://", re.IGNORECASE)


class _Retriable(Exception):
    """An error that a retry may avoid; `wait` is how long the server asks to wait (seconds)."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


def is_remote(uri: str) -> bool:
    """Whether `uri` is an http or https URL."""
    return _SCHEME.match(uri) is not None


def fetch(
    url: str,
    *,
    allow_private: bool = False,
    only: Collection[str] | None = None,
    max_bytes: int = MAX_BYTES,
    seconds: float = SECONDS,
) -> bytes:
    """Download the content of a URL.

    Args:
        url: must not contain a user name or password.
        allow_private: allow IP addresses that are not public (this machine, the local network).
        only: the hosts to download from, as HOST or HOST:PORT, also after redirects; None: all.
        max_bytes: the largest response to accept.
        seconds: time limit for everything, including redirects, retries and the waits between them.

    Raises:
        BadImage: it cannot be downloaded within these limits; the message names the URL and the limit.
    """
    download = _Download(url, allow_private, only, max_bytes, time.monotonic() + seconds)
    for attempt in range(RETRIES + 1):  # after a broken connection, or a status such as 429 or 503
        try:
            return download.run()
        except _Retriable as problem:
            wait = max(_FIRST_WAIT * 2**attempt * random.uniform(0.8, 1.2), problem.wait)
            if time.monotonic() + wait >= download.deadline:
                raise BadImage(f"{url} {problem}, and the time limit is {seconds:g} s") from None
            if attempt == RETRIES:
                raise BadImage(f"{url} {problem} ({attempt + 1} tries)") from None
            time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


@dataclass(frozen=True)
class _Download:
    """One download within its limits. Messages name the original `url`; `deadline` is a time of `time.monotonic`."""

    url: str
    allow_private: bool
    only: Collection[str] | None
    max_bytes: int
    deadline: float

    def run(self) -> bytes:
        """The content, after all redirects."""
        place = self.url
        for _ in range(MAX_REDIRECTS + 1):
            content, target = self._get(place)
            if target is None:
                return content
            try:
                place = urljoin(place, target)
            except ValueError:
                raise BadImage(f"{self.url} redirects to {_brief(target)}, which is not a valid URL") from None
        raise BadImage(f"{self.url} redirects more than {MAX_REDIRECTS} times")

    def _get(self, place: str) -> tuple[bytes, str | None]:
        """(content, None), or (nothing, redirect target) of the URL `place`."""
        scheme, host, port, path = self._parts(place)
        addresses = self._resolve(host, port)
        connection: http.client.HTTPConnection
        if scheme == "https":
            connection = http.client.HTTPSConnection(host, port, context=_tls())
        else:
            connection = http.client.HTTPConnection(host, port)
        try:
            with closing(connection):
                connection.sock = _connect(addresses, port, host if scheme == "https" else None, self.deadline)
                # A server that sends a byte now and then never exceeds the timeout of one read, so limit the whole.
                alarm = threading.Timer(_left(self.deadline), _hang_up, (connection.sock,))
                alarm.daemon = True
                alarm.start()
                try:
                    return self._exchange(connection, path)
                finally:
                    alarm.cancel()
                    if time.monotonic() >= self.deadline:
                        raise _Retriable("did not respond in full")
        except ssl.SSLCertVerificationError as error:
            raise BadImage(f"{self.url} has an invalid certificate: {error.verify_message}") from None
        except (OSError, http.client.HTTPException) as error:
            raise _Retriable(f"could not be read ({_reason(error)})") from None

    def _exchange(self, connection: http.client.HTTPConnection, path: str) -> tuple[bytes, str | None]:
        headers = {"User-Agent": "hashseek", "Accept": "image/*", "Accept-Encoding": "identity", "Connection": "close"}
        connection.request("GET", path, headers=headers)
        with closing(connection.getresponse()) as response:
            status, reason = response.status, _brief(response.reason)
            if status in _REDIRECTS and response.headers["Location"]:
                # Python reads headers as Latin-1, but servers also send UTF-8; `_quoted` passes on the bytes.
                return b"", response.headers["Location"].encode("latin-1").decode(errors="surrogateescape")
            if status in _RETRIABLE:
                wait = response.headers["Retry-After"] or ""
                raise _Retriable(f"responded with {status} {reason}", float(wait) if wait.isdecimal() else 0.0)
            if status != 200:
                raise BadImage(f"{self.url} responded with {status} {reason}")
            promised = response.length
            content = bytearray()
            while block := response.read1(_BLOCK):
                content += block
                if len(content) > self.max_bytes:
                    raise BadImage(f"{self.url} is larger than the limit of {self.max_bytes:,} bytes")
            if promised is not None and len(content) < promised:
                raise _Retriable(f"ended after {len(content):,} of {promised:,} bytes")
            return bytes(content), None

    def _parts(self, place: str) -> tuple[str, str, int, str]:
        """The scheme of the URL `place`, its host name in ASCII, its port, and its path and query, encoded."""
        try:
            if "\0" in place:
                raise ValueError("name resolution would end there")
            parts = urlsplit(place)
            port = parts.port or (443 if parts.scheme == "https" else 80)
            name = parts.hostname or ""
            host = name if ":" in name else name.encode("idna").decode("ascii")
            path = _quoted(parts.path or "/") + (f"?{_quoted(parts.query)}" if parts.query else "")
        except ValueError:
            raise BadImage(f"{self.url} is not a valid URL: correct it") from None
        leads = "" if place == self.url else f" redirects to {_brief(place)}, which"
        if parts.scheme not in ("http", "https") or not host:
            raise BadImage(f"{self.url}{leads} is not an http or https URL")
        if parts.username is not None:
            raise BadImage(f"{self.url}{leads} contains a user name: such URLs are not downloaded")
        usual = port == (443 if parts.scheme == "https" else 80)
        if self.only is not None and f"{host}:{port}" not in self.only and not (usual and host in self.only):
            raise BadImage(f"{self.url}{leads} is on {host}:{port}, which is not an allowed host (--url-host)")
        return parts.scheme, host, port, path

    def _resolve(self, host: str, port: int) -> list[str]:
        """The IP addresses of `host`; a host with even one IP address that is not public is refused."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
                raise _Retriable(f"could not be read (the host name {host} cannot be resolved at the moment)") from None
            raise BadImage(f"{self.url} is on the unknown host {host}") from None
        addresses = [str(entry[4][0]) for entry in found]
        for address in addresses:
            if not self.allow_private and not is_public(address):
                remedy = "use --allow-private if you trust it" if self.only is None else "it is not downloaded"
                raise BadImage(f"{self.url} resolves to {address}, which is not a public IP address: {remedy}")
        return addresses


def is_public(address: str) -> bool:
    """Whether an IP address is on the public internet, not on this machine or in a private or reserved network."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None or ip in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))  # an IPv4 address in the last 32 bits
        if ip not in _GLOBAL_UNICAST or ip.sixtofour is not None or ip.teredo is not None:
            return False
    # Python's `is_global` misses these reserved networks.
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in _SPECIAL)


def _connect(addresses: list[str], port: int, tls_name: str | None, deadline: float) -> socket.socket:
    """A connection to the first of the IP addresses that accepts one."""
    address, *others = addresses
    try:
        plain = socket.create_connection((address, port), timeout=_left(deadline) / len(addresses))
    except OSError:
        if others:
            return _connect(others, port, tls_name, deadline)
        raise
    plain.settimeout(_left(deadline))
    if tls_name is None:
        return plain
    try:
        return _tls().wrap_socket(plain, server_hostname=tls_name)
    except BaseException:
        plain.close()
        raise


def _hang_up(connected: socket.socket) -> None:
    with suppress(OSError):  # it was already closed
        # Not SSLSocket.shutdown, which would clear the TLS state that the reading thread uses.
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _quoted(part: str) -> str:
    """Part of a URL, percent-encoded; existing escapes and bytes that are not UTF-8 are kept."""
    return quote(part, safe="/%:@!$&'()*+,;=~?[]", errors="surrogateescape")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return _brief(str(error)) or type(error).__name__


def _brief(text: str) -> str:
    """Text from a server, short and safe to print."""
    return printable(text.strip())[:200]
