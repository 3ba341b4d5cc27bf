"""Markdown pages are well formed: tables, equation numbers, links inside the repository and names of tests."""

import re
from urllib.parse import urlsplit

import pytest

from docs.pages import DOCS, PAGES, ROOT, name_of

EQUATIONS = range(1, 27)
SEARCHED = ("src", "tests", "docs", "examples", "benchmarks")
SOURCES = [file for folder in SEARCHED for file in sorted((ROOT / folder).rglob("*"))
           if file.suffix in (".py", ".pyi", ".md", ".h", ".cpp")]  # fmt: skip


def without_code(text):
    """Return a page without fenced blocks; their lines become empty."""
    return re.sub(r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)


def columns(line):
    """Return the number of cells of a table row; escaped bars and bars in inline code do not separate cells."""
    text = re.sub(r"\\\||`[^`]*`", "", line.strip())
    return text.strip("|").count("|") + 1


def broken_rows(text):
    """Return (line number, problem) of each table row that Markdown does not render as a row of its table."""
    problems, width, previous = [], None, ""
    for number, line in enumerate(without_code(text).splitlines(), 1):
        is_row = line.startswith("|")
        is_delimiter = re.fullmatch(r"\|(\s*:?-+:?\s*\|)+", line) is not None
        if not is_row:
            width = None
        elif is_delimiter and width is None:
            width = columns(line)
            if columns(previous) != width:
                problems.append((number - 1, f"{columns(previous)} columns, {width} in the delimiter"))
        elif width is not None and columns(line) != width:
            problems.append((number, f"{columns(line)} columns instead of {width}"))
        elif width is None and previous.startswith("|"):
            problems.append((number, "table without a delimiter row"))
        elif width is None and not line.startswith("| ") and not line.startswith("||"):
            problems.append((number, "row must start with '| '"))
        previous = line
    return problems + single_rows(text)


def single_rows(text):
    """Return (line number, problem) of rows that stand alone, e.g. after an empty line in a table."""
    lines = ["", *without_code(text).splitlines(), ""]
    return [
        (number, "row outside of a table")
        for number, (before, line, after) in enumerate(zip(lines, lines[1:], lines[2:], strict=False), 1)
        if line.startswith("|") and not before.startswith("|") and not re.match(r"\|\s*:?-", after)
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tables_have_equal_columns(page):
    assert broken_rows(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("| a | b |\n|---|---|\n| 1 |\n", 3),
        ("| a | b |\n|---|---|---|\n", 1),
        ("| a | b |\n|---|---|\n| 1 | 2 |\n\n| 3 | 4 |\n", 5),
        ("| a | b |\n| 1 | 2 |\n", 2),
    ],
)
def test_broken_tables_are_found(text, line):
    assert line in [number for number, _ in broken_rows(text)]


def test_correct_tables_pass():
    assert broken_rows("| a | b |\n|:---|---|\n| `x|y` | 2 |\n| \\| | |\n\ntext\n\n| c |\n|---|\n| 1 |\n") == []


@pytest.mark.parametrize("number", EQUATIONS)
def test_every_equation_has_a_heading_with_an_anchor(number):
    page = (DOCS / "concepts.md").read_text(encoding="utf-8")
    section = re.search(rf"^## Eq\. {number}: .+ {{ #eq-{number} }}$(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    assert section is not None
    assert re.search(r"\$", section[1]), "the section has no formula"


def test_equations_are_in_order():
    page = (DOCS / "concepts.md").read_text(encoding="utf-8")
    assert [int(number) for number in re.findall(r"^## Eq\. (\d+):", page, re.MULTILINE)] == list(EQUATIONS)


def test_references_to_equations_exist():
    wrong = [f"{file.relative_to(ROOT)}: Eq. {number}" for file in SOURCES
             for number in re.findall(r"\bEqs?\. (\d+)", file.read_text(encoding="utf-8"))
             if int(number) not in EQUATIONS]  # fmt: skip
    assert wrong == []


def anchors(page):
    """Return the anchors of the headings of a page, as the site and GitHub create them."""
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text(encoding="utf-8")), re.MULTILINE)
    explicit = {match[1] for heading in headings if (match := re.search(r"{ #([\w-]+) }$", heading))}
    return explicit | {re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_to_files_and_headings(page):
    wrong = []
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            wrong.append(target)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_results_name_a_section(page):
    assert re.findall(r"\]\([^)]*\bresults\.md\)", page.read_text(encoding="utf-8")) == []


def unsuitable(link):
    """Return whether a link to another host cannot be followed by a reader: not https, local, or a placeholder."""
    host = urlsplit(link).hostname or ""
    reserved = host in ("localhost", "example.com", "example.org") or re.fullmatch(r"[\d.]+", host)
    return bool(
        not link.startswith("https://") or "." not in host or reserved or re.search(r"OWNER|TODO|XXX|[<>{}]", link)
    )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_other_hosts_are_well_formed(page):
    """Whether the hosts can be reached is checked once a week by the job `links` of the workflow `docs`."""
    links = re.findall(r"\]\((\w+:[^)\s]*)\)|<(\w+:[^>\s]*)>", without_code(page.read_text(encoding="utf-8")))
    assert [link for pair in links for link in pair if link and unsuitable(link)] == []


def test_unsuitable_links_are_found():
    wrong = ["http://a.org", "https://", "https://host/a", "https://localhost/a", "https://127.0.0.1/a",
             "https://example.com", "https://OWNER.github.io/a", "https://a.org/<name>", "ftp://a.org"]  # fmt: skip
    assert [link for link in wrong if not unsuitable(link)] == []
    assert not unsuitable("https://arxiv.org/abs/1711.03189")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_of_tests_exist(page):
    """Pages refer to test functions and files by name."""
    folders = (ROOT / "tests", ROOT / "paper" / "tests")
    files = [file for folder in folders for file in folder.rglob("*.py")]  # several can have the same name
    names = {file.name for file in files}
    quoted = re.findall(r"`(?:tests/[\w/]*/)?((?:test|check)_\w+(?:\.py)?)`", page.read_text(encoding="utf-8"))
    names |= {name for file in files for name in re.findall(r"^\s*def (\w+)\(", file.read_text("utf-8"), re.MULTILINE)}
    assert [name for name in quoted if name not in names] == []
