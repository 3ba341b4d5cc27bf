"use strict";
/* The demo of demo.md: samples, own images, sliders, and the probabilities of the networks that network.js computes. */
(() => {
  const LARGEST = 20 * 2 ** 20, SIDE = 32;
  const TITLES = { spot: "Spot light", ramp: "Ramp across the image", shadow: "Shadow", cast: "Color cast", contrast: "Less contrast" };
  const byId = name => document.getElementById("demo-" + name);
  const element = (name, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  };
  const percent = fraction => (100 * fraction).toFixed(1) + " %";
  const networks = spherenet.networks.map(saved => new spherenet.Network(saved));
  const { classes } = networks[0];
  let pixels = null, label = null, waiting = 0, latest = 0;

  /** Draw pixels [side, side, 3] on a canvas of that size. */
  function draw(canvas, values) {
    const image = canvas.getContext("2d").createImageData(SIDE, SIDE);
    for (let at = 0; at < SIDE * SIDE; at++) image.data.set([...values.subarray(3 * at, 3 * at + 3), 255], 4 * at);
    canvas.getContext("2d").putImageData(image, 0, 0);
  }

  /** Show the image under the chosen light, and what each network says. */
  function show() {
    if (!pixels) return;
    const strengths = Object.fromEntries(sliders.map(slider => [slider.name, Number(slider.value)]));
    const changed = spherenet.changeLight(pixels, strengths);
    draw(byId("image"), changed);
    const all = networks.map(network => network.probabilities(changed));
    const best = all.map(probabilities => probabilities.indexOf(Math.max(...probabilities)));
    [...byId("scores").tBodies[0].rows].forEach((row, index) => {
      row.classList.toggle("demo-label", classes[index] === label);
      all.forEach((probabilities, network) => {
        const cell = row.cells[1 + network];
        cell.classList.toggle("demo-best", best[network] === index);
        cell.querySelector("b").style.width = 100 * probabilities[index] + "%";
        cell.querySelector("span").textContent = percent(probabilities[index]);
      });
    });
    const said = best.map((index, at) => `${networks[at].title}: ${classes[index]} (${percent(all[at][index])})`);
    byId("image").setAttribute("aria-label", label ? `The image, labeled ${label}` : "Your image");
    clearTimeout(waiting); // a slider that moves is not read aloud at each step
    waiting = setTimeout(() => { byId("message").textContent = said.join(". ") + "."; }, 200);
  }

  function choose(values, name) {
    [pixels, label] = [values, name];
    latest++; // a file that is still being read comes too late
    for (const button of byId("samples").children) button.setAttribute("aria-pressed", button.title === name);
    show();
  }

  const fail = text => {
    clearTimeout(waiting);
    byId("message").textContent = text;
  };

  /** Read the middle square of an image file at the size of the networks: each pixel is the mean of 16×16. */
  async function read(files) {
    if (!files.length) return;
    const number = ++latest;
    if (files.length > 1) return fail("Choose one image at a time.");
    if (files[0].size > LARGEST) return fail("The file must have at most 20 MiB.");
    let bitmap;
    try {
      bitmap = await createImageBitmap(files[0]);
    } catch {
      return number === latest && fail("The file must be an image that this browser can read.");
    }
    if (number !== latest) return bitmap.close();
    const side = Math.min(bitmap.width, bitmap.height), large = 16 * SIDE;
    const canvas = element("canvas", { width: large, height: large }), context = canvas.getContext("2d");
    context.fillStyle = "white"; // behind transparent pixels
    context.fillRect(0, 0, large, large);
    context.imageSmoothingQuality = "high";
    context.drawImage(bitmap, (bitmap.width - side) / 2, (bitmap.height - side) / 2, side, side, 0, 0, large, large);
    bitmap.close();
    const { data } = context.getImageData(0, 0, large, large), sums = new Float64Array(3 * SIDE * SIDE);
    for (let at = 0; at < large * large; at++) {
      const target = 3 * ((at / large >> 4) * SIDE + (at % large >> 4));
      for (let channel = 0; channel < 3; channel++) sums[target + channel] += data[4 * at + channel] / 256;
    }
    choose(Uint8ClampedArray.from(sums), null);
  }

  const sliders = spherenet.lights.map(name => {
    const range = { min: 0, max: 0.95, step: 0.05, value: 0 };
    const slider = element("input", { type: "range", id: "demo-" + name, name, ...range });
    slider.addEventListener("input", show);
    byId("lights").append(element("label", { htmlFor: slider.id }, TITLES[name], slider));
    return slider;
  });
  byId("reset").addEventListener("click", () => {
    for (const slider of sliders) slider.value = 0;
    show();
  });
  byId("file").addEventListener("change", async event => {
    await read([...event.target.files]);
    event.target.value = ""; // the same file can be chosen again
  });
  for (const name of ["dragover", "drop"]) {
    byId("demo").addEventListener(name, event => {
      event.preventDefault();
      if (name === "drop") read([...event.dataTransfer.files]);
    });
  }

  const heads = networks.map(network => element("th", { scope: "col" }, network.title));
  byId("scores").tHead.rows[0].append(...heads);
  byId("scores").tBodies[0].append(...classes.map(name => element("tr", {},
    element("th", { scope: "row" }, name),
    ...networks.map(() => element("td", {}, element("div", {}, element("b")), element("span"))))));
  byId("accuracy").tHead.rows[0].append(...heads.map(head => head.cloneNode(true)));
  byId("accuracy").tBodies[0].append(...Object.keys(networks[0].accuracy).map(name => element("tr", {},
    element("th", { scope: "row" }, name),
    ...networks.map(network => element("td", {}, percent(network.accuracy[name]))))));

  const samples = spherenet.samples.map(({ name, pixels: base64 }) => {
    const values = Uint8ClampedArray.from(atob(base64), letter => letter.charCodeAt(0));
    const canvas = element("canvas", { width: SIDE, height: SIDE });
    draw(canvas, values);
    const button = element("button", { type: "button", title: name, ariaLabel: name }, canvas);
    button.addEventListener("click", () => choose(values, name));
    return button;
  });
  byId("samples").append(...samples);
  samples[0].click();
})();
