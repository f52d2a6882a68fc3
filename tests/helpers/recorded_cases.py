"""The numbers of the frameworks in tests/recorded, and the comparison that each belongs to."""

from __future__ import annotations

import json
from functools import cache

from conformance import release
from conformance.environments import PEERS
from conformance.peers import functions
from conformance.record import RECORDED


@cache
def recorded(peer):
    return json.loads((RECORDED / f"{peer}.json").read_text())


@cache
def entries(peer):
    """The comparisons of a framework by name and release:
    one name may mean another comparison at another release.
    """
    release.set_current(PEERS[peer].release)
    return functions(PEERS[peer])


def entry(peer, name, version):
    return next(
        f for f in entries(peer) if f.name == name and (f.releases is None or version in f.releases)
    )


NAMES = [
    (peer, name)
    for peer in PEERS
    if (RECORDED / f"{peer}.json").is_file()
    for name in recorded(peer)
]
