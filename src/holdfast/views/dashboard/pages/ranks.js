// All ranks, node by node, on a canvas, which draws a thousand within milliseconds.
import { bytes, duration, fill, h, number } from "./dom.js";
import { lossText } from "./history.js";
import { slowKey, stragglers } from "./overview.js";

const METRICS = {
  step: ["Step", "steps, between the slowest and the fastest rank", [["h1", "the fastest"], ["h3", "halfway"], ["h5", "the slowest"]]],
  rate: ["Rate", "steps per second, relative to the median", [["h1", "as fast as the others"], ["h2", "from 75 %"], ["h3", "from 50 %"], ["h4", "from 25 %"], ["h5", "slower or stalled"]]],
  lag: ["Lag", "time to reach the step of the fastest rank, at the median rate", [["h1", "below 1 s"], ["h2", "below 5 s"], ["h3", "below 20 s"], ["h4", "below 60 s"], ["h5", "more"]]],
  memory: ["Memory", "resident memory, relative to the largest", [["m1", "little"], ["m3", "half of the largest"], ["m5", "the largest"]]],
};
const SIZES = [[48, 46], [256, 30], [1100, 20], [4200, 13], [Infinity, 8]];
const COLUMNS_MAX = 16; // Ranks of one node in a row.
const GAP = 8;

