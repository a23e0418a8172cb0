"""What the operator's commands share: options, the connection, exit codes, and how results are written."""

from __future__ import annotations

import getpass
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
import typer

from dispatch.cli.remote import RemoteConnection, is_gateway
from dispatch.errors import DispatchError
from dispatch.fabric.address import is_valkey, redacted
from dispatch.fabric.functions import fabric_snapshot
from dispatch.fabric.schema import check_group
from dispatch.fabric.sync import BlockingConnection
from dispatch.fabric.verifying import verify_library_blocking

TIMEOUT_S = 1.0
"""How long a server may take for one answer: a person waits, and a command may need a second to start."""

REFUSED, TROUBLE = 1, 2
"""Exit codes: the answer is no (each command says of what); no answer, or something is wrong with the call itself."""

_PAGE = 200  # rows of a snapshot: about 3 ms of the server's time

DEFAULT_URL = "valkey://127.0.0.1:6379"
DEFAULT_GROUP = "default"

_VALKEY_HELP = "Valkey: valkey://[[user]:password@]host[:port][/db], valkeys:// with TLS, ?cluster=true for a cluster."


def _valkey_or_gateway(url: str) -> str:
    if is_valkey(url) or is_gateway(url):
        return url
    complain(
        f"the address {redacted(url)!r} is neither Valkey's (valkey://host:port, valkeys:// with TLS) nor a gateway's "
        "(http://host:port, https://host)"
    )
    raise typer.Exit(TROUBLE)


ServerUrl = Annotated[str, typer.Option("--url", envvar="DISPATCH_VALKEY_URL", help=_VALKEY_HELP)]
Url = Annotated[
    str,
    typer.Option(
        "--url",
        "--gateway",
        envvar="DISPATCH_VALKEY_URL",
        callback=_valkey_or_gateway,
        help=f"{_VALKEY_HELP} Or a gateway: http://host[:port] or https://host, with the key in DISPATCH_API_KEY.",
    ),
]
Group = Annotated[str, typer.Option("--group", "--fabric-group", envvar="DISPATCH_FABRIC_GROUP", help="Fabric group.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; messages go to stderr.")]
Actor = Annotated[str, typer.Option(help="Who does this, for the record.", show_default="user@host")]
Reason = Annotated[str, typer.Option(help="Why, for the record.")]


class FabricGroup:
    """One fabric group, over a connection whose server runs this version's library, or over a gateway's control API."""

    def __init__(self, connection: BlockingConnection | RemoteConnection, name: str) -> None:
        self.connection = connection
        self.name = name

    def run(self, call: Any) -> Any:
        """Run one function for the group."""
        return self.connection.run(self.name, call)

    def run_many(self, calls: Sequence[Any]) -> list[Any]:
        """Run functions for the group in one round trip, not atomically; the first error of any is raised."""
        answers = self.connection.run_many(self.name, calls)
        for answer in answers:
            if isinstance(answer, DispatchError):
                raise answer
        return answers

    def rows(self, section: str, subject: str = "") -> Iterator[dict[str, Any]]:
        """Read a section of the group's state, page by page."""
        for page in self.pages(section, subject):
            yield from page["rows"]

    def pages(self, section: str, subject: str = "") -> Iterator[dict[str, Any]]:
        """Read a section of the group's state as the pages it comes in."""
        cursor = ""
        while True:
            page = self.run(fabric_snapshot(section, cursor=cursor, limit=_PAGE, subject=subject))
            yield page
            cursor = page["cursor"]
            if not cursor:
                return


@contextmanager
def trouble_as_exit_code() -> Iterator[None]:
    """Say an error of this package in one sentence on stderr and end with exit code 2."""
    try:
        yield
    except DispatchError as error:
        complain(str(error))
        raise typer.Exit(TROUBLE) from error


@contextmanager
def fabric_group(url: str, name: str) -> Iterator[FabricGroup]:
    """Open a fabric group; what goes wrong inside ends the command as `trouble_as_exit_code` does."""
    with trouble_as_exit_code():
        check_group(name)
        if is_gateway(url):
            with RemoteConnection(url) as remote:
                yield FabricGroup(remote, name)
            return
        with BlockingConnection(url, timeout_s=TIMEOUT_S) as connection:
            verify_library_blocking(connection, name)
            yield FabricGroup(connection, name)


def who(actor: str) -> str:
    """Return `actor`, or user@host when none is given."""
    if actor:
        return actor
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def complain(text: str) -> None:
    """Write one line to stderr."""
    typer.echo(f"dispatch: {text}", err=True)


def require_typed(question: str, word: str, refusal: str) -> None:
    """Ask a person to type `word`, so that nothing large happens by a slip.

    Raises:
        typer.Exit: something else was typed, or nobody is there to type; `refusal` was said.
    """
    typer.echo(f"{question} to go on: ", nl=False, err=True)
    typed = sys.stdin.readline()
    if not typed.endswith("\n"):  # nobody is there to type
        typer.echo(err=True)
    if typed.strip() != word:
        complain(f"{refusal} (--yes does not ask)")
        raise typer.Exit(REFUSED)


def write_json(document: Any) -> None:
    """Write one indented JSON document to stdout."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(document)).decode() + "\n")


def moment(ms: int | None) -> str:
    """Return a time of the server as text in UTC, to the second."""
    return "-" if ms is None else f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%SZ}"


def one_line(text: str) -> str:
    """Return what somebody wrote, fit to be printed inside a line: no line breaks, no control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def or_dash(value: object) -> str:
    """Return `value` as text; nothing is a dash."""
    return "-" if value is None or value == "" else str(value)
