"""Conformance of platforms: what any implementation has to keep, run with pytest where the device is.

Subclass `PlatformConformance` in a test module and set `platform_class`.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from pelton.config import CUDAGraphMode, EngineConfig
from pelton.errors import ConfigError
from pelton.kv_cache.spec import DTYPE_BYTES
from pelton.platform.interface import Platform
from pelton.plugins import load_plugins
from pelton.worker.interface import Worker
from pelton.worker.select import worker_class


class PlatformConformance:
    platform_class: ClassVar[type[Platform]]
    settings: ClassVar[dict[str, object]] = {}
    """Flat settings to make the engine's configuration with."""

    @pytest.fixture
    def config(self) -> EngineConfig:
        return EngineConfig.from_flat(**self.settings)

    @pytest.fixture
    def platform(self, config: EngineConfig) -> Platform:
        platform = self.platform_class()
        platform.init_device(config, 0)
        return platform

    def test_says_who_it_is(self, platform: Platform) -> None:
        assert platform.name and platform.device_type
        assert platform.describe(0).strip()

    def test_defaults_are_usable(self, platform: Platform) -> None:
        assert platform.default_max_num_seqs >= 1
        assert platform.default_max_num_batched_tokens >= platform.default_max_num_seqs
        assert min(platform.encoder_scale, platform.throughput_scale) >= 1
        assert platform.default_dtype in platform.supported_dtypes
        assert set(platform.supported_dtypes) <= set(DTYPE_BYTES)
        assert CUDAGraphMode.NONE in platform.supported_graph_modes

    def test_device_computes_in_every_supported_dtype(self, platform: Platform) -> None:
        for name in platform.supported_dtypes:
            ones = torch.ones(4, 4, dtype=getattr(torch, name), device=platform.device(0))
            result = (ones @ ones).float().cpu()
            platform.synchronize()
            assert bool((result == 4).all()), name

    def test_selecting_the_device_again_changes_nothing(self, platform: Platform, config: EngineConfig) -> None:
        before = platform.device(0)
        platform.init_device(config, 0)
        assert platform.device(0) == before

    def test_capability_is_a_pair_or_nothing(self, platform: Platform) -> None:
        capability = platform.capability(0)
        assert capability is None or (len(capability) == 2 and all(isinstance(part, int) for part in capability))

    def test_kv_cache_gets_the_size_that_is_set(self, platform: Platform) -> None:
        config = EngineConfig.from_flat(**{**self.settings, "kv_cache_memory_bytes": 2**20})
        assert platform.available_kv_cache_bytes(config, weights_bytes=0, peak_activation_bytes=0) == 2**20

    def test_kv_cache_has_room_by_default(self, platform: Platform, config: EngineConfig) -> None:
        assert platform.available_kv_cache_bytes(config, weights_bytes=2**20, peak_activation_bytes=2**20) > 0

    def test_kv_cache_that_cannot_fit_is_the_operators_error(self, platform: Platform) -> None:
        config = EngineConfig.from_flat(**{**self.settings, "kv_cache_memory_bytes": 2**60})
        with pytest.raises(ConfigError, match=str(2**60)):
            platform.available_kv_cache_bytes(config, weights_bytes=0, peak_activation_bytes=0)

    def test_peak_is_measured_or_not_run(self, platform: Platform) -> None:
        ran: list[bool] = []
        peak = platform.measure_peak_bytes(lambda: ran.append(True))
        assert (peak is None and not ran) or (peak is not None and peak >= 0 and ran == [True])

    def test_compiling_ahead_says_how_many_kernels_were_new(self, platform: Platform) -> None:
        def run() -> None:
            torch.ones(4, device=platform.device(0)).sum()

        assert platform.compile_ahead(run) == 0, "torch's own kernels are none of them"

    def test_worker_is_a_worker(self, platform: Platform) -> None:
        assert issubclass(worker_class(platform, load_plugins()), Worker)
