"""The built site: whole, in its navigation, every public name in it, and nothing that lives elsewhere."""

import importlib
import importlib.util
import re

import markdown
import pytest
import yaml

from docs.pages import DOCS, PAGES, ROOT

PACKAGES = ["functional", "layers", "losses", "regularizers", "optim", "models", "convert", "export", "data", "engine",
            "runlog", "estimators"]  # fmt: skip


class _Loader(yaml.SafeLoader):
    """mkdocs.yml may have tags of its own."""


def navigation():
    """The files that mkdocs.yml names, in order."""

    def files(entries):
        for entry in entries:
            for value in entry.values():
                yield from [value] if isinstance(value, str) else files(value)

    return list(files(yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"]))


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page():
    assert sorted(navigation()) == sorted(str(page.relative_to(DOCS)) for page in PAGES if DOCS in page.parents)


def test_it_builds_without_warnings(site):
    for file in navigation():
        assert (site / file).with_suffix(".html").is_file()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_documented(site, package):
    module = importlib.import_module(f"spherenet.{package}")
    page = (site / "api" / f"{package}.html").read_text()
    constants = {name for name in module.__all__ if name.isupper()}  # tables, told by what takes their keys
    for name in {*module.__all__} - constants:
        assert re.search(rf'id="spherenet\.{package}\.(\w+\.)?{name}"', page), f"{name} is not on its page"


def test_nothing_is_fetched_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not re.findall(r'<(?:script|img|iframe)[^>]*\ssrc="https?:', text), page
        assert not re.findall(r'<link(?![^>]*rel="canonical")[^>]*\shref="https?:', text), page
    for sheet in (site / "assets").rglob("*.css"):
        assert not re.findall(r"url\([\"']?https?:|@import", sheet.read_text()), sheet


def test_pictures_are_used_and_have_their_command_beside_them():
    text = "".join(page.read_text() for page in PAGES)
    for picture in (DOCS / "images").glob("*.[sp][vn]g"):
        assert f"images/{picture.name}" in text
        drawn_by = (DOCS / "images" / picture.name).with_suffix(".py")
        assert drawn_by.is_file() or re.search(rf"spherenet theory \w+.* -o {picture.name}", text), picture.name


def test_no_page_names_a_machine():
    for page in PAGES:
        assert not re.findall(r"/(?:work|tmp|home|root)/", page.read_text()), page


@pytest.fixture(scope="module")
def to_html():
    spec = importlib.util.spec_from_file_location("mathml", DOCS / "extensions" / "mathml.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda text: markdown.markdown(text, extensions=[module.makeExtension(), "tables"])


def test_formulas_become_mathml(to_html):
    assert '<math xmlns="http://www.w3.org/1998/Math/MathML" display="inline">' in to_html(r"for $\theta = 0$ it")
    block = to_html("as\n\n$$\\frac{a}{b},\n\\qquad c$$\n\nthen")
    assert 'display="block"' in block
    assert "<mfrac>" in block
    assert to_html("| $a$ | b |\n|---|---|\n| $x_1$ | 2 |").count("<math") == 2


@pytest.mark.parametrize("text", [r"$\frac{a$", "$x^$", r"$\left( a$"])
def test_a_broken_formula_is_an_error(to_html, text):
    with pytest.raises(Exception, match=r"braces|^$"):  # the converter's own errors say nothing
        to_html(text)


@pytest.mark.parametrize("text", ["`$HOME and $PATH`", "it costs $5, not $6", r"\$a\$", "a $ b $ c"])
def test_what_is_no_formula_stays(to_html, text):
    assert "<math" not in to_html(text)
