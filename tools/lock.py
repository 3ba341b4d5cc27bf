"""Write requirements.lock: every package of the developer environment with its version and SHA-256.

python tools/lock.py               # asks pip to resolve '.[dev]' with constraints.txt; installs nothing

The hashes are those of the files that pip selects here, so the lock is valid for this platform only. It is installed by

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


if __name__ == "__main__":
    LOCK.write_text(lock_text(resolve()), encoding="utf-8")
