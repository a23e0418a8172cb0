"""The one element of every page: all that is seen is drawn by the modules in `web/`, from what they are told."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nicegui import ui
from nicegui.dependencies import register_esm
from nicegui.events import GenericEventArguments

WEB = Path(__file__).with_name("web")
_MODULE = "fabric-studio"


def _fingerprint() -> float:
    """Return a number that changes with the modules: browsers keep what they loaded under it for a year."""
    digest = hashlib.sha256()
    for path in sorted(WEB.glob("*.*")):
        digest.update(path.name.encode() + path.read_bytes())
    return float(int(digest.hexdigest()[:12], 16))


register_esm(_MODULE, WEB, max_time=_fingerprint())

STYLE = (WEB / "studio.css").read_text("utf-8")

HEAD = """
<script>
  (() => {
    let chosen = null;
    try { chosen = localStorage.getItem("fd-theme"); } catch { /* storage may be forbidden */ }
    const dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = dark ? "dark" : "light";
  })();
</script>
"""
"""Before anything is painted, so that a dark page never flashes white."""


class Stage(ui.element, component="stage.js"):
    """Shows one group. `asked` is called with whatever a page asks for."""

    def __init__(self, props: dict[str, Any], asked: Callable[[GenericEventArguments], Any]) -> None:
        super().__init__()
        self.props.update(props)
        self.on("ask", asked)
