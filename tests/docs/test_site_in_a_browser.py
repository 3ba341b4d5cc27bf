"""The site in a browser, opened from disk: no errors, no requests to other hosts, formulas, navigation, search."""

import pytest

PHONE, DESKTOP = 390, 1280


@pytest.fixture
def open_page(visit, site):
    """Return a function that opens a page of the site."""
    return lambda name, width, scheme: visit((site / name).as_uri(), width, scheme)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_formulas_and_figures_are_rendered(open_page, width, scheme):
    page = open_page("concepts.html", width, scheme)
    assert page.title() == "Concepts - spherenet"
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    red = int(background.removeprefix("rgb(").split(",")[0])
    assert red > 200 if scheme == "light" else red < 60

    formulas = page.locator("math")
    assert formulas.count() >= 25
    assert page.locator("math[display=block] mfrac").count() >= 1
    fraction = page.locator("math[display=block] mfrac").first.evaluate("""fraction => {
        const [above, below] = [...fraction.children].map(child => child.getBoundingClientRect())
        return above.height > 0 && above.bottom <= below.top + 4
    }""")
    assert fraction, "the numerator is not drawn above the denominator"
    assert "$" not in page.locator("article").inner_text()

    for image in page.locator("article img").all():
        image.scroll_into_view_if_needed()
        assert image.evaluate("image => image.complete && image.naturalWidth > 300")


@pytest.mark.parametrize("width", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_navigation(open_page, width):
    page = open_page("index.html", width, "light")
    if width == PHONE:
        page.locator("label.md-header__button[for=__drawer]").click()
        use = page.locator("nav.md-nav--primary label.md-nav__link", has_text="Evidence")
        if use.count() and use.first.is_visible():
            use.first.click()
    page.locator("nav.md-nav--primary a.md-nav__link", has_text="Errata").first.click()
    page.wait_for_url("**/errata.html")
    assert page.locator("h1").inner_text().startswith("Errata")
    page.locator("footer a.md-footer__link--prev").click()
    page.wait_for_url("**/reliability.html")


@pytest.mark.parametrize("width", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_search_from_disk(open_page, width):
    page = open_page("index.html", width, "dark")
    page.locator("header .md-search__button:visible, header [for=__search]:visible").first.click()
    page.keyboard.type("hyperspherical_energy")
    assert page.get_by_role("combobox").input_value() == "hyperspherical_energy"
    result = page.locator("a[href*='losses.html']", has_text="energy").first
    result.wait_for()
    assert page.get_by_role("combobox").input_value() == "hyperspherical_energy"
    result.click()
    page.wait_for_url("**/api/losses.html*")


def test_pages_fit_the_width_of_a_phone(open_page, site):
    page = open_page("index.html", PHONE, "light")
    for file in sorted(site.rglob("*.html")):
        if file.name == "404.html":  # for servers: its links are absolute
            continue
        page.goto(file.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), file.name


def test_color_scheme_can_be_switched(open_page):
    page = open_page("index.html", DESKTOP, "light")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    for _ in range(2):  # system, light, dark
        page.locator("form[data-md-component=palette] label:visible").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
