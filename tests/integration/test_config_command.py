"""`dispatch config`: one document a group, applied as a whole under compare-and-set, with a history."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from dispatch.fabric.schema import key
from tests.support.by_hand import ByHand
from tests.support.commands import Commands, Done
from tests.support.groups import default_document, unique_group
from tests.support.producing import eye
from tests.support.valkey import ValkeyProcess

IN_FORCE, REFUSED, TROUBLE = 0, 1, 2


@pytest.fixture
def dispatch(valkey: ValkeyProcess, group: str) -> Commands:
    return Commands(valkey.url, group)


def written(folder: Path, document: dict[str, Any], name: str = "group.yaml") -> str:
    path = folder / name
    path.write_text(json.dumps(document) if name.endswith(".json") else yaml.safe_dump(document))
    return str(path)


def changes(done: Done) -> dict[str, tuple[str, str]]:
    return {row["field"]: (row["before"], row["after"]) for row in done.json["changes"]}


# ---- show and apply


def test_what_is_shown_can_be_applied_and_changes_nothing(dispatch: Commands, tmp_path: Path) -> None:
    shown = dispatch("config", "show")
    assert shown.out.startswith("# group t-")
    assert "generation 1 by test at 20" in shown.out.splitlines()[0]
    (tmp_path / "shown.yaml").write_text(shown.out)
    again = dispatch("config", "apply", str(tmp_path / "shown.yaml"))
    assert (again.code, again.out, again.err) == (IN_FORCE, "no difference: generation 1 stays in force\n", "")
    whole = dispatch("config", "show", "--json").json
    assert whole["document"] == yaml.safe_load(shown.out)
    assert (whole["generation"], whole["actor"]) == (1, "test")


def test_a_group_that_was_never_configured_is_told_and_can_be(valkey: ValkeyProcess, tmp_path: Path) -> None:
    dispatch = Commands(valkey.url, unique_group())
    none = dispatch("config", "show")
    assert (none.code, none.out) == (TROUBLE, "")
    assert none.err.endswith("has no configuration; run: dispatch config apply FILE\n")
    first = dispatch("config", "apply", written(tmp_path, default_document()), "--actor", "me")
    assert first.code == IN_FORCE
    assert "pools[interactive]: absent -> quantum 4" in first.out
    assert first.out.endswith("generation 1 is in force\n")


@pytest.mark.parametrize("name", ["group.yaml", "group.json", "group.toml"])
def test_a_file_of_each_format_is_applied(dispatch: Commands, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "group.toml":
        path.write_text(
            'policy = "fifo"\n[[pools]]\npool_id = "a"\n[[endpoints]]\nendpoint_id = "e"\nurl = "http://h/v1"\n'
        )
    else:
        document = {
            "policy": "fifo",
            "pools": [{"pool_id": "a"}],
            "endpoints": [{"endpoint_id": "e", "url": "http://h/v1"}],
        }
        written(tmp_path, document, name)
    done = dispatch("config", "apply", str(path), "--json", "--reason", "why", "--actor", "me")
    assert (done.code, done.json["status"], done.json["generation"], done.json["actor"]) == (0, "APPLIED", 2, "me")
    assert changes(done)["policy"] == ("drr", "fifo")
    assert changes(done)["pools[backfill]"][1] == "absent"
    assert done.err == "generation 2 is in force\n"
    in_force = dispatch("config", "show", "--json").json
    assert (in_force["reason"], in_force["document"]["default_endpoint"]) == ("why", "e")


def test_a_dry_run_and_a_diff_say_what_would_change_and_change_nothing(dispatch: Commands, tmp_path: Path) -> None:
    document = default_document() | {"total_concurrent_dispatch": 9}
    document["pools"][0] |= {"quantum": 6, "max_concurrent": 3}
    file = written(tmp_path, document)
    said = "total_concurrent_dispatch: 8 -> 9\npools[interactive].quantum: 4 -> 6\n"
    said += "pools[interactive].max_concurrent: none -> 3\nnothing was changed: generation 1 stays in force\n"
    assert dispatch("config", "apply", file, "--dry-run") == Done(IN_FORCE, said, "")
    assert dispatch("config", "diff", file) == Done(REFUSED, said, "")
    as_json = dispatch("config", "diff", file, "--json")
    assert (as_json.json["status"], as_json.json["changed"]) == ("VALID", 3)
    assert dispatch("config", "show", "--json").json["generation"] == 1
    same = dispatch("config", "diff", written(tmp_path, default_document()))
    assert same == Done(IN_FORCE, "no difference: generation 1 stays in force\n", "")


# ---- set


def test_single_fields_are_set_and_pools_added_and_removed(dispatch: Commands) -> None:
    words = ["pools.interactive.quantum=6", "total_concurrent_dispatch=12", "pools.new.v2.quantum=2"]
    done = dispatch("config", "set", *words, "--json")
    assert changes(done) == {
        "total_concurrent_dispatch": ("8", "12"),
        "pools[interactive].quantum": ("4", "6"),
        "pools[new.v2]": ("absent", "quantum 2, endpoint default, max_attempts 1"),
    }
    assert dispatch("config", "set", "pools.new.v2=null").out.endswith("-> absent\ngeneration 3 is in force\n")


def test_what_a_field_fills_in_follows_it(dispatch: Commands) -> None:
    dispatch("config", "set", "endpoints.b.url=http://b/v1", "pools.backfill.delivery=at_least_once")
    dispatch("config", "set", "pools.backfill.endpoint_url=http://own/v1", "default_endpoint=b")
    document = dispatch("config", "show", "--json").json["document"]
    pools = {pool["pool_id"]: pool for pool in document["pools"]}
    assert (pools["backfill"]["endpoint"], pools["backfill"]["max_attempts"]) == ("pool.backfill", 3)
    assert pools["interactive"]["endpoint"] == "b"
    assert dispatch("config", "set", "pools.backfill.endpoint=default").code == IN_FORCE


@pytest.mark.parametrize("word", ["quantum", "=3", "a.b=3", "pools.x=3", "pools.quantum=3", "pools=null", "policy=[1]"])
def test_what_is_no_assignment_is_refused_before_anything(dispatch: Commands, word: str) -> None:
    done = dispatch("config", "set", word)
    assert (done.code, done.out) == (TROUBLE, "")
    assert done.err.count("\n") == 1
    assert repr(word.partition("=")[0])[1:-1] in done.err


# ---- refused


def wrong_documents() -> dict[str, tuple[dict[str, Any], str]]:
    plain = default_document()
    ten = [{"pool_id": f"p{n}", "endpoint_url": f"http://h{n}/v1"} for n in range(9)]
    return {
        "minima": (
            plain | {"pools": [{"pool_id": "a", "min_concurrent": 5}, {"pool_id": "b", "min_concurrent": 4}]},
            "pools is sum of min_concurrent 9: allowed: at most total_concurrent_dispatch (8)",
        ),
        "unknown field": (
            plain | {"pools": [{"pool_id": "a", "quantums": 2}]}, "pools[a].quantums is 2: unknown field"
        ),
        "min over max": (
            plain | {"pools": [{"pool_id": "a", "min_concurrent": 3, "max_concurrent": 2}]},
            "pools[a].min_concurrent is 3: allowed: at most max_concurrent (2)",
        ),
        "too many": (
            plain | {"pools": [{"pool_id": f"p{n}"} for n in range(1001)]}, "pools is 1001 pools: allowed: at most 1000"
        ),
        "last url": (
            plain | {"pools": [*ten, {"pool_id": "p9", "endpoint_url": "http://h:99999/v1"}]},
            "pools[p9].endpoint_url is http://h:99999/v1: allowed: http(s)://host[:port][/path], no query",
        ),
        "twice": (plain | {"pools": [{"pool_id": "a"}, {"pool_id": "a"}]}, "pools[a].pool_id is a: used twice"),
        "no endpoint": (
            plain | {"pools": [{"pool_id": "a", "endpoint": "x"}]}, "pools[a].endpoint is x: no endpoint has this id"
        ),
        "login in a url": (
            plain | {"endpoints": [{"endpoint_id": "e", "url": "http://u:geheim@h/v1"}]},
            "endpoints[e].url is http://h/v1: credentials do not belong here: use api_key_env",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("kind", list(wrong_documents()))
def test_a_wrong_document_changes_nothing_about_running_and_waiting_work(
    valkey: ValkeyProcess, group: str, dispatch: Commands, tmp_path: Path, kind: str
) -> None:
    document, said = wrong_documents()[kind]
    hand = ByHand(valkey.url, group)
    hand.submit("interactive", 5)
    leases = hand.claim(3)
    before = everything(valkey, group)
    done = dispatch("config", "apply", written(tmp_path, document))
    assert (done.code, done.out) == (REFUSED, "")
    first, *_, last = done.err.splitlines()
    assert first == f"dispatch: {said}"
    assert last.startswith("dispatch: nothing was changed; in force stays generation 1 by test at 20")
    assert "geheim" not in done.err
    as_json = dispatch("config", "diff", written(tmp_path, document), "--json")
    assert (as_json.code, as_json.json["status"]) == (REFUSED, "INVALID")
    assert everything(valkey, group) == before
    hand.settle(leases)
    hand.close()


def everything(valkey: ValkeyProcess, group: str) -> dict[bytes, bytes | None]:
    """Return all keys of a group with what they hold."""
    with eye(valkey.url) as client:
        return {name: client.dump(name) for name in sorted(client.scan_iter(match=f"{{{group}}}:*", count=1000))}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("g.yaml", "pools:\n  - {pool_id: a\n", "g.yaml: line 3, column 1: "),
        ("g.json", '{"pools": [}', "g.json: line 1, column 12: "),
        ("g.toml", "a = \n", "(at line 1, column 5)"),
        ("g.yaml", "pools: []\npools: []\n", "line 2, column 1: the key 'pools' stands twice"),
        ("g.txt", "", "the file's ending '.txt' is none of"),
        ("g.yaml", "pools: !!python/object:os.system {}\n", "g.yaml: "),
        ("g.yaml", "? [a]\n: 1\n", "g.yaml: "),
    ],
)
def test_a_file_with_a_syntax_error_is_one_sentence(
    dispatch: Commands, tmp_path: Path, name: str, text: str, said: str
) -> None:
    (tmp_path / name).write_text(text)
    done = dispatch("config", "apply", str(tmp_path / name))
    assert (done.code, done.out) == (TROUBLE, "")
    assert done.err.startswith("dispatch: ")
    assert said in done.err
    assert done.err.count("\n") == 1
    assert dispatch("config", "show", "--json").json["generation"] == 1


# ---- compare and set


def test_the_second_of_two_who_read_the_same_generation_is_told_who_won(dispatch: Commands, tmp_path: Path) -> None:
    file = written(tmp_path, default_document() | {"policy": "fifo"})
    assert dispatch("config", "set", "total_concurrent_dispatch=9", "--actor", "anna").code == IN_FORCE
    late = dispatch("config", "apply", file, "--expected", "1")
    assert (late.code, late.out) == (REFUSED, "")
    assert late.err.startswith("dispatch: nothing was changed: generation 2 by anna at 20")
    assert late.err.endswith(" is in force, not 1; look and repeat\n")
    as_json = dispatch("config", "apply", file, "--expected", "1", "--json")
    assert (as_json.code, as_json.json["status"], as_json.json["generation"]) == (REFUSED, "CONFLICT", 2)
    assert dispatch("config", "show", "--json").json["document"]["policy"] == "drr"


def test_of_two_writers_at_once_exactly_one_wins(valkey: ValkeyProcess, group: str) -> None:
    results: list[int] = []

    def write(total: int) -> None:
        words = [f"total_concurrent_dispatch={total}", "--expected", "1", "--url", valkey.url, "--group", group]
        done = subprocess.run(
            [sys.executable, "-m", "dispatch", "config", "set", *words],
            capture_output=True, stdin=subprocess.DEVNULL, timeout=30, check=False,
        )  # fmt: skip
        results.append(done.returncode)

    writers = [threading.Thread(target=write, args=(total,)) for total in (20, 30)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(results) == [IN_FORCE, REFUSED]
    with eye(valkey.url) as client:
        events = [record for _, record in client.xrange(key(group, "events"))]
    assert [record[b"generation"] for record in events] == [b"1", b"2"]


# ---- history and rollback


def test_history_says_when_by_whom_why_and_what(valkey: ValkeyProcess, group: str, dispatch: Commands) -> None:
    dispatch("config", "set", "total_concurrent_dispatch=9", "--actor", "anna", "--reason", "more\x1b[31m room")
    dispatch("config", "set", "pools.backfill.quantum=2", "--actor", "ben")
    listed = dispatch("config", "history")
    assert [line.split()[0] for line in listed.out.splitlines()] == ["generation", "3", "2", "1"]
    assert "anna   1        more [31m room" in listed.out
    rows = dispatch("config", "history", "--json", "--limit", "2").json["generations"]
    assert [(row["generation"], row["actor"], row["changed"]) for row in rows] == [(3, "ben", 1), (2, "anna", 1)]
    one = dispatch("config", "history", "2")
    assert one.out.splitlines()[1:] == ["total_concurrent_dispatch: 8 -> 9"]
    assert dispatch("config", "history", "2", "--json").json["document"]["total_concurrent_dispatch"] == 9
    assert "total_concurrent_dispatch: 8" in dispatch("config", "show", "--generation", "1").out
    with eye(valkey.url) as client:
        _, event = client.xrevrange(key(group, "events"), count=1)[0]
    assert (event[b"kind"], event[b"generation"], event[b"actor"], event[b"changed"]) == (b"config", b"3", b"ben", b"1")


def test_a_rollback_is_a_new_generation_with_the_old_document(dispatch: Commands) -> None:
    first = dispatch("config", "show", "--json").json["document"]
    dispatch("config", "set", "policy=fifo", "pools.extra.quantum=3", "pools.backfill.endpoint_url=http://own/v1")
    look = dispatch("config", "rollback", "1", "--dry-run")
    assert "policy: fifo -> drr" in look.out
    assert look.out.endswith("nothing was changed: generation 2 stays in force\n")
    done = dispatch("config", "rollback", "1", "--actor", "me")
    assert (done.code, done.out.splitlines()[-1]) == (IN_FORCE, "generation 3 is in force")
    now = dispatch("config", "show", "--json").json
    assert (now["generation"], now["reason"], now["document"]) == (3, "rollback to 1", first)
    gone = dispatch("config", "rollback", "99")
    assert gone.code == TROUBLE
    assert gone.err.endswith("is not kept; dispatch config history lists those that are\n")


def test_history_is_paged_by_the_size_of_its_documents(dispatch: Commands) -> None:
    pools = [f"pools.p{number}.display_name={'x' * 2000}" for number in range(400)]
    for total in range(2, 8):
        dispatch("config", "set", *pools, f"total_concurrent_dispatch={total}")
    rows = dispatch("config", "history", "--json").json["generations"]
    assert [row["generation"] for row in rows] == [7, 6, 5, 4, 3, 2, 1]
    assert rows[-2]["changed"] == 401
    told = dispatch("config", "history", "2").out
    assert told.endswith("... and 201 more\n")


# ---- removal


def test_a_pool_with_work_is_not_removed_until_it_is_drained(
    valkey: ValkeyProcess, group: str, dispatch: Commands
) -> None:
    hand = ByHand(valkey.url, group)
    hand.submit("backfill", 2)
    lease = hand.claim(1)
    refused = dispatch("config", "set", "pools.backfill=null")
    assert refused.code == REFUSED
    said = (
        "pools is backfill: cannot be removed: 1 wait, 0 wait for their next attempt and 1 run in it; "
        "run: dispatch pools drain backfill"
    )
    assert refused.err.splitlines()[0] == f"dispatch: {said}"
    assert dispatch("pools", "drain", "backfill").out == "pool backfill is now draining; 1 wait, 1 run\n"
    assert hand.refusal("backfill") == "pool_draining"
    hand.settle(lease)
    hand.settle(hand.claim(1))
    assert dispatch("config", "set", "pools.backfill=null").code == IN_FORCE
    with eye(valkey.url) as client:
        assert not list(client.scan_iter(match=f"{{{group}}}:*backfill*"))
    hand.close()
