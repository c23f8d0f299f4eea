"""Images behind http(s) addresses, fetched with limits: a list of addresses may come from somebody one does not trust.

The name in an address is resolved here and the connection made to the very address that was checked, after each
redirect anew, so that no answer of a name server and no redirect leads into a private network. Proxies named by the
environment are not used: what they connect to could not be checked.
"""

import http.client
import ipaddress
import random
import re
import socket
import ssl
import threading
import time
from contextlib import closing
from functools import cache
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from hashseek.indexing.printing import printable
from hashseek.retrieval.errors import BadImage

MAX_BYTES = 32 * 2**20
SECONDS = 30.0
MAX_REDIRECTS = 5
RETRIES = 3
_FIRST_WAIT = 0.25  # seconds before the first retry; doubled for each further one
_BLOCK = 2**16
_REDIRECTS = (301, 302, 303, 307, 308)
_PASSING = (408, 425, 429, 500, 502, 503, 504)  # answers that may be another one a moment later
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")  # RFC 4291: all IPv6 addresses that are given out
_SPECIAL = [ipaddress.ip_network(text) for text in ("192.0.0.0/24", "3fff::/20")]  # RFC 6890, RFC 9637
_SCHEME = re.compile(r"https?://", re.IGNORECASE)


class _Passing(Exception):
    """What went wrong may go right when it is tried again; `wait` is what the server asks for (seconds)."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


def is_remote(uri: str) -> bool:
    """Whether `uri` is an http or https address."""
    return _SCHEME.match(uri) is not None


def fetch(
    url: str,
    *,
    allow_private: bool = False,
    max_bytes: int = MAX_BYTES,
    seconds: float = SECONDS,
    max_redirects: int = MAX_REDIRECTS,
    retries: int = RETRIES,
) -> bytes:
    """The content behind an http(s) address.

    Args:
        url: the address; without user name and password.
        allow_private: whether it may lead to an address that is not public (this machine, the local network).
        max_bytes: the longest answer that is read.
        seconds: for everything together: redirects, retries and the waits between them.
        max_redirects: how many are followed.
        retries: after a broken connection or an answer that may pass (429, 503 and the like).

    Raises:
        BadImage: it cannot be had within these limits; the message names the address and the limit.
    """
    deadline = time.monotonic() + seconds
    for attempt in range(retries + 1):
        try:
            return _follow(url, allow_private, max_bytes, max_redirects, deadline)
        except _Passing as problem:
            wait = max(_FIRST_WAIT * 2**attempt * random.uniform(0.8, 1.2), problem.wait)
            if time.monotonic() + wait >= deadline:
                raise BadImage(f"{url} {problem}, within the {seconds:g} s that it is given") from None
            if attempt == retries:
                raise BadImage(f"{url} {problem}, {attempt + 1} times") from None
            time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def _follow(url: str, allow_private: bool, max_bytes: int, max_redirects: int, deadline: float) -> bytes:
    place = url
    for _ in range(max_redirects + 1):
        content, target = _get(url, place, allow_private, max_bytes, deadline)
        if target is None:
            return content
        try:
            place = urljoin(place, target)
        except ValueError:
            raise BadImage(f"{url} redirects to {_brief(target)}, which is no address") from None
    raise BadImage(f"{url} redirects more than {max_redirects} times")


def _get(url: str, place: str, allow_private: bool, max_bytes: int, deadline: float) -> tuple[bytes, str | None]:
    """(content, None), or (nothing, where `place` redirects to); `url` is what messages call it."""
    parts, host, port = _parts(url, place)
    address = _resolve(url, host, port, allow_private)
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(host, port, context=_tls())
    else:
        connection = http.client.HTTPConnection(host, port)
    try:
        with closing(connection):
            connection.sock = _connect(address, port, host if parts.scheme == "https" else None, deadline)
            # A server that sends a byte now and then never exceeds the time of one read: the whole has a limit.
            alarm = threading.Timer(_left(deadline), _hang_up, (connection.sock,))
            alarm.daemon = True
            alarm.start()
            try:
                return _exchange(connection, parts, url, max_bytes)
            finally:
                alarm.cancel()
                if time.monotonic() >= deadline:
                    raise _Passing("was not answered in full")
    except ssl.SSLCertVerificationError as error:
        raise BadImage(f"{url} cannot be trusted: {error.verify_message}") from None
    except (OSError, http.client.HTTPException) as error:
        raise _Passing(f"could not be read ({_reason(error)})") from None


def _exchange(
    connection: http.client.HTTPConnection, parts: SplitResult, url: str, max_bytes: int
) -> tuple[bytes, str | None]:
    path = _quoted(parts.path or "/") + (f"?{_quoted(parts.query)}" if parts.query else "")
    headers = {"User-Agent": "hashseek", "Accept": "image/*", "Accept-Encoding": "identity", "Connection": "close"}
    connection.request("GET", path, headers=headers)
    with closing(connection.getresponse()) as answer:
        if answer.status in _REDIRECTS and answer.headers["Location"]:
            return b"", answer.headers["Location"]
        if answer.status in _PASSING:
            asked = answer.headers["Retry-After"] or ""
            wait = float(asked) if re.fullmatch(r"[0-9]{1,6}", asked) else 0.0
            raise _Passing(f"answered {answer.status} {_brief(answer.reason)}", wait)
        if answer.status != 200:
            raise BadImage(f"{url} answered {answer.status} {_brief(answer.reason)}")
        promised = answer.length
        if promised is not None and promised > max_bytes:
            raise BadImage(f"{url} has {promised:,} bytes; at most {max_bytes:,} are fetched as one image")
        content = bytearray()
        while block := answer.read1(_BLOCK):
            content += block
            if len(content) > max_bytes:
                raise BadImage(f"{url} has more than the {max_bytes:,} bytes that are fetched as one image")
        if promised is not None and len(content) < promised:
            raise _Passing(f"ended after {len(content):,} of the {promised:,} bytes that it promised")
        return bytes(content), None


def _parts(url: str, place: str) -> tuple[SplitResult, str, int]:
    """Scheme and path, host name as it is asked for, and port of `place`."""
    try:
        parts = urlsplit(place)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        name = parts.hostname or ""
        host = name if ":" in name else name.encode("idna").decode("ascii")
    except ValueError:
        raise BadImage(f"{url} is not an address that can be asked for: correct it") from None
    leads = "" if place == url else f" redirects to {_brief(place)}, which"
    if parts.scheme not in ("http", "https") or not host:
        raise BadImage(f"{url}{leads} is no http or https address")
    if parts.username is not None:
        raise BadImage(f"{url}{leads} holds a user name: such addresses are not fetched")
    return parts, host, port


def _resolve(url: str, host: str, port: int, allow_private: bool) -> str:
    """An IP address of `host`; a name with even one address that is not public is refused as a whole."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
            raise _Passing(f"could not be read (the name {host} cannot be resolved just now)") from None
        raise BadImage(f"{url} leads to {host}, a host that is not known") from None
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        if not allow_private and not is_public(address):
            raise BadImage(
                f"{url} leads to {address}, an address that is not public: "
                "say --allow-private if the list is your own and may go there"
            )
    return addresses[0]


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the public internet, and not to this machine, a private or a special network."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in ipaddress.ip_network("64:ff9b::/96"):  # NAT64 carries an IPv4 address in the last 32 bits
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    # Python's table knows neither all that is reserved outside of 2000::/3, such as site-local fec0::/10, nor these.
    in_public = ip in _GLOBAL_UNICAST if ip.version == 6 else True
    return ip.is_global and in_public and not ip.is_multicast and not any(ip in network for network in _SPECIAL)


def _connect(address: str, port: int, tls_name: str | None, deadline: float) -> socket.socket:
    plain = socket.create_connection((address, port), timeout=_left(deadline))
    if tls_name is None:
        return plain
    try:
        return _tls().wrap_socket(plain, server_hostname=tls_name)
    except BaseException:
        plain.close()
        raise


def _hang_up(connected: socket.socket) -> None:
    try:
        # Of the socket itself: an SSLSocket's own shutdown would take its state away from the thread that reads.
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
    except OSError:
        return  # it has ended by itself


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _quoted(part: str) -> str:
    """Part of an address as it may be sent; what is quoted already stays, and so do bytes that are no UTF-8."""
    return quote(part, safe="/%:@!$&'()*+,;=~?[]", errors="surrogateescape")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return _brief(str(error)) or type(error).__name__


def _brief(text: str) -> str:
    """What a server says, made fit for a sentence."""
    return printable(text.strip())[:200]
