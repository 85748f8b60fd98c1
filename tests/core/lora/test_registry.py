"""Adapters in the front end: numbers that never come again, and names that resolvers find."""

from __future__ import annotations

import asyncio

import pytest

from pelton.config import LoRAConfig
from pelton.errors import AdapterNotFoundError, ConfigError, InvalidAdapterError, NotSupportedError, RequestError
from pelton.lora.registry import FAILURE_S, AdapterRegistry
from pelton.lora.request import LoRARequest


class Resolver:
    def __init__(self, found: dict[str, object]) -> None:
        self.found, self.asked, self.go = found, [], asyncio.Event()
        self.go.set()

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        self.asked.append((base_model_name, lora_name))
        await self.go.wait()
        found = self.found.get(lora_name)
        if isinstance(found, Exception):
            raise found
        return found  # type: ignore[return-value]


class Engine:
    def __init__(self) -> None:
        self.loaded: list[str] = []

    async def __call__(self, ref: object) -> None:
        await asyncio.sleep(0)
        self.loaded.append(ref.name)  # type: ignore[attr-defined]


def registry(**more: object) -> AdapterRegistry:
    return AdapterRegistry(LoRAConfig(enable_lora=True), ["base"], **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "a\nb", "\0", "a\x1b[31m", "\ud800", "a" * 257, 5])
def test_a_name_that_cannot_be_logged_is_refused(name):
    with pytest.raises(RequestError, match="lora_name must be a string of 1 to 256 printable characters") as refused:
        LoRARequest(name, 1, "/a")
    assert refused.value.param == "lora_name"


def test_a_number_never_comes_again():
    adapters, request = registry(), LoRARequest("x", 1, "/a")
    first = adapters.ref(request)
    assert adapters.ref(LoRARequest("x", 1, "/a")) is first
    assert adapters.ref(LoRARequest("x", 1, "/b")).id != first.id
    assert adapters.ref(LoRARequest("x", 2, "/a")).id != first.id
    adapters.forget(request)
    assert adapters.ref(request).id not in (first.id, 2, 3)


def test_what_is_no_request_is_refused():
    with pytest.raises(RequestError, match="lora_request is a str; give a LoRARequest"):
        registry().ref("x")  # type: ignore[arg-type]
    with pytest.raises(NotSupportedError, match="enable_lora is off"):
        AdapterRegistry(LoRAConfig()).ref(LoRARequest("x", 1, "/a"))
    for arguments in (("", 1, "/a"), ("x", 0, "/a"), ("x", 1, "")):
        with pytest.raises(RequestError):
            LoRARequest(*arguments)
    with pytest.raises(RequestError, match="The model itself has this name"):
        registry().check_name("base")


async def test_resolvers_are_asked_in_order_until_one_finds_it():
    adapters, engine = registry(), Engine()
    request = LoRARequest("sql", 1, "/sql")
    first, second, third = Resolver({}), Resolver({"sql": request}), Resolver({"sql": request})
    resolvers = [("first", first), ("second", second), ("third", third)]
    assert await adapters.resolve("sql", "base", resolvers, engine) == request
    assert first.asked == second.asked == [("base", "sql")]
    assert third.asked == []
    assert await adapters.resolve("sql", "base", resolvers, engine) == request  # it stays
    assert len(second.asked) == 1
    assert (engine.loaded, list(adapters.served)) == (["sql"], ["sql"])


async def test_a_second_request_waits_for_the_same_load_and_outlives_the_first():
    adapters, engine, resolver = registry(), Engine(), Resolver({"sql": LoRARequest("sql", 1, "/sql")})
    resolver.go.clear()
    asking = [asyncio.create_task(adapters.resolve("sql", "base", [("r", resolver)], engine)) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asking[0].cancel()
    resolver.go.set()
    results = await asyncio.gather(*asking, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1] == results[2] == LoRARequest("sql", 1, "/sql")
    assert (len(resolver.asked), engine.loaded) == (1, ["sql"])


async def test_a_failure_is_remembered_for_a_short_time():
    now = [0.0]
    adapters, engine, resolver = (
        registry(clock=lambda: now[0]),
        Engine(),
        Resolver({"bad": InvalidAdapterError("bad r")}),
    )
    for _ in range(2):
        with pytest.raises(InvalidAdapterError, match="bad r"):
            await adapters.resolve("bad", "base", [("r", resolver)], engine)
        with pytest.raises(AdapterNotFoundError, match="'gone' not found; asked: r"):
            await adapters.resolve("gone", "base", [("r", resolver)], engine)
    assert len(resolver.asked) == 2
    now[0] = FAILURE_S + 1
    resolver.found["bad"] = LoRARequest("bad", 1, "/bad")
    await adapters.resolve("bad", "base", [("r", resolver)], engine)
    assert engine.loaded == ["bad"]


async def test_a_resolver_that_breaks_leaves_the_name_to_the_next(caplog):
    broken, good = Resolver({"sql": ValueError("oops")}), Resolver({"sql": LoRARequest("sql", 1, "/sql")})
    await registry().resolve("sql", "base", [("broken", broken), ("good", good)], Engine())
    assert "LoRA resolver broken failed" in caplog.text


@pytest.mark.parametrize("found", ["/sql", LoRARequest("base", 1, "/sql")], ids=["text", "another-name"])
async def test_a_resolver_that_finds_something_else_leaves_the_name_to_the_next(found, caplog):
    """It is not the client's mistake; and an adapter of another name would be served as that, the model's own too."""
    broken, good = Resolver({"sql": found}), Resolver({"sql": LoRARequest("sql", 1, "/sql")})
    adapters = registry()
    await adapters.resolve("sql", "base", [("broken", broken), ("good", good)], Engine())
    assert "LoRA resolver broken failed" in caplog.text and "not a LoRARequest of that name" in caplog.text
    assert set(adapters.served) == {"sql"}


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"max_loras": 0}, "max_loras is 0; use 1 to"),
        ({"max_lora_rank": 257}, "max_lora_rank is 257; use 1 to 256"),
        ({"max_loras": 4, "max_cpu_loras": 3}, "max_cpu_loras is 3; use at least max_loras, 4"),
        ({"enable_lora": True, "lora_modules": ["x"]}, "lora_modules has 'x'; write name=path"),
        ({"lora_modules": ["x=/a"]}, "enable_lora is off"),
        ({"enable_lora": True, "lora_resolvers": ["x"]}, "--allow-runtime-lora-updating"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, match):
    with pytest.raises(ConfigError, match=match):
        LoRAConfig(**settings)
