"""HTTP by hand over one connection that is kept: it costs little beside the server under test, which has two cores."""

import asyncio
from contextlib import asynccontextmanager


def write_request(path, body=b"", headers=(), method="POST"):
    """The bytes of a request; `headers` are pairs, or a mapping."""
    pairs = headers.items() if isinstance(headers, dict) else headers
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: x",
        f"Content-Length: {len(body)}",
        *(f"{n}: {v}" for n, v in pairs),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


class RawClient:
    """One connection."""

    def __init__(self, reader, writer):
        self._reader, self._writer = reader, writer

    async def ask(self, request):
        """Status, headers by their small names, and body of what comes back for these bytes."""
        self._writer.write(request)
        return await self.read()

    async def read(self):
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head[1:] if line)
        }
        body = await self._reader.readexactly(int(headers.get("content-length", 0)))
        return int(head[0].split()[1]), headers, body


@asynccontextmanager
async def connect(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.close()
