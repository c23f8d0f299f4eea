"""Downloads: the limits hold against a real server that hangs, lies, redirects in a circle or never ends."""

import re
import socket
import ssl
import threading
import time
from http.server import ThreadingHTTPServer

import pytest

from hashseek.indexing import remote
from hashseek.indexing.remote import fetch, is_public, is_remote
from hashseek.retrieval.errors import BadImage
from support.paths import ROOT
from support.web import QuietHandler, answering, url_of

CONTENT = bytes(range(256)) * 40  # 10 kB


class Handler(QuietHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.asked.append(self.path)
        getattr(self, f"answer_{self.path.strip('/').partition('?')[0].partition('/')[0]}")()

    def reply(self, status=200, content=b"", **headers):
        self.send_response(status)
        for name, value in ({"Content_Length": len(content)} | headers).items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(content)

    def answer_good(self):
        self.reply(content=CONTENT)

    def answer_gone(self):
        self.reply(404)

    def answer_busy(self):  # two times, then not
        self.reply(503, Retry_After=0) if self.server.asked.count("/busy") < 3 else self.answer_good()

    def answer_never(self):
        self.reply(503)

    def answer_away(self):
        self.reply(302, Location="good")

    def answer_utf8(self):  # a raw header, as some servers send
        self.reply(302, Location="/good/é".encode().decode("latin-1"))

    def answer_round(self):
        self.reply(302, Location=f"/round/{len(self.server.asked)}")

    def answer_metadata(self):
        self.reply(302, Location="http://169.254.169.254/latest/meta-data/")

    def answer_odd(self):
        self.reply(302, Location="http://[bad")

    def answer_file(self):
        self.reply(302, Location="file:///etc/passwd")

    def answer_hang(self):
        self.server.over.wait(30)

    def answer_drip(self):  # a byte of a header now and then
        while not self.server.over.wait(0.05):
            self.wfile.write(b"X")

    def answer_short(self):
        self.reply(content=CONTENT, Content_Length=2 * len(CONTENT))
        self.close_connection = True

    def answer_endless(self):  # 10 GB, if it is let
        self.send_response(200)
        self.end_headers()
        self.close_connection = True
        for _ in range(10 * 2**10):
            self.wfile.write(bytes(2**20))
            self.server.sent += 2**20

    def answer_reset(self):
        self.close_connection = True

    def answer_garbage(self):
        self.wfile.write(b"\x00\x01\x02\n\n")
        self.close_connection = True


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *args):  # the client hung up: what is tested
        pass


@pytest.fixture
def server():
    with answering(Handler, Server) as running:
        running.asked, running.sent, running.over = [], 0, threading.Event()
        running.url = url_of(running)
        yield running
        running.over.set()


def get(server, path, **options):
    return fetch(f"{server.url}/{path}", **{"allow_private": True, "seconds": 10.0, **options})


def test_content_is_downloaded_after_redirects_and_retries_and_without_a_proxy(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert get(server, "good") == CONTENT
    assert get(server, "good/ü space?q=ä") == CONTENT
    assert get(server, "away") == CONTENT
    assert get(server, "utf8") == CONTENT
    assert get(server, "busy") == CONTENT
    assert server.asked.count("/busy") == 3
    assert get(server, "good/\udcff") == CONTENT  # of a list that is not UTF-8
    assert {"/good/%C3%BC%20space?q=%C3%A4", "/good/%FF", "/good/%C3%A9"} <= set(server.asked)


def test_the_next_ip_address_of_a_host_is_tried(server, monkeypatch):
    """`localhost` is often ::1 first, where no server of IPv4 answers."""
    both = [(2, 1, 6, "", (address, 0)) for address in ("127.0.0.9", "127.0.0.1")]
    look_up = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: both if host == "x.y" else look_up(host, *a, **k))
    monkeypatch.setattr(remote, "RETRIES", 0)
    server.url = server.url.replace("127.0.0.1", "x.y")
    assert get(server, "good") == CONTENT


def test_https_needs_a_trusted_certificate_for_the_host(server, monkeypatch):
    monkeypatch.setattr(remote, "RETRIES", 0)
    own = ROOT / "tests" / "support" / "certificate.pem"  # of 127.0.0.1, signed by nobody
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(own)
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    url = server.url.replace("http://", "https://")
    with pytest.raises(BadImage):
        fetch(f"{url}/good", allow_private=True, seconds=10)
    trusting = ssl.create_default_context(cafile=own)
    monkeypatch.setattr(remote, "_tls", lambda: trusting)
    assert fetch(f"{url}/good", allow_private=True, seconds=10) == CONTENT
    with pytest.raises(BadImage):
        fetch(f"{url}/good".replace("127.0.0.1", "localhost"), allow_private=True, seconds=10)


