// The job at a glance: figures, history, nodes, stragglers and recent events.
import { ask } from "./actions.js";
import { bytes, clock, duration, fill, h, number, percent, pill, setText, table } from "./dom.js";
import { history } from "./history.js";

const EVENTS_SHOWN = 12;
const NODES_SHOWN = 200;

export function overview(element) {
  const figures = h("div", { class: "figures" });
  const title = h("h2", {}, "Nodes");
  const nodes = h("div", {});
  const slow = h("div", {});
  const events = h("div", {});
  const past = history();
  element.append(figures, past.element,
    h("section", {}, title, nodes),
    h("div", { class: "two" },
      h("section", {}, h("h2", {}, "Stragglers"), slow),
      h("section", {}, h("h2", {}, "Recent events"), events)));

  function render(state) {
    const { job } = state;
    const steps = job.step_max < 0 ? "–" : job.step_min === job.step_max ? number(job.step_max) : `${number(job.step_min)} – ${number(job.step_max)}`;
    const shown = [
      [percent(job.goodput), job.goodput_is_upper_bound ? "goodput (upper bound)" : "goodput"],
      [job.generation < 0 ? "–" : number(job.generation), job.round < 0 ? "generation" : `generation, round ${job.round}`],
      [`${job.restarts} of ${job.max_restarts}`, "restarts charged"],
      [`${job.members} of ${job.min_nodes}:${job.max_nodes}`, `nodes, ${job.present} connected`],
      job.end ? [number(job.ranks), "workers, last known"] : [`${job.running} of ${job.ranks}`, "workers running"],
      [steps, [job.total > 0 ? `step of ${number(job.total)}` : "step", job.rate === null ? "" : `${number(job.rate)} steps/s`].filter(Boolean).join(", ")],
      ...(job.total > 0 && !job.end ? [[job.eta_s === null ? "–" : duration(job.eta_s), "remaining (ETA)"]] : []),
    ];
    fill(figures, JSON.stringify(shown), () => shown.map(([value, text]) => h("div", { class: "figure" }, h("b", {}, value), h("span", {}, text))));
    past.render(state);
    // The only node of a job cannot be drained.
    const canDrain = state.canAct && job.max_nodes > 1;
    setText(title, job.end ? "Nodes, as last reported" : "Nodes");
    fill(nodes, JSON.stringify([state.nodes, canDrain, state.isLost, Boolean(job.end)]), () => nodeTable(state, canDrain));
    fill(slow, slowKey(state), () => stragglers(state));
    const newest = state.events.filter((event) => isOfJob(event, state)).slice(-EVENTS_SHOWN);
    fill(events, `${newest.length} ${newest[0]?.wall} ${newest.at(-1)?.wall}`, () => [
      h("ol", { class: "events" }, ...newest.reverse().map(eventLine)),
      h("p", { class: "about" }, h("a", { href: "#timeline" }, "Full history"))]);
  }
  return { render };
}

// Every node reports the same events; the coordinator reports them once.
export function isOfJob(event, state) {
  return event.source === "" || event.kind === "watchdog" || state.job.max_nodes <= 1;
}

export function eventLine(event) {
  return h("li", { class: event.is_problem ? "bad" : "" }, h("time", {}, clock(event.wall)), " ", h("span", { class: "dim" }, event.source || "job"), " ", event.text || event.kind);
}

function nodeTable({ nodes, isLost, job }, canDrain) {
  const isOver = Boolean(job.end);
  const hasGpus = nodes.some((one) => one.gpu !== null);
  const rows = nodes.slice(0, NODES_SHOWN).map((one) => [
    h("span", { class: "mono" }, one.node), one.host,
    [isOver ? "–" : pill(one.state), !isOver && one.mark ? h("span", { class: `mark ${one.mark}` }, one.mark) : ""],
    one.ranks_text ? h("a", { href: `#logs?ranks=${encodeURIComponent(one.ranks_text.replaceAll(" ", ""))}` }, one.ranks_text) : "–",
    `${one.running}/${one.size}`,
    one.step_max < 0 ? "–" : one.step_min === one.step_max ? number(one.step_max) : `${number(one.step_min)} – ${number(one.step_max)}`,
    one.rate === null ? "–" : number(one.rate), one.heartbeat_age_s < 0 ? "–" : `${one.heartbeat_age_s.toFixed(1)} s`,
    one.cpu === null ? "–" : percent(one.cpu), bytes(one.rss_bytes), ...(hasGpus ? [percent(one.gpu)] : []),
    !canDrain ? "" : h("button", { type: "button", disabled: isLost, "data-focus": `drain ${one.node}`, onclick: () => ask(one.drained ? "undrain" : "drain", one.node) }, one.drained ? "Undrain…" : "Drain…"),
  ]);
  const more = nodes.length - rows.length;
  return [table(["node", "host", "state", "ranks", "#workers", "#step", "#steps/s", "#heartbeat", "#CPU", "#memory", ...(hasGpus ? ["#GPU"] : []), "#"], rows),
    more > 0 ? h("p", { class: "about" }, `${more} more nodes are not listed; see `, h("a", { href: "#ranks" }, "all ranks"), ".") : ""];
}

function marked({ ranks }) {
  const order = { stalled: 0, slow: 1, behind: 2 };
  return ranks.rank.map((_, at) => at).filter((at) => ranks.mark?.[at])
    .sort((a, b) => order[ranks.mark[a]] - order[ranks.mark[b]] || (ranks.rate[a] ?? 0) - (ranks.rate[b] ?? 0) || a - b).slice(0, 20);
}

function reportsSteps(ranks) {
  return (ranks.step || []).some((step) => step >= 0);
}

export function slowKey(state) {
  const { ranks } = state;
  return JSON.stringify([marked(state).map((at) => [ranks.rank[at], ranks.mark[at], ranks.lag[at], ranks.rate[at], ranks.age[at]]), ranks.rank.length, reportsSteps(ranks)]);
}

export function stragglers(state) {
  const { ranks, nodes } = state;
  const found = marked(state);
  if (!found.length) {
    return h("p", { class: "about" }, reportsSteps(ranks) ? "No stragglers." : "Unknown: no rank reports steps (holdfast.worker.progress).");
  }
  return table(["rank", "node", "state", "#steps/s", "#behind", "#last heartbeat", ""], found.map((at) => [
    String(ranks.rank[at]), nodes[ranks.node[at]]?.node ?? "", h("span", { class: `mark ${ranks.mark[at]}` }, ranks.mark[at]),
    number(ranks.rate[at]), number(ranks.lag[at]), ranks.age[at] < 0 ? "–" : duration(ranks.age[at]),
    h("a", { href: `#logs?ranks=${ranks.rank[at]}` }, "logs")]));
}
