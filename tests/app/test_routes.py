"""The routes under the page: commands work, and what must be refused is refused with a sentence that helps."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import signal
import zlib
from typing import Any

import pytest
from starlette.applications import Starlette

from app.live import routes
from app.samples import SAMPLE_PROMPTS
from app.session import Hub, Lab
from tests.app.conftest import wait_for
from tests.app.kit import call

APP = Starlette(routes=routes.routes())


def post(lab: Lab | str, verb: str, headers: dict[str, str] | None = None, **body: Any) -> Any:
    token = lab if isinstance(lab, str) else lab.token
    return call(APP, "POST", f"/lab/api/{verb}", {"lab": token, **body}, headers=headers)


def state(lab: Lab, query: str = "") -> dict[str, Any]:
    return call(APP, "GET", f"/lab/api/state?lab={lab.token}{query}").json


@pytest.fixture
def lab(hub: Hub) -> Lab:
    return hub.enter(None)


def test_a_prompt_is_sent_streams_and_ends(lab: Lab):
    (request,) = post(lab, "send", prompt="hello", max_tokens=5).json["ids"]
    wait_for(lambda: lab.log.num_live == 0)
    found = state(lab, f"&selected={request}")
    assert found["requests"][0]["text"] == "abcde"
    assert found["requests"][0]["state"] == "finished"
    assert [text for text, _, _ in found["focus"]["tokens"]] == list("abcde")
    assert found["tiles"]["latency"][0]["count"] == 1
    assert found["head"]["model"]["title"] == "Scripted model"


def test_four_samples_share_the_engine(lab: Lab):
    assert len(post(lab, "samples", max_tokens=40).json["ids"]) == len(SAMPLE_PROMPTS) == 4
    wait_for(lambda: lab.log.num_live == 0)
    assert any(len(step.scheduled) == 4 for step in lab.log.steps())


def test_pause_step_and_run(lab: Lab):
    state(lab)
    post(lab, "control", action="pause")
    post(lab, "send", prompt="hello", max_tokens=20)
    post(lab, "control", action="step", steps=3)
    wait_for(lambda: lab.log.next_index == 3)
    found = state(lab)
    assert found["head"]["mode"] == "paused"
    assert found["requests"][0]["tokens"] == 3
    post(lab, "control", action="run")
    wait_for(lambda: lab.log.num_live == 0)
    assert state(lab, "&step=1")["requests"][0]["text"] == "ab"


def test_one_request_is_stopped_the_other_goes_on(lab: Lab):
    post(lab, "control", action="pause")
    ids = post(lab, "send", prompt="hello", max_tokens=50, copies=2).json["ids"]
    assert post(lab, "abort", request_id=ids[0]).json["stopped"] == 1
    post(lab, "control", action="step", steps=1)
    wait_for(lambda: lab.log.next_index >= 1)
    states = {row["id"]: row["state"] for row in state(lab)["requests"]}
    assert states[ids[0]] == "finished"
    assert states[ids[1]] != "finished"


def test_new_settings_restart_the_engine_and_show(lab: Lab):
    post(lab, "send", prompt="hello", max_tokens=3)
    wait_for(lambda: lab.log.next_index > 0)
    answer = post(
        lab, "engine", config={"max_num_batched_tokens": 64, "block_size": 8, "num_kv_blocks": 40, "max_model_len": 200}
    )
    assert answer.json["config"]["block_size"] == 8
    wait_for(lambda: lab.log.next_index == 0)
    found = state(lab)
    assert found["head"]["config"]["num_kv_blocks"] == 40
    assert found["pool"]["total"] == 40
    assert found["requests"] == []


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"block_size": 0}, "block_size=0 must be at least 1"),
        ({"max_num_seqs": None}, "max_num_seqs=None must be a whole number"),
        ({"max_num_seqs": 2.5}, "max_num_seqs=2.5 must be a whole number"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 64, "max_model_len": 100},
            "raise max_num_batched_tokens",
        ),
        ({"color": "red"}, "unknown engine setting 'color'"),
        ({"kv_layout": "contiguous", "enable_prefix_caching": True}, "enable_prefix_caching=True can't work"),
        ([1, 2], "config must be an object"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_the_engines_own_words(lab: Lab, config: Any, says: str):
    post(lab, "send", prompt="hello", max_tokens=3)
    answer = post(lab, "engine", config=config)
    assert answer.status == 400
    assert says in answer.json["error"]
    wait_for(lambda: lab.log.num_live == 0)
    assert lab.log.next_index > 0, "the old engine went on"


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"prompt": ""}, 400, "the prompt is empty"),
        ({"prompt": " \n\t "}, 400, "the prompt is empty"),
        ({"prompt": 7}, 400, "the prompt is empty"),
        ({"prompt": "x" * 200_001}, 413, "200,001 characters; the lab takes at most 200,000"),
        ({"prompt": "x" * 5000}, 400, "1024"),
        ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens=0 must be at least 1"),
        ({"prompt": "x", "temperature": -1}, 400, "temperature=-1 must be from 0"),
        ({"prompt": "x", "copies": 65}, 400, "copies=65 must be a whole number from 1 to 64"),
        ({"prompt": "x", "copies": True}, 400, "copies=True"),
    ],
)
def test_bad_prompts_are_refused_with_the_numbers(lab: Lab, body: dict[str, Any], status: int, says: str):
    answer = post(lab, "send", **body)
    assert answer.status == status
    assert says in answer.json["error"]
    assert post(lab, "send", prompt="still there", max_tokens=1).status == 200


def test_control_characters_are_data(lab: Lab):
    assert post(lab, "send", prompt="\x00\x07\u202e<script>", max_tokens=2).status == 200
    wait_for(lambda: lab.log.num_live == 0)
    assert state(lab)["requests"][0]["prompt"] == "\x00\x07\u202e<script>"


def test_a_body_that_is_too_long_is_cut_off(lab: Lab):
    answer = call(APP, "POST", "/lab/api/send", raw=b'{"prompt": "' + b"x" * 1_100_000 + b'"}')
    assert answer.status == 413
    assert "1,000,000 bytes" in answer.json["error"]


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(lab: Lab, raw: bytes):
    answer = call(APP, "POST", "/lab/api/send", raw=raw)
    assert answer.status == 400
    assert "JSON" in answer.json["error"]


@pytest.mark.parametrize("verb", sorted(routes.COMMANDS))
def test_a_token_of_nobody_gets_nothing(hub: Hub, verb: str):
    answer = post("x" * 24, verb, prompt="hello", config={}, action="pause")
    assert answer.status == 403
    assert "reload the page" in answer.json["error"]


@pytest.mark.parametrize("path", ["state", "stream", "token", "vllm"])
def test_reading_needs_the_token_too(hub: Hub, path: str):
    assert call(APP, "GET", f"/lab/api/{path}?viewer=abcdefgh").status == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.test"},
        {"origin": "null"},
        {"origin": "http://lab.test:81"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_another_sites_page_cannot_command(lab: Lab, headers: dict[str, str]):
    answer = post(lab, "send", headers, prompt="hello")
    assert answer.status == 403
    assert post(lab, "send", {"origin": "http://lab.test"}, prompt="hello", max_tokens=1).status == 200


def test_a_form_cannot_command(lab: Lab):
    answer = post(lab, "send", {"content-type": "text/plain"}, prompt="hello")
    assert answer.status == 415


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"action": "jump"}, "run, pause or step"),
        ({"action": "step", "steps": 0}, "from 1 to 1000"),
        ({"action": "run", "rate": 0}, "0.1 to 1000"),
    ],
)
def test_bad_controls(lab: Lab, body: dict[str, Any], says: str):
    answer = post(lab, "control", **body)
    assert (answer.status, says in answer.json["error"]) == (400, True)


def test_unknown_commands_and_files(lab: Lab):
    assert post(lab, "dance").status == 404
    assert call(APP, "GET", "/lab/assets/x/..%2froutes.py").status in (404, 405)
    assert call(APP, "GET", "/lab/assets/x/../routes.py").status in (404, 405)
    assert call(APP, "GET", "/lab/assets/x/nothing.js").status == 404
    answer = call(APP, "GET", f"/lab/assets/{routes.build_tag()}/main.js")
    assert (answer.status, answer.headers["cache-control"]) == (200, "public, max-age=31536000, immutable")


def test_plotly_is_served_compressed_and_is_the_version_that_figures_are_checked_against(hub: Hub):
    from plotly.offline import get_plotlyjs

    packed = call(APP, "GET", routes.plotly_address(), headers={"accept-encoding": "gzip"})
    plain = call(APP, "GET", routes.plotly_address())
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == plain.body
    ours, theirs = (re.search(r"v(\d+\.\d+\.\d+)", text[:300]) for text in (plain.body.decode(), get_plotlyjs()))
    assert ours and theirs and ours[1] == theirs[1]
    assert "immutable" in packed.headers["cache-control"]


def test_before_the_model_is_ready_commands_say_so(sleeping: Hub):
    lab = sleeping.enter(None)
    answer = post(lab, "send", prompt="hello")
    assert answer.status == 503
    assert state(lab)["head"]["open"] is False


def test_a_killed_host_leaves_the_page_and_comes_back(lab: Lab, hub: Hub):
    post(lab, "engine", config={"num_kv_blocks": 33})
    post(lab, "send", prompt="hello", max_tokens=500)
    wait_for(lambda: lab.log.next_index > 2)
    os.kill(hub.client.pid, signal.SIGKILL)
    wait_for(lambda: hub.client.state.state == "stopped")
    found = state(lab)
    assert found["head"]["state"] == "stopped"
    assert found["head"]["error"]
    assert found["requests"][0]["state"] == "finished"
    assert found["clock"]["last"] > 0, "what happened is still there to be looked at"
    refused = post(lab, "send", prompt="hello")
    assert refused.status == 503
    assert "Restart the engine" in refused.json["error"]
    assert post(lab, "restart").status == 200
    hub.client.wait_ready(60)
    assert post(lab, "send", prompt="again", max_tokens=2).status == 200
    assert state(lab)["head"]["config"]["num_kv_blocks"] == 33, "its settings are kept"
    assert post(lab, "restart").status == 409


def test_a_token_tells_its_step_block_and_slot(lab: Lab):
    post(lab, "engine", config={"block_size": 4, "num_kv_blocks": 40, "max_model_len": 100})
    (request,) = post(lab, "send", prompt="123456", max_tokens=6).json["ids"]
    wait_for(lambda: lab.log.num_live == 0)
    prompt = lab.log.request(request).trace.prompt_tokens
    found = call(APP, "GET", f"/lab/api/token?lab={lab.token}&request={request}&index=2").json
    position = prompt + 2
    assert (found["logical"], found["offset"]) == divmod(position, 4)
    assert found["block"] in range(1, 41)
    assert found["itl_ms"] > 0
    last = call(APP, "GET", f"/lab/api/token?lab={lab.token}&request={request}&index=5").json
    assert last["last"] is True
    assert call(APP, "GET", f"/lab/api/token?lab={lab.token}&request={request}&index=99").status == 404
    assert call(APP, "GET", f"/lab/api/token?lab={lab.token}&request={request}&index=x").status == 400


def test_the_vllm_line_has_the_settings(lab: Lab):
    line = call(APP, "GET", f"/lab/api/vllm?lab={lab.token}").json["command"]
    assert "--max-num-batched-tokens 256" in line
    assert "--num-gpu-blocks-override 128" in line


def test_the_stream_sends_only_what_changed_and_ends_with_the_server(lab: Lab):
    async def listen() -> list[dict[str, Any]]:
        viewer = routes.Viewer(routes.Look())
        gone = asyncio.Event()
        heard: list[dict[str, Any]] = []

        async def is_gone() -> bool:
            return gone.is_set()

        async for pieces in routes._events(routes.hub(), lab, viewer, (lab.token, "viewer01"), is_gone):
            chunk = b"".join(pieces)
            if chunk.startswith(b"data: "):
                heard.append(json.loads(chunk[6:]))
                if len(heard) == 1:
                    await asyncio.to_thread(post, lab, "send", prompt="hello", max_tokens=300)
                elif len(heard) == 2:
                    viewer.look = routes.Look(theme="dark")
                    viewer.bell.set()
                elif len(heard) >= 4:
                    routes.end_streams()
        return heard

    heard = asyncio.run(asyncio.wait_for(listen(), 20))
    assert {"head", "pool", "batch", "timeline", "requests", "tables", "tiles", "story"} <= heard[0].keys()
    assert "requests" in heard[1]
    assert "head" not in heard[-1] or heard[-1]["head"] != heard[0]["head"]


def test_viewers_that_look_alike_share_what_is_built(lab: Lab):
    state(lab)
    assert lab.look(routes.Look()) is lab.look(routes.Look())
    assert lab.look(routes.Look(theme="dark")) is not lab.look(routes.Look())


def test_a_class_gets_one_compressed_copy_of_each_section_and_every_stream_can_be_read():
    parts = {"head": b'{"state":"ready"}', "pool": b"[" + b"1," * 5000 + b"1]"}
    later = {"pool": b"[" + b"2," * 5000 + b"2]", "head": parts["head"]}
    events = [[b"retry: 1000\n\n"], *([b"data: ", *routes._pieces(news), b"\n\n"] for news in (parts, later, parts))]

    async def heard(small: bool) -> list[bytes]:
        async def source():
            for event in events:
                yield event

        return [chunk async for chunk in routes._joined(source(), small)]

    plain = asyncio.run(heard(False))
    assert [json.loads(event.removeprefix(b"data: ")) for event in plain[1:]] == [
        {name: json.loads(value) for name, value in news.items()} for news in (parts, later, parts)
    ]
    routes._packed.cache_clear()
    packed = asyncio.run(heard(True))
    before = routes._packed.cache_info()
    assert asyncio.run(heard(True)) == packed
    after = routes._packed.cache_info()
    assert after.misses == before.misses, "the second follower costs no compression"
    unpack = zlib.decompressobj(31)
    assert [unpack.decompress(chunk) for chunk in packed] == [b"", *plain], "each event can be read when it arrives"
    assert sum(map(len, packed)) < sum(map(len, plain)) / 10
