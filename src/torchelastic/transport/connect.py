"""Connect to the store: try until its host answers, then greet it."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import re
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field

from torchelastic.clock import Clock
from torchelastic.config import format_endpoint, parse_endpoint
from torchelastic.errors import (
    ConfigError,
    RendezvousLost,
    RendezvousRefused,
    TlsError,
    WireError,
)
from torchelastic.transport import frames
from torchelastic.transport.addresses import is_address, loopback_addresses
from torchelastic.transport.auth import ANONYMOUS, Credentials, is_nonce, new_nonce
from torchelastic.transport.link import Link
from torchelastic.transport.tls import TlsPipe

log = logging.getLogger(__name__)

FIRST_PAUSE = 0.01
LONGEST_PAUSE = 0.25
#: Seconds one attempt may take: a packet filter that swallows packets gives no answer at all.
ATTEMPT = 5.0
#: Seconds the last attempt has, though the time is up: enough to learn what is wrong.
LAST_ATTEMPT = 0.25
#: Seconds between the addresses of a name that has several.
NEXT_ADDRESS = 0.25
#: Seconds without success before the reason is logged; between two such lines; and before a new
#: reason is logged.
SAY_AFTER, SAY_EVERY, SAY_CHANGES = 5.0, 60.0, 5.0


@dataclass(frozen=True)
class Endpoint:
    """The address of the store of a job."""

    host: str
    port: int
    job: str
    #: This node's credentials.
    credentials: Credentials = field(default=ANONYMOUS, repr=False, compare=False)
    #: Nodes of this machine that saw the end of their run of the job.
    ended: Collection[str] = field(default=(), repr=False, compare=False)

    @classmethod
    def at(cls, address: str, job: str, credentials: Credentials = ANONYMOUS) -> Endpoint:
        return cls(*parse_endpoint(address), job, credentials)

    def __str__(self) -> str:
        return format_endpoint(self.host, self.port)


class NoAnswer(Exception):
    """A server accepted the connection and did not answer."""


class _Nowhere(Exception):
    """Agents answered, but none of them hosts the store."""


class _InVain(Exception):
    """A failed attempt: the place and the error."""

    def __init__(self, place: Endpoint, problem: Exception) -> None:
        super().__init__(place, problem)
        self.place = place
        self.problem = problem


@dataclass
class _Complaint:
    """Logs why no host answers: after a while, then periodically, and when the reason changes."""

    say: Callable[[str], None]
    #: When the next one is due, and when it is if there is something new to say.
    due: float
    due_if_new: float
    said: str = ""

    def about(self, sentence: str, now: float) -> None:
        if now >= (self.due if sentence == self.said else self.due_if_new):
            self.said, self.due, self.due_if_new = sentence, now + SAY_EVERY, now + SAY_CHANGES
            self.say(sentence)


async def connect_to_host(
    places: Sequence[Endpoint],
    lease: str | None,
    *,
    timeout: float,
    clock: Clock,
    term: int = 0,
    again: bool = False,
    refused: float = math.inf,
    meanwhile: Callable[[], Awaitable[None]] | None = None,
    say: Callable[[str], None] = log.debug,
) -> tuple[Link, frames.Welcome, Endpoint]:
    """Connect and greet, taking up `lease` if possible; wait for the host.

    Tries all `places`; the host must have at least `term`. `again`: there was a connection before.
    Gives up early after `refused` seconds of nothing but refused connections. `meanwhile` is
    called after every failed attempt, `say` from time to time with the reason. Raises
    `RendezvousRefused` at once if the store refuses or another server has the port,
    `RendezvousLost` if no host answers in time.
    """
    deadline = clock.now() + timeout
    complaint = _Complaint(say, clock.now() + SAY_AFTER, clock.now() + SAY_AFTER)
    refused_until = clock.now() + refused
    pause = FIRST_PAUSE
    while True:
        try:
            left = max(deadline - clock.now(), LAST_ATTEMPT)
            return await _follow(places, lease, term, min(ATTEMPT, left))
        except _InVain as error:
            vain = error
        why = obstacle(vain.place, vain.problem)
        log.debug("No rendezvous yet. %s", why)
        complaint.about(why, clock.now())
        if not isinstance(vain.problem, ConnectionRefusedError):
            refused_until = clock.now() + refused
        if clock.now() >= min(deadline, refused_until):
            raise _verdict(places[0], timeout, vain, again) from vain.problem
        if meanwhile is not None:
            await meanwhile()
        await asyncio.sleep(min(pause, max(deadline - clock.now(), 0.0)))
        pause = min(2 * pause, LONGEST_PAUSE)


def _verdict(
    endpoint: Endpoint, timeout: float, vain: _InVain, again: bool
) -> RendezvousLost | RendezvousRefused:
    if again:
        return RendezvousLost(
            f"Lost the rendezvous at {endpoint} ({_words(vain.problem)}): its host has exited, "
            "is frozen or is unreachable."
        )
    why = obstacle(vain.place, vain.problem)
    if isinstance(vain.problem, NoAnswer):
        return RendezvousRefused(why)
    return RendezvousLost(f"No rendezvous answered at {endpoint} within {timeout:g} s. {why}")


def obstacle(place: Endpoint, problem: Exception) -> str:
    """Describe what keeps this node from its rendezvous, and what to do about it."""
    if isinstance(problem, socket.gaierror):
        return (
            f"The name '{place.host}' does not resolve on this node: check --rdzv-endpoint, DNS "
            "and /etc/hosts."
        )
    if isinstance(problem, ConnectionRefusedError):
        return (
            f"{place.host} refuses connections to port {place.port}: nothing listens there. Start "
            "the agent on that host, or correct --rdzv-endpoint."
        )
    if isinstance(problem, NoAnswer):
        return (
            f"Something at {place} accepts connections but does not answer as a torchelastic "
            "rendezvous: choose another port in --rdzv-endpoint."
        )
    if isinstance(problem, asyncio.TimeoutError):
        return (
            f"{place} does not respond at all: the machine is down, or a firewall drops packets to "
            f"port {place.port}."
        )
    if isinstance(problem, _Nowhere):
        return f"The agent at {place} answers, but no node hosts the rendezvous yet."
    return f"{place} cannot be reached: {_words(problem)}."


def _words(problem: Exception) -> str:
    if isinstance(problem, NoAnswer):
        return "no answer to our hello"
    if isinstance(problem, _Nowhere):
        return "no node hosts it"
    if isinstance(problem, socket.gaierror):
        return "host name not known"
    if isinstance(problem, asyncio.TimeoutError):
        return "no answer"
    if isinstance(problem, ConnectionRefusedError):
        return "connection refused"
    return str(problem) or type(problem).__name__


async def _follow(
    places: Sequence[Endpoint], lease: str | None, term: int, timeout: float
) -> tuple[Link, frames.Welcome, Endpoint]:
    """Ask at the places, then wherever an agent says that the store is, each place once.

    Raises `_InVain`, or `RendezvousRefused` if that is the only obstacle.
    """
    vain: _InVain | None = None
    refusal: RendezvousRefused | None = None
    asking, asked = list(places), set(places)
    while asking:
        place = asking.pop(0)
        try:
            link, answer = await connect_once(place, lease=lease, term=term, timeout=timeout)
        except (OSError, asyncio.TimeoutError, NoAnswer) as error:
            vain = _InVain(place, error)
            continue
        except RendezvousRefused as error:
            refusal = error
            continue
        if isinstance(answer, frames.Welcome) and answer.term >= term:
            return link, answer, place
        link.abort()
        vain = vain or _InVain(place, _Nowhere())
        if isinstance(answer, frames.Elsewhere):
            named = [
                Endpoint.at(address, place.job, place.credentials) for address in answer.addresses
            ]
            asking = [new for new in named if new not in asked] + asking
            asked.update(named)
    # One place may be another job's, and the store at another one that is to come yet.
    raise vain or refusal or _InVain(places[0], _Nowhere())


async def connect_once(
    endpoint: Endpoint,
    *,
    purpose: str = frames.STORE,
    lease: str | None = None,
    term: int = 0,
    timeout: float,
) -> tuple[Link, frames.Welcome | frames.Elsewhere]:
    """One attempt at one place. Raises OSError, TimeoutError, `NoAnswer` or `RendezvousRefused`."""
    shown = endpoint.credentials
    tls = TlsPipe(shown.client_tls, server=False) if shown.client_tls is not None else None
    link = Link(tls=tls, limit=frames.GREETING_LIMIT)
    nonce = new_nonce() if shown.secret is not None else ""
    hello = frames.Hello(
        *(frames.PROTOCOL, frames.VERSION, endpoint.job, lease, purpose, term, nonce),
        ended=list(endpoint.ended),
    )
    try:
        await asyncio.wait_for(_connect(link, endpoint), timeout)
        return link, await _greet(link, endpoint, hello, timeout)
    except BaseException:
        # Whatever it was, a cancellation included: no half-made connection is left behind.
        link.abort()
        raise


async def _connect(link: Link, endpoint: Endpoint) -> None:
    loop = asyncio.get_running_loop()
    # The loopback addresses by themselves: no thread for the name service is needed then.
    *others, final = loopback_addresses(endpoint.host) or (endpoint.host,)
    for address in others:
        try:
            await loop.create_connection(lambda: link, address, endpoint.port)
        except OSError:
            continue
        return
    try:
        # Of a name with several addresses, the next one is tried beside one that is slow.
        stagger = None if is_address(final) else NEXT_ADDRESS
        await loop.create_connection(
            lambda: link, final, endpoint.port, happy_eyeballs_delay=stagger
        )
    except UnicodeError as error:
        raise ConfigError(
            f"'{endpoint.host}' is not a host name: correct --rdzv-endpoint."
        ) from error
    except OSError as error:
        if is_refused_everywhere(error):
            raise ConnectionRefusedError(errno.ECONNREFUSED, str(error)) from error
        raise


def is_refused_everywhere(error: OSError) -> bool:
    """Return whether nothing listens at any address of a name. For several, asyncio puts the errors
    in one text; a list of them exists only from Python 3.12 on.

    >>> is_refused_everywhere(OSError("Multiple exceptions: [Errno 111] a, [Errno 113] b"))
    False
    """
    if error.errno is not None:
        return error.errno == errno.ECONNREFUSED
    numbers = re.findall(r"\[Errno (\d+)\]", str(error))
    return bool(numbers) and set(numbers) == {str(errno.ECONNREFUSED)}


async def _greet(
    link: Link, endpoint: Endpoint, hello: frames.Hello, timeout: float
) -> frames.Welcome | frames.Elsewhere:
    """Say hello; if the job has a secret, ask for proof that the other end has it too."""
    greeting = frames.pack(hello)
    link.send(greeting)
    answer = await _answer(link, endpoint, timeout)
    if endpoint.credentials.secret is not None:
        _prove(link, endpoint, frames.payload_of(greeting), answer)
        answer = await _answer(link, endpoint, timeout)
    if not isinstance(answer, frames.Welcome | frames.Elsewhere):
        raise RendezvousRefused(_no_rendezvous(endpoint))
    link.admit()
    return answer


def _prove(link: Link, endpoint: Endpoint, hello: bytes, challenge: frames.Message) -> None:
    """Check that the other end has our secret, and only then prove that we have it."""
    secret = endpoint.credentials.secret
    assert secret is not None
    if not isinstance(challenge, frames.Challenge):
        raise RendezvousRefused(
            f"This node has a secret, but the rendezvous at {endpoint} has none: give every node "
            "of the job the same secret (--rdzv-secret-file or TORCHELASTIC_SECRET)."
        )
    known = is_nonce(challenge.nonce) and secret.proves(
        challenge.proof, "server", hello, challenge.nonce
    )
    if not known:
        raise RendezvousRefused(
            f"The rendezvous at {endpoint} has a different secret: give every node of the job "
            "the same secret (--rdzv-secret-file or TORCHELASTIC_SECRET)."
        )
    link.send(frames.Proof(secret.proof("client", hello, challenge.nonce)))


async def _answer(link: Link, endpoint: Endpoint, timeout: float) -> frames.Message:
    """The next message of the other end, unless it refuses us."""
    try:
        frame = await asyncio.wait_for(link.next_frame(), timeout)
        answer = frames.parse(frame, frames.ANSWERS_TO_HELLO)
    except TlsError as error:
        raise RendezvousRefused(
            f"TLS handshake with {endpoint} failed ({error}): give every node a certificate from "
            "the same CA (--rdzv-tls-ca, --rdzv-tls-cert, --rdzv-tls-key), or none."
        ) from error
    except WireError as error:
        raise RendezvousRefused(_no_rendezvous(endpoint)) from error
    except (OSError, EOFError, asyncio.TimeoutError) as error:
        # Not a refusal yet: proxies take connections for a host that is still to come.
        raise NoAnswer from error
    if isinstance(answer, frames.Refusal):
        raise RendezvousRefused(answer.line)
    return answer


def _no_rendezvous(endpoint: Endpoint) -> str:
    return (
        f"The port of {endpoint} is in use by something other than a torchelastic rendezvous: "
        "choose another port in --rdzv-endpoint."
    )
