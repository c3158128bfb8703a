"""HTTP for strangers: one request per connection, a bounded number of connections, a deadline for each of them."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeAlias

from advisor.bot.webhooks.webhook import Refusal

_CROWDED_S = 1.0  # a connection that has not sent its request by then makes room when there is none
_POLL_S = 0.1
_BACKLOG = 512
_LINE = 65_536
_LEFT_BYTES, _LEFT_S = 1 << 20, 0.5  # of a body nobody reads: how much is taken off the wire to get the answer across


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request whose head has been read: header names are lower-case, repeated ones joined by commas."""

    method: str
    path: str
    headers: Mapping[str, str]
    read: Callable[[int], bytes]  # the body; raises Refusal when it ends early


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A status and a small JSON object; `then` is called once it has been sent, or could not be."""

    status: HTTPStatus
    body: Mapping[str, object]
    headers: Mapping[str, str] = field(default_factory=dict)
    then: Callable[[], None] = lambda: None


Respond: TypeAlias = Callable[[Request], Answer]


class Listener(socketserver.TCPServer):
    """Reads requests and lets `respond` answer them, each connection in a thread of its own.

    A client has `request_s` seconds to get its request across, whatever pace it keeps, and one second once all
    `connections` are taken: who sends a head letter by letter loses its place to who has something to say.
    `report` is told what came to no request: a bug as the exception, what a client did in a word.
    """

    allow_reuse_address = True
    request_queue_size = _BACKLOG

    def __init__(
        self,
        address: tuple[str, int],
        respond: Respond,
        *,
        connections: int,
        request_s: float,
        report: Callable[[BaseException | str], None],
    ) -> None:
        """Bind and listen; raises OSError."""
        self.respond = respond
        self.report = report
        self._request_s = request_s
        self._slots = threading.BoundedSemaphore(connections)
        self._open: dict[socket.socket, float | None] = {}  # since when it has been sending its request
        self._open_lock = threading.Condition()
        self._stopping = threading.Event()
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def stop(self, grace_s: float) -> None:
        """Accept nothing more, and give what has been accepted some seconds to be answered."""
        self._stopping.set()
        self.shutdown()
        self.server_close()
        with self._open_lock:
            self._open_lock.wait_for(lambda: not self._open, grace_s)
            for connection in self._open:
                _hang_up(connection)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Wait for a free place, and hand the connection to a thread."""
        while not self._slots.acquire(timeout=_POLL_S):
            self._hang_up_slow(_CROWDED_S)
            if self._stopping.is_set():
                self.shutdown_request(request)
                return
        with self._open_lock:
            self._open[request] = time.monotonic()
        try:
            threading.Thread(
                target=self._serve_one, args=(request, client_address), name="advisor-bot-connection", daemon=True
            ).start()
        except RuntimeError:  # the system has no thread left
            self._forget(request)
            raise

    def service_actions(self) -> None:
        """Between two connections: hang up on those whose time is over."""
        self._hang_up_slow(self._request_s)

    def received(self, connection: socket.socket) -> None:
        """The request of a connection is complete: its deadline counts no more."""
        with self._open_lock:
            self._open[connection] = None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is counted, anything else is a bug."""
        error = sys.exc_info()[1]
        self.report(error if error is not None and not isinstance(error, OSError) else "gone")

    def _serve_one(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except Exception:  # noqa: BLE001 - one connection ends, told by handle_error, the others go on
            self.handle_error(request, client_address)
        finally:
            self._forget(request)

    def _forget(self, request: Any) -> None:
        with self._open_lock:  # under the lock, so that nobody hangs up on a number that another socket has by then
            self._open.pop(request, None)
            self.shutdown_request(request)
            self._open_lock.notify_all()
        self._slots.release()

    def _hang_up_slow(self, limit_s: float) -> None:
        latest = time.monotonic() - limit_s
        with self._open_lock:
            for connection, since in self._open.items():
                if since is not None and since < latest:
                    _hang_up(connection)


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has gone already
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(http.server.BaseHTTPRequestHandler):
    """One request. No version banner, no page of HTML, no word of the request in the answer."""

    server: Listener
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 8192
    command = ""
    _unread = False

    def handle(self) -> None:
        self.close_connection = True
        self.raw_requestline = self.rfile.readline(_LINE + 1)
        if not self.raw_requestline:
            self.server.report("gone")
            return
        if len(self.raw_requestline) > _LINE:
            self.send_error(HTTPStatus.REQUEST_URI_TOO_LONG)
            return
        if not self.parse_request():
            return
        headers = _joined(self.headers)
        self._unread = "content-length" in headers or "transfer-encoding" in headers
        path = self.path.partition("?")[0]
        answer = self.server.respond(Request(method=self.command, path=path, headers=headers, read=self._read))
        try:
            self._send(answer)
        finally:
            answer.then()
        if self._unread:
            self._take_off_the_wire()

    def handle_expect_100(self) -> bool:
        """Whether to go on is said when the body is read: a body that nobody wants is not asked for."""
        return True

    def _read(self, length: int) -> bytes:
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.wfile.flush()
        body = self.rfile.read(length)
        self._unread = False
        if len(body) < length:
            raise Refusal(HTTPStatus.BAD_REQUEST, "the body ended early")
        self.server.received(self.connection)
        return body

    def _send(self, answer: Answer) -> None:
        body = json.dumps(dict(answer.body)).encode() + b"\n"
        self.send_response_only(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()

    def _take_off_the_wire(self) -> None:
        """Closing with bytes unread resets the connection, and the client would never see the answer."""
        with contextlib.suppress(OSError):  # the client has gone already, or was hung up on
            self.connection.shutdown(socket.SHUT_WR)
        end, left = time.monotonic() + _LEFT_S, _LEFT_BYTES
        while left > 0 and (patience := end - time.monotonic()) > 0:
            self.connection.settimeout(patience)
            try:
                taken = len(self.connection.recv(65_536))
            except TimeoutError:
                return
            if not taken:
                return
            left -= taken

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the parser of requests says of a malformed one."""
        self.request_version = "HTTP/1.1"  # what was sent may be no HTTP at all; the answer is
        self.server.report("malformed")
        self._send(Answer(status=HTTPStatus(code), body={"error": "malformed request"}))
        self._take_off_the_wire()

    def log_message(self, format: str, *args: Any) -> None:
        """Deliveries are logged where they are understood."""


def _joined(headers: Any) -> dict[str, str]:
    joined: dict[str, str] = {}
    for name, value in headers.items():
        key = name.lower()
        joined[key] = f"{joined[key]}, {value}" if key in joined else value
    return joined
