"""Whatever comes to the port: the connection that sends it ends, nothing else is affected."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging

import pytest

from tests.fuzz import NOISE, Fuzzer, greetings
from tests.support import SOAK
from tests.unit.rendezvous.embedded_support import soon, story
from tests.unit.transport.listener_support import (
    JOB,
    SECRET,
    call,
    echoed,
    frame,
    receiving,
    stranger,
)
from torchelastic.transport import frames
from torchelastic.transport.auth import Credentials

SHOWN = Credentials(SECRET)


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "secret"])
@story
async def test_noise_ends_the_connection_that_made_it(secret):
    async with receiving(secret=secret, patience=0.2) as (listener, echo):
        member = await call(listener.port, Credentials(secret))
        no_nonce = frames.Hello(frames.PROTOCOL, frames.VERSION, JOB, None, nonce="none")
        for noise in (*NOISE, frames.pack(no_nonce)):
            async with stranger(listener.port) as noisy:
                noisy.say(noise)
                assert b"challenge" not in await noisy.end()
        await soon(lambda: listener.visitors == 0, "the strangers are gone")
        assert await echoed(member)
        assert len(echo.links) == 1


@story
async def test_stranger_before_admission_can_send_little():
    async with receiving() as (listener, echo):
        async with stranger(listener.port) as large:
            large.say(frame(b"x" * (frames.GREETING_LIMIT + 1)))
            assert await large.end() == b""
        member = await call(listener.port)
        assert await echoed(member, b"x" * frames.FRAME_LIMIT)
        member.send((frames.FRAME_LIMIT + 1).to_bytes(4, "big"))
        await asyncio.wait_for(asyncio.shield(echo.links[0].ended), 10)


@story
async def test_a_greeting_has_its_time_however_slowly_it_comes():
    async with receiving(secret=SECRET, patience=0.1) as (listener, echo):
        async with stranger(listener.port) as silent:
            assert await silent.end() == b""
        async with stranger(listener.port) as slow:
            # One that says hello and then nothing has no more time than the others.
            hello = frames.Hello(frames.PROTOCOL, frames.VERSION, JOB, None, nonce="0" * 64)
            slow.say(frames.pack(hello))
            assert b"challenge" in await slow.hear()
            assert await slow.end() == b""
        assert listener.visitors == 0
        assert not echo.links


@story
async def test_thousands_who_say_nothing_keep_nobody_out(caplog):
    async with (
        receiving(secret=SECRET, most_visitors=40) as (listener, _),
        contextlib.AsyncExitStack() as crowd,
    ):
        member = await call(listener.port, SHOWN)
        for number in range(120):
            await crowd.enter_async_context(stranger(listener.port))
            if number % 40 == 0:
                assert await echoed(await call(listener.port, SHOWN))
        assert await echoed(member)
        await soon(lambda: listener.visitors == 20, "half of the room is left to other sources")
    assert caplog.text.count("too many connections without a hello") == 1


@story
async def test_each_source_is_logged_once(caplog):
    caplog.set_level(logging.DEBUG, logger="torchelastic")
    async with receiving(secret=SECRET) as (listener, _):
        for _ in range(5):
            async with stranger(listener.port) as noisy:
                noisy.say(b"GET / HTTP/1.1\r\n\r\n")
                await noisy.end()
        async with stranger(listener.port):
            pass  # a look whether the port is open, as load balancers have
    assert len(caplog.records) == 1
    assert "Rejected a connection from 127.0.0.1: not a torchelastic node" in caplog.text


@story
async def test_frames_that_nobody_takes_do_not_fill_the_memory():
    async with receiving() as (listener, echo):
        member = await call(listener.port)
        echo.links[0].keep_frames()
        payload = b"x" * 100_000
        for _ in range(200):
            member.send(frame(payload))
        taken = [await asyncio.wait_for(echo.links[0].next_frame(), 10) for _ in range(200)]
        assert taken == [payload] * 200


@story
async def test_link_reader_that_gives_up_logs_nothing():
    printed = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: printed.append(what))
    async with receiving() as (listener, echo):
        member = await call(listener.port)
        member.next_frame()
        echo.links[0].abort()
        await asyncio.wait_for(asyncio.shield(member.ended), 10)
        del member
        gc.collect()
    assert printed == []


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "secret"])
@story
async def test_fuzzed_greetings(secret):
    fuzzer = Fuzzer(4)
    async with receiving(secret=secret, patience=0.5) as (listener, _):
        member = await call(listener.port, Credentials(secret))
        for number in range(100 * SOAK):
            async with stranger(listener.port) as bad:
                for piece in fuzzer.pieces(fuzzer.message(greetings(JOB))):
                    bad.say(piece)
            if number % 50 == 0:
                assert await echoed(member)
                assert await echoed(await call(listener.port, Credentials(secret)))
        await soon(lambda: listener.visitors == 0, "all of them are gone")
