"""Make Triton's interpreter faster: the same results, without work that it repeats or whose result it discards.

This is a plugin of pytest rather than a conftest.py, which pytest would import in all processes, with Triton.
"""

import os

import numpy as np
import pytest
from triton.runtime import interpreter

EVERY = int(os.environ.get("SPHERENET_EVERY", "1"))
OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def require_no_overflow(lhs, rhs, operation):
    """Check a sum, difference or product of integers. The interpreter computes this check and discards its result."""
    dtype = lhs.type.scalar
    assert dtype == rhs.type.scalar
    assert dtype.is_int()
    if dtype.int_bitwidth < 64:
        exact = OPERATIONS[operation.__name__](lhs.handle.data, rhs.handle.data, dtype=np.int64)
        inside = (exact >= dtype.get_int_min_value()) & (exact <= dtype.get_int_max_value())
        assert inside.all(), f"{dtype} overflows in {operation.__name__}"


def pytest_collection_modifyitems(config, items):
    """Leave the first case of every test, and every Nth case of all."""
    functions = [item.nodeid.partition("[")[0] for item in items]
    left = [at % EVERY == 0 or functions[at] not in functions[:at] for at in range(len(items))]
    config.hook.pytest_deselected(items=[item for item, stays in zip(items, left, strict=True) if not stays])
    items[:] = [item for item, stays in zip(items, left, strict=True) if stays]


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter():
    """Replace the functions of the language once per launch and function, and look up NumPy's dtypes once per dtype.

    The interpreter replaces a hundred functions in each call of a device function, although they stay replaced until
    the launch ends.
    """
    replaced = set()
    replace, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore

    def replace_once(function):
        if function in replaced:
            return interpreter._LangPatchScope()
        replaced.add(function)
        return replace(function)

    def restore_and_forget(scope):
        replaced.clear()
        restore(scope)

    dtypes, find_dtype = {}, interpreter._get_np_dtype

    def numpy_dtype(dtype):
        if dtype.name not in dtypes:
            dtypes[dtype.name] = find_dtype(dtype)
        return dtypes[dtype.name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", replace_once)
        patch.setattr(interpreter._LangPatchScope, "restore", restore_and_forget)
        patch.setattr(interpreter, "_get_np_dtype", numpy_dtype)
        patch.setattr(interpreter.interpreter_semantic, "binary_op_sanitize_overflow_impl", require_no_overflow)
        yield
