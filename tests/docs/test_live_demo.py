"""The demo of the site, computed by its own JavaScript: the same scores as PyTorch, from disk, by keyboard."""

import base64
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

import spherenet as sn
from docs.pages import DOCS, ROOT
from spherenet.data import corrupt
from spherenet.data.preprocessing import Preprocessing, normalize

expect = pytest.importorskip("playwright.sync_api").expect

PHONE, DESKTOP = 390, 1440
FOLDER = DOCS / "assets" / "demo"
SAMPLES = sorted((ROOT / "examples" / "images").glob("*.png"))
LIGHTS = ["spot", "ramp", "shadow", "cast", "contrast"]


def saved(name):
    """Return the values of a script of docs/demo.py."""
    return json.loads("[" + re.search(r"push\(\n(.*)\n\);", (FOLDER / name).read_text("utf-8"), re.DOTALL)[1] + "]")


@pytest.fixture(scope="module")
def networks(tmp_path_factory):
    """The networks of the page as PyTorch modules with their preprocessing."""
    loaded = []
    for name in ("spherenet.js", "cnn.js"):
        (network,) = saved(name)
        folder = tmp_path_factory.mktemp("network")
        (folder / "config.json").write_text(json.dumps(network["config"]))
        (folder / "model.safetensors").write_bytes(base64.b64decode(network["weights"]))
        preprocessing = Preprocessing.from_dict(network["config"]["metadata"]["preprocessing"])
        loaded.append((sn.load_model(folder), preprocessing))
    return loaded


@pytest.fixture
def open_page(visit, site):
    """Return a function that opens the page from disk."""

    def open_at(width=DESKTOP, scheme="light"):
        page = visit((site / "demo.html").as_uri(), width, scheme)
        page.locator("#demo-samples button").first.wait_for()
        return page

    return open_at


def pixels_of(path):
    return torch.from_numpy(np.array(Image.open(path).convert("RGB"))).unsqueeze(0)


def shares(page, column):
    """Return the shown probabilities of a network in percent."""
    cells = page.locator(f"#demo-scores tbody td:nth-child({column + 2}) span")
    return [float(text.removesuffix(" %")) for text in cells.all_inner_texts()]


def test_scores_are_those_of_pytorch(open_page, networks):
    page = open_page()
    computed = page.evaluate("""() => spherenet.networks.map(saved => {
        const network = new spherenet.Network(saved)
        return spherenet.samples.map(({pixels}) => network.scores(Uint8Array.from(atob(pixels), c => c.charCodeAt(0))))
    })""")
    for scores, (model, preprocessing) in zip(computed, networks, strict=True):
        images = normalize(torch.cat([pixels_of(path) for path in SAMPLES]), preprocessing)
        with torch.no_grad():
            expected = model.eval()(images)
        torch.testing.assert_close(torch.tensor(scores), expected, rtol=1e-4, atol=1e-4)
        assert expected.std(0).min() > 0.1  # scores that do not depend on the image would not compare anything


def test_edges_of_the_range_are_those_of_pytorch(open_page, networks):
    """Flat images have no contrast, so that every centered patch inside of them is flat."""
    page = open_page()
    flat = [0, 127, 255]
    computed = page.evaluate("""values => spherenet.networks.map(saved => {
        const network = new spherenet.Network(saved)
        return values.map(value => network.scores(new Uint8Array(3 * 32 * 32).fill(value)))
    })""", flat)  # fmt: skip
    for scores, (model, preprocessing) in zip(computed, networks, strict=True):
        images = torch.stack([torch.full((32, 32, 3), value, dtype=torch.uint8) for value in flat])
        with torch.no_grad():
            expected = model.eval()(normalize(images, preprocessing))
        torch.testing.assert_close(torch.tensor(scores), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strengths", [{name: 0.85} for name in LIGHTS] + [dict.fromkeys(LIGHTS, 0.3)],
                         ids=[*LIGHTS, "all"])  # fmt: skip
def test_light_is_that_of_the_library(open_page, strengths):
    page = open_page()
    images = pixels_of(SAMPLES[0]).permute(0, 3, 1, 2)
    for name, strength in strengths.items():
        images = corrupt(images, f"{name}:{strength}")
    changed = page.evaluate(
        "strengths => [...spherenet.changeLight(Uint8Array.from(atob(spherenet.samples[0].pixels), "
        "c => c.charCodeAt(0)), strengths)]",
        strengths,
    )
    assert changed == images[0].permute(1, 2, 0).flatten().tolist()


