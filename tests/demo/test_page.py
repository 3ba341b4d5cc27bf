"""The page of `spherenet demo` in a browser: choose, drop, change the layer, errors; phone and desktop."""

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
    with DemoServer(Analyzer(load_predictor(shipped_model())), "cifar10-cnn-9-sigmoid") as started:
        thread = threading.Thread(target=started.serve_forever, args=(0.01,))
        thread.start()
        yield started
        started.shutdown()
        thread.join()


@pytest.fixture
def open_page(browser, server):
    """Return a function that opens the page; at the end, assert that there was no error and no other host."""
    pages, errors, requests = [], [], []

    def open_at(width, scheme="light"):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("console", lambda message: errors.append(message.text) if message.type == "warning" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(server.address)
        page.locator("#layer option").first.wait_for(state="attached")
        pages.append(page)
        return page

    yield open_at
    for page in pages:
        page.close()
    assert errors == []
    assert [url for url in requests if not url.startswith((server.address, "data:"))] == []


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
    assert page.locator("#model").inner_text() == "Model cifar10-cnn-9-sigmoid, 10 classes."
    page.set_input_files("#file", image)
    page.locator("#bars li").first.wait_for()
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
    page.evaluate(
        """bytes => {
            const data = new DataTransfer()
            data.items.add(new File([new Uint8Array(bytes)], "image.png"))
            document.dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true}))
        }""",
        list(image.read_bytes()),
    )
    page.locator("#bars li").first.wait_for()
    before = page.locator("#patches").inner_text()
    page.locator("#layer").select_option(index=0)
    expect(page.locator("#patches")).not_to_have_text(before, use_inner_text=True)
    assert "3×3 pixels" in page.locator("#patches").inner_text()
    wrong = tmp_path / "wrong.png"
    wrong.write_text("<script>alert(1)</script>")
    page.set_input_files("#file", wrong)
    expect(page.locator("#message")).to_have_text(re.compile("^The file cannot be read"))
    assert page.locator("#bars li").count() == 10
    page.set_input_files("#file", image)
    expect(page.locator("#message")).to_have_text("")


def test_names_from_a_model_are_text(open_page, server, image, monkeypatch):
    names = ("<img src=x onerror=alert(1)>", "</svg>", *map(str, range(8)))
    predictor = server.analyzer.predictor
    monkeypatch.setattr(server.analyzer, "predictor", type(predictor)(predictor.model, names, predictor.preprocessing))
    page = open_page(DESKTOP)
    page.set_input_files("#file", image)
    page.locator("#bars li").first.wait_for()
    assert sorted(page.locator("#bars .row span:first-child").all_inner_texts()) == sorted(names)
    assert page.locator("#bars img, #circle img").count() == 0
