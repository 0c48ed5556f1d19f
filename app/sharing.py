"""Addresses under which others reach this machine, and QR codes of links. Nothing is asked of any other machine."""

from __future__ import annotations

import ipaddress
import socket

import psutil
import segno

ANY = ("0.0.0.0", "::", "")


def is_open(host: str) -> bool:
    """Whether listening on ``host`` lets other machines in."""
    if host in ANY:
        return True
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def network_addresses(host: str) -> list[str]:
    """Addresses that others on the network can use, likeliest first."""
    if not is_open(host):
        return []
    if host not in ANY:
        return [host]
    found: list[str] = []
    up = psutil.net_if_stats()
    for name, entries in psutil.net_if_addrs().items():
        if name in up and not up[name].isup:
            continue
        found += [entry.address for entry in entries if entry.family == socket.AF_INET]
    usable = [a for a in found if not ipaddress.ip_address(a).is_loopback and not ipaddress.ip_address(a).is_link_local]
    return sorted(usable, key=lambda a: (not ipaddress.ip_address(a).is_private, a.startswith("172."), a))


def opened_words(port: int) -> str:
    """What letting a network in means, for the person who did it."""
    return (
        f"Everyone who reaches this machine on port {port} can open a lab of their own on it, send prompts, and use its "
        "processor and memory within the quotas. They can't change the model, and they don't see your saved runs, your "
        "lab or each other's. The connection is not encrypted: use a network that you trust."
    )


def qr(text: str) -> str:
    """A QR code of a text as an SVG data address."""
    return str(segno.make(text, error="m", micro=False).svg_data_uri(scale=4, border=3, dark="#000", light="#fff"))