def test_samples_are_all_example_images():
    samples = saved("samples.js")
    assert [sample["name"] for sample in samples] == [path.stem for path in SAMPLES]
    for sample, path in zip(samples, SAMPLES, strict=True):
        assert base64.b64decode(sample["pixels"]) == np.array(Image.open(path).convert("RGB")).tobytes()
    assert [sample["name"] for sample in samples] == saved("cnn.js")[0]["config"]["metadata"]["classes"]


def test_networks_differ_in_the_operator_only():
    (sphere,), (cnn,) = saved("spherenet.js"), saved("cnn.js")
    different = {name for name, value in sphere["config"]["model"].items() if cnn["config"]["model"][name] != value}
    assert different == {"operator", "center"}
    assert list(sphere["accuracy"]) == list(cnn["accuracy"])
    assert max((FOLDER / name).stat().st_size for name in ("spherenet.js", "cnn.js")) < 300_000


@pytest.mark.parametrize(("width", "scheme"), [(PHONE, "dark"), (DESKTOP, "light")], ids=["phone", "desktop"])
def test_sliders_change_image_and_probabilities(open_page, width, scheme):
    page = open_page(width, scheme)
    assert page.locator("#demo-samples button[aria-pressed=true]").get_attribute("title") == "airplane"
    assert page.locator("#demo-scores tbody th").all_inner_texts() == [path.stem for path in SAMPLES]
    before = [shares(page, column) for column in (0, 1)]
    assert [sum(values) for values in before] == pytest.approx([100, 100], abs=0.6)
    sliders = page.locator("#demo-lights input")
    assert [slider.get_attribute("name") for slider in sliders.all()] == LIGHTS
    image = "document.getElementById('demo-image').toDataURL()"
    shown = page.evaluate(image)
    sliders.first.fill("0.9")
    assert page.evaluate(image) != shown
    assert [shares(page, column) for column in (0, 1)] != before
    page.locator("#demo-reset").click()
    assert page.evaluate(image) == shown
    assert [shares(page, column) for column in (0, 1)] == before
    expect(page.locator("#demo-message")).to_have_text(re.compile(r"^SphereNet: \w+ \(.+ %\)\. CNN: \w+ \(.+ %\)\.$"))
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_page_is_used_by_keyboard(open_page):
    page = open_page()
    page.locator("#demo-samples button").nth(2).focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.locator("#demo-samples button[aria-pressed=true]").get_attribute("title") == "cat"
    before = shares(page, 0)
    page.locator("#demo-lights input").first.focus()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    assert page.locator("#demo-spot").input_value() == "0.25"
    assert shares(page, 0) != before
    for control in page.locator("#demo-demo :is(input, button)").all():
        assert control.evaluate("control => control.ariaLabel || control.labels?.length || control.textContent")


def test_own_image(open_page, tmp_path):
    page = open_page()
    enlarged = tmp_path / "cat.png"
    Image.open(ROOT / "examples" / "images" / "cat.png").resize((512, 512), Image.Resampling.NEAREST).save(enlarged)
    page.locator("#demo-samples button").nth(3).click()
    expected = [shares(page, column) for column in (0, 1)]
    page.locator("#demo-samples button").nth(0).click()
    page.set_input_files("#demo-file", enlarged)
    expect(page.locator("#demo-samples button[aria-pressed=true]")).to_have_count(0)
    assert [shares(page, column) for column in (0, 1)] == expected
    page.set_input_files("#demo-file", [])
    assert [shares(page, column) for column in (0, 1)] == expected


DROP = """count => {
    const data = new DataTransfer()
    for (let i = 0; i < count; i++) data.items.add(new File(["no image"], `image${i}.png`))
    document.getElementById("demo-demo").dispatchEvent(new DragEvent("drop", {dataTransfer: data, cancelable: true}))
}"""


def test_files_that_are_no_single_image_get_a_sentence(open_page, tmp_path):
    page = open_page()
    message = page.locator("#demo-message")
    before = shares(page, 0)
    wrong = tmp_path / "wrong.png"
    wrong.write_text("<script>alert(1)</script>")
    page.set_input_files("#demo-file", wrong)
    expect(message).to_have_text("The file must be an image that this browser can read.")
    page.evaluate(DROP, 2)
    expect(message).to_have_text("Choose one image at a time.")
    huge = tmp_path / "huge.png"
    Image.new("1", (60_000, 60_000)).save(huge)
    page.set_input_files("#demo-file", huge)
    expect(message).to_have_text("The file must be an image that this browser can read.")
    page.evaluate(DROP, 0)
    with wrong.open("wb") as file:
        file.truncate(21 * 2**20)
    page.set_input_files("#demo-file", wrong)
    expect(message).to_have_text("The file must have at most 20 MiB.")
    assert shares(page, 0) == before
