"""Write the lock files: every package of an environment with its version and SHA-256.

python tools/lock.py               # requirements.lock: asks pip to resolve '.[dev]' with constraints.txt
python tools/lock.py release       # build.lock and release.lock: asks uv to resolve the groups of pyproject.toml

Nothing is installed; the second command needs uv (pip install uv). build.lock has what setup.py needs, release.lock the
tools of a release. Both have the hashes of all files of a version, so they are valid for all systems.

The hashes in requirements.lock are those of the files that pip selects here, so it is valid for this platform only. It
is installed by `make LOCKED=1`, or by

pip install --require-hashes --requirement requirements.lock
pip install --no-deps --no-build-isolation --editable .
"""

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"
GROUPS = ("build", "release")


def resolve():
    """Return pip's report of what it would install."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = ["--dry-run", "--ignore-installed", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
        command = [sys.executable, "-m", "pip", "install", *options, "--report", str(report), f"{ROOT}[dev]"]
        subprocess.run(command, check=True)  # noqa: S603 (no input from outside)
        return json.loads(report.read_text(encoding="utf-8"))


def lock_text(report):
    """Return the content of requirements.lock for a report of pip."""
    lines = []
    for entry in report["install"]:
        name, version = entry["metadata"]["name"], entry["metadata"]["version"]
        if name != "spherenet-torch":
            sha256 = entry["download_info"]["archive_info"]["hashes"]["sha256"]
            lines.append(f"{name.lower().replace('_', '-')}=={version} --hash=sha256:{sha256}\n")
    system = f"{platform.system()} {platform.machine()}, Python {'.'.join(platform.python_version_tuple()[:2])}"
    return f"# Written by tools/lock.py for {system}. Install with pip install --require-hashes.\n" + "".join(
        sorted(lines)
    )


def lock_group(group):
    """Write the lock file of a dependency group of pyproject.toml, for all systems."""
    options = [
        "--universal",
        "--python-version",
        "3.11",
        "--generate-hashes",
        "--no-header",
        "--no-annotate",
        "--quiet",
    ]
    command = ["uv", "pip", "compile", *options, "--group", f"pyproject.toml:{group}"]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
    head = (
        "# Written by tools/lock.py release for all systems, Python 3.11. Install with pip install --require-hashes.\n"
    )
    (ROOT / f"{group}.lock").write_text(head + done.stdout, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["release"]:
        for group in GROUPS:
            lock_group(group)
    else:
        LOCK.write_text(lock_text(resolve()), encoding="utf-8")
