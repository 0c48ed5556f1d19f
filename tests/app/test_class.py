"""Many people on one machine: who may what, what a session may take, and what is left when its browser is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from starlette.applications import Starlette

from app.live import routes
from app.owner import COOKIE, LOCAL_NAMES, Owner
from app.scenes import catalogue, own_folder
from app.session import Hub, Lab, LabUnknown, Limits, install, public_name
from engine.serve.client import EngineClient
from engine.serve.protocol import HostOptions
from engine.workload.claims import Run, judge
from tests.app.conftest import wait_for
from tests.app.kit import call

APP = Starlette(routes=routes.routes())
READERS = ("state", "stream", "token", "vllm")
TRAFFIC = {"arrivals": {"rate": 50.0}, "prompt": {"tokens": 8}, "output": {"tokens": 4}, "stop": {"requests": 10}}


def post(lab: Lab | str, verb: str, *, headers: dict[str, str] | None = None, client: str = "127.0.0.1", **body: Any) -> Any:
    token = lab if isinstance(lab, str) else lab.token
    return call(APP, "POST", f"/lab/api/{verb}", {"lab": token, **body}, headers=headers, client=client)


def state(lab: Lab | str, **kwargs: Any) -> Any:
    token = lab if isinstance(lab, str) else lab.token
    return call(APP, "GET", f"/lab/api/state?lab={token}", **kwargs)


@pytest.fixture
def lab(hub: Hub) -> Lab:
    return hub.enter(None)


# -- traffic and scenes -------------------------------------------------------------------------------------------------


def test_traffic_runs_and_offered_and_achieved_stand_apart(lab: Lab):
    assert post(lab, "traffic", spec=TRAFFIC).status == 200
    wait_for(lambda: lab.log.traffic is not None and lab.log.traffic.completed == 10)
    room = state(lab).json["room"]
    assert room["traffic"]["ended"] is True
    assert room["traffic"]["due"] == 10
    assert room["traffic"]["offered_rate"] != room["traffic"]["achieved_rate"]
    assert room["workload"]["arrivals"]["rate"] == 50.0
    assert "traffic=" in room["link"]


def test_the_rate_changes_while_it_runs_and_it_can_be_stopped(lab: Lab):
    slow = {**TRAFFIC, "arrivals": {"process": "constant", "rate": 0.5}, "stop": {"seconds": 60}}
    assert post(lab, "traffic", spec=slow).status == 200
    assert post(lab, "rate", rate=100).status == 200
    wait_for(lambda: lab.log.traffic is not None and lab.log.traffic.due > 10)
    assert post(lab, "stop").status == 200
    wait_for(lambda: lab.log.traffic.ended and lab.log.traffic.in_flight == 0)
    for wrong in (0, -1, "fast", None, True, 1e9):
        assert post(lab, "rate", rate=wrong).status == 400


@pytest.mark.parametrize(
    ("change", "says", "field"),
    [
        ({"arrivals": {"rate": 0}}, "rate=0.0 must be a number", "arrivals"),
        ({"arrivals": {"process": "wavy"}}, "process='wavy'|Invalid enum value 'wavy'", "arrivals"),
        ({"prompt": {"tokens": None}}, "Expected `int`", "prompt.tokens"),
        ({"output": {"distribution": "uniform", "low": 9, "high": 3}}, "low=9 is more than high=3", "output"),
        ({"stop": {}}, "stop is empty", ""),
        ({"prompt": {"tokens": 2000}}, "max_model_len=1,024", None),
        ({"stop": {"seconds": 7200}}, "at most 3,600", None),
        ({"output": {"tokens": 4000}}, "at most 2,048", None),
        ({"nonsense": 1}, "nonsense", ""),
    ],
)
def test_bad_traffic_is_refused_by_field(lab: Lab, change: dict[str, Any], says: str, field: str | None):
    answer = post(lab, "traffic", spec={**TRAFFIC, **change})
    assert answer.status == 400
    assert any(part in answer.json["error"] for part in says.split("|")), answer.json
    if field is not None:
        assert answer.json["field"].startswith(field)
    assert post(lab, "traffic", spec="nonsense").status == 400


@pytest.mark.parametrize("scene", catalogue().scenes, ids=lambda scene: scene.id)
def test_a_scene_started_from_the_page_shows_what_it_claims(lab: Lab, scene: Any):
    assert post(lab, "scene", id=scene.id).json["id"] == scene.id
    wait_for(lambda: lab.log.traffic is not None and lab.log.traffic.ended and lab.log.traffic.in_flight == 0, 30)
    run = Run(lab.log.traces(), lab.log.steps())
    for claim in scene.shows:
        outcome = judge(claim, run)
        assert outcome.holds, outcome.text
    room = state(lab).json["room"]
    assert room["scene"]["look"] == scene.look
    assert room["link"] == f"scene={scene.id}"


def test_a_teachers_own_scene_is_listed_and_a_broken_one_says_why(lab: Lab, tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("INFERENCE_LAB_DATA", str(tmp_path))
    own_folder().mkdir()
    text = "\n".join([
        "id: mine", "title: Mine", "look: Look here. And there.", "workload:", "  arrivals: {unit: steps}",
        "  requests: [{prompt_tokens: 5}]",
    ])  # fmt: skip
    (own_folder() / "mine.yaml").write_text(text)
    (own_folder() / "broken.yaml").write_text(text.replace("id: mine", "id: broken").replace("prompt_tokens: 5", "promt: 5"))
    found = call(APP, "GET", "/lab/api/scenes").json
    assert "mine" in [scene["id"] for scene in found["scenes"]]
    assert len(found["problems"]) == 1
    assert "broken.yaml, line" in found["problems"][0]
    assert "promt" in found["problems"][0]
    assert post(lab, "scene", id="mine").status == 200
    assert post(lab, "scene", id="broken").status == 404
    (own_folder() / "broken.yaml").unlink()
    assert call(APP, "GET", "/lab/api/scenes").json["problems"] == []


def test_what_a_link_brought_is_started_as_it_is(hub: Hub):
    lab = hub.enter(None)
    lab.set_up({"scene": "small-pool"})
    room = state(lab).json["room"]
    assert room["prepared"] is True
    assert state(lab).json["pool"]["total"] == 24
    assert post(lab, "traffic", spec=room["workload"]).status == 200
    after = state(lab).json["room"]
    assert after["scene"]["id"] == "small-pool"
    assert after["prepared"] is False


# -- followers ----------------------------------------------------------------------------------------------------------


def test_a_follower_sees_the_lab_at_a_step_of_their_own_and_never_its_token(lab: Lab, hub: Hub):
    post(lab, "send", prompt="hello", max_tokens=10)
    wait_for(lambda: lab.log.num_live == 0 and lab.log.next_index == 10)
    name = "follow:" + hub.share(lab)
    now = state(name)
    assert now.json["requests"][0]["text"] == "abcdefghij"
    past = call(APP, "GET", f"/lab/api/state?lab={name}&step=2")
    assert past.json["requests"][0]["text"] == "abc"
    assert past.json["clock"] == {**past.json["clock"], "cursor": 2, "last": 9}
    for answer in (now, past, post(lab, "share", origin="http://lab.test")):
        assert lab.token not in answer.body.decode()
    assert hub.share(lab) not in (lab.token, "")


@pytest.mark.parametrize("verb", sorted(set(routes.COMMANDS) - {"view"}))
def test_a_follower_changes_nothing_however_they_ask(lab: Lab, hub: Hub, verb: str):
    hub.ensure_open(lab)
    follow = hub.share(lab)
    everything = {
        "prompt": "x", "config": {"num_kv_blocks": 1}, "action": "pause", "spec": TRAFFIC, "rate": 5, "id": "burst",
        "on": False, "model": "tiny", "request_id": None,
    }  # fmt: skip
    before = (lab.log.generation, lab.log.next_index, lab.config, lab.follow)
    for name in (
        "follow:" + follow,
        follow,
        "follow:" + lab.token,
        f"follow:follow:{follow}",
        f"run:{follow}",
        lab.token + " ",
    ):
        answer = post(name, verb, **everything)
        assert answer.status == 403, (name, answer.json)
    assert state("follow:" + follow).json["head"]["mode"] == "running"
    assert (lab.log.generation, lab.log.next_index, lab.config, lab.follow) == before
    assert lab.log.traffic is None


def test_a_follower_moves_no_cursor_but_their_own(lab: Lab, hub: Hub):
    name = "follow:" + hub.share(lab)
    mine = routes.Viewer(routes.Look(), lab)
    theirs = routes.Viewer(routes.Look(), lab, follows=True)
    routes._viewers[(lab.token, "presenter")] = mine
    routes._viewers[(name, "follower1")] = theirs
    try:
        assert post(name, "view", viewer="presenter", step=3).status == 404
        assert post(name, "view", viewer="follower1", step=3).status == 200
        assert (mine.look.step, theirs.look.step, lab.driven) == (None, 3, None)
        projector = routes.Viewer(routes.Look(theme="dark"), lab, mirror=True)
        assert post(lab, "view", viewer="presenter", step=7, selected="x").status == 200
        assert (projector.shown.step, projector.shown.selected, projector.shown.theme) == (7, "x", "dark")
        assert theirs.look.step == 3
    finally:
        routes._viewers.clear()


def test_a_follow_link_ends_when_sharing_ends(lab: Lab, hub: Hub):
    first = hub.share(lab)
    assert hub.share(lab) == first
    assert post(lab, "share", on=False).status == 200
    answer = state("follow:" + first)
    assert answer.status == 403
    assert "ask the presenter" in answer.json["error"]
    assert hub.share(lab) != first


def test_sharing_says_whether_others_can_reach_it_and_draws_a_code(lab: Lab, hub: Hub):
    found = post(lab, "share", origin="http://localhost:8501").json
    assert found["open"] is False
    assert found["address"] == f"http://localhost:8501/?follow={lab.follow}"
    assert found["qr"].startswith("data:image/svg+xml")
    hub.listens = ("0.0.0.0", 8501)
    found = post(lab, "share", origin="http://localhost:8501").json
    if found["addresses"]:
        assert found["address"].startswith(f"http://{found['addresses'][0]}:8501/?follow=")
        assert "not encrypted" in found["words"]
    assert post(lab, "share", origin="http://10.1.2.3:8501").json["address"].startswith("http://10.1.2.3:8501/")
    evil = post(lab, "share", origin="javascript:alert(1)//").json["address"]
    assert "javascript" not in evil


# -- the owner ----------------------------------------------------------------------------------------------------------


def test_only_the_owner_changes_the_model_and_reads_saved_runs(lab: Lab, hub: Hub):
    key = hub.owner.key
    strangers = [
        {"client": "192.168.1.7"},
        {"client": "192.168.1.7", "headers": {"cookie": f"{COOKIE}=guess"}},
        {"headers": {"x-forwarded-for": "192.168.1.7"}},
        {"headers": {"host": "evil.test"}},
    ]
    for stranger in strangers:
        answer = post(lab, "model", model="tiny", **stranger)
        assert answer.status == 403, stranger
        assert "owner" in answer.json["error"]
        assert state("run:anything", **stranger).status == 403
    assert "saved run" in state("run:nothing").json["error"], "the owner is told that there is no such run"
    assert call(APP, "GET", "/lab/owner?key=guess", client="192.168.1.7").status == 403
    entered = call(APP, "GET", f"/lab/owner?key={key}", client="192.168.1.7")
    assert (entered.status, "HttpOnly" in entered.headers["set-cookie"]) == (303, True)
    answer = post(lab, "model", model="", client="192.168.1.7", headers={"cookie": f"{COOKIE}={key}"})
    assert (answer.status, "name a model" in answer.json["error"]) == (400, True)
    assert hub.client.state.state == "ready"


@pytest.mark.parametrize(
    ("address", "host", "owns"),
    [
        ("127.0.0.1", "localhost:8501", True),
        ("127.0.0.1", "127.0.0.1:8501", True),
        ("::1", "[::1]:8501", True),
        ("::ffff:127.0.0.1", "localhost", True),
        ("127.0.0.1", "rebound.example:8501", False),
        ("192.168.1.4", "localhost:8501", False),
        ("", "localhost", False),
        (None, "localhost", False),
    ],
)
def test_who_is_the_owner(address: str | None, host: str, owns: bool):
    assert Owner().knows(address, {"host": host}, {}) is owns


@pytest.mark.parametrize(
    "body", [{"model": 7}, {"model": "x" * 501}, {"model": "tiny", "dtype": "int3"}, {"model": "a", "device": "rm -rf"}]
)
def test_a_bad_model_is_refused(lab: Lab, body: dict[str, Any]):
    assert post(lab, "model", **body).status == 400


@pytest.fixture
def own_hub() -> Iterator[Hub]:
    """A hub with a host of its own, whose model may be changed."""
    with EngineClient("scripted:seconds=0.001,kv_bytes=1024", options=HostOptions(kv_quota_bytes=12 * 2**20)) as client:
        client.wait_ready(60)
        made = Hub(client, Limits(grace=60.0), Owner(LOCAL_NAMES | {"lab.test"}), alive=lambda session: session == "alive")
        install(made)
        routes.allow_streams()
        yield made
        install(None)


def test_the_owner_changes_the_model_and_others_are_told_and_keep_their_settings(own_hub: Hub):
    owners, learners = own_hub.enter(None), own_hub.enter(None)
    for lab in (owners, learners):
        assert post(lab, "engine", config={"num_kv_blocks": 77}).status == 200
    post(learners, "send", prompt="hello", max_tokens=2000)
    assert post(owners, "model", model="scripted:load=0.2").status == 200
    wait_for(lambda: own_hub.client.state.state == "ready" and own_hub.client.state.model.name == "scripted:load=0.2")
    found = state(learners).json
    assert "changed the model to scripted:load=0.2" in found["room"]["notice"]
    assert (found["head"]["open"], found["head"]["config"]["num_kv_blocks"]) == (True, 77)
    assert state(owners).json["room"]["notice"] == ""
    assert post(learners, "send", prompt="again", max_tokens=2).status == 200
    assert post(owners, "model", model="scripted:nonsense=1").status == 200
    wait_for(lambda: own_hub.client.state.state == "failed")
    assert "scripted" in state(learners).json["head"]["error"]
    assert post(owners, "model", model="scripted").status == 200
    wait_for(lambda: own_hub.client.state.state == "ready")
    assert post(learners, "send", prompt="once more", max_tokens=2).status == 200


def test_settings_that_do_not_fit_any_more_can_be_changed_from_the_page(own_hub: Hub):
    lab = own_hub.enter(None)
    lab.config = lab.config.replace(num_kv_blocks=2000)
    found = state(lab).json
    assert "Set num_kv_blocks to at most" in found["trouble"]
    assert found["head"]["open"] is False
    assert post(lab, "send", prompt="x").status == 400
    assert post(lab, "engine", config={"num_kv_blocks": 64}).status == 200
    assert state(lab).json["head"]["open"] is True


# -- quotas -------------------------------------------------------------------------------------------------------------


def test_what_a_session_may_take_is_told_in_plain_words(lab: Lab, hub: Hub):
    answers = {
        "max_tokens": post(lab, "send", prompt="x", max_tokens=2049),
        "copies": post(lab, "send", prompt="x", copies=65),
        "max_num_queued_requests": post(lab, "engine", config={"max_num_queued_requests": 100_000}),
    }
    for name, answer in answers.items():
        assert answer.status == 400
        assert name in answer.json["error"]
    post(lab, "control", action="pause")
    for _ in range(4):
        assert post(lab, "send", prompt="x", copies=64).status == 200
    refused = post(lab, "send", prompt="x")
    assert refused.status == 400
    assert "max_num_queued_requests=256" in refused.json["error"]
    assert lab.log.num_live == 256


def test_kv_memory_is_bounded_over_all_sessions(own_hub: Hub):
    labs = [own_hub.enter(None) for _ in range(8)]
    opened = [state(lab).json for lab in labs]
    refused = [found for found in opened if not found["head"]["open"]]
    assert 0 < len(refused) < 8
    for found in refused:
        assert "all pools together may take 12.0 MiB" in found["trouble"]
    own_hub.release(labs[0])
    assert state(labs[[f["head"]["open"] for f in opened].index(False)]).json["head"]["open"] is True


def test_twenty_sessions_at_once_load_the_model_once_and_share_nothing(hub: Hub):
    said: list[Any] = []
    hub.client.on_change.append(lambda state: said.append(state.state))
    labs = [hub.enter(None) for _ in range(20)]
    problems: list[BaseException] = []

    def learner(number: int, lab: Lab) -> None:
        try:
            assert post(lab, "engine", config={"num_kv_blocks": 100 + number, "block_size": 8}).status == 200
            assert post(lab, "send", prompt=f"the secret of number {number:02}", max_tokens=3 + number).status == 200
            assert post(lab, "traffic", spec={**TRAFFIC, "seed": number}).status == 200
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=learner, args=pair) for pair in enumerate(labs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hub.client.on_change.clear()
    assert problems == []
    assert said == [], "no model was loaded anew"
    wait_for(lambda: all(lab.log.num_live == 0 and lab.log.traffic.ended for lab in labs), 30)
    for number, lab in enumerate(labs):
        answer = state(lab)
        body, found = answer.body.decode(), answer.json
        assert found["head"]["config"]["num_kv_blocks"] == 100 + number
        assert found["room"]["workload"].get("seed", 0) == number
        assert f"the secret of number {number:02}" in body
        others = [f"the secret of number {other:02}" for other in range(20) if other != number]
        assert not [secret for secret in others if secret in body]
        assert not [other.token for other in labs if other.token in body]
        assert found["requests"][0]["tokens"] >= 3
    hits = [trace.cached_tokens for lab in labs for trace in lab.log.traces() if trace.number == 0]
    assert hits == [0] * 20, "the first prompt of a lab finds nothing of another lab's cache"
    assert any(step.wait_time > 0 for lab in labs for step in lab.log.steps()), "labs take turns, and the wait is told"
    assert max(state(lab).json["room"]["waited"] for lab in labs) > 0


# -- reload, and the end ------------------------------------------------------------------------------------------------


def test_a_reload_within_the_grace_time_finds_the_lab_and_after_it_a_new_one_set_up_the_same(own_hub: Hub):
    lab = own_hub.enter(None, "tab that closes")
    query = {"engine": "num_kv_blocks:50,max_model_len:512"}
    lab.set_up(query)
    post(lab, "send", prompt="hello", max_tokens=3)
    wait_for(lambda: lab.log.num_live == 0)
    assert own_hub.reap(time.monotonic() + 59) == []
    assert own_hub.enter(lab.token) is lab
    assert own_hub.reap(time.monotonic() + 61) == [lab.token]
    with pytest.raises(LabUnknown):
        own_hub.find(lab.token)
    assert state(lab).status == 403
    again = own_hub.enter(lab.token)
    again.set_up(query)
    assert again is not lab
    found = state(again).json
    assert (found["head"]["config"]["num_kv_blocks"], found["requests"]) == (50, [])


def test_an_open_tab_keeps_its_lab_and_a_stream_too(own_hub: Hub):
    kept = own_hub.enter(None, "alive")
    watched = own_hub.enter(None)
    watched.viewers = 1
    followed = own_hub.enter(None)
    followed.followers = 3
    assert own_hub.reap(time.monotonic() + 1000) == [followed.token], "followers keep no lab"
    assert own_hub.reap(time.monotonic() + 100_000) == []
    assert set(own_hub.tokens()) == {kept.token, watched.token}


def test_a_lab_that_comes_back_while_it_is_being_closed_is_a_new_one(own_hub: Hub):
    lab = own_hub.enter("t" * 24)
    state(lab)
    post(lab, "send", prompt="old secret", max_tokens=2000)
    left = own_hub._detach(lab)
    again = own_hub.enter("t" * 24)
    assert again is not lab
    assert again.log is not lab.log
    closing = threading.Thread(target=own_hub._close, args=(lab, left))
    closing.start()
    found = state(again).json
    closing.join()
    assert found["head"]["open"] is True
    assert "old secret" not in str(found)
    assert post(again, "send", prompt="new", max_tokens=2).status == 200
    wait_for(lambda: again.log.num_live == 0)


def _busy_round(hub: Hub) -> None:
    """A tab that is closed in the middle of everything: streaming, traffic, a pause, new settings."""
    labs = [hub.enter(None, "gone") for _ in range(6)]
    for number, lab in enumerate(labs):
        state(lab)
        post(lab, "send", prompt="a long story " * 20, max_tokens=700, copies=8)
        if number % 3 == 0:
            post(lab, "traffic", spec={**TRAFFIC, "stop": {"seconds": 600}})
        elif number % 3 == 1:
            post(lab, "control", action="pause")
        else:
            post(lab, "engine", config={"num_kv_blocks": 90})
            post(lab, "send", prompt="another story", max_tokens=500, copies=4)
        hub.share(lab)
    wait_for(lambda: sum(lab.log.next_index for lab in labs) > 600, 30)
    assert len(hub.reap(time.monotonic() + 61)) == 6


def test_nothing_stays_behind_when_tabs_close_in_the_middle_of_everything(own_hub: Hub):
    host, here = psutil.Process(own_hub.client.pid), psutil.Process()
    memory: list[tuple[int, int]] = []
    threads = []
    for _ in range(5):
        _busy_round(own_hub)
        memory.append((host.memory_info().rss, here.memory_info().rss))
        threads.append(threading.active_count())
    assert own_hub.tokens() == ()
    assert own_hub._followed == {}
    assert own_hub._leaving == {}
    assert own_hub.client._logs == {}
    assert threads[4] <= threads[1]
    for second, fifth in zip(memory[1], memory[4], strict=True):
        assert fifth <= 1.1 * second, f"memory grows: {memory}"
    lab = own_hub.enter(None)
    assert state(lab).json["head"]["open"] is True


def test_a_released_lab_leaves_no_recording(tmp_path: Any):
    with EngineClient("scripted", recordings=tmp_path / "recordings") as client:
        client.wait_ready(60)
        made = Hub(client, Limits(grace=1.0), alive=lambda session: False)
        install(made)
        lab = made.enter(None)
        post(lab, "send", prompt="hello", max_tokens=50)
        wait_for(lambda: lab.log.num_live == 0)
        assert len(list((tmp_path / "recordings").iterdir())) == 1
        assert made.reap(time.monotonic() + 2) == [lab.token]
        assert list((tmp_path / "recordings").iterdir()) == []
        install(None)


def test_the_reaper_works_by_itself_and_ends(tmp_path: Any):
    made = Hub(EngineClient("scripted"), Limits(grace=0.2), alive=lambda session: False)
    lab = made.enter(None)
    thread = made.start_reaping()
    wait_for(lambda: made.tokens() == ())
    with pytest.raises(LabUnknown):
        made.find(lab.token)
    made.end()
    thread.join(5)
    assert not thread.is_alive()


def test_commands_beyond_what_one_page_may_have_waiting_are_refused(lab: Lab):
    lab.commands = lab.limits.in_flight
    answer = post(lab, "send", prompt="x")
    assert (answer.status, "wait for the engine already" in answer.json["error"]) == (429, True)
    lab.commands = 0
    assert post(lab, "send", prompt="x", max_tokens=1).status == 200
    assert lab.commands == 0


def test_more_pages_than_one_lab_is_shown_to_are_refused(lab: Lab):
    for number in range(lab.limits.viewers):
        routes._viewers[(lab.token, f"viewer{number:04}")] = routes.Viewer(routes.Look(), lab)
    try:
        answer = call(APP, "GET", f"/lab/api/stream?lab={lab.token}&viewer=onemore1")
        assert (answer.status, "120 pages look at this lab already" in answer.json["error"]) == (503, True)
    finally:
        routes._viewers.clear()


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        ("smollm2", "smollm2"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("/mnt/disk/secret/model", "model"),
        ("~/m.gguf", "m.gguf"),
    ],
)
def test_learners_do_not_see_the_owners_folders(model: str, shown: str):
    assert public_name(model) == shown
