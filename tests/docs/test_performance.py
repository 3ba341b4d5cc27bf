"""The measured tables of the pages agree with docs/performance.json."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_pages_agree_with_measurements():
    specification = importlib.util.spec_from_file_location("performance_page", DOCS / "performance.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    for path, text in module.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python docs/performance.py"
