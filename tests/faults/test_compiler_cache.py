"""Compilers use a cache that only the user can access: they would execute what another user stores in it."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from command_line import TINY, one_sentence, spherenet
from spherenet._util.caches import private_folder, use_private_compiler_cache
from spherenet.kernels import backends, compiled

POINT = 4
VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS")
posix = pytest.mark.skipif(os.name != "posix", reason="owners and modes of folders")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return the folder for compiled code of a user who has not set any variable."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # restores the variable after the test, also if it is set in between
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "spherenet" / "compiler"


@posix
def test_cache_is_private(cache, tried):
    use_private_compiler_cache()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert [Path(os.environ[name]).parent for name in VARIABLES[:2]] == [cache, cache]
    use_private_compiler_cache()  # an existing folder is used again
    tried("a private folder for compiled code")


def test_folders_chosen_by_the_user_are_kept(cache, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLES[0], str(tmp_path / "mine"))
    monkeypatch.setenv(VARIABLES[1], str(tmp_path / "mine too"))
    use_private_compiler_cache()
    assert [os.environ[name] for name in VARIABLES[:2]] == [str(tmp_path / "mine"), str(tmp_path / "mine too")]
    assert not cache.exists()


def test_default_that_torch_has_stored_is_replaced(cache, tmp_path, monkeypatch):
    """When torch compiles for the first time, it writes its default into the variable."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv(VARIABLES[0], str(tmp_path / "torchinductor_me"))
    use_private_compiler_cache()
    assert Path(os.environ[VARIABLES[0]]).parent == cache


def link(cache):
    cache.parent.mkdir(parents=True)
    (cache.parent / "elsewhere").mkdir(mode=0o700)
    cache.symlink_to(cache.parent / "elsewhere")


def file(cache):
    cache.parent.mkdir(parents=True)
    cache.touch()


def open_to_others(cache):
    cache.mkdir(parents=True)
    cache.chmod(0o755)


def in_writable_folder(cache):
    cache.mkdir(parents=True, mode=0o700)
    cache.parent.chmod(0o777)


FOREIGN = {
    "a link": link,
    "a regular file": file,
    "mode 755": open_to_others,
    "every user can replace it": in_writable_folder,
}


@posix
@pytest.mark.parametrize("problem", FOREIGN)
def test_folder_that_is_not_private_is_rejected(cache, problem, tried):
    FOREIGN[problem](cache)
    with pytest.raises(
        PermissionError, match=rf"compiler must be a folder of this user with mode 700, got .*{problem}"
    ):
        use_private_compiler_cache()
    assert not set(VARIABLES[:2]) & set(os.environ)
    tried(f"a folder for compiled code: {problem}")


@posix
@pytest.mark.parametrize("owned", ["the folder", "the folder around it"])
def test_folder_of_another_user_is_rejected(cache, monkeypatch, owned, tried):
    private_folder(cache)
    original, foreign = os.geteuid(), cache if owned == "the folder" else cache.parent
    if original == 0:
        os.chown(foreign, 1, -1)
    else:  # only root can give folders away: the process gets another user instead
        monkeypatch.setattr(os, "geteuid", lambda: original + 1)
    with pytest.raises(PermissionError, match="another user"):
        private_folder(cache)
    tried(f"a folder for compiled code: {owned} belongs to another user")


@posix
def test_layer_runs_without_compiler_if_there_is_no_private_folder(cache, caplog, monkeypatch):
    def increment(x):
        return x + 1

    link(cache)
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("compiled"))
    for _ in range(2):
        assert compiled.compiled_or_plain(increment, torch.ones(2)).tolist() == [2, 2]
    (record,) = caplog.records
    assert "got a link" in record.getMessage()


@posix
def test_triton_is_not_imported_if_there_is_no_private_folder(cache, monkeypatch):
    link(cache)
    monkeypatch.setattr(backends.importlib, "import_module", lambda name: pytest.fail(f"imported {name}"))
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: name)
    backends.load_backend.cache_clear()
    backends.has_triton.cache_clear()
    with pytest.warns(RuntimeWarning, match="without Triton.*got a link"):
        assert not backends.has_triton()
    backends.has_triton.cache_clear()


@posix
def test_train_with_compile_rejects_a_folder_that_is_not_private(cache, tmp_path, capsys):
    link(cache)
    assert spherenet("train", *TINY, "--compile", "--output", tmp_path / "run") == 2
    assert one_sentence(message := capsys.readouterr().err), message
    assert "got a link" in message


def test_precompiled_headers_are_switched_off_if_the_compiler_is_imported_already(cache, monkeypatch):
    """torch keeps them in the temporary directory, whatever the folder of the cache is."""
    from torch._inductor import config

    monkeypatch.setattr(config, "cpp_cache_precompile_headers", True)
    use_private_compiler_cache()
    assert config.cpp_cache_precompile_headers is False


COMPILE = """
import logging, torch
from spherenet.kernels.compiled import compiled_or_plain
def formula(x):
    return x.sin() + 1
logging.basicConfig()
compiled_or_plain(formula, torch.ones(9))
"""


@posix
def test_compiler_writes_no_file_to_the_temporary_directory(cache, tmp_path, tried):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "without torch.compile" not in done.stderr
    assert [path for path in temporary.rglob("*") if not path.is_dir()] == []
    assert any((cache / "inductor").iterdir())
    tried("a function compiled in a new process: no file in the temporary directory")
