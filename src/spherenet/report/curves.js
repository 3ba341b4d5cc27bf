// Interactive curves without a library: `drawCurves(element, plot)` with the fields of `Plot` in page.py.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { left: 62, right: 14, top: 10, bottom: 44 };
const HEIGHT = 330;

function add(parent, name, attributes = {}, text = "") {
  const node = parent.namespaceURI === SVG || name === "svg" ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = text;
  return parent.appendChild(node);
}

// Return about `count` round numbers that cover the range.
function ticksOf(low, high, count) {
  const raw = (high - low) / count || Math.abs(high) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= raw * 0.999);
  const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  return { step, values: Array.from({ length: Math.max(last - first, 1) + 1 }, (_, index) => (first + index) * step) };
}

function format(value, step, percent) {
  const shown = percent ? 100 * value : value;
  const digits = Math.min(8, Math.max(0, -Math.floor(Math.log10(percent ? 100 * step : step) + 1e-9)));
  return shown.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }) + (percent ? "%" : "");
}

function drawCurves(element, plot) {
  const hidden = new Set();
  const legend = add(element.parentNode, "div", { class: "legend" });
  element.after(legend);
  plot.lines.forEach((line, index) => {
    const button = add(legend, "button", { type: "button", "aria-pressed": "true" });
    const sample = add(button, "svg", { width: 28, height: 10, "aria-hidden": "true" });
    add(sample, "line", { x1: 0, x2: 28, y1: 5, y2: 5, stroke: line.color, "stroke-width": 2, "stroke-dasharray": line.dash });
    add(button, "span", {}, line.name);
    button.addEventListener("click", () => {
      hidden.has(index) ? hidden.delete(index) : hidden.add(index);
      button.setAttribute("aria-pressed", String(!hidden.has(index)));
      draw();
    });
  });

  function draw() {
    element.replaceChildren();
    const lines = plot.lines.filter((line, index) => !hidden.has(index) && line.x.length);
    const xs = lines.flatMap(line => line.x), ys = lines.flatMap(line => [...line.y, ...line.band.flat()]);
    if (!xs.length) return;
    const width = Math.max(element.clientWidth, 260);
    const inner = { width: width - MARGIN.left - MARGIN.right, height: HEIGHT - MARGIN.top - MARGIN.bottom };
    const named = plot.names.length > 0;
    const xTicks = ticksOf(named ? 0 : Math.min(0, ...xs), Math.max(...xs), Math.max(2, Math.floor(inner.width / 90)));
    const yTicks = ticksOf(Math.min(...ys), Math.max(...ys), 5);
    const xEnd = named ? plot.names.length - 1 || 1 : Math.max(...xs) || 1, xStart = xTicks.values[0];
    const [yStart, yEnd] = [yTicks.values[0], yTicks.values.at(-1)];
    const x = value => MARGIN.left + inner.width * (value - xStart) / (xEnd - xStart);
    const y = value => MARGIN.top + inner.height * (1 - (value - yStart) / (yEnd - yStart));
    const points = list => list.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ");

    const svg = add(element, "svg", { width, height: HEIGHT, role: "img", "aria-label": plot.heading });
    for (const value of yTicks.values) {
      add(svg, "line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) });
      add(svg, "text", { class: "y-tick", x: MARGIN.left - 8, y: y(value) + 4 }, format(value, yTicks.step, plot.percent));
    }
    const shown = xTicks.values.filter(value => value <= xEnd * 1.0001 && (!named || Number.isInteger(value)));
    for (const value of shown) {
      const text = named ? plot.names[value] : format(value, xTicks.step, false);
      const label = add(svg, "text", { class: "x-tick", x: x(value), y: HEIGHT - MARGIN.bottom + 18 }, text);
      if (named && value === xEnd) label.style.textAnchor = "end";
    }
    add(svg, "text", { class: "x-label", x: MARGIN.left + inner.width / 2, y: HEIGHT - 4 }, plot.xLabel);
    const middle = MARGIN.top + inner.height / 2;
    add(svg, "text", { class: "x-label", transform: `translate(12 ${middle}) rotate(-90)` }, plot.yLabel);
    for (const line of lines) {
      const edge = side => line.band.map((pair, index) => [line.x[index], pair[side]]);
      if (line.band.length) add(svg, "polygon", { points: points([...edge(0), ...edge(1).reverse()]), fill: line.color, "fill-opacity": 0.15 });
    }
    for (const line of lines) {
      const pairs = line.x.map((value, index) => [value, line.y[index]]);
      add(svg, "polyline", { points: points(pairs), stroke: line.color, "stroke-dasharray": line.dash });
      if (pairs.length <= 40) for (const [a, b] of pairs) add(svg, "circle", { cx: x(a), cy: y(b), r: 2.5, fill: line.color });
    }

    const cursor = add(svg, "line", { class: "cursor", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, visibility: "hidden" });
    const tip = add(element, "div", { class: "tip", hidden: "" });
    const leave = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); };
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("pointermove", event => {
      const at = event.clientX - svg.getBoundingClientRect().left;
      const nearest = xs.reduce((best, value) => Math.abs(x(value) - at) < Math.abs(x(best) - at) ? value : best);
      const values = lines.filter(line => line.x.includes(nearest)).map(line => [line, line.y[line.x.indexOf(nearest)]]);
      tip.replaceChildren();
      add(tip, "b", {}, named ? plot.names[nearest] : `${nearest.toLocaleString("en-US")} ${plot.xLabel}`);
      for (const [line, value] of values.sort((a, b) => b[1] - a[1])) {
        const row = add(tip, "div", {}, `${line.name}: ${format(value, yTicks.step / 1000, plot.percent)}`);
        row.style.borderLeft = `3px solid ${line.color}`;
      }
      cursor.setAttribute("x1", x(nearest));
      cursor.setAttribute("x2", x(nearest));
      cursor.setAttribute("visibility", "visible");
      tip.hidden = false;
      tip.style.left = `${Math.max(0, Math.min(x(nearest) + 12, width - tip.offsetWidth))}px`;
    });
  }

  draw();
  new ResizeObserver(draw).observe(element.parentNode);
}
