"""Words that the style guide replaces, and where they occur: `python tests/docs/vocabulary.py PATH …` lists them.

Looked at are docstrings, comments, names and other strings of Python files, and the text of Markdown pages.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

UNIT = r"(filter|step|pixel|layer|line|run|verb|batch|class|channel|row|map|image|epoch|network|process|file)"
PER = r"(numbers?|objects?|bars?|modules?|folders?|values?|rows?|times?|sums?|kernels?|bytes?|seconds?|images?|one k)"

PATTERNS = {
    r"(?<![A-Za-z])SPEC( \d|2\b)": "a document in the repository, such as Eq. 5 of docs/concepts.md",
    r"(?<![a-z])pictures?(?![a-z])": "image",
    r"\b(go|goes|going|went|gone) on\b": "resume, continue",
    r"\bbegun\b": "started",
    r"\banswers? (with|to)\b|\b(the|its|an|whose|these|same|exact) answers?\b": "output, value, returns",
    r"\bis (not )?to be had\b|\bto be had\b|\bbears\b": "(not) available, (not) supported",
    r"\bas at two\b|, say[,.)]|\(say[ ,]": "for example",
    r"\b(is|are|not|be|still) whole\b|\bwhole (checkpoint|file|lines? only)|\bdamaged\b": "valid, complete, corrupt",
    r"\bwants?\b|\basks? for\b|\basked for\b": "requires, takes, requested",
    r"\b(house|houses|rooms?|witness|witnesses)\b": "layer factory, package, probe",
    r"(?<!CNN )(?<!CNN)(?<!cnn_)(?<!cnn )\btwins?\b": "CNN twin, counterpart",
    rf"\b{PER} an? {UNIT}\b": "per",
    r"\b(colour|grey|centre|behaviour|neighbour|favour|licence|catalogue|analyse|metre|fibre|cancelled|labelled)": "American spelling",
    r"(?i)\w*(normalis|optimis|initialis|recognis|summaris|quantis|generalis|minimis|maximis|regularis|parametris"
    r"|serialis|synchronis|organis|penalis|visualis|standardis|equalis|factoris|linearis|vectoris|utilis)(e|ed|es|er"
    r"|ers|ing|ation|ations|able)\b": "American spelling",
}
"""Regular expression of what is avoided, and what to write instead."""

ALLOWED = (
    "--train-pictures",  # hidden aliases of earlier option names
    "train_pictures",
)
"""Text that may stay although a pattern matches it."""


def findings(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield (line number, matched text, what to write instead) for each finding in a file."""
    in_code = False
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if path.suffix == ".md" and line.lstrip().startswith("```"):
            in_code = not in_code
        text = line
        for allowed in ALLOWED:
            text = text.replace(allowed, "")
        for pattern, instead in PATTERNS.items():
            for match in re.finditer(pattern, text):
                yield number, match.group(), instead


def files_of(paths: list[Path]) -> Iterator[Path]:
    """Yield the Python, stub, C++ and Markdown files among paths and below them."""
    for path in paths:
        if path.is_dir():
            yield from (
                file for file in sorted(path.rglob("*")) if file.suffix in (".py", ".pyi", ".md", ".h", ".cpp", ".j2")
            )
        else:
            yield path


if __name__ == "__main__":
    count = 0
    for file in files_of([Path(argument) for argument in sys.argv[1:]]):
        for number, found, instead in findings(file):
            print(f"{file}:{number}: {found!r}: write {instead}")
            count += 1
    raise SystemExit(bool(count))
