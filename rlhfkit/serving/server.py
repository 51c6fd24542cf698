"""``Server``: an ASGI application behind :class:`AccessControlMiddleware`, in a thread or in the foreground."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import uvicorn
from starlette.types import ASGIApp

from rlhfkit.serving.access import AccessToken, check_host, check_tls_files
from rlhfkit.serving.middleware import AccessControlMiddleware
from rlhfkit.validation import check_integer, check_number

log = logging.getLogger(__name__)


class Server:
    """Serves an application over HTTP, by default on the loopback address and a free port.

    Example::

        with Server(app, token=AccessToken(variable="REWARD_TOKEN")) as server:
            httpx.get(f"{server.url}/health")
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: AccessToken | None = None,
        ssl_certfile: str | os.PathLike[str] | None = None,
        ssl_keyfile: str | os.PathLike[str] | None = None,
        start_timeout: float = 30.0,
        shutdown_timeout: float = 10.0,
        **limits: Any,
    ) -> None:
        """Set address and access. Nothing listens before :meth:`start` or :meth:`run`.

        Args:
            app: What is served.
            host: Address to listen on; others than the loopback address need a token.
            port: 0: any that is free; see ``url``.
            token: Token that requests must bring.
            ssl_certfile: TLS certificate (PEM). Without one tokens are sent unencrypted: for loopback and trusted
                networks only.
            ssl_keyfile: Its private key.
            start_timeout: Seconds to wait until the application has started.
            shutdown_timeout: Seconds that running requests have to finish when the server is closed.
            **limits: ``max_body_bytes``, ``max_total_bytes``, ``max_concurrent``, ``body_timeout``, ``open_paths`` of
                :class:`AccessControlMiddleware`.

        Raises:
            ValueError: If the host can be reached from outside and there is no good token, or an argument is out of
                range.
        """
        check_host(host, token)
        check_integer("port", port, minimum=0, maximum=2**16 - 1, why="0 takes any that is free")
        check_number("start_timeout", start_timeout, above=0, why="it is in seconds")
        check_number("shutdown_timeout", shutdown_timeout, above=0, why="it is in seconds")
        check_tls_files(ssl_certfile, ssl_keyfile)
        self.host = host
        self.port = port
        self.start_timeout = start_timeout
        self.middleware = AccessControlMiddleware(app, token=token, **limits)
        self._settings: dict[str, Any] = {
            "app": self.middleware,
            "http": "h11",  # limits the size of headers
            "ws": "none",
            "loop": "asyncio",
            "log_config": None,
            "access_log": False,
            "server_header": False,
            "proxy_headers": False,
            "ssl_certfile": ssl_certfile,
            "ssl_keyfile": ssl_keyfile,
            "timeout_graceful_shutdown": max(1, round(shutdown_timeout)),
        }
        self._thread: threading.Thread | None = None
        self._uvicorn: uvicorn.Server | None = None
        self._error: BaseException | None = None

    @property
    def url(self) -> str:
        """Address for clients; known once the server listens."""
        scheme = "http" if self._settings["ssl_certfile"] is None else "https"
        return f"{scheme}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def run(self, ready: Callable[[str], None] | None = None) -> None:
        """Serve in this thread until the process is interrupted or terminated, then let running requests finish.

        ``ready`` is called with ``url`` once the server listens. Raises ``OSError`` if it cannot listen on the address.
        """
        listener = self._listen()
        if ready is not None:
            ready(self.url)
        self._serve(listener)

    def start(self) -> Self:
        """Serve in a thread of this process, and return when requests are answered.

        Raises:
            OSError: If it cannot listen on the address.
            RuntimeError: If the application fails to start.
            TimeoutError: If it takes longer than ``start_timeout``.
        """
        if self._thread is not None:
            return self
        listener = self._listen()
        self._error = None
        self._thread = threading.Thread(
            target=self._serve_in_thread, args=(listener,), name="rlhfkit-server", daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + self.start_timeout
        while self._uvicorn is None or not self._uvicorn.started:
            if not self._thread.is_alive():
                self._thread = None
                raise RuntimeError(f"the server at {self.url} failed to start") from self._error
            if time.monotonic() > deadline:
                self.close()
                raise TimeoutError(f"the server at {self.url} did not start within {self.start_timeout:g} s")
            time.sleep(0.005)
        return self

    def close(self) -> None:
        """Stop listening, let running requests finish, and end the thread; does nothing if the server does not run."""
        if self._thread is None:
            return
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True
        limit = self._settings["timeout_graceful_shutdown"] + 10
        self._thread.join(limit)
        if self._thread.is_alive():
            log.warning("the server at %s did not stop within %g s; its thread is left behind", self.url, limit)
        self._thread, self._uvicorn = None, None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _listen(self) -> socket.socket:
        """Return a listening socket, so that the port is known and cannot be taken by others."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listener = socket.create_server((self.host, self.port), family=family, backlog=2048)
        address, self.port = listener.getsockname()[:2]
        try:
            check_host(address, self.middleware.token)  # a name such as localhost may resolve to any address
        except ValueError:
            listener.close()
            raise
        return listener

    def _serve(self, listener: socket.socket) -> None:
        self._uvicorn = uvicorn.Server(uvicorn.Config(**self._settings))
        with listener:
            self._uvicorn.run(sockets=[listener])

    def _serve_in_thread(self, listener: socket.socket) -> None:
        try:
            self._serve(listener)
        except BaseException as error:  # uvicorn raises SystemExit when the application does not start
            self._error = error
