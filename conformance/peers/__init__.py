"""One module for each part of a framework; each defines FUNCTIONS,
and imports the framework only inside its calls.
"""

from __future__ import annotations

import importlib

from conformance.environments import Peer
from conformance.suite import Function


def functions(peer: Peer) -> list[Function]:
    """Everything that is compared with this framework, at any release."""
    return [
        function
        for module in peer.modules
        for function in importlib.import_module(f"conformance.peers.{module}").FUNCTIONS
    ]
