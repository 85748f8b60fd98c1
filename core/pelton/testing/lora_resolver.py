"""Conformance of LoRA resolvers: what any implementation has to keep, run with pytest.

Subclass `LoRAResolverConformance` in a test module, give it `make_resolver`, and `known_name` where there is an adapter.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar

import pytest

from pelton.config import EngineConfig
from pelton.errors import RequestError
from pelton.lora.request import LoRARequest
from pelton.lora.resolver import LoRAResolver, ResolverContext

BASE_NAME = "under-test"
HOSTILE_NAMES = (
    "", ".", "..", "../../etc", "/etc", "a/../../etc", "a\0b", "no such adapter", "ä" * 300, "C:\\x", "~root", "$HOME", "*",
)  # fmt: skip


class LoRAResolverConformance:
    known_name: ClassVar[str | None] = None
    """An adapter that it finds after `prepare`."""

    def prepare(self, folder: Path) -> None:
        """Put adapters where the resolver looks for them."""

    def make_resolver(self, context: ResolverContext, folder: Path) -> LoRAResolver:
        """folder: an empty one, which `prepare` filled."""
        raise NotImplementedError

    @pytest.fixture
    def resolver(self, tmp_path: Path) -> LoRAResolver:
        self.prepare(tmp_path)
        context = ResolverContext(
            config=EngineConfig.from_flat(model=BASE_NAME), max_lora_rank=16, target_modules=("q_proj", "v_proj"),
            base_model_names=(BASE_NAME,),
        )  # fmt: skip
        return self.make_resolver(context, tmp_path)

    @pytest.mark.parametrize("name", HOSTILE_NAMES, ids=[str(index) for index in range(len(HOSTILE_NAMES))])
    def test_a_name_that_is_not_its_own_is_nobodys_or_the_clients_error(
        self, resolver: LoRAResolver, name: str
    ) -> None:
        try:
            found = asyncio.run(resolver.resolve_lora(BASE_NAME, name))
        except RequestError:
            return
        assert found is None, f"{name!r} gives {found}"

    def test_finds_what_is_there(self, resolver: LoRAResolver) -> None:
        if self.known_name is None:
            pytest.skip("known_name is not set")
        found = asyncio.run(resolver.resolve_lora(BASE_NAME, self.known_name))
        assert isinstance(found, LoRARequest) and Path(found.lora_path).is_dir()
        assert found.lora_name == self.known_name, f"asked for {self.known_name!r}, it gives {found.lora_name!r}"

    def test_serves_requests_at_once(self, resolver: LoRAResolver) -> None:
        async def ask() -> list[LoRARequest | None]:
            names = [self.known_name or "no such adapter"] * 8
            return await asyncio.gather(*(resolver.resolve_lora(BASE_NAME, name) for name in names))

        found = asyncio.run(ask())
        assert all((one is None) == (self.known_name is None) for one in found)
