"""News of a KV connector's worker half, taken into a step's result: transfers that ended, and blocks whose load failed."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from pelton.errors import PluginError
from pelton.plugins import FIX_IT

if TYPE_CHECKING:
    from pelton.kv_transfer.interface import WorkerConnector
    from pelton.messages.step import ModelOutput


def take_news(name: str, connector: WorkerConnector, output: ModelOutput) -> None:
    """Add the news of the connector `name` to `output`. Raises `PluginError` that names it where they are something else."""
    finished, invalid = connector.take_finished(), connector.take_invalid_block_ids()
    is_pair = isinstance(finished, (tuple, list)) and len(finished) == 2
    if not is_pair or not all(_are(str, ids) for ids in finished):
        raise _wrong(
            name, connector, f"{finished!r} from take_finished", "two lists of request ids, (sending, receiving)"
        )
    if not _are(int, invalid):
        raise _wrong(name, connector, f"{invalid!r} from take_invalid_block_ids", "a list of block ids")
    sending, receiving = finished
    output.finished_sending += sending
    output.finished_receiving += receiving
    output.invalid_block_ids += invalid


def _are(kind: type, values: Any) -> bool:
    return isinstance(values, Collection) and not isinstance(values, str) and all(type(one) is kind for one in values)


def _wrong(name: str, connector: WorkerConnector, found: str, wanted: str) -> PluginError:
    made_by = type(connector)
    place = f"{made_by.__module__}:{made_by.__qualname__}"
    return PluginError(f"The KV connector {name!r} ({place}) gives {found}; it has to give {wanted}. {FIX_IT}")
