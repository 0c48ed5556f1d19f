"""Streamlit's files come from memory, the page announces what it will need, and no answer waits for an acknowledgement."""

from __future__ import annotations

import gzip
import re
import socket
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from streamlit.file_util import get_static_dir

from app import server
from app.files import KeptFiles, announcement
from app.live.routes import STATIC, announced, build_tag, plotly_address
from tests.app.kit import call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "js").mkdir()
    (tmp_path / "js" / "index.AbC-1_z9.js").write_text("let one = 1;\n" * 100)
    (tmp_path / "js" / "plain.js").write_text("no hash in the name")
    (tmp_path / "secret.AbCdEf12.js").write_text("not for everybody")
    return tmp_path


@pytest.fixture
def app(folder: Path) -> Starlette:
    rest = Route("/{path:path}", lambda request: PlainTextResponse("the app itself"), methods=["GET", "HEAD", "POST"])
    return Starlette(
        routes=[rest], middleware=[Middleware(KeptFiles, folder=folder, announced="</x.js>; rel=modulepreload")]
    )


def test_a_kept_file_is_read_once_and_compressed_for_those_who_take_it(app: Starlette, folder: Path):
    path = "/static/js/index.AbC-1_z9.js"
    packed = call(app, "GET", path, headers={"accept-encoding": "gzip, br"})
    assert gzip.decompress(packed.body) == (folder / path.removeprefix("/static/")).read_bytes()
    assert (packed.headers["content-encoding"], packed.headers["vary"]) == ("gzip", "Accept-Encoding")
    assert packed.headers["content-type"] == "text/javascript"
    (folder / "js" / "index.AbC-1_z9.js").unlink()
    plain = call(app, "GET", path)
    assert plain.body == b"let one = 1;\n" * 100
    assert "content-encoding" not in plain.headers
    assert "immutable" in plain.headers["cache-control"]


@pytest.mark.parametrize(
    "path",
    [
        "/static/js/plain.js", "/static/js/absent.AbCdEf12.js",
        "/static/../secret.AbCdEf12.js", "/static/js/../secret.AbCdEf12.js",
        "/static/secret.AbCdEf12.js", "/static/js/", "/lab/api/state",
    ],
)  # fmt: skip
def test_everything_else_is_the_apps_own_business(app: Starlette, path: str):
    assert call(app, "GET", path).body == b"the app itself"
    assert call(app, "POST", "/static/js/index.AbC-1_z9.js").body == b"the app itself"


def test_the_front_page_alone_announces_files(app: Starlette):
    assert call(app, "GET", "/").headers["link"] == "</x.js>; rel=modulepreload"
    assert "link" not in call(app, "GET", "/lessons").headers


def test_what_is_announced_is_there():
    assert announcement(["/a.js"], ["/b.css"], ["/c.js"]) == (
        "</a.js>; rel=modulepreload, </b.css>; rel=preload; as=style, </c.js>; rel=preload; as=script"
    )
    addresses = re.findall(r"<([^>]+)>", announced())
    base = f"/lab/assets/{build_tag()}/"
    assert set(addresses) == {plotly_address(), base + "live.css", *(base + path.name for path in STATIC.glob("*.js"))}


def test_streamlits_files_are_where_we_look_and_named_as_we_think():
    page = (Path(get_static_dir()) / "index.html").read_text()
    named = re.findall(r'"\./static/((?:js|css)/[^"]+)"', page)
    assert len(named) > 10
    kept = KeptFiles(None, Path(get_static_dir()) / "static")
    for name in named:
        kept._keep(name)
    assert set(kept._files) == set(named)


def test_connections_do_not_wait_for_acknowledgements():
    from streamlit.web.server.starlette import starlette_server

    server.answer_at_once()
    server.answer_at_once()
    with (
        starlette_server._bind_socket("127.0.0.1", 0, 5) as listening,
        socket.create_connection(listening.getsockname()),
    ):
        listening.setblocking(True)
        connection, _ = listening.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
