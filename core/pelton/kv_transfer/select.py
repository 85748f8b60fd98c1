"""Find the KV connector that the settings name."""

from __future__ import annotations

from pelton.config import EngineConfig
from pelton.kv_cache.spec import KVCachePlan
from pelton.kv_transfer.interface import ConnectorContext, KVConnector
from pelton.metrics.plugin_metrics import PluginMetrics
from pelton.model.resolved import ResolvedModel
from pelton.plugins import Plugins


def find_connector(
    config: EngineConfig,
    model: ResolvedModel,
    plugins: Plugins,
    plan: KVCachePlan,
    metrics: PluginMetrics | None = None,
    rank: int = 0,
) -> tuple[type[KVConnector], ConnectorContext] | None:
    """Return the connector and what its halves are made from; None without one. Raises `ConfigError` for an unknown name."""
    name = config.kv_transfer.kv_connector
    if name is None:
        return None
    entry = plugins.find("pelton_kv_connectors", name, setting="kv_transfer_config.kv_connector")
    connector: type[KVConnector] = entry.resolve()
    return connector, ConnectorContext(
        name=entry.name, config=config, model=model, plan=plan, metrics=metrics or PluginMetrics(), rank=rank
    )
