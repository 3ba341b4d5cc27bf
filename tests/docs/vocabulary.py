"""Terms that contributors should avoid, with replacements: `python tests/docs/vocabulary.py PATH …` lists occurrences.

Every line of Python, stub, C++, template and Markdown files is searched, except inline code of Markdown pages, which
may quote former names.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

UNIT = (
    r"(filter|step|pixel|layer|line|run|verb|batch|class|channel|row|map|image|epoch|network|process|file|seed|group)"
)
COUNTED = (
    r"(numbers?|objects?|bars?|modules?|folders?|values?|rows?|times?|sums?|kernels?|bytes?|seconds?|images?|one k)"
)
IS = r"(is|are|was|were|be|been)"


class Term(NamedTuple):
    """A term to avoid.

    Attributes:
        pattern: Regular expression that finds it.
        instead: What to write instead.
        sample: Sentence that contains it, for the test of the pattern.
    """

    pattern: str
    instead: str
    sample: str


TERMS = (
    Term(r"(?<![A-Za-z])SPEC( \d|2\b)", "an equation of docs/concepts.md, e.g. Eq. 5", "the loss of SPEC 1 (4)"),
    Term(rf"\b{COUNTED} an? {UNIT}\b", "per", "one number a pixel"),
    Term(
        rf"\bwhere (it|they|that|this|one|both) (is|are|does|do|has|have|can|cannot|fails?|fits?)\b"
        rf"|\bwhere (possible|needed|necessary|none {IS}|there (is|are)|nothing)\b",
        "if, when",
        "the default where none is given",
    ),
    Term(r"[,;:] for (it|they|we|there|nothing|nobody|otherwise)\b", "because, since", "made, for it reads them"),
    Term(r"\b(go|goes|going|went|gone) on\b", "resume, continue", "the run goes on"),
    Term(r"\b(had|has|have|is|are|was|were) begun\b|\bbegun\b", "started", "a run that was begun"),
    Term(r"(?i)\banswer(s|ed|ing)?\b", "output, value, returns", "the layer answers with an angle"),
    Term(r"(?i)(?<![a-z])pictures?(?![a-z])", "image", "read_pictures"),
    Term(r"\b(not )?to be had\b|\bbears\b", "(not) available, (not) supported", "a GPU is not to be had"),
    Term(r"\bas at two\b|, say(?=[,.)]|$)|\(say[ ,]", "e.g., for example", "a batch of two, say"),
    Term(
        rf"\b({IS}|not|still) whole\b|\bwhole (checkpoint|file|lines? only)|(?i:\bdamaged?\b)",
        "valid, complete, corrupt",
        "the checkpoint is whole",
    ),
    Term(
        r"(?<!you )\bwants?\b|\bask(s|ed|ing)? for\b", "requires, takes, allocates, requested", "it wants two numbers"
    ),
    Term(
        r"\b(in|into|of|a|each|every|one|per) pieces?\b|\b(a|its|own|their|his) share\b"
        r"|\bparts? of (a|the|its) (batch|epoch)\b",
        "step, iteration, epoch, batch, fraction",
        "each process takes its share",
    ),
    Term(r"\b(house|houses|witness|witnesses)\b|\brooms\b", "layer factory, package, probe", "the rooms of the house"),
    Term(r"(?<!CNN )(?<!CNN)(?<!cnn_)(?<!cnn )\btwins?\b", "CNN twin, counterpart", "a layer and its twin"),
    Term(r"\b(a|its|one|each|every|per) notes?\b", "message, reason", "a note on each layer"),
    Term(r"\b(say|says|said|saying) so\b", "reports, logs", "a run that collapses says so"),
    Term(rf"\b{IS} told\b", "receives, is reported, is documented", "the user is told"),
    Term(r"\bof (its|their|his|one's) own\b", "separate, custom", "a folder of its own"),
    Term(r"\bnobody\b", "no caller, no process", "nobody reads it"),
    Term(
        r"(?i)(colour|\bgrey|greyscale|centre[ds]?\b|behaviour|neighbour|favour|licence|catalogue|analyse|metre\b|fibre"
        r"|cancelled|labelled|modelling)",
        "American spelling",
        "the colour of a grey centre",
    ),
    Term(
        r"(?i)\w*(normalis|optimis|initialis|recognis|summaris|quantis|generalis|minimis|maximis|regularis|parametris"
        r"|serialis|synchronis|organis|penalis|visualis|standardis|equalis|factoris|linearis|vectoris|utilis)(e|ed|es|er"
        r"|ers|ing|ation|ations|able)\b",
        "American spelling",
        "an optimiser",
    ),
)

ALLOWED = (
    # Hidden aliases of former option names and names in files of earlier versions.
    "--train-pictures",
    "train_pictures",
    "--picture",
    '"colour"',
    '"pictures"',
    '"house"',  # a class of CIFAR-100
)
"""Text that may stay although a pattern matches it."""

SUFFIXES = (".py", ".pyi", ".md", ".h", ".cpp", ".j2")
INLINE_CODE = re.compile(r"`[^`\n]*`")


class Finding(NamedTuple):
    """An occurrence of a term."""

    line: int
    text: str
    instead: str


def search(text: str, terms: Iterable[Term] = TERMS) -> list[tuple[str, str]]:
    """Return (match, what to write instead) for each occurrence of a term in a text."""
    for allowed in ALLOWED:
        text = text.replace(allowed, "")
    return [(match.group(), term.instead) for term in terms for match in re.finditer(term.pattern, text, re.MULTILINE)]


def findings(path: Path) -> Iterator[Finding]:
    """Yield the occurrences in a file."""
    lines = path.read_text("utf-8").splitlines()
    if path.suffix == ".md":
        lines = [INLINE_CODE.sub("", line) for line in lines]
    occurring = {instead for _, instead in search("\n".join(lines))}
    terms = [term for term in TERMS if term.instead in occurring]
    for number, line in enumerate(lines, 1):
        for match, instead in search(line, terms) if terms else []:
            yield Finding(number, match, instead)


def files_of(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the files among paths and below them, except this one, which quotes all terms."""
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in SUFFIXES and file.resolve() != Path(__file__).resolve():
                yield file


if __name__ == "__main__":
    count = 0
    for file in files_of(map(Path, sys.argv[1:])):
        for number, match, instead in findings(file):
            print(f"{file}:{number}: {match!r}: write {instead}")
            count += 1
    raise SystemExit(bool(count))
