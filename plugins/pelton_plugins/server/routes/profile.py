"""/start_profile, /stop_profile."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
from litestar import Response, post

from pelton.errors import PeltonError
from pelton_plugins.server.errors import NotAllowedError
from pelton_plugins.server.openapi import api
from pelton_plugins.server.state import ServerState

MAX_PROFILE_S = 60.0  # what is recorded stays in memory until it is written
WRITE_TIMEOUT_S = 300.0


class ProfileAnswer(msgspec.Struct):
    trace: str
    """The file, on the server's machine; with several ranks the first one's, beside which the others lie."""


def routes(state: ServerState) -> list[Any]:
    ends: set[asyncio.Task[None]] = set()

    async def end_later() -> None:
        await asyncio.sleep(MAX_PROFILE_S)
        with contextlib.suppress(PeltonError):  # it was ended meanwhile
            await state.engine().call("worker.stop_profile", timeout_s=WRITE_TIMEOUT_S)

    @post("/start_profile", status_code=200, opt=api(None, None, text="text/plain"))
    async def start_profile() -> Response[bytes]:
        """Record what engine and device do, for 60 s at most."""
        engine, folder = _engine(state)
        await engine.call("worker.start_profile", folder)
        for end in ends:
            end.cancel()
        task = asyncio.create_task(end_later())
        ends.add(task)
        task.add_done_callback(ends.discard)
        return Response(b"", media_type="text/plain")

    @post("/stop_profile", status_code=200, opt=api(None, ProfileAnswer))
    async def stop_profile() -> Response[bytes]:
        """Write the trace, which Perfetto and Chrome show."""
        engine, _ = _engine(state)
        trace = await engine.call("worker.stop_profile", timeout_s=WRITE_TIMEOUT_S)
        for end in ends:
            end.cancel()
        return Response(msgspec.json.encode(ProfileAnswer(trace)), media_type="application/json")

    return [start_profile, stop_profile]


def _engine(state: ServerState) -> tuple[Any, str]:
    folder = state.config.profile_dir
    if folder is None:
        raise NotAllowedError("Clients may not profile this engine: start the server with --profile-dir FOLDER.")
    return state.engine(), folder
