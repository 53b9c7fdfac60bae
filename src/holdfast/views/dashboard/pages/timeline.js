// The stages of the job over time, and the events below. Zoom by keys, wheel and buttons.
import { clock, duration, fill, h, pill, setText, svg, table } from "./dom.js";
import { isFailure } from "./failures.js";
import { eventLine, isOfJob } from "./overview.js";
import { session } from "./session.js";

const STEPS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800, 1209600, 2592000];
const SPAN_MIN_S = 0.05;
const LANE = 34, EVENTS_LANE = 26, AXIS = 22;
const GENERATIONS_SHOWN = 200, EVENTS_SHOWN = 300;

export function timeline(element) {
  let state = null;
  let range = null; // The visible time, [from, to]; null for all.
  let wanted = null;
  const box = h("div", { class: "chart", tabindex: 0, role: "application", "aria-label": "Timeline; plus and minus zoom, arrow keys move, 0 shows all", id: "chart" });
  const chosen = h("p", { class: "chosen", "aria-live": "polite" });
  const failed = h("button", { type: "button", onclick: () => lastFailure() }, "Last failure");
  const buttons = h("div", { class: "zoom" },
    ...[["Zoom in", () => zoom(0.5)], ["Zoom out", () => zoom(2)], ["All", () => show(null)]].map(([text, act]) => h("button", { type: "button", onclick: act }, text)), failed,
    h("span", {}, "Keys: + − 0 and arrows. Mouse: drag, or Ctrl and the wheel."));
  const measured = h("p", { class: "about" });
  const list = h("div", {});
  const events = h("div", {});
  const every = h("input", { type: "checkbox", id: "every-event", onchange: () => render(state) });
  element.append(
    h("section", {}, h("h2", {}, "Timeline"), buttons, box, chosen,
      h("div", { class: "legend" }, ...Object.entries(session.stages).map(([stage, text]) => h("span", {}, h("span", { class: `key ${stage}` }), `${stage}: ${text}`)))),
    h("section", {}, h("h2", {}, "Generations"), measured, list),
    h("section", {}, h("h2", {}, "Events"), h("label", { class: "about" }, every, " of all nodes and workers"), events));

  // The time axis ends with the job.
  const now = () => (state?.job?.end ? state.spans.at(-1)?.to ?? state.job.end.wall : null) ?? Date.now() / 1000;
  const restart = () => [...session.ending, ...session.starting];

  function whole() {
    const from = Math.min(...state.spans.slice(0, 1).map((span) => span.from), now() - 10);
    return [from, now() + (now() - from) * 0.01];
  }

  function show(next) {
    const all = whole();
    if (next) {
      const span = Math.max(SPAN_MIN_S, Math.min(next[1] - next[0], all[1] - all[0]));
      const from = Math.max(all[0], Math.min(next[0], all[1] - span));
      range = span >= (all[1] - all[0]) * 0.999 ? null : [from, from + span];
    } else range = null;
    draw();
  }

  function zoom(factor, middle = 0.5) {
    const [from, to] = range ?? whole();
    const at = from + (to - from) * middle;
    show([at - (at - from) * factor, at + (to - at) * factor]);
  }

  function move(share) {
    const [from, to] = range ?? whole();
    show([from + (to - from) * share, to + (to - from) * share]);
  }

  function zoomTo(at) {
    const all = state.generations;
    const number = all[at].number;
    const own = state.spans.filter((span) => span.generation === number);
    const found = [...own.filter((span) => session.ending.includes(span.stage)),
      ...state.spans.filter((span) => span.generation === all[at + 1]?.number && session.starting.includes(span.stage))];
    const from = found[0]?.from ?? own[0]?.from ?? 0, to = (found.length ? found : own).at(-1)?.to ?? now();
    const room = Math.max(SPAN_MIN_S, (to - from) * 0.35);
    show([from - room, to + room]);
    const one = all[at];
    chosen.textContent = one.is_over ? `Generation ${one.number} ended: ${one.ended_by || "the reason is unknown"}. ${stagesText(all, at)}` : `Generation ${one.number} runs.`;
    box.focus({ preventScroll: true });
    box.scrollIntoView({ block: "nearest" });
  }

  function stagesText(all, at) {
    const next = all[at + 1];
    if (!next) return "";
    return `Restart: ${Object.entries(next.stages).map(([name, seconds]) => `${name} ${duration(seconds)}`).join(", ")}.`;
  }

  function lastFailure() {
    const at = state.generations.findLastIndex(isFailure);
    if (at >= 0) zoomTo(at);
  }

  function draw() {
    const width = box.clientWidth;
    if (!width || !state?.job) return;
    const [from, to] = range ?? whole();
    const x = (at) => ((at - from) / (to - from)) * width;
    const height = LANE + EVENTS_LANE + AXIS;
    const drawn = svg("svg", { width, height, role: "img" });
    const step = STEPS.find((one) => one >= (to - from) / Math.max(2, width / 110)) ?? STEPS.at(-1);
    for (const at of ticks(from, to, step)) {
      drawn.append(svg("line", { x1: x(at), x2: x(at), y1: 0, y2: height - AXIS }));
      if (x(at) < 40 || x(at) > width - 40) continue;
      drawn.append(svg("text", { x: x(at), y: height - 5, "text-anchor": "middle" }, tickLabel(at, step)));
    }
    drawn.append(svg("rect", { class: "lane", x: 0, y: 4, width, height: LANE - 8 }));
    const places = new Map(state.generations.map((one, at) => [one.number, at]));
    for (const span of state.spans) {
      const end = span.to ?? now();
      if (end < from || span.from > to) continue;
      const left = Math.max(-2, x(span.from)), right = Math.min(width + 2, x(end));
      const rect = svg("rect", { class: `piece ${span.stage}`, x: left, y: 4, width: Math.max(1, right - left), height: LANE - 8, "data-generation": span.generation },
        svg("title", {}, `generation ${span.generation}: ${span.stage}, ${duration(end - span.from)} from ${clock(span.from)}`));
      if (places.has(span.generation)) rect.addEventListener("click", () => zoomTo(places.get(span.generation)));
      drawn.append(rect);
      if (span.stage === "useful" && right - left > 26) drawn.append(svg("text", { class: "on", x: (left + right) / 2, y: LANE / 2 + 4, "text-anchor": "middle" }, span.generation));
    }
    for (const one of state.generations) {
      if (isFailure(one) && one.ended !== null && one.ended >= from && one.ended <= to) drawn.append(svg("path", { class: "cross", d: `M${x(one.ended) - 4} 1l8 6m0 -6l-8 6` }));
    }
    drawn.append(svg("rect", { class: "lane", x: 0, y: LANE + 4, width, height: EVENTS_LANE - 8 }));
    for (const event of state.events) {
      if (event.wall < from || event.wall > to) continue;
      drawn.append(svg("rect", { class: `event ${event.is_problem ? "bad" : event.kind === "requested" ? "requested" : ""}`, x: x(event.wall) - 1, y: LANE + 4, width: 2, height: EVENTS_LANE - 8 },
        svg("title", {}, `${clock(event.wall)} ${event.source || "job"}: ${event.text || event.kind}`)));
    }
    box.replaceChildren(drawn);
    box.dataset.from = from;
    box.dataset.to = to;
  }

  function render(next) {
    state = next;
    draw();
    failed.disabled = !state.generations.some(isFailure);
    const all = state.generations;
    const { job } = state;
    setText(measured, `The columns from detect to warmup are the stages of the restart that led to a generation${job.measured < job.members ? `, as ${job.measured} of ${job.members} nodes recorded them` : ""}.`);
    const key = JSON.stringify([all.slice(-GENERATIONS_SHOWN), Math.floor(now() / 5)]);
    fill(list, key, () => all.length ? table(["generation", "#started", "#ranks", "#ran", ...restart().map((name) => `#${name}`), "end"],
      all.slice(-GENERATIONS_SHOWN).map((one, place) => [one, Math.max(0, all.length - GENERATIONS_SHOWN) + place]).reverse().map(([one, at]) => [
        h("button", { type: "button", "data-focus": `generation ${one.number}`, "aria-label": `Show generation ${one.number} in the timeline`, onclick: () => zoomTo(at) }, String(one.number)),
        one.started === null ? "–" : clock(one.started), one.world_size ? String(one.world_size) : "–",
        duration(one.is_over ? one.ran_s ?? NaN : now() - (one.started ?? NaN)),
        ...restart().map((name) => duration(one.stages[name] ?? NaN)),
        one.is_over ? [pill(one.end), " ", one.ended_by] : h("span", { class: "dim" }, "runs")])) : h("p", { class: "about" }, "No generation yet."));
    const listed = every.checked ? state.events : state.events.filter((event) => isOfJob(event, state));
    fill(events, `${listed.length} ${listed.at(-1)?.wall}`, () => listed.length
      ? h("ol", { class: "events scroll-y", tabindex: 0, "aria-label": "Events, the newest first" }, ...listed.slice(-EVENTS_SHOWN).reverse().map(eventLine))
      : h("p", { class: "about" }, "No events yet."));
    if (wanted !== null) {
      const at = all.findIndex((one) => one.number === wanted);
      if (at >= 0) { wanted = null; zoomTo(at); }
    }
  }

  box.addEventListener("keydown", (event) => {
    if (!state || event.ctrlKey || event.metaKey) return;
    const act = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => show(null), ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2) }[event.key];
    if (act) { event.preventDefault(); event.stopPropagation(); act(); }
  });
  box.addEventListener("wheel", (event) => {
    if (!state || !(event.ctrlKey || event.shiftKey)) return;
    event.preventDefault();
    const place = box.getBoundingClientRect();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, (event.clientX - place.left) / place.width);
  }, { passive: false });
  let dragged = null;
  box.addEventListener("pointerdown", (event) => { dragged = event.clientX; });
  addEventListener("pointerup", () => { dragged = null; });
  box.addEventListener("pointermove", (event) => {
    if (dragged === null || !range || Math.abs(event.clientX - dragged) < 4) return;
    move((dragged - event.clientX) / box.clientWidth);
    dragged = event.clientX;
  });
  new ResizeObserver(() => { if (!element.hidden) draw(); }).observe(box);
  return { render, open: (query) => { if (query.has("generation")) wanted = Number(query.get("generation")); } };
}

// Round times of day in the time zone of the browser. Sums of steps would accumulate errors.
export function ticks(from, to, step) {
  const offset = new Date(from * 1000).getTimezoneOffset() * 60;
  const found = [];
  for (let count = Math.ceil((from - offset) / step); count * step + offset < to; count++) found.push(count * step + offset);
  return found;
}

export function tickLabel(at, step) {
  const time = new Date(Math.round(at * 1000));
  const text = time.toTimeString().slice(0, 8);
  if (step < 1) return `${text}.${String(Math.round(time.getMilliseconds() / 10)).padStart(2, "0")}`;
  return step >= 3600 && text === "00:00:00" ? time.toLocaleDateString("en", { month: "short", day: "numeric" }) : text;
}
