"""The processes of `dispatch dev`: last words, unexpected ends, stopping in order, and a parent that is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from dispatch.cli.dev.children import Child, Children, Program
from dispatch.errors import DispatchError

pytestmark = pytest.mark.anyio

IGNORES_TERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
)
SLEEPS = "import time; print('up', flush=True); time.sleep(60)"


def program(code: str, *, name: str = "thing", stage: int = 0, stop_s: float = 5.0) -> Program:
    command = [sys.executable, "-I", "-c", code]
    return Program(name=name, stage=stage, command=command, environment=dict(os.environ), stop_s=stop_s)


@contextlib.asynccontextmanager
async def started(*programs: Program) -> AsyncIterator[tuple[Children, list[Child], list[str]]]:
    said: list[str] = []
    async with anyio.create_task_group() as tasks:
        children = Children(tasks, echo=said.append)
        try:
            yield children, [await children.start(item) for item in programs], said
        finally:
            await children.stop()
            tasks.cancel_scope.cancel()


async def until_said(said: list[str], text: str) -> None:
    with anyio.fail_after(5):
        while not any(text in line for line in said):  # noqa: ASYNC110 - what the children say is a plain list
            await anyio.sleep(0.01)


def runs(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_a_child_that_ends_by_itself_is_told_with_its_last_lines() -> None:
    code = "print('first'); print('port is taken'); raise SystemExit(3)"
    async with started(program(code, name="gateway dev-1")) as (children, _, _):
        with pytest.raises(DispatchError) as told:
            await children.watch()
    assert str(told.value) == (
        "gateway dev-1 ended unexpectedly (exit code 3); its last lines:\n    first\n    port is taken"
    )


async def test_a_killed_child_is_told_with_its_signal() -> None:
    async with started(program(SLEEPS)) as (children, [child], said):
        await until_said(said, "up")
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(DispatchError, match=r"thing ended unexpectedly \(signal 9\)"):
            await children.watch()


async def test_a_program_that_is_not_there_ends_unexpectedly_and_says_so() -> None:
    missing = Program(name="server", stage=0, command=["/nonexistent/server"], environment={})
    async with started(missing) as (children, _, _):
        with pytest.raises(DispatchError, match="No such file"):
            await children.watch()


async def test_only_the_last_lines_are_kept() -> None:
    async with started(program("for n in range(1000): print('line', n)")) as (_, [child], _):
        await child.ended.wait()
        assert list(child.tail) == [f"line {n}" for n in range(980, 1000)]


async def test_stop_ends_higher_stages_first_and_then_nobody_is_left() -> None:
    order: list[str] = []
    async with started(
        program(SLEEPS, name="valkey", stage=0), program(SLEEPS, name="gateway", stage=2), program(SLEEPS, stage=1)
    ) as (children, all_children, said):
        for child in all_children:
            await until_said(said, f"{child.program.name}: up")

        async def note(child: Child) -> None:
            await child.ended.wait()
            order.append(child.program.name)

        async with anyio.create_task_group() as tasks:
            for child in all_children:
                tasks.start_soon(note, child)
            await children.stop()
    assert order == ["gateway", "thing", "valkey"]
    assert not any(runs(child.pid) for child in all_children)


async def test_a_child_that_does_not_obey_is_killed_after_its_time() -> None:
    async with started(program(IGNORES_TERM, stop_s=0.2)) as (children, [child], said):
        await until_said(said, "deaf")
        with anyio.fail_after(3):
            await children.stop()
        assert child.process.returncode == -signal.SIGKILL


async def test_hurry_ends_a_stop_under_way() -> None:
    async with started(program(IGNORES_TERM, stop_s=60)) as (children, [child], said):
        await until_said(said, "deaf")
        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(children.stop)
                await anyio.wait_all_tasks_blocked()
                children.hurry()
        assert child.process.returncode == -signal.SIGKILL


async def test_a_reader_of_the_logs_that_went_away_is_told_and_the_children_are_still_followed() -> None:
    def gone(_line: str) -> None:
        raise BrokenPipeError

    async with anyio.create_task_group() as tasks:
        children = Children(tasks, echo=gone)
        child = await children.start(program("for n in range(100_000): print('line', n)"))
        with pytest.raises(BrokenPipeError):
            await children.watch()
        with anyio.fail_after(10):
            await child.ended.wait()
        assert child.tail[-1] == "line 99999"


async def test_stop_is_quick_when_the_tasks_around_it_are_cancelled() -> None:
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            children = Children(tasks)
            child = await children.start(program(SLEEPS, stop_s=60))
            try:
                tasks.cancel_scope.cancel()
                await anyio.sleep_forever()
            finally:
                await children.stop()
    assert child.process.returncode == -signal.SIGTERM


async def test_stop_is_not_left_half_way_when_it_is_cancelled() -> None:
    async with started(program(IGNORES_TERM, stop_s=0.2)) as (children, [child], said):
        await until_said(said, "deaf")
        with anyio.CancelScope() as scope:
            scope.cancel()
            await children.stop()
        assert child.ended.is_set()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
async def test_a_killed_parent_takes_its_children_along(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import anyio, os\n"
        "from dispatch.cli.dev.children import Children, Program\n"
        "async def main():\n"
        "    async with anyio.create_task_group() as tasks:\n"
        f"        command = [{sys.executable!r}, '-c', {IGNORES_TERM!r}]\n"
        "        children = Children(tasks, echo=lambda line: print(child.pid, flush=True))\n"
        "        program = Program(name='x', stage=0, command=command, environment=dict(os.environ))\n"
        "        child = await children.start(program)\n"
        "        await anyio.sleep(60)\n"
        "anyio.run(main)\n"
    )
    parent = await anyio.open_process([sys.executable, str(script)], stderr=subprocess.DEVNULL)
    assert parent.stdout is not None
    pid = int(await parent.stdout.receive())
    assert runs(pid)
    parent.kill()
    await parent.wait()
    await parent.aclose()
    with anyio.fail_after(5):
        while runs(pid):  # noqa: ASYNC110 - a process that is no child of ours can only be looked at
            await anyio.sleep(0.01)
