"""What a page that opens offline needs: its styles and scripts, and a policy that names them."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files


def asset(package: str, name: str) -> str:
    """The text of a file in the folder `assets` of a package."""
    return (files(package) / "assets" / name).read_text(encoding="utf-8")


def content_policy(style: str, script: str, live: int = 0) -> str:
    """A content policy that allows this style, this script, the page's pictures, and no request but
    that of a live page to its own server.
    """
    allowed = {
        "script-src": f"'{_digest(script)}'",
        "style-src": f"'{_digest(style)}'",
        "img-src": "data:",
    } | ({"connect-src": "'self'"} if live else {})
    rules = [
        "default-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        *(f"{name} {value}" for name, value in allowed.items()),
    ]
    return "; ".join(rules)


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
