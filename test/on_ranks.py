"""``@ranks(1, 3)`` makes a test of a body, a function that all ranks run, at each of these world sizes.

If there are more than two, only a thorough run has all of them. Otherwise a test runs the last one, and one of the others.

    @ranks(2, 3)
    def test_sum(ctx, factor):
        ...

Other arguments are fixtures or parameters, which must pickle. ``path`` is a path in ``tmp_path`` that does not exist.
"""

import functools
import importlib
import inspect
import zlib
from collections.abc import Callable
from typing import Any

import pairs
import pytest

Test = Callable[..., None]


def ranks(*world_sizes: int, pool: str = "pool", **options: Any) -> Callable[[Test], Test]:
    """Make a test of a body. Without ``world_sizes``, ``world_size`` is a parameter of the test.

    ``pool`` is the name of the fixture; ``options`` are arguments of its ``run``, such as ``timeout``.
    """

    def decorate(body: Test) -> Test:
        sizes = world_sizes
        if len(sizes) > 2 and not pairs.thorough:
            sizes = (sizes[zlib.crc32(body.__name__.encode()) % (len(sizes) - 1)], sizes[-1])
        wanted = [name for name in inspect.signature(body).parameters if name != "ctx"]

        def test(world_size: int = world_sizes[0] if world_sizes else 0, **values: Any) -> None:
            run = values.pop(pool).run
            if "path" in wanted:
                values["path"] = str(values.pop("tmp_path") / "x")
            call = functools.partial(_run, body.__module__, body.__name__)
            call.__name__ = body.__name__  # type: ignore[attr-defined]
            run(call, world_size=world_size, **values, **options)

        asked = [pool, *("tmp_path" if name == "path" else name for name in wanted)]
        if len(sizes) != 1:
            asked.append("world_size")
        kind = inspect.Parameter.KEYWORD_ONLY
        test.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in asked])  # type: ignore[attr-defined]
        test.body = body  # type: ignore[attr-defined]
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(test, name, getattr(body, name))
        return pytest.mark.parametrize("world_size", sizes)(test) if len(sizes) > 1 else test

    return decorate


def _run(module: str, name: str, ctx: Any, /, **values: Any) -> Any:
    return getattr(importlib.import_module(module), name).body(ctx, **values)
