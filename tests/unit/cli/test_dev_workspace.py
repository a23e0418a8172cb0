"""The temporary folder of `dispatch dev` goes with it, and with the next run if it was killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dispatch.cli.dev.workspace import workspace

HOLD = "from dispatch.cli.dev.workspace import workspace\nwith workspace() as f: print(f, flush=True); input()"


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_goes_at_the_end_with_all_in_it(temporary_folder: Path) -> None:
    with workspace() as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "file").write_text("x")
    assert list(temporary_folder.iterdir()) == []


def test_the_folder_goes_when_the_run_fails(temporary_folder: Path) -> None:
    with pytest.raises(RuntimeError, match="boom"), workspace():
        raise RuntimeError("boom")
    assert list(temporary_folder.iterdir()) == []


def test_a_living_run_keeps_its_folder_and_a_killed_one_loses_it() -> None:
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        try:
            with workspace():
                assert theirs.is_dir()
        finally:
            other.kill()
            other.wait()
    assert theirs.is_dir()
    with workspace():
        assert not theirs.exists()


def test_a_folder_that_is_just_being_made_stays(temporary_folder: Path) -> None:
    fresh = temporary_folder / "dispatch-dev-fresh"
    fresh.mkdir()
    with workspace():
        assert fresh.is_dir()
