// Values of the job over time: a small plot for each kind of value that is known.
import { bytes, clock, duration, h, number, percent, setText, svg } from "./dom.js";

const WIDTH = 300, HEIGHT = 72;
const SPANS = [["All", Infinity], ["2 hours", 7200], ["10 minutes", 600]];
const SIMILAR = 0.1; // A memory that varies by less than this share is drawn as nearly constant.
const KINDS = [
  { name: "rates", title: "Steps per second", text: (value) => number(value), now: (job) => job.rate, low: () => 0 },
  { name: "losses", title: "Loss", text: lossText, now: (job) => job.loss, low: (low) => low },
  { name: "rss", title: "Memory", text: (value) => bytes(value), now: (job) => job.rss_bytes || null, low: (low, high) => Math.min(low, (1 - SIMILAR) * high) },
  { name: "gpu", title: "GPU utilization", text: (value) => percent(value), now: (job) => job.gpu, low: () => 0, high: () => 1 },
];

// A loss is a number, or one of the texts nan, inf and -inf.
export function lossText(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "number" ? String(Number(value.toPrecision(4))) : value;
}

export function history() {
  let span = Infinity;
  let state = null;
  let drawn = null; // What the plots show.
  const buttons = SPANS.map(([text, seconds]) => h("button", { type: "button", "aria-pressed": String(seconds === span), onclick: () => choose(seconds) }, text));
  const plots = KINDS.map((kind) => plot(kind));
  const element = h("section", { id: "history", hidden: true }, h("h2", {}, "History"),
    h("div", { class: "zoom", role: "group", "aria-label": "Time that the plots cover" }, ...buttons),
    h("div", { class: "plots" }, ...plots.map((one) => one.element)));

  function choose(seconds) {
    span = seconds;
    buttons.forEach((button, at) => button.setAttribute("aria-pressed", String(SPANS[at][1] === span)));
    drawn = null;
    render(state);
  }

  function render(next) {
    state = next;
    const { series, job } = state;
    element.hidden = !series || !KINDS.some(({ name }) => series[name].some((value) => value !== null));
    if (element.hidden) return;
    if (drawn !== series) {
      drawn = series;
      const to = series.edges.at(-1), from = Math.max(series.edges[0], to - span);
      for (const one of plots) one.draw(series, from, to);
    }
    for (const one of plots) one.showNow(job);
  }

  return { element, render };
}

function plot(kind) {
  const now = h("b", {});
  const range = h("span", {});
  const since = h("span", {});
  const until = h("span", {}, "now");
  const area = svg("path", { class: "area" }), line = svg("path", { class: "line" }), bad = svg("path", { class: "bad" });
  const title = svg("title", {});
  const picture = svg("svg", { role: "img", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" }, title, area, line, bad);
  const element = h("figure", { class: "small-plot", "data-kind": kind.name, hidden: true },
    h("figcaption", {}, h("span", {}, kind.title), now), picture, h("div", { class: "ends", "aria-hidden": "true" }, since, range, until));
  let shown = [], begin = 0, end = 1, covers = "", current = "";

  function draw(series, from, to) {
    const values = series[kind.name];
    [begin, end] = [from, to];
    shown = values.map((value, at) => ({ since: Math.max(from, series.edges[at]), until: series.edges[at + 1], value })).filter((one) => one.until > from);
    for (const one of shown) one.at = (one.since + one.until) / 2;
    element.hidden = !values.some((value) => value !== null);
    const finite = shown.map((one) => one.value).filter((value) => typeof value === "number");
    const lowest = Math.min(...finite), highest = Math.max(...finite);
    const low = kind.low(lowest, highest), high = kind.high ? kind.high() : highest;
    const x = (at) => (((at - from) / (to - from)) * WIDTH).toFixed(1);
    const y = (value) => (HEIGHT - 2 - (high > low ? (value - low) / (high - low) : 0.5) * (HEIGHT - 6)).toFixed(1);
    const runs = [];
    for (const [place, one] of shown.entries()) {
      if (typeof one.value !== "number") continue;
      if (typeof shown[place - 1]?.value !== "number") runs.push({ since: x(one.since), points: [`${x(one.since)} ${y(one.value)}`] });
      const run = runs.at(-1);
      run.points.push(`${x(one.at)} ${y(one.value)}`);
      if (typeof shown[place + 1]?.value !== "number") run.points.push(`${run.until = x(one.until)} ${y(one.value)}`);
    }
    line.setAttribute("d", runs.map(({ points }) => `M${points.join("L")}`).join(""));
    area.setAttribute("d", runs.map(({ since, points, until }) => `M${since} ${HEIGHT}L${points.join("L")}L${until} ${HEIGHT}Z`).join(""));
    bad.setAttribute("d", shown.filter((one) => typeof one.value === "string").map((one) => `M${x(one.at)} 0V${HEIGHT}`).join(""));
    const extremes = [lowest, highest].map(kind.text);
    setText(range, finite.length ? [...new Set(extremes)].join(" – ") : "");
    covers = `over ${duration(to - from)}${finite.length ? `, between ${extremes.join(" and ")}` : ""}`;
    describe();
  }

  function describe() {
    const text = `${kind.title} ${covers}; now ${current}`;
    if (picture.getAttribute("aria-label") === text) return;
    picture.setAttribute("aria-label", text);
    setText(title, text);
  }

  function showNow(job) {
    current = kind.text(kind.now(job));
    setText(now, current);
    now.classList.toggle("bad", typeof kind.now(job) === "string");
    setText(since, `${duration(end - begin)} ${job.end ? "before" : "ago"}`);
    setText(until, job.end ? "the end" : "now");
    describe();
  }

  // The value under the mouse.
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const at = begin + ((event.clientX - box.left) / box.width) * (end - begin);
    const found = shown.find((one) => at >= one.since && at < one.until);
    if (found) setText(until, `${clock(found.at)}: ${found.value === null ? "unknown" : kind.text(found.value)}`);
  });
  picture.addEventListener("pointerleave", () => setText(until, "now"));

  return { element, draw, showNow: (job) => { if (!picture.matches(":hover")) showNow(job); } };
}
