"use strict";
/* Puts interactive curves in place of the figures named in data.js: a value at each iteration, methods on and off. */
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const NARROW = 500, LEFT = 34, RIGHT = 8, TOP = 10, BOTTOM = 26;
  const element = (name, attributes = {}, ...children) => filled(document.createElement(name), attributes, children);
  const shape = (name, attributes = {}, ...children) => filled(document.createElementNS(SVG, name), attributes, children);
  const count = number => number.toLocaleString("en-US");
  let figures = 0;

  function filled(made, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  /** Build the interactive figure of one image. */
  function build(image, { band, limits: [low, high], panels }) {
    const title = image.alt, clip = `curves-clip-${++figures}`;
    let panel = panels[0], shown = [], at = 0, redraw = () => {};
    const hidden = new Set(); // names, so that a method stays off in all panels
    const svg = shape("svg", { role: "img", "aria-label": title });
    const slider = element("input", { type: "range", min: 0, "aria-label": "Iteration" });
    const step = element("output");
    const legend = element("ul", { class: "curves-legend" });
    const tabs = element("div", { class: "curves-tabs", role: "group", "aria-label": "Panel" });
    const note = element("p");
    const figure = element("figure", { class: "curves" }, tabs, svg, element("label", {}, slider, step), legend, note);

    const steps = () => panel.curves[0].points.map(([iteration]) => iteration);

    /** Choose a panel and write its legend. */
    function choose(chosen) {
      panel = chosen;
      for (const tab of tabs.children) tab.setAttribute("aria-pressed", tab.textContent === panel.title);
      shown = panel.curves.map(curve => {
        const key = shape("svg", { class: "curves-key", viewBox: "0 0 24 4", "aria-hidden": "true" }, line(curve, "M0 2H24"));
        const button = element("button", { type: "button", "aria-pressed": !hidden.has(curve.name) }, key, curve.name);
        button.addEventListener("click", () => {
          hidden[hidden.has(curve.name) ? "delete" : "add"](curve.name);
          button.setAttribute("aria-pressed", !hidden.has(curve.name));
          draw();
        });
        return { curve, value: element("output"), button };
      });
      legend.replaceChildren(...shown.map(({ button, value }) => element("li", {}, button, value)));
      note.textContent = `Test accuracy in %. Lines: means over ${panel.seeds} seeds; bands: ${band}.`;
      slider.max = steps().length - 1;
      slider.value = at = slider.max;
      draw();
    }

    const colors = ({ color: [light, dark] }) => `--light: ${light}; --dark: ${dark}`;
    const line = (curve, d) => shape("path", { d, class: "curves-line" + (curve.dashed ? " curves-dashed" : ""), style: colors(curve) });

    /** Draw the panel at the width of the page. */
    function draw() {
      const width = Math.max(figure.clientWidth, 240), height = Math.round(width < NARROW ? 0.72 * width : 0.5 * width);
      const last = steps().at(-1);
      const x = iteration => LEFT + (width - LEFT - RIGHT) * iteration / last;
      const y = percent => height - BOTTOM - (height - BOTTOM - TOP) * (percent - low) / (high - low);
      const point = (iteration, percent) => `${x(iteration).toFixed(1)} ${y(percent).toFixed(1)}`;
      const text = (content, attributes) => shape("text", attributes, content);
      const axes = shape("g", { class: "curves-axes" });
      const spacing = high - low <= 30 ? 5 : high - low <= 60 ? 10 : 20;
      for (let percent = low; percent <= high; percent += spacing) {
        axes.append(shape("path", { d: `M${LEFT} ${y(percent)}H${width - RIGHT}` }));
        axes.append(text(percent, { x: LEFT - 6, y: y(percent) + 4, "text-anchor": "end" }));
      }
      const ticks = width < NARROW ? 2 : 4;
      for (let tick = 0; tick <= ticks; tick++) {
        const anchor = tick === ticks ? "end" : "middle";
        axes.append(text(count(last * tick / ticks), { x: x(last * tick / ticks), y: height - 6, "text-anchor": anchor }));
      }
      const curves = shape("g", { "clip-path": `url(#${clip})` });
      const visible = panel.curves.filter(({ name }) => !hidden.has(name));
      for (const curve of visible) {
        const upper = curve.points.map(([iteration, , , most]) => point(iteration, most));
        const lower = curve.points.map(([iteration, , least]) => point(iteration, least));
        curves.append(shape("path", { d: `M${[...upper, ...lower.reverse()].join("L")}Z`, class: "curves-band", style: colors(curve) }));
      }
      for (const curve of visible) curves.append(line(curve, "M" + curve.points.map(([iteration, mean]) => point(iteration, mean)).join("L")));
      const pointer = shape("path", { class: "curves-pointer" });
      const box = shape("clipPath", { id: clip }, shape("rect", { x: LEFT, y: TOP, width: width - LEFT - RIGHT, height: height - TOP - BOTTOM }));
      filled(svg, { viewBox: `0 0 ${width} ${height}`, width, height }, []).replaceChildren(box, axes, curves, pointer);
      svg.onpointermove = svg.onpointerdown = event => {
        const along = (event.clientX - svg.getBoundingClientRect().left - LEFT) / (width - LEFT - RIGHT) * last;
        at = steps().reduce((best, value, index, all) => Math.abs(value - along) < Math.abs(all[best] - along) ? index : best, 0);
        slider.value = at;
        redraw();
      };
      redraw = () => {
        pointer.setAttribute("d", `M${x(steps()[at])} ${TOP}V${height - BOTTOM}`);
        show();
      };
      redraw();
    }

    /** Write the values at the chosen iteration. */
    function show() {
      step.textContent = `iteration ${count(steps()[at])}`;
      for (const { curve, value } of shown) {
        const [, mean, least, most] = curve.points[at];
        value.textContent = hidden.has(curve.name) ? "" : `${mean.toFixed(1)} (${least.toFixed(1)} to ${most.toFixed(1)})`;
      }
      const said = shown.filter(({ value }) => value.textContent).map(({ curve, value }) => `${curve.name} ${value.textContent}`);
      slider.setAttribute("aria-valuetext", `${step.textContent}: ${said.join(", ")}`);
    }

    slider.addEventListener("input", () => {
      at = Number(slider.value);
      redraw();
    });
    for (const each of panels.length > 1 ? panels : []) {
      const tab = element("button", { type: "button" }, each.title);
      tab.addEventListener("click", () => choose(each));
      tabs.append(tab);
    }
    image.after(figure);
    image.hidden = true;
    choose(panel);
    let width = figure.clientWidth;
    new ResizeObserver(() => {
      if (figure.clientWidth === width) return;
      width = figure.clientWidth;
      draw();
    }).observe(figure);
  }

  for (const [name, figure] of Object.entries(window.spherenetCurves)) {
    for (const image of document.querySelectorAll(`article img[src$="images/${name}.svg"]`)) build(image, figure);
  }
})();
