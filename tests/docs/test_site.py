"""The built site: complete navigation, all public names, and no resources from other hosts."""

import importlib
import importlib.util
import logging
import re
import shutil
import subprocess
from pathlib import Path

import griffe
import markdown
import pytest
import yaml

from docs.conftest import SITE_URL
from docs.pages import DOCS, PAGES, ROOT

PACKAGES = ["functional", "layers", "angles", "magnitudes", "losses", "regularizers", "optim", "models", "convert",
            "export", "data", "runs", "training", "estimators"]  # fmt: skip


class _Loader(yaml.SafeLoader):
    """Loader of mkdocs.yml, which contains a tag for environment variables."""


_Loader.add_constructor("!ENV", lambda loader, node: loader.construct_sequence(node)[1])


def navigation():
    """Return the files in the navigation of mkdocs.yml, in order."""

    def files(entries):
        for entry in entries:
            for value in entry.values():
                yield from [value] if isinstance(value, str) else files(value)

    return list(files(yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"]))


def test_navigation_contains_every_page():
    assert sorted(navigation()) == sorted(str(page.relative_to(DOCS)) for page in PAGES if DOCS in page.parents)


def test_site_builds_without_warnings(site):
    for file in navigation():
        assert (site / file).with_suffix(".html").is_file()


def test_docstrings_describe_the_arguments_of_their_functions(caplog):
    """What the build of the site prints as warnings, without building it."""
    extension = griffe.load_extensions(str(DOCS / "extensions" / "docstrings.py"))
    package = griffe.load("spherenet", search_paths=[ROOT / "src"], docstring_parser="google", extensions=extension)
    objects = [package]
    while objects:
        described = objects.pop()
        if described.docstring is not None:
            assert described.docstring.parsed is not None
        objects += [member for member in described.members.values() if not member.is_alias]
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_pages_have_titles_and_descriptions(site):
    """Search engines show both."""
    pages = {file: (site / file).with_suffix(".html").read_text() for file in navigation()}
    titles = [re.search(r"<title>(.*?)</title>", text)[1] for text in pages.values()]
    assert len(set(titles)) == len(titles)
    general = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["site_description"]
    own = [re.search(r'<meta name="description" content="(.*?)"', text)[1] for text in pages.values()]
    assert len(set(own)) == len(own)
    assert general not in own
    assert [text for text in own if not 30 <= len(text) <= 160] == []


def test_sitemap_lists_every_page(site):
    listed = re.findall(r"<loc>(.*?)</loc>", (site / "sitemap.xml").read_text())
    pages = [str(Path(file).with_suffix(".html")) for file in navigation()]
    assert sorted(listed) == sorted(SITE_URL + page for page in pages)


def test_address_of_the_site_is_that_of_the_metadata():
    """Placeholders and addresses are in pyproject.toml only; make passes the address on."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    urls = re.search(r'^Documentation = "(.*)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    planned = subprocess.run(["make", "--dry-run", "docs"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"SITE_URL='{urls[1]}'" in planned.stdout


def test_scripts_are_not_published(site):
    assert list(site.rglob("*.py")) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_documented(site, package):
    module = importlib.import_module(f"spherenet.{package}")
    pages = "".join(page.read_text() for page in sorted((site / "api").glob("*.html")))
    constants = {name for name in module.__all__ if name.isupper()}  # documented with the functions that use them
    for name in {*module.__all__} - constants:
        assert re.search(rf'id="spherenet\.{package}\.(\w+\.)?{name}"', pages), f"{name} is on no page"


def test_site_loads_nothing_from_other_hosts(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not re.findall(r'<(?:script|img|iframe)[^>]*\ssrc="https?:', text), page
        assert not re.findall(r'<link(?![^>]*rel="canonical")[^>]*\shref="https?:', text), page
    for sheet in (site / "assets").rglob("*.css"):
        assert not re.findall(r"url\([\"']?https?:|@import", sheet.read_text()), sheet


def test_figures_are_used_and_have_a_command():
    text = "".join(page.read_text() for page in PAGES)
    by_make_results = (ROOT / "paper" / "spherenet_paper" / "report" / "pages.py").read_text("utf-8")
    for figure in (DOCS / "images").glob("*.[sp][vn]g"):
        assert f"images/{figure.name}" in text
        script = figure.with_suffix(".py")
        by_command = re.search(rf"spherenet theory \w+.* -o {figure.name}", text) or figure.name in by_make_results
        assert script.is_file() or by_command, figure.name


def test_pages_contain_no_local_paths():
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
def test_broken_formula_is_an_error(to_html, text):
    with pytest.raises(Exception, match=r"braces|^$"):  # errors of the converter have no message
        to_html(text)


@pytest.mark.parametrize("text", ["`$HOME and $PATH`", "it costs $5, not $6", r"\$a\$", "a $ b $ c"])
def test_text_without_formulas_is_unchanged(to_html, text):
    assert "<math" not in to_html(text)


def test_numbers_stay_with_their_units(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "extensions")
    text = "86.6 ± 0.2 %, n = 5, p < 0.001, [−0.71, +1.29] and 3 points, k < n, [a, 1]; `a = 3 %`\n\n    b = 3 %\n"
    shown = markdown.markdown(text, extensions=["typography"]).replace("\N{NO-BREAK SPACE}", "~")
    together = "86.6 ±~0.2~%, n~=~5, p~&lt;~0.001, [−0.71,~+1.29] and 3~points, k &lt; n, [a, 1]; <code>a = 3 %</code>"
    assert together in shown
    assert "<pre><code>b = 3 %" in shown


def test_options_do_not_break_and_can_be_copied(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "extensions")
    shown = markdown.markdown("`train --data-dir x -o <y>` and `a-b`", extensions=["typography"])
    option = '<span class="option">{}</span>'.format
    assert f"<code>train {option('--data-dir')} x {option('-o')} &lt;y&gt;</code>" in shown
    assert "<code>a-b</code>" in shown


def test_stars_of_shapes_are_shown(site):
    assert "cosines [*, C] → [*, C]." in (site / "api" / "losses.html").read_text()
    for page in (site / "api").glob("*.html"):
        assert not re.findall(r"\[<em>", page.read_text()), page