# path -> a value that the message names
REFUSED = {
    "gone": "404",
    "never": "503",
    "round": "5",
    "metadata": "169.254.169.254",
    "odd": "http://[bad",
    "file": "file:///etc/passwd",
    "short": "20,480",
    "endless": "1,000,000",
    "reset": "",
    "garbage": "",
    "good/\ud800.jpg": "",  # JSON may escape half a character
}


@pytest.mark.parametrize("path", REFUSED)
def test_a_refusal_names_the_url_and_the_value(server, path, monkeypatch):
    monkeypatch.setattr(remote, "RETRIES", 1)
    private = path != "metadata"
    if not private:  # the server itself counts as public here, its redirect target does not
        monkeypatch.setattr(remote, "is_public", lambda ip: ip == "127.0.0.1" or is_public(ip))
    with pytest.raises(BadImage, match=re.escape(f"{server.url}/{path}")) as refused:
        get(server, path, allow_private=private, max_bytes=1_000_000)
    assert REFUSED[path] in str(refused.value)
    assert "\n" not in str(refused.value)
    assert server.sent < 50 * 2**20  # of 10 GB


@pytest.mark.parametrize("path", ["hang", "drip"])
def test_the_time_limit_holds_for_a_server_that_hangs(server, path):
    started = time.monotonic()
    with pytest.raises(BadImage, match=r"0\.7"):
        get(server, path, seconds=0.7)
    assert time.monotonic() - started < 20  # generous: the machine may be busy; it hangs for 30


def test_private_addresses_are_refused_before_anything_is_sent(server, monkeypatch):
    port = server.server_port
    for host in ("127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0"):
        with pytest.raises(BadImage, match=host.replace("[", "\\[")):
            fetch(f"http://{host}:{port}/good", seconds=5.0)
    assert server.asked == []
    public_and_private = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 80)) for ip in ("8.8.8.8", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: public_and_private)
    with pytest.raises(BadImage, match=r"10\.0\.0\.1"):
        fetch("http://example.org/x.jpg")


def test_only_allowed_hosts_are_asked_and_only_at_public_addresses(server, monkeypatch):
    place, port = f"127.0.0.1:{server.server_port}", server.server_port
    assert get(server, "good", only=[place]) == CONTENT
    assert get(server, "away", only=[place, "other.example"]) == CONTENT
    asked = len(server.asked)
    for only in ([], ["127.0.0.1"], ["other.example"], ["27.0.0.1", f"localhost:{port}"]):  # a name alone: port 80, 443
        with pytest.raises(BadImage, match=re.escape(place)):
            get(server, "good", only=only)
    for host in ("2130706433", "0x7f.1", "[::ffff:127.0.0.1]", "127.0.0.1@localhost", "localhost.", "127.0.0.1."):
        with pytest.raises(BadImage):
            fetch(f"http://{host}:{port}/good", only=[place, "localhost"], allow_private=True)
    with pytest.raises(BadImage, match=r"127\.0\.0\.1|::1"):  # an allowed name that leads here
        fetch(f"http://localhost:{port}/good", only=[f"localhost:{port}"])
    assert len(server.asked) == asked
    with pytest.raises(BadImage, match=r"169\.254\.169\.254"):
        get(server, "metadata", only=[place])


# The last lines: a provider's network, metadata of clouds, IPv4 inside IPv6, and NAT64 of the metadata address.
PRIVATE = """
    10.1.2.3 172.31.0.1 192.168.1.1 127.8.8.8 0.0.0.0 224.0.0.1 255.255.255.255 192.0.0.8 ::1 :: fd00::1 ff02::1
    fe80::1%eth0 fec0::1 5f00::1 3fff::1
    100.64.0.1
    169.254.169.254
    ::ffff:10.0.0.1 ::127.0.0.1 ::ffff:0:127.0.0.1 2002:a00:1:: 64:ff9b:1::7f00:1
    64:ff9b::a9fe:a9fe
"""


def test_public_and_private_ip_addresses():
    assert [ip for ip in ("8.8.8.8", "2001:4860:4860::8888", "64:ff9b::808:808") if not is_public(ip)] == []
    assert [ip for ip in PRIVATE.split() if is_public(ip)] == []


def test_invalid_urls_are_refused(monkeypatch):
    with pytest.raises(BadImage):
        fetch("http://name.invalid/x", seconds=3.0)
    monkeypatch.setattr("socket.getaddrinfo", None)  # the others are refused before their host is looked up
    for rest in (
        "",
        "/x.jpg",
        "a:b@example.org/x",
        "[::1/x",
        "example.org:99999/x",
        f"{'a' * 70}.org/x",
        "localhost\0.org/x",
    ):
        with pytest.raises(BadImage):
            fetch(f"http://{rest}", seconds=3.0)


def test_what_counts_as_remote():
    uris = ("http://x", "HTTPS://x", "/a/http://x", "ftp://x")
    assert [is_remote(uri) for uri in uris] == [True, True, False, False]
