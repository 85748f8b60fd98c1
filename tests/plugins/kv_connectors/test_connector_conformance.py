"""The built-in KV connector keeps what every connector has to keep, and the suite says what a wrong one does wrong."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from _pytest.outcomes import Failed

from pelton.kv_transfer.interface import KVConnector
from pelton.testing.kv_connector import KVConnectorConformance, TwoHalves
from pelton_plugins.kv_connectors.block_files import StorageWorker
from pelton_plugins.kv_connectors.shared_storage import SharedStorage, StorageScheduler, storage_folder


class TestSharedStorage(KVConnectorConformance):
    connector = SharedStorage

    def extra_config(self, folder):
        return {"shared_storage_path": str(folder)}

    def damage(self, folder):
        files = list(folder.rglob("*.safetensors"))
        for path in files:
            path.write_bytes(path.read_bytes()[:-40])
        return bool(files)


class _SavesTooEarly(StorageScheduler):
    """Names blocks for saving in the step that computes them, whose result nobody knows yet."""

    def build_metadata(self, output):
        for new in output.new:
            self.request_computed(new.request_id)
        return super().build_metadata(output)


class _IgnoresSalts(StorageScheduler):
    def num_matched_tokens(self, request, num_computed_tokens):
        return super().num_matched_tokens(msgspec.structs.replace(request, cache_salt=None), num_computed_tokens)


class _NeverDone(StorageWorker):
    def take_finished(self):
        super().take_finished()
        return (), ()


class _CopiesLate(StorageWorker):
    """Keeps the pages in mind, and copies them when the engine ends."""

    def wait_for_save(self):
        self._late = [*getattr(self, "_late", ()), self._transfers]
        self._copied += self._transfers.leaving

    def shutdown(self):
        for transfers in getattr(self, "_late", ()):
            self._transfers = transfers
            super().wait_for_save()
        self._late = []
        super().shutdown()


class _AnyName(StorageScheduler):
    def __init__(self, name, *args, **options):
        super().__init__("mine", *args, **options)


def _connector(scheduler=StorageScheduler, worker=StorageWorker) -> type[KVConnector]:
    class Wrong(SharedStorage):
        @staticmethod
        def for_scheduler(context):
            return scheduler(context.name, storage_folder(context), 4, loads=True, saves=True)

        @staticmethod
        def for_worker(context):
            return worker(storage_folder(context))

    return Wrong


@pytest.mark.parametrize(
    "connector, test, message",
    [
        (
            _connector(_SavesTooEarly),
            "test_kv_of_a_request_that_failed_is_never_shared",
            "tokens 0 to 4 of layer.0 were brought with other content .* it is NaN of a request that failed",
        ),
        (_connector(_IgnoresSalts), "test_nothing_is_brought_for_other_tokens_or_another_salt", "other content than"),
        (
            _connector(worker=_NeverDone),
            "test_another_engine_gets_what_was_saved",
            "never reports finished_sending for r1",
        ),
        (
            _connector(worker=_CopiesLate),
            "test_another_engine_gets_what_was_saved",
            "tokens 0 to 4 of layer.0 were brought with other content .* what a later request wrote there",
        ),
        (
            _connector(_AnyName),
            "test_its_half_in_the_scheduler_has_the_name_it_was_given",
            "'mine'; metadata is sent under",
        ),
        (_connector(), "test_parts_of_several_ranks_are_kept_apart", "were brought with other content"),
    ],
    ids=["too-early", "salts", "never-done", "late-copy", "name", "ranks"],
)
def test_a_wrong_connector_fails_with_what_it_did(connector, test, message, tmp_path):
    suite = TestSharedStorage()
    model = KVConnectorConformance.model.__wrapped__(suite, tmp_path)
    settings = {
        "kv_connector": "x", "kv_connector_extra_config": suite.extra_config(Path(tmp_path / "stored")),
    }  # fmt: skip

    def start(num_ranks=1):
        return TwoHalves(connector, model, settings, num_ranks)

    options = (
        {"chunk": None} if "failed" in test else {"options": {"num_decodes": 0}} if "another_engine" in test else {}
    )
    with pytest.raises((AssertionError, Failed), match=message):
        getattr(suite, test)(start, **options)
