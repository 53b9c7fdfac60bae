// The frame of the page: the choice of the view, the head, and the keys.
import { ask, showKeys } from "./actions.js";
import { clock, duration, fill, h, pill, setText } from "./dom.js";
import { connect, onChange, state } from "./feed.js";
import { failures } from "./failures.js";
import { logs } from "./logs.js";
import { overview } from "./overview.js";
import { ranks } from "./ranks.js";
import { leave, post, request, session } from "./session.js";
import { stacks } from "./stacks.js";
import { timeline } from "./timeline.js";

const VIEWS = { overview, timeline, ranks, logs, stacks, failures };
const TITLES = { overview: "Overview", timeline: "Timeline", ranks: "Ranks", logs: "Logs", stacks: "Stacks", failures: "Failures" };
const $ = (id) => document.getElementById(id);
const shown = {};
let current = "";

// The address names the view and its query: #logs?ranks=3. It never contains a secret.
function place() {
  const [name, query] = location.hash.slice(1).split("?");
  return [name in VIEWS ? name : "overview", new URLSearchParams(query || "")];
}

function route() {
  const [name, query] = place();
  const isNew = name !== current;
  current = name;
  if (!shown[name]) {
    const element = h("div", { class: "view", id: `view-${name}` });
    $("main").append(element);
    shown[name] = { element, ...VIEWS[name](element, state) };
  }
  for (const [other, view] of Object.entries(shown)) view.element.hidden = other !== name;
  for (const tab of $("tabs").children) {
    if (tab.dataset.view === name) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
  shown[name].open?.(query, isNew);
  render();
}

function render() {
  const job = state.job;
  if (!job) return;
  const { end } = job;
  const isLost = !end && (state.live !== "on" || job.problem !== "");
  const kind = end ? end.outcome : job.problem ? "unreachable" : job.state === "active" ? "running" : job.state;
  document.title = `${job.run_id || "Holdfast"}: ${kind || "…"}`;
  setText($("live"), end ? "ended" : state.live !== "on" ? "reconnecting" : job.problem ? "no connection to the job" : "live");
  $("live").className = `live ${end ? "ended" : isLost ? "wait" : "on"}`;
  setText($("job"), job.run_id || "…");
  setText($("over"), [job.elapsed_s ? `${end ? "ran" : "running"} for ${duration(job.elapsed_s)}` : "", session.readOnly ? "read-only" : "", `holdfast ${session.version}`].filter(Boolean).join(" · "));
  // Without a connection, and after the end, the page shows the last known state.
  document.body.classList.toggle("stale", Boolean(end) || isLost);
  $("verdict").className = `verdict ${kind.replace(/[^a-z]/g, "-")}`;
  if ($("state").textContent !== kind) $("state").replaceWith(Object.assign(pill(kind || "…"), { id: "state" }));
  setText($("why"), end ? [end.why, end.wall === null ? "" : `at ${clock(end.wall)}`].filter(Boolean).join(" · ") : [job.problem, job.delay || (job.why ? `last change: ${job.why}` : "")].filter(Boolean).join(" · ") || (job.running ? `${job.running} of ${job.ranks} workers are running` : "the job is starting"));
  $("report").hidden = !end;
  if (end) fill($("report"), job.report, () => ["Report: ", h("code", {}, job.report)]);
  state.canAct = !session.readOnly && !end;
  state.isLost = isLost;
  for (const button of document.querySelectorAll(".acting")) { button.hidden = !state.canAct; button.disabled = isLost; }
  if (end && $("reason")) $("dialog").close();
  shown[current]?.render(state);
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("dialog").open) return;
  const isTyping = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName);
  if (isTyping) return;
  const names = Object.keys(VIEWS);
  if (event.key >= "1" && event.key <= String(names.length)) location.hash = names[event.key - 1];
  else if (event.key === "/") { location.hash = "logs"; setTimeout(() => $("logs-grep")?.focus()); }
  else if (event.key === "?") showKeys();
  else return;
  event.preventDefault();
}

async function begin() {
  const response = await request("/session");
  Object.assign(session, await response.json());
  $("tabs").append(...Object.keys(VIEWS).map((name, at) => h("a", { href: `#${name}`, "data-view": name, "aria-keyshortcuts": String(at + 1) }, TITLES[name])));
  $("restart").addEventListener("click", () => ask("restart"));
  $("stop").addEventListener("click", () => ask("stop"));
  $("keys").addEventListener("click", showKeys);
  $("logout").addEventListener("click", async () => { await post("/logout", {}); leave(); });
  addEventListener("hashchange", route);
  addEventListener("keydown", onKey);
  onChange(render);
  route();
  connect();
}

begin().catch((problem) => setText($("live"), problem.message));
