"""The page of `spherenet demo` in a browser: samples, light, choose, drop, layers, errors; phone and desktop."""

import re
import threading

import pytest
from PIL import Image

from spherenet.demo import Analyzer, DemoServer
from spherenet.export import shipped_model
from spherenet.training.saved_runs import load_predictor

expect = pytest.importorskip("playwright.sync_api").expect

PHONE, DESKTOP = 390, 1280


@pytest.fixture(scope="module")
def server():
    with DemoServer(Analyzer(load_predictor(shipped_model())), "cifar10-air-cosine") as started:
        thread = threading.Thread(target=started.serve_forever, args=(0.01,))
        thread.start()
        yield started
        started.shutdown()
        thread.join()


@pytest.fixture
def open_page(visit, server):
    """Return a function that opens the page and waits for the first image."""

    def open_at(width, scheme="light"):
        page = visit(server.address, width, scheme, errors=("warning",))  # rejected files are errors
        page.locator("#layer option").first.wait_for(state="attached")
        if page.locator("#samples button").count():  # the first one is analyzed at once
            page.locator("#bars li").first.wait_for()
        return page

    return open_at


DROP = """([bytes, count]) => {
    const data = new DataTransfer()
    for (let i = 0; i < count; i++) data.items.add(new File([new Uint8Array(bytes)], `image${i}.png`))
    document.dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true}))
}"""


def values_of(page):
    """Return a context that ends when the page has received the values of an image."""
    return page.expect_response(lambda response: "/analyze" in response.url)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    path = tmp_path_factory.mktemp("images") / "image.png"
    drawing = Image.radial_gradient("L").resize((90, 60)).convert("RGB")
    drawing.paste((200, 40, 20), (10, 10, 40, 40))
    drawing.save(path)
    return path


@pytest.mark.parametrize(("width", "scheme"), [(PHONE, "dark"), (DESKTOP, "light")], ids=["phone", "desktop"])
def test_image_is_analyzed(open_page, image, width, scheme):
    page = open_page(width, scheme)
    assert page.locator("#model").inner_text() == "Model cifar10-air-cosine, 10 classes."
    with values_of(page):
        page.set_input_files("#file", image)
    expect(page.locator("#message")).to_have_text("")
    values = [float(text.removesuffix(" %")) for text in page.locator("#bars .row span:last-child").all_inner_texts()]
    assert len(values) == 10
    assert values == sorted(values, reverse=True)
    assert sum(values) == pytest.approx(100, abs=0.6)
    assert page.locator("#circle line").count() == 11
    assert page.locator("#boxes rect.halo").count() == page.locator("#patches li").count() > 1
    frame, box = (page.locator(name).first.bounding_box() for name in ("#frame", "#boxes rect"))
    assert frame["x"] - 3 <= box["x"]
    assert box["x"] + box["width"] <= frame["x"] + frame["width"] + 3
    assert page.locator("#image").evaluate("image => image.naturalWidth") == 384
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(background.removeprefix("rgb(").split(",")[0]) > 200) == (scheme == "light")
    for label in page.locator("#circle text").all():
        text = label.bounding_box()
        circle = page.locator("#circle").bounding_box()
        assert circle["x"] - 1 <= text["x"]
        assert text["x"] + text["width"] <= circle["x"] + circle["width"] + 1


def test_dropped_image_another_layer_and_errors(open_page, image, tmp_path):
    page = open_page(DESKTOP)
    with values_of(page):
        page.evaluate(DROP, [list(image.read_bytes()), 1])
    expect(page.locator("#message")).to_have_text("")
    before = page.locator("#patches").inner_text()
    page.locator("#layer").select_option(index=0)
    expect(page.locator("#patches")).not_to_have_text(before, use_inner_text=True)
    assert "4×4 pixels" in page.locator("#patches").inner_text()  # 3×3 whitened patches of 2×2
    wrong = tmp_path / "wrong.png"
    wrong.write_text("<script>alert(1)</script>")
    page.set_input_files("#file", wrong)
    expect(page.locator("#message")).to_have_text(re.compile("^The file cannot be read"))
    assert page.locator("#bars li").count() == 10
    page.set_input_files("#file", image)
    expect(page.locator("#message")).to_have_text("")
    page.evaluate(DROP, [list(image.read_bytes()), 2])
    expect(page.locator("#message")).to_have_text("Choose one image at a time.")
    page.evaluate(DROP, [[], 0])
    assert page.locator("#bars li").count() == 10


def test_names_from_a_model_are_text(open_page, server, image, monkeypatch):
    names = ("<img src=x onerror=alert(1)>", "</svg>", *map(str, range(8)))
    predictor = server.analyzer.predictor
    monkeypatch.setattr(server.analyzer, "predictor", type(predictor)(predictor.model, names, predictor.preprocessing))
    page = open_page(DESKTOP)
    page.set_input_files("#file", image)
    page.locator("#bars li").first.wait_for()
    assert sorted(page.locator("#bars .row span:first-child").all_inner_texts()) == sorted(names)
    assert page.locator("#bars img, #circle img").count() == 0


def best(page, name="bars"):
    return page.locator(f"#{name} .row span:first-child").first.inner_text()


def test_page_starts_with_samples_and_sliders_change_the_light(open_page):
    page = open_page(PHONE)
    assert page.locator("#samples button").count() == 10
    assert page.locator("#classes").inner_text().startswith("airplane, automobile, bird")
    assert page.locator("#samples button").first.get_attribute("aria-pressed") == "true"
    names = []
    for button in page.locator("#samples button").all():
        with values_of(page):
            button.click()
        expect(page.locator("#message")).to_have_text("")
        names.append(best(page) == button.get_attribute("title"))
    assert sum(names) >= 7  # the network is right for 87 % of the test images
    before, shown = page.locator("#bars").inner_text(), page.locator("#image").get_attribute("src")
    sliders = page.locator("#lights input")
    assert [slider.get_attribute("name") for slider in sliders.all()] == ["spot", "ramp", "cast", "contrast"]
    with values_of(page) as response:
        sliders.first.fill("0.9")
    assert "light=spot%3A0.9" in response.value.url
    expect(page.locator("#bars")).not_to_have_text(before, use_inner_text=True)
    assert page.locator("#image").get_attribute("src") != shown
    with values_of(page):
        page.locator("#reset").click()
    expect(page.locator("#bars")).to_have_text(before, use_inner_text=True)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_second_model_is_shown_beside(browser, server):
    compared = Analyzer(load_predictor(shipped_model()))
    with DemoServer(server.analyzer, "first", compared=compared, compared_title="second") as both:
        thread = threading.Thread(target=both.serve_forever, args=(0.01,))
        thread.start()
        page = browser.new_page(viewport={"width": DESKTOP, "height": 900})
        page.goto(both.address)
        page.locator("#compared-bars li").first.wait_for()
        titles = page.locator("#bars-title").inner_text(), page.locator("#compared-title").inner_text()
        same = best(page) == best(page, "compared-bars")
        page.close()
        both.shutdown()
        thread.join()
    assert titles == ("first", "second")
    assert same
