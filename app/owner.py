"""Who owns this machine: its model, its saved runs and its experiments.

Whoever sits at it (the browser calls from the machine itself, by one of its local names), or has opened the owner's
address that the lab prints when it lets a network in. Another account on the same machine counts as its owner too.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Mapping
from typing import Any

import streamlit as st

COOKIE = "inference_lab_owner"
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
PROXIED = ("x-forwarded-for", "forwarded", "x-real-ip")
"""Headers of a proxy: behind one, every browser seems to call from the machine itself."""


class Owner:
    """Tells the owner from guests.

    Args:
        names: host names under which the owner's own browser calls; another name may be a foreign page that had itself
            resolved to this machine.
    """

    def __init__(self, names: frozenset[str] = LOCAL_NAMES) -> None:
        self.names = names
        self.key = secrets.token_urlsafe(18)
        """Opens the owner's pages from elsewhere."""

    def has_key(self, key: str | None) -> bool:
        """Whether a key is the owner's."""
        return key is not None and hmac.compare_digest(key.encode(), self.key.encode())

    def knows(self, address: str | None, headers: Mapping[str, str], cookies: Mapping[str, str]) -> bool:
        """Whether a caller is the owner. ``address``: where it calls from; ``headers`` by small letters."""
        if self.has_key(cookies.get(COOKIE)):
            return True
        if any(name in headers for name in PROXIED):
            return False
        return _is_loopback(address) and host_name(headers.get("host", "")) in self.names


def host_name(host: str) -> str:
    """The name in a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _is_loopback(address: str | None) -> bool:
    try:
        found = ipaddress.ip_address(address or "")
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return bool((mapped or found).is_loopback)


def request_is_owner(owner: Owner, request: Any) -> bool:
    """Whether a request (Starlette's) comes from the owner."""
    return owner.knows(request.client.host if request.client else None, request.headers, request.cookies)


def page_is_owner(owner: Owner) -> bool:
    """Whether the page that runs now is shown to the owner. A page without any browser (in a test) is the owner's."""
    headers = {name.lower(): value for name, value in st.context.headers.items()}
    if not headers:
        return True
    # Streamlit says None for the machine's own browser.
    return owner.knows(st.context.ip_address or "127.0.0.1", headers, st.context.cookies.to_dict())
