"""What the page's own files keep to: data is text, nothing is loaded from elsewhere, colours can be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dispatch.studio

STUDIO = Path(dispatch.studio.__file__).parent
WEB = STUDIO / "web"
SCRIPTS = sorted(WEB.glob("*.js"))
STYLE = (WEB / "studio.css").read_text("utf-8")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_data_is_set_as_text_and_nothing_comes_from_elsewhere(path: Path) -> None:
    text = path.read_text("utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|v-html|document\.write", text)
    assert not re.search(r"(https?:)?//[a-z0-9.-]+\.[a-z]{2,}", text)
    assert not re.search(r"\b(eval|Function)\(|(?<!async )(?<![.\w])fetch\(|window\.fetch|XMLHttpRequest", text)


def test_the_style_loads_nothing() -> None:
    assert "url(" not in STYLE
    assert "@import" not in STYLE


@pytest.mark.parametrize("path", sorted(STUDIO.glob("*.py")), ids=lambda path: path.name)
def test_no_table_is_ever_rebuilt(path: Path) -> None:
    """A grid that is updated as a whole loses scroll and selection; html in cells would let data be markup."""
    assert not re.search(r"grid\.update\(|html_columns|sanitize=False|ui\.html\(", path.read_text("utf-8"))


def tokens(theme: str) -> dict[str, str]:
    found = re.search(rf'html\[data-theme="{theme}"\] \{{(.*?)\}}', STYLE, re.DOTALL)
    assert found is not None
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", found[1]))


def light(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_can_be_read_on_every_surface_it_stands_on(theme: str) -> None:
    colours = tokens(theme)
    for surface in ("bg", "panel", "head", "hover", "sel"):
        for text in ("t1", "t2", "t3", "work-t", "hold-t", "broken-t", "person-t"):
            assert contrast(colours[text], colours[surface]) >= 4.5, (text, surface)
    for tone in ("work", "hold", "broken", "person", "grey"):
        assert contrast(colours[f"{tone}-t"], colours[f"{tone}-b"]) >= 4.5, tone
        assert contrast(colours[tone], colours["panel"]) >= 3.0, tone
