"""Code, tests and documentation avoid the terms of `vocabulary.py`."""

import pytest

from docs.pages import ROOT
from docs.vocabulary import ALLOWED, TERMS, files_of, findings, search

SEARCHED = ["src", "tests", "docs", "examples", "benchmarks", "tools", "README.md", "CHANGELOG.md", "CONTRIBUTING.md",
            "DECISIONS.md", "LICENSES.md", "RELEASING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", ".github",
            "setup.py"]  # fmt: skip


@pytest.mark.parametrize("name", SEARCHED)
def test_no_avoided_terms(name):
    found = [f"{file.relative_to(ROOT)}:{line}: {text!r}: write {instead}"
             for file in files_of([ROOT / name]) for line, text, instead in findings(file)]  # fmt: skip
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", SEARCHED)
def test_every_place_has_files(name):
    assert any(files_of([ROOT / name]))


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.sample)
def test_pattern_finds_its_sample(term):
    assert term.instead in {instead for _, instead in search(term.sample)}


@pytest.mark.parametrize(
    "sentence",
    [
        "Return one value per filter, or None when the layer has no k.",
        "z = W·x + b, where W has shape [filters, features].",
        "Resume the run if the checkpoint is valid; the images are not needed.",
        "Layers share one weight. This part of the code computes norms for the CNN twin.",
        "ψ is piecewise and its pieces meet at jπ/m.",
    ],
)
def test_plain_sentences_pass(sentence):
    assert not search(sentence)


@pytest.mark.parametrize("text", ALLOWED)
def test_allowed_text_is_ignored(text):
    assert not search(f"parser.add_argument({text})")


def test_inline_code_of_pages_is_ignored(tmp_path):
    page, sample = tmp_path / "page.md", TERMS[0].sample
    page.write_text(f"`{sample}` is inline code\n{sample} is not\n")
    assert [line for line, *_ in findings(page)] == [2]
