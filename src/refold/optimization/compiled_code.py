"""Where torch's compiler keeps the code that it makes: in a folder of ours for a while."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_INDUCTOR, _TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


@contextmanager
def compiled_code_in(folder: Path | None) -> Iterator[None]:
    """Let torch's compiler keep code in this folder. One that the user has set stays."""
    before = {name: os.environ.get(name) for name in (_INDUCTOR, _TRITON)}
    if folder is None or _is_set_by_user(before):
        yield
        return
    os.environ[_INDUCTOR] = str(folder)
    os.environ.pop(_TRITON, None)  # the compiler sets it to a folder inside of the other one
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _is_set_by_user(settings: dict[str, str | None]) -> bool:
    """Whether a setting is other than what the compiler itself sets when it runs."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    usual = os.path.abspath(default_cache_dir())
    return any(value is not None and not value.startswith(usual) for value in settings.values())
