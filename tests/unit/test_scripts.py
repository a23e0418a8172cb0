"""The scripts of the repository: they parse, setup does what is missing and nothing else, check says what failed.

`setup` is tried in a copy of the checkout with a stand-in for Python that makes no real environment but notes what it
was asked to install, so that these tests need no network and take no minute.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ["scripts/bench/engine", "scripts/bench/fabric", "scripts/bench/ingress"]
SCRIPTS = [
    "scripts/setup", "scripts/dev", "scripts/test", "scripts/check", "scripts/with-docker", ".ci/run", *BENCHMARKS,
]  # fmt: skip

STAND_IN = r"""#!/bin/bash
case "$1 $2" in
  "-c import ensurepip, venv") [ ! -e "$STAND_IN/no-venv" ] ;;
  "-c "*) ;;
  "--version "*) echo "Python 3.12.0" ;;
  "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; touch "$3/pyvenv.cfg" ;;
  "-m pip")
    echo "${@: -1}" >>"$STAND_IN/installed"
    [ ! -e "$STAND_IN/pip-fails" ] || { echo "no connection"; exit 1; }
    sleep "$(cat "$STAND_IN/pip-seconds" 2>/dev/null || echo 0)"
    printf '#!/bin/bash\necho "dispatch $*"\n' >"$(dirname "$0")/dispatch"
    chmod +x "$(dirname "$0")/dispatch"
    ;;
  "-I -c") ;;
  *) echo "unexpected: $*" >&2; exit 9 ;;
