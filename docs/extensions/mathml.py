"""Formulas as MathML, made when the site is built: `$…$` in a line, `$$…$$` as a paragraph of its own.

Browsers draw MathML themselves, so a page needs no script and no font for it. What is in backticks or a code block is
left alone; a formula that cannot be read stops the build.
"""

import re
import xml.etree.ElementTree as ElementTree

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor

__all__ = ["MathMLExtension", "makeExtension"]

FORMULA = r"\$\$(?P<block>.+?)\$\$|(?<![\\$\w])\$(?P<inline>[^\s$](?:[^$\n]*[^\s$])?)\$(?![$\w])"
AFTER_BACKTICKS = 185  # they have 190, escapes 180: code wins over a formula, a formula's backslashes over escapes


class _Formula(InlineProcessor):
    def handleMatch(self, match: re.Match[str], data: str) -> tuple[str, int, int]:  # type: ignore[override]  # noqa: N802
        latex = match["block"] or match["inline"]
        if latex.count("{") != latex.count("}"):  # which the converter would mend by guessing
            raise ValueError(f"the braces of the formula {latex!r} do not match.")
        mathml = convert(latex.strip(), display="block" if match["block"] else "inline")
        ElementTree.fromstring(mathml)  # noqa: S314 - our own formulas; an error here is a broken page
        return self.md.htmlStash.store(mathml), match.start(0), match.end(0)


class MathMLExtension(Extension):
    """Registers the formulas of a page."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Add the inline pattern."""
        pattern = _Formula(FORMULA, md)
        pattern.compiled_re = re.compile(FORMULA, re.DOTALL)
        md.inlinePatterns.register(pattern, "mathml", AFTER_BACKTICKS)


def makeExtension(**options: object) -> MathMLExtension:  # noqa: N802
    """What Markdown calls."""
    return MathMLExtension(**options)
