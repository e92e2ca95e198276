"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const make = (name, attributes, text) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const digits = (value, count) => String(Number(value.toPrecision(count)));
  const duration = (s) => {
    if (s === 0) return "0";
    if (Math.abs(s) < 1) return `${digits(s * 1000, 3)} ms`;
    if (s < 60) return `${digits(s, 3)} s`;
    const whole = Math.round(s), pad = (n) => String(n).padStart(2, "0");
    const d = Math.floor(whole / 86400), h = Math.floor(whole / 3600) % 24, m = Math.floor(whole / 60) % 60, r = whole % 60;
    if (d) return h ? `${d} d ${pad(h)} h` : `${d} d`;
    if (h) return m ? `${h} h ${pad(m)} min` : `${h} h`;
    return r ? `${m} min ${pad(r)} s` : `${m} min`;
  };
  const prefixed = (value, unit) => {
    for (const [factor, prefix] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (Math.abs(value) >= factor * 0.9995) return `${digits(value / factor, 3)} ${prefix}${unit}`;
    }
    return `${digits(value, 3)} ${unit}`.trim();
  };
  const spell = (value, unit) => {
    if (unit === "time") return duration(value);
    if (unit === "percent") return `${digits(value * 100, 3)} %`;
    if (unit === "bytes") return prefixed(value, "B");
    return unit === "number" ? digits(value, 4) : prefixed(value, "");
  };
  const place = (value, [low, high, start, end]) => start + (value - low) / (high - low) * (end - start);
  const pointer = (svg, event) => {
    const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
    return (event.clientX - box.left) / box.width * view.width;
  };

  const follow = (svg) => {
    const data = JSON.parse(document.getElementById(svg.dataset.chart).textContent);
    const cursor = svg.querySelector(".cursor"), tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    svg.parentNode.append(tip);
    const hide = () => { tip.hidden = true; cursor.replaceChildren(); };
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("pointermove", (event) => {
      const [low, high, start, end] = data.x;
      const at = low + (pointer(svg, event) - start) / (end - start) * (high - low);
      if (at < low || at > high) return hide();
      const near = [];
      for (const series of data.series) {
        let best = -1, gap = Infinity;
        for (let index = 0; index < series.points.length; index += 2) {
          const distance = Math.abs(series.points[index] - at);
          if (series.points[index + 1] !== null && distance < gap) [best, gap] = [index, distance];
        }
        if (best >= 0 && gap < (high - low) / 8) near.push([series, series.points[best], series.points[best + 1]]);
      }
      if (!near.length) return hide();
      const x = place(at, data.x), bottom = data.y[2], top = data.y[3];
      cursor.replaceChildren(make("line", { x1: x, x2: x, y1: top, y2: bottom }));
      const title = document.createElement("b");
      title.textContent = spell(at, data.x[4]);
      tip.replaceChildren(title);
      for (const [series, px, py] of near) {
        const y = place(py, data.y);
        if (y >= top - 6) cursor.append(make("circle", { cx: place(px, data.x), cy: y, r: 4, class: `dot ${series.style}` }));
        const row = document.createElement("div");
        const key = document.createElement("span"), name = document.createElement("span"), value = document.createElement("span");
        key.className = `swatch line ${series.style}`;
        name.textContent = series.name;
        value.textContent = spell(py, data.y[4]);
        row.append(key, name, value);
        tip.append(row);
      }
      tip.hidden = false;
      const box = svg.getBoundingClientRect(), pixel = x / svg.viewBox.baseVal.width * box.width;
      const left = pixel + 14 + tip.offsetWidth > box.width ? pixel - tip.offsetWidth - 14 : pixel + 14;
      tip.style.transform = `translate(${Math.max(0, left)}px, ${top / svg.viewBox.baseVal.height * box.height}px)`;
    });
  };
  document.querySelectorAll("svg[data-chart]").forEach(follow);

  const source = document.getElementById("timeline-data");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const overview = document.getElementById("timeline-overview"), brush = overview.querySelector(".brush");
  const picture = document.getElementById("timeline-window");
  const bars = document.getElementById("timeline-bars"), ruler = document.getElementById("timeline-ruler");
  const names = ["waiting for quorum", "grace", "merging", "publishing"];
  const steps = [.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400];
  const width = data.window[1] - data.window[0];
  let start = data.window[0];
  const inset = Math.max(1, Math.floor(data.pitch / 6)), floor = data.floor;
  const draw = () => {
    start = Math.max(0, Math.min(data.end - width, start));
    const stop = start + width, whole = [0, data.end, data.left, data.right], scale = [start, stop, data.left, data.right];
    brush.setAttribute("x", place(start, whole));
    brush.setAttribute("width", Math.max(3, place(stop, whole) - place(start, whole)));
    overview.setAttribute("aria-valuenow", Math.round(start));
    overview.setAttribute("aria-valuetext", `${duration(start)} to ${duration(stop)}`);
    const step = steps.find((value) => value >= width / 9) || Math.ceil(width / 9 / 86400) * 86400, marks = [];
    for (let index = Math.ceil(start / step); index * step <= stop; index += 1) {
      const x = place(index * step, scale);
      marks.push(make("line", { x1: x, x2: x, y1: 20, y2: floor, class: "grid" }));
      marks.push(make("text", { x, y: floor + 16, class: "tick middle" }, duration(index * step)));
    }
    ruler.replaceChildren(...marks);
    const drawn = [];
    for (const [fragment, ...rest] of data.rounds) {
      const times = rest.slice(0, 5), [round, merged, missing] = rest.slice(5);
      if (times[4] < start || times[0] > stop) continue;
      const group = make("g", {});
      const spent = names.map((name, index) => `${name} ${duration(Math.max(0, times[index + 1] - times[index]))}`).join(", ");
      group.append(make("title", {}, `round ${round}, fragment ${fragment}: ${merged} merged; ${spent}${missing ? `; without ${missing}` : ""}`));
      for (let index = 0; index < 4; index += 1) {
        const left = Math.max(data.left, place(times[index], scale)), right = Math.min(data.right, place(times[index + 1], scale));
        if (times[index + 1] > times[index] && right > left) {
          group.append(make("rect", {
            x: left, y: 20 + fragment * data.pitch + inset, width: Math.max(1, right - left), height: data.pitch - 2 * inset, class: `fill p${index}`,
          }));
        }
      }
      drawn.push(group);
    }
    bars.replaceChildren(...drawn);
    picture.setAttribute("aria-label", `Rounds of each fragment. Bars from opening to publication, ${drawn.length} rounds between ${duration(start)} and ${duration(stop)}.`);
  };
  const move = (event) => {
    start = (pointer(overview, event) - data.left) / (data.right - data.left) * data.end - width / 2;
    draw();
  };
  overview.addEventListener("pointerdown", (event) => { overview.setPointerCapture(event.pointerId); move(event); });
  overview.addEventListener("pointermove", (event) => { if (overview.hasPointerCapture(event.pointerId)) move(event); });
  overview.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -width / 4, ArrowRight: width / 4, PageDown: -width, PageUp: width, Home: -Infinity, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    start = Math.max(0, Math.min(data.end - width, start + moves[event.key]));
    draw();
  });
})();
