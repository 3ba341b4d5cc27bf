"""The Markdown pages of the repository, split into their fenced blocks."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAMES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "DECISIONS.md",
         "LICENSES.md", "RELEASING.md")  # fmt: skip
PAGES = [*(ROOT / name for name in NAMES), *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`((?:spherenet|make|python|pip|torchrun)\s[^`]+)`")


class Block(NamedTuple):
    """A fenced block: its language, its text and the line at which it starts."""

    language: str
    text: str
    line: int


def name_of(page):
    return str(page.relative_to(ROOT))


def blocks(page, *languages):
    """Return the blocks of a page in these languages, in order."""
    text = page.read_text(encoding="utf-8")
    fenced = [Block(fence[1], fence[2], text.count("\n", 0, fence.start(2))) for fence in FENCE.finditer(text)]
    return [block for block in fenced if block.language in languages]


def commands(block):
    """Return the commands of a bash or console block as lists of words, without comments and redirections."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    split = [shlex.split(line, comments=True) for line in lines]
    return [_without_redirection(words) for words in split if words]


def all_commands(page):
    """Return the commands of a page in order: those of bash and console blocks and those in inline code."""
    text, position, found = page.read_text(encoding="utf-8"), 0, []
    for fence in [*FENCE.finditer(text), None]:
        prose = text[position : fence.start() if fence else len(text)]
        found += [shlex.split(span[1]) for span in INLINE.finditer(prose)]
        if fence and fence[1] in ("bash", "console"):
            found += commands(Block(fence[1], fence[2], 0))
        position = fence.end() if fence else len(text)
    return found


def _without_redirection(words):
    ends = [words.index(sign) for sign in (">", "|", "&&") if sign in words]
    return words[: min(ends, default=len(words))]


def shown_output(block):
    """Return the lines of a console block that are not commands: the expected output."""
    return [line for line in block.text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("$ ")]
