"""Triton's interpreter, a third faster."""

from importlib import import_module
from importlib.util import find_spec

import pytest


@pytest.fixture(autouse=True, scope="session")
def _language_looked_through_once():
    """Where a kernel calls another function of Triton's language, the interpreter looks through all of that language again, to
    replace what it has replaced already when the kernel began."""
    interpreter = import_module("triton.runtime.interpreter") if find_spec("triton") else None
    if not all(hasattr(interpreter, name) for name in ("_patch_lang", "_LangPatchScope")):  # another version of Triton
        yield
        return
    import triton.language as tl

    replace = interpreter._patch_lang

    def replace_once(fn):
        languages = [module for module in (tl, tl.core) if any(value is module for value in fn.__globals__.values())]
        if not languages or any(tl.core.is_builtin(module.load) for module in languages):
            return replace(fn)
        return interpreter._LangPatchScope()  # with nothing to restore

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", replace_once)
        yield
