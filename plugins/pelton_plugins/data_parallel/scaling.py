"""`Scaling`: another number of engines while they serve.

Engines with a model each come and leave one by one: those that stay notice nothing. Engines that share their experts have other experts
where there are more or fewer of them: all leave, and as many as are wanted start.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from pelton.config.parallel import ParallelConfig
from pelton.engine.client import EngineClient
from pelton.errors import ConfigError, EngineDeadError, EngineError, NotSupportedError, RequestError
from pelton.logging import get_logger
from pelton_plugins.data_parallel.side_by_side import run_all, start_all

if TYPE_CHECKING:
    from pelton_plugins.data_parallel.client import SeveralEngines

MAX_ENGINES = 1024
MAX_DRAIN_S = 86_400.0
CLOSE_S = 10.0

logger = get_logger(__name__)


def check_elastic(parallel: ParallelConfig) -> None:
    """Raise `ConfigError` where the number of engines may change and cannot."""
    for name in ("data_parallel_address", "data_parallel_size_local", "data_parallel_start_rank"):
        if parallel.enable_elastic_ep and getattr(parallel, name):
            raise ConfigError(
                f"{name} is {getattr(parallel, name)!r}, which does not go with enable_elastic_ep: all engines are of one server on one "
                "host. Leave one of them off."
            )


class Scaling:
    """One in each front end. calls: what `EngineClient.call` does here, by method.

    `scale_elastic_ep`(number, seconds) does all. `check_scaling` says what is against it, and changes nothing. A front end of engines that
    another process owns has `take_engines`(number, seconds): engines leave, by number and not closed, and those that its starter gives
    join; all of them leave with 0. `num_engines`: how many there are.
    """

    def __init__(self, engines: SeveralEngines, parallel: ParallelConfig) -> None:
        self._engines, self._parallel = engines, parallel
        self.why_none: str | None = None
        """Why there are no engines, while there are none."""
        self._is_busy = threading.Lock()
        self.calls: dict[str, Callable[..., Any]] = {
            "scale_elastic_ep": self.scale,
            "check_scaling": self.check,
            "take_engines": self.take,
            "num_engines": lambda: engines.num_engines,
        }

    def check(self, num_engines: int, drain_timeout_s: float) -> bool:
        if not self._parallel.enable_elastic_ep:
            raise NotSupportedError(
                f"The number of engines stays {self._engines.num_engines}: enable_elastic_ep is off.",
                param="new_data_parallel_size",
            )
        if not _is_number(num_engines, int) or not 1 <= num_engines <= MAX_ENGINES:
            _refuse("new_data_parallel_size", num_engines, f"Use a whole number of engines, 1 to {MAX_ENGINES}")
        if not _is_number(drain_timeout_s, (int, float)) or not 0 <= drain_timeout_s <= MAX_DRAIN_S:
            _refuse("drain_timeout", drain_timeout_s, f"Use seconds, 0 to {MAX_DRAIN_S:g}")
        if self._is_busy.locked():
            _refuse_now("The number of engines is being changed already.")
        if self._engines.num_engines and self._engines.call("is_sleeping"):
            _refuse_now("The engines sleep. Wake them up first.")
        return True

    def scale(self, num_engines: int, drain_timeout_s: float) -> bool:
        """Blocks until it is done. What is wrong leaves the engines as they were."""
        self.check(num_engines, drain_timeout_s)
        with self._busy():
            before = self._engines.num_engines
            if num_engines == before:
                return True
            logger.info("%d engines become %d.", before, num_engines)
            try:
                if self._parallel.enable_expert_parallel:
                    self._replace_all(before, num_engines, drain_timeout_s)
                else:
                    self._close(self._engines.leave(num_engines, drain_timeout_s))
                    self._start(before, num_engines)
            except Exception as error:
                self._engines.check_open()
                if not self._engines.num_engines:
                    raise
                self._engines.info = self._engines.shared_info()
                why = f"{num_engines} engines did not start, and there are {before} as before. {error}"
                if isinstance(error, ConfigError):
                    raise RequestError(why, param="new_data_parallel_size") from error
                raise EngineError(why) from error
            self.why_none = None
            self._engines.info = self._engines.shared_info()
        return True

    def take(self, num_engines: int, drain_timeout_s: float) -> bool:
        with self._busy():
            self.why_none = "The number of engines is being changed."
            self._engines.leave(num_engines, drain_timeout_s)
            first = self._engines.num_engines
            if num_engines > first:
                parallel = msgspec.structs.replace(self._parallel, data_parallel_size=num_engines)
                self._engines.join([self._engines.start_one(parallel, index) for index in range(first, num_engines)])
            if num_engines:
                self.why_none = None
        return True

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        if not self._is_busy.acquire(blocking=False):
            _refuse_now("The number of engines is being changed already.")
        try:
            yield
        finally:
            self._is_busy.release()

    def _start(self, first: int, end: int) -> None:
        """Start engines with these numbers beside those that run."""
        if first >= end:
            return
        parallel = msgspec.structs.replace(self._parallel, data_parallel_size=end)
        self._have(self._started(parallel, range(first, end), lambda: None))

    def _replace_all(self, before: int, num_engines: int, drain_timeout_s: float) -> None:
        """With another share of the experts in each. Where they do not start, those that were there are started again."""
        self.why_none = f"{before} engines that share their experts become {num_engines}."
        engines = self._engines
        self._close(engines.leave(0, drain_timeout_s))
        try:
            self._start_group(num_engines)
        except Exception as error:
            if not before:
                raise
            engines.check_open()
            logger.error("%d engines did not start: %s", num_engines, error)
            try:
                self._start_group(before)
            except Exception as second:
                self.why_none = f"There are no engines: {num_engines} did not start ({error}), and {before} did not any more ({second})."
                raise EngineDeadError(self.why_none) from second
            self.why_none = None
            raise

    def _start_group(self, num_engines: int) -> None:
        engines = self._engines
        group, parallel = engines.group_of(
            msgspec.structs.replace(self._parallel, data_parallel_size=num_engines, data_parallel_store=None)
        )
        give_up = (lambda: None) if group is None else group.give_up
        try:
            clients = self._started(parallel, range(num_engines), give_up)
            engines.set_group(group)
            self._have(clients)
        except BaseException:
            if group is not None:
                group.close()
            raise

    def _started(
        self, parallel: ParallelConfig, indexes: Sequence[int], give_up: Callable[[], None]
    ) -> list[EngineClient]:
        engines = self._engines
        return start_all(
            [partial(engines.start_one, parallel, index) for index in indexes], give_up, engines.check_open
        )

    def _have(self, clients: Sequence[EngineClient]) -> None:
        """Let them join, if they have room for what requests were checked against since the start."""
        promised, found = self._engines.info.max_model_len, min(client.info.max_model_len for client in clients)
        try:
            if found < promised:
                raise EngineError(
                    f"A new engine has room for requests of {found} tokens, and {promised} are promised (max_model_len)."
                )
            self._engines.join(clients)
        except BaseException:
            self._close(clients)
            raise

    @staticmethod
    def _close(clients: Sequence[EngineClient]) -> None:
        for future in run_all([partial(client.shutdown, CLOSE_S) for client in clients]):
            with contextlib.suppress(EngineDeadError):
                future.result()


def _is_number(value: object, kinds: type | tuple[type, ...]) -> bool:
    return (
        isinstance(value, kinds)
        and not isinstance(value, bool)
        and not (isinstance(value, float) and math.isnan(value))
    )


def _refuse(name: str, value: object, what: str) -> NoReturn:
    raise RequestError(what, param=name, value=value)


def _refuse_now(why: str) -> NoReturn:
    error = RequestError(why, param="new_data_parallel_size")
    error.status = 409
    raise error
