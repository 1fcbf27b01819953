"""Where a server listens, as its own lines and its clients write it."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from hotloop.errors import OptionError


@dataclass(frozen=True)
class Address:
    """Where a server listens."""

    scheme: str
    host: str
    port: int

    @classmethod
    def parse(cls, url: str) -> "Address":
        """From `http://HOST:PORT`, with or without the scheme; OptionError for anything else."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            raise OptionError(f"URL {url}: must be http://HOST:PORT") from None
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.path.strip("/")
            or parts.query
        ):
            raise OptionError(f"URL {url}: must be http://HOST:PORT, without a path")
        return cls(parts.scheme, parts.hostname, port)

    def __str__(self) -> str:
        return f"{self.scheme}://{join_port(self.host, self.port)}"


def join_port(host: str, port: int) -> str:
    """HOST:PORT, as addresses have it: one of IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