esac
"""


@dataclass
class Checkout:
    """A copy of what `setup` reads, with the stand-in beside it."""

    root: Path
    stand_in: Path

    def run(self, script: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.root / script), *options], capture_output=True, text=True, timeout=30, check=False, cwd="/",
            env=self.environment(**environment),
        )  # fmt: skip

    def environment(self, **changes: str) -> dict[str, str]:
        own = {"STAND_IN": str(self.stand_in), "DISPATCH_PYTHON": str(self.stand_in / "python")}
        return dict(os.environ) | own | changes

    @property
    def installed(self) -> list[str]:
        """What pip was asked to install, call by call, since the last look."""
        path = self.stand_in / "installed"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root = tmp_path / "a checkout"
    stand_in = tmp_path / "stand-in"
    for folder in (root, stand_in):
        folder.mkdir()
    shutil.copytree(ROOT / "scripts", root / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, root / name)
    (stand_in / "python").write_text(STAND_IN)
    (stand_in / "python").chmod(0o755)
    return Checkout(root, stand_in)


BOTH_STEPS = ["editables", ".[embedded,dev]"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_executable_and_parses(script: str) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize("script", ["scripts/setup", "scripts/with-docker"])
def test_help_says_what_a_script_is_for(script: str) -> None:
    done = subprocess.run([str(ROOT / script), "--help"], capture_output=True, text=True, check=True)
    assert f"{script} " in done.stdout
    assert "#" not in done.stdout


def test_setup_makes_what_is_missing_and_says_so(checkout: Checkout) -> None:
    done = checkout.run("scripts/setup")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["setup"] * 3
    assert "Python 3.12.0" in done.stderr
    assert checkout.installed == BOTH_STEPS


def test_setup_does_nothing_when_nothing_is_missing(checkout: Checkout) -> None:
    checkout.run("scripts/setup")
    assert checkout.installed
    done = checkout.run("scripts/setup")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert checkout.installed == []


def test_setup_is_silent_and_fast_in_this_very_checkout() -> None:
    if not (ROOT / ".venv" / ".setup").exists():
        pytest.skip("these tests run in an environment that scripts/setup did not make")
    subprocess.run([str(ROOT / "scripts/setup")], capture_output=True, check=True)  # as scripts/test does
    took = []
    for _ in range(5):
        start = time.perf_counter()
        done = subprocess.run([str(ROOT / "scripts/setup")], capture_output=True, text=True, check=False)
        took.append(time.perf_counter() - start)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert min(took) < 0.5, took


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_setup_installs_again_when_its_inputs_changed(checkout: Checkout, name: str) -> None:
    checkout.run("scripts/setup")
    assert checkout.installed
    with (checkout.root / name).open("a") as file:
        file.write("\n# a change\n")
    done = checkout.run("scripts/setup")
    assert "making .venv" not in done.stderr
    assert checkout.installed == BOTH_STEPS


def test_setup_remakes_a_venv_that_was_moved(checkout: Checkout) -> None:
    checkout.run("scripts/setup")
    assert checkout.installed
    moved = Checkout(checkout.root.with_name("elsewhere"), checkout.stand_in)
    checkout.root.rename(moved.root)
    done = moved.run("scripts/setup")
    assert done.returncode == 0
    assert "making it anew" in done.stderr
    assert moved.installed == BOTH_STEPS


def test_setup_remakes_a_venv_whose_python_is_gone(checkout: Checkout) -> None:
    checkout.run("scripts/setup")
    assert checkout.installed
    python = checkout.root / ".venv/bin/python"
    python.unlink()
    python.symlink_to("/nonexistent/python3")
    done = checkout.run("scripts/setup")
    assert done.returncode == 0
    assert "making it anew" in done.stderr
    assert checkout.installed == BOTH_STEPS


def test_setup_without_dev_installs_less_and_the_full_one_adds_the_rest(checkout: Checkout) -> None:
    assert checkout.run("scripts/setup", "--no-dev").returncode == 0
    assert checkout.installed == ["editables", ".[embedded]"]
    assert checkout.run("scripts/setup").returncode == 0
    assert checkout.installed == BOTH_STEPS
    assert checkout.run("scripts/setup", "--no-dev").stderr == ""
    assert checkout.installed == []


def test_a_failed_installation_is_told_and_tried_again_next_time(checkout: Checkout) -> None:
    trouble = checkout.stand_in / "pip-fails"
    trouble.touch()
    done = checkout.run("scripts/setup")
    assert done.returncode == 1
    assert "no connection" in done.stderr
    assert ".venv/setup.log" in done.stderr
    trouble.unlink()
    assert checkout.installed == ["editables"]
    assert checkout.run("scripts/setup").returncode == 0
    assert checkout.installed == BOTH_STEPS


def test_two_setups_at_once_install_once(checkout: Checkout) -> None:
    (checkout.stand_in / "pip-seconds").write_text("0.3")
    both = [
        subprocess.Popen(
            [str(checkout.root / "scripts/setup")], stderr=subprocess.PIPE, text=True, env=checkout.environment()
        )
        for _ in range(2)
    ]
    said = [process.communicate(timeout=30)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("waiting for it" in text for text in said) == 1
    assert checkout.installed == BOTH_STEPS


def test_setup_works_through_a_link_from_any_folder(checkout: Checkout, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(checkout.root / "scripts/setup")
    done = subprocess.run([str(link)], capture_output=True, check=True, cwd="/", env=checkout.environment())
    assert done.returncode == 0
    assert (checkout.root / ".venv/bin/dispatch").exists()


def test_no_python_is_one_sentence(checkout: Checkout) -> None:
    done = checkout.run("scripts/setup", DISPATCH_PYTHON="/nonexistent/python3")
    assert done.returncode == 1
    assert done.stderr == "setup: DISPATCH_PYTHON=/nonexistent/python3 is no Python 3.11 or newer that runs\n"


def test_a_python_without_venv_is_one_sentence_with_the_package_to_install(checkout: Checkout) -> None:
    (checkout.stand_in / "no-venv").touch()
    done = checkout.run("scripts/setup")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "python3-venv" in done.stderr


def test_an_unknown_option_is_refused(checkout: Checkout) -> None:
    done = checkout.run("scripts/setup", "--nope")
    assert done.returncode == 1
    assert "--nope" in done.stderr
    assert checkout.installed == []


def test_dev_sets_up_and_becomes_dispatch_dev(checkout: Checkout) -> None:
    done = checkout.run("scripts/dev", "--load", "--port", "0")
    assert done.stdout == "dispatch dev --load --port 0\n"
    assert checkout.installed == BOTH_STEPS


def test_check_runs_everything_and_names_what_failed(checkout: Checkout, tmp_path: Path) -> None:
    checkout.run("scripts/setup")
    tools = tmp_path / "tools"
    tools.mkdir()
    # Of ruff only the format passes, luacheck fails, and mypy and pytest are asked of the stand-in, which has neither.
    executable(checkout.root / ".venv/bin/ruff", '#!/bin/sh\n[ "$1" = format ]\n')
    executable(tools / "luacheck", "#!/bin/sh\nexit 1\n")
    done = checkout.run("scripts/check", PATH=f"{tools}:{os.environ['PATH']}")
    assert done.returncode == 1
    assert [line for line in done.stdout.splitlines() if line.startswith("== ")] == [
        "== ruff check", "== ruff format", "== mypy", "== luacheck", "== import rules",
    ]  # fmt: skip
    assert done.stdout.endswith("\ncheck: failed: ruff check, mypy, luacheck, import rules\n")


def test_without_docker_the_command_runs_all_the_same_and_its_code_is_kept(checkout: Checkout, tmp_path: Path) -> None:
    checkout.run("scripts/setup")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "cat", "cut", "dirname", "env", "printf", "readlink", "sh", "sha256sum", "shasum"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    done = checkout.run("scripts/with-docker", "sh", "-c", "echo ran; exit 7", PATH=str(tools), DOCKER_HOST="")
    assert done.returncode == 7
    assert done.stdout == "ran\n"
    assert done.stderr == "with-docker: Docker is not installed; integration tests use the embedded server\n"


def test_no_script_names_a_path_of_one_machine() -> None:
    for script in SCRIPTS:
        text = (ROOT / script).read_text()
        assert "/home/" not in text
        assert "/root/" not in text
        assert sys.prefix not in text


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
