"""From a model to a plan, with the options of one compilation: for its first model, and for those that replace it.

Owns the order: import, cache, plan from the cache, plan made, fallback of the whole model, cache written.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import anyio.to_thread
import msgspec

from aionn.errors import Error
from aionn.hal import ExecutionPreference, Model, Priority
from aionn.models.importing import ImportOptions, is_onnx
from aionn.observability.tracing import section
from aionn.platform.real_work import real_work
from aionn.runtime.background import Background
from aionn.runtime.clock import missed_at
from aionn.runtime.devices import RuntimeDevice
from aionn.runtime.placement.caching import open_cache
from aionn.runtime.placement.fallback import can_fall_back, may_fall_back
from aionn.runtime.placement.plan import Plan
from aionn.runtime.placement.planning import (
    LoadedModel,
    PlanOptions,
    identity_of,
    keep_plan,
    load_model,
    make_plan,
    restore_plan,
)
from aionn.runtime.recovery.prepared import Recoverer

__all__ = ["Compiler", "Planned"]


class Planned(NamedTuple):
    """A plan that is ready.

    Attributes:
        plan: It.
        from_cache: Whether every step came from the cache.
        recoverer: Makes its steps recover; None if they do not.
    """

    plan: Plan
    from_cache: bool
    recoverer: Recoverer | None


class Compiler:
    """Makes the plans of one compilation.

    Args:
        background: Where preparations after a death run.
        candidates: The devices, in the order of preference.
        fallback_device: Where failing steps run; None means nowhere.
        imports: For .onnx files.
        preference: See ``Runtime.compile`` for this and the next three.
        priority: See there.
        cache_dir: See there.
        recover: See there.

    Attributes:
        loaded: The model whose plan is being made, or could not be made, once it is loaded; for reports of a failure.
    """

    def __init__(
        self,
        background: Background,
        candidates: Sequence[RuntimeDevice],
        fallback_device: RuntimeDevice | None,
        imports: ImportOptions,
        *,
        preference: ExecutionPreference,
        priority: Priority,
        cache_dir: str | os.PathLike[str] | None,
        recover: bool,
    ) -> None:
        self._background = background
        self._candidates = candidates
        self._fallback_device = fallback_device
        self._imports = imports
        self._preference = preference
        self._priority = priority
        self._cache_dir = cache_dir
        self._recover = recover
        self.loaded: LoadedModel | None = None

    async def plan(
        self,
        model: Model | str | os.PathLike[str],
        *,
        deadline_ns: int | None,
        cache_token: bytes | None = None,
    ) -> Planned:
        """A plan for a model.

        Args:
            model: A model, or the path of a file.
            deadline_ns: For the plan; None means no deadline.
            cache_token: See ``Runtime.compile``.

        Raises:
            Error: As for ``Runtime.compile``.
        """
        self.loaded = None
        with section("LR_PC", "compile"), missed_at(deadline_ns, "compile"):
            described = b""
            if self._imports.names or (self._cache_dir is not None and await _is_onnx(model)):
                # The import may read other files, and depends on the options: its result identifies the compilation.
                self.loaded = await load_model(model, self._imports)
                model, described = self.loaded.model, identity_of(self.loaded, self._imports)
            cache = await open_cache(self._cache_dir, cache_token, model, described)
            recoverer = Recoverer(self._background) if self._recover else None
            options = PlanOptions(self._preference, self._priority, deadline_ns, cache, recoverer)
            # With leave to fall back the whole model is needed; without, a plan from the cache will do.
            plan = None
            if self._fallback_device is None:
                plan = await restore_plan(model, self._candidates, options)
            if plan is None:
                if self.loaded is None:
                    self.loaded = await load_model(model)
                    if cache is not None and not await cache.is_for(model):
                        cache, options = None, options._replace(cache=None)
                plan = await self._make(self.loaded, options)
        self.loaded = None
        return Planned(plan, cache is not None and cache.used is True, recoverer)

    async def _make(self, loaded: LoadedModel, options: PlanOptions) -> Plan:
        fallback_device = self._fallback_device
        if fallback_device is not None and not can_fall_back(loaded.model):
            fallback_device = None
        try:
            plan = await make_plan(loaded, self._candidates, options, fallback_device)
        except Error as e:
            if fallback_device is None or not may_fall_back(e):
                raise
            # A model that failed to compile goes to the reference device as a whole, as in the HAL.
            plan = await make_plan(loaded, [fallback_device], options._replace(cache=None))
            reason = f"fallback: compiling failed ({e})"
            return plan._replace(
                placement=tuple(msgspec.structs.replace(p, reason=reason) for p in plan.placement)
            )
        await keep_plan(plan, self._candidates, options)
        return plan


async def _is_onnx(model: Model | str | os.PathLike[str]) -> bool:
    if not isinstance(model, str | os.PathLike):
        return False
    with real_work("reading a model"):
        return await anyio.to_thread.run_sync(is_onnx, model)
