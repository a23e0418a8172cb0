"""The wheel: built, installed into an empty environment away from the checkout, and used for one call.

Needs the package index (or its cache) for the dependencies; without either the test is skipped, except in CI.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.dev import dev, wait_gone

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc"),
]


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def scripts(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment that has the wheel and nothing of the checkout."""
    folder = tmp_path_factory.mktemp("empty")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    install = [folder / "venv/bin/python", "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    try:
        run(*install, "--constraint", ROOT / "constraints.txt", f"{wheel}[embedded]", cwd=folder)
    except AssertionError as error:
        if "CI" not in os.environ and "onnection" in str(error):
            pytest.skip("the dependencies cannot be fetched here")
        raise
    return folder / "venv/bin"


def test_the_wheel_carries_the_library_and_nothing_of_the_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    source = {path.relative_to(ROOT / "lua").as_posix() for path in (ROOT / "lua").rglob("*") if path.is_file()}
    carried = {name.removeprefix("dispatch/_lua/") for name in names if name.startswith("dispatch/_lua/")}
    assert carried == source
    assert {name.split("/")[0] for name in names} == {"dispatch", names[-1].split("/")[0]}
    assert names[-1].endswith(".dist-info/RECORD")


def test_the_installed_command_is_the_wheels(scripts: Path, tmp_path: Path) -> None:
    assert run(scripts / "dispatch", "--version", cwd=tmp_path).startswith("dispatch ")
    where = run(scripts / "python", "-c", "import dispatch; print(dispatch.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(scripts.parent)
    here = run(sys.executable, "-m", "dispatch", "scripts", "print", cwd=tmp_path)
    assert run(scripts / "dispatch", "scripts", "print", cwd=tmp_path) == here


def test_dev_of_the_wheel_answers_one_call_and_leaves_nothing(scripts: Path, tmp_path: Path) -> None:
    with dev(tmp_path / "t", command=[str(scripts / "dispatch")]) as running:
        running.wait_ready()
        done = subprocess.run(["bash", "-c", running.curl], capture_output=True, text=True, timeout=20, check=True)
        assert json.loads(done.stdout)["choices"][0]["message"]["content"]
        children = running.children()
        running.signal(signal.SIGINT)
        assert running.wait_end() == 0
        wait_gone(list(children))
        assert list(running.temporary.iterdir()) == []
