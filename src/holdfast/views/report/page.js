// Zooms the timeline: buttons, keys, and the links to generations. The page is complete without it too.
"use strict";
(() => {
  const scroll = document.getElementById("scroll");
  if (!scroll) return;
  const svg = scroll.querySelector("svg");
  const ticks = svg.querySelector(".ticks");
  const whole = Number(scroll.dataset.seconds) || 1;
  const make = (name, attributes) => {
    const one = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) one.setAttribute(key, value);
    return one;
  };
  let zoom = 1;

  function label(seconds, step) {
    if (step < 1) return seconds.toFixed(Math.min(4, Math.ceil(-Math.log10(step)))) + " s";
    const s = Math.round(seconds);
    if (s < 60) return s + " s";
    const parts = [[Math.floor(s / 86400), " d"], [Math.floor(s / 3600) % 24, " h"], [Math.floor(s / 60) % 60, " min"], [s % 60, " s"]];
    return parts.filter(([count]) => count).map(([count, unit]) => count + unit).join(" ");
  }

  function drawTicks() {
    const wanted = whole / Math.max(2, (scroll.clientWidth * zoom) / 110);
    const steps = [];
    for (let power = -4; power < 1; power++) for (const one of [1, 2, 5]) steps.push(one * 10 ** power);
    steps.push(10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800);
    const step = steps.find((one) => one >= wanted) || whole;
    ticks.replaceChildren();
    const from = (scroll.scrollLeft / (scroll.clientWidth * zoom)) * whole;
    const to = from + whole / zoom;
    for (let at = Math.max(0, Math.floor(from / step) * step); at <= Math.min(whole, to + step); at += step) {
      const x = (at / whole) * 100 + "%";
      ticks.append(make("line", { x1: x, x2: x, y1: 0, y2: svg.height.baseVal.value - 18 }));
      const text = make("text", { x, y: svg.height.baseVal.value - 4, "text-anchor": at === 0 ? "start" : at > whole * 0.97 ? "end" : "middle" });
      text.textContent = label(at, step);
      ticks.append(text);
    }
  }

  function show(next, center) {
    const middle = center ?? (scroll.scrollLeft + scroll.clientWidth / 2) / (scroll.clientWidth * zoom);
    zoom = Math.min(100000 / scroll.clientWidth, Math.max(1, next));
    svg.style.width = zoom * 100 + "%";
    scroll.scrollLeft = middle * scroll.clientWidth * zoom - scroll.clientWidth / 2;
    drawTicks();
  }

  const actions = { in: () => show(zoom * 2), out: () => show(zoom / 2), all: () => show(1) };
  for (const button of document.querySelectorAll("button[data-zoom]"))
    button.addEventListener("click", () => actions[button.dataset.zoom]());
  scroll.addEventListener("keydown", (event) => {
    const action = { "+": "in", "=": "in", "-": "out", "0": "all" }[event.key];
    if (action && !event.ctrlKey && !event.metaKey) { event.preventDefault(); actions[action](); }
  });
  for (const link of document.querySelectorAll("a[data-from]"))
    link.addEventListener("click", () => {
      const from = Number(link.dataset.from), to = Number(link.dataset.to);
      show(whole / Math.max((to - from) * 1.3, whole / 5000), (from + to) / 2 / whole);
    });
  scroll.addEventListener("scroll", drawTicks, { passive: true });
  addEventListener("resize", drawTicks);
  drawTicks();
})();