export function ranks(element) {
  let metric = "rate";
  let state = null;
  let chosen = -1; // A rank, not a position: ranks move between nodes.
  let cells = []; // Of each rank in order: x, y, size.
  let byRow = [];
  let drawnSize = 0;
  const buttons = h("div", { class: "choice", role: "group", "aria-label": "What the colours show" },
    ...Object.entries(METRICS).map(([name, [title]]) => h("button", { type: "button", "data-metric": name, "aria-pressed": String(name === metric), onclick: () => choose(name) }, title)));
  const about = h("p", { class: "about" });
  const legend = h("div", { class: "legend" });
  const canvas = h("canvas", { tabindex: 0, role: "application", "aria-label": "Ranks by node; arrow keys move, Enter shows the logs", "aria-describedby": "rank-detail" });
  const detail = h("div", { id: "rank-detail", class: "detail", "aria-live": "polite" });
  const slow = h("div", {});
  element.append(
    h("section", {}, h("h2", {}, "Nodes × ranks"), buttons, about, h("div", { class: "map" }, canvas), legend, detail),
    h("section", {}, h("h2", {}, "Stragglers"), slow));

  function choose(name) {
    metric = name;
    for (const button of buttons.children) button.setAttribute("aria-pressed", String(button.dataset.metric === name));
    if (state) render(state);
  }

  function level(at, facts) {
    const { ranks: all } = state;
    if (all.state[at] !== "running") return "off";
    switch (metric) {
      case "step": {
        if (all.step[at] < 0) return "none";
        const share = facts.stepMax > facts.stepMin ? (all.step[at] - facts.stepMin) / (facts.stepMax - facts.stepMin) : 1;
        return `h${5 - Math.round(4 * share)}`;
      }
      case "rate": {
        const rate = all.rate[at];
        if (rate === null || !facts.rate) return rate === 0 ? "h5" : "none";
        const share = rate / facts.rate;
        return share >= 0.9 ? "h1" : share >= 0.75 ? "h2" : share >= 0.5 ? "h3" : share >= 0.25 ? "h4" : "h5";
      }
      case "lag": {
        if (all.step[at] < 0) return "none";
        const seconds = facts.rate ? all.lag[at] / facts.rate : all.lag[at] ? Infinity : 0;
        return seconds < 1 ? "h1" : seconds < 5 ? "h2" : seconds < 20 ? "h3" : seconds < 60 ? "h4" : "h5";
      }
      default:
        return all.rss[at] ? `m${1 + Math.round((4 * all.rss[at]) / facts.rssMax)}` : "none";
    }
  }

  function layout(width) {
    const { ranks: all, nodes } = state;
    const groups = new Map();
    all.rank.forEach((_, at) => {
      if (!groups.has(all.node[at])) groups.set(all.node[at], []);
      groups.get(all.node[at]).push(at);
    });
    const size = SIZES.find(([count]) => all.rank.length <= count)[1];
    const hasNames = size >= 20 && groups.size <= 300;
    const head = hasNames ? 17 : 0;
    const gap = size >= 13 ? GAP : 3;
    let x = 0, y = 0, tallest = 0;
    cells = new Array(all.rank.length);
    byRow = [];
    const names = [];
    for (const [node, members] of groups) {
      const across = Math.min(COLUMNS_MAX, members.length, Math.max(1, Math.floor(width / size)));
      const wide = Math.max(across * size, hasNames ? 92 : 0);
      const tall = Math.ceil(members.length / across) * size + head;
      if (x && x + wide > width) { x = 0; y += tallest + gap; tallest = 0; }
      if (hasNames) names.push([x, y + 12, wide, nodes[node]?.node ?? ""]);
      members.forEach((at, place) => {
        cells[at] = [x + (place % across) * size, y + head + Math.floor(place / across) * size];
      });
      x += wide + gap;
      tallest = Math.max(tallest, tall);
    }
    byRow = cells.map((_, at) => at).sort((a, b) => cells[a][1] - cells[b][1] || cells[a][0] - cells[b][0]);
    return { size, names, height: y + tallest + 2 };
  }

  function draw() {
    const { ranks: all } = state;
    const width = canvas.parentElement.clientWidth;
    if (!width) return;
    const { size, names, height } = layout(width);
    const scale = devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const css = getComputedStyle(document.documentElement);
    const colour = (name) => css.getPropertyValue(`--${name}`).trim();
    const paint = { off: colour("end"), none: colour("soft") };
    for (const name of ["h1", "h2", "h3", "h4", "h5", "m1", "m2", "m3", "m4", "m5"]) paint[name] = colour(name);
    const facts = factsOf(state);
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const inset = size >= 13 ? 1 : 0.5;
    const byLevel = new Map();
    cells.forEach((_, at) => {
      const name = level(at, facts);
      if (!byLevel.has(name)) byLevel.set(name, []);
      byLevel.get(name).push(at);
    });
    for (const [name, places] of byLevel) {
      context.fillStyle = paint[name];
      context.beginPath();
      for (const at of places) context.rect(cells[at][0] + inset, cells[at][1] + inset, size - 2 * inset, size - 2 * inset);
      context.fill();
    }
    const font = getComputedStyle(document.body).fontFamily;
    context.fillStyle = colour("dim");
    context.font = `11.5px ${font}`;
    for (const [x, y, wide, name] of names) context.fillText(short(context, name, wide), x, y);
    if (size >= 30) {
      context.textAlign = "center";
      context.font = `600 ${size >= 40 ? 13 : 11}px ${font}`;
      for (const [name, places] of byLevel) {
        context.fillStyle = colour(["h4", "h5", "m4", "m5"].includes(name) ? "on-strong" : "ink");
        for (const at of places) context.fillText(all.rank[at], cells[at][0] + size / 2, cells[at][1] + size / 2 + 4);
      }
      context.textAlign = "start";
    }
    const at = all.rank.indexOf(chosen);
    if (at >= 0) {
      context.strokeStyle = colour("ink");
      context.lineWidth = 2;
      context.strokeRect(cells[at][0], cells[at][1], size, size);
    }
    drawnSize = size;
    canvas.dataset.cells = cells.length;
  }

  function render(next) {
    state = next;
    const [, text, keys] = METRICS[metric];
    about.textContent = `${text[0].toUpperCase()}${text.slice(1)}. ${number(state.ranks.rank.length)} ranks on ${number(state.nodes.length)} nodes.`;
    fill(legend, metric, () => [...keys, ["none", "not reported"], ["off", "not running"]].map(([name, meaning]) => h("span", {}, h("span", { class: `key ${name}` }), meaning)));
    draw();
    fill(detail, JSON.stringify(facts()), () => describe());
    fill(slow, slowKey(state), () => stragglers(state));
  }

  function facts() {
    const { ranks: all, nodes } = state;
    const at = all.rank.indexOf(chosen);
    if (at < 0) return null;
    return {
      rank: all.rank[at], node: nodes[all.node[at]]?.node ?? "", local: all.local[at], state: all.state[at], mark: all.mark[at], pid: all.pid[at], step: all.step[at],
      rate: all.rate[at], lag: all.lag[at], age: all.age[at], cpu: all.cpu[at], rss: all.rss[at], section: all.section[at], loss: all.loss?.[at] ?? null, eta: all.eta?.[at] ?? -1,
    };
  }

  function describe() {
    const one = facts();
    if (!one) return h("p", { class: "about" }, "Choose a rank with the mouse or the arrow keys.");
    const rows = [["node", one.node], ["local rank", String(one.local)], ["process", one.pid ? String(one.pid) : "–"], ["state", one.mark ? `${one.state}, ${one.mark}` : one.state],
      ["step", number(one.step)], ["steps per second", one.rate === null ? "–" : number(one.rate)], ["behind", `${number(one.lag)} ${one.lag === 1 ? "step" : "steps"}`], ["last heartbeat", one.age < 0 ? "–" : `${duration(one.age)} ago`],
      ["CPU", one.cpu === null ? "–" : `${Math.round(100 * one.cpu)} %`], ["memory", bytes(one.rss)], ["section", one.section || "–"],
      ...(one.loss === null ? [] : [["loss", lossText(one.loss)]]), ...(one.eta < 0 ? [] : [["remaining (ETA)", duration(one.eta)]])];
    return [h("h3", {}, `Rank ${one.rank} `, h("a", { href: `#logs?ranks=${one.rank}` }, "logs")),
      h("dl", { class: "facts columns" }, ...rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))))];
  }

  function pick(at) {
    if (at === undefined || at < 0) return;
    chosen = state.ranks.rank[at];
    render(state);
  }

  canvas.addEventListener("click", (event) => {
    if (!state) return;
    const box = canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top, size = drawnSize;
    pick(cells.findIndex(([left, top]) => x >= left && x < left + size && y >= top && y < top + size));
  });
  canvas.addEventListener("keydown", (event) => {
    if (!state || !cells.length) return;
    const at = state.ranks.rank.indexOf(chosen);
    if (event.key === "Enter" && at >= 0) { location.hash = `logs?ranks=${chosen}`; return; }
    const place = byRow.indexOf(at);
    const steps = { ArrowRight: 1, ArrowLeft: -1 };
    if (event.key in steps) pick(byRow[Math.min(byRow.length - 1, Math.max(0, place + steps[event.key]))]);
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") pick(at < 0 ? byRow[0] : beside(at, event.key === "ArrowDown"));
    else if (event.key === "Home") pick(byRow[0]);
    else if (event.key === "End") pick(byRow.at(-1));
    else return;
    event.preventDefault();
  });

  function beside(at, isDown) {
    const [x, y] = cells[at];
    const rows = [...new Set(byRow.map((one) => cells[one][1]))];
    const row = rows[rows.indexOf(y) + (isDown ? 1 : -1)];
    const there = byRow.filter((one) => cells[one][1] === row);
    return there.sort((a, b) => Math.abs(cells[a][0] - x) - Math.abs(cells[b][0] - x))[0] ?? at;
  }

  new ResizeObserver(() => { if (state && !element.hidden) draw(); }).observe(element);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (state && !element.hidden) draw(); });
  return { render, open: (query) => { if (query.has("rank")) chosen = Number(query.get("rank")); } };
}

// The values to which the colours relate.
function factsOf({ job, ranks: all }) {
  return { stepMin: job.step_min, stepMax: job.step_max, rate: job.rate, rssMax: all.rss.reduce((a, b) => Math.max(a, b), 1) };
}

function short(context, name, width) {
  if (context.measureText(name).width <= width) return name;
  let end = name.length;
  while (end > 1 && context.measureText(`${name.slice(0, end)}…`).width > width) end--;
  return `${name.slice(0, end)}…`;
}
