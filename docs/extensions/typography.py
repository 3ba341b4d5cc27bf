"""Markdown extension: lines do not break inside "79 %", "± 0.2", "n = 3", an interval, or an option like `--data`.

Text gets no-break spaces when the site is built, so that sources stay plain. Code keeps its characters, to be copied.
"""

import re
import xml.etree.ElementTree as ElementTree

from markdown import Extension, Markdown
from markdown.treeprocessors import Treeprocessor

__all__ = ["TypographyExtension", "makeExtension"]

NUMBER = r"[+−-]?\d[\d.,]*"
TOGETHER = re.compile(
    rf"[±<≤] (?=\d)|(?<=\d) (?=%|points\b)|(?<=\[){NUMBER}, (?={NUMBER}\])|(?<![\w.])[^\W\d_]′? [=<≤≥] (?={NUMBER})"
)
OPTION = re.compile(r"(?<!\S)(--?\w[\w-]*)")
LITERAL = ("pre", "script", "style", "math", "svg")
AFTER_INLINE = 15  # inline patterns have 20


class _NoBreaks(Treeprocessor):
    def run(self, root: ElementTree.Element) -> None:
        """Change all texts below an element."""
        if root.tag in LITERAL:
            return
        if root.tag == "code":
            _wrap_options(root)
            return
        root.text = _joined(root.text)
        for child in root:
            self.run(child)
            child.tail = _joined(child.tail)


def _joined(text: str | None) -> str | None:
    """Replace the spaces at which a line must not break."""
    return text and TOGETHER.sub(lambda match: match[0].replace(" ", "\N{NO-BREAK SPACE}"), text)


def _wrap_options(code: ElementTree.Element) -> None:
    """Put each option of inline code into an element that does not break at its hyphens."""
    between, *parts = re.split(OPTION, code.text or "")
    code.text = between
    for option, after in zip(parts[::2], parts[1::2], strict=True):
        element = ElementTree.SubElement(code, "span", {"class": "option"})
        element.text, element.tail = option, after


class TypographyExtension(Extension):
    """Registers the change of spaces."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Add the processor."""
        md.treeprocessors.register(_NoBreaks(md), "typography", AFTER_INLINE)


def makeExtension(**options: object) -> TypographyExtension:  # noqa: N802
    """Return the extension; Markdown calls this function."""
    return TypographyExtension(**options)
