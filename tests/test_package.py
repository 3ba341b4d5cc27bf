"""The package as a whole: what it exports, and what importing it costs."""

import subprocess
import sys

import spherenet as sn


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_import_does_not_wait_for_torch():
    assert run("import sys, spherenet; print(spherenet.__version__ != '', 'torch' in sys.modules)") == "True False"


def test_every_public_name_resolves():
    assert sn.__all__
    for name in sn.__all__:
        assert getattr(sn, name) is not None
    assert set(sn.__all__) <= set(dir(sn))


def test_submodules_resolve_on_first_use():
    assert run("import spherenet as sn; print(sn.functional.sphere_conv2d.__name__)") == "sphere_conv2d"
