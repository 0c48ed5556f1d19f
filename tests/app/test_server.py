"""Letting a network in: what it opens is said, and nothing is asked of a machine outside."""

from __future__ import annotations

import pytest

from app import server, sharing
from app.session import Hub, Limits


@pytest.mark.parametrize(
    ("host", "opens"),
    [
        ("127.0.0.1", False), ("localhost", False), ("::1", False),
        ("0.0.0.0", True), ("::", True), ("192.168.1.4", True), ("teacher.local", True),
    ],
)  # fmt: skip
def test_what_lets_others_in(host: str, opens: bool):
    assert sharing.is_open(host) is opens


def test_a_lab_for_this_machine_alone_has_nothing_to_say(sleeping: Hub):
    assert server.network_words(sleeping, "127.0.0.1", 8501) == ""
    assert sharing.network_addresses("127.0.0.1") == []


def test_an_open_lab_says_where_what_that_opens_and_who_owns_it(sleeping: Hub):
    words = server.network_words(sleeping, "192.168.1.4", 8501)
    assert "http://192.168.1.4:8501" in words
    assert "can open a lab of their own" in words
    assert "can't change the model" in words
    assert "not encrypted" in words
    assert f"http://192.168.1.4:8501/lab/owner?key={sleeping.owner.key}" in words


def test_addresses_of_the_network_are_no_loopback_ones():
    assert not [address for address in sharing.network_addresses("0.0.0.0") if address.startswith(("127.", "169.254."))]


def test_streamlit_asks_nobody_for_this_machines_address(monkeypatch: pytest.MonkeyPatch):
    from streamlit import net_util
    from streamlit.web.server import server_util

    monkeypatch.setattr(net_util, "get_external_ip", net_util.get_external_ip)

    def asked(*args: object, **kwargs: object) -> None:
        raise AssertionError("a request to the outside")

    monkeypatch.setattr(net_util, "_make_blocking_http_get", asked)
    server.stay_inside()
    assert server_util.is_url_from_allowed_origins("http://stranger.example") is False


@pytest.mark.parametrize(("name", "text"), [("LABS", "none"), ("LABS", "0"), ("GRACE", "-3"), ("GRACE", "1e99")])
def test_limits_from_the_environment_are_checked(monkeypatch: pytest.MonkeyPatch, name: str, text: str):
    monkeypatch.setenv(f"INFERENCE_LAB_{name}", text)
    with pytest.raises(ValueError, match=f"INFERENCE_LAB_{name}='{text}' must be a number from"):
        Limits.from_environment()


def test_limits_can_be_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("INFERENCE_LAB_LABS", "5")
    monkeypatch.setenv("INFERENCE_LAB_GRACE", "30")
    assert (Limits.from_environment().labs, Limits.from_environment().grace) == (5, 30.0)
