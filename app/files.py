"""Files that never change, served from memory.

A page needs sixty of Streamlit's files, which bear a hash in their names. They are read and compressed once, so that a class
that opens the lab all at once gets a third of the bytes. The lab's own modules and plotly.js are announced with the page
itself, so that the browser asks for them at once and not when Streamlit has started.
"""

from __future__ import annotations

import gzip
import mimetypes
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders

NAME = re.compile(r"/static/((?:js|css|media)/[A-Za-z0-9_.-]+\.[A-Za-z0-9_-]{8}\.[a-z0-9]+)")
"""Addresses of Streamlit's files with a hash in their names."""
PACKED = {".js", ".css", ".svg"}
"""What gets smaller by compression; fonts are compressed already."""


class KeptFiles:
    """ASGI middleware: answers for the files in ``folder``, and tells the browser early what a page will need.

    Args:
        app: what answers everything else.
        folder: Streamlit's static folder, the parent of ``js``, ``css`` and ``media``.
        announced: value of the ``Link`` header of the front page.
    """

    def __init__(self, app: Any, folder: Path, announced: str = "") -> None:
        self.app = app
        self.folder = folder
        self.announced = announced
        self._files: dict[str, tuple[bytes, bytes, str]] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        if scope["type"] != "http" or scope["method"] != "GET":
            await self.app(scope, receive, send)
            return
        found = NAME.fullmatch(scope["path"])
        if found:
            if found[1] not in self._files:
                await run_in_threadpool(self._keep, found[1])
            if found[1] in self._files:
                await _answer(scope, send, *self._files[found[1]])
                return
        await self.app(scope, receive, self._announcing(send) if scope["path"] == "/" and self.announced else send)

    def _keep(self, name: str) -> None:
        """Read a file into memory, if there is one of that name."""
        path = self.folder / name
        if not path.is_file():
            return
        plain = path.read_bytes()
        packed = gzip.compress(plain, 6) if path.suffix in PACKED else b""
        self._files[name] = (plain, packed, mimetypes.guess_type(name)[0] or "application/octet-stream")

    def _announcing(self, send: Any) -> Any:
        async def announce(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).append("Link", self.announced)
            await send(message)

        return announce


async def _answer(scope: Any, send: Any, plain: bytes, packed: bytes, media_type: str) -> None:
    """The file, compressed for those who take it so."""
    small = bool(packed) and "gzip" in Headers(scope=scope).get("accept-encoding", "")
    body = packed if small else plain
    headers = [
        (b"content-type", media_type.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"public, immutable, max-age=31536000"),
        (b"vary", b"Accept-Encoding"),
        *([(b"content-encoding", b"gzip")] if small else []),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def announcement(modules: Sequence[str], styles: Sequence[str], scripts: Sequence[str]) -> str:
    """A ``Link`` header for files that the page will need; addresses from the root."""
    links = [
        *(f"<{address}>; rel=modulepreload" for address in modules),
        *(f"<{address}>; rel=preload; as=style" for address in styles),
        *(f"<{address}>; rel=preload; as=script" for address in scripts),
    ]
    return ", ".join(links)
