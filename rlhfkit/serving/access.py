"""Access tokens of servers, and the rule for addresses that need one."""

import hmac
import ipaddress
import os
from dataclasses import dataclass

from rlhfkit.validation import check_integer

MIN_TOKEN_LENGTH = 16
"""Minimum length of a server's token in characters: 16 random ones cannot be guessed over a network."""


class AccessToken:
    """A secret shared by client and server, sent as ``Authorization: Bearer ...``.

    ``repr``, ``str`` and errors never show it. A token given by environment variable is not stored either: pickles,
    logs and configuration files contain only the variable's name.

    Example::

        AccessToken(variable="REWARD_TOKEN")  # export REWARD_TOKEN=$(openssl rand -hex 32)
    """

    def __init__(self, value: str | None = None, *, variable: str | None = None) -> None:
        """Set the secret or where to find it.

        Args:
            value: The secret.
            variable: Environment variable that holds it, here and in processes this object is sent to.

        Raises:
            ValueError: If not exactly one is given, the variable is not set, or the secret is empty or has characters
                other than visible ASCII.
        """
        if (value is None) == (variable is None):
            raise ValueError("give either the token or the environment variable that holds it")
        self.variable = variable
        self._value = value
        self._read()

    @classmethod
    def optional(cls, value: str | None = None, *, variable: str | None = None) -> "AccessToken | None":
        """Return a token, or ``None`` if neither argument is given; arguments and errors are the constructor's."""
        return None if value is None and variable is None else cls(value, variable=variable)

    def header(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._read()}"}

    def matches(self, header: str | None) -> bool:
        """Whether an ``Authorization`` header (``None``: not sent) holds this token; compares in constant time."""
        scheme, _, given = (header or "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._read().encode())

    def redact(self, text: str) -> str:
        """Replace the secret in a text, such as a server's response, before it is shown or logged."""
        return text.replace(self._read(), "***")

    def __len__(self) -> int:
        """Number of characters of the secret."""
        return len(self._read())

    def __repr__(self) -> str:
        return "AccessToken(***)" if self.variable is None else f"AccessToken(variable={self.variable!r})"

    def _read(self) -> str:
        where = "the token" if self.variable is None else f"environment variable {self.variable}"
        value = self._value if self.variable is None else os.environ.get(self.variable)
        if value is None:
            raise ValueError(f"{where} is not set; it must hold the token")
        if not value or not all("!" <= character <= "~" for character in value):
            raise ValueError(f"{where} must be one or more visible ASCII characters, without spaces and line ends")
        return value


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where a server listens, and who may use it; raises ``ValueError`` for a port out of range, or one TLS file."""

    host: str = "127.0.0.1"
    """Address to listen on; others than the loopback address need a token."""
    port: int = 0
    """0: any that is free."""
    token: AccessToken | None = None
    """What clients must send; ``None``: a random one, on the loopback address only."""
    public_url: str | None = None
    """Address for clients on other machines, ``https://trainer:8000``; ``None``: they run on this one."""
    ssl_certfile: str | None = None
    """TLS certificate (PEM). Without one tokens and texts are sent unencrypted."""
    ssl_keyfile: str | None = None
    """Its private key."""

    def __post_init__(self) -> None:
        check_integer("port", self.port, minimum=0, maximum=2**16 - 1, why="0 takes any that is free")
        check_tls_files(self.ssl_certfile, self.ssl_keyfile)


def check_tls_files(certfile: str | os.PathLike[str] | None, keyfile: str | os.PathLike[str] | None) -> None:
    """Raise ``ValueError`` if a certificate is given without its key, or a key without its certificate."""
    if (certfile is None) != (keyfile is None):
        raise ValueError("ssl_certfile and ssl_keyfile go together: give both or neither")


def is_loopback(host: str) -> bool:
    """Whether an address is ``localhost``, in 127.0.0.0/8, or ::1; false for other names, which are not resolved."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_host(host: str, token: AccessToken | None) -> None:
    """Raise ``ValueError`` if ``host`` can be reached from outside and there is no token, or a short one."""
    if token is not None and len(token) < MIN_TOKEN_LENGTH:
        raise ValueError(
            f"a server's token must have at least {MIN_TOKEN_LENGTH} characters, {token!r} has {len(token)}; "
            "`openssl rand -hex 32` makes a good one"
        )
    if token is None and not is_loopback(host):
        raise ValueError(
            f"refusing to listen on {host!r} without a token: others could reach the server. Name an environment "
            "variable that holds one, or listen on 127.0.0.1"
        )
