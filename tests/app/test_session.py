"""Labs are private, found again by their token, and bounded in number."""

from __future__ import annotations

import pytest

from app.session import Hub, LabsFull, LabUnknown, Limits, hub, install
from engine.serve.client import EngineClient


def test_a_token_is_unguessable_and_finds_its_lab_again(sleeping: Hub):
    one, other = sleeping.enter(None), sleeping.enter(None)
    assert one.token != other.token
    assert len(one.token) >= 24
    assert sleeping.enter(one.token) is one
    assert sleeping.find(one.token) is one


@pytest.mark.parametrize(
    "token", ["", "short", "x" * 65, "../../etc/passwd", "a b c d e f g h i j", "<script>alert(1)</script>"]
)
def test_a_bad_token_gets_a_new_lab(sleeping: Hub, token: str):
    assert sleeping.enter(token).token != token


def test_a_token_of_an_earlier_server_is_taken_over(sleeping: Hub):
    assert sleeping.enter("a" * 24).token == "a" * 24


def test_unknown_labs_are_told_to_reload(sleeping: Hub):
    with pytest.raises(LabUnknown, match="reload the page"):
        sleeping.find("b" * 24)


def test_the_lab_whose_browser_is_away_longest_makes_room_and_one_in_use_never_does():
    made = Hub(EngineClient("scripted"), Limits(labs=3), alive=lambda session: session == "open tab")
    labs = [made.enter(None, session) for session in ("open tab", "closed tab", "")]
    with pytest.raises(LabsFull, match="All 3 labs of this machine are in use"):
        made.enter(None)
    for lab, away in zip(labs, (900, 300, 100), strict=True):
        lab.seen -= away
    made.enter(None)
    assert made.find(labs[0].token) is labs[0], "its tab is open"
    with pytest.raises(LabUnknown):
        made.find(labs[1].token)
    assert made.find(labs[2].token) is labs[2]


def test_labs_do_not_see_each_other(hub: Hub):
    one, other = hub.enter(None), hub.enter(None)
    assert hub.ensure_open(one)
    assert hub.ensure_open(other)
    hub.client.send(one.token, "secret", params={"max_tokens": 1})
    assert other.log.traces() == []


def test_without_a_launcher_the_page_says_how_to_start():
    install(None)
    with pytest.raises(RuntimeError, match="make lab"):
        hub()


def test_nothing_is_open_before_the_host_is_ready():
    made = Hub(EngineClient("scripted"))
    assert made.ensure_open(made.enter(None)) is False


def test_a_lab_that_waits_for_an_experiment_says_so(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    """Requests stand still while an experiment has the engine; nothing else on the page tells why."""
    lab = hub.enter(None)
    assert hub.ensure_open(lab)
    told = "experiment is being measured"
    monkeypatch.setattr("app.session.measuring", lambda: True)
    assert not any(told in text for text in lab.room()["problems"]), "nobody waits"
    lab.client.control(lab.token, "pause")
    lab.client.send(lab.token, "a prompt", chat=False, params={"max_tokens": 4})
    assert lab.log.wait_until(lambda log: log.num_live == 1, 20)
    assert any(told in text for text in lab.room()["problems"])
    monkeypatch.setattr("app.session.measuring", lambda: False)
    assert not any(told in text for text in lab.room()["problems"])
