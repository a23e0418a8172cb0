"""Config documents as files."""

from __future__ import annotations

from pathlib import Path

import pytest

from dispatch.config import default_document, load_document
from dispatch.errors import ConfigurationError

POOLS = [{"pool_id": "a", "quantum": 2}]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", "policy: drr\npools:\n  - {pool_id: a, quantum: 2}\n"),
        ("c.yml", "policy: drr\npools: [{pool_id: a, quantum: 2}]\n"),
        ("c.toml", 'policy = "drr"\n[[pools]]\npool_id = "a"\nquantum = 2\n'),
        ("c.JSON", '{"policy": "drr", "pools": [{"pool_id": "a", "quantum": 2}]}'),
    ],
)
def test_all_formats_read_the_same(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert load_document(tmp_path / name) == {"policy": "drr", "pools": POOLS}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("c.yaml", "a: 1\nb: [1,\nc: 2\n", r"line 4, column 1: expected"),
        ("c.yaml", "a: 1\nb: 2\na: 3\n", "line 3, column 1: the key 'a' stands twice"),
        ("c.yaml", "pools:\n  - {q: 1, q: 2}\n", "line 2, column 12: the key 'q' stands twice"),
        ("c.yaml", "a: !!python/object/apply:os.getcwd []\n", "line 1, column 4"),
        ("c.toml", "a = 1\nb = \n", "at line 2, column 5"),
        ("c.json", '{"a": 1,\n "b": }', "line 2, column 7"),
        ("c.json", '{"a": 1, "a": 2}', "the key 'a' stands twice"),
        ("c.yaml", "- 1\n", "a mapping of names to values is expected at the top, found a list"),
        ("c.yaml", "", "found nothing"),
        ("c.txt", "a: 1", "'.txt' is none of .yaml, .yml, .toml, .json"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigurationError, match=said) as caught:
        load_document(tmp_path / name)
    assert str(caught.value).startswith(str(tmp_path / name))


def test_an_unreadable_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"absent\.yaml: cannot be read: No such file"):
        load_document(tmp_path / "absent.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff\n")
    with pytest.raises(ConfigurationError, match="is not UTF-8"):
        load_document(tmp_path / "latin.yaml")


def test_yaml_anchors_and_merges_work(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("base: &b {quantum: 2}\na: {<<: *b, pool_id: a}\n")
    assert load_document(tmp_path / "c.yaml")["a"] == {"quantum": 2, "pool_id": "a"}


def test_the_default_document_has_the_four_pools_and_one_endpoint() -> None:
    document = default_document("http://h/v1", "KEY")
    assert {row["pool_id"]: row["quantum"] for row in document["pools"]} == {
        "interactive": 4,
        "document-extract": 2,
        "backfill": 1,
        "default": 1,
    }
    assert document["endpoints"] == [{"endpoint_id": "default", "url": "http://h/v1", "api_key_env": "KEY"}]
