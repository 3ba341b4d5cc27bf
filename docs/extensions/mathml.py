"""Markdown extension: convert formulas to MathML when the site is built, `$…$` inline and `$$…$$` as a block.

Browsers render MathML natively, without scripts or fonts. Code is not changed. A formula that cannot be parsed
stops the build.
"""

import re
import xml.etree.ElementTree as ElementTree

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor

__all__ = ["MathMLExtension", "makeExtension"]

FORMULA = r"\$\$(?P<block>.+?)\$\$|(?<![\\$\w])\$(?P<inline>[^\s$](?:[^$\n]*[^\s$])?)\$(?![$\w])"
AFTER_BACKTICKS = 185  # backticks have 190 and escapes 180: code has priority over formulas, formulas over escapes


class _Formula(InlineProcessor):
    def handleMatch(self, match: re.Match[str], data: str) -> tuple[str, int, int]:  # type: ignore[override]  # noqa: N802
        latex = match["block"] or match["inline"]
        if latex.count("{") != latex.count("}"):  # the converter would guess the missing one
            raise ValueError(f"the braces of the formula {latex!r} do not match.")
        mathml = convert(latex.strip(), display="block" if match["block"] else "inline")
        ElementTree.fromstring(mathml)  # noqa: S314 - trusted input; fails if the output is not well-formed
        return self.md.htmlStash.store(mathml), match.start(0), match.end(0)


class MathMLExtension(Extension):
    """Registers the formula pattern."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Add the inline pattern."""
        pattern = _Formula(FORMULA, md)
        pattern.compiled_re = re.compile(FORMULA, re.DOTALL)
        md.inlinePatterns.register(pattern, "mathml", AFTER_BACKTICKS)


def makeExtension(**options: object) -> MathMLExtension:  # noqa: N802
    """Return the extension; Markdown calls this function."""
    return MathMLExtension(**options)
